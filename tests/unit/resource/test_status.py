"""Which results of a driver the API server accepts, and the entries of a claim's status."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from drakit import Condition, NetworkData, PreparedDevice, Version
from drakit_formats.resource.status import checked, data_copy, data_of, has_status, status_entry

READY = Condition(type="Ready", status="True", reason="Configured", message="It works.")


def of_network(**fields) -> PreparedDevice:
    return PreparedDevice(network_data=NetworkData(**fields))


VALID = {
    "nothing": PreparedDevice(),
    "two-conditions": PreparedDevice(
        conditions=(READY, replace(READY, type="lamp.example.com/Lit"))
    ),
    "network": of_network(
        interface_name="net1",
        ips=("192.0.2.5/24", "2001:db8::5/64"),
        hardware_address="0a:58:c0:00:02:05",
    ),
    "attributes": PreparedDevice(attributes={"firmware": Version("1.2.3")}),
}


@pytest.mark.parametrize("prepared", VALID.values(), ids=VALID)
def test_a_valid_result_has_no_problem(prepared):
    assert checked(prepared) is prepared


@pytest.mark.parametrize(
    ("prepared", "problem"),
    [
        (PreparedDevice(conditions=[READY]), "conditions are of type list, not a tuple"),
        (PreparedDevice(conditions=(READY,) * 9), "conditions have 9 entries, more than 8"),
        (PreparedDevice(conditions=(READY, READY)), "condition 'Ready' is given twice"),
        (PreparedDevice(conditions=("Ready",)), "conditions contain 'Ready', which is not a"),
        (
            PreparedDevice(conditions=(replace(READY, status=True),)),
            "condition has a status that is not a string: True",
        ),
        (
            PreparedDevice(conditions=(replace(READY, message="\ud800"),)),
            "condition has a message that is not a string",
        ),
        (
            PreparedDevice(conditions=(replace(READY, type=""),)),
            "condition '' has a type that is empty",
        ),
        (
            PreparedDevice(conditions=(replace(READY, type="so so"),)),
            "condition 'so so' has a type that is",
        ),
        (
            PreparedDevice(conditions=(replace(READY, reason="it is up"),)),
            "condition 'Ready' has reason 'it is up', which is not a word",
        ),
        (PreparedDevice(conditions=(replace(READY, reason=""),)), "condition 'Ready' has reason"),
        (of_network(interface_name="n" * 257), "network_data.interface_name is not a string of at"),
        (of_network(hardware_address="0" * 129), "network_data.hardware_address is not a string"),
        (of_network(ips=("192.0.2.5",)), "network_data.ips contains '192.0.2.5', which is not"),
        (of_network(ips=("2001:DB8::5/64",)), "network_data.ips contains '2001:DB8::5/64'"),
        (of_network(ips=("::ffff:192.0.2.5/96",)), "network_data.ips contains '::ffff:192.0.2.5"),
        (of_network(ips=("192.0.2.5/24",) * 2), "network_data.ips contains an address twice"),
        (of_network(ips=("192.0.2.5/24",) * 17), "network_data.ips is not a tuple of at most 16"),
        (PreparedDevice(network_data="net1"), "network_data is of type str, not a NetworkData"),
        (PreparedDevice(attributes={"a": 1.5}), "attributes are invalid: attribute 'a' is"),
    ],
)
def test_a_result_that_the_api_would_reject_has_a_problem(prepared, problem):
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}"):
        checked(prepared)


def nested(levels: int):
    value = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def test_data_is_a_json_object_of_bounded_size_and_depth():
    assert data_copy({"vf": 3, "of": ["a", None]}) == {"vf": 3, "of": ["a", None]}
    assert data_copy(nested(16)) == nested(16)
    assert data_copy({"a": "<" * 1700}) == {"a": "<" * 1700}
    for data, problem in (
        ([], "data is of type list, not a mapping"),
        ({"a": float("nan")}, "data cannot be written as JSON"),
        ({"a": "x" * 10_240}, "data is larger than 10 KiB as JSON"),
        ({"a": "<" * 1710}, "data is larger than 10 KiB as JSON"),  # six characters each
        (nested(17), "data has more than 16 levels"),
        ({"a": [2**63]}, "data contains an integer of more than 64 bits"),
        ({"a": {"\ud800": 1}}, "data contains text that is not valid Unicode"),
        ({"a": ["\ud800"]}, "data contains text that is not valid Unicode"),
    ):
        with pytest.raises(ValueError, match=problem):
            data_copy(data)


def test_the_data_of_a_backend_is_measured_in_bytes_and_has_finite_numbers():
    assert data_of('{"a": "' + "é" * 5000 + '"}') == {"a": "é" * 5000}
    for written, problem in (
        ('{"a": "' + "é" * 5200 + '"}', "data is larger than 10 KiB as JSON"),
        ('{"a": [1e999]}', "data contains a number that is too large"),
        ('{"a": NaN}', "data is not valid JSON"),
    ):
        with pytest.raises(ValueError, match=problem):
            data_of(written)


def entry(prepared: PreparedDevice, stored, now: str, share_id: str | None = None):
    return status_entry(
        prepared,
        driver="lamp.example.com",
        pool="node-1",
        device="lamp-0",
        share_id=share_id,
        stored=stored,
        now=now,
    )


def test_an_entry_has_what_the_driver_returned_and_no_empty_fields():
    prepared = PreparedDevice(
        conditions=(replace(READY, message="m" * 2000),),
        data={"vf": 3},
        network_data=NetworkData(interface_name="net1"),
    )
    assert entry(prepared, {}, "2026-11-27T10:00:00Z", share_id="s-1") == {
        "driver": "lamp.example.com",
        "pool": "node-1",
        "device": "lamp-0",
        "shareID": "s-1",
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "Configured",
                "message": "m" * 1024,
                "lastTransitionTime": "2026-11-27T10:00:00Z",
            }
        ],
        "data": {"vf": 3},
        "networkData": {"interfaceName": "net1"},
    }
    assert not has_status(PreparedDevice(attributes={"a": 1}))
    assert has_status(prepared)


def test_a_condition_keeps_its_time_while_its_status_is_the_same():
    lit = replace(READY, type="Lit")
    stored = entry(PreparedDevice(conditions=(READY, lit)), {}, "2026-11-27T10:00:00Z")
    changed = replace(lit, status="False", reason="Off")
    same = replace(READY, reason="StillConfigured", message="It still works.")
    later = entry(PreparedDevice(conditions=(same, changed)), stored, "2026-11-27T11:00:00Z")
    assert [(each["type"], each["lastTransitionTime"]) for each in later["conditions"]] == [
        ("Ready", "2026-11-27T10:00:00Z"),
        ("Lit", "2026-11-27T11:00:00Z"),
    ]
