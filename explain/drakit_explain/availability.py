"""
How many devices of a cluster there are for a request, and what stands in the way of the others.

:mod:`.counting` counts each slice; a count is kept until its slice, or an allocation in its pool,
changes. The counts explain; Kubernetes' allocator decides whether a pod fits.

It must not know clients, or how a sentence is made of the counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from drakit_explain.allocation import NotEvaluatedError
from drakit_explain.budget import MAX_STEPS, Budget
from drakit_explain.codes import Code
from drakit_explain.counting import (
    NOTHING,
    STEPS_PER_DEVICE,
    STEPS_PER_SLICE,
    Availability,
    SelectorError,
    SliceCount,
    SliceCounting,
    Tally,
)
from drakit_explain.devices import DeviceKind
from drakit_explain.model import Request
from drakit_explain.nodes import Unusable
from drakit_explain.selection import Selection
from drakit_explain.world import Reachable, World

REQUESTS = 4
"""Different requests of one explanation for which the devices of the cluster are counted. Counts
are kept, so a later explanation counts less."""

MAX_PLACEMENTS = 2
"""Sets of nodes for which the results of a request are kept. Each takes up to 0.6 MiB with 5,000
nodes, and each pod can have one of its own."""

SLICES_AT_ONCE = 250
"""Slices that are counted ahead of an explanation without a pause: about 10 ms."""


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
    on_nodes: Mapping[str, Tally]
    """The devices of each node, whether a pod can use the node or not."""

    by_nodes: list[tuple[Mapping[str, Unusable | None], Availability]] = field(
        default_factory=list["tuple[Mapping[str, Unusable | None], Availability]"]
    )
    """Results by the nodes that a pod can use: most pods can use the same nodes."""

    kinds: set[tuple[str, DeviceKind]] = field(default_factory=set[tuple[str, DeviceKind]])
    """The kinds of the devices that match, each with its driver: found by the first pod that needs
    them, and kept until a slice, node or class changes."""

    def on_one_node(
        self, nodes: Mapping[str, Unusable | None], found: Availability
    ) -> tuple[Code | None, int]:
        """Return why no node has enough devices for the request; None if none publishes enough,
        and the most that a node publishes."""
        request, on_nodes = self.request, self.on_nodes
        usable = [each for node, each in on_nodes.items() if nodes.get(node, NOTHING) is None]
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
                if not groups or not (count.tally.total or count.small):
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
        budget.spend(len(self.counts) + len(self.on_nodes))
        found = self._for_nodes(nodes)
        self.by_nodes.insert(0, (nodes, found))
        del self.by_nodes[MAX_PLACEMENTS:]
        return found

    def _for_nodes(self, nodes: Mapping[str, Unusable | None]) -> Availability:
        result = Availability()
        bad = {name for name, reason in nodes.items() if reason is not None}
        for count in self.counts.values():
            if bad and bad.issuperset(count.reach.nodes):
                if total := count.tally.total:
                    reasons = [nodes[name] for name in count.reach.nodes]
                    words = {_word(reason) for reason in reasons if reason is not None}
                    result.elsewhere.add(total, words=words)
                result.small += count.small
            else:
                count.merge_into(result)
        usable = ((-each.free, name) for name, each in self.on_nodes.items() if name not in bad)
        less, name = min(usable, default=(0, ""))
        result.most_free = (name, -less)
        return result

    def able(self, budget: Budget) -> set[str]:
        """Return the nodes with enough free devices for the request alone."""
        budget.spend(1 + len(self.on_nodes) // 10)
        return {name for name, each in self.on_nodes.items() if each.suffices(self.request)}


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


def analyze(
    request: Request, world: World, budget: Budget, *, before: Analysis | None = None
) -> Analysis:
    """
    Count the devices of the cluster for a request.

    :param before: an earlier analysis of the request in this world: slices that have not changed
        are not counted again.

    Raises :class:`NotEvaluatedError` where a selector has no outcome.
    """
    return next(filter(None, analyze_in_steps(request, world, budget, before=before)))


def analyze_in_steps(
    request: Request, world: World, budget: Budget, *, before: Analysis | None
) -> Iterator[Analysis | None]:
    """
    Count as :func:`analyze` does: yield None in between, and the analysis at the end.

    It is as old as the first step, so that what changes meanwhile is counted again. It ends early
    if slices or rules change.
    """
    if request.unsupported:
        raise NotEvaluatedError(
            f'drakit does not support {request.unsupported} of request "{request.name}"'
        )
    selectors = world.expressions(request)
    # Rules concern all slices, and seldom change.
    if before is not None and (
        before.revision < world.rules_revision or before.selectors != selectors
    ):
        before = None
    counting = SliceCounting(request, world, budget)
    if before is not None and before.revision >= world.slices_revision:
        yield _updated(before, world, counting)
        return
    revision, of_cluster = world.revision, _cluster_revision(world)
    reachable = world.reachable()
    budget.spend(1 + len(reachable))
    counts: dict[str, SliceCount] = {}
    on_nodes: dict[str, Tally] = {}
    rejected = [0] * len(selectors)
    errors: list[SelectorError] = []
    matching = counted = 0
    for reach in reachable:
        count = _unchanged(reach, before, world)
        if count is None:
            count = counting.count(reach)
            counted += 1
        counts[reach.slice.name] = count
        matching += count.tally.total + count.small
        errors += count.errors
        for number, devices in enumerate(count.rejected):
            rejected[number] += devices
        for node in reach.nodes if count.tally.total else ():
            known = on_nodes.get(node)
            tally = count.tally if known is None else known.changed(NOTHING, count.tally)
            on_nodes[node] = tally
        if counted == SLICES_AT_ONCE:
            counted = 0
            yield None
            if _cluster_revision(world) != of_cluster:
                break
    yield Analysis(
        request=request,
        revision=revision,
        selectors=selectors,
        counts=counts,
        published=sum(len(each.slice.devices) for each in reachable),
        rejected=tuple(
            (owner, expression, number)
            for (owner, expression), number in zip(selectors, rejected, strict=True)
        ),
        errors=tuple(errors),
        matching=matching,
        on_nodes=on_nodes,
    )


def _cluster_revision(world: World) -> int:
    return max(world.slices_revision, world.rules_revision)


def _unchanged(reach: Reachable, before: Analysis | None, world: World) -> SliceCount | None:
    count = before.counts.get(reach.slice.name) if before is not None else None
    if count is None or count.reach is not reach or count.stamp != world.stamp(reach.pool):
        return None
    return count


def _updated(before: Analysis, world: World, counting: SliceCounting) -> Analysis:
    """Return an analysis after changes of allocations: what nodes reach is the same."""
    counts, on_nodes, matching = dict(before.counts), dict(before.on_nodes), before.matching
    for pool in world.pools_changed_since(before.revision):
        for of in world.slices_of_pool(pool):
            old = counts.get(of.name)
            if old is None:  # no node reaches it
                continue
            new = counts[of.name] = counting.count(old.reach)
            matching += new.tally.total + new.small - old.tally.total - old.small
            for node in new.reach.nodes:
                on_nodes[node] = on_nodes.get(node, NOTHING).changed(old.tally, new.tally)
                if not on_nodes[node].total:
                    del on_nodes[node]
    return replace(
        before,
        revision=world.revision,
        counts=counts,
        matching=matching,
        on_nodes=on_nodes,
        by_nodes=[],
    )
