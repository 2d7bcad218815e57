"""examples/driver: the rotors do what their README says, and the files beside them fit them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from drakit import AllocatedDevice, Capacity, ClaimReference, Device, DriverError, Health, Inventory
from drakit_formats.resource.device import Feature, without
from drakit_formats.resource.inventory import check_inventory
from drakit_nodeplugin.endpoints.contract import traits_of
from tests.fakes.node import StaticNode
from tests.unit.docs.listings import ROOT, module

FOLDER = ROOT / "examples" / "driver"
SOURCE = (FOLDER / "rotors.py").read_text()
CLAIM = ClaimReference(namespace="lab", name="turn", uid="uid-1")


@pytest.fixture
def rotors(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module("rotors", SOURCE, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The rotors of the node: one, in the west."""
    (tmp_path / "west").mkdir()
    return tmp_path


@pytest.fixture
def driver(rotors: ModuleType, folder: Path) -> Iterator[Any]:
    made = rotors.Rotors(rotors.RotorsConfig(directory=folder), StaticNode(name="node-1"))
    yield made
    made.close()


@pytest.fixture
def share(rotors: ModuleType):
    """Make a share of the rotor as the node plugin gives it to the driver."""

    def made(number: int, *, speed: int, rpm: str | None, **fields: Any) -> AllocatedDevice:
        return AllocatedDevice(
            name="west",
            pool="",
            request=f"rotor-{number}",
            share_id=f"share-{number}",
            consumed_capacity={} if rpm is None else {"rpm": rpm},
            parameters=rotors.RotorParameters(speed=speed),
            **fields,
        )

    return made


async def first(driver: Any) -> list[Device]:
    stream = driver.devices()
    found = await anext(stream)
    await stream.aclose()
    return found


async def test_folders_are_rotors_that_can_be_published(driver, folder):
    (folder / "west" / "model").write_text("R3\n")
    (folder / "README").touch()
    (west,) = await first(driver)
    assert (west.name, west.attributes) == ("west", {"model": "R3"})
    assert west.allow_multiple_allocations
    assert isinstance(west.capacity["rpm"], Capacity)
    assert not check_inventory(Inventory(devices=[west])).left_out


async def test_a_node_without_rotors_is_no_error(driver, folder):
    (folder / "west").rmdir()
    folder.rmdir()
    assert await first(driver) == []


def test_of_two_shares_the_fastest_counts_until_it_is_given_back(driver, share, folder):
    slow, fast = share(1, speed=300, rpm="400"), share(2, speed=1200, rpm="1200")
    speed = folder / "west" / "speed"
    assert traits_of(type(driver)).side_effects

    for _ in range(2):  # it may be called again
        edits = driver.prepare(CLAIM, slow)
    assert edits.env == {"ROTOR_SPEED_ROTOR_1__WEST": "300"}
    (mount,) = edits.mounts
    assert (mount.host_path, mount.container_path) == (str(folder / "west"), "/rotors/west")
    assert speed.read_text() == "300"
    assert driver.prepare(CLAIM, fast).env == {"ROTOR_SPEED_ROTOR_2__WEST": "1200"}
    assert speed.read_text() == "1200"

    # Nothing but names is certain at unprepare.
    for _ in range(2):
        driver.unprepare(CLAIM, replace(fast, parameters=None, consumed_capacity={}))
        assert speed.read_text() == "300"
    driver.unprepare(CLAIM, slow)
    assert speed.read_text() == "0"
    assert {path.name for path in (folder / "west").iterdir()} == {"speed"}


@pytest.mark.parametrize(
    ("rpm", "speed", "fits"),
    [
        pytest.param("1200", 1200, True, id="all-that-was-claimed"),
        pytest.param("1200", 1201, False, id="more-than-was-claimed"),
        pytest.param("1k", 1001, False, id="more-than-was-claimed-in-another-writing"),
        pytest.param("3k", 3000, True, id="as-much-as-was-claimed-in-another-writing"),
        pytest.param(None, 3000, True, id="a-whole-rotor-where-the-cluster-knows-no-shares"),
    ],
)
def test_a_speed(driver, share, folder, rpm, speed, fits):
    device = share(1, speed=speed, rpm=rpm)
    if fits:
        driver.prepare(CLAIM, device)
        assert (folder / "west" / "speed").read_text() == str(speed)
        return
    with pytest.raises(DriverError, match=f"{speed} is more than the claim's {rpm} rpm"):
        driver.prepare(CLAIM, device)
    assert not (folder / "west" / "speed").exists()
    driver.unprepare(CLAIM, device)


def test_a_claim_with_admin_access_turns_nothing(driver, share, folder):
    looker = share(1, speed=3000, rpm=None, admin_access=True)
    assert driver.prepare(CLAIM, looker).mounts
    driver.unprepare(CLAIM, looker)
    assert not list((folder / "west").iterdir())


def test_a_removed_rotor_is_named_and_can_be_unprepared(driver, share, folder):
    (folder / "west").rmdir()
    device = share(1, speed=0, rpm="100")
    with pytest.raises(DriverError, match="rotor west no longer exists"):
        driver.prepare(CLAIM, device)
    driver.unprepare(CLAIM, device)


@pytest.mark.parametrize(
    ("fault", "health"),
    [
        pytest.param(None, Health.healthy(), id="none"),
        pytest.param(
            "it squeaks\n", Health.unhealthy("it squeaks"), id="one-that-can-be-lived-with"
        ),
        pytest.param(
            "fatal: stuck", Health.unhealthy("fatal: stuck", evict_pods=True), id="a-fatal-one"
        ),
    ],
)
def test_a_fault(driver, folder, fault, health):
    if fault is not None:
        (folder / "west" / "fault").write_text(fault)
    assert driver.health(Device(name="west")) == health


async def test_where_nothing_can_be_shared_a_rotor_is_whole(driver):
    (west,) = await first(driver)
    whole = without(west, {Feature.MULTIPLE_ALLOCATIONS})
    assert whole is not None
    assert (whole.allow_multiple_allocations, whole.capacity) == (False, {"rpm": "3000"})


def test_the_claim_of_the_example_asks_for_what_the_driver_has(rotors):
    device_class, template, pod = yaml.safe_load_all((FOLDER / "claim.yaml").read_text())
    (selector,) = device_class["spec"]["selectors"]
    assert selector["cel"]["expression"] == f'device.driver == "{rotors.Rotors.name}"'
    devices = template["spec"]["spec"]["devices"]
    (request,), (config,) = devices["requests"], devices["config"]
    assert request["exactly"]["deviceClassName"] == device_class["metadata"]["name"]
    assert config["requests"] == [request["name"]]
    assert config["opaque"]["driver"] == rotors.Rotors.name
    asked = rotors.RotorParameters.model_validate(config["opaque"]["parameters"])
    assert asked.speed <= int(request["exactly"]["capacity"]["requests"]["rpm"])
    (source,) = pod["spec"]["resourceClaims"]
    assert source["resourceClaimTemplateName"] == template["metadata"]["name"]


def test_the_values_of_the_example_are_what_driver_and_chart_know(rotors, schema):
    values = yaml.safe_load((FOLDER / "values.yaml").read_text())
    for section, given in values.items():
        assert given.keys() <= schema["properties"][section]["properties"].keys()
    (entry,) = values["nodeplugin"]["drivers"]
    assert entry["driver"] == "rotors:Rotors"
    rotors.RotorsConfig.model_validate(entry["config"])
