"""
``kubectl drakit explain``: what the arguments ask, once, or again until it changes or ends.

It must not know how an answer is found.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from drakit_cli.answers import UsageError
from drakit_cli.kubectl import devices, questions
from drakit_cli.kubectl.connection import fetch
from drakit_cli.kubectl.explain import Report, counts, notes, wanted
from drakit_cli.kubectl.gather import UnreachableError
from drakit_cli.kubectl.objects import PoolReport
from drakit_cli.kubectl.output import MAX_NAMES, Output, shortened
from drakit_cli.kubectl.questions import Waiting
from drakit_cli.kubectl.targets import (
    CLAIM,
    CLASS,
    NODE,
    POD,
    SLICE,
    TEMPLATE,
    Target,
    parse_target,
)
from drakit_cli.kubectl.workloads import WorkloadReport, worst_code
from drakit_daemon.kube import Session
from drakit_explain.pending import Verdict

MIN_PAUSE_SECONDS = 2.0
MAX_PAUSE_SECONDS = 30.0
_REST = 4
"""A question is asked again after this many times the time that it took, within these bounds: all
users together must not keep the API server busy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An answer, for programs and for people."""

    kind: str
    body: Callable[[], Mapping[str, Any]]
    """Of 500 pods in a large cluster, it takes longer to write than the table."""

    exit_code: int
    is_done: bool
    """Whether nothing is waited for any more."""

    show: Callable[[Output], None]

    def print(self, output: Output) -> None:
        """Print it."""
        if output.for_programs:
            output.data(self.kind, self.body())
        else:
            self.show(output)


Ask = Callable[[Session, str], Awaitable[Answer]]


def run(options: argparse.Namespace, output: Output) -> int:
    """Explain what the arguments name; return the exit code."""
    ask = _question(options)
    if options.timeout is not None and not options.wait:
        raise UsageError("--timeout needs --wait")

    async def answer(session: Session, namespace: str) -> Answer:
        if options.watch:
            return await _watch(lambda: ask(session, namespace), output)
        if options.wait:
            return await _wait(lambda: ask(session, namespace), options.timeout)
        return await ask(session, namespace)

    found = fetch(options, answer)
    if not options.watch:
        found.print(output)
    return found.exit_code


async def _watch(ask: Callable[[], Awaitable[Answer]], output: Output) -> Answer:
    """Print an answer when it is another one, without end."""
    last: Answer | None = None
    shown: Mapping[str, Any] | None = None
    while True:
        answer, pause = await _timed(ask, last)
        if answer is not None and (body := answer.body()) != shown:
            if last is not None and output.format != "json":
                output.line("---")
            answer.print(output)
            output.flush()
            last, shown = answer, body
        await asyncio.sleep(pause)


async def _wait(ask: Callable[[], Awaitable[Answer]], seconds: float | None) -> Answer:
    """Return the first answer with nothing to wait for, or the last one in this time."""
    clock = asyncio.get_running_loop().time
    end = float("inf") if seconds is None else clock() + seconds
    last: Answer | None = None
    while True:
        answer, pause = await _timed(ask, last)
        last = answer or last
        left = end - clock()
        if answer is not None and answer.is_done:
            return answer
        if last is not None and left <= 0:
            return replace(last, exit_code=last.exit_code or 1)
        await asyncio.sleep(min(pause, left))


async def _timed(
    ask: Callable[[], Awaitable[Answer]], last: Answer | None
) -> tuple[Answer | None, float]:
    """
    Return an answer, and how long to pause after it.

    After a first answer, a server that does not answer for a while gives None.
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
        gc.collect()  # a command has no collector, and this one may have no end
    return answer, min(max((clock() - began) * _REST, MIN_PAUSE_SECONDS), MAX_PAUSE_SECONDS)


# ---------------------------------------------------------------- questions


def _question(options: argparse.Namespace) -> Ask:
    target = parse_target(options.target)
    given = [target is not None, options.all_namespaces, options.filename is not None]
    if sum(given) > 1:
        raise UsageError("an object, -A and -f exclude each other")
    if options.filename is not None:
        content = _content(options.filename)

        async def ask_manifest(session: Session, namespace: str) -> Answer:
            reports = await questions.ask_manifest(session, namespace, content)
            return _of_manifest(reports)

        return ask_manifest
    if target is None:

        async def ask_waiting(session: Session, namespace: str) -> Answer:
            everywhere = options.all_namespaces
            found = await questions.ask_waiting(session, namespace, everywhere=everywhere)
            return _of_waiting(found, "" if everywhere else f" in namespace {namespace}")

        return ask_waiting
    return _about(target)


def _about(target: Target) -> Ask:
    async def ask(session: Session, namespace: str) -> Answer:
        if target.kind in (NODE, SLICE):
            ask_pools = questions.ask_node if target.kind is NODE else questions.ask_slice
            return _of_one(await ask_pools(session, namespace, target), _show_pools)
        ask_one = _OF_ONE.get(target.kind.kind)
        if ask_one is not None:
            return _of_one(await ask_one(session, namespace, target), _show_report)
        return _of_one(await questions.ask_workload(session, namespace, target), _show_workload)

    return ask


_OF_ONE = {
    POD.kind: questions.ask_pod,
    CLAIM.kind: questions.ask_claim,
    TEMPLATE.kind: questions.ask_template,
    CLASS.kind: questions.ask_class,
}


def _content(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{name} cannot be read: {error}") from None


# ---------------------------------------------------------------- answers

Single = TypeVar("Single", Report, PoolReport, WorkloadReport)


def _of_one(answer: Single, show: Callable[[Single, Output], None]) -> Answer:
    return Answer(
        kind="ExplainReport",
        body=answer.body,
        exit_code=answer.exit_code,
        is_done=answer.is_done,
        show=partial(show, answer),
    )


def _of_manifest(reports: list[Report]) -> Answer:
    def show(output: Output) -> None:
        for number, report in enumerate(reports):
            if number:
                output.line()
            _show_report(report, output)

    return _of_list(reports, show)


def _of_waiting(found: Waiting, where: str) -> Answer:
    def show(output: Output) -> None:
        if found.reports:
            _show_waiting(found.reports, output)
        else:
            output.line(f"No pod waits for devices{where}.")
        output.lines("Not evaluated", found.gaps)

    return _of_list(found.reports, show)


def _of_list(reports: Sequence[Report], show: Callable[[Output], None]) -> Answer:
    return Answer(
        kind="ExplainReportList",
        body=lambda: {"items": [each.body() for each in reports]},
        exit_code=worst_code(reports),
        is_done=all(each.is_done for each in reports),
        show=show,
    )


# ---------------------------------------------------------------- for people

_COUNTS = (
    *("REQUEST", "CLASS", "WANTS", "PUBLISHED", "MATCHING"),
    *("FREE", "ALLOCATED", "TAINTED", "ELSEWHERE", "TOO SMALL"),
)
_COLOURS = {
    Verdict.BLOCKED: "bad",
    Verdict.BROKEN: "bad",
    Verdict.DELETING: "bad",
    Verdict.UNDECIDED: "unsure",
    Verdict.FITS: "good",
    Verdict.STARTING: "good",
    Verdict.NOT_PENDING: "good",
}


def _show_pools(answer: PoolReport, output: Output) -> None:
    """Print the explanation of a node or slice, with its pools."""
    _show_report(answer.report, output)
    if answer.pools:
        output.line()
        devices.show_rows(answer.pools, output, wide=output.wide)


def _show_workload(answer: WorkloadReport, output: Output) -> None:
    """Print one answer for all pods of a workload, and explain one pod for each reason."""
    output.line(f"{answer.sentence}.", colour=_COLOURS[answer.verdict])
    for group in answer.groups:
        names = shortened(group.names, most=len(group.names) if output.wide else MAX_NAMES)
        output.line()
        output.line(f"{group.words}: {names}", colour="head")
        _show_report(group.first, output)


def _show_waiting(reports: Sequence[Report], output: Output) -> None:
    """Print a line for each pod."""
    rows = [
        [
            each.namespace,
            each.name,
            each.verdict.value,
            ", ".join(dict.fromkeys(each.codes)),
            each.summary,
        ]
        for each in reports
    ]
    output.table(("NAMESPACE", "NAME", "VERDICT", "REASON", "MESSAGE"), rows, cut=not output.wide)


def _show_report(report: Report, output: Output) -> None:
    """Print an explanation."""
    for sentence in report.lines:
        output.line(f"{sentence[0].upper()}{sentence[1:]}.", colour=_COLOURS[report.verdict])
    for claim in report.claims:
        output.line()
        output.line(f"{claim.origin[0].upper()}{claim.origin[1:]}:", colour="head")
        if claim.allocated or not claim.requests:
            output.line("allocated" if claim.allocated else "not allocated", indent=2)
            continue
        rows: list[list[str]] = []
        for each in claim.requests:
            request = each.analysis.request
            numbers = [str(number) for number in counts(each).values()]
            rows.append([each.name, request.device_class, wanted(request), *numbers])
        output.table(_COUNTS, rows, indent=2)
        for each in claim.requests:
            for text in notes(each, wide=output.wide):
                output.line(text, indent=2)
    output.lines(
        "Nodes that cannot be used",
        (
            f"{shortened(names, most=len(names) if output.wide else MAX_NAMES)}: {why}"
            for why, names in report.nodes.items()
        ),
    )
    output.lines("The scheduler reports", [report.scheduler] if report.scheduler else [])
    output.lines("Not evaluated", report.unknown)
