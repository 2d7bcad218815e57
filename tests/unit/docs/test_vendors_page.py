"""docs/vendors/index.md: its figures are those of the code, the examples and the benchmark."""

from __future__ import annotations

import re

from tests.unit.docs.listings import ROOT, code_lines, listing

PAGE = "docs/vendors/index.md"
TEXT = (ROOT / PAGE).read_text()
BENCH = "\n".join(
    (ROOT / name).read_text()
    for name in ("docs/contributors/performance.md", "bench/results/node-plugin.txt")
)


def row(beginning: str) -> str:
    """The row of a table of the page, by how its first cell begins."""
    (found,) = re.findall(rf"^\| {re.escape(beginning)}.*", TEXT, re.M)
    return found


def measured(**facts: str) -> dict[str, str]:
    """The figures of the benchmark's first row with these facts."""
    for line in re.findall(r"^[a-z-]+ .*=.*", BENCH, re.M):
        name, *words = line.split()
        figures = dict(word.split("=", 1) for word in words if "=" in word) | {"row": name}
        if facts.items() <= figures.items():
            return figures
    raise LookupError(facts)


def test_the_lines_of_the_drivers_are_theirs():
    lamps = code_lines(listing("docs/vendors/driver-contract.md", "lamp.py"))
    assert f"| {lamps} Python |" in row("[The lamps]")
    rotors = code_lines((ROOT / "examples/driver/rotors.py").read_text())
    assert f"| {rotors} Python |" in row("[examples/driver]")
    backend = [
        path
        for path in (ROOT / "examples/backend").glob("*.go")
        if not path.name.endswith("_test.go")
    ]
    lines = sum(len(path.read_text().splitlines()) for path in backend)
    assert f"| {lines} Go |" in row("[examples/backend]")


def test_the_overhead_is_measured():
    figure = measured(row="overhead", endpoint="backend", batch="1")["overhead_ms"]
    assert f"| {figure} ms |" in row("Additional time to prepare")


def test_the_memory_is_measured():
    (shown,) = re.findall(r"\*\*(\d+) MiB of memory per node", TEXT)
    assert int(shown) == round(float(measured(row="idle")["rss_mib"]))
