"""
The metadata files of one driver's claims (KEP-5304): a file for each request, which the claim's CDI
file mounts into containers.

The content is stored with the claim, so that a lost file can be restored without calling the
driver. A metadata file is written before the CDI file that mounts it, and removed before it. So a
metadata file without a CDI file belongs to an unfinished step. Files are replaced as a whole, so a
running container keeps the content that it was started with.

For a driver without metadata, there are no such files and no costs. If the directory is unreadable,
only claims with metadata fail. :mod:`drakit_formats.resource.metadata` defines the format; the
checkpoint writes and removes files together with their rows.

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

    All methods except :meth:`mounts` block. Only one thread at a time may call :meth:`place` and
    :meth:`unlink`.
    """

    def __init__(self, driver: str, directory: Path) -> None:
        """Create the object. `directory` belongs only to the driver. It must have the same path for
        container runtimes."""
        self._driver = driver
        # Don't flush files to disk: after a boot, every claim is prepared again, and its files are
        # compared.
        self._directory = SpecDirectory(directory, durable=False)
        self._names: dict[str, frozenset[str]] = {}
        """Files that exist or should exist, keyed by UID. Includes those of earlier processes once
        the directory was listed."""
        self._is_listed = False
        self._listing = threading.Lock()
        self._problems = ProblemLog(
            logger,
            "the directory of metadata files cannot be listed; only claims with metadata fail",
            facts={"driver": driver, "file": str(directory)},
        )

    @property
    def directory(self) -> Path:
        """The directory of the files, which need not exist."""
        return self._directory.path

    def mounts(self, claim: StoredClaim) -> dict[int, Mount]:
        """Return the mounts of a claim's files: one for each request, keyed by the index of the
        request's first device. A container gets all devices of a claim, or those of one request."""
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
        """Return whether a file of a claim does not have its content."""
        try:
            return any(
                self._directory.read_text(name) != text for name, text in self._texts(claim).items()
            )
        except (OSError, ValueError):
            return True  # the write reports the problem for this claim only

    def clean(self, needed: Collection[str]) -> None:
        """Remove half-written files of earlier processes, and those of all claims except the needed
        ones. There must be no work on claims in flight. Raises OSError."""
        self._directory.clean_temporary("")
        for error in self.unlink(self._known().keys() - set(needed)).values():
            raise error

    def _known(self) -> dict[str, frozenset[str]]:
        """Return the files, keyed by UID. Until the directory can be listed, those of earlier
        processes are missing. A later start removes them, and containers cannot get them without a
        CDI file."""
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
            uid = name.rpartition("_")[0]  # requests contain no underscore
            self._names[uid] = self._names.get(uid, frozenset()) | {name}
        self._is_listed = True
        self._problems.report(None)

    def _mounted(self, claim: StoredClaim, names: frozenset[str]) -> frozenset[str]:
        """Return the files among these that exist and that the claim's CDI file mounts, but whose
        content is unknown. Rebuilt entries, and entries of an earlier version, have no content.
        Their containers may be running, and could not restart without the files."""
        spec = claim.cdi_spec or ""
        mounted = frozenset(name for name in names if f'/{name}"' in spec)
        return mounted.intersection(self._directory.names("")) if mounted else mounted

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._call(self._directory.remove, name)

    def _call(self, action: Callable[..., object], name: str, *values: str) -> None:
        """Write or remove a file. If that fails, raise an OSError that names the file, because the
        claim's CDI file can fail as well."""
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
