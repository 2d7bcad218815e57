"""Devices that claims hold keep their hardware, whatever cables, the kernel and policies do."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

import pytest

from drakit import DriverError, Edits, HeldDevice
from drakit_drivers.hostdev import HostDevices
from tests.fakes.hostdev import ONE, TWO, Rig, taints
from tests.fakes.sysfs import policy
from tests.fakes.usb_descriptors import FTDI
from tests.unit.devices.conftest import Node, pass_time

TTY = policy("tty", "/dev/ttyUSB*")
EVICTING = TTY | {"onVanish": "Evict"}

RENUMBERED = "hostdev.drakit.dev/renumbered"
SHARED = "hostdev.drakit.dev/shared"


def number(edits: Edits) -> tuple[int | None, int | None]:
    (node,) = edits.device_nodes
    return node.major, node.minor


SERIALS = pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param("A1", "B2", id="serial-numbers"),
        pytest.param("A1", "A1", id="twins"),
        pytest.param(None, None, id="no-serial-numbers"),
    ],
)


# ------------------------------------------------------------ numbers


async def holding(host) -> tuple[Rig, str]:
    """A driver whose only adapter a claim holds, and the adapter's name."""
    rig = Rig(host, {"serial": TTY})
    (held,) = await rig.paths()
    await rig.prepare(held)
    return rig, held


@SERIALS
async def test_another_adapter_with_the_number_of_a_held_one_is_not_published(host, first, second):
    a = host.adapter("1", "ttyUSB0", serial=first)
    rig = Rig(host, {"serial": TTY})
    (held,) = await rig.paths()
    assert number(await rig.prepare(held)) == (188, 0)
    host.unplug(a)
    host.adapter("2", "ttyUSB0", serial=second)
    for _ in range(2):
        inventory = await rig.scan()
        assert inventory.devices == []
        assert inventory.withdrawn == (), "it is unplugged"
        (rejected,) = inventory.rejected
        assert (rejected.device, rejected.reason) == ("/dev/ttyUSB0", "InUse")
        assert "number 188:0, which claim default/one still holds" in rejected.message
        assert "delete the pod" in rejected.message
        rig.restart({"serial": TTY})
    with pytest.raises(DriverError, match=r"cannot be allocated|no longer on node"):
        await rig.prepare(held)
    rig.holds.clear()
    assert list((await rig.paths()).values()) == ["/dev/ttyUSB0"]


async def test_a_container_keeps_a_former_number_until_its_claim_is_released(host):
    a = host.adapter("1", "ttyUSB0", serial="A1")
    rig, held = await holding(host)
    host.unplug(a)
    host.adapter("1", "ttyUSB1", serial="A1")
    await rig.scan()
    assert number(await rig.prepare(held)) == (188, 1)
    host.adapter("2", "ttyUSB0", serial="B2")
    assert list(await rig.paths()) == [held]
    assert (await rig.rejected())["/dev/ttyUSB0"][0] == "InUse"
    rig.holds.clear()
    assert list((await rig.paths()).values()) == ["/dev/ttyUSB0", "/dev/ttyUSB1"]


@SERIALS
async def test_two_held_adapters_that_swap_numbers_are_tainted_and_prepared_again(
    host, first, second
):
    plugged = [host.adapter("1.1", "ttyUSB0", serial=first)]
    plugged += [host.adapter("1.2", "ttyUSB1", serial=second)]
    rig = Rig(host, {"serial": EVICTING})
    a, b = sorted((await rig.paths()).items(), key=lambda item: str(item[1]))
    await rig.prepare(a[0], ONE)
    await rig.prepare(b[0], TWO)
    assert not any(each.prepare_again or each.taints for each in (await rig.devices()).values())
    for each in plugged:
        host.unplug(each)
    assert (await rig.scan()).devices == []
    host.adapter("1.2", "ttyUSB0", serial=second)
    host.adapter("1.1", "ttyUSB1", serial=first)

    found = await rig.devices()
    assert found.keys() == {a[0], b[0]}
    for name, claim in ((a[0], ONE), (b[0], TWO)):
        assert found[name].prepare_again
        assert taints(found[name]) == {RENUMBERED: "NoExecute"}
        health = found[name].health
        assert health is not None
        assert health.status == "unhealthy"
        assert f"containers of claim {claim} may have the old number" in health.message
        assert "cannot open the new one; Kubernetes evicts the pod" in health.message
    assert number(await rig.prepare(a[0], ONE)) == (188, 1)
    assert number(await rig.prepare(b[0], TWO)) == (188, 0)

    # The claims have the new numbers, and containers may have the old ones.
    found = await rig.devices()
    assert {name: each.prepare_again for name, each in found.items()} == {a[0]: False, b[0]: False}
    assert all(taints(each) == {RENUMBERED: "NoExecute"} for each in found.values())
    del rig.holds[a[0]]
    assert list(await rig.devices()) == [b[0]], "its number may still be used by the other claim"
    rig.holds.clear()
    assert not any(each.taints for each in (await rig.devices()).values())


async def test_a_number_that_returns_is_no_longer_outdated(host):
    a = host.adapter("1", "ttyUSB0")
    rig, held = await holding(host)
    host.unplug(a)
    again = host.adapter("1", "ttyUSB1")
    device = (await rig.devices())[held]
    assert device.prepare_again
    assert taints(device) == {RENUMBERED: "NoSchedule"}, "only a policy that evicts evicts pods"
    host.unplug(again)
    host.adapter("1", "ttyUSB0")
    device = (await rig.devices())[held]
    assert (device.prepare_again, device.taints) == (False, ())


async def test_free_copies_of_a_renumbered_device_can_be_claimed(host):
    a = host.adapter("1", "ttyUSB0")
    rig = Rig(host, {"serial": TTY | {"sharing": {"mode": "Users", "users": 2}}})
    held, free = await rig.paths()
    await rig.prepare(held)
    host.unplug(a)
    host.adapter("1", "ttyUSB1")
    found = await rig.devices()
    assert taints(found[held]) == {RENUMBERED: "NoSchedule"}
    assert taints(found[free]) == {}
    assert number(await rig.prepare(free, TWO)) == (188, 1)
    host.adapter("2", "ttyUSB0")
    assert {name: each.attributes["minor"] for name, each in (await rig.devices()).items()} == {
        held: 1,
        free: 1,
    }


async def test_after_a_reboot_claims_hold_hardware_and_no_numbers(host):
    for port, serial in (("1", "A1"), ("2", "A1"), ("3", "C3")):
        host.adapter(port, f"ttyUSB{port}", serial=serial)
    rig = Rig(host, {"serial": EVICTING})
    before = {each.attributes["usbPath"]: each.name for each in (await rig.scan()).devices}
    held, twin, other = before.values()
    await rig.prepare(held, ONE)
    await rig.prepare(other, TWO)
    for name, device in rig.holds.items():
        nodes = tuple(replace(node, major=None, minor=None) for node in device.nodes)
        rig.holds[name] = replace(device, nodes=nodes)
    for port in "123":
        host.unplug(host.sys / f"devices/pci0000:00/0000:00:14.0/usb1/1-{port}")
    rig.restart({"serial": EVICTING})
    host.adapter("2", "ttyUSB1", serial="A1")
    host.adapter("1", "ttyUSB3", serial="A1")
    host.adapter("3", "ttyUSB2", serial="C3")
    found = {name: each for name, each in (await rig.devices()).items() if name != twin}
    assert found.keys() >= {held, other}, "the free twin may have another name"
    assert not any(each.taints or each.prepare_again for each in found.values())
    assert number(await rig.prepare(held, ONE)) == (188, 3)


# ------------------------------------------------------------ names


@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
async def test_a_twin_never_takes_the_name_of_a_held_device(host, restarts):
    a = host.adapter("1", "ttyUSB0", serial="A1")
    policies = {"serial": TTY}
    rig = Rig(host, policies)
    (held,) = await rig.paths()
    assert held == "serial-0403-6001-a1-i0"
    await rig.prepare(held)
    host.unplug(a)
    host.adapter("2", "ttyUSB1", serial="A1")
    if restarts:
        rig.restart(policies)
    (twin,) = await rig.paths()
    assert twin != held
    with pytest.raises(DriverError, match=f"device {held} is no longer on node"):
        await rig.prepare(held)
    if restarts:
        rig.restart(policies)
    host.adapter("1", "ttyUSB0", serial="A1")
    assert await rig.paths() == {held: "/dev/ttyUSB0", twin: "/dev/ttyUSB1"}
    rig.holds.clear()
    assert await rig.paths() == {held: "/dev/ttyUSB0", twin: "/dev/ttyUSB1"}


async def test_held_twins_keep_their_names_over_a_restart(host):
    """Without the other one, each twin would have the name without a hash."""
    one = host.adapter("1", "ttyUSB0", serial="A1")
    host.adapter("2", "ttyUSB1", serial="A1")
    rig = Rig(host, {"serial": TTY})
    before = await rig.paths()
    for name, claim in zip(before, (ONE, TWO), strict=True):
        await rig.prepare(name, claim)
    host.unplug(one)
    rig.restart({"serial": TTY})
    left = {name: path for name, path in before.items() if path == "/dev/ttyUSB1"}
    assert await rig.paths() == left
    host.adapter("1", "ttyUSB0", serial="A1")
    rig.restart({"serial": TTY})
    assert await rig.paths() == before


async def test_claims_without_identities_hold_what_the_driver_published_under_the_name(host):
    """As after an upgrade, or with a rebuilt checkpoint."""
    a = host.adapter("1", "ttyUSB0", serial="A1")
    rig = Rig(host, {"serial": TTY})
    (held,) = await rig.paths()
    rig.holds[held] = HeldDevice(claims=(ONE,))
    await rig.scan()
    host.unplug(a)
    host.adapter("2", "ttyUSB1", serial="A1")
    for _ in range(2):
        inventory = await rig.scan()
        assert [device.name for device in inventory.devices] != [held]
        assert inventory.withdrawn == ()
    rig.apply({"renamed": TTY})
    host.adapter("1", "ttyUSB0", serial="A1")
    inventory = await rig.scan()
    assert inventory.withdrawn == (held,)
    assert [device.attributes["path"] for device in inventory.devices] == ["/dev/ttyUSB1"]


async def test_a_device_of_which_nothing_is_known_is_withdrawn_and_never_evicted(host):
    rig = Rig(host, {"serial": TTY})
    rig.holds["serial-0403-6001-a1-i0"] = HeldDevice(claims=(ONE,))
    assert (await rig.scan()).withdrawn == ("serial-0403-6001-a1-i0",)


# ------------------------------------------------------------ policies


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"renamed": TTY}, id="renamed"),
        pytest.param({"a": TTY, "b": EVICTING}, id="replaced-by-two"),
        pytest.param(
            {"serial": TTY | {"sharing": {"mode": "Users", "users": 2}}}, id="shared-by-users"
        ),
        pytest.param({"serial": TTY | {"group": "Unit"}}, id="grouped"),
        pytest.param({"serial": policy("tty", "/dev/ttyACM*"), "b": TTY}, id="matches-others"),
    ],
)
@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
async def test_a_held_device_is_never_free_under_a_second_name(host, changed, restarts):
    host.adapter("1", "ttyUSB0", serial="A1")
    host.adapter("2", "ttyUSB1", serial="B2")
    rig = Rig(host, {"serial": TTY})
    held, other = await rig.paths()
    await rig.prepare(held)
    rig.restart(changed) if restarts else rig.apply(changed)
    inventory = await rig.scan()
    assert {each.attributes["path"] for each in inventory.devices} == {"/dev/ttyUSB1"}
    assert other not in {each.name for each in inventory.devices}
    assert inventory.withdrawn == (held,)
    (rejected,) = inventory.rejected
    assert (rejected.device, rejected.reason) == ("/dev/ttyUSB0", "InUse")
    assert f"claim default/one holds it as device {held}" in rejected.message
    rig.holds.clear()
    inventory = await rig.scan()
    assert {each.attributes["path"] for each in inventory.devices} == {
        "/dev/ttyUSB0",
        "/dev/ttyUSB1",
    }
    assert inventory.withdrawn == ()


async def test_a_held_unit_is_not_free_as_nodes(host):
    for index in range(2):
        host.device(f"pci0000:00/0000:00:1f.3/sound/card0/controlC{index}", f"116:{index}",
                    subsystem="sound", devname=f"snd/controlC{index}", node=True)  # fmt: skip
    host.parent("pci0000:00/0000:00:1f.3", "pci")
    spec = policy("sound", "/dev/snd/*")
    rig = Rig(host, {"sound": spec | {"group": "Unit"}})
    (held,) = await rig.devices()
    await rig.prepare(held)
    assert len(rig.holds[held].nodes) == 2
    rig.apply({"sound": spec})
    inventory = await rig.scan()
    assert inventory.devices == []
    assert inventory.withdrawn == (held,)
    assert {each.device for each in inventory.rejected} == {
        "/dev/snd/controlC0",
        "/dev/snd/controlC1",
    }


async def test_an_older_policy_does_not_take_a_held_device(host):
    host.adapter("1", "ttyUSB0", serial="A1")
    rig = Rig(host, {"older": policy("tty", "/dev/none"), "serial": TTY})
    (held,) = await rig.paths()
    await rig.prepare(held)
    rig.restart({"older": TTY, "serial": TTY})
    assert await rig.paths() == {held: "/dev/ttyUSB0"}
    rig.holds.clear()
    rig.restart({"older": TTY, "serial": TTY})
    assert await rig.paths() == {"older-0403-6001-a1-i0": "/dev/ttyUSB0"}


@pytest.mark.looptime
@pytest.mark.parametrize("known", [False, True], ids=["unknown-hardware", "older-policy"])
async def test_a_device_that_waits_for_a_claim_is_published_soon_after_its_release(
    host, looptime, known
):
    host.adapter("1", "ttyUSB0", serial="A1")
    rig = Rig(host, {"older": policy("tty", "/dev/none"), "serial": TTY})
    (held,) = await rig.paths()
    if known:
        await rig.prepare(held)
        rig.apply({"older": TTY, "serial": TTY})
    else:
        rig.holds[held] = HeldDevice(claims=(ONE,))
        host.adapter("2", "ttyUSB1", serial="A1")
        rig.restart({"serial": TTY})
    async with aclosing(rig.driver.devices()) as stream:
        assert [each.name for each in (await anext(stream)).devices] == [held] * known
        rig.holds.clear()
        names = {each.name for each in (await anext(stream)).devices}
    assert names == {"older-0403-6001-a1-i0"} if known else len(names) == 2
    assert looptime <= 2


async def test_fewer_users_leave_the_held_copies_and_no_free_ones(host):
    host.device("virtual/misc/kvm", "10:232", node=True)
    host.device("virtual/misc/fuse", "10:229", node=True)

    def spec(users: int) -> dict[str, dict]:
        sharing = {"mode": "Users", "users": users}
        return {name: policy("misc", f"/dev/{name}", sharing=sharing) for name in ("kvm", "fuse")}

    rig = Rig(host, spec(4))
    await rig.scan()
    await rig.prepare("kvm-1", ONE)
    await rig.prepare("kvm-3", TWO)
    rig.apply(spec(2))
    inventory = await rig.scan()
    assert {each.name for each in inventory.devices} == {"kvm-1", "fuse-0", "fuse-1"}
    assert inventory.withdrawn == ("kvm-3",)
    assert {each.policy: each.in_use for each in inventory.policies} == {"kvm": 1, "fuse": 0}
    rig.apply(spec(8))
    assert len(await rig.devices()) == 16, "more users leave every name as it is"
    assert not any(each.in_use for each in (await rig.scan()).policies)


@pytest.mark.looptime
@pytest.mark.parametrize("mode", ["Users", "Capacity"])
async def test_the_outcome_of_fewer_users_counts_the_claims_until_they_are_released(
    host, looptime, mode
):
    for name, numbers in (("kvm", "10:232"), ("fuse", "10:229")):
        host.device(f"virtual/misc/{name}", numbers, node=True)

    def spec(users: int) -> dict[str, dict]:
        sharing = {"mode": mode, "users": users}
        return {name: policy("misc", f"/dev/{name}", sharing=sharing) for name in ("kvm", "fuse")}

    rig = Rig(host, spec(2))
    await rig.scan()
    if mode == "Users":
        await rig.prepare("kvm-0", ONE)
        await rig.prepare("kvm-1", TWO)
        last = {"kvm-1": rig.holds["kvm-1"]}
    else:
        share = {"users": "1"}
        rig.holds["kvm-kvm"] = HeldDevice(claims=(ONE, TWO), shares=(share, share))
        last = {"kvm-kvm": HeldDevice(claims=(TWO,), shares=(share,))}
    rig.apply(spec(1))
    async with aclosing(rig.driver.devices()) as stream:
        first = await anext(stream)
        assert {each.policy: each.in_use for each in first.policies} == {"kvm": 1, "fuse": 0}
        rig.holds.clear()
        rig.holds.update({} if mode == "Users" else last)
        second = await anext(stream)
    assert not any(each.in_use for each in second.policies)
    assert looptime <= 3


async def test_a_device_with_capacity_is_tainted_while_a_claim_holds_one_of_its_copies(host):
    host.device("virtual/misc/kvm", "10:232", node=True)
    host.device("virtual/misc/fuse", "10:229", node=True)
    spec = policy("misc", "/dev/kvm", "/dev/fuse")
    rig = Rig(host, {"a": spec | {"sharing": {"mode": "Users", "users": 2}}})
    await rig.scan()
    await rig.prepare("a-kvm-1")
    rig.apply({"a": spec | {"sharing": {"mode": "Capacity", "users": 2}}})
    inventory = await rig.scan()
    assert {each.name: taints(each) for each in inventory.devices} == {
        "a-kvm": {SHARED: "NoSchedule"},
        "a-fuse": {},
    }
    assert inventory.withdrawn == ()
    fallback = {each.name: taints(each) for each in inventory.fallback or ()}
    assert fallback == {"a-kvm-0": {}, "a-kvm-1": {}, "a-fuse-0": {}, "a-fuse-1": {}}


async def test_labels_that_no_longer_match_withdraw_free_devices_and_keep_held_ones(host):
    host.adapter("1", "ttyUSB0", serial="A1")
    host.adapter("2", "ttyUSB1", serial="B2")
    rig = Rig(host, {"serial": EVICTING | {"nodeSelector": {"matchLabels": {"lab": "yes"}}}})
    rig.node.labels = {"lab": "yes"}
    held, _ = await rig.paths()
    await rig.prepare(held)
    rig.node.labels = {}
    for _ in range(2):
        inventory = await rig.scan()
        assert (inventory.devices, inventory.withdrawn) == ([], (held,))
        rig.restart({"serial": EVICTING | {"nodeSelector": {"matchLabels": {"lab": "yes"}}}})
    rig.node.labels = {"lab": "yes"}
    assert held in await rig.paths()


async def test_a_held_device_that_the_host_uses_now_is_withdrawn(host):
    for index in (0, 1):
        host.block(f"virtual/block/zram{index}", f"253:{index}", node=True)
    rig = Rig(host, {"zram": policy("block", "/dev/zram*", onVanish="Evict")})
    await rig.scan()
    await rig.prepare("zram-zram0")
    host.mount("253:0", "/mnt", source="/dev/zram0")
    inventory = await rig.scan()
    assert [each.name for each in inventory.devices] == ["zram-zram1"]
    assert inventory.withdrawn == ("zram-zram0",)
    host.unplug(host.sys / "devices/virtual/block/zram0")
    assert (await rig.scan()).withdrawn == (), "it is gone"


# ------------------------------------------------------------ identities


async def test_an_equal_node_beside_a_held_one_stays_free(host):
    host.parent("platform/gpio", "platform")
    for n in range(2):
        host.device(f"platform/gpio/gpiochip{n}", f"254:{n}", subsystem="gpio", node=True)
    rig = Rig(host, {"gpio": policy("gpio", "/dev/gpiochip*")})
    before = await rig.paths()
    held, free = before
    await rig.prepare(held)
    assert await rig.paths() == before
    assert not any(each.taints for each in (await rig.devices()).values())
    assert number(await rig.prepare(free, TWO)) == (254, 1)


async def test_the_sensors_of_one_chip_have_different_identities(host):
    chip, chip_place = "platform/fe804000.i2c/i2c-1/1-006a", "platform-fe804000.i2c-i2c-006a"
    host.parent("platform/fe804000.i2c", "platform")
    host.parent(chip, "i2c")
    for n, sensor in enumerate(("accel", "gyro")):
        host.device(
            f"{chip}/iio:device{n}", f"240:{n}", subsystem="iio", node=True, name=f"lsm_{sensor}"
        )
    rig = Rig(host, {"iio": policy("iio", "/dev/iio:device*")})
    nodes = [(await rig.prepare(name)).device_nodes[0] for name in await rig.paths()]
    assert [node.identity for node in nodes] == [
        f"iio {chip_place} - iio:device lsm_{sensor} iio:device-{chip_place}"
        for sensor in ("accel", "gyro")
    ]


async def test_an_identity_does_not_depend_on_the_progress_of_udev(host):
    """A held device would be free under another name until udev has processed it."""
    a = host.adapter("1", "ttyUSB0")
    host.udev_entry("c188:0", "E:ID_USB_SERIAL_SHORT=X9")
    rig, held = await holding(host)
    host.unplug(a)
    host.adapter("1", "ttyUSB1")
    assert await rig.paths() == {held: "/dev/ttyUSB1"}


async def test_the_links_and_copies_of_a_device_have_one_identity_whatever_the_policy(host):
    host.adapter("1", "ttyUSB0", serial="A1")
    host.udev_entry("c188:0", "S:serial/by-id/usb-a1")
    host.link("serial/by-id/usb-a1", "../../ttyUSB0")
    rig = Rig(host, {"a": TTY | {"container": {"byIdLinks": "Always"}}})
    (name,) = await rig.paths()
    nodes = (await rig.prepare(name)).device_nodes
    assert [node.path for node in nodes] == ["/dev/ttyUSB0", "/dev/serial/by-id/usb-a1"]
    identities = {node.identity for node in nodes}
    rig = Rig(host, {"b": TTY | {"group": "Unit", "sharing": {"mode": "Users", "users": 2}}})
    for name in await rig.paths():
        identities |= {node.identity for node in (await rig.prepare(name)).device_nodes}
    (identity,) = identities
    assert identity == "tty pci-0000:00:14.0-usbv2-0:1 i0 ttyUSB - 0403-6001-A1"


async def test_the_nodes_of_a_camera_have_different_identities_that_do_not_have_their_numbers(host):
    usb = "pci0000:00/0000:00:14.0/usb1/1-4"
    host.adapter("4", "ttyUSB0", serial="A1")
    for kernel, index in (("video7", "0"), ("video3", "1")):
        host.device(f"{usb}/1-4:1.0/video4linux/{kernel}", f"81:{kernel[5:]}",
                    subsystem="video4linux", index=index, node=True)  # fmt: skip
    rig = Rig(host, {"camera": policy("video4linux", "/dev/video*", group="Unit")})
    (name,) = await rig.devices()
    nodes = (await rig.prepare(name)).device_nodes
    assert {node.path: node.identity for node in nodes} == {
        "/dev/video3": "video4linux pci-0000:00:14.0-usbv2-0:4 i0 video 1 0403-6001-A1",
        "/dev/video7": "video4linux pci-0000:00:14.0-usbv2-0:4 i0 video 0 0403-6001-A1",
    }


async def test_an_identity_has_at_most_256_printable_characters_and_tells_long_ones_apart(host):
    for index in range(2):
        host.adapter(str(index), f"ttyUSB{index}", serial="\x1bx" * 150 + str(index))
    rig = Rig(host, {"serial": TTY})
    identities = {
        (await rig.prepare(name, claim)).device_nodes[0].identity or ""
        for name, claim in zip(await rig.paths(), (ONE, TWO), strict=True)
    }
    assert len(identities) == 2
    assert all(each.isprintable() and len(each) <= 256 for each in identities)
    assert all(each.startswith("tty ") for each in identities)


async def test_the_capacity_of_one_user_has_no_steps(host):
    """The API server rejects a range of which one step exceeds the capacity."""
    host.device("virtual/misc/kvm", "10:232", node=True)
    one = policy("misc", "/dev/kvm", sharing={"mode": "Capacity", "users": 1})
    (device,) = (await Rig(host, {"kvm": one}).scan()).devices
    assert device.capacity == {"users": "1"}
    assert device.allow_multiple_allocations


@pytest.mark.looptime
@pytest.mark.parametrize(
    "after",
    [
        pytest.param({"mode": "Capacity", "users": 2}, id="fewer-users"),
        pytest.param({"mode": "Capacity", "users": 1}, id="one-user"),
        pytest.param({"mode": "Users", "users": 3}, id="other-sharing"),
        pytest.param({}, id="exclusive"),
        pytest.param(None, id="deleted"),
    ],
)
async def test_a_policy_offers_fewer_users_of_a_device(host, after: dict | None):
    host.device("virtual/misc/kvm", "10:232", node=True)
    kvm = {"kvm": policy("misc", "/dev/kvm", sharing={"mode": "Capacity", "users": 4})}
    rig = Rig(host, kvm)
    async with Node().plugin(HostDevices.name) as manager:
        manager.replaced(HostDevices.name, await rig.scan())
        await pass_time(5)
        sharing = {} if after is None else {"kvm": kvm["kvm"] | {"sharing": after}}
        rig.apply({name: {k: v for k, v in each.items() if v} for name, each in sharing.items()})
        listed = await rig.scan()
        manager.replaced(HostDevices.name, listed)
        await pass_time(5)
        (pool,) = manager.publication().pools.values()
        assert [each.name for each in pool.devices] == [each.name for each in listed.devices]
        assert not manager.rejected


# ------------------------------------------------------------ changed sharing

WHOLE: dict[str, object] = {}
SHARES, FEWER = ({"sharing": {"mode": "Capacity", "users": users}} for users in (4, 1))
ENTRIES = {"sharing": {"mode": "Users", "users": 4}}
UNIT = {"group": "Unit"}


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        pytest.param(SHARES, WHOLE, "which holds a share, and", id="capacity-to-exclusive"),
        pytest.param(SHARES, FEWER, "hold more of it than sharing.users", id="fewer-users"),
        pytest.param(SHARES, ENTRIES, "in its former form", id="capacity-to-users"),
        pytest.param(SHARES, SHARES | UNIT, "in its former form", id="group-of-shares"),
        pytest.param(ENTRIES, WHOLE, "in its former form", id="users-to-exclusive"),
        pytest.param(ENTRIES, SHARES, "which holds it as device", id="users-to-capacity"),
        pytest.param(WHOLE, SHARES, "which holds the whole device", id="exclusive-to-capacity"),
        pytest.param(WHOLE, ENTRIES, "in its former form", id="exclusive-to-users"),
        pytest.param(WHOLE, UNIT, "in its former form", id="group"),
    ],
)
@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
async def test_a_device_whose_sharing_changes_is_free_once_the_last_claim_has_released_it(
    host, before, after, reason, restarts
):
    held_port, free_port = ("/dev/ttyUSB0", "/dev/ttyUSB1")
    for index in range(2):
        host.adapter(str(index), f"ttyUSB{index}", serial=f"A{index}")
    rig = Rig(host, {"serial": TTY | before})
    names = [name for name, path in (await rig.paths()).items() if path == held_port]
    await rig.prepare(names[0], ONE)
    if before is SHARES:
        await rig.prepare(names[0], TWO)
    rig.apply({"serial": TTY | after})
    await rig.scan()
    if restarts:
        rig.restart({"serial": TTY | after})
    inventory = await rig.scan()
    free = {str(each.attributes["path"]) for each in inventory.devices if not each.taints}
    assert free == {free_port}
    (outcome,) = inventory.policies
    # Without a memory, the driver cannot tell entries of before from those of a cluster that does
    # not support DRAConsumableCapacity.
    if not (restarts and before is ENTRIES and after is SHARES):
        assert outcome.in_use == 1
        assert "claim default/one" in outcome.in_use_by
        assert reason in outcome.in_use_by
    rig.holds.clear()
    inventory = await rig.scan()
    assert {str(each.attributes["path"]) for each in inventory.devices} == {held_port, free_port}
    assert not any(each.taints for each in inventory.devices)
    assert inventory.policies[0].in_use == 0


async def test_a_change_that_leaves_room_for_the_held_shares_taints_nothing(host):
    for index in range(2):
        host.adapter(str(index), f"ttyUSB{index}", serial=f"A{index}")
    rig = Rig(host, {"serial": TTY | SHARES})
    (held, _) = await rig.devices()
    await rig.prepare(held)
    for users in (8, 2, 1):
        rig.apply({"serial": TTY | {"sharing": {"mode": "Capacity", "users": users}}})
        inventory = await rig.scan()
        assert not any(each.taints for each in inventory.devices)
        assert inventory.policies[0].in_use == 0


async def test_held_shares_are_quantities(host):
    """The API server writes 1000 as 1k."""
    host.device("virtual/misc/kvm", "10:232", node=True)
    kvm = policy("misc", "/dev/kvm", sharing={"mode": "Capacity", "users": 1024})
    rig = Rig(host, {"kvm": kvm})
    rig.holds["kvm-kvm"] = HeldDevice(claims=(ONE,), shares=({"users": "1k"},))
    assert taints((await rig.devices())["kvm-kvm"]) == {}
    rig.apply({"kvm": kvm | {"sharing": {"mode": "Capacity", "users": 999}}})
    assert taints((await rig.devices())["kvm-kvm"]) == {SHARED: "NoSchedule"}


# ------------------------------------------------------------ new ids

CONTROLLER = "pci0000:00/0000:00:14.0"


def plug(host, port: str, number: str, ids: str, serial: str | None = None):
    """Plug in a USB device without a driver; the kernel gives it another number each time."""
    host.parent(CONTROLLER, "pci")
    host.parent(f"{CONTROLLER}/usb1", "usb", idVendor="1d6b", idProduct="2", speed="480")
    made = host.usb_device(f"{CONTROLLER}/usb1/1-{port}", f"189:{number}", FTDI, node=True)
    (made / "serial").unlink()
    vendor, product = ids.split(":")
    host.write(made, idVendor=vendor, idProduct=product, **({"serial": serial} if serial else {}))
    return made


def usb(*ids: str, **fields) -> dict:
    pairs = [each.split(":") for each in ids]
    return {
        "match": [
            {"subsystem": "usb", "usb": {"vendorID": vendor, "productID": product}}
            for vendor, product in pairs
        ],
        **fields,
    }


EMPTY, LOADED = "1a6e:089a", "18d1:9302"
BOTH = usb(EMPTY, LOADED)
BY_PORT = BOTH | {"identity": "Port"}


@pytest.mark.parametrize(
    "spec", [BOTH, BY_PORT, BOTH | {"group": "Unit"}, BOTH | {"onVanish": "Evict"}]
)
@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
async def test_hardware_that_gets_new_ids_at_its_port_stays_with_its_claim(host, spec, restarts):
    """As a Coral does when its first pod loads the firmware; its twin is free before and after."""
    first, twin = plug(host, "2", "3", EMPTY), plug(host, "3", "4", EMPTY)
    rig = Rig(host, {"coral": spec, "coral-2": usb("ffff:0001")})
    held, free = await rig.paths()
    await rig.prepare(held)
    host.unplug(first)
    host.unplug(twin)
    plug(host, "2", "5", LOADED)
    plug(host, "3", "6", LOADED)
    if restarts:
        rig.restart({"coral": spec, "coral-2": usb("ffff:0001")})
    inventory = await rig.scan()
    (mine, other) = sorted(inventory.devices, key=lambda each: each.attributes["minor"])
    assert (mine.name, mine.attributes["minor"]) == (held, 5)
    assert mine.prepare_again
    assert taints(mine) == {RENUMBERED: "NoExecute" if "onVanish" in spec else "NoSchedule"}
    assert (other.attributes["minor"], other.taints) == (6, ())
    assert (other.name == free) == (spec is BY_PORT)
    assert inventory.withdrawn == ()
    assert number(await rig.prepare(held)) == (189, 5)
    device = (await rig.devices())[held]
    assert not device.prepare_again
    assert RENUMBERED in taints(device), "containers can have the old number"
    rig.holds.clear()
    after = await rig.devices()
    assert not any(each.taints for each in after.values())
    assert (held in after) == (spec is BY_PORT)


@pytest.mark.parametrize(
    ("spec", "ids", "serials"),
    [
        pytest.param(usb(EMPTY), LOADED, (None, None), id="the-policy-names-only-the-old-ids"),
        pytest.param(BOTH, LOADED, ("A1", "B2"), id="another-serial-number"),
        pytest.param(BOTH, EMPTY, ("A1", "B2"), id="another-device-of-the-model"),
    ],
)
async def test_other_hardware_at_the_port_of_a_held_device_is_not_the_held_device(
    host, spec, ids, serials
):
    first = plug(host, "2", "3", EMPTY, serials[0])
    plug(host, "3", "4", EMPTY, "C3")
    rig = Rig(host, {"coral": spec, "other": usb(LOADED)})
    held, twin = await rig.paths()
    await rig.prepare(held)
    host.unplug(first)
    plug(host, "2", "5", ids, serials[1])
    inventory = await rig.scan()
    assert held not in {each.name for each in inventory.devices}
    assert inventory.withdrawn == (), "it is gone"
    assert twin in {each.name for each in inventory.devices}
    with pytest.raises(DriverError, match=f"device {held} is no longer on node"):
        await rig.prepare(held)


async def test_a_policy_by_port_takes_any_matching_device_at_the_port_for_the_held_one(host):
    """A boot loader can report another serial number than the program."""
    first = plug(host, "2", "3", EMPTY, "A1")
    rig = Rig(host, {"dfu": BY_PORT, "other": usb("ffff:0001")})
    (held,) = await rig.paths()
    assert held == "dfu-usb-pci-0000-00-14-0-usbv2-0-2"
    await rig.prepare(held)
    host.unplug(first)
    plug(host, "2", "3", LOADED, "B2")
    plug(host, "3", "5", LOADED, "A1")
    found = await rig.devices()
    assert {name: each.attributes["minor"] for name, each in found.items()} == {
        held: 3,
        "dfu-usb-pci-0000-00-14-0-usbv2-0-3": 5,
    }
    assert not any(each.taints for each in found.values())


async def test_a_device_whose_boot_loader_has_another_node_stays_with_its_claim(host):
    """The program has a serial port, the boot loader only the node of the USB device."""
    app = host.adapter("2", "ttyUSB0", serial="A1")
    boot = usb("0483:df11")["match"]
    spec = {"match": [*policy("tty", "/dev/ttyUSB*")["match"], *boot], "identity": "Port"}
    rig = Rig(host, {"board": spec})
    (held,) = await rig.paths()
    await rig.prepare(held)
    host.unplug(app)
    plug(host, "2", "3", "0483:df11", "FFFF")
    assert await rig.paths() == {held: "/dev/bus/usb/001/004"}
    host.unplug(host.sys / f"devices/{CONTROLLER}/usb1/1-2")
    host.adapter("2", "ttyUSB0", serial="A1")
    device = (await rig.devices())[held]
    assert (device.attributes["path"], device.taints) == ("/dev/ttyUSB0", ())


def serial_ports(*ids: str) -> dict:
    return {"match": [{**each, "subsystem": "tty"} for each in usb(*ids)["match"]]}


async def test_another_node_of_a_device_by_port_is_not_the_held_one(host):
    host.adapter("1", "ttyUSB0", serial="A1")
    second = f"{CONTROLLER}/usb1/1-1/1-1:1.1"
    host.parent(second, "usb", bInterfaceNumber="01")
    host.device(f"{second}/ttyUSB1/tty/ttyUSB1", "188:1", subsystem="tty", node=True)
    rig = Rig(host, {"serial": TTY | {"identity": "Port"}})
    held, other = await rig.paths()
    await rig.prepare(held)
    host.unplug(host.sys / f"devices/{CONTROLLER}/usb1/1-1/1-1:1.0")
    assert await rig.paths() == {other: "/dev/ttyUSB1"}
    with pytest.raises(DriverError, match=f"device {held} is no longer on node"):
        await rig.prepare(held)


async def test_new_ids_that_another_claim_holds_stay_with_that_claim(host):
    """The policy names both pairs only after both claims have been prepared."""
    first, second = "0403:6001", "10c4:ea60"
    unplugged = host.adapter("1", "ttyUSB0")
    rig = Rig(host, {"serial": serial_ports(first)})
    (old,) = await rig.paths()
    await rig.prepare(old, ONE)
    host.unplug(unplugged)
    host.write(host.adapter("1", "ttyUSB1"), idVendor="10c4", idProduct="ea60")
    rig.apply({"serial": serial_ports(second)})
    (new,) = await rig.paths()
    await rig.prepare(new, TWO)
    rig.apply({"serial": serial_ports(first, second)})
    assert await rig.paths() == {new: "/dev/ttyUSB1"}
    with pytest.raises(DriverError, match=f"device {old} is no longer on node"):
        await rig.prepare(old, ONE)


@pytest.mark.parametrize(("before", "after"), [(EMPTY, LOADED), (LOADED, EMPTY)])
async def test_hardware_with_other_ids_after_a_reboot_keeps_the_name_of_its_claim(
    host, before, after
):
    """A warm reboot leaves the firmware of a device loaded, and a cold one does not."""
    made = plug(host, "2", "3", before)
    rig = Rig(host, {"coral": BOTH})
    (held,) = await rig.paths()
    await rig.prepare(held)
    host.unplug(made)
    plug(host, "2", "5", after)
    nodes = tuple(replace(node, major=None, minor=None) for node in rig.holds[held].nodes)
    rig.holds[held] = replace(rig.holds[held], nodes=nodes)
    rig.restart({"coral": BOTH})
    await rig.scan()
    await rig.prepare(held)
    for _ in range(2):
        inventory = await rig.scan()
        assert [each.name for each in inventory.devices] == [held]
        assert inventory.withdrawn == ()
        rig.restart({"coral": BOTH})
