"""
NVIDIA's Python binding of NVML without NVIDIA's hardware: the functions, constants and errors that
examples/nvidia uses, on a machine that tests change.

The module has its own folder, so that it can be imported as ``pynvml`` where the real binding is
not installed.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

NVML_DEVICE_MIG_DISABLE, NVML_DEVICE_MIG_ENABLE = 0, 1
NVML_BRAND_TESLA, NVML_BRAND_NVIDIA, NVML_BRAND_TITAN_RTX = 2, 14, 16
NVML_DEVICE_ARCH_AMPERE, NVML_DEVICE_ARCH_ADA, NVML_DEVICE_ARCH_BLACKWELL = 7, 8, 10
NVML_DEVICE_ARCH_UNKNOWN = 0xFFFFFFFF
nvmlEventTypeSingleBitEccError = 1
nvmlEventTypeXidCriticalError = 8
_NO_INSTANCE = 0xFFFFFFFF


class NVMLError(Exception):
    """The base of all errors; the text is the binding's."""

    text: ClassVar[str] = "Unknown Error"

    def __str__(self) -> str:
        return self.text


class NVMLError_Uninitialized(NVMLError):
    text = "Uninitialized"


class NVMLError_InvalidArgument(NVMLError):
    text = "Invalid Argument"


class NVMLError_NotSupported(NVMLError):
    text = "Not Supported"


class NVMLError_NotFound(NVMLError):
    text = "Not Found"


class NVMLError_DriverNotLoaded(NVMLError):
    text = "Driver Not Loaded"


class NVMLError_Timeout(NVMLError):
    text = "Timeout"


class NVMLError_LibraryNotFound(NVMLError):
    text = "NVML Shared Library Not Found"


class NVMLError_FunctionNotFound(NVMLError):
    text = "Function Not Found"


class NVMLError_GpuIsLost(NVMLError):
    text = "GPU is lost"


class NVMLError_LibRmVersionMismatch(NVMLError):
    text = "RM has detected an NVML/RM version mismatch."


class Struct:
    """A structure that NVML fills in."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__ |= fields


@dataclass
class Mig:
    """A compute instance in a GPU instance."""

    uuid: str
    profile: str
    instance: int
    start: int
    size: int
    slices: int
    memory_mb: int
    compute_slices: int | None = None
    """The slices of the compute instance, if it is only a part of the GPU instance."""


@dataclass
class Gpu:
    uuid: str
    name: str
    bus_id: str
    memory: int
    brand: int = NVML_BRAND_NVIDIA
    architecture: int = NVML_DEVICE_ARCH_AMPERE
    capability: tuple[int, int] = (8, 0)
    mig_capable: bool = True
    mig: list[Mig] | None = None
    """None if MIG mode is off. The index in the list is not NVML's: index 0 has no instance."""
    remap_failed: bool | None = False
    """None if the GPU does not remap rows."""
    has_events: bool = True
    lost: bool = False


def two_gpus() -> list[Gpu]:
    """A GPU for whole claims, and one of another model with MIG instances."""
    return [
        Gpu(
            uuid="GPU-11111111-aaaa-4bbb-8ccc-000000000001",
            name="NVIDIA L4",
            bus_id="00000000:3B:00.0",
            memory=24_152_899_584,
            architecture=NVML_DEVICE_ARCH_ADA,
            capability=(8, 9),
            mig_capable=False,
        ),
        Gpu(
            uuid="GPU-22222222-aaaa-4bbb-8ccc-000000000002",
            name="NVIDIA A100-SXM4-40GB",
            bus_id="00000000:AF:00.0",
            memory=42_949_672_960,
            mig=[
                Mig("MIG-33333333-aaaa-5bbb-8ccc-000000000001", "3g.20gb", 1, 4, 4, 3, 19968),
                Mig("MIG-33333333-aaaa-5bbb-8ccc-000000000002", "1g.5gb", 7, 0, 1, 1, 4864),
                Mig("MIG-33333333-aaaa-5bbb-8ccc-000000000003", "1g.5gb", 8, 1, 1, 1, 4864),
            ],
        ),
    ]


@dataclass
class Machine:
    """The machine that NVML finds."""

    gpus: list[Gpu] = field(default_factory=two_gpus)
    event_error: type[NVMLError] | None = None
    """Raised by `nvmlEventSetCreate`."""
    driver_version: str = "535.104.05"
    cuda_version: int = 12020
    init_error: type[NVMLError] | None = None
    starts: int = 0
    """`nvmlInit` without `nvmlShutdown`."""
    event_sets: list[EventSet] = field(default_factory=list["EventSet"])

    def xid(self, gpu: Gpu, xid: int, *, instance: int = _NO_INSTANCE) -> None:
        """Report a critical error to those that wait for events of this GPU."""
        data = Struct(
            device=gpu,
            eventType=nvmlEventTypeXidCriticalError,
            eventData=xid,
            gpuInstanceId=instance,
            computeInstanceId=_NO_INSTANCE if instance == _NO_INSTANCE else 0,
        )
        for events in self.event_sets:
            if gpu in events.gpus:
                events.queue.put(data)


class EventSet:
    def __init__(self) -> None:
        self.gpus: list[Gpu] = []
        self.queue: queue.Queue[Struct] = queue.Queue()
        self.waiting = False


MACHINE = Machine()

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _started(function: _Function) -> _Function:
    """Raise as NVML does before `nvmlInit`, and for a handle of a lost GPU."""

    def checked(*arguments: Any) -> Any:
        if not MACHINE.starts:
            raise NVMLError_Uninitialized
        for argument in arguments:
            if isinstance(argument, Gpu) and argument.lost:
                raise NVMLError_GpuIsLost
        return function(*arguments)

    return checked  # type: ignore[return-value]


def nvmlInit() -> None:
    if MACHINE.init_error:
        raise MACHINE.init_error
    MACHINE.starts += 1


@_started
def nvmlShutdown() -> None:
    assert not any(events.waiting for events in MACHINE.event_sets), "a thread is still in NVML"
    MACHINE.starts -= 1


@_started
def nvmlSystemGetDriverVersion() -> str:
    return MACHINE.driver_version


@_started
def nvmlSystemGetCudaDriverVersion() -> int:
    return MACHINE.cuda_version


@_started
def nvmlDeviceGetCount() -> int:
    return len(MACHINE.gpus)


@_started
def nvmlDeviceGetHandleByIndex(index: int) -> Gpu:
    gpu = MACHINE.gpus[index]
    if gpu.lost:
        raise NVMLError_GpuIsLost
    return gpu


@_started
def nvmlDeviceGetUUID(handle: Gpu | Mig) -> str:
    return handle.uuid


@_started
def nvmlDeviceGetName(handle: Gpu | Mig) -> str:
    if isinstance(handle, Gpu):
        return handle.name
    (gpu,) = [gpu for gpu in MACHINE.gpus if handle in (gpu.mig or ())]
    return f"{gpu.name} MIG {handle.profile}"


@_started
def nvmlDeviceGetBrand(handle: Gpu) -> int:
    return handle.brand


@_started
def nvmlDeviceGetArchitecture(handle: Gpu) -> int:
    return handle.architecture


@_started
def nvmlDeviceGetCudaComputeCapability(handle: Gpu) -> tuple[int, int]:
    return handle.capability


@_started
def nvmlDeviceGetMemoryInfo(handle: Gpu) -> Struct:
    return Struct(total=handle.memory, free=handle.memory, used=0)


@_started
def nvmlDeviceGetPciInfo(handle: Gpu) -> Struct:
    return Struct(busId=handle.bus_id)


@_started
def nvmlDeviceGetRemappedRows(handle: Gpu) -> tuple[int, int, int, int]:
    if handle.remap_failed is None:
        raise NVMLError_NotSupported
    return (0, 0, 0, int(handle.remap_failed))


@_started
def nvmlDeviceGetMigMode(handle: Gpu) -> list[int]:
    if not handle.mig_capable:
        raise NVMLError_NotSupported
    return [int(handle.mig is not None)] * 2


@_started
def nvmlDeviceGetMaxMigDeviceCount(handle: Gpu) -> int:
    return 7 if handle.mig_capable else 0


@_started
def nvmlDeviceGetMigDeviceHandleByIndex(handle: Gpu, index: int) -> Mig:
    instances = handle.mig or []
    if not 0 < index <= len(instances):  # NVML's numbers have gaps
        raise NVMLError_NotFound
    return instances[index - 1]


@_started
def nvmlDeviceGetAttributes_v2(handle: Mig) -> Struct:
    return Struct(
        multiprocessorCount=14 * handle.slices,
        sharedCopyEngineCount=handle.slices,
        sharedDecoderCount=handle.slices // 2,
        sharedEncoderCount=0,
        sharedJpegCount=0,
        sharedOfaCount=0,
        gpuInstanceSliceCount=handle.slices,
        computeInstanceSliceCount=handle.compute_slices or handle.slices,
        memorySizeMB=handle.memory_mb,
    )


@_started
def nvmlDeviceGetGpuInstanceId(handle: Mig) -> int:
    return handle.instance


@_started
def nvmlDeviceGetGpuInstanceById(handle: Gpu, instance: int) -> Mig:
    for mig in handle.mig or ():
        if mig.instance == instance:
            return mig
    raise NVMLError_NotFound


@_started
def nvmlGpuInstanceGetInfo(handle: Mig) -> Struct:
    return Struct(id=handle.instance, placement=Struct(start=handle.start, size=handle.size))


@_started
def nvmlEventSetCreate() -> EventSet:
    if MACHINE.event_error:
        raise MACHINE.event_error
    events = EventSet()
    MACHINE.event_sets.append(events)
    return events


@_started
def nvmlDeviceRegisterEvents(handle: Gpu, event_types: int, events: EventSet) -> None:
    if not handle.has_events:
        raise NVMLError_NotSupported
    assert event_types == nvmlEventTypeXidCriticalError
    events.gpus.append(handle)


@_started
def nvmlEventSetWait_v2(events: EventSet, timeout_ms: int) -> Struct:
    events.waiting = True
    end = time.monotonic() + timeout_ms / 1000
    try:
        while (left := end - time.monotonic()) > 0:
            if any(gpu.lost for gpu in events.gpus):
                raise NVMLError_GpuIsLost
            try:
                return events.queue.get(timeout=min(left, 0.01))
            except queue.Empty:
                continue
        raise NVMLError_Timeout
    finally:
        events.waiting = False


@_started
def nvmlEventSetFree(events: EventSet) -> None:
    if events not in MACHINE.event_sets:
        raise NVMLError_InvalidArgument
    MACHINE.event_sets.remove(events)
