"""Optional hardening of an install: pinned images, network policies, rights on OpenShift."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.unit.chart.reading import pod_spec, the
from tests.unit.docs.listings import listing

WORKLOADS = {"nodeplugin": "DaemonSet", "operator": "Deployment"}
ONE, OTHER = "sha256:" + "1" * 64, "sha256:" + "2" * 64


def images(objects: list[dict[str, Any]]) -> dict[str, str]:
    return {
        component: pod_spec(objects, kind, f"drakit-{component}")["containers"][0]["image"]
        for component, kind in WORKLOADS.items()
    }


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [body for body in objects if body["kind"] == kind]


# ------------------------------------------------------------ images


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        pytest.param(
            {"repository": "my/drakit", "tag": "1"},
            {"nodeplugin": "my/drakit-nodeplugin:1", "operator": "my/drakit-operator:1"},
            id="one-repository-and-tag",
        ),
        pytest.param(
            {"repository": "my/drakit", "digest": {"nodeplugin": ONE, "operator": OTHER}},
            {
                "nodeplugin": f"my/drakit-nodeplugin@{ONE}",
                "operator": f"my/drakit-operator@{OTHER}",
            },
            id="digests",
        ),
        pytest.param(
            {"repository": "my/drakit", "tag": "1", "digest": {"nodeplugin": ONE}},
            {"nodeplugin": f"my/drakit-nodeplugin@{ONE}", "operator": "my/drakit-operator:1"},
            id="a-digest-comes-before-the-tag",
        ),
    ],
)
def test_an_image_is_named_by_tag_or_digest(render, image, expected):
    assert images(render({"image": image})) == expected


# ------------------------------------------------------------ network policies


def test_a_plain_install_has_no_network_policy(render):
    assert not of_kind(render(), "NetworkPolicy")


@pytest.mark.parametrize("component", WORKLOADS)
def test_a_network_policy_admits_probes_and_metrics_alone(render, component):
    objects = render({"networkPolicy": {"enabled": True}})
    name = f"drakit-{component}"
    spec = the(objects, "NetworkPolicy", name)["spec"]
    selector = the(objects, WORKLOADS[component], name)["spec"]["selector"]
    assert spec["podSelector"] == selector
    # No policy can select the API server on every cluster: sites must restrict egress themselves.
    assert spec["policyTypes"] == ["Ingress"]
    ports = {port["port"]: rule.get("from") for rule in spec["ingress"] for port in rule["ports"]}
    assert ports == {"probes": None, "metrics": None}
    (container,) = pod_spec(objects, WORKLOADS[component], name)["containers"]
    assert {port["name"] for port in container["ports"]} == ports.keys()


def test_metrics_can_be_restricted_to_scrapers(render):
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    objects = render({"networkPolicy": {"enabled": True, "metricsFrom": peers}})
    for component in WORKLOADS:
        ingress = the(objects, "NetworkPolicy", f"drakit-{component}")["spec"]["ingress"]
        sources = {port["port"]: rule.get("from") for rule in ingress for port in rule["ports"]}
        assert sources == {"probes": None, "metrics": peers}


def test_an_operator_that_is_not_installed_has_neither_policy_nor_binding(render):
    objects = render(
        {
            "operator": {"enabled": False},
            "networkPolicy": {"enabled": True},
            "openShift": {"scc": {"operator": "nonroot-v2"}},
        }
    )
    assert [body["metadata"]["name"] for body in of_kind(objects, "NetworkPolicy")] == [
        "drakit-nodeplugin"
    ]
    assert not of_kind(objects, "RoleBinding")


# ------------------------------------------------------------ OpenShift


def test_a_plain_install_has_no_rights_of_openshift(render):
    assert "security.openshift.io" not in str(render())


@pytest.mark.parametrize(
    ("component", "scc"),
    [
        pytest.param("nodeplugin", "privileged", id="nodeplugin"),
        pytest.param("operator", "nonroot-v2", id="operator"),
    ],
)
def test_a_component_may_use_the_constraints_that_the_site_names(render, component, scc):
    objects = render({"openShift": {"scc": {component: scc}}})
    (role,) = [body for body in of_kind(objects, "Role") if "security.openshift.io" in str(body)]
    assert role["rules"] == [
        {
            "apiGroups": ["security.openshift.io"],
            "resources": ["securitycontextconstraints"],
            "resourceNames": [scc],
            "verbs": ["use"],
        }
    ]
    (binding,) = [
        body
        for body in of_kind(objects, "RoleBinding")
        if body["roleRef"]["name"] == role["metadata"]["name"]
    ]
    (subject,) = binding["subjects"]
    spec = pod_spec(objects, WORKLOADS[component], f"drakit-{component}")
    assert subject == {
        "kind": "ServiceAccount",
        "name": spec["serviceAccountName"],
        "namespace": "drakit-system",
    }


@pytest.mark.parametrize("name", ["digests.yaml", "networkpolicy.yaml"])
def test_the_values_of_the_documentation_can_be_installed(render, name):
    values = yaml.safe_load(listing("docs/admin/install.md", name))
    assert str(render(values)) != str(render())


def test_the_constraints_of_the_documentation_fit_the_node_plugin(render):
    scc = yaml.safe_load(listing("docs/admin/install.md", "scc.yaml"))
    assert scc["apiVersion"] == "security.openshift.io/v1"
    spec = pod_spec(render(), "DaemonSet", "drakit-nodeplugin")
    used = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
    # The kubelet's token comes in a projected volume, which admission adds.
    assert set(scc["volumes"]) == used | {"projected"}
    assert scc["allowHostDirVolumePlugin"] is True
    (container,) = spec["containers"]
    assert scc["allowPrivilegedContainer"] is False
    assert scc["requiredDropCapabilities"] == container["securityContext"]["capabilities"]["drop"]
    assert scc["runAsUser"]["type"] == scc["seLinuxContext"]["type"] == "RunAsAny"
    assert scc["seccompProfiles"] == ["runtime/default"]
    for power in ("IPC", "Network", "PID", "Ports"):
        assert scc[f"allowHost{power}"] is False


# ------------------------------------------------------------ the disk helper


def test_a_plain_install_has_no_disk_helper(render):
    objects = render({"hostdev": {"allowDisks": True}})
    assert "disk-helper" not in str(objects)


def test_only_the_disk_helper_is_privileged_and_it_has_no_token(render):
    objects = render({"hostdev": {"diskHelper": {"enabled": True}}})
    spec = pod_spec(objects, "DaemonSet", "drakit-nodeplugin")
    plugin, helper = spec["containers"]
    assert not plugin["securityContext"]["privileged"]
    assert helper["securityContext"] == {
        "runAsUser": 0,
        "privileged": True,
        "readOnlyRootFilesystem": True,
    }
    mounts = {mount["mountPath"]: mount["name"] for mount in helper["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    token = "/var/run/secrets/kubernetes.io/serviceaccount"
    assert "emptyDir" in volumes[mounts[token]]
    assert {path for path, name in mounts.items() if "hostPath" in volumes[name]} == {"/host/dev"}
    assert mounts.keys() == {"/run/drakit-disk-helper", "/host/dev", token}


def test_the_driver_finds_the_disk_helper_where_it_listens(render):
    objects = render({"hostdev": {"diskHelper": {"enabled": True}}})
    plugin, helper = pod_spec(objects, "DaemonSet", "drakit-nodeplugin")["containers"]
    config = yaml.safe_load(
        the(objects, "ConfigMap", "drakit-nodeplugin")["data"]["nodeplugin.yaml"]
    )
    (driver,) = config["drivers"]
    assert driver["driver"] == "hostdev-disks"
    socket = driver["config"]["diskHelper"]
    assert helper["args"][0] == socket
    directory = socket.rpartition("/")[0]
    assert all(
        directory in {mount["mountPath"] for mount in container["volumeMounts"]}
        for container in (plugin, helper)
    )
