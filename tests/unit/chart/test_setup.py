"""The hooks that upgrade definitions and apply policies."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from drakit_cli.main import parser
from drakit_cli.setup import read_definitions
from tests.unit.chart.conftest import CHART
from tests.unit.chart.reading import the
from tools.crds.__main__ import CHECKSUM, with_checksum

POLICIES = {"lamp": {"match": [{"subsystem": "tty", "paths": ["/dev/ttyUSB*"]}]}}


def hooks(objects: list[dict[str, Any]]) -> dict[tuple[str, str], list[str]]:
    """Return the events of all hooks, by kind and name."""
    return {
        (body["kind"], body["metadata"]["name"]): events.split(",")
        for body in objects
        if (events := body["metadata"].get("annotations", {}).get("helm.sh/hook"))
    }


def command(job: dict[str, Any]) -> list[str]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return [*container["command"], *container["args"]]


def test_a_plain_install_runs_no_hook_because_helm_installs_the_definitions(render):
    events = {event for found in hooks(render()).values() for event in found}
    assert events == {"post-rollback", "pre-delete"}
    shipped = [yaml.safe_load(file.read_text()) for file in (CHART / "crds").iterdir()]
    names = sorted(body["metadata"]["name"] for body in shipped)
    assert names == sorted(body["metadata"]["name"] for body in read_definitions())


def test_an_upgrade_applies_definitions_that_the_cluster_lacks_first(render):
    # Helm finds no definition in the cluster, because this render does not have a cluster.
    found = hooks(render(upgrade=True))
    assert found["Job", "drakit-setup-crds"] == ["pre-install", "pre-upgrade"]


def test_the_chart_compares_definitions_by_a_checksum_of_their_content():
    for file in sorted((CHART / "crds").iterdir()):
        text = file.read_text()
        assert with_checksum(text) == text
        checksum = yaml.safe_load(text)["metadata"]["annotations"][CHECKSUM]
        changed = text.replace("type: string", "type: integer", 1)
        assert (
            yaml.safe_load(with_checksum(changed))["metadata"]["annotations"][CHECKSUM] != checksum
        )
    assert f'"{CHECKSUM}"' in (CHART / "templates/_helpers.tpl").read_text()


def test_enabled_policies_are_applied_after_the_install_with_their_specs_alone(render):
    lamp = {**POLICIES["lamp"], "enabled": True}
    dark = {**POLICIES["lamp"], "enabled": False}
    objects = render({"hostdev": {"policies": {"lamp": lamp, "dark": dark}}})
    assert "post-install" in hooks(objects)["Job", "drakit-setup-policies"]
    assert hooks(objects)["Job", "drakit-setup-remove"] == ["pre-delete"]
    body = the(objects, "ConfigMap", "drakit-setup")["data"]["policies.yaml"]
    assert yaml.safe_load(body) == POLICIES
    assert "HostDevicePolicy" not in {body["kind"] for body in objects}


@pytest.mark.parametrize("hostdev", [True, False], ids=["hostdev", "without-hostdev"])
def test_a_rollback_to_a_revision_without_policies_applies_none(render, hostdev):
    # Helm runs the hooks of this revision, as they were rendered, when a later one had policies.
    objects = render({"hostdev": {"enabled": hostdev}, "simulated": {"enabled": True}})
    for kind in ("Job", "ConfigMap"):
        name = "drakit-setup-policies" if kind == "Job" else "drakit-setup"
        assert hooks(objects)[kind, name] == ["post-rollback"]
    data = the(objects, "ConfigMap", "drakit-setup")["data"]["policies.yaml"]
    assert yaml.safe_load(data) == {}


def test_helm_prints_the_result_of_a_removal_which_is_not_retried(render):
    job = the(render(), "Job", "drakit-setup-remove")
    policy = job["metadata"]["annotations"]["helm.sh/hook-output-log-policy"]
    assert set(policy.split(",")) == {"hook-succeeded", "hook-failed"}
    assert job["spec"]["backoffLimit"] == 0


def test_a_removal_knows_the_drivers_of_the_values(render):
    drivers = [{"driver": "camera:Camera"}, {"driver": "lamp:Lamp", "name": "lamps.test"}]
    values = {"nodeplugin": {"drivers": drivers}, "devicePlugins": {"enabled": True}}
    arguments = command(the(render(values), "Job", "drakit-setup-remove"))
    named = {each.partition("=")[2] for each in arguments if each.startswith("--driver=")}
    assert named == {"hostdev.drakit.dev", "lamps.test", "deviceplugin.drakit.dev"}
    assert "--unnamed-drivers" in arguments
    del drivers[0]
    assert "--unnamed-drivers" not in command(the(render(values), "Job", "drakit-setup-remove"))


LONGEST = 53
"""Characters of a release's name that Helm accepts."""


@pytest.mark.parametrize("length", [1, 41, 42, 43, 44, 52, LONGEST])
@pytest.mark.parametrize("pattern", ["c", "c."])
def test_the_names_of_jobs_and_services_fit_into_a_label(render, pattern, length):
    release = (pattern * LONGEST)[: length - 1] + "c"
    objects = render(
        {"hostdev": {"policies": POLICIES}, "operator": {"admission": {"enabled": True}}},
        release=release,
        upgrade=True,
    )
    jobs = [body["metadata"]["name"] for body in objects if body["kind"] == "Job"]
    assert len(set(jobs)) == 3
    for name in jobs:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?", name), name
    for body in objects:
        for value in body["metadata"]["labels"].values():
            assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", value), value


def test_long_names_of_two_releases_stay_different(render):
    jobs = [
        body["metadata"]["name"]
        for end in ("a", "b")
        for body in render(release="c" * 51 + end)
        if body["kind"] == "Job"
    ]
    assert len(set(jobs)) == 4


def test_a_release_that_does_not_upgrade_the_definitions_applies_its_policies(render):
    values = {"crds": {"enabled": False}, "hostdev": {"policies": POLICIES}}
    found = hooks(render(values, upgrade=True))
    jobs = {name for kind, name in found if kind == "Job"}
    assert jobs == {"drakit-setup-policies", "drakit-setup-remove"}


def test_each_hook_has_its_account_and_rights_before_it_runs(render):
    objects = render({"hostdev": {"policies": POLICIES}}, upgrade=True)
    found = hooks(objects)
    needed = {event for (kind, _), events in found.items() if kind == "Job" for event in events}
    kinds = ("ClusterRole", "ClusterRoleBinding")
    accounts = [(kind, "drakit-setup", needed) for kind in ("ServiceAccount", *kinds)]
    removal = [
        (kind, "drakit-setup-remove", {"pre-delete"}) for kind in (*kinds, "Role", "RoleBinding")
    ]
    for kind, name, events in (*accounts, *removal):
        assert events == set(found[kind, name])
        weight = the(objects, kind, name)["metadata"]["annotations"]["helm.sh/hook-weight"]
        assert int(weight) < 0


@pytest.mark.parametrize("name", ["crds", "policies", "remove"])
def test_the_hooks_use_options_that_the_command_has(render, name):
    job = the(
        render({"hostdev": {"policies": POLICIES}}, upgrade=True), "Job", f"drakit-setup-{name}"
    )
    program, *arguments = command(job)
    assert program.endswith("/drakit")
    options = parser().parse_args(arguments)
    assert options.release == "drakit-system/drakit"


def test_a_vendors_release_needs_no_image_of_the_operator(render):
    vendor = {"operator": {"enabled": False}, "image": {"repository": "example.com/lamps"}}
    objects = render({**vendor, "hostdev": {"policies": POLICIES}})
    assert "lamps-operator" not in str(objects)


def test_a_vendors_release_never_replaces_definitions_with_older_ones(render):
    found = hooks(render({"operator": {"enabled": False}}, upgrade=True))
    assert ("Job", "drakit-setup-crds") not in found
