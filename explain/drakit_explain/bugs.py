"""
Bugs in Kubernetes and container runtimes that affect claims, by release.

Each scheduler row was verified in the source of the release with the fix and of the release before
it, or, if there is no fix, of the newest patch release (`READ`): the scheduler's plugin, the taint
tracker and the eviction in ``k8s.io/kubernetes``, and the allocators in
``k8s.io/dynamic-resource-allocation``. Rows for kubelets and runtimes follow the release notes and
the pull requests. Later releases are not assessed, and a vendor's packages can contain fixes from
later releases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from drakit_explain.codes import Code
from drakit_explain.devices import DeviceFacts
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    DeviceID,
    NodeFacts,
    PodFacts,
    PoolID,
    Request,
    SliceFacts,
    TaintRuleFacts,
    TemplateFacts,
    exact_of,
)
from drakit_explain.world import World

READ: Mapping[int, int] = {34: 13, 35: 10, 36: 6, 37: 2, 38: 0}
"""The newest patch release that was verified, keyed by minor version (1.x). For 1.38, the changelog
of the second alpha release was read."""

KUBELETS_READ: Mapping[int, int] = {35: 4, 36: 3, 37: 2}
"""The newest patch release whose kubelet was verified, keyed by minor version."""

ISSUES = "https://github.com/kubernetes/kubernetes/issues/"
PULLS = "https://github.com/kubernetes/kubernetes/pull/"

MAX_COUNT = 2**63 - 1

Wanted = ClaimFacts | TemplateFacts
Touched = Callable[[World], str | None]
"""Returns an object that a bug can affect, as its kind and name."""

_VERSION = re.compile(r"v?1\.(\d+)\.(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bug:
    """A bug, and the releases that have it."""

    what: str
    """The incorrect behavior of Kubernetes, as a clause."""

    link: str
    fixes: Mapping[int, int | None]
    """The first patch release without the bug, keyed by minor version. None if the release in
    `READ` still has the bug. Minor versions that are missing here do not have the bug."""

    touched: Touched
    waits: bool = False
    """Whether a pod can stay pending even though its devices are available."""

    allocates: bool = False
    """Whether a claim can get devices other than the requested ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundBug:
    """A bug in the cluster's release that can affect one of the cluster's objects."""

    object: str
    what: str
    fixed: str
    """The first release with a fix, such as ``Kubernetes 1.36.5``. Empty if none is known."""

    link: str

    @property
    def fix(self) -> str:
        """Return the remedy, with the link."""
        fix = f"upgrade to {self.fixed}" if self.fixed else "no release has a fix yet"
        return f"{fix} ({self.link})"


def known_bugs(version: str, world: World, matches: Callable[[Bug], bool] = bool) -> list[FoundBug]:
    """Return the known bugs in a version, such as ``v1.36.3``, that can affect a cluster's
    objects."""
    match = _VERSION.match(version)
    if match is None:
        return []
    minor, patch = int(match[1]), int(match[2])
    return [
        FoundBug(
            object=found,
            what=f"in Kubernetes {version.removeprefix('v')}, {bug.what}",
            fixed=_fixed_in(bug.fixes, minor),
            link=bug.link,
        )
        for bug in BUGS
        if matches(bug)
        and _has(bug.fixes, minor, patch)
        and (found := bug.touched(world)) is not None
    ]


def _has(
    fixes: Mapping[int, int | None], minor: int, patch: int, *, read: Mapping[int, int] = READ
) -> bool:
    if minor not in fixes:
        return False
    fix = fixes[minor]
    return patch <= read[minor] if fix is None else patch < fix


def _fixed_in(fixes: Mapping[int, int | None], minor: int) -> str:
    for each in range(minor, max(READ) + 1):
        if each not in fixes:
            return f"Kubernetes 1.{each}"
        if (patch := fixes[each]) is not None:
            return f"Kubernetes 1.{each}.{patch}"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeBug:
    """A bug in the kubelet or container runtime of a node."""

    what: str
    link: str
    kubelets: Mapping[int, int | None] = field(default_factory=dict[int, "int | None"])
    """The same as :attr:`Bug.fixes`. Empty for a bug in a runtime."""

    runtimes: str = ""
    """A regular expression for the runtimes and versions that have the bug."""

    fixed: str = ""
    """The first release of the runtime with a fix."""

    touches: Callable[[NodeFacts, World], bool]
    """Returns whether the bug can affect objects on the node, regardless of its pods."""

    codes: frozenset[Code] = frozenset()
    """The reasons that the bug can cause. If empty, containers start without a device."""

    of_pod: Callable[[PodFacts], bool] = bool
    """Returns whether the bug can affect a given pod with claims."""


def bugs_of_node(
    node: NodeFacts, world: World, pod: PodFacts | None = None
) -> Iterator[tuple[NodeBug, FoundBug]]:
    """Return the known bugs in a node's kubelet and runtime that can affect a pod. Without a pod,
    return those that can affect any object on the node."""
    match = _VERSION.match(node.kubelet)
    minor, patch = (int(match[1]), int(match[2])) if match else (-1, -1)
    name, _, version = node.runtime.partition("://")
    for bug in NODE_BUGS:
        if bug.runtimes:
            has, component = re.match(bug.runtimes, node.runtime) is not None, f"{name} {version}"
            fixed = bug.fixed
        else:
            has = _has(bug.kubelets, minor, patch, read=KUBELETS_READ)
            component = f"kubelet {node.kubelet.removeprefix('v')}"
            fixed = _fixed_in(bug.kubelets, minor)
        if has and (bug.touches(node, world) if pod is None else bug.of_pod(pod)):
            what = f"{component} on node {node.name} {bug.what}"
            yield (
                bug,
                FoundBug(object=f"Node {node.name}", what=what, fixed=fixed, link=bug.link),
            )


def bug_behind(pod: PodFacts, code: Code | None, world: World) -> str:
    """
    Return the known bugs on a pod's node that can cause a reason, as clauses.

    :param code: the reason. None for a running pod, which may lack a device.
    """
    node = world.node(pod.node or "")
    if node is None or not (pod.claims or pod.extended_claim):
        return ""
    return "; ".join(
        f"{found.what}: {found.fix}"
        for bug, found in bugs_of_node(node, world, pod)
        if (code in bug.codes if code is not None else not bug.codes)
    )


# ---------------------------------------------------------------- the objects


def _named(of: Wanted) -> str:
    return f"{of.reference.kind} {of.namespace}/{of.name}"


def _always(_: World) -> bool:
    return True


def _wanted(
    matches: Callable[[Wanted], bool], *, beside: Callable[[World], bool] = _always
) -> Touched:
    """Return a function that finds an affected template or claim. Templates come first, because a
    claim from a template has the same requests."""

    def find(world: World) -> str | None:
        if not beside(world):
            return None
        wanted = chain(world.of(TemplateFacts).values(), world.of(ClaimFacts).values())
        return next((_named(each) for each in wanted if matches(each)), None)

    return find


def _request(
    matches: Callable[[Request], bool], *, beside: Callable[[World], bool] = _always
) -> Touched:
    return _wanted(lambda of: any(map(matches, exact_of(of.requests))), beside=beside)


def _claim(matches: Callable[[ClaimFacts, World], bool]) -> Touched:
    def find(world: World) -> str | None:
        claims = world.of(ClaimFacts).values()
        return next((_named(each) for each in claims if matches(each, world)), None)

    return find


def _partition(matches: Callable[[DeviceFacts], bool]) -> Touched:
    """Return a function that finds the slice of a device that consumes counters."""

    def find(world: World) -> str | None:
        for of in _with_counters(world):
            if any(each.consumes and matches(each) for each in of.devices):
                return f"ResourceSlice {of.name}"
        return None

    return find


def _rule(matches: Callable[[TaintRuleFacts], bool]) -> Touched:
    def find(world: World) -> str | None:
        rules = world.of(TaintRuleFacts).values()
        return next((f"DeviceTaintRule {each.name}" for each in rules if matches(each)), None)

    return find


def _with_counters(world: World) -> Iterator[SliceFacts]:
    return (each for each in world.slices() if each.devices.consumes)


def _has_counters(world: World) -> bool:
    return any(True for _ in _with_counters(world))


def _has_shareable(world: World) -> bool:
    return any(group.kind.shareable for each in world.slices() for group in each.devices.groups)


def _sum_too_large(of: Wanted) -> bool:
    least = sum(min(each.count for each in exact_of([request])) for request in of.requests)
    return least > MAX_COUNT


def _rejected_with_counters(world: World) -> str | None:
    tainted = _partition(lambda device: bool(device.taints))
    constrained = _wanted(lambda of: bool(of.constraints), beside=_has_counters)
    return tainted(world) or constrained(world)


def _pools_of_one_name(world: World) -> str | None:
    seen: dict[str, PoolID] = {}
    for each in world.slices():
        if each.counter_sets and seen.setdefault(each.pool, each.of_pool) != each.of_pool:
            return f"ResourceSlice {each.name}"
    return None


def _shareable_beside_others(world: World) -> str | None:
    for of in world.slices():
        if len(of.devices) > 1 and any(group.kind.shareable for group in of.devices.groups):
            return f"ResourceSlice {of.name}"
    return None


def _later_alternative_for_all(of: Wanted) -> bool:
    return any(each.every for request in of.requests for each in request.alternatives[1:])


def _distinct(of: Wanted) -> bool:
    several = any(each.every or each.count > 1 for each in exact_of(of.requests))
    return several and any(each.distinct for each in of.constraints)


def _used_beside_templates(claim: ClaimFacts, world: World) -> bool:
    return claim.allocated and claim.owner_pod is None and bool(world.of(TemplateFacts))


def _published(devices: Iterable[DeviceID], world: World) -> Iterator[tuple[DeviceID, DeviceFacts]]:
    for device in devices:
        for of in world.slices_of_pool(device.of_pool):
            if (each := of.devices.named(device.device)) is not None:
                yield device, each


def _evicting(claim: ClaimFacts, world: World) -> bool:
    """Return whether a claim for extended resources has a device whose taint evicts pods."""
    return claim.for_extended and any(
        taint.effect == "NoExecute"
        for device, facts in _published(claim.devices, world)
        for taint in world.taints(device, facts)
    )


def _shares_of_unshared(claim: ClaimFacts, world: World) -> bool:
    shared = {each.device for each in claim.shares}
    return any(not facts.kind.shareable for _, facts in _published(shared, world))


def _has_slices(node: NodeFacts, world: World) -> bool:
    return bool(world.slices_of_node(node.name))


def _has_two_drivers(node: NodeFacts, world: World) -> bool:
    return len({each.driver for each in world.slices_of_node(node.name)}) > 1


def _had_device_plugin(node: NodeFacts, world: World) -> bool:
    """Return whether a device plugin registered a resource that a class provides."""
    names = {each.name for each in node.allocatable}
    return any(each.extended_resource in names for each in world.of(ClassFacts).values())


# ---------------------------------------------------------------- the bugs

BUGS: tuple[Bug, ...] = (
    Bug(
        what="kube-scheduler panics when the requests of a claim ask for more devices than a "
        "64-bit number can hold",
        link=f"{ISSUES}141323",
        fixes={34: 12, 35: 9, 36: 5, 37: 1},
        touched=_wanted(_sum_too_large),
    ),
    Bug(
        what="kube-scheduler panics when a request for all devices selects a device that consumes "
        "counters",
        link=f"{ISSUES}138882",
        fixes={35: 6, 36: 2},
        touched=_request(lambda each: each.every, beside=_has_counters),
    ),
    Bug(
        what="kube-scheduler panics, or ignores changes, when there are DeviceTaintRules",
        link=f"{PULLS}139681",
        fixes={36: 3},
        touched=_rule(lambda _: True),
    ),
    Bug(
        what="kube-scheduler can allocate a device twice when it schedules many pods at once",
        link=f"{PULLS}136269",
        fixes={34: 4, 35: 1},
        touched=_claim(lambda claim, _: claim.allocated),
    ),
    Bug(
        what="kube-scheduler forgets the counters that allocated shares of a device consume, so it "
        "can allocate devices together that exclude each other",
        link=f"{ISSUES}139034",
        fixes={34: None, 35: None, 36: 2},
        touched=_partition(lambda device: device.kind.shareable),
    ),
    Bug(
        what="kube-scheduler keeps the counters of a device reserved that it rejects because of a "
        "taint or a constraint, so a pod can wait although its devices are free",
        link=f"{ISSUES}140436",
        fixes={34: None, 35: None, 36: 3},
        touched=_rejected_with_counters,
        waits=True,
    ),
    Bug(
        what="kube-scheduler adds up the counters of pools with the same name, even if "
        "they are of different drivers",
        link=f"{ISSUES}140434",
        fixes={35: None, 36: 4},
        touched=_pools_of_one_name,
        waits=True,
    ),
    Bug(
        what="kube-scheduler reserves the counters of a device again for a request with admin "
        "access, so the request can fail",
        link=f"{ISSUES}140729",
        fixes={34: None, 35: None, 36: None, 37: None, 38: None},
        touched=_request(lambda each: each.admin_access, beside=_has_counters),
        waits=True,
    ),
    Bug(
        what="kube-scheduler checks the capacity of the first device in a slice instead of the "
        "selected device, so a pod can wait although a shared device has enough capacity",
        link=f"{ISSUES}133705",
        fixes={34: None},
        touched=_shareable_beside_others,
        waits=True,
    ),
    Bug(
        what="kube-scheduler can find no devices for a second or later alternative that asks for "
        "all devices",
        link=f"{PULLS}137347",
        fixes={34: None, 35: None},
        touched=_wanted(_later_alternative_for_all),
        waits=True,
    ),
    Bug(
        what="kube-scheduler can allocate devices with the same value to a request for several "
        "devices with the constraint distinctAttribute",
        link=f"{ISSUES}140438",
        fixes={34: None, 35: None, 36: None},
        touched=_wanted(_distinct),
        allocates=True,
    ),
    Bug(
        what="a request for all devices leaves out shared devices with too little capacity",
        link=f"{PULLS}140769",
        fixes={35: None, 36: None},
        touched=_request(lambda each: each.every, beside=_has_shareable),
        allocates=True,
    ),
    Bug(
        what="kube-scheduler tries no other node for a request for all devices when a pool on one "
        "node is incomplete or invalid",
        link=f"{ISSUES}141829",
        fixes={34: None, 35: None, 36: None, 37: None},
        touched=_request(lambda each: each.every, beside=lambda world: bool(world.not_ready())),
    ),
    Bug(
        what="a pod can stay pending if one of its claims is allocated and another one is not",
        link=f"{PULLS}139017",
        fixes={35: 6, 36: 2},
        touched=_claim(_used_beside_templates),
        waits=True,
    ),
    Bug(
        what="kube-scheduler finds no device for a capacity that is requested by its full name, if "
        "the driver publishes the name without its domain",
        link=f"{PULLS}142202",
        fixes={34: None, 35: None, 36: None, 37: None},
        touched=_request(lambda each: any("/" in amount.name for amount in each.capacity)),
    ),
    Bug(
        what="kube-scheduler can allocate a whole device while claims have shares of it, after "
        "its driver has ended the sharing",
        link=f"{PULLS}140798",
        fixes={34: None, 35: None, 36: None, 37: None},
        touched=_claim(_shares_of_unshared),
    ),
    Bug(
        what="kube-scheduler applies a DeviceTaintRule without deviceSelector to all devices, "
        "although it selects none",
        link=f"{ISSUES}141620",
        fixes={34: None, 35: None, 36: None, 37: 1},
        touched=_rule(lambda rule: not rule.selective),
    ),
    Bug(
        what="a NoExecute taint evicts pods immediately, even if their requests tolerate it, "
        "because kube-scheduler does not copy tolerations into allocations",
        link=f"{PULLS}134479",
        fixes={34: None},
        touched=_request(
            lambda each: any(one.effect in ("", "NoExecute") for one in each.tolerations)
        ),
    ),
    Bug(
        what="a NoExecute taint does not evict pods that use its device as an extended resource",
        link=f"{ISSUES}141290",
        fixes={34: None, 35: None, 36: None, 37: 2},
        touched=_claim(_evicting),
    ),
)

_STARTS = frozenset({Code.NOT_PREPARED, Code.POD_NOT_STARTED})

NODE_BUGS: tuple[NodeBug, ...] = (
    NodeBug(
        what="loses its connection to a driver that gets no call for 30 minutes: pods stay in "
        "ContainerCreating or Terminating without an Event until the kubelet is restarted",
        link=f"{ISSUES}133920",
        kubelets={34: 2},
        touches=_has_slices,
        codes=frozenset({Code.NOT_PREPARED, Code.NOT_UNPREPARED}),
    ),
    NodeBug(
        what="does not prepare the other claims of a pod if one of them is already prepared for "
        "another pod",
        link=f"{ISSUES}135901",
        kubelets={34: 4, 35: 1},
        touches=_has_slices,
        codes=_STARTS,
        of_pod=lambda pod: len(pod.claims) > 1,
    ),
    NodeBug(
        what="passes CDI devices twice to the runtime if one of several claims of a pod fails to "
        "prepare at first",
        link=f"{PULLS}140274",
        kubelets={34: 11, 35: None, 36: 4},
        touches=_has_two_drivers,
        codes=frozenset({Code.POD_NOT_STARTED}),
        of_pod=lambda pod: len(pod.claims) > 1,
    ),
    NodeBug(
        what="cannot end a pod whose status does not name the claim that was made from a template",
        link=f"{ISSUES}139772",
        kubelets={36: None},
        touches=lambda node, world: False,
        codes=frozenset({Code.NOT_UNPREPARED}),
        of_pod=lambda pod: any(each.template and not each.generated for each in pod.claims),
    ),
    NodeBug(
        what="still expects an extended resource from a device plugin that is gone, until the old "
        "pod that has a device of the plugin is deleted",
        link=f"{PULLS}141426",
        kubelets={36: None, 37: None},
        touches=_had_device_plugin,
        codes=frozenset({Code.POD_NOT_STARTED}),
        of_pod=lambda pod: bool(pod.extended_claim),
    ),
    NodeBug(
        what="ignores the CDI devices of claims, so containers start without their devices",
        link="https://github.com/Mirantis/cri-dockerd/issues/558",
        runtimes="docker://",
        touches=_has_slices,
    ),
    NodeBug(
        what="ignores the CDI devices of claims unless its configuration has enable_cdi = true",
        link="https://github.com/containerd/containerd/pull/9621",
        runtimes=r"containerd://v?1\.",
        fixed="containerd 2.0, or enable CDI",
        touches=_has_slices,
    ),
    NodeBug(
        what="drops CDI devices that an NRI plugin adds to a container",
        link="https://github.com/containerd/containerd/pull/12650",
        runtimes=r"containerd://v?(2\.0\.|1\.7\.[12]?\d\b)",
        fixed="containerd 2.1 or 1.7.30",
        touches=_has_slices,
    ),
)
