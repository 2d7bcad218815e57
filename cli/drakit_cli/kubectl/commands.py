"""
The commands. Each connects, gathers facts, computes a result, prints it, and returns the exit code.

Does not depend on how a result is computed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from drakit_cli.answers import CommandError
from drakit_cli.connection import fetch
from drakit_cli.kubectl import devices, doctor, explain_command, maintenance
from drakit_cli.kubectl.capabilities import with_capabilities
from drakit_cli.kubectl.components import find_components
from drakit_cli.kubectl.device import Device, describe, slice_of
from drakit_cli.kubectl.drivers import find_drivers
from drakit_cli.kubectl.gather import Gap, Gathered, MissingError, UnreachableError, gather
from drakit_cli.kubectl.output import Output
from drakit_cli.kubectl.permissions import find_denied, find_lacking
from drakit_cli.kubectl.pods import list_pods
from drakit_cli.kubectl.questions import OF_EXPLAIN
from drakit_cli.kubectl.releases import Releases, find_releases
from drakit_cli.kubectl.targets import qualified_name
from drakit_cli.kubectl.versions import all_versions, own_versions
from drakit_daemon.kube import ApiError, NotFoundError, Session, resource_path
from drakit_explain import cel
from drakit_explain.broken import node_of_claim
from drakit_explain.kinds import (
    CLAIMS,
    CLASSES,
    DRIVERS,
    NAMESPACES,
    NODES,
    REPORTS,
    RULES,
    SLICES,
    TEMPLATES,
)
from drakit_explain.model import ClaimFacts
from drakit_explain.pending_claims import quota_of

_OF_DOCTOR = (TEMPLATES, NAMESPACES, DRIVERS, *OF_EXPLAIN)

_CLAIM = ("NAMESPACE", "NAME", "STATE", "NODE", "DEVICES", "PODS", "CLASSES")


def run(options: argparse.Namespace) -> int:
    """Run the parsed command."""
    logging.getLogger("drakit_daemon").setLevel(logging.ERROR)
    if options.command == "completion":
        from drakit_cli.kubectl.completion import script

        print(script(options.shell))
        return 0
    # The other dependencies can be installed without it, by another extra.
    if not cel.is_installed():
        raise ImportError("no evaluator of CEL selectors is installed")
    with _without_collector():
        return _COMMANDS[options.command](options, Output(format=options.output))


@contextmanager
def _without_collector() -> Generator[None]:
    """
    Stop Python's cyclic collector.

    The facts of a cluster are hundreds of thousands of objects that live as long as the command,
    and the collector would visit them repeatedly. With 100,000 claims, that would take half of the
    command's time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _devices(options: argparse.Namespace, output: Output) -> int:
    async def ask(session: Session, namespace: str) -> tuple[Gathered, Device | None]:
        kinds = (SLICES, CLAIMS, NODES, RULES, *((REPORTS,) if options.name else ()))
        found = await gather(session, kinds, namespace=namespace)
        rows, are_devices = devices.selected(found, options.name)
        if not are_devices or len(rows) != 1 or len(rows[0].devices) != 1:
            return found, None
        (pool,) = rows
        (row,) = pool.devices
        name, published = slice_of(pool, row, found), None
        if name:
            path = resource_path(f"{SLICES.group}/{found.version}", SLICES.plural, name=name)
            with suppress(NotFoundError):
                published = await session.get(path)
        return found, describe(pool, row, published, found)

    found, device = fetch(options, ask)
    found.require(SLICES)
    rows, are_devices = devices.selected(found, options.name)
    if options.name and not rows:
        raise MissingError(f'no driver, pool or device is named "{options.name}"')
    if output.names_only:
        output.names("/".join((*row.identity, each.name)) for row in rows for each in row.devices)
    elif device is not None:
        output.write("Device", device)
    elif output.for_programs:
        output.data("DeviceList", devices.body(rows, found))
    else:
        devices.show(rows, found, output, wide=output.wide or are_devices)
    return 1 if devices.fails(rows, options.fail_on) else 0


def _drivers(options: argparse.Namespace, output: Output) -> int:
    async def ask(session: Session, namespace: str) -> Gathered:
        kinds = (SLICES, CLAIMS, NODES, RULES, REPORTS, DRIVERS)
        found = await gather(session, kinds, namespace=namespace)
        try:
            pods = await list_pods(session, None, {"fieldSelector": "status.phase=Pending"})
        except UnreachableError as error:
            effect = "pods that wait for a driver are not counted"
            found.gaps.append(Gap(kind="pods", what=str(error), effect=effect))
        else:
            for each in pods:
                found.world.apply(each.facts)
        return found

    drivers = find_drivers(fetch(options, ask), options.name)
    if options.name and not drivers.rows:
        raise MissingError(f'no driver has the name "{options.name}"')
    if output.names_only:
        output.names(row.name for row in drivers.rows)
    else:
        output.write("DriverList", drivers)
    return 1 if options.fail_on and drivers.fails else 0


def _claims(options: argparse.Namespace, output: Output) -> int:
    # A pod in any namespace can use a device.
    everywhere = options.all_namespaces or options.device is not None

    async def ask(session: Session, namespace: str) -> tuple[str, Gathered]:
        local = () if everywhere else (CLAIMS,)
        return namespace, await gather(session, (CLAIMS,), namespace=namespace, local=local)

    namespace, found = fetch(options, ask)
    only = None if everywhere else namespace
    claims = sorted(found.world.of(ClaimFacts).values(), key=lambda one: (one.namespace, one.name))
    rows = [
        _claim_row(each)
        for each in claims
        if only in (None, each.namespace) and (not options.device or _uses(each, options.device))
    ]
    code = 1 if any(row["state"] in options.fail_on for row in rows) else 0
    gaps = [
        gap.what
        for gap in found.gaps
        if not (gap.kind == CLAIMS.plural and gap.where == "other namespaces" and only)
    ]
    if output.names_only:
        output.names(qualified_name(ClaimFacts.kind, row["name"]) for row in rows)
        return code
    if output.for_programs:
        output.data("ClaimList", {"claims": rows, "notEvaluated": gaps})
        return code
    if not rows:
        where = f" in namespace {only}" if only else ""
        output.line(f"No claims{f' use {options.device}' if options.device else where}.")
    else:
        columns = len(_CLAIM) if output.wide else len(_CLAIM) - 1
        output.table(_CLAIM[:columns], [_claim_cells(row)[:columns] for row in rows])
    output.lines("Not evaluated", gaps)
    return code


def _uses(claim: ClaimFacts, device: str) -> bool:
    return any(
        devices.is_named(device, each.device.of_pool, each.device.device) for each in claim.results
    )


def _claim_row(claim: ClaimFacts) -> dict[str, Any]:
    requests = [each for one in claim.requests for each in (one.alternatives or (one,))]
    state = "pending"
    if claim.deleting:
        state = "deleting"
    elif claim.allocated:
        state = "in use" if claim.consumers else "allocated"
    allocated = dict.fromkeys(each.device for each in claim.results)
    return {
        "namespace": claim.namespace,
        "name": claim.name,
        "state": state,
        # The node is empty if several nodes can use the claim, or if the claim is not allocated.
        "node": node_of_claim(claim) or "",
        "devices": ["/".join(each) for each in allocated],
        "pods": sorted(claim.reserved_for),
        "users": claim.users,
        "deviceClasses": list(dict.fromkeys(each.device_class for each in requests)),
        "consumed": {
            "/".join(each): share for each in allocated if (share := devices.share_of(claim, each))
        },
    }


def _claim_cells(row: Mapping[str, Any]) -> list[str]:
    """Return the columns of a claim. Each share is listed next to its device."""
    shares = {
        device: ", ".join(f"{name} {amount}" for name, amount in share.items())
        for device, share in row["consumed"].items()
    }
    named = [f"{each} ({shares[each]})" if each in shares else each for each in row["devices"]]
    return [
        *(row[key] for key in ("namespace", "name", "state", "node")),
        ", ".join(named),
        devices.pods_cell(row["users"]),
        ", ".join(row["deviceClasses"]),
    ]


def _quota(options: argparse.Namespace, output: Output) -> int:
    async def ask(session: Session, namespace: str) -> tuple[str, Gathered]:
        return namespace, await gather(session, (CLASSES,), namespace=namespace)

    namespace, found = fetch(options, ask)
    found.require(CLASSES)
    device_class = found.world.device_class(options.device_class)
    if device_class is None:
        raise MissingError(f'no DeviceClass has the name "{options.device_class}"')
    output.manifest(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": device_class.name, "namespace": namespace},
            "spec": {"hard": quota_of(device_class, options.devices)},
        }
    )
    return 0


def _doctor(options: argparse.Namespace, output: Output) -> int:
    async def ask(session: Session, namespace: str) -> doctor.Examined:
        found = await gather(session, _OF_DOCTOR, namespace=namespace)
        releases, found = await asyncio.gather(
            find_releases(session, namespace), with_capabilities(session, found)
        )
        nodes = {each.node for each in releases.pods if each.ready}
        nodes |= {each.place.node for each in found.world.slices() if each.place is not None}
        (denied, unasked), (lacking, unread), components = await asyncio.gather(
            find_denied(session, releases),
            find_lacking(session, namespace),
            find_components(session, nodes - {""}),
        )
        found.gaps.extend((*releases.gaps, *unasked, *unread))
        return doctor.Examined(
            found=found, releases=releases, components=components, denied=denied, lacking=lacking
        )

    diagnosis = doctor.diagnose(fetch(options, ask))
    output.write("DoctorReport", diagnosis)
    return 1 if diagnosis.wrong or (options.fail_on == "note" and diagnosis.findings) else 0


def _version(options: argparse.Namespace, output: Output) -> int:
    async def ask(session: Session, namespace: str) -> tuple[str, Releases]:
        try:
            kubernetes = str((await session.get("/version")).get("gitVersion") or "")
        except ApiError as error:
            raise UnreachableError(str(error)) from None
        return kubernetes, await find_releases(session, namespace)

    found = own_versions()
    problem: CommandError | None = None
    try:
        found = found if options.client else all_versions(found, *fetch(options, ask))
    # Print the versions on this machine anyway, because they help to find the cause.
    except CommandError as error:
        problem = error
    output.write("Version", found)
    if problem is not None:
        raise problem
    return 0


_COMMANDS = {
    "explain": explain_command.run,
    "devices": _devices,
    "drivers": _drivers,
    "claims": _claims,
    "quota": _quota,
    "doctor": _doctor,
    "cordon": maintenance.run,
    "drain": maintenance.run,
    "uncordon": maintenance.uncordon,
    "version": _version,
}
