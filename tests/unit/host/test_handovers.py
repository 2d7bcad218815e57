"""Two hosted drivers on the sockets and the data of one node, in one process."""

from __future__ import annotations

import asyncio
import gc
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from drakit_daemon import tasks
from drakit_driver.runtime import loop
from drakit_driver.runtime import thread as threads
from drakit_driver.runtime.contract import traits_of
from drakit_driver.runtime.loading import LoadedDriver
from drakit_nodeplugin.changes import FilePoller
from drakit_nodeplugin.config import NodePluginConfig
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.host import driver as hosting
from drakit_nodeplugin.host.driver import HostedDriver
from drakit_nodeplugin.kubelet.sockets import SocketPaths, socket_paths
from drakit_nodeplugin.state import lock
from drakit_nodeplugin.state.checkpoint import Checkpoint
from drakit_nodeplugin.state.inspection import forget
from drakit_nodeplugin.state.lock import is_locked
from drakit_nodeplugin.state.records import StoredClaim
from tests.fakes.checkpoints import prepared_claim, reopen, stored_claim
from tests.fakes.kubelet import FakeKubelet, reference
from tests.unit.claims.conftest import sql
from tests.unit.endpoints.camera import NODE, Behaviour, Camera, until
from tests.unit.host.conftest import environment

OLD, NEW = (f"00000000-0000-4000-8000-00000000000{n}" for n in (1, 2))
A, B = reference("uid-a", name="a"), reference("uid-b", name="b")


@pytest.fixture(autouse=True)
def thawed():
    """A hosted driver excludes the objects of the process from full collections."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    for constant, seconds in {"ASK": 0.02, "YIELD": 0.2, "STANDBY": 0.05}.items():
        monkeypatch.setattr(lock, f"{constant}_SECONDS", seconds)


class Instance:
    """A hosted driver, and the kubelet's connection to it."""

    def __init__(self, hosted: HostedDriver, paths: SocketPaths, kubelet: FakeKubelet) -> None:
        self.hosted, self.paths = hosted, paths
        self._kubelet = kubelet

    @property
    def is_active(self) -> bool:
        return self.hosted._active is not None

    @property
    def registration(self) -> tuple[int, int] | None:
        """The identity of the registration socket."""
        try:
            found = self.paths.registration.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_ctime_ns

    async def register(self) -> Path:
        dra = Path((await self._kubelet.get_info(self.paths.registration)).endpoint)
        await self._kubelet.notify(self.paths.registration)
        return dra


class Site:
    """A node."""

    def __init__(self, root: Path, kubelet: FakeKubelet) -> None:
        self.root, self.kubelet = root, kubelet
        self.config = NodePluginConfig.model_validate(
            {
                "drivers": [{"driver": "cameras"}],
                "kubeletRoot": str(root),
                "cdiDirectory": str(root / "cdi"),
            }
        )
        self.data = self.config.drivers_directory / Camera.name
        self.checkpoint = self.data / "checkpoint.db"
        (root / "cdi").mkdir()

    async def fill(self, *claims: StoredClaim) -> list[StoredClaim]:
        """Write claims, as an earlier process did."""
        self.data.mkdir(mode=0o700, parents=True)
        checkpoint = Checkpoint(self.checkpoint)
        await checkpoint.open()
        begun = await checkpoint.write([replace(each, state="preparing") for each in claims])
        states = {each.uid: each.state for each in claims}
        written = [replace(row, state=states[uid]) for uid, row in begun.written.items()]
        stored = (await checkpoint.write(written)).written
        await checkpoint.close()
        return [stored[each.uid] for each in claims]

    @asynccontextmanager
    async def instance(self, uid: str, behaviour: Behaviour) -> AsyncIterator[Instance]:
        """Start an instance, and run it until the end of the block, as the daemon does."""
        surroundings = environment(
            self.root,
            node=NODE,
            config=self.config,
            instance_uid=uid,
            file_poller=FilePoller(period_seconds=0.02),
        )
        driver = LoadedDriver(
            name=Camera.name,
            make=lambda: Camera(behaviour),
            traits=traits_of(Camera),
            where="here",
        )
        hosted = HostedDriver(driver, surroundings)
        running: asyncio.Task[None] | None = None
        try:
            await hosted.start()
            pollers = {
                "file poller": surroundings.file_poller.run,
                "CDI file poller": surroundings.cdi_poller.run,
            }
            running = asyncio.create_task(tasks.run({**pollers, **hosted.parts()}))
            paths = socket_paths(Camera.name, kubelet_root=self.root, instance_uid=uid)
            yield Instance(hosted, paths, self.kubelet)
            assert not running.done(), running.exception()
        finally:
            if running is not None:
                running.cancel()
                await asyncio.wait({running})
            await hosted.stop()


@pytest.fixture
async def site():
    # Unix socket paths have at most 107 bytes: pytest's own directories are too deep.
    root = Path(tempfile.mkdtemp(prefix="dk", dir="/tmp"))
    async with FakeKubelet(root) as kubelet:
        yield Site(root, kubelet)
    shutil.rmtree(root)


@pytest.fixture
def old() -> Behaviour:
    """The driver of the instance that is active first."""
    return Behaviour()


@pytest.fixture
def new() -> Behaviour:
    return Behaviour()


class Block:
    """Vendor code that lasts until the test lets it go."""

    def __init__(self) -> None:
        self.begun, self._go = threading.Event(), threading.Event()
        self.let_go = self._go.set

    def __call__(self, *_) -> None:
        """Block the thread."""
        self.begun.set()
        self._go.wait(10)

    async def call(self) -> None:
        self.begun.set()
        while not self._go.is_set():
            await asyncio.sleep(0.01)


@pytest.fixture
def block():
    block = Block()
    yield block
    block.let_go()


async def still(condition, *, seconds: float = 0.6) -> None:
    """Check that a condition stays true for a while: much longer than a round of the pollers."""
    loop = asyncio.get_running_loop()
    until_time = loop.time() + seconds
    while loop.time() < until_time:
        assert condition()
        await asyncio.sleep(0.01)


# ------------------------------------------------------------ a driver that fails


@pytest.mark.parametrize("step", ["start", "run"])
async def test_a_driver_that_fails_unexpectedly_is_started_again_and_ends_nothing_else(
    site, old, monkeypatch, step, caplog
):
    """The instance would be done, and with it all drivers of the process."""
    monkeypatch.setattr(hosting, "RESTART_SECONDS", (0.01, 0.01))
    failures = [step]
    restore, pass_time = DeviceManager.restore, DeviceManager._pass_time

    def fail(step: str) -> None:
        if failures == [step]:
            failures.clear()
            raise KeyError("a pool")

    async def failing_restore(self):
        fail("start")
        return await restore(self)

    def failing_pass_time(self, now: float) -> None:
        pass_time(self, now)
        if old.made:
            fail("run")

    monkeypatch.setattr(DeviceManager, "restore", failing_restore)
    monkeypatch.setattr(DeviceManager, "_pass_time", failing_pass_time)
    async with site.instance(OLD, old) as first:
        dra = await first.register()
        made = 1 if step == "start" else 2
        await until(lambda: old.made == made and first.is_active)
        assert await site.kubelet.unprepare(dra, A) == {"uid-a": ""}
        assert "another" not in (first.hosted.readiness_problem() or "")
        note = first.hosted._events._pending.get_nowait()[2]
        assert (
            "driver camera.example.com is unavailable: an internal error of the node plugin" in note
        )
    assert old.closed == old.made
    assert "driver failed; it is started again" in caplog.messages


async def test_a_checkpoint_that_is_damaged_meanwhile_costs_its_driver_a_start(
    site, old, monkeypatch
):
    monkeypatch.setattr(hosting, "RESTART_SECONDS", (0.01, 0.01))
    await site.fill(prepared_claim("a", boot_id="boot-0"))
    async with site.instance(OLD, old) as first:
        dra = await first.register()
        sql(site.checkpoint, "UPDATE bodies SET checksum = 1")
        assert "is damaged" in (await site.kubelet.unprepare(dra, A))["uid-a"]
        await until(lambda: old.made == 2 and first.is_active)
        assert [*site.data.glob("checkpoint.db.damaged-*")]
        note = first.hosted._events._pending.get_nowait()[2]
        assert f"{site.checkpoint} is damaged" in note


# ------------------------------------------------------------ the former driver ends first


async def test_a_driver_that_recovers_a_claim_is_not_handed_over_before_it_has(
    site, old, new, block
):
    await site.fill(stored_claim("a", state="unpreparing"))
    old.unprepare = block.call
    async with site.instance(OLD, old), site.instance(NEW, new) as second:
        await second.register()
        await until(block.begun.is_set)
        await still(lambda: new.made == 0)
        block.let_go()
        await until(lambda: second.is_active)
        assert (old.closed, new.made) == (1, 1)
    assert await reopen(site.checkpoint) == ({}, None)


async def test_a_call_that_does_not_end_delays_a_hand_over_for_a_while_only(
    site, old, new, monkeypatch
):
    monkeypatch.setattr(hosting, "HAND_OVER_SECONDS", 0.5)
    monkeypatch.setattr(loop, "CALLS_SECONDS", 0.05)
    monkeypatch.setattr(loop, "TASKS_SECONDS", 0.05)
    await site.fill(stored_claim("a", state="unpreparing"))
    begun = threading.Event()

    async def swallow() -> None:
        begun.set()
        while new.made == 0:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    finished = threading.Event()

    async def finish() -> None:
        finished.set()

    old.unprepare, new.unprepare = swallow, finish
    async with site.instance(OLD, old) as first:
        await first.register()
        await until(begun.is_set)
        async with site.instance(NEW, new) as second:
            await second.register()
            await still(lambda: new.made == 0, seconds=0.3)
            await until(lambda: second.is_active)
            await until(finished.is_set)
            await until(lambda: not second.hosted._active.queue.held("uid-a"))
    assert await reopen(site.checkpoint) == ({}, None)


async def test_a_driver_that_is_slow_to_close_is_not_handed_over_before_it_has(
    site, old, new, block, monkeypatch
):
    """After the limit, only a restart can end its thread: the process is not alive any more."""
    monkeypatch.setattr(threads, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(hosting, "HAND_OVER_SECONDS", 0.3)
    closes = Camera.close

    def close(self) -> None:
        if self.behaviour is old:
            block()
        closes(self)

    monkeypatch.setattr(Camera, "close", close)
    async with site.instance(OLD, old) as first, site.instance(NEW, new) as second:
        dra = await second.register()
        await until(block.begun.is_set)
        waiting = asyncio.create_task(site.kubelet.unprepare(dra, A))
        assert await first.hosted.liveness_problem() is None
        await still(lambda: new.made == 0)
        assert not waiting.done()
        assert "does not end" in await first.hosted.liveness_problem()
        assert await second.hosted.liveness_problem() is None
        block.let_go()
        assert await waiting == {"uid-a": ""}
        assert (old.closed, new.made) == (1, 1)
        assert not first.is_active
        assert await first.hosted.liveness_problem() is None


async def test_an_instance_whose_driver_does_not_end_keeps_the_lock_when_it_stops(
    site, old, new, block, monkeypatch
):
    monkeypatch.setattr(threads, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(Camera, "close", block)
    async with site.instance(OLD, old) as first:
        pass
    assert block.begun.is_set()
    assert is_locked(site.data)
    block.let_go()
    await first.hosted._lock.release()  # as the end of the process does


async def test_an_instance_that_stops_while_its_driver_starts_keeps_the_lock(
    site, old, block, monkeypatch
):
    monkeypatch.setattr(threads, "CLOSE_SECONDS", 0.05)

    def init(self, behaviour) -> None:
        block()
        raise AssertionError("it was stopped")

    monkeypatch.setattr(Camera, "__init__", init)
    starting = asyncio.create_task(site.instance(OLD, old).__aenter__())
    await until(block.begun.is_set)
    starting.cancel()
    await asyncio.wait({starting})
    assert starting.cancelled()
    assert is_locked(site.data)


async def test_runs_of_a_driver_never_overlap_when_it_is_active_again(site, old, new, monkeypatch):
    """The former instance creates its driver again only after the other one has closed."""
    monkeypatch.setattr(lock, "IGNORE_SECONDS", 0.0)
    async with site.instance(OLD, old) as first:
        for count in (1, 2, 3):
            async with site.instance(NEW, new) as second:
                await second.register()
                await until(lambda: second.is_active)
                assert (old.made, old.closed, new.made) == (count, count, count)
            await until(lambda: first.is_active)
            assert (old.made, new.closed) == (count + 1, count)


# ------------------------------------------------------------ the request


async def test_a_new_instance_that_is_never_registered_asks_after_a_while(
    site, old, new, monkeypatch
):
    monkeypatch.setattr(hosting, "UNREGISTERED_SECONDS", 1.0)
    clock = asyncio.get_running_loop().time
    async with site.instance(OLD, old):
        began = clock()
        async with site.instance(NEW, new) as second:
            await until(lambda: second.is_active)
            assert clock() - began >= 1.0


# ------------------------------------------------------------ instances that crash


async def test_an_active_instance_registers_again_when_it_ignores_another(
    site, old, new, block, caplog
):
    await site.fill(prepared_claim("b"))
    old.unprepare = block.call
    async with site.instance(OLD, old) as first:
        async with site.instance(NEW, new) as second:
            await second.register()
            await until(lambda: second.is_active)
        await until(lambda: first.is_active)
        dra, before = await first.register(), first.registration
        in_flight = asyncio.create_task(site.kubelet.unprepare(dra, B))
        await until(block.begun.is_set)

        async with site.instance(NEW, new) as second:
            await second.register()
            await until(lambda: any("ignoring it for a while" in each for each in caplog.messages))
            # The kubelet would cancel the call.
            await still(lambda: first.registration == before)
            block.let_go()
            assert await in_flight == {"uid-b": ""}
            await until(lambda: first.registration not in (None, before))
            dra = await first.register()
            assert await site.kubelet.unprepare(dra, A) == {"uid-a": ""}
            assert (first.is_active, second.is_active) == (True, False)


# ------------------------------------------------------------ requests of admins


async def test_a_claim_is_forgotten_on_request_while_a_hand_over_waits_for_a_call(
    site, old, new, block
):
    stored, _ = await site.fill(prepared_claim("a"), prepared_claim("b"))
    old.unprepare = block.call
    async with site.instance(OLD, old) as first, site.instance(NEW, new) as second:
        in_flight = asyncio.create_task(site.kubelet.unprepare(await first.register(), B))
        await until(block.begun.is_set)
        await second.register()
        await until(lambda: (site.data / "waiting.lock").exists())
        await still(lambda: not second.is_active)
        await asyncio.to_thread(forget, site.checkpoint, stored)
        assert not in_flight.done()
        assert new.made == 0
        block.let_go()
        assert await in_flight == {"uid-b": ""}
        await until(lambda: second.is_active)
    assert await reopen(site.checkpoint) == ({}, None)
