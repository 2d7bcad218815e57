from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from drakit import Device, Driver, DriverError
from drakit.device import Health, Inventory
from drakit.driver import DriverConfig
from drakit_driver.runtime.contract import DeviceKey
from drakit_driver.runtime.polling import HealthPolling
from tests.fakes.node import StaticNode

pytestmark = pytest.mark.looptime

OK = Health.healthy()
DIRTY = Health.unhealthy("the lens is dirty")
INVALID = "the driver returned {}, which is not a valid Health"


class Lens(Driver[DriverConfig]):
    """A driver whose results the test controls."""

    name = "lens.example.com"
    health_period_seconds = 10.0

    def __init__(self) -> None:
        super().__init__(DriverConfig(), StaticNode(name="node-1"))
        self.asked: list[tuple[float, str]] = []
        self.at_once = self.most_at_once = 0
        self.answer: Callable[[str], object] = lambda name: OK
        self.seconds: Callable[[str], float] = lambda name: 0.0

    def devices(self):
        raise NotImplementedError

    async def health(self, device):
        self.asked.append((asyncio.get_running_loop().time(), device.name))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.seconds(device.name))
        finally:
            self.at_once -= 1
        answer = self.answer(device.name)
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Lab:
    def __init__(self, driver: Driver) -> None:
        self.told: list[tuple[float, str, Health]] = []
        self.polling = HealthPolling(Lens.name, driver, self._report)
        self.task = asyncio.create_task(self.polling.run())

    def _report(self, key: DeviceKey, health: Health) -> None:
        self.told.append((asyncio.get_running_loop().time(), key.name, health))

    def replaced(self, *names: str) -> None:
        listed = Inventory(devices=tuple(Device(name=name) for name in names))
        self.polling.replaced(listed, listed)


@asynccontextmanager
async def polled(driver: Driver, *names: str) -> AsyncIterator[Lab]:
    """Poll the devices with these names. This is not a fixture, because fixtures run on the real
    clock."""
    lab = Lab(driver)
    if names:
        lab.replaced(*names)
    yield lab
    assert not lab.task.done(), lab.task
    lab.task.cancel()
    await asyncio.wait({lab.task})


async def test_each_device_is_polled_and_only_changes_are_reported():
    lens = Lens()
    async with polled(lens, "a", "b") as lab:
        await asyncio.sleep(25)
        lens.answer = lambda name: DIRTY if name == "b" else OK
        await asyncio.sleep(25)
        assert lens.asked == [(at, name) for at in (0, 10, 20, 30, 40) for name in ("a", "b")]
        assert lab.told == [(0, "a", OK), (0, "b", OK), (30, "b", DIRTY)]


async def test_devices_of_the_fallback_are_polled_as_well_each_name_once():
    lens = Lens()
    async with polled(lens) as lab:
        ours = Inventory(
            devices=(Device(name="a"),),
            fallback=(Device(name="a", pool=""), Device(name="whole"), Device(name="whole")),
        )
        lab.polling.replaced(ours, ours)
        await asyncio.sleep(1)
        assert lab.told == [(0, "a", OK), (0, "whole", OK)]
        fewer = Inventory(devices=ours.devices, fallback=())
        lab.polling.replaced(fewer, fewer)
        await asyncio.sleep(10)
        assert [name for _, name in lens.asked] == ["a", "whole", "a"]


async def test_the_period_begins_when_the_answer_is_there():
    lens = Lens()
    lens.seconds = lambda name: 5
    async with polled(lens, "a"):
        await asyncio.sleep(40)
        assert [at for at, _ in lens.asked] == [0, 15, 30]


async def test_a_new_device_is_polled_at_once_one_that_is_gone_never_again_and_a_returned_is_new():
    lens = Lens()
    async with polled(lens, "a", "b") as lab:
        await asyncio.sleep(3)
        lab.replaced("b", "c")
        await asyncio.sleep(14)
        lab.replaced("a", "b", "c")
        await asyncio.sleep(1)
        assert lens.asked == [(0, "a"), (0, "b"), (3, "c"), (10, "b"), (13, "c"), (17, "a")]
        assert lab.told == [(0, "a", OK), (0, "b", OK), (3, "c", OK), (17, "a", OK)]


async def test_a_device_that_is_gone_for_a_moment_is_reported_again():
    """The listener may have discarded the device in between, so its health is reported again."""
    lens = Lens()
    async with polled(lens, "a") as lab:
        await asyncio.sleep(3)
        lab.replaced()
        lab.replaced("a")
        await asyncio.sleep(1)
        assert lab.told == [(0, "a", OK), (3, "a", OK)]


async def test_a_device_that_goes_during_its_poll_is_not_reported_nor_polled_twice_at_once():
    lens = Lens()
    lens.seconds = lambda name: 5
    async with polled(lens, "a", "b") as lab:
        await asyncio.sleep(1)
        lab.replaced()
        await asyncio.sleep(1)
        lab.replaced("b")
        await asyncio.sleep(28)
        assert lens.asked == [(0, "a"), (0, "b"), (15, "b")]
        assert lab.told == [(5, "b", OK)]


async def test_the_same_inventory_again_changes_nothing():
    lens = Lens()
    async with polled(lens) as lab:
        for _ in range(50):
            lab.replaced("a", "b")
            await asyncio.sleep(0.1)
        assert len(lens.asked) == len(lab.told) == 2


async def test_no_more_than_sixteen_are_polled_at_a_time():
    lens = Lens()
    lens.seconds = lambda name: 1
    async with polled(lens, *(f"lens-{number}" for number in range(40))) as lab:
        await asyncio.sleep(9)
        assert lens.most_at_once == 16
        assert sorted({at for at, _ in lens.asked}) == [0, 1, 2]
        assert len(lab.told) == 40


async def test_devices_that_never_answer_are_unknown_and_do_not_block_polls_of_others():
    class Stubborn(Lens):
        async def health(self, device):
            if device.name.startswith("lens"):
                self.asked.append((asyncio.get_running_loop().time(), device.name))
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(1e6)
                await asyncio.sleep(1000)  # it swallows what was to end it
            return OK

    lens = Stubborn()
    async with polled(lens) as lab:
        names = [f"lens-{number:02}" for number in range(16)]
        lab.replaced(*names, "well")
        await asyncio.sleep(100)
        unknown = Health.unknown("the driver did not respond within 30 s")
        assert lab.told[-1] == (30, "well", OK)
        assert sorted(lab.told[:-1], key=str) == [(30, name, unknown) for name in names]
        assert len(lens.asked) == 16, "a device is not asked while its last call still runs"


async def test_a_call_that_is_overdue_is_cancelled_and_its_device_polled_again():
    lens = Lens()
    lens.seconds = lambda name: 31 if len(lens.asked) < 2 else 0
    async with polled(lens, "a") as lab:
        await asyncio.sleep(45)
        assert [at for at, _ in lens.asked] == [0, 40]
        assert [(at, health.status) for at, _, health in lab.told] == [
            (30, "unknown"),
            (40, "healthy"),
        ]


INVALID_ANSWERS = {
    "with-a-reason": (DriverError("the bus is slow"), "the bus is slow"),
    "raises": (ValueError("a bug"), "the driver failed: ValueError: a bug"),
    "no-message": (KeyError(), "the driver failed: KeyError (no message)"),
    "endless": (ValueError("x" * 9999), "the driver failed: ValueError: x"),
    "cancels": (
        asyncio.CancelledError(),
        "the driver canceled its own call, which is a bug in the driver",
    ),
    "times-out": (TimeoutError("bus"), "the driver failed: TimeoutError: bus"),
    "forgets": (None, INVALID.format("NoneType")),
    "a-bool": (True, INVALID.format("bool")),
    "no-such-status": (Health("sick"), INVALID.format("Health")),
    "no-text": (Health("healthy", 5), INVALID.format("Health")),
}


@pytest.mark.parametrize(("answer", "message"), INVALID_ANSWERS.values(), ids=INVALID_ANSWERS)
async def test_an_invalid_answer_is_unknown_health(answer, message):
    lens = Lens()
    lens.answer = lambda name: answer
    async with polled(lens, "a") as lab:
        await asyncio.sleep(25)
        ((at, name, health),) = lab.told
        assert (at, name, health.status) == (0, "a", "unknown")
        assert health.message.startswith(message)
        assert len(health.message) <= 1024
        assert len(lens.asked) == 3, "it is asked on"


async def test_a_fault_is_logged_once_and_not_for_each_device_each_time(caplog):
    lens = Lens()
    lens.answer = lambda name: ValueError("a bug") if name == "a" else None
    async with polled(lens, "a", "b", "c"):
        await asyncio.sleep(100)
        assert sorted(record.error for record in caplog.records) == [
            "driver fails to report health",
            "the driver returned NoneType, which is not a valid Health",
        ]
        assert {record.levelno for record in caplog.records} == {logging.ERROR}


async def test_a_period_that_is_too_short_is_raised():
    class Restless(Lens):
        health_period_seconds = 1e-9

    lens = Restless()
    async with polled(lens, "a"):
        await asyncio.sleep(1.05)
        assert len(lens.asked) == 11
