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

from drakit_cli.kubectl import devices, doctor, explain_command
from drakit_cli.kubectl.capabilities import find_capabilities
from drakit_cli.kubectl.components import find_components
from drakit_cli.kubectl.connection import fetch
from drakit_cli.kubectl.gather import (
    CLAIMS,
    NODES,
    RULES,
    SLICES,
    TEMPLATES,
    Gathered,
    Kind,
    UnreachableError,
    gather,
)
from drakit_cli.kubectl.output import Output
from drakit_cli.kubectl.permissions import find_denied, find_lacking
from drakit_cli.kubectl.questions import OF_EXPLAIN
from drakit_cli.kubectl.releases import find_releases
from drakit_daemon.kube import Session
from drakit_explain import cel
from drakit_explain.broken import node_of_claim
from drakit_explain.model import ClaimFacts

_OF_DOCTOR = (TEMPLATES, *OF_EXPLAIN)

_CLAIM = ("NAMESPACE", "NAME", "STATE", "NODE", "DEVICES", "PODS", "CLASSES")


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


_COMMANDS = {
    "explain": explain_command.run,
    "devices": _devices,
    "claims": _claims,
    "doctor": _doctor,
}
