from __future__ import annotations

import asyncio
import time

import pytest

from drakit import Device
from drakit.device import Inventory
from drakit_driver.runtime import thread as stream
from drakit_driver.runtime.latest_value import LatestValue
from drakit_driver.runtime.thread import FloodError, read_inventories
from tests.fakes.tasks import counted_turns

CAM = Device(name="cam-0")


async def read(generator) -> int:
    """Read a stream; return the number of its yields, even after a failure."""
    yields = 0

    async def counted():
        nonlocal yields
        async for inventory in generator:
            yields += 1
            yield inventory

    try:
        await read_inventories(counted(), LatestValue[Inventory]())
    finally:
        await generator.aclose()
    return yields


@pytest.mark.looptime
async def test_the_last_of_many_fast_inventories_is_read_although_the_driver_then_waits():
    taken: list[str] = []

    async def generate():
        for number in range(1000):
            yield [Device(name=f"cam-{number}")]
            await asyncio.sleep(0.001)
        await asyncio.sleep(10)
        assert taken[-1] == "cam-999"
        yield [CAM]

    async def take() -> None:
        while True:
            given, _ = await latest.next()
            assert given is not None
            taken.append(given.devices[0].name)

    latest = LatestValue[Inventory](pace_seconds=stream.SNAPSHOT_SECONDS)
    copying = asyncio.create_task(take())
    await read_inventories(generate(), latest)
    copying.cancel()
    assert taken[0] == "cam-0"
    assert len(taken) < 30


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("seconds", "yields"),
    [
        pytest.param(0.001, 4000, id="a-thousand-a-second"),
        pytest.param(0.00051, 5000, id="almost-two-thousand-a-second"),
        pytest.param(0, 1999, id="a-burst"),
    ],
)
async def test_a_driver_may_yield_two_thousand_times_a_second(seconds, yields):
    async def generate():
        for _ in range(yields):
            yield [CAM]
            await asyncio.sleep(seconds)

    assert await read(generate()) == yields


@pytest.mark.looptime
@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(0.0004, id="waits-too-little"),
        pytest.param(0, id="gives-way-and-does-not-wait"),
    ],
)
async def test_more_than_two_thousand_a_second_are_a_flood(seconds, looptime):
    async def generate():
        while True:
            yield [CAM]
            await asyncio.sleep(seconds)

    with pytest.raises(FloodError, match="more than 2,000 inventories within a second"):
        await read(generate())
    assert looptime <= 5


async def test_a_stream_that_never_waits_lets_others_run_until_it_is_a_flood():
    async def generate():
        while True:
            yield [CAM] * 2000

    with counted_turns() as turns, pytest.raises(FloodError):
        await read(generate())
    assert turns[0] > 1


async def test_large_inventories_without_a_wait_are_a_flood_before_they_cost_much():
    yields = 0

    async def generate():
        nonlocal yields
        while True:
            yields += 1
            yield [CAM] * 16_384

    with pytest.raises(FloodError):
        await read(generate())
    assert yields < 1000


@pytest.mark.looptime
async def test_large_inventories_with_waits_between_them_are_no_flood():
    async def generate():
        for _ in range(60):
            yield [CAM] * 8192
            await asyncio.sleep(0.05)

    assert await read(generate()) == 60


async def test_a_stream_that_blocks_instead_of_waiting_is_no_flood_and_lets_others_run(monkeypatch):
    monkeypatch.setattr(stream, "MAX_YIELDS", 50)

    async def generate():
        for _ in range(10):
            yield [CAM]
            until = time.monotonic() + 0.03
            while time.monotonic() < until:
                pass

    with counted_turns() as turns:
        assert await read(generate()) == 10
    assert turns[0] >= 9, "between two inventories it is their turn"
