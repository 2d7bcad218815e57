"""docs/reference/device-health.md agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from drakit import Health
from drakit_driver.runtime.contract import traits_of
from drakit_nodeplugin.config import DeviceHealthSettings, NodePluginConfig
from drakit_nodeplugin.devices.taints import GONE, MAINTENANCE, STOPPED, UNHEALTHY, UNPREPARING
from tests.fakes.node import StaticNode

PAGE = (Path(__file__).parents[3] / "docs/reference/device-health.md").read_text()


def listings(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def test_the_settings_of_the_page_are_the_defaults():
    settings, _ = listings("yaml")
    config = NodePluginConfig.model_validate(yaml.safe_load(settings))
    assert config.devices.health == DeviceHealthSettings()
    assert config.devices.health.model_fields_set == set(DeviceHealthSettings.model_fields)


def test_the_page_names_every_taint_and_no_other():
    named = set(re.findall(r"drakit\.dev/[a-z-]+", PAGE))
    assert named == {GONE, MAINTENANCE, STOPPED, UNHEALTHY, UNPREPARING}


async def test_the_driver_of_the_page_reports_how_its_device_is():
    (source,) = listings("python")
    names = {}
    exec(compile(source, "docs/reference/device-health.md", "exec"), names)
    kind = names["Pumps"]
    assert traits_of(kind).health
    stream = kind(kind.config_type(), StaticNode(name="node-1")).devices()
    said = [(await anext(stream))[0].health for _ in range(2)]
    await stream.aclose()
    assert said == [Health.healthy(), Health.unhealthy("it runs dry")]
