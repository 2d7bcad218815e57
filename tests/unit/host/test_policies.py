"""Valid versions of policies, and the handling of invalid ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from drakit import DevicePolicy
from drakit_driver.runtime import policies as feeds
from drakit_nodeplugin.host import policies
from drakit_nodeplugin.host.policies import PolicyState, PolicyTable, StoredPolicy, check
from tests.fakes.lamps import LampPolicy

HALL = StoredPolicy(
    name="hall", uid="uid-1", created="2026-01-01T00:00:00Z", generation=1, spec={"lamps": 2}
)
BROKEN = replace(HALL, generation=2, spec={"lamps": -1})


def table(*given: StoredPolicy) -> PolicyTable:
    made = PolicyTable()
    made.replace([check(each, LampPolicy) for each in given])
    return made


def in_force(made: PolicyTable) -> dict[str, int]:
    return {each.stored.name: each.stored.generation for each in made.valid}


def states(made: PolicyTable) -> Sequence[PolicyState]:
    """The states if the driver has applied all valid policies."""
    return made.states({each.stored.name: each.policy for each in made.valid})


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        pytest.param({"lamps": -1}, "spec.lamps: Input should be greater", id="a-wrong-value"),
        pytest.param({"lamp": 1}, "spec.lamps: Field required; spec.lamp: is not", id="keys"),
        pytest.param(
            {"lamps": 1, "node_selector": {}}, "spec.node_selector: is not a known", id="spelling"
        ),
        pytest.param(None, "spec: it is missing, or too large to be read", id="no-spec"),
        pytest.param(
            {"lamps": 1, "room": "x" * feeds.MAX_SPEC_BYTES}, "spec: it has", id="too-large"
        ),
    ],
)
def test_the_problem_of_an_invalid_policy_names_the_field(spec, problem):
    checked = check(replace(HALL, spec=spec), LampPolicy)
    assert checked.policy is None
    assert checked.problem.startswith(problem)


def test_a_validator_of_a_vendor_that_fails_costs_its_policy_only():
    class Failing(DevicePolicy):
        def __init__(self, **_: object) -> None:
            raise KeyError("lamps")

        @classmethod
        def model_validate(cls, *_, **__):
            raise KeyError("lamps")

    checked = check(HALL, Failing)
    assert checked.problem == "spec: the driver fails to read it: KeyError: 'lamps'"


def test_an_invalid_policy_keeps_its_last_valid_version():
    made = table(HALL)
    made.apply(check(BROKEN, LampPolicy))
    assert in_force(made) == {"hall": 1}
    (state,) = states(made)
    assert (state.observed_generation, state.generation) == (2, 1)
    assert state.problem.endswith("(generation 1 stays in effect)")

    made.apply(check(replace(BROKEN, generation=3, spec={"lamps": 3}), LampPolicy))
    assert in_force(made) == {"hall": 3}
    assert states(made)[0].problem == ""


def test_a_new_policy_of_the_same_name_gets_nothing_of_the_old_one():
    made = table(HALL)
    made.apply(check(replace(BROKEN, uid="uid-2"), LampPolicy))
    assert in_force(made) == {}
    assert states(made)[0].generation is None


def test_the_oldest_policies_are_in_force_if_there_are_too_many(monkeypatch):
    monkeypatch.setattr(policies, "MAX_POLICIES", 1)
    younger = replace(HALL, name="attic", uid="uid-4", created="2026-02-01T00:00:00Z")
    made = table(younger, HALL)
    assert in_force(made) == {"hall": 1}
    attic, _ = states(made)
    assert attic.problem == "1 older policies are in effect, the maximum; delete unused policies"
    assert attic.generation is None
