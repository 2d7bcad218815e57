"""Of the block devices, only zram and loop devices that the host does not use are published."""

from __future__ import annotations

import pytest

from drakit_drivers.hostdev.block_usage import read_usage
from drakit_drivers.hostdev.host import reason_against_block_device
from drakit_drivers.hostdev.policy_devices import Refusal
from drakit_drivers.hostdev.sysfs import UnreadableError
from tests.fakes.sysfs import VOLUMES, FakeHost

VDA = "pci0000:00/0000:00:02.0/virtio1/block/vda"


def usage(host: FakeHost):
    return read_usage(host.sysfs(), dev_root=host.dev, mountinfo=host.mountinfo, swaps=host.swaps)


def refusal(host: FakeHost, name: str) -> Refusal | None:
    return reason_against_block_device(host.find("block")[name], usage(host))


def reasons(host: FakeHost) -> dict[str, str | None]:
    """The reason to refuse each of the two zram devices."""
    found = {name: refusal(host, name) for name in ("zram0", "zram1")}
    return {name: each.message if each else None for name, each in found.items()}


@pytest.fixture
def zram(host: FakeHost) -> FakeHost:
    """Two zram devices."""
    host.block("virtual/block/zram0", "253:0", devtype="disk")
    host.block("virtual/block/zram1", "253:1", devtype="disk")
    return host


def upper(host: FakeHost, name: str, number: str, lower: str):
    """Build a device (dm, md) on another one."""
    made = host.block(f"virtual/block/{name}", number)
    host.holder(host.find("block")[lower].directory, made)


@pytest.mark.parametrize(
    ("name", "attributes", "reason", "part"),
    [
        pytest.param("zram0", {"size": 2048}, None, "", id="zram"),
        pytest.param("zram1", {"backing_dev": "none"}, None, "", id="zram-without-backing-device"),
        pytest.param("zram0", {"size": 0}, "Other", "no size", id="zram-without-disksize"),
        pytest.param(
            "zram0",
            {"backing_dev": "/dev/sda1"},
            "NotSupported",
            "a zram device that writes to /dev/sda1; use a CSI driver",
            id="zram-with-backing-device",
        ),
        pytest.param("loop0", {"size": 0}, None, "", id="loop"),
        pytest.param(
            "loop0",
            {"loop__backing_file": "/x"},
            "NotSupported",
            "a loop device with a backing file; use a CSI driver",
            id="loop-with-backing-file",
        ),
        pytest.param(
            "zramdisk", {}, "NotSupported", "it is a disk", id="a-name-that-only-begins-so"
        ),
    ],
)
def test_zram_and_loop_devices_without_backing_are_published(host, name, attributes, reason, part):
    host.block(f"virtual/block/{name}", "253:0", **attributes)
    found = refusal(host, name)
    assert (found.reason if found else None) == reason
    assert part in (found.message if found else "")


def test_no_disk_partition_or_volume_is_published_and_the_reason_refers_to_csi(host):
    host.block(VDA, "254:0", devtype="disk")
    host.block(f"{VDA}/vda1", "254:1", devtype="partition")
    host.block("virtual/block/loop0", "7:0", loop__backing_file="/x")
    host.block("virtual/block/loop0/loop0p1", "259:0", devtype="partition")
    host.block("virtual/block/dm-0", "252:0", devtype="disk")
    host.block("virtual/block/md0", "9:0", devtype="disk")
    for name in ("vda", "vda1", "loop0p1", "dm-0", "md0"):
        assert refusal(host, name) == Refusal(
            "NotSupported",
            "it is a disk, and hostdev publishes no disk; use a CSI driver: see 'Disks: use CSI' "
            "in the documentation (docs/admin/disks.md)",
        )


def mount(*arguments, **facts):
    return lambda host: host.mount(*arguments, **facts)


def swap_on_escaped_link(host):
    host.node("zram0", "b", "253:0")
    host.link("disk/my swap", "../zram0")
    host.swap("/dev/disk/my\\040swap")


def btrfs_second_device(host):
    host.block(VDA, "254:0")
    host.mount("0:33", "/", fs_type="btrfs", source="/dev/vda")
    btrfs_member(host)


def btrfs_under_dev_root(host):
    host.mount("0:33", "/", fs_type="btrfs", source="/dev/root")
    btrfs_member(host)


def btrfs_member(host):
    members = host.sys / "fs/btrfs/uuid/devices"
    members.mkdir(parents=True)
    (members / "zram0").symlink_to(host.sys / "devices/virtual/block/zram0")


def bcachefs_of_two_devices(host):
    host.block(VDA, "254:0")
    host.mount("0:34", "/", fs_type="bcachefs", source="/dev/vda:/dev/zram0")


def source_by_link(host):
    host.node("zram0", "b", "253:0")
    host.link("disk/by-label/root", "../../zram0")
    host.mount("0:35", "/", fs_type="other", source="/dev/disk/by-label/root")


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (mount("253:0", "/", source="/dev/zram0"), "it is mounted at /"),
        (mount("253:0", "/", source="/dev/root"), "it is mounted at /"),
        (mount("253:0", "/with\\040space"), "it is mounted at /with space"),
        *(
            (mount("253:0", f"/var/lib/kubelet/{path}"), "it is mounted as a volume of a pod")
            for path in VOLUMES
        ),
        (mount("0:33", "/", fs_type="btrfs", source="/dev/zram0"), "it is mounted at /"),
        (
            mount(
                "0:6", "/var/lib/kubelet/x", fs_type="devtmpfs", source="devtmpfs", root="/zram0"
            ),
            "it is mounted at /var/lib/kubelet/x",
        ),
        (lambda host: host.swap("/dev/zram0"), "it is a swap area"),
        (swap_on_escaped_link, "it is a swap area"),
        (lambda host: upper(host, "dm-0", "252:0", "zram0"), "dm-0 is built on it"),
        (lambda host: upper(host, "md0", "9:0", "zram0"), "md0 is built on it"),
        (btrfs_second_device, "it is part of a mounted btrfs"),
        (btrfs_under_dev_root, "it is part of a mounted btrfs"),
        (bcachefs_of_two_devices, "it is mounted at /"),
        (source_by_link, "it is mounted at /"),
        (
            lambda host: host.block("virtual/block/loop0", "7:0", loop__backing_file="/dev/zram0"),
            "it is the backing file of loop0",
        ),
    ],
)
def test_a_device_in_use_is_never_published_and_the_other_one_is(zram, use, reason):
    use(zram)
    assert reasons(zram) == {"zram0": reason, "zram1": None}
    found = refusal(zram, "zram0")
    assert found
    assert found.reason == "InUse"


def test_a_device_in_a_subdirectory_is_found_without_its_node(host):
    host.block("virtual/block/cciss!c0d0", "104:0", devname="cciss/c0d0")
    host.mount("0:35", "/", fs_type="btrfs", source="/dev/cciss/c0d0")
    assert usage(host) == {"104:0": "mounted at /"}


@pytest.mark.parametrize("missing", ["mountinfo", "swaps"])
def test_usage_is_unknown_if_a_list_is_unreadable(zram, missing):
    getattr(zram, missing).unlink()
    with pytest.raises(UnreadableError, match=f"{missing} cannot be read"):
        usage(zram)


@pytest.mark.parametrize(
    "line", ["27 1 253:0 / /", "x", "27 1 a:b / / rw - ext4 /dev/vda rw", "a b c - e f g"]
)
def test_usage_is_unknown_if_mountinfo_is_malformed(zram, line):
    zram.mountinfo.write_text(f"{line}\n")
    with pytest.raises(UnreadableError, match="line of mountinfo"):
        usage(zram)


def test_usage_is_unknown_if_the_list_of_swap_areas_has_no_header(zram):
    zram.swaps.write_text("")
    with pytest.raises(UnreadableError, match="not with its header"):
        usage(zram)


def test_usage_is_unknown_if_a_mount_or_a_swap_area_is_of_an_unknown_device(zram):
    zram.mount("0:40", "/data", fs_type="bcachefs", source="/dev/gone")
    with pytest.raises(UnreadableError, match=r"/dev/gone .* \(mounted at /data\)"):
        usage(zram)
    zram.mountinfo.write_text("")
    zram.swap("/dev/gone")
    with pytest.raises(UnreadableError, match=r"/dev/gone .* \(a swap area\)"):
        usage(zram)


@pytest.mark.parametrize(
    ("fs_type", "source"),
    [("9p", "/dev/root"), ("overlay", "overlay"), ("nfs4", "server:/dev/x"), ("tmpfs", "/dev/x")],
)
def test_mounts_without_a_device_take_nothing_away(zram, fs_type, source):
    zram.mount("0:41", "/x", fs_type=fs_type, source=source)
    assert reasons(zram) == {"zram0": None, "zram1": None}


def test_a_character_device_as_source_is_no_block_device(zram):
    zram.node("fuse", "c", "253:0")
    zram.mount("0:42", "/x", fs_type="fuse.sshfs", source="/dev/fuse")
    assert reasons(zram) == {"zram0": None, "zram1": None}
