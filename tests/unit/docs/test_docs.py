"""What the documentation shows works as it is shown."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import yaml

from drakit import AllocatedDevice, ClaimReference
from drakit_nodeplugin.config import NodePluginConfig
from drakit_nodeplugin.endpoints.loading import load_drivers
from tests.fakes.node import StaticNode

ROOT = Path(__file__).parents[3]


def listings(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


@pytest.fixture
def lamps(tmp_path, monkeypatch):
    """The driver of docs/drivers.md, loaded as the page says, on a directory of lamps."""
    (source,) = listings("docs/drivers.md", "python")
    (config,) = listings("docs/drivers.md", "yaml")
    module = types.ModuleType("lamp")
    monkeypatch.setitem(sys.modules, "lamp", module)
    exec(compile(source, "docs/drivers.md", "exec"), module.__dict__)
    body = yaml.safe_load(config.replace("/run/lamps", str(tmp_path)))
    entries = NodePluginConfig.model_validate(body).drivers
    (driver,) = load_drivers(entries, file=Path("plugin.yaml"), node=StaticNode(name="node-1"))
    (tmp_path / "desk").touch()
    return driver.make()


async def test_the_driver_of_the_page_works(lamps, tmp_path):
    stream = lamps.devices()
    assert [device.name for device in await anext(stream)] == ["desk"]
    await stream.aclose()
    claim = ClaimReference(namespace="lab", name="light", uid="uid-a")
    desk = AllocatedDevice(name="desk", pool="node-1", request="light")

    edits = await lamps.prepare(claim, desk)

    assert edits.env == {"LAMP": "/lamps/desk"}
    assert edits.mounts[0].host_path == str(tmp_path / "desk")
    (tmp_path / "desk").unlink()
    with pytest.raises(Exception, match="lamp desk was unscrewed"):
        await lamps.prepare(claim, desk)
    await lamps.unprepare(claim, desk)


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
)
def test_yaml_of_the_pages_is_yaml_and_their_links_lead_somewhere(page):
    for listing in listings(page, "yaml"):
        assert list(yaml.safe_load_all(listing))
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        if not target.startswith("https://"):
            assert ((ROOT / page).parent / target).exists(), target


def test_the_example_configuration_is_what_the_plugin_reads():
    listing = listings("docs/node-plugin.md", "yaml")[0]
    config = NodePluginConfig.model_validate(yaml.safe_load(listing))
    node = StaticNode(name="node-1")
    (driver,) = load_drivers(config.drivers, file=Path("plugin.yaml"), node=node)
    assert driver.name == "hostdev.drakit.dev"
