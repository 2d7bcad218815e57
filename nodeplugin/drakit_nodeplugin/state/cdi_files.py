"""
The CDI files of one driver's claims: one spec per claim, named by its UID.

The UID makes the file name unique. This matters because runtimes cache specs, and read them again
only on a cache miss. The content of a file is generated once and stored with the claim. Later, the
file is compared with that content, and restored without calling the driver.
:mod:`drakit_formats.cdi` defines the format of a spec. The checkpoint writes and removes files
together with their rows.

Does not depend on the checkpoint, the API server, drivers or gRPC.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import cast

from drakit.device import Edits, Mount
from drakit_formats.cdi import SpecDirectory, build_spec, container_edits, dump_spec


class ClaimSpecs:
    """
    Writes, compares, reads and removes the CDI files of one driver, but never files of others.

    All methods except :meth:`build` and :meth:`cdi_id` block.
    """

    def __init__(self, driver: str, directory: Path) -> None:
        self._driver = driver
        self._kind = f"{driver}/claim"
        self._prefix = f"{driver}-claim_"
        # Don't flush files to disk, because every claim is prepared again after a boot, and its
        # file is then compared.
        self._directory = SpecDirectory(directory, durable=False)

    def build(
        self,
        uid: str,
        edits: Sequence[Edits],
        *,
        mounts: Mapping[int, Mount] = MappingProxyType({}),
    ) -> str:
        """
        Return the content of a claim's file. Raises :class:`drakit_formats.cdi.InvalidEditsError`.

        `mounts` are the node plugin's own mounts, keyed by the index of their device.
        """
        devices = [(f"{uid}-{index}", edit) for index, edit in enumerate(edits)]
        spec = build_spec(self._kind, devices)
        for index, mount in mounts.items():
            # Keep these mounts out of the driver's edits, which are untrusted until they have been
            # checked.
            container = spec["devices"][index]["containerEdits"]
            own = container_edits(Edits(mounts=(mount,)))["mounts"]
            container["mounts"] = [*container.get("mounts", ()), *own]
        return dump_spec(spec)

    def cdi_id(self, uid: str, index: int) -> str:
        """Return the qualified CDI name of a claim's device, which :meth:`build` has validated."""
        return f"{self._kind}={uid}-{index}"

    def place(self, texts: Mapping[str, str]) -> Mapping[str, OSError]:
        """Ensure that the files of these claims have these contents. Return the errors, keyed by
        UID."""
        return self._each(texts, lambda name, uid: self._directory.write_text(name, texts[uid]))

    def unlink(self, uids: Collection[str]) -> Mapping[str, OSError]:
        """Ensure that these claims do not have files. Return the errors, keyed by UID."""
        failed = self._each(uids, lambda name, _: self._directory.remove(name))
        # The kubelet passes on any UID. If the UID cannot be part of a file name, there is no file.
        no_name = (errno.EINVAL, errno.ENAMETOOLONG)
        return {uid: error for uid, error in failed.items() if error.errno not in no_name}

    def read(self, uid: str) -> str | None:
        """Return the content of a claim's file, an empty string if the file is damaged, or None if
        it does not exist or belongs to another program. Raises OSError."""
        try:
            text = self._directory.read_text(f"{self._prefix}{uid}.json")
        except ValueError:
            return None
        if text is None:
            return None
        try:
            spec: object = json.loads(text)
        except (ValueError, RecursionError):
            return ""
        if not isinstance(spec, dict):
            return ""
        return text if self._is_ours(cast("dict[str, object]", spec), uid) else None

    def uids(self) -> set[str]:
        """Return the UIDs of all claims that have a file. Raises OSError."""
        begin, end = len(self._prefix), -len(".json")
        return {name[begin:end] for name in self._directory.names(self._prefix)}

    def without_entry(self, known: Collection[str]) -> set[str]:
        """
        Return the UIDs of all claims that have a file, except the known ones. Raises OSError.

        Files of other programs are ignored, regardless of their names, but unreadable files are
        included.
        """
        return {uid for uid in self.uids().difference(known) if not self._is_foreign(uid)}

    def clean(self) -> None:
        """Remove partially written files of earlier processes. Raises OSError."""
        self._directory.clean_temporary(self._prefix)

    def _each(
        self, uids: Iterable[str], action: Callable[[str, str], object]
    ) -> dict[str, OSError]:
        """Call `action` with the file name and the UID of each claim. Return the errors, keyed by
        UID."""
        failed: dict[str, OSError] = {}
        for uid in uids:
            try:
                action(f"{self._prefix}{uid}.json", uid)
            except OSError as error:
                failed[uid] = error
            except ValueError as error:
                failed[uid] = OSError(errno.EINVAL, str(error))
        return failed

    def _is_foreign(self, uid: str) -> bool:
        try:
            return self.read(uid) is None
        except OSError:
            return False

    def _is_ours(self, spec: dict[str, object], uid: str) -> bool:
        devices = spec.get("devices")
        if spec.get("kind") != self._kind or not isinstance(devices, list):
            return False
        named = [
            cast("dict[str, object]", device).get("name") if isinstance(device, dict) else None
            for device in cast("list[object]", devices)
        ]
        return all(claim_uid(f"{self._kind}={name}", driver=self._driver) == uid for name in named)


def claim_uid(cdi_name: str, *, driver: str) -> str | None:
    """Return the UID of the claim in a CDI name, or None if the name does not belong to the
    driver."""
    kind, _, device = cdi_name.partition("=")
    uid, _, index = device.rpartition("-")
    return uid if kind == f"{driver}/claim" and uid and index.isdigit() else None
