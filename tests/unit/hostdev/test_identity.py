"""A disk keeps its identity and name under any number and path that the kernel assigns."""

from __future__ import annotations

import re

import pytest

from drakit import DriverError
from drakit_drivers.hostdev import HostDevices
from drakit_drivers.hostdev.identity import disk_identity
from tests.fakes.node import StaticNode
from tests.fakes.sysfs import FakeHost, policy
from tests.unit.hostdev.test_driver import CLAIM, allocated

WWN_A, WWN_B = "0x5000c500a1b2c3d4", "0x5000c500ffffffff"


@pytest.mark.parametrize(
    ("attributes", "properties", "identity"),
    [
        pytest.param(
            {"wwid": "eui.0025385b71b00fd1"}, {}, "eui-0025385b71b00fd1", id="nvme-with-eui"
        ),
        pytest.param(
            {"wwid": "nvme.144d-53-506e-00000001"}, {}, "nvme-144d-53-506e-00000001", id="nvme-old"
        ),
        pytest.param(
            {"device/wwid": "naa.5000C500A1B2C3D4"}, {}, "wwn-5000c500a1b2c3d4", id="scsi"
        ),
        pytest.param({}, {"ID_WWN": WWN_A}, "wwn-5000c500a1b2c3d4", id="sata-by-udev"),
        pytest.param(
            {},
            {"ID_WWN": "0x6000c29800000000", "ID_WWN_WITH_EXTENSION": "0x6000c298000000001234"},
            "wwn-6000c298000000001234",
            id="the-extension-tells-luns-apart",
        ),
        pytest.param({"serial": "vol-1"}, {}, "serial-vol-1", id="virtio"),
        pytest.param(
            {},
            {"ID_SERIAL": "Flash_0012-0:1", "ID_SERIAL_SHORT": "0012", "ID_INSTANCE": "0:1"},
            "serial-0012-0:1",
            id="slot-of-a-card-reader",
        ),
        pytest.param({}, {"ID_SERIAL": "QEMU_HARDDISK"}, None, id="a-model-is-no-identity"),
        pytest.param({}, {"ID_FS_UUID": "1-2-3"}, None, id="a-file-system-is-no-identity"),
        pytest.param({"serial": "0000 0000"}, {}, None, id="zeros-are-no-serial"),
        pytest.param({"wwid": "eui.0000000000000000"}, {}, None, id="zeros-are-no-eui"),
        pytest.param({"dm/uuid": "LVM-aBc"}, {"ID_WWN": WWN_A}, "dm-LVM-aBc", id="volume"),
        pytest.param({"md/metadata_version": "1.2"}, {"MD_UUID": "a:b"}, "md-a:b", id="array"),
        pytest.param({}, {"MD_UUID": "a:b"}, None, id="member-of-an-array"),
        pytest.param({}, {}, None, id="nothing"),
    ],
)
def test_identities(attributes, properties, identity):
    assert disk_identity("sda", attributes.get, properties) == identity


def test_the_areas_of_an_emmc_differ():
    names = ("mmcblk0", "mmcblk0boot0", "mmcblk0boot1")
    found = {disk_identity(name, {"device/cid": "1501"}.get, {}) for name in names}
    assert found == {"cid-1501", "cid-1501-boot0", "cid-1501-boot1"}


def disk(host: FakeHost, name: str, number: str, *properties: str, **attributes: str) -> None:
    """Plug in a blank disk that udev has processed."""
    if not (host.dev / name).exists():
        host.node(name, "b", number)
    host.block(f"virtual/block/{name}", number, devtype="disk", **attributes)
    link = next((p.partition("=")[2] for p in properties if p.startswith("E:ID_WWN=")), name)
    host.udev_entry(f"b{number}", "I:1", f"S:disk/by-id/wwn-{link}", *properties)


def made(host: FakeHost, *paths: str, **allow: bool) -> HostDevices:
    spec = policy("block", *(paths or ("/dev/disk/by-id/*",)), allow=allow)
    return HostDevices(host.config({"disk": spec}, allowDisks=True), StaticNode(name="node-1"))


async def published(driver: HostDevices) -> dict[str, object]:
    stream = driver.devices()
    found = {device.name: device.attributes["path"] for device in (await anext(stream)).devices}
    await stream.aclose()
    return found


async def test_a_by_id_policy_gives_the_same_disk_after_the_kernel_renumbered(host):
    disk(host, "sda", "8:0", f"E:ID_WWN={WWN_A}")
    disk(host, "sdb", "8:16", f"E:ID_WWN={WWN_B}")
    before = made(host)
    names = await published(before)
    assert names == {
        "disk-wwn-5000c500a1b2c3d4": "/dev/sda",
        "disk-wwn-5000c500ffffffff": "/dev/sdb",
    }
    # The node reboots, and the kernel finds the disks in another order.
    disk(host, "sda", "8:0", f"E:ID_WWN={WWN_B}")
    disk(host, "sdb", "8:16", f"E:ID_WWN={WWN_A}")
    edits = await made(host).prepare(CLAIM, allocated("disk-wwn-5000c500a1b2c3d4"))
    assert [(node.path, node.minor) for node in edits.device_nodes] == [("/dev/sdb", 16)]


async def test_another_disk_under_the_path_is_not_prepared_and_both_are_named(host):
    disk(host, "sda", "8:0", f"E:ID_WWN={WWN_A}")
    driver = made(host, "/dev/sd*")
    (name,) = await published(driver)
    disk(host, "sda", "8:0", f"E:ID_WWN={WWN_B}")
    with pytest.raises(DriverError) as caught:
        await driver.prepare(CLAIM, allocated(name))
    assert str(caught.value).startswith(
        "device disk-wwn-5000c500a1b2c3d4 is no longer on node node-1; "
        "/dev/sda is now disk-wwn-5000c500ffffffff; "
    )


async def test_a_disk_without_identity_is_refused_unless_the_policy_allows_it(host, caplog):
    caplog.set_level("INFO")
    disk(host, "sda", "8:0")
    assert await published(made(host, "/dev/sd*")) == {}
    (record,) = [record for record in caplog.records if hasattr(record, "reason")]
    assert "no WWN, EUI or serial number" in record.reason
    assert await published(made(host, "/dev/sd*", unstableIdentity=True)) == {
        "disk-sda": "/dev/sda"
    }


async def test_two_disks_with_one_identity_are_refused(host, caplog):
    """Refuse disks with the same identity: two paths to one disk, or one serial number for all
    disks of a vendor."""
    caplog.set_level("INFO")
    disk(host, "sda", "8:0", serial="1")
    disk(host, "sdb", "8:16", serial="1")
    for allow in ({}, {"unstableIdentity": True}):
        assert await published(made(host, "/dev/sda", **allow)) == {}
    assert "sdb has the same identity, serial-1" in {r.reason for r in caplog.records[-1:]}


async def test_the_paths_of_a_multipath_namespace_are_no_other_disks(host):
    disk(host, "nvme0n1", "259:0", wwid="eui.01")
    path = host.block("virtual/block/nvme0c0n1", "259:1", wwid="eui.01")
    (path / "dev").unlink()
    (path / "uevent").write_text("DEVTYPE=disk\n")
    assert set(await published(made(host, "/dev/nvme*"))) == {"disk-eui-01"}


async def test_identities_that_differ_in_case_alone_have_different_names(host):
    disk(host, "sda", "8:0", serial="aB")
    (upper,) = await published(made(host, "/dev/sd*"))
    disk(host, "sda", "8:0", serial="Ab")
    (lower,) = await published(made(host, "/dev/sd*"))
    assert upper != lower
    assert all(re.fullmatch(r"disk-serial-ab-[0-9a-f]{8}", name) for name in (upper, lower))


@pytest.mark.parametrize("serial", ["x" * 200, "WD WX12 ", "Ünï", "a/b:c"])
async def test_any_identity_becomes_a_label(host, serial):
    disk(host, "sda", "8:0", serial=serial)
    (name,) = await published(made(host, "/dev/sd*"))
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name)


async def test_a_partition_has_its_disks_identity_and_its_number(host):
    disk(host, "sda", "8:0", f"E:ID_WWN={WWN_A}")
    host.block("virtual/block/sda/sda2", "8:2", devtype="partition", node=True)
    host.write(host.sys / "devices/virtual/block/sda/sda2", partition="2")
    assert await published(made(host, "/dev/sda2", formatted=True)) == {
        "disk-wwn-5000c500a1b2c3d4-part2": "/dev/sda2"
    }


async def test_a_disk_that_was_formatted_since_is_not_prepared(host):
    disk(host, "sda", "8:0", f"E:ID_WWN={WWN_A}")
    driver = made(host)
    (name,) = await published(driver)
    disk(host, "sda", "8:0", f"E:ID_WWN={WWN_A}", "E:ID_FS_TYPE=zfs_member")
    with pytest.raises(DriverError, match=r"signature \(zfs_member\)"):
        await driver.prepare(CLAIM, allocated(name))


async def test_zram_and_loop_keep_the_kernels_name(host):
    host.block("virtual/block/zram0", "253:0", node=True)
    host.block("virtual/block/loop0", "7:0", size=0, node=True)
    assert set(await published(made(host, "/dev/zram*", "/dev/loop*"))) == {
        "disk-zram0",
        "disk-loop0",
    }
