"""How the cases of Kubernetes' allocator tables become questions to the helper."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from e2e.images.go import CEL_DEFAULT, CEL_MINORS, CEL_SOURCES
from tests.oracle.dumps import MODULE, VERSIONS
from tests.oracle.tables import GATES_OF_FEATURES, is_reachable, question_of

CASE = {
    "features": {"AdminAccess": True, "DeviceBindingAndStatus": True, "PrioritizedList": False},
    "node": {"metadata": {"name": "n"}},
    "claims": None,
    "classes": None,
    "slices": None,
    "allocated": [{"driver": "a", "pool": "p", "device": "d"}],
}


def test_a_case_has_the_gates_of_its_features() -> None:
    question = json.loads(question_of(CASE))
    gates = ("DRAAdminAccess", "DRADeviceBindingConditions", "DRAResourceClaimDeviceStatus")
    assert question["gates"] == dict.fromkeys(gates, True)
    assert question["inUse"] == CASE["allocated"]
    assert question["claims"] == []


def test_a_scheduler_of_1_36_has_no_list_attributes() -> None:
    assert not is_reachable("1.36", {"ListTypeAttributes": True})
    assert is_reachable("1.36", {"ListTypeAttributes": False})
    assert is_reachable("1.37", {"ListTypeAttributes": True})


@pytest.mark.parametrize("minor", CEL_MINORS)
def test_the_helper_of_a_minor_release_has_the_version_of_its_table(minor: str) -> None:
    name = "go.mod" if minor == CEL_DEFAULT else f"go-{minor}.mod"
    text = (CEL_SOURCES / name).read_text()
    found = dict(re.findall(r"^\t(k8s\.io/\S+) (v0\.\S+)$", text, re.M))
    assert found[MODULE] == VERSIONS[minor]
    assert found["k8s.io/api"] == found["k8s.io/apimachinery"] == found[MODULE]


def test_both_sides_have_the_same_gates() -> None:
    source = Path(CEL_SOURCES, "release.go").read_text()
    found = re.findall(r'^\t"(\w+)": +\{(.*)\},$', source, re.M)
    features = {name: re.findall(r"\w+", gates) for name, gates in found}
    assert {each: features[each] for each in GATES_OF_FEATURES} == dict(GATES_OF_FEATURES)
    of_selectors = {"EnableConsumableCapacity", "EnableListTypeAttributes"}
    assert features.keys() - GATES_OF_FEATURES.keys() == of_selectors
