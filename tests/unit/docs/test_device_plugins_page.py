"""docs/admin/device-plugins.md shows the example's files, and keys that the chart has."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from drakit_nodeplugin.config import DevicePlugins
from tests.unit.docs.listings import ROOT, listing, listings, validated

PAGE = "docs/admin/device-plugins.md"
COMPARISON = "docs/reference/device-plugins.md"
EXAMPLE = ROOT / "examples" / "device-plugin"
CHART = ROOT / "charts" / "drakit"


def shown(name: str) -> Any:
    return yaml.safe_load(listing(PAGE, name))


def example(name: str) -> list[Any]:
    return list(yaml.safe_load_all((EXAMPLE / name).read_text()))


def test_the_listings_are_parts_of_the_example():
    assert [shown("values.yaml")] == example("values.yaml")
    (plugin,) = example("daemonset.yaml")
    (volume,) = shown("the volume in daemonset.yaml")
    assert volume in plugin["spec"]["template"]["spec"]["volumes"]
    template, _ = example("claim-pod.yaml")
    assert template in [yaml.safe_load(text) for text in listings(PAGE, "yaml")]


def test_the_page_uses_every_file_of_the_example():
    text = (ROOT / PAGE).read_text()
    files = set(re.findall(r"examples/device-plugin/([\w.-]+\.yaml)", text)) | {"values.yaml"}
    assert files == {path.name for path in EXAMPLE.iterdir()}
    assert DevicePlugins().driver_name in text


@pytest.mark.parametrize("name", ["values.yaml", "other-name.yaml", "allowed.yaml"])
def test_the_node_plugin_accepts_the_values(name):
    plugins = validated(shown(name))["devicePlugins"]["plugins"]
    for entry in plugins.values():
        entry["resources"] = [
            each if isinstance(each, str) else each["name"] for each in entry["resources"]
        ]
    assert DevicePlugins.model_validate({"plugins": plugins}).plugins


def test_the_keys_of_the_page_are_those_of_the_chart():
    text = "".join((ROOT / page).read_text() for page in (PAGE, COMPARISON))
    schema = json.loads((CHART / "values.schema.json").read_text())
    named = set(re.findall(r"`(devicePlugins|nodeplugin)\.([\w.]+)", text))
    assert named
    for section, path in named:
        place = schema["properties"][section]
        for key in path.split("."):
            place = place["properties"][key]
