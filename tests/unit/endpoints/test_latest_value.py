from __future__ import annotations

import asyncio
import threading

import pytest

from drakit import Device
from drakit.device import Health, Inventory
from drakit_driver.runtime.contract import ConnectionEndedError, DeviceKey, HealthReport
from drakit_driver.runtime.latest_value import LatestValue, updates_of

KEY = DeviceKey("", "cam-0")
DIRTY = Health.unhealthy("the lens is dirty")


@pytest.mark.looptime
async def test_the_first_value_is_taken_at_once_and_of_the_others_the_last_of_each_pace():
    cell = LatestValue[int]()
    taken: list[tuple[float, int | None]] = []

    async def read() -> None:
        while True:
            value, _ = await cell.next()
            taken.append((round(asyncio.get_running_loop().time(), 3), value))

    reading = asyncio.create_task(read())
    for number in range(250):
        cell.replace(number)
        await asyncio.sleep(0.001)
    await asyncio.sleep(1)
    reading.cancel()
    assert [at for at, _ in taken] == [0, 0.1, 0.2, 0.3]
    assert [value for _, value in taken] == pytest.approx([0, 100, 200, 249], abs=2)
    assert taken[-1][1] == 249


@pytest.mark.looptime
async def test_the_pace_grows_with_the_devices_of_an_inventory(looptime):
    cell = LatestValue[Inventory]()
    large = Inventory(devices=tuple(Device(name=f"cam-{n}") for n in range(10_000)))
    updates = updates_of(cell)
    for _ in range(2):
        cell.replace(large)
        await anext(updates)
    assert looptime == pytest.approx(0.3)


@pytest.mark.looptime
async def test_health_comes_after_the_inventory_that_has_its_device_and_the_last_of_each_counts():
    cell = LatestValue[Inventory]()
    inventory = Inventory(devices=(Device(name="cam-0"),))
    cell.replace(inventory)
    cell.report(KEY, Health.healthy())
    cell.report(KEY, DIRTY)
    updates = updates_of(cell)
    assert await anext(updates) is inventory
    assert await anext(updates) == HealthReport(devices={KEY: DIRTY})
    cell.report(KEY, Health.healthy())
    assert await anext(updates) == HealthReport(devices={KEY: Health.healthy()})


async def test_a_receiver_that_works_long_gets_the_next_update_later():
    loop = asyncio.get_running_loop()
    cell = LatestValue[Inventory]()
    updates = updates_of(cell)
    cell.replace(Inventory(devices=()))
    await anext(updates)
    until_at = loop.time() + 0.05
    while loop.time() < until_at:
        pass  # the device manager compares
    worked_at = loop.time()
    cell.replace(Inventory(devices=()))
    await anext(updates)
    assert loop.time() - worked_at >= 0.4


@pytest.mark.looptime
async def test_an_end_is_not_delayed_and_what_was_not_taken_is_dropped(looptime):
    cell = LatestValue[int]()
    cell.replace(1)
    await cell.next()
    cell.hold(100)
    cell.replace(2)
    reading = asyncio.create_task(cell.next())
    await asyncio.sleep(1)
    cell.end(ConnectionEndedError("the bus is gone"))
    cell.end(ConnectionEndedError("nobody reads this"))
    with pytest.raises(ConnectionEndedError, match="the bus is gone"):
        await reading
    assert looptime == 1
    with pytest.raises(ConnectionEndedError, match="the bus is gone"):
        await cell.next()


async def test_a_thread_that_writes_without_end_wakes_the_loop_once_for_each_taking(monkeypatch):
    loop = asyncio.get_running_loop()
    woken = 0
    wake = loop.call_soon_threadsafe

    def count(*arguments):
        nonlocal woken
        woken += 1
        return wake(*arguments)

    monkeypatch.setattr(loop, "call_soon_threadsafe", count)
    cell = LatestValue[int](pace_seconds=0.01)

    def write() -> None:
        for number in range(100_000):
            cell.replace(number)
            cell.report(KEY, DIRTY)

    thread = threading.Thread(target=write)
    thread.start()
    taken = 0
    last: int | None = None
    while last != 99_999:
        value, _ = await cell.next()
        last = last if value is None else value
        taken += 1
    thread.join()
    assert woken <= taken + 1
