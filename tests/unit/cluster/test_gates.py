"""The feature gates of the tests' clusters."""

import pytest

from e2e.cluster import gates
from e2e.cluster.api import Options
from e2e.cluster.local import binaries


@pytest.mark.parametrize("minor", binaries.minors())
def test_a_cluster_sets_only_gates_that_its_release_knows_and_disables_by_default(minor):
    defaults = gates.defaults(minor)
    chosen = gates.gates_of_tests(minor)
    assert {name: defaults[name] for name in chosen} == dict.fromkeys(chosen, False)
    enabled = {name for name, on in {**defaults, **chosen}.items() if on}
    assert gates.NEEDED & defaults.keys() <= enabled


def test_gates_that_a_test_sets_replace_those_of_the_release():
    assert Options().gates_for("1.36") == {"DRADeviceTaintRules": True}
    assert Options(gates={}).gates_for("1.36") == {}
    assert Options(gates={"A": False}).gates_for("1.36") == {"A": False}


def test_only_old_releases_serve_the_alpha_version_of_rules():
    alpha = "resource.k8s.io/v1alpha3"
    assert alpha in Options().runtime_config_for("1.35")
    assert alpha not in Options().runtime_config_for("1.36")
    assert Options(runtime_config={alpha: False}).runtime_config_for("1.36") == {alpha: False}


@pytest.mark.parametrize(
    ("minor", "oldest", "newest", "inside"),
    [
        ("1.36", None, None, True),
        ("1.36", "1.36", "1.36", True),
        ("1.36", "1.37", None, False),
        ("1.36", None, "1.35", False),
        ("1.100", "1.36", None, True),
    ],
)
def test_a_range_of_releases(minor, oldest, newest, inside):
    assert gates.in_range(minor, oldest=oldest, newest=newest) is inside
