"""
The helper program ``drakit-cel``: Kubernetes' own CEL compiler and allocator, used over a pipe.

There is a build for each minor version of Kubernetes (``drakit-cel-1.37``).

Each message in either direction is one line of JSON (``operator/cel/main.go``). The program is
stateless: if it dies or returns a malformed response, it is replaced, and the query is sent once
more. If it does not respond in time, it is replaced, but the query is not sent again. A new process
must first respond to an empty query, which shows whether the program or the query is the cause of a
failure. If it is the program, the next start is delayed by a backoff. If it is the query, other
queries still get responses.

Does not depend on slices or claims.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import orjson

from drakit_daemon.backoff import Backoff
from drakit_explain.cel.gates import DEFAULT_GATES
from drakit_explain.selectors import SELECTOR_SECONDS, FeatureGates, Reads, SelectorResult
from drakit_explain.verdicts import MAX_BYTES, Verdict, parse_verdicts

NAME = "drakit-cel"

INCLUDED = Path(__file__).with_name("programs")
"""The directory of the programs in a platform-specific wheel (`tools/wheel.py`). Other
installations do not have it."""

_MINORS = tuple(DEFAULT_GATES)

RESPONSE_SECONDS = 5.0
"""How long to wait for a response. Most take milliseconds, and the program itself gives up after 2
s. Meanwhile, all other queries wait."""

COMPILE_SECONDS = 0.03
"""Maximum time to compile one selector."""

MAX_EXPRESSIONS = 100
"""Maximum number of expressions in one query."""

FIRST_PAUSE_SECONDS = 1.0
"""The initial backoff after a failed start. It doubles with each further failure."""

LONGEST_PAUSE_SECONDS = 60.0

QUESTION_SECONDS = 300.0
"""How long to wait before repeating a query that ended two processes, or did not get a response in
time."""

MAX_ANSWER = 64 << 20
"""Maximum size of a response. A response about 2,000 devices has a few kilobytes."""

CHUNK = 1 << 16

ENVIRONMENT = {"GOGC": "50"}
"""Environment variables for the program, unless the environment already sets them. Go collects
garbage more often, which costs little, and 80,000 devices take 9 MiB less."""

PROBE = {"reads": {"expressions": list[str]()}}
"""A query to which every working program responds immediately."""

Parsed = TypeVar("Parsed")


class HelperError(Exception):
    """The helper did not return a result. The message contains the reason."""

    def __init__(self, text: str, *, retry_seconds: float) -> None:
        super().__init__(text)
        self.retry_seconds: float = retry_seconds
        """How long to wait until the same query may get a result."""


class QueryError(HelperError):
    """The helper works, but has no result for this query: the query is too large, the program
    returned an error, or processes failed to respond to it."""

    def __init__(self, text: str) -> None:
        super().__init__(text, retry_seconds=QUESTION_SECONDS)


class LateError(QueryError):
    """There was no response to the query in time."""


def find_helper(
    minor: str = "", environ: Mapping[str, str] = os.environ, *, included: Path = INCLUDED
) -> Path | None:
    """
    Find the program for a minor version of Kubernetes, such as 1.37. If it is not installed, find
    another one.

    The other program is the one in ``DRAKIT_CEL``, ``drakit-cel`` on the ``PATH``, or the program
    for the newest release, because an image can contain fewer programs than ``DRAKIT_CEL``
    suggests.
    """
    if minor and (program := find_release(minor, environ, included=included)) is not None:
        return program
    named = environ.get("DRAKIT_CEL") or shutil.which(NAME, path=environ.get("PATH"))
    if named and Path(named).is_file():
        return Path(named)
    programs = (find_release(each, environ, included=included) for each in reversed(_MINORS))
    return next((each for each in programs if each is not None), Path(named) if named else None)


def find_release(
    minor: str, environ: Mapping[str, str] = os.environ, *, included: Path = INCLUDED
) -> Path | None:
    """Find the program for exactly this minor version. If ``DRAKIT_CEL`` is set, it must be next to
    that program. Otherwise, it must be in this package or on the ``PATH``."""
    name = f"{NAME}-{minor}"
    if named := environ.get("DRAKIT_CEL"):
        program = Path(named).with_name(name)
        return program if program.is_file() else None
    found = shutil.which(name, path=str(included)) or shutil.which(name, path=environ.get("PATH"))
    return Path(found) if found else None


class Helper:
    """One helper process, started on first use. Not thread-safe: runs one query at a time."""

    def __init__(
        self,
        program: Path,
        *,
        gates: FeatureGates | None = None,
        response_seconds: float = RESPONSE_SECONDS,
        backoff: Backoff | None = None,
    ) -> None:
        """
        :param backoff: the backoff for failed starts.
        """
        self._program = str(program)
        self._gates = gates or FeatureGates()
        self._response_seconds = response_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._backoff = backoff or Backoff(
            first_seconds=FIRST_PAUSE_SECONDS, limit_seconds=LONGEST_PAUSE_SECONDS
        )
        self._problem = ""
        self._start_at = 0.0

    def use(self, gates: FeatureGates) -> None:
        """Evaluate with these feature gates from now on."""
        if gates != self._gates:
            self.close()
            self._gates = gates

    def reads(
        self, expressions: Sequence[str], *, seconds: float = SELECTOR_SECONDS
    ) -> list[Reads]:
        """Return the fields that expressions read. ``seconds`` is the time limit for the
        response."""
        found: list[Reads] = []
        for start in range(0, len(expressions), MAX_EXPRESSIONS):
            some = list(expressions[start : start + MAX_EXPRESSIONS])
            line = self._encoded({"reads": {"expressions": some}})
            parse = partial(_parse_reads, count=len(some))
            found += self._ask(line, parse, seconds=seconds + COMPILE_SECONDS * len(some))
        return found

    def select(
        self,
        expression: str,
        devices: Sequence[Mapping[str, Any]],
        *,
        seconds: float = SELECTOR_SECONDS,
    ) -> list[SelectorResult]:
        """Evaluate a valid expression for each device. ``seconds`` is the time limit for the
        response."""
        query = {"expressions": [expression], "devices": list(devices)}
        line = self._encoded({"select": query})
        parse = partial(_parse_outcomes, count=len(devices))
        return self._ask(line, parse, seconds=seconds)

    def verdicts(self, query: bytes, *, nodes: int) -> tuple[Verdict, ...]:
        """
        Query Kubernetes' allocator, and return a verdict for each node, in their order.

        :param query: JSON in the format of ``operator/cel/verdict.go``.

        :raises QueryError: the query is too large, or the helper does not respond to it, for
            example because it takes too much memory or time.
        :raises HelperError: the helper does not respond to any query.
        """
        line = b'{"verdict":' + query + b"}\n"
        if len(line) > MAX_BYTES:
            raise QueryError(f"the objects of a query have more than {MAX_BYTES} bytes")
        parse = partial(parse_verdicts, nodes=nodes)
        return self._ask(line, parse, seconds=self._response_seconds)

    def release(self) -> str:
        """Return the version of Kubernetes whose allocator the helper contains. Empty if
        unknown."""
        return self._ask(
            self._encoded({"release": {}}),
            lambda answer: str(answer["kubernetes"]),
            seconds=self._response_seconds,
        )

    def _encoded(self, query: Mapping[str, Any]) -> bytes:
        """Encode a query as a line. Raises QueryError if it is nested too deeply."""
        try:
            return orjson.dumps(query, option=orjson.OPT_APPEND_NEWLINE)
        except orjson.JSONEncodeError as error:
            raise QueryError(f"a query for {self._program} is nested too deeply") from error

    def _ask(self, line: bytes, parse: Callable[[Any], Parsed], *, seconds: float) -> Parsed:
        """Send a query, and return its parsed response. Raises the same errors as the public
        methods."""
        seconds = min(seconds, self._response_seconds)
        process = self._process or self._start()
        try:
            return self._exchange(process, line, parse, seconds=seconds)
        # The query is the cause, because this process has responded to all earlier ones.
        except TimeoutError as error:
            self.close()
            with suppress(HelperError):  # start now, so that the next query does not wait for it
                self._start()
            raise LateError(f"{self._program}: {error}") from error
        except OSError as error:
            self.close()
            first = error
        # The process may have died before this query, so only a new process shows whether the query
        # is the cause.
        process = self._start()
        try:
            return self._exchange(process, line, parse, seconds=seconds)
        except OSError as second:
            self.close()
            raise QueryError(f"{self._program}: {second}; before that: {first}") from second

    def close(self) -> None:
        """Stop the process if it is running. The next query starts another one."""
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

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a process, and check that it responds. Raise an error if the last start failed
        recently."""
        left = self._start_at - time.monotonic()
        if left > 0:
            raise HelperError(self._problem, retry_seconds=left)
        try:
            process = self._process = subprocess.Popen(
                [self._program, *_flags(self._gates)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=ENVIRONMENT | os.environ,
                bufsize=0,
            )
            self._exchange(
                process, self._encoded(PROBE), _parse_probe, seconds=self._response_seconds
            )
        except OSError as error:
            self.close()
            seconds = self._backoff.next_seconds()
            self._start_at = time.monotonic() + seconds
            self._problem = f"{self._program} does not work: {error}"
            raise HelperError(self._problem, retry_seconds=seconds) from error
        self._backoff.succeeded()
        return process

    def _exchange(
        self,
        process: subprocess.Popen[bytes],
        line: bytes,
        parse: Callable[[Any], Parsed],
        *,
        seconds: float,
    ) -> Parsed:
        """Write a query and read its response. An OSError means that the process is unusable."""
        assert process.stdin is not None
        assert process.stdout is not None
        end = time.monotonic() + seconds
        if select.select([process.stdout], [], [], 0)[0] and process.poll() is None:
            raise OSError("the process wrote more than one response")
        _write(process.stdin.fileno(), line, end)
        text = _read_line(process.stdout.fileno(), end)
        try:
            answer = json.loads(text)
            failure = answer.get("error")
            if failure is None:
                return parse(answer)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise OSError("the process returned a malformed response") from error
        raise QueryError(f"{self._program}: {failure}")


_PLAIN = {
    "t": SelectorResult(selected=True),
    "f": SelectorResult(),
    "u": SelectorResult(unknown="the selector takes too much time", expensive=True),
}


def _flags(gates: FeatureGates) -> list[str]:
    return [
        f"-consumable-capacity={str(gates.consumable_capacity).lower()}",
        f"-list-attributes={str(gates.list_attributes).lower()}",
    ]


def _parse_probe(answer: Any) -> None:
    if answer != {"reads": []}:
        raise ValueError("not the response to an empty query")


def _parse_reads(answer: Any, *, count: int) -> list[Reads]:
    return [
        Reads(
            error=each.get("error", ""),
            everything=each.get("everything", False),
            attributes=frozenset(each.get("attributes", ())),
            capacity=frozenset(each.get("capacity", ())),
            shareable=each.get("allowMultipleAllocations", False),
        )
        for _, each in zip(range(count), answer["reads"], strict=True)
    ]


def _parse_outcomes(answer: Any, *, count: int) -> list[SelectorResult]:
    (selection,) = answer["selections"]
    if error := selection.get("error"):
        return [SelectorResult(error=error)] * count
    letters = selection.get("outcomes", "")
    texts, numbers = selection.get("errors", []), selection.get("errorOf", [])
    if len(letters) != count or letters.count("e") != len(numbers):
        raise ValueError(f"{len(letters)} outcomes for {count} devices")
    errors = iter([texts[number] if number >= 0 else "CEL error" for number in numbers])
    return [
        SelectorResult(error=next(errors)) if letter == "e" else _PLAIN[letter]
        for letter in letters
    ]


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
            raise OSError(f"a response has more than {MAX_ANSWER} bytes")
    return b"".join(parts)


def _wait(descriptor: int, end: float, *, write: bool) -> None:
    left = end - time.monotonic()
    ready = select.select(
        [] if write else [descriptor], [descriptor] if write else [], [], max(left, 0)
    )
    if not ready[0] and not ready[1]:
        raise TimeoutError("the process did not respond in time")
