"""The least amount of a capacity that a claim takes, and whether it is available."""

import pytest

from drakit_explain.allocation import short_capacities, summed
from drakit_explain.devices import Amount, CapacityFacts, CapacityPolicy


def short(total, *, asked=None, used="0", policy=None):
    return short_capacities(
        (CapacityFacts(name="size", value=total, policy=policy),),
        () if asked is None else (Amount("size", asked),),
        used=[summed([Amount("size", used)])],
    )


VALUES = CapacityPolicy(default="1", valid_values=("1", "2", "8"))
RANGE = CapacityPolicy(default="2", min="2", max="8", step="3")
SPAN = CapacityPolicy(default="2", min="2", max="8")
ODD = CapacityPolicy(default="0", min="0", step="1500m")
ENOUGH, TOO_LITTLE, NEVER = (), ("size",), None


@pytest.mark.parametrize(
    ("facts", "answer"),
    [
        pytest.param({"asked": "6", "used": "4"}, ENOUGH, id="exactly-what-is-left"),
        pytest.param({"asked": "6", "used": "4001m"}, TOO_LITTLE, id="a-thousandth-too-much"),
        pytest.param({"asked": "11"}, NEVER, id="more-than-there-is"),
        pytest.param({"used": "1"}, TOO_LITTLE, id="all-of-it-by-default"),
        pytest.param({"used": "9", "policy": VALUES}, ENOUGH, id="default-of-the-policy"),
        pytest.param(
            {"asked": "3", "used": "3", "policy": VALUES}, TOO_LITTLE, id="up-to-a-valid-value"
        ),
        pytest.param({"asked": "9", "policy": VALUES}, NEVER, id="more-than-any-valid-value"),
        pytest.param(
            {"asked": "1", "used": "9", "policy": SPAN}, TOO_LITTLE, id="up-to-the-minimum"
        ),
        pytest.param({"asked": "3", "used": "6", "policy": RANGE}, TOO_LITTLE, id="up-to-a-step"),
        pytest.param({"asked": "5", "used": "5", "policy": RANGE}, ENOUGH, id="a-step-exactly"),
        pytest.param({"asked": "9", "policy": SPAN}, NEVER, id="more-than-the-maximum"),
        pytest.param(
            {"asked": "4", "used": "6", "policy": ODD}, ENOUGH, id="steps-are-whole-numbers"
        ),
    ],
)
def test_what_is_left_is_compared_with_what_is_taken(facts, answer):
    assert short("10", **facts) == answer


def test_what_is_no_quantity_is_an_error():
    with pytest.raises(ValueError, match="'much' is not a Kubernetes quantity"):
        short("much", asked="1")
