"""
Events on a claim, which report its failures on this node to its owner.

The kubelet reports on a pod that its claims cannot be prepared, but never that they cannot be
unprepared. This module reports both on the claim, where the Events remain visible after the pod is
gone. It reports only problems that a user can act on, such as a device that got a different number
while its claim was prepared. It repeats the same message on a claim after ten minutes at the
earliest. Transient failures and slow work are reported only after three minutes, and success only
after a reported failure. Claims do not wait for Events, which are written from a bounded queue.

Does not depend on gRPC.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from drakit.device import ClaimReference
from drakit_daemon.kube.events import EventRecorder
from drakit_nodeplugin.claims.errors import (
    AbandonedError,
    ClaimBusyError,
    ClaimFetchError,
    ClaimGoneError,
    ClaimReplacedError,
)
from drakit_nodeplugin.claims.queue import RESTART, SLOW_SECONDS
from drakit_nodeplugin.claims.work import GERUND, ClaimResult, Operation
from drakit_nodeplugin.reasons import ClaimReason

logger = logging.getLogger(__name__)

REPEAT_SECONDS = 600.0
"""Minimum time before the same message is reported again on the same claim."""

PAUSE_SECONDS = 0.1
"""Pause between two writes. A driver that fails all claims on a node must not flood the API
server."""

MAX_WAITING = 256
"""Maximum number of Events waiting to be written, one per claim and operation. A node has a few
hundred pods."""

MAX_REMEMBERED = 2048
"""Maximum number of failures to remember, one per claim and operation. The oldest are forgotten
first."""

_PASSING = frozenset({ClaimBusyError.reason, ClaimFetchError.reason})
"""Reasons that are usually transient, for example because the API server is busy."""

_SILENT = frozenset({AbandonedError.reason, ClaimGoneError.reason, ClaimReplacedError.reason})
"""Reasons that do not concern the claim's owner: the pod is being deleted, or the claim does not
exist."""

PREPARED: ClaimReason = "Prepared"
_FAILED: Mapping[Operation, ClaimReason] = {
    "prepare": "PrepareFailed",
    "unprepare": "UnprepareFailed",
}

RENUMBERED: ClaimReason = "DeviceRenumbered"

_Key = tuple[str, Operation | Literal["renumbered"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pending:
    """An Event that is waiting to be written."""

    claim: ClaimReference
    operation: Operation
    note: str
    reason: ClaimReason

    @property
    def key(self) -> _Key:
        """The key of the Event. A later Event with the same key replaces it."""
        return self.claim.uid, "renumbered" if self.reason == RENUMBERED else self.operation

    @property
    def failed(self) -> bool:
        """Whether the Event reports a failed operation."""
        return self.reason == _FAILED[self.operation]


@dataclass(slots=True)
class _Failure:
    """A claim failure, remembered until the claim succeeds."""

    since: float
    """The time of the first failure (loop clock)."""

    note: str | None = None
    """The message of the last Event."""

    reported_at: float = 0.0


class ClaimEvents:
    """Decides which results of one driver's claims to report, and writes the Events. It is an
    observer of the claim queue (:class:`.queue.ClaimObserver`)."""

    def __init__(self, driver: str, *, node: str) -> None:
        self._driver = driver
        self._node = node
        self._failures: OrderedDict[_Key, _Failure] = OrderedDict()
        self._waiting: dict[_Key, _Pending] = {}
        self._due = asyncio.Event()
        self._overflowing = False

    # ------------------------------------------------------------ observed claims

    def finished(
        self, claim: ClaimReference, operation: Operation, answer: ClaimResult, seconds: float
    ) -> None:
        """Record the result of a prepare or unprepare."""
        if answer.renumbered:
            note = (
                f"claim {claim}: on node {self._node}, {'; '.join(answer.renumbered)}; running "
                "containers keep the old number, and cannot open the new one until they "
                "restart; restart them, or delete the pods that use the claim"
            )
            self._add(_Pending(claim=claim, operation=operation, note=note, reason=RENUMBERED))
        if answer.error is None:
            if self._failures:
                self._succeeded(claim, operation)
        elif answer.reason not in _SILENT:
            failure = self._failure(claim, operation)
            if answer.reason in _PASSING and _now() - failure.since < SLOW_SECONDS:
                return
            self._warn(claim, operation, failure, answer.error)

    def lasts(self, claim: ClaimReference, operation: Operation) -> None:
        """Record that work on a claim has been running for :data:`.SLOW_SECONDS`."""
        text = (
            f"claim {claim}: driver {self._driver} has been {GERUND[operation]} it for more than "
            f"{SLOW_SECONDS:.0f} s; check the driver's log on this node, and if this persists, "
            f"{RESTART}"
        )
        self._warn(claim, operation, self._failure(claim, operation), text)

    def _succeeded(self, claim: ClaimReference, operation: Operation) -> None:
        failure = self._forget((claim.uid, "prepare"))
        # The claim's life cycle ends here, so earlier failures no longer matter.
        if operation == "unprepare":
            self._forget((claim.uid, "unprepare"))
        elif failure is not None and failure.note is not None:
            note = f"claim {claim}: driver {self._driver} has now prepared it"
            self._add(_Pending(claim=claim, operation=operation, note=note, reason=PREPARED))

    def _failure(self, claim: ClaimReference, operation: Operation) -> _Failure:
        key = (claim.uid, operation)
        failure = self._failures.setdefault(key, _Failure(since=_now()))
        self._failures.move_to_end(key)
        if len(self._failures) > MAX_REMEMBERED:
            self._failures.popitem(last=False)
        return failure

    def _forget(self, key: _Key) -> _Failure | None:
        if key in self._waiting and self._waiting[key].failed:
            del self._waiting[key]
        return self._failures.pop(key, None)

    # ------------------------------------------------------------ reports

    def _warn(
        self, claim: ClaimReference, operation: Operation, failure: _Failure, text: str
    ) -> None:
        if failure.note != text or _now() - failure.reported_at >= REPEAT_SECONDS:
            reason = _FAILED[operation]
            self._add(_Pending(claim=claim, operation=operation, note=text, reason=reason))

    def _add(self, pending: _Pending) -> None:
        key = pending.key
        if len(self._waiting) >= MAX_WAITING and key not in self._waiting:
            if not self._overflowing:
                self._overflowing = True
                logger.warning("too many claims to report on", extra={"driver": self._driver})
            return
        self._waiting[key] = pending
        self._due.set()

    async def run(self, recorder: EventRecorder) -> None:
        """Write Events until canceled. Events added before the call are not lost."""
        while True:
            await self._due.wait()
            self._due.clear()
            while self._waiting:
                key = next(iter(self._waiting))
                pending = self._waiting.pop(key)
                # Update the failure before the write, because the same failure may recur during the
                # write.
                if pending.failed and (failure := self._failures.get(key)) is not None:
                    failure.note, failure.reported_at = pending.note, _now()
                await self._write(recorder, pending)
                await asyncio.sleep(PAUSE_SECONDS)
            self._overflowing = False

    async def _write(self, recorder: EventRecorder, pending: _Pending) -> None:
        claim = pending.claim
        try:
            await recorder.record(
                {
                    "apiVersion": "resource.k8s.io/v1",
                    "kind": "ResourceClaim",
                    "namespace": claim.namespace,
                    "name": claim.name,
                    "uid": claim.uid,
                },
                type="Normal" if pending.reason == PREPARED else "Warning",
                reason=pending.reason,
                action=GERUND[pending.operation].capitalize(),
                note=pending.note,
            )
        except Exception:  # a lost Event must not stop the daemon
            logger.exception(
                "Event could not be written",
                extra={"driver": self._driver, "claim": str(claim), "claim_uid": claim.uid},
            )


def _now() -> float:
    return asyncio.get_running_loop().time()
