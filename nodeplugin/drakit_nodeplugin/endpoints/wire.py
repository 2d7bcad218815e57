"""
Messages of vendors' processes in pieces: what is at the top of one, without reading what is below.

A message of 4 MiB can hold two million messages in it, and reading it as a whole would take a
hundred times its size and a second of the daemon's loop. So its parts are counted and measured
before they are read, and read a few at a time.

It must not know gRPC, or what the parts mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

__all__ = ("MAX_PART_BYTES", "GarbageError", "TooManyFieldsError", "parse", "parts", "printable")

MAX_PART_BYTES = 64 * 1024
"""Of a backend's device, counter set, or the health of one: the largest that the API would take has
a quarter of it."""

MAX_UNKNOWN = 20_000
"""Fields that are passed over in one message: a later version may have one for each device. Passing
over so many takes a hundredth of a second."""

MAX_TEXT = 1000
"""Characters of a process's text that go on; of an Event's message there are 1,024."""

_VARINT_BYTES = 10
_LENGTH_DELIMITED = 2
_FIXED_BYTES = {1: 8, 5: 4}

MessageT = TypeVar("MessageT", bound=Message)


class GarbageError(Exception):
    """What came cannot be read, or is larger than anything that could be used. The text says what
    it is, and stands behind words for who sent it."""

    def __init__(self, text: str = "a message that is no protobuf message of its kind") -> None:
        super().__init__(text)


class TooManyFieldsError(GarbageError):
    """A message has more fields that are not known than one could mean."""

    def __init__(self) -> None:
        super().__init__("a message with too many fields that are not known")


def parts(
    raw: bytes,
    known: frozenset[int],
    *,
    limit: int = MAX_PART_BYTES,
    max_unknown: int = MAX_UNKNOWN,
) -> Iterator[tuple[int, bytes]]:
    """
    Give the messages at the top of one, with the numbers of their fields.

    Fields that are not known are passed over, as those of a later version. Raises
    :class:`GarbageError`, also for a part that has more bytes than `limit`, and
    :class:`TooManyFieldsError` if more than `max_unknown` would be passed over. How many known
    ones are too many is said by who takes them: it can stop.
    """
    at, end, unknown = 0, len(raw), 0
    while at < end:
        tag, at = _varint(raw, at)
        number, kind = tag >> 3, tag & 7
        if number == 0 or (number in known and kind != _LENGTH_DELIMITED):
            raise GarbageError
        if number not in known:
            unknown += 1
            if unknown > max_unknown:
                raise TooManyFieldsError
        if kind == _LENGTH_DELIMITED:
            size, at = _varint(raw, at)
            if at + size > end:
                raise GarbageError
            if number in known:
                if size > limit:
                    raise GarbageError(
                        f"a message with a part of more than {limit // 1024} KiB in it"
                    )
                yield number, raw[at : at + size]
            at += size
        elif kind == 0:
            _, at = _varint(raw, at)
        elif kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
        else:
            raise GarbageError
    if at != end:
        raise GarbageError


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Read a number; gives it, and where the next thing begins."""
    value = shift = 0
    for byte in raw[at : at + _VARINT_BYTES]:
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise GarbageError


def parse(kind: type[MessageT], raw: bytes) -> MessageT:
    """Read one message; raises :class:`GarbageError`."""
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise GarbageError from None


def printable(text: str) -> str:
    """Give a process's text fit for a message: in one line, not too long, and never empty."""
    words = " ".join(text[:MAX_TEXT].split())
    if not words.isprintable():
        words = "".join(each if each.isprintable() else "?" for each in words)
    return words or "it does not say why"
