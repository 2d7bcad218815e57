"""A host in a temporary directory: sysfs, udev's database, device nodes, mounts, swap areas."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from drakit import AllocatedClaim, AllocatedDevice, ClaimReference, Edits, Policy
from drakit_drivers.hostdev import HostDevicePolicySpec, HostDevices
from drakit_drivers.hostdev.hardware import HostDevice, identity_of_node, identity_of_unit
from drakit_drivers.hostdev.policy import HostDevicesConfig
from drakit_drivers.hostdev.policy_devices import Published
from drakit_drivers.hostdev.sysfs import Sysfs

CLAIM = ClaimReference(namespace="default", name="c", uid="u")


def policy(subsystem: str, *paths: str, **fields: object) -> dict[str, object]:
    """Return the spec of a policy with one matcher."""
    return {"match": [{"subsystem": subsystem, "paths": list(paths)}], **fields}


def as_policies(policies: dict[str, dict[str, object]]) -> list[Policy[HostDevicePolicySpec]]:
    """Return policies of the cluster, the first one being the oldest."""
    return [
        Policy(
            name=name,
            created=datetime(2026, 1, 1 + index, tzinfo=UTC),
            generation=1,
            spec=HostDevicePolicySpec.model_validate(spec),
        )
        for index, (name, spec) in enumerate(policies.items())
    ]


def published(device: HostDevice, policy: str = "a", **fields: object) -> Published:
    """Return a device as a policy publishes it."""
    fields.setdefault("match", [{"subsystem": device.subsystem, "paths": ["/dev/x"]}])
    (one,) = as_policies({policy: fields})
    group = fields.get("group")
    identity = identity_of_unit(device) if group == "Unit" else identity_of_node(device)
    return Published(name="x", policy=one, hosts=(device,), identity=identity)


async def prepared(driver: HostDevices, *devices: AllocatedDevice) -> Edits:
    """Prepare a claim of these devices; return the edits of the first one, or raise its error."""
    claim = AllocatedClaim(claim=CLAIM, devices=devices)
    answer = (await driver.prepare_claims([claim]))[CLAIM.uid]
    if isinstance(answer, Exception):
        raise answer
    return answer[0]


_SWAPS_HEADER = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Make a file or directory exist and be unreadable: a link to itself, which even root cannot
    follow."""
    aside = path.with_name(f"{path.name}.aside")
    path.rename(aside)
    path.symlink_to(path.name)
    try:
        yield
    finally:
        path.unlink()
        aside.rename(path)


VOLUMES = (
    "pods/uid-1/volumes/kubernetes.io~csi/pvc-secret/mount",
    "pods/uid-1/volume-subpaths/secret/app/0",
    "pods/uid-1/volumeDevices/kubernetes.io~csi/pvc-secret",
    "plugins/kubernetes.io/csi/csi.test/0a1b/globalmount",
)
"""Mount points below the kubelet's directory that contain volumes of pods."""


class FakeHost:
    """Builds what the kernel would show; paths of devices are relative to ``devices/``."""

    def __init__(self, root: Path) -> None:
        self.sys = root / "sys"
        self.udev = root / "udev"
        self.dev = root / "dev"
        self.mountinfo = root / "mountinfo"
        self.swaps = root / "swaps"
        for directory in (self.sys / "class", self.sys / "devices", self.udev / "data", self.dev):
            directory.mkdir(parents=True)
        self.mount_lines: list[str] = []
        self.mount("0:5", "/proc", fs_type="proc", source="proc")
        self.swap()

    def node(self, path: str, kind: str, number: str) -> None:
        """Make a device node; a test that needs one is skipped where nobody may make any."""
        major, minor = map(int, number.split(":"))
        target = self.dev / path
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = stat.S_IFBLK if kind == "b" else stat.S_IFCHR
        try:
            os.mknod(target, mode | 0o600, os.makedev(major, minor))
        except PermissionError:
            pytest.skip("making device nodes needs root")

    def link(self, path: str, target: str) -> None:
        (self.dev / path).parent.mkdir(parents=True, exist_ok=True)
        (self.dev / path).symlink_to(target)

    def device(
        self,
        where: str,
        number: str,
        *,
        subsystem: str = "misc",
        devname: str | None = None,
        devtype: str | None = None,
        node: bool = False,
        **attributes: str,
    ) -> Path:
        """Add a device with a number, and its node where one is asked for."""
        directory = self.sys / "devices" / where
        directory.mkdir(parents=True, exist_ok=True)
        devname = devname or directory.name
        major, minor = number.split(":")
        uevent = f"MAJOR={major}\nMINOR={minor}\nDEVNAME={devname}\n"
        (directory / "uevent").write_text(uevent + (f"DEVTYPE={devtype}\n" if devtype else ""))
        self.write(directory, dev=number, **attributes)
        self.subsystem(directory, subsystem)
        entry = self.sys / "class" / subsystem / directory.name
        if not entry.is_symlink():
            entry.symlink_to(os.path.relpath(directory, entry.parent))
        kind = "b" if subsystem == "block" else "c"
        by_number = self.sys / "dev" / ("block" if kind == "b" else "char")
        by_number.mkdir(parents=True, exist_ok=True)
        if not (by_number / number).is_symlink():
            (by_number / number).symlink_to(directory)
        if node:
            self.node(devname, kind, number)
        return directory

    def usb_device(
        self, where: str, number: str, descriptors: bytes | None, *, node: bool = False
    ) -> Path:
        """Add a USB device with a device node. Its number is 189:N, its path 001/(N + 1)."""
        minor = int(number.partition(":")[2])
        directory = self.device(
            where,
            number,
            subsystem="usb",
            devname=f"bus/usb/001/{minor + 1:03}",
            devtype="usb_device",
            node=node,
            idVendor="1d6b",
            idProduct="0104",
            serial=f"s{minor}",
        )
        if descriptors is not None:
            (directory / "descriptors").write_bytes(descriptors)
        return directory

    def block(self, where: str, number: str, *, size: int = 2048, **options) -> Path:
        """Add a block device; one below another block device is its partition."""
        directory = self.device(
            where, number, subsystem="block", **{"size": str(size), "ro": "0", **options}
        )
        (directory / "holders").mkdir(exist_ok=True)
        if (directory.parent / "dev").exists():
            self.write(directory, partition="1")
        return directory

    def holder(self, lower: Path, upper: Path) -> None:
        """Build one block device on another."""
        (lower / "holders" / upper.name).symlink_to(upper)
        (upper / "slaves").mkdir(exist_ok=True)
        (upper / "slaves" / lower.name).symlink_to(lower)

    def parent(
        self, where: str, subsystem: str, *, driver: str | None = None, **attributes
    ) -> Path:
        """Add a device without a node: a USB interface, a PCI function."""
        directory = self.sys / "devices" / where
        directory.mkdir(parents=True, exist_ok=True)
        self.write(directory, **attributes)
        self.subsystem(directory, subsystem)
        if driver:
            target = self.sys / "bus" / subsystem / "drivers" / driver
            target.mkdir(parents=True, exist_ok=True)
            (directory / "driver").symlink_to(target)
        return directory

    def adapter(self, port: str, tty: str, *, serial: str | None = None) -> Path:
        """Plug a USB serial adapter into a port: ``2``, or ``2.1`` of a hub at port 2."""
        controller = "pci0000:00/0000:00:14.0"
        where = f"{controller}/usb1/1-{port}"
        self.parent(controller, "pci")
        self.parent(f"{controller}/usb1", "usb", idVendor="1d6b", idProduct="2", speed="480")
        facts = {"serial": serial} if serial else {}
        directory = self.parent(where, "usb", idVendor="0403", idProduct="6001", **facts)
        self.parent(f"{where}/1-{port}:1.0", "usb", bInterfaceNumber="00")
        number = f"188:{tty.removeprefix('ttyUSB')}"
        node = f"{where}/1-{port}:1.0/{tty}/tty/{tty}"
        self.device(node, number, subsystem="tty", node=True)
        return directory

    def unplug(self, directory: Path) -> None:
        """Unplug a device, with the devices below it that have a node."""
        for uevent in [*directory.rglob("uevent")]:
            facts = dict(line.split("=") for line in uevent.read_text().split())
            (self.dev / facts["DEVNAME"]).unlink(missing_ok=True)
            kind = "block" if (uevent.parent / "subsystem").readlink().name == "block" else "char"
            (self.sys / "dev" / kind / f"{facts['MAJOR']}:{facts['MINOR']}").unlink()
            (uevent.parent / "subsystem").resolve().joinpath(uevent.parent.name).unlink()
        shutil.rmtree(directory)

    def subsystem(self, directory: Path, name: str) -> None:
        target = self.sys / "class" / name
        target.mkdir(parents=True, exist_ok=True)
        if not (directory / "subsystem").is_symlink():
            (directory / "subsystem").symlink_to(target)

    def write(self, directory: Path, **attributes: str) -> None:
        """Write attributes; a double underscore stands for a slash."""
        for name, value in attributes.items():
            path = directory / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")

    def udev_entry(self, key: str, *lines: str) -> None:
        (self.udev / "data" / key).write_text("".join(f"{line}\n" for line in lines))

    def mount(
        self,
        number: str,
        point: str = "/",
        *,
        fs_type: str = "ext4",
        source: str = "/dev/root",
        root: str = "/",
    ) -> None:
        self.mount_lines.append(
            f"{22 + len(self.mount_lines)} 1 {number} {root} {point} rw,relatime shared:1"
            f" - {fs_type} {source} rw\n"
        )
        self.mountinfo.write_text("".join(self.mount_lines))

    def swap(self, *paths: str) -> None:
        lines = [f"{path}                               partition\t1024\t0\t-2\n" for path in paths]
        self.swaps.write_text(_SWAPS_HEADER + "".join(lines))

    def sysfs(self) -> Sysfs:
        return Sysfs(self.sys, udev_root=self.udev, dev_root=self.dev)

    def find(self, subsystem: str) -> dict[str, HostDevice]:
        found = self.sysfs().devices(subsystem, wanted=lambda path: True)
        assert found.unreadable is None
        return {device.kernel_name: device for device in found.devices}

    def config(self, policies: dict[str, dict], **options) -> HostDevicesConfig:
        return HostDevicesConfig.model_validate(
            {
                "policies": policies,
                "sysRoot": self.sys,
                "udevRoot": self.udev,
                "devRoot": self.dev,
                "mountinfo": self.mountinfo,
                "swaps": self.swaps,
                **options,
            }
        )
