"""
Events on a claim: its failures on this node, for its owner.

The kubelet reports on a pod that its claims cannot be prepared, but never that they cannot be
unprepared. This module reports both on the claim, where they remain visible after the pod is gone.
Only problems that a user can act on are reported, each once. A device that got a different number
while its claim was prepared is one of them. Transient failures and slow work are
reported only after three minutes. Success is reported only after a reported failure. No claim waits
for an Event: Events are written from a bounded queue.

It must not know gRPC, or how a claim is prepared.
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
from drakit_nodeplugin.claims.work import GERUND, ClaimAnswer, Operation
from drakit_nodeplugin.reasons import ClaimReason

logger = logging.getLogger(__name__)

REPEAT_SECONDS = 600.0
"""Minimum time before the same sentence is reported again on the same claim."""

PAUSE_SECONDS = 0.1
"""Pause between two writes. A driver that fails all claims of a node must not flood the API
server."""

MAX_WAITING = 256
"""Events that wait to be written, one per claim and operation; a node has a few hundred pods."""

MAX_REMEMBERED = 2048
"""Claims whose failures are remembered; the oldest are forgotten first."""

_PASSING = frozenset({ClaimBusyError.reason, ClaimFetchError.reason})
"""Reasons that are mostly transient: for example, the API server is busy."""

_SILENT = frozenset({AbandonedError.reason, ClaimGoneError.reason, ClaimReplacedError.reason})
"""Reasons that do not concern the claim: its pod is being deleted, or the claim does not exist."""

PREPARED: ClaimReason = "Prepared"
_FAILED: Mapping[Operation, ClaimReason] = {
    "prepare": "PrepareFailed",
    "unprepare": "UnprepareFailed",
}

RENUMBERED: ClaimReason = "DeviceRenumbered"

_Key = tuple[str, Operation | Literal["renumbered"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pending:
    """An Event that is to be written."""

    claim: ClaimReference
    operation: Operation
    note: str
    reason: ClaimReason

    @property
    def key(self) -> _Key:
        """One Event of a key waits: a later one replaces it."""
        return self.claim.uid, "renumbered" if self.reason == RENUMBERED else self.operation

    @property
    def failed(self) -> bool:
        """Whether it reports a failed operation."""
        return self.reason == _FAILED[self.operation]


@dataclass(slots=True)
class _Failure:
    """A claim that fails, remembered until it succeeds."""

    since: float
    """Start time. All times here are those of the loop's clock."""

    note: str | None = None
    """The text of the last Event."""

    reported_at: float = 0.0


class ClaimEvents:
    """Selects the results of one driver's claims to report, and writes the Events. An observer of
    the claim queue (:class:`.queue.ClaimObserver`)."""

    def __init__(self, driver: str, *, node: str) -> None:
        self._driver = driver
        self._node = node
        self._failures: OrderedDict[_Key, _Failure] = OrderedDict()
        self._waiting: dict[_Key, _Pending] = {}
        self._due = asyncio.Event()
        self._overflowing = False

    # ------------------------------------------------------------ observed claims

    def finished(
        self, claim: ClaimReference, operation: Operation, answer: ClaimAnswer, seconds: float
    ) -> None:
        """A claim was prepared or unprepared, or could not be."""
        if answer.renumbered:
            note = (
                f"claim {claim}: on node {self._node}, {'; '.join(answer.renumbered)}; running "
                "containers keep the old number, and have no right to the new one until they "
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
        """Work on a claim has lasted for :data:`.SLOW_SECONDS`."""
        text = (
            f"claim {claim}: driver {self._driver} has been {GERUND[operation]} it for more than "
            f"{SLOW_SECONDS:.0f} s; check the driver's log on this node, and if this persists, "
            f"{RESTART}"
        )
        self._warn(claim, operation, self._failure(claim, operation), text)

    def _succeeded(self, claim: ClaimReference, operation: Operation) -> None:
        failure = self._forget((claim.uid, "prepare"))
        if operation == "unprepare":  # the claim has ended here: earlier failures do not matter
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
        """Write Events until canceled; those added before the call are not lost."""
        while True:
            await self._due.wait()
            self._due.clear()
            while self._waiting:
                key = next(iter(self._waiting))
                pending = self._waiting.pop(key)
                # Before the write: the same failure may come during it.
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
        except Exception:  # an Event that is lost must not end the daemon
            logger.exception(
                "Event could not be written",
                extra={"driver": self._driver, "claim": str(claim), "claim_uid": claim.uid},
            )


def _now() -> float:
    return asyncio.get_running_loop().time()
