"""
The commands: connect, gather, compute, print; return the exit code.

It must not know how an answer is computed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from drakit_cli.answers import CommandError, UsageError
from drakit_cli.kubectl import devices, doctor
from drakit_cli.kubectl import explain as explaining
from drakit_cli.kubectl.capabilities import confirm, find_capabilities, with_gates
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
    UnreachableError,
    gather,
    read_pod,
    read_release,
    with_loads,
    with_prepare_failure,
)
from drakit_cli.kubectl.output import MAX_NAMES, Output, shortened
from drakit_cli.kubectl.releases import find_denied, find_releases
from drakit_daemon.kube import ConfigError, Session, connect
from drakit_daemon.kube.session import Timeouts
from drakit_explain import cel
from drakit_explain.broken import is_placed, node_of_claim
from drakit_explain.model import ClaimFacts
from drakit_explain.pending import Verdict

Answer = TypeVar("Answer")

_OF_EXPLAIN = (CLAIMS, CLASSES, SLICES, NODES, RULES, REPORTS, POLICIES)
_OF_DOCTOR = (TEMPLATES, *_OF_EXPLAIN)

_TIMEOUTS = Timeouts(connect_seconds=10, request_seconds=30)
"""A user may be far from the cluster."""

_KINDS = {
    "pod": "pod",
    "pods": "pod",
    "po": "pod",
    "claim": "claim",
    "claims": "claim",
} | dict.fromkeys(("resourceclaim", "resourceclaims"), "claim")
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


def _fetch(options: argparse.Namespace, ask: Callable[[Session, str], Awaitable[Answer]]) -> Answer:
    """Connect as the user, and ask in the user's namespace."""

    async def fetch() -> Answer:
        try:
            session = await connect(
                _kubeconfig(options.kubeconfig, os.environ),
                context=options.context,
                user_agent="kubectl-drakit",
                timeouts=_TIMEOUTS,
            )
        except ConfigError as error:
            raise UsageError(str(error)) from None
        async with session:
            return await ask(session, options.namespace or session.namespace or "default")

    return asyncio.run(fetch())


def _kubeconfig(given: Path | None, environ: Mapping[str, str]) -> Path | None:
    """Prefer the user's kubeconfig to the service account of a pod, as kubectl does."""
    if given is not None:
        return given
    if listed := environ.get("KUBECONFIG"):
        return Path(listed)
    default = Path(environ.get("HOME", "/root"), ".kube", "config")
    return default if default.is_file() else None


def _explain(options: argparse.Namespace, output: Output) -> int:
    word, slash, name = options.target.partition("/")
    kind = _KINDS.get(word)
    if kind is None or not slash or not name or "/" in name:
        raise UsageError(f"{options.target!r} is neither pod/NAME nor claim/NAME")
    report = _explain_pod(options, name) if kind == "pod" else _explain_claim(options, name)
    if output.for_programs:
        output.data(report.body())
    else:
        _print_report(report, output)
    return 1 if report.wrong else 0


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

    return _fetch(options, ask)


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
        raise CommandError(f'claim "{name}" does not exist in namespace "{namespace}"')

    return _fetch(options, ask)


def _devices(options: argparse.Namespace, output: Output) -> int:
    found = _gather(options, (SLICES, CLAIMS, NODES, RULES))
    if found.lacks_all(SLICES):
        raise UnreachableError(_gap_of(found, SLICES))
    if output.for_programs:
        output.data(devices.body(found))
    else:
        devices.show(found, output)
    return 1 if any(each.problem for each in devices.pool_rows(found)) else 0


def _claims(options: argparse.Namespace, output: Output) -> int:
    async def ask(session: Session, namespace: str) -> tuple[str, Gathered]:
        local = () if options.all_namespaces else (CLAIMS,)
        return namespace, await gather(session, (CLAIMS,), namespace=namespace, local=local)

    namespace, found = _fetch(options, ask)
    only = None if options.all_namespaces else namespace
    claims = sorted(found.world.of(ClaimFacts).values(), key=lambda one: (one.namespace, one.name))
    rows = [_claim_row(each) for each in claims if only in (None, each.namespace)]
    gaps = [
        gap.what
        for gap in found.gaps
        if not (gap.kind == CLAIMS.plural and gap.where == "other namespaces" and only)
    ]
    if output.for_programs:
        output.data({"claims": rows, "notEvaluated": gaps})
        return 0
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
    return 0


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
        denied, gaps = await find_denied(session, releases)
        return doctor.Examined(
            found=found, releases=releases, capabilities=capabilities, denied=denied, gaps=gaps
        )

    diagnosis = doctor.diagnose(_fetch(options, ask))
    if output.for_programs:
        output.data(diagnosis.body())
    else:
        diagnosis.show(output)
    return 1 if diagnosis.wrong else 0


def _gather(options: argparse.Namespace, kinds: Sequence[Kind]) -> Gathered:
    async def ask(session: Session, namespace: str) -> Gathered:
        return await gather(session, kinds, namespace=namespace)

    return _fetch(options, ask)


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
