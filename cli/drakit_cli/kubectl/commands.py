"""
The commands: connect, gather, compute, print; return the exit code.

It must not know how an answer is computed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from drakit_cli.answers import UsageError
from drakit_cli.kubectl import devices, doctor
from drakit_cli.kubectl import explain as explaining
from drakit_cli.kubectl.capabilities import confirm, find_capabilities, with_gates
from drakit_cli.kubectl.components import find_components
from drakit_cli.kubectl.connection import fetch
from drakit_cli.kubectl.gather import (
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
    Gathered,
    Kind,
    MissingError,
    UnreachableError,
    gather,
    read_pod,
    read_release,
    with_loads,
    with_prepare_failure,
)
from drakit_cli.kubectl.output import MAX_NAMES, Output, shortened
from drakit_cli.kubectl.permissions import find_denied, find_lacking
from drakit_cli.kubectl.releases import find_releases
from drakit_cli.kubectl.targets import CLAIM, POD, parse_target
from drakit_daemon.kube import Session
from drakit_explain import cel
from drakit_explain.broken import is_placed, node_of_claim
from drakit_explain.model import ClaimFacts
from drakit_explain.pending import Verdict

_OF_EXPLAIN = (CLAIMS, CLASSES, SLICES, NODES, RULES, REPORTS, POLICIES)
_OF_DOCTOR = (TEMPLATES, *_OF_EXPLAIN)

_COUNTS = (
    *("REQUEST", "CLASS", "WANTS", "PUBLISHED", "MATCHING"),
    *("FREE", "ALLOCATED", "TAINTED", "ELSEWHERE", "TOO SMALL"),
)
_CLAIM = ("NAMESPACE", "NAME", "STATE", "NODE", "DEVICES", "PODS", "CLASSES")
_COLOURS = {
    Verdict.BLOCKED: "bad",
    Verdict.BROKEN: "bad",
    Verdict.DELETING: "bad",
    Verdict.UNDECIDED: "unsure",
    Verdict.FITS: "good",
    Verdict.NOT_PENDING: "good",
}


def run(options: argparse.Namespace) -> int:
    """Run the command that was parsed."""
    logging.getLogger("drakit_daemon").setLevel(logging.ERROR)
    if options.command == "completion":
        from drakit_cli.kubectl.completion import script

        print(script(options.shell))
        return 0
    if not cel.is_installed():  # the other dependencies may have come with another extra
        raise ImportError("no evaluator of CEL selectors is installed")
    return _COMMANDS[options.command](options, Output(format=options.output))


def _explain(options: argparse.Namespace, output: Output) -> int:
    target = parse_target(options.target)
    if target is None or target.kind not in (POD, CLAIM):
        raise UsageError("name a pod or a claim")
    name = target.name
    report = _explain_pod(options, name) if target.kind is POD else _explain_claim(options, name)
    if output.for_programs:
        output.data("ExplainReport", report.body())
    else:
        _print_report(report, output)
    return report.exit_code


def _explain_pod(options: argparse.Namespace, name: str) -> explaining.Report:
    async def ask(session: Session, namespace: str) -> explaining.Report:
        pod, settled = await read_pod(session, namespace, name)
        named = [each.claim or each.generated for each in pod.claims]
        named.append(pod.extended_claim)
        names = {
            CLAIMS: [each for each in named if each],
            TEMPLATES: [each.template for each in pod.claims if each.template],
        }
        kinds = [TEMPLATES, *_OF_EXPLAIN]
        if any(each.template and not each.generated for each in pod.claims):
            kinds += [NAMESPACES, QUOTAS]  # they decide whether a claim can be created
            names[NAMESPACES] = [namespace]
        local = [TEMPLATES, QUOTAS]
        found = await gather(session, kinds, namespace=namespace, names=names, local=local)
        await read_release(session, found)
        found = await with_gates(session, found, explaining.selectors_of(pod, found))
        if is_placed(pod):
            found = await with_prepare_failure(session, found, pod)
        found = await with_loads(session, found, explaining.nodes_that_matter(pod, found))
        return await explaining.explain_pod(
            pod, found, settled=settled, confirm=partial(confirm, session, found)
        )

    return fetch(options, ask)


def _explain_claim(options: argparse.Namespace, name: str) -> explaining.Report:
    async def ask(session: Session, namespace: str) -> explaining.Report:
        kinds = (PODS, *_OF_EXPLAIN)
        found = await gather(
            session, kinds, namespace=namespace, names={CLAIMS: [name]}, local=[PODS]
        )
        claim = found.world.claim(namespace, name)
        if claim is not None:
            await read_release(session, found)
            found = await with_gates(session, found, explaining.selectors_of(claim, found))
            return await explaining.explain_claim(
                claim, found, confirm=partial(confirm, session, found)
            )
        if found.lacks_all(CLAIMS):
            raise UnreachableError(f"no permission to read claim {namespace}/{name}")
        raise MissingError(f'claim "{name}" does not exist in namespace "{namespace}"')

    return fetch(options, ask)


def _devices(options: argparse.Namespace, output: Output) -> int:
    found = _gather(options, (SLICES, CLAIMS, NODES, RULES))
    if found.lacks_all(SLICES):
        raise UnreachableError(_gap_of(found, SLICES))
    if output.for_programs:
        output.data("DeviceList", devices.body(found))
    else:
        devices.show(found, output)
    return 1 if devices.fails(found, options.fail_on) else 0


def _claims(options: argparse.Namespace, output: Output) -> int:
    async def ask(session: Session, namespace: str) -> tuple[str, Gathered]:
        local = () if options.all_namespaces else (CLAIMS,)
        return namespace, await gather(session, (CLAIMS,), namespace=namespace, local=local)

    namespace, found = fetch(options, ask)
    only = None if options.all_namespaces else namespace
    claims = sorted(found.world.of(ClaimFacts).values(), key=lambda one: (one.namespace, one.name))
    rows = [_claim_row(each) for each in claims if only in (None, each.namespace)]
    code = 1 if any(row["state"] in options.fail_on for row in rows) else 0
    gaps = [
        gap.what
        for gap in found.gaps
        if not (gap.kind == CLAIMS.plural and gap.where == "other namespaces" and only)
    ]
    if output.for_programs:
        output.data("ClaimList", {"claims": rows, "notEvaluated": gaps})
        return code
    if not rows:
        output.line(f"No claims in namespace {only}." if only else "No claims.")
    else:
        columns = len(_CLAIM) if output.wide else len(_CLAIM) - 1
        cells = [
            [cell if isinstance(cell, str) else ", ".join(cell) for cell in row.values()]
            for row in rows
        ]
        output.table(_CLAIM[:columns], [row[:columns] for row in cells])
    output.lines("Not evaluated", gaps)
    return code


def _claim_row(claim: ClaimFacts) -> dict[str, str | list[str]]:
    requests = [each for one in claim.requests for each in (one.alternatives or (one,))]
    state = "pending"
    if claim.deleting:
        state = "deleting"
    elif claim.allocated:
        state = "in use" if claim.consumers else "allocated"
    return {
        "namespace": claim.namespace,
        "name": claim.name,
        "state": state,
        # Empty if several can use it, or if it is not allocated.
        "node": node_of_claim(claim) or "",
        "devices": list(dict.fromkeys("/".join(each.device) for each in claim.results)),
        "pods": sorted(claim.reserved_for),
        "deviceClasses": list(dict.fromkeys(each.device_class for each in requests)),
    }


def _doctor(options: argparse.Namespace, output: Output) -> int:
    async def ask(session: Session, namespace: str) -> doctor.Examined:
        found = await gather(session, _OF_DOCTOR, namespace=namespace)
        releases, capabilities = await asyncio.gather(
            find_releases(session, namespace), find_capabilities(session)
        )
        found = replace(found, gates=capabilities.of_selectors)
        if capabilities.minor is not None:
            found.world.use_release(capabilities.minor[1])
        nodes = {each.node for each in releases.pods if each.ready}
        nodes |= {each.place.node for each in found.world.slices() if each.place is not None}
        (denied, unasked), (lacking, unread), components = await asyncio.gather(
            find_denied(session, releases),
            find_lacking(session, namespace),
            find_components(session, nodes - {""}),
        )
        return doctor.Examined(
            found=found,
            releases=releases,
            capabilities=capabilities,
            components=components,
            denied=denied,
            lacking=lacking,
            gaps=[*unasked, *unread],
        )

    diagnosis = doctor.diagnose(fetch(options, ask))
    if output.for_programs:
        output.data("DoctorReport", diagnosis.body())
    else:
        diagnosis.show(output)
    return 1 if diagnosis.wrong else 0


def _gather(options: argparse.Namespace, kinds: Sequence[Kind]) -> Gathered:
    async def ask(session: Session, namespace: str) -> Gathered:
        return await gather(session, kinds, namespace=namespace)

    return fetch(options, ask)


def _gap_of(found: Gathered, kind: Kind) -> str:
    return next(gap.what for gap in found.gaps if gap.kind == kind.plural)


_COMMANDS = {"explain": _explain, "devices": _devices, "claims": _claims, "doctor": _doctor}


def _print_report(report: explaining.Report, output: Output) -> None:
    for sentence in report.lines:
        output.line(f"{sentence[0].upper()}{sentence[1:]}.", colour=_COLOURS[report.verdict])
    for claim in report.claims:
        output.line()
        output.line(f"{claim.origin[0].upper()}{claim.origin[1:]}:", colour="head")
        if claim.allocated or not claim.requests:
            output.line("allocated" if claim.allocated else "not allocated", indent=2)
            continue
        rows: list[list[str]] = []
        for each in claim.requests:
            request = each.analysis.request
            numbers = [str(number) for number in explaining.counts(each).values()]
            rows.append([each.name, request.device_class, explaining.wanted(request), *numbers])
        output.table(_COUNTS, rows, indent=2)
        for each in claim.requests:
            for text in explaining.notes(each, wide=output.wide):
                output.line(text, indent=2)
    output.lines(
        "Nodes that cannot be used",
        (
            f"{shortened(names, most=len(names) if output.wide else MAX_NAMES)}: {why}"
            for why, names in report.nodes.items()
        ),
    )
    output.lines(
        "Not verified by Kubernetes' allocator", [report.unverified] if report.unverified else []
    )
    output.lines("The scheduler reports", [report.scheduler] if report.scheduler else [])
    output.lines("Not evaluated", report.unknown)
