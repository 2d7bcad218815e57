"""
Checks the Events that drakit writes during a run.

An Event is correct if an entry in :data:`EXPECTED` explains it: by the spec that it belongs to, or
by the state of the cluster at that time, because specs run concurrently. Any other Event is a bug
in drakit, or needs an entry here. Pure functions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from .report import Spec

CONTROLLER = "drakit.dev/"
"""The prefix of the reporting controller in all of our Events."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """One Event of drakit."""

    reason: str
    kind: str
    namespace: str
    name: str
    note: str
    time: str
    controller: str
    spec: str = ""
    """The name of the spec whose object the Event is about. Empty if unknown."""

    @property
    def about(self) -> tuple[str, str, str]:
        """The object that the Event is about."""
        return self.kind, self.namespace, self.name


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Events that are correct in some specs."""

    spec: str
    """A regular expression for a part of the spec's name."""

    reason: str
    """A regular expression for the whole reason."""

    kinds: tuple[str, ...]
    note: str
    """A regular expression for the whole note."""

    why: str

    after: str = ""
    """A regular expression for the whole note of an earlier Event about the same object."""

    beside: str = ""
    """A regular expression for a part of the name of a spec that was running at that time, or had
    ended less than :data:`LATE_SECONDS` before."""

    def covers(self, event: Written) -> bool:
        return (
            re.search(self.spec, event.spec) is not None
            and re.fullmatch(self.reason, event.reason) is not None
            and event.kind in self.kinds
            and re.fullmatch(self.note, event.note) is not None
        )

    def is_due(self, event: Written, events: Sequence[Written], specs: Sequence[Spec]) -> bool:
        """Return whether the state of the cluster explains the Event."""
        earlier = not self.after or any(
            re.fullmatch(self.after, each.note) and each.about == event.about
            for each in events
            if each.time < event.time
        )
        return earlier and (not self.beside or any(self._ran(spec, event) for spec in specs))

    def _ran(self, spec: Spec, event: Written) -> bool:
        if not (re.search(self.beside, spec.name) and spec.started and spec.ended and event.time):
            return False
        late = timedelta(seconds=LATE_SECONDS)
        return spec.started <= datetime.fromisoformat(event.time) <= spec.ended + late


WAITING = ("Pod", "ResourceClaim")

INJECTED = r"claim \S+: driver \S+:? its .*(injected error|the spec lets \S+ fail).*"
"""The note about a call that a spec lets fail, whatever the call. Nothing else has this error."""

LATE_SECONDS = 60
"""A pod waits for a while before it is reported."""


EXPECTED = (
    Expected(
        spec="",
        reason="DeviceClassMissing",
        kinds=("ResourceClaimTemplate",),
        note=r'DeviceClass "dra-\d+-class\S*" of ResourceClaimTemplate .* does not exist; .*',
        why="A spec deletes its class first, and its templates only with their namespace.",
    ),
    Expected(
        spec="extended resource|ExtendedResourceClaimStatus",
        reason="DeviceClassMissing",
        kinds=("ResourceClaim",),
        note=r'(?!.*correct deviceClassName).*DeviceClass "dra-\d+-class\S*" .* does not exist; .*',
        why="A spec deletes its class before the pod and its claim.",
    ),
    Expected(
        spec="must run a pod with extended resource with resource quota",
        reason="DeviceClassMissing",
        kinds=("ResourceClaim",),
        note=r'DeviceClass "dra-\d+-class\S*" of ResourceClaim dra-\d+/external-claim, .*',
        why="The spec deletes its class before the claim, which it wrote.",
    ),
    Expected(
        spec="multiple drivers write metadata",
        reason="DeviceClassMissing",
        kinds=("ResourceClaim",),
        note=r'DeviceClass "dra-\d+-shared-class" of ResourceClaim dra-\d+/multi-driver-claim, .*',
        why="The spec deletes its class before the claim, which it wrote.",
    ),
    Expected(
        spec="CRUD Tests",
        reason="DeviceClassMissing",
        kinds=("ResourceClaim", "ResourceClaimTemplate"),
        note=r'DeviceClass "dra\.example\.com" of .* does not exist; .*',
        why="The objects of these specs name a class that nobody creates.",
    ),
    Expected(
        spec="",
        reason="NoResourceSlices|PluginGone|Leftovers",
        kinds=("DeviceDriver",),
        note=r"the (node )?plugin on .* (publishes no ResourceSlices|is gone); run .*|"
        r"the driver is unavailable, but its objects remain: .*",
        why="A spec ends its driver, and deletes its slices, before its other objects are gone.",
    ),
    Expected(
        spec="",
        reason="Published",
        kinds=("DeviceDriver",),
        note="all pools are complete",
        why="The node's report, which listed no slices, goes before the object of the driver.",
        after=r"the plugin on .* publishes no ResourceSlices; run .*",
    ),
    Expected(
        spec="",
        reason="PrepareFailed|UnprepareFailed",
        kinds=("ResourceClaim",),
        note=INJECTED,
        why="A spec lets the driver fail.",
    ),
    Expected(
        spec="",
        reason="Prepared",
        kinds=("ResourceClaim",),
        note=r"claim \S+: driver \S+ has now .*",
        after=INJECTED,
        why="A spec let the driver fail, and it succeeds now.",
    ),
    Expected(
        spec="must keep pod in pending state if NodePrepareResources times out",
        reason="PoolGone",
        kinds=("Pod",),
        note=r".* pool some-pool of driver \S+, from which claim .*, is no longer published; .*",
        why="The specs of a node allocate devices that nobody publishes.",
    ),
    Expected(
        spec="must not run a pod if a claim is not ready",
        reason="ClaimNotAllocated",
        kinds=("Pod",),
        note=r".* its claim external-claim is not allocated; the scheduler ignores a pod that .*",
        why="The spec sets nodeName, so that nobody allocates the claim.",
    ),
    *(
        Expected(
            spec=spec,
            reason="DevicesAllocated",
            kinds=WAITING,
            note=note,
            why="The spec lets a pod wait until another pod has released its device.",
        )
        for spec, note in (
            ("supports reusing resources", r"(.* )?the only device of .* is allocated to claim .*"),
            (
                "must prevent overcommitment",
                r"(.* )?request .* asks for 10 devices: all 10 devices of .*",
            ),
            ("must consume and free up counters", r".* 1 is allocated to .*"),
            (
                "must allow multiple allocations",
                r".* has too little memory left( \(.*\))?, because shares .*",
            ),
        )
    ),
    Expected(
        spec="No(Schedule|Execute) keeps pod",
        reason="DevicesTainted",
        kinds=WAITING,
        note=r"(.* )?all 10 devices of .* are tainted with example\.com/taint, which .*",
        why="All devices have a taint that the pod does not tolerate.",
    ),
    Expected(
        spec="",
        reason="Devices(Tainted|Allocated)",
        kinds=WAITING,
        note=r".*tainted with .*test\.example\.com/evict.*",
        beside="DeviceTaintRule evicts pod",
        why="A rule of a spec that runs at the same time taints the devices.",
    ),
    Expected(
        spec="DeviceTaintRule evicts pod",
        reason="EvictionByDeviceTaint",
        kinds=WAITING,
        note=r".* has the taint test\.example\.com/evict(=\S+)? with effect NoExecute, .*",
        why="The spec taints the device of a running pod.",
    ),
    Expected(
        spec="retries pod scheduling after updating device class",
        reason="NoDevicePublished",
        kinds=WAITING,
        note=r".*no node publishes a device of DeviceClass .*",
        why="The class has the selector false until the pod was found unschedulable.",
    ),
    Expected(
        spec="runs pod after driver starts",
        reason="NoDevicePublished",
        kinds=WAITING,
        note=r".*no node publishes a device of DeviceClass .*",
        why="The driver starts after the pod was found unschedulable.",
    ),
    Expected(
        spec="retries pod scheduling after creating device class",
        reason="DeviceClassMissing",
        kinds=WAITING,
        note=r'.*DeviceClass "dra-\d+-class-b" of .* does not exist; .*',
        why="The class is created after the pod was found unschedulable.",
    ),
)


def watched(text: str) -> Iterator[Mapping[str, Any]]:
    """Yield the Events in the output of `kubectl get --watch --output-watch-events -o json`."""
    decoder, place = json.JSONDecoder(), 0
    while True:
        while place < len(text) and text[place].isspace():
            place += 1
        if place >= len(text):
            return
        try:
            change, place = decoder.raw_decode(text, place)
        except ValueError:
            return  # the last one is half written
        if change["type"] in ("ADDED", "MODIFIED"):
            yield change["object"]


def written(events: Iterator[Mapping[str, Any]], specs: Sequence[Spec]) -> list[Written]:
    """Return drakit's Events, each once, with the specs that they belong to. Excludes Events of
    specs that ended before these began, because a watch starts with all existing Events."""
    found = {
        event["metadata"]["uid"]: _written(event, specs)
        for event in events
        if (event.get("reportingController") or "").startswith(CONTROLLER)
    }
    begun = min((spec.started for spec in specs if spec.ran and spec.started), default=None)
    return sorted(
        (event for event in found.values() if not _is_earlier(event, begun)),
        key=lambda event: event.time,
    )


def _is_earlier(event: Written, begun: datetime | None) -> bool:
    """Return whether an Event about an object of another run of specs is older than this run."""
    of_spec = _spec_namespace(event.namespace, event.name)
    if not of_spec or event.spec or begun is None or not event.time:
        return False
    return datetime.fromisoformat(event.time) < begun


def _spec_namespace(namespace: str, name: str) -> str:
    """Return the namespace of the spec that has an object, or an empty string. Cluster-scoped
    objects of a spec are named after the spec's namespace."""
    found = re.match(r"dra-(node-)?\d+", namespace or name)
    return found[0] if found else ""


def _written(event: Mapping[str, Any], specs: Sequence[Spec]) -> Written:
    about, time = event["regarding"], event.get("eventTime") or ""
    namespace = about.get("namespace", "")
    return Written(
        reason=event["reason"],
        kind=about["kind"],
        namespace=namespace,
        name=about["name"],
        note=event.get("note", ""),
        time=time,
        controller=event["reportingController"],
        spec=_owner(specs, namespace=namespace or _spec_namespace("", about["name"]), time=time),
    )


def _owner(specs: Sequence[Spec], *, namespace: str, time: str) -> str:
    """Return the spec of a namespace. For an object without a namespace, return the only spec that
    was running at that time."""
    for spec in specs:
        if namespace in spec.namespaces:
            return spec.name
    if namespace or not time:
        return ""
    at = datetime.fromisoformat(time)
    running = [
        spec.name
        for spec in specs
        if spec.ran and spec.started and spec.ended and spec.started <= at <= spec.ended
    ]
    return running[0] if len(running) == 1 else ""


def unexpected(
    events: Sequence[Written], specs: Sequence[Spec], expected: Sequence[Expected] = EXPECTED
) -> list[Written]:
    """Return the Events that no entry covers. `specs` are all specs of the run."""
    return [
        event
        for event in events
        if not any(entry.covers(event) and entry.is_due(event, events, specs) for entry in expected)
    ]


def as_lines(events: Sequence[Written]) -> str:
    """Return one JSON object per line."""
    return "".join(f"{json.dumps(asdict(event))}\n" for event in events)
