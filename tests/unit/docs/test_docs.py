"""docs/vendors/driver-contract.md and packaging.md: their listings work, and name what exists."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

import drakit
from drakit import (
    AllocatedDevice,
    ClaimReference,
    Device,
    DriverError,
    Edits,
    Health,
    Inventory,
    Policy,
)
from drakit_cli.main import main
from drakit_cli.new import PLUGIN, project_of, render
from drakit_driver.runtime.contract import DriverTraits
from drakit_driver.runtime.loading import LoadedDriver
from drakit_driver.runtime.snapshot import inventory_of
from drakit_drivers.hostdev import HostDevicePolicySpec
from drakit_explain.parameters import schemas_of
from drakit_formats import crds
from drakit_formats.cdi.spec import build_spec
from drakit_formats.resource.device import Feature, without
from drakit_formats.resource.inventory import check_inventory
from drakit_nodeplugin.config import NodePluginConfig
from drakit_nodeplugin.host.drivers import load_drivers
from tests.fakes.node import StaticNode
from tests.unit.docs.listings import (
    PAGES,
    ROOT,
    commands,
    documents,
    is_values,
    listing,
    listings,
    module,
    validated,
)

PAGE = "docs/vendors/driver-contract.md"
PACKAGING = "docs/vendors/packaging.md"


def load(name: str, entry: dict, monkeypatch: pytest.MonkeyPatch) -> LoadedDriver:
    """Load a driver of docs/vendors/driver-contract.md as the page says."""
    module(name, listing(PAGE, f"{name}.py"), monkeypatch)
    entries = NodePluginConfig.model_validate({"drivers": [entry]}).drivers
    (driver,) = load_drivers(entries, file=Path("plugin.yaml"), node=StaticNode(name="node-1"))
    return driver


def values_of(name: str, page: str = PAGE) -> dict[str, Any]:
    return yaml.safe_load(listing(page, name))


@pytest.fixture
def lamps(tmp_path, monkeypatch):
    """The first driver of the page, on a directory of lamps."""
    (entry,) = copy.deepcopy(values_of("values.yaml", PACKAGING)["nodeplugin"]["drivers"])
    entry["config"]["directory"] = str(tmp_path)
    (tmp_path / "desk").touch()
    return load("lamp", entry, monkeypatch).make()


@pytest.fixture
def bays(tmp_path, monkeypatch) -> LoadedDriver:
    """The last driver of the page, on a directory with a bay."""
    (tmp_path / "bay-0").mkdir()
    entry = {"driver": "bays:Bays", "config": {"directory": str(tmp_path)}}
    return load("bays", entry, monkeypatch)


async def test_the_driver_of_the_page_works(lamps, tmp_path):
    stream = lamps.devices()
    assert [device.name for device in await anext(stream)] == ["desk"]
    await stream.aclose()
    claim = ClaimReference(namespace="lab", name="light", uid="uid-a")
    bright = lamps.parameters_type(brightness=80)
    desk = AllocatedDevice(name="desk", pool="", request="light", parameters=bright)

    edits = lamps.prepare(claim, desk)

    assert edits.env == {"LAMP_LIGHT__DESK": "/lamps/desk", "LAMP_BRIGHTNESS_LIGHT__DESK": "80"}
    assert edits.mounts[0].host_path == str(tmp_path / "desk")
    assert lamps.health(Device(name="desk")) == Health.healthy()
    (tmp_path / "desk").write_text("broken")
    assert lamps.health(Device(name="desk")) == Health.unhealthy("the filament of desk is broken")
    (tmp_path / "desk").unlink()
    with pytest.raises(Exception, match="lamp desk was unscrewed"):
        lamps.prepare(claim, desk)
    await lamps.unprepare(claim, desk)


def test_the_schema_of_the_page_is_that_of_its_driver(monkeypatch, capsys):
    module("lamp", listing(PAGE, "lamp.py"), monkeypatch)
    assert main(["schema", "lamp:Lamps"]) == 0
    printed = schemas_of(yaml.safe_load(capsys.readouterr().out))
    shown = schemas_of(values_of("lamps-chart/templates/devicedriver.yaml", PACKAGING))
    assert printed.driver == shown.driver
    for parameters in ({}, {"brightness": 80}, {"brightness": 101}, {"bright": 1}):
        problems = [bool(each.versions[""].problems(parameters)) for each in (printed, shown)]
        assert problems[0] is problems[1]


async def test_the_partitions_of_the_page_are_devices_that_can_be_published(monkeypatch):
    stream = load("cards", {"driver": "cards:Cards"}, monkeypatch).make().devices()
    inventory = await anext(stream)
    await stream.aclose()
    checked = check_inventory(inventory)
    assert (len(checked.devices), len(checked.counter_sets), checked.rejected) == (3, 1, {})
    assert [device.name for device in checked.fallback] == ["card-0"]


async def test_the_driver_with_policies_of_the_page_publishes_what_they_ask_for(monkeypatch):
    loaded = load("rooms", {"driver": "rooms:Rooms"}, monkeypatch)
    kind = loaded.traits.policies.type
    driver = loaded.make()

    def policy(name: str, month: int, **spec: Any) -> dict[str, Policy]:
        created = datetime(2026, month, 1, tzinfo=UTC)
        checked = kind.model_validate(spec)
        return {name: Policy(name=name, created=created, generation=1, spec=checked)}

    driver.apply_policies(
        policy("late", 2, room="hall", lamps=1)
        | policy("early", 1, room="hall", lamps=4)
        | policy("elsewhere", 1, room="attic", lamps=1, nodeSelector={"floor": "9"})
    )
    stream = driver.devices()
    inventory = await anext(stream)
    await stream.aclose()
    assert [device.name for device in inventory.devices] == ["hall-0", "hall-1", "hall-2"]
    assert [each.device for each in inventory.rejected] == ["hall/3"]
    outcomes = {each.policy: (each.matched, each.published) for each in inventory.policies}
    assert outcomes == {"early": (4, 3), "late": (1, 0)}
    assert inventory_of(inventory).policies == tuple(inventory.policies)


def test_a_driver_of_the_page_needs_no_prepare(monkeypatch):
    traits = load("sticks", {"driver": "sticks:Sticks"}, monkeypatch).traits
    assert traits == DriverTraits(side_effects=False)


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


def test_the_test_of_the_page_runs_and_notices_a_driver_that_is_wrong(tmp_path):
    (tmp_path / "test_lamp.py").write_text(listing(PAGE, "test_lamp.py"))
    lamp = listing(PAGE, "lamp.py")

    def run(source: str) -> str:
        (tmp_path / "lamp.py").write_text(source)
        return subprocess.run(
            [sys.executable, "-B", "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"],
            cwd=tmp_path,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            timeout=25,
            check=False,
        ).stdout

    count = len(re.findall(r"^def test_", listing(PAGE, "test_lamp.py"), re.M))
    assert f"\n{count} passed in" in run(lamp)
    wrong = lamp.replace("{device.request}__{device.name}", "{device.request}")
    assert wrong != lamp
    assert f"\n1 failed, {count - 1} passed in" in run(wrong)


def test_a_parameter_of_the_page_has_one_of_a_few_values(monkeypatch):
    blinking = module("blinking", listing(PAGE, "blinking.py"), monkeypatch).BlinkingParameters
    assert blinking.model_validate({"color": "red"}).color == "red"
    with pytest.raises(ValueError, match="color"):
        blinking.model_validate({"color": "blue"})


def test_the_capacity_that_the_page_selects_by_is_of_its_card(monkeypatch):
    card = module("devices", listing(PAGE, "devices.py"), monkeypatch).CARD
    cards = module("cards", listing(PAGE, "cards.py"), monkeypatch).Cards
    (selector,) = values_of("capacity.yaml")["selectors"]
    found = re.fullmatch(
        r'device\.capacity\["(.+)"\]\.(\w+)\.compareTo\(quantity\("(\w+)"\)\) >= 0',
        selector["cel"]["expression"],
    )
    assert found is not None
    driver, name, amount = found.groups()
    assert driver == cards.name
    assert drakit.parse_quantity(card.capacity[name]) >= drakit.parse_quantity(amount)


def test_a_card_of_the_page_can_be_published_and_shared(monkeypatch):
    card = module("devices", listing(PAGE, "devices.py"), monkeypatch).CARD
    assert check_inventory(Inventory(devices=[card])).rejected == {}
    needing_more = {
        *("consumes", "compatibility_groups", "node_allocatable_resources", "extra"),
        *("binding_conditions", "binding_failure_conditions", "binds_to_node"),
    }
    assert all(getattr(card, each.name) for each in fields(Device) if each.name not in needing_more)
    whole = without(card, {Feature.MULTIPLE_ALLOCATIONS})
    assert whole is not None
    assert not whole.allow_multiple_allocations

    (request,) = values_of("shares.yaml")["spec"]["devices"]["requests"]
    ((name, amount),) = request["exactly"]["capacity"]["requests"].items()
    policy = card.capacity[name].valid_range
    amounts = [drakit.parse_quantity(text) for text in (policy.min, amount, policy.max)]
    assert amounts == sorted(amounts)
    assert amounts[1] % drakit.parse_quantity(policy.step) == 0


def test_edits_of_the_page_keep_the_rules_of_cdi(monkeypatch):
    given = module("edits", listing(PAGE, "edits.py"), monkeypatch).GIVEN
    assert all(getattr(given, field.name) for field in fields(Edits))
    spec = build_spec("cards.example.com/claim", [("card-0", given)])
    assert spec["devices"]


def test_the_page_shows_how_every_value_is_made():
    shown = "".join(listings(PAGE, "python"))
    made_by_the_plugin = {"AllocatedClaim", "HeldDevice", "HeldNode", "Policy"}
    of_a_claim = {"ClaimData", "ClaimOwner", "ClaimConsumer", "ClaimConfig", "OtherDevice"}
    for_few_drivers = {"Condition", "NetworkData", "NodeAllocatableResource", "PreparedDevice"}
    for_few_drivers |= {"ParameterVersion"}
    for name in {*drakit.__all__} - made_by_the_plugin - of_a_claim - for_few_drivers:
        if is_dataclass(getattr(drakit, name)):
            assert f"{name}(" in shown or f"{name}." in shown, name


VALUES = [
    *(pytest.param(body, id=name) for name, body in documents() if is_values(body)),
    *(
        pytest.param(yaml.safe_load(path.read_text()), id=str(path.relative_to(ROOT)))
        for path in sorted((ROOT / "examples").glob("*/values.yaml"))
    ),
]


@pytest.mark.parametrize("values", VALUES)
def test_the_chart_and_the_node_plugin_accept_the_values_of_the_pages_and_examples(values):
    """Also those of pages whose commands only `make test-all` runs."""
    for policy in validated(values)["hostdev"]["policies"].values():
        HostDevicePolicySpec.model_validate(
            {key: value for key, value in policy.items() if key != "enabled"}
        )


POLICIES = [
    pytest.param(body, id=f"{name}-{body['metadata']['name']}")
    for name, body in [
        *documents(),
        *(
            (str(path.relative_to(ROOT)), body)
            for path in sorted((ROOT / "examples").glob("hostdev/*.yaml"))
            for body in yaml.safe_load_all(path.read_text())
        ),
    ]
    if isinstance(body, dict) and body.get("kind") == "HostDevicePolicy"
]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_policies_of_the_pages_and_examples_are_valid(policy):
    assert policy["apiVersion"] == crds.API_VERSION
    assert HostDevicePolicySpec.model_validate(policy["spec"])


def test_the_commands_of_the_page_make_and_install_what_the_values_name():
    given = "\n".join(commands(PACKAGING))
    image = values_of("values.yaml", PACKAGING)["image"]
    name = f"{image['repository']}-nodeplugin:{image['tag']}"
    (base,) = re.findall(r"^ARG BASE=(.*)", listing(PACKAGING, "Dockerfile"), re.M)
    for words in (f"build -t {name} ", f"BASE={base} ", f"push {name}\n", "-f values.yaml"):
        assert words in given
    assert {*re.findall(r" -n (\w+)", given), *re.findall(r"namespace (\w+)", given)} == {"lamps"}


def test_the_dockerfiles_of_page_and_example_are_the_same_but_for_the_driver():
    example = (ROOT / "examples/driver/Dockerfile").read_text()
    assert listing(PACKAGING, "Dockerfile") == example.replace("rotors.py", "lamp.py")
    more = listing(PACKAGING, "Dockerfile.more")
    assert more.splitlines()[0] == example.splitlines()[0]
    assert more.endswith(listing(PACKAGING, "Dockerfile.package").partition("FROM ${BASE}\n")[2])
    # Where the image has its Python.
    assert "python3 -m venv --without-pip /opt/drakit" in (ROOT / "Dockerfile").read_text()


def test_the_package_of_the_page_is_the_one_of_a_new_project():
    project = render(project_of("lamps", driver=None, image=None, drakit=version("drakit")), PLUGIN)
    shown = tomllib.loads(listing(PACKAGING, "pyproject.toml"))["project"]
    written = tomllib.loads(project["pyproject.toml"])["project"]
    assert shown.items() <= written.items()
    dockerfile = [line for line in project["Dockerfile"].splitlines() if line[0] != "#"]
    assert listing(PACKAGING, "Dockerfile.package").splitlines() == dockerfile
    shown_class = yaml.safe_load(listing(PACKAGING, "lamps-chart/templates/deviceclass.yaml"))
    assert shown_class == yaml.safe_load(project["deviceclass.yaml"])


@pytest.mark.parametrize("page", PAGES)
def test_yaml_of_the_pages_is_yaml(page):
    for text in listings(page, "yaml"):
        assert list(yaml.safe_load_all(text))
