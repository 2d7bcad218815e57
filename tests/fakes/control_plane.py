"""
A cluster in memory whose control plane acts: claims are made from templates, pods get devices and a
node, and what is no longer used is released.

Kubernetes' own allocator decides whether claims fit. The controllers act within each write, so no
test waits for them. There are no kubelets, and no evictions: a pod that has a node stays pending.

Does not depend on situations.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import orjson

from drakit.quantity import parse_quantity
from drakit.testing.cluster import FakeCluster, Object, ObjectKey, ObjectPath, StatusError, merge
from drakit_explain.cel.gates import DEFAULT_GATES
from drakit_explain.cel.helper import Helper
from drakit_explain.verdicts import Verdict, VerdictOutcome

MINOR = "1.36"
"""The release of Kubernetes."""

CORE, DRA = "/api/v1", "/apis/resource.k8s.io/v1"
PODS, NODES = f"{CORE}/pods", f"{CORE}/nodes"
CLAIMS, TEMPLATES = f"{DRA}/resourceclaims", f"{DRA}/resourceclaimtemplates"
RULES = "/apis/resource.k8s.io/v1beta2/devicetaintrules"
EVENTS, NEW_EVENTS = f"{CORE}/events", "/apis/events.k8s.io/v1/events"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
QUOTAS = f"{CORE}/resourcequotas"
PROTECTION = "resource.kubernetes.io/delete-protection"
ADMIN_LABEL = "resource.kubernetes.io/admin-access"
EXTENDED = "resource.kubernetes.io/extended-resource-claim"
NOT_READY = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
OF_CLAIMS = "count/resourceclaims.resource.k8s.io"
TIME = "2026-01-01T00:00:00Z"
MAX_CONSUMERS = 256
NO_DEVICES = "cannot allocate all claims"


class ControlPlane(FakeCluster):
    """Objects whose controllers act within each request that writes."""

    def __init__(self, allocator: Helper, *, refused: str) -> None:
        """
        :param refused: the annotation of pods that the scheduler refuses, with its message.
        """
        super().__init__()
        self._refused = refused
        self._allocator = allocator
        self._threads = ThreadPoolExecutor(1)  # a question blocks, which no event loop may
        self._answers: dict[bytes, Verdict] = {}
        self._gates = dict.fromkeys(DEFAULT_GATES[MINOR], True)

    def request(
        self, method: str, path: str, params: dict[str, str] | None = None, body: object = None
    ) -> tuple[int, Object]:
        target, params = ObjectPath.parse(path), params or {}
        if method == "DELETE" and not target.name:
            for each in self.list_objects(target, params)["items"]:
                self._delete(ObjectPath.parse(f"{path}/{each['metadata']['name']}"), {})
            answer = 200, {"kind": "Status"}
        else:
            answer = super().request(method, path, params, body)
        if method != "GET" and not params.get("dryRun"):
            self.act()
        return answer

    def act(self) -> None:
        """Let all controllers act until none has anything to do."""
        version = -1
        while version != self.version:
            version = self.version
            self._follow_nodes()
            self._count_quotas()
            self._collect_garbage()
            self._make_claims()
            self._release_claims()
            for key, pod in self._each(PODS):
                self._schedule(key, pod)

    # ---------------------------------------------------------------- the API server

    def create(self, target: ObjectPath, body: Object) -> Object:
        """Admit, default and create an object."""
        body = copy.deepcopy(body)
        kind = target.collection.rpartition("/")[2]
        if target.collection in (CLAIMS, TEMPLATES):
            spec = body["spec"] if target.collection == CLAIMS else body["spec"]["spec"]
            for request in spec["devices"]["requests"]:
                for exact in request.get("firstAvailable", [request.get("exactly")]):
                    exact.setdefault("allocationMode", "ExactCount")
                    if exact["allocationMode"] == "ExactCount":
                        exact.setdefault("count", 1)
                    for toleration in exact.get("tolerations", ()):
                        toleration.setdefault("operator", "Equal")
            self._admit(kind, target.namespace or "", spec)
        elif target.collection == PODS:
            body.setdefault("status", {"phase": "Pending"})
            if "priorityClassName" in body["spec"]:
                body["spec"]["priority"] = 2_000_000_000
        elif target.collection == f"{CORE}/namespaces":
            name = body["metadata"]["name"]
            body["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = name
        elif target.collection == NEW_EVENTS:  # one object in two groups
            core = {
                "metadata": {"name": body["metadata"]["name"]},
                "involvedObject": body["regarding"],
                "message": body["note"],
                "reportingComponent": body["reportingController"],
                **{key: body[key] for key in ("reason", "type", "eventTime")},
            }
            name = f"{CORE}/namespaces/{target.namespace}/events"
            super().create(ObjectPath.parse(name), core)
        return super().create(target, body)

    def _admit(self, plural: str, namespace: str, spec: Object) -> None:
        labels = (self._get(f"{CORE}/namespaces", "", namespace) or {"metadata": {}})["metadata"]
        for request in spec["devices"]["requests"]:
            wants = request.get("exactly", {}).get("adminAccess")
            if wants and labels.get("labels", {}).get(ADMIN_LABEL) != "true":
                raise StatusError(403, "Forbidden", "admin access to devices requires the label")
        for _, binding in self._each(f"{ADMISSION}/validatingadmissionpolicybindings"):
            of = binding["spec"]["matchResources"]["namespaceSelector"]["matchLabels"]
            policy = self._get(
                f"{ADMISSION}/validatingadmissionpolicies", "", binding["spec"]["policyName"]
            )
            if policy is None or of["kubernetes.io/metadata.name"] != namespace:
                continue
            rules = policy["spec"]["matchConstraints"]["resourceRules"]
            if any(plural in rule["resources"] for rule in rules):
                raise StatusError(422, "Invalid", policy["spec"]["validations"][0]["message"])
        for _, quota in self._each(QUOTAS, namespace) if plural == "resourceclaims" else ():
            status = quota.get("status", {})
            if status.get("used", {}).get(OF_CLAIMS, 0) == status.get("hard", {}).get(OF_CLAIMS):
                raise StatusError(403, "Forbidden", f"exceeded quota: {quota['metadata']['name']}")

    def _delete(self, target: ObjectPath, options: Object) -> Object:
        old = self._found(target)
        if target.collection == f"{CORE}/namespaces":
            for key in [each for each in self.objects if each[1] == target.name]:
                self.commit(key, self.objects[key], None)
        spec = old.get("spec", {})
        graceful = options.get("gracePeriodSeconds") != 0 and spec.get("nodeName")
        if target.collection == PODS and graceful and spec.get("terminationGracePeriodSeconds"):
            return self._change(
                target.key, {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
            )
        return super()._delete(target, options)

    # ---------------------------------------------------------------- controllers

    def _follow_nodes(self) -> None:
        for key, node in self._each(NODES):
            conditions = node.get("status", {}).get("conditions", ())
            ready = all(each["status"] == "True" for each in conditions)
            taints = [each for each in node["spec"].get("taints", ()) if each != NOT_READY]
            if not ready:
                taints.append(NOT_READY)
            if taints != node["spec"].get("taints", []):
                self._change(key, {"spec": {"taints": taints}})

    def _count_quotas(self) -> None:
        for key, quota in self._each(QUOTAS):
            used = {OF_CLAIMS: str(sum(1 for _ in self._each(CLAIMS, key[1])))}
            status = {"hard": quota["spec"]["hard"], "used": used}
            if quota.get("status") != status:
                self._change(key, {"status": status})

    def _collect_garbage(self) -> None:
        pods = {pod["metadata"]["uid"] for _, pod in self._each(PODS)}
        for key, claim in self._each(CLAIMS):
            metadata = claim["metadata"]
            owners = [each["uid"] for each in metadata.get("ownerReferences", ())]
            if owners and not pods.intersection(owners) and "deletionTimestamp" not in metadata:
                path = f"{DRA}/namespaces/{key[1]}/resourceclaims/{key[2]}"
                self._delete(ObjectPath.parse(path), {})

    def _make_claims(self) -> None:
        for key, pod in self._each(PODS):
            made = {each["name"] for each in pod["status"].get("resourceClaimStatuses", ())}
            for used in pod["spec"].get("resourceClaims", ()):
                template = self._get(TEMPLATES, key[1], used.get("resourceClaimTemplateName", ""))
                if template is not None and used["name"] not in made:
                    self._make_claim(key, used["name"], template["spec"]["spec"])

    def _make_claim(self, key: ObjectKey, name: str, spec: Object) -> None:
        pod = self.objects[key]
        claim = self._owned(pod, f"{key[2]}-{name}-", spec)
        path = f"{DRA}/namespaces/{key[1]}/resourceclaims"
        try:
            made = self.create(ObjectPath.parse(path), claim)
        except StatusError as error:
            message = f"PodResourceClaim {name}: failed to create ResourceClaim: {error}"
            self._report(pod, "FailedResourceClaimCreation", message)
            return
        statuses = pod["status"].get("resourceClaimStatuses", [])
        statuses = [*statuses, {"name": name, "resourceClaimName": made["metadata"]["name"]}]
        self._change(key, {"status": {"resourceClaimStatuses": statuses}})

    def _owned(self, pod: Object, prefix: str, spec: Object) -> Object:
        metadata = pod["metadata"]
        owner = {"apiVersion": "v1", "kind": "Pod", "controller": True}
        owner |= {each: metadata[each] for each in ("name", "uid")}
        return {"metadata": {"generateName": prefix, "ownerReferences": [owner]}, "spec": spec}

    def _report(self, pod: Object, reason: str, message: str) -> None:
        namespace, name = pod["metadata"]["namespace"], f"{pod['metadata']['uid']}-{reason}"
        if self._get(EVENTS, namespace, name) is None:
            event = {
                "metadata": {"name": name},
                "involvedObject": {"kind": "Pod"}
                | {each: pod["metadata"][each] for each in ("name", "uid", "namespace")},
                "type": "Warning",
                "reason": reason,
                "message": message,
                "eventTime": TIME,
            }
            super().create(ObjectPath.parse(f"{CORE}/namespaces/{namespace}/events"), event)

    def _release_claims(self) -> None:
        """Remove reservations of pods that are gone, and release what no pod needs any more."""
        pods = {pod["metadata"]["uid"] for _, pod in self._each(PODS)}
        for key, claim in self._each(CLAIMS):
            reserved = claim.get("status", {}).get("reservedFor", [])
            users = [u for u in reserved if u["resource"] != "pods" or u["uid"] in pods]
            if users != reserved:
                self._change(key, {"status": {"reservedFor": users or None}})
                if not users:
                    self._deallocate(key)

    def _deallocate(self, key: ObjectKey) -> None:
        claim = self.objects[key]
        kept = [each for each in claim["metadata"].get("finalizers", ()) if each != PROTECTION]
        released = dict.fromkeys(("allocation", "reservedFor", "devices"))
        self._change(key, {"metadata": {"finalizers": kept}, "status": released})
        if "deletionTimestamp" in claim["metadata"] and not kept:
            self.commit(key, self.objects[key], None)

    # ---------------------------------------------------------------- the scheduler

    def _schedule(self, key: ObjectKey, pod: Object) -> None:
        spec = pod["spec"]
        if "deletionTimestamp" in pod["metadata"] or spec.get("schedulerName"):
            return
        keys = self._claims_of(pod)
        for each in keys:
            if each in self.objects and _has_failed(self.objects[each]):
                self._deallocate(each)
        claims = [self.objects[each] for each in keys if each in self.objects]
        if spec.get("nodeName"):
            for each in keys:
                if each in self.objects and self.objects[each].get("status", {}).get("allocation"):
                    self._reserve(each, pod)
            return
        if spec.get("schedulingGates"):
            return
        if refused := pod["metadata"].get("annotations", {}).get(self._refused):
            self._refuse(key, refused)
            return
        if len(claims) < len(spec.get("resourceClaims", ())) or any(
            "deletionTimestamp" in each["metadata"] for each in claims
        ):
            return
        extended = self._extended(pod)
        if extended is not None:
            claims.append(extended)
        open_ = [each for each in claims if not each.get("status", {}).get("allocation")]
        missing = self._missing_class(open_)
        node, message = ("", missing) if missing else self._find_node(pod, claims, open_)
        if not node:
            for claim in claims:
                users = claim.get("status", {}).get("reservedFor", [])
                if claim not in open_ and [u["uid"] for u in users] == [pod["metadata"]["uid"]]:
                    self._deallocate(_key(CLAIMS, claim))
            self._refuse(key, message)
            return
        self._place(key, node, claims, extended)

    def _refuse(self, key: ObjectKey, message: str) -> None:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        conditions = [{**condition, "message": message}]
        if self.objects[key]["status"].get("conditions") != conditions:
            self._change(key, {"status": {"conditions": conditions}})

    def _place(
        self, key: ObjectKey, node: str, claims: Sequence[Object], extended: Object | None
    ) -> None:
        pod = self.objects[key]
        open_ = [each for each in claims if not each.get("status", {}).get("allocation")]
        results = self._ask(node, open_).results if open_ else ()
        for claim, found in zip(open_, results, strict=True):
            if claim is extended:
                path = f"{DRA}/namespaces/{key[1]}/resourceclaims"
                claim = self.create(ObjectPath.parse(path), claim)
                name = claim["metadata"]["name"]
                self._change(
                    key, {"status": {"extendedResourceClaimStatus": {"resourceClaimName": name}}}
                )
            self._allocate(_key(CLAIMS, claim), node, found)
        for each in claims:
            if each is not extended:
                self._reserve(_key(CLAIMS, each), pod)
        if all(self._is_bound(self.objects[_key(CLAIMS, c)]) for c in claims if c is not extended):
            condition = {"type": "PodScheduled", "status": "True"}
            change = {"spec": {"nodeName": node}, "status": {"conditions": [condition]}}
            self._change(key, change)

    def _allocate(self, key: ObjectKey, node: str, results: Sequence[Object]) -> None:
        allocation: Object = {"devices": {"results": list(results)}}
        places = {(s["spec"]["driver"], s["spec"]["pool"]["name"]): s for s in self._slices()}
        if not all(
            places[each["driver"], each["pool"]]["spec"].get("allNodes") for each in results
        ):
            field = {"key": "metadata.name", "operator": "In", "values": [node]}
            allocation["nodeSelector"] = {"nodeSelectorTerms": [{"matchFields": [field]}]}
        finalizers = [*self.objects[key]["metadata"].get("finalizers", ()), PROTECTION]
        change = {"metadata": {"finalizers": finalizers}, "status": {"allocation": allocation}}
        self._change(key, change)

    def _reserve(self, key: ObjectKey, pod: Object) -> None:
        users = self.objects[key].get("status", {}).get("reservedFor", [])
        own = {"resource": "pods", **{each: pod["metadata"][each] for each in ("name", "uid")}}
        if own not in users and len(users) < MAX_CONSUMERS:
            self._change(key, {"status": {"reservedFor": [*users, own]}})

    def _is_bound(self, claim: Object) -> bool:
        return all(
            any(
                condition["type"] == wanted and condition["status"] == "True"
                for device in claim["status"].get("devices", ())
                if device["device"] == result["device"]
                for condition in device["conditions"]
            )
            for result in _results(claim)
            for wanted in result.get("bindingConditions", ())
        )

    def _claims_of(self, pod: Object) -> list[ObjectKey]:
        """The keys of the claims that a pod names, or that were made for it."""
        made = {
            each["name"]: each["resourceClaimName"]
            for each in pod["status"].get("resourceClaimStatuses", ())
        }
        names = [
            each.get("resourceClaimName") or made.get(each["name"], "")
            for each in pod["spec"].get("resourceClaims", ())
        ]
        return [(CLAIMS, pod["metadata"]["namespace"], name) for name in names if name]

    def _extended(self, pod: Object) -> Object | None:
        """Return the claim for the extended resources that classes provide, if the pod does not
        have it yet."""
        requests = [
            {"name": f"container-{number}-request-0", "exactly": {"deviceClassName": name}}
            for number, container in enumerate(pod["spec"]["containers"])
            for resource in container["resources"].get("limits", {})
            for name in self._class_of(resource)
        ]
        if not requests or "extendedResourceClaimStatus" in pod["status"]:
            return None
        for each in requests:
            each["exactly"] |= {"allocationMode": "ExactCount", "count": 1}
        claim = self._owned(pod, f"{pod['metadata']['name']}-extended-resources-", {})
        claim["metadata"]["annotations"] = {EXTENDED: "true"}
        claim["metadata"]["namespace"] = pod["metadata"]["namespace"]
        return {**claim, "spec": {"devices": {"requests": requests}}}

    def _class_of(self, resource: str) -> Iterator[str]:
        for _, each in self._each(f"{DRA}/deviceclasses"):
            if each["spec"].get("extendedResourceName") == resource:
                yield each["metadata"]["name"]

    def _missing_class(self, claims: Sequence[Object]) -> str:
        for claim in claims:
            for request in claim["spec"]["devices"]["requests"]:
                for exact in request.get("firstAvailable", [request.get("exactly")]):
                    name = exact["deviceClassName"]
                    if self._get(f"{DRA}/deviceclasses", "", name) is None:
                        return f"request {request['name']}: device class {name} does not exist"
        return ""

    def _find_node(
        self, pod: Object, claims: Sequence[Object], open_: Sequence[Object]
    ) -> tuple[str, str]:
        """Return a node for the pod, or the scheduler's message."""
        reasons: Counter[str] = Counter()
        nodes = [node for _, node in self._each(NODES)]
        found = ""
        for node in nodes:
            name = node["metadata"]["name"]
            why = self._why_not(pod, node)
            selectors = [
                c["status"]["allocation"].get("nodeSelector") for c in claims if c not in open_
            ]
            if not why and not all(_selects(each, node) for each in selectors if each):
                why = "node(s) didn't match the allocation of a claim"
            if not why and open_:
                verdict = self._ask(name, open_)
                if verdict.outcome in (VerdictOutcome.FATAL, VerdictOutcome.UNDECIDED):
                    text = verdict.text
                    if verdict.outcome is VerdictOutcome.UNDECIDED:
                        text = f"node {name}: timed out trying to allocate devices"
                    return "", f'running "DynamicResources" filter plugin: {text}'
                why = "" if verdict.outcome is VerdictOutcome.ALLOCATED else NO_DEVICES
            if why:
                reasons[why] += 1
            found = found or ("" if why else name)
        own = pod["metadata"]["uid"]
        users = [c.get("status", {}).get("reservedFor", []) for c in claims]
        if found and any(
            len(u) >= MAX_CONSUMERS and own not in {e["uid"] for e in u} for u in users
        ):
            return "", "resourceclaim in use"
        counted = ", ".join(f"{number} {why}" for why, number in sorted(reasons.items()))
        return found, f"0/{len(nodes)} nodes are available: {counted}."

    def _why_not(self, pod: Object, node: Object) -> str:
        """Return the reason why a node is filtered before devices are searched, in Kubernetes'
        words."""
        spec = pod["spec"]
        labels = node["metadata"].get("labels", {})
        required = _required(spec, "nodeAffinity")
        if spec.get("nodeSelector", {}).items() - labels.items() or (
            required and not _selects(required, node)
        ):
            return "node(s) didn't match Pod's node affinity/selector"
        if node["spec"].get("unschedulable"):
            return "node(s) were unschedulable"
        for taint in node["spec"].get("taints", ()):
            if not any(t.get("key") in (None, taint["key"]) for t in spec.get("tolerations", ())):
                return "node(s) had untolerated taint(s)"
        if _required(spec, "podAffinity"):
            return "node(s) didn't match pod affinity rules"
        name = node["metadata"]["name"]
        others = [each for _, each in self._each(PODS) if each["spec"].get("nodeName") == name]
        if _ports(pod).intersection(*[_ports(each) for each in others] or [set()]):
            return "node(s) didn't have free ports for the requested pod ports"
        allocatable = node["status"].get("allocatable", {})
        for resource, amount in _requested(pod).items():
            if any(self._class_of(resource)):
                continue
            used = sum(_requested(each).get(resource, 0) for each in others)
            if used + amount > parse_quantity(str(allocatable.get(resource, "0"))):
                return f"Insufficient {resource}"
        return ""

    def _ask(self, node: str, claims: Sequence[Object]) -> Verdict:
        question = orjson.dumps(
            {
                "nodes": [{"metadata": self.objects[NODES, "", node]["metadata"]}],
                "classes": [each for _, each in self._each(f"{DRA}/deviceclasses")],
                "slices": self._slices(),
                "claims": claims,
                "inUse": [r for _, claim in self._each(CLAIMS) for r in _results(claim)],
                "gates": self._gates,
            }
        )
        if question not in self._answers:
            asked = self._threads.submit(self._allocator.verdicts, question, nodes=1)
            (self._answers[question],) = asked.result()
        return self._answers[question]

    def _slices(self) -> list[Object]:
        """The slices, with the taints of rules."""
        slices = [copy.deepcopy(each) for _, each in self._each(f"{DRA}/resourceslices")]
        for _, rule in self._each(RULES):
            selector, taint = rule["spec"].get("deviceSelector", {}), rule["spec"]["taint"]
            for spec in (each["spec"] for each in slices):
                if taint["effect"] != "None" and selector.get("driver") in (None, spec["driver"]):
                    for device in spec.get("devices", ()):
                        device["taints"] = [*device.get("taints", ()), taint]
        return slices

    # ---------------------------------------------------------------- objects

    def _each(self, collection: str, namespace: str = "") -> list[tuple[ObjectKey, Object]]:
        return [
            (key, body)
            for key, body in self.objects.items()
            if key[0] == collection and namespace in ("", key[1])
        ]

    def _get(self, collection: str, namespace: str, name: str) -> Object | None:
        return self.objects.get((collection, namespace, name))

    def _change(self, key: ObjectKey, change: Object) -> Object:
        old = self.objects[key]
        return self.commit(key, old, merge(old, change))


def _key(collection: str, body: Object) -> ObjectKey:
    return collection, body["metadata"]["namespace"], body["metadata"].get("name", "")


def _results(claim: Object) -> list[Object]:
    return claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", [])


def _has_failed(claim: Object) -> bool:
    """Return whether a device of a claim has failed one of its binding conditions."""
    failures = {each for r in _results(claim) for each in r.get("bindingFailureConditions", ())}
    devices = claim.get("status", {}).get("devices", ())
    return any(each["type"] in failures for device in devices for each in device["conditions"])


def _required(spec: Object, kind: str) -> Object | None:
    affinity = spec.get("affinity", {}).get(kind, {})
    return affinity.get("requiredDuringSchedulingIgnoredDuringExecution")


def _selects(selector: Object, node: Object) -> bool:
    """Return whether a node selector whose operators are all In selects a node."""
    fields = {"metadata.name": node["metadata"]["name"]}
    labels = node["metadata"].get("labels", {})
    return any(
        all(
            values.get(each["key"]) in each["values"]
            for values, name in ((labels, "matchExpressions"), (fields, "matchFields"))
            for each in term.get(name, ())
        )
        for term in selector["nodeSelectorTerms"]
    )


def _ports(pod: Object) -> set[int]:
    containers = pod["spec"]["containers"]
    return {port["hostPort"] for each in containers for port in each.get("ports", ())}


def _requested(pod: Object) -> Counter[str]:
    found: Counter[str] = Counter()
    for container in pod["spec"]["containers"]:
        for resource, amount in container["resources"].get("requests", {}).items():
            found[resource] += parse_quantity(str(amount))
    return found
