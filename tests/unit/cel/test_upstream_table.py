"""The Python library's results, compared with Kubernetes' own table of CEL selectors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from drakit_explain.cel.library import Library
from drakit_explain.projection import project_slice
from drakit_explain.selectors import FeatureGates, SelectorIndex, bring_up_to_date
from tests.oracle.dumps import SELECTORS

CASES: Mapping[str, Any] = json.loads(SELECTORS.read_text())["cases"]

UNDECIDED = "undecided"
ERROR = "error"


def _gates(case: Mapping[str, Any]) -> Iterator[FeatureGates]:
    """The gates of a case; upstream runs one that names none with each combination."""
    if case["gates"]:
        yield FeatureGates(**case["gates"])
        return
    for capacity, lists in itertools.product((True, False), repeat=2):
        yield FeatureGates(consumable_capacity=capacity, list_attributes=lists)


def _ours(case: Mapping[str, Any], gates: FeatureGates) -> str | bool:
    """The outcome for the device of a case, by the way of a slice."""
    device = {"name": "device", **case["device"]}
    pool = {"name": "pool", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": device.pop("driver"), "pool": pool, "devices": [device]}
    of = project_slice({"metadata": {"name": "slice", "uid": "slice"}, "spec": spec})
    library, index = Library(), SelectorIndex()
    library.use(gates)
    bring_up_to_date(index, library, [case["expression"]], [of])
    found = index.evaluated(case["expression"], of)
    if found.unknown:
        return UNDECIDED
    return ERROR if found.errors else bool(found.matches)


@pytest.mark.parametrize("name", CASES)
def test_a_selector_has_upstreams_outcome_or_none(name: str) -> None:
    case = CASES[name]
    failure = case["compileError"] or case["matchError"]
    expected = ERROR if failure else case["match"]
    for gates in _gates(case):
        assert _ours(case, gates) in (expected, UNDECIDED), gates


def test_the_library_decides_a_part_of_the_table() -> None:
    """The test above would pass if all outcomes were undecided."""
    decided = [
        name
        for name, case in CASES.items()
        if all(_ours(case, gates) != UNDECIDED for gates in _gates(case))
    ]
    assert len(decided) >= 23, decided
    assert {CASES[name]["match"] for name in decided} == {True, False}
