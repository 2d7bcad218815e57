"""
What Kubernetes' own allocator is asked to confirm an explanation, and whether it does.

The search of drakit counts devices, names the reason and finds remedies. Whether the claims can be
allocated on a node is decided by Kubernetes, by rules that differ between releases. So an answer is
certain only where both agree. The allocator gets the objects as the API server has them, with
fields that drakit does not know.

It must not know how objects are read, or who runs the allocator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from drakit_explain.model import DeviceID
from drakit_explain.verdicts import Verdict, VerdictOutcome, VerdictQuestion, without_config
from drakit_formats.resource.objects import Object, child, children, text

_SLICE_FIELDS = frozenset(
    {
        "driver",
        "pool",
        "nodeName",
        "nodeSelector",
        "allNodes",
        "devices",
        "perDeviceNodeSelection",
        "sharedCounters",
        # These two change no verdict.
        "partitionTypeAttribute",
        "skipNodeOperations",
    }
)
_DEVICE_FIELDS = frozenset(
    {
        "name",
        "attributes",
        "capacity",
        "consumesCounters",
        "nodeName",
        "nodeSelector",
        "allNodes",
        "taints",
        "bindsToNode",
        "bindingConditions",
        "bindingFailureConditions",
        "allowMultipleAllocations",
    }
)
_VALUE_FIELDS = frozenset(
    {"bool", "int", "string", "version", "bools", "ints", "strings", "versions"}
)
_POLICY_FIELDS = frozenset({"default", "validValues", "validRange"})
_REQUEST_FIELDS = frozenset({"name", "exactly", "firstAvailable"})
_EXACT_FIELDS = frozenset(
    {
        "name",
        "deviceClassName",
        "selectors",
        "allocationMode",
        "count",
        "adminAccess",
        "tolerations",
        "capacity",
    }
)
_CONSTRAINT_FIELDS = frozenset({"requests", "matchAttribute", "distinctAttribute"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Confirmation:
    """A question to the allocator, apart from the objects that must be read for it."""

    nodes: tuple[Object, ...]
    expected: tuple[VerdictOutcome | None, ...]
    """What the search found on each node; None if it only excludes that the claims fit."""

    claims: tuple[str | Object, ...]
    """The claims to allocate: the path of each, of its template, or what the scheduler makes."""

    classes: tuple[str, ...]
    """Paths."""

    slices: tuple[str, ...]
    """Paths of all slices of the pools of these nodes."""

    in_use: tuple[Object, ...]
    taints: Mapping[DeviceID, Sequence[Object]]
    """Those that DeviceTaintRules add."""

    all_free: bool = False
    """Whether devices count as if no claim held them and they had no taints."""

    minor: int | None
    """The minor release of Kubernetes 1 whose allocator decides; None if it is unknown."""

    def paths(self) -> list[str]:
        """Return the paths of the objects that the question needs."""
        claims = [each for each in self.claims if isinstance(each, str)]
        return list(dict.fromkeys((*claims, *self.classes, *self.slices)))

    def question(self, read: Mapping[str, Object], gates: Mapping[str, bool]) -> VerdictQuestion:
        """
        Return the question to the allocator.

        :param read: the objects, by path.
        """
        return VerdictQuestion(
            nodes=self.nodes,
            claims=[
                _claim(read[each] if isinstance(each, str) else each, number)
                for number, each in enumerate(self.claims)
            ],
            classes=[read[each] for each in self.classes],
            slices=[self._slice(read[each]) for each in self.slices],
            in_use=self.in_use,
            gates=gates,
        )

    def refuted(self, verdicts: Sequence[Verdict]) -> str:
        """Return where the allocator says something else, as a clause; empty if it agrees."""
        for node, expected, verdict in zip(self.nodes, self.expected, verdicts, strict=True):
            if not _agrees(verdict.outcome, expected):
                name, words = node["metadata"]["name"], _WORDS[verdict.outcome]
                said = f": {verdict.text}" if verdict.text else ""
                return (
                    f"drakit finds that the claims {_FOUND[expected]} on node {name}, and "
                    f"Kubernetes' allocator {words}{said}"
                )
        return ""

    def _slice(self, body: Object) -> Object:
        """Return a slice with the taints that DeviceTaintRules add to its devices."""
        if not (self.taints or self.all_free):
            return body
        driver, pool = text(body, "spec", "driver"), text(body, "spec", "pool", "name")
        devices = [
            {
                **each,
                "taints": []
                if self.all_free
                else [*children(each, "taints"), *self._added(driver, pool, each)],
            }
            for each in children(body, "spec", "devices")
        ]
        return {**body, "spec": {**child(body, "spec"), "devices": devices}}

    def _added(self, driver: str, pool: str, device: Object) -> Sequence[Object]:
        return self.taints.get(DeviceID(driver, pool, text(device, "name")), ())


def _agrees(found: VerdictOutcome, expected: VerdictOutcome | None) -> bool:
    if expected is None:
        return found is not VerdictOutcome.ALLOCATED
    return found is expected


_FOUND = {
    None: "cannot be allocated",
    VerdictOutcome.ALLOCATED: "can be allocated",
    VerdictOutcome.UNAVAILABLE: "cannot be allocated",
    VerdictOutcome.FATAL: "make the scheduler give up the pod",
}

_WORDS = {
    VerdictOutcome.ALLOCATED: "finds devices there",
    VerdictOutcome.UNAVAILABLE: "finds none there",
    VerdictOutcome.FATAL: "fails",
    VerdictOutcome.UNDECIDED: "has no answer",
}


def needed_of(body: Object) -> Object:
    """
    Return what a question needs of an object.

    The rest is not kept while the other objects are read: managed fields, annotations and
    parameters of drivers can take 20 MiB of each claim of a pod.
    """
    metadata = {"name": text(body, "metadata", "name")}
    return {"metadata": metadata, "spec": _needed_of(child(body, "spec"))}


def _needed_of(spec: Object) -> Object:
    if "spec" in spec:  # of a template
        return {"spec": _needed_of(child(spec, "spec"))}
    if isinstance(devices := spec.get("devices"), dict):  # of a claim
        return {**spec, "devices": without_config(cast("Object", devices))}
    return spec


def unknown_fields(question: VerdictQuestion) -> str:
    """
    Name a field of a question that this version of drakit does not know; empty if there is none.

    Even if the verdicts agree, such a field may be the cause.
    """
    fields = (
        *(each for body in question.slices for each in _of_slice(body)),
        *(each for body in question.claims for each in _of_claim(body)),
    )
    return next(iter(fields), "")


def _of_slice(body: Object) -> Iterator[str]:
    where = f"of ResourceSlice {text(body, 'metadata', 'name')}"
    yield from _beyond(child(body, "spec"), _SLICE_FIELDS, where)
    for device in children(body, "spec", "devices"):
        yield from _beyond(device, _DEVICE_FIELDS, f"of device {text(device, 'name')} {where}")
        for key in (attributes := child(device, "attributes")):
            yield from _beyond(child(attributes, key), _VALUE_FIELDS, f"of attribute {key} {where}")
        for key in (capacity := child(device, "capacity")):
            policy = child(capacity, key, "requestPolicy")
            yield from _beyond(policy, _POLICY_FIELDS, f"of capacity {key} {where}")


def _of_claim(body: Object) -> Iterator[str]:
    for request in children(body, "spec", "devices", "requests"):
        where = f"of request {text(request, 'name')}"
        yield from _beyond(request, _REQUEST_FIELDS, where)
        for exact in (child(request, "exactly"), *children(request, "firstAvailable")):
            yield from _beyond(exact, _EXACT_FIELDS, where)
    for constraint in children(body, "spec", "devices", "constraints"):
        yield from _beyond(constraint, _CONSTRAINT_FIELDS, "of a constraint")


def _beyond(body: Object, known: Collection[str], where: str) -> Iterator[str]:
    return (f"field {name} {where}" for name in body if name not in known)


def _claim(body: Object, number: int) -> Object:
    """Return a claim without the names that differ between equal pods."""
    spec = child(body, "spec")
    if "spec" in spec:  # of a template
        spec = child(spec, "spec")
    metadata = {"namespace": "default", "name": f"claim-{number}", "uid": f"claim-{number}"}
    return {"metadata": metadata, "spec": spec}
