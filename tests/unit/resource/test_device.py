from __future__ import annotations

from decimal import Decimal

import pytest

from drakit import Device, Version
from drakit.resource.claim import base_request
from drakit.resource.device import device_body, device_problems, same_device
from drakit.resource.nodeselector import NodeLabelsUnknownError, selects_node
from drakit.resource.quantity import parse_quantity


@pytest.mark.parametrize(
    ("device", "problem"),
    [
        pytest.param(Device(name="Cam_0"), "not a DNS label", id="name"),
        pytest.param(Device(name="c" * 64), "not a DNS label", id="name-length"),
        pytest.param(
            Device(name="c", attributes={f"a{n}": n for n in range(33)}), "has 33", id="too-many"
        ),
        pytest.param(Device(name="c", attributes={"a-b": 1}), "no C identifier", id="identifier"),
        pytest.param(Device(name="c", attributes={"UP.er/a": 1}), "a domain", id="domain"),
        pytest.param(Device(name="c", attributes={"a": "x" * 65}), "more than 64", id="string"),
        pytest.param(Device(name="c", attributes={"a": "é" * 33}), "64 bytes", id="string-bytes"),
        pytest.param(Device(name="c", attributes={"a": "\udc80"}), "as UTF-8", id="string-broken"),
        pytest.param(Device(name="c", attributes={"a": 1.5}), "of type float", id="float"),
        pytest.param(Device(name="c", attributes={"a": None}), "of type NoneType", id="none"),
        pytest.param(Device(name="c", attributes={7: 1}), "of type int", id="attribute-number"),
        pytest.param(Device(name="c", attributes=None), "no mapping", id="no-attributes"),
        pytest.param(Device(name=None), "name is no text", id="no-name"),
        pytest.param(Device(name="c", capacity={"size": 8}), "as text", id="amount-number"),
        pytest.param(
            Device(name="c", capacity={"size": "1e9999999"}), "not a Kub", id="amount-huge"
        ),
        pytest.param(
            Device(name="c", attributes={"a": Version(12)}), "semantic", id="version-type"
        ),
        pytest.param(Device(name="c", attributes={"a": 2**63}), "64-bit", id="integer"),
        pytest.param(Device(name="c", attributes={"a": Version("1.2")}), "semantic", id="version"),
        pytest.param(
            Device(name="c", capacity={"size": "8 GB"}), "not a Kubernetes", id="quantity"
        ),
    ],
)
def test_what_the_api_would_refuse_is_said_in_a_sentence(device, problem):
    problems = "; ".join(device_problems(device)).replace("is not a C", "no C")
    assert problem in problems


def test_a_good_device_is_written_as_the_api_wants_it():
    device = Device(
        name="cam-0",
        attributes={"usb": True, "port": 3, "model": "x", "firmware": Version("1.2.3")},
        capacity={"size": "8Gi"},
    )
    assert device_problems(device) == []
    assert device_body(device) == {
        "name": "cam-0",
        "attributes": {
            "usb": {"bool": True},
            "port": {"int": 3},
            "model": {"string": "x"},
            "firmware": {"version": "1.2.3"},
        },
        "capacity": {"size": {"value": "8Gi"}},
    }


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({"name": "c", "capacity": {"size": {"value": "8192Mi"}}, "taints": []}, True),
        ({"name": "c", "capacity": {"size": {"value": "8Ti"}}}, False),
        ({"name": "c"}, False),
        ({"name": "c", "capacity": {"size": {"value": "8Gi"}}, "taints": [{"key": "k"}]}, False),
    ],
)
def test_devices_are_compared_by_meaning(other, same):
    assert same_device({"name": "c", "capacity": {"size": {"value": "8Gi"}}}, other) is same


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("500m", Decimal("0.5")),
        ("1Gi", 2**30),
        ("1.5k", 1500),
        ("12e3", 12000),
        ("2E", 2 * 10**18),
    ],
)
def test_quantities(text, value):
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "8 Gi", "Gi", "8GB", "1e", "--1"])
def test_no_quantities(text):
    with pytest.raises(ValueError, match="is not a Kubernetes quantity"):
        parse_quantity(text)


def term(key: str, operator: str, *values: str, kind: str = "matchExpressions") -> dict:
    requirement = {"key": key, "operator": operator, "values": list(values)}
    return {"nodeSelectorTerms": [{kind: [requirement]}]}


@pytest.mark.parametrize(
    ("selector", "here"),
    [
        pytest.param(None, True, id="none-means-any"),
        pytest.param(term("metadata.name", "In", "node-1", kind="matchFields"), True, id="name"),
        pytest.param(term("metadata.name", "In", "node-2", kind="matchFields"), False, id="other"),
        pytest.param(term("zone", "In", "a", "b"), True, id="in"),
        pytest.param(term("zone", "NotIn", "a"), False, id="not-in"),
        pytest.param(term("rack", "NotIn", "a"), True, id="not-in-without-label"),
        pytest.param(term("zone", "Exists"), True, id="exists"),
        pytest.param(term("rack", "DoesNotExist"), True, id="does-not-exist"),
        pytest.param(term("slots", "Gt", "3"), True, id="greater"),
        pytest.param(term("slots", "Lt", "3"), False, id="less"),
        pytest.param(term("zone", "Gt", "3"), False, id="greater-than-text"),
        pytest.param({"nodeSelectorTerms": [{}]}, False, id="an-empty-term-matches-nothing"),
        pytest.param({"nodeSelectorTerms": []}, False, id="no-term"),
    ],
)
def test_node_selectors(selector, here):
    assert selects_node(selector, name="node-1", labels={"zone": "a", "slots": "4"}) is here


def test_a_selector_on_labels_needs_labels():
    by_name = term("metadata.name", "In", "node-1", kind="matchFields")
    assert selects_node(by_name, name="node-1", labels=None) is True
    with pytest.raises(NodeLabelsUnknownError):
        selects_node(term("zone", "In", "a"), name="node-1", labels=None)


def test_base_requests():
    assert [base_request(name) for name in ("main", "main/small")] == ["main", "main"]
