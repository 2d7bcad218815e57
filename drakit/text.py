"""
Text of others for people: control characters, which can forge lines or change a terminal, become
visible escapes.

Logs, Events, reports and the output of all command lines use :func:`escaped`. Does not depend on
the origin of a text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO


def plural(number: int, word: str) -> str:
    """Return a number and its word, as in ``1 node`` and ``2 nodes``."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def escaped(text: str, *, keep: str = "") -> str:
    r"""
    Escape unprintable characters except those in `keep`: C0 and C1 controls, DEL, bidirectional
    overrides, line separators, and surrogates, which no stream can encode.

    The escapes are those of JSON (``\u001b``), so that the result of a JSON document is the same
    document.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else json.dumps(c)[1:-1] for c in text)


class EscapedStream:
    """
    A text stream that escapes what it writes, except newlines and tabs.

    It has no file descriptor: libraries that look for a terminal write colors to it, which would be
    escaped.
    """

    def __init__(self, stream: TextIO) -> None:
        self.unescaped = stream
        """The stream below, for colors."""

    def write(self, text: str) -> int:
        """Write text with its control characters escaped."""
        return self.unescaped.write(escaped(text, keep="\n\t"))

    def flush(self) -> None:
        """Flush the stream below."""
        self.unescaped.flush()

    def isatty(self) -> bool:
        """Return whether the stream below is a terminal."""
        return self.unescaped.isatty()


@contextmanager
def escaped_streams() -> Generator[None]:
    """Escape what the block, or the decorated function, writes to stdout and stderr."""
    with redirect_stdout(EscapedStream(sys.stdout)), redirect_stderr(EscapedStream(sys.stderr)):
        yield
