"""docs/contributors/performance.md: its figures are those of the benchmarks' output."""

from __future__ import annotations

import re

import pytest

from tests.unit.docs.listings import ROOT

PAGE = (ROOT / "docs/contributors/performance.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"### {title}\n")[2].partition("\n## ")[0].partition("\n### ")[0]


@pytest.mark.parametrize(
    ("title", "file"), [("Node plugin", "node-plugin.txt"), ("Operator", "operator.txt")]
)
def test_the_results_are_in_the_output_of_the_row(title, file):
    output = (ROOT / "bench/results" / file).read_text()
    rows = re.findall(
        r"^\| (?:`([a-z-]+)` )?\| [^|]+ \| ([^|]+) \| [^|]+ \|$", section(title), re.M
    )
    assert len(rows) >= 8
    name = ""
    for given, result in rows:
        name = given or name
        measured = set(re.findall(rf"^{name} .*", output, re.M))
        values = {value for line in measured for value in re.findall(r"=([\d.]+)", line)}
        figures = re.findall(r"\d+(?:\.\d+)?", result)
        assert figures
        assert set(figures) <= values, f"{name}: {result}"


def test_the_times_with_prepared_claims_are_in_the_output():
    output = (ROOT / "bench/results/node-plugin.txt").read_text()
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", section("Prepared claims on the node"), re.M)
    assert [batch for batch, _ in rows] == ["1", "8", "64"]
    for batch, times in rows:
        for resident, time in zip(("0", "1000", "10000"), times.split("|"), strict=True):
            found = re.findall(rf"^prepare batch={batch} resident={resident} .*", output, re.M)
            (row,) = [row for row in found if "driver=plain" not in row]
            assert f" p50_ms={time.removesuffix('ms ').strip()} " in row


def test_the_machine_is_that_of_the_output():
    machine = (ROOT / "bench/results/node-plugin.txt").read_text().splitlines()[0]
    (python,) = re.findall(r"python=(\S+)", machine)
    assert f"Python {python}" in PAGE
