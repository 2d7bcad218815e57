"""
Programs that a kit starts: the node plugin, and the target's own program, if it has one.

The output of a program goes to a file. ``python -m drakit.testing.conformance.programs FROM TO`` is
also such a program: a relay from a new socket to the socket of a backend that is already running.
The relay is needed because a socket cannot be moved, and the node plugin ignores symbolic links.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from drakit.testing.conformance.facts import ConformanceError

END_SECONDS = 20.0
"""Grace period between SIGTERM and SIGKILL."""

RESTART_SECONDS = 1.0
"""How long to wait before restarting a program that exited by itself, as a container would be."""


class Program:
    """A program in its own process group. It can be started again after it exits."""

    def __init__(
        self,
        name: str,
        command: str | Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        restarted: bool = False,
    ) -> None:
        """`command` is a shell command line, or a program and its arguments. With `restarted`, the
        program is started again whenever it exits by itself."""
        self.name = name
        self.exit_code: int | None = None
        """The exit code of the last process that exited by itself."""

        self.ends: int = 0
        """The number of processes that have exited by themselves since the start."""

        self._command = command
        self._log = log
        self._environment = environment
        self._restarted = restarted
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether the program has been started, and has neither been stopped by the kit nor exited
        for good. True even while the program is waiting to be restarted."""
        return self._watching is not None and not self._watching.done()

    async def start(self) -> None:
        """Start the program. Raises ConformanceError if it cannot be started."""
        self.exit_code, self.ends = None, 0
        await self._spawn()
        self._watching = asyncio.create_task(self._watch(), name=self.name)

    async def terminate(self) -> int | None:
        """Send SIGTERM, wait for the exit, and return the exit code. Return None if the program had
        to be killed."""
        process = await self._unwatched()
        if process is None:
            return None
        self._signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(END_SECONDS):
                return await process.wait()
        except TimeoutError:
            return None
        finally:
            await self._end(process)

    async def kill(self) -> None:
        """Send SIGKILL to the program and all processes that it has started."""
        process = await self._unwatched()
        if process is not None:
            await self._end(process)

    def text(self) -> str:
        """Return the output of all runs of the program."""
        try:
            return self._log.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    async def _spawn(self) -> None:
        with self._log.open("ab") as log:
            try:
                if isinstance(self._command, str):
                    self._process = await asyncio.create_subprocess_shell(
                        self._command,
                        env=dict(self._environment),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                else:
                    self._process = await asyncio.create_subprocess_exec(
                        *self._command,
                        env=dict(self._environment),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
            except OSError as error:
                raise ConformanceError(
                    f"{self.name} cannot be started: {error.filename}: {error.strerror}"
                ) from error

    async def _watch(self) -> None:
        while self._process is not None:
            self.exit_code = await self._process.wait()
            self.ends += 1
            if not self._restarted:
                return
            await asyncio.sleep(RESTART_SECONDS)
            await self._spawn()

    async def _unwatched(self) -> asyncio.subprocess.Process | None:
        """Detach the process from its watcher, which would start it again."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
            self._watching = None
        process, self._process = self._process, None
        return process

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        self._signal(process, signal.SIGKILL)
        await process.wait()

    @staticmethod
    def _signal(process: asyncio.subprocess.Process, number: int) -> None:
        # Kill the group even if the process has exited, because the processes that it started must
        # not survive.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


async def run_command(
    command: str, *, environment: Mapping[str, str], timeout_seconds: float
) -> None:
    """Run a shell command line, and wait for it to finish. Raises ConformanceError if it fails."""
    # Use a file instead of a pipe, because background processes that the command leaves behind
    # would keep a pipe open.
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_shell(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_seconds):
                await process.wait()
        except TimeoutError:
            raise ConformanceError(
                f"the set-up command did not end within {timeout_seconds:g} s: {command}"
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode != 0:
            output.seek(0)
            text = output.read().decode(errors="replace").strip()[-1000:]
            raise ConformanceError(
                f"the set-up command failed with exit code {process.returncode}: {command}"
                + (f"\n{text}" if text else "")
            )


def python_environment() -> dict[str, str]:
    """Return the environment for the kit's own Python programs. Do not use it for the target's
    programs: with PYTHONSAFEPATH, a script cannot import the modules next to it."""
    return {"PYTHONPATH": python_path(), "PYTHONSAFEPATH": "1"}


def python_path() -> str:
    """Return a PYTHONPATH with which another Python process finds the same modules as this one, and
    those in the working directory: a driver that is being developed may not be installed."""
    return os.pathsep.join(dict.fromkeys([os.getcwd(), *filter(None, sys.path)]))


def add_working_directory() -> None:
    """Add the working directory to the import path of this process."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)


# ------------------------------------------------------------ the relay

CHUNK_BYTES = 65_536


async def relay(source: Path, target: Path) -> None:
    """Listen at `source`, and forward all data to `target` and back, until canceled."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_unix_connection(target)
        except OSError as error:
            sys.stderr.write(f"{target} cannot be reached: {error}\n")
            writer.close()
            return
        # If one direction ends, close the other as well.
        ways = [
            asyncio.create_task(_pass_on(reader, back)),
            asyncio.create_task(_pass_on(there, writer)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        for end in (back, writer):
            end.close()

    source.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(connected, source)
    async with server:
        await server.serve_forever()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
    except ConnectionError:
        return


if __name__ == "__main__":
    asyncio.run(relay(Path(sys.argv[1]), Path(sys.argv[2])))
