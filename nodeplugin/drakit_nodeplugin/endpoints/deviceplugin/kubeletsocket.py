"""
``kubelet.sock``, at which device plugins register: served for as long as it is our turn.

As the kubelet at its start, it first removes all sockets from the directory, so that plugins notice
and register anew. The socket is bound under another name and linked to its place: there it listens
from the first moment on, and gRPC, which removes what it has bound, never removes the one that
another instance has put in its place since. It is a link and no rename, as many plugins watch the
directory for files that are created, and a renamed one is none.

It must not know who may register, or what a registration leads to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc.aio

from drakit_nodeplugin.endpoints.deviceplugin.registration import REGISTRATION_SOCKET

__all__ = ("KubeletSocket",)

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Between two looks whether it is still our turn, and the socket in its place."""

MAX_RETRY_SECONDS = 60.0
"""The longest time between two attempts to serve it."""

STOP_SECONDS = 1.0
"""How long registrations under way may take at the end."""

MAX_CALLS = 64
"""Registrations at once."""


SocketIdentity = tuple[int, int]
"""What tells a socket from another one of the same path: its inode, and when it was made (an inode
is used again at once)."""


def identity_of(path: Path) -> SocketIdentity | None:
    """Look which socket is at a path; None if there is nothing. Blocks."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


class KubeletSocket:
    """Serves the socket while an event is set."""

    def __init__(
        self,
        directory: Path,
        *,
        primary: asyncio.Event,
        add_services: Callable[[grpc.aio.Server], None],
        on_lost: Callable[[], None],
    ) -> None:
        """`on_lost` is called when it is our turn no more."""
        self.path = directory / REGISTRATION_SOCKET
        self._directory = directory
        self._primary = primary
        self._add_services = add_services
        self._on_lost = on_lost
        self._server: grpc.aio.Server | None = None
        self._identity: SocketIdentity | None = None
        self._cleaned = False
        """Whether the directory was emptied since it is our turn."""
        self.problem: str | None = None
        """Why it cannot be served, as a sentence; None while it is, or is not to be."""

    async def run(self) -> None:
        """Serve whenever it is our turn, until cancelled."""
        loop = asyncio.get_running_loop()
        pause, due_at = LOOK_SECONDS, 0.0
        while True:
            if not self._primary.is_set():
                await self.stop()
                self._on_lost()
                self.problem, due_at = None, 0.0
                await self._primary.wait()
            if loop.time() >= due_at:
                try:
                    await self._look()
                except (OSError, RuntimeError) as error:
                    pause = min(pause * 2, MAX_RETRY_SECONDS)
                    self._cannot(error, retry_seconds=pause)
                else:
                    pause, self.problem = LOOK_SECONDS, None
                due_at = loop.time() + pause
            await asyncio.sleep(LOOK_SECONDS)

    def _cannot(self, error: Exception, *, retry_seconds: float) -> None:
        self.problem = f"{self.path} cannot be served: {error}"
        facts = {"path": str(self.path), "error": str(error), "retry_seconds": retry_seconds}
        logger.error("device plugins cannot register", extra=facts)

    async def _look(self) -> None:
        if self._server is None:
            await self._start()
            return
        found = await asyncio.to_thread(identity_of, self.path)
        if found != self._identity:
            how = "it was removed" if found is None else "another one is in its place"
            logger.warning(
                "socket is lost and is made anew", extra={"path": str(self.path), "error": how}
            )
            await self._stop_server()
            await self._start()

    async def _start(self) -> None:
        bound = self._directory / f".kubelet-{secrets.token_hex(4)}"
        await asyncio.to_thread(self._prepare_directory)
        server = grpc.aio.server(maximum_concurrent_rpcs=MAX_CALLS)
        self._add_services(server)
        try:
            server.add_insecure_port(f"unix:{bound}")
            await server.start()
            self._identity = await asyncio.to_thread(self._put_in_place, bound)
        except BaseException:
            await server.stop(0)
            raise
        self._server = server
        logger.info("device plugins can register", extra={"path": str(self.path)})

    def _prepare_directory(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o750)
        if self._cleaned:
            return
        for entry in os.scandir(self._directory):
            if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                with suppress(FileNotFoundError):
                    os.unlink(entry.path)
        self._cleaned = True

    def _put_in_place(self, bound: Path) -> SocketIdentity | None:
        os.chmod(bound, 0o600)  # root alone may register, as with the kubelet's directory
        identity = identity_of(bound)
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        os.link(bound, self.path)
        os.unlink(bound)
        return identity

    async def stop(self) -> None:
        """Serve no more; only our own socket is removed."""
        self._cleaned = False
        await self._stop_server()

    async def _stop_server(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        await asyncio.to_thread(self._remove_own)
        await server.stop(STOP_SECONDS)

    def _remove_own(self) -> None:
        if self._identity is not None and identity_of(self.path) == self._identity:
            with suppress(OSError):
                os.unlink(self.path)
