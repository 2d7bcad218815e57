"""
``drakit conformance``: tests a driver against the rules of the driver contract, and prints
violations.

Does not depend on the rules, or on how they are tested: see :mod:`drakit.testing.conformance`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drakit.settings import SettingsError, read_file
from drakit.testing.conformance.facts import TargetError
from drakit.testing.conformance.programs import add_working_directory
from drakit.testing.conformance.rules import Rule, rules
from drakit.testing.conformance.runner import Outcome, Report, RuleResult, run
from drakit.testing.conformance.targets import PythonTarget, parse_target
from drakit_cli.answers import UsageError
from drakit_daemon.command_line import columns
from drakit_driver.runtime.loading import driver_class

WIDTH = 96
"""The width of explanations in columns, unless the terminal is narrower."""

_ELEMENTS = {Outcome.FAILED: "failure", Outcome.BROKEN: "error", Outcome.SKIPPED: "skipped"}


def conformance(options: argparse.Namespace) -> int:
    """Test the rules. Return 1 if the driver violates one, or cannot be tested."""
    if options.list:
        _list(rules())
        return 0
    if options.target is None:
        raise UsageError("no driver is given: run 'drakit conformance TARGET'")
    chosen = _chosen(options.rule)
    try:
        target = parse_target(
            options.target,
            config=_mapping(options.driver_config),
            parameters=None if options.parameters is None else _mapping(options.parameters),
            setup=options.setup,
            unplug=options.unplug,
        )
        if isinstance(target, PythonTarget):
            add_working_directory()
            driver_class(target.reference, where="TARGET")
    except (TargetError, SettingsError) as error:
        raise UsageError(str(error)) from error
    report = asyncio.run(run(target, only=chosen, on_result=print_result))
    if options.junit is not None:
        xml = _junit_xml(report, target=target.name)
        try:
            options.junit.write_text(xml, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{options.junit} cannot be written: {error.strerror}") from error
    _print_summary(report)
    return 0 if report.good else 1


def _chosen(ids: Sequence[str] | None) -> Sequence[Rule] | None:
    if not ids:
        return None
    known = {rule.id: rule for rule in rules()}
    if unknown := [each for each in ids if each not in known]:
        raise UsageError(
            f"rule {unknown[0]} does not exist: run 'drakit conformance --list' for all rules"
        )
    return [known[each] for each in dict.fromkeys(ids)]


def _mapping(path: Path | None) -> Mapping[str, Any]:
    """Read a YAML file that contains a mapping."""
    try:
        return {} if path is None else read_file(path)
    except SettingsError as error:
        raise UsageError(str(error)) from error


# ------------------------------------------------------------ what is printed


def _list(known: Sequence[Rule]) -> None:
    width = max((len(rule.id) for rule in known), default=0)
    for rule in known:
        print(f"{rule.id:{width}}  {rule.title}")
        print(_indented(f"reason: {rule.why}"))


def print_result(result: RuleResult) -> None:
    """Print the result of a rule."""
    print(f"{result.outcome.upper():7}  {result.rule.id}  ({result.seconds:.1f} s)")
    match result.outcome:
        case Outcome.PASSED:
            pass
        case Outcome.SKIPPED:
            print(_indented(result.text))
        case Outcome.FAILED:
            print(_indented(f"the rule: {result.rule.title}"))
            print(_indented(f"observed: {result.text}"))
            print(_indented(f"reason: {result.rule.why}"))
            _print_log(result)
        case Outcome.BROKEN:
            print(_indented(result.text))
            _print_log(result)
    sys.stdout.flush()


def _print_log(result: RuleResult) -> None:
    if result.log:
        print(_indented("the log ends with:"))
        print(textwrap.indent(result.log, " " * 11))


def _print_summary(report: Report) -> None:
    counts = [f"{number} {outcome}" for outcome in Outcome if (number := report.count(outcome)) > 0]
    print()
    print(", ".join(counts) or "no rule ran")
    for words, outcome in (("violated", Outcome.FAILED), ("not tested", Outcome.BROKEN)):
        if bad := [result.rule.id for result in report.results if result.outcome is outcome]:
            print(f"{words}: {', '.join(bad)}")


def _indented(text: str) -> str:
    lines = text.splitlines() or [""]
    # Do not wrap a traceback, or the output of a program.
    if len(lines) > 1:
        return textwrap.indent(text, " " * 9)
    return textwrap.fill(
        text,
        width=min(WIDTH, columns(sys.stdout) or WIDTH),
        initial_indent=" " * 9,
        subsequent_indent=" " * 11,
        break_long_words=False,
        break_on_hyphens=False,
    )


# ------------------------------------------------------------ JUnit XML, for CI systems


def _junit_xml(report: Report, *, target: str) -> str:
    """Return a test suite with a test case for each rule."""
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
            outcome = ElementTree.SubElement(case, element, message=_printable(result.text))
            outcome.text = _printable(f"{result.rule.why}\n\n{result.log}".strip())
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def _printable(text: str) -> str:
    """Replace characters that XML cannot contain."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
