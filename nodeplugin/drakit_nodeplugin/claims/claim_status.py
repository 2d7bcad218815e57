"""
Claim status (KEP-4817): writes a driver's results to the driver's own entries in
``ResourceClaim.status.devices``.

The entries are written in the background, after the kubelet has received its response. No claim
waits for the API server, or fails because of it. Only the newest result of a claim is written, and
an unprepare replaces a pending write with a removal. The write queue is bounded, and kept only in
memory, so that the checkpoint does not grow. After a restart, an entry that had not been written is
missing until the next prepare of its claim. A result without a status, and an unprepare, also
remove entries from before the restart. The claim object shows whether there are any.

Server-side apply with one field manager for each driver changes only these entries. Entries of
other drivers, and fields in these entries that other managers own, remain unchanged.

Does not depend on gRPC or the checkpoint.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from drakit.device import ClaimReference, Edits, PreparedDevice
from drakit_daemon.kube import ApiError, ForbiddenError, InvalidError
from drakit_daemon.kube.queue import WorkQueue
from drakit_daemon.rate_limiter import RateLimiter
from drakit_formats.resource.nodes import is_pool_of
from drakit_formats.resource.objects import Object, children, text
from drakit_formats.resource.status import has_status, status_entry
from drakit_nodeplugin.claims.errors import ClaimFetchError, ClaimGoneError
from drakit_nodeplugin.claims.source import ApiClaims
from drakit_nodeplugin.claims.work import ClaimResult, KubeletDevice, Operation

logger = logging.getLogger(__name__)

RETRY_SECONDS = (1.0, 60.0)
"""Initial and maximum delay before a write is retried."""

MAX_REFUSALS = 5
"""Maximum number of attempts for a write that the API server rejects because of a missing
permission, a policy or an invalid value. A retry is useful if the permission has just been granted,
but every node would retry."""

READ_SECONDS = 15.0
"""Time limit for reading a claim from the API server."""

BURST = 20.0
WRITES_PER_SECOND = 5.0
"""Rate limit for writes. The statuses of a few pods that start together are written immediately,
but a flood of pods must not become a flood of writes."""

MAX_WAITING = 512
"""Maximum number of claims whose status is waiting to be written. A node has a few hundred pods."""

MAX_WAITING_BYTES = 4 * 1024 * 1024
"""Maximum total size, as JSON, of the statuses that are waiting to be written. A claim has up to 32
devices, with 10 KiB of data and 8 conditions each."""

MAX_CLAIM_BYTES = 1024 * 1024
"""Maximum size, as JSON, of the entries of a claim. The API server cannot store objects of 1.5 MiB
or more, and the object also contains the rest of the claim."""

MAX_REMEMBERED = 4096
"""Maximum number of claims for which to remember whether they have a status. The oldest ones are
forgotten first, and are then treated like claims from before a restart."""

_UNUSABLE = (400, 413)
"""HTTP status codes for requests that the API server cannot parse, or that are too large."""

WriteResult = Literal["success", "error", "dropped"]
"""The result of a write, as a metric label. A write that will be retried is an error."""

_Key = tuple[str, str, str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """The status to write for a claim."""

    claim: ClaimReference
    devices: Sequence[tuple[KubeletDevice, PreparedDevice]]
    """The results for the devices. Empty to remove the entries."""

    bytes: int


class ClaimStatuses:
    """Writes the status of one driver's claims. It is an observer of the claim queue
    (:class:`.queue.ClaimObserver`)."""

    def __init__(
        self,
        driver: str,
        source: ApiClaims,
        *,
        node: str,
        on_write: Callable[[WriteResult], None] = lambda result: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Create a writer. `now` returns the wall-clock time, for transition times."""
        self._driver = driver
        self._node = node
        self._source = source
        self._on_write = on_write
        self._now = now
        self._wanted: dict[str, _Wanted] = {}
        self._bytes = 0
        self._queue: WorkQueue[str] = WorkQueue(
            retry_seconds=RETRY_SECONDS[0], retry_limit_seconds=RETRY_SECONDS[1]
        )
        self._has_status: OrderedDict[str, bool] = OrderedDict()
        """For each claim that this process has prepared, keyed by UID: whether it has a status. If
        that is unknown, or a removal has not been written yet, the value is true."""
        self._overflowing = False

    # ------------------------------------------------------------ observed claims

    def finished(
        self, claim: ClaimReference, operation: Operation, answer: ClaimResult, seconds: float
    ) -> None:
        """Enqueue the status of a claim after a successful prepare or unprepare. A failure does
        not change it."""
        if answer.error is not None:
            return
        if operation == "unprepare":
            # None means that the claim was prepared before a restart.
            if self._has_status.pop(claim.uid, None) is not False:
                self._want(claim, ())
            return
        if answer.prepared is None:
            return
        pairs = zip(answer.devices, answer.prepared, strict=False)
        # Omit the edits, which the limits do not count, and which can be larger than everything
        # else.
        devices = [
            (device, replace(each, edits=Edits(), attributes={}))
            for device, each in pairs
            if has_status(each)
        ]
        evidence = {self._has_status.get(claim.uid), answer.had_status} - {None}
        self._has_status[claim.uid] = bool(devices) or True in evidence or not evidence
        if self._has_status[claim.uid]:
            self._want(claim, devices)
        self._has_status.move_to_end(claim.uid)
        if len(self._has_status) > MAX_REMEMBERED:
            self._has_status.popitem(last=False)

    def lasts(self, claim: ClaimReference, operation: Operation) -> None:
        """Do nothing. The status is written only when the operation has finished."""

    def _want(
        self, claim: ClaimReference, devices: Sequence[tuple[KubeletDevice, PreparedDevice]]
    ) -> None:
        self._forget(claim.uid)
        entries = [self._entry(device, each, stored={}, now="") for device, each in devices]
        size = len(json.dumps(entries, ensure_ascii=False).encode()) if entries else 0
        if size > MAX_CLAIM_BYTES:
            self._on_write("dropped")
            facts = {"driver": self._driver, "claim": str(claim), "claim_uid": claim.uid}
            limit = f"its entries have more than {MAX_CLAIM_BYTES // 1024} KiB"
            logger.warning("claim status not written", extra={**facts, "error": limit})
            return
        if len(self._wanted) >= MAX_WAITING or self._bytes + size > MAX_WAITING_BYTES:
            self._on_write("dropped")
            if not self._overflowing:
                self._overflowing = True
                logger.warning("too many claim statuses to write", extra={"driver": self._driver})
            return
        self._wanted[claim.uid] = _Wanted(claim=claim, devices=devices, bytes=size)
        self._bytes += size
        self._queue.add(claim.uid)

    def _forget(self, uid: str) -> None:
        self._queue.forget(uid)
        if (wanted := self._wanted.pop(uid, None)) is not None:
            self._bytes -= wanted.bytes
            self._overflowing = False

    # ------------------------------------------------------------ writes

    async def run(self) -> None:
        """Write statuses until canceled. Statuses enqueued before the call are not lost."""
        limiter = RateLimiter(burst=BURST, per_second=WRITES_PER_SECOND)
        while True:
            uid = await self._queue.get()
            try:
                await limiter.wait()
                if (wanted := self._wanted.get(uid)) is not None:
                    await self._try(uid, wanted)
            finally:
                self._queue.done(uid)

    async def _try(self, uid: str, wanted: _Wanted) -> None:
        facts = {"driver": self._driver, "claim": str(wanted.claim), "claim_uid": uid}
        try:
            await self._write(wanted)
        except ClaimGoneError:
            pass
        except (ApiError, ClaimFetchError) as error:
            cause = error.__cause__ if isinstance(error, ClaimFetchError) else error
            refused = isinstance(cause, ForbiddenError | InvalidError) or (
                isinstance(cause, ApiError) and cause.status in _UNUSABLE
            )
            if not refused or self._queue.failures(uid) + 1 < MAX_REFUSALS:
                self._on_write("error")
                if self._wanted.get(uid) is wanted:
                    self._queue.retry(uid)
                if self._queue.failures(uid) == 1:
                    logger.info(
                        "claim status not written yet", extra={**facts, "error": str(error)}
                    )
                return
            self._on_write("dropped")
            logger.warning("claim status not written", extra={**facts, "error": str(error)})
        except Exception:  # a lost status must not stop the daemon
            self._on_write("dropped")
            logger.exception("claim status could not be written", extra=facts)
        else:
            self._on_write("success")
            if not wanted.devices and self._wanted.get(uid) is wanted and uid in self._has_status:
                self._has_status[uid] = False
        if self._wanted.get(uid) is wanted:
            self._forget(uid)

    async def _write(self, wanted: _Wanted) -> None:
        """Write one status. Does nothing if no write is needed, for example if this name now
        belongs to a claim with another UID."""
        body = await self._source.body(wanted.claim, timeout_seconds=READ_SECONDS)
        if text(body, "metadata", "uid") != wanted.claim.uid:
            return
        stored = {
            _key_of(entry): entry
            for entry in children(body, "status", "devices")
            # During an unprepare, the claim may already be allocated a device of another node.
            if entry.get("driver") == self._driver and is_pool_of(self._node, text(entry, "pool"))
        }
        allocated = {
            _key_of(result)
            for result in children(body, "status", "allocation", "devices", "results")
            if result.get("driver") == self._driver
        }
        now = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        entries: list[dict[str, Any]] = []
        for device, prepared in wanted.devices:
            key = (device.pool, device.device, device.share_id)
            if key in allocated:
                entries.append(self._entry(device, prepared, stored=stored.get(key, {}), now=now))
        # If none of the devices is still allocated, the API server has already removed the entries.
        if entries or (stored and not wanted.devices):
            await self._source.apply_status(
                wanted.claim,
                {"devices": entries} if entries else {},
                field_manager=f"{self._driver}/drakit-nodeplugin",
            )

    def _entry(
        self, device: KubeletDevice, prepared: PreparedDevice, *, stored: Object, now: str
    ) -> dict[str, Any]:
        return status_entry(
            prepared,
            driver=self._driver,
            pool=device.pool,
            device=device.device,
            share_id=device.share_id,
            stored=stored,
            now=now,
        )


def _key_of(entry: Object) -> _Key:
    return text(entry, "pool"), text(entry, "device"), text(entry, "shareID") or None
