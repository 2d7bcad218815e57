"""
Explains why a pod is pending. Returns the result that the scheduler would get, and a sentence with
the problem and the remedy.

Nodes that the pod cannot use are excluded first (:mod:`.nodes`). Kubernetes' allocator checks the
others (:mod:`.queries`). If it finds devices on a node, no reason is returned, because the pod is
waiting for something else. Otherwise, :mod:`.shortage` identifies the cause. If requested,
:mod:`.remedies` proves which change would be enough, which takes longer than the rest. Both steps
have a budget (:mod:`.budget`), and raise :class:`.QueriesPendingError` until the queries that they
planned have results.

The same situation results in the same sentence (without a time or a number of attempts), so that
Events can be deduplicated. Facts that cannot be evaluated are reported as unknown.

Does not depend on Kubernetes clients, clocks, or earlier reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, partial

from drakit_explain.allocation import NotEvaluatedError
from drakit_explain.availability import Analysis, analyze, analyze_in_steps, budget_of
from drakit_explain.broken import (
    broken_pod,
    claims_of_pod,
    failed_pod,
    gone_devices,
    has_others,
    is_placed,
    node_of_claim,
    not_bindable,
)
from drakit_explain.budget import Budget, BudgetSpentError
from drakit_explain.codes import Cause, Code, Finding, Reason, cause_at_node, no_remedy
from drakit_explain.counts import MAX_NAMES, OTHERS
from drakit_explain.deletion import pod_stays
from drakit_explain.evidence import NO_EVENTS, Events
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    NodeFacts,
    PodFacts,
    Request,
    exact_of,
    exact_requests,
)
from drakit_explain.nodes import NodeProblem, Nodes, Unusable, UsableNodes
from drakit_explain.pending_claims import (
    Wanted,
    classes_missing,
    extended,
    misspelt_resources,
    resolve,
    wanted_of,
)
from drakit_explain.pools import PoolState
from drakit_explain.queries import Query, Verdicts, answered
from drakit_explain.recent import keep
from drakit_explain.remedies import proven_remedies, replaced_device
from drakit_explain.reports import not_registered
from drakit_explain.shortage import (
    RequestReport,
    counted_shortage,
    findings_of_errors,
    findings_of_shortage,
    is_given_up,
    reported_by_scheduler,
)
from drakit_explain.templates import never_together
from drakit_explain.trial import Judged, Trial, judge
from drakit_explain.verdicts import Verdict as AllocatorVerdict
from drakit_explain.wording import lacks
from drakit_explain.world import World

MAX_KEPT = 64
"""Maximum number of requests with cached counts, and of pods with cached results. Each entry takes
about 0.5 MiB in a cluster of 2,000 nodes. The least recently used are dropped first."""


_MAY_END = {Code.DEVICES_ALLOCATED, Code.DEVICES_TAINTED}
"""Reasons that no longer apply when devices become free."""


class Verdict(StrEnum):
    """The result of an explanation."""

    NOT_PENDING = "not pending"
    """The pod has a node, or the scheduler ignores it, because it is gated or being deleted."""

    STARTING = "starting"
    """The pod has a node and no known problem, but not all of its containers have started."""

    BROKEN = "broken"
    """The pod has a node, but its claims prevent it from starting, or its devices have a
    problem."""

    DELETING = "deleting"
    """The pod is being deleted, and something prevents the deletion from completing."""

    BLOCKED = "blocked"
    """The scheduler cannot bind the pod, because of its claims."""

    FITS = "fits"
    """Devices for the pod are available. If the pod stays pending, its claims are not the cause.
    Any reasons are about how it would start on the node."""

    UNDECIDED = "undecided"
    """A fact could not be evaluated, or the explanation has used its budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimReport:
    """A claim of the pod, as the scheduler sees it."""

    origin: str
    """The origin of the claim: ``claim "name"`` or ``claim template "name"``."""

    claim: str | None
    allocated: bool
    requests: tuple[RequestReport, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """The explanation of a pod."""

    verdict: Verdict
    reasons: tuple[Reason, ...] = ()
    claim_reasons: tuple[Reason, ...] = ()
    """Those of the `reasons` that keep claims from being allocated, as one sentence for each
    claim."""

    claims: tuple[ClaimReport, ...] = ()
    nodes: Nodes = field(default_factory=dict[str, "Unusable | None"])
    """All nodes, each with the reason, other than devices, why the pod cannot use it."""

    find_remedy: Callable[[], str] = field(default=no_remedy, compare=False)
    """Searches for the `remedy`. It must first be called before the next change to the world."""

    fits_on: str = ""
    unknown: tuple[str, ...] = ()

    @property
    def remedy(self) -> str:
        """The changes that would make the pod fit, as a clause. Each is proven to be enough by
        itself. Empty if there are none."""
        return self.find_remedy()


PODS_AT_ONCE = 200
"""How many pods to process before other tasks can run, which takes a few milliseconds."""


def waits(pod: PodFacts) -> bool:
    """Return whether the scheduler is searching for a node for the pod."""
    return pod.node is None and not pod.gated and not pod.deleting and pod.phase == "Pending"


def count_waiting(world: World, found: dict[str, set[str]]) -> Iterator[None]:
    """
    For each DeviceClass, add the UIDs of the pods that are waiting with unallocated claims for it.
    Other tasks can run after each part of the work.

    Tenants choose the names in claims. Therefore, only the first existing classes have their own
    sets, and `OTHERS` contains the pods that request any other name.
    """
    classes = sorted(each.name for each in world.of(ClassFacts).values())[:MAX_NAMES]
    found |= {name: set[str]() for name in (*classes, OTHERS)}
    for done, name in enumerate(list(world.waiting_pods())):
        if done % PODS_AT_ONCE == PODS_AT_ONCE - 1:
            yield
        pod = world.of(PodFacts).get(name)
        if pod is None or not waits(pod):
            continue
        wanted = (request for each in wanted_of(pod, world) for request in each.requests)
        for request in exact_of(wanted):
            found[request.device_class if request.device_class in found else OTHERS].add(pod.uid)


def searching(pod: PodFacts, world: World) -> PodFacts | None:
    """
    Return the pod for which devices are searched, or None.

    While a pod is waiting, it is the pod itself. If one of the pod's devices is gone, it is the pod
    that the controller would create as a replacement.
    """
    if waits(pod):
        return pod
    if not is_placed(pod) or not any(gone_devices(pod, world)):
        return None
    return replace(
        pod,
        node=None,
        phase="Pending",
        claims=tuple(replace(each, generated=None) for each in pod.claims),
        extended_claim=None,
        scheduling_message="",
    )


@dataclass(slots=True)
class _Result:
    """The result that equal pods share, until the world changes."""

    key: object
    judged: Judged
    left: int
    """The number of steps that were left in the budget."""

    remedy: str | None = None
    never: list[Finding] | None = None
    """The reasons why claims cannot be allocated even if all devices are free."""


class Explainer:
    """Explains pods of one world. Caches the results of requests until the world changes."""

    def __init__(self, world: World, *, name_all_holders: bool = False) -> None:
        """
        Explain pods of a world.

        :param name_all_holders: whether to also name claims in other namespaces. Reasons appear in
            Events that the pod's owner reads, so by default, such claims are only counted.
        """
        self._world = world
        self.verdicts: Verdicts = Verdicts(world)
        self._name_all = name_all_holders
        self._nodes = UsableNodes(world)
        self._analyses: dict[Request, Analysis] = {}
        self._revisions: tuple[int, int, int | None, int] = (-1, -1, None, 0)
        self._results: dict[int, _Result] = {}
        """The results, keyed by the hash of the key. The hash is computed only once, because that
        takes the longest."""

    def expressions(self, pod: PodFacts) -> list[str]:
        """Return the selectors that must be evaluated before the pod is explained."""
        return self._world.texts(self._exact_requests(pod))

    def prepare(self, pod: PodFacts) -> Iterator[None]:
        """Count the devices that the explanation of a pod needs. Yields at intervals. Calling this
        is optional."""
        world, budget = self._world, budget_of(self._world)
        with suppress(BudgetSpentError, NotEvaluatedError, ValueError):
            for request in self._exact_requests(pod):
                key = replace(request, name="")
                before = self._analyses.get(key)
                newest = max(world.slices_revision, world.rules_revision)
                if before is not None and before.revision >= newest:
                    continue
                for found in analyze_in_steps(key, world, budget, before=before):
                    if found is not None:
                        keep(self._analyses, key, found, limit=MAX_KEPT)
                    yield

    def _exact_requests(self, pod: PodFacts) -> list[Request]:
        searched = searching(pod, self._world)
        wanted = wanted_of(searched, self._world) if searched is not None else ()
        return exact_of(request for each in wanted for request in each.requests)

    def explain(
        self, pod: PodFacts, *, settled: bool = False, events: Events = NO_EVENTS
    ) -> Explanation:
        """
        Return the reasons why a pod's claims are not allocated, or cannot be used on its node.

        :param settled: whether the pod has not changed for some time. If so, a state that is normal
            for a short time is a problem.
        :param events: the Events about the pod and its claims, if they are known.

        Raises :class:`QueriesPendingError` if the planned queries must be run first.
        """
        self.verdicts.take()
        if pod.deleting:
            held = pod_stays(pod, self._world, settled=settled, events=events)
            verdict = Verdict.DELETING if held else Verdict.NOT_PENDING
            return Explanation(verdict=verdict, reasons=held)
        if pod.phase == "Failed":
            return Explanation(verdict=Verdict.BROKEN, reasons=failed_pod(pod))
        if is_placed(pod):
            return self._placed(pod, settled=settled, events=events)
        if not waits(pod):
            return Explanation(verdict=Verdict.NOT_PENDING)
        self._refresh()
        found = [
            resolve(pod, each, self._world, settled=settled, events=events, name_all=self._name_all)
            for each in pod.claims
        ]
        allocated = [each for each in found if isinstance(each, ClaimFacts)]
        reports = [_report_allocated(each) for each in allocated]
        blocked = [each for each in found if isinstance(each, Finding)]
        of_resources, unknown = extended(pod, self._world)
        wanted = [*(each for each in found if isinstance(each, Wanted)), *of_resources]
        blocked += (
            missing
            for each in wanted
            for request in each.requests
            for missing in classes_missing(
                each.origin,
                request,
                self._world,
                claim=self._world.claim(pod.namespace, each.claim),
            )
        )
        blocked += not_bindable(pod, allocated, self._world)
        blocked += misspelt_resources(pod, self._world)
        if blocked:
            return self._blocked(pod, blocked, reports)
        budget = budget_of(self._world)
        try:
            nodes = self._nodes.of(pod, allocated, budget)
        except BudgetSpentError:
            return _undecided(["the pod has too many rules for nodes"], reports, {})
        if unknown:
            return _undecided(unknown, reports, nodes)
        if not wanted:
            if elsewhere := list(self._elsewhere(pod, allocated, nodes)):
                return self._blocked(pod, elsewhere, reports, nodes)
            if all(nodes.values()) and (unused := _unused(pod, allocated, nodes)):
                return _undecided(unused, reports, nodes)
            node = next(filter(None, map(node_of_claim, allocated)), "")
            cannot_start = self._unregistered(pod, node, allocated)
            return Explanation(
                verdict=Verdict.FITS, reasons=cannot_start, claims=tuple(reports), nodes=nodes
            )
        try:
            return self._search(pod, wanted, allocated, nodes, reports, budget)
        except BudgetSpentError:
            return _undecided(["the search for the cause took too long"], reports, nodes)
        except (NotEvaluatedError, ValueError) as error:  # ValueError: a malformed quantity
            return _undecided([str(error)], reports, nodes)

    def explain_now(
        self,
        pod: PodFacts,
        answer: Callable[[Query], AllocatorVerdict],
        *,
        settled: bool = False,
        events: Events = NO_EVENTS,
    ) -> Explanation:
        """Explain a pod, and use `answer` to run all queries. This may take seconds."""
        explain = partial(self.explain, pod, settled=settled, events=events)
        found = answered(self.verdicts, explain, answer)
        find_remedy = partial(answered, self.verdicts, found.find_remedy, answer)
        return replace(found, find_remedy=find_remedy)

    def _unregistered(
        self,
        pod: PodFacts,
        node: str,
        allocated: Sequence[ClaimFacts],
        judged: Judged | None = None,
    ) -> tuple[Reason, ...]:
        """Return the reasons why a pod that fits on a node could not start there, because drivers
        are not registered. The scheduler does not know these reasons."""
        drivers = dict.fromkeys(one.device.driver for each in allocated for one in each.results)
        if judged is not None:
            drivers |= dict.fromkeys(sorted(judged.answers[node].drivers))
        return tuple(
            Reason(
                code=Code.DRIVER_UNAVAILABLE,
                sentence=f"pod {pod.namespace}/{pod.name} fits on node {node}, but cannot start "
                f"there: driver {driver} is not registered with the kubelet ({state}); check the "
                f"log of the node plugin on that node",
                regarding=pod.reference,
                transient=Code.DRIVER_UNAVAILABLE,
                cause=cause_at_node(
                    node, f"driver {driver} is not registered with the kubelet", self._world
                ),
            )
            for driver in drivers
            if (state := not_registered(driver, node, self._world))
        )

    def _elsewhere(
        self, pod: PodFacts, allocated: Sequence[ClaimFacts], nodes: Nodes
    ) -> Iterator[Finding]:
        """Return findings about claims that other pods use on nodes where this pod cannot run."""
        if not self._world.of(NodeFacts) or any(problem is None for problem in nodes.values()):
            return
        for claim in allocated:
            if claim.nodes is not None and has_others(claim, pod):
                only = node_of_claim(claim)
                where = f"on node {only}" if only is not None else "on nodes"
                problem = nodes.get(only) if only is not None else None
                full = problem is not None and problem.problem is NodeProblem.RESOURCES
                fix = "free resources on that node" if full else "allow the pod to run there"
                yield Finding(
                    code=Code.DEVICES_ON_OTHER_NODES,
                    what=f"its claim {claim.name} is allocated {where} where the pod cannot "
                    f"run{lacks(problem)}, and other pods use the claim; {fix}, or use another "
                    f"claim",
                )

    def _placed(self, pod: PodFacts, *, settled: bool, events: Events) -> Explanation:
        reasons = broken_pod(pod, self._world, settled=settled, events=events)
        is_starting = pod.phase == "Pending" or pod.is_starting
        fine = Verdict.STARTING if is_starting else Verdict.NOT_PENDING
        new = searching(pod, self._world) if reasons else None
        return Explanation(
            verdict=Verdict.BROKEN if reasons else fine,
            reasons=reasons,
            find_remedy=no_remedy if new is None else cache(lambda: self._replaced(pod, new)),
            claims=tuple(map(_report_allocated, claims_of_pod(pod, self._world))),
        )

    def _replaced(self, pod: PodFacts, new: PodFacts) -> str:
        """Return the device that a new pod would get instead of a missing one, as a clause."""
        found = self.explain(new)
        if found.verdict is not Verdict.FITS or not found.fits_on or found.reasons:
            return ""
        requests = [each for one in wanted_of(new, self._world) for each in one.requests]
        gone = gone_devices(pod, self._world)
        return replaced_device(gone, requests, found.fits_on, self._world)

    # ---- the cluster's devices

    def _refresh(self) -> None:
        world = self._world
        loads = world.loads.revision if world.loads is not None else None
        revisions = (world.revision, world.registrations_revision, loads, self.verdicts.revision)
        if self._revisions != revisions:
            self._revisions = revisions
            self._results.clear()

    def _analysis(self, request: Request, budget: Budget) -> Analysis:
        key = replace(request, name="")
        found = self._analyses.get(key)
        if found is None or found.revision != self._world.revision:
            found = analyze(request, self._world, budget, before=found)
        keep(self._analyses, key, found, limit=MAX_KEPT)
        return found

    # ---- the verdict

    def _search(
        self,
        pod: PodFacts,
        wanted: Sequence[Wanted],
        allocated: Sequence[ClaimFacts],
        nodes: Nodes,
        reports: list[ClaimReport],
        budget: Budget,
    ) -> Explanation:
        trial = Trial(
            world=self._world,
            verdicts=self.verdicts,
            wanted=wanted,
            nodes=nodes,
            budget=budget,
            analyze=self._analysis,
            own=frozenset(claim.uid for claim in allocated),
        )
        result = self._result(pod, allocated, trial)
        judged = result.judged
        with suppress(BudgetSpentError):
            reports.extend(_report(each, trial) for each in wanted)
        reader = None if self._name_all else pod.namespace
        by_origin = {each.origin: each.requests for each in reports}
        if judged.fatal and (unread := _unread(trial)):
            return _undecided(unread, reports, nodes)
        if judged.fatal and (judged.fits_on or judged.unjudged or judged.fails):
            if pod.unchecked and not is_given_up(pod):
                return _undecided(_perhaps_not_reached(pod, judged), reports, nodes)
            given_up = findings_of_errors(trial, judged)
            return self._blocked(pod, given_up, reports, nodes, fits_on=judged.fits_on)
        if not judged.fatal:
            if told := reported_by_scheduler(pod, trial.rules):
                return self._blocked(pod, [told], reports, nodes, fits_on=judged.fits_on)
            if judged.fits_on:
                return Explanation(
                    verdict=Verdict.FITS,
                    reasons=self._unregistered(pod, judged.fits_on, allocated, judged),
                    claims=tuple(reports),
                    nodes=nodes,
                    fits_on=judged.fits_on,
                )
            if unknown := (
                _unjudged(judged, counted_shortage(trial, by_origin, reader=reader))
                or _unused(pod, allocated, nodes)
                or _unread(trial)
                or _uncertain(trial)
            ):
                return _undecided(unknown, reports, nodes)
        # Raises an error if the budget was used up, because then the reports are incomplete.
        trial.budget.spend()
        findings = findings_of_shortage(
            trial, by_origin, judged, reader=reader, preempting=pod.displaces > 0
        )
        if any(each.code in _MAY_END for each in findings):
            findings = self._with_never(findings, trial, result)
        return self._blocked(
            pod,
            findings,
            reports,
            nodes,
            find_remedy=cache(lambda: self._remedy(pod, allocated, trial, result)),
        )

    def _with_never(self, findings: list[Finding], trial: Trial, result: _Result) -> list[Finding]:
        """Put the findings first that would remain even if all devices were free. Remove the advice
        from the other findings, because it would not be enough."""
        lasting = [each for each in findings if each.code is Code.CONSTRAINT_NOT_MET]
        unnamed = trial.unnamed()
        if not lasting and result.never is None:
            several = len(list(trial.requests())) > 1 or any(
                each.constraints for each in trial.wanted
            )
            result.never = (
                never_together(unnamed.wanted, self._world, self.verdicts) if several else []
            )
        if not lasting:  # equal pods share the result, but not their claims
            pairs = list(zip(trial.wanted, unnamed.wanted, strict=True))
            lasting = [
                replace(
                    found,
                    what=trial.named(found.what),
                    claims=tuple([one.claim for one, each in pairs if each.origin in found.claims]),
                )
                for found in result.never or ()
            ]
        if not lasting:
            return findings
        return [*lasting, *(replace(each, advice="") for each in findings if each not in lasting)]

    def _result(self, pod: PodFacts, allocated: Sequence[ClaimFacts], trial: Trial) -> _Result:
        """Return the node results for a pod. Pods with equal rules and claims share them."""
        key = (
            (pod.namespace, pod.placement, pod.requests, pod.displaces),
            tuple(claim.name for claim in allocated),
            tuple(trial.wanted),
        )
        number = hash(key)
        found = self._results.get(number)
        if found is None or found.key != key:
            judged = judge(trial, reached=lambda name: self._nodes.passes(pod, name))
            found = _Result(key, judged, trial.budget.left)
        trial.budget.left = found.left
        keep(self._results, number, found, limit=MAX_KEPT)
        return found

    def _remedy(
        self, pod: PodFacts, allocated: Sequence[ClaimFacts], trial: Trial, result: _Result
    ) -> str:
        """Return the proven remedies, which have a separate budget."""
        if result.remedy is None:
            self.verdicts.take()
            budget = budget_of(self._world)
            result.remedy = proven_remedies(
                replace(trial.unnamed(), budget=budget, fatal=result.judged.distinct),
                reader=None if self._name_all else pod.namespace,
                usable_after=lambda name: self._nodes.after(pod, allocated, name, budget),
            )
        return trial.named(result.remedy)

    def _blocked(
        self,
        pod: PodFacts,
        blocked: Sequence[Finding],
        reports: Sequence[ClaimReport],
        nodes: Nodes | None = None,
        *,
        fits_on: str = "",
        find_remedy: Callable[[], str] = no_remedy,
    ) -> Explanation:
        blocked = [
            each if each.cause is not None else replace(each, cause=self._of_template(pod, each))
            for each in blocked
        ]
        return Explanation(
            verdict=Verdict.BLOCKED,
            fits_on=fits_on,
            find_remedy=find_remedy,
            reasons=tuple(
                each.about(pod.reference, f"pod {pod.namespace}/{pod.name} waits: ")
                for each in dict.fromkeys(blocked)
            ),
            claim_reasons=tuple(
                each.about(
                    claim.reference,
                    f"ResourceClaim {claim.namespace}/{claim.name} is not allocated for pod "
                    f"{pod.name}: ",
                )
                for each in dict.fromkeys(blocked)
                for name in each.claims
                if (claim := self._world.claim(pod.namespace, name)) is not None
            ),
            claims=tuple(reports),
            nodes=nodes or {},
        )

    def _of_template(self, pod: PodFacts, finding: Finding) -> Cause | None:
        """Return the cause that the pods of a template share, such as a missing class."""
        if not pod.claims or not all(each.template for each in pod.claims):
            return None
        template = self._world.template(pod.namespace, pod.claims[0].template or "")
        return Cause(template.reference, finding.what) if template is not None else None


def _report_allocated(claim: ClaimFacts) -> ClaimReport:
    return ClaimReport(origin=f'claim "{claim.name}"', claim=claim.name, allocated=claim.allocated)


def _report(wanted: Wanted, trial: Trial) -> ClaimReport:
    return ClaimReport(
        origin=wanted.origin,
        claim=None,
        allocated=False,
        requests=tuple(
            RequestReport(name=name, analysis=trial.analysis(exact), found=trial.found(exact))
            for request in wanted.requests
            for name, exact in exact_requests(request)
        ),
    )


def _undecided(unknown: Sequence[str], reports: Sequence[ClaimReport], nodes: Nodes) -> Explanation:
    return Explanation(
        verdict=Verdict.UNDECIDED, claims=tuple(reports), nodes=nodes, unknown=tuple(unknown)
    )


def _unused(pod: PodFacts, allocated: Sequence[ClaimFacts], nodes: Nodes) -> list[str]:
    """Describe the claims that exclude nodes even though no other pod uses them. The scheduler may
    deallocate them."""
    excluding = {
        problem.detail
        for problem in nodes.values()
        if problem is not None and problem.problem is NodeProblem.CLAIM
    }
    return [
        f"claim {claim.name} is allocated for other nodes, but no pod uses it, so the scheduler "
        f"might allocate it again"
        for claim in allocated
        if claim.name in excluding and not has_others(claim, pod)
    ]


def _perhaps_not_reached(pod: PodFacts, judged: Judged) -> list[str]:
    """Explain that the scheduler may never reach a fatal error, because other filters run before
    the DRA plugin's filter, and may exclude the node."""
    first, number = next(iter(judged.fatal)), len(judged.fatal)
    more = f" and {number - 1} more" if number > 1 else ""
    why = ", ".join(pod.unchecked)
    return [f"the allocator fails on node {first}{more}, but {why} may exclude that node first"]


def _unjudged(judged: Judged, counted: Sequence[str]) -> list[str]:
    """Return the reasons why nodes do not have a result, and the findings from the counts."""
    if undecided := [each.text for each in judged.answers.values() if each.undecided]:
        return [undecided[0], *counted]
    if judged.unjudged:
        first, number = judged.unjudged[0], len(judged.unjudged)
        nodes = f"node {first}" if number == 1 else f"node {first} and {number - 1} more"
        return [f"there are too many nodes, so drakit did not check {nodes}", *counted]
    return []


def _unread(trial: Trial) -> list[str]:
    """Describe the facts that could not be read, which make every reason uncertain."""
    if names := trial.world.unreadable():
        return [f"ResourceSlice {names[0]} could not be read"]
    return _of_pool(trial, PoolState.UNREAD, "has more devices than drakit evaluates")


def _uncertain(trial: Trial) -> list[str]:
    """Describe the unknown facts that make a shortage uncertain."""
    if trial.rules.skips_pools:  # later releases do not allocate from such a pool
        return []
    return _of_pool(trial, PoolState.INCOMPLETE, "is incomplete: slices are missing")


def _of_pool(trial: Trial, state: PoolState, what: str) -> list[str]:
    for pool in trial.not_ready():
        if pool.state is state and trial.concerns(pool):
            return [f"pool {pool.identity.pool} of driver {pool.identity.driver} {what}"]
    return []
