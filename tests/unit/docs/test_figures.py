"""The figures of the pages: those of the benchmarks' output, the chart and the examples."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from tests.unit.docs.listings import ROOT, code_lines, listing

PERFORMANCE = (ROOT / "docs/contributors/performance.md").read_text()
SIZING = (ROOT / "docs/admin/sizing.md").read_text()
COMPARISON = (ROOT / "docs/comparison.md").read_text()
NODE_PLUGIN = (ROOT / "bench/results/node-plugin.txt").read_text()


def section(title: str) -> str:
    """A section of the page about performance."""
    rest = PERFORMANCE.partition(f"### {title}\n")[2]
    return rest.partition("\n## ")[0].partition("\n### ")[0]


def row(page: str, beginning: str) -> str:
    """The row of a table of a page, by how its first cell begins."""
    (found,) = re.findall(rf"^\| {re.escape(beginning)}.*", page, re.M)
    return found


def measured(name: str, *words: str) -> dict[str, str]:
    """The figures of the first line of the node plugin's output with these words."""
    for line in NODE_PLUGIN.splitlines():
        first, *given = line.split()
        if first == name and set(words) <= set(given) and "driver=plain" not in given:
            return dict(word.split("=", 1) for word in given if "=" in word)
    raise LookupError(name, words)


@pytest.mark.parametrize(
    ("title", "file"), [("Node plugin", "node-plugin.txt"), ("Operator", "operator.txt")]
)
def test_the_results_are_in_the_output_of_the_row(title, file):
    output = (ROOT / "bench/results" / file).read_text()
    rows = re.findall(
        r"^\| (?:`([a-z-]+)` )?\| [^|]+ \| ([^|]+) \| [^|]+ \|$", section(title), re.M
    )
    assert len(rows) >= 7
    name = ""
    for given, result in rows:
        name = given or name
        lines = set(re.findall(rf"^{name} .*", output, re.M))
        values = {value for line in lines for value in re.findall(r"=([\d.]+)", line)}
        figures = re.findall(r"\d+(?:\.\d+)?", result)
        assert figures
        assert set(figures) <= values, f"{name}: {result}"


def test_the_times_with_prepared_claims_are_in_the_output():
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", section("Prepared claims on the node"), re.M)
    assert [batch for batch, _ in rows] == ["1", "8", "64"]
    for batch, times in rows:
        for resident, time in zip(("0", "1000", "10000"), times.split("|"), strict=True):
            figures = measured("prepare", f"batch={batch}", f"resident={resident}")
            assert figures["p50_ms"] == time.removesuffix("ms ").strip()


@pytest.mark.parametrize("name", ["node-plugin.txt", "operator.txt", "kinds.txt"])
def test_the_machines_are_those_of_the_output(name):
    first = (ROOT / "bench/results" / name).read_text().splitlines()[0]
    machine = dict(word.split("=", 1) for word in shlex.split(first) if "=" in word)
    assert f"| {machine['cores']} cores, {machine['cpu']}" in row(PERFORMANCE, f"`{name}`")
    assert f"Python\n{machine['python']}" in PERFORMANCE.replace(" ", "\n")


def test_only_the_page_about_performance_names_the_machines():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    naming = [path.stem for path in pages if re.search(r"\bXeon\b|\bEPYC\b", path.read_text())]
    assert naming == ["performance"]


def test_the_resources_of_the_sizing_page_are_those_of_the_chart():
    values = yaml.safe_load((ROOT / "charts/drakit/values.yaml").read_text())
    for component, name in (("nodeplugin", "Node plugin"), ("operator", "Operator")):
        resources = values[component]["resources"]
        shown = row(SIZING, f"{name} |")
        requests = resources["requests"]
        assert f"{requests['cpu']} CPU, {requests['memory']}" in shown
        assert resources["limits"]["memory"] in shown
        assert "cpu" not in resources["limits"]


def test_the_figures_of_the_sizing_page_are_results():
    results = PERFORMANCE + "".join(file.read_text() for file in ROOT.glob("bench/results/*.txt"))
    key = {"MiB": r"mib", "%": r"cpu_percent", "ms": r"cpu_ms", "s": r"seconds"}
    figures = re.findall(r"([\d.]+) (MiB|%|ms|s)\b", SIZING)
    figures += re.findall(r"([\d.]+) (%) of a core", SIZING)
    measured = {(number, unit) for number, unit in figures if "." in number or unit == "%"}
    measured.update(re.findall(r"\| ([\d.]+) (MiB|s) \|", SIZING))  # with three digits
    assert len(measured) > 12
    for number, unit in measured:
        assert re.search(rf"\w*{key[unit]}={re.escape(number)}\b", results), (number, unit)


def test_the_lines_of_the_comparison_are_those_of_the_examples():
    shown = row(COMPARISON, "Code for a new device")
    lamps = code_lines(listing("docs/vendors/driver-contract.md", "lamp.py"))
    rotors = code_lines((ROOT / "examples/driver/rotors.py").read_text())
    backend = (ROOT / "examples/backend").glob("*.go")
    sources = [path for path in backend if not path.name.endswith("_test.go")]
    lines = sum(len(path.read_text().splitlines()) for path in sources)
    assert f" {lamps} lines of Python ([the lamps]" in shown
    assert f", {rotors} ([examples/driver]" in shown
    assert f" {lines} lines of Go ([examples/backend]" in shown


@pytest.mark.parametrize(
    ("beginning", "figure"),
    [
        ("Prepare one claim", "one_ms"),
        ("Prepare 8 claims", "eight_ms"),
        ("Memory on a node", "idle_mib"),
    ],
)
def test_the_figures_of_the_kinds_of_drivers_are_of_one_run(beginning, figure):
    output = (ROOT / "bench/results/kinds.txt").read_text()
    found = {
        line.split()[1]: float(line.partition(f"{figure}=")[2].split()[0])
        for line in output.splitlines()
        if line.startswith("kinds ")
    }
    kinds = ("python", "python-container", "go", "kubeletplugin")
    expected = [found[f"driver={kind}"] for kind in kinds]
    shown = re.findall(r"([\d.]+) M?[im][sB]", row(PERFORMANCE, beginning))
    assert [float(each) for each in shown] == expected


def test_the_memory_of_the_comparison_is_that_of_the_output():
    (memory,) = re.findall(r"\*\*(\d+) MiB of memory per node", COMPARISON)
    assert int(memory) == round(float(measured("idle")["rss_mib"]))
