"""
Transactions that a damaged log (SQLite's ``-wal``) holds, and that SQLite silently leaves out.

SQLite reads a log up to the first frame that does not pass its checksum, because a power cut may
leave one transaction behind that was not finished. More than one cannot be left so, as each is
flushed before the next begins: then frames that were on disk have changed, and claims that the
kubelet was told of are missing. The format is that of https://sqlite.org/fileformat2.html#walformat.

Functions block. It must not know tables or rows.
"""

from __future__ import annotations

import sqlite3
import struct
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ("lost_transactions",)

_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">4I8x")
_MAGIC = (0x377F0682, 0x377F0683)
_UNFINISHED = 1
"""Transactions that a crash may leave behind what is readable."""

_BUSY_SECONDS = 5.0
"""How long another process may checkpoint the log: milliseconds, unless its disk hangs."""


def lost_transactions(connection: sqlite3.Connection, log: Path) -> int:
    """
    Count the transactions of a log that SQLite does not see, where a crash does not explain them.

    The connection must be in no transaction; it must not have written yet. Raises sqlite3.Error.
    """
    before = _header(log)
    if before is None:
        return 0
    commits = list(_commits(log, before))
    readable = _readable_frames(connection)
    if _header(log) != before:
        return 0  # another process has begun the log anew: it has read all of it
    lost = sum(number > readable for number in commits)
    return lost if lost > _UNFINISHED or (lost and not _is_sound(before)) else 0


def _readable_frames(connection: sqlite3.Connection) -> int:
    until = time.monotonic() + _BUSY_SECONDS
    while True:
        busy, readable, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if not busy:
            return readable
        # Another process is checkpointing, and SQLite answers with -1 instead of a number.
        if time.monotonic() > until:
            error = sqlite3.OperationalError(
                f"another process has been checkpointing the log for {_BUSY_SECONDS:g} s"
            )
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise error
        time.sleep(0.01)


def _header(log: Path) -> bytes | None:
    try:
        with log.open("rb") as file:
            header = file.read(_HEADER.size)
    except FileNotFoundError:
        return None
    return header if len(header) == _HEADER.size else None


def _commits(log: Path, header: bytes) -> Iterator[int]:
    """Give the numbers of frames, from 1, that end a transaction of this life of the log."""
    _, _, page_bytes, _, *salts, _, _ = _HEADER.unpack(header)
    if not _is_sound(header):
        page_bytes = _page_bytes(log)
    if not page_bytes:
        return
    with log.open("rb") as file:
        number = 0
        while True:
            file.seek(_HEADER.size + number * (_FRAME.size + page_bytes))
            frame = file.read(_FRAME.size)
            if len(frame) < _FRAME.size:
                return
            _, pages, *found = _FRAME.unpack(frame)
            if number == 0 and not _is_sound(header):
                salts = found
            number += 1
            if pages and found == salts:
                yield number


def _page_bytes(log: Path) -> int:
    """Give the size of pages by the database, where the log's header does not tell it."""
    try:
        with log.with_name(log.name.removesuffix("-wal")).open("rb") as file:
            size = int.from_bytes(file.read(18)[16:18])
    except OSError:
        return 0
    return 65536 if size == 1 else size


def _is_sound(header: bytes) -> bool:
    """Check the header against its own checksum."""
    magic, *_, sum_1, sum_2 = _HEADER.unpack(header)
    if magic not in _MAGIC:
        return False
    order = ">" if magic & 1 else "<"
    one = two = 0
    for first, second in struct.iter_unpack(f"{order}2I", header[:24]):
        one = (one + first + two) & 0xFFFFFFFF
        two = (two + second + one) & 0xFFFFFFFF
    return (one, two) == (sum_1, sum_2)
