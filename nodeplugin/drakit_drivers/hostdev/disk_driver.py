"""
The driver ``hostdev-disks``: hostdev with the disk helper.

Before a claim gets a disk, the helper opens it exclusively, which detects uses that sysfs does not
show. After a claim with ``onRelease: Wipe``, the helper erases the disk. The pod does not wait for
that, but the device stays reserved until it is done.

It must not know the system calls that open or erase a disk.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import ClassVar

from drakit import (
    AllocatedDevice,
    DriverError,
    Node,
    NoParameters,
    ReleasePendingError,
)
from drakit_drivers.diskhelper.protocol import Answer, Operation, Request
from drakit_drivers.hostdev.config import HostDevicesConfig
from drakit_drivers.hostdev.disk_helper import DiskHelper
from drakit_drivers.hostdev.disk_records import DiskRecord, DiskRecords
from drakit_drivers.hostdev.driver import HostDevices
from drakit_drivers.hostdev.selection import Published
from drakit_drivers.hostdev.sysfs import HostDevice, Sysfs, read_attribute
from drakit_drivers.hostdev.udev import UdevDatabase

__all__ = ("HostDisks",)

logger = logging.getLogger(__name__)

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

WIPE_SECONDS = 5.0
"""The time that a release waits for the end of a wipe. It suffices for small disks."""

POLL_SECONDS = 0.2


class HostDisks(HostDevices):
    """Publishes devices of the host, checks that nothing has a disk open, and wipes disks."""

    side_effects: ClassVar[bool] = True
    can_wipe: ClassVar[bool] = True

    def __init__(self, config: HostDevicesConfig, node: Node) -> None:
        super().__init__(config, node)
        if config.disk_helper is None or config.disk_records is None:
            raise DriverError("hostdev-disks needs diskHelper and diskRecords in its configuration")
        self._helper = DiskHelper(config.disk_helper)
        self._records = DiskRecords(config.disk_records)
        self._sysfs = Sysfs(config.sys_root, UdevDatabase(config.udev_root))
        self._boot_id = BOOT_ID.read_text().strip()

    async def reset(self, device: AllocatedDevice[NoParameters | None]) -> None:
        if self._records.damaged:
            await asyncio.to_thread(self._check_unrecorded, device.name)
        deadline = asyncio.get_running_loop().time() + WIPE_SECONDS
        while problem := await asyncio.to_thread(self._wipe, device.name):
            if asyncio.get_running_loop().time() > deadline:
                raise ReleasePendingError(problem)
            await asyncio.sleep(POLL_SECONDS)

    def lend(self, published: Published) -> None:
        """Check that nothing has a disk open, and record that it must be wiped."""
        name, host = published.name, published.host
        if host.block is None:
            return
        record = DiskRecord(
            boot_id=self._boot_id,
            number=host.number,
            sequence=_sequence(_disk_of(host)),
            identity=host.block.identity,
            partition=host.block.partition,
        )
        answer = self._ask("check", record)
        if answer.outcome != "free":
            raise DriverError(
                f"device {name} ({host.path}) cannot be allocated to a pod: {answer.detail}; free "
                f"it on node {self.node.name}, or delete the pod to get another device"
            )
        if published.spec.on_release == "Wipe":
            self._records.add(name, record)

    def _wipe(self, name: str) -> str | None:
        """Request a wipe; return the reason why it is not complete, or None."""
        record = self._records.find(name)
        if record is None:
            return None
        if record.boot_id != self._boot_id:
            present = self._present(record)
            if present is None:
                if record.identity is not None:
                    return (
                        f"disk {name} must be wiped, but is disconnected: connect it again to "
                        f"node {self.node.name}"
                    )
                # A zram device is empty, and a loop device has lost its file.
                self._records.remove(name)
                return None
            self._records.add(name, present)
            record = present
        answer = self._ask("wipe", record)
        if answer.outcome == "wiped":
            self._records.remove(name)
            logger.info("disk wiped", extra={"device": name})
            return None
        if answer.outcome == "wiping":
            return f"disk {name} is being wiped"
        return f"disk {name} cannot be wiped: {answer.detail}"

    def _check_unrecorded(self, name: str) -> None:
        """After the loss of the records, release only devices that need no wipe."""
        published = self.find(name)
        if published.spec.on_release == "Wipe" and self._records.find(name) is None:
            raise ReleasePendingError(
                f"drakit cannot determine whether disk {name} must be wiped, because its record "
                f"was damaged; wipe the disk manually, and run 'drakit node claim forget'"
            )

    def _present(self, record: DiskRecord) -> DiskRecord | None:
        """Find the disk of an earlier boot by its identity."""
        if record.identity is None:
            return None
        for directory in self._sysfs.block_directories().values():
            if (directory / "partition").exists():
                continue
            if self._sysfs.disk_identity(directory) != record.identity:
                continue
            place = _part_of(directory, record.partition)
            number = place and read_attribute(place, "dev")
            if number:
                return DiskRecord(
                    boot_id=self._boot_id,
                    number=number,
                    sequence=_sequence(directory),
                    identity=record.identity,
                    partition=record.partition,
                )
        return None

    def _ask(self, operation: Operation, record: DiskRecord) -> Answer:
        return self._helper.ask(
            Request(operation=operation, number=record.number, sequence=record.sequence)
        )


def _disk_of(host: HostDevice) -> Path:
    return host.directory.parent if host.block and host.block.partition else host.directory


def _part_of(disk: Path, partition: str | None) -> Path | None:
    if partition is None:
        return disk
    found = (each for each in disk.iterdir() if read_attribute(each, "partition") == partition)
    return next(found, None)


def _sequence(disk: Path) -> int:
    text = read_attribute(disk, "diskseq")
    if text is None or not text.isdecimal():
        raise DriverError(
            f"{disk.name} has no disk sequence number, which the disk helper needs: the kernel "
            "must be Linux 5.15 or later"
        )
    return int(text)
