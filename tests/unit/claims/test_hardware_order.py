"""The engine with its scheduler: calls for common hardware never overlap, and nothing waits
without need."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from drakit import AllocatedDevice, ClaimReference, CounterSet, Device, DriverError, Edits
from drakit_nodeplugin.state.checkpoint import CheckpointError
from tests.fakes.claims import NODE, FakeClaims, claim_body, reference
from tests.fakes.direct import DirectEndpoint
from tests.fakes.tasks import until
from tests.unit.claims.conftest import EmptyDriver

A, B = "uid-a", "uid-b"
CARD = CounterSet(name="card", counters={"memory": "40Gi"})
HALVES = [Device(name=name, consumes={"card": {"memory": "20Gi"}}) for name in ("half-0", "half-1")]


class Watched(EmptyDriver):
    """Notes calls that overlap in a device or a counter set."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.overlaps: list[tuple[str, str]] = []
        self.held: dict[str, asyncio.Event] = {}
        self.broken: set[str] = set()
        self._running: list[tuple[str, set[str]]] = []

    async def call(self, what: str, *devices: AllocatedDevice) -> None:
        keys = {key for device in devices for key in (device.name, *device.consumes)}
        self.overlaps += [(what, other) for other, held in self._running if held & keys]
        self.calls.append(what)
        self._running.append((what, keys))
        try:
            await asyncio.sleep(0.01)
            if what in self.held:
                await self.held[what].wait()
        finally:
            self._running.remove((what, keys))

    async def prepare(self, claim: ClaimReference, device: AllocatedDevice) -> Edits:
        await self.call(f"prepare {claim.uid}", device)
        return Edits(env={"A": "b"})

    async def unprepare(self, claim: ClaimReference, device: AllocatedDevice) -> None:
        await self.call(f"unprepare {claim.uid}", device)


class Checked(Watched):
    async def check(self, claim: ClaimReference, device: AllocatedDevice) -> bool:
        await self.call(f"check {claim.uid}", device)
        return claim.uid not in self.broken


class Failing(Watched):
    """Fails in its call for several claims."""

    async def prepare_claims(self, claims: Any) -> Any:
        raise DriverError("the card is broken")


class HeldClaims(FakeClaims):
    """Holds the reads of one claim."""

    gate: asyncio.Event | None = None

    async def fetch(self, claim, *, timeout_seconds):
        if claim.uid == B and self.gate is not None:
            await self.gate.wait()
        return await super().fetch(claim, timeout_seconds=timeout_seconds)


@pytest.fixture
def claims() -> HeldClaims:
    return HeldClaims()


@pytest.fixture
def driver(request) -> Watched:
    return getattr(request, "param", Watched)()


@pytest.fixture
def devices(driver) -> DirectEndpoint:
    return DirectEndpoint(driver, node=NODE)


def share(number: int) -> dict[str, str]:
    return {"device": "nic", "shareID": f"share-{number}"}


@pytest.mark.parametrize("driver", [Failing], indirect=True)
async def test_rollbacks_of_a_batch_do_not_overlap(start, claims, driver):
    plugin = await start()
    plugin.inventories.list(*HALVES, counter_sets=[CARD])
    claims.store(claim_body(A, "half-0"), claim_body(B, "half-1"))
    answers = await plugin.prepare(reference(A), reference(B))
    assert ["the card is broken" in answers[uid].error for uid in (A, B)] == [True, True]
    assert sorted(driver.calls) == [f"unprepare {A}", f"unprepare {B}"]
    assert driver.overlaps == []


@pytest.mark.parametrize("driver", [Watched, Checked], indirect=True)
async def test_a_claim_that_is_abandoned_while_it_is_read_does_not_wait_for_hardware(
    start, claims, driver
):
    plugin = await start()
    claims.store(claim_body(A, share(0)), claim_body(B, share(1)))
    if isinstance(driver, Checked):
        assert (await plugin.prepare(reference(B)))[B].error is None
    claims.gate = asyncio.Event()
    busy = driver.held[f"prepare {A}"] = asyncio.Event()
    first = asyncio.create_task(plugin.prepare(reference(A)))
    await until(lambda: f"prepare {A}" in driver.calls)
    second = asyncio.create_task(plugin.prepare(reference(B)))
    await asyncio.sleep(0.01)
    unprepare = asyncio.create_task(plugin.unprepare(reference(B)))
    await asyncio.sleep(0.01)
    claims.gate.set()
    async with asyncio.timeout(5):
        assert "stopped preparing the claim" in (await second)[B].error
    busy.set()
    assert (await first)[A].error is None
    assert await unprepare == {B: None}
    assert driver.overlaps == []


@pytest.mark.parametrize("driver", [Checked], indirect=True)
async def test_a_second_prepare_takes_the_counter_sets_that_the_entry_did_not_have(
    start, claims, driver
):
    plugin = await start()
    claims.store(claim_body(A, "half-0"), claim_body(B, "half-1"))
    assert (await plugin.prepare(reference(A)))[A].error is None
    plugin.inventories.list(*HALVES, counter_sets=[CARD])
    driver.broken.add(A)
    busy = driver.held[f"prepare {B}"] = asyncio.Event()
    second = asyncio.create_task(plugin.prepare(reference(B)))
    await until(lambda: f"prepare {B}" in driver.calls)
    first = asyncio.create_task(plugin.prepare(reference(A)))
    await until(lambda: plugin.is_waiting(A))
    busy.set()
    await asyncio.gather(first, second)
    assert driver.calls.count(f"prepare {A}") == 2
    assert driver.overlaps == []


@pytest.fixture
async def plugin(start, claims):
    """A plugin that has prepared claim A; claim B has the same device."""
    plugin = await start()
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-0"))
    assert (await plugin.prepare(reference(A)))[A].error is None
    return plugin


async def entry_of(plugin):
    return (await plugin.checkpoint.find([A]))[A]


async def test_a_claim_whose_device_is_being_unprepared_gets_its_error_at_once(plugin, driver):
    """The driver may hang, and the error names the claim that has the device."""
    busy = driver.held[f"unprepare {A}"] = asyncio.Event()
    first = asyncio.create_task(plugin.unprepare(reference(A)))
    await until(lambda: f"unprepare {A}" in driver.calls)
    assert f"lab/claim-{A}" in (await plugin.prepare(reference(B)))[B].error
    busy.set()
    assert await first == {A: None}
    assert (await plugin.prepare(reference(B)))[B].error is None


async def test_a_canceled_collector_does_not_wait_for_the_driver(plugin, driver):
    busy = driver.held[f"unprepare {A}"] = asyncio.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await plugin.queue.collect(await entry_of(plugin))
    assert not await plugin.queue.drain(timeout_seconds=0.01)
    busy.set()
    assert await plugin.queue.drain(timeout_seconds=5)
    assert await plugin.states() == {}


async def test_a_canceled_recovery_does_not_wait_for_the_driver(start, claims, driver):
    plugin = await start()
    claims.store(claim_body(A, "cam-0"))
    busy = driver.held[f"prepare {A}"] = asyncio.Event()
    call = asyncio.create_task(plugin.prepare(reference(A)))
    await until(lambda: driver.calls)
    await plugin.queue.cancel()
    await call
    driver.held = {f"unprepare {A}": busy}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await plugin.recovery.recover()
    busy.set()
    assert await plugin.queue.drain(timeout_seconds=5)
    assert await plugin.states() == {}


async def test_a_collection_waits_in_no_line_and_holds_its_claim_from_the_start(plugin):
    entry = await entry_of(plugin)
    assert plugin.queue.take(A)
    assert not await plugin.queue.collect(entry)
    plugin.queue.release(A)
    collecting = asyncio.create_task(plugin.queue.collect(entry))
    await asyncio.sleep(0)
    assert await plugin.queue.drain(timeout_seconds=5)
    assert await plugin.states() == {}
    assert await collecting


async def test_a_collection_that_fails_after_its_caller_has_gone_is_logged(plugin, caplog):
    entry = await entry_of(plugin)
    busy = asyncio.Event()

    async def fail(uids):
        await busy.wait()
        raise CheckpointError("the disk is full")

    plugin.checkpoint.find = fail
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await plugin.queue.collect(entry)
    busy.set()
    assert await plugin.queue.drain(timeout_seconds=5)
    (record,) = [each for each in caplog.records if each.msg == "work without a call failed"]
    assert record.error == "the disk is full"


async def test_calls_for_the_devices_of_one_claim_follow_each_other_on_common_hardware(
    start, claims, driver
):
    plugin = await start()
    nic = Device(name="nic", allow_multiple_allocations=True)
    plugin.inventories.list(*HALVES, nic, counter_sets=[CARD])
    claims.store(claim_body(A, "half-0", "half-1"), claim_body(B, share(0), share(1)))
    answers = await plugin.prepare(reference(A), reference(B))
    assert [answers[uid].error for uid in (A, B)] == [None, None]
    assert await plugin.unprepare(reference(A), reference(B)) == {A: None, B: None}
    assert driver.overlaps == []
