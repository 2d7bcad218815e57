"""
Events on a claim: what went wrong with it on this node, for the person who owns it.

The kubelet tells a pod that its claims cannot be prepared, and nobody that they cannot be
unprepared; here it is told at the claim, where it is still seen when the pod is gone. Only what a
person can act on is told, and once: a failure that passes by itself must have lasted, and work that
is merely slow must have gone on, for three minutes. That a claim is prepared is told only after its
failure was. Nobody waits for an Event: what is to be told stands in a bounded line.

It must not know gRPC, the API client, or how a claim is prepared.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from drakit.device import ClaimReference
from drakit_nodeplugin.claims.answers import (
    GERUND,
    Answer,
    ClaimService,
    Operation,
    PrepareAnswer,
)
from drakit_nodeplugin.claims.errors import (
    AbandonedError,
    ClaimBusyError,
    ClaimFetchError,
    ClaimGoneError,
    ClaimReplacedError,
)

__all__ = ("AnnouncedClaims", "ClaimAnnouncer", "Recorder")

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 180.0
"""How long what passes by itself must have lasted: two of the kubelet's attempts, 90 s apart."""

REPEAT_SECONDS = 600.0
"""Before the same sentence is told again about the same claim."""

PAUSE_SECONDS = 0.1
"""Between two writes: a driver that fails a whole node's claims must not flood the API server."""

MAX_WAITING = 256
"""Claims that wait to be told of; a node has at most a few hundred pods."""

MAX_REMEMBERED = 2048
"""Claims whose failures are remembered; the oldest are forgotten first."""

_PASSING = frozenset({ClaimBusyError.reason, ClaimFetchError.reason})
"""Reasons that mostly pass by themselves: an API server or another instance that is busy."""

_SILENT = frozenset({AbandonedError.reason, ClaimGoneError.reason, ClaimReplacedError.reason})
"""Reasons that are nothing to be told at the claim: its pod is going, or it is not there."""

_Key = tuple[str, Operation]


class Recorder(Protocol):
    """What writes Events; a write that fails is its own trouble."""

    async def record(
        self,
        regarding: Mapping[str, Any],
        *,
        reason: str,
        action: str,
        note: str,
        type: Literal["Normal", "Warning"] = "Warning",
    ) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Saying:
    """One Event that is to be written."""

    claim: ClaimReference
    operation: Operation
    note: str
    failed: bool = True


@dataclass(slots=True)
class _Failure:
    """What is remembered of a claim that fails, until it succeeds."""

    since: float
    """Loop clock, as all times here."""

    note: str | None = None
    said_at: float = 0.0


class ClaimAnnouncer:
    """Decides what of one driver's claims is told, and has it written."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self._failures: OrderedDict[_Key, _Failure] = OrderedDict()
        self._waiting: dict[_Key, _Saying] = {}
        self._due = asyncio.Event()
        self._overflowing = False

    # ------------------------------------------------------------ what happens to claims

    def failed(
        self, claim: ClaimReference, operation: Operation, *, reason: str, text: str
    ) -> None:
        """A claim could not be prepared or unprepared; the reason is a word of a closed set."""
        if reason in _SILENT:
            return
        failure = self._failure(claim, operation)
        if reason in _PASSING and _now() - failure.since < PATIENCE_SECONDS:
            return
        self._warn(claim, operation, failure, text)

    def lasts(self, claim: ClaimReference, operation: Operation) -> None:
        """Work on a claim has gone on for :data:`PATIENCE_SECONDS`."""
        text = (
            f"claim {claim}: driver {self._driver} has been {GERUND[operation]} it for more than "
            f"{PATIENCE_SECONDS:.0f} s; look at the driver's log on this node"
        )
        self._warn(claim, operation, self._failure(claim, operation), text)

    def succeeded(self, claim: ClaimReference, operation: Operation) -> None:
        """A claim is prepared, or unprepared, now."""
        if not self._failures:
            return
        failure = self._forget((claim.uid, "prepare"))
        if operation == "unprepare":  # whatever was wrong with it before: this was its end here
            self._forget((claim.uid, "unprepare"))
        elif failure is not None and failure.note is not None:
            note = f"claim {claim}: driver {self._driver} has prepared it now"
            self._say(_Saying(claim=claim, operation=operation, note=note, failed=False))

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

    # ------------------------------------------------------------ what is told

    def _warn(
        self, claim: ClaimReference, operation: Operation, failure: _Failure, text: str
    ) -> None:
        if failure.note != text or _now() - failure.said_at >= REPEAT_SECONDS:
            self._say(_Saying(claim=claim, operation=operation, note=text))

    def _say(self, saying: _Saying) -> None:
        key = (saying.claim.uid, saying.operation)
        if len(self._waiting) >= MAX_WAITING and key not in self._waiting:
            if not self._overflowing:
                self._overflowing = True
                logger.warning("too many claims to tell of", extra={"driver": self._driver})
            return
        self._waiting[key] = saying
        self._due.set()

    async def run(self, recorder: Recorder) -> None:
        """Write what is to be told, until cancelled; what came before is not lost."""
        while True:
            await self._due.wait()
            self._due.clear()
            while self._waiting:
                key = next(iter(self._waiting))
                saying = self._waiting.pop(key)
                # Before the write: the same may be said during it.
                if saying.failed and (failure := self._failures.get(key)) is not None:
                    failure.note, failure.said_at = saying.note, _now()
                await self._write(recorder, saying)
                await asyncio.sleep(PAUSE_SECONDS)
            self._overflowing = False

    async def _write(self, recorder: Recorder, saying: _Saying) -> None:
        claim, reason = saying.claim, f"{saying.operation.capitalize()}Failed"
        try:
            await recorder.record(
                {
                    "apiVersion": "resource.k8s.io/v1",
                    "kind": "ResourceClaim",
                    "namespace": claim.namespace,
                    "name": claim.name,
                    "uid": claim.uid,
                },
                type="Warning" if saying.failed else "Normal",
                reason=reason if saying.failed else "Prepared",
                action=GERUND[saying.operation].capitalize(),
                note=saying.note,
            )
        except Exception:  # a sentence that is lost must not end the daemon
            logger.exception(
                "an event could not be written",
                extra={"driver": self._driver, "claim": str(claim), "claim_uid": claim.uid},
            )


class AnnouncedClaims:
    """A :class:`ClaimService` whose failures are told by a :class:`ClaimAnnouncer`."""

    def __init__(self, claims: ClaimService, announcer: ClaimAnnouncer) -> None:
        self._claims = claims
        self._announcer = announcer

    async def prepare(self, claims: Sequence[ClaimReference], answer: Answer) -> None:
        """Prepare, and tell what fails or lasts."""
        with _Watch("prepare", claims, answer, self._announcer) as watch:
            await self._claims.prepare(claims, watch.answer)

    async def unprepare(self, claims: Sequence[ClaimReference], answer: Answer) -> None:
        """Unprepare, and tell what fails or lasts."""
        with _Watch("unprepare", claims, answer, self._announcer) as watch:
            await self._claims.unprepare(claims, watch.answer)

    def abandon(self, uid: str) -> None:
        """Pass it on."""
        self._claims.abandon(uid)


class _Watch:
    """Follows the claims of one call to their answers."""

    def __init__(
        self,
        operation: Operation,
        claims: Sequence[ClaimReference],
        answer: Answer,
        announcer: ClaimAnnouncer,
    ) -> None:
        self._operation: Operation = operation
        self._left = {claim.uid: claim for claim in claims}
        self._answer = answer
        self._announcer = announcer

    def __enter__(self) -> _Watch:
        self._timer = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        for claim in self._left.values():
            self._announcer.lasts(claim, self._operation)

    def answer(self, uid: str, said: PrepareAnswer) -> None:
        claim = self._left.pop(uid, None)
        if claim is not None and said.error is None:
            self._announcer.succeeded(claim, self._operation)
        elif claim is not None and said.error is not None:
            reason = said.reason or ""
            self._announcer.failed(claim, self._operation, reason=reason, text=said.error)
        self._answer(uid, said)


def _now() -> float:
    return asyncio.get_running_loop().time()
