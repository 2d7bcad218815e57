"""
Projects raw objects to the facts of :mod:`.model`: objects of ``resource.k8s.io``, and the parts of
pods, nodes, namespaces and quotas (core ``v1``) on which claims and devices depend.

Fields that the facts do not need are ignored. Absent, null and empty fields are treated alike.
Content that a tenant can make large has a limit for each object. Beyond the limit, the object is
projected without that content. Strings that repeat in thousands of objects (names of drivers,
pools, classes and attributes) are stored once. The same applies to values that similar devices have
in common: capacities, counters and taints.

Does not depend on clients.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import lru_cache
from sys import intern
from typing import TypeVar

import orjson

from drakit_explain.devices import (
    Amount,
    AttributeFact,
    CapacityFacts,
    CapacityPolicy,
    CounterSetFacts,
    DeviceFacts,
    DeviceKind,
    Devices,
    ListValue,
    Place,
    TaintFacts,
    Version,
)
from drakit_explain.loads import requests_of_pod
from drakit_explain.model import (
    PREVENTING,
    ClaimFacts,
    ClassFacts,
    Constraint,
    Consumer,
    ContainerProblem,
    DeviceID,
    ExtendedRequest,
    NamespaceFacts,
    NodeFacts,
    Placement,
    PodClaim,
    PodFacts,
    QuotaFacts,
    Request,
    Result,
    Share,
    SliceFacts,
    TaintRuleFacts,
    TemplateFacts,
    Toleration,
    without_content,
)
from drakit_formats.resource.nodes import NodeSelector, node_selector
from drakit_formats.resource.objects import (
    VERSIONS,
    Object,
    child,
    children,
    from_version,
    requests_from_version,
    text,
    words,
)

# ---------------------------------------------------------------- resource.k8s.io

Shared = TypeVar("Shared")

MAX_EXPRESSION = 2048
"""Maximum size of a selector. A selector that tests a dozen attributes is smaller. A single
four-byte character makes Python use four bytes for each character of the string."""

MAX_CONTENT = 64 * 2**10
"""Maximum JSON size of a claim's requests and constraints, of a class's selectors, and of a pod's
scheduling rules and resources. Each byte can take 25 bytes after parsing (``{},{},...``)."""

MAX_SHARED = 2**10
"""Maximum JSON size of content to cache. Cached content remains in memory after its object is
gone."""

MAX_NAMES = 16
"""Maximum number of an object's finalizers, and of its scheduling gates, to keep. Sentences name
them, and most objects have only one."""

MAX_CONTAINERS = 3
"""Maximum number of a pod's containers to keep problems of."""

MAX_MESSAGE = 768
"""Maximum length of a message from the kubelet or runtime. In messages from containerd and runc,
the cause is at the end."""

MAX_POD_CLAIMS = 32
"""Maximum number of a pod's claims. The API does not have a limit, and each claim takes 0.5 KiB."""

_EVERYWHERE = Place(every=True)

FOR_EXTENDED = "resource.kubernetes.io/extended-resource-claim"
"""The annotation on claims that the scheduler creates for extended resources."""


def finalizers(metadata: Object) -> tuple[str, ...]:
    found = metadata.get("finalizers")
    return once(tuple(map(str, found[:MAX_NAMES]))) if found else ()


def _controller(metadata: Object) -> Object:
    """Return the reference to the owner that controls an object. Empty if there is none."""
    owners = children(metadata, "ownerReferences")
    return next((each for each in owners if each.get("controller")), _NOBODY)


_NOBODY: Object = {}


def project_taint_rule(body: Object) -> TaintRuleFacts:
    """Project a DeviceTaintRule."""
    metadata, spec = child(body, "metadata"), child(body, "spec")
    selector, taint = child(spec, "deviceSelector"), child(spec, "taint")
    return TaintRuleFacts(
        name=metadata["name"],
        uid=metadata["uid"],
        taint=TaintFacts(
            key=text(taint, "key"), effect=text(taint, "effect"), value=text(taint, "value")
        ),
        driver=text(selector, "driver"),
        pool=text(selector, "pool"),
        device=text(selector, "device"),
        owner=text(_controller(metadata), "uid"),
        selective=spec.get("deviceSelector") is not None,
        unsupported=bool(selector.get("deviceClassName") or selector.get("selectors")),
    )


def project_claim(body: Object, version: str = VERSIONS[0]) -> ClaimFacts:
    """Project a ResourceClaim of the given API version."""
    metadata, status = child(body, "metadata"), child(body, "status")
    spec = requests_from_version(child(body, "spec"), version)
    allocation = status.get("allocation")
    owner = _controller(metadata)
    owner = owner if text(owner, "kind") == "Pod" else _NOBODY
    results = children(allocation or {}, "devices", "results")
    conditions = {
        _device_key(entry): children(entry, "conditions") for entry in children(status, "devices")
    }
    allocated = tuple(
        [
            _result(each, conditions.get(_device_key(each), []) if conditions else [])
            for each in results
        ]
    )
    taken = [
        (result, facts.device)
        for result, facts in zip(results, allocated, strict=True)
        if not result.get("adminAccess")
    ]
    # The owner and a consumer are often the same pod, so share its name and UID.
    of_owner = {name: name for name in (text(owner, "name"), text(owner, "uid"))}
    consumers = tuple(
        [
            Consumer(
                intern(text(consumer, "resource")),
                of_owner.get(name := text(consumer, "name"), name),
                of_owner.get(uid := text(consumer, "uid"), uid),
            )
            for consumer in children(status, "reservedFor")
        ]
    )
    requests, constraints = _requests(spec)
    return ClaimFacts(
        namespace=intern(text(metadata, "namespace")),
        name=metadata["name"],
        uid=metadata["uid"],
        requests=requests,
        constraints=constraints,
        allocated=allocation is not None,
        devices=tuple([device for result, device in taken if not result.get("shareID")]),
        shares=tuple(
            [
                Share(device=device, consumed=amounts(child(result, "consumedCapacity")))
                for result, device in taken
                if result.get("shareID")
            ]
        ),
        results=allocated,
        consumers=consumers,
        owner_pod=text(owner, "name") or None,
        owner_uid=text(owner, "uid"),
        for_extended=text(metadata, "annotations", FOR_EXTENDED) == "true",
        deleting=bool(metadata.get("deletionTimestamp")),
        finalizers=finalizers(metadata),
        nodes=_nodes(child(allocation, "nodeSelector")) if allocation is not None else None,
    )


def _nodes(selector: Object) -> NodeSelector | str | None:
    """Return a node's name if a selector selects only that node by name, in the form that the
    allocator writes. Otherwise, return the selector."""
    match selector:
        case {
            "nodeSelectorTerms": [
                {
                    "matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]
                } as term
            ]
        } if not term.get("matchExpressions"):
            return intern(name)
        case _:
            return node_selector(selector) if selector else None


def _device_key(entry: Object) -> tuple[str, ...]:
    return tuple(text(entry, name) for name in ("driver", "pool", "device", "shareID"))


def _result(result: Object, conditions: list[Object]) -> Result:
    true = {text(each, "type") for each in conditions if text(each, "status") == "True"}
    binding, failure = result.get("bindingConditions"), result.get("bindingFailureConditions")
    return Result(
        request=intern(text(result, "request")),
        device=_device_id(result),
        tolerations=_tolerations(result),
        outstanding=once(tuple([each for each in binding if each not in true])) if binding else (),
        failed=once(tuple([each for each in failure if each in true])) if failure else (),
    )


def project_template(body: Object, version: str = VERSIONS[0]) -> TemplateFacts:
    """Project a ResourceClaimTemplate of the given API version."""
    metadata = child(body, "metadata")
    spec = requests_from_version(child(body, "spec", "spec"), version)
    requests, constraints = _requests(spec)
    return TemplateFacts(
        namespace=intern(text(metadata, "namespace")),
        name=metadata["name"],
        uid=metadata["uid"],
        requests=requests,
        constraints=constraints,
    )


def project_class(body: Object) -> ClassFacts:
    """Project a DeviceClass."""
    metadata, spec = child(body, "metadata"), child(body, "spec")
    return ClassFacts(
        name=metadata["name"],
        uid=metadata["uid"],
        selectors=_selectors(spec) if _json_bytes(spec.get("selectors")) <= MAX_CONTENT else ("",),
        extended_resource=text(spec, "extendedResourceName"),
        created=text(metadata, "creationTimestamp"),
        owner=text(_controller(metadata), "uid"),
    )


def project_slice(body: Object, version: str = VERSIONS[0]) -> SliceFacts:
    """Project a ResourceSlice of the given API version."""
    metadata, spec = child(body, "metadata"), child(from_version(body, version), "spec")
    driver, pool = intern(text(spec, "driver")), child(spec, "pool")
    by_device = bool(spec.get("perDeviceNodeSelection"))
    devices = Devices.of([_device(each, by_device=by_device) for each in children(spec, "devices")])
    return SliceFacts(
        name=metadata["name"],
        uid=metadata["uid"],
        driver=driver,
        pool=intern(text(pool, "name")),
        generation=int(pool.get("generation") or 0),
        pool_slices=int(pool.get("resourceSliceCount") or 1),
        place=_place(spec),
        by_device=by_device,
        devices=devices,
        counter_sets=tuple(
            _counter_set(text(counters, "name"), counters)
            for counters in children(spec, "sharedCounters")
        ),
        raw=zlib.compress(orjson.dumps(spec)) if _has_extra(spec, devices) else b"",
    )


_SLICE_FIELDS = frozenset(
    (
        *("driver", "pool", "nodeName", "nodeSelector", "allNodes", "devices"),
        *("perDeviceNodeSelection", "sharedCounters"),
        "partitionTypeAttribute",  # this field does not change a verdict
    )
)
_DEVICE_FIELDS = frozenset(
    (
        *("name", "attributes", "capacity", "consumesCounters", "nodeName", "nodeSelector"),
        *("allNodes", "taints", "bindsToNode", "bindingConditions", "bindingFailureConditions"),
        "allowMultipleAllocations",
    )
)
_POLICY_FIELDS = frozenset(("default", "validValues", "validRange"))
_EXACT_FIELDS = frozenset(
    (
        *("name", "deviceClassName", "selectors", "allocationMode", "count", "adminAccess"),
        *("tolerations", "capacity"),
    )
)
_CONSTRAINT_FIELDS = frozenset(("requests", "matchAttribute", "distinctAttribute"))


def _has_extra(spec: Object, devices: Devices) -> bool:
    """Return whether a slice has fields that the facts do not contain."""
    return not (
        _SLICE_FIELDS.issuperset(spec)
        and all(map(_DEVICE_FIELDS.issuperset, children(spec, "devices")))
        and not any(group.kind.extra for group in devices.groups)
        and not any(one.grouped for consumed in devices.consumes for one in consumed)
    )


def _extra(body: Object, known: frozenset[str]) -> bytes:
    """Return the fields of a request or constraint that the facts do not contain, as JSON."""
    if known.issuperset(body):
        return b""
    return orjson.dumps({name: value for name, value in body.items() if name not in known})


def _place(body: Object) -> Place | None:
    """Read which nodes can use a slice or device. Return None if it does not have such a field."""
    if node := text(body, "nodeName"):
        return Place(node=intern(node))
    if body.get("allNodes"):
        return _EVERYWHERE
    if (selector := body.get("nodeSelector")) is not None:
        return Place(selector=node_selector(selector))
    return None


def _json_bytes(*parts: object) -> int:
    """Return the size of parsed JSON, as the API server writes it."""
    return len(orjson.dumps(parts))


def _constraint(body: Object) -> Constraint:
    distinct = text(body, "distinctAttribute")
    return Constraint(
        attribute=intern(distinct or text(body, "matchAttribute")),
        distinct=bool(distinct),
        requests=tuple(intern(str(name)) for name in body.get("requests") or ()),
        extra=_extra(body, _CONSTRAINT_FIELDS),
    )


def _requests(spec: Object) -> tuple[tuple[Request, ...], tuple[Constraint, ...]]:
    """Read requests and constraints, without the content of those that are too large."""
    devices = child(spec, "devices")
    bodies, constraints = children(devices, "requests"), children(devices, "constraints")
    content = orjson.dumps((bodies, constraints))
    if len(content) <= MAX_SHARED:
        return _requests_of(content)
    if len(content) > MAX_CONTENT:
        why = f"the size (the requests of its claim have more than {MAX_CONTENT >> 10} KiB)"
        return without_content(tuple(map(_request, bodies)), why), ()
    return tuple(map(_request, bodies)), tuple(map(_constraint, constraints))


@lru_cache(maxsize=1024)
def _requests_of(content: bytes) -> tuple[tuple[Request, ...], tuple[Constraint, ...]]:
    """Read requests and constraints. The result is cached, because many claims have the same
    requests and constraints."""
    bodies, constraints = orjson.loads(content)
    return tuple(map(_request, bodies)), tuple(map(_constraint, constraints))


def _request(request: Object) -> Request:
    if alternatives := children(request, "firstAvailable"):
        return Request(
            name=request["name"],
            device_class="",
            alternatives=tuple(_exact(entry["name"], entry) for entry in alternatives),
        )
    return _exact(request["name"], child(request, "exactly"))


def _exact(name: str, body: Object) -> Request:
    every = body.get("allocationMode") == "All"
    unsupported = _unsupported(body)
    return Request(
        name=name,
        device_class=intern(text(body, "deviceClassName")),
        count=0 if every else int(body.get("count") or 1),
        selectors=_selectors(body),
        admin_access=bool(body.get("adminAccess")),
        tolerations=_tolerations(body),
        capacity=amounts(child(body, "capacity", "requests")),
        unsupported=unsupported,
        extra=_extra(body, _EXACT_FIELDS - {"allocationMode"} if unsupported else _EXACT_FIELDS),
    )


_UNREAD = {"name": "", "allocationMode": "that cannot be read"}

UNREAD_CLAIM: Object = {"devices": {"requests": [{**_UNREAD, "exactly": _UNREAD}]}}
"""The spec to assume for an unreadable claim, in all versions. Every result about it is
uncertain."""


def _unsupported(body: Object) -> str:
    """Return the part of a request that drakit does not support, or an empty string."""
    mode = text(body, "allocationMode")
    if mode not in ("", "ExactCount", "All"):
        return f"allocation mode {mode}"
    return "derivedAttributes" if body.get("derivedAttributes") else ""


def _tolerations(body: Object) -> tuple[Toleration, ...]:
    found = children(body, "tolerations")
    return once(tuple(map(_toleration, found))) if found else ()


def _toleration(body: Object) -> Toleration:
    return Toleration(
        key=text(body, "key"),
        operator=text(body, "operator") or "Equal",
        value=text(body, "value"),
        effect=text(body, "effect"),
        seconds=body.get("tolerationSeconds"),
    )


def _selectors(body: Object) -> tuple[str, ...]:
    return tuple(_kept(text(entry, "cel", "expression")) for entry in children(body, "selectors"))


def _kept(expression: str) -> str:
    """Return an expression, or an empty one if it is too large, so that its result is unknown."""
    return intern(expression) if len(expression.encode()) <= MAX_EXPRESSION else ""


def _device_id(result: Object) -> DeviceID:
    return DeviceID(intern(result["driver"]), intern(result["pool"]), intern(result["device"]))


def _device(device: Object, *, by_device: bool) -> DeviceFacts:
    attributes = child(device, "attributes")
    values = tuple([_attribute(value) for value in attributes.values()])
    capacity = child(device, "capacity")
    return DeviceFacts(
        name=device["name"],
        kind=_kind(
            tuple(attributes),
            orjson.dumps(capacity) if capacity else b"",
            bool(device.get("allowMultipleAllocations")),
            device.get("bindingConditions") is not None,
            None in values or ListValue in map(type, values),
            None in values,
        ),
        values=values,
        taints=_taints(device),
        consumes=_consumes(device),
        place=_place(device) if by_device else None,
    )


@lru_cache(maxsize=1024)
def _kind(
    attributes: tuple[str, ...],
    capacity: bytes,
    shareable: bool,
    binding: bool,
    unusual: bool,
    extra: bool,
) -> DeviceKind:
    """Return the DeviceKind that all similar devices share. It is cached by its parameters, which
    are cheap to compare."""
    found = orjson.loads(capacity or b"{}")
    return once(
        DeviceKind(
            attributes=tuple(map(intern, attributes)),
            capacity=tuple(_capacity(intern(name), value) for name, value in found.items()),
            shareable=shareable,
            binding=binding,
            unusual=unusual,
            extra=extra
            or not all(
                _POLICY_FIELDS.issuperset(child(each, "requestPolicy")) for each in found.values()
            ),
        )
    )


def _taints(body: Object) -> tuple[TaintFacts, ...]:
    """Read a device's or node's taints that pods must tolerate."""
    found = children(body, "taints")
    if not found:
        return ()
    return once(
        tuple(
            TaintFacts(key=text(each, "key"), effect=each["effect"], value=text(each, "value"))
            for each in found
            if each.get("effect") in PREVENTING
        )
    )


def _consumes(device: Object) -> tuple[CounterSetFacts, ...]:
    found = children(device, "consumesCounters")
    return once(tuple(_counter_set(text(each, "counterSet"), each) for each in found))


@lru_cache(maxsize=1024)
def once(facts: Shared) -> Shared:
    """Return the cached facts that equal these, because similar devices share them."""
    return facts


def _capacity(name: str, body: Object) -> CapacityFacts:
    policy = child(body, "requestPolicy")
    span = child(policy, "validRange")
    return CapacityFacts(
        name=name,
        value=text(body, "value"),
        policy=CapacityPolicy(
            default=text(policy, "default") or None,
            valid_values=tuple(str(value) for value in children(policy, "validValues")),
            min=text(span, "min") or None,
            max=text(span, "max") or None,
            step=text(span, "step") or None,
        )
        if policy
        else None,
    )


def _counter_set(name: str, body: Object) -> CounterSetFacts:
    return CounterSetFacts(
        name=intern(name),
        counters=tuple(
            Amount(intern(counter), intern(text(value, "value")))
            for counter, value in child(body, "counters").items()
        ),
        grouped=bool(body.get("compatibilityGroups")),
    )


def amounts(body: Object) -> tuple[Amount, ...]:
    return tuple([Amount(intern(name), intern(str(each))) for name, each in body.items()])


_PLAIN = frozenset(("string", "int", "bool"))


def _attribute(value: Object) -> AttributeFact | None:
    for kind, fact in value.items():
        if kind in _PLAIN:
            return fact
        match kind:
            case "version":
                return _version(fact)
            case "strings" | "ints" | "bools" | "versions":
                return ListValue(kind, tuple(fact))
            case _:
                continue
    return None


@lru_cache(maxsize=1024)
def _version(text: str) -> Version:
    return Version(text)


# ---------------------------------------------------------------- the core API

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"

ADMIN_ACCESS = "resource.kubernetes.io/admin-access"
"""The label on namespaces in which claims may have admin access."""

_SANDBOX = {"True": True, "False": False}


_TOO_MANY_CLAIMS = Placement(
    unread=f"the pod has more than {MAX_POD_CLAIMS} claims, so drakit does not evaluate them"
)


def _conditions(status: Object) -> dict[str, Object]:
    return {text(each, "type"): each for each in children(status, "conditions")}


def project_pod(body: Object) -> PodFacts:
    """Project a Pod."""
    metadata, spec, status = child(body, "metadata"), child(body, "spec"), child(body, "status")
    made = {entry["name"]: entry for entry in children(status, "resourceClaimStatuses")}
    conditions = _conditions(status)
    evicted = conditions.get("DisruptionTarget", {})
    claims, gates = children(spec, "resourceClaims"), children(spec, "schedulingGates")
    placement = _placement(spec) if len(claims) <= MAX_POD_CLAIMS else _TOO_MANY_CLAIMS
    return PodFacts(
        namespace=intern(text(metadata, "namespace")),
        name=metadata["name"],
        uid=metadata["uid"],
        claims=tuple(
            _pod_claim(claim, made.get(claim["name"])) for claim in claims[:MAX_POD_CLAIMS]
        ),
        node=spec.get("nodeName") or None,
        phase=intern(text(status, "phase")),
        gated=bool(gates),
        gates=once(tuple(text(each, "name") for each in gates[:MAX_NAMES])),
        scheduler=intern(name) if (name := text(spec, "schedulerName")) != _OWN_SCHEDULER else "",
        group=intern(_group_of_pod(spec)),
        health=once(tuple(dict.fromkeys(_health(status)))),
        unchecked=once(tuple(_unchecked(spec))),
        deleting=bool(metadata.get("deletionTimestamp")),
        finalizers=finalizers(metadata),
        sandbox=_SANDBOX.get(text(conditions.get("PodReadyToStartContainers", {}), "status")),
        containers=tuple(_container_problems(status))[:MAX_CONTAINERS],
        running_since=_running_since(status),
        failure=": ".join(filter(None, (text(status, "reason"), _message(status)))),
        disruption=intern(text(evicted, "reason")) if text(evicted, "status") == "True" else "",
        scheduling_message=text(conditions.get("PodScheduled", {}), "message"),
        tried="PodScheduled" in conditions,
        nominated=intern(text(status, "nominatedNodeName")),
        extended=() if placement.unread else tuple(_extended_requests(spec)),
        extended_claim=text(status, "extendedResourceClaimStatus", "resourceClaimName") or None,
        placement=placement,
        requests=() if placement.unread else requests_of_pod(spec),
        priority=int(spec.get("priority") or 0),
        preempts=spec.get("preemptionPolicy") != "Never",
    )


_STARTS = ("", "ContainerCreating", "PodInitializing")
"""The waiting reasons of containers that do not have a problem yet."""

_OF_RUNTIME = ("ContainerCannotRun", "StartError")
"""The termination reasons of containers that failed before they ran. Their messages come from the
runtime."""


def _message(of: Object) -> str:
    return words(of, "message", most=MAX_MESSAGE)


def _container_problems(status: Object) -> Iterator[ContainerProblem]:
    for kind in ("initContainerStatuses", "containerStatuses"):
        for each in children(status, kind):
            name, waiting = text(each, "name"), child(each, "state", "waiting")
            ended = child(each, "state", "terminated")
            reason = text(waiting, "reason")
            if reason == "CrashLoopBackOff":
                ended = child(each, "lastState", "terminated") or {"exitCode": "unknown"}
            if ended.get("exitCode"):
                of_runtime = text(ended, "reason") in _OF_RUNTIME
                said = _message(ended) if of_runtime else f"exit code {ended['exitCode']}"
                reasons = (reason, text(ended, "reason"))
                yield ContainerProblem(name, ", ".join(filter(None, reasons)), said)
            elif reason not in _STARTS:
                yield ContainerProblem(name, reason, _message(waiting))


def _running_since(status: Object) -> str:
    statuses = children(status, "containerStatuses")
    started = [text(each, "state", "running", "startedAt") for each in statuses]
    return min(filter(None, started), default="").removesuffix("Z")


def _health(status: Object) -> Iterator[tuple[str, str]]:
    for container in children(status, "containerStatuses"):
        for each in children(container, "allocatedResourcesStatus"):
            for resource in children(each, "resources"):
                if resource.get("health") == "Unhealthy" and resource.get("message"):
                    yield text(each, "name"), words(resource, "message")


_OWN_SCHEDULER = "default-scheduler"


def _group_of_pod(spec: Object) -> str:
    """Return the PodGroup to which a pod belongs (1.35: ``workloadRef``), or the field that refers
    to another group."""
    group, of_1_35 = child(spec, "schedulingGroup"), text(spec, "workloadRef", "podGroup")
    return text(group, "podGroupName") or of_1_35 or next(iter(group), "")


def _unchecked(spec: Object) -> Iterator[str]:
    """Yield the rules of a pod that exclude nodes, but that :mod:`.nodes` does not check."""
    if any(
        each.get("persistentVolumeClaim") or each.get("ephemeral")
        for each in children(spec, "volumes")
    ):
        yield "its volumes"
    if any(
        port.get("hostPort")
        for kind in ("initContainers", "containers")
        for container in children(spec, kind)
        for port in children(container, "ports")
    ):
        yield "its host ports"
    if any(
        child(spec, "affinity", kind).get(_REQUIRED) for kind in ("podAffinity", "podAntiAffinity")
    ):
        yield "its affinity to other pods"
    if any(
        each.get("whenUnsatisfiable") != "ScheduleAnyway"
        for each in children(spec, "topologySpreadConstraints")
    ):
        yield "its topology spread constraints"


def _extended_requests(spec: Object) -> Iterator[ExtendedRequest]:
    for kind in ("initContainers", "containers"):
        for container in children(spec, kind):
            init = kind == "initContainers" and container.get("restartPolicy") != "Always"
            for resource, amount in child(container, "resources", "limits").items():
                if "/" in resource and str(amount).isdecimal() and int(amount):
                    yield ExtendedRequest(
                        text(container, "name"), intern(resource), int(amount), init
                    )


def _placement(spec: Object) -> Placement:
    affinity = child(spec, "affinity", "nodeAffinity").get(_REQUIRED)
    rules = (spec.get("nodeSelector"), affinity, spec.get("tolerations"))
    containers = (*children(spec, "initContainers"), *children(spec, "containers"))
    size = _json_bytes(rules, [each.get("resources") for each in containers])
    if size > MAX_CONTENT:
        what = "node selector, node affinity, tolerations and resources of the pod"
        why = f"{what} have more than {MAX_CONTENT >> 10} KiB, so drakit does not evaluate them"
        return Placement(unread=why)
    placement = Placement(
        node_selector=tuple(sorted(child(spec, "nodeSelector").items())),
        affinity=node_selector(affinity) if affinity is not None else None,
        tolerations=tuple(map(_toleration, children(spec, "tolerations"))),
    )
    return placement if size > MAX_SHARED else once(placement)


def project_node(body: Object) -> NodeFacts:
    """Project a Node."""
    metadata, spec, status = child(body, "metadata"), child(body, "spec"), child(body, "status")
    return NodeFacts(
        name=metadata["name"],
        uid=metadata["uid"],
        labels={intern(k): intern(v) for k, v in child(metadata, "labels").items()},
        taints=_taints(spec),
        unschedulable=bool(spec.get("unschedulable")),
        ready=text(_conditions(status).get("Ready", {}), "status") == "True",
        allocatable=amounts(child(status, "allocatable")),
        kubelet=intern(text(status, "nodeInfo", "kubeletVersion")),
        runtime=intern(text(status, "nodeInfo", "containerRuntimeVersion")),
        declared=once(tuple(status.get("declaredFeatures") or ())),
    )


def project_namespace(body: Object) -> NamespaceFacts:
    """Project a Namespace."""
    metadata = child(body, "metadata")
    return NamespaceFacts(
        name=metadata["name"],
        uid=metadata["uid"],
        admin_access=child(metadata, "labels").get(ADMIN_ACCESS) == "true",
    )


def project_quota(body: Object) -> QuotaFacts:
    """Project the limits of a ResourceQuota for claims. Quotas with scopes do not count claims."""
    metadata, spec, status = child(body, "metadata"), child(body, "spec"), child(body, "status")
    scoped = bool(spec.get("scopes") or spec.get("scopeSelector"))
    hard, used = (
        {name: amount for name, amount in child(status, key).items() if _OF_CLAIMS in name}
        for key in ("hard", "used")
    )
    return QuotaFacts(
        namespace=intern(text(metadata, "namespace")),
        name=metadata["name"],
        uid=metadata["uid"],
        hard=() if scoped else amounts(hard),
        used=() if scoped else amounts(used),
    )


_OF_CLAIMS = ".resource.k8s.io"
"""The part of a quota's resource name which shows that the quota limits claims."""


def _pod_claim(claim: Object, made: Object | None) -> PodClaim:
    generated = text(made, "resourceClaimName") if made is not None else ""
    return PodClaim(
        name=claim["name"],
        claim=claim.get("resourceClaimName") or None,
        template=claim.get("resourceClaimTemplateName") or None,
        generated=generated or None,
        needless=made is not None and not generated,
    )
