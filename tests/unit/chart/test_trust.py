"""The permissions of the pods: their tokens, RBAC rules, and tolerated nodes."""

from __future__ import annotations

from typing import Any

import pytest

from drakit_cli.setup import read_definitions
from drakit_nodeplugin.config import MAX_BACKENDS, MAX_RESOURCES
from tests.unit.chart.reading import pod_spec, the

TOKENS = "/var/run/secrets/kubernetes.io/serviceaccount"
SERIAL = {"match": [{"subsystem": "tty", "paths": ["/dev/ttyUSB*"]}]}
DELETES = ("list", "delete")
POLICIES = {"hostdev": {"policies": {"serial": SERIAL}}}

WORKLOADS = [
    pytest.param("DaemonSet", "drakit-nodeplugin", id="node-plugin"),
    pytest.param("Deployment", "drakit-operator", id="operator"),
    pytest.param("Job", "drakit-setup-crds", id="hook-of-definitions"),
    pytest.param("Job", "drakit-setup-policies", id="hook-of-policies"),
    pytest.param("Job", "drakit-setup-remove", id="hook-of-removal"),
]


# ------------------------------------------------------------ tokens


@pytest.mark.parametrize(("kind", "name"), WORKLOADS)
def test_a_token_lives_for_an_hour(render, kind, name):
    spec = pod_spec(render(POLICIES, upgrade=True), kind, name)
    # Kubernetes would otherwise mount a token that the API server accepts for a year.
    assert spec["automountServiceAccountToken"] is False
    (volume,) = [volume for volume in spec["volumes"] if "projected" in volume]
    token, ca, namespace = volume["projected"]["sources"]
    assert token == {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}}
    assert ca == {
        "configMap": {
            "name": "kube-root-ca.crt",
            "items": [{"key": "ca.crt", "path": "ca.crt"}],
        }
    }
    (item,) = namespace["downwardAPI"]["items"]
    assert item == {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}
    main = spec["containers"][0]
    (mount,) = [each for each in main["volumeMounts"] if each["name"] == volume["name"]]
    assert (mount["mountPath"], mount["readOnly"]) == (TOKENS, True)


# ------------------------------------------------------------ RBAC


def rights(objects: list[dict[str, Any]], name: str) -> set[tuple[str, str]]:
    """Every resource and verb of a ClusterRole."""
    rules = the(objects, "ClusterRole", name)["rules"]
    return {
        (resource, verb)
        for rule in rules
        for resource in rule.get("resources") or rule["nonResourceURLs"]
        for verb in rule["verbs"]
    }


def test_without_hostdev_nobody_reads_or_changes_its_policies(render):
    without = render({"hostdev": {"enabled": False}, "simulated": {"enabled": True}})
    for name in ("drakit-nodeplugin", "drakit-operator"):
        assert any("hostdevicepolicies" in resource for resource, _ in rights(render(), name))
        assert not any("hostdevicepolicies" in resource for resource, _ in rights(without, name))
    # Only policies have DeviceClasses that the operator writes.
    assert rights(render(), "drakit-operator") - rights(without, "drakit-operator") == {
        *(("hostdevicepolicies", verb) for verb in ("get", "list", "watch")),
        ("hostdevicepolicies/status", "patch"),
        *(("deviceclasses", verb) for verb in ("create", "patch", "delete")),
    }
    assert ("nodedevicereports", "watch") in rights(without, "drakit-operator")


def test_without_maintenance_nobody_reads_or_acts_on_it(render):
    enabled = render({"maintenance": {"enabled": True}})
    reads = {("devicemaintenances", verb) for verb in ("get", "list", "watch")}
    for name, writes in (
        ("drakit-nodeplugin", set()),
        (
            "drakit-operator",
            {
                ("devicemaintenances/status", "patch"),
                ("devicetaintrules", "create"),
                ("devicetaintrules", "delete"),
                ("pods/eviction", "create"),
            },
        ),
    ):
        assert rights(enabled, name) - rights(render(), name) == reads | writes


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_only_policies_of_enabled_backends_can_be_read(render, enabled):
    lamps = {"group": "lamps.example.com", "version": "v1", "plural": "lamppolicies"}
    allowed = {
        "lamps": {"driver": "lamps.example.com", "policies": lamps},
        "gpu": {"driver": "gpu.example.com"},
    }
    objects = render({"backends": {"enabled": enabled, "allowed": allowed}})
    added = rights(objects, "drakit-nodeplugin") - rights(render(), "drakit-nodeplugin")
    expected = {("lamppolicies", verb) for verb in ("get", "list", "watch")}
    assert added == (expected if enabled else set())


@pytest.mark.parametrize(
    ("values", "resources"),
    [
        pytest.param(
            {},
            {
                "customresourcedefinitions",
                "customresourcedefinitions/status",
                "devicedrivers",
                "devicemaintenances",
                "hostdevicepolicies",
                "nodedevicereports",
            },
            id="both",
        ),
        pytest.param({"crds": {"enabled": False}}, {"hostdevicepolicies"}, id="policies"),
    ],
)
def test_the_hooks_have_only_the_rights_that_they_need(render, values, resources):
    objects = render(values, upgrade=True)
    assert {resource for resource, _ in rights(objects, "drakit-setup")} == resources
    names = {body["metadata"]["name"] for body in read_definitions()}
    for rule in the(objects, "ClusterRole", "drakit-setup")["rules"]:
        if set(rule["verbs"]) != {"create"} and "apiextensions.k8s.io" in rule["apiGroups"]:
            assert set(rule["resourceNames"]) >= names
    # Helm itself installs the definitions.
    assert {resource for resource, _ in rights(render(POLICIES), "drakit-setup")} == {
        "hostdevicepolicies"
    }


def test_the_removal_has_only_the_rights_that_it_needs(render):
    expected = {
        ("resourceclaims", "list"),
        *((kind, verb) for kind in ("resourceslices", "nodedevicereports") for verb in DELETES),
    }
    assert rights(render(), "drakit-setup-remove") == expected
    maintenance = render({"maintenance": {"enabled": True}})
    added = rights(maintenance, "drakit-setup-remove") - expected
    assert added == {("devicemaintenances", "list")}
    workloads, pods = the(render(), "Role", "drakit-setup-remove")["rules"]
    assert workloads["resourceNames"] == ["drakit-nodeplugin"]
    assert (workloads["resources"], workloads["verbs"]) == (["daemonsets"], ["get", "delete"])
    assert (pods["resources"], pods["verbs"]) == (["pods"], ["list"])


# ------------------------------------------------------------ tolerations

NO_EXECUTE = {"operator": "Exists", "effect": "NoExecute"}


def tolerated(key: str) -> dict[str, str]:
    return {"key": key, "operator": "Exists", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param({}, [tolerated("amd.com/gpu"), tolerated("nvidia.com/gpu")], id="default"),
        pytest.param(
            {"deviceTaints": {"example.com/fpga": True, "amd.com/gpu": False}},
            [tolerated("example.com/fpga"), tolerated("nvidia.com/gpu")],
            id="a-key-more-and-a-key-less",
        ),
        pytest.param(
            {"tolerations": [{"operator": "Exists"}]},
            [tolerated("amd.com/gpu"), tolerated("nvidia.com/gpu"), {"operator": "Exists"}],
            id="tolerations-are-added",
        ),
    ],
)
def test_the_plugin_tolerates_eviction_device_taints_and_what_an_admin_adds(
    render, values, expected
):
    spec = pod_spec(render({"nodeplugin": values}), "DaemonSet", "drakit-nodeplugin")
    first, *others = spec["tolerations"]
    assert (first, others) == (NO_EXECUTE, expected)


# ------------------------------------------------------------ stops


def test_the_grace_period_of_the_pod_is_longer_than_a_stop(render):
    from drakit_driver.runtime.thread import CLOSE_SECONDS as PYTHON
    from drakit_nodeplugin.config import NodePluginConfig
    from drakit_nodeplugin.endpoints.backend.connection import CLOSE_SECONDS as BACKEND
    from drakit_nodeplugin.host.driver import ENDED_SECONDS
    from drakit_nodeplugin.kubelet.server import RESPONSE_SECONDS

    field = NodePluginConfig.model_fields["drain_timeout"]
    (limit,) = [each.le.total_seconds() for each in field.metadata if hasattr(each, "le")]
    assert RESPONSE_SECONDS <= field.default.total_seconds() <= limit
    # Canceled work, answers and each of two sockets have a second.
    needed = limit + 4 + max(BACKEND, PYTHON) + ENDED_SECONDS
    spec = pod_spec(render(), "DaemonSet", "drakit-nodeplugin")
    assert needed < spec["terminationGracePeriodSeconds"]


# ------------------------------------------------------------ limits


@pytest.mark.parametrize(
    ("section", "key", "limit"),
    [
        pytest.param("backends", "allowed", MAX_BACKENDS, id="backends"),
        pytest.param("devicePlugins", "plugins", MAX_RESOURCES, id="device-plugins"),
    ],
)
def test_the_schema_has_the_limits_of_the_node_plugin(schema, section, key, limit):
    assert schema["properties"][section]["properties"][key]["maxProperties"] == limit
