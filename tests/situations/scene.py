"""
A scene: the namespace, driver and objects of one situation, and what is said of its pod.

Devices are those of made-up slices: no driver prepares them, so a pod that has a node is as good as
running. Nodes may be made up, too: without a kubelet, but ready. Does not depend on single
situations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self

from drakit_explain.evidence import Event, Events
from drakit_explain.pending import Explanation
from drakit_operator.announcing import CONTROLLER
from e2e.kit import wait_for
from tests.situations.api import ADMISSION, DRA, KINDS, REPORTS, Api, Body, RefusedError
from tests.situations.explaining import Explaining

LABEL = "explain.test/scene"
ADMIN_LABEL = "resource.kubernetes.io/admin-access"
WAITS = "waits"
REFUSED = "explain.test/refused"
"""The annotation with which the control plane in memory does not schedule a pod, and why."""

POLICIES = ("validatingadmissionpolicybindings", "validatingadmissionpolicies")
CLUSTER_WIDE = ("resourceslices", "deviceclasses", "devicetaintrules", "nodes", *POLICIES)

HOSTNAME = "kubernetes.io/hostname"
NODE_LEASES = "kube-node-lease"
HEARTBEAT_SECONDS = 10
BARE = {"key": "explain.test/bare", "effect": "NoSchedule"}
"""The taint of made-up nodes: the pods of DaemonSets do not run there."""

VERDICT_SECONDS = 30
SCHEDULED_SECONDS = 60
"""The scheduler tries a pod again after at most ten seconds."""


class Heartbeats:
    """Renews the Leases of made-up nodes, as their kubelets would. For threads."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._nodes: set[str] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def add(self, node: Body) -> None:
        name = node["metadata"]["name"]
        owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node["metadata"]["uid"]}
        metadata = {"name": name, "namespace": NODE_LEASES, "ownerReferences": [owner]}
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
        self._api.create({**body, "spec": _renewed(name)})
        self._nodes.add(name)

    def remove(self, nodes: Sequence[str]) -> None:
        self._nodes.difference_update(nodes)

    def _run(self) -> None:
        while not self._stopped.wait(HEARTBEAT_SECONDS):
            for name in list(self._nodes):
                with suppress(RefusedError):  # the Lease is deleted with its node
                    change = {"spec": _renewed(name)}
                    self._api.patch("leases", name, change, namespace=NODE_LEASES)


def _renewed(node: str) -> Body:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": now}


def device(name: str, attributes: dict[str, Any] | None = None, **fields: Any) -> Body:
    """A device; attributes are plain values or raw ones, capacity and counters quantities."""
    kinds = {str: "string", int: "int", bool: "bool"}
    values = {
        key: value if isinstance(value, dict) else {kinds[type(value)]: value}
        for key, value in (attributes or {}).items()
    }
    capacity = {key: {"value": amount} for key, amount in fields.pop("capacity", {}).items()}
    found: Body = {"name": name, "attributes": values, **fields}
    if capacity:
        found["capacity"] = capacity
    return found


def _ready(ready: bool) -> Body:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": "Ready",
        "status": "True" if ready else "False",
        "reason": "KubeletReady" if ready else "KubeletNotReady",
        "message": "",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }


def devices(*names: str, **fields: Any) -> list[Body]:
    return [device(name, **fields) for name in names]


def counters(name: str, **amounts: str) -> Body:
    return {"name": name, "counters": {key: {"value": value} for key, value in amounts.items()}}


def consumes(**amounts: str) -> list[Body]:
    """Consumption of a partition from the counter set `board`."""
    body = counters("board", **amounts)
    return [{"counterSet": body["name"], "counters": body["counters"]}]


@dataclass
class Scene:
    """One situation's part of the cluster; `driver` names its driver and its class."""

    api: Api
    explaining: Explaining
    name: str
    namespace: str
    node: str
    other: str
    heartbeats: Heartbeats
    cleanups: list[Callable[[], object]] = field(default_factory=list)
    made_up: list[str] = field(default_factory=list)
    """Nodes of the scene. If there are any, its pods use no others."""

    held: bool = False
    """Whether the pod that is explained is kept from the scheduler until it was."""

    settled: bool = False
    """Whether the pod is old enough for a missing claim to be a problem."""

    refused: str = ""
    """The scheduler's message about the pod that is explained, if it is not to be scheduled."""

    quoted: list[Event] = field(default_factory=list)
    """The Events that the scene has written as a kubelet, a driver or a controller."""

    @property
    def driver(self) -> str:
        return f"{self.name}.test"

    # ---- nodes

    def make_node(self, name: str, *, ready: bool = True) -> str:
        """Create a node without a kubelet. If it is ready, wait until pods can be placed there."""
        node = self._create_node(name, ready=ready)
        if ready:
            self.wait_usable(node)
        return node

    def make_nodes(self, number: int) -> list[str]:
        """Create many nodes that are ready."""
        nodes = [self._create_node(str(each), ready=True) for each in range(number)]
        for node in nodes:
            self.wait_usable(node)
        return nodes

    def change_readiness(self, node: str, *, ready: bool) -> None:
        """Report the readiness of a made-up node, as its kubelet would."""
        body = self.api.get("nodes", node)
        body["status"]["conditions"] = [_ready(ready)]
        self.api.write_status("nodes", body)

    def wait_usable(self, node: str) -> None:
        """Wait until Kubernetes has removed the taints of a node that is not ready."""
        wait_for(
            f"node {node} has no taints of its condition",
            lambda: self.api.get("nodes", node)["spec"].get("taints") == [BARE],
            seconds=VERDICT_SECONDS,
        )

    # ---- classes and slices

    def device_class(self, *selectors: str, name: str = "", **fields: str) -> None:
        """Create a class of the scene's devices, or replace it."""
        own = f'device.driver == "{self.driver}"'
        expressions = [own, *(each.replace("DRIVER", self.driver) for each in selectors)]
        spec: Body = {"selectors": [{"cel": {"expression": each}} for each in expressions]}
        spec |= fields
        self._put(self._body("DeviceClass", name or self.driver, spec=spec))

    def publish(
        self,
        *published: Body | list[Body],
        pool: str = "",
        number: int = 0,
        of: int = 1,
        generation: int = 1,
        **spec: Any,
    ) -> None:
        """Create a slice, or replace it; on the first node unless `spec` has another place."""
        flat = [x for each in published for x in (each if isinstance(each, list) else [each])]
        places = ("nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection")
        if not any(place in spec for place in places):
            spec["nodeName"] = self.node
        pool = pool or spec.get("nodeName", "shared")
        about = {"name": pool, "generation": generation, "resourceSliceCount": of}
        body = {"driver": self.driver, "pool": about, **spec}
        if flat:
            body["devices"] = flat
        self._put(self._body("ResourceSlice", f"{self.name}-{pool}-{number}", spec=body))

    def taint_rule(self, **taint: str) -> str:
        """Create a DeviceTaintRule for all devices of the scene."""
        name = f"{self.name}-rule"
        spec = {"deviceSelector": {"driver": self.driver}, "taint": taint}
        body = self._body("DeviceTaintRule", name, spec=spec)
        path = self.api.taint_rules_path()
        assert path is not None
        body["apiVersion"] = path.removeprefix("/apis/")
        self._put(body)
        return name

    # ---- claims and pods

    def request(self, name: str = "gpu", *selectors: str, **exact: Any) -> Body:
        """A request of the scene's class."""
        return {"name": name, "exactly": self._exact(selectors, exact)}

    def alternatives(self, *alternatives: Body) -> Body:
        found = [{"name": each["name"], **each["exactly"]} for each in alternatives]
        return {"name": "gpu", "firstAvailable": found}

    def claim(self, name: str, *requests: Body, constraints: Sequence[Body] = ()) -> None:
        spec = self._claim_spec(requests, constraints)
        self._put(self._body("ResourceClaim", name, spec=spec, namespaced=True))

    def template(self, name: str, *requests: Body, constraints: Sequence[Body] = ()) -> None:
        spec = {"spec": self._claim_spec(requests, constraints)}
        self._put(self._body("ResourceClaimTemplate", name, spec=spec, namespaced=True))

    def pod(
        self,
        *requests: Body,
        name: str = WAITS,
        constraints: Sequence[Body] = (),
        claims: Sequence[str] = (),
        templates: Sequence[str] = (),
        cpu: str = "1m",
        extended: str = "",
        host_port: int = 0,
        **spec: Any,
    ) -> None:
        """
        Create a pod, or replace it: its requests become a template of its name.

        :param extended: an extended resource of which it requests one.
        :param host_port: a port of its node that it uses.
        """
        if requests:
            self.api.delete("pods", name, namespace=self.namespace)
            self.template(name, *requests, constraints=constraints)
        used = [{"resourceClaimName": each} for each in claims]
        made = [*([name] if requests else []), *templates]
        used += [{"resourceClaimTemplateName": each} for each in made]
        names = [f"claim-{number}" for number in range(len(used))]
        amounts = {extended: "1"} if extended else {}
        container: Body = {
            "name": "main",
            "image": "localhost/nothing:dev",
            "imagePullPolicy": "Never",
            "resources": {
                "requests": {"cpu": cpu, **amounts},
                "limits": amounts,
                "claims": [{"name": each} for each in names],
            },
        }
        if host_port:
            container["ports"] = [{"containerPort": host_port, "hostPort": host_port}]
        body = {
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
            "resourceClaims": [
                {"name": each, **source} for each, source in zip(names, used, strict=True)
            ],
            **self._placement(),
            **spec,
        }
        if self.held and name == WAITS:
            body["schedulerName"] = "nobody"
        pod = self._body("Pod", name, spec=body, namespaced=True)
        if self.refused and name == WAITS:
            pod["metadata"]["annotations"] = {REFUSED: self.refused}
        self._put(pod)

    def release(self) -> None:
        """Give the held pod to the scheduler."""
        body = self.api.get("pods", WAITS, namespace=self.namespace)
        spec = {key: value for key, value in body["spec"].items() if key != "schedulerName"}
        self._put(self._body("Pod", WAITS, spec=spec, namespaced=True))

    def holder(self, *requests: Body, name: str = "holder", **spec: Any) -> None:
        """Create a pod and wait until it has its devices."""
        self.pod(*requests, name=name, **spec)
        self.wait_scheduled(name)

    def delete(self, plural: str, name: str) -> None:
        """Delete an object, a pod without a grace period."""
        self.api.delete(plural, name, namespace="" if plural in CLUSTER_WIDE else self.namespace)

    def withdraw(self, pool: str) -> None:
        """Delete the slice of a pool."""
        self.delete("resourceslices", f"{self.name}-{pool}-0")

    def start_deletion(self, plural: str, name: str) -> None:
        """Delete an object of the namespace, a pod with its grace period; do not wait."""
        self.api.start_deletion(plural, name, namespace=self.namespace)

    def hold(self, plural: str, name: str, *finalizers: str) -> None:
        """Give an object of the namespace these finalizers, and no others of ours."""
        change = {"metadata": {"finalizers": list(finalizers)}}
        self.api.patch(plural, name, change, namespace=self.namespace)

    def deny(self, plural: str) -> None:
        """Let no object of a kind be created in the namespace, and wait until that is so."""
        group, version = DRA.removeprefix("/apis/").split("/")
        rule = {"apiGroups": [group], "apiVersions": [version], "resources": [plural]}
        policy = {
            "matchConstraints": {"resourceRules": [{**rule, "operations": ["CREATE"]}]},
            "validations": [{"expression": "false", "message": "not today"}],
        }
        only = {"matchLabels": {"kubernetes.io/metadata.name": self.namespace}}
        binding = {
            "policyName": self.name,
            "validationActions": ["Deny"],
            "matchResources": {"namespaceSelector": only},
        }
        self._put(self._body("ValidatingAdmissionPolicy", self.name, spec=policy))
        self._put(self._body("ValidatingAdmissionPolicyBinding", self.name, spec=binding))

        def denied() -> bool:
            try:
                self.claim("probe", self.request())
            except RefusedError as error:
                return "not today" in str(error)
            self.delete("resourceclaims", "probe")
            return False

        wait_for(f"no {plural} can be created", denied, seconds=VERDICT_SECONDS)

    def allow(self) -> None:
        """Allow again what was denied."""
        for plural in POLICIES:
            self.delete(plural, self.name)

    def status_of(self, claim: str) -> Body:
        body = self.api.get("resourceclaims", claim, namespace=self.namespace)
        return body.get("status", {})

    def write_claim(self, claim: str, **status: Any) -> None:
        """Write the status of a claim."""
        body = self.api.get("resourceclaims", claim, namespace=self.namespace)
        self.api.write_status("resourceclaims", {**body, "status": status})

    def quota(self, **hard: str) -> None:
        """Limit the namespace, and wait until the use of the limits is counted."""
        spec = {"hard": {key.replace("_", "/"): amount for key, amount in hard.items()}}
        self._put(self._body("ResourceQuota", "quota", spec=spec, namespaced=True))
        wait_for(
            "the quota is counted",
            lambda: (
                self.api.get("resourcequotas", "quota", namespace=self.namespace)
                .get("status", {})
                .get("used")
            ),
            seconds=VERDICT_SECONDS,
        )

    def allow_admin_access(self, *, allowed: bool) -> None:
        labels = {ADMIN_LABEL: "true" if allowed else None}
        self.api.patch("namespaces", self.namespace, {"metadata": {"labels": labels}})

    def allocated_claim(self) -> Body:
        """Wait until a claim of the scene is allocated."""

        def found() -> Body | None:
            claims = self.api.list("resourceclaims", namespace=self.namespace)
            return next((each for each in claims if each.get("status", {}).get("allocation")), None)

        return wait_for("a claim is allocated", found, seconds=VERDICT_SECONDS)

    def change_node(self, **spec: Any) -> None:
        """Change the spec of the first node until the scene is closed; None removes a field."""
        undone = {"spec": dict.fromkeys(spec)}
        self.cleanups.append(lambda: self.api.patch("nodes", self.node, undone))
        self.api.patch("nodes", self.node, {"spec": spec})

    # ---- what others report

    def event(
        self, reason: str, message: str, *, plural: str = "pods", name: str = WAITS, second: int = 0
    ) -> None:
        """Write an Event about an object of the namespace, at a second of the year 2026."""
        about = self.api.get(plural, name, namespace=self.namespace)["metadata"]
        time = f"2026-01-01T00:00:{second:02}"
        found = Event(time=time, reason=reason, message=message, uid=about["uid"])
        self.quoted.append(found)
        body = {
            "metadata": {"name": f"e-{len(self.quoted)}"},
            "involvedObject": {"name": name, "uid": found.uid},
            "reason": reason,
            "message": message,
            "eventTime": f"{time}.000000Z",
        }
        self.api.call("POST", f"/api/v1/namespaces/{self.namespace}/events", body)

    def change_pod(self, name: str = WAITS, **status: Any) -> None:
        """Write a part of a pod's status, as its kubelet would."""
        change = {"status": status}
        self.api.patch("pods", name, change, namespace=self.namespace, subresource="status")

    def container(self, **state: Any) -> None:
        """Write the state of the pod's container in a sandbox that is ready."""
        sandbox = {"type": "PodReadyToStartContainers", "status": "True"}
        statuses = [{"name": "main", "state": state}]
        phase = "Running" if "running" in state else "Pending"
        self.change_pod(phase=phase, conditions=[sandbox], containerStatuses=statuses)

    def start(self) -> None:
        """Run the pod, as its kubelet would."""
        self.container(running={"startedAt": "2026-01-01T00:01:00Z"})

    def refuse(self, message: str) -> None:
        """Let the scheduler refuse the pod to come with a message; an empty one ends it."""
        self.refused = message
        if not message:
            change = {"metadata": {"annotations": {REFUSED: None}}}
            self.api.patch("pods", WAITS, change, namespace=self.namespace)

    def report(
        self, node: str, *, state: str = "Registered", progress: str = "", **status: Any
    ) -> None:
        """Write the report of the scene's driver on a node; `progress` is what is slow there."""
        registered = "True" if state == "Registered" else "False"
        conditions = [{"type": "Registered", "status": registered, "reason": state}]
        if progress:
            slow = {"type": "ClaimsProgressing", "status": "False", "message": progress}
            conditions.append(slow)
        name = f"{node}.{self.driver}"
        body = self._body("NodeDeviceReport", name, spec={"nodeName": node, "driver": self.driver})
        body["apiVersion"] = REPORTS.removeprefix("/apis/")
        body["status"] = {"conditions": conditions, **status}
        self._put(body)
        self.cleanups.append(lambda: self.api.delete("nodedevicereports", name))

    # ---- what is said of it

    def explain(self, name: str = WAITS) -> Explanation:
        return self.explaining.explain(
            self.namespace, name, settled=self.settled, events=Events(self.quoted)
        )

    def scheduled_on(self, name: str = WAITS) -> str:
        return self.api.get("pods", name, namespace=self.namespace)["spec"].get("nodeName", "")

    def wait_scheduled(self, name: str = WAITS) -> str:
        what = f"pod {self.namespace}/{name} gets a node"
        return wait_for(what, lambda: self.scheduled_on(name), seconds=SCHEDULED_SECONDS)

    def wait_refused(self, name: str = WAITS) -> str:
        """Wait until the scheduler reports that the pod fits nowhere; return its message."""

        def refused() -> str:
            body = self.api.get("pods", name, namespace=self.namespace)
            for condition in body["status"].get("conditions", ()):
                if condition["type"] == "PodScheduled" and condition["status"] == "False":
                    return f"{condition.get('reason')}: {condition.get('message')}"
            return ""

        what = f"the scheduler refuses pod {self.namespace}/{name}"
        return wait_for(what, refused, seconds=VERDICT_SECONDS)

    def wait_event(
        self, name: str, *words: str, kind: str = "", seconds: float = VERDICT_SECONDS
    ) -> tuple[str, str]:
        """Wait for an Event of the operator about an object with all these words."""

        def written() -> tuple[str, str] | None:
            texts = {f"{reason} {note}": (reason, note) for reason, note in self.events(name, kind)}
            return next((texts[t] for t in texts if all(word in t for word in words)), None)

        what = f"an Event about {self.namespace}/{name}"
        return wait_for(what, written, seconds=seconds, period=0.2)

    def events(self, name: str, kind: str = "") -> list[tuple[str, str]]:
        """The reasons and notes of the operator's Events about an object, of any kind or one."""
        return [
            (each["reason"], each["message"])
            for each in self.api.list("events", namespace=self.namespace)
            if each["involvedObject"]["name"] == name
            and kind in ("", each["involvedObject"]["kind"])
            and each.get("reportingComponent") == CONTROLLER
        ]

    def claims_of(self, name: str) -> list[str]:
        """The names of the claims that were made for a pod."""
        return [
            each["metadata"]["name"]
            for each in self.api.list("resourceclaims", namespace=self.namespace)
            for owner in each["metadata"].get("ownerReferences", ())
            if owner["name"] == name
        ]

    def claim_names(self, name: str) -> list[str]:
        """The names in a pod's status of the claims that were made for it."""
        status = self.api.get("pods", name, namespace=self.namespace).get("status", {})
        return [each["resourceClaimName"] for each in status.get("resourceClaimStatuses", ())]

    def command(self, target: str) -> tuple[int, Body]:
        return self.explaining.command(self.namespace, target)

    def exists(self, plural: str, name: str) -> bool:
        items = self.api.list(plural, namespace=self.namespace)
        return any(each["metadata"]["name"] == name for each in items)

    # ---- bookkeeping

    def open(self) -> None:
        labels = {LABEL: "1", ADMIN_LABEL: "true"}
        metadata = {"name": self.namespace, "labels": labels}
        self.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        account = {"apiVersion": "v1", "kind": "ServiceAccount"}
        account["metadata"] = {"name": "default"}  # its controller may be slower than our pods
        try:
            self.api.call("POST", f"/api/v1/namespaces/{self.namespace}/serviceaccounts", account)
        except RefusedError as error:
            if error.code != 409:
                raise

    def close(self) -> None:
        self.heartbeats.remove(self.made_up)
        for cleanup in self.cleanups:
            cleanup()
        for pod in self.api.list("pods", namespace=self.namespace):
            self.api.delete("pods", pod["metadata"]["name"], namespace=self.namespace, wait=False)
        self.api.delete("namespaces", self.namespace, wait=False)
        for plural in CLUSTER_WIDE:
            self.api.delete_all(plural, labels=f"{LABEL}={self.namespace}")

    def _create_node(self, name: str, *, ready: bool) -> str:
        full = f"{self.name}-{name}"
        self.made_up.append(full)
        amounts = {"cpu": "4", "memory": "4Gi", "pods": "500"}
        body = self._body("Node", full, spec={"taints": [BARE]})
        body["metadata"]["labels"][HOSTNAME] = full
        body["status"] = {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [_ready(ready)],
        }
        self.heartbeats.add(self.api.create(body))
        return full

    def _placement(self) -> Body:
        """Keep the scene's pods on its own nodes, if it has any."""
        if not self.made_up:
            return {}
        tolerated = {"key": BARE["key"], "operator": "Exists"}
        return {"nodeSelector": {LABEL: self.namespace}, "tolerations": [tolerated]}

    def _exact(self, selectors: Sequence[str], exact: dict[str, Any]) -> Body:
        body: Body = {"deviceClassName": exact.pop("of", self.driver), **exact}
        if selectors:
            texts = [each.replace("DRIVER", self.driver) for each in selectors]
            body["selectors"] = [{"cel": {"expression": each}} for each in texts]
        if "capacity" in body:
            body["capacity"] = {"requests": body["capacity"]}
        return body

    def _claim_spec(self, requests: Sequence[Body], constraints: Sequence[Body]) -> Body:
        spec: Body = {"requests": list(requests)}
        if constraints:
            spec["constraints"] = list(constraints)
        return {"devices": spec}

    def _body(self, kind: str, name: str, *, spec: Body, namespaced: bool = False) -> Body:
        metadata: Body = {"name": name, "labels": {LABEL: self.namespace}}
        if namespaced:
            metadata["namespace"] = self.namespace
        path = ADMISSION if kind.startswith("Validating") else DRA
        core = kind in ("Node", "Pod", "ResourceQuota")
        version = "v1" if core else path.removeprefix("/apis/")
        return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}

    def _put(self, body: Body) -> None:
        """Create an object; one of its name is deleted before."""
        try:
            self.api.create(body)
        except RefusedError as error:
            if error.code != 409:
                raise
            metadata = body["metadata"]
            plural, namespace = KINDS[body["kind"]], metadata.get("namespace", "")
            self.api.delete(plural, metadata["name"], namespace=namespace)
            self.api.create(body)
