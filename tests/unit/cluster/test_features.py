"""Tests on a cluster are selected by features, and every one of them has a feature."""

import re
from pathlib import Path

import pytest

from e2e.features import FEATURES, UnknownFeatureError, names_of, selected

E2E = Path(__file__).parents[3] / "e2e"
MARK = re.compile(r"pytest\.mark\.feature\(([^)]*)\)")


@pytest.mark.parametrize("path", sorted(E2E.rglob("test_*.py")), ids=lambda path: path.stem)
def test_every_file_of_tests_has_known_features(path):
    marks = MARK.findall(path.read_text())
    assert marks
    assert names_of(*(mark.replace('"', "") for mark in marks))


def test_every_feature_has_tests():
    marks = [mark for path in E2E.rglob("test_*.py") for mark in MARK.findall(path.read_text())]
    assert names_of(*(mark.replace('"', "") for mark in marks)) == FEATURES.keys()


def test_an_unknown_feature_is_refused_with_the_known_ones():
    with pytest.raises(UnknownFeatureError, match=r"no feature clams; .*claims.*versions"):
        names_of("health,clams")


@pytest.mark.parametrize(
    ("wanted", "excluded", "runs"),
    [
        pytest.param("", "", True, id="all"),
        pytest.param("claims", "", True, id="its-feature"),
        pytest.param("claims, health", "", True, id="one-of-two"),
        pytest.param("cdi", "", False, id="another-feature"),
        pytest.param("", "claims", False, id="excluded"),
        pytest.param("claims", "operator", False, id="wanted-and-excluded"),
        pytest.param("", "cdi", True, id="another-excluded"),
    ],
)
def test_selection(wanted, excluded, runs):
    features = names_of("claims", "operator")
    assert selected(features, wanted=names_of(wanted), excluded=names_of(excluded)) is runs
