"""
One bash session in an empty folder, in which a page's commands run one after the other.

Variables, functions and the working folder persist from block to block, as in a reader's terminal.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

READS = re.compile(
    r"kubectl (?:(?:-n|--namespace|--context)[ =]\S+ )?"
    r"(?:get|describe|logs|events|top|explain|auth can-i|api-resources|version)\b"
)

SCRIPT = """\
set -euo pipefail
set -E
trap 'echo "$BASH_COMMAND" > "{failed}"' ERR
trap 'code=$?; printf "\\n%s %s\\n" "$page_mark" "$code"' EXIT
"""
"""A background process may keep our pipe open after bash has ended, so a mark ends the reading."""


@dataclass(frozen=True)
class Ran:
    """The result of a list of commands."""

    code: int | None
    """The exit code. None if the commands did not end in time."""

    output: str
    """Standard output and standard error, interleaved as in a terminal."""

    failed: str = ""
    """The command that failed."""


def only_reads(commands: str) -> bool:
    """Return whether all commands only read from the API server, so that they can be repeated."""
    joined = commands.replace("\\\n", " ")
    lines = [line.strip() for line in joined.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    return bool(lines) and all(READS.match(line) for line in lines)


class Shell:
    """A bash session. `close` ends it and everything that it started."""

    def __init__(self, folder: Path, *, env: Mapping[str, str], scratch: Path) -> None:
        self._scratch = scratch
        self._failed = scratch / "failed"
        self._bash = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            cwd=folder,
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._tell(SCRIPT.format(failed=self._failed))

    def run(self, commands: str, *, timeout_seconds: float, apart: bool = False) -> Ran:
        """
        Run commands to their end. A failure ends the session, unless they run in a subshell.

        :param apart: run in a subshell, which leaves no variables behind.
        """
        self._failed.unlink(missing_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=self._scratch, suffix=".sh", delete=False
        ) as script:
            script.write(commands)
        mark = f"---{secrets.token_hex(8)}---"
        if apart:
            # `||` would disable -e inside, but a background process keeps it.
            call = f"( source {script.name} ) </dev/null & code=0; wait $! || code=$?\n"
        else:
            call = f"source {script.name} </dev/null\ncode=0\n"
        self._tell(f"page_mark={mark}\n{call}printf '\\n%s %s\\n' '{mark}' \"$code\"\n")
        timer = threading.Timer(timeout_seconds, self._kill)
        timer.start()
        code, output = self._read(mark)
        late = not timer.is_alive() and timer.finished.is_set()
        timer.cancel()
        failed = self._failed.read_text().strip() if self._failed.exists() else ""
        return Ran(None if late else code, output, failed)

    def close(self) -> None:
        """End the session and its background processes."""
        self._kill()
        self._bash.wait()
        for stream in (self._bash.stdin, self._bash.stdout):
            if stream:
                stream.close()

    def _tell(self, text: str) -> None:
        assert self._bash.stdin
        try:
            # Write without a buffer, because a buffer that cannot be written would raise again on
            # close.
            os.write(self._bash.stdin.fileno(), text.encode())
        except BrokenPipeError:
            # The session has ended, which the next read shows.
            return

    def _read(self, mark: str) -> tuple[int, str]:
        assert self._bash.stdout
        lines: list[str] = []
        for line in self._bash.stdout:
            if line.startswith(mark):
                # The empty line before the mark is part of the mark.
                return int(line.split()[1]), "".join(lines).removesuffix("\n")
            lines.append(line)
        return self._bash.wait(), "".join(lines)

    def _kill(self) -> None:
        try:
            os.killpg(self._bash.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
