"""What the page of simulated devices shows is what the driver takes."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from drakit_drivers.simulated import SimulatedConfig, SimulatedParameters
from drakit_drivers.simulated.control import Control
from drakit_drivers.simulated.inventory import all_devices, without_device

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "start" / "simulated-devices.md").read_text()


def listing(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)
    return text


def test_the_settings_are_all_there_are_and_the_defaults():
    (entry,) = yaml.safe_load(listing("yaml"))["drivers"]
    config = SimulatedConfig.model_validate(entry["config"])
    default = SimulatedConfig()
    assert config == default.model_copy(update={"control_file": default.control})
    assert set(entry["config"]) == {field.alias for field in type(default).model_fields.values()}
    for profile in ("gpu", "nic", "cpu"):
        fields = type(getattr(default, profile)).model_fields
        assert set(entry["config"][profile]) == {field.alias for field in fields.values()}


def test_the_control_file_is_all_that_one_can_say():
    control = Control.model_validate_json(listing("json"))
    assert control.model_fields_set == set(Control.model_fields)
    assert without_device(all_devices(SimulatedConfig()), control) == []


def test_every_parameter_is_named():
    named = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.M))
    assert {field.alias for field in SimulatedParameters.model_fields.values()} <= named


def test_every_example_is_named():
    linked = set(re.findall(r"\((?:\.\./)+examples/simulated/([\w-]+\.yaml)\)", PAGE))
    assert linked == {file.name for file in (ROOT / "examples" / "simulated").glob("*.yaml")}
