"""
Explains the problems of a template, class, node or slice.

Templates and classes are explained for an imaginary pod that has such a claim, and no other rules.
Nodes and slices have the problems of their pools. A node also has the problems that its node plugin
reports. Does not depend on sessions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from drakit.text import plural
from drakit_cli.kubectl.capabilities import evaluate_selectors
from drakit_cli.kubectl.devices import PoolRow, pool_body, pool_rows, show_rows
from drakit_cli.kubectl.explain import Ask, Report, make_report, selectors_of, user_of
from drakit_cli.kubectl.gather import Gathered
from drakit_cli.kubectl.output import Output
from drakit_cli.kubectl.targets import CLASS, NODE, SLICE, TEMPLATE
from drakit_explain.codes import Code, Reason, no_remedy
from drakit_explain.kinds import CLAIMS, CLASSES, NODES, RULES, SLICES
from drakit_explain.model import (
    ClassFacts,
    NodeFacts,
    ReportFacts,
    Request,
    SliceFacts,
    TemplateFacts,
)
from drakit_explain.pending import Explainer, Verdict
from drakit_explain.poolchecks import node_of_slice, node_problems, slice_problems
from drakit_explain.queries import answered
from drakit_explain.templates import class_problems, template_problems

# ---------------------------------------------------------------- templates and classes

_OF_CLASS, _REQUEST = "a-device", "device"
"""The names of the template for one device of a class, and of its request. The cluster does not
contain them."""


def explain_template(template: TemplateFacts, found: Gathered, *, ask: Ask) -> Report:
    """Explain whether a template's claims can ever be allocated, and whether they can be allocated
    now."""
    subject = f"claims of {TEMPLATE.kind} {template.namespace}/{template.name}"
    return _explain_source(template, found, subject, template, ask)


def explain_class(
    device_class: ClassFacts, found: Gathered, *, template: TemplateFacts, ask: Ask
) -> Report:
    """
    Explain whether one device of a class can ever be allocated, and whether it can be allocated
    now.

    :param template: the template from :func:`template_of`, which the world contains.
    """
    subject = f"one device of {CLASS.kind} {device_class.name}"
    report = _explain_source(template, found, subject, device_class, ask)
    return replace(
        report,
        sentences=tuple(map(_of_class, report.sentences)),
        remedy=_of_class(report.remedy),
        claims=tuple(replace(each, origin=subject) for each in report.claims),
    )


def _of_class(sentence: str) -> str:
    """Remove the made-up names of the template and its request from a sentence."""
    both = f'request "{_REQUEST}" of claim template "{_OF_CLASS}"'
    for matching in (f" that matches {both}", f" that match {both}"):
        sentence = sentence.replace(matching, "")
    return sentence.replace(both, "a request").replace(f'request "{_REQUEST}"', "the request")


def template_of(device_class: ClassFacts, namespace: str) -> TemplateFacts:
    """Return a template for one device of a class."""
    request = Request(name=_REQUEST, device_class=device_class.name)
    return TemplateFacts(namespace=namespace, name=_OF_CLASS, uid="", requests=(request,))


def _explain_source(
    template: TemplateFacts, found: Gathered, subject: str, of: TemplateFacts | ClassFacts, ask: Ask
) -> Report:
    pod = user_of(template)
    evaluate_selectors(found, selectors_of([pod], found))
    explainer = Explainer(found.world, name_all_holders=True)
    explanation = explainer.explain_now(pod, ask)
    if found.lacks(CLAIMS, CLASSES, NODES, SLICES, RULES):
        problems: Sequence[Reason] = ()
    elif isinstance(of, TemplateFacts):
        find = partial(template_problems, of, found.world, explainer.verdicts)
        problems = answered(explainer.verdicts, find, ask)
    else:
        problems = class_problems(of, found.world)
    if problems:  # These problems would exist even if all devices were free.
        explanation = replace(
            explanation,
            verdict=Verdict.BLOCKED,
            reasons=tuple(problems),
            find_remedy=no_remedy,
            fits_on="",
        )
    kind = of.reference.kind
    report = make_report(explanation, found, pod=pod, kind=kind, subject=subject)
    namespace = of.namespace if isinstance(of, TemplateFacts) else ""
    return replace(report, namespace=namespace, name=of.name)


# ---------------------------------------------------------------- nodes and slices


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolReport:
    """The explanation of a node or slice, with its pools."""

    report: Report
    pools: tuple[PoolRow, ...]

    @property
    def exit_code(self) -> int:
        return self.report.exit_code

    @property
    def is_done(self) -> bool:
        return not self.exit_code

    def body(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {**self.report.body(), "pools": [pool_body(each) for each in self.pools]}

    def show(self, output: Output) -> None:
        """Print the report."""
        self.report.show(output)
        if self.pools:
            output.line()
            show_rows(self.pools, output, wide=output.wide)


def explain_node(node: NodeFacts, found: Gathered) -> PoolReport:
    """Explain what keeps pods from the devices of a node."""
    pools = tuple(row for row in pool_rows(found) if row.node == node.name)
    devices = plural(sum(len(each.published) for each in pools), "device")
    reasons = list(node_problems(node, found.world))
    if not node.ready:
        text = f"node {node.name} is not ready: pods that use its {devices} cannot start"
        not_ready = Reason(code=Code.NODE_NOT_READY, sentence=text, regarding=node.reference)
        reasons.insert(0, not_ready)
    reports = [each for each in found.world.of(ReportFacts).values() if each.node == node.name]
    reasons += (reason for each in reports for reason in _of_report(each, node))
    notes = [note for each in reports for note in _notes(each)]
    state = f"node {node.name} publishes {devices} in {plural(len(pools), 'pool')}"
    if node.unschedulable:
        state += "; it is cordoned, so new pods do not get them"
    report = _report(NODE.kind, node.name, reasons, state, found, notes)
    return PoolReport(report=report, pools=pools)


def explain_slice(of: SliceFacts, found: Gathered) -> PoolReport:
    """Explain what keeps pods from the devices of a slice."""
    where = node_of_slice(of)
    pools = tuple(
        row
        for row in pool_rows(found)
        if row.identity == of.of_pool and (row.node == where or not row.named)
    )
    reasons = slice_problems(of, found.world)
    node = found.world.node(where)
    if node is not None:
        reasons += (
            each
            for each in node_problems(node, found.world)
            if each.sentence.startswith(f"pool {of.pool} of driver {of.driver} ")
        )
    known = f"pool {of.pool} of driver {of.driver}"
    if not reasons:
        reasons = [
            Reason(
                code=Code.POOL_INCOMPLETE,
                sentence=f"no device can be allocated from {known}: {row.problem}",
                regarding=of.reference,
            )
            for row in pools
            if row.problem
        ]
    number = plural(len(of.devices), "device")
    newest = max((each.generation for each in pools), default=of.generation)
    state = f"ResourceSlice {of.name} publishes {number} of {known}"
    if of.generation < newest:
        state += f"; it is of generation {of.generation}, and the scheduler only uses {newest}"
    return PoolReport(report=_report(SLICE.kind, of.name, reasons, state, found), pools=pools)


def _of_report(report: ReportFacts, node: NodeFacts) -> Iterator[Reason]:
    driver = f"driver {report.driver}"
    if report.registration:
        yield Reason(
            code=Code.DRIVER_UNAVAILABLE,
            sentence=f"{driver} is not registered with the kubelet ({report.registration}): pods "
            f"that use its devices cannot start",
            regarding=node.reference,
        )
    for each in report.unhealthy:
        yield Reason(
            code=Code.DEVICE_UNHEALTHY,
            sentence=f"device {each.device} of pool {each.pool}, {driver}, is unhealthy"
            + (f": {each.message}" if each.message else ""),
            regarding=node.reference,
        )


def _notes(report: ReportFacts) -> Iterator[str]:
    """Return the devices and policies that a driver does not publish on a node, with the
    reasons."""
    driver = f"driver {report.driver}"
    if report.refused:
        yield f"{driver} refuses its policies: {report.refused}"
    for each in report.policies:
        if each.problem:
            yield f"{driver} does not apply policy {each.name}: {each.problem}"
    if report.rejected:
        number = plural(report.rejected, "device")
        yield f"{driver} does not publish {number}, such as {report.rejected_example}"
    for field in report.dropped:
        yield f"{driver}: {field.message}"


def _report(
    kind: str,
    name: str,
    reasons: Sequence[Reason],
    state: str,
    found: Gathered,
    notes: Sequence[str] = (),
) -> Report:
    lacks = found.lacks(SLICES, NODES)
    verdict = Verdict.BROKEN if reasons else Verdict.UNDECIDED if lacks else Verdict.NOT_PENDING
    texts = tuple(each.text for each in reasons)
    return Report(
        kind=kind,
        namespace="",
        name=name,
        verdict=verdict,
        sentences=(*texts, state, *notes),
        codes=tuple(each.code.value for each in reasons),
        unknown=tuple(str(gap) for gap in found.gaps),
    )
