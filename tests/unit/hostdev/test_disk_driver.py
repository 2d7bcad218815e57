"""hostdev with the disk helper: disks that are open elsewhere, and disks that must be wiped."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from drakit import AllocatedDevice, ClaimReference, DriverError, ReleasePendingError
from drakit_drivers.diskhelper.disk import DiskBusyError
from drakit_drivers.diskhelper.server import Server, Wipes
from drakit_drivers.hostdev import HostDevicesConfig, disk_driver
from drakit_drivers.hostdev.disk_driver import HostDisks
from tests.fakes.node import StaticNode
from tests.fakes.sysfs import FakeHost, policy

CLAIM = ClaimReference(namespace="default", name="c", uid="u")
WIPE = {"disks": policy("block", "/dev/sd*", onRelease="Wipe")}
KEEP = {"disks": policy("block", "/dev/sd*")}
SERIAL = "serial-one"
DEVICE = "disks-serial-one"


class Drives:
    """Disks whose wipe ends when the test permits it."""

    def __init__(self) -> None:
        self.busy = False
        self.done = True
        self.wiped: list[tuple[str, int]] = []

    def check(self, number: str, sequence: int) -> None:
        if self.busy:
            raise DiskBusyError("another program has it open exclusively")

    def wipe(self, number: str, sequence: int, *, progress: Callable[[str], None]) -> None:
        self.check(number, sequence)
        while not self.done:
            threading.Event().wait(0.01)
        self.wiped.append((number, sequence))


@pytest.fixture
def drives() -> Drives:
    return Drives()


@pytest.fixture
def helper(drives, tmp_path) -> Iterator[Path]:
    path = tmp_path / "helper.sock"
    server = Server(path, Wipes(drives), allowed_uid=os.geteuid())
    thread = threading.Thread(target=server.run)
    thread.start()
    yield path
    drives.done = True
    server.close()
    thread.join(10)


@pytest.fixture
def start(host, helper, tmp_path, monkeypatch):
    """Start the driver, as after a restart of the plugin, or of the node."""
    monkeypatch.setattr(disk_driver, "WIPE_SECONDS", 30)
    monkeypatch.setattr(disk_driver, "POLL_SECONDS", 0.01)

    def start(policies: dict, *, boot: str = "first") -> HostDisks:
        boot_id = tmp_path / "boot_id"
        boot_id.write_text(boot)
        monkeypatch.setattr(disk_driver, "BOOT_ID", boot_id)
        config = host.config(
            policies,
            allowDisks=True,
            diskHelper=str(helper),
            diskRecords=str(tmp_path / "data" / "disks.json"),
        )
        return outside_of_the_loop(config)

    return start


def outside_of_the_loop(config: HostDevicesConfig) -> HostDisks:
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(HostDisks, config, StaticNode(name="node-1")).result()


def plug_in(host: FakeHost, name: str = "sda", number: str = "8:0", *, sequence: int = 7) -> None:
    directory = host.block(f"pci0000:00/ata1/{name}", number, node=True)
    host.write(directory, diskseq=str(sequence))
    host.write(directory / "device", model="Disk")
    host.udev_entry(f"b{number}", "E:ID_SERIAL_SHORT=one")


def allocated() -> AllocatedDevice:
    return AllocatedDevice(name=DEVICE, pool="node-1", request="main")


def test_the_entry_point_leads_here():
    (entry,) = entry_points(group="drakit.drivers", name="hostdev-disks")
    assert entry.load() is HostDisks


async def test_a_disk_is_wiped_after_its_claim_and_only_once(host, start, drives):
    plug_in(host)
    driver = start(WIPE)
    await driver.prepare(CLAIM, allocated())
    await driver.reset(allocated())
    assert drives.wiped == [("8:0", 7)]
    await driver.reset(allocated())
    assert len(drives.wiped) == 1


async def test_a_disk_that_another_program_has_open_is_refused_and_never_wiped(host, start, drives):
    plug_in(host)
    driver = start(WIPE)
    drives.busy = True
    with pytest.raises(DriverError, match="another program has it open exclusively; free it on"):
        await driver.prepare(CLAIM, allocated())
    drives.busy = False
    await driver.reset(allocated())  # the rollback
    assert drives.wiped == []


async def test_a_disk_of_a_policy_that_keeps_content_is_not_wiped(host, start, drives):
    plug_in(host)
    driver = start(KEEP)
    await driver.prepare(CLAIM, allocated())
    await driver.reset(allocated())
    assert drives.wiped == []


async def test_the_pod_does_not_wait_for_a_long_wipe_and_the_device_does(
    host, start, drives, monkeypatch
):
    plug_in(host)
    driver = start(WIPE)
    await driver.prepare(CLAIM, allocated())
    drives.done = False
    monkeypatch.setattr(disk_driver, "WIPE_SECONDS", 0.1)
    with pytest.raises(ReleasePendingError, match="is being wiped"):
        await driver.reset(allocated())
    monkeypatch.setattr(disk_driver, "WIPE_SECONDS", 30)
    drives.done = True
    await driver.reset(allocated())
    assert len(drives.wiped) == 1


async def test_a_disk_is_wiped_although_its_policy_is_gone_and_the_plugin_restarted(
    host, start, drives
):
    plug_in(host)
    await start(WIPE).prepare(CLAIM, allocated())
    await start({}).reset(allocated())
    assert drives.wiped == [("8:0", 7)]


async def test_after_a_reboot_the_disk_is_wiped_under_its_new_number(host, start, drives):
    plug_in(host)
    await start(WIPE).prepare(CLAIM, allocated())
    host.udev_entry("b8:0", "E:ID_SERIAL_SHORT=another")
    plug_in(host, "sdb", "8:16", sequence=3)
    await start(WIPE, boot="second").reset(allocated())
    assert drives.wiped == [("8:16", 3)]


async def test_after_a_reboot_a_disk_that_is_unplugged_waits_for_its_return(
    host, start, drives, monkeypatch
):
    plug_in(host)
    await start(WIPE).prepare(CLAIM, allocated())
    host.udev_entry("b8:0", "E:ID_SERIAL_SHORT=another")
    driver = start(WIPE, boot="second")
    monkeypatch.setattr(disk_driver, "WIPE_SECONDS", 0.1)
    with pytest.raises(ReleasePendingError, match="connect it again to node node-1"):
        await driver.reset(allocated())
    monkeypatch.setattr(disk_driver, "WIPE_SECONDS", 30)
    host.udev_entry("b8:0", "E:ID_SERIAL_SHORT=one")
    await driver.reset(allocated())
    assert drives.wiped == [("8:0", 7)]


async def test_a_damaged_record_is_quarantined_and_a_disk_to_wipe_stays_reserved(
    host, start, drives, tmp_path
):
    plug_in(host)
    await start(WIPE).prepare(CLAIM, allocated())
    (tmp_path / "data" / "disks.json").write_text('{"disks-serial-one": 7}')
    driver = start(WIPE)
    with pytest.raises(ReleasePendingError, match="wipe the disk manually"):
        await driver.reset(allocated())
    assert (tmp_path / "data" / "disks.damaged").exists()
    assert drives.wiped == []


async def test_without_sequence_numbers_no_disk_is_prepared(host, start):
    plug_in(host)
    host.write(host.find("block")["sda"].directory, diskseq="")
    with pytest.raises(DriverError, match=r"Linux 5\.15"):
        await start(WIPE).prepare(CLAIM, allocated())


async def test_a_device_that_is_no_disk_needs_no_helper(host, start, helper):
    host.device("virtual/misc/kvm", "10:232", node=True)
    driver = start({"kvm": policy("misc", "/dev/kvm", sharing={"mode": "Users", "users": 2})})
    device = AllocatedDevice(name="kvm-0", pool="node-1", request="main")
    assert (await driver.prepare(CLAIM, device)).device_nodes
    await driver.reset(device)


def test_the_records_are_for_root_alone(tmp_path):
    record = disk_driver.DiskRecord(boot_id="b", number="8:0", sequence=1, identity=None)
    path = tmp_path / "data" / "disks.json"
    disk_driver.DiskRecords(path).add("a", record)
    assert path.stat().st_mode & 0o777 == 0o600
    assert disk_driver.DiskRecords(path).find("a") == record


def test_without_the_socket_the_driver_does_not_start(host):
    with pytest.raises(DriverError, match="needs diskHelper and diskRecords"):
        HostDisks(host.config({}), StaticNode(name="node-1"))
