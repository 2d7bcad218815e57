"""
Explains a pod or a claim with :mod:`drakit_explain`, based on the objects that the user is allowed
to read.

If a missing permission could have caused a reason, the reason is dropped, and the result is
"undecided". Does not depend on sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from drakit_cli.kubectl.capabilities import evaluate_selectors
from drakit_cli.kubectl.gather import Gathered
from drakit_cli.kubectl.output import MAX_NAMES, Output, shortened
from drakit_cli.kubectl.pods import SeenPod
from drakit_explain.allocation import NotEvaluatedError
from drakit_explain.availability import Availability
from drakit_explain.broken import broken_claim, claims_of_pod, node_of_claim, taints_for_new_pods
from drakit_explain.bugs import Bug, bug_behind, known_bugs
from drakit_explain.codes import Cause, Code, Reason, certain, no_remedy
from drakit_explain.deletion import claim_stays
from drakit_explain.evidence import AUTOSCALER
from drakit_explain.kinds import CLAIMS, CLASSES, NODES, PODS, RULES, SLICES
from drakit_explain.model import (
    ClaimFacts,
    NodeFacts,
    PodClaim,
    PodFacts,
    Request,
    SliceFacts,
    TemplateFacts,
    exact_of,
)
from drakit_explain.nodes import NodeProblem, Unusable
from drakit_explain.pending import ClaimReport, Explainer, Explanation, Verdict, searching, waits
from drakit_explain.pending_claims import not_checked, wanted_of
from drakit_explain.queries import Query
from drakit_explain.shortage import RequestReport, is_given_up
from drakit_explain.verdicts import Verdict as AllocatorVerdict
from drakit_explain.wording import cut
from drakit_explain.world import Selection, World

Ask = Callable[[Query], AllocatorVerdict]
"""Sends a query to Kubernetes' allocator."""

FINE = (Verdict.FITS, Verdict.STARTING, Verdict.NOT_PENDING)
"""The verdicts for pods without a known problem."""

UNDECIDED_CODE = 4
"""The exit code if the result is undecided."""

_COUNTS = (
    *("REQUEST", "CLASS", "WANTS", "PUBLISHED", "MATCHING"),
    *("FREE", "ALLOCATED", "TAINTED", "ELSEWHERE", "TOO SMALL"),
)
COLORS = {
    Verdict.BLOCKED: "bad",
    Verdict.BROKEN: "bad",
    Verdict.DELETING: "bad",
    Verdict.UNDECIDED: "unsure",
    Verdict.FITS: "good",
    Verdict.STARTING: "good",
    Verdict.NOT_PENDING: "good",
}
"""The colors of a result's sentences, keyed by verdict."""

_NODE_RULES = {
    NodeProblem.SELECTOR: "node selector or affinity excludes them",
    NodeProblem.TAINT: "taint {} is not tolerated",
    NodeProblem.CORDONED: "cordoned",
    NodeProblem.RESOURCES: "too little {} left",
    NodeProblem.CLAIM: "allocated claim {} is not available there",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The explanation of a pod or a claim."""

    kind: str
    namespace: str
    name: str
    verdict: Verdict
    sentences: tuple[str, ...]
    gated: bool = False
    """Whether scheduling gates block the pod."""

    remedy: str = ""
    """The possible changes. According to the allocator, each of them is sufficient."""

    codes: tuple[str, ...] = ()
    causes: tuple[Cause | None, ...] = ()
    """The cause of each reason. Reasons of several pods with the same cause are grouped."""

    claims: tuple[ClaimReport, ...] = ()
    nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, "tuple[str, ...]"])
    """The nodes that the pod cannot use, keyed by reason."""

    fits_on: str = ""
    scheduler: str = ""
    unknown: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """The sentences, and the remedy if there is one."""
        return (*self.sentences, self.remedy) if self.remedy else self.sentences

    @property
    def summary(self) -> str:
        """The first sentence. If it begins with the name of the pod, the name is removed."""
        first = self.sentences[0] if self.sentences else ""
        return first.removeprefix(f"pod {self.namespace}/{self.name} ").removeprefix("waits: ")

    @property
    def reasons(self) -> str:
        """The codes of the reasons, without duplicates."""
        return ", ".join(dict.fromkeys(self.codes))

    @property
    def exit_code(self) -> int:
        if self.verdict is Verdict.UNDECIDED:
            return UNDECIDED_CODE
        fine = not self.codes and self.verdict in FINE
        return 0 if fine else 1

    @property
    def is_done(self) -> bool:
        """Whether nothing is pending."""
        return not self.exit_code and self.verdict is not Verdict.STARTING and not self.gated

    def body(self) -> dict[str, Any]:
        """Return the explanation as JSON."""
        return {
            "object": {"kind": self.kind, "namespace": self.namespace, "name": self.name},
            "verdict": self.verdict.value,
            "reasons": [
                {"code": code, "sentence": text}
                for code, text in zip(self.codes, self.sentences, strict=False)
            ],
            "remedy": self.remedy,
            "message": "; ".join(self.lines),
            "claims": [_claim_body(each) for each in self.claims],
            "fitsOn": self.fits_on,
            "unusableNodes": {reason: list(names) for reason, names in self.nodes.items()},
            "schedulerMessage": self.scheduler,
            "notEvaluated": list(self.unknown),
        }

    def show(self, output: Output) -> None:
        """Print the explanation."""
        for sentence in self.lines:
            # Don't add a second period if the sentence ends with a quoted message that has one.
            sentence = sentence.removesuffix(".")
            output.line(f"{sentence[0].upper()}{sentence[1:]}.", color=COLORS[self.verdict])
        for claim in self.claims:
            output.line()
            output.line(f"{claim.origin[0].upper()}{claim.origin[1:]}:", color="head")
            if claim.allocated or not claim.requests:
                output.line("allocated" if claim.allocated else "not allocated", indent=2)
                continue
            rows: list[list[str]] = []
            for each in claim.requests:
                request = each.analysis.request
                numbers = [str(number) for number in counts(each).values()]
                rows.append([each.name, request.device_class, wanted(request), *numbers])
            output.table(_COUNTS, rows, indent=2)
            for each in claim.requests:
                for text in notes(each, wide=output.wide):
                    output.line(text, indent=2)
        output.lines(
            "Nodes that cannot be used",
            (
                f"{shortened(names, most=len(names) if output.wide else MAX_NAMES)}: {why}"
                for why, names in self.nodes.items()
            ),
        )
        output.lines("The scheduler reports", [self.scheduler] if self.scheduler else [])
        output.lines("Not evaluated", self.unknown)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reports:
    """The explanations of several objects."""

    reports: tuple[Report, ...]

    @property
    def exit_code(self) -> int:
        return worst_code(self.reports)

    @property
    def is_done(self) -> bool:
        """Whether nothing is pending."""
        return all(each.is_done for each in self.reports)

    def body(self) -> dict[str, Any]:
        """Return the explanations as JSON."""
        return {"items": [each.body() for each in self.reports]}

    def show(self, output: Output) -> None:
        """Print each explanation in full."""
        for number, report in enumerate(self.reports):
            if number:
                output.line()
            report.show(output)


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting(Reports):
    """The explanations of waiting pods, and the unknown facts."""

    gaps: tuple[str, ...] = ()
    where: str
    """The requested namespace, or an empty string for all namespaces."""

    def show(self, output: Output) -> None:
        """Print a line for each pod."""
        if self.reports:
            rows = [
                (each.namespace, each.name, each.verdict.value, each.reasons, each.summary)
                for each in self.reports
            ]
            head = ("NAMESPACE", "NAME", "VERDICT", "REASON", "MESSAGE")
            output.table(head, rows, cut=not output.wide)
        else:
            where = f" in namespace {self.where}" if self.where else ""
            output.line(f"No pod waits for devices{where}.")
        output.lines("Not evaluated", self.gaps)


def worst_code(reports: Iterable[Report]) -> int:
    """Return 1 if there is a problem, otherwise 4 if a result is undecided, otherwise 0."""
    codes = {each.exit_code for each in reports}
    return 1 if 1 in codes else UNDECIDED_CODE if UNDECIDED_CODE in codes else 0


def selectors_of(pods: Iterable[PodFacts], found: Gathered) -> list[str]:
    """Return the selectors that must be evaluated before pods are explained."""
    explainer = Explainer(found.world)
    texts = (text for pod in pods for text in explainer.expressions(pod))
    return list(dict.fromkeys(texts))


def nodes_that_matter(pods: Iterable[PodFacts], found: Gathered) -> set[str]:
    """Return the nodes with a device that a request of the pods selects, or with a device that can
    end the search."""
    waiting = [one for pod in pods if (one := searching(pod, found.world)) is not None]
    if not waiting:
        return set()
    evaluate_selectors(found, selectors_of(waiting, found))
    world = found.world
    nodes = {name for name, _ in world.not_ready()} | _nodes_of_claims(waiting, world)
    requests = {
        exact: None
        for pod in waiting
        for each in wanted_of(pod, world)
        for exact in exact_of(each.requests)
    }
    selections = [Selection(world, exact) for exact in requests]
    for reach in world.reachable():
        if any(_may_select(each, reach.slice) for each in selections):
            nodes.update(reach.nodes)
    return nodes


def _nodes_of_claims(pods: Iterable[PodFacts], world: World) -> set[str]:
    """Return the nodes that can use the allocated claims of pods."""
    nodes: set[str] = set()
    for claim in (claim for pod in pods for claim in claims_of_pod(pod, world) if claim.allocated):
        one = node_of_claim(claim)
        nodes.update([one] if one is not None else (name for _, name in world.of(NodeFacts)))
    return nodes


def _may_select(selection: Selection, of: SliceFacts) -> bool:
    """Return whether a request selects a device in a slice, or ends the search at a device in
    it."""
    try:
        selected = selection.of(of)
    except NotEvaluatedError:
        return True
    return bool(selected.matches or selected.errors)


def explain_pods(
    pods: Sequence[SeenPod], found: Gathered, *, ask: Ask, brief: bool = False
) -> list[Report]:
    """
    Explain why each pod is waiting, does not start on its node, or still exists after its deletion.

    :param brief: whether to omit the nodes that each pod cannot use, and the remedies, which take
        longer than the rest.
    """
    evaluate_selectors(found, selectors_of((each.facts for each in pods), found))
    explainer = Explainer(found.world, name_all_holders=True)
    reports: list[Report] = []
    for each in pods:
        pod = each.facts
        explanation = explainer.explain_now(pod, ask, settled=each.settled, events=found.events)
        if brief:
            explanation = replace(explanation, find_remedy=no_remedy, nodes={})
        subject = f"pod {pod.namespace}/{pod.name}"
        reports.append(make_report(explanation, found, pod=pod, kind="Pod", subject=subject))
    return reports


def explain_claim(claim: ClaimFacts, found: Gathered, *, ask: Ask) -> Report:
    """Explain a claim: its state, or whether it could be allocated for a pod that has no other
    rules."""
    subject = f"claim {claim.namespace}/{claim.name}"
    pod = user_of(claim)
    if claim.deleting or claim.allocated:
        explanation = _placed_claim(claim, found)
    else:
        evaluate_selectors(found, selectors_of([pod], found))
        explanation = Explainer(found.world, name_all_holders=True).explain_now(pod, ask)
    report = make_report(explanation, found, pod=pod, kind="ResourceClaim", subject=subject)
    if report.verdict is Verdict.NOT_PENDING:
        taints = taints_for_new_pods(claim, found.world)
        return replace(report, sentences=(*_claim_state(claim, subject, found), *taints))
    if report.verdict is Verdict.UNDECIDED and claim.allocated:
        undecided = "it is unknown whether its devices have a problem"
        return replace(report, sentences=(*_claim_state(claim, subject, found), undecided))
    return report


def user_of(of: ClaimFacts | TemplateFacts) -> PodFacts:
    """Return a pod with only this claim, or a claim from this template, and without other rules."""
    by_name = of.name if isinstance(of, ClaimFacts) else None
    template = None if by_name else of.name
    claim = PodClaim(name=of.name, claim=by_name, template=template)
    return PodFacts(namespace=of.namespace, name=of.name, uid="", claims=(claim,))


def _placed_claim(claim: ClaimFacts, found: Gathered) -> Explanation:
    if claim.deleting:
        reasons = claim_stays(claim, found.world, all_pods=not found.lacks(PODS))
        verdict = Verdict.DELETING if reasons else Verdict.NOT_PENDING
        return Explanation(verdict=verdict, reasons=reasons)
    reasons = broken_claim(claim, found.world)
    verdict = Verdict.BROKEN if reasons else Verdict.NOT_PENDING
    return Explanation(verdict=verdict, reasons=reasons)


_USERS = 8
"""Maximum number of a claim's users to list in a sentence. A claim can have 256."""


def _claim_state(claim: ClaimFacts, subject: str, found: Gathered) -> tuple[str, ...]:
    if claim.deleting:
        return (f"{subject} is being deleted",)
    names = ", ".join(dict.fromkeys("/".join(each.device) for each in claim.results))
    users = cut(claim.users, _USERS)
    used = f"it is reserved for {users}" if users else "no pod uses it"
    state = f"{subject} is allocated: {names or 'no device'}", used
    pods = found.world.of(PodFacts).values()
    stale = {each.uid for each in claim.consumers if each.resource == "pods"}
    stale -= {each.uid for each in pods if each.phase not in ("Succeeded", "Failed")}
    if not stale or found.lacks(PODS):
        return state
    return (
        *state,
        f"{len(stale)} of these pods do not run: Kubernetes removes their entries of "
        f"status.reservedFor, so if they stay, check that the kube-controller-manager is running",
    )


def wanted(request: Request) -> str:
    """Return the number of devices that a request asks for, as a phrase."""
    return "all" if request.every else str(request.count)


MAX_HOLDERS = 100
"""Maximum number of holders to list for a request. In a large cluster, every claim may hold a
device."""


def holders(found: Availability) -> tuple[list[str], int]:
    """Return the names of claims that hold devices, hardware or shares of a request, and the total
    number of such claims."""
    claims = claims_holding(found)
    named = [
        f"claim {each.namespace}/{each.name} ({', '.join(each.users) or 'no pod'})"
        for each in claims[:MAX_HOLDERS]
    ]
    return named, len(claims)


def claims_holding(found: Availability) -> list[ClaimFacts]:
    """Return the claims that hold devices, hardware or shares of a request, sorted by name."""
    claims = found.allocated.claims | found.partitioned.claims | found.used_up.claims
    return sorted(claims.values(), key=lambda each: (each.namespace, each.name))


def _state(pod: PodFacts, subject: str, found: Gathered) -> list[str]:
    """Describe a pod that is scheduled, or that the scheduler ignores."""
    if pod.deleting:
        return [f"{subject} is being deleted"]
    if pod.gated:
        gates = ", ".join(pod.gates)
        return [
            f"{subject} has the scheduling gates {gates}: the scheduler ignores it until they are "
            f"removed"
        ]
    phase = f"(phase {pod.phase or 'unknown'})"
    if pod.node is None:
        return [f"{subject} is not waiting for devices {phase}"]
    if pod.phase == "Succeeded":
        return [f"{subject} has ended on node {pod.node} {phase}"]
    state = f"{subject} is scheduled to node {pod.node} {phase}"
    claims = claims_of_pod(pod, found.world)
    taints = [taint for each in claims for taint in taints_for_new_pods(each, found.world)]
    if missing := bug_behind(pod, None, found.world):
        taints.append(f"if its containers lack a device: {missing}")
    return [state, *taints] if taints else [f"{state}; its devices have no known problem"]


def make_report(
    explanation: Explanation, found: Gathered, *, pod: PodFacts, kind: str, subject: str
) -> Report:
    reasons = certain(explanation.reasons, found.world)
    unknown = [*explanation.unknown, *(str(gap) for gap in found.gaps)]
    if reasons and _may_not_be_reached(explanation, found, pod):
        reasons = []
        unknown.append("the allocator fails on a node that the scheduler may exclude first")
    verdict = _narrowed(explanation, reasons, found, pod)
    if verdict is Verdict.UNDECIDED:
        reasons = []
    if found.lacks(CLAIMS, CLASSES, NODES, SLICES, RULES):
        # Don't return a remedy, because any remedy could fail due to a fact that the user is not
        # allowed to see.
        explanation = replace(explanation, find_remedy=no_remedy)
    remedy = explanation.remedy if reasons else ""
    if kind != "Pod":
        remedy = remedy.replace("the pod would fit", "a pod that uses it would fit", 1)
    if waits(pod):
        unknown += _decided_by_others(pod)
    if reasons and len(reasons) < len(explanation.reasons):
        unknown.append(
            "there may be more reasons, which depend on objects that you have no permission to list"
        )
    return Report(
        kind=kind,
        namespace=pod.namespace,
        name=pod.name,
        verdict=verdict,
        sentences=(
            *_sentences(verdict, reasons, explanation, pod, kind, subject, found),
            *_of_autoscaler(pod, found),
        ),
        gated=pod.gated,
        remedy=remedy,
        codes=tuple(each.code.value for each in reasons),
        causes=tuple(each.cause for each in reasons),
        # Omit the counts if all slices are unknown, because they would all be zero.
        claims=() if found.lacks_all(SLICES) else explanation.claims,
        nodes=_grouped(explanation.nodes),
        fits_on=explanation.fits_on,
        scheduler="" if pod.node else pod.scheduling_message,
        unknown=tuple(dict.fromkeys(unknown)),
    )


def _of_autoscaler(pod: PodFacts, found: Gathered) -> Iterator[str]:
    event = found.events.latest([pod.uid], AUTOSCALER) if waits(pod) else None
    if event is not None:
        yield f"the autoscaler of the nodes reports: {event}"


def _narrowed(
    explanation: Explanation, reasons: Sequence[Reason], found: Gathered, pod: PodFacts
) -> Verdict:
    """Return the verdict, or "undecided" if it depends on facts that the user is not allowed to
    see."""
    verdict = explanation.verdict
    if explanation.reasons and not reasons:
        return Verdict.NOT_PENDING if verdict is Verdict.DELETING else Verdict.UNDECIDED
    if verdict is Verdict.FITS and _decided_by_others(pod):
        uncertain = True
    elif verdict is Verdict.FITS and explanation.fits_on:
        uncertain = found.lacks(CLAIMS, NODES, SLICES, RULES)
    elif verdict in (Verdict.NOT_PENDING, Verdict.STARTING) and pod.node and pod.claims:
        uncertain = found.lacks_all(SLICES) or found.lacks_all(CLAIMS)
    else:
        uncertain = False
    return Verdict.UNDECIDED if uncertain else verdict


def _may_not_be_reached(explanation: Explanation, found: Gathered, pod: PodFacts) -> bool:
    """Return whether the pod fits on a node according to the known facts, but unknown rules or free
    resources of the nodes might prevent that."""
    known = is_given_up(pod) or Code.SEARCH_FAILED in {each.code for each in explanation.reasons}
    return bool(explanation.fits_on) and not known and found.lacks(NODES, PODS)


def _decided_by_others(pod: PodFacts) -> list[str]:
    """Describe the rules that affect where a pod runs, but that drakit does not evaluate."""
    found: list[str] = []
    if pod.scheduler:
        found.append(
            f"scheduler {pod.scheduler} places the pod, and drakit knows only the rules of "
            f"Kubernetes' own"
        )
    if pod.group:
        found.append(
            f"the pod is placed together with its group {pod.group}, but drakit checks only one pod"
        )
    return found


def _sentences(
    verdict: Verdict,
    reasons: Sequence[Reason],
    explanation: Explanation,
    pod: PodFacts,
    kind: str,
    subject: str,
    found: Gathered,
) -> list[str]:
    match verdict:
        case Verdict.FITS:
            alone = f"pod {pod.namespace}/{pod.name} "
            cannot_start = [each.text.replace(alone, f"{subject} ", 1) for each in reasons]
            return [*cannot_start, _fits(pod, kind, subject, explanation, found)]
        case Verdict.NOT_PENDING | Verdict.STARTING:
            return _state(pod, subject, found)
        case Verdict.UNDECIDED if pod.node:
            return [f"it is unknown whether the devices of {subject} have a problem"]
        case Verdict.UNDECIDED:
            where = (
                f", but devices on node {explanation.fits_on} match" if explanation.fits_on else ""
            )
            verb = "scheduled" if kind == "Pod" else "allocated"
            return [f"it is unknown whether {subject} can be {verb}{where}"]
        case _:
            waits = f"pod {pod.namespace}/{pod.name} waits: "
            alone = f"{subject} cannot be allocated: "
            start = waits if kind == "Pod" else alone
            proven = verdict is Verdict.BLOCKED and explanation.remedy
            texts = [each.sentence if proven else each.text for each in reasons]
            return [
                start + text.removeprefix(waits) if text.startswith(waits) else text
                for text in texts
            ]


def _fits(pod: PodFacts, kind: str, subject: str, explanation: Explanation, found: Gathered) -> str:
    counts = _counts_of_scheduler(pod.scheduling_message)
    scheduler = f"; the scheduler reports {counts}" if counts else ""
    if not explanation.fits_on:
        if not explanation.claims and not pod.extended_claim:
            return f"{subject} uses no device, so it is not waiting for devices{scheduler}"
        allocated = f"all claims of {subject} are allocated"
        if explanation.reasons:
            return allocated
        return f"{allocated}, so it is not waiting for devices{scheduler}"
    then = _off(pod, counts, explanation) or _then(
        pod, counts, found, starts=not explanation.reasons
    )
    if kind != "Pod":
        then = "it is allocated when a pod that uses it is scheduled"
    then = "".join((then, *_bugs(pod, found, lambda bug: bug.allocates)))
    available = f"the devices for {subject} are available on node {explanation.fits_on}"
    return available if kind in ("ResourceClaimTemplate", "DeviceClass") else f"{available}; {then}"


def _bugs(pod: PodFacts, found: Gathered, matches: Callable[[Bug], bool]) -> Iterator[str]:
    """Return the known bugs in the release that a pod's claims, or any slice, can trigger."""
    own = {("ResourceClaim", each.claim or each.generated) for each in pod.claims}
    own |= {("ResourceClaimTemplate", each.template) for each in pod.claims}
    named = {f"{kind} {pod.namespace}/{name}" for kind, name in own}
    for bug in known_bugs(found.kubernetes, found.world, matches):
        if bug.object in named or bug.object.startswith("ResourceSlice "):
            yield f"; {bug.what}: {bug.fix}"


def _off(pod: PodFacts, counts: str, explanation: Explanation) -> str:
    """Return a message if the scheduler does not allocate devices for an extended resource that a
    class provides."""
    of_classes = {each.origin for each in explanation.claims}
    for resource in {each.resource for each in pod.extended}:
        if f"Insufficient {resource}" in counts and f'extended resource "{resource}"' in of_classes:
            return (
                f"but the scheduler reports {counts}: it does not allocate them for {resource}, so "
                f"check that the feature gate DRAExtendedResource is on in the scheduler"
            )
    return ""


_NOT_ALLOCATED = "cannot allocate all claims"
"""The scheduler's message about a node on which its DRA plugin cannot allocate devices."""


def _then(pod: PodFacts, counts: str, found: Gathered, *, starts: bool) -> str:
    """Return the reason why a pod is pending even though devices are available on a node."""
    unchecked = not_checked(pod, found.world)
    if pod.nominated:
        return (
            f"the scheduler preempts other pods on node {pod.nominated} for it, and waits until "
            f"they have ended"
        )
    if not pod.tried:
        return (
            "but no scheduler has tried the pod: if that lasts, check that the kube-scheduler is "
            "running"
        )
    if _NOT_ALLOCATED in counts:
        others = [each for each in counts.split(", ") if _NOT_ALLOCATED not in each]
        if not others:
            bugs = "".join(_bugs(pod, found, lambda bug: bug.waits))
            return (
                f"the scheduler reports {counts}: its last attempt may have been before these "
                f"devices were free, and it tries again within 5 minutes{bugs}"
            )
        named = f" (not checked: {', '.join(unchecked)})" if unchecked else ""
        return (
            f"but no node has both the devices and the other resources that the pod needs{named}: "
            f"the scheduler reports {counts}"
        )
    then = "if it stays pending, devices are not the cause" if starts else "the scheduler decides"
    if unchecked:
        then += f" (not checked: {', '.join(unchecked)})"
    return f"{then}; the scheduler reports {counts}" if counts else then


def _counts_of_scheduler(message: str) -> str:
    """Return the part of the scheduler's message with the number of nodes for each reason."""
    counts = message.partition(" nodes are available: ")[2]
    return counts.partition(". ")[0].rstrip(".")


def _grouped(nodes: Mapping[str, Unusable | None]) -> dict[str, tuple[str, ...]]:
    groups: dict[str, list[str]] = {}
    for name, problem in sorted(nodes.items()):
        if problem is not None:
            text = _NODE_RULES[problem.problem].format(problem.detail)
            groups.setdefault(text, []).append(name)
    return {reason: tuple(names) for reason, names in groups.items()}


def counts(report: RequestReport) -> dict[str, int]:
    """Return the counts of a request, keyed by table column."""
    found, analysis = report.found, report.analysis
    return {
        "published": analysis.published,
        "matching": analysis.matching,
        "free": found.free,
        "allocated": found.releasable,
        "tainted": found.tainted.devices,
        "elsewhere": found.elsewhere.devices,
        "tooSmall": found.small,
    }


def _claim_body(claim: ClaimReport) -> dict[str, Any]:
    return {
        "origin": claim.origin,
        "claim": claim.claim,
        "allocated": claim.allocated,
        "requests": [_request_body(each) for each in claim.requests],
    }


def _request_body(report: RequestReport) -> dict[str, Any]:
    found, analysis = report.found, report.analysis
    named, number = holders(found)
    return {
        "name": report.name,
        "deviceClass": analysis.request.device_class,
        "wants": wanted(analysis.request),
        **counts(report),
        "rejected": [
            {"by": owner, "expression": expression, "devices": number}
            for owner, expression, number in analysis.rejected
        ],
        "selectorErrors": [
            {"device": "/".join(error.device), "error": error.text} for error in analysis.errors
        ],
        "holders": named,
        "holderCount": number,
        "taints": sorted(found.tainted.words),
    }


def notes(report: RequestReport, *, wide: bool) -> Sequence[str]:
    """Return the lines below a request's table."""
    found, analysis = report.found, report.analysis
    texts = [
        f"{owner} rejects {number} of {analysis.published}: {expression}"
        for owner, expression, number in analysis.rejected
        if number or wide
    ]
    texts += _cut([f"selector error: {each.text}" for each in analysis.errors], wide=wide)
    named, number = holders(found)
    texts += _cut([f"allocated to {each}" for each in named], wide=wide, number=number)
    if words := sorted(found.tainted.words):
        texts.append(f"tainted with {', '.join(words)}")
    return [f"{report.name}: {text}" for text in texts]


def _cut(texts: Sequence[str], *, wide: bool, number: int = 0) -> list[str]:
    """Return the first strings, and the number of omitted strings. `number` is the length of the
    whole list, if `texts` is only a part of it."""
    most = len(texts) if wide else 3
    rest = max(len(texts), number) - most
    more = "" if wide else " (-o wide)"
    return [*texts[:most], *([f"and {rest} more{more}"] if rest > 0 else [])]
