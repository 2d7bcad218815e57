"""
Publishes NVIDIA GPUs, either whole, shared in time slices, or as MIG instances.

NVML lists the devices and reports their failures. The names of attributes, parameters and taints
are those of NVIDIA's DRA driver, so that existing claims match. Do not run both on the same node.

Containers get CDI devices from the file that ``nvidia-ctk cdi generate`` writes, by UUID: the
libraries, links and device nodes of a GPU depend on the version of its driver, and NVIDIA's toolkit
knows them all. A UUID always means the same hardware, unlike the number in /dev/nvidia0.

The driver does not create MIG instances, because the toolkit's file would not contain them. It
needs NVML (libnvidia-ml.so.1) and the GPUs' device nodes.
"""

import asyncio
import re
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pynvml as nvml
from pydantic import PositiveFloat, PositiveInt

from drakit import (
    AllocatedDevice,
    Capacity,
    CapacityRange,
    ClaimReference,
    CounterSet,
    Device,
    DeviceParameters,
    Driver,
    DriverConfig,
    DriverError,
    Edits,
    Health,
    Inventory,
    Node,
    ParameterVersion,
    RejectedDevice,
    Taint,
    Topology,
    Version,
)

BRANDS = (
    *("Unknown", "Quadro", "Tesla", "NVS", "Grid", "GeForce", "Titan", "NvidiaVApps", "NvidiaVPC"),
    *("NvidiaVCS", "NvidiaVWS", "NvidiaCloudGaming", "QuadroRTX", "NvidiaRTX", "Nvidia"),
    *("GeForceRTX", "TitanRTX"),
)
ARCHITECTURES = (
    *("Unknown", "Unknown", "Kepler", "Maxwell", "Pascal", "Volta", "Turing", "Ampere"),
    *("Ada Lovelace", "Hopper", "Blackwell"),
)
"""The names of architectures and brands, in the order of NVML's numbers."""

INTERVALS = ("Default", "Short", "Medium", "Long")
"""The lengths of a time slice, in the order of nvidia-smi's numbers."""

WHOLE_GPU = 0xFFFFFFFF
"""The GPU instance in an event that affects the whole GPU."""


class GpusConfig(DriverConfig):
    time_slices: PositiveInt = 1
    """The number of claims that can share a GPU. The claims take turns. Their memory is not
    isolated: the scheduler only tracks it."""

    ignored_xids: frozenset[int] = frozenset({13, 31, 43, 45, 68, 109})
    """Errors (XIDs) that leave a GPU healthy, by default those of applications."""

    poll_seconds: PositiveFloat = 5
    """Maximum time to detect a change other than an error (XID)."""

    sysfs: Path = Path("/sys")


class TimeSlicing(DeviceParameters):
    interval: Literal["Default", "Short", "Medium", "Long"] = "Default"


class Sharing(DeviceParameters):
    strategy: Literal["TimeSlicing"]
    time_slicing_config: TimeSlicing = TimeSlicing()


class GpuParameters(DeviceParameters):
    sharing: Sharing | None = None

    @property
    def interval(self) -> str:
        """The length of the time slices."""
        return self.sharing.time_slicing_config.interval if self.sharing else "Default"


class Gpus(Driver[GpusConfig, GpuParameters]):
    name = "gpu.nvidia.com"
    reports_health = True
    parameter_versions = (
        ParameterVersion("resource.nvidia.com/v1beta1", "GpuConfig"),
        ParameterVersion("resource.nvidia.com/v1beta1", "MigDeviceConfig"),
    )

    def __init__(self, config: GpusConfig, node: Node) -> None:
        super().__init__(config, node)
        # NVML calls block, some of them for seconds if a GPU is broken, and no call may be running
        # when NVML is shut down. Therefore, a single thread makes all calls, one after the other.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nvml")
        self._stopping = False
        self._read: dict[int, Inventory] = {}
        self._lost: Collection[str] = ()
        self._xids: dict[tuple[str, int], int] = {}

    def close(self) -> None:
        self._thread.shutdown()

    async def devices(self) -> AsyncIterator[Inventory]:
        call = partial(asyncio.get_running_loop().run_in_executor, self._thread)
        try:
            await call(self._start)
            while True:
                yield await call(self._list)
                await call(self._wait)
        except nvml.NVMLError as error:
            raise DriverError(
                f"NVML fails: {error}; if the node's NVIDIA driver works (nvidia-smi), restart "
                "this driver's pod, so that it gets the current library"
            ) from error
        finally:
            self._stopping = True
            self._thread.submit(self._stop)

    # ------------------------------------------------------------ called in the NVML thread

    def _start(self) -> None:
        self._stopping, self._events = False, None
        nvml.nvmlInit()
        self._read.clear()  # NVML can number the GPUs differently after each start
        self._watch()

    def _stop(self) -> None:
        with suppress(nvml.NVMLError):  # a lost GPU must not prevent the shutdown
            if self._events:
                nvml.nvmlEventSetFree(self._events)
        with suppress(nvml.NVMLError):  # NVML may never have started
            nvml.nvmlShutdown()

    def _watch(self) -> None:
        """Subscribe to the critical errors of all GPUs."""
        self._events = nvml.nvmlEventSetCreate()
        for index in range(nvml.nvmlDeviceGetCount()):
            # An old GPU does not have events, and _list handles a broken one.
            with suppress(nvml.NVMLError):
                gpu = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, self._events)

    def _wait(self) -> None:
        """Wait until a device has failed, or until it is time to poll."""
        end = time.monotonic() + self.config.poll_seconds
        while (left := end - time.monotonic()) > 0 and not self._stopping:
            left = min(left, 1)
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, int(left * 1000) + 1)
            except nvml.NVMLError_Timeout:
                continue
            except nvml.NVMLError_GpuIsLost:
                # While the set contains a lost GPU, NVML does not report errors of the others.
                nvml.nvmlEventSetFree(self._events)
                self._watch()
                time.sleep(left)
                return
            if event.eventData in self.config.ignored_xids:
                continue
            with suppress(nvml.NVMLError):  # the GPU is lost, which _list reports
                uuid = nvml.nvmlDeviceGetUUID(event.device)
                self._xids[uuid, event.gpuInstanceId] = event.eventData
            return

    def _list(self) -> Inventory:
        """Read all GPUs. A GPU that cannot be read does not affect the others."""
        found: list[Inventory] = []
        lost: list[str] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                gpu = self._read[index] = self._read_gpu(index)
            except nvml.NVMLError as error:
                problem = f"the GPU cannot be read: {error}; reset it, or reboot the node"
                gpu = _unreadable(self._read.get(index), f"GPU {index}", problem)
                lost += [device.name for device in gpu.devices]
            found.append(gpu)
        self._lost = lost
        devices = [device for gpu in found for device in gpu.devices]
        return Inventory(
            devices=devices,
            counter_sets=[counters for gpu in found for counters in gpu.counter_sets],
            # In a cluster without counters, don't publish a device that consists of other devices.
            fallback=[
                replace(d, consumes={}) for d in devices if d.attributes["type"] != "mig-gpu"
            ],
            rejected=[device for gpu in found for device in gpu.rejected],
        )

    def _read_gpu(self, index: int) -> Inventory:
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid: str = nvml.nvmlDeviceGetUUID(gpu)
        bus_id = nvml.nvmlDeviceGetPciInfo(gpu).busId[4:].lower()  # sysfs has four digits fewer
        mig = _supported(nvml.nvmlDeviceGetMigMode, gpu)[0] == nvml.NVML_DEVICE_MIG_ENABLE
        slices = 1 if mig else self.config.time_slices
        device = Device(
            name=uuid.lower(),
            attributes={"type": "gpu", "uuid": uuid, "pcieBusID": bus_id, **_attributes(gpu)},
            capacity=_capacity(nvml.nvmlDeviceGetMemoryInfo(gpu).total, slices),
            topology=_topology(self.config.sysfs / "bus/pci/devices" / bus_id),
            edits=_edits(uuid),
            allow_multiple_allocations=slices > 1,
        )
        if _supported(nvml.nvmlDeviceGetRemappedRows, gpu)[3]:
            problem = f"{uuid} has no spare memory rows for those that failed; replace the GPU"
            device = replace(device, health=Health.unhealthy(problem))
        if mig:
            return self._partitions(gpu, device)
        return Inventory(devices=[self._judged(device, uuid, WHOLE_GPU)])

    def _partitions(self, gpu: Any, whole: Device) -> Inventory:
        """Return the MIG instances of a GPU, and the GPU as a device that contains all of them. Its
        type is not ``gpu``, because a program can use only one instance at a time."""
        uuid = str(whole.attributes["uuid"])
        devices: list[Device] = []
        rejected: list[RejectedDevice] = []
        ids: list[int] = []
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            try:
                mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
            except (nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument):
                continue
            size = nvml.nvmlDeviceGetAttributes_v2(mig)
            if size.computeInstanceSliceCount != size.gpuInstanceSliceCount:
                # Such instances share memory, so counters would have to count parts of them.
                problem = "it is a part of a GPU instance; create instances with nvidia-smi mig -C"
                rejected.append(_rejected(nvml.nvmlDeviceGetUUID(mig), problem))
                continue
            ids.append(nvml.nvmlDeviceGetGpuInstanceId(mig))
            handle = nvml.nvmlDeviceGetGpuInstanceById(gpu, ids[-1])
            device = _instance(mig, size, nvml.nvmlGpuInstanceGetInfo(handle).placement, whole)
            devices.append(self._judged(device, uuid, WHOLE_GPU, ids[-1]))
        if not devices:
            problem = "MIG mode is on, but there are no instances; create some, or turn it off"
            return Inventory(devices=(), rejected=[*rejected, _rejected(uuid, problem)])
        counters = {name: "1" for device in devices for name in device.consumes[whole.name]}
        whole = replace(
            whole,
            attributes={**whole.attributes, "type": "mig-gpu"},
            consumes={whole.name: counters},
            edits=Edits(cdi_devices=tuple(name for d in devices for name in d.edits.cdi_devices)),
        )
        return Inventory(
            devices=[self._judged(whole, uuid, WHOLE_GPU, *ids), *devices],
            counter_sets=[CounterSet(name=whole.name, counters=counters)],
            rejected=rejected,
        )

    def _judged(self, device: Device, uuid: str, *instances: int) -> Device:
        """Return a device with its health. It is unhealthy if one of these instances had an error,
        until this driver restarts, because NVML does not report that a GPU has recovered."""
        for xid in [self._xids[uuid, i] for i in instances if (uuid, i) in self._xids]:
            problem = f"{uuid} reported XID {xid}; reset the GPU, then restart this driver's pod"
            taint = Taint(key="gpu.nvidia.com/xid", value=f"{xid}", effect="NoSchedule")
            return replace(device, health=Health.unhealthy(problem), taints=(taint,))
        return device if device.health else replace(device, health=Health.healthy())

    async def prepare(self, claim: ClaimReference, device: AllocatedDevice[GpuParameters]) -> Edits:
        if device.edits is None:
            raise DriverError(f"{device.name} is no longer on the node; delete the pod")
        interval = device.parameters.interval
        if interval != "Default":
            uuid = _own_gpu(device)
            if uuid is None:
                problem = f"the claim is not the only one that uses the GPU of {device.name}"
                raise DriverError(f"{problem}; remove the interval, or claim a whole GPU")
            await self._set_interval(uuid, interval)
        return device.edits

    async def unprepare(
        self, claim: ClaimReference, device: AllocatedDevice[GpuParameters | None]
    ) -> None:
        uuid = _own_gpu(device)
        if uuid is None or device.name in self._lost:  # resetting the GPU also resets the interval
            return
        if device.parameters is None or device.parameters.interval != "Default":
            await self._set_interval(uuid, "Default")

    async def _set_interval(self, uuid: str, interval: str) -> None:
        """Set the length of a GPU's time slices. NVML does not have a function for this."""
        number = str(INTERVALS.index(interval))
        command = ["nvidia-smi", "compute-policy", "-i", uuid, "--set-timeslice", number]
        run = partial(subprocess.run, capture_output=True, text=True, timeout=30, check=False)
        done = await asyncio.to_thread(run, command)
        if done.returncode:
            reason = (done.stderr or done.stdout).strip()[:200]
            raise DriverError(f"nvidia-smi cannot set the time slices of {uuid}: {reason}")


def _own_gpu(device: AllocatedDevice[Any]) -> str | None:
    """Return the UUID of a GPU whose time slices the claim can set, as its only user."""
    uuid = device.edits.cdi_devices[0].partition("=")[2] if device.edits else ""
    shared = device.share_id is not None or device.admin_access
    return uuid if uuid.startswith("GPU-") and not shared else None


def _instance(mig: Any, size: Any, placement: Any, whole: Device) -> Device:
    """Return a MIG instance, which consumes memory slices of its GPU."""
    uuid: str = nvml.nvmlDeviceGetUUID(mig)
    *_, profile = nvml.nvmlDeviceGetName(mig).split(" MIG ")
    slices = range(placement.start, placement.start + placement.size)
    identity = {"type": "mig", "uuid": uuid, "parentUUID": whole.attributes["uuid"]}
    return replace(
        whole,
        name=uuid.lower(),
        attributes={**whole.attributes, **identity, "profile": profile},
        capacity={
            "memory": f"{size.memorySizeMB}Mi",
            "multiprocessors": f"{size.multiprocessorCount}",
            "copyEngines": f"{size.sharedCopyEngineCount}",
            "decoders": f"{size.sharedDecoderCount}",
            "encoders": f"{size.sharedEncoderCount}",
            "jpegEngines": f"{size.sharedJpegCount}",
            "ofaEngines": f"{size.sharedOfaCount}",
        },
        consumes={whole.name: {f"memory-slice-{n}": "1" for n in slices}},
        edits=_edits(uuid),
    )


def _unreadable(last: Inventory | None, name: str, problem: str) -> Inventory:
    """Return the devices of a lost GPU, as they were last read."""
    if last is None:
        return Inventory(devices=(), rejected=[_rejected(name, problem, "Unreadable")])
    taint = Taint(key="gpu.nvidia.com/gpu-lost", effect="NoSchedule")
    health = Health.unhealthy(problem, evict_pods=True)
    lost = [replace(device, health=health, taints=(taint,)) for device in last.devices]
    return replace(last, devices=lost)


def _rejected(
    name: str, problem: str, reason: Literal["NotSupported", "Unreadable"] = "NotSupported"
) -> RejectedDevice:
    return RejectedDevice(device=name, reason=reason, message=problem)


def _capacity(memory: int, slices: int) -> Mapping[str, str | Capacity]:
    if slices == 1:
        return {"memory": f"{memory}"}
    one = CapacityRange(min="1", step="1")
    return {
        "memory": Capacity(value=f"{memory}", default=f"{memory // slices}"),
        "timeSlices": Capacity(value=f"{slices}", default="1", valid_range=one),
    }


def _attributes(gpu: Any) -> Mapping[str, str | Version]:
    """Return the common attributes of a GPU and its instances."""
    brand, architecture = nvml.nvmlDeviceGetBrand(gpu), nvml.nvmlDeviceGetArchitecture(gpu)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(gpu)
    cuda = nvml.nvmlSystemGetCudaDriverVersion()
    driver = [int(part) for part in nvml.nvmlSystemGetDriverVersion().split(".")]  # 535.104.05
    return {
        "productName": nvml.nvmlDeviceGetName(gpu),
        "brand": dict(enumerate(BRANDS)).get(brand, "Unknown"),
        "architecture": dict(enumerate(ARCHITECTURES)).get(architecture, "Unknown"),
        "cudaComputeCapability": Version(f"{major}.{minor}.0"),
        "cudaDriverVersion": Version(f"{cuda // 1000}.{cuda % 1000 // 10}.0"),
        "driverVersion": Version(".".join(map(str, [*driver, 0, 0][:3]))),
    }


def _supported(function: Callable[[Any], Sequence[int]], gpu: Any) -> Sequence[int]:
    """Return NVML's numbers for a GPU, or zeros if the GPU or its driver is too old."""
    try:
        return function(gpu)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return (0, 0, 0, 0)


def _topology(device: Path) -> Topology:
    """Read the location of a PCI device from sysfs. A virtual machine may not have it."""
    root = next((part for part in device.resolve().parts if re.match("pci.+:", part)), None)
    numa = None
    with suppress(OSError, ValueError):
        numa = int((device / "numa_node").read_text())
    return Topology(numa_node=None if numa == -1 else numa, pcie_root=root, pci_bus_id=device.name)


def _edits(uuid: str) -> Edits:
    return Edits(cdi_devices=(f"nvidia.com/gpu={uuid}",))
