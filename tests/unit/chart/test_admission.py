"""The admission policies: the objects that the token of a node's plugin may write."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from drakit.device import Health
from drakit_drivers.hostdev import HostDevices
from drakit_nodeplugin.devices.taints import DOMAIN, Condition, taints
from tests.unit.chart.reading import pod_spec, the

SLICES = "drakit-nodeplugin"
EVENTS = "drakit-nodeplugin-events"
REPORTS = "drakit-nodeplugin-reports"
NO_HOSTDEV: dict[str, Any] = {"hostdev": {"enabled": False}}


def policy(objects: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return the(objects, "ValidatingAdmissionPolicy", name)["spec"]


def bound_drivers(objects: list[dict[str, Any]]) -> list[str] | None:
    """The drivers whose slices a plugin may write; None for any."""
    found = [
        re.search(r"spec\.driver in (\[.*?\])", validation["expression"])
        for validation in policy(objects, SLICES)["validations"]
    ]
    lists = [json.loads(match[1]) for match in found if match]
    assert len(lists) <= 1
    return lists[0] if lists else None


def allowing(*drivers: str) -> dict[str, Any]:
    return {"backends": {"enabled": True, "allowed": {name: {} for name in drivers}}}


@pytest.mark.parametrize("name", [SLICES, EVENTS])
def test_a_policy_binds_the_account_of_the_plugin_and_fails_closed(render, name):
    objects = render()
    spec = policy(objects, name)
    account = pod_spec(objects, "DaemonSet", "drakit-nodeplugin")["serviceAccountName"]
    (condition,) = spec["matchConditions"]
    assert f'"system:serviceaccount:drakit-system:{account}"' in condition["expression"]
    assert spec["failurePolicy"] == "Fail"
    (rule,) = spec["matchConstraints"]["resourceRules"]
    assert rule["apiVersions"] == ["*"]
    assert set(rule["operations"]) == {"CREATE", "UPDATE", "DELETE"}
    binding = the(objects, "ValidatingAdmissionPolicyBinding", name)["spec"]
    assert binding == {"policyName": name, "validationActions": ["Deny"]}


def test_the_policies_cover_everything_that_the_plugin_may_write(render):
    objects = render()
    rules = the(objects, "ClusterRole", "drakit-nodeplugin")["rules"]
    written = {
        (group, resource)
        for rule in rules
        if set(rule["verbs"]) - {"get", "list", "watch"}
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    covered = {
        (group, resource)
        for name in (SLICES, EVENTS, REPORTS)
        for rule in policy(objects, name)["matchConstraints"]["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert written == covered


@pytest.mark.parametrize(
    ("values", "drivers"),
    [
        pytest.param({}, [HostDevices.name], id="hostdev"),
        pytest.param(
            {
                "simulated": {"enabled": True, "config": {"driverName": "fpga.test"}},
                "devicePlugins": {"enabled": True, "driverName": "dp.test"},
            },
            ["dp.test", "fpga.test", HostDevices.name],
            id="everything-that-a-value-names",
        ),
        pytest.param(
            {
                **NO_HOSTDEV,
                "nodeplugin": {"drivers": [{"driver": "camera:Camera", "name": "cam.test"}]},
            },
            ["cam.test"],
            id="a-class-with-its-name",
        ),
        pytest.param(
            {
                **NO_HOSTDEV,
                "nodeplugin": {
                    "drivers": [
                        {"driver": "hostdev"},
                        {"driver": "simulated"},
                        {"driver": "simulated", "config": {"driverName": "fpga.test"}},
                    ]
                },
            },
            ["fpga.test", HostDevices.name, "simulated.drakit.dev"],
            id="drivers-that-ship",
        ),
        pytest.param(
            {"nodeplugin": {"drivers": [{"driver": "camera:Camera"}]}},
            None,
            id="a-class-without-its-name",
        ),
        pytest.param(
            allowing("gpu.test", "cam.test"),
            ["cam.test", "gpu.test", HostDevices.name],
            id="backends-that-are-allowed",
        ),
        pytest.param({**NO_HOSTDEV, **allowing()}, [], id="no-backend-is-allowed"),
        pytest.param({"backends": {"enabled": True}}, None, id="backends-choose-their-names"),
    ],
)
def test_drivers_are_bound_where_the_values_name_them_all(render, values, drivers):
    assert bound_drivers(render(values)) == drivers


def test_slices_of_a_driver_that_left_the_values_can_be_tainted_and_deleted(render):
    """The plugin still hosts it from its record, so that its claims can end."""
    (rule,) = [
        validation
        for validation in policy(render(allowing()), SLICES)["validations"]
        if "spec.driver in" in validation["expression"]
    ]
    delete, listed, update = rule["expression"].split(" || ")
    assert delete == "object == null"
    assert listed == f'variables.slices.all(spec, spec.driver in ["{HostDevices.name}"])'
    assert update.startswith("(oldObject != null && object.spec.?devices.orValue([]).all(device, ")
    condition = Condition(health=Health.unhealthy("broken"), tainted=True, evicting=True)
    for taint in taints((), condition, stopped=True, unpreparing=True):
        assert taint.key.startswith(DOMAIN)
        assert taint.effect != "None"
    assert f'taint.key.startsWith("{DOMAIN}") && taint.effect != "None"' in update
