"""Optional hardening of an install: pinned images, network policies, rights on OpenShift."""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.mark.parametrize("component", WORKLOADS)
def test_a_network_policy_admits_probes_and_metrics_alone(render, component):
    objects = render({"networkPolicy": {"enabled": True}})
    name = f"drakit-{component}"
    assert not of_kind(render(), "NetworkPolicy")
    spec = the(objects, "NetworkPolicy", name)["spec"]
    selector = the(objects, WORKLOADS[component], name)["spec"]["selector"]
    assert spec["podSelector"] == selector
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


EGRESS = {"enabled": True, "apiServer": {"192.0.2.10/32": 6443, "10.96.0.1/32": 443}}


def destinations(rules: list[dict[str, Any]]) -> set[tuple[str, str, int]]:
    """Return the address (or `any`), protocol and port of each allowed connection."""
    return {
        (peer["ipBlock"]["cidr"] if peer else "any", port["protocol"], port["port"])
        for rule in rules
        for peer in rule.get("to", [None])
        for port in rule["ports"]
    }


@pytest.mark.parametrize("component", ["nodeplugin", "operator", "setup"])
def test_egress_is_to_the_api_server_and_dns_alone(render, component):
    objects = render({"networkPolicy": {"enabled": True, "egress": EGRESS}})
    spec = the(objects, "NetworkPolicy", f"drakit-{component}")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert ("ingress" in spec) is (component != "setup")
    assert destinations(spec["egress"]) == {
        ("192.0.2.10/32", "TCP", 6443),
        ("10.96.0.1/32", "TCP", 443),
        ("any", "UDP", 53),
        ("any", "TCP", 53),
    }


def test_the_policy_of_the_hooks_selects_their_pods(render):
    policies = {"hostdev": {"policies": {"kvm": {"enabled": True}}}}
    objects = render({"networkPolicy": {"enabled": True, "egress": EGRESS}, **policies})
    selector = the(objects, "NetworkPolicy", "drakit-setup")["spec"]["podSelector"]["matchLabels"]
    jobs = of_kind(objects, "Job")
    assert jobs
    for job in jobs:
        assert selector.items() <= job["spec"]["template"]["metadata"]["labels"].items()


def test_drivers_can_open_connections_of_their_own(render):
    rule = {"to": [{"ipBlock": {"cidr": "198.51.100.0/24"}}], "ports": [{"port": 8443}]}
    egress = {**EGRESS, "dns": False, "nodeplugin": [rule]}
    objects = render({"networkPolicy": {"enabled": True, "egress": egress}})
    assert rule in the(objects, "NetworkPolicy", "drakit-nodeplugin")["spec"]["egress"]
    rules = the(objects, "NetworkPolicy", "drakit-operator")["spec"]["egress"]
    assert rule not in rules
    assert {port for _, _, port in destinations(rules)} == {443, 6443}


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        pytest.param(
            {"enabled": True, "egress": {"enabled": True}},
            "networkPolicy.egress.apiServer is empty",
            id="no-address",
        ),
        pytest.param(
            {"enabled": False, "egress": EGRESS},
            "networkPolicy.egress.enabled has no effect without networkPolicy.enabled",
            id="no-policies",
        ),
        pytest.param(
            {"enabled": True, "egress": {**EGRESS, "apiServer": {"api.example.com": 443}}},
            "api.example.com",
            id="a-name",
        ),
    ],
)
def test_egress_that_would_cut_off_the_pods_is_refused(refusal, policy, words):
    image = {"repository": "registry.example.com/drakit"}
    assert words in refusal({"image": image, "networkPolicy": policy})


# ------------------------------------------------------------ user namespaces, AppArmor


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the specs of all pods, keyed by the name of their workload."""
    return {
        body["metadata"]["name"]: body["spec"]["template"]["spec"]
        for body in objects
        if any(containers(body)) and body["kind"] != "Pod"
    }


def test_user_namespaces_are_for_pods_without_host_paths(render):
    policies = {"hostdev": {"policies": {"kvm": {"enabled": True}}}}
    assert not [1 for spec in pods(render(policies)).values() if "hostUsers" in spec]
    found = pods(render({"operator": {"hostUsers": False}, **policies}))
    assert "drakit-setup-policies" in found
    for name, spec in found.items():
        assert spec.get("hostUsers", True) is (name == "drakit-nodeplugin"), name
        assert spec.get("hostUsers", True) is any("hostPath" in each for each in spec["volumes"])


def test_each_component_has_its_apparmor_profile(render):
    local = {"type": "Localhost", "localhostProfile": "drakit"}
    default = {"type": "RuntimeDefault"}
    values = {
        "hostdev": {"policies": {"kvm": {"enabled": True}}},
        "nodeplugin": {"appArmorProfile": local},
        "operator": {"appArmorProfile": default},
    }
    found = {
        name: spec["containers"][0]["securityContext"]["appArmorProfile"]
        for name, spec in pods(render(values)).items()
    }
    assert found.pop("drakit-nodeplugin") == local
    assert found
    assert all(profile == default for profile in found.values())
    # A pod with a profile does not start on nodes without AppArmor.
    assert "appArmorProfile" not in str(render())


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
    # Its hooks use the same constraints.
    bindings = {body["metadata"]["name"] for body in of_kind(objects, "RoleBinding")}
    assert bindings == {"drakit-setup-scc", "drakit-setup-remove"}
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
    roles = [body for body in of_kind(objects, "Role") if "security.openshift.io" in str(body)]
    assert len(roles) == (1 if component == "nodeplugin" else 2), "the hooks have the operator's"
    role = the(roles, "Role", f"drakit-{component}-scc")
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


def test_the_constraints_of_the_documentation_fit_the_node_plugin(render):
    scc = yaml.safe_load(listing("docs/admin/platforms.md", "scc.yaml"))
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
    everything["networkPolicy"]["egress"]["apiServer"] = EGRESS["apiServer"]
    everything["operator"]["hostUsers"] = False
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
            spec = body["spec"] if body["kind"] == "Pod" else body["spec"]["template"]["spec"]
            context = spec["securityContext"]
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            is_plugin = body["metadata"]["name"] == "drakit-nodeplugin"
            assert context.get("runAsNonRoot", False) is not is_plugin
    for power in ("hostNetwork", "hostPID", "hostIPC"):
        assert power not in yaml.dump_all(objects)
