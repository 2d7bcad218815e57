"""The objects on which the operator acts in its benchmark, and the figures of the audit log."""

from __future__ import annotations

import jsonschema
import pytest
import yaml

from bench.acting import Acting, most_updates, writes_of_operator
from bench.scene import Scene
from tests.unit.crds.test_versions import ROOT

ACTING = Acting()


@pytest.mark.parametrize(
    ("plural", "bodies", "number"),
    [
        pytest.param("hostdevicepolicies", ACTING.policy_bodies(), 1_000, id="policies"),
        pytest.param("devicedrivers", ACTING.driver_bodies(), 50, id="drivers"),
        pytest.param("devicemaintenances", ACTING.maintenance_bodies(), 100, id="maintenances"),
    ],
)
def test_the_objects_fit_their_definitions(plural, bodies, number):
    text = (ROOT / f"charts/drakit/crds/{plural}.yaml").read_text(encoding="utf-8")
    (version,) = yaml.safe_load(text)["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    specs = [body["spec"] for body in bodies]
    assert len(specs) == number
    checks = jsonschema.Draft202012Validator(spec)
    for each in specs[::25]:
        assert each.keys() <= spec["properties"].keys()
        checks.validate(each)


def test_each_maintenance_is_about_one_slice_of_64_devices():
    slices = {
        (body["spec"]["driver"], body["spec"]["nodeName"]): len(body["spec"]["devices"])
        for body in ACTING.slice_bodies()
    }
    chosen = [body["spec"]["devices"] for body in ACTING.maintenance_bodies()]
    assert [slices[each["driver"], each["node"]] for each in chosen] == [64] * 100
    assert {node for _, node in slices} <= {
        body["metadata"]["name"] for body in Scene(slices=100).node_bodies()
    }


def record(at, *, name="d", agent="drakit-operator/1.0", resource="devicedrivers"):
    return {
        "userAgent": agent,
        "verb": "patch",
        "stage": "ResponseComplete",
        "requestReceivedTimestamp": f"2026-11-29T12:00:{at:06.3f}Z",
        "objectRef": {"resource": resource, "name": name, "subresource": "status"},
    }


@pytest.mark.parametrize(
    ("times", "most"),
    [
        pytest.param([], 0, id="none"),
        pytest.param([0, 5.1, 10.2], 1, id="apart"),
        pytest.param([0, 4.9, 10], 2, id="too-soon"),
    ],
)
def test_the_most_updates_within_five_seconds(times, most):
    writes = [record(at) for at in times] + [record(at, name=f"other-{at}") for at in times]
    assert most_updates(writes, seconds=5.0) == most


def test_writes_of_others_and_of_the_lease_do_not_count():
    mine = record(9.5)
    others = [record(9.5, agent="kubectl/v1"), record(9.5, resource="leases"), record(1)]
    found = writes_of_operator([mine, *others], since="2026-11-29T12:00:09")
    assert list(found) == [mine]
