"""Quantities: their values are those that the API server stores."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drakit.quantity import parse_quantity, quantity_units, same_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("500m", Decimal("0.5")),
        ("1Gi", 2**30),
        ("1.5k", 1500),
        ("12e3", 12000),
        ("2E", 2 * 10**18),
        ("-1", -1),
        ("+5.", 5),
        (".5", Decimal("0.5")),
        ("12345678901234567890123456789012345678901", 12345678901234567890123456789012345678901),
        pytest.param("0.1n", Decimal("1e-9"), id="finer-than-a-billionth-is-rounded-up"),
        pytest.param("-0.1n", Decimal("-1e-9"), id="also-below-zero"),
        pytest.param("1e-999", Decimal("1e-9"), id="however-fine"),
        pytest.param("9Ei", 2**63 - 1, id="binary-suffixes-end-at-64-bits"),
        pytest.param("1e999", Decimal("1e999"), id="decimal-ones-do-not"),
    ],
)
def test_quantities(text, value):
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text", ["", "8 Gi", "Gi", "8GB", "1e", "--1", "1K", "1gi", "\uff11", "1\n", "1e9999", "1" * 65]
)
def test_no_quantities(text):
    with pytest.raises(ValueError, match="is not a Kubernetes quantity"):
        parse_quantity(text)


@settings(derandomize=True, database=None)
@given(st.integers(0, 2**40), st.sampled_from(["", "k", "M", "Ki", "Mi"]))
def test_a_quantity_equals_the_same_amount_in_thousandths(number, suffix):
    value = int(parse_quantity(f"{number}{suffix}"))
    assert same_quantity(f"{number}{suffix}", f"{value * 1000}m")
    assert not same_quantity(f"{number}{suffix}", f"{value * 1000 + 1}m")


@pytest.mark.parametrize(
    ("text", "units"),
    [
        pytest.param("1", 10**9, id="one"),
        pytest.param("1n", 1, id="the-finest"),
        pytest.param("0.1", 10**8, id="a-tenth"),
        pytest.param("20Gi", 20 * 2**30 * 10**9, id="binary"),
        pytest.param("9e30", 9 * 10**39, id="beyond-64-bits"),
    ],
)
def test_units_are_whole_numbers_whose_sums_are_exact(text, units):
    assert quantity_units(text) == units
    assert quantity_units(text) * 3 + quantity_units("1n") == 3 * units + 1
