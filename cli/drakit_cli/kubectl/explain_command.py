"""
``kubectl drakit explain``: explains the specified object, either once, or repeatedly until nothing
is pending.

Does not depend on how a result is found.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

from drakit_cli.answers import UsageError
from drakit_cli.connection import fetch
from drakit_cli.kubectl import questions
from drakit_cli.kubectl.explain import Reports
from drakit_cli.kubectl.gather import UnreachableError
from drakit_cli.kubectl.output import Answer, Output
from drakit_cli.kubectl.targets import (
    CLAIM,
    CLASS,
    NODE,
    POD,
    SLICE,
    TEMPLATE,
    Target,
    parse_target,
    qualified_name,
)
from drakit_daemon.kube import Session

MIN_PAUSE_SECONDS = 2.0
MAX_PAUSE_SECONDS = 30.0
_REST = 4
"""How long to wait before the next query, as a multiple of how long the last one took, within the
limits above. Many users at the same time must not overload the API server."""


class Explanation(Answer, Protocol):
    """A result with the state that determines whether the command repeats the query."""

    @property
    def exit_code(self) -> int: ...

    @property
    def is_done(self) -> bool:
        """Whether nothing is pending."""
        ...


Ask = Callable[[Session, str], Awaitable[Explanation]]


def run(options: argparse.Namespace, output: Output) -> int:
    """Explain the object in the arguments. Return the exit code."""
    ask = _question(options)
    if options.timeout is not None and not options.wait:
        raise UsageError("--timeout needs --wait")

    async def answer(session: Session, namespace: str) -> tuple[Explanation, int]:
        again = partial(ask, session, namespace)
        if options.watch:
            await _watch(again, output)
        if options.wait:
            return await _wait(again, options.timeout)
        found = await again()
        return found, found.exit_code

    found, code = fetch(options, answer)
    _print(found, output)
    return code


def _print(answer: Explanation, output: Output) -> None:
    if output.names_only:
        body = answer.body()
        explained = [each["object"] for each in body.get("items", [body])]
        output.names(qualified_name(each["kind"], each["name"]) for each in explained)
        return
    output.write("ExplainReportList" if isinstance(answer, Reports) else "ExplainReport", answer)


async def _watch(ask: Callable[[], Awaitable[Explanation]], output: Output) -> NoReturn:
    """Print the result whenever it changes, until the command is interrupted."""
    last: Explanation | None = None
    shown: Mapping[str, Any] | None = None
    while True:
        answer, pause = await _timed(ask, last)
        if answer is not None and (body := answer.body()) != shown:
            if last is not None and output.format != "json":
                output.line("---")
            _print(answer, output)
            output.flush()
            last, shown = answer, body
        await asyncio.sleep(pause)


async def _wait(
    ask: Callable[[], Awaitable[Explanation]], seconds: float | None
) -> tuple[Explanation, int]:
    """Repeat the query until nothing is pending, or until the timeout. Return the last result, with
    its exit code."""
    clock = asyncio.get_running_loop().time
    end = float("inf") if seconds is None else clock() + seconds
    last: Explanation | None = None
    while True:
        answer, pause = await _timed(ask, last)
        last = answer or last
        left = end - clock()
        if answer is not None and answer.is_done:
            return answer, answer.exit_code
        if last is not None and left <= 0:
            return last, last.exit_code or 1
        await asyncio.sleep(min(pause, left))


async def _timed(
    ask: Callable[[], Awaitable[Explanation]], last: Explanation | None
) -> tuple[Explanation | None, float]:
    """
    Return a result, and how long to wait before the next query.

    If the server does not respond after a first result, return None as the result.
    """
    clock = asyncio.get_running_loop().time
    began = clock()
    try:
        answer = await ask()
    except UnreachableError as error:
        if last is None:
            raise
        print(f"error: {error}", file=sys.stderr)
        return None, MAX_PAUSE_SECONDS
    finally:
        # Collect explicitly: commands run without the garbage collector, but this one may run for a
        # long time.
        gc.collect()
    return answer, min(max((clock() - began) * _REST, MIN_PAUSE_SECONDS), MAX_PAUSE_SECONDS)


# ---------------------------------------------------------------- questions


def _question(options: argparse.Namespace) -> Ask:
    target = parse_target(options.target)
    given = [target is not None, options.all_namespaces, options.filename is not None]
    if sum(given) > 1:
        raise UsageError("an object, -A and -f were combined: use only one of them")
    if options.filename is not None:
        return partial(questions.ask_manifest, content=_content(options.filename))
    if target is None:
        return partial(questions.ask_waiting, everywhere=options.all_namespaces)
    about = _ABOUT.get(target.kind.kind, questions.ask_workload)
    return lambda session, namespace: about(session, namespace, target)


_ABOUT: Mapping[str, Callable[[Session, str, Target], Awaitable[Explanation]]] = {
    POD.kind: questions.ask_pod,
    CLAIM.kind: questions.ask_claim,
    TEMPLATE.kind: questions.ask_template,
    CLASS.kind: questions.ask_class,
    NODE.kind: questions.ask_node,
    SLICE.kind: questions.ask_slice,
}
"""The functions that explain the objects of each kind. All other kinds are workloads."""


def _content(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text()
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not UTF-8 text") from None
