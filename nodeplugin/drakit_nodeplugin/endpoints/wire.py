"""
Calls to other processes, which may be hostile: errors have messages for users, and received
messages are limited in size, rate, number of fields and loop time.

A :class:`Client` keeps messages as bytes, because their fields are counted before parsing. Its
error messages do not contain numbers that vary, so that the same cause results in the same message.

A message of 4 MiB can contain two million messages. Parsing it would take a hundred times its size
in memory, and would block the daemon's loop for a tenth of a second. Therefore, one pass over the
bytes counts the fields first, and then protobuf parses the message. Long lists are split into their
members (:func:`parts`), which the caller parses one by one and in turns (:class:`Turns`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from drakit_daemon.rate_limiter import RateLimiter
from drakit_daemon.tasks import cancelled_by_owner
from drakit_driver.runtime.failures import MAX_TEXT, printable
from drakit_nodeplugin.endpoints.host_paths import OpenSocket

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Maximum size of a message. This is gRPC's default limit, for servers in any language."""

MESSAGES_PER_SECOND = 100.0
MESSAGES_AT_ONCE = 200.0
"""Maximum burst of messages on a stream. A process that sends more does not wait for changes, and
even receiving its messages takes up event loop time."""

BYTES_PER_SECOND = 32 * 1024 * 1024
"""Maximum data rate of one stream, so that endless large messages take up little event loop
time."""

MAX_FIELDS = 40_000
"""Maximum number of fields in a message: twice as many as in the largest device list. Counting them
takes 20 ms."""

MIN_FIELD_BYTES = 2
"""Minimum size of a field, which has a tag and a value. The fields of a short message need not be
counted."""

MAX_PART_BYTES = 64 * 1024
"""Maximum size of a device, counter set or health message: four times the largest size that the API
accepts."""

MAX_DETAILS = MAX_TEXT - 100
"""Maximum length of a status message, so that the error with it is not too long."""

MAX_QUOTED = 100
"""Maximum length of a name in an error."""

TURN_SECONDS = 0.001
"""How long a task works before it lets other tasks run."""

_VARINT_BYTES = 10
_LENGTH_DELIMITED = 2
_FIXED_BYTES = {1: 8, 5: 4}

MessageT = TypeVar("MessageT", bound=Message)


# ---------------------------------------------------------------- calls

_OPTIONS: Sequence[tuple[str, str | int]] = (
    ("grpc.default_authority", "localhost"),  # some servers reject the default
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Without this option, channels to the same path would share their connection and its backoff,
    # although another process may be listening at the path now.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)

_Unary: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"
_Stream: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[bytes, bytes]"


class CallFailedError(Exception):
    """A call failed. The message is the end of a sentence whose subject is the other process."""

    def __init__(self, text: str, *, code: grpc.StatusCode | None = None) -> None:
        super().__init__(text)
        self.code = code

    @property
    def may_be_lost(self) -> bool:
        """Whether the call may have failed because the connection has ended."""
        return self.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class Client:
    """The calls of one service at a unix socket, with messages as bytes."""

    def __init__(self, socket: OpenSocket, service: str) -> None:
        """Create a client, which connects with its first call. The client takes over the socket,
        and closes it."""
        self._service = service
        self._socket = socket
        self._channel = grpc.aio.insecure_channel(f"unix:{socket.path}", options=_OPTIONS)

    async def call(
        self,
        method: str,
        request: bytes,
        *,
        timeout_seconds: float,
        metadata: Sequence[tuple[str, str]] = (),
        wait_for_ready: bool = False,
    ) -> bytes:
        """Call a method. Raises :class:`CallFailedError`."""
        unary: _Unary = self._channel.unary_unary(f"/{self._service}/{method}")
        try:
            return await unary(
                request,
                timeout=timeout_seconds,
                metadata=tuple(metadata),
                wait_for_ready=wait_for_ready,
            )
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError) as error:
            raise _failed(error, method) from None

    async def stream(self, method: str, *, skips: bool = True) -> AsyncGenerator[bytes]:
        """
        Call a method without parameters, and yield messages until the stream ends.

        Raises :class:`CallFailedError`, and :class:`GarbageError` for a flood of messages. If
        `skips` is false, no message may be skipped, so reads are throttled during a flood.
        """
        limiter = RateLimiter(burst=MESSAGES_AT_ONCE, per_second=MESSAGES_PER_SECOND)
        stream_of: _Stream = self._channel.unary_stream(f"/{self._service}/{method}")
        stream = stream_of(b"")
        try:
            while isinstance(raw := await stream.read(), bytes):
                if not skips:
                    await limiter.wait()
                elif not limiter.take():
                    raise GarbageError(f"more than {MESSAGES_PER_SECOND:.0f} messages a second")
                yield raw
                await asyncio.sleep(len(raw) / BYTES_PER_SECOND)
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise _failed(error, method) from None
        finally:
            stream.cancel()

    async def close(self, *, grace_seconds: float | None = None) -> None:
        """Close the channel. After the grace period, its calls are canceled."""
        try:
            await self._channel.close(grace_seconds)
        finally:
            self._socket.close()


def _failed(error: BaseException, method: str) -> CallFailedError:
    """Return the error of a call. If the current task was canceled, raise the cancellation
    instead."""
    if not isinstance(error, grpc.aio.AioRpcError):
        # If the other side canceled a call, or the channel was closed, gRPC raises CancelledError.
        # For a call that begins after that, it raises UsageError.
        if isinstance(error, asyncio.CancelledError) and cancelled_by_owner():
            raise error
        return CallFailedError(f"canceled {method}", code=grpc.StatusCode.CANCELLED)
    code, details = error.code(), error.details() or ""
    match code:
        case grpc.StatusCode.UNIMPLEMENTED:
            text = f"does not implement {method}"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            text = f"did not respond to {method} in time"
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in details:
            text = (
                f"sent a response to {method} that is larger than 4 MiB, or cannot receive a "
                "request of this size"
            )
        case _:
            word = code.name.lower().replace("_", " ")
            text = f"failed in {method}: {printable(details[:MAX_DETAILS])} ({word})"
    return CallFailedError(text, code=code)


# ---------------------------------------------------------------- messages


class GarbageError(Exception):
    """A message that cannot be parsed, or exceeds a limit. The error's message is the end of a
    sentence whose subject is the sender."""

    def __init__(self, text: str = "a malformed protobuf message") -> None:
        super().__init__(text)


def parse(kind: type[MessageT], raw: bytes) -> MessageT:
    """Parse one message with at most :data:`MAX_FIELDS` fields, including nested ones. Raises
    :class:`GarbageError`."""
    if len(raw) > MAX_FIELDS * MIN_FIELD_BYTES:
        _count(raw, kind)
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise GarbageError from None


def parts(
    raw: bytes,
    numbers: frozenset[int],
    *,
    limit: int = MAX_PART_BYTES,
    flags: frozenset[int] = frozenset(),
) -> Iterator[tuple[int, bytes]]:
    """
    Yield the messages and strings in the fields with these numbers, each with its field number.

    Of the booleans in `flags`, only those that are true are yielded, with empty bytes. Other
    fields, such as those of a later version, are skipped. Raises :class:`GarbageError`, including
    for more than :data:`MAX_FIELDS` fields in total, and for a part that is larger than `limit`.
    """
    for count, (number, wire_type, start, end) in enumerate(_fields(raw, 0, len(raw))):
        if count == MAX_FIELDS:
            raise _too_many_fields()
        if number in flags and wire_type == 0:
            if any(byte & 0x7F for byte in raw[start:end]):
                yield number, b""
            continue
        if number not in numbers and number not in flags:
            continue
        if wire_type != _LENGTH_DELIMITED:
            raise GarbageError
        if end - start > limit:
            raise GarbageError(f"a message with a part of more than {limit // 1024} KiB in it")
        yield number, raw[start:end]


def split(raw: bytes, numbers: frozenset[int]) -> tuple[list[tuple[int, bytes]], bytes]:
    """Return the messages in the fields with these numbers, as in :func:`parts`, and the bytes of
    the other fields, so that each can be parsed separately."""
    found: list[tuple[int, bytes]] = []
    rest = bytearray()
    at = 0
    for count, (number, wire_type, start, end) in enumerate(_fields(raw, 0, len(raw))):
        if count == MAX_FIELDS:
            raise _too_many_fields()
        if number in numbers and wire_type == _LENGTH_DELIMITED:
            found.append((number, raw[start:end]))
        else:
            rest += raw[at:end]
        at = end
    return found, bytes(rest)


def _count(raw: bytes, kind: type[Message]) -> None:
    """Raise :class:`GarbageError` if there are too many fields, including nested ones."""
    count = 0
    remaining = [(0, len(raw), kind.DESCRIPTOR)]
    while remaining:
        start, end, message = remaining.pop()
        for number, wire_type, inner_start, inner_end in _fields(raw, start, end):
            count += 1
            if count > MAX_FIELDS:
                raise _too_many_fields()
            field = message.fields_by_number.get(number)
            if wire_type == _LENGTH_DELIMITED and field is not None and field.message_type:
                remaining.append((inner_start, inner_end, field.message_type))


def _fields(raw: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, wire type, start and end of each field's value. Raises
    :class:`GarbageError`."""
    while at < end:
        tag, at = _varint(raw, at)
        number, wire_type = tag >> 3, tag & 7
        if number == 0:
            raise GarbageError
        start = at
        if wire_type == _LENGTH_DELIMITED:
            size, start = _varint(raw, at)
            at = start + size
        elif wire_type == 0:
            _, at = _varint(raw, at)
        elif wire_type in _FIXED_BYTES:
            at += _FIXED_BYTES[wire_type]
        else:
            raise GarbageError
        if at > end:
            raise GarbageError
        yield number, wire_type, start, at


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return the number at an index, and the index after it."""
    value = shift = 0
    for byte in raw[at : at + _VARINT_BYTES]:
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise GarbageError


def _too_many_fields() -> GarbageError:
    return GarbageError(f"a message with more than {MAX_FIELDS:,} fields")


def quoted(text: str) -> str:
    """Return a name that another process chose, in quotes and truncated."""
    return repr(text[:MAX_QUOTED]) + ("..." if len(text) > MAX_QUOTED else "")


def shown(path: Path) -> str:
    """Return a path that a vendor chose, in printable characters."""
    text = str(path)
    return text if text.isprintable() else ascii(text)


class Turns:
    """Lets other tasks run at intervals, during a loop over many small items."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()
        self._worked_seconds = 0.0

    @property
    def worked_seconds(self) -> float:
        """The time spent in all turns, including the current one, but not the time of other
        tasks."""
        return self._worked_seconds + self._loop.time() - self._began_at

    async def give_way(self) -> None:
        """Let other tasks run if this turn has taken long enough."""
        took = self._loop.time() - self._began_at
        if took > TURN_SECONDS:
            self._worked_seconds += took
            await asyncio.sleep(0)
            self._began_at = self._loop.time()


async def to_its_end(calling: Coroutine[Any, Any, bytes]) -> bytes:
    """
    Wait for the end of a call, even if its caller no longer needs the response.

    Canceling a call would end it here immediately, but its handler might continue. It could then
    prepare a device that the next call has already found unprepared. Therefore, the call is not
    canceled. Its deadline limits its duration.
    """
    task = asyncio.create_task(calling)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        try:
            with suppress(CallFailedError):
                await asyncio.shield(task)
        except asyncio.CancelledError:  # a second cancellation means that the loop is ending
            task.cancel()
        raise
