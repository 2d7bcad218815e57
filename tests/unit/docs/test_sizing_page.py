"""The sizing page has the chart's values, and only figures that the benchmarks printed."""

from __future__ import annotations

import re

import yaml

from tests.unit.docs.listings import ROOT

PAGE = (ROOT / "docs/admin/sizing.md").read_text()
RESULTS = "".join(
    file.read_text()
    for file in [ROOT / "docs/contributors/performance.md", *ROOT.glob("bench/results/*.txt")]
)


def test_the_defaults_are_those_of_the_chart():
    values = yaml.safe_load((ROOT / "charts/drakit/values.yaml").read_text())
    for component, name in (("nodeplugin", "Node plugin"), ("operator", "Operator")):
        resources = values[component]["resources"]
        (row,) = re.findall(rf"^\| {name} \|.*$", PAGE, re.M)
        requests = resources["requests"]
        assert f"{requests['cpu']} CPU, {requests['memory']}" in row
        assert resources["limits"]["memory"] in row
        assert "cpu" not in resources["limits"]


def test_the_figures_are_results_of_the_benchmarks():
    figures = re.findall(r"([\d.]+) (MiB|%|ms|s)\b", PAGE)
    figures += re.findall(r"([\d.]+) (%) of a core", PAGE)
    key = {"MiB": r"mib", "%": r"cpu_percent", "ms": r"cpu_ms", "s": r"seconds"}
    decimal = [(number, unit) for number, unit in figures if "." in number or unit == "%"]
    assert len(decimal) > 12
    for number, unit in decimal:
        assert re.search(rf"\w*{key[unit]}={re.escape(number)}\b", RESULTS), (number, unit)
