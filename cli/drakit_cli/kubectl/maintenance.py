"""
``kubectl drakit cordon``, ``drain`` and ``uncordon``: preview, create, follow and delete a
DeviceMaintenance.

The preview asks :mod:`drakit_explain.maintenance` what the operator will ask, and the allocator
where the pods that are evicted fit afterwards: with the taints, without the claims of these pods,
and one pod after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from drakit.text import plural
from drakit_cli.answers import CommandError, UsageError
from drakit_cli.connection import fetch
from drakit_cli.kubectl.capabilities import evaluate_selectors, open_allocator, with_gates
from drakit_cli.kubectl.devices import is_named
from drakit_cli.kubectl.explain import Ask, explain_pods
from drakit_cli.kubectl.gather import (
    Gap,
    Gathered,
    MissingError,
    UnreachableError,
    gap_of,
    gather,
    sentence_of,
    with_release,
)
from drakit_cli.kubectl.output import Output
from drakit_cli.kubectl.pods import SeenPod, see_pod
from drakit_cli.kubectl.questions import OF_EXPLAIN, with_room
from drakit_cli.kubectl.replicas import place, release
from drakit_daemon.kube import AlreadyExistsError, ApiError, NotFoundError, Session, resource_path
from drakit_explain.allocation import NotEvaluatedError
from drakit_explain.kinds import CLAIMS, NAMESPACES, QUOTAS, RULES, SLICES, TEMPLATES
from drakit_explain.maintenance import (
    DRAIN,
    NO_RULES,
    RefusedError,
    Use,
    rule_facts,
    select,
    unsupported,
    uses,
)
from drakit_explain.model import ClaimFacts, DeviceID, MaintenanceFacts
from drakit_explain.pending import Verdict
from drakit_explain.reports import project_maintenance
from drakit_formats import crds
from drakit_formats.resource.nodes import selects_labels
from drakit_formats.resource.objects import Object, child, children, text

PATH = resource_path(crds.API_VERSION, crds.MAINTENANCES)

POLL_SECONDS = 1.0

_NAME = re.compile(r"[^a-z0-9]+")


# ---------------------------------------------------------------- preview


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """What a maintenance would do."""

    mode: str
    devices: Sequence[DeviceID]
    unsupported: Sequence[DeviceID]
    """Devices that nothing can taint."""

    blockers: Sequence[Mapping[str, Any]]
    """What holds them, as in the status, with ``budgets``, ``afterwards``, and whether it is
    ``blocked``: then it does not go away by itself."""

    gaps: Sequence[Gap]

    @property
    def exit_code(self) -> int:
        return 1 if self.unsupported or any(each["blocked"] for each in self.blockers) else 0

    def body(self) -> dict[str, Any]:
        """Write it for programs."""
        return {
            "mode": self.mode,
            "devices": ["/".join(each) for each in self.devices],
            "unsupported": ["/".join(each) for each in self.unsupported],
            "blockers": list(self.blockers),
            "notEvaluated": [str(gap) for gap in self.gaps],
        }

    def show(self, output: Output) -> None:
        """Print it."""
        output.line("These devices would be tainted:", colour="head")
        for each in self.devices:
            output.line("/".join(each), indent=2)
        if self.unsupported:
            output.line(f"Not possible for {len(self.unsupported)} of them: {NO_RULES}")
        verb = "would be evicted" if self.mode == DRAIN else "keep them until they end"
        output.line()
        if not self.blockers:
            output.line("No claim holds them.")
            return
        output.line(f"These pods use them, and {verb}:", colour="head")
        rows = [
            (
                f"{each['kind']} {each['namespace']}/{each['name']}",
                each["message"],
                "; ".join(each["budgets"]),
                each["afterwards"],
            )
            for each in self.blockers
        ]
        output.table(("WHAT", "USES", "BUDGETS", "AFTERWARDS"), rows)
        output.lines("Not evaluated", map(str, self.gaps))


async def preview(session: Session, wanted: MaintenanceFacts, namespace: str) -> Preview:
    """Return what a maintenance would do now."""
    found = await gather(session, (TEMPLATES, *OF_EXPLAIN, NAMESPACES, QUOTAS), namespace=namespace)
    if found.lacks_all(SLICES):
        raise UnreachableError(f"no permission to list {SLICES.word}")
    found = await with_release(session, found)
    of_class = found.world.device_class(wanted.selection.device_class)
    selectors = of_class.selectors if of_class is not None else ()
    found = await with_gates(session, found, selectors)
    await asyncio.to_thread(evaluate_selectors, found, selectors)
    try:
        devices = select(wanted, found.world)
    except RefusedError as error:
        kind = MissingError if error.reason == "NoDevices" else CommandError
        raise kind(str(error)) from None
    except NotEvaluatedError as error:
        raise UnreachableError(str(error)) from None
    using = uses(wanted, devices, found.world)
    missing = unsupported(devices, found.world) if RULES.plural in found.absent else ()
    blockers = await _blockers(session, wanted, devices, using, found)
    return Preview(
        mode=wanted.mode,
        devices=devices,
        unsupported=missing,
        blockers=blockers,
        gaps=[each for each in found.gaps if each.kind in (CLAIMS.plural, "pods", "budgets")],
    )


async def _blockers(
    session: Session,
    wanted: MaintenanceFacts,
    devices: Sequence[DeviceID],
    using: Sequence[Use],
    found: Gathered,
) -> list[dict[str, Any]]:
    nothing: dict[str, Any] = {"budgets": [], "afterwards": "", "blocked": False}
    if wanted.mode != DRAIN:
        return [{**each.blocker(), **nothing} for each in using]
    bodies: dict[str, Object] = {}
    budgets: dict[str, Sequence[Object]] = {}
    for use in using:
        if (pod := use.pod) is None or pod.uid in bodies:
            continue
        where = use.claim.namespace
        try:
            path = resource_path("v1", "pods", namespace=where, name=pod.name)
            bodies[pod.uid] = await session.get(path)
            if where not in budgets:
                path = resource_path("policy/v1", "poddisruptionbudgets", namespace=where)
                budgets[where] = (await session.list(path)).items
        except NotFoundError:
            continue
        except ApiError as error:
            what = "pods and PodDisruptionBudgets"
            effect = "what becomes of the pods is unknown"
            found.gaps.append(
                gap_of(error, "pods", denied=f"read {what}", failed=what, effect=effect)
            )
    afterwards = await _afterwards(session, wanted, devices, list(bodies.values()), found)
    found_blockers: list[dict[str, Any]] = []
    for use in using:
        uid = use.pod.uid if use.pod is not None else ""
        of_pod = _budgets(bodies.get(uid), budgets.get(use.claim.namespace, ()))
        entry = {
            "budgets": list(of_pod),
            "afterwards": afterwards.get(uid, ""),
            "blocked": use.pod is None or not all(of_pod.values()) or len(of_pod) > 1,
        }
        found_blockers.append({**use.blocker(), **entry})
    return found_blockers


def _budgets(pod: Object | None, budgets: Sequence[Object]) -> dict[str, bool]:
    """Return what the budgets of a pod say, and whether each allows its eviction now."""
    labels: Mapping[str, str] = child(pod or {}, "metadata", "labels")
    found: dict[str, bool] = {}
    for each in budgets:
        selector = child(each, "spec").get("selector")
        if pod is not None and selector is not None and selects_labels(selector, labels):
            allowed = int(child(each, "status").get("disruptionsAllowed") or 0)
            number = f"allows {allowed} evictions now" if allowed else "allows no eviction now"
            found[f"{text(each, 'metadata', 'name')} {number}"] = bool(allowed)
    return found


async def _afterwards(
    session: Session,
    wanted: MaintenanceFacts,
    devices: Sequence[DeviceID],
    bodies: Sequence[Object],
    found: Gathered,
) -> dict[str, str]:
    """Return what becomes of pods after their eviction, by UID."""
    world, pods = found.world, [see_pod(each) for each in bodies]
    for device in devices:
        world.apply(replace(rule_facts(wanted, device), uid=wanted.uid))
    found = await with_room(session, found, [each.facts for each in pods])
    evicted = {each.facts.uid for each in pods}
    for pod in pods:
        release(pod.facts, world)
    for claim in list(world.of(ClaimFacts).values()):
        if claim.consumers and all(each.uid in evicted for each in claim.consumers):
            world.apply(
                replace(claim, allocated=False, devices=(), shares=(), results=(), consumers=())
            )
    async with open_allocator(session, found, needed=bool(pods)) as ask:
        return await asyncio.to_thread(_placed, pods, found, ask)


def _placed(pods: Sequence[SeenPod], found: Gathered, ask: Ask) -> dict[str, str]:
    """Explain, one after the other, whether equal pods fit."""
    afterwards: dict[str, str] = {}
    for each in pods:
        if not each.owner_uid:
            afterwards[each.facts.uid] = "no controller creates it again"
            continue
        claims = tuple(replace(claim, generated=None) for claim in each.facts.claims)
        again = replace(
            each.facts,
            uid=f"{each.facts.uid}/again",
            node=None,
            phase="Pending",
            claims=claims,
            extended_claim=None,
            sandbox=None,
        )
        (report,) = explain_pods([SeenPod(facts=again)], found, ask=ask, brief=True)
        said = f"a new one waits: {report.summary}"
        if report.verdict is Verdict.FITS:
            said = f"a new one fits on node {report.fits_on}" if report.fits_on else "it fits"
            place(again, 1, found.world, ask, alone=True)
        elif report.verdict is not Verdict.BLOCKED:
            said = "it is unknown whether a new one fits"
        afterwards[each.facts.uid] = said
    return afterwards


# ---------------------------------------------------------------- the commands


def wanted_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the maintenance that arguments name; raises UsageError."""
    *before, device = (options.device or "").split("/")
    driver, pool = (before[0], "/".join(before[1:])) if len(before) > 1 else ("", *before, "")[:2]
    names = {
        "driver": options.driver or driver,
        "pool": options.pool or pool,
        "device": device,
        "node": options.node,
        "class": options.device_class,
    }
    selection = {key: name for key, name in names.items() if name}
    if not selection:
        raise UsageError("name a device, or select devices by --driver, --pool, --node or --class")
    spec: dict[str, Any] = {"devices": selection, "mode": options.command.capitalize()}
    if options.reason:
        spec["reason"] = options.reason
    if options.length is not None:
        end = datetime.now(UTC) + timedelta(seconds=options.length)
        spec["window"] = {"end": end.strftime("%Y-%m-%dT%H:%M:%SZ")}
    if getattr(options, "time_limit", None):
        spec["timeLimitSeconds"] = max(1, round(options.time_limit))
    words = "-".join((options.command, *selection.values())).lower()
    name = options.name or _NAME.sub("-", words)[:63].strip("-")
    kind = {"apiVersion": crds.API_VERSION, "kind": MaintenanceFacts.kind}
    return {**kind, "metadata": {"name": name}, "spec": spec}


def run(options: argparse.Namespace, output: Output) -> int:
    """Run ``cordon`` or ``drain``; return the exit code."""
    body = wanted_of(options)
    name = body["metadata"]["name"]
    if options.timeout is not None and not options.wait:
        raise UsageError("--timeout needs --wait")

    async def ask(session: Session, namespace: str) -> int:
        shown = await preview(session, project_maintenance(body), namespace)
        if options.dry_run:
            output.write("MaintenancePreview", shown)
            return shown.exit_code
        await _create(session, name, body)
        output.line(f"devicemaintenance/{name} created: {plural(len(shown.devices), 'device')}")
        if not options.wait:
            return 0
        condition = "Drained" if options.command == "drain" else "Tainted"
        return await _follow(session, f"{PATH}/{name}", condition, options.timeout, output)

    return fetch(options, ask)


async def _create(session: Session, name: str, body: Mapping[str, Any]) -> None:
    try:
        await session.create(PATH, body, strict=True)
    except NotFoundError:
        raise CommandError(
            "the cluster has no DeviceMaintenances: install or upgrade drakit's "
            "CustomResourceDefinitions, and set maintenance.enabled in the chart"
        ) from None
    except AlreadyExistsError:
        raise CommandError(
            f"DeviceMaintenance {name} already exists: set --name, or delete it with "
            f"'kubectl drakit uncordon {name}'"
        ) from None
    except ApiError as error:
        raise UnreachableError(sentence_of(error)) from None


async def _follow(
    session: Session, path: str, condition: str, seconds: float | None, output: Output
) -> int:
    """Print what changes until a condition is true; return the exit code."""
    clock, shown = asyncio.get_running_loop().time, ""
    end = float("inf") if seconds is None else clock() + seconds
    while True:
        try:
            body = await session.get(path)
        except NotFoundError:
            raise MissingError("the DeviceMaintenance was deleted") from None
        except ApiError as error:
            raise UnreachableError(sentence_of(error)) from None
        conditions = {text(each, "type"): each for each in children(body, "status", "conditions")}
        found = conditions.get(condition, child({}))
        said = text(found or conditions.get("Accepted", child({})), "message")
        if said and said != shown:
            output.line(said)
            output.flush()
            shown = said
        generation = child(body, "metadata").get("generation")
        is_current = found.get("observedGeneration") == generation
        if text(found, "status") == "True" and is_current:
            return 0
        if _status_of(body, "Accepted") == "False" or _status_of(body, "Ended") == "True":
            return 1
        if clock() >= end:
            for each in children(body, "status", "blockers"):
                where = f"{text(each, 'namespace')}/{text(each, 'name')}"
                output.line(f"{where}: {text(each, 'message')}")
            if not conditions:
                output.line("the operator has not acted: set maintenance.enabled in the chart")
            return 1
        await asyncio.sleep(min(POLL_SECONDS, max(0.0, end - clock())))


def _status_of(body: Object, kind: str) -> str:
    conditions = children(body, "status", "conditions")
    return next((text(each, "status") for each in conditions if text(each, "type") == kind), "")


def uncordon(options: argparse.Namespace, output: Output) -> int:
    """Run ``uncordon``; return the exit code."""

    async def ask(session: Session, namespace: str) -> int:
        try:
            known = [project_maintenance(each) for each in (await session.list(PATH)).items]
        except NotFoundError:
            known = []
        except ApiError as error:
            raise UnreachableError(sentence_of(error)) from None
        found = [each for each in known if each.name == options.name] or [
            each
            for each in known
            if any(is_named(options.name, one.of_pool, one.device) for one in each.devices)
        ]
        if not found:
            raise MissingError(f"no DeviceMaintenance is {options.name}, or has such a device")
        for each in found:
            if len(each.devices) > 1 and each.name != options.name:
                raise CommandError(
                    f"DeviceMaintenance {each.name} has {len(each.devices)} devices: end it for "
                    f"all of them with 'kubectl drakit uncordon {each.name}'"
                )
            try:
                await session.delete(f"{PATH}/{each.name}", uid=each.uid)
            except NotFoundError:
                continue
            except ApiError as error:
                raise UnreachableError(sentence_of(error)) from None
            output.line(f"devicemaintenance/{each.name} deleted: its devices are back in service")
        return 0

    return fetch(options, ask)
