"""
Log lines of both daemons: a constant message, named facts, and the id of the request behind it.

The id is a context variable that a filter stamps on every record, so nobody passes it along; tasks
and ``run_coroutine_threadsafe`` inherit it, ``run_in_executor`` does not (use
``contextvars.copy_context().run``). Which facts are logged is the caller's business.

It must not know what a request is.
"""

from __future__ import annotations

import json
import logging
import secrets
import sys
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

__all__ = ("RequestIdFilter", "configure", "new_request_id", "request_id", "request_scope")

request_id: ContextVar[str] = ContextVar("request_id", default="-")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id"}


def new_request_id() -> str:
    """Make an id that is short enough to read aloud and unlikely to return within a log."""
    return secrets.token_hex(4)


@contextmanager
def request_scope(identifier: str) -> Generator[None]:
    """Stamp all that is logged within, and in tasks begun within, with this id."""
    token = request_id.set(identifier)
    try:
        yield
    finally:
        request_id.reset(token)


class RequestIdFilter(logging.Filter):
    """Puts the current request's id on a record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    return {k: v for k, v in vars(record).items() if k not in _STANDARD and not k.startswith("_")}


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

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
        return json.dumps(line, default=str, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Escape unprintable characters, such as a newline or a control code in a hostile name."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


class TextFormatter(logging.Formatter):
    """
    One human-readable line: time, level, message, then the facts as key=value.

    A traceback follows, indented, so that no text in it can look like the start of a log line.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        facts = {"request_id": getattr(record, "request_id", "-"), **_facts(record)}
        told = " ".join(f"{k}={v}" for k, v in facts.items() if v != "-")
        line = _escaped(f"{time} {record.levelname:<7} {record.getMessage()}  {told}".rstrip())
        if record.exc_info:
            for part in self.formatException(record.exc_info).split("\n"):
                line += f"\n    {_escaped(part)}"
        return line


def configure(*, level: str = "INFO", form: Literal["json", "text"] = "json") -> None:
    """Send everything to standard error in one form. Called once, by a daemon's ``main``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    handler.addFilter(RequestIdFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # At DEBUG these say every turn of their own machinery.
    for name in ("grpc", "asyncio"):
        logging.getLogger(name).setLevel(max(root.level, logging.INFO))
