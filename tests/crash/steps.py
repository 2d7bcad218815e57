"""
The steps of a process, seen from outside the code that makes them; at one of them it is killed.

A step is a moment before or after something that stays when the process is gone: a file below the
node's root is opened for writing, synced, renamed or removed; a transaction begins, is about to be
committed, is committed; a driver is called, and has returned; a call of the kubelet came, and its
reply is about to be sent. Production code has no hook for this: Python's audit events, SQLite's
trace, and wrappers around a few functions tell of it.

A step's label is made of its kind and of details that are the same in every run; what differs (pod,
random names, times) is replaced. A label that is met again gets a number. So labels do not depend
on the order in which the claims of a batch get their turn. Transactions of endpoints have labels of
their own, as they come whenever a driver has something to tell.

It must not know scenarios, or what a step means.
"""

from __future__ import annotations

import functools
import mmap
import os
import re
import signal
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATH_EVENTS = {
    "os.chmod": "chmod",
    "os.link": "link",
    "os.mkdir": "mkdir",
    "os.remove": "remove",
    "os.rename": "rename",
    "os.rmdir": "rmdir",
    "os.symlink": "symlink",
    "os.truncate": "truncate",
}
"""Audit events and what they are called in labels; the path comes first in all of them, and a
rename is named by where it leads to. Unlinking is ``os.remove``."""

FILE_CALLS = ("fsync", "fdatasync", "write", "pwrite")
"""Functions of `os` on a descriptor that raise no audit event."""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

VARYING = (
    (re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "POD"),
    (re.compile(r"instance-[\w-]+\.lock"), "instance-*.lock"),
    (re.compile(r"\.[0-9a-f]{8}\.drakit"), ".*.drakit"),
    (re.compile(r"\d{8}T\d{6}"), "TIME"),
)

READING = re.compile(r"\s*(SELECT|EXPLAIN|--|PRAGMA\s+\w+\s*(\(.*\))?\s*;?\s*$)", re.IGNORECASE)

ENDING = re.compile(r"\s*(COMMIT|END|ROLLBACK|RELEASE)\b", re.IGNORECASE)

VACUUM_INSTRUCTIONS = 40
"""Of SQLite's machine, between two steps within a VACUUM: the one statement that leaves a file
half-made if it is cut."""

ENDPOINTS = re.compile(r"sql of endpoints .*")
"""Labels of the endpoints' transactions."""

FRONT_DOOR = re.compile(r"\w+ \S+(\.lock|\.sock)( #\d+)?")
"""Labels of the sockets' and their lock's steps: they are the same in every start."""

NODE_LABELS = re.compile(r"\w+ \S*node\.json\S*( #\d+)?|fsync plugins/drakit\.dev( #\d+)?")
"""Labels of the copy of the node's labels: it is written when the API server has answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """What a process is told about its steps."""

    root: Path
    """Files below it count."""

    trail: Path
    """Where the labels of its steps are written, one a line, before each is made."""

    armed: Path
    """A file of one byte: steps count while it is not zero."""

    kill_at: str | None = None


class Steps:
    """Notes each step of this process, and kills it at the one that was ordered."""

    def __init__(self, orders: Orders) -> None:
        self._root = f"{os.path.realpath(orders.root)}/"
        self._kill_at = orders.kill_at
        self._trail = os.open(orders.trail, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with orders.armed.open("rb") as file:
            self._armed = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
        self._times: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._write = os.write
        self._within = ContextVar("within", default="sql")

    def step(self, label: str) -> None:
        """The process is about to do what the label says."""
        if not self._armed[0]:
            return
        for pattern, word in VARYING:
            label = pattern.sub(word, label)
        with self._lock:
            self._times[label] += 1
            if self._times[label] > 1:
                label = f"{label} #{self._times[label]}"
            self._write(self._trail, f"{label}\n".encode())
            if label == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()  # nothing comes after it, in whatever thread this is

    # ------------------------------------------------------------ where steps are seen

    def install(self) -> None:
        """See all steps from now on; this cannot be undone."""
        sys.addaudithook(self._audit)
        for name in FILE_CALLS:
            setattr(os, name, self._file_call(name, getattr(os, name)))
        self._trace_sqlite()

    def around(self, kind: type, name: str, label: Callable[..., str], *words: str) -> None:
        """Make steps of the beginning and the end of a coroutine method."""
        method = getattr(kind, name)
        before, after = words

        @functools.wraps(method)
        async def stepped(*values: Any, **named: Any) -> Any:
            text = label(*values, **named)
            self.step(f"{text}: {before}")
            try:
                return await method(*values, **named)
            finally:
                self.step(f"{text}: {after}")

        setattr(kind, name, stepped)

    def set_apart(self, kind: type, name: str, word: str) -> None:
        """Give the transactions that a coroutine method makes a word of their own."""
        method = getattr(kind, name)

        @functools.wraps(method)
        async def apart(*values: Any, **named: Any) -> Any:
            token = self._within.set(word)
            try:
                return await method(*values, **named)
            finally:
                self._within.reset(token)

        setattr(kind, name, apart)

    def transaction_step(self, text: str) -> None:
        """The process is about to do, or has done, something with a transaction."""
        self.step(f"{self._within.get()} {text}")

    def _inside(self, path: object) -> str | None:
        if isinstance(path, int):
            try:
                path = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return None
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        text = os.fsdecode(path)
        return text.removeprefix(self._root) if text.startswith(self._root) else None

    def _audit(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = values
            # An integer is a descriptor that was opened before.
            if flags & WRITING and not isinstance(path, int) and (inside := self._inside(path)):
                self.step(f"open {inside}")
        elif (word := PATH_EVENTS.get(event)) is not None:
            path = values[1] if event == "os.rename" else values[0]
            if (inside := self._inside(path)) and not (word == "mkdir" and os.path.isdir(path)):
                self.step(f"{word} {inside}")

    def _file_call(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def stepped(descriptor: int, *values: Any) -> Any:
            if self._armed[0] and (inside := self._inside(descriptor)) is not None:
                self.step(f"{name} {inside}")
            return function(descriptor, *values)

        return stepped

    def _trace_sqlite(self) -> None:
        connect = sqlite3.connect
        traced = traced_connection(self)

        @functools.wraps(connect)
        def stepped(*values: Any, **named: Any) -> sqlite3.Connection:
            path = os.fsdecode(values[0]).removeprefix("file:").partition("?")[0]
            if (inside := self._inside(path)) is not None:
                self.step(f"connect {inside}")
            connection = connect(*values, **{"factory": traced} | named)

            def statement(text: str) -> None:
                self._statement(text, within=connection.in_transaction)

            connection.set_trace_callback(statement)
            return connection

        sqlite3.connect = stepped

    def _statement(self, text: str, *, within: bool) -> None:
        # What is between a transaction's begin and its end is not there after a kill.
        if READING.match(text) or (within and not ENDING.match(text)):
            return
        words = re.findall(r"[A-Za-z_]+", text)
        self.transaction_step(" ".join(words[:3]))


def traced_connection(steps: Steps) -> type[sqlite3.Connection]:
    """SQLite tells of a statement before it runs; this class tells when a commit is over."""

    class Traced(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            if sql.startswith("VACUUM"):
                self.set_progress_handler(self._go_on, VACUUM_INSTRUCTIONS)
            cursor = super().execute(sql, *values)
            if ENDING.match(sql):
                steps.transaction_step("after COMMIT")
            return cursor

        def _go_on(self) -> bool:
            steps.step("sql within VACUUM")
            return False

        def commit(self) -> None:
            super().commit()
            steps.transaction_step("after COMMIT")

        def close(self) -> None:
            # The last one to close writes the log back into the database.
            steps.step("sql close")
            super().close()

    return Traced


def install(orders: Orders) -> None:
    """See the steps of a node plugin that hosts one of the drivers of :mod:`.drivers`."""
    from drakit_nodeplugin.kubelet.dra import ClaimCalls
    from tests.crash.drivers import Marking, Plain

    steps = Steps(orders)
    steps.install()
    set_endpoints_apart(steps)
    for kind, names in ((Marking, ("prepare", "unprepare", "check")), (Plain, ("prepare",))):
        for name in names:
            steps.around(kind, name, functools.partial(_driver_call, name), "before", "after")
    steps.around(ClaimCalls, "answer", _kubelet_call, "received", "reply is to be sent")


def set_endpoints_apart(steps: Steps) -> None:
    """Let transactions of endpoints not change the numbers of those of claims."""
    from drakit_nodeplugin.claims.checkpoint.store import Checkpoint

    for name in ("write_endpoints", "forget_endpoints"):
        steps.set_apart(Checkpoint, name, "sql of endpoints")


def _driver_call(name: str, _driver: Any, claim: Any, device: Any) -> str:
    return f"driver {name} {claim.uid} {device.name}"


def _kubelet_call(_calls: Any, operation: str, *_values: Any, **_named: Any) -> str:
    return f"call {operation}"
