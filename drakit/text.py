"""
Escapes control characters in untrusted text, because they can forge log lines or manipulate a
terminal.

Logs, Events, reports and the output of all command lines use :func:`escaped`.
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
    overrides, line separators, and surrogates, which cannot be encoded.

    The escapes are JSON escapes (``\u001b``), so escaping a JSON document does not change its
    meaning.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else json.dumps(c)[1:-1] for c in text)


class EscapedStream:
    """
    A text stream that escapes its output, except newlines and tabs.

    The stream does not have a file descriptor, so libraries that check for a terminal do not write
    color codes, which would be escaped.
    """

    def __init__(self, stream: TextIO) -> None:
        self.unescaped = stream
        """The underlying stream, for writing color codes."""

    def write(self, text: str) -> int:
        """Write text with its control characters escaped."""
        return self.unescaped.write(escaped(text, keep="\n\t"))

    def flush(self) -> None:
        """Flush the underlying stream."""
        self.unescaped.flush()

    def isatty(self) -> bool:
        """Return whether the underlying stream is a terminal."""
        return self.unescaped.isatty()


@contextmanager
def escaped_streams() -> Generator[None]:
    """Escape everything that the block, or the decorated function, writes to stdout and stderr."""
    with redirect_stdout(EscapedStream(sys.stdout)), redirect_stderr(EscapedStream(sys.stderr)):
        yield
