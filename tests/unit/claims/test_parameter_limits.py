"""The limits of a claim's opaque parameters, and the number of stored copies."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from drakit_nodeplugin.claims.allocation import MAX_CONFIG_DEPTH, allocated_claim
from drakit_nodeplugin.claims.errors import BadConfigError, TooManyParametersError
from drakit_nodeplugin.config import OpaqueParameters
from drakit_nodeplugin.state.records import StoredClaim, dump
from tests.fakes.claims import DRIVER, claim_body, opaque
from tests.unit.claims.conftest import wanted as parsed

A, B = "uid-a", "uid-b"
LIMITS = OpaqueParameters().model_copy(update={"max_bytes": 1000, "max_values": 100})


def claim(*configs: Any, devices: int = 1) -> dict[str, Any]:
    names = [f"cam-{n}" for n in range(devices)]
    return claim_body(A, *names, config=configs)


def wanted(found: dict[str, Any]) -> StoredClaim:
    return parsed(found, limits=LIMITS)


def nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels - 1):
        found = {"a": found}
    return found


def listed(nodes: int) -> dict[str, Any]:
    """Parameters with this many keys and values: the object, a key, a list, and its items."""
    return {"a": [0] * (nodes - 3)}


@pytest.mark.parametrize(
    ("configs", "devices"),
    [
        pytest.param([listed(100)], 1, id="as-many-nodes-as-can-be"),
        pytest.param([listed(50), listed(50)], 1, id="in-two-configs"),
        pytest.param([listed(25)], 4, id="for-four-devices"),
        pytest.param([{"a": "x" * 992}], 1, id="as-many-bytes-as-can-be"),
        pytest.param([{"a": "x" * 242}], 4, id="as-many-bytes-for-four-devices"),
        pytest.param([opaque({"a": "x" * 5000}, driver="other.example.com")], 1, id="of-another"),
        pytest.param([opaque({"a": "x" * 5000}, "other")], 1, id="for-another-request"),
    ],
)
def test_parameters_within_the_limits_are_wanted(configs, devices):
    given = [each if "opaque" in each else opaque(each) for each in configs]
    assert len(wanted(claim(*given, devices=devices)).devices) == devices


@pytest.mark.parametrize(
    ("configs", "devices", "limit"),
    [
        pytest.param([listed(101)], 1, "100 keys and values", id="a-node-more"),
        pytest.param([listed(50), listed(51)], 1, "100 keys and values", id="in-two-configs"),
        pytest.param([listed(26)], 4, "100 keys and values", id="for-four-devices"),
        pytest.param([{str(n): {} for n in range(51)}], 1, "100 keys and values", id="keys"),
        pytest.param([{"a": "x" * 993}], 1, "1000 bytes", id="a-byte-more"),
        pytest.param([{"a": "x" * 243}], 4, "1000 bytes", id="a-byte-more-for-four-devices"),
        pytest.param([{"a": "é" * 497}], 1, "1000 bytes", id="bytes-and-not-characters"),
    ],
)
def test_more_is_refused_with_claim_driver_limit_and_remedy(configs, devices, limit):
    with pytest.raises(TooManyParametersError) as caught:
        wanted(claim(*map(opaque, configs), devices=devices))
    assert str(caught.value) == (
        f"claim lab/claim-uid-a: the opaque parameters for driver {DRIVER} exceed the limit of "
        f"{limit}, counted once for each device that they apply to; shorten the parameters, "
        f"request fewer devices per claim, or increase the limit in the chart's value "
        f"nodeplugin.opaqueParameters"
    )
    assert caught.value.reason == "BadConfig"


def test_a_config_of_the_largest_size_passes_whatever_is_in_it():
    densest = {"a": [0] * ((10 * 1024 - 7) // 2)}
    assert 10 * 1024 - 2 < len(orjson.dumps(densest)) <= 10 * 1024
    parsed(claim(opaque(densest)))


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        pytest.param(
            opaque(nested(MAX_CONFIG_DEPTH + 1)), "are nested deeper than 64 levels", id="deep"
        ),
        pytest.param(opaque([]), "are not a JSON object", id="list"),
        pytest.param(opaque(None), "are not a JSON object", id="nothing"),
        pytest.param(
            opaque("text", source="FromClass"),
            f"opaque parameters for driver {DRIVER} in its DeviceClass are not a JSON object",
            id="of-the-class",
        ),
    ],
)
def test_invalid_parameters_are_refused(config, wrong):
    with pytest.raises(BadConfigError, match=wrong):
        wanted(claim(config))


def test_as_many_levels_as_can_be_are_wanted():
    assert parsed(claim(opaque(nested(MAX_CONFIG_DEPTH)))).configs


def test_a_config_is_stored_once_however_many_devices_it_applies_to():
    row = dump(wanted(claim(opaque({"mode": "unmistakable"}), devices=32)))
    assert row.count(b"unmistakable") == 1


def test_each_device_has_the_configs_of_its_request_the_weakest_first():
    found = claim_body(
        A,
        {"device": "cam-0", "request": "main/small"},
        {"device": "cam-1", "request": "other"},
        config=[
            opaque({"of": "claim"}),
            opaque({"of": "other"}, "other"),
            opaque({"of": "class"}, "main", source="FromClass"),
            opaque({"of": "large"}, "main/large"),
        ],
    )
    claim = wanted(found)
    assert claim.configs == ('{"of":"class"}', '{"of":"claim"}', '{"of":"other"}')
    assert [device.configs for device in allocated_claim(claim).devices] == [
        ({"of": "class"}, {"of": "claim"}),
        ({"of": "claim"}, {"of": "other"}),
    ]


def test_the_order_of_keys_makes_no_other_config():
    first, second = (wanted(claim(opaque(each))) for each in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    assert first.configs == second.configs


def test_a_driver_that_changes_parameters_changes_those_of_one_device_only():
    stored = wanted(claim(opaque({"options": {"mode": "fast"}}), devices=2))
    first, second = allocated_claim(stored).devices
    first.configs[0]["options"].clear()
    assert second.configs == ({"options": {"mode": "fast"}},)
    assert allocated_claim(stored).devices[0] == allocated_claim(stored).devices[0]
