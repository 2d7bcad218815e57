"""
CDI files of one driver's claims, read back: what is in them, and whether they are ours at all.

Files are written and removed by :mod:`.specs`, after the checkpoint; they are read only where the
checkpoint has no word of them.

It must not know the checkpoint, the API server, drivers or gRPC.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from drakit.cdi import InvalidNameError, SpecDirectory, transient_file_name
from drakit_nodeplugin.claims.kubeletview import claim_uid

__all__ = ("SpecText", "SpecTexts")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecText:
    """A claim's CDI file."""

    text: str | None
    """As the checkpoint keeps it; None if the file is damaged."""

    this_boot: bool
    """Whether it was written since the node started. A directory that outlives a reboot holds files
    of devices that nobody has prepared since."""


class SpecTexts:
    """Reads what :class:`.specs.ClaimSpecs` of the same driver and directory has written."""

    def __init__(self, driver: str, directory: Path) -> None:
        self._driver = driver
        self._kind = f"{driver}/claim"
        self._directory = SpecDirectory(directory)

    async def read(self, uid: str) -> SpecText | None:
        """Read the file of a claim; None if there is none, or somebody else wrote it. OSError."""
        return await asyncio.to_thread(self._read, uid)

    def _read(self, uid: str) -> SpecText | None:
        try:
            name = transient_file_name(self._kind, uid)
            written = (self._directory.path / name).stat().st_mtime
        except (InvalidNameError, FileNotFoundError):
            return None
        text = self._directory.read_text(name)
        if text is None:
            return None
        try:
            spec: object = json.loads(text)
        except (ValueError, RecursionError):
            spec = None
        if not isinstance(spec, dict):
            return SpecText(text=None, this_boot=False)
        if not self._ours(cast("dict[str, object]", spec), uid):
            return None
        return SpecText(text=text, this_boot=written > _boot_time())

    def _ours(self, spec: dict[str, object], uid: str) -> bool:
        devices = spec.get("devices")
        if spec.get("kind") != self._kind or not isinstance(devices, list):
            return False
        named = [
            cast("dict[str, object]", device).get("name") if isinstance(device, dict) else None
            for device in cast("list[object]", devices)
        ]
        return all(claim_uid(f"{self._kind}={name}", driver=self._driver) == uid for name in named)


def _boot_time() -> float:
    """When the node started, on the wall clock as it goes now: that is what files carry."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
