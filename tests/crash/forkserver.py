"""
Starts many node plugins: a clean process imports everything once, and forks a plugin for each
start.

Imports take most of the time of an ordinary start. The server makes no loop, no thread and no gRPC
object before it forks. A fork runs `drakit_nodeplugin.__main__.main` with its own flags and
environment, as `python -m drakit_nodeplugin` does.

It reads commands as lines of JSON from standard input, and reports started and ended processes on
standard output. It ends, with all its forks, when its input ends.

It must not depend on scenarios, or on steps beyond passing their options on.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import itertools
import json
import os
import select
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODULES = ("drakit_nodeplugin.__main__", "drakit_nodeplugin.app", "tests.crash.drivers")
"""The modules that are imported before a fork, with all their imports."""

LINE_BYTES = 2**20


@dataclass(eq=False, kw_only=True, slots=True)
class Process:
    """A node plugin that was forked."""

    pid: int
    status: asyncio.Future[int] = field(default_factory=asyncio.Future)
    """The exit code, or the negative number of the signal; set when the process has ended."""

    def kill(self) -> None:
        if not self.status.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def ended(self, *, timeout_seconds: float) -> int | None:
        """Return the status; None if the process still runs after the timeout."""
        await asyncio.wait({self.status}, timeout=timeout_seconds)
        return self.status.result() if self.status.done() else None


class ForkServer:
    """The client of one server process."""

    def __init__(self, server: asyncio.subprocess.Process) -> None:
        self._server = server
        self._numbers = itertools.count()
        self._starting: dict[int, asyncio.Future[Process]] = {}
        self._alive: dict[int, Process] = {}

    async def start(
        self, *arguments: str, environment: Mapping[str, str], options: Mapping[str, Any], log: Path
    ) -> Process:
        """Start a node plugin with these flags; its output goes to the log."""
        number = next(self._numbers)
        started = self._starting[number] = asyncio.get_running_loop().create_future()
        order = {
            "number": number,
            "arguments": arguments,
            "environment": dict(environment),
            "options": {name: value and str(value) for name, value in options.items()},
            "log": str(log),
        }
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order).encode() + b"\n")
        return await started

    async def listen(self) -> None:
        """Receive reports of started and ended processes until the server ends."""
        assert self._server.stdout is not None
        async for line in self._server.stdout:
            said = json.loads(line)
            number = said["number"]
            if "pid" in said:
                process = self._alive[number] = Process(pid=said["pid"])
                self._starting.pop(number).set_result(process)
            else:
                self._alive.pop(number).status.set_result(said["status"])
        for started in self._starting.values():
            started.set_exception(RuntimeError("the fork server has ended"))


@contextlib.asynccontextmanager
async def fork_server() -> AsyncIterator[ForkServer]:
    """Start the server; at the end, it and its forks are gone."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-m", "tests.crash.forkserver"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_BYTES,
    )
    assert process.stdout is not None
    if not await process.stdout.readline():
        await process.wait()
        raise RuntimeError("the fork server did not start; its output is above")
    server = ForkServer(process)
    listening = asyncio.create_task(server.listen())
    try:
        yield server
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
        await listening


# -------------------------------------------------------------------- in the server's process


def main() -> None:
    # grpc reads this at its import. No part of grpc runs when we fork.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
    # The API server speaks no TLS, and reading all authorities takes a third of a start.
    os.environ["SSL_CERT_FILE"] = os.devnull
    for module in MODULES:
        importlib.import_module(module)
    library = importlib.import_module("drakit_daemon.kube.client_library")
    library._library()  # otherwise loaded at the first session
    importlib.import_module("kubernetes_asyncio.config.kube_config")
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not survive the fork"
    gc.freeze()
    _report(ready=1)
    _serve()


def _serve() -> None:
    alive: dict[int, tuple[int, int]] = {}  # pidfd: number of the command, pid
    rest = b""
    while True:
        ready, _, _ = select.select([0, *alive], [], [])
        for pidfd in alive.keys() & ready:
            number, pid = alive.pop(pidfd)
            os.close(pidfd)
            _, status = os.waitpid(pid, 0)
            _report(number=number, status=os.waitstatus_to_exitcode(status))
        if 0 not in ready:
            continue
        data = os.read(0, 65536)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _run_node_plugin(order)
            alive[os.pidfd_open(pid)] = (order["number"], pid)
            _report(number=order["number"], pid=pid)
    for _, pid in alive.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _report(**facts: int) -> None:
    os.write(1, json.dumps(facts).encode() + b"\n")


def _run_node_plugin(order: Mapping[str, Any]) -> None:
    code = 1
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, descriptor)
        os.environ.update(order["environment"])
        code = _run(order["arguments"], order["options"])
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run(arguments: Sequence[str], options: Mapping[str, str | None]) -> int:
    from drakit_nodeplugin.__main__ import main as run_node_plugin
    from tests.crash import steps

    paths = {n: Path(v) for n, v in options.items() if v and n not in ("kill_at", "keeps")}
    if options["keeps"]:
        from drakit_nodeplugin.state.lock import DriverLock

        setattr(DriverLock, "_waiting", lambda self: None)  # noqa: B010  (only in this process)
    steps.install(steps.StepOptions(**paths, kill_at=options["kill_at"]))
    sys.argv = ["drakit-nodeplugin", *arguments]
    try:
        run_node_plugin()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    return 0


if __name__ == "__main__":
    main()
