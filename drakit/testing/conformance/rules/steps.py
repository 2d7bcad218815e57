"""
Common steps of rules: choosing devices, storing claims, and making calls that must succeed.

A rule begins with a step that another rule covers: preparing a plain claim. If that step fails, the
rule is skipped with the reason, because each driver fault should be reported only once. Any later
problem fails the rule.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar, cast

from drakit.testing.conformance.facts import (
    ClaimUnderTest,
    ConformanceError,
    PrepareResult,
    PublishedDevice,
)
from drakit.testing.conformance.kit import Kit
from drakit.testing.conformance.programs import add_working_directory
from drakit.testing.conformance.targets import PythonTarget, Target

ResultT = TypeVar("ResultT")

GROUP = "drakit.drivers"
"""The entry point group for drivers."""

STOPPED = "drakit.dev/stopped"
"""The taint of a device whose driver is unavailable."""

GONE = "drakit.dev/gone"
"""The taint of a device that its driver no longer lists, while a claim holds it."""

EVENT_CHARACTERS = 1024
"""The API server's limit for an Event's note."""

_KEEPS_AWAY = ("NoSchedule", "NoExecute")
_NO_SENTENCE = (
    (re.compile(r"Traceback \(most recent call"), "a traceback"),
    (re.compile(r"\bat 0x[0-9a-f]+"), "the address of an object"),
    (re.compile(r"<[\w.]+ object"), "an object's representation"),
    (re.compile(r"failed in \w+: \w+"), "an internal exception"),
    (re.compile(r"goroutine \d+ \["), "a traceback"),
    (re.compile(r"[\x00-\x08\x0e-\x1f]"), "control characters"),
)
_STOP = re.compile(r"^\S+ ERROR +endpoint stopped .*?reason=(?P<reason>.*)$", re.MULTILINE)


# ------------------------------------------------------------ devices


async def usable(kit: Kit, *, at_least: int = 1) -> list[PublishedDevice]:
    """
    Return devices that claims can use at the same time, or skip the rule.

    Tainted devices are excluded, and so are all but one of the partitions of each piece of
    hardware. The result consists of devices for a single claim. If there are fewer than `at_least`
    of them, and more shareable devices, it consists of shareable devices.
    """
    found = _apart(untainted(await kit.devices(at_least=at_least)))
    alone = [device for device in found if not device.allow_multiple]
    shared = [device for device in found if device.allow_multiple]
    best = alone if len(alone) >= at_least else max(alone, shared, key=len)
    if len(best) < at_least:
        kit.skip(
            f"the rule needs {at_least} devices without taints that can be allocated at the same "
            f"time; the driver publishes {len(best)}"
        )
    return best


def untainted(devices: Sequence[PublishedDevice]) -> list[PublishedDevice]:
    """Return the devices that a scheduler would allocate to new pods."""
    return [
        device
        for device in devices
        if not any(taint.get("effect") in _KEEPS_AWAY for taint in device.taints)
    ]


def _apart(devices: Sequence[PublishedDevice]) -> list[PublishedDevice]:
    """Exclude devices that consume from the same counter set as an earlier device."""
    taken: set[tuple[str, str]] = set()
    found: list[PublishedDevice] = []
    for device in devices:
        consumed = cast("list[dict[str, Any]]", device.body.get("consumesCounters") or [])
        sets = {(device.pool, str(item.get("counterSet"))) for item in consumed}
        if not sets & taken:
            taken |= sets
            found.append(device)
    return found


def stopped(devices: Sequence[PublishedDevice]) -> list[str]:
    """Return the names of the devices whose taint shows that their driver is unavailable."""
    return [d.name for d in devices if any(taint.get("key") == STOPPED for taint in d.taints)]


def stop_reasons(log: str) -> list[str]:
    """Return the reasons why the driver has stopped, read from an excerpt of the node plugin's
    log."""
    return [match["reason"] for match in _STOP.finditer(log)]


# ------------------------------------------------------------ the driver's class


def class_of(target: Target) -> type[object] | None:
    """Return the driver class of a Python target, or None for other targets. Raises
    ConformanceError if this process cannot load it, although the node plugin could."""
    if not isinstance(target, PythonTarget):
        return None
    try:
        found = _loaded(target.reference)
    except (Exception, SystemExit) as error:
        raise ConformanceError(f"{target.reference} cannot be loaded: {error}") from error
    return cast("type[object]", found) if isinstance(found, type) else None


def _loaded(reference: str) -> object:
    module, colon, attribute = reference.partition(":")
    if not colon:
        return next(p for p in entry_points(group=GROUP) if p.name == reference).load()
    add_working_directory()
    return getattr(import_module(module), attribute)


# ------------------------------------------------------------ claims


async def answer_of(kit: Kit, claim: ClaimUnderTest) -> PrepareResult:
    """Prepare one claim, and return its result."""
    answers = await kit.prepare(claim)
    if claim.uid not in answers:
        kit.fail(
            "the response to prepare does not contain its claim, so the kubelet reports a failure"
        )
    return answers[claim.uid]


async def prepared(kit: Kit, claim: ClaimUnderTest) -> PrepareResult:
    """Prepare a plain claim as the first step. Skip the rule if that fails, or if the edits contain
    paths that do not exist: other rules cover both."""
    answer = await answer_of(kit, claim)
    if answer.error:
        kit.skip(f"the driver prepares no claim (see the rule prepare): {answer.error}")
    skip_if_missing(kit, claim)
    return answer


def skip_if_missing(kit: Kit, claim: ClaimUnderTest) -> None:
    """Skip the rule if the edits of a claim that was just prepared contain paths that do not exist
    on the host."""
    if missing := missing_paths(edits_of(kit, claim)):
        kit.skip(
            f"the edits of a claim name {missing[0]}, which does not exist on the host (see the "
            f"rule host-paths)"
        )


async def prepared_once(kit: Kit, device: PublishedDevice) -> None:
    """Prepare a plain claim, as :func:`prepared` does, and unprepare it."""
    claim = kit.claim(device)
    await prepared(kit, claim)
    await must_unprepare(kit, claim, when="at the start of the rule,")


@dataclass(frozen=True, kw_only=True)
class Held:
    """A prepared claim, with the edits of its containers."""

    kit: Kit
    claim: ClaimUnderTest
    answer: PrepareResult
    edits: Mapping[str, Any]
    who: str
    """How failure messages refer to the claim, at the start of a sentence."""

    async def prepare_again(self, *, when: str) -> None:
        """Prepare the claim again. Fail the rule if the response or the edits differ."""
        again = await must_prepare(self.kit, self.claim, when=when)
        if again != self.answer or edits_of(self.kit, self.claim) != self.edits:
            self.kit.fail(f"{when} {self.who} got a different response")

    def expect_paths(self, event: str) -> None:
        """Fail the rule if a host path in the edits no longer exists after an event."""
        if missing := missing_paths(self.edits):
            self.kit.fail(f"{event} removed {missing[0]}, which {self.who} needs")


async def hold(
    kit: Kit, claim: ClaimUnderTest, *, who: str = "a prepared claim", when: str = ""
) -> Held:
    """Prepare a claim, as :func:`prepared` does or, if `when` is set, as :func:`must_prepare`
    does."""
    answer = await (must_prepare(kit, claim, when=when) if when else prepared(kit, claim))
    return Held(kit=kit, claim=claim, answer=answer, edits=edits_of(kit, claim), who=who)


async def must_prepare(kit: Kit, claim: ClaimUnderTest, *, when: str) -> PrepareResult:
    """Prepare a claim. Fail the rule if that fails."""
    answer = await answer_of(kit, claim)
    if answer.error:
        kit.fail(f"{when} prepare must succeed, but failed: {answer.error}")
    return answer


async def must_unprepare(kit: Kit, claim: ClaimUnderTest, *, when: str) -> None:
    """Unprepare a claim. Fail the rule if that fails."""
    error = (await kit.unprepare(claim)).get(claim.uid)
    if error is None:
        kit.fail(f"{when} the response to unprepare does not contain its claim")
    if error:
        kit.fail(f"{when} unprepare must succeed, but failed: {error}")


def check_sentence(kit: Kit, error: str, what: str) -> None:
    """Fail the rule if a claim's error is not a user-friendly sentence."""
    for pattern, name in _NO_SENTENCE:
        if pattern.search(error):
            kit.fail(
                f"the error for a claim {what} contains {name} instead of a sentence: {error!r}"
            )
    if len(error) > EVENT_CHARACTERS:
        kit.fail(
            f"the error for a claim {what} has {len(error)} characters; the limit of an Event is "
            f"{EVENT_CHARACTERS}: {error[:100]!r}"
        )


@contextlib.asynccontextmanager
async def going_on(work: Coroutine[Any, Any, ResultT]) -> AsyncGenerator[asyncio.Task[ResultT]]:
    """Run a coroutine concurrently with the rule. Cancel it if it is still running when the rule
    ends."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # retrieve the exception, so that asyncio does not log it


async def free_again(kit: Kit, *devices: PublishedDevice, when: str) -> None:
    """Fail the rule if a new claim cannot use the devices. Leaves no claim prepared."""
    claim = kit.claim(*devices)
    await must_prepare(kit, claim, when=f"{when}, for the device's next pod,")
    await must_unprepare(kit, claim, when=f"{when}, after the next pod ended,")


# ------------------------------------------------------------ container edits


def edits_of(kit: Kit, claim: ClaimUnderTest) -> dict[str, Any]:
    """Return the CDI edits of all devices of a claim. Lists whose order does not matter are
    sorted."""
    edits = kit.edits(claim)
    if "env" in edits:
        edits["env"] = sorted(edits["env"], key=str)
    return edits


def host_paths(edits: Mapping[str, Any]) -> dict[str, str]:
    """Return the host paths in CDI edits, each with its purpose."""
    found: dict[str, str] = {}
    for mount in edits.get("mounts") or ():
        path = str(mount.get("hostPath", ""))
        if path.startswith("/") and mount.get("type", "") in ("", "none", "bind"):
            found[path] = f"mount to {mount.get('containerPath')}"
    for node in edits.get("deviceNodes") or ():
        found[str(node.get("hostPath") or node.get("path", ""))] = "device node"
    for hook in edits.get("hooks") or ():
        found[str(hook.get("path", ""))] = f"{hook.get('hookName')} hook"
    for net in edits.get("netDevices") or ():
        found[f"/sys/class/net/{net.get('hostInterfaceName')}"] = "network interface"
    return found


def missing_paths(edits: Mapping[str, Any]) -> list[str]:
    """Return the host paths in CDI edits that do not exist."""
    return [
        f"{path} ({what})" for path, what in host_paths(edits).items() if not Path(path).exists()
    ]
