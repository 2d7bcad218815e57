"""The device numbers that claims hold, and the identity of the hardware behind them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from drakit import DeviceNode
from drakit_nodeplugin.state import device_numbers as numbers_module
from drakit_nodeplugin.state.device_numbers import (
    MAX_FORMER_NODES,
    HeldNumbers,
    with_former_nodes,
)
from drakit_nodeplugin.state.records import StoredNode
from tests.fakes.claims import DRIVER, FakeClaims, FakeDevices, claim_body, reference
from tests.unit.claims.conftest import Plugin, errors, forget, stopped

A, B, C = "uid-a", "uid-b", "uid-c"


def node(minor: int, identity: str | None, *, path: str = "/dev/ttyUSB0") -> DeviceNode:
    return DeviceNode(path=path, type="c", major=188, minor=minor, identity=identity)


@pytest.fixture
async def plugin(start, claims, devices):
    """Two serial adapters, one claim each, and a third that gets the number of the first."""
    devices.nodes = {
        "adapter-a": (node(0, "usb:a"),),
        "adapter-b": (node(1, "usb:b"),),
        "adapter-c": (node(0, "usb:c"),),
    }
    claims.store(claim_body(A, "adapter-a"), claim_body(B, "adapter-b"), claim_body(C, "adapter-c"))
    return await start()


async def nodes_of(plugin, uid: str) -> list[tuple[int, str, bool]]:
    claim = (await plugin.checkpoint.find([uid]))[uid]
    return [(n.minor, n.identity, n.current) for d in claim.devices for n in d.nodes]


REFUSED = (
    f"claim lab/claim-{C}, request main: device adapter-c has device node c 188:0, which is still "
    f"held for other hardware, device adapter-a of claim lab/claim-{A}; this pod starts "
    f"automatically once the pod that uses lab/claim-{A} is gone"
)


async def test_a_number_that_is_held_for_other_hardware_is_refused_until_it_is_released(
    plugin, devices
):
    assert await errors(plugin, A) == [None]
    assert await errors(plugin, C, B) == [REFUSED, None], "the rest of the batch goes on"
    assert devices.prepared == {"adapter-a": A, "adapter-b": B}, "the refused claim is undone"
    assert await plugin.states() == {A: "prepared", B: "prepared"}
    assert plugin.files() == {f"{DRIVER}-claim_{uid}.json" for uid in (A, B)}
    assert plugin.answers[C].reason == "NumberTaken"

    await plugin.unprepare(reference(A))
    assert await errors(plugin, C) == [None]


async def test_a_claim_that_is_being_unprepared_holds_its_number(plugin, devices):
    assert await errors(plugin, A) == [None]
    devices.reason_away = stopped
    assert await plugin.unprepare(reference(A)) == {A: None}
    devices.reason_away = None
    assert await errors(plugin, C) == [REFUSED]


@pytest.mark.parametrize("side_effects", [True, False])
async def test_of_two_claims_of_one_batch_one_is_refused(plugin, devices, side_effects):
    devices.traits = replace(devices.traits, side_effects=side_effects)
    first, second = await errors(plugin, A, C)
    assert [error is None for error in (first, second)].count(True) == 1
    assert len(await plugin.states()) == 1


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        pytest.param(
            {}, "devices adapter-c and adapter-a with different", id="of-two-devices-of-a-claim"
        ),
        pytest.param(
            {"adapter-a": (node(0, "usb:a"), node(0, "usb:b", path="/dev/ttyUSB1"))},
            "device adapter-a twice, with different",
            id="of-one-device",
        ),
    ],
)
async def test_nodes_that_contradict_each_other_are_refused(plugin, claims, devices, nodes, text):
    devices.nodes |= nodes
    claims.store(claim_body("uid-both", "adapter-a", "adapter-c"))
    assert await errors(plugin, "uid-both") == [
        "claim lab/claim-uid-both, request main: the driver returned device node c 188:0 for "
        f"{text} hardware identities; the kubelet retries; if the error persists, report a bug in "
        "the driver"
    ]
    assert devices.prepared == {}


@pytest.mark.parametrize("identity", [None, "the one card"])
async def test_nodes_of_equal_identity_or_of_none_are_shared(plugin, claims, devices, identity):
    """Two functions of one group with a common node, as vfio/vfio or nvidiactl."""
    shared = node(7, identity, path="/dev/vfio/vfio")
    devices.nodes = {
        "adapter-a": (node(0, "usb:a"), shared),
        "adapter-b": (node(1, "usb:b"), shared),
        "adapter-c": (node(2, "usb:c"), shared),
    }
    assert await errors(plugin, A, B) == [None, None]
    assert await errors(plugin, C) == [None]


async def test_block_and_character_devices_have_separate_numbers(plugin, devices):
    devices.nodes["adapter-c"] = (replace(node(0, "disk:c"), type="b"),)
    assert await errors(plugin, A, C) == [None, None]


async def test_admin_access_neither_holds_a_number_nor_is_refused(plugin, claims, devices):
    admin = {"device": "adapter-a", "adminAccess": True}
    claims.store(claim_body("uid-admin", admin), claim_body("uid-watch", admin))
    assert await errors(plugin, "uid-admin", C, "uid-watch") == [None, None, None]


async def test_numbers_of_an_earlier_boot_count_for_nothing(start, plugin, devices):
    """The kernel numbers devices again at each boot: two claims may have each other's numbers."""
    assert await errors(plugin, A, B) == [None, None]
    plugin = await start(boot_id="boot-2")
    devices.nodes |= {"adapter-a": (node(1, "usb:a"),), "adapter-b": (node(0, "usb:b"),)}
    assert await errors(plugin, A) == [None]
    assert await nodes_of(plugin, A) == [(1, "usb:a", True)], "no container has the old one"
    assert await errors(plugin, B) == [None]


async def test_a_holder_in_another_namespace_is_named_by_its_uid(plugin, claims):
    body = claim_body("uid-other", "adapter-a")
    body["metadata"]["namespace"] = "secret"
    claims.bodies[body["metadata"]["name"]] = body
    other = replace(reference("uid-other"), namespace="secret")
    assert (await plugin.prepare(other))["uid-other"].error is None
    (error,) = await errors(plugin, C)
    assert "device adapter-a of claim uid-other in another namespace; this pod" in error


async def test_the_number_of_a_claim_that_an_admin_has_forgotten_is_free(plugin):
    assert await errors(plugin, A) == [None]
    await forget(plugin, A)
    assert await errors(plugin, C) == [None]


async def test_a_write_that_fails_holds_nothing(plugin, monkeypatch):
    checkpoint = plugin.checkpoint
    transaction = checkpoint._transaction  # the database rolls back what it has done

    def failing(database, work, **uids):
        def then_fail(database):
            work(database)
            raise ValueError("no space")

        return transaction(database, then_fail, **uids)

    devices = plugin.devices
    devices.traits = replace(devices.traits, side_effects=False)
    monkeypatch.setattr(checkpoint, "_transaction", failing)
    (error,) = await errors(plugin, A)
    assert "no space" in error
    monkeypatch.undo()
    assert await errors(plugin, C) == [None]


# ------------------------------------------------------------ two drivers


def plugin_of(folder, *, claims, numbers, devices) -> Plugin:
    return Plugin(folder, boot_id="boot-1", claims=claims, devices=devices, numbers=numbers)


@pytest.fixture
async def drivers(tmp_path):
    """Two drivers of one node plugin."""
    numbers, claims = HeldNumbers(), FakeClaims()
    claims.store(*(claim_body(f"uid-{n}", f"dev-{n}") for n in range(4)))
    plugins = []
    for name in ("serial.example.com", "modem.example.com"):
        folder = tmp_path / name
        folder.mkdir()
        plugin = plugin_of(folder, claims=claims, numbers=numbers, devices=FakeDevices())
        await plugin.checkpoint.open()
        plugins.append(plugin)
    yield plugins
    for plugin in plugins:
        await plugin.checkpoint.close()


async def test_an_identity_is_one_of_its_driver(drivers):
    """A driver that repeats the identity of another one gets no share of its device."""
    serial, modem = drivers
    serial.devices.nodes["dev-0"] = (node(0, "usb:a"),)
    modem.devices.nodes["dev-1"] = (node(0, "usb:a"),)
    assert await errors(serial, "uid-0") == [None]
    (refused,) = await errors(modem, "uid-1")
    assert refused is not None
    assert "is still held for other hardware, device dev-0" in refused


async def test_nothing_gets_a_number_before_the_rows_of_all_drivers_are_read(drivers, monkeypatch):
    """At a start, one driver is served before the checkpoint of another one is open."""
    monkeypatch.setattr(numbers_module, "READ_SECONDS", 0.0)
    serial, modem = drivers
    serial.devices.nodes["dev-0"] = (node(0, "usb:a"),)
    modem.devices.nodes |= {"dev-1": (node(0, "modem:b"),), "dev-2": (node(1, "modem:c"),)}
    assert await errors(serial, "uid-0") == [None]
    assert await errors(modem, "uid-2") == [None]
    numbers = HeldNumbers()
    numbers.expect({"serial.example.com", "modem.example.com"})
    restarted = []
    for old in (modem, serial):
        await old.checkpoint.close()
        folder = old.cdi.parent
        new = plugin_of(folder, claims=old.claims, numbers=numbers, devices=old.devices)
        restarted.append(new)
    modem, serial = restarted
    try:
        await modem.checkpoint.open()
        (refused,) = await errors(modem, "uid-1")
        assert refused is not None
        assert "the checkpoint of driver serial.example.com has not been read" in refused
        again = await modem.queue.prepare_again(reference("uid-2"))
        assert again.error is None, "a held number is kept"
        await serial.checkpoint.open()
        (refused,) = await errors(modem, "uid-1")
        assert refused is not None
        assert "is still held for other hardware, device dev-0" in refused
    finally:
        await modem.checkpoint.close()
        await serial.checkpoint.close()


async def test_a_claim_waits_for_the_rows_of_a_driver_that_starts(drivers):
    _, modem = drivers
    modem.devices.nodes["dev-1"] = (node(0, "modem:b"),)
    numbers = modem.checkpoint._numbers
    numbers.expect({"late.example.com"})
    call = asyncio.create_task(errors(modem, "uid-1"))
    await asyncio.sleep(0.1)
    assert not call.done()
    numbers.load("late.example.com", ())
    assert await call == [None]


# ------------------------------------------------------------ second prepares


async def test_two_devices_that_swap_their_numbers_get_new_rows_and_files(plugin, devices):
    assert await errors(plugin, A, B) == [None, None]
    devices.nodes |= {"adapter-a": (node(1, "usb:a"),), "adapter-b": (node(0, "usb:b"),)}
    first = await plugin.queue.prepare_again(reference(A))
    second = await plugin.queue.prepare_again(reference(B))
    assert first.renumbered == ("the device number of adapter-a changed from c 188:0 to c 188:1",)
    assert second.renumbered == ("the device number of adapter-b changed from c 188:1 to c 188:0",)
    assert devices.unprepares == 0
    assert await nodes_of(plugin, A) == [(1, "usb:a", True), (0, "usb:a", False)]
    for uid, minor in ((A, 1), (B, 0)):
        assert f'"minor": {minor}' in (plugin.cdi / f"{DRIVER}-claim_{uid}.json").read_text()

    again = await plugin.queue.prepare_again(reference(A))
    assert (again.error, again.renumbered) == (None, ())


async def test_hardware_that_gets_another_identity_with_its_number_is_reported(plugin, devices):
    """A device changes its ids when its firmware is loaded."""
    assert await errors(plugin, A, B) == [None, None]
    devices.nodes["adapter-a"] = (node(5, "usb:a-loaded"),)
    answer = await plugin.queue.prepare_again(reference(A))
    assert answer.renumbered == ("the device number of adapter-a changed from c 188:0 to c 188:5",)
    assert await nodes_of(plugin, A) == [(5, "usb:a-loaded", True), (0, "usb:a", False)]


async def test_only_numbers_that_changed_are_reported_of_hardware_with_several_nodes(
    plugin, devices
):
    """A serial adapter with two ports."""
    first, second = node(0, "usb:a"), node(4, "usb:a", path="/dev/ttyUSB1")
    devices.nodes["adapter-a"] = (first, second)
    assert await errors(plugin, A) == [None]
    assert (await plugin.queue.prepare_again(reference(A))).renumbered == ()
    devices.nodes["adapter-a"] = (first, replace(second, minor=5))
    assert (await plugin.queue.prepare_again(reference(A))).renumbered == (
        "the device number of adapter-a changed from c 188:4 to c 188:5",
    )


async def test_a_number_that_running_containers_may_use_is_held_until_the_release(plugin, devices):
    assert await errors(plugin, A) == [None]
    devices.nodes["adapter-a"] = (node(5, "usb:a"),)
    assert (await plugin.queue.prepare_again(reference(A))).error is None
    assert await errors(plugin, C) == [REFUSED]
    await plugin.unprepare(reference(A))
    assert await errors(plugin, C) == [None]


async def test_a_second_prepare_is_never_refused_because_of_a_number(plugin, devices):
    """The device has that number: a refusal would only keep a wrong CDI file."""
    assert await errors(plugin, A, B) == [None, None]
    devices.nodes["adapter-b"] = (node(0, "usb:b"),)
    assert (await plugin.queue.prepare_again(reference(B))).error is None
    assert await nodes_of(plugin, B) == [(0, "usb:b", True), (1, "usb:b", False)]


async def test_a_second_prepare_that_fails_changes_nothing(plugin, devices):
    assert await errors(plugin, A) == [None]
    before = (await plugin.checkpoint.find([A]))[A]
    devices.failing = {"adapter-a"}
    answer = await plugin.queue.prepare_again(reference(A))
    assert "adapter-a is broken" in answer.error
    assert (await plugin.checkpoint.find([A]))[A] == before
    assert devices.unprepares == 0


async def test_a_claim_that_is_not_prepared_needs_no_second_prepare(start, plugin, devices):
    assert (await plugin.queue.prepare_again(reference(A))).error is None
    assert await errors(plugin, A) == [None]
    plugin = await start(boot_id="boot-2")
    assert (await plugin.queue.prepare_again(reference(A))).error is None
    assert devices.prepares == 1, "after a reboot, the kubelet asks"


async def test_a_second_prepare_without_work_is_no_success_of_the_claim(plugin, devices):
    """An Event would say that the claim is prepared now."""
    devices.failing = {"adapter-a"}
    (error,) = await errors(plugin, A)
    assert error is not None
    assert (await plugin.queue.prepare_again(reference(A))).devices == ()
    assert plugin.answers[A].error == error


async def test_an_outdated_file_is_replaced_at_the_start(start, plugin, devices):
    """A crash between the row and the file."""
    assert await errors(plugin, A, B) == [None, None]
    path = plugin.cdi / f"{DRIVER}-claim_{A}.json"
    old = path.read_text()
    devices.nodes["adapter-a"] = (node(5, "usb:a"),)
    await plugin.queue.prepare_again(reference(A))
    new = path.read_text()
    path.write_text(old)
    plugin = await start()
    assert await plugin.restorer.restore() == 0
    assert await plugin.restorer.restore(compare=True) == 1
    assert path.read_text() == new != old


async def test_a_file_that_cannot_be_read_keeps_no_other_from_being_replaced(plugin):
    assert await errors(plugin, A, B) == [None, None]
    broken, outdated = (plugin.cdi / f"{DRIVER}-claim_{uid}.json" for uid in (A, B))
    text = outdated.read_text()
    broken.unlink()
    broken.mkdir()
    outdated.write_text("{}")
    assert await plugin.restorer.restore(compare=True) == 1
    assert outdated.read_text() == text


def test_former_numbers_of_a_device_are_bounded_and_the_latest_are_kept():
    nodes: tuple[StoredNode, ...] = ()
    for minor in range(200):
        now = StoredNode(type="c", major=188, minor=minor, identity="usb:a")
        nodes = with_former_nodes((now,), nodes)
    assert [n.minor for n in nodes] == [*range(199, 198 - MAX_FORMER_NODES, -1)]
    assert [n.current for n in nodes] == [True] + [False] * MAX_FORMER_NODES
