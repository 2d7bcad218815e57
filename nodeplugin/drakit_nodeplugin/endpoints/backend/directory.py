"""
Watches the backend directories: finds the sockets in them, and the socket that serves each driver.

Each entry in the configuration has a separate directory, which only its backend's pod mounts. A
backend registers by creating its socket there. The node plugin queries each new socket for its
driver name, and refuses the socket if the name is not the one in the entry. Therefore, no backend
can take the name of another backend, or reach its socket. If several sockets in a directory report
the name, as during an update, the first one keeps it for its lifetime. The files belong to the
backends: the node plugin creates directories, but never removes one, because a pod may still mount
it. :mod:`.connection` connects to a backend and calls it.

Does not depend on devices or claims.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from drakit.driver import Node, PolicyResource
from drakit_daemon.backoff import Backoff
from drakit_daemon.sockets import refuses_connections
from drakit_driver.runtime.failures import printable
from drakit_formats.resource.limits import MAX_DRIVER_NAME, is_driver_name
from drakit_nodeplugin.endpoints.allowlist import Rights
from drakit_nodeplugin.endpoints.host_paths import (
    HostDeviceNodes,
    OpenSocket,
    SocketFile,
    open_directory,
    open_socket,
    socket_file,
)
from drakit_nodeplugin.endpoints.sources import Diagnostic
from drakit_nodeplugin.endpoints.wire import (
    MAX_QUOTED,
    CallFailedError,
    Client,
    GarbageError,
    parse,
    shown,
)
from drakit_nodeplugin.reasons import NodeReason
from drakit_proto.backend.v1 import backend_pb2 as pb

if TYPE_CHECKING:
    from drakit_nodeplugin.allowed import AllowedBackend

logger = logging.getLogger(__name__)

SERVICE = "drakit.backend.v1.Backend"
SUFFIX = ".sock"
MAX_ENTRIES = 1000
"""Maximum number of directory entries to read. The backend owns the directory, and can create any
number of files in it."""

MAX_SOCKETS = 8
"""Maximum number of sockets to use in a directory. During an update, there are two. Known sockets
take precedence over new ones."""

SCAN_SECONDS = 1.0
UNLISTED_SECONDS = 10.0
"""Time between two searches for backends without an entry. Each search connects to their
sockets."""

AGAIN_SECONDS = (1.0, 60.0)
"""Initial and maximum delay before a socket that failed, or was refused, is queried again."""

CONCURRENCY = 64
"""Maximum number of sockets to query at the same time. Even if every socket in 64 full directories
hangs for :data:`INFO_SECONDS`, each is queried within the maximum delay, so the other sockets are
not held up."""

REPORTED_FAILURES = 3
"""Number of consecutive failures of a socket before they are reported. A socket exists before its
backend listens on it and sets its permissions, so a few failures are normal."""

HANDOVER_SECONDS = 30.0
"""How long a second backend can have the same name before this is reported. An update may start the
new backend first."""

INFO_SECONDS = 5.0
"""Time limit for GetInfo."""

MAX_INFO_BYTES = 64 * 1024
PROBE_SECONDS = 1.0

_PERMISSIONS = (
    "make root its owner, or allow others to write to it (mode 0666) and to traverse its "
    "directories: the node plugin cannot override file permissions"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSocket:
    """A file that should be a socket. A new file at the same path is treated as a different
    socket."""

    path: Path
    file: SocketFile
    rights: Rights
    """The permissions from the directory's entry."""

    def open(self) -> OpenSocket:
        """Open the socket. Raises OSError, including if there is now a different file at its path.
        Blocks."""
        opened = open_socket(self.path)
        if opened.file != self.file:
            opened.close()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return opened


def scan(directory: Path, *, known: Collection[str] = ()) -> Mapping[str, SocketFile]:
    """
    Return the sockets in a directory, keyed by name. Create the directory if it is missing. Raises
    OSError. Blocks.

    `known` names come first. If there are more than :data:`MAX_SOCKETS`, one more is returned.
    """
    try:
        with open_directory(directory) as descriptor:
            return _sockets_in(descriptor, known=known)
    except FileNotFoundError:
        # If a backend does not run as root, its init container changes the owner of the directory.
        # The node plugin, which has no capabilities, can then read the directory only with the
        # permissions for "others".
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        return {}


def _sockets_in(directory: int, *, known: Collection[str]) -> Mapping[str, SocketFile]:
    with os.scandir(directory) as entries:
        names = [
            entry.name
            for entry in islice(entries, MAX_ENTRIES)
            if entry.name.endswith(SUFFIX) and not entry.name.startswith(".")
        ]
    # List known names first, because directories are unordered, and a new file must not displace a
    # known one.
    names = [*known, *(name for name in names if name not in known)]
    found: dict[str, SocketFile] = {}
    for name in names:
        with suppress(FileNotFoundError):  # the file was removed in the meantime
            found[name] = socket_file(os.stat(name, dir_fd=directory, follow_symlinks=False))
        if len(found) > MAX_SOCKETS:
            break
    return found


_Key = tuple[str, str]
"""The name of an entry, and the name of a file in its directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scanned:
    """The result of scanning all directories."""

    sockets: Mapping[_Key, SocketFile]
    problems: Mapping[str, str]
    """The problems of directories, keyed by entry, each as the end of a sentence."""
    unreadable: frozenset[str]
    """The entries whose directories could not be read. Their sockets may still exist."""


def _scan_all(parent: Path, entries: Collection[str], *, known: Collection[_Key]) -> _Scanned:
    """Scan the directory of each entry. Blocks."""
    sockets: dict[_Key, SocketFile] = {}
    problems: dict[str, str] = {}
    unreadable: set[str] = set()
    for entry in entries:
        here = [name for of, name in known if of == entry]
        try:
            found = scan(parent / entry, known=here)
        except OSError as error:
            problems[entry] = (
                f"cannot be read or created: {os.strerror(error.errno or 0)}; the node plugin "
                "finds no new socket until the directory is accessible"
            )
            unreadable.add(entry)
            continue
        if len(found) > MAX_SOCKETS:
            problems[entry] = f"has more than {MAX_SOCKETS} sockets; the others are ignored"
        sockets |= {(entry, name): found[name] for name in islice(found, MAX_SOCKETS)}
    return _Scanned(sockets=sockets, problems=problems, unreadable=frozenset(unreadable))


def _unlisted(parent: Path, entries: Collection[str]) -> set[str]:
    """Return the directories without an entry in which a backend is listening. Blocks."""
    found: set[str] = set()
    with suppress(OSError), os.scandir(parent) as directories:
        for each in islice(directories, MAX_ENTRIES):
            if each.name in entries or not each.is_dir(follow_symlinks=False):
                continue
            with suppress(OSError), open_directory(parent / each.name) as descriptor:
                for name in islice(_sockets_in(descriptor, known=()), MAX_SOCKETS):
                    if _listens(parent / each.name / name):
                        found.add(each.name)
    return found


def _listens(path: Path) -> bool:
    opened = open_socket(path)
    try:
        return opened.file.is_socket and not refuses_connections(Path(opened.path))
    finally:
        opened.close()


class _RefusedError(Exception):
    """A backend cannot be used. The message is the end of a sentence."""

    def __init__(self, text: str, *, is_reported: bool = True) -> None:
        super().__init__(text)
        self.is_reported = is_reported


class _Candidate:
    """A file that may be a backend's socket."""

    def __init__(self, socket: BackendSocket) -> None:
        self.socket = socket
        self.driver: str | None = None
        """The driver that the socket serves. None if unknown or refused."""
        self.wanted: str | None = None
        """The driver name that the socket reports, while another socket has that name."""
        self.waits_since: float | None = None
        """The time at which the socket first reported that name (loop clock)."""
        self.note: str | None = None
        """The problem that was last reported. None after success."""
        self.task: asyncio.Task[None] | None = None
        self.due_at = 0.0
        self.backoff = Backoff(*AGAIN_SECONDS, jitter=0)

    def ask_soon(self) -> None:
        self.due_at = 0.0
        self.backoff.succeeded()


class BackendDirectory:
    """Watches the directory of every ``backends.allowed`` entry, in one event loop."""

    def __init__(
        self,
        path: Path,
        *,
        node: Node,
        taken: Callable[[str], str | None],
        report: Callable[[Diagnostic], None],
        allowed: Mapping[str, AllowedBackend],
        devices: HostDeviceNodes,
    ) -> None:
        """
        Create the watch, without reading anything yet. `path` contains a directory for each entry
        of `allowed`. `node` is described to the backends. `taken` returns the reason why a backend
        cannot have a name, or None. `report` notifies users. `devices` is the host's ``/dev``.
        """
        self.path = path
        self.node = node
        self.version = ""
        """The drakit version. Set before the first socket is found."""
        self._taken = taken
        self._report = report
        self._drivers = {entry: each.driver for entry, each in allowed.items()}
        self._entries = {driver: entry for entry, driver in self._drivers.items()}
        self._policies = {
            each.driver: PolicyResource(**each.policies.model_dump())
            for each in allowed.values()
            if each.policies is not None
        }
        self._rights = {
            entry: Rights(where=f"backends.allowed.{entry}", allowed=each, find_node=devices.node)
            for entry, each in allowed.items()
        }
        self._candidates: dict[_Key, _Candidate] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._holders: dict[str, _Candidate] = {}
        self._appeared: set[str] = set()
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._scanning = asyncio.Lock()
        self._problems: Mapping[str, str] = {}
        """The problem last reported for each directory, keyed by entry."""
        self._without_entry: set[str] = set()
        """The directories of backends without an entry that have already been reported."""
        self._search_at = 0.0
        self._hurry = asyncio.Event()
        self._news = asyncio.Event()

    # ------------------------------------------------------------ queries

    def place(self, driver: str) -> str:
        """Return the reason why a driver does not have a socket, as the end of a sentence."""
        entry = self._entries.get(driver)
        if entry is None:
            return (
                "backends.allowed no longer has an entry for it; add it to the values of drakit's "
                "release, or uninstall the backend"
            )
        return f"no backend has registered in {shown(self.path / entry)} yet"

    def policies(self, driver: str) -> PolicyResource | None:
        """Return the custom resource for a driver's policies, or None if its entry does not have
        policies."""
        return self._policies.get(driver)

    def socket(self, driver: str) -> BackendSocket | None:
        """Return a driver's socket, or None until a socket has reported its name."""
        holder = self._holders.get(driver)
        return None if holder is None else holder.socket

    def has_successor(self, socket: BackendSocket) -> bool:
        """Return whether another backend of the entry serves its driver, is waiting to do so, or is
        being queried. If so, there is an update in progress, and `socket` belongs to the previous
        backend."""
        entry = socket.path.parent.name
        return any(
            each.driver or each.wanted or each.task
            for (place, _), each in self._candidates.items()
            if place == entry and each.socket != socket
        )

    async def wait(self, driver: str, *, other_than: BackendSocket | None = None) -> BackendSocket:
        """Wait for a socket of a driver, other than the given one."""
        while (socket := self.socket(driver)) is None or socket == other_than:
            await self._news.wait()
        return socket

    async def at_start(self, driver: str) -> BackendSocket | None:
        """Return a driver's socket as soon as it is known, or None once every socket has been
        queried. Can be called before :meth:`run`."""
        if not self.version:
            await self._scan()
        while (socket := self.socket(driver)) is None and self._tasks:
            await asyncio.wait({*self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        return socket

    def lost(self, socket: BackendSocket) -> None:
        """Record that a connection to a socket has ended. The socket is queried again. If it does
        not respond, another socket can get its name."""
        candidate = self._candidates.get((socket.path.parent.name, socket.path.name))
        if candidate is not None and candidate.socket == socket:
            self._release(candidate)
            candidate.ask_soon()
            self._hurry.set()

    def forget(self, driver: str) -> None:
        """Record that a driver is no longer hosted. The next scan reports the driver again if it
        still has a backend."""
        self._appeared.discard(driver)
        self._hurry.set()

    # ------------------------------------------------------------ watching

    async def run(self, appeared: Callable[[str], None]) -> None:
        """Watch until canceled. `appeared` is called once with each driver name, when the driver's
        backend first appears."""
        try:
            while True:
                self._hurry.clear()
                await self._scan()
                for driver in [*self._holders]:
                    if driver not in self._appeared:
                        self._appeared.add(driver)
                        appeared(driver)
                with suppress(TimeoutError):
                    async with asyncio.timeout(SCAN_SECONDS):
                        await self._hurry.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait({*self._tasks})

    async def _scan(self) -> None:
        """Scan the directories, and query the sockets that are due."""
        async with self._scanning:
            known = {*self._candidates}
            scanned = await asyncio.to_thread(_scan_all, self.path, self._drivers, known=known)
            self.version = self.version or await asyncio.to_thread(version, "drakit")
        self._report_problems(scanned.problems)
        self._compare(scanned)
        now = asyncio.get_running_loop().time()
        if now >= self._search_at:
            self._search_at = now + UNLISTED_SECONDS
            self._report_unlisted(await asyncio.to_thread(_unlisted, self.path, self._drivers))
        for candidate in self._candidates.values():
            if candidate.driver is None and candidate.task is None and candidate.due_at <= now:
                candidate.due_at = now + candidate.backoff.next_seconds()
                candidate.task = asyncio.create_task(self._ask(candidate), name="ask")
                self._tasks.add(candidate.task)
                candidate.task.add_done_callback(self._tasks.discard)

    def _report_problems(self, problems: Mapping[str, str]) -> None:
        """Report new problems with directories."""
        before, self._problems = self._problems, problems
        for entry, problem in problems.items():
            if before.get(entry) != problem:
                note = f"the directory of backends.allowed.{entry}, {shown(self.path / entry)}, "
                diagnostic = Diagnostic(
                    reason="BackendDirectory", note=note + problem, source=self._drivers[entry]
                )
                self._report(diagnostic)

    def _report_unlisted(self, found: set[str]) -> None:
        """Report new backends without an entry, because their own logs cannot show the cause."""
        for name in sorted(found - self._without_entry):
            note = (
                f"a backend listens in {shown(self.path / name)}, but backends.allowed has no "
                f"entry {name}; add the entry to the values of drakit's release, or uninstall the "
                "backend"
            )
            self._report(Diagnostic(reason="BackendRefused", note=note, source=name))
        self._without_entry = found

    def _compare(self, scanned: _Scanned) -> None:
        for key in [key for key in self._candidates if key not in scanned.sockets]:
            if key[0] not in scanned.unreadable:
                self._drop(self._candidates.pop(key))
        for key, file in scanned.sockets.items():
            before = self._candidates.get(key)
            if before is not None and before.socket.file == file:
                continue
            entry, name = key
            socket = BackendSocket(
                path=self.path / entry / name, file=file, rights=self._rights[entry]
            )
            candidate = self._candidates[key] = _Candidate(socket)
            if before is not None:
                # Keep these fields, which belong to the path rather than to the file.
                candidate.note, candidate.waits_since = before.note, before.waits_since
                self._drop(before)

    def _drop(self, candidate: _Candidate) -> None:
        self._release(candidate)
        if candidate.task is not None:
            candidate.task.cancel()

    def _release(self, candidate: _Candidate) -> None:
        """Release the name of a candidate, and make the candidates that want the name due."""
        name, candidate.driver = candidate.driver, None
        if name is None:
            return
        del self._holders[name]
        for other in self._candidates.values():
            if other.wanted == name:
                other.ask_soon()
        self._hurry.set()

    # ------------------------------------------------------------ one socket

    async def _ask(self, candidate: _Candidate) -> None:
        """Query a socket for its driver name."""
        path = candidate.socket.path
        reason: NodeReason = "BackendRefused"
        note: str | None = None
        candidate.wanted = None
        try:
            async with self._slots:
                driver = await self._name_of(candidate.socket)
            self._admit(candidate, driver)
        except _RefusedError as error:
            if error.is_reported:
                note = f"the backend at {shown(path)} is refused: {error}"
        except CallFailedError as error:
            reason = "BackendUnreachable"
            if candidate.backoff.failures >= REPORTED_FAILURES:
                note = f"the backend's socket {shown(path)} {error}"
        except Exception:
            logger.exception("backend's socket cannot be checked", extra={"path": shown(path)})
        else:
            candidate.note = candidate.waits_since = None
            candidate.backoff.succeeded()
        finally:
            candidate.task = None
        if note is not None and note != candidate.note:
            candidate.note = note
            driver = self._drivers[path.parent.name]
            self._report(Diagnostic(reason=reason, note=note, source=driver))

    async def _name_of(self, socket: BackendSocket) -> str:
        """Return the driver name of a socket, after checking that it is the driver in its entry."""
        if not socket.file.is_socket:
            raise _RefusedError("the file is not a socket; remove or rename it")
        if problem := socket.rights.owner_problem(socket.file):
            raise _RefusedError(f"it {problem}")
        try:
            opened = await asyncio.to_thread(socket.open)
        except OSError:
            # Don't report this, because the next scan finds the current file.
            raise _RefusedError("it was replaced or removed", is_reported=False) from None
        client = Client(opened, SERVICE)
        try:
            info = await identify(client, node=self.node, version=self.version)
        except CallFailedError as error:
            if error.code is grpc.StatusCode.UNAVAILABLE and (
                why := await unreachable(opened.path)
            ):
                raise CallFailedError(why, code=error.code) from None
            raise
        finally:
            await client.close()
        name = info.driver_name
        if not is_driver_name(name):
            raise _RefusedError(
                f"it reports the name {name[:80]!r:.80}, which is not a DNS subdomain of at most "
                f"{MAX_DRIVER_NAME} characters that begins with a letter; this is a bug in the "
                "backend"
            )
        entry = socket.path.parent.name
        if name != self._drivers[entry]:
            raise _RefusedError(self._foreign(name, entry))
        if (wanted := policies_of(info)) not in (None, ours := self._policies.get(name)):
            raise _RefusedError(
                f"its policies are {_resource_text(wanted)}, but those of "
                f"backends.allowed.{entry} are {_resource_text(ours)}; correct the field policies "
                "of the entry"
            )
        return name

    def _foreign(self, name: str, entry: str) -> str:
        """Return the reason why a driver name cannot be announced in the directory of an entry."""
        text = (
            f"it reports the name {name}, but only {self._drivers[entry]} can register in the "
            f"directory of backends.allowed.{entry}"
        )
        if (own := self._entries.get(name)) is None:
            return f"{text}; correct the entry, or remove the backend"
        return f"{text}; the directory of {name} is {shown(self.path / own)}"

    def _admit(self, candidate: _Candidate, driver: str) -> None:
        if (why := self._taken(driver)) is not None:
            raise _RefusedError(f"it reports the name {driver}, and {why}; remove one of the two")
        holder = self._holders.get(driver)
        if holder is not None:
            candidate.wanted = driver
            now = asyncio.get_running_loop().time()
            if candidate.waits_since is None:
                candidate.waits_since = now
            raise _RefusedError(
                f"it reports the name {driver}, which is the driver of the backend at "
                f"{shown(holder.socket.path)}; stop one of the two",
                is_reported=now - candidate.waits_since >= HANDOVER_SECONDS,
            )
        candidate.driver = driver
        self._holders[driver] = candidate
        facts = {"driver": driver, "path": shown(candidate.socket.path)}
        logger.info("backend found", extra=facts)
        news, self._news = self._news, asyncio.Event()
        news.set()
        self._hurry.set()


async def identify(client: Client, *, node: Node, version: str) -> pb.GetInfoResponse:
    """Call GetInfo of a backend, with the facts about the node. The caller must check the response.
    Raises :class:`.CallFailedError`."""
    request = pb.GetInfoRequest(node_name=node.name, plugin_version=version)
    if (labels := node.labels) is not None:
        request.node_labels.labels.update(labels)
        request.node_labels.SetInParent()
    answer = await client.call("GetInfo", request.SerializeToString(), timeout_seconds=INFO_SECONDS)
    if len(answer) > MAX_INFO_BYTES:
        raise CallFailedError("responded to GetInfo with more than 64 KiB")
    try:
        return parse(pb.GetInfoResponse, answer)
    except GarbageError as error:
        raise CallFailedError(f"responded to GetInfo with {error}") from None


def policies_of(info: pb.GetInfoResponse) -> PolicyResource | None:
    """Return the custom resource for a backend's policies, or None if the backend does not report
    one."""
    if not info.HasField("policies"):
        return None
    given = info.policies
    return PolicyResource(group=given.group, version=given.version, plural=given.plural)


def _resource_text(resource: PolicyResource | None) -> str:
    if resource is None:
        return "none"
    return printable(f"{resource.plural}.{resource.group}/{resource.version}"[:MAX_QUOTED])


async def unreachable(path: str) -> str | None:
    """Return the reason why a connection to a socket fails, as the end of a sentence, or None if it
    works. gRPC errors do not contain enough information to name a remedy."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    probe.setblocking(False)
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            await asyncio.get_running_loop().sock_connect(probe, path)
    except TimeoutError:
        return "accepts no connections"
    except PermissionError:
        return f"cannot be connected to (permission denied); {_PERMISSIONS}"
    except ConnectionRefusedError:
        return "has no listener; start its backend or remove the file"
    except OSError as error:
        if error.errno == errno.EPROTOTYPE:
            return "is not a stream socket"
        return f"cannot be connected to: {os.strerror(error.errno or 0)}"
    finally:
        probe.close()
    return None
