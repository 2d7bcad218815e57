"""Optional hardening of an install: pinned images, network policies, rights on OpenShift."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.unit.chart.reading import pod_spec, the
from tests.unit.docs.listings import documents, is_values, listing

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


@pytest.mark.parametrize("component", WORKLOADS)
def test_a_network_policy_admits_probes_and_metrics_alone(render, component):
    objects = render({"networkPolicy": {"enabled": True}})
    name = f"drakit-{component}"
    assert not of_kind(render(), "NetworkPolicy")
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
    assert not [body for body in objects if "drakit-operator" in body["metadata"]["name"]]


# ------------------------------------------------------------ OpenShift


@pytest.mark.parametrize(
    ("component", "scc"),
    [
        pytest.param("nodeplugin", "privileged", id="nodeplugin"),
        pytest.param("operator", "nonroot-v2", id="operator"),
    ],
)
def test_a_component_may_use_the_constraints_that_the_site_names(render, component, scc):
    assert "security.openshift.io" not in str(render())
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


@pytest.mark.parametrize(
    "values",
    [pytest.param(body, id=name) for name, body in documents() if is_values(body)],
)
def test_the_values_of_the_documentation_can_be_installed(render, values):
    assert render(values)


def test_the_constraints_of_the_documentation_fit_the_node_plugin(render):
    scc = yaml.safe_load(listing("docs/admin/install.md", "scc.yaml"))
    assert scc["apiVersion"] == "security.openshift.io/v1"
    spec = pod_spec(render(), "DaemonSet", "drakit-nodeplugin")
    used = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
    assert set(scc["volumes"]) == used
    assert scc["allowHostDirVolumePlugin"] is True
    assert spec["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
    (container,) = spec["containers"]
    assert scc["allowPrivilegedContainer"] is False
    assert scc["requiredDropCapabilities"] == container["securityContext"]["capabilities"]["drop"]
    assert scc["runAsUser"]["type"] == scc["seLinuxContext"]["type"] == "RunAsAny"
    assert scc["seccompProfiles"] == ["runtime/default"]
    for power in ("IPC", "Network", "PID", "Ports"):
        assert scc[f"allowHost{power}"] is False


# ------------------------------------------------------------ no privileges


def switched_on(values: Any) -> Any:
    """The values with every switch on."""
    if isinstance(values, dict):
        return {key: switched_on(value) for key, value in values.items()}
    return True if values is False else values


def containers(body: Any) -> Iterator[dict[str, Any]]:
    """The containers of all pods in objects."""
    if isinstance(body, list):
        for each in body:
            yield from containers(each)
    if isinstance(body, dict):
        for key, value in body.items():
            if key in ("containers", "initContainers") and value:
                yield from value
            yield from containers(value)


def test_with_every_switch_on_no_container_is_privileged_or_has_a_capability(render, values):
    everything = switched_on(values)
    everything["nodeplugin"] |= {"kubeletStateDirectory": "/srv/kubelet", "bootIDFile": "/srv/id"}
    everything["openShift"]["scc"] = {"nodeplugin": "privileged", "operator": "nonroot-v2"}
    everything["image"]["repository"] = "registry.example.com/drakit"
    objects = render(everything, upgrade=True)
    owners = {body["metadata"]["name"] for body in objects if any(containers(body))}
    hooks = {f"drakit-setup-{name}" for name in ("crds", "policies", "remove")}
    assert hooks | {"drakit-nodeplugin", "drakit-operator"} <= owners
    for container in containers(objects):
        context, name = container["securityContext"], container["name"]
        assert not context.get("privileged"), name
        assert context["allowPrivilegeEscalation"] is False, name
        assert context["readOnlyRootFilesystem"] is True, name
        assert context["capabilities"] == {"drop": ["ALL"]}, name
    for body in objects:
        if any(containers(body)):
            context = body["spec"]["template"]["spec"]["securityContext"]
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            is_plugin = body["metadata"]["name"] == "drakit-nodeplugin"
            assert context.get("runAsNonRoot", False) is not is_plugin
    for power in ("hostNetwork", "hostPID", "hostIPC"):
        assert power not in yaml.dump_all(objects)
