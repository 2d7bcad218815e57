"""
The client of the disk helper: checks whether a disk is open elsewhere, and requests wipes.

:mod:`drakit_drivers.diskhelper` is the other side. Calls block; each opens a connection of its own,
so a helper that restarts is found again.

It must not know policies or claims.
"""

from __future__ import annotations

import socket
from pathlib import Path

from drakit import DriverError
from drakit_drivers.diskhelper.protocol import MAX_LINE, Answer, MalformedError, Request

__all__ = ("DiskHelper",)

CALL_SECONDS = 15.0
"""Longest wait for an answer: opening a disk that has to spin up takes seconds."""


class DiskHelper:
    """The helper behind a unix socket."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ask(self, request: Request) -> Answer:
        """Send a request. Raises DriverError if the helper does not answer."""
        try:
            return Answer.parse(self._exchange(request.line()))
        except (OSError, MalformedError) as error:
            raise DriverError(
                f"the disk helper does not answer on {self._path}: {error}; check the container "
                "disk-helper of the node plugin's pod"
            ) from error

    def _exchange(self, line: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(CALL_SECONDS)
            connection.connect(str(self._path))
            connection.sendall(line)
            with connection.makefile("rb") as answer:
                return answer.readline(MAX_LINE + 1)
