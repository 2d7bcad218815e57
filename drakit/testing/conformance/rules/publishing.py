"""
What is published: devices that Kubernetes takes, under names that stay, by a stream that stays.

It must not know how devices are prepared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from drakit.testing.conformance.facts import PublishedDevice
from drakit.testing.conformance.kit import Kit
from drakit.testing.conformance.rule import rule
from drakit.testing.conformance.rules import steps

__all__ = ()

TOLD_SECONDS = 1.0
"""From a device's publication to the Event that says which others are left out."""

LISTED_SECONDS = 2.0
"""From the start of the node plugin to the slices of what a driver lists then."""

WATCHED_SECONDS = 3.0
"""How long a stream is looked at; one that ended comes back after a second or two."""


@rule(
    "devices-published",
    "all devices are published, and none is left out",
    why="The API server refuses a ResourceSlice with a device that breaks a limit. Such a device "
    "is left out alone, and no pod ever gets it.",
)
async def devices_published(kit: Kit) -> None:
    devices = await kit.devices()
    await steps.within(TOLD_SECONDS, lambda: bool(_left_out(kit)))
    if left_out := _left_out(kit):
        kit.fail(f"{len(left_out)} devices are not published; the first: {left_out[0]}")
    keys = [(device.pool, device.name) for device in devices]
    if twice := {key for key in keys if keys.count(key) > 1}:
        kit.fail(f"two devices have one name in one pool: {sorted(twice)[0][1]}")


def _left_out(kit: Kit) -> list[str]:
    return [note for note in kit.events() if " is not published: " in note]


@rule(
    "names-stay",
    "devices have the same names and pools after a restart",
    why="An allocation names its device by driver, pool and name, for as long as the claim lives. "
    "A device that comes back under another name is another one: pods that were scheduled to the "
    "old one do not start.",
)
async def names_stay(kit: Kit) -> None:
    before = await _settled(kit)
    after = await _restarted(kit)
    names, later = {(d.pool, d.name) for d in before}, {(d.pool, d.name) for d in after}
    if lost := names - later:
        came = f"; new is {_first(later - names)}" if later - names else ""
        kit.fail(
            f"device {_first(lost)} is not published any more after a restart of the node plugin"
            f"{came}; all had to be as before"
        )
    if added := later - names:
        kit.fail(f"device {_first(added)} was not there before a restart of the node plugin")


@rule(
    "quiet-restart",
    "a restart without a change writes no ResourceSlice",
    why="A ResourceSlice that changes is looked at by all schedulers, and every node restarts its "
    "plugin at an update. Times, process ids and random values do not belong into attributes.",
)
async def quiet_restart(kit: Kit) -> None:
    before = await _settled(kit)
    writes = kit.slice_writes()
    after = await _restarted(kit)
    if (more := kit.slice_writes() - writes) == 0:
        return
    kit.fail(
        f"a restart of the node plugin without a change led to {more} writes of ResourceSlices"
        f"{_difference(before, after)}; there had to be none"
    )


def _difference(before: Sequence[PublishedDevice], after: Sequence[PublishedDevice]) -> str:
    """Say what is the first difference, if one can be seen."""
    old = {(device.pool, device.name): device for device in before}
    for device in after:
        was = old.get((device.pool, device.name))
        if was is None:
            return f": device {device.name} is new"
        for what, earlier, now in (
            ("attribute", was.attributes, device.attributes),
            ("capacity", was.capacity, device.capacity),
        ):
            if name := _changed(earlier, now):
                return (
                    f": {what} {name} of device {device.name} was {earlier.get(name)!r} and is "
                    f"{now.get(name)!r}"
                )
    return ""


def _changed(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Name the first key whose value differs."""
    names = sorted(earlier.keys() | now.keys())
    return next((name for name in names if earlier.get(name) != now.get(name)), None)


@rule(
    "stream-stays-open",
    "the stream that lists the devices stays open",
    why="A stream that ends says that the driver is gone: its devices are tainted for new pods and "
    "are not prepared any more, and after a grace period they are not published any more.",
)
async def stream_stays_open(kit: Kit) -> None:
    begun, end = len(kit.log()), time.monotonic() + WATCHED_SECONDS
    while time.monotonic() < end:
        if names := steps.stopped(await kit.devices()):
            reasons = steps.stop_reasons(kit.log())
            kit.fail(
                f"devices were tainted with {steps.STOPPED}, first {names[0]}: "
                f"{reasons[-1] if reasons else 'their driver was away'}; the stream must stay open "
                f"while nothing changes"
            )
        await asyncio.sleep(0.05)
    if reasons := steps.stop_reasons(kit.log()[begun:]):
        kit.fail(f"the driver stopped while nothing was asked of it: {reasons[0]}")


async def _settled(kit: Kit) -> list[PublishedDevice]:
    """Give the devices once the slices have stopped to change, as they may after a start."""
    before = None
    for _ in range(20):
        now = (await kit.devices(), kit.slice_writes())
        if now == before:
            break
        before = now
        await asyncio.sleep(0.4)
    return await kit.devices()


async def _restarted(kit: Kit) -> list[PublishedDevice]:
    """Restart the node plugin, and give the devices once what is listed then is published."""
    await kit.restart()
    await asyncio.sleep(LISTED_SECONDS)
    return await kit.devices()


def _first(keys: set[tuple[str, str]]) -> str:
    return sorted(keys)[0][1]
