"""The driver: its loading, its errors, and the environment of containers."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from drakit import AllocatedDevice, ClaimReference, DriverError, Health
from drakit_driver.runtime.contract import traits_of
from drakit_driver.runtime.loading import LoadedDriver
from drakit_drivers.simulated import Simulated, SimulatedConfig, SimulatedParameters
from drakit_nodeplugin.config import DriverEntry
from drakit_nodeplugin.host.drivers import load_drivers
from tests.fakes.node import StaticNode

CLAIM = ClaimReference(namespace="lab", name="train", uid="u")
NODE = StaticNode(name="node-1")
SHARE = "5be7e9a1-3b9d-4b58-a3e6-6ce5f2e9a7d1"


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "control.json"


@pytest.fixture
def driver(file) -> Simulated:
    return Simulated(SimulatedConfig(control_file=file), NODE)


def load(*configs: dict[str, Any]) -> list[LoadedDriver]:
    entries = [DriverEntry(driver="simulated", config=config) for config in configs]
    return load_drivers(entries, file=Path("plugin.yaml"), node=NODE)


def allocated(name: str, *, pool: str = "", request: str = "gpu", **facts: Any) -> AllocatedDevice:
    facts.setdefault("parameters", SimulatedParameters())
    return AllocatedDevice(name=name, pool=pool, request=request, **facts)


# ------------------------------------------------------------ loading


def test_it_is_found_by_name_and_can_be_several_drivers():
    one, other = load({}, {"driverName": "fpga.test"})
    assert (one.name, other.name) == ("simulated.drakit.dev", "fpga.test")


def test_the_driver_reports_health_and_has_no_side_effects():
    traits = traits_of(Simulated)
    assert traits.health
    assert not any((traits.side_effects, traits.polls_health))
    assert traits.parameters_type is SimulatedParameters


# ------------------------------------------------------------ what it says


@pytest.mark.looptime
async def test_devices_change_as_in_the_file(driver, file):
    async with aclosing(driver.devices()) as stream:
        first = await anext(stream)
        assert {device.health for device in first.devices} == {Health.healthy()}
        change = asyncio.create_task(anext(stream))
        await asyncio.sleep(60)
        assert not change.done()
        file.write_text(json.dumps({"health": {"nic-0": {"status": "unhealthy"}}}))
        health = {device.name: device.health for device in (await change).devices}
        assert health["nic-0"] == Health.unhealthy("")
        change = asyncio.create_task(anext(stream))
        file.write_text("{}")
        assert await change == first


@pytest.mark.looptime
async def test_a_stop_ends_the_stream_with_its_reason(driver, file):
    async with aclosing(driver.devices()) as stream:
        await anext(stream)
        file.write_text('{"stop": "maintenance of the lab"}')
        with pytest.raises(DriverError, match=r"^maintenance of the lab$"):
            await anext(stream)


@pytest.mark.looptime
async def test_after_a_stop_it_is_back_as_soon_as_in_the_file(driver, file, looptime):
    file.write_text('{"stop": "maintenance of the lab"}')
    async with aclosing(driver.devices()) as stream:
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(30)
        assert not first.done()
        with pytest.raises(DriverError, match="the driver is stopped: maintenance of the lab"):
            driver.prepare(CLAIM, allocated("gpu-0"))
        file.unlink()
        assert len((await first).devices) == 17
        assert looptime <= 30.4


async def test_names_of_no_device_are_logged(driver, file, caplog):
    missing = {"health": {"gpu-9": {"status": "healthy"}}, "missing": ["cpu-3", "gpu-?"]}
    file.write_text(json.dumps(missing))
    async with aclosing(driver.devices()) as stream:
        await anext(stream)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.__dict__["devices"] == ["gpu-9"]


# ------------------------------------------------------------ what a container gets


def test_a_container_sees_all_that_it_got_of_a_partition(driver):
    parameters = SimulatedParameters.model_validate(
        {"sharing": "timeSlicing", "timeSliceMilliseconds": 20, "env": {"MODE": "fast"}}
    )
    device = allocated("gpu-1-2g-0", request="gpu/small", parameters=parameters)
    env = driver.prepare(CLAIM, device).env
    assert json.loads(env.pop("SIMULATED_GPU__GPU_1_2G_0")) == {
        "driver": "simulated.drakit.dev",
        "device": "gpu-1-2g-0",
        "pool": "",
        "claim": "lab/train",
        "request": "gpu/small",
        "type": "partition",
        "parent": "gpu-1",
        "profile": "2g",
        "numaNode": 1,
        "capacity": {"memory": "20480Mi"},
        "parameters": {
            "sharing": "timeSlicing",
            "timeSliceMilliseconds": 20,
            "env": {"MODE": "fast"},
        },
    }
    assert env == {"SIMULATED_GPU": "gpu-1-2g-0", "MODE": "fast"}


def test_shares_of_a_device_are_distinguished_and_show_what_was_taken(driver):
    shares = [SHARE, SHARE.replace("5", "6")]
    env: dict[str, str] = {}
    for share, bandwidth in zip(shares, ("10G", "2G"), strict=True):
        device = allocated(
            "nic-0", request="nic", share_id=share, consumed_capacity={"bandwidth": bandwidth}
        )
        env |= driver.prepare(CLAIM, device).env
    said = [
        json.loads(env[f"SIMULATED_NIC__NIC_0__{share.upper().replace('-', '_')}"])
        for share in shares
    ]
    assert [each["shareID"] for each in said] == shares
    assert [each["capacity"] for each in said] == [{"bandwidth": "10G"}, {"bandwidth": "2G"}]


def test_a_look_at_a_device_does_not_hide_the_device_itself(driver):
    env = dict(driver.prepare(CLAIM, allocated("gpu-0")).env)
    env |= driver.prepare(CLAIM, allocated("gpu-0", admin_access=True)).env
    assert json.loads(env["SIMULATED_GPU__GPU_0__ADMIN"])["adminAccess"] is True
    assert "adminAccess" not in json.loads(env["SIMULATED_GPU__GPU_0"])


def test_devices_of_the_fallback_can_be_prepared(driver):
    device = allocated("cpu-5", pool="cpus", request="cpus")
    assert "SIMULATED_CPUS__CPU_5" in driver.prepare(CLAIM, device).env


@pytest.mark.parametrize(
    ("control", "device", "text"),
    [
        pytest.param({}, "gpu-7", "the device is gone on node node-1", id="never-there"),
        pytest.param({"missing": ["gpu-0"]}, "gpu-0-1g-0", "is gone", id="its-gpu-is-missing"),
        pytest.param(
            {"failPrepare": {"gpu-0": "no power"}},
            "gpu-0",
            "the device cannot be prepared on node node-1: no power",
            id="told-to-fail",
        ),
    ],
)
async def test_a_device_that_cannot_be_prepared(driver, file, control, device, text):
    file.write_text(json.dumps(control))
    async with aclosing(driver.devices()) as stream:
        await anext(stream)
    with pytest.raises(DriverError, match=text):
        driver.prepare(CLAIM, allocated(device))
