"""
Why a pod is pending: what the scheduler would find, and a sentence with the problem and the remedy.

Nodes that the pod cannot use are excluded first (:mod:`.nodes`). On each other node with enough
devices for every request, the scheduler's search decides (:mod:`.allocation`). If it finds devices
on a node, no reason is returned: the pod waits for something else. The counts of
:mod:`.availability`, in the words of :mod:`.wording`, explain the rest.

The same situation gives the same sentence (no time, no counter of attempts), so that Events can be
deduplicated. What cannot be evaluated is reported as unknown; nothing is guessed.

It must not know Kubernetes clients, clocks, or earlier reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from drakit.explain.allocation import (
    Answer,
    NotEvaluatedError,
    Outcome,
    Relaxed,
    SearchedClaim,
    allocate,
)
from drakit.explain.availability import Analysis, Availability, analyze, needed
from drakit.explain.broken import broken_pod, is_placed, node_of_claim, not_bindable
from drakit.explain.codes import Code, Finding, Reason
from drakit.explain.deletion import pod_stays
from drakit.explain.model import (
    ClaimFacts,
    NodeFacts,
    ObjectReference,
    PodFacts,
    Request,
    TemplateFacts,
)
from drakit.explain.nodes import NodeProblem, Unusable, unusable
from drakit.explain.pending_claims import (
    Wanted,
    classes_missing,
    exact_requests,
    extended,
    resolve,
)
from drakit.explain.pools import NodePool, NodeView, PoolState
from drakit.explain.wording import remedy, state
from drakit.explain.world import World
from drakit.resource.nodeselector import selects_node

__all__ = (
    "ClaimReport",
    "Explainer",
    "Explanation",
    "RequestReport",
    "Verdict",
    "missing_classes_of_claim",
    "missing_classes_of_template",
    "waits",
)

MAX_NODES = 64
"""Nodes that are searched for one pod; with more candidates, the answer may be undecided."""

MAX_NAMED = 3


class Verdict(StrEnum):
    """The result of an explanation."""

    NOT_PENDING = "not pending"
    """It has a node, or is not to be scheduled (gates, deletion)."""

    BROKEN = "broken"
    """It has a node, but the reasons keep it from being started, or endanger it."""

    DELETING = "deleting"
    """It is being deleted, and the reasons hold it."""

    BLOCKED = "blocked"
    """The reasons keep it from being scheduled."""

    FITS = "fits"
    """There are devices for it; if it still waits, something else keeps it."""

    UNDECIDED = "undecided"
    """Something could not be evaluated, or the search was too long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestReport:
    """One request, or alternative, and its devices."""

    name: str
    """``request`` or ``request/subrequest``."""

    analysis: Analysis
    found: Availability


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimReport:
    """A claim of the pod as the scheduler finds it."""

    origin: str
    """``claim "name"`` or ``claim template "name"``."""

    claim: str | None
    allocated: bool
    requests: tuple[RequestReport, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """The explanation of a pod."""

    verdict: Verdict
    reasons: tuple[Reason, ...] = ()
    claims: tuple[ClaimReport, ...] = ()
    nodes: Mapping[str, Unusable | None] = field(default_factory=dict[str, "Unusable | None"])
    """All nodes, and why the pod cannot use each, apart from devices."""

    fits_on: str = ""
    unknown: tuple[str, ...] = ()


def waits(pod: PodFacts) -> bool:
    """Return whether the scheduler searches a node for the pod."""
    return pod.node is None and not pod.gated and not pod.deleting and pod.phase == "Pending"


class Explainer:
    """Explains pods of one world; caches the results of requests until the world changes."""

    def __init__(self, world: World, *, name_all_holders: bool = False) -> None:
        """
        Explain pods of a world.

        :param name_all_holders: name claims of other namespaces, too. Reasons appear in Events
            that the pod's owner reads, so by default these claims are counted.
        """
        self._world = world
        self._name_all = name_all_holders
        self._revision = -1
        self._analyses: dict[Request, Analysis] = {}
        self._nodes: dict[object, dict[str, Unusable | None]] = {}

    def expressions(self, pod: PodFacts) -> list[str]:
        """Return the selectors that must be evaluated before the pod is explained."""
        wanted = [
            found
            for each in pod.claims
            if isinstance(found := resolve(pod, each, self._world, settled=False), Wanted)
        ]
        return [
            text
            for each in (*wanted, *extended(pod, self._world)[0])
            for request in each.requests
            for _, exact in exact_requests(request)
            for _, text in self._world.expressions(exact)
            if text
        ]

    def explain(self, pod: PodFacts, *, settled: bool = False) -> Explanation:
        """
        Return why a pod's claims are not allocated, or cannot be used on its node.

        :param settled: nothing about the pod has changed for a while, so that what is normal for a
            moment is a problem.
        """
        if pod.deleting:
            held = pod_stays(pod, self._world, settled=settled)
            verdict = Verdict.DELETING if held else Verdict.NOT_PENDING
            return Explanation(verdict=verdict, reasons=held)
        if is_placed(pod):
            return self._placed(pod, settled=settled)
        if not waits(pod):
            return Explanation(verdict=Verdict.NOT_PENDING)
        self._refresh()
        reports: list[ClaimReport] = []
        wanted: list[Wanted] = []
        allocated: list[ClaimFacts] = []
        blocked: list[Finding] = []
        for each in pod.claims:
            found = resolve(pod, each, self._world, settled=settled)
            match found:
                case Finding():
                    blocked.append(found)
                case ClaimFacts():
                    allocated.append(found)
                    origin = f'claim "{found.name}"'
                    reports.append(ClaimReport(origin=origin, claim=found.name, allocated=True))
                case Wanted():
                    wanted.append(found)
                case None:
                    pass
        of_resources, unknown = extended(pod, self._world)
        wanted += of_resources
        blocked += (
            missing
            for each in wanted
            for request in each.requests
            for missing in classes_missing(each.origin, request, self._world)
        )
        blocked += not_bindable(pod, allocated)
        if blocked:
            return self._blocked(pod, blocked, reports)
        nodes = self._usable(pod, allocated)
        if unknown:
            return Explanation(
                verdict=Verdict.UNDECIDED,
                claims=tuple(reports),
                nodes=nodes,
                unknown=tuple(unknown),
            )
        if not wanted:
            if elsewhere := list(self._elsewhere(allocated, nodes)):
                return self._blocked(pod, elsewhere, reports, nodes)
            return Explanation(verdict=Verdict.FITS, claims=tuple(reports), nodes=nodes)
        try:
            return self._search(pod, wanted, nodes, reports)
        except (NotEvaluatedError, ValueError) as error:  # the second: what is no quantity
            return Explanation(
                verdict=Verdict.UNDECIDED,
                claims=tuple(reports),
                nodes=nodes,
                unknown=(str(error),),
            )

    def _elsewhere(
        self, allocated: Sequence[ClaimFacts], nodes: Mapping[str, Unusable | None]
    ) -> Iterator[Finding]:
        """Return the claims in use that keep the pod off all nodes; others are allocated again."""
        if not self._world.of(NodeFacts) or any(problem is None for problem in nodes.values()):
            return
        for claim in allocated:
            if claim.nodes is not None and claim.consumers:
                only = node_of_claim(claim)
                where = f"on node {only}" if only is not None else "on nodes"
                yield Finding(
                    code=Code.DEVICES_ON_OTHER_NODES,
                    what=f"its claim {claim.name} is allocated {where}, where the pod cannot run, "
                    f"and other pods use the claim; let the pod run there, or use another claim",
                )

    def _placed(self, pod: PodFacts, *, settled: bool) -> Explanation:
        reasons = broken_pod(pod, self._world, settled=settled)
        names = [name for each in pod.claims if (name := each.claim or each.generated)]
        claims = [self._world.claim(pod.namespace, name) for name in names]
        return Explanation(
            verdict=Verdict.BROKEN if reasons else Verdict.NOT_PENDING,
            reasons=reasons,
            claims=tuple(
                ClaimReport(
                    origin=f'claim "{each.name}"', claim=each.name, allocated=each.allocated
                )
                for each in claims
                if each is not None
            ),
        )

    # ---- what the cluster has

    def _refresh(self) -> None:
        if self._revision != self._world.revision:
            self._revision = self._world.revision
            self._analyses.clear()
            self._nodes.clear()

    def _analysis(self, request: Request) -> Analysis:
        if request not in self._analyses:
            self._analyses[request] = analyze(request, self._world)
        return self._analyses[request]

    def _usable(self, pod: PodFacts, allocated: Sequence[ClaimFacts]) -> dict[str, Unusable | None]:
        """Return for each node why the pod cannot use it."""
        key = pod.placement.key
        if key not in self._nodes:
            self._nodes[key] = {
                name: self._unusable(pod, view) for name, view in self._world.views().items()
            }
        nodes = self._nodes[key]
        restricted = [claim for claim in allocated if claim.nodes is not None]
        if not restricted:
            return nodes
        views = self._world.views()
        return {
            name: problem or _other_claim(restricted, views[name])
            for name, problem in nodes.items()
        }

    def _unusable(self, pod: PodFacts, view: NodeView) -> Unusable | None:
        node: NodeFacts | None = self._world.node(view.name)
        return None if node is None else unusable(pod.placement, node)

    # ---- the verdict

    def _search(
        self,
        pod: PodFacts,
        wanted: Sequence[Wanted],
        nodes: dict[str, Unusable | None],
        reports: list[ClaimReport],
    ) -> Explanation:
        reports += [self._report(each, nodes) for each in wanted]
        candidates = self._candidates(wanted, nodes)
        answers: dict[str, Answer] = {}
        for name in candidates[:MAX_NODES]:
            answer = self._allocate(wanted, name)
            if answer.outcome is Outcome.FITS:
                return Explanation(
                    verdict=Verdict.FITS, claims=tuple(reports), nodes=nodes, fits_on=name
                )
            answers[name] = answer
        undecided = [name for name, a in answers.items() if a.outcome is Outcome.UNDECIDED]
        if undecided or len(candidates) > MAX_NODES:
            unknown = f"the search on node {undecided[0]}" if undecided else "more than 64 nodes"
            return Explanation(
                verdict=Verdict.UNDECIDED,
                claims=tuple(reports),
                nodes=nodes,
                unknown=(f"{unknown} takes too long",),
            )
        if unknown := self._uncertain(wanted, nodes):
            return Explanation(
                verdict=Verdict.UNDECIDED, claims=tuple(reports), nodes=nodes, unknown=unknown
            )
        blocked = list(self._why(pod, wanted, nodes, reports, answers))
        return self._blocked(pod, blocked, reports, nodes)

    def _uncertain(
        self, wanted: Sequence[Wanted], nodes: Mapping[str, Unusable | None]
    ) -> tuple[str, ...]:
        """Return unknown facts that could make every reason uncertain."""
        for each in wanted:
            if not each.requests:
                return (f"{each.origin} has no requests, or could not be read",)
        if names := self._world.unreadable():
            return (f"ResourceSlice {names[0]} could not be read",)
        views = self._world.views()
        for name, problem in nodes.items():
            for pool in self._world.pools_of_node(views[name]) if problem is None else ():
                if pool.state is PoolState.INCOMPLETE and self._concern(wanted, pool):
                    driver, name = pool.identity
                    return (f"pool {name} of driver {driver} is incomplete: slices are missing",)
        return ()

    def _report(self, wanted: Wanted, nodes: Mapping[str, Unusable | None]) -> ClaimReport:
        requests: list[RequestReport] = []
        for request in wanted.requests:
            for name, exact in exact_requests(request):
                analysis = self._analysis(exact)
                found = analysis.for_nodes(nodes)
                requests.append(RequestReport(name=name, analysis=analysis, found=found))
        return ClaimReport(
            origin=wanted.origin, claim=None, allocated=False, requests=tuple(requests)
        )

    def _candidates(
        self, wanted: Sequence[Wanted], nodes: Mapping[str, Unusable | None]
    ) -> list[str]:
        """Return the nodes with enough free devices, or a selector error, for each request."""
        requests = [request for each in wanted for request in each.requests]
        failing = {
            node
            for request in requests
            for _, exact in exact_requests(request)
            for error in self._analysis(exact).errors
            for node in error.nodes
        }
        return [
            name
            for name, problem in nodes.items()
            if problem is None
            and (name in failing or all(self._may_fit(request, name) for request in requests))
        ]

    def _may_fit(self, request: Request, node: str) -> bool:
        return any(
            self._analysis(exact).free_by_node.get(node, 0) >= needed(exact)
            for _, exact in exact_requests(request)
        )

    def _allocate(
        self, wanted: Sequence[Wanted], node: str, relaxed: Relaxed | None = None
    ) -> Answer:
        claims = [
            SearchedClaim(name=each.name, requests=each.requests, constraints=each.constraints)
            for each in wanted
        ]
        pools = self._world.pools_of_node(self._world.views()[node])
        return allocate(
            claims, pools, allocated=self._world, selections=self._world, relaxed=relaxed
        )

    def _why(
        self,
        pod: PodFacts,
        wanted: Sequence[Wanted],
        nodes: Mapping[str, Unusable | None],
        reports: Sequence[ClaimReport],
        answers: Mapping[str, Answer],
    ) -> Iterator[Finding]:
        reader = None if self._name_all else pod.namespace
        failed = [
            (name, answer)
            for name, answer in answers.items()
            if answer.outcome is Outcome.FAILED and answer.device is not None
        ]
        for name, answer in failed[:1]:
            yield _failed(name, answer, len(failed))
        invalid = self._invalid(wanted, nodes)
        for pool in invalid[:MAX_NAMED]:
            yield Finding(
                code=Code.POOL_INVALID,
                what=f"nothing is allocated from pool {pool.identity.pool} of driver "
                f"{pool.identity.driver}, because {pool.problem}; correct the driver",
            )
        short = bool(invalid)
        by_origin = {report.origin: report for report in reports}
        for each in wanted:
            for request in each.requests:
                report = by_origin[each.origin]
                found = self._short(each, request, report, nodes, reader)
                short = short or bool(found)
                if not invalid or any(each.analysis.matching for each in report.requests):
                    yield from found
        if not short and not failed:
            yield self._competing(wanted, nodes, answers)

    def _concern(self, wanted: Sequence[Wanted], pool: NodePool) -> bool:
        """Return whether a request could select devices of a pool that is not ready."""
        return any(
            self._world.concerns(exact, pool.identity.driver)
            for each in wanted
            for request in each.requests
            for _, exact in exact_requests(request)
        )

    def _invalid(
        self, wanted: Sequence[Wanted], nodes: Mapping[str, Unusable | None]
    ) -> list[NodePool]:
        views = self._world.views()
        found = {
            pool.identity: pool
            for name, problem in nodes.items()
            if problem is None
            for pool in self._world.pools_of_node(views[name])
            if pool.state is PoolState.INVALID and self._concern(wanted, pool)
        }
        return [found[identity] for identity in sorted(found)]

    def _short(
        self,
        wanted: Wanted,
        request: Request,
        report: ClaimReport,
        nodes: Mapping[str, Unusable | None],
        reader: str | None,
    ) -> list[Finding]:
        """Return why a request alone has too few devices on every node; empty if it has enough."""
        if any(problem is None and self._may_fit(request, n) for n, problem in nodes.items()):
            return []
        names = dict(exact_requests(request))
        return [
            _too_few(wanted.origin, each, reader)
            for each in report.requests
            # Where a selector fails, nobody knows whether it would select the device.
            if each.name in names and not (each.analysis.errors and not each.analysis.matching)
        ]

    def _competing(
        self,
        wanted: Sequence[Wanted],
        nodes: Mapping[str, Unusable | None],
        answers: Mapping[str, Answer],
    ) -> Finding:
        """Explain a pod whose requests each have enough devices, but not together."""
        every = [
            (number, index)
            for number, each in enumerate(wanted)
            for index in range(len(each.constraints))
        ]
        for name in list(answers)[:MAX_NAMED]:
            for key in every:
                relaxed = Relaxed(constraints=frozenset([key]))
                if self._allocate(wanted, name, relaxed).outcome is Outcome.FITS:
                    return _constraint(wanted[key[0]], key[1], name)
            if every:
                relaxed = Relaxed(constraints=frozenset(every))
                if self._allocate(wanted, name, relaxed).outcome is Outcome.FITS:
                    return Finding(
                        code=Code.CONSTRAINT_NOT_MET,
                        what=f"no node has devices that satisfy all constraints together; on node "
                        f"{name} the devices are enough without them",
                    )
        for name in list(answers)[:MAX_NAMED]:
            relaxed = Relaxed(allocations=True)
            if self._allocate(wanted, name, relaxed).outcome is Outcome.FITS:
                return Finding(
                    code=Code.DEVICES_ALLOCATED,
                    what=f"its requests need the same free devices, and the others on node {name} "
                    f"are allocated; the claims can be allocated when enough of them are released",
                )
        where = "no node" if len(nodes) != 1 else f"node {next(iter(nodes))} never"
        return Finding(
            code=Code.REQUESTS_COMPETE,
            what=f"{where} has devices for all requests of its claims together, though for each "
            f"of them alone; reduce the requests, or add devices to one node",
        )

    def _blocked(
        self,
        pod: PodFacts,
        blocked: Sequence[Finding],
        reports: Sequence[ClaimReport],
        nodes: Mapping[str, Unusable | None] | None = None,
    ) -> Explanation:
        return Explanation(
            verdict=Verdict.BLOCKED,
            reasons=tuple(
                Reason(
                    code=each.code,
                    sentence=f"pod {pod.namespace}/{pod.name} waits: {each.what}",
                    regarding=pod.reference,
                )
                for each in dict.fromkeys(blocked)
            ),
            claims=tuple(reports),
            nodes=nodes or {},
        )


def missing_classes_of_template(template: TemplateFacts, world: World) -> list[Reason]:
    """Warn of a template whose claims can never be allocated."""
    origin = f"ResourceClaimTemplate {template.namespace}/{template.name}"
    return _missing_classes(origin, template.requests, template.reference, world)


def missing_classes_of_claim(claim: ClaimFacts, world: World) -> list[Reason]:
    """Warn of a claim that cannot be allocated; for a generated one, its template is warned of."""
    if claim.allocated or claim.owner_pod is not None:
        return []
    origin = f"ResourceClaim {claim.namespace}/{claim.name}"
    return _missing_classes(origin, claim.requests, claim.reference, world)


def _missing_classes(
    origin: str, requests: Sequence[Request], regarding: ObjectReference, world: World
) -> list[Reason]:
    return [
        Reason(code=blocked.code, sentence=blocked.what, regarding=regarding)
        for request in requests
        for blocked in classes_missing(origin, request, world)
    ]


def _other_claim(claims: Sequence[ClaimFacts], view: NodeView) -> Unusable | None:
    for claim in claims:
        if not selects_node(claim.nodes, name=view.name, labels=view.labels):
            return Unusable(NodeProblem.CLAIM, claim.name)
    return None


def _failed(node: str, answer: Answer, nodes: int) -> Finding:
    more = f" (and {nodes - 1} more nodes)" if nodes > 1 else ""
    assert answer.device is not None
    device = answer.device
    return Finding(
        code=Code.SELECTOR_FAILED,
        what=f"the scheduler ends its search on node {node}{more} at device {device.device} of "
        f"pool {device.pool}, driver {device.driver}: {answer.failure}; "
        f"test that a key exists before you read it, or exclude the device by its driver",
    )


def _constraint(wanted: Wanted, index: int, node: str) -> Finding:
    constraint = wanted.constraints[index]
    kind = "distinctAttribute" if constraint.distinct else "matchAttribute"
    of = f" of requests {', '.join(constraint.requests)}" if constraint.requests else ""
    same = "different values" if constraint.distinct else "one value"
    return Finding(
        code=Code.CONSTRAINT_NOT_MET,
        what=f"no node has enough free devices with {same} of {constraint.attribute}, which "
        f"{kind}{of} of {wanted.origin} requires; without this constraint it fits on node {node}",
    )


def _too_few(origin: str, report: RequestReport, reader: str | None) -> Finding:
    request, found, analysis = report.analysis.request, report.found, report.analysis
    name = f'request "{report.name}"'
    devices = f'DeviceClass "{request.device_class}" that {name} of {origin} could use'
    if not analysis.matching:
        return Finding(
            code=Code.NO_DEVICE_PUBLISHED,
            what=f"no node publishes a device of {devices}{_rejected(analysis)}; check that the "
            f"driver runs and publishes ResourceSlices, and the selectors of class and request",
        )
    if found.total == 0 and not request.capacity:
        return Finding(
            code=Code.NO_DEVICE_PUBLISHED,
            what=f"no published device of {devices} can ever be allocated, because each consumes "
            f"more of a counter than its pool has; correct the driver",
        )
    if found.total == 0:
        return Finding(
            code=Code.NO_DEVICE_PUBLISHED,
            what=f'no published device of DeviceClass "{request.device_class}" that {name} of '
            f"{origin} selects has the capacity that it asks for; lower capacity.requests or add "
            f"devices",
        )
    if found.total < needed(request):
        verb = "is" if found.total == 1 else "are"
        return Finding(
            code=Code.NO_DEVICE_PUBLISHED,
            what=f"{name} of {origin} asks for {request.count} devices of DeviceClass "
            f'"{request.device_class}", but only {found.total} {verb} published that it could '
            f"use; lower count or add devices",
        )
    if found.free >= needed(request, found):
        node, most = found.most_free
        return Finding(
            code=Code.REQUESTS_COMPETE,
            what=f"{name} of {origin} asks for {request.count} devices of DeviceClass "
            f'"{request.device_class}" on one node, and no node has so many free: node {node} has '
            f"the most ({most}); lower count or add devices to one node",
        )
    released = found.free + found.releasable >= needed(request, found)
    code = Code.DEVICES_TAINTED
    if released:
        code = Code.DEVICES_ALLOCATED
    elif not found.tainted.devices:
        code = Code.DEVICES_ON_OTHER_NODES
    what = f"{state(found, of=devices, reader=reader)}; {remedy(found, released=released)}"
    return Finding(code=code, what=what)


def _rejected(analysis: Analysis) -> str:
    """Return how many devices each selector rejects, as a clause."""
    parts = [
        f"{owner} rejects {number} by {_shown(expression)}"
        for owner, expression, number in analysis.rejected
        if number
    ]
    if not parts:
        return ""
    return f" (of {analysis.published} published, {', '.join(parts)})"


def _shown(expression: str) -> str:
    flat = " ".join(expression.split())
    return flat if len(flat) <= 120 else f"{flat[:117]}..."
