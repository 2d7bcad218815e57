"""
The CDI files of one driver's claims: a spec a claim, named by its UID.

The UID in the name makes it unique for ever, because runtimes cache specs and read again only on a
miss. The text of a file is made once; whoever keeps it can have the file compared with it and put
in place again, without the driver and without a look at what it means. What a spec looks like is
:mod:`drakit.cdi`'s, when one is written the engine's.

It must not know the checkpoint, the API server, drivers or gRPC.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from drakit.cdi import SpecDirectory, build_spec, dump_spec, qualified_name
from drakit.device import Edits

__all__ = ("ClaimSpecs",)


class ClaimSpecs:
    """
    Writes, compares and removes the CDI files of one driver; files of others are never touched.

    Each call is one hop to a thread, however many claims it is about; those that are no coroutines
    are for a thread.
    """

    def __init__(self, driver: str, directory: Path) -> None:
        self._kind = f"{driver}/claim"
        self._prefix = f"{driver}-claim_"
        # Not flushed to disks: after a boot every claim is prepared again, and its file compared.
        self._directory = SpecDirectory(directory, durable=False)

    def build(self, uid: str, edits: Sequence[Edits]) -> str:
        """Give the text of a claim's file; raise :class:`drakit.cdi.InvalidEditsError`."""
        devices = [(f"{uid}-{index}", edit) for index, edit in enumerate(edits)]
        return dump_spec(build_spec(self._kind, devices))

    def cdi_id(self, uid: str, index: int) -> str:
        """Give the qualified CDI name of a claim's device."""
        return qualified_name(self._kind, f"{uid}-{index}")

    async def write(self, specs: Mapping[str, str]) -> Mapping[str, OSError]:
        """Make sure that the files of these claims hold these texts; answer those that failed."""
        return await asyncio.to_thread(self._write, specs)

    async def remove(self, uids: Collection[str]) -> Mapping[str, OSError]:
        """Make sure that these claims have no file; answer those that failed."""
        return await asyncio.to_thread(self._remove, uids)

    async def read(self, uid: str) -> str | None:
        """Give the text of a claim's file; None if it has none. Raises OSError."""
        return await asyncio.to_thread(self._read, uid)

    async def present(self) -> set[str]:
        """Give the UIDs of all claims that have a file. Raises OSError."""
        return await asyncio.to_thread(self.uids)

    def uids(self) -> set[str]:
        """Give the UIDs of all claims that have a file. Blocks; raises OSError."""
        begin, end = len(self._prefix), -len(".json")
        return {name[begin:end] for name in self._directory.names(self._prefix)}

    async def clean(self) -> None:
        """Remove what an earlier process left half-written. Raises OSError."""
        await asyncio.to_thread(self._directory.clean_temporary, self._prefix)

    def _file(self, uid: str) -> str:
        return f"{self._prefix}{uid}.json"

    def _write(self, specs: Mapping[str, str]) -> Mapping[str, OSError]:
        return _each(specs, lambda uid: self._directory.write_text(self._file(uid), specs[uid]))

    def _remove(self, uids: Collection[str]) -> Mapping[str, OSError]:
        failed = _each(uids, lambda uid: self._directory.remove(self._file(uid)))
        # Kubelets ask for all they know: what cannot be a file's name is no file's name.
        return {uid: error for uid, error in failed.items() if not _no_name(error)}

    def _read(self, uid: str) -> str | None:
        try:
            return self._directory.read_text(self._file(uid))
        except ValueError:
            return None


def _each(uids: Iterable[str], action: Callable[[str], object]) -> dict[str, OSError]:
    failed: dict[str, OSError] = {}
    for uid in uids:
        try:
            action(uid)
        except OSError as error:
            failed[uid] = error
        except ValueError as error:
            failed[uid] = OSError(errno.EINVAL, str(error))
    return failed


def _no_name(error: OSError) -> bool:
    return error.errno in (errno.EINVAL, errno.ENAMETOOLONG)
