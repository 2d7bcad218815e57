"""When an active driver reports a stopped endpoint to users, and what remains of a closed one."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from drakit_daemon import tasks
from drakit_driver.runtime.contract import DriverTraits, EndpointContext
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.host.active_driver import ActiveDriver
from drakit_nodeplugin.host.node import NodeEvents
from drakit_nodeplugin.kubelet.server import Registration
from tests.unit.devices.conftest import DRIVER, NODE, SETTINGS, inventory
from tests.unit.host.conftest import environment

UNKNOWN = "its policies are unknown"
ENDED = "its stream ended"
GRACE = SETTINGS.start_grace_period


class Source:
    """A driver whose endpoints are the test's."""

    name, where, foreign = DRIVER, "test", False
    traits = DriverTraits(health=True)

    def __init__(self, *expected: str) -> None:
        self.expected = expected
        self.surroundings: EndpointContext | None = None

    def endpoint(self, surroundings: EndpointContext) -> Source:
        self.surroundings = surroundings
        return self

    async def start(self) -> None: ...

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None: ...


class Events(NodeEvents):
    """The Events of the Node, before they are written."""

    def __init__(self, session: asyncio.Future) -> None:
        super().__init__(NODE, session)
        self.notes: list[str] = []

    def emit(self, *, reason: str, action: str, note: str) -> None:
        assert (reason, action) == ("EndpointStopped", "Connect")
        self.notes.append(note)


class Host:
    """An instance of the node plugin that can run a driver."""

    def __init__(self, directory) -> None:
        self._environment = environment(directory, node=NODE)
        self.events = Events(self._environment.session)
        self.metrics = self._environment.metrics
        assert self._environment.config.devices.start_grace_period == GRACE

    @asynccontextmanager
    async def running(self, *expected: str) -> AsyncIterator[DeviceManager]:
        """Run a driver as its active instance does; its endpoints report to the manager."""
        source = Source(*expected)
        active = ActiveDriver(
            source,
            self._environment,
            events=self.events,
            registration=Registration(DRIVER, dra_socket=None, versions=()),
        )
        await active.start()
        parts = [
            asyncio.create_task(tasks.run(each)) for each in (active.maintenance(), active.parts())
        ]
        try:
            yield source.surroundings.listener
            for part in parts:
                assert not part.done(), part.exception()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.wait(parts)
            await active.close()

    @property
    def counted(self) -> float | None:
        return self.metrics.registry.get_sample_value(
            "drakit_endpoint_diagnostics_total", {"driver": DRIVER, "reason": "EndpointStopped"}
        )


@pytest.fixture
async def host(tmp_path) -> Host:
    return Host(tmp_path)


def stopped(reason: str) -> str:
    return f"driver {DRIVER} is unavailable: {reason}; new pods do not get its devices"


@pytest.mark.looptime
async def test_a_driver_that_lists_its_devices_soon_after_the_start_has_not_stopped(host):
    async with host.running(DRIVER) as manager:
        manager.stopped(DRIVER, UNKNOWN)
        await asyncio.sleep(GRACE - 1)
        manager.replaced(DRIVER, inventory("cam-0"))
        await asyncio.sleep(100)
        assert host.events.notes == []


@pytest.mark.looptime
async def test_a_driver_that_lists_nothing_in_the_grace_period_after_the_start_has_stopped(host):
    async with host.running(DRIVER) as manager:
        manager.stopped(DRIVER, ENDED)
        await asyncio.sleep(1)
        manager.stopped(DRIVER, UNKNOWN)
        await asyncio.sleep(GRACE - 2)
        assert host.events.notes == []
        await asyncio.sleep(3)
        assert host.events.notes == [stopped(UNKNOWN)], "once, with the newest reason"
        manager.wait("the devices that claims hold are unknown")
        await asyncio.sleep(100)
        manager.wait(None)
        await asyncio.sleep(1000)
        assert len(host.events.notes) == host.counted == 1


@pytest.mark.looptime
async def test_a_driver_that_has_listed_its_devices_is_reported_at_once_and_for_each_reason(host):
    async with host.running(DRIVER) as manager:
        manager.replaced(DRIVER, inventory("cam-0"))
        for reason in (ENDED, ENDED, UNKNOWN):
            manager.stopped(DRIVER, reason)
            await asyncio.sleep(0.1)
        assert host.events.notes == [stopped(ENDED), stopped(UNKNOWN)]
        manager.replaced(DRIVER, inventory("cam-0"))
        manager.stopped(DRIVER, UNKNOWN)
        await asyncio.sleep(1000)
        assert host.events.notes[2:] == [stopped(UNKNOWN)], "it has listed its devices in between"
        assert host.counted == 3


@pytest.mark.looptime
async def test_a_device_plugin_that_never_lists_its_devices_has_stopped(host):
    """Nothing waits for an endpoint that is not expected."""
    async with host.running() as manager:
        manager.stopped("example.com/cam", ENDED)
        await asyncio.sleep(0.1)
        (note,) = host.events.notes
        assert note.startswith(f"driver {DRIVER}, example.com/cam is unavailable: {ENDED};")


@pytest.mark.looptime
@pytest.mark.parametrize(
    "report",
    [
        pytest.param(lambda manager: manager.stopped(DRIVER, ENDED), id="waiting"),
        pytest.param(lambda manager: manager.replaced(DRIVER, inventory("a")), id="running"),
    ],
)
async def test_nothing_of_a_closed_driver_runs_on(host, report: Callable[[DeviceManager], None]):
    before = asyncio.all_tasks()
    async with host.running(DRIVER) as manager:
        report(manager)
        await asyncio.sleep(1)
        remaining = weakref.ref(manager)
        del manager
    assert asyncio.all_tasks() == before
    await asyncio.sleep(GRACE + 3)
    gc.collect()
    assert remaining() is None, "a timer would keep it"
    assert host.events.notes == []
