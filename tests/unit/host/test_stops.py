"""When the host reports a stopped endpoint to users."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from drakit_nodeplugin.host.active_driver import _ReportingListener
from tests.unit.devices.conftest import DRIVER, SETTINGS, Node, inventory

UNKNOWN = "its policies are unknown"
ENDED = "its stream ended"


@asynccontextmanager
async def host() -> AsyncIterator[tuple[_ReportingListener, list[str]]]:
    """A listener on a running device manager, and the reasons of the stops that it reports."""
    reported: list[str] = []
    async with Node().plugin() as manager:
        yield (
            _ReportingListener(
                manager,
                on_stopped=lambda _, reason: reported.append(reason),
                on_listed=lambda *_: None,
            ),
            reported,
        )


@pytest.mark.looptime
async def test_a_driver_that_lists_its_devices_soon_after_the_start_has_not_stopped():
    async with host() as (listener, reported):
        listener.stopped(DRIVER, UNKNOWN)
        await asyncio.sleep(SETTINGS.start_grace_period - 1)
        listener.replaced(DRIVER, inventory("cam-0"))
        await asyncio.sleep(100)
        assert reported == []


@pytest.mark.looptime
async def test_a_driver_that_lists_nothing_in_the_grace_period_after_the_start_has_stopped():
    async with host() as (listener, reported):
        listener.stopped(DRIVER, ENDED)
        listener.stopped(DRIVER, UNKNOWN)
        await asyncio.sleep(SETTINGS.start_grace_period - 1)
        assert reported == []
        await asyncio.sleep(3)
        assert reported == [UNKNOWN], "once, with the newest reason"


@pytest.mark.looptime
async def test_a_driver_that_stops_for_changing_reasons_is_reported_once():
    async with host() as (listener, reported):
        for reason in (ENDED, UNKNOWN) * 5:
            listener.stopped(DRIVER, reason)
        await asyncio.sleep(SETTINGS.start_grace_period + 3)
        assert reported == [UNKNOWN]


@pytest.mark.looptime
async def test_a_driver_that_has_listed_its_devices_is_reported_at_once():
    async with host() as (listener, reported):
        listener.replaced(DRIVER, inventory("cam-0"))
        listener.stopped(DRIVER, ENDED)
        assert reported == [ENDED]
