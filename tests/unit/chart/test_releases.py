"""Several releases of the chart in one cluster: nothing of one is another's, or takes its place."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from drakit_cli.new import project_of
from tests.unit.chart.reading import pod_spec, the

CLUSTER_WIDE = {
    "ClusterRole",
    "ClusterRoleBinding",
    "DeviceClass",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}

VENDOR: dict[str, Any] = {
    "hostdev": {"enabled": False},
    "operator": {"enabled": False},
    "nodeplugin": {"drivers": [{"driver": "camera:Camera"}]},
}
"""A vendor's release in addition to drakit, with its own driver."""


def named(objects: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(body["kind"], body["metadata"]["name"]) for body in objects}


def selector(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, str]:
    return the(objects, kind, name)["spec"]["selector"]["matchLabels"]


def test_a_release_can_keep_the_names_of_another(render):
    kept = render({"fullnameOverride": "drakit"}, release="prod")
    assert named(kept) == named(render(release="drakit"))


@pytest.mark.parametrize(
    ("release", "name"),
    [
        pytest.param("drakit", "drakit", id="as-documented"),
        pytest.param("my-drakit", "my-drakit", id="a-name-with-drakit-in-it"),
        pytest.param("cameras", "cameras-drakit", id="any-other-name"),
        pytest.param("c" * 53, "c" * 52, id="the-longest-name-that-helm-takes"),
        pytest.param("c" * 51, "c" * 51, id="no-hyphen-at-the-cut"),
    ],
)
def test_names_begin_with_the_releases(render, release, name):
    objects = render(release=release)
    found = {item for item in named(objects) if item[0] in ("DaemonSet", "Deployment")}
    assert found == {("DaemonSet", f"{name}-nodeplugin"), ("Deployment", f"{name}-operator")}
    for body in objects:
        labels = body["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == name
        assert all(len(value) <= 63 for value in labels.values())


def test_a_second_release_has_nothing_that_the_first_has(render):
    first, second = render(), render(VENDOR, release="cameras")
    assert not named(first) & named(second)
    plugin = project_of("cameras", driver=None, image=None, drakit="0.1.0").plugin
    assert ("DaemonSet", plugin) in named(second)
    policy = the(second, "ValidatingAdmissionPolicy", plugin)["spec"]
    account = pod_spec(second, "DaemonSet", plugin)["serviceAccountName"]
    (condition,) = policy["matchConditions"]
    assert f'"system:serviceaccount:drakit-system:{account}"' in condition["expression"]
    assert {body["kind"] for body in second} >= CLUSTER_WIDE - {"DeviceClass"}


def test_the_policies_of_hostdev_come_from_the_release_that_has_it(render):
    policies = {"policies": {"kvm": {"enabled": True}}}
    for hostdev, applied in ((policies, 1), (policies | {"enabled": False}, 0)):
        objects = render(VENDOR | {"hostdev": hostdev}, release="cameras")
        data = the(objects, "ConfigMap", "cameras-drakit-setup")["data"]["policies.yaml"]
        assert len(yaml.safe_load(data)) == applied


def test_selectors_are_those_of_charts_that_could_be_installed_once(render):
    # They cannot be changed: another one would make every upgrade fail.
    objects = render()
    for kind, component in (("DaemonSet", "nodeplugin"), ("Deployment", "operator")):
        assert selector(objects, kind, f"drakit-{component}") == {
            "app.kubernetes.io/name": "drakit",
            "app.kubernetes.io/component": component,
        }


def test_no_release_selects_the_pods_of_another(render):
    first, second = render(), render(VENDOR, release="cameras")
    pods = [
        (the(objects, "DaemonSet", f"{name}-nodeplugin")["spec"]["template"], objects, name)
        for objects, name in ((first, "drakit"), (second, "cameras-drakit"))
    ]
    for pod, objects, name in pods:
        own = selector(objects, "DaemonSet", f"{name}-nodeplugin").items()
        matched = [other for other, *_ in pods if own <= other["metadata"]["labels"].items()]
        assert matched == [pod]


def test_operators_of_two_releases_do_not_wait_for_one_lease(render, tmp_path):
    objects = render(release="cameras")
    data = the(objects, "ConfigMap", "cameras-drakit-operator")["data"]["operator.yaml"]
    assert "leaseName: cameras-drakit-operator" in data
    (rule,) = [
        rule
        for rule in the(objects, "Role", "cameras-drakit-operator")["rules"]
        if "resourceNames" in rule
    ]
    assert rule["resourceNames"] == ["cameras-drakit-operator"]
