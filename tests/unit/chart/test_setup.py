"""The hooks that upgrade definitions and apply policies."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from drakit_cli.main import _parser
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


def test_a_plain_install_has_no_hook_because_helm_installs_the_definitions(render):
    assert hooks(render()) == {}
    shipped = [yaml.safe_load(file.read_text()) for file in (CHART / "crds").iterdir()]
    names = sorted(body["metadata"]["name"] for body in shipped)
    assert names == sorted(body["metadata"]["name"] for body in read_definitions())


def test_an_upgrade_applies_definitions_that_the_cluster_lacks_first(render):
    # Helm finds no definition in the cluster, because this render has none.
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


def test_an_uninstall_names_what_is_still_in_maintenance(render):
    found = hooks(objects := render({"maintenance": {"enabled": True}}))
    assert {name: events for (kind, name), events in found.items() if kind == "Job"} == {
        "drakit-setup-remove": ["pre-delete"]
    }
    job = the(objects, "Job", "drakit-setup-remove")
    assert job["metadata"]["annotations"]["helm.sh/hook-output-log-policy"] == "hook-succeeded"
    assert "--file" not in " ".join(command(job))


def test_a_release_that_does_not_upgrade_the_definitions_applies_its_policies(render):
    values = {"crds": {"enabled": False}, "hostdev": {"policies": POLICIES}}
    found = hooks(render(values, upgrade=True))
    jobs = {name for kind, name in found if kind == "Job"}
    assert jobs == {"drakit-setup-policies", "drakit-setup-remove"}


def test_each_hook_has_its_account_and_rights_before_it_runs(render):
    objects = render({"hostdev": {"policies": POLICIES}}, upgrade=True)
    found = hooks(objects)
    needed = {event for (kind, _), events in found.items() if kind == "Job" for event in events}
    for kind in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding"):
        assert needed <= set(found[kind, "drakit-setup"])
        weight = the(objects, kind, "drakit-setup")["metadata"]["annotations"]
        assert int(weight["helm.sh/hook-weight"]) < 0


@pytest.mark.parametrize("name", ["crds", "policies", "remove"])
def test_the_hooks_use_options_that_the_command_has(render, name):
    job = the(
        render({"hostdev": {"policies": POLICIES}}, upgrade=True), "Job", f"drakit-setup-{name}"
    )
    program, *arguments = command(job)
    assert program.endswith("/drakit")
    options = _parser().parse_args(arguments)
    assert options.release == "drakit-system/drakit"


def test_a_vendors_release_needs_no_image_of_the_operator(render):
    vendor = {"operator": {"enabled": False}, "image": {"repository": "example.com/lamps"}}
    objects = render({**vendor, "hostdev": {"policies": POLICIES}})
    assert "lamps-operator" not in str(objects)


def test_a_vendors_release_never_replaces_definitions_with_older_ones(render):
    found = hooks(render({"operator": {"enabled": False}}, upgrade=True))
    assert ("Job", "drakit-setup-crds") not in found
