"""
Boxes: PID namespaces, each of which ends with one signal to its init.

A program in a box has no parent outside of the box, and is identified by its process ID in this
machine's namespace. Other modules decide which programs run, and define the content of a node's
file system (:mod:`.control_plane`, :mod:`.node`, :mod:`.init`).
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..api import ClusterError
from . import init
from .records import Process, write_json

NODE_NAMESPACES = ("--mount", "--net", "--uts")

# The shell forks into the new namespace, prints the child's ID in this machine's namespace, and
# ends. The box's init then adopts the child.
LAUNCH = 'setsid "$@" >&2 & echo $!'


class Box:
    """One box of a cluster, whether or not it is running."""

    def __init__(self, state: Path, name: str, *, is_node: bool) -> None:
        self.state, self.name = state, name
        self._namespaces = NODE_NAMESPACES if is_node else ()
        self._is_node = is_node

    @property
    def init(self) -> Process | None:
        """The box's init, alive or not. None if it never ran."""
        return _read(self.state / "boxes" / f"{self.name}.json")

    @property
    def running(self) -> bool:
        return (found := self.init) is not None and found.alive

    @property
    def pid(self) -> int:
        """The process whose namespaces belong to the box."""
        if (found := self.init) is None or not found.alive:
            raise ClusterError(f"{self.name} does not run")
        return found.pid

    def start(self, *, timeout_seconds: float = 15) -> None:
        """Start the init. When this returns, the box is complete."""
        for name in ("boxes", "components", "logs"):
            (self.state / name).mkdir(exist_ok=True)
        propagation = ("--propagation", "slave") if self._is_node else ()
        argv = ["unshare", "--pid", *self._namespaces, *propagation, "--", "sh", "-c"]
        argv += ['"$@" & echo $!', "sh", sys.executable, "-I", "-S", init.__file__]
        argv += [init.MARK, str(self.state), self.name]
        log = self.state / "logs" / f"{self.name}-init.log"
        with (
            log.open("ab") as errors,
            subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
            ) as starter,
        ):
            assert starter.stdout is not None
            received = _read_until(starter.stdout.fileno(), b"ready\n", timeout_seconds)
        if not received:
            self.end()
            raise ClusterError(f"{self.name} could not be set up: {log.read_text().strip()}")

    def end(self, *, timeout_seconds: float = 20) -> None:
        """
        End the init, and with it everything in the box.

        Uses SIGKILL immediately, because a cluster's content is disposable, and the kernel waits
        for each process.
        """
        found = self.init
        if found is not None:
            found.signal(signal.SIGKILL)
            if not found.wait(timeout_seconds):
                raise ClusterError(
                    f"{self.name} (process {found.pid}) did not end within {timeout_seconds:g} s "
                    "of SIGKILL: one of its processes hangs in the kernel"
                )
            (self.state / "boxes" / f"{self.name}.json").unlink(missing_ok=True)
        for component in self.state.glob(f"components/{self.name}.*.json"):
            component.unlink()

    def enter(self, *options: str) -> list[str]:
        """Return the start of a command line that runs the rest in the box."""
        return ["nsenter", "--target", str(self.pid), "--pid", *self._namespaces, *options, "--"]

    def spawn(self, name: str, argv: Sequence[str], *, env: Mapping[str, str]) -> Process:
        """Start a long-running program. Its output is appended to its log."""
        with self.log(name).open("ab") as log:
            done = subprocess.run(
                [*self.enter("--no-fork"), "sh", "-c", LAUNCH, "sh", *argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(env),
                timeout=10,
                check=False,
            )
        if done.returncode != 0:
            raise ClusterError(f"{argv[0]} could not be started: see {self.log(name)}")
        try:
            process = Process.of(int(done.stdout))
        except FileNotFoundError as error:
            raise ClusterError(f"{name} ended at once: {self.tail(name)}") from error
        write_json(self._component(name), {"pid": process.pid, "started": process.started})
        return process

    def component(self, name: str) -> Process | None:
        """Return a program that was started in the box, alive or not."""
        return _read(self._component(name))

    def wake(self, name: str) -> bool:
        """Resume a frozen program. Return whether it runs."""
        process = self.component(name)
        return process is not None and process.signal(signal.SIGCONT)

    def stop(self, name: str, *, timeout_seconds: float) -> None:
        """Stop a program with SIGTERM, and after the timeout with SIGKILL."""
        process = self.component(name)
        if process is None:
            return
        process.signal(signal.SIGCONT)
        process.signal(signal.SIGTERM)
        if not process.wait(timeout_seconds):
            process.signal(signal.SIGKILL)
            process.wait(5)
        self._component(name).unlink(missing_ok=True)

    def log(self, name: str) -> Path:
        return self.state / "logs" / f"{self.name}-{name}.log"

    def tail(self, name: str, *, lines: int = 15) -> str:
        """Return the end of a program's log."""
        try:
            return "\n".join(self.log(name).read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return "(no log)"

    def _component(self, name: str) -> Path:
        return self.state / "components" / f"{self.name}.{name}.json"


def end_all(boxes: Sequence[Box]) -> None:
    """End several boxes. Sends the signal to all of them before waiting for any."""
    for box in boxes:
        if (found := box.init) is not None:
            found.signal(signal.SIGKILL)
    for box in boxes:
        box.end()


def _read(path: Path) -> Process | None:
    try:
        return Process(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def _read_until(descriptor: int, end: bytes, timeout_seconds: float) -> bool:
    """Read until the last bytes are `end`. Return False if the stream ends first."""
    received = b""
    while not received.endswith(end):
        readable, _, _ = select.select([descriptor], [], [], timeout_seconds)
        chunk = os.read(descriptor, 1024) if readable else b""
        if not chunk:
            return False
        received += chunk
    return True
