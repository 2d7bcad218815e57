"""
Results as JUnit XML, which CI systems show.

It must not know where the file is written.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from drakit.testing.conformance.runner import Outcome, Report

__all__ = ("junit_xml",)

_ELEMENTS = {Outcome.FAILED: "failure", Outcome.BROKEN: "error", Outcome.SKIPPED: "skipped"}


def junit_xml(report: Report, *, target: str) -> str:
    """Give a test suite with a test case per rule."""
    suite = ElementTree.Element(
        "testsuite",
        name=f"drakit conformance {_printable(target)}",
        tests=str(len(report.results)),
        failures=str(report.count(Outcome.FAILED)),
        errors=str(report.count(Outcome.BROKEN)),
        skipped=str(report.count(Outcome.SKIPPED)),
    )
    for result in report.results:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname="drakit.conformance",
            name=result.rule.id,
            time=f"{result.seconds:.3f}",
        )
        if (element := _ELEMENTS.get(result.outcome)) is not None:
            told = ElementTree.SubElement(case, element, message=_printable(result.text))
            told.text = _printable(f"{result.rule.why}\n\n{result.log}".strip())
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def _printable(text: str) -> str:
    """What XML cannot hold, a log may well have."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
