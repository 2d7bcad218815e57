"""docs/admin/device-plugins.md shows the example's files, and keys that the chart has."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import yaml

from drakit_nodeplugin.config import DevicePlugins, Devices
from drakit_nodeplugin.endpoints.deviceplugin.messages import MAX_ANSWER_BYTES
from drakit_nodeplugin.endpoints.wire import MAX_MESSAGE_BYTES
from tests.unit.docs.listings import ROOT, commands, listing, listings

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
def test_the_chart_and_the_node_plugin_accept_the_values(name):
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    values["devicePlugins"] |= shown(name)["devicePlugins"]
    jsonschema.validate(values, schema)
    plugins = values["devicePlugins"]["plugins"]
    for entry in plugins.values():
        entry["resources"] = [
            each if isinstance(each, str) else each["name"] for each in entry["resources"]
        ]
    assert DevicePlugins.model_validate({"plugins": plugins}).plugins


def test_another_name_of_a_class_differs_from_nvidias():
    (entry,) = shown("other-name.yaml")["devicePlugins"]["plugins"].values()
    (resource,) = entry["resources"]
    assert resource["deviceClass"] != "gpu.nvidia.com"


def test_the_device_plugin_moves_node_by_node_there_and_back():
    (plugin,) = example("daemonset.yaml")
    meta, spec = plugin["metadata"], plugin["spec"]
    assert spec["updateStrategy"] == {"type": "OnDelete"}
    ((key, value),) = spec["selector"]["matchLabels"].items()
    lines = commands(PAGE)
    of_the_plugin = f"-n {meta['namespace']} -l {key}={value} --field-selector spec.nodeName"
    steps = [
        "kubectl patch daemonset",
        "daemonset.yaml",
        "kubectl cordon $NODE",
        "kubectl delete pod (?!-n kube-system)",
        f"kubectl delete pod {of_the_plugin}",
        "kubectl wait node/.NODE .*allocatable",
        "kubectl uncordon $NODE",
    ]
    places = [
        [place for place, line in enumerate(lines) if re.search(step.replace("$", r"\$"), line)]
        for step in steps
    ]
    assert [len(each) for each in places] == [2] * len(steps)
    for way in (0, 1):
        assert [each[way] for each in places] == sorted(each[way] for each in places)


def test_the_keys_and_times_of_the_page_are_those_of_the_chart():
    text = "".join((ROOT / page).read_text() for page in (PAGE, COMPARISON))
    schema = json.loads((CHART / "values.schema.json").read_text())
    named = set(re.findall(r"`(devicePlugins|nodeplugin)\.([\w.]+)", text))
    assert named
    for section, path in named:
        place = schema["properties"][section]
        for key in path.split("."):
            place = place["properties"][key]
    assert "`nodeplugin.devices.startGracePeriod` (30 s)" in text
    assert Devices().start_grace_period == 30
    assert "removed after 5 minutes" in text
    assert Devices().endpoint_stop_grace_period == 300


def test_the_sizes_of_messages_are_those_of_the_code():
    found = re.search(
        r"`Allocate` responses of up to (\d+) MiB, other messages of up to (\d+) MiB",
        (ROOT / COMPARISON).read_text(),
    )
    assert found is not None
    shown = [int(number) * 2**20 for number in found.groups()]
    assert shown == [MAX_ANSWER_BYTES, MAX_MESSAGE_BYTES]
