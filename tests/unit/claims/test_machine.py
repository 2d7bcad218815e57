"""
A state machine that acts on an engine, in any order, like kubelets, schedulers, admins and power
failures.

It also updates a model of a few dictionaries. After each step, both must agree: on every result, on
the checkpoint's rows, on CDI files, and on the driver's actions on its devices.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from drakit import (
    AllocatedDevice,
    ClaimReference,
    CounterSet,
    Device,
    Edits,
    PreparedDevice,
)
from drakit_driver.runtime.contract import traits_of
from drakit_driver.runtime.failures import EndpointStoppedError
from drakit_nodeplugin.state.holds import PoolContent
from tests.fakes.claims import DRIVER, NODE, FakeClaims, FakeDevices, claim_body, reference
from tests.fakes.direct import DirectEndpoint
from tests.unit.claims.conftest import MEMORY, EmptyDriver, Plugin, stopped

# Thousands of steps, each with an fsync: on a busy disk, that exceeds the usual timeout.
pytestmark = pytest.mark.timeout(120)

UIDS = [f"uid-{letter}" for letter in "abcd"]
TAKES = {"gpu": 4, "half-a": 2, "half-b": 2, "quarter": 1}
"""Compute slices that the devices consume of one GPU, which has four."""

DEVICES = ["cam-0", *TAKES]
INVENTORY = PoolContent(
    devices={
        name: Device(
            name=name,
            consumes={"gpu": {"compute": str(TAKES[name])}} if name in TAKES else {},
        )
        for name in DEVICES
    },
    counter_sets=(CounterSet(name="gpu", counters={"compute": "4"}),),
)


def overlap(one: Iterable[str], *others: Iterable[str]) -> bool:
    """Return whether devices conflict with those of others."""
    mine, theirs = set(one), {name for other in others for name in other}
    taken = sum(TAKES.get(name, 0) for name in theirs)
    wanted = sum(TAKES.get(name, 0) for name in mine)
    return bool(mine & theirs) or (wanted > 0 and wanted + taken > 4)


uids = st.sampled_from(UIDS)
device_sets = st.sets(st.sampled_from(DEVICES), min_size=1, max_size=2).map(
    lambda names: tuple(sorted(names))
)


class World(FakeDevices):
    """The hardware. What is prepared survives processes, and ends with a boot."""

    def __init__(self, *, side_effects: bool) -> None:
        super().__init__(side_effects=side_effects)
        self.stopped = False
        self.gate: asyncio.Event | None = None
        """An event for which prepares wait, before or after they have changed the device."""
        self.hangs_after = False
        self.clashes: list[str] = []

    def unavailable(self) -> EndpointStoppedError | None:
        return stopped() if self.stopped else None

    async def check_device(self, claim: ClaimReference, device: AllocatedDevice) -> bool:
        raise AssertionError("a driver without checks is not asked")

    async def prepare_device(
        self, claim: ClaimReference, device: AllocatedDevice
    ) -> PreparedDevice:
        self.prepares += 1
        await self._call(device)
        if self.gate is not None and not self.hangs_after:
            await self.gate.wait()
        others = [name for name, uid in self.prepared.items() if uid != claim.uid]
        if overlap([device.name], others):
            self.clashes.append(f"{device.name} for {claim.uid} beside {others}")
        if self.traits.side_effects:
            self.prepared[device.name] = claim.uid
        if self.gate is not None and self.hangs_after:
            await self.gate.wait()
        return PreparedDevice(edits=Edits.of_device_nodes(f"/dev/{device.name}"))

    async def _call(self, device: AllocatedDevice) -> None:
        if (error := self.unavailable()) is not None:
            raise error
        await super()._call(device)


class Batches(EmptyDriver):
    """A driver that applies each call to the world."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    async def prepare(self, claim: ClaimReference, device: AllocatedDevice) -> Edits:
        return await self._world.prepare_device(claim, device)

    async def unprepare(self, claim: ClaimReference, device: AllocatedDevice) -> None:
        await self._world.unprepare_device(claim, device)

    async def prepare_claims(self, claims):
        return await super().prepare_claims(claims)

    async def unprepare_claims(self, claims):
        return await super().unprepare_claims(claims)


class Reached(DirectEndpoint):
    """The world behind the real endpoint, without the driver's thread."""

    def __init__(self, world: World) -> None:
        traits = replace(traits_of(Batches), side_effects=world.traits.side_effects)
        super().__init__(Batches(world), node=NODE, traits=traits)
        self.unavailable = world.unavailable


@dataclass(frozen=True)
class Row:
    """The expected row of a claim."""

    devices: tuple[str, ...]
    boot: int
    prepared: bool = True


class Engine(RuleBasedStateMachine):
    """One node with one driver."""

    side_effects = True
    batches = False

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="drakit-machine-", dir=MEMORY))
        self.claims = FakeClaims()
        self.world = World(side_effects=self.side_effects)
        self.api: dict[str, tuple[str, ...]] = {}
        self.rows: dict[str, Row] = {}
        self.boot = 0

    def run(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 20))

    @initialize()
    def begin(self) -> None:
        self.run(self._start())

    async def _start(self) -> None:
        self.plugin = Plugin(
            self.folder,
            boot_id=f"boot-{self.boot}",
            claims=self.claims,
            devices=Reached(self.world) if self.batches else self.world,
        )
        self.plugin.inventories.pools = {NODE: INVENTORY}
        self.calls = self.plugin.queue
        await self.plugin.checkpoint.open()
        await self.plugin.restorer.restore()

    async def _restart(self) -> None:
        await self.plugin.checkpoint.close()
        await self._start()

    def teardown(self) -> None:
        self.run(self.plugin.checkpoint.close())
        self.loop.close()
        shutil.rmtree(self.folder)

    # ------------------------------------------------------------ the API server and scheduler

    @rule(uid=uids, devices=device_sets)
    def allocate(self, uid, devices):
        """Allocate a claim, or allocate it again with other devices; never devices of another
        allocated claim."""
        if overlap(devices, *(others for other, others in self.api.items() if other != uid)):
            return
        self.api[uid] = devices
        self.claims.store(claim_body(uid, *devices))

    @rule(uid=uids)
    def delete(self, uid):
        self.api.pop(uid, None)
        self.claims.bodies.pop(f"claim-{uid}", None)

    @rule(answers=st.booleans())
    def api_server(self, answers):
        self.claims.answers = answers

    # ------------------------------------------------------------ the driver

    @rule(device=st.sampled_from(DEVICES), broken=st.booleans())
    def device(self, device, broken):
        (self.world.failing.add if broken else self.world.failing.discard)(device)

    @rule(stopped=st.booleans())
    def driver(self, stopped):
        self.world.stopped = stopped

    # ------------------------------------------------------------ the kubelet

    @rule(batch=st.sets(uids, min_size=1, max_size=3))
    def prepare(self, batch):
        for group in self._independent(sorted(batch)):
            expected = {uid: self._expect_prepare(uid) for uid in group}
            answers = self.run(self._ask("prepare", group))
            for uid in group:
                answer = answers[uid]
                if expected[uid] is None:
                    assert answer.error, f"{uid} must not be prepared"
                else:
                    assert answer.error is None, answer.error
                    assert tuple(d.device for d in answer.devices) == expected[uid]

    @rule(batch=st.sets(uids, min_size=1, max_size=3))
    def unprepare(self, batch):
        expected = {uid: self._expect_unprepare(uid) for uid in batch}
        answers = self.run(self._ask("unprepare", sorted(batch)))
        for uid in batch:
            assert (answers[uid].error is None) == expected[uid], answers[uid].error

    @rule(uid=uids, devices=device_sets)
    def start_a_pod(self, uid, devices):
        """Allocate and prepare at once, so that walks reach claims that conflict with each
        other."""
        self.allocate(uid, devices)
        self.prepare({uid})

    @rule(uid=uids)
    def delete_a_pod_by_force_while_the_driver_is_stopped(self, uid):
        """Deallocate a claim: from then on, the scheduler counts the hardware as free."""
        self.world.stopped = True
        self.unprepare({uid})
        self.delete(uid)
        self.world.stopped = False

    @rule(uid=uids, hangs_after=st.booleans())
    def unprepare_overtakes_a_prepare_that_hangs(self, uid, hangs_after):
        if not self._would_call_driver(uid):
            return
        # Before the hang may come what frees its former devices.
        assert self._expect_prepare(uid) is not None

        async def hang() -> None:
            self.world.gate, self.world.hangs_after = asyncio.Event(), hangs_after
            before = self.world.prepares
            first = asyncio.create_task(self._ask("prepare", [uid]))
            while self.world.prepares == before:
                await asyncio.sleep(0)
            second = await self._ask("unprepare", [uid])
            assert second[uid].error is None
            assert (await first)[uid].error is not None
            self.world.gate = None

        self.run(hang())
        del self.rows[uid]

    async def _ask(self, operation, batch):
        references = [reference(uid) for uid in batch]
        return await self.calls.ask(operation, references, timeout_seconds=10)

    # ------------------------------------------------------------ the node

    @rule()
    def restart(self):
        self.run(self._restart())
        self._expect_recovery()

    @rule()
    def reboot(self):
        self.boot += 1
        self.world.prepared.clear()
        shutil.rmtree(self.plugin.cdi, ignore_errors=True)
        self.run(self._restart())
        self._expect_recovery()

    @rule(uid=uids, hangs_after=st.booleans())
    def crash_in_the_middle_of_a_prepare(self, uid, hangs_after):
        if not self._would_call_driver(uid):
            return
        former = self.rows.get(uid)
        wanted = self._expect_prepare(uid)
        assert wanted is not None

        async def crash() -> None:
            self.world.gate, self.world.hangs_after = asyncio.Event(), hangs_after
            before = self.world.prepares
            work = asyncio.create_task(self._ask("prepare", [uid]))
            while self.world.prepares == before:
                await asyncio.sleep(0)
            for _ in range(5):
                await asyncio.sleep(0)
            # As if the process ended: nothing of it runs on.
            work.cancel()
            await self.calls.cancel()
            self.world.gate = None
            await self._restart()

        self.run(crash())
        del self.rows[uid]
        repeated = former is not None and former.prepared and former.devices == wanted
        if repeated and former is not None and not self.side_effects:
            # After a reboot, and without an intent: nothing of it has changed yet.
            self.rows[uid] = former
        self._expect_recovery()

    @precondition(lambda self: any(row.prepared for row in self.rows.values()))
    @rule(data=st.data())
    def somebody_deletes_a_cdi_file(self, data):
        names = sorted(self.plugin.files())
        if names:
            (self.plugin.cdi / data.draw(st.sampled_from(names))).unlink()
            assert self.run(self.plugin.restorer.restore()) == 1

    @rule()
    def recover(self):
        self._expect_recovery()

    # ------------------------------------------------------------ the model

    def _current(self, uid) -> bool:
        row = self.rows.get(uid)
        return row is not None and row.prepared and row.boot == self.boot

    def _undone(self, uid) -> bool:
        """Undo a row if the driver allows it. Return whether it is gone."""
        row = self.rows[uid]
        # Without side effects there is nothing that a driver would have to undo.
        free = not self.side_effects or not (
            self.world.stopped or set(row.devices) & self.world.failing
        )
        if free:
            del self.rows[uid]
        else:
            self.rows[uid] = replace(row, prepared=False)
        return free

    def _taken(self, uid, devices) -> bool:
        return overlap(devices, *(row.devices for other, row in self.rows.items() if other != uid))

    def _would_call_driver(self, uid) -> bool:
        wanted = self.api.get(uid)
        row = self.rows.get(uid)
        return (
            wanted is not None
            and self.claims.answers
            and not self.world.stopped
            and not self.world.failing
            and not self._taken(uid, wanted)
            and not (self._current(uid) and row is not None and row.devices == wanted)
        )

    def _expect_prepare(self, uid) -> tuple[str, ...] | None:
        """Return the devices of the result. None if the call must fail."""
        row, wanted = self.rows.get(uid), self.api.get(uid)
        if not self.claims.answers:
            return row.devices if row is not None and self._current(uid) else None
        if wanted is None:
            return None
        if row is not None and (not row.prepared or row.devices != wanted):
            if not self._undone(uid):
                return None
        elif self._current(uid):
            return wanted
        if self.world.stopped or self._taken(uid, wanted):
            return None
        if set(wanted) & self.world.failing:
            if self.side_effects:
                self.rows[uid] = Row(wanted, self.boot)
                self._undone(uid)
            else:
                self.rows.pop(uid, None)
            return None
        self.rows[uid] = Row(wanted, self.boot)
        return wanted

    def _expect_unprepare(self, uid) -> bool:
        if uid not in self.rows:
            return True
        return self._undone(uid) or self.world.stopped

    def _expect_recovery(self) -> None:
        for uid, row in list(self.rows.items()):
            if not row.prepared:
                self._undone(uid)
        self.run(self.plugin.recovery.recover())

    def _independent(self, batch):
        """Split a batch if its claims need the same hardware: their order within a call is
        undefined."""
        touched: set[str] = set()
        for uid in batch:
            row = self.rows.get(uid)
            mine = {*self.api.get(uid, ()), *(row.devices if row else ())}
            mine = {"gpu" if name in TAKES else name for name in mine}
            if mine & touched:
                return [[uid] for uid in batch]
            touched |= mine
        return [batch]

    # ------------------------------------------------------------ what must always hold

    @invariant()
    def rows_are_as_expected(self):
        if not hasattr(self, "plugin"):
            return
        states = self.run(self.plugin.states())
        expected = {
            uid: "prepared" if row.prepared else "unpreparing" for uid, row in self.rows.items()
        }
        assert states == expected

    @invariant()
    def files_belong_to_prepared_claims(self):
        """Check the files. A claim that the driver refused to undo may keep its file until it is
        undone."""
        if not hasattr(self, "plugin"):
            return
        files = self.plugin.files()
        current = {_file(uid) for uid in self.rows if self._current(uid)}
        refused = {_file(uid) for uid, row in self.rows.items() if not row.prepared}
        assert current <= files <= current | refused

    @invariant()
    def devices_are_held_by_rows_alone(self):
        assert self.world.clashes == []
        for device, uid in self.world.prepared.items():
            assert uid in self.rows, f"{device} is held for {uid}, of which nobody knows"
            assert device in self.rows[uid].devices
        if self.side_effects:
            for uid, row in self.rows.items():
                for device in row.devices:
                    assert not self._current(uid) or self.world.prepared.get(device) == uid


def _file(uid: str) -> str:
    return f"{DRIVER}-claim_{uid}.json"


class EngineWithoutSideEffects(Engine):
    side_effects = False


class EngineOfBatches(Engine):
    batches = True


_SETTINGS = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    # The same walks each time, so that a change is judged by what it changes. To look for more,
    # take this away and let it walk for an hour.
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestEngine = Engine.TestCase
TestEngine.settings = _SETTINGS
TestEngineWithoutSideEffects = EngineWithoutSideEffects.TestCase
TestEngineWithoutSideEffects.settings = _SETTINGS
TestEngineOfBatches = EngineOfBatches.TestCase
TestEngineOfBatches.settings = settings(_SETTINGS, max_examples=50)
