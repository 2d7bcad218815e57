"""The control file: the times of its reads, and its effective content."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from contextlib import aclosing
from pathlib import Path

import pytest

from drakit import Health, Taint
from drakit_drivers.simulated import SimulatedConfig
from drakit_drivers.simulated.control import Control, ControlFile
from drakit_drivers.simulated.inventory import all_devices, commanded

UNWELL = {"health": {"gpu-0": {"status": "unhealthy", "message": "hot", "broken": True}}}


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "control.json"


def states(control: dict, **config) -> dict:
    """Devices by name, as the control file changes them."""
    inventory = all_devices(SimulatedConfig.model_validate(config))
    found = commanded(inventory, Control.model_validate(control), driver="sim.test")
    return {device.name: device for device in found.devices}


# ------------------------------------------------------------ reading


@pytest.mark.looptime
async def test_a_change_is_noticed_within_two_polls(file, looptime):
    async with aclosing(ControlFile(file).follow()) as controls:
        assert await anext(controls) == Control()
        change = asyncio.create_task(anext(controls))
        await asyncio.sleep(30)
        assert not change.done()
        file.write_text(json.dumps(UNWELL))
        assert (await change).health["gpu-0"].message == "hot"
        assert looptime <= 30.4
        change = asyncio.create_task(anext(controls))
        file.unlink()
        assert await change == Control()
        assert looptime <= 30.8


def test_a_pipe_in_the_files_place_is_not_waited_for(file):
    os.mkfifo(file)
    assert ControlFile(file).poll() is None


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        pytest.param('{"health": {"gpu-0"', "EOF", id="half-written"),
        pytest.param("[]", "object", id="no-object"),
        pytest.param('{"healht": {}}', "healht", id="misspelt"),
        pytest.param('{"health": {"gpu-0": {"status": "ill"}}}', "gpu-0.status", id="no-status"),
        pytest.param(f'{{"stop": "{"x" * 2**20}"}}', "bytes", id="huge"),
    ],
)
def test_a_bad_file_is_reported_once_and_the_last_good_one_stays(file, caplog, bad, reason):
    control = ControlFile(file)
    file.write_text(json.dumps(UNWELL))
    assert control.poll() is not None
    caplog.clear()
    file.write_text(bad)
    for _ in range(3):
        assert control.poll() is None
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert reason in record.__dict__["reason"]
    assert control.last == Control.model_validate(UNWELL)


def test_a_file_that_was_only_half_written_is_not_reported(file, caplog):
    control = ControlFile(file)
    file.write_text('{"stop"')
    assert control.poll() is None
    file.write_text('{"stop": "maintenance"}')
    assert control.poll() == Control(stop="maintenance")
    assert control.poll() is None
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_file_with_the_same_content_again_is_no_change_and_an_empty_one_commands_nothing(file):
    control = ControlFile(file)
    file.write_text(json.dumps(UNWELL))
    assert control.poll() is not None
    file.write_text(json.dumps(UNWELL, indent=1))
    assert control.poll() is None
    file.write_text("\n")
    assert control.poll() == Control()


# ------------------------------------------------------------ what counts


def test_entries_for_a_gpu_apply_to_its_partitions():
    found = states(UNWELL)
    unwell = {name for name, device in found.items() if device.health != Health.healthy()}
    assert unwell == {name for name in found if name == "gpu-0" or name.startswith("gpu-0-")}
    assert found["gpu-0"].health == Health.unhealthy("hot", evict_pods=True)


def test_a_partition_can_have_its_own_entry():
    more = {"gpu-0-1g-*": {"status": "healthy"}, "gpu-0-2g-1": {"status": "unknown"}}
    found = states({"health": UNWELL["health"] | more})
    assert found["gpu-0-1g-0"].health == Health.healthy()
    assert found["gpu-0-2g-0"].health == Health.unhealthy("hot", evict_pods=True)
    assert found["gpu-0-2g-1"].health == Health.unknown()


def test_a_number_that_begins_alike_is_another_device():
    found = states({"missing": ["gpu-1"]}, gpu={"count": 11})
    assert "gpu-1" not in found
    assert "gpu-10" in found


def test_taints_of_all_patterns_add_up_and_get_the_drivers_domain():
    found = states(
        {
            "taints": {
                "*": [{"key": "drill", "effect": "None"}],
                "nic-0": [{"key": "lab.test/cable", "value": "loose"}],
            }
        }
    )
    drill = Taint(key="sim.test/drill", effect="None")
    assert found["gpu-0-1g-0"].taints == (drill,)
    assert found["nic-0"].taints == (
        drill,
        Taint(key="lab.test/cable", value="loose", effect="NoSchedule"),
    )


def test_a_gpu_that_is_gone_takes_its_partitions_and_counters_along():
    inventory = all_devices(SimulatedConfig())
    found = commanded(inventory, Control(missing=("gpu-1",)), driver="sim.test")
    assert not [device for device in found.devices if device.name.startswith("gpu-1")]
    assert [each.name for each in found.counter_sets] == ["gpu-0"]
    assert "gpu-1" not in {device.name for device in found.fallback or ()}
