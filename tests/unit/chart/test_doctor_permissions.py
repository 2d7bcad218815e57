"""The permissions that `kubectl drakit doctor` checks are those that the chart's roles give."""

from __future__ import annotations

import pytest

from drakit_cli.kubectl.permissions import RULES
from tests.unit.chart.reading import the


@pytest.mark.parametrize("component", sorted(RULES))
@pytest.mark.parametrize("hostdev", [True, False])
@pytest.mark.parametrize("claim_status", [True, False])
@pytest.mark.parametrize("maintenance", [True, False])
@pytest.mark.parametrize("taints", [True, False])
def test_the_doctor_checks_all_that_a_role_allows(
    render, component, hostdev, claim_status, maintenance, taints
):
    objects = render(
        {
            "hostdev": {"enabled": hostdev},
            "maintenance": {"enabled": maintenance},
            "operator": {"driverTaints": {"enabled": taints}},
            "backends": {"enabled": True, "allowed": {"gpu": {"driver": "gpu.example.com"}}},
            "nodeplugin": {"claimStatus": {"enabled": claim_status}},
        }
    )
    role = the(objects, "ClusterRole", f"drakit-{component}")
    allowed = {
        (verb, group, of)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for group in rule.get("apiGroups", [""])
        for of in rule.get("resources") or rule["nonResourceURLs"]
    }
    parts = {"": True, "hostdev": hostdev, "claimStatus": claim_status, "maintenance": maintenance}
    parts["taints"] = maintenance or taints
    enabled = {part for part, is_on in parts.items() if is_on}
    checked = {
        (each.verb, each.group, each.resource or each.path)
        for rule in RULES[component]
        if rule.only in enabled
        for each in rule.permissions()
    }
    assert checked == allowed
