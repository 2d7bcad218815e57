"""
Checks whether the pods of a manifest fit. The pods are placed one at a time: each takes the devices
that the allocator finds, and the resources that it requests on their node.

Does not depend on sessions, or on the output format.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from drakit_cli.answers import CommandError
from drakit_cli.kubectl.explain import Ask, Report, explain_pods
from drakit_cli.kubectl.gather import Gap, Gathered
from drakit_cli.kubectl.manifests import CRON_JOB, Document, PlannedPod
from drakit_cli.kubectl.pods import SeenPod
from drakit_cli.kubectl.targets import DAEMON_SET, POD, REPLICA_SET, STATEFUL_SET, Target
from drakit_cli.kubectl.workloads import find_workload
from drakit_daemon.kube import Session
from drakit_explain.availability import budget_of
from drakit_explain.codes import Code
from drakit_explain.kinds import PODS
from drakit_explain.loads import Load
from drakit_explain.model import ClaimFacts, Consumer, PodFacts, QuotaFacts
from drakit_explain.pending import Explainer, Verdict
from drakit_explain.pending_claims import not_checked, wanted_of
from drakit_explain.projection import project_claim
from drakit_explain.verdicts import VerdictOutcome
from drakit_explain.world import Name, World
from drakit_formats.resource.objects import Object, child, text

REFUSED = "Refused"
"""The code of an object that the API server rejects."""


def refused(document: Document, sentence: str, *, code: str = REFUSED) -> Report:
    """Return a report that an object would not be created."""
    return Report(
        kind=document.kind.kind,
        namespace=document.namespace,
        name=document.name,
        verdict=Verdict.BLOCKED,
        sentences=(sentence,),
        codes=(code,),
    )


async def without_existing(session: Session, pod: PlannedPod, found: Gathered) -> PlannedPod:
    """
    Return the pods that a workload in the manifest would create in addition to its current pods.

    If the manifest changes the pod template, and the controller deletes each pod before it creates
    the next one, the devices of the current pods are assumed to be free.
    """
    source, old = pod.source, pod.source.old
    if old is None or source.kind in (POD, CRON_JOB):
        return pod
    try:
        target = Target(kind=source.kind, name=source.name)
        workload = await find_workload(session, source.namespace, target)
    except CommandError as error:
        found.gaps.append(
            Gap(
                kind=PODS.plural,
                what=str(error),
                effect="its pods are considered pods of another workload",
            )
        )
        return pod
    alive = [each for each in workload.pods if each.facts.phase not in ("Succeeded", "Failed")]
    if source.kind is REPLICA_SET or child(old, "spec", "template") == child(
        source.body, "spec", "template"
    ):
        return replace(pod, pods=max(pod.pods - len(alive), 0))
    if source.kind in (STATEFUL_SET, DAEMON_SET) or _ends_pods_first(source.body):
        for each in alive:
            release(each.facts, found.world)
    return pod


def _ends_pods_first(deployment: Object) -> bool:
    """Return whether a Deployment deletes a pod of its old template before a new pod runs."""
    spec = child(deployment, "spec")
    strategy = child(spec, "strategy")
    most = str(child(strategy, "rollingUpdate").get("maxUnavailable", "25%"))
    number = int(most.removesuffix("%")) if most.removesuffix("%").isdecimal() else 0
    if most.endswith("%"):
        number = number * int(spec.get("replicas", 1)) // 100
    return text(strategy, "type") == "Recreate" or number > 0


def release(pod: PodFacts, world: World) -> None:
    """Remove the claims that were created for a deleted pod, and release the resources that the pod
    held on its node."""
    for each in pod.claims:
        claim = world.claim(pod.namespace, each.generated or "")
        if claim is not None and claim.owner_uid in ("", pod.uid):
            world.remove(ClaimFacts, Name(claim.namespace, claim.name))
    if world.loads is not None:
        world.loads.remove(pod.uid)


def explain_planned(pod: PlannedPod, found: Gathered, ask: Ask) -> Report:
    """Explain whether the pods of one object in a manifest fit, and place them, so that the next
    object cannot use their devices."""
    source, facts = pod.source, pod.facts
    if pod.refusal:
        return refused(source, f"{source.title} would wait: {pod.refusal}")
    if facts.node and source.old is None and wanted_of(facts, found.world):
        why = "it sets spec.nodeName, so the scheduler does not allocate its claims"
        return refused(
            source,
            f"{source.title} would not start: {why}; use a node selector instead",
            code=Code.CLAIM_NOT_ALLOCATED,
        )
    if not pod.pods:
        return Report(
            kind=pod.kind,
            namespace=source.namespace,
            name=source.name,
            verdict=Verdict.NOT_PENDING,
            sentences=(f"{source.title} would create no pod",),
        )
    (report,) = explain_pods([SeenPod(facts=facts)], found, ask=ask)
    report = replace(report, kind=pod.kind)
    if source.kind is POD and source.old is not None:
        return report
    unknown = list(report.unknown)
    if unchecked := not_checked(facts, found.world):
        unknown.append(f"not checked: {', '.join(unchecked)}")
    quotas = found.world.of(QuotaFacts).values()
    if pod.pods > 1 and any(each.namespace == source.namespace for each in quotas):
        unknown.append("quotas were checked for one of the pods")
    if source.kind is DAEMON_SET:
        unknown.append(f"only one pod of {source.title} was checked, not one on each node")
    subject, waits = source.title, "would wait"
    fits = f"fits on node {report.fits_on}" if report.fits_on else "needs no free device"
    number, following = _place(report, pod, found, ask)
    pods, one = f"the {pod.pods} pods of {subject}", number == 1
    if following is not None:
        report = replace(following, kind=pod.kind)
        subject = f"{number} of {pods}"
        waits = f"{'fits' if one else 'fit'}; the next one would wait"
    elif 1 < pod.pods == number:
        at = f"fit, the first on node {report.fits_on}"
        subject, fits = pods, at if report.fits_on else "need no free device"
    elif number < pod.pods and report.verdict is not Verdict.BLOCKED:
        unknown.append(f"only {number} of {pods} {'was' if one else 'were'} checked")
    single = f"{POD.word} {facts.namespace}/{facts.name}"
    sentences = [
        each.replace(f"{single} waits", f"{subject} {waits}", 1).replace(single, subject, 1)
        for each in report.sentences
    ]
    if report.verdict is Verdict.FITS:
        sentences[-1] = f"{subject} {fits}"
    return replace(report, sentences=tuple(sentences), unknown=tuple(unknown))


def _place(report: Report, pod: PlannedPod, found: Gathered, ask: Ask) -> tuple[int, Report | None]:
    """Place the pods. Return the number of pods that certainly fit, and the report for the next one
    if it would wait."""
    if report.verdict is not Verdict.FITS:
        return 1, None
    if not (report.fits_on or report.claims):
        return pod.pods, None
    done = place(pod.facts, max(pod.pods - 1, 1), found.world, ask, single=pod.pods == 1)
    if done.stopped or pod.pods == 1:
        return max(done.number, 1), None
    following = [SeenPod(facts=pod.facts)]
    (last,) = explain_pods(following, found, ask=ask, brief=True)
    if last.verdict is Verdict.BLOCKED:
        return done.number, last
    if last.verdict is not Verdict.FITS:
        return done.number, None
    return done.number + place(pod.facts, 1, found.world, ask, after=done.number).number, None


# ---------------------------------------------------------------- placing


MAX_SECONDS = 2.0
"""How long to keep placing pods. A user is waiting, and a Job can have thousands of pods."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """The pods that have been placed in a world."""

    number: int = 0
    stopped: bool = False
    """Whether placing stopped early, so that it is unknown whether another pod fits."""


def place(
    pod: PodFacts, limit: int, world: World, ask: Ask, *, after: int = 0, single: bool = False
) -> Placed:
    """
    Place equal pods in a world, where they remain.

    :param limit: maximum number of pods to place.
    :param after: the number of these pods that have already been placed.
    :param single: whether it is the only pod, so that its name does not need a number.
    """
    explainer = Explainer(world, name_all_holders=True)
    end = time.monotonic() + MAX_SECONDS
    for number in range(limit):
        explanation = explainer.explain_now(pod, ask)
        if explanation.verdict is Verdict.BLOCKED:
            return Placed(number=number)
        usable = (name for name, problem in explanation.nodes.items() if problem is None)
        node = explanation.fits_on or next(usable, "")
        name = pod.name if single else f"{pod.name}-{after + number + 1}"
        claims = _claims_of(pod, name, node, explainer, world, ask) if node else None
        if explanation.verdict is not Verdict.FITS or claims is None or time.monotonic() > end:
            return Placed(number=number, stopped=True)
        for claim in claims:
            world.apply(claim)
        if world.loads is not None:
            world.loads.apply(Load(f"{pod.uid}/{name}", node, pod.priority, pod.requests))
    return Placed(number=limit)


def _claims_of(
    pod: PodFacts, name: str, node: str, explainer: Explainer, world: World, ask: Ask
) -> list[ClaimFacts] | None:
    """Return a pod's claims with the devices that the allocator finds. They include a new claim for
    each one that does not exist yet. Return None if the devices are unknown."""
    wanted = wanted_of(pod, world)
    verdict = ask(explainer.verdicts.query(wanted, node, budget_of(world)))
    if verdict.outcome is not VerdictOutcome.ALLOCATED or len(verdict.results) != len(wanted):
        # The allocator cannot allocate the claims, or the program is an older version that does not
        # return devices.
        return None
    claims: dict[str, ClaimFacts] = {}
    user = Consumer("pods", name, name)
    for each, results in zip(wanted, verdict.results, strict=True):
        status = {"allocation": {"devices": {"results": results}}}
        metadata = {"namespace": pod.namespace, "name": name, "uid": f"{pod.uid}/{name}"}
        new = project_claim({"metadata": metadata, "status": status})
        claim = claims.get(each.claim) or world.claim(pod.namespace, each.claim)
        if claim is None:
            claim = replace(new, devices=(), shares=())
        claims[each.claim] = replace(
            claim,
            allocated=True,
            consumers=tuple(dict.fromkeys((*claim.consumers, user))),
            nodes=node,
            devices=(*claim.devices, *new.devices),
            shares=(*claim.shares, *new.shares),
        )
    return list(claims.values())
