"""What the documentation shows works as it is shown."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from drakit import AllocatedDevice, ClaimReference, Device, DriverError, Edits, Health
from drakit.resource.inventory import check_inventory
from drakit_nodeplugin.config import NodePluginConfig
from drakit_nodeplugin.endpoints.loading import LoadedDriver, load_drivers
from drakit_nodeplugin.endpoints.traits import DriverTraits
from tests.fakes.node import StaticNode

ROOT = Path(__file__).parents[3]


def listings(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


def code_lines(source: str) -> int:
    """Count lines as a vendor would: without imports, comments and empty ones."""
    lines = [line for line in source.splitlines() if line.strip() and not line.startswith("#")]
    return sum(not line.startswith(("import ", "from ")) for line in lines)


def load(name: str, source: str, entry: dict, monkeypatch: pytest.MonkeyPatch) -> LoadedDriver:
    """Load a driver of docs/drivers.md as the page says."""
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(source, "docs/drivers.md", "exec"), module.__dict__)
    entries = NodePluginConfig.model_validate({"drivers": [entry]}).drivers
    (driver,) = load_drivers(entries, file=Path("plugin.yaml"), node=StaticNode(name="node-1"))
    return driver


@pytest.fixture
def lamps(tmp_path, monkeypatch):
    """The first driver of the page, on a directory of lamps."""
    source, _, _ = listings("docs/drivers.md", "python")
    config, _ = listings("docs/drivers.md", "yaml")
    (entry,) = yaml.safe_load(config.replace("/run/lamps", str(tmp_path)))["drivers"]
    (tmp_path / "desk").touch()
    assert code_lines(source) <= 40
    return load("lamp", source, entry, monkeypatch).make()


@pytest.fixture
def bays(tmp_path, monkeypatch) -> LoadedDriver:
    """The last driver of the page, on a directory with a bay."""
    _, _, source = listings("docs/drivers.md", "python")
    (tmp_path / "bay-0").mkdir()
    entry = {"driver": "bays:Bays", "config": {"directory": str(tmp_path)}}
    return load("bays", source, entry, monkeypatch)


async def test_the_driver_of_the_page_works(lamps, tmp_path):
    stream = lamps.devices()
    assert [device.name for device in await anext(stream)] == ["desk"]
    await stream.aclose()
    claim = ClaimReference(namespace="lab", name="light", uid="uid-a")
    bright = lamps.parameters_type(brightness=80)
    desk = AllocatedDevice(name="desk", pool="", request="light", parameters=bright)

    edits = lamps.prepare(claim, desk)

    assert edits.env == {"LAMP": "/lamps/desk", "BRIGHTNESS": "80"}
    assert edits.mounts[0].host_path == str(tmp_path / "desk")
    assert lamps.health(Device(name="desk")) == Health.ok()
    (tmp_path / "desk").write_text("broken")
    assert lamps.health(Device(name="desk")) == Health.bad("the filament of desk is broken")
    (tmp_path / "desk").unlink()
    with pytest.raises(Exception, match="lamp desk was unscrewed"):
        lamps.prepare(claim, desk)
    await lamps.unprepare(claim, desk)


async def test_the_partitions_of_the_page_are_devices_that_can_be_published(monkeypatch):
    _, source, _ = listings("docs/drivers.md", "python")
    stream = load("cards", source, {"driver": "cards:Cards"}, monkeypatch).make().devices()
    inventory = await anext(stream)
    await stream.aclose()
    checked = check_inventory(inventory)
    assert (len(checked.devices), len(checked.counter_sets), checked.left_out) == (3, 1, {})
    assert [device.name for device in checked.fallback] == ["card-0"]


async def test_the_driver_with_side_effects_of_the_page_keeps_its_contract(bays, tmp_path):
    assert bays.traits == DriverTraits(side_effects=True, checks=True)
    volts = tmp_path / "bay-0" / "volts"
    driver = bays.make()
    stream = driver.devices()
    assert [device.name for device in await anext(stream)] == ["bay-0"]
    await stream.aclose()
    claim = ClaimReference(namespace="lab", name="test", uid="uid-a")
    bay = AllocatedDevice(
        name="bay-0", pool="", request="bay", configs=({"volts": 5}, {"volts": 12})
    )

    for _ in range(2):
        assert (await driver.prepare(claim, bay)).env == {"BAY_VOLTS": "12"}
        assert await driver.check(claim, bay)
        assert volts.read_text() == "12"
    looker = replace(bay, admin_access=True)
    assert (await driver.prepare(claim, replace(looker, configs=()))).env == {"BAY_VOLTS": "5"}
    await driver.unprepare(claim, looker)
    assert volts.read_text() == "12"
    with pytest.raises(DriverError, match="has 5 or 12 volts, not 230"):
        await driver.prepare(claim, replace(bay, configs=({"volts": 230},)))
    for _ in range(2):
        await driver.unprepare(claim, replace(bay, configs=()))
        assert not volts.exists()
    assert not await driver.check(claim, bay)


def test_the_page_names_every_field_of_devices_and_edits():
    page = (ROOT / "docs/drivers.md").read_text()
    named = set(re.findall(r"`([a-z_]+)`", page))
    for kind in (Device, Edits, AllocatedDevice):
        assert {field.name for field in fields(kind)} <= named


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
