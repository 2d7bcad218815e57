"""The example of docs/reference/cdi.md works as shown."""

from __future__ import annotations

import re
from pathlib import Path

from drakit_formats.cdi import build_spec, lint_spec

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "cdi.md"


def test_the_example_runs():
    (edits,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    names: dict = {}
    exec(compile(edits, PAGE, "exec"), names)
    spec = build_spec("camera.example.com/claim", [("a", names["edits"])])
    assert spec["cdiVersion"] == "0.7.0"
    assert lint_spec(spec) == []


def test_the_fields_of_the_table_are_those_of_edits():
    from drakit.device import Edits
    from drakit_formats.cdi.fields import check_edits

    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", PAGE.read_text(), re.M)
    assert {ours for ours, _ in rows} == set(Edits.__dataclass_fields__) - {"cdi_devices"}
    assert "`cdi_devices` is the only field that is not written to the file" in PAGE.read_text()
    found: list = []
    check_edits({theirs: None for _, theirs in rows}, "", found)
    assert found == []
