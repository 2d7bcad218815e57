"""
Bugs of Kubernetes that concern claims, by the releases that have them.

Each row was read in the source of the release with the fix and of the one before it, or else of the
newest patch release (`READ`): the scheduler's plugin, the tracker of taints and the eviction in
``k8s.io/kubernetes``, the allocators in ``k8s.io/dynamic-resource-allocation``. Later releases are
not judged, and the packages of a vendor can have fixes of later releases.

It must not know how a version or objects are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    PoolID,
    Request,
    SliceFacts,
    TaintRuleFacts,
    TemplateFacts,
)
from drakit_explain.world import World

READ: Mapping[int, int] = {34: 13, 35: 10, 36: 6, 37: 2}
"""The newest patch release that was read, by minor release of Kubernetes 1."""

ISSUES = "https://github.com/kubernetes/kubernetes/issues/"
PULLS = "https://github.com/kubernetes/kubernetes/pull/"

MAX_COUNT = 2**63 - 1

_VERSION = re.compile(r"v?1\.(\d+)\.(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bug:
    """A bug, and the releases that have it."""

    what: str
    """A clause that says what Kubernetes does."""

    link: str
    fixes: Mapping[int, int | None]
    """By minor release, the first patch release without the bug; None if `READ` has it. Minor
    releases that are not here do not have the bug."""

    touched: Callable[[World], str | None]
    """Return an object, by kind and name, that the bug can concern."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundBug:
    """A bug that the release of a cluster has, and that one of its objects can meet."""

    object: str
    what: str
    fixed: str
    """The first release with a fix, such as ``1.36.5``; empty if none was read."""

    link: str


def known_bugs(version: str, world: World) -> list[FoundBug]:
    """Return the known bugs of a version such as ``v1.36.3`` that objects of a cluster can meet."""
    match = _VERSION.match(version)
    if match is None:
        return []
    minor, patch = int(match[1]), int(match[2])
    return [
        FoundBug(object=found, what=bug.what, fixed=_fixed_in(bug, minor), link=bug.link)
        for bug in BUGS
        if _has(bug, minor, patch) and (found := bug.touched(world)) is not None
    ]


def _has(bug: Bug, minor: int, patch: int) -> bool:
    if minor not in bug.fixes:
        return False
    fix = bug.fixes[minor]
    return patch <= READ[minor] if fix is None else patch < fix


def _fixed_in(bug: Bug, minor: int) -> str:
    for each in range(minor, max(READ) + 1):
        if each not in bug.fixes:
            return f"1.{each}"
        if (patch := bug.fixes[each]) is not None:
            return f"1.{each}.{patch}"
    return ""


# ---------------------------------------------------------------- the objects


def _wanted(world: World) -> Iterator[ClaimFacts | TemplateFacts]:
    """Return claims, and templates first: a claim of a template has its requests."""
    yield from world.of(TemplateFacts).values()
    yield from world.of(ClaimFacts).values()


def _named(of: ClaimFacts | TemplateFacts) -> str:
    return f"{of.reference.kind} {of.namespace}/{of.name}"


def _exact(requests: Iterable[Request]) -> Iterator[Request]:
    for each in requests:
        yield from each.alternatives or (each,)


def _first(
    world: World, matches: Callable[[ClaimFacts | TemplateFacts], bool], *, beside: bool = True
) -> str | None:
    """Name the first claim or template that matches; None unless `beside` holds."""
    if not beside:
        return None
    return next((_named(each) for each in _wanted(world) if matches(each)), None)


def _asks_for_all(of: ClaimFacts | TemplateFacts) -> bool:
    return any(each.every for each in _exact(of.requests))


def _with_counters(world: World) -> Iterator[SliceFacts]:
    return (each for each in world.slices() if each.devices.consumes)


def _has_counters(world: World) -> bool:
    return any(True for _ in _with_counters(world))


def _has_shareable(world: World) -> bool:
    return any(group.kind.shareable for each in world.slices() for group in each.devices.groups)


def _sum_too_large(world: World) -> str | None:
    def matches(of: ClaimFacts | TemplateFacts) -> bool:
        least = sum(min(each.count for each in _exact([request])) for request in of.requests)
        return least > MAX_COUNT

    return _first(world, matches)


def _all_with_counters(world: World) -> str | None:
    return _first(world, _asks_for_all, beside=_has_counters(world))


def _shared_with_counters(world: World) -> str | None:
    for each in _with_counters(world):
        if any(device.kind.shareable and device.consumes for device in each.devices):
            return f"ResourceSlice {each.name}"
    return None


def _rejected_with_counters(world: World) -> str | None:
    for each in _with_counters(world):
        if any(device.taints and device.consumes for device in each.devices):
            return f"ResourceSlice {each.name}"
    return _first(world, lambda of: bool(of.constraints), beside=_has_counters(world))


def _pools_of_one_name(world: World) -> str | None:
    seen: dict[str, PoolID] = {}
    for each in world.slices():
        if each.counter_sets and seen.setdefault(each.pool, each.of_pool) != each.of_pool:
            return f"ResourceSlice {each.name}"
    return None


def _admin_with_counters(world: World) -> str | None:
    def matches(of: ClaimFacts | TemplateFacts) -> bool:
        return any(each.admin_access for each in _exact(of.requests))

    return _first(world, matches, beside=_has_counters(world))


def _later_alternative_for_all(world: World) -> str | None:
    def matches(of: ClaimFacts | TemplateFacts) -> bool:
        return any(each.every for request in of.requests for each in request.alternatives[1:])

    return _first(world, matches)


def _distinct(world: World) -> str | None:
    def matches(of: ClaimFacts | TemplateFacts) -> bool:
        several = any(each.every or each.count > 1 for each in _exact(of.requests))
        return several and any(each.distinct for each in of.constraints)

    return _first(world, matches)


def _all_and_pool_not_ready(world: World) -> str | None:
    return _first(world, _asks_for_all, beside=bool(world.not_ready()))


def _all_of_shared(world: World) -> str | None:
    return _first(world, _asks_for_all, beside=_has_shareable(world))


def _allocated(world: World) -> str | None:
    return next((_named(each) for each in world.of(ClaimFacts).values() if each.allocated), None)


def _used_beside_templates(world: World) -> str | None:
    if not world.of(TemplateFacts):
        return None
    named = (each for each in world.of(ClaimFacts).values() if each.owner_pod is None)
    return next((_named(each) for each in named if each.allocated), None)


def _rule(world: World) -> str | None:
    return next(
        (f"DeviceTaintRule {each.name}" for each in world.of(TaintRuleFacts).values()), None
    )


def _rule_without_selector(world: World) -> str | None:
    rules = (each for each in world.of(TaintRuleFacts).values() if not each.selective)
    return next((f"DeviceTaintRule {each.name}" for each in rules), None)


def _extended(world: World) -> str | None:
    classes = (each for each in world.of(ClassFacts).values() if each.extended_resource)
    return next((f"DeviceClass {each.name}" for each in classes), None)


# ---------------------------------------------------------------- the bugs

BUGS: tuple[Bug, ...] = (
    Bug(
        what="kube-scheduler panics when the requests of a claim ask for more devices than a "
        "64-bit number can hold",
        link=f"{ISSUES}141323",
        fixes={34: 12, 35: 9, 36: 5, 37: 1},
        touched=_sum_too_large,
    ),
    Bug(
        what="kube-scheduler panics when a request for all devices selects a device that consumes "
        "counters",
        link=f"{ISSUES}138882",
        fixes={35: 6, 36: 2},
        touched=_all_with_counters,
    ),
    Bug(
        what="kube-scheduler panics, or ignores changes, when there are DeviceTaintRules",
        link=f"{PULLS}139681",
        fixes={36: 3},
        touched=_rule,
    ),
    Bug(
        what="kube-scheduler can allocate a device twice when it schedules many pods at once",
        link=f"{PULLS}136269",
        fixes={34: 4, 35: 1},
        touched=_allocated,
    ),
    Bug(
        what="kube-scheduler forgets the counters that allocated shares of a device consume, so it "
        "can allocate devices together that exclude each other",
        link=f"{ISSUES}139034",
        fixes={34: None, 35: None, 36: 2},
        touched=_shared_with_counters,
    ),
    Bug(
        what="kube-scheduler keeps the counters of a device reserved that it rejects because of a "
        "taint or a constraint, so a pod can wait although its devices are free",
        link=f"{ISSUES}140436",
        fixes={34: None, 35: None, 36: 3},
        touched=_rejected_with_counters,
    ),
    Bug(
        what="kube-scheduler counts the counters of pools with the same name together, even if "
        "they are of different drivers",
        link=f"{ISSUES}140434",
        fixes={35: None, 36: 4},
        touched=_pools_of_one_name,
    ),
    Bug(
        what="kube-scheduler reserves the counters of a device again for a request with admin "
        "access, so the request can fail",
        link=f"{ISSUES}140729",
        fixes={34: None, 35: None, 36: None, 37: None},
        touched=_admin_with_counters,
    ),
    Bug(
        what="kube-scheduler can find no devices for a second or later alternative that asks for "
        "all devices",
        link=f"{PULLS}137347",
        fixes={34: None, 35: None},
        touched=_later_alternative_for_all,
    ),
    Bug(
        what="kube-scheduler can allocate devices with the same value to a request for several "
        "devices with the constraint distinctAttribute",
        link=f"{ISSUES}140438",
        fixes={34: None, 35: None, 36: None},
        touched=_distinct,
    ),
    Bug(
        what="a request for all devices leaves out shared devices with too little capacity",
        link=f"{PULLS}140769",
        fixes={35: None, 36: None},
        touched=_all_of_shared,
    ),
    Bug(
        what="kube-scheduler tries no other node for a request for all devices when a pool on one "
        "node is incomplete or invalid",
        link=f"{ISSUES}141829",
        fixes={34: None, 35: None, 36: None, 37: None},
        touched=_all_and_pool_not_ready,
    ),
    Bug(
        what="a pod can stay pending if one of its claims is allocated and another one is not",
        link=f"{PULLS}139017",
        fixes={35: 6, 36: 2},
        touched=_used_beside_templates,
    ),
    Bug(
        what="kube-scheduler applies a DeviceTaintRule without deviceSelector to all devices, and "
        "not to none",
        link=f"{ISSUES}141620",
        fixes={34: None, 35: None, 36: None, 37: 1},
        touched=_rule_without_selector,
    ),
    Bug(
        what="a NoExecute taint does not evict pods that use its device as an extended resource",
        link=f"{ISSUES}141290",
        fixes={34: None, 35: None, 36: None, 37: 2},
        touched=_extended,
    ),
)
