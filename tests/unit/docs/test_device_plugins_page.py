"""What docs/device-plugins.md shows is what stands in the example, and the chart has its keys."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from drakit_nodeplugin.config import DevicePlugins, Devices
from tests.unit.docs.listings import ROOT, listing, listings

PAGE = "docs/device-plugins.md"
EXAMPLE = ROOT / "examples" / "device-plugin"


def shown(name: str) -> Any:
    return yaml.safe_load(listing(PAGE, name))


def example(name: str) -> list[Any]:
    return list(yaml.safe_load_all((EXAMPLE / name).read_text()))


def test_the_listings_are_parts_of_the_example():
    assert [shown("values.yaml")] == example("values.yaml")
    (plugin,) = example("daemonset.yaml")
    (volume,) = shown("daemonset.yaml")
    assert volume in plugin["spec"]["template"]["spec"]["volumes"]
    template, _ = example("claim-pod.yaml")
    assert [shown("claim-pod.yaml")] == template["spec"]["spec"]["devices"]["requests"]


def test_the_commands_name_files_and_objects_that_there_are():
    commands = "".join(listings(PAGE, "console"))
    files = set(re.findall(r"-f (examples/\S+)", commands))
    assert files == {f"examples/device-plugin/{path.name}" for path in EXAMPLE.iterdir()}
    (unchanged,) = example("extended-resource-pod.yaml")
    assert f"get pod {unchanged['metadata']['name']} " in commands
    assert DevicePlugins().driver_name in commands


def test_the_keys_and_times_of_the_page_are_those_of_the_chart():
    text = (ROOT / PAGE).read_text()
    schema = json.loads((ROOT / "charts" / "drakit" / "values.schema.json").read_text())
    named = set(re.findall(r"`(devicePlugins|nodeplugin)\.([\w.]+)", text))
    assert named
    for section, path in named:
        place = schema["properties"][section]
        for key in path.split("."):
            place = place["properties"][key]
    assert "`nodeplugin.devices.startGracePeriod` (30 s)" in text
    assert Devices().start_grace_period == 30
    assert "gone after 5 minutes" in text
    assert Devices().endpoint_stop_grace_period == 300


def test_the_links_of_the_page_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / PAGE).read_text()):
        assert (ROOT / "docs" / target).exists(), target
