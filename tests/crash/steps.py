"""
Observes the steps of a process from outside its code, and kills the process at one of them.

A step is a moment before or after an effect that outlives the process. Examples are changes to
files below the node's root, the begin and commit of a transaction, a driver's call and return, and
a call of the kubelet and its reply. Production code has no hook for this: Python's audit events,
SQLite's trace, and wrappers around a few functions report steps.

A step's label consists of its kind and of details that are the same in every run. Other details
(pod, random names, times) are replaced. A repeated label gets a number. So labels do not depend on
the order in which the claims of a batch get their turn. Transactions of endpoints have separate
labels, because they can happen at any time.

It must not depend on scenarios, or on the meaning of a step.
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
"""Audit events and their names in labels. The path is the first value of each event; a rename is
labeled with its target. Unlinking is ``os.remove``."""

FILE_CALLS = ("fsync", "fdatasync", "write", "pwrite")
"""Functions of `os` for descriptors that raise no audit event."""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

VARYING = (
    (re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "POD"),
    (re.compile(r"\.[0-9a-f]{8}\.drakit"), ".*.drakit"),
    (re.compile(r"\d{8}T\d{6}"), "TIME"),
)

READING = re.compile(r"\s*(SELECT|EXPLAIN|--|PRAGMA\s+\w+\s*(\(.*\))?\s*;?\s*$)", re.IGNORECASE)

ENDING = re.compile(r"\s*(COMMIT|END|ROLLBACK|RELEASE)\b", re.IGNORECASE)

VACUUM_INSTRUCTIONS = 40
"""Instructions of SQLite's virtual machine between two steps of a VACUUM: the only statement that
leaves a half-made file if it is interrupted."""

ENDPOINTS = re.compile(r"sql of endpoints .*")
"""Labels of the endpoints' transactions."""

FRONT_DOOR = re.compile(r"\w+ \S+(\.lock|\.sock)( #\d+)?")
"""Labels of the steps of sockets and their lock. They are the same in every start."""

NODE_LABELS = re.compile(r"\w+ \S*node\.json\S*( #\d+)?|fsync plugins/drakit\.dev( #\d+)?")
"""Steps of the file with the node's labels, which is written after a response of the API server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOptions:
    """The options of :class:`Steps` in one process."""

    root: Path
    """The directory whose files count."""

    labels: Path
    """The file for the labels of the steps: one line before each step."""

    armed: Path
    """A file of one byte. Steps count while the byte is not zero."""

    kill_at: str | None = None


class Steps:
    """Records each step of this process, and kills the process at the requested one."""

    def __init__(self, options: StepOptions) -> None:
        self._root = f"{os.path.realpath(options.root)}/"
        self._kill_at = options.kill_at
        self._labels = os.open(options.labels, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with options.armed.open("rb") as file:
            self._armed = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
        self._times: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._write = os.write
        self._within = ContextVar("within", default="sql")

    def step(self, label: str) -> None:
        """Record a step before it happens."""
        if not self._armed[0]:
            return
        for pattern, word in VARYING:
            label = pattern.sub(word, label)
        with self._lock:
            self._times[label] += 1
            if self._times[label] > 1:
                label = f"{label} #{self._times[label]}"
            self._write(self._labels, f"{label}\n".encode())
            if label == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()  # no later step can happen, in any thread

    # ------------------------------------------------------------ observation

    def install(self) -> None:
        """Observe all steps from now on; this cannot be undone."""
        sys.addaudithook(self._audit)
        for name in FILE_CALLS:
            setattr(os, name, self._file_call(name, getattr(os, name)))
        self._trace_sqlite()

    def around(self, kind: type, name: str, label: Callable[..., str], *words: str) -> None:
        """Record the begin and the end of a coroutine method as steps."""
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
        """Label the transactions of a coroutine method with a separate word."""
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
        """Record a step of a transaction."""
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
        # Statements within a transaction have no effect after a kill.
        if READING.match(text) or (within and not ENDING.match(text)):
            return
        words = re.findall(r"[A-Za-z_]+", text)
        self.transaction_step(" ".join(words[:3]))


def traced_connection(steps: Steps) -> type[sqlite3.Connection]:
    """Return a connection class that records the end of a commit: SQLite reports statements only
    before they run."""

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
            # The last connection to close writes the log back into the database.
            steps.step("sql close")
            super().close()

    return Traced


def install(options: StepOptions) -> None:
    """Observe the steps of a node plugin that hosts one of the drivers of :mod:`.drivers`."""
    from drakit_nodeplugin.kubelet.dra import ClaimCalls
    from tests.crash.drivers import Marking, Plain

    steps = Steps(options)
    steps.install()
    set_endpoints_apart(steps)
    for kind, names in ((Marking, ("prepare", "unprepare", "check")), (Plain, ("prepare",))):
        for name in names:
            steps.around(kind, name, functools.partial(_driver_call, name), "before", "after")
    steps.around(ClaimCalls, "handle", _kubelet_call, "received", "reply is to be sent")


def set_endpoints_apart(steps: Steps) -> None:
    """Number the transactions of endpoints separately from those of claims."""
    from drakit_nodeplugin.state.checkpoint import Checkpoint

    for name in ("write_endpoints", "forget_endpoints"):
        steps.set_apart(Checkpoint, name, "sql of endpoints")


def _driver_call(name: str, _driver: Any, claim: Any, device: Any) -> str:
    return f"driver {name} {claim.uid} {device.name}"


def _kubelet_call(_calls: Any, operation: str, *_values: Any, **_named: Any) -> str:
    return f"call {operation}"
