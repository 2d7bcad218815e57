"""
CDI files of one driver's claims, read back: what is in them, and whether they are ours at all.

Files are written and removed by :mod:`.cdi_files`, after the checkpoint; they are read only where
the checkpoint has no word of them.

It must not know the checkpoint, the API server, drivers or gRPC.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import cast

from drakit.cdi import InvalidNameError, SpecDirectory, transient_file_name
from drakit_nodeplugin.claims.kubeletview import claim_uid

__all__ = ("SpecTexts",)


class SpecTexts:
    """Reads what :class:`.specs.ClaimSpecs` of the same driver and directory has written."""

    def __init__(self, driver: str, directory: Path) -> None:
        self._driver = driver
        self._kind = f"{driver}/claim"
        self._directory = SpecDirectory(directory)

    async def read(self, uid: str) -> str | None:
        """Return the file of a claim; empty if it is damaged, None if it does not exist or belongs
        to another program. Raises OSError."""
        return await asyncio.to_thread(self._read, uid)

    def _read(self, uid: str) -> str | None:
        try:
            text = self._directory.read_text(transient_file_name(self._kind, uid))
        except InvalidNameError:
            return None
        if text is None:
            return None
        try:
            spec: object = json.loads(text)
        except (ValueError, RecursionError):
            return ""
        if not isinstance(spec, dict):
            return ""
        return text if self._ours(cast("dict[str, object]", spec), uid) else None

    def _ours(self, spec: dict[str, object], uid: str) -> bool:
        devices = spec.get("devices")
        if spec.get("kind") != self._kind or not isinstance(devices, list):
            return False
        named = [
            cast("dict[str, object]", device).get("name") if isinstance(device, dict) else None
            for device in cast("list[object]", devices)
        ]
        return all(claim_uid(f"{self._kind}={name}", driver=self._driver) == uid for name in named)
