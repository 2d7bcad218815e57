"""
How many devices of a cluster there are for a request, and what stands in the way of the others.

:mod:`.counting` counts each slice; a count is kept until its slice, or an allocation in its pool,
changes. The counts explain; Kubernetes' allocator decides whether a pod fits.

It must not know clients, or how a sentence is made of the counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from drakit_explain.allocation import NotEvaluatedError, not_supported
from drakit_explain.budget import MAX_STEPS, Budget
from drakit_explain.codes import Code
from drakit_explain.counting import (
    STEPS_PER_DEVICE,
    STEPS_PER_SLICE,
    Availability,
    SelectorError,
    SliceCount,
    SliceCounting,
)
from drakit_explain.devices import DeviceKind
from drakit_explain.model import Request
from drakit_explain.nodes import Unusable
from drakit_explain.selection import Selection
from drakit_explain.world import Reachable, World

_OPERATORS = ("", "Equal", "Exists")

REQUESTS = 4
"""Different requests of one explanation for which the devices of the cluster are counted. Counts
are kept, so a later explanation counts less."""

MAX_PLACEMENTS = 2
"""Sets of nodes for which the results of a request are kept. Each takes up to 0.6 MiB with 5,000
nodes, and each pod can have one of its own."""

SLICES_AT_ONCE = 250
"""Slices that are counted ahead of an explanation without a pause: about 10 ms."""


class OnNode(NamedTuple):
    """How many devices of a node a request could have."""

    free: int = 0
    held: int = 0
    tainted: int = 0

    @property
    def total(self) -> int:
        return self.free + self.held + self.tainted

    def changed(self, old: SliceCount, new: SliceCount) -> OnNode:
        return OnNode(
            self.free + new.available - old.available,
            self.held + new.releasable - old.releasable,
            self.tainted + new.tainted - old.tainted,
        )

    def would_do(self, request: Request, *, untainted: bool = False) -> bool:
        """Return whether they are enough when claims release them, and without taints."""
        if request.every:
            return bool(self.total) and (untainted or not self.tainted)
        return self.total - (0 if untainted else self.tainted) >= request.count


_NOTHING = OnNode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """The devices of the whole cluster for one request, regardless of the pod."""

    request: Request
    revision: int
    """The world's revision."""

    selectors: tuple[tuple[str, str], ...]
    """In order: the owner, and the expression."""

    counts: Mapping[str, SliceCount]
    """By the slice's name."""

    published: int
    rejected: tuple[tuple[str, str, int], ...]
    """For each selector in order: its owner, itself, and the devices that it rejects."""

    errors: tuple[SelectorError, ...]
    matching: int
    free_by_node: Mapping[str, int]
    """How many devices each node could give to the request alone."""

    matching_by_node: Mapping[str, int]
    """How many devices of each node match, available or not."""

    by_nodes: list[tuple[Mapping[str, Unusable | None], Availability]] = field(
        default_factory=list["tuple[Mapping[str, Unusable | None], Availability]"]
    )
    """Results by the nodes that a pod can use: most pods can use the same nodes."""

    on_nodes: dict[str, OnNode] = field(default_factory=dict[str, "OnNode"])
    """The devices of each node, found by the first pod that needs them."""

    kinds: set[tuple[str, DeviceKind]] = field(default_factory=set[tuple[str, DeviceKind]])
    """The kinds of the devices that match, each with its driver: found by the first pod that needs
    them, and kept until a slice, node or class changes."""

    def count_on_nodes(self) -> Mapping[str, OnNode]:
        """Count the devices of each node, whether a pod can use the node or not."""
        if not self.on_nodes:
            same: dict[OnNode, OnNode] = {}  # few numbers for many nodes
            for count in self.counts.values():
                free, held, tainted = count.available, count.releasable, count.tainted
                for node in count.reach.nodes:
                    known = self.on_nodes.get(node, _NOTHING)
                    number = OnNode(known.free + free, known.held + held, known.tainted + tainted)
                    self.on_nodes[node] = same.setdefault(number, number)
        return self.on_nodes

    def on_one_node(
        self, nodes: Mapping[str, Unusable | None], found: Availability
    ) -> tuple[Code | None, int]:
        """Return why no node has enough devices for the request; None if none publishes enough,
        and the most that a node publishes."""
        request, on_nodes = self.request, self.count_on_nodes()
        usable = [each for node, each in on_nodes.items() if nodes.get(node, _NOTHING) is None]
        code: Code | None = None
        if any(each.would_do(request) for each in usable):
            code = Code.DEVICES_ALLOCATED
        elif any(each.would_do(request, untainted=True) for each in usable):
            code = Code.DEVICES_TAINTED
        elif any(each.would_do(request, untainted=True) for each in on_nodes.values()):
            code = Code.DEVICES_ON_OTHER_NODES
        found.on_one_node = code, max((each.total for each in on_nodes.values()), default=0)
        return found.on_one_node

    def find_kinds(self, world: World) -> Collection[tuple[str, DeviceKind]]:
        """Return the kinds of the devices that match, each with its driver."""
        if not self.kinds:
            selection = Selection(world, self.request)
            found: set[tuple[str, int]] = set()  # the hash of a kind costs more than the rest
            for count in self.counts.values():
                of = count.reach.slice
                groups = [
                    each for each in of.devices.groups if (of.driver, id(each.kind)) not in found
                ]
                if not groups or not (count.total or count.too_small):
                    continue
                matches = selection.of(of).matches
                for kind, mask, _ in groups:
                    if mask & matches:
                        found.add((of.driver, id(kind)))
                        self.kinds.add((of.driver, kind))
        return self.kinds

    def for_nodes(self, nodes: Mapping[str, Unusable | None], budget: Budget) -> Availability:
        """
        Return what a pod finds on its nodes.

        :param nodes: all nodes, each with the reason why the pod cannot use it.
        """
        budget.spend()
        for known, found in self.by_nodes:
            if known is nodes:
                return found
        budget.spend(len(self.counts) + len(self.free_by_node))
        found = self._for_nodes(nodes)
        self.by_nodes.insert(0, (nodes, found))
        del self.by_nodes[MAX_PLACEMENTS:]
        return found

    def _for_nodes(self, nodes: Mapping[str, Unusable | None]) -> Availability:
        result = Availability()
        bad = {name for name, reason in nodes.items() if reason is not None}
        for count in self.counts.values():
            if bad and bad.issuperset(count.reach.nodes):
                if total := count.total:
                    reasons = [nodes[name] for name in count.reach.nodes]
                    words = {_word(reason) for reason in reasons if reason is not None}
                    result.elsewhere.add(total, words=words)
                result.small += count.too_small
            else:
                count.merge_into(result)
        usable = ((-free, name) for name, free in self.free_by_node.items() if name not in bad)
        less, name = min(usable, default=(0, ""))
        result.most_free = (name, -less)
        return result

    def nodes_with(self, number: int, budget: Budget) -> set[str]:
        """Return the nodes that could give so many devices to the request alone."""
        budget.spend(1 + len(self.free_by_node) // 10)
        return {name for name, free in self.free_by_node.items() if free >= number}


def _word(reason: Unusable) -> str:
    return f"{reason.problem.value} {reason.detail}".strip()


def needed(request: Request, found: Availability | None = None) -> int:
    """Return how many devices there must be at least; "all" means at least one."""
    if request.every and found is not None:
        return max(found.total, 1)
    return max(request.count, 1)


def budget_of(world: World) -> Budget:
    """Return the budget of one explanation: larger clusters take longer."""
    slices = len(world.reachable())
    devices = world.counted_one_by_one()
    steps = STEPS_PER_SLICE * slices + STEPS_PER_DEVICE * devices
    return Budget(MAX_STEPS + REQUESTS * steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """Slices that were counted for a request ahead of its analysis."""

    revision: int
    """The world's revision when the count began."""

    selectors: tuple[tuple[str, str], ...]
    counts: dict[str, SliceCount] = field(default_factory=dict[str, SliceCount])


def count_ahead(
    request: Request, world: World, counted: Counted, budget: Budget, *, before: Analysis | None
) -> Iterator[None]:
    """
    Count the slices of the cluster for a request, as :func:`analyze` does, and yield in between.

    It ends early if slices or rules change meanwhile. Raises as :func:`analyze` does.
    """
    _check(request)
    known = _still_known(before, counted.selectors, world)
    counting = SliceCounting(request, world, budget)
    revision, number = _cluster_revision(world), 0
    for reach in world.reachable():
        count = _unchanged(reach, known, world)
        if count is None:
            count = counting.count(reach)
            number += 1
        counted.counts[reach.slice.name] = count
        if number == SLICES_AT_ONCE:
            number = 0
            yield
            if _cluster_revision(world) != revision:
                return


def _cluster_revision(world: World) -> int:
    return max(world.slices_revision, world.rules_revision)


def analyze(
    request: Request, world: World, budget: Budget, *, before: Analysis | Counted | None = None
) -> Analysis:
    """
    Count the devices of the cluster for a request.

    :param before: an earlier analysis of the request in this world, or a part of one: slices that
        have not changed are not counted again.

    Raises :class:`NotEvaluatedError` where a selector has no outcome.
    """
    _check(request)
    selectors = world.expressions(request)
    known = _still_known(before, selectors, world)
    counting = SliceCounting(request, world, budget)
    is_recent = isinstance(before, Analysis) and before.revision >= world.slices_revision
    if isinstance(before, Analysis) and is_recent and known and not request.every:
        return _updated(before, world, counting)
    counts: dict[str, SliceCount] = {}
    reachable = world.reachable()
    budget.spend(1 + len(reachable))
    rejected = [0] * len(selectors)
    published = matching = 0
    errors: list[SelectorError] = []
    for reach in reachable:
        count = _unchanged(reach, known, world) or counting.count(reach)
        counts[reach.slice.name] = count
        published += len(reach.slice.devices)
        matching += count.total + count.too_small
        errors += count.errors
        for number, devices in enumerate(count.rejected):
            rejected[number] += devices
    return Analysis(
        request=request,
        revision=world.revision,
        selectors=selectors,
        counts=counts,
        published=published,
        rejected=tuple(
            (owner, expression, number)
            for (owner, expression), number in zip(selectors, rejected, strict=True)
        ),
        errors=tuple(errors),
        matching=matching,
        free_by_node=_free_by_node(request, counts.values()),
        matching_by_node=_matching_by_node(counts.values()),
        kinds=before.kinds if isinstance(before, Analysis) and known and is_recent else set(),
    )


def _check(request: Request) -> None:
    if request.unsupported:
        raise NotEvaluatedError(not_supported(request, request.name))
    for toleration in request.tolerations:
        if toleration.operator not in _OPERATORS:
            raise NotEvaluatedError(
                f"operator {toleration.operator} of a toleration is unknown to this version"
            )


def _still_known(
    before: Analysis | Counted | None, selectors: tuple[tuple[str, str], ...], world: World
) -> Mapping[str, SliceCount]:
    # Rules concern all slices, and seldom change.
    if before is None or before.revision < world.rules_revision or before.selectors != selectors:
        return {}
    return before.counts


def _unchanged(
    reach: Reachable, known: Mapping[str, SliceCount], world: World
) -> SliceCount | None:
    count = known.get(reach.slice.name)
    if count is None or count.reach is not reach or count.stamp != world.stamp(reach.pool):
        return None
    return count


def _updated(before: Analysis, world: World, counting: SliceCounting) -> Analysis:
    """Return an analysis after changes of allocations: what nodes reach is the same."""
    counts, on_nodes, matching = dict(before.counts), dict(before.on_nodes), before.matching
    free_by_node, matching_by_node = dict(before.free_by_node), dict(before.matching_by_node)
    for pool in world.pools_changed_since(before.revision):
        for of in world.slices_of_pool(pool):
            old = counts.get(of.name)
            if old is None:  # no node reaches it
                continue
            new = counts[of.name] = counting.count(old.reach)
            matching += new.total + new.too_small - old.total - old.too_small
            for node in new.reach.nodes:
                _add(free_by_node, node, new.available - old.available)
                _add(matching_by_node, node, new.total - old.total)
                if on_nodes:
                    on_nodes[node] = on_nodes[node].changed(old, new)
    return replace(
        before,
        revision=world.revision,
        counts=counts,
        matching=matching,
        free_by_node=free_by_node,
        matching_by_node=matching_by_node,
        by_nodes=[],
        on_nodes=on_nodes,
    )


def _add(numbers: dict[str, int], node: str, number: int) -> None:
    if total := numbers.get(node, 0) + number:
        numbers[node] = total
    else:
        numbers.pop(node, None)


def _matching_by_node(counts: Iterable[SliceCount]) -> dict[str, int]:
    matching: dict[str, int] = {}
    for count in counts:
        if total := count.total:
            for node in count.reach.nodes:
                matching[node] = matching.get(node, 0) + total
    return matching


def _free_by_node(request: Request, counts: Iterable[SliceCount]) -> dict[str, int]:
    free: dict[str, int] = {}
    taken: set[str] = set()
    for count in counts:
        if number := count.available:
            for node in count.reach.nodes:
                free[node] = free.get(node, 0) + number
        # Where each device has a place of its own, it may concern another node.
        every = request.every and not count.reach.slice.by_device
        if every and count.available + count.left_out < count.total:
            taken.update(count.reach.nodes)
    return {node: number for node, number in free.items() if node not in taken}
