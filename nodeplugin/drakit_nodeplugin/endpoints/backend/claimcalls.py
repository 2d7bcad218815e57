"""
The calls of a backend for claims: what is asked, and which part of the answer is for which claim.

To :mod:`drakit_nodeplugin.endpoints.calls` this is a driver whose methods go over a socket. An
answer is measured before it is read, and a part that cannot be read fails its claim alone.

It must not know how a backend is found, or how calls wait for each other.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import grpc

from drakit.device import AllocatedClaim, Edits
from drakit.driver import DriverError
from drakit.logs import request_id
from drakit_nodeplugin.endpoints.backend.channel import (
    MAX_MESSAGE_BYTES,
    BackendChannel,
    BackendFailedError,
)
from drakit_nodeplugin.endpoints.backend.convert import (
    MAX_EDITS,
    claim_message,
    edits_of,
    entries_of,
)
from drakit_nodeplugin.endpoints.backend.pacing import Turns
from drakit_nodeplugin.endpoints.backend.wire import GarbageError, parse, parts, printable
from drakit_nodeplugin.endpoints.bridge import CallOverdueError
from drakit_nodeplugin.endpoints.calls import CALL_SECONDS
from drakit_proto.backend.v1 import backend_pb2 as pb

__all__ = ("BackendClaims",)

logger = logging.getLogger(__name__)

DEADLINE_SECONDS = CALL_SECONDS - 1.0
"""Of a call: so that the backend is told of its end before anybody here gives it up."""

MAX_CLAIM_BYTES = 512 * 1024
"""Of the answer for one claim: several times what 32 devices with a hundred edits each take."""

REQUEST_ID = "drakit-request-id"
"""Metadata of each call: the id that is on the node plugin's log lines about it."""

LOST_SECONDS = 1.0
"""How long its connection may still seem to live after a call that did not reach the backend."""

_CLAIMS = frozenset({1})
"""The field of every answer that has the claims in it."""

_UID = frozenset({1})
"""The field of all of those that has the claim's UID in it."""


AnswerT = TypeVar("AnswerT", pb.PreparedClaim, pb.UnpreparedClaim, pb.CheckedClaim)


class BackendClaims:
    """Calls a backend about claims; one for each connection."""

    def __init__(
        self, driver: str, channel: BackendChannel, *, over: Callable[[float], Awaitable[None]]
    ) -> None:
        """`over` waits for the end of the connection, but no longer than so many seconds."""
        self._driver = driver
        self._channel = channel
        self._over = over
        self._lacks: set[str] = set()
        """Optional methods that the backend does not implement."""

    async def prepare_claims(
        self, claims: Sequence[AllocatedClaim]
    ) -> Mapping[str, Sequence[Edits] | Exception]:
        """As :meth:`drakit.Driver.prepare_claims`; raises :class:`DriverError`."""
        answers = await self._ask("PrepareClaims", claims, pb.PreparedClaim)
        turns = Turns()
        results: dict[str, Sequence[Edits] | Exception] = {}
        for uid, answer in answers.items():
            if isinstance(answer, Exception):
                results[uid] = answer
            elif answer.error:
                results[uid] = DriverError(printable(answer.error))
            elif any(entries_of(edits) > MAX_EDITS for edits in answer.edits):
                results[uid] = _fault(f"gave more than {MAX_EDITS:,} edits for a device")
            else:
                converted: list[Edits] = []
                for edits in answer.edits:
                    converted.append(edits_of(edits))
                    await turns.give_way()
                results[uid] = converted
        return results

    async def unprepare_claims(
        self, claims: Sequence[AllocatedClaim]
    ) -> Mapping[str, Exception | None]:
        """As :meth:`drakit.Driver.unprepare_claims`; raises :class:`DriverError`."""
        answers = await self._ask_if_it_can("UnprepareClaims", claims, pb.UnpreparedClaim)
        if answers is None:
            return {item.claim.uid: None for item in claims}
        results: dict[str, Exception | None] = {}
        for uid, answer in answers.items():
            if isinstance(answer, Exception):
                results[uid] = answer
            else:
                results[uid] = DriverError(printable(answer.error)) if answer.error else None
        return results

    async def check_claims(self, claims: Sequence[AllocatedClaim]) -> Mapping[str, bool]:
        """Say of claims whether they are in order; raises :class:`DriverError`."""
        answers = await self._ask_if_it_can("CheckClaims", claims, pb.CheckedClaim)
        if answers is None:
            return {item.claim.uid: True for item in claims}
        return {
            uid: not isinstance(answer, Exception) and answer.in_order
            for uid, answer in answers.items()
        }

    async def _ask_if_it_can(
        self, method: str, claims: Sequence[AllocatedClaim], kind: type[AnswerT]
    ) -> Mapping[str, AnswerT | Exception] | None:
        """Call an optional method; None if the backend does not implement it."""
        if method not in self._lacks:
            try:
                return await self._ask(method, claims, kind)
            except _NotImplementedError:
                self._lacks.add(method)
        return None

    async def _ask(
        self, method: str, claims: Sequence[AllocatedClaim], kind: type[AnswerT]
    ) -> Mapping[str, AnswerT | Exception]:
        """Call a method; gives what was answered by UID, for claims that were asked about."""
        answers: dict[str, AnswerT | Exception] = {}
        for request, uids in _requests(claims):
            raw = await self._call(method, request)
            try:
                self._sort(raw, kind, method=method, uids=uids, answers=answers)
            except GarbageError as error:
                raise _fault(f"answered {method} with {error}") from None
        return answers

    async def _call(self, method: str, request: bytes) -> bytes:
        metadata = ((REQUEST_ID, request_id.get()),)
        try:
            return await self._channel.call(
                method, request, timeout_seconds=DEADLINE_SECONDS, metadata=metadata
            )
        except BackendFailedError as error:
            if error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                # Who waits for this call hears of the connection's end, if that is the cause.
                await self._over(LOST_SECONDS)
            if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise CallOverdueError from None
            if error.code is grpc.StatusCode.UNIMPLEMENTED:
                raise _NotImplementedError(f"its backend {error}") from None
            raise DriverError(f"its backend {error}") from None

    def _sort(
        self,
        raw: bytes,
        kind: type[AnswerT],
        *,
        method: str,
        uids: frozenset[str],
        answers: dict[str, AnswerT | Exception],
    ) -> None:
        """Put each part of an answer to its claim; raises :class:`GarbageError`."""
        strange = 0
        for count, (_, part) in enumerate(parts(raw, _CLAIMS, limit=len(raw))):
            if count > 2 * len(uids):
                raise GarbageError("more claims than it was asked about")
            uid = _uid_of(part)
            if uid not in uids:
                strange += 1
            elif uid in answers:
                answers[uid] = _fault(f"answered {method} twice for this claim")
            elif len(part) > MAX_CLAIM_BYTES:
                size = MAX_CLAIM_BYTES // 1024
                answers[uid] = _fault(f"answered {method} with more than {size} KiB for this claim")
            else:
                try:
                    answers[uid] = parse(kind, part)
                except GarbageError as error:
                    answers[uid] = _fault(f"answered {method} with {error} for this claim")
        if strange:
            text = f"it answered {method} for claims that it was not asked about"
            logger.error("backend answers too much", extra={"driver": self._driver, "error": text})


class _NotImplementedError(DriverError):
    """The backend does not have a method."""


def _requests(claims: Sequence[AllocatedClaim]) -> Iterator[tuple[bytes, frozenset[str]]]:
    """Write the claims as one request, or as several where one would be too large; all requests
    have the same form."""
    request = pb.PrepareClaimsRequest(claims=[claim_message(item) for item in claims])
    if len(claims) > 1 and request.ByteSize() > MAX_MESSAGE_BYTES:
        half = len(claims) // 2
        yield from _requests(claims[:half])
        yield from _requests(claims[half:])
    else:
        yield request.SerializeToString(), frozenset(item.claim.uid for item in claims)


def _uid_of(part: bytes) -> str | None:
    """Give the UID of an answer that has not been read yet; None if there is none."""
    try:
        found = [uid for _, uid in parts(part, _UID, limit=len(part))]
        return found[-1].decode() if found else None
    except (GarbageError, UnicodeDecodeError):
        return None


def _fault(text: str) -> DriverError:
    return DriverError(f"its backend {text}; this is a fault of the backend")
