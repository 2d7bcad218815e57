"""
``kubectl drakit cordon``, ``drain`` and ``uncordon``: preview, create, follow and delete a
DeviceMaintenance.

The preview uses :mod:`drakit_explain.maintenance`, as the operator does. It also asks the allocator
where the evicted pods would fit afterwards, one pod at a time, with the taints and without the
claims of the evicted pods.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from drakit_cli.kubectl.targets import qualified_name
from drakit_daemon.kube import AlreadyExistsError, ApiError, NotFoundError, Session, resource_path
from drakit_explain.allocation import NotEvaluatedError
from drakit_explain.kinds import CLASSES, NAMESPACES, QUOTAS, RULES, SLICES, TEMPLATES, Kind
from drakit_explain.maintenance import (
    DRAIN,
    RefusedError,
    Use,
    rule_facts,
    select,
    unsupported,
    unsupported_message,
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
    """The effects of a maintenance."""

    mode: str
    devices: Sequence[DeviceID]
    unsupported: Sequence[DeviceID]
    """Devices that cannot be tainted."""

    blockers: Sequence[Mapping[str, Any]]
    """The claims and pods that hold the devices, as in the status, with ``budgets``, ``afterwards``
    and ``blocked``. A ``blocked`` blocker does not go away by itself."""

    gaps: Sequence[Gap]

    @property
    def exit_code(self) -> int:
        return 1 if self.unsupported or any(each["blocked"] for each in self.blockers) else 0

    def body(self) -> dict[str, Any]:
        """Return the preview as JSON."""
        return {
            "mode": self.mode,
            "devices": ["/".join(each) for each in self.devices],
            "unsupported": ["/".join(each) for each in self.unsupported],
            "blockers": list(self.blockers),
            "notEvaluated": [str(gap) for gap in self.gaps],
        }

    def show(self, output: Output) -> None:
        """Print the preview."""
        output.line("These devices would be tainted:", color="head")
        for each in self.devices:
            output.line("/".join(each), indent=2)
        if self.unsupported:
            output.line(f"Not possible for {unsupported_message(self.unsupported)}")
        verb = "would be evicted" if self.mode == DRAIN else "keep them until they end"
        output.line()
        if self.blockers:
            output.line(f"These pods use them, and {verb}:", color="head")
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
        else:
            output.line("No claim holds them.")
        output.lines("Not evaluated", map(str, self.gaps))


async def _select(
    session: Session, wanted: MaintenanceFacts, namespace: str, kinds: Sequence[Kind]
) -> tuple[Sequence[DeviceID], Gathered]:
    """Return the devices that a maintenance would select, and the facts of the given kinds."""
    found = await gather(session, kinds, namespace=namespace)
    name = wanted.selection.device_class
    found.require(SLICES, *((CLASSES,) if name else ()))
    of_class = found.world.device_class(name)
    selectors = of_class.selectors if of_class is not None else ()
    found = await with_gates(session, await with_release(session, found), selectors)
    await asyncio.to_thread(evaluate_selectors, found, selectors)
    try:
        return select(wanted, found.world), found
    except RefusedError as error:
        kind = MissingError if error.reason == "NoDevices" else CommandError
        raise kind(str(error)) from None
    except NotEvaluatedError as error:
        raise UnreachableError(str(error)) from None


async def preview(session: Session, wanted: MaintenanceFacts, namespace: str) -> Preview:
    """Return the effects that a maintenance would have if it started now."""
    kinds = (TEMPLATES, *OF_EXPLAIN, NAMESPACES, QUOTAS)
    devices, found = await _select(session, wanted, namespace, kinds)
    using = uses(wanted, devices, found.world)
    absent = RULES.plural in found.absent
    nothing: dict[str, Any] = {"budgets": [], "afterwards": "", "blocked": False}
    blockers = [{**each.blocker(), **nothing} for each in using]
    if wanted.mode == DRAIN:
        pods = await _read_pods(session, using, blockers, found)
        for device in devices:
            found.world.apply(rule_facts(wanted, device))
        afterwards = await _afterwards(session, pods, found)
        for use, entry in zip(using, blockers, strict=True):
            entry["afterwards"] = afterwards.get(use.pod.uid, "") if use.pod is not None else ""
    return Preview(
        mode=wanted.mode,
        devices=devices,
        unsupported=unsupported(devices, found.world) if absent else (),
        blockers=blockers,
        gaps=tuple(dict.fromkeys(found.gaps)),
    )


async def _read_pods(
    session: Session,
    using: Sequence[Use],
    blockers: Sequence[dict[str, Any]],
    found: Gathered,
) -> Sequence[SeenPod]:
    """Return the pods that would be evicted, and add their budgets to the blockers."""
    pods: dict[str, SeenPod] = {}
    budgets: dict[str, Sequence[Object]] = {}
    for use, entry in zip(using, blockers, strict=True):
        entry["blocked"] = use.pod is None
        if (pod := use.pod) is None:
            continue
        where = use.claim.namespace
        try:
            body = await session.get(resource_path("v1", "pods", namespace=where, name=pod.name))
            if where not in budgets:
                path = resource_path("policy/v1", "poddisruptionbudgets", namespace=where)
                budgets[where] = (await session.list(path)).items
        except NotFoundError:
            continue
        except ApiError as error:
            what = "pods and PodDisruptionBudgets"
            effect = "it is unknown which pods can be evicted"
            gap = gap_of(error, "pods", denied=f"read {what}", failed=what, effect=effect)
            found.gaps.append(gap)
            continue
        pods[pod.uid] = see_pod(body)
        of_pod = _budgets(body, budgets[where])
        entry["budgets"] = list(of_pod)
        # The API server does not evict a pod to which several PodDisruptionBudgets apply.
        entry["blocked"] = not all(of_pod.values()) or len(of_pod) > 1
    return list(pods.values())


def _budgets(pod: Object, budgets: Sequence[Object]) -> dict[str, bool]:
    """Return a description of each budget of a pod, and whether the budget allows the pod's
    eviction now."""
    labels: Mapping[str, str] = child(pod, "metadata", "labels")
    found: dict[str, bool] = {}
    for each in budgets:
        selector = child(each, "spec").get("selector")
        if selector is not None and selects_labels(selector, labels):
            allowed = int(child(each, "status").get("disruptionsAllowed") or 0)
            number = plural(allowed, "eviction") if allowed else "no eviction"
            found[f"{text(each, 'metadata', 'name')} allows {number} now"] = bool(allowed)
    return found


async def _afterwards(
    session: Session, pods: Sequence[SeenPod], found: Gathered
) -> Mapping[str, str]:
    """Return a sentence about what happens to each pod after its eviction, keyed by UID."""
    found = await with_room(session, found, [each.facts for each in pods])
    world, evicted = found.world, {each.facts.uid for each in pods}
    for pod in pods:
        release(pod.facts, world)
    for claim in list(world.of(ClaimFacts).values()):
        if claim.consumers and all(each.uid in evicted for each in claim.consumers):
            world.apply(
                replace(claim, allocated=False, devices=(), shares=(), results=(), consumers=())
            )
    async with open_allocator(session, found, needed=bool(pods)) as ask:
        return await asyncio.to_thread(
            lambda: {each.facts.uid: _placed(each, found, ask) for each in pods}
        )


def _placed(pod: SeenPod, found: Gathered, ask: Ask) -> str:
    """Return a sentence about whether an equal pod would fit. If so, the following pods cannot use
    its devices."""
    if not pod.owner_uid:
        return "no controller creates it again"
    again = replace(
        pod.facts,
        uid=f"{pod.facts.uid}/again",
        node=None,
        phase="Pending",
        claims=tuple(replace(claim, generated=None) for claim in pod.facts.claims),
        extended_claim=None,
        sandbox=None,
    )
    (report,) = explain_pods([SeenPod(facts=again)], found, ask=ask, brief=True)
    if report.verdict is Verdict.BLOCKED:
        return f"a new one waits: {report.summary}"
    if report.verdict is Verdict.FITS and report.fits_on:
        place(again, 1, found.world, ask, single=True)
        return f"a new one fits on node {report.fits_on}"
    return report.summary


# ---------------------------------------------------------------- the commands


def wanted_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the maintenance that the arguments describe. Raises UsageError."""
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
    if getattr(options, "time_limit", None):
        spec["timeLimitSeconds"] = max(1, round(options.time_limit))
    words = "-".join((options.command, *selection.values())).lower()
    name = options.name or _NAME.sub("-", words)[:63].strip("-")
    kind = {"apiVersion": crds.API_VERSION, "kind": MaintenanceFacts.kind}
    return {**kind, "metadata": {"name": name}, "spec": spec}


def _fetch(options: argparse.Namespace, ask: Callable[[Session, str], Awaitable[int]]) -> int:
    async def guarded(session: Session, namespace: str) -> int:
        try:
            return await ask(session, namespace)
        except ApiError as error:
            raise UnreachableError(sentence_of(error)) from None

    return fetch(options, guarded)


def run(options: argparse.Namespace, output: Output) -> int:
    """Run ``cordon`` or ``drain``. Return the exit code."""
    body = wanted_of(options)
    name = body["metadata"]["name"]
    if options.timeout is not None and not options.wait:
        raise UsageError("--timeout needs --wait")

    async def ask(session: Session, namespace: str) -> int:
        wanted = project_maintenance(body)
        if options.dry_run:
            shown = await preview(session, wanted, namespace)
            if output.names_only:
                output.names("/".join(each) for each in shown.devices)
            else:
                output.write("MaintenancePreview", shown)
            return shown.exit_code
        devices, _ = await _select(session, wanted, namespace, (CLASSES, SLICES))
        await _create(session, name, body)
        if output.names_only:
            output.names([_qualified(name)])
        output.progress(f"devicemaintenance/{name} created: {plural(len(devices), 'device')}")
        if not options.wait:
            return 0
        condition = "Drained" if wanted.mode == DRAIN else "Tainted"
        return await _follow(session, f"{PATH}/{name}", condition, options.timeout, output)

    return _fetch(options, ask)


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


async def _follow(
    session: Session, path: str, condition: str, seconds: float | None, output: Output
) -> int:
    """Print changes until a condition becomes true. Return the exit code."""
    clock, shown = asyncio.get_running_loop().time, ""
    end = float("inf") if seconds is None else clock() + seconds
    while True:
        try:
            body = await session.get(path)
        except NotFoundError:
            raise MissingError("the DeviceMaintenance was deleted") from None
        conditions = {text(each, "type"): each for each in children(body, "status", "conditions")}
        accepted, found, ended = (
            conditions.get(each, child({})) for each in ("Accepted", condition, "Ended")
        )
        said = text(found or accepted, "message")
        if said and said != shown:
            output.progress(said)
            shown = said
        is_current = found.get("observedGeneration") == child(body, "metadata").get("generation")
        if text(found, "status") == "True" and is_current:
            return 0
        if text(accepted, "status") == "False" or text(ended, "status") == "True":
            return 1
        if clock() >= end:
            for each in children(body, "status", "blockers"):
                where = f"{text(each, 'namespace')}/{text(each, 'name')}"
                output.progress(f"{where}: {text(each, 'message')}")
            if not conditions:
                output.progress("the operator has not acted: set maintenance.enabled in the chart")
            return 1
        await asyncio.sleep(min(POLL_SECONDS, max(0.0, end - clock())))


def _qualified(name: str) -> str:
    return qualified_name(MaintenanceFacts.kind, name, group=crds.GROUP)


def uncordon(options: argparse.Namespace, output: Output) -> int:
    """Run ``uncordon``. Return the exit code."""

    async def ask(session: Session, _: str) -> int:
        try:
            known = [project_maintenance(each) for each in (await session.list(PATH)).items]
        except NotFoundError:
            known = []
        found = [each for each in known if each.name == options.name] or [
            each
            for each in known
            if any(is_named(options.name, one.of_pool, one.device) for one in each.devices)
        ]
        if not found:
            raise MissingError(
                f"no DeviceMaintenance is named {options.name}, or has a device of this name: list "
                "them with 'kubectl get devicemaintenances'"
            )
        for each in found:  # Check all maintenances before any is deleted.
            if len(each.devices) > 1 and each.name != options.name:
                raise CommandError(
                    f"DeviceMaintenance {each.name} has {len(each.devices)} devices: end it for "
                    f"all of them with 'kubectl drakit uncordon {each.name}'"
                )
        for each in found:
            with suppress(NotFoundError):
                await session.delete(f"{PATH}/{each.name}", uid=each.uid)
            if output.names_only:
                output.names([_qualified(each.name)])
            output.progress(
                f"devicemaintenance/{each.name} deleted: its devices are back in service"
            )
        return 0

    return _fetch(options, ask)
