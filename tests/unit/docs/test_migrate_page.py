"""The manifests of docs/admin/migrate.md fit the API, each other, and the old resources."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.unit.docs.listings import listings

PAGE = "docs/admin/migrate.md"


def manifests(kind: str) -> list[dict[str, Any]]:
    """The manifests of a kind, in the order of the page."""
    blocks = [list(yaml.safe_load_all(text)) for text in listings(PAGE, "yaml")]
    objects = [one for block in blocks for one in block if isinstance(one, dict)]
    return [one for one in objects if one.get("kind") == kind]


@pytest.mark.parametrize(
    ("name", "resource"),
    [
        ("zigbee", "squat.ai/zigbee"),
        ("camera", "akri.sh/camera"),
        ("net-tun", "smarter-devices/net_tun"),
    ],
)
def test_a_policy_has_the_name_of_the_old_resource(name, resource):
    (policy,) = [one for one in manifests("HostDevicePolicy") if one["metadata"]["name"] == name]
    assert policy["spec"]["deviceClass"] == {"extendedResourceName": resource}


def test_each_claim_names_the_class_of_its_policy():
    classes = [
        request["exactly"]["deviceClassName"]
        for template in manifests("ResourceClaimTemplate")
        for request in template["spec"]["spec"]["devices"]["requests"]
    ]
    policies = [policy["metadata"]["name"] for policy in manifests("HostDevicePolicy")]
    assert classes == [f"{policy}.drakit.dev" for policy in policies]
