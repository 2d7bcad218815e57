"""The messages of a subscriber and their times, on a virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from drakit_nodeplugin.kubelet.health import GONE, HealthService, StreamLog, shown
from tests.fakes.health import FakeHealth, health

WELL, ILL = health("cam-0"), health("cam-0", "unhealthy", "the lens is dirty")
OTHER = health("cam-1")
LOG = StreamLog("camera.example.com", "v1.NodeWatchResources")


def subscribe(source, *, timeout_seconds=30.0):
    return reports_of(source, timeout_seconds=timeout_seconds).subscribe(LOG)


def reports_of(source, *, timeout_seconds=30.0):
    reports = HealthService(
        driver="camera.example.com", reports_health=True, timeout_seconds=timeout_seconds
    )
    reports.serve(source)
    return reports


async def waits(subscription):
    """Wait for the next message in the background."""
    waiting = asyncio.create_task(subscription.next())
    await asyncio.sleep(0.5)
    assert not waiting.done()
    return waiting


@pytest.mark.looptime
async def test_a_change_is_sent_at_once_and_alone(looptime):
    source = FakeHealth(WELL, OTHER)
    subscription = subscribe(source)
    await subscription.next()
    waiting = await waits(subscription)
    source.replace(ILL)
    assert list(await waiting) == [ILL]
    assert looptime == 0.5


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("timeout_seconds", "sent_seconds", "resend_seconds"),
    [
        pytest.param(30.0, 30, 10.0, id="at-a-third-of-the-timeout"),
        pytest.param(4.2, 5, 5 / 3, id="of-whole-seconds-rounded-up"),
        pytest.param(0.01, 1, 1 / 3, id="of-one-second-at-least"),
    ],
)
async def test_everything_is_sent_again(looptime, timeout_seconds, sent_seconds, resend_seconds):
    reports = reports_of(FakeHealth(WELL, OTHER), timeout_seconds=timeout_seconds)
    assert reports.timeout_seconds == sent_seconds
    subscription = reports.subscribe(LOG)
    for number in range(3):
        assert list(await subscription.next()) == [WELL, OTHER]
        assert 0 <= looptime - number * resend_seconds < 0.001


@pytest.mark.looptime
async def test_everything_is_sent_again_while_a_device_changes_all_the_time(looptime):
    source = FakeHealth(WELL, OTHER)
    subscription = subscribe(source)
    await subscription.next()

    async def flap():
        for number in range(1_000_000):
            source.replace(ILL if number % 2 else WELL)
            await asyncio.sleep(0.001)

    flapping = asyncio.create_task(flap())
    messages = 0
    while OTHER not in await subscription.next():
        messages += 1
    flapping.cancel()
    assert 10 <= looptime < 10.3
    assert messages <= 50


@pytest.mark.looptime
async def test_a_thousand_changes_a_second_make_five_messages_of_what_differs(looptime):
    devices = [f"cam-{n}" for n in range(100)]
    source = FakeHealth(*(health(name) for name in devices))
    subscription = subscribe(source)
    messages = [await subscription.next()]

    async def read():
        while True:
            messages.append(await subscription.next())

    reading = asyncio.create_task(read())
    for number in range(2000):
        name = devices[number % 100]
        source.replace(health(name, "unhealthy", f"fault {number // 100}"))
        await asyncio.sleep(0.001)
    await asyncio.sleep(1)
    reading.cancel()
    assert 8 <= len(messages) - 1 <= 11
    assert all(len(message) <= 100 for message in messages)
    last = {state.device: state for message in messages for state in message}
    assert list(last.values()) == list(source.health_states())


@pytest.mark.looptime
async def test_a_change_that_is_undone_before_the_poll_is_not_sent(looptime):
    source = FakeHealth(WELL)
    subscription = subscribe(source)
    await subscription.next()
    source.replace(ILL)
    source.replace(WELL)
    assert list(await subscription.next()) == [WELL]
    assert looptime == 10


@pytest.mark.looptime
async def test_a_missing_device_is_sent_as_unknown_once(looptime):
    source = FakeHealth(WELL, OTHER)
    subscription = subscribe(source)
    await subscription.next()
    source.remove("cam-0")
    (gone,) = await subscription.next()
    assert (gone.device, gone.status, gone.message) == ("cam-0", "unknown", GONE)
    assert looptime < 1
    assert list(await subscription.next()) == [OTHER]


@pytest.mark.looptime
async def test_nothing_is_sent_for_a_driver_until_it_has_a_device(looptime):
    source = FakeHealth()
    subscription = subscribe(source)
    waiting = asyncio.create_task(subscription.next())
    await asyncio.sleep(25)
    source.replace(WELL)
    assert list(await waiting) == [WELL]
    assert 25 <= looptime < 25.3


@pytest.mark.looptime
async def test_the_end_stops_waiting_sending_and_future_subscriptions():
    reports = reports_of(FakeHealth(*(health(f"cam-{n}") for n in range(501))))
    waiter, sender = reports.subscribe(LOG), reports.subscribe(LOG)
    for _ in range(2):
        await waiter.next()
    await sender.next()
    waiting = await waits(waiter)
    reports.end()
    assert await waiting is None
    assert await sender.next() is None
    assert await reports.subscribe(LOG).next() is None


@pytest.mark.looptime
async def test_streams_of_a_driver_without_health_wait_until_the_end():
    reports = HealthService(driver="camera.example.com", reports_health=False, timeout_seconds=30)
    serving = asyncio.create_task(reports.until_served())
    for source in (FakeHealth(WELL), None):
        reports.serve(source)
        await asyncio.sleep(30)
        assert not serving.done()
    reports.end()
    assert not await serving


@pytest.mark.looptime
async def test_a_source_that_is_gone_at_once_begins_no_stream():
    reports = HealthService(driver="camera.example.com", reports_health=True, timeout_seconds=30)
    serving = asyncio.create_task(reports.until_served())
    await asyncio.sleep(1)
    for source in (FakeHealth(WELL), None):
        reports.serve(source)
    await asyncio.sleep(30)
    assert not serving.done()
    reports.serve(FakeHealth(WELL))
    assert await serving


@pytest.mark.looptime
async def test_a_source_after_the_end_begins_no_stream():
    reports = reports_of(FakeHealth(WELL))
    reports.end()
    reports.serve(FakeHealth(ILL))
    assert not await reports.until_served()


@pytest.mark.looptime
async def test_a_cancelled_wait_leaves_nothing_behind():
    subscription = subscribe(FakeHealth(WELL))
    await subscription.next()
    waiting = await waits(subscription)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", "", id="none"),
        pytest.param("m" * 1024, "m" * 1024, id="of-the-longest-length-stays"),
        pytest.param("m" * 1025, "m" * 1021 + "...", id="longer-is-cut"),
        pytest.param("ж" * 512, "ж" * 512, id="of-1024-bytes-stays"),
        pytest.param("ж" * 513, "ж" * 510 + "...", id="is-cut-between-characters"),
        pytest.param("bad \udcff name", "bad \\udcff name", id="no-text-at-all-can-be-sent"),
    ],
)
def test_a_text(text, expected):
    assert shown(text) == expected
