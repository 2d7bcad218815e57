"""docs/admin/device-plugins.md shows the example's files, and keys that the chart has."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import jsonschema
import yaml

from drakit_nodeplugin.config import DevicePlugins, Devices
from tests.unit.docs.listings import ROOT, listing, listings

PAGE = "docs/admin/device-plugins.md"
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


def test_the_allow_list_is_one_that_the_chart_and_the_node_plugin_take():
    chart = ROOT / "charts" / "drakit"
    schema = json.loads((chart / "values.schema.json").read_text())
    values = yaml.safe_load((chart / "values.yaml").read_text())
    allowed = shown("allowed.yaml")["devicePlugins"]
    values["devicePlugins"] |= allowed
    jsonschema.validate(values, schema)
    assert DevicePlugins.model_validate(allowed).allowed


def test_another_name_of_a_class_is_one_that_the_chart_takes():
    chart = ROOT / "charts" / "drakit"
    schema = json.loads((chart / "values.schema.json").read_text())
    values = yaml.safe_load((chart / "values.yaml").read_text())
    values["devicePlugins"] |= shown("other-name.yaml")["devicePlugins"]
    jsonschema.validate(values, schema)
    (resource,) = values["devicePlugins"]["resources"]
    assert resource["deviceClass"] != "gpu.nvidia.com"


def test_the_device_plugin_moves_node_by_node():
    (plugin,) = example("daemonset.yaml")
    meta, spec = plugin["metadata"], plugin["spec"]
    texts = "".join(listings(PAGE, "console")).replace("\\\n", " ")
    commands = re.findall(r"^\$ (.*)$", texts, re.M)
    (patch,) = {words[-1] for words in map(shlex.split, commands) if words[1] == "patch"}
    assert yaml.safe_load(patch)["spec"]["updateStrategy"]["type"] == "OnDelete"
    assert spec["updateStrategy"] == {"type": "OnDelete"}
    ((key, value),) = spec["selector"]["matchLabels"].items()
    delete = f"delete pod -n {meta['namespace']} -l {key}={value} --field-selector spec.nodeName"
    there = ["patch daemonset", "apply -f", "cordon", "delete pod PODS", delete, "allocatable"]
    places = [
        [place for place, each in enumerate(commands) if step in each]
        for step in [*there, "uncordon"]
    ]
    # Once there and once back; the wait for the node's numbers is before it takes pods again.
    patched, _, cordoned, emptied, moved, waited, uncordoned = places
    cordoned = [place for place in cordoned if place not in uncordoned]
    order = [patched, cordoned, emptied, moved, waited, uncordoned]
    assert [len(each) for each in order] == [2] * len(order)
    for way in (0, 1):
        assert [each[way] for each in order] == sorted(each[way] for each in order)


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
        assert (ROOT / "docs" / "admin" / target).exists(), target
