"""
The metadata files of one driver's claims (KEP-5304): a file for each request, which the claim's CDI
file mounts into containers.

The content is stored with the claim, so that a lost file can be restored without calling the
driver. A metadata file is written before the CDI file that mounts it, and removed before that file.
A metadata file without a CDI file therefore belongs to an unfinished step. Files are replaced as a
whole, so a running container keeps the content that it was started with.

For a driver without metadata, there are no such files, and there is no cost. If the directory is
unreadable, only claims with metadata fail. :mod:`drakit_formats.resource.metadata` defines the
format. The checkpoint writes and removes files together with their rows.

Does not depend on the checkpoint, the API server, drivers or gRPC.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from drakit.device import Mount
from drakit_daemon.logs import ProblemLog
from drakit_formats.cdi import SpecDirectory
from drakit_formats.resource.claim import base_request
from drakit_formats.resource.metadata import container_path, file_text
from drakit_nodeplugin.state.records import StoredClaim

logger = logging.getLogger(__name__)


class MetadataFiles:
    """
    Writes, compares and removes the metadata files of one driver.

    All methods except :meth:`mounts` block. Only one thread at a time can call :meth:`place` and
    :meth:`unlink`.
    """

    def __init__(self, driver: str, directory: Path) -> None:
        """Create the object. `directory` belongs only to the driver. Container runtimes must see it
        at the same path."""
        self._driver = driver
        # Don't flush files to disk, because every claim is prepared again after a boot, and its
        # files are then compared.
        self._directory = SpecDirectory(directory, durable=False)
        self._names: dict[str, frozenset[str]] = {}
        """The names of files that exist or should exist, keyed by UID. Includes files of earlier
        processes once the directory has been listed."""
        self._is_listed = False
        self._listing = threading.Lock()
        self._problems = ProblemLog(
            logger,
            "the directory of metadata files cannot be listed; only claims with metadata fail",
            facts={"driver": driver, "file": str(directory)},
        )

    @property
    def directory(self) -> Path:
        """The directory of the metadata files, which need not exist."""
        return self._directory.path

    def mounts(self, claim: StoredClaim) -> dict[int, Mount]:
        """Return the mounts of a claim's files: one for each request, keyed by the index of the
        request's first device. A container gets either all devices of a claim or those of one
        request."""
        mounts: dict[int, Mount] = {}
        mounted: set[str] = set()
        for index, device in enumerate(claim.devices):
            request = base_request(device.request)
            if device.request not in claim.metadata or request in mounted:
                continue
            mounted.add(request)
            mounts[index] = Mount(
                host_path=f"{self.directory}/{_name(claim.uid, request)}",
                container_path=container_path(
                    self._driver, claim.reference, request, pod_claim=claim.pod_claim_name
                ),
            )
        return mounts

    def place(self, claims: Collection[StoredClaim]) -> Mapping[str, OSError]:
        """Ensure that claims have exactly their files. Return the errors, keyed by UID."""
        failed: dict[str, OSError] = {}
        for claim in claims:
            if not claim.metadata and claim.uid not in self._known():
                continue
            texts = self._texts(claim)
            former = self._known().get(claim.uid, frozenset())
            self._known()[claim.uid] = former | texts.keys()
            try:
                for name, text in texts.items():
                    self._call(self._directory.write_text, name, text)
                left = former - texts.keys()
                mounted = self._mounted(claim, left) if left else frozenset[str]()
                self._remove(left - mounted)
            except OSError as error:
                failed[claim.uid] = error
            else:
                self._settle(claim.uid, mounted.union(texts))
        return failed

    def unlink(self, uids: Collection[str]) -> Mapping[str, OSError]:
        """Ensure that these claims have no files. Return the errors, keyed by UID."""
        failed: dict[str, OSError] = {}
        for uid in uids:
            try:
                self._remove(self._known().get(uid, ()))
            except OSError as error:
                failed[uid] = error
            else:
                self._settle(uid, frozenset())
        return failed

    def missing(self) -> set[str]:
        """Return the UIDs of claims that have lost a file. Raises OSError if any claim had a file
        and the directory cannot be listed."""
        if not (known := self._known()):
            return set()
        found = frozenset(self._directory.names(""))
        return {uid for uid, names in [*known.items()] if not names <= found}

    def differs(self, claim: StoredClaim) -> bool:
        """Return whether any of a claim's files does not have the stored content."""
        try:
            return any(
                self._directory.read_text(name) != text for name, text in self._texts(claim).items()
            )
        except (OSError, ValueError):
            # Treat the file as different: the write reports the problem, for this claim only.
            return True

    def clean(self, needed: Collection[str]) -> None:
        """Remove partially written files of earlier processes, and the files of all claims except
        the needed ones. There must be no work on claims in flight. Raises OSError."""
        self._directory.clean_temporary("")
        for error in self.unlink(self._known().keys() - set(needed)).values():
            raise error

    def _known(self) -> dict[str, frozenset[str]]:
        """Return the files, keyed by UID. Until the directory can be listed, files of earlier
        processes are missing from the result. A later start removes such files, and containers
        cannot get them without a CDI file."""
        if not self._is_listed:
            with self._listing:
                if not self._is_listed:
                    self._list()
        return self._names

    def _list(self) -> None:
        try:
            found = self._directory.names("")
        except OSError as error:
            self._problems.report(str(error))
            return
        for name in found:
            uid = name.rpartition("_")[0]  # request names do not contain underscores
            self._names[uid] = self._names.get(uid, frozenset()) | {name}
        self._is_listed = True
        self._problems.report(None)

    def _mounted(self, claim: StoredClaim, names: frozenset[str]) -> frozenset[str]:
        """Return those of these files that exist and that the claim's CDI file mounts, but whose
        content is unknown. Rebuilt entries, and entries from an earlier version, do not have the
        content. Containers of such claims may be running, and could not restart without the
        files."""
        spec = claim.cdi_spec or ""
        mounted = frozenset(name for name in names if f'/{name}"' in spec)
        return mounted.intersection(self._directory.names("")) if mounted else mounted

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._call(self._directory.remove, name)

    def _call(self, action: Callable[..., object], name: str, *values: str) -> None:
        """Write or remove a file. If that fails, raise an OSError that names the file, to
        distinguish the error from one about the claim's CDI file."""
        try:
            action(name, *values)
        except ValueError as error:
            raise OSError(errno.EINVAL, str(error)) from None
        except OSError as error:
            why = f"metadata file {self.directory / name}: {error.strerror or error}"
            raise OSError(error.errno or errno.EIO, why) from error

    def _settle(self, uid: str, names: frozenset[str]) -> None:
        if names:
            self._known()[uid] = names
        else:
            self._known().pop(uid, None)

    def _texts(self, claim: StoredClaim) -> dict[str, str]:
        return {
            _name(claim.uid, base_request(request)): file_text(
                claim.reference,
                body,
                generation=claim.metadata_generation,
                pod_claim=claim.pod_claim_name,
            )
            for request, body in claim.metadata.items()
        }


def _name(uid: str, request: str) -> str:
    return f"{uid}_{request}.json"
