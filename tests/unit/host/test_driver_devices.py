"""The path of a driver's devices from the checkpoint to the manager, and from there to users."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from drakit import ClaimReference, Device, HeldNode, Inventory, Taint
from drakit import HeldDevice as DeviceOfClaims
from drakit_driver.runtime.contract import DriverTraits
from drakit_driver.runtime.policies import PolicyFeed
from drakit_nodeplugin.changes import Revision
from drakit_nodeplugin.devices.counts import DEVICE_STATES
from drakit_nodeplugin.host.driver_devices import DriverDevices
from drakit_nodeplugin.host.node import NodeEvents
from drakit_nodeplugin.metrics import Metrics
from drakit_nodeplugin.state.checkpoint import CheckpointError
from drakit_nodeplugin.state.holds import HeldDevice
from drakit_nodeplugin.state.records import StoredDevice, StoredEndpoint, StoredNode
from tests.fakes.kube import FakeApiServer
from tests.fakes.tasks import running
from tests.unit.host.conftest import environment
from tests.unit.slices.conftest import Link

DRIVER, NODE = "camera.example.com", "node-1"
CLAIM = ClaimReference(namespace="lab", name="a", uid="uid-a")


class Rows:
    """The parts of the checkpoint that concern devices."""

    path = Path("/nowhere/checkpoint.db")

    def __init__(self) -> None:
        self.unpreparing: tuple[str, ...] = ()
        self.held = {NODE: frozenset({"cam-0", "cam-1"}), "no-such-pool": frozenset({"x"})}
        self.boot_id = "boot-1"
        self.endpoints_stored: dict = {}
        self.error: str | None = None
        self.damage: str | None = None
        self.revision = Revision()
        """Advances at each write of claims."""

    def _use(self) -> None:
        if self.error is not None:
            raise CheckpointError(self.error)

    async def held_beside_unpreparing(self):
        self._use()
        return [
            HeldDevice(pool=NODE, device=name, consumes={}, unpreparing=True)
            for name in self.unpreparing
        ]

    async def claims_of_devices(self):
        self._use()
        node = StoredNode(type="c", major=81, minor=0, identity="usb:a", current=False)
        return {
            (pool, name): {
                CLAIM: [
                    StoredDevice(
                        pool=pool,
                        device=name,
                        request="main",
                        share_id="s" if name == "cam-1" else None,
                        consumed_capacity={"users": "2"} if name == "cam-1" else {},
                        nodes=(node,) if name == "cam-0" else (),
                    )
                ]
            }
            for pool, names in self.held.items()
            for name in names
        }

    async def uids(self, *, boot_id):
        self._use()
        return {CLAIM.uid} if boot_id == self.boot_id else set()

    async def devices_in_use(self):
        self._use()
        return self.held

    async def endpoints(self):
        self._use()
        return list(self.endpoints_stored.values())

    async def write_endpoints(self, endpoints):
        self.endpoints_stored.update({endpoint.name: endpoint for endpoint in endpoints})

    async def forget_endpoints(self, names):
        for name in names:
            self.endpoints_stored.pop(name, None)


def hosted(
    rows: Rows,
    *,
    health: bool = False,
    policies: PolicyFeed | None = None,
    session: asyncio.Future | None = None,
    registered: asyncio.Event | None = None,
    metrics: Metrics | None = None,
) -> DriverDevices:
    session = session or asyncio.get_running_loop().create_future()
    surroundings = environment(Path("/nowhere"), node=NODE, session=session)
    return DriverDevices(
        DRIVER,
        traits=DriverTraits(health=health),
        checkpoint=rows,
        environment=surroundings,
        events=NodeEvents(NODE, session),
        metrics=(metrics or surroundings.metrics).for_driver(DRIVER),
        expected=(DRIVER,),
        registered=registered or asyncio.Event(),
        policies=policies,
    )


def gauge(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"driver": DRIVER, **labels})


def tainted(devices: DriverDevices) -> set[str]:
    return {
        device.name
        for pool in devices.manager.publication().pools.values()
        for device in pool.devices
        if any(taint.key == "drakit.dev/unpreparing" for taint in device.taints)
    }


async def test_a_driver_with_policies_learns_which_devices_claims_hold_before_it_starts():
    feed = PolicyFeed()
    await hosted(Rows(), policies=feed).restore()
    held = HeldNode(type="c", major=81, minor=0, identity="usb:a", current=False)
    assert feed.held() == {
        "cam-0": DeviceOfClaims(claims=(CLAIM,), nodes=(held,)),
        "cam-1": DeviceOfClaims(claims=(CLAIM,), shares=({"users": "2"},)),
        "no-such-pool/x": DeviceOfClaims(claims=(CLAIM,)),
    }


async def test_a_driver_learns_no_numbers_of_an_earlier_boot():
    feed, rows = PolicyFeed(), Rows()
    rows.boot_id = "boot-0"
    await hosted(rows, policies=feed).restore()
    (node,) = feed.held()["cam-0"].nodes
    assert (node.identity, node.major, node.minor) == ("usb:a", None, None)


def break_reading(rows: Rows, broken: bool) -> None:
    rows.error = "no disk" if broken else None


def damage(rows: Rows, broken: bool) -> None:
    rows.damage = "a row is lost" if broken else None
    # The rebuild has found one claim so far, and then finds the other.
    rows.held = {NODE: frozenset({"cam-0"} if broken else {"cam-0", "cam-1"})}


UNKNOWN = [
    pytest.param(break_reading, "no disk", id="cannot-be-read"),
    pytest.param(
        damage,
        "the checkpoint /nowhere/checkpoint.db is being rebuilt: a row is lost",
        id="is-being-rebuilt",
    ),
]


@contextlib.asynccontextmanager
async def following(devices: DriverDevices, *names: str) -> AsyncIterator[None]:
    """Run the parts that follow claims and devices, and those with these names."""
    names = ("unpreparing", "devices", *names)
    async with running(*(devices.parts()[name]() for name in names)):
        yield


@pytest.mark.looptime
@pytest.mark.parametrize(("spoil", "reason"), UNKNOWN)
async def test_a_driver_waits_until_it_is_known_what_claims_hold(spoil, reason, caplog):
    rows, feed = Rows(), PolicyFeed()
    rows.endpoints_stored[DRIVER] = StoredEndpoint(
        name=DRIVER,
        pools={NODE: ("cam-0", "cam-1", "cam-2")},
        evicting={NODE: ("cam-0", "cam-2")},
    )
    spoil(rows, True)
    devices = hosted(rows, policies=feed)
    manager = devices.manager
    await devices.restore()
    devices.manager.adopt({})
    async with following(devices):
        await asyncio.sleep(3600)
        assert not devices.holds_known.is_set()
        assert feed.held() == {}
        (status,) = manager.endpoint_statuses()
        assert status.state == "Waiting"
        assert status.reason == f"the devices that claims hold are unknown: {reason}"
        assert manager.waiting == status.reason
        assert manager.publication().pools == {}
        assert not manager.publication().complete

        spoil(rows, False)
        async with asyncio.timeout(1.5):
            await devices.holds_known.wait()
        assert feed.held().keys() >= {"cam-0", "cam-1"}
        assert manager.waiting is None
        assert manager.publication().held == {NODE}, "the names of its devices are known, too"
        manager.replaced(DRIVER, Inventory(devices=[Device(name="cam-3")]))
        await asyncio.sleep(60)
        assert {
            device.name: [(taint.key, taint.effect) for taint in device.taints]
            for device in manager.publication().pools[NODE].devices
        } == {
            "cam-0": [("drakit.dev/gone", "NoExecute")],
            "cam-1": [("drakit.dev/gone", "NoSchedule")],
            "cam-3": [],
        }
    message = "driver waits: the devices that claims hold are unknown"
    assert [record.message for record in caplog.records].count(message) == 1


@pytest.mark.looptime
@pytest.mark.parametrize(("spoil", "reason"), UNKNOWN)
async def test_what_claims_held_stays_held_while_it_is_unknown_later(spoil, reason):
    rows, feed = Rows(), PolicyFeed()
    devices = hosted(rows, policies=feed)
    await devices.restore()
    devices.manager.replaced(DRIVER, Inventory(devices=[Device(name="cam-0")]))
    async with following(devices):
        feed.prepared(CLAIM, "cam-2", DeviceOfClaims(claims=(CLAIM,)))
        await asyncio.sleep(2)
        spoil(rows, True)
        rows.revision.advance()
        await asyncio.sleep(3600)
        assert feed.held().keys() == {"cam-0", "cam-1", "cam-2", "no-such-pool/x"}
        assert devices.manager.waiting is None
        (status,) = devices.manager.endpoint_statuses()
        assert (status.state, reason in status.reason) == ("Running", False)
        spoil(rows, False)
        rows.held = {NODE: frozenset({"cam-2"})}
        await asyncio.sleep(6)
        assert feed.held().keys() == {"cam-2"}


@pytest.mark.looptime
@pytest.mark.parametrize("first", ["slices", "kubelet"])
async def test_nothing_is_removed_before_the_slices_are_listed_and_the_kubelet_knows_the_driver(
    first,
):
    server = FakeApiServer()
    server.store(f"/api/v1/nodes/{NODE}", {"metadata": {"uid": "node-uid"}})
    session, registered = asyncio.get_running_loop().create_future(), asyncio.Event()
    steps = [lambda: session.set_result(Link(server)), registered.set]
    devices = hosted(Rows(), session=session, registered=registered)
    await devices.restore()
    devices.manager.replaced(DRIVER, Inventory(devices=[Device(name="cam-0")]))
    async with following(devices, "slices"):
        for step in steps if first == "slices" else reversed(steps):
            assert not devices.manager.publication().complete
            await asyncio.sleep(100)
            assert not devices.manager.publication().complete
            step()
        await asyncio.sleep(1)
        assert devices.manager.publication().complete


async def test_a_driver_without_policies_does_not_wait():
    rows = Rows()
    rows.error = "no disk"
    devices = hosted(rows)
    await devices.restore()
    assert devices.holds_known.is_set()
    assert devices.manager.waiting is None


async def list_cameras(devices) -> None:
    """List two devices after a start."""
    await devices.restore()
    devices.manager.replaced(
        DRIVER, Inventory(devices=(Device(name="cam-0"), Device(name="cam-1")))
    )


@pytest.mark.looptime
async def test_a_device_whose_unprepare_does_not_end_is_tainted_until_it_does():
    rows = Rows()
    devices = hosted(rows)
    await list_cameras(devices)
    watching = asyncio.create_task(devices.parts()["unpreparing"]())
    await asyncio.sleep(6)
    rows.unpreparing = ("cam-0",)
    rows.revision.advance()
    await asyncio.sleep(6)
    assert tainted(devices) == set(), "a single check may have met a normal unprepare"
    await asyncio.sleep(5)
    assert tainted(devices) == {"cam-0"}
    rows.unpreparing = ()
    await asyncio.sleep(5)
    assert tainted(devices) == set()
    watching.cancel()


async def test_devices_that_an_earlier_process_began_to_unprepare_are_tainted_from_the_start():
    rows = Rows()
    rows.unpreparing = ("cam-0",)
    devices = hosted(rows)
    await list_cameras(devices)
    assert tainted(devices) == {"cam-0"}


async def test_all_devices_that_are_rejected_are_counted_and_not_the_named_ones_alone():
    metrics = Metrics()
    devices = hosted(Rows(), metrics=metrics)
    bad = [Device(name=f"No_Name_{number}") for number in range(150)]
    devices.manager.replaced(DRIVER, Inventory(devices=bad))
    await devices.measure()
    assert gauge(metrics, "drakit_rejected_devices") == 150


async def test_devices_are_counted_by_state():
    metrics, rows = Metrics(), Rows()
    devices = hosted(rows, metrics=metrics)
    cameras = [Device(name=f"cam-{number}") for number in range(3)]
    spare = Device(name="spare", taints=(Taint(key="lab.example.com/spare", effect="NoSchedule"),))
    devices.manager.replaced(DRIVER, Inventory(devices=[*cameras, spare]))
    await devices.measure()

    def count(pool: str) -> dict[str, float | None]:
        return {
            state: gauge(metrics, "drakit_devices", pool=pool, state=state)
            for state in DEVICE_STATES
        }

    assert count(NODE) == {"free": 1, "allocated": 2, "tainted": 1, "unhealthy": 0, "gone": 0}
    removed = "no-such-pool"
    assert count(removed) == {"free": 0, "allocated": 0, "tainted": 0, "unhealthy": 0, "gone": 1}
    rows.held = {}
    await devices.measure()
    assert set(count(removed).values()) == {None}


@pytest.mark.parametrize(
    ("health", "expected"),
    [
        pytest.param(True, {"drakit.dev/unhealthy"}, id="that-knows-health-are-adopted"),
        pytest.param(False, set(), id="that-does-not-report-health-are-not"),
    ],
)
async def test_health_taints_of_a_driver(health: bool, expected: set[str]):
    devices = hosted(Rows(), health=health)
    devices.manager.adopt({(NODE, "cam-0"): {("drakit.dev/unhealthy", "NoSchedule"): 5}})
    devices.manager.replaced(DRIVER, Inventory(devices=(Device(name="cam-0"),)))
    (device,) = devices.manager.publication().pools[NODE].devices
    assert {taint.key for taint in device.taints} == expected


async def written(*notes: tuple[str, str], last: str) -> list[str]:
    """Emit notes of sources until the last one is written; return the written ones."""
    written: list[str] = []

    class Session:
        async def create(self, path, body, *, timeout_seconds=None):
            if "first" in body["note"]:
                raise ValueError("not of the API server")
            written.append(body["note"])

    session = asyncio.get_running_loop().create_future()
    session.set_result(Session())
    events = NodeEvents(NODE, session)
    for note, source in notes:
        events.emit(reason="BackendRefused", action="Connect", note=note, source=source)
    run = asyncio.create_task(events.run())
    async with asyncio.timeout(5):
        while last not in written:
            await asyncio.sleep(0.001)
    run.cancel()
    return written


async def test_an_event_that_cannot_be_written_does_not_end_the_others():
    notes = (("the first", ""), ("device usb-\udcff is not published", ""))
    shown = "device usb-\\udcff is not published"
    assert await written(*notes, last=shown) == [shown]


async def test_the_flood_of_one_driver_silences_no_other():
    """The directory of backends reports on the drivers of all backends."""
    flood = [(f"it reports the name {n}", "rude") for n in range(100)]
    assert len(await written(*flood, ("refused", "polite"), last="refused")) < 20
