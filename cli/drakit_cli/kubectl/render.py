"""
Explanations for people.

It must not know sessions, or how an explanation is found.
"""

from __future__ import annotations

from collections.abc import Sequence

from drakit_cli.kubectl import devices
from drakit_cli.kubectl import explain as explaining
from drakit_cli.kubectl.objects import PoolReport
from drakit_cli.kubectl.output import MAX_NAMES, Output, shortened
from drakit_cli.kubectl.workloads import WorkloadReport
from drakit_explain.pending import Verdict

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
    Verdict.NOT_PENDING: "good",
}


def show_pools(answer: PoolReport, output: Output) -> None:
    """Print the explanation of a node or slice, with its pools."""
    show_report(answer.report, output)
    if answer.pools:
        output.line()
        devices.show_rows(answer.pools, output, wide=output.wide)


def show_workload(answer: WorkloadReport, output: Output) -> None:
    """Print one answer for all pods of a workload, and explain one pod for each reason."""
    output.line(f"{answer.sentence}.", colour=_COLOURS[answer.verdict])
    for group in answer.groups:
        names = shortened(group.names, most=len(group.names) if output.wide else MAX_NAMES)
        output.line()
        output.line(f"{group.words}: {names}", colour="head")
        show_report(group.first, output)


def show_waiting(reports: Sequence[explaining.Report], output: Output) -> None:
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


def show_report(report: explaining.Report, output: Output) -> None:
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
            numbers = [str(number) for number in explaining.counts(each).values()]
            rows.append([each.name, request.device_class, explaining.wanted(request), *numbers])
        output.table(_COUNTS, rows, indent=2)
        for each in claim.requests:
            for text in explaining.notes(each, wide=output.wide):
                output.line(text, indent=2)
    output.lines(
        "Nodes that cannot be used",
        (
            f"{shortened(names, most=len(names) if output.wide else MAX_NAMES)}: {why}"
            for why, names in report.nodes.items()
        ),
    )
    output.lines(
        "Not verified by Kubernetes' allocator", [report.unverified] if report.unverified else []
    )
    output.lines("The scheduler reports", [report.scheduler] if report.scheduler else [])
    output.lines("Not evaluated", report.unknown)
