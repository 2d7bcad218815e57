"""
The protocol of the disk helper: a client sends one line of JSON on a new connection, and gets one
back.

A request names a block device by its number *and* by the kernel's sequence number of the disk. The
kernel never reuses the sequence number, so a request cannot reach another disk that was plugged in
meanwhile.

It must not know sockets, or operations on disks.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

__all__ = ("MAX_LINE", "Answer", "MalformedError", "Operation", "Outcome", "Request")

MAX_LINE = 4096
"""Bytes of a line. A longer one is malformed."""

Operation = Literal["check", "wipe"]
Outcome = Literal["free", "busy", "wiping", "wiped", "failed"]

_NUMBER = re.compile(r"[0-9]{1,4}:[0-9]{1,7}")
_MAX_SEQUENCE = 2**64 - 1


class MalformedError(ValueError):
    """A line that is not a request or an answer; the text is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """An operation on one block device."""

    operation: Operation
    """``check``: whether the disk can be opened exclusively. ``wipe``: erase it; the first request
    starts the work, and each further one reports its progress."""

    number: str
    """``MAJOR:MINOR`` of the disk or partition."""

    sequence: int
    """The kernel's sequence number of the disk (``diskseq`` in sysfs, since Linux 5.15)."""

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def parse(line: bytes) -> Request:
        """Read a line; raises MalformedError."""
        body = _parse(line)
        match body:
            case {"operation": "check" | "wipe" as operation, "number": str(number), **rest} if (
                _NUMBER.fullmatch(number)
            ):
                sequence = rest.get("sequence")
            case _:
                raise MalformedError("a request needs an operation and a device number")
        if not isinstance(sequence, int) or not 0 <= sequence <= _MAX_SEQUENCE:
            raise MalformedError("a request needs the disk's sequence number")
        return Request(operation=cast("Operation", operation), number=number, sequence=sequence)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The outcome of a request."""

    outcome: Outcome
    """``free`` or ``busy`` after a check; ``wiping``, ``wiped``, ``busy`` or ``failed`` after a
    request to wipe."""

    detail: str = ""
    """A clause for people: the reason, or the progress."""

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode()[: MAX_LINE - 1] + b"\n"

    @staticmethod
    def parse(line: bytes) -> Answer:
        """Read a line; raises MalformedError."""
        body = _parse(line)
        outcome, detail = body.get("outcome"), body.get("detail", "")
        if outcome not in get_args(Outcome) or not isinstance(detail, str):
            raise MalformedError("an answer needs an outcome")
        return Answer(outcome=cast("Outcome", outcome), detail=detail)


def _parse(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE or not line.endswith(b"\n"):
        raise MalformedError("the line is incomplete or too long")
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MalformedError("the line is not JSON") from error
    if not isinstance(body, dict):
        raise MalformedError("the line is not a JSON object")
    return cast("dict[str, Any]", body)
