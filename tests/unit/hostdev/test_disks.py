"""A block device that the host uses, or that contains data, is never published."""

from __future__ import annotations

import shutil

import pytest

from drakit_drivers.hostdev.disks import UsageUnknownError, read_usage, reason_not_to_publish
from e2e.signatures import BLANK, BLUESTORE, EXT2, PARTITIONED, SWAP, ZFS, blkid
from tests.fakes.sysfs import FakeHost

VDA = "pci0000:00/0000:00:02.0/virtio1/block/vda"


def usage(host: FakeHost):
    return read_usage(host.sysfs(), dev_root=host.dev, mountinfo=host.mountinfo, swaps=host.swaps)


def reason(
    host: FakeHost, name: str, *, allow_disks: bool = True, allow_formatted: bool = True
) -> str | None:
    """The reason to refuse a device; by default it is blank."""
    refusal = reason_not_to_publish(
        host.find("block")[name],
        usage(host),
        allow_disks=allow_disks,
        allow_formatted=allow_formatted,
        allow_unstable_identity=True,
    )
    return refusal.message if refusal else None


@pytest.fixture
def disk(host: FakeHost) -> FakeHost:
    """A disk vda with partitions vda1 and vda2; a second disk vdb."""
    host.block(VDA, "254:0", devtype="disk")
    host.block(f"{VDA}/vda1", "254:1", devtype="partition")
    host.block(f"{VDA}/vda2", "254:2", devtype="partition")
    host.block("virtual/block/vdb", "254:16", devtype="disk")
    return host


def upper(host: FakeHost, name: str, number: str, *lower: str, **attributes):
    """Build a device (dm, md) on others."""
    made = host.block(f"virtual/block/{name}", number, **attributes)
    for device in lower:
        host.holder(host.find("block")[device].directory, made)
    return made


def test_free_disks_pass_where_disks_are_allowed(disk):
    assert [reason(disk, name) for name in ("vda", "vda1", "vdb")] == [None] * 3


def test_disks_do_not_pass_by_default(disk):
    for name in ("vda", "vda1", "vdb"):
        assert "allowDisks is not set" in (reason(disk, name, allow_disks=False) or "")


def mounted_whole(host):
    host.mount("254:0", "/", source="/dev/vda")


def mounted_as_dev_root(host):
    host.mount("254:0", "/", source="/dev/root")


def mounted_partition(host):
    host.mount("254:1", "/boot", source="/dev/vda1")


def swap_on_partition(host):
    host.swap("/dev/vda2")


def swap_on_escaped_name(host):
    upper(host, "dm-0", "252:0", "vda2", dm__name="my swap")
    host.swap("/dev/mapper/my\\040swap")


def mounted_dm_on_partition(host):
    upper(host, "dm-0", "252:0", "vda1", dm__name="vg-root")
    host.mount("252:0", "/", source="/dev/mapper/vg-root")


def mounted_dm_on_md_on_partition(host):
    upper(host, "md0", "9:0", "vda1")
    upper(host, "dm-0", "252:0", "md0")
    host.mount("252:0", "/")


def mounted_partition_of_md(host):
    upper(host, "md0", "9:0", "vda1")
    host.block("virtual/block/md0/md0p1", "259:0")
    host.mount("259:0", "/srv")


def unmounted_dm(host):
    upper(host, "dm-0", "252:0", "vda1")


def multipath_on_whole_disk(host):
    upper(host, "dm-0", "252:0", "vda")
    upper(host, "dm-1", "252:1", "dm-0")
    host.mount("252:1", "/")


def btrfs_by_source(host):
    host.mount("0:33", "/", fs_type="btrfs", source="/dev/vda1")


def btrfs_second_device(host):
    host.mount("0:33", "/", fs_type="btrfs", source="/dev/vdb")
    (host.sys / "fs/btrfs/uuid/devices").mkdir(parents=True)
    (host.sys / "fs/btrfs/uuid/devices/vda1").symlink_to(host.sys / "devices" / VDA / "vda1")


def btrfs_under_dev_root(host):
    host.mount("0:33", "/", fs_type="btrfs", source="/dev/root")
    (host.sys / "fs/btrfs/uuid/devices").mkdir(parents=True)
    (host.sys / "fs/btrfs/uuid/devices/vda1").symlink_to(host.sys / "devices" / VDA / "vda1")


def bcachefs_of_two_devices(host):
    host.mount("0:34", "/", fs_type="bcachefs", source="/dev/vdb:/dev/vda1")


def source_by_uuid_link(host):
    host.udev_entry("b254:1", "S:disk/by-uuid/1-2")
    host.mount("0:35", "/", fs_type="other", source="/dev/disk/by-uuid/1-2")


def source_by_node(host):
    host.node("vda1", "b", "254:1")
    host.link("disk/by-label/root", "../../vda1")
    host.mount("0:35", "/", fs_type="other", source="/dev/disk/by-label/root")


def raw_volume_of_a_pod(host):
    host.mount("0:6", "/var/lib/kubelet/x", fs_type="devtmpfs", source="devtmpfs", root="/vda2")


def loop_on_whole_disk(host):
    host.block("virtual/block/loop0", "7:0", loop__backing_file="/dev/vda")


@pytest.mark.parametrize(
    "use",
    [
        loop_on_whole_disk,
        mounted_whole,
        mounted_as_dev_root,
        mounted_partition,
        swap_on_partition,
        swap_on_escaped_name,
        mounted_dm_on_partition,
        mounted_dm_on_md_on_partition,
        mounted_partition_of_md,
        unmounted_dm,
        multipath_on_whole_disk,
        btrfs_by_source,
        btrfs_second_device,
        btrfs_under_dev_root,
        bcachefs_of_two_devices,
        source_by_uuid_link,
        source_by_node,
        raw_volume_of_a_pod,
    ],
)
def test_a_disk_in_use_is_never_published(disk, use):
    use(disk)
    assert reason(disk, "vda") is not None


def test_the_reason_names_the_device_and_its_user(disk):
    mounted_dm_on_partition(disk)
    assert reason(disk, "vda") == "dm-0 is mounted at /"
    assert reason(disk, "dm-0") == "it is mounted at /"
    swap_on_partition(disk)
    assert reason(disk, "vda2") == "it is a swap area"
    disk.mount("254:16", "/with\\040space")
    assert reason(disk, "vdb") == "it is mounted at /with space"


def test_the_reason_names_the_device_on_top(disk):
    unmounted_dm(disk)
    assert reason(disk, "vda") == "dm-0 is built on vda1"
    assert reason(disk, "vda1") == "dm-0 is built on it"
    assert reason(disk, "dm-0") is None


def test_a_free_partition_beside_one_in_use_does_not_pass(disk):
    """A partition of the host's disk stays unpublished: it may be the root of the host's next
    version."""
    assert reason(disk, "vda2") is None
    unmounted_dm(disk)
    assert reason(disk, "vda2") == "dm-0 is built on vda1"
    mounted_partition(disk)
    assert reason(disk, "vda2") == "vda1 is mounted at /boot"


def test_a_partition_of_a_disk_that_is_used_as_a_whole_does_not_pass(disk):
    multipath_on_whole_disk(disk)
    assert reason(disk, "vda2") == "dm-1 is mounted at /"
    mounted_whole(disk)
    assert reason(disk, "vda1") == "vda is mounted at /"


def test_a_ring_of_holders_is_walked_once(disk):
    blocks = disk.find("block")
    disk.holder(blocks["vda"].directory, blocks["vdb"].directory)
    disk.holder(blocks["vdb"].directory, blocks["vda"].directory)
    assert reason(disk, "vda") == "vdb is built on it"


def test_a_slash_in_a_name_is_found(host):
    host.block("virtual/block/cciss!c0d0", "104:0", devname="cciss/c0d0")
    host.mount("0:35", "/", fs_type="btrfs", source="/dev/cciss/c0d0")
    assert reason(host, "cciss!c0d0") == "it is mounted at /"


@pytest.mark.parametrize("missing", ["mountinfo", "swaps"])
def test_unreadable_lists_mean_that_nothing_is_known(disk, missing):
    getattr(disk, missing).unlink()
    with pytest.raises(UsageUnknownError, match=f"{missing} cannot be read"):
        usage(disk)


def test_a_damaged_mountinfo_means_that_nothing_is_known(disk):
    disk.mountinfo.write_text("27 1 254:0 / /")
    with pytest.raises(UsageUnknownError, match="line of mountinfo"):
        usage(disk)


def test_an_unknown_mount_source_makes_usage_unknown(disk):
    disk.mount("0:40", "/data", fs_type="bcachefs", source="/dev/gone")
    with pytest.raises(UsageUnknownError, match=r"/dev/gone \(mounted at /data\)"):
        usage(disk)


def test_an_unknown_swap_area_makes_usage_unknown(disk):
    disk.swap("/dev/gone")
    with pytest.raises(UsageUnknownError, match=r"/dev/gone \(a swap area\)"):
        usage(disk)


@pytest.mark.parametrize(
    ("fs_type", "source"),
    [("9p", "/dev/root"), ("overlay", "overlay"), ("nfs4", "server:/dev/x"), ("tmpfs", "/dev/x")],
)
def test_mounts_without_a_device_take_nothing_away(disk, fs_type, source):
    disk.mount("0:41", "/x", fs_type=fs_type, source=source)
    assert reason(disk, "vda") is None


def test_a_character_device_as_source_is_no_disk(disk):
    disk.node("fuse", "c", "10:229")
    disk.mount("0:42", "/x", fs_type="fuse.sshfs", source="/dev/fuse")
    assert reason(disk, "vda") is None


@pytest.mark.parametrize(
    ("name", "attributes", "reason_part"),
    [
        pytest.param("zram0", {"size": 2048}, None, id="zram-of-a-size"),
        pytest.param("zram0", {"size": 0}, "no size", id="zram-without-disksize"),
        pytest.param("loop0", {"size": 0}, None, id="free-loop"),
        pytest.param("loop0", {"loop__backing_file": "/x"}, "backing file", id="loop-with-file"),
        pytest.param("zramdisk", {}, "allowDisks", id="a-name-that-only-begins-so"),
    ],
)
def test_zram_and_loop_pass_by_default(host, name, attributes, reason_part):
    host.block(f"virtual/block/{name}", "253:0", **attributes)
    said = reason(host, name, allow_disks=False)
    assert said is None if reason_part is None else reason_part in (said or "")


def test_a_loop_device_with_backing_file_passes_where_disks_are_allowed(host):
    host.block("virtual/block/loop0", "7:0", loop__backing_file="/x")
    assert reason(host, "loop0") is None
    host.mount("7:0", "/x")
    assert reason(host, "loop0") == "it is mounted at /x"


def test_a_mounted_zram_does_not_pass(host):
    host.block("virtual/block/zram0", "253:0")
    host.mount("253:0", "/tmp", source="/dev/zram0")
    assert reason(host, "zram0", allow_disks=False) == "it is mounted at /tmp"


CONTENTS = [pytest.param(content, id=content.name) for content in (ZFS, BLUESTORE, EXT2, SWAP)]


@pytest.mark.skipif(shutil.which("blkid") is None, reason="this machine has no blkid")
@pytest.mark.parametrize("content", [*CONTENTS, BLANK, PARTITIONED])
def test_the_fake_udev_entries_match_those_of_blkid(content, tmp_path):
    content.write(tmp_path / "disk")
    found = blkid(tmp_path / "disk")
    assert {f"E:{key}={value}" for key, value in content.properties.items()} <= set(found)
    assert bool(found) == bool(content.properties)


def feed(host: FakeHost, number: str, content) -> None:
    """Set the udev entry of a device to that of a content."""
    properties = [f"E:{key}={value}" for key, value in content.properties.items()]
    host.udev_entry(f"b{number}", "I:1234567", "E:ID_BUS=ata", *properties)


def test_a_disk_that_udev_found_blank_passes(host):
    host.block("virtual/block/vdb", "254:16", devtype="disk")
    feed(host, "254:16", BLANK)
    assert reason(host, "vdb", allow_formatted=False) is None


@pytest.mark.parametrize("content", [*CONTENTS, PARTITIONED])
def test_a_disk_with_a_signature_passes_only_where_formatted_disks_are_allowed(host, content):
    host.block("virtual/block/vdb", "254:16", devtype="disk")
    feed(host, "254:16", content)
    found = reason(host, "vdb", allow_formatted=False) or ""
    kind = content.properties.get("ID_FS_TYPE") or content.properties["ID_PART_TABLE_TYPE"]
    assert f"({kind})" in found
    assert "set allow.formatted" in found
    assert reason(host, "vdb", allow_formatted=True) is None


def test_a_disk_without_an_entry_of_udev_passes_only_where_formatted_disks_are_allowed(host):
    host.block("virtual/block/vdb", "254:16", devtype="disk")
    assert "udev's database has no entry" in (reason(host, "vdb", allow_formatted=False) or "")
    assert reason(host, "vdb", allow_formatted=True) is None


def test_a_disk_whose_partitions_udev_has_not_seen_does_not_pass(disk):
    feed(disk, "254:0", BLANK)
    assert reason(disk, "vda", allow_formatted=False) == "it has partitions (vda1, vda2)"


def test_a_blank_partition_passes_only_where_formatted_disks_are_allowed(disk):
    feed(disk, "254:1", PARTITIONED)  # a partition inherits its disk's properties
    assert "it is a partition of vda" in (reason(disk, "vda1", allow_formatted=False) or "")
    assert reason(disk, "vda1", allow_formatted=True) is None


def test_a_disk_in_use_does_not_pass_because_formatted_disks_are_allowed(disk):
    feed(disk, "254:16", ZFS)
    disk.mount("254:16", "/srv")
    assert reason(disk, "vdb", allow_formatted=True) == "it is mounted at /srv"


@pytest.mark.parametrize(
    ("name", "attributes", "content", "part"),
    [
        pytest.param("zram0", {}, None, None, id="zram-without-an-entry"),
        pytest.param("zram0", {}, BLANK, None, id="zram-that-udev-knows"),
        pytest.param("zram0", {}, SWAP, "signature", id="zram-with-a-signature"),
        pytest.param("loop0", {"size": 0}, None, None, id="free-loop"),
        pytest.param("loop0", {"size": 0}, EXT2, None, id="free-loop-with-an-entry-of-before"),
        pytest.param("loop0", {"loop__backing_file": "/x"}, None, "no entry", id="loop"),
        pytest.param("loop0", {"loop__backing_file": "/x"}, BLANK, None, id="loop-blank"),
        pytest.param("loop0", {"loop__backing_file": "/x"}, ZFS, "zfs_member", id="loop-zfs"),
    ],
)
def test_contents_of_zram_and_loop(host, name, attributes, content, part):
    host.block(f"virtual/block/{name}", "7:0", **attributes)
    if content:
        feed(host, "7:0", content)
    found = reason(host, name, allow_formatted=False)
    assert found is None if part is None else part in (found or "")
