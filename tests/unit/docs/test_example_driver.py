"""examples/driver: the rotors behave as the README describes, and the other files match them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from drakit import AllocatedDevice, ClaimReference, Device, DriverError, Health
from drakit_driver.runtime.contract import traits_of
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
