"""
The CDI files of one driver's claims: a spec a claim, named by its UID.

The UID in the name makes it unique for ever, because runtimes cache specs and read again only on a
miss. What a spec looks like is :mod:`drakit.cdi`'s, when one is written the engine's.

It must not know the checkpoint, the API server, drivers or gRPC.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from drakit.cdi import InvalidEditsError, SpecDirectory, build_spec, qualified_name
from drakit.device import Edits

__all__ = ("ClaimSpecs",)


class ClaimSpecs:
    """Writes, checks and removes the CDI files of one driver; files of others are never touched."""

    def __init__(self, driver: str, directory: Path) -> None:
        self._kind = f"{driver}/claim"
        self._prefix = f"{driver}-claim_"
        self._directory = SpecDirectory(directory)

    def build(self, uid: str, edits: Sequence[Edits]) -> str:
        """Give the text of a claim's spec; raise :class:`drakit.cdi.InvalidEditsError`."""
        devices = [(f"{uid}-{index}", edit) for index, edit in enumerate(edits)]
        try:
            return json.dumps(build_spec(self._kind, devices), sort_keys=True)
        except InvalidEditsError:
            raise
        except (AttributeError, TypeError, ValueError) as error:
            # Vendors make edits: a Path where text should be must not fail the whole batch.
            raise InvalidEditsError(f"the driver gave a value of a wrong type: {error}") from error

    def cdi_id(self, uid: str, index: int) -> str:
        """Give the qualified CDI name of a claim's device."""
        return qualified_name(self._kind, f"{uid}-{index}")

    async def write(self, specs: Mapping[str, str]) -> Mapping[str, OSError]:
        """Make sure that the files of these claims hold these texts; answer those that failed."""
        return await asyncio.to_thread(self._write, specs)

    async def remove(self, uids: Collection[str]) -> Mapping[str, OSError]:
        """Make sure that these claims have no file; answer those that failed."""
        return await asyncio.to_thread(self._remove, uids)

    async def present(self) -> set[str]:
        """Give the UIDs of all claims that have a file."""
        return await asyncio.to_thread(self._present)

    async def changed_at(self) -> int | None:
        """Give the time of the directory's last change, in nanoseconds of its file system's clock;
        None if there is no directory."""
        return await asyncio.to_thread(self._changed_at)

    async def clean(self) -> None:
        """Remove what an earlier process left half-written."""
        await asyncio.to_thread(self._directory.clean_temporary, self._prefix)

    def _changed_at(self) -> int | None:
        try:
            return self._directory.path.stat().st_mtime_ns
        except OSError:
            return None

    def _file(self, uid: str) -> str:
        return f"{self._prefix}{uid}.json"

    def _write(self, specs: Mapping[str, str]) -> Mapping[str, OSError]:
        failed: dict[str, OSError] = {}
        for uid, spec in specs.items():
            try:
                self._directory.write(self._file(uid), json.loads(spec))
            except OSError as error:
                failed[uid] = error
        return failed

    def _remove(self, uids: Collection[str]) -> Mapping[str, OSError]:
        failed: dict[str, OSError] = {}
        for uid in uids:
            try:
                self._directory.remove(self._file(uid))
            except OSError as error:
                failed[uid] = error
        return failed

    def _present(self) -> set[str]:
        names = self._directory.names(self._prefix)
        return {name.removeprefix(self._prefix).removesuffix(".json") for name in names}
