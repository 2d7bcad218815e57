"""
If something cannot be read, it is unknown: published devices stay, tainted, and new ones wait.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drakit import DriverError
from drakit_drivers.hostdev.host import Host, Scan
from tests.fakes.hostdev import Labeled, Rig, taints
from tests.fakes.sysfs import FakeHost, as_policies, policy, unreadable

TTY = policy("tty", "/dev/ttyUSB*", onVanish="Evict")
ZRAM = policy("block", "/dev/zram*", onVanish="Evict")
POLICIES = {"serial": TTY, "zram": ZRAM}

UNREADABLE = {"hostdev.drakit.dev/unreadable": "NoSchedule"}


@pytest.fixture
def rig(host: FakeHost) -> Rig:
    """Two adapters and two zram devices; a claim holds the first of each."""
    host.adapter("1", "ttyUSB0", serial="A1")
    host.adapter("2", "ttyUSB1", serial="B2")
    for index in range(2):
        host.block(f"virtual/block/zram{index}", f"253:{index}", node=True)
    host.udev_entry("c188:0", "S:serial/by-id/a1")
    host.link("serial/by-id/a1", "../../ttyUSB0")
    host.write(host.sys / "class/tty/console", active="ttyS0")
    return Rig(host, POLICIES)


A1, B2, C3 = (f"serial-0403-6001-{serial}-i0" for serial in ("a1", "b2", "c3"))
USB = "devices/pci0000:00/0000:00:14.0/usb1/1-1"


@pytest.mark.parametrize(
    ("path", "tainted"),
    [
        pytest.param("sys/class/tty", {A1, B2}, id="listing-of-a-subsystem"),
        pytest.param("sys/class", {A1, B2, "zram-zram0", "zram-zram1"}, id="all-of-sysfs"),
        pytest.param(f"sys/{USB}/1-1:1.0/ttyUSB0/tty/ttyUSB0/uevent", {A1}, id="uevent"),
        pytest.param(f"sys/{USB}/serial", {A1}, id="attribute-of-a-parent"),
        pytest.param(f"sys/{USB}/1-1:1.0/bInterfaceNumber", {A1}, id="attribute-of-an-interface"),
        pytest.param("udev/data/c188:0", {A1}, id="udev"),
        pytest.param("dev/ttyUSB0", {A1}, id="device-node"),
        pytest.param("sys/class/tty/console/active", {A1, B2}, id="consoles"),
        pytest.param("mountinfo", {"zram-zram0", "zram-zram1"}, id="mounts"),
        pytest.param("swaps", {"zram-zram0", "zram-zram1"}, id="swap-areas"),
        pytest.param("sys/devices/virtual/block/zram0/holders", {"zram-zram0"}, id="holders"),
    ],
)
async def test_published_devices_stay_with_a_taint_and_new_ones_wait(host, rig, path, tainted):
    before = await rig.devices()
    await rig.prepare(A1)
    await rig.prepare("zram-zram0")
    host.adapter("3", "ttyUSB2", serial="C3")
    host.block("virtual/block/zram2", "253:2", node=True)
    new = {C3: B2, "zram-zram2": "zram-zram1"}
    with unreadable(host.mountinfo.parent / path):
        for _ in range(2):
            inventory = await rig.scan()
            found = {each.name: each for each in inventory.devices}
            expected = {name for name, neighbor in new.items() if neighbor not in tainted}
            assert found.keys() == before.keys() | expected
            assert inventory.withdrawn == ()
            for name, device in found.items():
                assert taints(device) == (UNREADABLE if name in tainted else {})
                assert device.health is not None
                assert device.health.status == ("unknown" if name in tainted else "healthy")
        for name in tainted & {A1, "zram-zram0"}:
            with pytest.raises(DriverError, match="cannot"):
                await rig.prepare(name)
    found = await rig.devices()
    assert found.keys() == before.keys() | new.keys()
    assert not any(device.taints for device in found.values())


async def test_the_reason_is_reported_in_the_policy_and_in_the_log_once(host, rig, caplog):
    await rig.scan()
    with unreadable(host.sys / "class" / "tty"):
        for _ in range(2):
            problems = {each.policy: each.problem for each in (await rig.scan()).policies}
    assert problems["zram"] == ""
    assert "devices of tty cannot be checked" in problems["serial"]
    assert "class/tty cannot be read: Too many levels of symbolic links" in problems["serial"]
    assert caplog.messages.count("devices cannot be checked") == 1
    assert {each.policy: each.problem for each in (await rig.scan()).policies}["serial"] == ""


async def test_a_device_that_is_known_to_be_unplugged_goes_while_others_are_unknown(host, rig):
    await rig.scan()
    await rig.prepare(A1)
    await rig.prepare("zram-zram0")
    host.unplug(host.sys / "devices/virtual/block/zram0")
    with unreadable(host.sys / "class" / "tty"):
        inventory = await rig.scan()
    assert {each.name for each in inventory.devices} == {A1, B2, "zram-zram1"}
    assert inventory.withdrawn == (), "zram0 is gone, and its pods are evicted"


async def test_a_device_whose_node_is_removed_first_is_evicted_once_it_is_gone(host, rig):
    """A scan can see the moment between: a withdrawn device would never be evicted."""
    await rig.scan()
    await rig.prepare(A1)
    (host.dev / "ttyUSB0").unlink()
    inventory = await rig.scan()
    assert inventory.withdrawn == ()
    assert {each.name: taints(each) for each in inventory.devices}[A1] == UNREADABLE
    host.unplug(host.sys / USB)
    inventory = await rig.scan()
    assert A1 not in {each.name for each in inventory.devices}
    assert inventory.withdrawn == ()


async def test_an_unknown_node_keeps_its_name_beside_an_equal_one(host):
    """Otherwise the claim that holds the first node would get the second one."""
    first, _ = (
        host.device(f"platform/gpio/gpiochip{n}", f"254:{n}", subsystem="gpio", node=True)
        for n in range(2)
    )
    host.parent("platform/gpio", "platform")
    rig = Rig(host, {"gpio": policy("gpio", "/dev/gpiochip*")})
    before = await rig.paths()
    held, _ = before
    await rig.prepare(held)
    with unreadable(first / "uevent"):
        assert await rig.paths() == before
        assert not any(each.prepare_again for each in (await rig.devices()).values())


async def test_other_hardware_in_the_place_of_an_unknown_device_replaces_it(host, rig):
    """The held one may still be there under another number, so its pods are not evicted."""
    await rig.scan()
    await rig.prepare(A1)
    host.unplug(host.sys / USB)
    host.adapter("3", "ttyUSB0", serial="C3")
    other = host.adapter("4", "ttyUSB4", serial="D4")
    with unreadable(other / "serial"):
        inventory = await rig.scan()
    assert {each.name for each in inventory.devices} == {B2, "zram-zram0", "zram-zram1"}
    assert inventory.withdrawn == (A1,)
    assert {each.device for each in inventory.rejected} == {"/dev/ttyUSB0"}


async def test_after_a_restart_a_held_device_that_is_unknown_is_not_evicted(host, rig):
    await rig.scan()
    await rig.prepare(A1)
    await rig.prepare("zram-zram0")
    rig.restart(POLICIES)
    with unreadable(host.sys / "class" / "tty"), unreadable(host.mountinfo):
        inventory = await rig.scan()
    assert {each.name for each in inventory.devices} == {"zram-zram0"}, "it is there, and held"
    assert inventory.withdrawn == (A1,)
    reasons = {each.device: each.reason for each in inventory.rejected}
    assert reasons == {"/dev/zram1": "Unreadable"}


async def test_a_policy_that_is_removed_withdraws_free_devices_even_if_they_are_unknown(host, rig):
    await rig.scan()
    await rig.prepare(A1)
    with unreadable(host.sys / "class" / "tty"):
        rig.apply({"zram": ZRAM})
        inventory = await rig.scan()
    assert {each.name for each in inventory.devices} == {"zram-zram0", "zram-zram1"}
    assert inventory.withdrawn == (A1,)


async def test_rules_that_are_known_count_more_than_those_that_are_unknown(host):
    host.device("virtual/tty/tty7", "4:7", subsystem="tty", node=True)
    allowed = {"all": policy("tty", "/dev/tty[0-9]", allow={"dangerous": "Always"})}
    rig = Rig(host, allowed, allowDangerous=True)
    assert list(await rig.devices()) == ["all-tty7"]
    with unreadable(host.sys / "class/tty/tty7/uevent"):
        assert list(await rig.devices()) == ["all-tty7"]
        rig.apply({"all": policy("tty", "/dev/tty[0-9]")})
        inventory = await rig.scan()
    assert inventory.devices == []
    assert [each.reason for each in inventory.rejected] == ["Dangerous"]


@pytest.mark.looptime
async def test_while_labels_are_unknown_nothing_changes_and_nothing_is_prepared(host, looptime):
    host.adapter("1", "ttyUSB0", serial="A1")
    host.adapter("2", "ttyUSB1", serial="B2")
    rig = Rig(host, {"serial": TTY}, Labeled(labels=None))
    assert set(await rig.devices()) == {A1, B2}
    stream = rig.driver.devices()
    await anext(stream)
    rig.apply({"serial": TTY | {"nodeSelector": {"matchLabels": {"lab": "yes"}}}})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(20):
            await anext(stream)
    with pytest.raises(DriverError, match="labels of node node-1 are unknown"):
        await rig.prepare(A1)
    await stream.aclose()
    rig.node.labels = {"lab": "no"}
    assert await rig.devices() == {}


# ------------------------------------------------------------ errors of the kernel


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let the process open no file: EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def scan(host: FakeHost, before: Scan | None = None) -> Scan:
    return Host(host.config({})).scan(as_policies(POLICIES), before=before)


def test_without_file_descriptors_everything_stays_as_it_was(host, rig):
    before = scan(host)
    assert len(before.selection.devices) == 4
    with no_descriptors():
        first = scan(host)
        during = scan(host, before)
    assert first.selection.devices == {}, "nothing was published before"
    assert during.selection.devices.keys() == before.selection.devices.keys()
    for published in during.selection.devices.values():
        assert published.doubt is not None
        assert published.doubt.kind == "unreadable"
        assert "Too many open files" in published.doubt.message
    after = scan(host, during)
    assert after.selection.devices == before.selection.devices


def test_a_device_that_is_replaced_during_the_scan_is_not_a_mixture_of_both(host):
    first = host.adapter("1", "ttyUSB0", serial="A1")

    def replaces(path: str) -> bool:
        """Replace the device after its number was read and before its attributes are."""
        host.unplug(first)
        host.adapter("2", "ttyUSB0", serial="B2")
        return True

    assert host.sysfs().devices("tty", wanted=replaces).devices == ()
    assert [each.usb.serial for each in host.find("tty").values() if each.usb] == ["B2"]


# ------------------------------------------------------------ what a prepare reads


def test_a_claim_of_eight_devices_is_prepared_from_one_scan_of_their_subsystem(host, monkeypatch):
    for index in range(8):
        host.adapter(f"3.{index}", f"ttyUSB{index}", serial=f"S{index}")
        host.device(f"virtual/misc/m{index}", f"10:{index}", node=True)
    misc = policy("misc", "/dev/m*", allow={"dangerous": "Always"})
    policies = as_policies({"serial": TTY, "misc": misc, "tty": policy("tty", "/dev/ttyACM*")})
    made = Host(host.config({}))
    before = made.scan(policies)
    read: list[str] = []

    def counted(path: Path) -> bytes:
        read.append(str(path).removeprefix(str(host.sys)))
        with path.open("rb") as file:
            return file.read()

    monkeypatch.setattr(Path, "read_bytes", counted)
    names = [name for name in before.selection.devices if name.startswith("serial-")]
    assert len(names) == 8
    found = made.scan(policies, before=before, only=names).selection
    assert found.devices.keys() == set(names)
    assert not any("misc" in path for path in read)
    uevents = [path for path in read if path.startswith("/class/tty/") and "uevent" in path]
    assert len(uevents) == len(set(uevents)) == 8, "each device once"


@pytest.mark.parametrize("names", [{"serial-unknown"}, {"misc-kvm"}], ids=["unknown", "other"])
def test_a_prepare_of_a_device_that_no_scan_has_found_reads_what_all_policies_need(host, names):
    host.adapter("1", "ttyUSB0", serial="A1")
    host.device("virtual/misc/kvm", "10:232", node=True)
    policies = as_policies({"serial": TTY, "misc": policy("misc", "/dev/kvm")})
    found = Host(host.config({})).scan(policies, only=names).selection
    assert set(found.devices) == {A1, "misc-kvm"}


def test_the_rules_of_a_prepare_are_those_of_a_scan(host):
    """The other policy and the twin count, although only one device is prepared."""
    host.adapter("1", "ttyUSB0", serial="A1")
    host.adapter("2", "ttyUSB1", serial="A1")
    policies = as_policies({"older": policy("tty", "/dev/ttyUSB1"), "serial": TTY})
    made = Host(host.config({}))
    before = made.scan(policies)
    for name in [*before.selection.devices]:
        found = made.scan(policies, before=before, only=[name]).selection
        assert found.find(name) == before.selection.find(name)
