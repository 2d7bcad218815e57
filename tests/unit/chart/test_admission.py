"""The admission policies: the objects that the tokens may write, mostly that of a node's plugin."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from drakit.device import Health
from drakit_drivers.hostdev import HostDevices
from drakit_nodeplugin.devices.taints import Condition, taints
from drakit_nodeplugin.slices.plan import PoolIdentity, slice_name
from tests.unit.chart.reading import AdmissionPolicy, pod_spec, the
from tests.unit.chart.slice_writes import ALLOWED, DEVICES, REFUSED, tainted

SLICES = "drakit-nodeplugin"
EVENTS = "drakit-nodeplugin-events"
REPORTS = "drakit-nodeplugin-reports"
CLAIMS = "drakit-nodeplugin-claims"
OPERATOR = (
    "drakit-operator",
    "drakit-operator-events",
    "drakit-operator-reports",
    "drakit-operator-drivers",
)
MAINTENANCE = "drakit-operator-maintenance"
CLAIM_STATUS: dict[str, Any] = {
    "nodeplugin": {"claimStatus": {"enabled": True}},
    "backends": {"enabled": True, "allowed": {"gpu": {"driver": "gpu.test"}}},
}
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
    allowed = {name.partition(".")[0]: {"driver": name} for name in drivers}
    return {"backends": {"enabled": True, "allowed": allowed}}


@pytest.mark.parametrize(
    ("kind", "component", "name"),
    [
        *(("DaemonSet", "nodeplugin", name) for name in (SLICES, EVENTS, REPORTS)),
        *(("Deployment", "operator", name) for name in (*OPERATOR, MAINTENANCE)),
    ],
)
def test_a_policy_binds_the_account_of_a_component_and_fails_closed(render, kind, component, name):
    objects = render({"maintenance": {"enabled": True}})
    spec = policy(objects, name)
    account = pod_spec(objects, kind, f"drakit-{component}")["serviceAccountName"]
    (condition,) = spec["matchConditions"]
    assert f'"system:serviceaccount:drakit-system:{account}"' in condition["expression"]
    assert spec["failurePolicy"] == "Fail"
    (rule,) = spec["matchConstraints"]["resourceRules"]
    assert rule["apiVersions"] == ["*"]
    assert set(rule["operations"]) == {"CREATE", "UPDATE", "DELETE"}
    binding = the(objects, "ValidatingAdmissionPolicyBinding", name)["spec"]
    assert binding == {"policyName": name, "validationActions": ["Deny"]}


@pytest.mark.parametrize(
    ("component", "policies", "others"),
    [
        pytest.param(
            "nodeplugin",
            (SLICES, EVENTS, REPORTS, CLAIMS),
            # The API server asks for this one with `resourceclaims/status`; nobody can write to it.
            {("resource.k8s.io", "resourceclaims/driver")},
            id="node-plugin",
        ),
        pytest.param(
            "operator",
            (*OPERATOR, MAINTENANCE),
            {
                # The API server ignores other fields.
                ("drakit.dev", "devicedrivers/status"),
                ("drakit.dev", "hostdevicepolicies/status"),
                ("drakit.dev", "devicemaintenances/status"),
                ("", "pods/eviction"),  # any pod can hold a device; budgets limit it
                ("coordination.k8s.io", "leases"),  # a name cannot limit `create`
            },
            id="operator",
        ),
    ],
)
def test_every_right_to_write_has_a_clause(render, component, policies, others):
    """A new right needs a clause in an admission policy, or a reason in this test."""
    objects = render({**CLAIM_STATUS, "maintenance": {"enabled": True}})
    roles = [
        body["rules"]
        for body in objects
        if body["kind"] in ("ClusterRole", "Role")
        and body["metadata"]["name"] == f"drakit-{component}"
    ]
    written = {
        (group, resource)
        for rules in roles
        for rule in rules
        if set(rule["verbs"]) - {"get", "list", "watch"}
        for group in rule.get("apiGroups", [])
        for resource in rule["resources"]
    }
    covered = {
        (group, resource)
        for name in policies
        for rule in policy(objects, name)["matchConstraints"]["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert written == covered | others


def test_claim_status_is_off_by_default_and_names_the_drivers(render):
    off, on = render(), render(CLAIM_STATUS)
    statuses = {"resourceclaims/status", "resourceclaims/driver"}
    rules = {
        rule["resources"][0]: rule
        for rule in the(on, "ClusterRole", "drakit-nodeplugin")["rules"]
        if statuses & set(rule["resources"])
    }
    assert rules["resourceclaims/status"]["verbs"] == ["patch"]
    assert rules["resourceclaims/driver"]["verbs"] == ["associated-node:patch"]
    assert rules["resourceclaims/driver"]["resourceNames"] == ["gpu.test", HostDevices.name]
    for rule in the(off, "ClusterRole", "drakit-nodeplugin")["rules"]:
        assert not statuses & set(rule["resources"])
    assert CLAIMS not in [each["metadata"]["name"] for each in off]
    # Without a name, RBAC would allow all of them.
    nothing = render({**CLAIM_STATUS, **NO_HOSTDEV, **allowing()})
    rules_of_nothing = the(nothing, "ClusterRole", "drakit-nodeplugin")["rules"]
    assert all("resourceclaims/driver" not in rule["resources"] for rule in rules_of_nothing)


def test_claim_status_needs_the_names_of_all_drivers(refusal):
    nodeplugin = {"claimStatus": {"enabled": True}, "drivers": [{"driver": "camera:Camera"}]}
    values = {"image": {"repository": "registry.example.com/drakit"}, "nodeplugin": nodeplugin}
    assert "set `name` for each entry of nodeplugin.drivers" in refusal(values)


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
        pytest.param(
            {"backends": {"enabled": True}}, [HostDevices.name], id="backends-without-entries"
        ),
    ],
)
def test_drivers_are_bound_where_the_values_name_them_all(render, values, drivers):
    assert bound_drivers(render(values)) == drivers


# ------------------------------------------------------------ slices and reports of other drivers


def of_driver(name: str, *devices: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """A slice of a driver, or its report."""
    identity = PoolIdentity(driver=name, node="node-1", node_uid="u", pool="node-1")
    pool = {"name": "node-1"}
    return {
        "metadata": {"name": slice_name(identity, 0)},
        "spec": {"driver": name, "nodeName": "node-1", "pool": pool, "devices": [*devices], **spec},
    }


@pytest.mark.parametrize("devices", ALLOWED)
def test_slices_of_a_driver_that_left_the_values_can_be_tainted_and_deleted(render, devices):
    """The plugin still hosts it from its record, so that its claims can end."""
    policy, old = AdmissionPolicy(render(), SLICES), of_driver("gpu.test", *DEVICES)
    assert policy.refusal(old, of_driver("gpu.test", *devices)) == ("", "")
    assert policy.refusal(old, None) == ("", "")


def test_every_taint_of_the_plugin_may_be_in_such_a_slice(render):
    condition = Condition(health=Health.unhealthy("broken"), tainted=True, evicting=True)
    policy, old = AdmissionPolicy(render(), SLICES), of_driver("gpu.test", *DEVICES)
    for taint in taints((), condition, stopped=True, unpreparing=True):
        new = tainted(*DEVICES, taints=[{"key": taint.key, "effect": taint.effect}])
        assert policy.refusal(old, of_driver("gpu.test", *new)) == ("", "")


LISTED = f"of the drivers in the chart's values: {HostDevices.name}"
FORGED = f"only write ResourceSlices {LISTED}; "


@pytest.mark.parametrize("devices", REFUSED)
def test_devices_of_a_foreign_driver_cannot_be_invented_or_changed(render, devices):
    policy, new = AdmissionPolicy(render(), SLICES), of_driver("gpu.test", *devices)
    for old in (of_driver("gpu.test", *DEVICES), None):
        assert FORGED in policy.refusal(old, new)[1]
    own = of_driver(HostDevices.name, *devices)
    assert policy.refusal(of_driver(HostDevices.name, *DEVICES), own) == ("", "")


def test_counters_of_a_foreign_driver_cannot_be_changed(render):
    def with_counters(value: str) -> dict[str, Any]:
        counters = {"name": "gpu-0", "counters": {"memory": {"value": value}}}
        return of_driver("gpu.test", *tainted(*DEVICES), sharedCounters=[counters])

    policy, old = AdmissionPolicy(render(), SLICES), with_counters("40Gi")
    assert policy.refusal(old, old) == ("", "")
    for new in (with_counters("80Gi"), of_driver("gpu.test", *tainted(*DEVICES))):
        assert FORGED in policy.refusal(old, new)[1]


@pytest.mark.parametrize(
    ("old", "new", "refused"),
    [
        pytest.param(None, HostDevices.name, False, id="create-of-the-values"),
        pytest.param(None, "gpu.test", True, id="create-of-another"),
        pytest.param("gpu.test", "gpu.test", False, id="update-of-one-that-left-the-values"),
        pytest.param("gpu.test", None, False, id="delete-of-one-that-left-the-values"),
    ],
)
def test_reports_are_bound_to_the_drivers_of_the_values(render, old, new, refused):
    """Each report costs the operator memory, and the driver is a part of its name."""
    before, after = (name and of_driver(name) for name in (old, new))
    _, message = AdmissionPolicy(render(), REPORTS).refusal(before, after)
    assert (f"only create NodeDeviceReports {LISTED}" in message) == refused == bool(message)
    unnamed = render({"nodeplugin": {"drivers": [{"driver": "camera:Camera"}]}})
    assert AdmissionPolicy(unnamed, REPORTS).refusal(before, after) == ("", "")


# ------------------------------------------------------------ names of slices


class Names:
    """The rule for the names of slices, evaluated as the API server does."""

    def __init__(self, objects: list[dict[str, Any]]) -> None:
        self._objects = objects

    def allow(self, name: str, *, driver: str, pool: str, update: bool = False) -> bool:
        spec = {"driver": driver, "pool": {"name": pool}, "nodeName": pool}
        body = {"metadata": {"name": name}, "spec": spec}
        policy = AdmissionPolicy(self._objects, SLICES, node=pool.partition("/")[0])
        _, message = policy.refusal(body if update else None, body)
        return "the name of a ResourceSlice must contain" not in message


@pytest.fixture
def names(render) -> Names:
    return Names(render({"nodeplugin": {"drivers": [{"driver": "camera:Camera"}]}}))


LONG = ".".join(["n" * 60] * 4)


@pytest.mark.parametrize("secret", [b"", b"s"], ids=["plain", "random"])
@pytest.mark.parametrize(
    ("driver", "pool"),
    [
        pytest.param("hostdev.drakit.dev", "node-1", id="the-nodes-own-pool"),
        pytest.param("hostdev.drakit.dev", "node-1/gpus/2", id="a-further-pool"),
        pytest.param("hostdev.drakit.dev", "ip-10-0-0-1.lab.example.com", id="a-node-with-dots"),
        pytest.param("d" * 63, LONG, id="a-long-driver-and-node"),
        *(pytest.param("d" * i, LONG, id=f"cut-at-{i}") for i in range(35, 45)),
    ],
)
def test_the_policy_allows_the_names_of_the_plugin(names: Names, driver, pool, secret):
    identity = PoolIdentity(driver=driver, node="n", node_uid="u", pool=pool, secret=secret)
    for index in (0, 1, 0xFFFFF):
        assert names.allow(slice_name(identity, index), driver=driver, pool=pool)


@pytest.mark.parametrize("secret", [b"", b"s"], ids=["plain", "random"])
@pytest.mark.parametrize(
    ("driver", "pool"),
    [
        pytest.param("a.test", "node-2", id="of-another-node"),
        pytest.param("a.test", "node-10", id="of-a-node-whose-name-begins-alike"),
        pytest.param("a.test", "nodeX1", id="of-a-node-with-another-character-for-a-dot"),
        pytest.param("a.test", "node-2/gpus", id="of-another-nodes-pool"),
        pytest.param("b.test", "node.1", id="of-another-driver"),
        pytest.param("a.test", "node.1/gpus", id="of-another-pool-of-the-node"),
    ],
)
def test_the_policy_refuses_names_of_slices(names: Names, driver, pool, secret):
    other = PoolIdentity(driver=driver, node="n", node_uid="u", pool=pool, secret=secret)
    for own in ("node-1", "node.1"):
        assert not names.allow(slice_name(other, 0), driver="a.test", pool=own)


@pytest.mark.parametrize(
    "name",
    ["forged", "0-a.test-node-1-01234567", "00000-a.test-node-1", "00000-a.test-node-1-0123456x"],
)
def test_the_policy_refuses_other_forms_of_names(names: Names, name: str):
    assert not names.allow(name, driver="a.test", pool="node-1")
    assert names.allow(name, driver="a.test", pool="node-1", update=True), "of before"
