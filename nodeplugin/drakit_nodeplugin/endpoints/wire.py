"""
Messages of other processes, which may be hostile: bounded in bytes, fields and loop time.

A message of 4 MiB can hold two million messages. Parsing it takes a hundred times its size in
memory, and a tenth of a second of the daemon's loop. So one walk over the bytes counts the fields
first, here and nowhere else; protobuf parses what is left. Long lists are split into their members
(:func:`parts`), which the caller parses one by one and in turns (:class:`Turns`).

It must not know gRPC, or the meaning of a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

__all__ = ("MAX_FIELDS", "MAX_PART_BYTES", "GarbageError", "Turns", "parse", "parts", "printable")

MAX_FIELDS = 40_000
"""Fields of one message: twice the largest list of devices. The walk over them takes 20 ms."""

MIN_FIELD_BYTES = 2
"""A field has a tag and a value; so a short message needs no count."""

MAX_PART_BYTES = 64 * 1024
"""Bytes of a device, counter set or health: four times the largest that the API accepts."""

MAX_TEXT = 1000
"""Characters of a process's text in an error; an Event's message has 1,024."""

TURN_SECONDS = 0.001
"""How long one task works before it lets others run."""

_VARINT_BYTES = 10
_LENGTH_DELIMITED = 2
_FIXED_BYTES = {1: 8, 5: 4}

MessageT = TypeVar("MessageT", bound=Message)


class GarbageError(Exception):
    """A message that cannot be parsed, or exceeds a limit. The text describes the message, and
    follows words for its sender."""

    def __init__(self, text: str = "a message that is no protobuf message of its kind") -> None:
        super().__init__(text)


def parse(kind: type[MessageT], raw: bytes) -> MessageT:
    """Parse one message of at most :data:`MAX_FIELDS` fields, those of its parts included; raises
    :class:`GarbageError`."""
    if len(raw) > MAX_FIELDS * MIN_FIELD_BYTES:
        _count(raw, kind)
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise GarbageError from None


def parts(
    raw: bytes, numbers: frozenset[int], *, limit: int = MAX_PART_BYTES
) -> Iterator[tuple[int, bytes]]:
    """
    Yield the messages in the fields with these numbers, each with its number.

    Other fields are skipped, as those of a later version. Raises :class:`GarbageError`, also for
    more than :data:`MAX_FIELDS` fields in all, and for a part of more bytes than `limit`.
    """
    for count, (number, wire_type, start, end) in enumerate(_fields(raw, 0, len(raw))):
        if count == MAX_FIELDS:
            raise _too_many_fields()
        if number not in numbers:
            continue
        if wire_type != _LENGTH_DELIMITED:
            raise GarbageError
        if end - start > limit:
            raise GarbageError(f"a message with a part of more than {limit // 1024} KiB in it")
        yield number, raw[start:end]


def _count(raw: bytes, kind: type[Message]) -> None:
    """Raise :class:`GarbageError` if there are too many fields, at any depth."""
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
    """Yield number, wire type, start and end of each field's value; raises
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
    """Return a number, and the index behind it."""
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


def printable(text: str) -> str:
    """Make a process's text fit for an error: one line, not too long, and never empty."""
    words = " ".join(text[:MAX_TEXT].split())
    if not words.isprintable():
        words = "".join(each if each.isprintable() else "?" for each in words)
    return words or "it gave no reason"


class Turns:
    """Lets other tasks run from time to time, in a loop over many small things."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()
        self._worked_seconds = 0.0

    @property
    def worked_seconds(self) -> float:
        """The time in all turns, including the current one, without the time of other tasks."""
        return self._worked_seconds + self._loop.time() - self._began_at

    async def give_way(self) -> None:
        """Let others run if this turn has taken long enough."""
        took = self._loop.time() - self._began_at
        if took > TURN_SECONDS:
            self._worked_seconds += took
            await asyncio.sleep(0)
            self._began_at = self._loop.time()
