"""
The calls of a backend for claims: what is asked, and which part of the answer is for which claim.

To :mod:`drakit_nodeplugin.endpoints.calls` this is a driver whose methods go over a socket. An
answer is measured before it is read, it is read claim by claim, and a part that cannot be read
fails its claim alone.

It must not know how a backend is found, or how calls wait for each other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

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
from drakit_nodeplugin.endpoints.calls import CALL_SECONDS
from drakit_nodeplugin.endpoints.python.bridge import CallOverdueError
from drakit_nodeplugin.endpoints.wire import GarbageError, Turns, parse, parts, printable
from drakit_proto.backend.v1 import backend_pb2 as pb

__all__ = ("BackendClaims",)

logger = logging.getLogger(__name__)

DEADLINE_SECONDS = CALL_SECONDS - 1.0
"""Of a call: so that the backend is told of its end before anybody here gives it up. It also bounds
how long the claim of a deleted pod waits for a prepare that goes on."""

MAX_CLAIM_BYTES = 512 * 1024
"""Of the answer for one claim: several times what 32 devices with a hundred edits each take."""

REQUEST_ID = "drakit-request-id"
"""Metadata of each call: the id that is on the node plugin's log lines about it."""

LOST_SECONDS = 1.0
"""How long its connection may still seem to live after a call that did not reach the backend."""

_CLAIMS = frozenset({1})
"""The field of every answer that holds the claims."""

ResultT = TypeVar("ResultT")
_Reader: TypeAlias = Callable[[bytes, int, Turns], Awaitable[ResultT]]
"""Makes a result of the answer for one claim, which has so many devices; raises GarbageError, and
DriverError if the claim has failed."""


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
        return await self._ask("PrepareClaims", claims, _prepared)

    async def unprepare_claims(
        self, claims: Sequence[AllocatedClaim]
    ) -> Mapping[str, Exception | None]:
        """As :meth:`drakit.Driver.unprepare_claims`; raises :class:`DriverError`."""
        answers = await self._ask_if_it_can("UnprepareClaims", claims, _unprepared)
        return {item.claim.uid: None for item in claims} if answers is None else answers

    async def check_claims(self, claims: Sequence[AllocatedClaim]) -> Mapping[str, bool]:
        """Say of claims whether they are in order; raises :class:`DriverError`."""
        answers = await self._ask_if_it_can("CheckClaims", claims, _in_order)
        if answers is None:
            return {item.claim.uid: True for item in claims}
        return {uid: answer is True for uid, answer in answers.items()}

    async def _ask_if_it_can(
        self, method: str, claims: Sequence[AllocatedClaim], read: _Reader[ResultT]
    ) -> Mapping[str, ResultT | Exception] | None:
        """Call an optional method; None if the backend does not implement it."""
        if method not in self._lacks:
            try:
                return await self._ask(method, claims, read)
            except _NotImplementedError:
                self._lacks.add(method)
        return None

    async def _ask(
        self, method: str, claims: Sequence[AllocatedClaim], read: _Reader[ResultT]
    ) -> Mapping[str, ResultT | Exception]:
        """Call a method; gives what was answered by UID, for claims that were asked about."""
        answers: dict[str, ResultT | Exception] = {}
        for request, counts in _requests(claims):
            raw = await self._call(method, request)
            try:
                answers |= await self._sort(raw, read, method=method, counts=counts)
            except GarbageError as error:
                raise _fault(f"answered {method} with {error}") from None
        return answers

    async def _call(self, method: str, request: bytes) -> bytes:
        metadata = ((REQUEST_ID, request_id.get()),)
        calling = self._channel.call(
            method, request, timeout_seconds=DEADLINE_SECONDS, metadata=metadata
        )
        try:
            return await _to_its_end(calling)
        except BackendFailedError as error:
            if error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                # Who waits for this call hears of the connection's end, if that is the cause.
                await self._over(LOST_SECONDS)
            if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise CallOverdueError from None
            if error.code is grpc.StatusCode.UNIMPLEMENTED:
                raise _NotImplementedError(f"its backend {error}") from None
            raise DriverError(f"its backend {error}") from None

    async def _sort(
        self, raw: bytes, read: _Reader[ResultT], *, method: str, counts: Mapping[str, int]
    ) -> Mapping[str, ResultT | Exception]:
        """Put each part of an answer to its claim; raises :class:`GarbageError`."""
        answers: dict[str, ResultT | Exception] = {}
        turns = Turns()
        strange = 0
        for count, (_, part) in enumerate(parts(raw, _CLAIMS, limit=len(raw))):
            if count > 2 * len(counts):
                raise GarbageError("more claims than it was asked about")
            await turns.give_way()
            uid = _uid_of(part)
            if uid is None or uid not in counts:
                strange += 1
            elif uid in answers:
                answers[uid] = _fault(f"answered {method} twice for this claim")
            elif len(part) > MAX_CLAIM_BYTES:
                size = MAX_CLAIM_BYTES // 1024
                answers[uid] = _fault(f"answered {method} with more than {size} KiB for this claim")
            else:
                try:
                    answers[uid] = await read(part, counts[uid], turns)
                except GarbageError as error:
                    answers[uid] = _fault(f"answered {method} with {error} for this claim")
                except DriverError as error:
                    # Without where it was raised: that would keep the message that was read.
                    error.__context__ = None
                    answers[uid] = error.with_traceback(None)
        if strange:
            text = f"it answered {method} for claims that it was not asked about"
            logger.error("backend answers too much", extra={"driver": self._driver, "error": text})
        return answers


async def _to_its_end(calling: Coroutine[Any, Any, bytes]) -> bytes:
    """
    Wait for a call, even if nobody wants its answer any more.

    A call that is cancelled is over here at once, while its handler may go on: it would prepare
    what the next call has found not prepared. So it is not cancelled; its deadline bounds it.
    """
    task = asyncio.create_task(calling)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:  # again: the loop ends
            task.cancel()
        raise


class _NotImplementedError(DriverError):
    """The backend does not have a method."""


def _requests(claims: Sequence[AllocatedClaim]) -> Iterator[tuple[bytes, Mapping[str, int]]]:
    """Write the claims as one request, or as several where one would be too large, with the number
    of each claim's devices; all requests have the same form."""
    request = pb.PrepareClaimsRequest(claims=[claim_message(item) for item in claims])
    if len(claims) > 1 and request.ByteSize() > MAX_MESSAGE_BYTES:
        half = len(claims) // 2
        yield from _requests(claims[:half])
        yield from _requests(claims[half:])
    else:
        yield request.SerializeToString(), {item.claim.uid: len(item.devices) for item in claims}


def _uid_of(part: bytes) -> str | None:
    """Return the UID of the answer for one claim, before the rest is parsed; None if it has none.

    All answers have it in the same field, and it is all that :class:`pb.CheckedClaim` has in common
    with the others: their other fields are skipped.
    """
    try:
        return pb.CheckedClaim.FromString(part).uid
    except DecodeError:
        return None


async def _prepared(part: bytes, count: int, turns: Turns) -> Sequence[Edits]:
    answer = parse(pb.PreparedClaim, part)
    if answer.error:
        raise DriverError(printable(answer.error))
    if len(answer.edits) > count:
        raise _fault("gave edits for more devices than a claim has")
    converted: list[Edits] = []
    for edits in answer.edits:
        if entries_of(edits) > MAX_EDITS:
            raise _fault(f"gave more than {MAX_EDITS:,} edits for a device")
        converted.append(edits_of(edits))
        await turns.give_way()
    return converted


async def _unprepared(part: bytes, count: int, turns: Turns) -> None:
    answer = parse(pb.UnpreparedClaim, part)
    if answer.error:
        raise DriverError(printable(answer.error))


async def _in_order(part: bytes, count: int, turns: Turns) -> bool:
    return parse(pb.CheckedClaim, part).in_order


def _fault(text: str) -> DriverError:
    return DriverError(f"its backend {text}; this is a fault of the backend")
