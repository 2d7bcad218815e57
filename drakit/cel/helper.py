"""
The helper program ``drakit-cel``: Kubernetes' own CEL compiler, asked over a pipe.

One JSON object a line each way (``operator/cel/main.go``). The program is stateless: one that dies,
hangs or answers nonsense is started again, and the question is asked once more. A question that
fails twice raises :class:`HelperError`.

It must not know slices, claims, or why a selector is evaluated.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drakit.explain.selectors import Outcome, Reads

__all__ = ("Helper", "HelperError", "find_helper")

NAME = "drakit-cel"

ANSWER_SECONDS = 20.0
"""Longest wait for one answer: 2,000 devices take 10 to 100 ms."""

MAX_ANSWER = 64 << 20
"""Bytes of an answer; one of 2,000 devices has some kilobytes."""

CHUNK = 1 << 16


class HelperError(Exception):
    """The helper gives no answer; the text says why."""


def find_helper(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Find the program: ``DRAKIT_CEL`` names it, or it is on the ``PATH``."""
    if named := environ.get("DRAKIT_CEL"):
        return Path(named)
    found = shutil.which(NAME, path=environ.get("PATH"))
    return Path(found) if found else None


class Helper:
    """One helper process, started on first use. Not for threads: one question at a time."""

    def __init__(
        self,
        program: Path,
        *,
        arguments: Sequence[str] = (),
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self._command = [str(program), *arguments]
        self._answer_seconds = answer_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self.restarts: int = 0

    def reads(self, expressions: Sequence[str]) -> list[Reads]:
        """Return what expressions read."""
        answer = self.ask({"reads": {"expressions": list(expressions)}})
        return [
            Reads(
                error=each.get("error", ""),
                everything=each.get("everything", False),
                attributes=frozenset(each.get("attributes", ())),
                capacity=frozenset(each.get("capacity", ())),
                shareable=each.get("allowMultipleAllocations", False),
            )
            for each in answer["reads"]
        ]

    def select(self, expression: str, devices: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Evaluate an expression that compiles for each device."""
        question = {"expressions": [expression], "devices": list(devices)}
        (selection,) = self.ask({"select": question})["selections"]
        if error := selection.get("error"):
            return [Outcome(error=error)] * len(devices)
        texts, numbers = selection.get("errors", []), iter(selection.get("errorOf", ()))
        outcomes: list[Outcome] = []
        for letter in selection.get("outcomes", ""):
            if letter == "e":
                number = next(numbers)
                outcomes.append(Outcome(error=texts[number] if number >= 0 else "CEL error"))
            else:
                outcomes.append(_SELECTED if letter == "t" else _NOT_SELECTED)
        if len(outcomes) != len(devices):
            raise HelperError(f"{len(outcomes)} outcomes for {len(devices)} devices")
        return outcomes

    def ask(self, question: Mapping[str, Any]) -> Any:
        """Ask one question; raise :class:`HelperError` if there is no answer, or a failure."""
        line = json.dumps(question, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        try:
            text = self._exchange(line)
        except OSError as first:
            self.close()
            self.restarts += 1
            try:
                text = self._exchange(line)
            except OSError as second:
                self.close()
                raise HelperError(f"{self._command[0]}: {second}; before that: {first}") from second
        try:
            answer = json.loads(text)
        except ValueError as error:
            self.close()
            raise HelperError(f"{self._command[0]} does not answer with JSON: {error}") from error
        if "error" in answer:
            raise HelperError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End the process, if there is one; the next question starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, line: bytes) -> bytes:
        process = self._process
        if process is None:
            process = self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        assert process.stdin is not None
        assert process.stdout is not None
        end = time.monotonic() + self._answer_seconds
        _write(process.stdin.fileno(), line, end)
        return _read_line(process.stdout.fileno(), end)


_SELECTED, _NOT_SELECTED = Outcome(selected=True), Outcome()


def _write(descriptor: int, data: bytes, end: float) -> None:
    os.set_blocking(descriptor, False)
    left = memoryview(data)
    while left:
        _wait(descriptor, end, write=True)
        left = left[os.write(descriptor, left[:CHUNK]) :]


def _read_line(descriptor: int, end: float) -> bytes:
    parts: list[bytes] = []
    size = 0
    while not parts or not parts[-1].endswith(b"\n"):
        _wait(descriptor, end, write=False)
        part = os.read(descriptor, CHUNK)
        if not part:
            raise BrokenPipeError("the process ended")
        parts.append(part)
        size += len(part)
        if size > MAX_ANSWER:
            raise OSError(f"an answer has more than {MAX_ANSWER} bytes")
    return b"".join(parts)


def _wait(descriptor: int, end: float, *, write: bool) -> None:
    left = end - time.monotonic()
    ready = select.select(
        [] if write else [descriptor], [descriptor] if write else [], [], max(left, 0)
    )
    if not ready[0] and not ready[1]:
        raise TimeoutError("no answer in time")
