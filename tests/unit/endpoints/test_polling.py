from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import pytest

from drakit import Device, Driver, DriverError
from drakit.device import Health, Inventory
from drakit.driver import DriverConfig
from drakit_nodeplugin.endpoints.contract import DeviceKey, HealthReport
from drakit_nodeplugin.endpoints.python.polling import HealthPolling
from tests.fakes.node import StaticNode
from tests.unit.endpoints.camera import CLAIM, DEVICE, Behaviour, Camera, new_endpoint, running

OK = Health.healthy()
DIRTY = Health.unhealthy("the lens is dirty")


class Lens(Driver[DriverConfig]):
    """A driver whose answers the test controls."""

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

    async def close(self) -> None:
        assert not self.task.done(), self.task
        self.task.cancel()
        await asyncio.wait({self.task})


@pytest.mark.looptime
async def test_each_device_is_polled_and_only_changes_are_reported():
    lens = Lens()
    lab = Lab(lens)
    lab.replaced("a", "b")
    await asyncio.sleep(25)
    lens.answer = lambda name: DIRTY if name == "b" else OK
    await asyncio.sleep(25)
    assert lens.asked == [(at, name) for at in (0, 10, 20, 30, 40) for name in ("a", "b")]
    assert lab.told == [(0, "a", OK), (0, "b", OK), (30, "b", DIRTY)]
    await lab.close()


@pytest.mark.looptime
async def test_devices_of_the_fallback_are_polled_as_well_each_name_once():
    lens = Lens()
    lab = Lab(lens)
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
    await lab.close()


@pytest.mark.looptime
async def test_an_answer_is_made_plain_whatever_its_class_does():
    class Sick(Health):
        pass

    class Worse(Health):
        def __getattribute__(self, name):
            raise RuntimeError("nobody may know")

    lens = Lens()
    lens.answer = lambda name: {"a": Sick("unhealthy", "dirty"), "b": Worse("unhealthy")}[name]
    lab = Lab(lens)
    lab.replaced("a", "b")
    await asyncio.sleep(1)
    (_, _, sick), (_, _, worse) = lab.told
    assert (type(sick), sick) == (Health, Health.unhealthy("dirty"))
    assert worse.status == "unknown"
    await lab.close()


@pytest.mark.looptime
async def test_the_period_begins_when_the_answer_is_there():
    lens = Lens()
    lens.seconds = lambda name: 5
    lab = Lab(lens)
    lab.replaced("a")
    await asyncio.sleep(40)
    assert [at for at, _ in lens.asked] == [0, 15, 30]
    await lab.close()


@pytest.mark.looptime
async def test_a_plain_function_is_polled_as_well():
    class Plain(Lens):
        def health(self, device):
            return DIRTY

    lab = Lab(Plain())
    lab.replaced("a")
    await asyncio.sleep(1)
    assert lab.told == [(0, "a", DIRTY)]
    await lab.close()


@pytest.mark.looptime
async def test_a_new_device_is_polled_at_once_one_that_is_gone_never_again_and_a_returned_is_new():
    lens = Lens()
    lab = Lab(lens)
    lab.replaced("a", "b")
    await asyncio.sleep(3)
    lab.replaced("b", "c")
    await asyncio.sleep(14)
    lab.replaced("a", "b", "c")
    await asyncio.sleep(1)
    assert lens.asked == [(0, "a"), (0, "b"), (3, "c"), (10, "b"), (13, "c"), (17, "a")]
    assert lab.told == [(0, "a", OK), (0, "b", OK), (3, "c", OK), (17, "a", OK)]
    await lab.close()


@pytest.mark.looptime
async def test_a_device_that_is_gone_for_a_moment_is_reported_again():
    """The listener may have discarded the device in between, so its health is reported again."""
    lens = Lens()
    lab = Lab(lens)
    lab.replaced("a")
    await asyncio.sleep(3)
    lab.replaced()
    lab.replaced("a")
    await asyncio.sleep(1)
    assert lab.told == [(0, "a", OK), (3, "a", OK)]
    await lab.close()


@pytest.mark.looptime
async def test_a_device_that_goes_during_its_poll_is_not_reported_nor_polled_twice_at_once():
    lens = Lens()
    lens.seconds = lambda name: 5
    lab = Lab(lens)
    lab.replaced("a", "b")
    await asyncio.sleep(1)
    lab.replaced()
    await asyncio.sleep(1)
    lab.replaced("b")
    await asyncio.sleep(28)
    assert lens.asked == [(0, "a"), (0, "b"), (15, "b")]
    assert lab.told == [(5, "b", OK)]
    await lab.close()


@pytest.mark.looptime
async def test_the_same_inventory_again_changes_nothing():
    lens = Lens()
    lab = Lab(lens)
    for _ in range(50):
        lab.replaced("a", "b")
        await asyncio.sleep(0.1)
    assert len(lens.asked) == len(lab.told) == 2
    await lab.close()


@pytest.mark.looptime
async def test_no_more_than_sixteen_are_polled_at_a_time():
    lens = Lens()
    lens.seconds = lambda name: 1
    lab = Lab(lens)
    lab.replaced(*(f"lens-{number}" for number in range(40)))
    await asyncio.sleep(9)
    assert lens.most_at_once == 16
    assert sorted({at for at, _ in lens.asked}) == [0, 1, 2]
    assert len(lab.told) == 40
    await lab.close()


@pytest.mark.looptime
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
    lab = Lab(lens)
    names = [f"lens-{number:02}" for number in range(16)]
    lab.replaced(*names, "well")
    await asyncio.sleep(100)
    unknown = Health.unknown("the driver did not answer within 30 s")
    assert lab.told[-1] == (30, "well", OK)
    assert sorted(lab.told[:-1], key=str) == [(30, name, unknown) for name in names]
    assert len(lens.asked) == 16, "a device is not asked while its last call still runs"
    await lab.close()


@pytest.mark.looptime
async def test_a_call_that_is_overdue_is_cancelled_and_its_device_polled_again():
    lens = Lens()
    lens.seconds = lambda name: 31 if len(lens.asked) < 2 else 0
    lab = Lab(lens)
    lab.replaced("a")
    await asyncio.sleep(45)
    assert [at for at, _ in lens.asked] == [0, 40]
    assert [(at, health.status) for at, _, health in lab.told] == [(30, "unknown"), (40, "healthy")]
    await lab.close()


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        pytest.param(DriverError("the bus is slow"), "the bus is slow", id="with-a-reason"),
        pytest.param(ValueError("a bug"), "the driver failed: ValueError: a bug", id="raises"),
        pytest.param(Silent(), "the driver failed: Silent (no message)", id="no-text"),
        pytest.param(
            asyncio.CancelledError(),
            "the driver's call was canceled, but not by its caller",
            id="cancels",
        ),
        pytest.param(TimeoutError("bus"), "the driver failed: TimeoutError: bus", id="times-out"),
        pytest.param(
            None, "the driver answered NoneType, which is not a valid Health", id="forgets"
        ),
        pytest.param(True, "the driver answered bool, which is not a valid Health", id="a-bool"),
        pytest.param(
            Health("sick"),
            "the driver answered Health, which is not a valid Health",
            id="no-such-status",
        ),
        pytest.param(
            Health("healthy", 5),
            "the driver answered Health, which is not a valid Health",
            id="no-text",
        ),
    ],
)
async def test_an_invalid_answer_is_unknown_health(answer, message):
    lens = Lens()
    lens.answer = lambda name: answer
    lab = Lab(lens)
    lab.replaced("a")
    await asyncio.sleep(25)
    ((at, name, health),) = lab.told
    assert (at, name, health.status) == (0, "a", "unknown")
    assert health.message.startswith(message)
    assert len(lens.asked) == 3, "it is asked on"
    await lab.close()


@pytest.mark.looptime
async def test_a_fault_is_logged_once_and_not_for_each_device_each_time(caplog):
    lens = Lens()
    lens.answer = lambda name: ValueError("a bug") if name == "a" else None
    lab = Lab(lens)
    lab.replaced("a", "b", "c")
    await asyncio.sleep(100)
    assert sorted(record.error for record in caplog.records) == [
        "driver fails to report health",
        "the driver answered NoneType, which is not a valid Health",
    ]
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    await lab.close()


@pytest.mark.looptime
async def test_a_text_without_end_is_cut():
    lens = Lens()
    lens.answer = lambda name: ValueError("x" * 100_000)
    lab = Lab(lens)
    lab.replaced("a")
    await asyncio.sleep(1)
    assert len(lab.told[0][2].message) == 1024
    await lab.close()


@pytest.mark.looptime
async def test_a_period_that_is_too_short_is_raised():
    class Restless(Lens):
        health_period_seconds = 1e-9

    lens = Restless()
    lab = Lab(lens)
    lab.replaced("a")
    await asyncio.sleep(1.05)
    assert len(lens.asked) == 11
    await lab.close()


@pytest.mark.looptime
async def test_devices_whose_names_are_no_names_are_not_polled():
    lens = Lens()
    lab = Lab(lens)
    lab.replaced(["no", "name"], "a")
    await asyncio.sleep(1)
    assert lens.asked == [(0, "a")]
    await lab.close()


# ------------------------------------------------------------ in the driver's thread


class PolledCamera(Camera):
    health_period_seconds = 0.1

    async def health(self, device):
        return self.behaviour.health(device)


async def test_health_is_reported_after_the_inventory_and_beside_calls_for_the_device(listener):
    behaviour = Behaviour()
    behaviour.health = lambda device: OK

    async def wait():
        while behaviour.health(None) is OK:
            await asyncio.sleep(0.01)

    behaviour.prepare = wait
    make = lambda: PolledCamera(behaviour)  # noqa: E731
    async with running(new_endpoint(make, listener, PolledCamera)) as endpoint:
        assert isinstance(await listener.hear(), Inventory)
        key = DeviceKey("", "cam-0")
        assert await listener.hear() == HealthReport(devices={key: OK})
        call = asyncio.create_task(endpoint.prepare(CLAIM, [DEVICE]))
        await asyncio.sleep(0.05)
        behaviour.health = lambda device: DIRTY
        assert await listener.hear() == HealthReport(devices={key: DIRTY})
        call.cancel()
        await asyncio.wait({call})


async def test_a_health_that_ends_the_thread_stops_the_driver(listener, short_delays):
    behaviour = Behaviour()

    def leave(device):
        behaviour.health = lambda device: OK
        raise SystemExit(3)

    behaviour.health = leave
    make = lambda: PolledCamera(behaviour)  # noqa: E731
    async with running(new_endpoint(make, listener, PolledCamera)):
        while not isinstance(told := await listener.hear(), HealthReport):
            pass
        assert listener.reasons[-1] == "SystemExit: 3"
        assert list(told.devices.values()) == [OK]
