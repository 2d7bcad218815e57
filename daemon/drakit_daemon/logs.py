"""
The log format of both daemons: a constant message, named facts, and the ID of the request that
caused the line.

The ID is a context variable that a filter adds to every record, so no caller passes it along. Tasks
and ``run_coroutine_threadsafe`` inherit it; ``run_in_executor`` does not (use
``contextvars.copy_context().run``). The caller decides which facts it logs. :class:`ProblemLog`
logs the result of a repeated check only when it changes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

from drakit.text import escaped

request_id: ContextVar[str] = ContextVar("request_id", default="-")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id"}


def new_request_id() -> str:
    """Return an ID that is short, and unlikely to repeat within a log."""
    # A cryptographically secure ID would take a system call each time.
    return f"{random.getrandbits(32):08x}"


@contextmanager
def request_scope(identifier: str) -> Generator[None]:
    """Add this ID to each log line in the block, and in the tasks that the block starts."""
    token = request_id.set(identifier)
    try:
        yield
    finally:
        request_id.reset(token)


class ProblemLog:
    """
    Logs a problem when it appears or changes, and once when it is gone.

    Use this class for periodic checks: report the result of each check, and only changes are
    logged. Not thread-safe.
    """

    def __init__(
        self,
        logger: logging.Logger,
        message: str,
        *,
        recovered: str | None = None,
        level: int = logging.WARNING,
        fact: str = "error",
        facts: Mapping[str, object] | None = None,
        pause_seconds: float = 0.0,
    ) -> None:
        """
        ``recovered`` is the message when a problem is gone. Without it, that is not logged. The
        problem is logged as the fact ``fact``, in addition to ``facts``. ``pause_seconds`` is the
        minimum time between two lines (loop clock), so that a flapping result does not flood the
        log.
        """
        self.problem: str | None = None
        """The last logged result. None if there was no problem."""

        self._logger = logger
        self._message = message
        self._recovered = recovered
        self._level = level
        self._fact = fact
        self._facts = dict(facts or {})
        self._pause_seconds = pause_seconds
        self._logged_at = float("-inf")

    def report(self, problem: str | None, **facts: object) -> bool:
        """Report the result of a check. Returns True if a new problem was logged."""
        if problem == self.problem or not self._pause_is_over():
            return False
        self.problem = problem
        facts = self._facts | facts
        if problem is not None:
            self._logger.log(self._level, self._message, extra=facts | {self._fact: problem})
            return True
        if self._recovered is not None:
            self._logger.info(self._recovered, extra=facts)
        return False

    def _pause_is_over(self) -> bool:
        if not self._pause_seconds:
            return True
        now = asyncio.get_running_loop().time()
        if now - self._logged_at < self._pause_seconds:
            return False
        self._logged_at = now
        return True


class RequestIdFilter(logging.Filter):
    """Adds the current request's ID to a record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    return {k: v for k, v in vars(record).items() if k not in _STANDARD and not k.startswith("_")}


_encode = json.JSONEncoder(default=str, ensure_ascii=False).encode


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "msg": record.getMessage(),
            "request_id": getattr(record, "request_id", "-"),
            **_facts(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return escaped(_encode(line))


class TextFormatter(logging.Formatter):
    """
    Formats a record as one human-readable line: time, level, message, then the facts as key=value.

    A traceback follows, indented, so that no line of it can look like the start of a record.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        facts = {"request_id": getattr(record, "request_id", "-"), **_facts(record)}
        named = " ".join(f"{k}={v}" for k, v in facts.items() if v != "-")
        line = escaped(f"{time} {record.levelname:<7} {record.getMessage()}  {named}".rstrip())
        if record.exc_info:
            for part in self.formatException(record.exc_info).split("\n"):
                line += f"\n    {escaped(part)}"
        return line


def configure(*, level: str = "INFO", form: Literal["json", "text"] = "json") -> None:
    """Log everything to standard error in one format. A daemon calls this once in ``main``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    handler.addFilter(RequestIdFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # Don't log the location in the code, the thread or the process, because determining them takes
    # a third of the time of a line (Python's Logging HOWTO, "Optimization").
    logging._srcfile = None  # pyright: ignore[reportPrivateUsage]
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    # At DEBUG, these libraries log each of their internal steps.
    for name in ("grpc", "asyncio"):
        logging.getLogger(name).setLevel(max(root.level, logging.INFO))
