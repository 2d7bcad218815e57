"""The driver accepts the examples of the page about simulated devices."""

from __future__ import annotations

import re
from pathlib import Path

from drakit_drivers.simulated import SimulatedConfig
from drakit_drivers.simulated.control import Control
from drakit_drivers.simulated.inventory import all_devices, without_device

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "start" / "simulated-devices.md").read_text()


def test_the_control_file_shows_every_key_and_only_devices_that_exist():
    (listing,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.M | re.S)
    control = Control.model_validate_json(listing)
    assert control.model_fields_set == set(Control.model_fields)
    assert without_device(all_devices(SimulatedConfig()), control) == []


def test_the_table_explains_every_key_of_the_control_file():
    named = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.M))
    assert {field.alias for field in Control.model_fields.values()} <= named


def test_every_example_is_named():
    linked = set(re.findall(r"\((?:\.\./)+examples/simulated/([\w-]+\.yaml)\)", PAGE))
    assert linked == {file.name for file in (ROOT / "examples" / "simulated").glob("*.yaml")}
