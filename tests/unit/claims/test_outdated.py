"""Claims that are prepared again because their driver marks a device."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from drakit import Device, Inventory
from drakit_nodeplugin.claims.errors import DriverFailedError, SpecFailedError
from drakit_nodeplugin.claims.outdated import POLL_SECONDS, QUIET_SECONDS, OutdatedClaims
from drakit_nodeplugin.claims.work import ClaimResult
from drakit_nodeplugin.state.checkpoint import CheckpointError
from tests.fakes.claims import DRIVER, NODE, claim_body, prepare, reference, unprepare
from tests.fakes.tasks import running
from tests.unit.devices.conftest import Node as DeviceNode

A, B, C = (reference(f"uid-{name}") for name in "abc")


class Rows:
    """The claims of a checkpoint."""

    def __init__(self) -> None:
        self.claims = {(NODE, "tty-0"): {A: (), B: ()}, (NODE, "tty-1"): {B: ()}}
        self.broken = False

    async def claims_of_devices(self):
        if self.broken:
            raise CheckpointError("no space")
        return self.claims


class Queue:
    """Records the second prepares, with their times."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, str]] = []
        self.reasons: dict[str, str] = {}
        self.slow: set[str] = set()

    async def prepare_again(self, claim):
        self.calls.append((asyncio.get_running_loop().time(), claim.uid))
        if claim.uid in self.slow:
            await asyncio.sleep(40)
        reason = self.reasons.get(claim.uid)
        return ClaimResult(error=reason and "it failed", reason=reason)

    def uids(self) -> list[str]:
        return sorted(uid for _, uid in self.calls)


class Lab:
    def __init__(self) -> None:
        self.rows, self.queue, self.registered = Rows(), Queue(), asyncio.Event()
        self.devices = DeviceNode().manager()
        self.claims = OutdatedClaims(
            devices=self.devices,
            checkpoint=self.rows,
            queue=self.queue,
            registered=self.registered,
        )

    def list(self, *marked: str) -> None:
        names = ("tty-0", "tty-1", "tty-2")
        devices = [Device(name=name, prepare_again=name in marked) for name in names]
        self.devices.replaced(DRIVER, Inventory(devices=devices))


@pytest.fixture
async def unregistered():
    lab = Lab()
    async with running(lab.claims.run()):
        yield lab


@pytest.fixture
def lab(unregistered):
    unregistered.registered.set()
    return unregistered


@pytest.mark.looptime
async def test_the_claims_of_a_marked_device_are_prepared_at_once_and_each_only_once(lab):
    lab.list()
    await asyncio.sleep(60)
    assert lab.queue.calls == []
    lab.list("tty-0", "tty-1", "tty-2")
    await asyncio.sleep(0.1)
    assert lab.queue.uids() == ["uid-a", "uid-b"]
    lab.list()
    await asyncio.sleep(120)
    assert len(lab.queue.calls) == 2


@pytest.mark.looptime
async def test_a_device_that_stays_marked_is_prepared_again_with_a_backoff(lab):
    lab.list("tty-1")
    await asyncio.sleep(600)
    times = [at for at, _ in lab.queue.calls]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert 0.5 <= pauses[0] <= 1
    assert 30 <= pauses[-1] <= 60
    assert len(times) < 30
    lab.list()
    await asyncio.sleep(61 + QUIET_SECONDS)
    count = len(lab.queue.calls)
    lab.list("tty-1")
    await asyncio.sleep(2.2)
    assert len(lab.queue.calls) >= count + 2, "the backoff begins again"


@pytest.mark.looptime
async def test_a_backend_that_marks_a_device_all_the_time_is_slowed_down(lab):
    for _ in range(300):
        lab.list("tty-1")
        await asyncio.sleep(0.5)
        lab.list()
        await asyncio.sleep(0.5)
    assert len(lab.queue.calls) < 20


@pytest.mark.looptime
async def test_a_device_that_is_marked_again_is_prepared_at_once(lab):
    for number in range(1, 4):
        lab.list("tty-1")
        await asyncio.sleep(0.1)
        assert len(lab.queue.calls) == number
        lab.list()
        await asyncio.sleep(10)


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("reason", "more"), [(DriverFailedError.reason, 0), (SpecFailedError.reason, 1)]
)
async def test_what_could_not_be_written_is_repeated_even_if_the_mark_is_gone(lab, reason, more):
    lab.queue.reasons = {"uid-b": reason}
    lab.list("tty-1")
    await asyncio.sleep(0.1)
    lab.queue.reasons = {}
    lab.list()
    await asyncio.sleep(120)
    assert len(lab.queue.calls) == 1 + more


@pytest.mark.looptime
async def test_a_slow_claim_does_not_delay_others_and_is_not_prepared_twice_at_once(lab):
    lab.queue.slow = {"uid-b"}
    lab.list("tty-1")
    await asyncio.sleep(1)
    lab.list("tty-0", "tty-1")
    await asyncio.sleep(0.1)
    assert lab.queue.uids() == ["uid-a", "uid-b"]
    await asyncio.sleep(35)
    assert lab.queue.uids().count("uid-b") == 1


@pytest.mark.looptime
async def test_a_claim_that_is_stored_while_its_device_is_marked_is_found(lab):
    lab.list("tty-2")
    await asyncio.sleep(20)
    assert lab.queue.calls == []
    lab.rows.claims[NODE, "tty-2"] = {C: ()}
    await asyncio.sleep(POLL_SECONDS + 0.1)
    assert lab.queue.uids()[0] == "uid-c"


@pytest.mark.looptime
async def test_nothing_is_prepared_before_the_registration(unregistered):
    unregistered.list("tty-1")
    await asyncio.sleep(20)
    assert unregistered.queue.calls == []
    unregistered.registered.set()
    await asyncio.sleep(0.1)
    assert unregistered.queue.uids() == ["uid-b"]


@pytest.mark.looptime
async def test_nothing_is_prepared_without_the_checkpoint(lab):
    lab.rows.broken = True
    lab.list("tty-1")
    await asyncio.sleep(20)
    assert lab.queue.calls == []
    lab.rows.broken = False
    await asyncio.sleep(POLL_SECONDS + 0.1)
    assert set(lab.queue.uids()) == {"uid-b"}


@pytest.mark.looptime
async def test_a_stopped_endpoint_is_not_called(lab):
    lab.list("tty-1")
    lab.devices.stopped(DRIVER, "it ended")
    await asyncio.sleep(60)
    assert lab.queue.calls == []
    lab.list("tty-1")
    await asyncio.sleep(0.1)
    assert lab.queue.uids() == ["uid-b"], "it marks its devices again"


# ------------------------------------------------------------ turns


@pytest.fixture
async def plugin(start, claims):
    claims.store(claim_body("uid-a", "tty-0"))
    plugin = await start()
    assert (await plugin.prepare(A))["uid-a"].error is None
    return plugin


async def again(plugin, devices) -> tuple[asyncio.Event, asyncio.Task[ClaimResult]]:
    """Begin a second prepare whose driver waits."""
    devices.held["tty-0"] = free = asyncio.Event()
    task = asyncio.create_task(plugin.queue.prepare_again(A))
    while devices.prepares < 2:
        await asyncio.sleep(0)
    return free, task


async def test_a_call_of_the_kubelet_waits_for_a_second_prepare_and_has_an_answer_of_its_own(
    plugin, devices
):
    """A prepared claim stays prepared if the second prepare fails."""
    free, task = await again(plugin, devices)
    devices.failing = {"tty-0"}
    call = asyncio.create_task(prepare(plugin.queue, A))
    await asyncio.sleep(0.05)
    assert not call.done()
    free.set()
    assert (await task).error is not None
    assert (await call)["uid-a"].error is None


async def test_an_unprepare_abandons_a_second_prepare(plugin, devices):
    free, task = await again(plugin, devices)
    call = asyncio.create_task(unprepare(plugin.queue, A))
    assert (await task).reason == "Abandoned"
    free.set()
    assert await call == {"uid-a": None}
    assert (devices.prepared, await plugin.states(), plugin.files()) == ({}, {}, set())


async def test_a_second_prepare_waits_for_its_turn(plugin, devices):
    free, task = await again(plugin, devices)
    later = asyncio.create_task(plugin.queue.prepare_again(A))
    await asyncio.sleep(0.05)
    assert devices.prepares == 2
    free.set()
    assert [(await each).error for each in (task, later)] == [None, None]
    assert devices.prepares == 3
