"""
The record of disks that pods have written and that must be wiped: a file that survives restarts.

A disk is recorded before a claim gets it and until it is wiped. So a disk that no pod ever had is
never wiped, not even if a claim for it failed because the host uses it. And a disk is wiped even if
its policy has been changed or deleted meanwhile.

It must not know the disk helper, policies, or claims.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ("DiskRecord", "DiskRecords")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskRecord:
    """A disk or partition that a claim has."""

    boot_id: str
    """The boot in which `number` and `sequence` are valid."""

    number: str
    sequence: int
    identity: str | None
    """The identity of the whole disk; None for zram and loop devices, whose content or set-up ends
    with the boot."""

    partition: str | None = None


class DiskRecords:
    """The records by the device's published name. Calls block."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be read."""
        self._path = path
        self.damaged: bool = False
        """Whether the file was damaged: which disks must be wiped is unknown."""
        self._records = self._read()

    def find(self, name: str) -> DiskRecord | None:
        return self._records.get(name)

    def add(self, name: str, record: DiskRecord) -> None:
        """Record a disk durably. Raises OSError."""
        if self._records.get(name) != record:
            self._write({**self._records, name: record})

    def remove(self, name: str) -> None:
        """Forget a disk durably. Raises OSError."""
        self._write({key: each for key, each in self._records.items() if key != name})

    def _read(self) -> dict[str, DiskRecord]:
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        try:
            return {name: DiskRecord(**fields) for name, fields in json.loads(text).items()}
        except (ValueError, TypeError, AttributeError) as error:
            aside = self._path.with_suffix(".damaged")
            self._path.replace(aside)
            self.damaged = True
            logger.error(
                "record of disks to wipe is damaged, and is quarantined",
                extra={"file": str(aside), "error": str(error)},
            )
            return {}

    def _write(self, records: Mapping[str, DiskRecord]) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({name: asdict(each) for name, each in records.items()}, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        self._records = dict(records)
