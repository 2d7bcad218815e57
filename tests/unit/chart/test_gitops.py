"""GitOps tools: the objects that `helm template` renders for them, and the phases of the hooks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.chart.conftest import CHART, IMAGE
from tests.unit.docs.listings import ROOT

PAGE = (ROOT / "docs/admin/gitops.md").read_text()

POLICIES: dict[str, Any] = {"hostdev": {"policies": {"kvm": {"enabled": True}}}}

ARGO_PHASES = {
    "pre-install": "PreSync",
    "pre-upgrade": "PreSync",
    "post-install": "PostSync",
    "post-upgrade": "PostSync",
    "pre-delete": "PreDelete",
}
"""Argo CD's phases of Helm's hooks. It does not create a hook that is in none of them."""


def phases(body: dict[str, Any]) -> set[str] | None:
    """Return the phases in which Argo CD creates an object; None for an object that it syncs."""
    events = body["metadata"].get("annotations", {}).get("helm.sh/hook")
    if events is None:
        return None
    return {ARGO_PHASES[each] for each in events.split(",") if each in ARGO_PHASES}


def named(objects: list[dict[str, Any]]) -> dict[str, set[str] | None]:
    return {f"{body['kind']}/{body['metadata']['name']}": phases(body) for body in objects}


def test_without_policies_in_the_values_no_hook_runs_at_a_sync(render):
    """Argo CD renders every sync as an install, and passes no --is-upgrade."""
    found = named(render())
    assert [name for name, when in found.items() if when and when != {"PreDelete"}] == []
    assert found["Job/drakit-setup-policies"] == set()
    assert found["Job/drakit-setup-remove"] == {"PreDelete"}


def test_policies_in_the_values_are_applied_at_each_sync(render):
    found = named(render(POLICIES))
    assert found["Job/drakit-setup-policies"] == {"PostSync"}
    assert found["Job/drakit-setup-remove"] == {"PreDelete"}
    # Without its account in the same phase, a Job of a hook would wait forever.
    assert found["ServiceAccount/drakit-setup"] == {"PostSync", "PreDelete"}


def test_the_pod_of_helm_test_is_never_created(render):
    found = named(render(POLICIES))
    assert found["Pod/drakit-test"] == found["ResourceClaimTemplate/drakit-test"] == set()


def test_the_hook_that_upgrades_the_definitions_is_not_rendered(render):
    assert "Job/drakit-setup-crds" not in named(render(POLICIES))


def test_argo_cd_gets_the_definitions_unless_it_skips_them(helm):
    arguments = ("template", "drakit", str(CHART), "--set", IMAGE)
    definitions = {file.stem for file in (CHART / "crds").iterdir()}
    for flags, expected in ((("--include-crds",), len(definitions)), (("--skip-crds",), 0)):
        done = helm(*arguments, *flags, values={})
        assert done.stdout.count("kind: CustomResourceDefinition\n") == expected


@pytest.mark.parametrize(
    ("certificates", "same"),
    [
        pytest.param({"certificates": "Release"}, False, id="release"),
        pytest.param(
            {"certificates": "CertManager", "issuerRef": {"name": "ca"}}, True, id="cert-manager"
        ),
        pytest.param(
            {"certificates": "Secret", "secretName": "tls", "caBundle": "PEM"}, True, id="secret"
        ),
    ],
)
def test_two_renders_are_equal_unless_the_chart_makes_the_certificate(helm, certificates, same):
    values = {**POLICIES, "operator": {"admission": {"enabled": True, **certificates}}}
    first, second = (
        helm("template", "drakit", str(CHART), "--set", IMAGE, values=values).stdout
        for _ in range(2)
    )
    assert "ValidatingWebhookConfiguration" in first
    assert (first == second) is same
    assert "`CertManager` or `Secret`" in PAGE


def test_no_object_of_the_chart_is_one_that_drakit_manages(render):
    """A tool would prune or revert these."""
    kinds = {body["kind"] for body in render(POLICIES)}
    managed = {"ResourceSlice", "NodeDeviceReport", "Event", "HostDevicePolicy", "Lease"}
    assert not kinds & managed


def test_with_the_defaults_the_chart_has_no_secret_and_no_webhook(render):
    kinds = {body["kind"] for body in render()}
    assert not kinds & {"Secret", "ValidatingWebhookConfiguration", "Certificate"}
