"""
The server: answers requests on a unix socket that only root can reach.

A wipe can take hours, so it runs in a thread of its own, and each request to wipe the same disk
reports its progress. The last outcome is returned once and then forgotten: a client that asks again
starts again, which is harmless. If the process dies, the client asks again, too.

It must not know Kubernetes, or how a disk is wiped.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from drakit_drivers.diskhelper.disk import DiskBusyError, DiskError
from drakit_drivers.diskhelper.protocol import MAX_LINE, Answer, MalformedError, Request

__all__ = ("Erasing", "Server", "Wipes")

logger = logging.getLogger(__name__)

CONNECTIONS = 16
"""Connections that are served at once; others wait in the kernel's queue."""

CLIENT_SECONDS = 10.0
"""The time that a client has to send its line, or to read the answer."""

WIPES = 64
"""Disks that are wiped at once."""


class Erasing(Protocol):
    """Works on a disk: see :class:`drakit_drivers.diskhelper.disk.Disks`."""

    def check(self, number: str, sequence: int) -> None: ...

    def wipe(self, number: str, sequence: int, *, progress: Callable[[str], None]) -> None: ...


@dataclass(kw_only=True, slots=True)
class _Wipe:
    detail: str = "0 %"
    end: Answer | None = None


class Wipes:
    """The wipes that run or have ended, by device number and sequence number."""

    def __init__(self, disks: Erasing) -> None:
        self._disks = disks
        self._lock = threading.Lock()
        self._wipes: dict[tuple[str, int], _Wipe] = {}

    def answer(self, request: Request) -> Answer:
        """Answer a request; blocks for as long as opening the disk takes."""
        if request.operation == "check":
            return self._check(request)
        key = (request.number, request.sequence)
        with self._lock:
            known = self._wipes.get(key)
            if known is None:
                if len(self._wipes) >= WIPES:
                    return Answer(
                        outcome="wiping", detail="the disk helper is busy with other disks"
                    )
                self._wipes[key] = known = _Wipe()
                threading.Thread(target=self._wipe, args=(key, known), daemon=True).start()
            if known.end is None:
                return Answer(outcome="wiping", detail=known.detail)
            del self._wipes[key]
            return known.end

    def _check(self, request: Request) -> Answer:
        try:
            self._disks.check(request.number, request.sequence)
        except DiskBusyError as error:
            return Answer(outcome="busy", detail=str(error))
        except DiskError as error:
            return Answer(outcome="failed", detail=str(error))
        return Answer(outcome="free")

    def _wipe(self, key: tuple[str, int], wipe: _Wipe) -> None:
        def progress(detail: str) -> None:
            wipe.detail = detail

        number, sequence = key
        end = Answer(outcome="failed", detail="the disk helper failed; its log has the cause")
        try:
            logger.info("wiping disk %s", number)
            self._disks.wipe(number, sequence, progress=progress)
            end = Answer(outcome="wiped")
        except DiskBusyError as error:
            end = Answer(outcome="busy", detail=str(error))
        except DiskError as error:
            end = Answer(outcome="failed", detail=str(error))
        except Exception:
            logger.exception("wiping disk %s failed", number)
        finally:
            logger.info("disk %s: %s %s", number, end.outcome, end.detail)
            with self._lock:
                wipe.end = end


class Server:
    """Serves a socket until it is closed."""

    def __init__(self, path: Path, wipes: Wipes, *, allowed_uid: int = 0) -> None:
        self._wipes = wipes
        self._allowed_uid = allowed_uid
        self._slots = threading.BoundedSemaphore(CONNECTIONS)
        with suppress(FileNotFoundError):
            path.unlink()  # left by an earlier process: no other program uses the directory
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old = os.umask(0o177)
        try:
            self._socket.bind(str(path))
        finally:
            os.umask(old)
        self._socket.listen(CONNECTIONS)

    def run(self) -> None:
        """Serve until `close`."""
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return  # closed
            self._slots.acquire()
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def close(self) -> None:
        """Stop serving; wipes end with the process."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                client.settimeout(CLIENT_SECONDS)
                if _uid(client) != self._allowed_uid:
                    return
                try:
                    with client.makefile("rb") as sent:
                        request = Request.parse(sent.readline(MAX_LINE + 1))
                    answer = self._wipes.answer(request)
                except MalformedError as error:
                    answer = Answer(outcome="failed", detail=f"the request is malformed: {error}")
                client.sendall(answer.line())
        except OSError as error:
            logger.warning("client is gone: %s", error)
        finally:
            self._slots.release()


def _uid(client: socket.socket) -> int:
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("iII", credentials)[1]
