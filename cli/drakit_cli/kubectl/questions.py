"""
Explains objects to a user. Each function gathers the facts that an explanation needs, and returns
the explanation.

Does not depend on command-line arguments, or on how a result is printed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from drakit_cli.kubectl import objects
from drakit_cli.kubectl.capabilities import open_allocator, with_gates
from drakit_cli.kubectl.explain import (
    Report,
    Reports,
    Waiting,
    claims_holding,
    explain_claim,
    explain_pods,
    nodes_that_matter,
    selectors_of,
    user_of,
)
from drakit_cli.kubectl.gather import (
    Gap,
    Gathered,
    MissingError,
    UnreachableError,
    gather,
    with_release,
)
from drakit_cli.kubectl.manifests import complete, read_documents
from drakit_cli.kubectl.objects import PoolReport
from drakit_cli.kubectl.pods import SeenPod, list_pods, read_pod, with_events, with_loads
from drakit_cli.kubectl.replicas import explain_planned, refused, without_existing
from drakit_cli.kubectl.targets import POD, Target
from drakit_cli.kubectl.workloads import KUEUE, WorkloadReport, find_workload, said_by_kueue
from drakit_daemon.kube import ApiError, Session, resource_path
from drakit_explain.kinds import (
    CLAIMS,
    CLASSES,
    NAMESPACES,
    NODES,
    PODS,
    POLICIES,
    QUOTAS,
    REPORTS,
    RULES,
    SLICES,
    TEMPLATES,
    Kind,
)
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    NodeFacts,
    PodFacts,
    SliceFacts,
    TemplateFacts,
)
from drakit_explain.pending import Verdict, searching
from drakit_explain.pending_claims import extended
from drakit_explain.world import AnyFact, Name
from drakit_formats.resource.objects import text

OF_EXPLAIN = (CLAIMS, CLASSES, SLICES, NODES, RULES, REPORTS, POLICIES)
"""The kinds that determine whether claims can be allocated."""

# ---------------------------------------------------------------- pods


async def ask_pod(session: Session, namespace: str, target: Target) -> Report:
    """Explain one pod."""
    pod = await read_pod(session, POD, namespace, target.name)
    (report,), _ = await _explain(session, [pod], namespace=namespace)
    report = replace(report, sentences=(*report.sentences, *await _ended_holders(session, report)))
    facts = pod.facts
    held = any(each.startswith(KUEUE) for each in facts.gates)
    said = await said_by_kueue(session, facts.namespace, facts.uid) if held else ""
    return replace(report, sentences=(*report.sentences, f"Kueue{said}")) if said else report


MAX_ASKED = 3
"""Maximum number of pods with devices whose phase is read."""


async def _ended_holders(session: Session, report: Report) -> list[str]:
    """If claims hold devices for pods that have ended, and block a pod, return messages about these
    claims."""
    if report.verdict is not Verdict.BLOCKED:
        return []
    requests = (each for claim in report.claims for each in claim.requests)
    claims = {each.uid: each for one in requests for each in claims_holding(one.found)}
    users = [(claim, name) for claim in claims.values() for name in claim.reserved_for]
    ended: list[str] = []
    for claim, name in users[:MAX_ASKED]:
        path = resource_path("v1", PODS.plural, namespace=claim.namespace, name=name)
        try:
            phase = text(await session.get(path), "status", "phase")
        except ApiError:
            continue
        if phase in ("Succeeded", "Failed"):
            ended.append(
                f"claim {claim.namespace}/{claim.name} is still reserved for pod {name}, which has "
                f"ended: Kubernetes removes the entry of status.reservedFor, so if it stays, check "
                f"that the kube-controller-manager is running"
            )
    return ended


async def ask_workload(session: Session, namespace: str, target: Target) -> WorkloadReport:
    """Explain all pods of a workload."""
    workload = await find_workload(session, namespace, target)
    reports, _ = await _explain(session, workload.pods, namespace=namespace)
    return WorkloadReport(workload=workload, reports=tuple(reports))


async def ask_waiting(session: Session, namespace: str, *, everywhere: bool) -> Waiting:
    """Explain all pods that are waiting for devices, or that have devices but have not started."""
    where = "" if everywhere else namespace
    pods = await list_pods(session, where or None, {"fieldSelector": "status.phase=Pending"})
    if not pods:
        return Waiting(reports=(), where=where)
    reports, found = await _explain(
        session, pods, namespace=namespace, everywhere=everywhere, brief=True
    )
    return Waiting(
        reports=tuple(
            report
            for pod, report in zip(pods, reports, strict=True)
            if pod.facts.claims or pod.facts.extended_claim or any(extended(pod.facts, found.world))
        ),
        gaps=tuple(str(gap) for gap in found.gaps),
        where=where,
    )


async def _explain(
    session: Session,
    pods: Sequence[SeenPod],
    *,
    namespace: str,
    everywhere: bool = False,
    brief: bool = False,
) -> tuple[list[Report], Gathered]:
    facts = [each.facts for each in pods]
    found = await _gather_for(session, facts, namespace=namespace, everywhere=everywhere)
    for pod in facts:
        found.world.apply(pod)
    found = await with_room(session, found, facts)
    found = await with_events(session, found, facts)
    needed = any(searching(each, found.world) is not None for each in facts)
    async with open_allocator(session, found, needed=needed) as ask:
        reports = await asyncio.to_thread(explain_pods, pods, found, ask=ask, brief=brief)
    return reports, found


async def _gather_for(
    session: Session, pods: Sequence[PodFacts], *, namespace: str, everywhere: bool = False
) -> Gathered:
    """Gather the facts that the explanation of pods needs."""
    claims = [each for pod in pods for each in pod.claims]
    named = [each.claim or each.generated for each in claims]
    named += [pod.extended_claim for pod in pods]
    names = {
        CLAIMS: list(dict.fromkeys(each for each in named if each)),
        TEMPLATES: list(dict.fromkeys(each.template for each in claims if each.template)),
    }
    kinds: list[Kind] = [TEMPLATES, *OF_EXPLAIN]
    if any(each.template and not each.generated for each in claims):
        kinds += [NAMESPACES, QUOTAS]  # these kinds determine whether a claim can be created
        names[NAMESPACES] = [namespace]
    if everywhere:
        return await gather(session, kinds, namespace=namespace)
    return await gather(session, kinds, namespace=namespace, names=names, local=[TEMPLATES, QUOTAS])


async def with_room(session: Session, found: Gathered, pods: Sequence[PodFacts]) -> Gathered:
    """Add the facts that depend on those already gathered: the release, the feature gates, and the
    free resources of nodes."""
    found = await with_release(session, found)
    found = await with_gates(session, found, selectors_of(pods, found))
    return await with_loads(session, found, nodes_that_matter(pods, found))


# ---------------------------------------------------------------- manifests


async def ask_manifest(session: Session, namespace: str, content: str) -> Reports:
    """Explain whether the pods of a manifest would be created, and whether each would fit after the
    previous ones."""
    manifest = await complete(session, *read_documents(content, namespace))
    pods = [each.facts for each in manifest.pods]
    places = {pod.namespace for pod in pods} or {namespace}
    found = await _gather_for(session, pods, namespace=min(places), everywhere=len(places) > 1)
    for fact in manifest.facts:
        if not (isinstance(fact, ClaimFacts) and found.world.claim(fact.namespace, fact.name)):
            found.world.apply(fact)  # A claim in the cluster keeps its devices.
    found = await with_room(session, found, pods)
    existing = [each.facts for each in manifest.pods if each.source.old and each.source.kind is POD]
    found = await with_events(session, found, existing)
    found.gaps.extend(
        Gap(kind="dry run", what=f"not validated by the API server ({why})", effect=_UNVALIDATED)
        for why in manifest.unchecked
    )
    reports = [
        refused(each, f"the API server does not accept {each.title}: {each.refusal}")
        for each in manifest.refused
    ]
    async with open_allocator(session, found) as ask:
        for each in manifest.pods:
            planned = await without_existing(session, each, found)
            reports.append(await asyncio.to_thread(explain_planned, planned, found, ask))
    return Reports(reports=tuple(reports))


_UNVALIDATED = "unknown fields, quotas and admission are not checked"


# ---------------------------------------------------------------- other objects


async def ask_claim(session: Session, namespace: str, target: Target) -> Report:
    """Explain one claim."""
    kinds = (PODS, *OF_EXPLAIN)
    found, claim = await _gather_one(session, CLAIMS, ClaimFacts, namespace, target, kinds, [PODS])
    found = await with_gates(session, found, selectors_of([user_of(claim)], found))
    async with open_allocator(session, found, needed=not claim.allocated) as ask:
        return await asyncio.to_thread(explain_claim, claim, found, ask=ask)


async def ask_template(session: Session, namespace: str, target: Target) -> Report:
    """Explain whether claims of a template can be allocated."""
    kinds = (TEMPLATES, *OF_EXPLAIN)
    found, template = await _gather_one(
        session, TEMPLATES, TemplateFacts, namespace, target, kinds, [TEMPLATES]
    )
    found = await with_gates(session, found, selectors_of([user_of(template)], found))
    async with open_allocator(session, found) as ask:
        return await asyncio.to_thread(objects.explain_template, template, found, ask=ask)


async def ask_class(session: Session, namespace: str, target: Target) -> Report:
    """Explain whether one device of a class can be allocated."""
    found, device_class = await _gather_one(
        session, CLASSES, ClassFacts, namespace, target, OF_EXPLAIN
    )
    template = objects.template_of(device_class, namespace)
    found.world.apply(template)
    found = await with_gates(session, found, selectors_of([user_of(template)], found))
    async with open_allocator(session, found) as ask:
        return await asyncio.to_thread(
            objects.explain_class, device_class, found, template=template, ask=ask
        )


async def ask_node(session: Session, namespace: str, target: Target) -> PoolReport:
    """Explain what keeps pods from the devices of a node."""
    kinds = (SLICES, CLAIMS, NODES, RULES, REPORTS)
    found, node = await _gather_one(session, NODES, NodeFacts, namespace, target, kinds)
    return objects.explain_node(node, found)


async def ask_slice(session: Session, namespace: str, target: Target) -> PoolReport:
    """Explain what keeps pods from the devices of a slice."""
    kinds = (SLICES, CLAIMS, NODES, RULES)
    found, of = await _gather_one(session, SLICES, SliceFacts, namespace, target, kinds)
    return objects.explain_slice(of, found)


async def _gather_one(
    session: Session,
    kind: Kind,
    facts: type[AnyFact],
    namespace: str,
    target: Target,
    kinds: Sequence[Kind],
    local: Sequence[Kind] = (),
) -> tuple[Gathered, AnyFact]:
    """Gather kinds and the release, and find the object that the user specified. Raise an error if
    the object does not exist, or if it is unknown whether it exists."""
    found = await gather(
        session, kinds, namespace=namespace, names={kind: [target.name]}, local=local
    )
    name = Name(namespace if kind.namespaced else "", target.name)
    fact = found.world.of(facts).get(name)
    if fact is not None:
        found = await with_release(session, found)
        return found, fact
    if failed := found.failed_list(kind):
        where = "/".join(filter(None, name))
        denied = f"no permission to read {target.kind.word} {where}"
        raise UnreachableError(denied if failed.forbidden else failed.what)
    inside = f' in namespace "{namespace}"' if kind.namespaced else ""
    raise MissingError(f'{target.kind.word} "{target.name}" does not exist{inside}')
