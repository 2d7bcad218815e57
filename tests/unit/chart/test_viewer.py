"""The viewer's role: users of `kubectl drakit` get answers, and groups are bound by value."""

from __future__ import annotations

import pytest

from drakit_cli.kubectl.cluster_checks import VIEWER_LACKS
from drakit_cli.kubectl.permissions import COMMANDS, VIEWER_LABELS
from drakit_cli.kubectl.targets import KINDS
from drakit_explain import kinds
from tests.unit.chart.reading import the

READ = {"get", "list", "watch"}
RELEASES = {("apps", "deployments"), ("apps", "daemonsets")}
"""The workloads that `doctor` and `version` look for."""


def rights(objects) -> dict[tuple[str, str], set[str]]:
    return {
        (group, resource): set(rule["verbs"])
        for rule in the(objects, "ClusterRole", "drakit-viewer")["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def test_the_viewer_reads_what_kubectl_drakit_reads_and_no_more_than_that(render):
    allowed = rights(render())
    read = [each for each in vars(kinds).values() if isinstance(each, kinds.Kind)]
    listed = {(each.group, each.plural) for each in read} | {("", "events")}
    named = {(each.group, each.names[0]) for each in KINDS}
    assert {key for key, verbs in allowed.items() if verbs == READ} == listed
    assert {key for key, verbs in allowed.items() if verbs == {"get", "list"}} == RELEASES
    assert allowed.keys() == listed | named | {("scheduling.k8s.io", "priorityclasses")}
    assert set().union(*allowed.values()) == READ


def test_the_doctor_refers_to_the_viewer_for_what_it_may_read(render):
    objects = render()
    allowed = rights(objects)
    assert not VIEWER_LACKS & {resource for _, resource in allowed}
    for group, resource, verbs, _ in COMMANDS:
        assert allowed[group, resource] >= set(verbs)
    labels = the(objects, "ClusterRole", "drakit-viewer")["metadata"]["labels"]
    assert VIEWER_LABELS.items() <= labels.items()
    assert the(objects, "Deployment", "drakit-operator")


@pytest.mark.parametrize(
    ("groups", "bound"),
    [
        pytest.param({}, [], id="nobody"),
        pytest.param({"lab": True, "oidc:office": True}, ["lab", "oidc:office"], id="two"),
        pytest.param({"lab": False, "office": True}, ["office"], id="one-removed"),
        pytest.param({"lab": False}, [], id="all-removed"),
    ],
)
def test_groups_are_bound_by_value(render, groups, bound):
    objects = render({"viewer": {"groups": groups}})
    bindings = [
        body
        for body in objects
        if body["kind"] == "ClusterRoleBinding" and body["metadata"]["name"] == "drakit-viewer"
    ]
    found = [subject["name"] for body in bindings for subject in body["subjects"]]
    assert found == bound
    assert len(bindings) == bool(bound)


def test_a_release_without_an_operator_has_no_viewer(render):
    objects = render({"operator": {"enabled": False}, "viewer": {"groups": {"lab": True}}})
    assert not any(body["metadata"]["name"] == "drakit-viewer" for body in objects)
