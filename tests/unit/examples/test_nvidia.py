"""examples/nvidia: the driver over a machine with two GPUs of different models, one in MIG mode."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import stat
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from drakit import (
    AllocatedDevice,
    Capacity,
    ClaimReference,
    Device,
    DriverError,
    Health,
    Inventory,
    Taint,
    Topology,
    Version,
)
from drakit_driver.runtime.parameters import with_parameters
from drakit_formats.resource.inventory import check_inventory
from tests.fakes.node import StaticNode
from tests.unit.docs.listings import ROOT, module

SOURCE = ROOT / "examples" / "nvidia" / "gpus.py"
FAKE = ROOT / "tests" / "fakes" / "nvml" / "pynvml.py"
CLAIM = ClaimReference(namespace="lab", name="train", uid="uid-1")
L4 = "gpu-11111111-aaaa-4bbb-8ccc-000000000001"
A100 = "gpu-22222222-aaaa-4bbb-8ccc-000000000002"
HALF, FIRST, SECOND = (f"mig-33333333-aaaa-5bbb-8ccc-00000000000{n}" for n in (1, 2, 3))


def from_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    made = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The binding, over a machine of its own."""
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    made = from_file("pynvml", FAKE)
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


@pytest.fixture
def gpus(nvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module("gpus", SOURCE.read_text(), monkeypatch)


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two GPUs behind different roots; the kernel does not know the NUMA node of the second."""
    links = tmp_path / "sys" / "bus" / "pci" / "devices"
    links.mkdir(parents=True)
    for root, address, numa in (
        ("pci0000:3a", "0000:3b:00.0", "1\n"),
        ("pci0000:ae", "0000:af:00.0", "-1\n"),
    ):
        device = tmp_path / "sys" / "devices" / root / "0000:3a:00.0" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(numa)
        (links / address).symlink_to(device)
    return tmp_path / "sys"


@pytest.fixture
def make(gpus: ModuleType, sysfs: Path) -> Iterator[Any]:
    made: list[Any] = []

    def driver(**values: Any) -> Any:
        config = gpus.GpusConfig(sysfs=sysfs, **values)
        made.append(gpus.Gpus(config, StaticNode(name="node-1")))
        return made[-1]

    yield driver
    for each in made:
        each.close()


@asynccontextmanager
async def listing(driver: Any) -> AsyncIterator[Any]:
    """Give a function that returns the next inventory."""
    stream = driver.devices()

    async def following() -> Inventory:
        inventory = await asyncio.wait_for(anext(stream), 5)
        assert not check_inventory(inventory).rejected
        return inventory

    try:
        yield following
    finally:
        await stream.aclose()


async def first(driver: Any) -> Inventory:
    async with listing(driver) as following:
        return await following()


def named(inventory: Inventory) -> dict[str, Device]:
    return {device.name: device for device in inventory.devices}


def unhealthy(inventory: Inventory) -> set[str]:
    return {name for name, device in named(inventory).items() if device.health != Health.healthy()}


# ---------------------------------------------------------------- devices


async def test_a_whole_gpu_has_the_attributes_of_nvidias_dra_driver(make):
    gpu = named(await first(make()))[L4]
    assert gpu.attributes == {
        "type": "gpu",
        "uuid": "GPU-11111111-aaaa-4bbb-8ccc-000000000001",
        "productName": "NVIDIA L4",
        "brand": "Nvidia",
        "architecture": "Ada Lovelace",
        "cudaComputeCapability": Version("8.9.0"),
        "cudaDriverVersion": Version("12.2.0"),
        "driverVersion": Version("535.104.5"),
        "pcieBusID": "0000:3b:00.0",
    }
    assert gpu.capacity == {"memory": "24152899584"}
    assert gpu.topology == Topology(numa_node=1, pcie_root="pci0000:3a", pci_bus_id="0000:3b:00.0")
    assert gpu.edits.cdi_devices == ("nvidia.com/gpu=GPU-11111111-aaaa-4bbb-8ccc-000000000001",)
    assert not gpu.allow_multiple_allocations
    assert not gpu.consumes


async def test_instances_share_a_gpu_with_the_device_that_has_all_of_them(make):
    inventory = await first(make())
    devices = named(inventory)
    assert list(devices) == [L4, A100, HALF, FIRST, SECOND]
    half, whole = devices[HALF], devices[A100]
    assert half.attributes == {
        **whole.attributes,
        "type": "mig",
        "uuid": "MIG-33333333-aaaa-5bbb-8ccc-000000000001",
        "parentUUID": "GPU-22222222-aaaa-4bbb-8ccc-000000000002",
        "profile": "3g.20gb",
    }
    assert half.capacity["memory"] == "19968Mi"
    assert half.capacity["multiprocessors"] == "42"
    assert half.topology == Topology(pcie_root="pci0000:ae", pci_bus_id="0000:af:00.0")
    assert half.edits.cdi_devices == ("nvidia.com/gpu=MIG-33333333-aaaa-5bbb-8ccc-000000000001",)

    used = {name: set(device.consumes.get(A100, ())) for name, device in devices.items()}
    assert used[HALF] == {f"memory-slice-{n}" for n in (4, 5, 6, 7)}
    assert (used[FIRST], used[SECOND]) == ({"memory-slice-0"}, {"memory-slice-1"})
    (counters,) = inventory.counter_sets
    assert used[A100] == set(counters.counters) == used[HALF] | used[FIRST] | used[SECOND]
    assert set(counters.counters.values()) == {"1"}

    # Claims for GPUs do not match it, and it has all instances.
    assert whole.attributes["type"] == "mig-gpu"
    assert whole.edits.cdi_devices == tuple(
        name for each in (HALF, FIRST, SECOND) for name in devices[each].edits.cdi_devices
    )
    fallback = {device.name: device for device in inventory.fallback or ()}
    assert list(fallback) == [L4, HALF, FIRST, SECOND]
    assert not any(device.consumes for device in fallback.values())


async def test_mig_mode_without_whole_instances_is_reported(make, nvml):
    parts = nvml.MACHINE.gpus[1].mig
    parts[0].compute_slices = 1
    inventory = await first(make())
    assert list(named(inventory)) == [L4, A100, FIRST, SECOND]
    (rejected,) = inventory.rejected
    assert rejected.device == "MIG-33333333-aaaa-5bbb-8ccc-000000000001"
    assert "a part of a GPU instance" in rejected.message

    parts.clear()
    inventory = await first(make())
    assert list(named(inventory)) == [L4]
    (rejected,) = inventory.rejected
    assert rejected.device == "GPU-22222222-aaaa-4bbb-8ccc-000000000002"
    assert "there are no instances" in rejected.message


async def test_time_slices_are_shares_of_whole_gpus(make):
    devices = named(await first(make(time_slices=4)))
    gpu = devices[L4]
    assert gpu.allow_multiple_allocations
    slices, memory = gpu.capacity["timeSlices"], gpu.capacity["memory"]
    assert isinstance(slices, Capacity)
    assert isinstance(memory, Capacity)
    assert (slices.value, slices.default) == ("4", "1")
    # Four claims that request no memory fit.
    assert (memory.value, memory.default) == ("24152899584", str(24152899584 // 4))
    others = [devices[name] for name in (A100, HALF, FIRST, SECOND)]
    assert not any(device.allow_multiple_allocations for device in others)
    assert not any("timeSlices" in device.capacity for device in others)


async def test_unknown_models_and_machines_without_topology_are_listed(make, nvml, sysfs):
    nvml.MACHINE.gpus[0].brand = 99
    nvml.MACHINE.gpus[0].architecture = nvml.NVML_DEVICE_ARCH_UNKNOWN
    nvml.MACHINE.gpus[0].bus_id = "00000000:99:00.0"
    nvml.MACHINE.gpus[0].remap_failed = None
    nvml.MACHINE.gpus[0].has_events = False
    gpu = named(await first(make()))[L4]
    assert (gpu.attributes["brand"], gpu.attributes["architecture"]) == ("Unknown", "Unknown")
    assert gpu.topology == Topology(pci_bus_id="0000:99:00.0")
    assert gpu.health == Health.healthy()


# ---------------------------------------------------------------- health


async def test_an_error_of_a_gpu_taints_it_at_once(make, nvml):
    async with listing(make(poll_seconds=60)) as following:
        assert not unhealthy(await following())
        nvml.MACHINE.xid(nvml.MACHINE.gpus[0], 31)  # of an application
        nvml.MACHINE.xid(nvml.MACHINE.gpus[0], 79)
        inventory = await following()
        assert unhealthy(inventory) == {L4}
        gpu = named(inventory)[L4]
        assert gpu.taints == (Taint(key="gpu.nvidia.com/xid", value="79", effect="NoSchedule"),)
        assert gpu.health
        assert "XID 79; reset the GPU" in gpu.health.message


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 68, 109])
async def test_errors_of_applications_are_ignored(make, nvml, xid):
    async with listing(make(poll_seconds=0.2)) as following:
        await following()
        nvml.MACHINE.xid(nvml.MACHINE.gpus[0], xid)
        assert not unhealthy(await following())


async def test_an_error_of_an_instance_does_not_affect_the_others(make, nvml):
    driver = make(poll_seconds=60)
    async with listing(driver) as following:
        await following()
        nvml.MACHINE.xid(nvml.MACHINE.gpus[1], 63, instance=7)
        assert unhealthy(await following()) == {A100, FIRST}
        nvml.MACHINE.xid(nvml.MACHINE.gpus[1], 64)
        assert unhealthy(await following()) == {A100, HALF, FIRST, SECOND}
    # A restart of the stream is not a restart of the driver.
    assert unhealthy(await first(driver)) == {A100, HALF, FIRST, SECOND}
    assert not unhealthy(await first(make()))


async def test_a_lost_gpu_stays_listed_and_the_other_one_is_still_watched(make, nvml):
    async with listing(make(poll_seconds=0.3)) as following:
        before = named(await following())
        nvml.MACHINE.gpus[1].lost = True
        inventory = await following()
        assert unhealthy(inventory) == {A100, HALF, FIRST, SECOND}
        half = named(inventory)[HALF]
        assert half.attributes == before[HALF].attributes
        assert half.taints == (Taint(key="gpu.nvidia.com/gpu-lost", effect="NoSchedule"),)
        assert half.health
        assert half.health.evict_pods
        assert "GPU is lost; reset it" in half.health.message
        assert len(inventory.counter_sets) == 1

        await following()
        nvml.MACHINE.xid(nvml.MACHINE.gpus[0], 48)
        while unhealthy(inventory := await following()) == {A100, HALF, FIRST, SECOND}:
            pass
        assert unhealthy(inventory) == {L4, A100, HALF, FIRST, SECOND}
        assert len(named(inventory)[HALF].taints) == 1

        nvml.MACHINE.gpus[1].lost = False
        assert unhealthy(await following()) == {L4}


async def test_a_gpu_that_was_never_read_is_reported(make, nvml):
    nvml.MACHINE.gpus[0].lost = True
    inventory = await first(make(poll_seconds=0.1))
    assert list(named(inventory)) == [A100, HALF, FIRST, SECOND]
    (rejected,) = inventory.rejected
    assert (rejected.device, rejected.reason) == ("GPU 0", "Unreadable")


async def test_a_gpu_without_spare_rows_is_unhealthy_with_all_its_instances(make, nvml):
    nvml.MACHINE.gpus[1].remap_failed = True
    inventory = await first(make())
    assert unhealthy(inventory) == {A100, HALF, FIRST, SECOND}
    health = named(inventory)[HALF].health
    assert health
    assert "no spare memory rows" in health.message


@pytest.mark.parametrize("error", ["LibraryNotFound", "DriverNotLoaded", "LibRmVersionMismatch"])
async def test_without_nvml_the_error_has_the_remedy(make, nvml, error):
    driver = make()
    kind = getattr(nvml, f"NVMLError_{error}")
    nvml.MACHINE.init_error = kind
    with pytest.raises(DriverError, match="restart this driver's pod") as raised:
        await first(driver)
    assert str(kind()) in str(raised.value)
    nvml.MACHINE.init_error = None
    assert named(await first(driver))


async def test_what_has_begun_is_stopped_if_events_fail(make, nvml):
    driver = make()
    assert named(await first(driver))
    nvml.MACHINE.event_error = nvml.NVMLError_Uninitialized
    with pytest.raises(DriverError, match="NVML fails: Uninitialized"):
        await first(driver)
    await asyncio.to_thread(driver.close)
    assert nvml.MACHINE.starts == 0
    assert not nvml.MACHINE.event_sets


async def test_after_an_update_the_devices_have_the_new_version(make, nvml):
    driver = make()
    assert named(await first(driver))[L4].attributes["driverVersion"] == Version("535.104.5")
    nvml.MACHINE.driver_version, nvml.MACHINE.cuda_version = "580.82", 13000
    for device in (await first(driver)).devices:
        assert device.attributes["driverVersion"] == Version("580.82.0")
        assert device.attributes["cudaDriverVersion"] == Version("13.0.0")


async def test_a_stopped_driver_leaves_nvml(make, nvml):
    driver = make(poll_seconds=60)
    async with listing(driver) as following:
        await following()
        waiting = asyncio.ensure_future(following())
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await asyncio.to_thread(driver.close)
    assert nvml.MACHINE.starts == 0
    assert not nvml.MACHINE.event_sets


# ---------------------------------------------------------------- claims


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The calls of nvidia-smi, which fails if there is a file `broken`."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n'
        f"[ ! -e {tmp_path}/broken ] || {{ echo Insufficient Permissions >&2; exit 4; }}\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    calls = tmp_path / "calls"
    calls.touch()
    return calls


@pytest.fixture
def allocated(gpus):
    def made(device: Device, *, interval: str | None = None, **fields: Any) -> AllocatedDevice:
        sharing = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}}
        given = {} if interval is None else {"sharing": sharing}
        values = {
            "name": device.name,
            "pool": device.pool,
            "request": "gpu",
            "parameters": gpus.GpuParameters.model_validate(given),
            "edits": device.edits,
        }
        return AllocatedDevice(**(values | fields))

    return made


LONG = "compute-policy -i GPU-11111111-aaaa-4bbb-8ccc-000000000001 --set-timeslice 3\n"
DEFAULT = LONG.replace(" 3", " 0")


async def test_a_claim_sets_the_time_slices_of_its_gpu_and_undoes_it(make, smi, allocated):
    driver = make()
    gpu = named(await first(driver))[L4]
    plain, long = allocated(gpu), allocated(gpu, interval="Long")
    assert await driver.prepare(CLAIM, plain) == gpu.edits
    await driver.unprepare(CLAIM, plain)
    assert smi.read_text() == ""
    for _ in range(2):
        assert await driver.prepare(CLAIM, long) == gpu.edits
    for _ in range(2):
        await driver.unprepare(CLAIM, long)
    assert smi.read_text() == 2 * LONG + 2 * DEFAULT
    await driver.unprepare(CLAIM, replace(long, parameters=None))
    assert smi.read_text() == 2 * LONG + 3 * DEFAULT

    (smi.parent / "broken").touch()
    for call in (driver.prepare, driver.unprepare):
        with pytest.raises(DriverError, match=r"GPU-1111.*: Insufficient Permissions"):
            await call(CLAIM, long)


async def test_a_claim_for_a_part_of_a_gpu_cannot_change_its_time_slices(make, smi, allocated):
    driver = make(time_slices=4)
    devices = named(await first(driver))
    for device in (
        allocated(devices[L4], interval="Long", share_id="share-1"),
        allocated(devices[L4], interval="Long", admin_access=True),
        allocated(devices[HALF], interval="Long"),
        allocated(devices[A100], interval="Long"),
    ):
        with pytest.raises(DriverError, match="not the only one that uses the GPU"):
            await driver.prepare(CLAIM, device)
        await driver.unprepare(CLAIM, device)
        await driver.unprepare(CLAIM, replace(device, parameters=None))
        plain = replace(device, parameters=allocated(devices[L4]).parameters)
        assert await driver.prepare(CLAIM, plain) == device.edits
    assert smi.read_text() == ""


async def test_a_gpu_that_is_gone_or_lost_can_be_unprepared(make, nvml, smi, allocated):
    driver = make(poll_seconds=0.1)
    async with listing(driver) as following:
        gpu = named(await following())[L4]
        gone = allocated(gpu, interval="Long", edits=None)
        with pytest.raises(DriverError, match="no longer on the node"):
            await driver.prepare(CLAIM, gone)
        await driver.unprepare(CLAIM, gone)
        nvml.MACHINE.gpus[0].lost = True
        await following()
        await driver.unprepare(CLAIM, allocated(gpu, interval="Long"))
    assert smi.read_text() == ""


@pytest.mark.parametrize(
    "parameters",
    [
        pytest.param({"sharing": {"strategy": "MPS"}}, id="a-strategy-that-is-not-supported"),
        pytest.param({"sharing": {}}, id="no-strategy"),
        pytest.param({"color": "red"}, id="an-unknown-key"),
    ],
)
def test_parameters_that_are_refused(gpus, parameters):
    with pytest.raises(ValidationError):
        gpus.GpuParameters.model_validate(parameters)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="without-a-version"),
        pytest.param(
            {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"},
            id="of-nvidias-dra-driver",
        ),
    ],
)
def test_parameters_of_nvidias_dra_driver_are_accepted(gpus, given):
    sharing = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}
    device = AllocatedDevice(
        name=L4, pool="", request="gpu", configs=({**given, "sharing": sharing},)
    )
    read = with_parameters(
        device,
        gpus.GpuParameters,
        driver="gpu.nvidia.com",
        index=0,
        versions=gpus.Gpus.parameter_versions,
    )
    assert read.parameters.interval == "Long"


# ---------------------------------------------------------------- the check on a machine


def test_the_check_prints_what_it_saw_and_the_problems(gpus, nvml, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    check = from_file("check_gpus", SOURCE.with_name("check.py"))
    monkeypatch.delitem(sys.modules, "check_gpus")
    names = [gpu.uuid for gpu in nvml.MACHINE.gpus] + [m.uuid for m in nvml.MACHINE.gpus[1].mig]
    spec = {"kind": "nvidia.com/gpu", "devices": [{"name": name} for name in names]}
    (tmp_path / "nvidia.yaml").write_text(yaml.safe_dump(spec))
    monkeypatch.setattr(check, "CDI_FOLDERS", (tmp_path, tmp_path / "missing"))
    monkeypatch.setattr(check, "conformance", lambda _slices: [])
    monkeypatch.setattr(sys, "argv", ["check.py", "--time-slices", "4"])
    assert check.main() == 0
    printed = capsys.readouterr().out
    for line in (
        "  productName: NVIDIA L4\n",
        "  timeSlices: 4, 1 a share\n",
        "  health: healthy",
        "  CDI devices: nvidia.com/gpu=MIG-33333333-aaaa-5bbb-8ccc-000000000001\n",
        "summary: 1 of type gpu, 1 of type mig-gpu, 3 of type mig\nno problems\n",
    ):
        assert line in printed

    nvml.MACHINE.gpus[0].remap_failed = True
    (tmp_path / "nvidia.yaml").unlink()
    assert check.main() == 1
    printed = capsys.readouterr().out
    assert f"problem: {L4} is not healthy\n" in printed
    missing = "problem: no CDI file has nvidia.com/gpu=GPU-1111"
    assert missing in printed

    nvml.MACHINE.init_error = nvml.NVMLError_DriverNotLoaded
    assert check.main() == 1
    assert "NVML fails: Driver Not Loaded" in capsys.readouterr().out


# ---------------------------------------------------------------- the fake, the lines


def test_the_fake_has_the_names_and_numbers_of_the_binding(nvml):
    files = importlib.metadata.files("nvidia-ml-py") or ()
    (path,) = [file.locate() for file in files if file.name == "pynvml.py"]
    real = from_file("real_pynvml", Path(str(path)))
    try:
        for name, value in vars(nvml).items():
            if not name.startswith(("nvml", "NVML")):
                continue
            if isinstance(value, type):
                assert issubclass(getattr(real, name), real.NVMLError)
                if value is not nvml.NVMLError:
                    assert str(getattr(real, name)()) == value.text
            elif isinstance(value, int):
                assert getattr(real, name) == value
            else:
                assert callable(getattr(real, name))
        events = dict(real.c_nvmlEventData_t._fields_)
        assert {"device", "eventType", "eventData", "gpuInstanceId"} <= events.keys()
        assert {"total"} <= dict(real.c_nvmlMemory_t._fields_).keys()
        assert {"busId"} <= dict(real.nvmlPciInfo_t._fields_).keys()
        assert {"start", "size"} <= dict(real.c_nvmlGpuInstancePlacement_t._fields_).keys()
        sizes = nvml.MACHINE.gpus[1].mig[0]
        nvml.MACHINE.starts = 1
        fake_sizes = vars(nvml.nvmlDeviceGetAttributes_v2(sizes))
        assert fake_sizes.keys() == dict(real.c_nvmlDeviceAttributes._fields_).keys()
    finally:
        del sys.modules["real_pynvml"]


def test_the_tables_have_the_numbers_of_the_binding(gpus, nvml):
    assert gpus.BRANDS[nvml.NVML_BRAND_TESLA] == "Tesla"
    assert gpus.BRANDS[nvml.NVML_BRAND_NVIDIA] == "Nvidia"
    assert gpus.BRANDS[nvml.NVML_BRAND_TITAN_RTX] == "TitanRTX"
    assert gpus.ARCHITECTURES[nvml.NVML_DEVICE_ARCH_AMPERE] == "Ampere"
    assert gpus.ARCHITECTURES[nvml.NVML_DEVICE_ARCH_BLACKWELL] == "Blackwell"


def test_the_driver_has_at_most_400_lines():
    assert len(SOURCE.read_text().splitlines()) <= 400
