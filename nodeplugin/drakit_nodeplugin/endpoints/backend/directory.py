"""
The registration directory: which backends there are, and which of them has which name.

A backend registers by having its socket there. Each new one is asked who it is; of several with one
name the first is used for as long as it lives. Files are the backends' own: none is ever removed.
That a backend is connected to and called is :mod:`.endpoint`'s.

It must not know devices, claims, or how a driver is hosted.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path

import grpc

from drakit.backoff import Backoff
from drakit_nodeplugin.endpoints.allowlist import AllowList, Rights
from drakit_nodeplugin.endpoints.backend.channel import (
    BackendFailedError,
    identify,
    shown,
    unreachable,
)
from drakit_nodeplugin.endpoints.backend.sockets import (
    MAX_SOCKETS,
    BackendSocket,
    scan,
)
from drakit_nodeplugin.endpoints.endpoint import Diagnostic
from drakit_nodeplugin.endpoints.names import MAX_DRIVER_NAME, MAX_PATH_BYTES, is_driver_name
from drakit_nodeplugin.endpoints.socketfile import SocketFile

__all__ = ("BackendDirectory",)

logger = logging.getLogger(__name__)

SCAN_SECONDS = 1.0
AGAIN_SECONDS = (1.0, 60.0)
"""First and longest delay before a socket that was refused, or fails, is looked at again."""

CONCURRENCY = 16
"""Sockets that are asked at a time who they are."""

HANGING_CONCURRENCY = 4
"""The same of those that gave no answer in time when they were asked last: each holds its place for
all of that time, and others must not wait behind them."""

PATIENCE = 3
"""Failures in a row before people hear of them: a socket is there before anybody listens on it, and
before its permissions are set."""

HANDOVER_SECONDS = 30.0
"""How long a backend may be there beside the one whose name it has before people hear of it: so an
update goes that begins the new one first."""


class _RefusedError(Exception):
    """A backend cannot be used; the text is a sentence's end."""

    def __init__(self, text: str, *, is_told: bool = True) -> None:
        super().__init__(text)
        self.is_told = is_told


class _Candidate:
    """A file that may be a backend's socket."""

    def __init__(self, socket: BackendSocket) -> None:
        self.socket = socket
        self.driver: str | None = None
        """Whose socket it is; None as long as that is not known, or not allowed."""
        self.wanted: str | None = None
        """The name that it would have if its holder were not."""
        self.waits_since: float | None = None
        """When it was first found to want one, by the loop's clock."""
        self.hangs = False
        """Whether it gave no answer when it was asked last."""
        self.note: str | None = None
        """What people were told of it last; None once it was in order."""
        self.task: asyncio.Task[None] | None = None
        self.due_at = 0.0
        self.backoff = _backoff()

    def look_soon(self) -> None:
        self.due_at = 0.0
        self.hangs = False
        self.backoff.succeeded()


class BackendDirectory:
    """Watches one directory, in the loop in which it is used."""

    def __init__(
        self,
        path: Path,
        *,
        node: str,
        taken: Callable[[str], str | None],
        remark: Callable[[Diagnostic], None],
        allowed: AllowList | None = None,
    ) -> None:
        """
        The directory is not read yet. `node` is the node's name, for the backends. `taken` returns
        the reason why a backend cannot have a name, or None. `remark` reports to users. Without
        `allowed`, any driver may register.
        """
        self.path = path
        self.node = node
        self.version = ""
        """Of drakit; known as soon as a socket is."""
        self._taken = taken
        self._remark = remark
        self._allowed = allowed
        self._found: Mapping[str, SocketFile] = {}
        self._candidates: dict[str, _Candidate] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._holders: dict[str, _Candidate] = {}
        self._appeared: set[str] = set()
        self._first: asyncio.Task[None] | None = None
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._hanging_slots = asyncio.Semaphore(HANGING_CONCURRENCY)
        self._scanning = asyncio.Lock()
        self._problem: str | None = None
        """What people were told of the directory itself."""
        self._hurry = asyncio.Event()
        self._news = asyncio.Event()

    # ------------------------------------------------------------ what others ask

    def rights(self, driver: str) -> Rights | None:
        """Return the rights of a driver; None without an allow list, or without an entry in it."""
        return None if self._allowed is None else self._allowed.entries.get(driver)

    def socket(self, driver: str) -> BackendSocket | None:
        """Give a driver's socket; None while there is none that said that it is."""
        holder = self._holders.get(driver)
        return None if holder is None else holder.socket

    async def wait(self, driver: str, *, other_than: BackendSocket | None = None) -> BackendSocket:
        """Wait for a driver's socket, or for another one than this."""
        while (socket := self.socket(driver)) is None or socket == other_than:
            await self._news.wait()
        return socket

    async def at_start(self, driver: str) -> BackendSocket | None:
        """Give a driver's socket as soon as it is known, or None once all that is there was looked
        at; also before :meth:`run`."""
        if self._first is None:
            self._first = asyncio.create_task(self._look_at_all(), name="first look at backends")
        waiting = asyncio.create_task(self.wait(driver))
        try:
            await asyncio.wait({waiting, self._first}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        return self.socket(driver)

    def lost(self, socket: BackendSocket) -> None:
        """A connection to a socket has ended: it is looked at again, and if there is nobody any
        more, another one may have its name."""
        candidate = self._candidates.get(socket.path.name)
        if candidate is not None and candidate.socket == socket:
            self._release(candidate)
            candidate.look_soon()
            self._hurry.set()

    def forget(self, driver: str) -> None:
        """A driver is not hosted any more: it appears anew, if its backend is there again."""
        self._appeared.discard(driver)
        self._hurry.set()

    # ------------------------------------------------------------ watching

    async def run(self, appeared: Callable[[str], None]) -> None:
        """Watch until cancelled; `appeared` gets the name of each driver once, when a backend of it
        is first there."""
        try:
            while True:
                self._hurry.clear()
                await self._look()
                for driver in [*self._holders]:
                    if driver not in self._appeared:
                        self._appeared.add(driver)
                        appeared(driver)
                try:
                    async with asyncio.timeout(SCAN_SECONDS):
                        await self._hurry.wait()
                except TimeoutError:
                    pass
        finally:
            await self._stop()

    async def _stop(self) -> None:
        tasks = {*self._tasks}
        if self._first is not None:
            tasks.add(self._first)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _look_at_all(self) -> None:
        await self._look()
        if self._tasks:
            await asyncio.wait({*self._tasks})

    async def _look(self) -> None:
        """See what is there, and begin to look at what is due."""
        async with self._scanning:
            try:
                found = await asyncio.to_thread(scan, self.path, known={*self._candidates})
                self.version = self.version or await asyncio.to_thread(_version)
            except OSError as error:
                self._tell_of_itself(
                    f"cannot be read or made: {os.strerror(error.errno or 0)}; no new backend is "
                    f"found until it can"
                )
                return
        self._tell_of_itself(
            f"has more than {MAX_SOCKETS} sockets; the others are not looked at"
            if len(found) > MAX_SOCKETS
            else None
        )
        if found != self._found:
            self._compare(dict(islice(found.items(), MAX_SOCKETS)))
            self._found = found
        now = asyncio.get_running_loop().time()
        for candidate in self._candidates.values():
            if candidate.driver is None and candidate.task is None and candidate.due_at <= now:
                candidate.due_at = now + candidate.backoff.next_seconds()
                candidate.task = asyncio.create_task(self._look_at(candidate), name="look")
                self._tasks.add(candidate.task)
                candidate.task.add_done_callback(self._tasks.discard)

    def _tell_of_itself(self, problem: str | None) -> None:
        """Say what is wrong with the directory, if that was not said already."""
        if problem != self._problem:
            self._problem = problem
            if problem is not None:
                note = f"the registration directory of backends, {shown(self.path)}, {problem}"
                self._remark(Diagnostic(reason="BackendDirectory", note=note))

    def _compare(self, found: Mapping[str, SocketFile]) -> None:
        for name in [name for name in self._candidates if name not in found]:
            self._drop(self._candidates.pop(name))
        for name, file in found.items():
            before = self._candidates.get(name)
            if before is not None and before.socket.file == file:
                continue
            socket = BackendSocket(path=self.path / name, file=file)
            anew = self._candidates[name] = _Candidate(socket)
            if before is not None:
                # Otherwise it is as if it were another file.
                anew.note, anew.waits_since = before.note, before.waits_since
                self._drop(before)

    def _drop(self, candidate: _Candidate) -> None:
        self._release(candidate)
        if candidate.task is not None:
            candidate.task.cancel()

    def _release(self, candidate: _Candidate) -> None:
        """Whose name becomes free may be the next one's."""
        name, candidate.driver = candidate.driver, None
        if name is None:
            return
        del self._holders[name]
        for other in self._candidates.values():
            if other.wanted == name:
                other.look_soon()
        self._hurry.set()

    # ------------------------------------------------------------ one socket

    async def _look_at(self, candidate: _Candidate) -> None:
        """Find out whose socket it is."""
        path = candidate.socket.path
        reason, note = "BackendRefused", None
        candidate.wanted = None
        try:
            async with self._hanging_slots if candidate.hangs else self._slots:
                driver = await self._name_of(candidate.socket)
            candidate.hangs = False
            if self._allowed is not None:
                await self._check_rights(candidate.socket, driver, self._allowed)
            self._admit(candidate, driver)
        except _RefusedError as error:
            if error.is_told:
                note = f"the backend at {shown(path)} is refused: {error}"
        except BackendFailedError as error:
            reason = "BackendUnreachable"
            candidate.hangs = error.code is grpc.StatusCode.DEADLINE_EXCEEDED
            if candidate.backoff.failures >= PATIENCE:
                note = f"the backend's socket {shown(path)} {error}"
        except Exception:
            logger.exception("backend cannot be looked at", extra={"path": shown(path)})
        else:
            candidate.note = candidate.waits_since = None
            candidate.backoff.succeeded()
        finally:
            candidate.task = None
        if note is not None and note != candidate.note:
            candidate.note = note
            self._remark(Diagnostic(reason=reason, note=note))

    async def _name_of(self, socket: BackendSocket) -> str:
        path = socket.path
        if not socket.file.is_socket:
            raise _RefusedError("the file is no socket; remove it, or name it otherwise")
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise _RefusedError(
                f"the path has more than {MAX_PATH_BYTES} bytes, which no socket can have; give it "
                f"a shorter name"
            )
        try:
            name = await identify(path, node=self.node, version=self.version)
        except BackendFailedError as error:
            if error.code is grpc.StatusCode.UNAVAILABLE and (why := await unreachable(path)):
                raise BackendFailedError(why, code=error.code) from None
            raise
        if not is_driver_name(name):
            raise _RefusedError(
                f"it calls itself {name[:80]!r:.80}, which is not a DNS subdomain of at most "
                f"{MAX_DRIVER_NAME} characters that begins with a letter; this is a fault of the "
                f"backend"
            )
        return name

    async def _check_rights(self, socket: BackendSocket, driver: str, allowed: AllowList) -> None:
        rights = allowed.entries.get(driver)
        if rights is None:
            raise _RefusedError(f"it calls itself {driver}, and {allowed.missing(driver)}")
        if problem := rights.owner_problem(socket.file):
            raise _RefusedError(f"it {problem}")
        # The name may come from another socket that existed here briefly.
        if not await asyncio.to_thread(socket.is_in_place):
            raise _RefusedError("it was replaced while it reported its name", is_told=False)

    def _admit(self, candidate: _Candidate, driver: str) -> None:
        if (why := self._taken(driver)) is not None:
            raise _RefusedError(f"it calls itself {driver}, and {why}; one of the two must go")
        holder = self._holders.get(driver)
        if holder is not None:
            candidate.wanted = driver
            now = asyncio.get_running_loop().time()
            if candidate.waits_since is None:
                candidate.waits_since = now
            raise _RefusedError(
                f"it calls itself {driver}, which is the driver of the backend at "
                f"{shown(holder.socket.path)}; stop one of the two",
                is_told=now - candidate.waits_since >= HANDOVER_SECONDS,
            )
        candidate.driver = driver
        self._holders[driver] = candidate
        facts = {"driver": driver, "path": shown(candidate.socket.path)}
        logger.info("backend found", extra=facts)
        news, self._news = self._news, asyncio.Event()
        news.set()
        self._hurry.set()


def _version() -> str:
    try:
        return version("drakit")
    except PackageNotFoundError:  # run from its sources
        return "unknown"


def _backoff() -> Backoff:
    first, longest = AGAIN_SECONDS
    return Backoff(first_seconds=first, limit_seconds=longest, jitter=0)
