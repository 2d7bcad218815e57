"""
The configuration of the simulated devices. Administrators configure the kinds, numbers and names of
the devices. Users set opaque parameters in a claim or a DeviceClass. The driver only passes the
parameters to the container, but validates them in order to demonstrate the effects of a mistake.

Does not depend on claims or the node.
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from drakit import DeviceParameters, DriverConfig
from drakit.layout import driver_directory

DRIVER_NAME = "simulated.drakit.dev"

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_VERSION = r"^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)$"

# Leave room for the suffix: `-<number>-<size>g-<number>`.
Prefix = Annotated[str, Field(pattern=rf"^{_LABEL}$", max_length=40)]
Pool = Annotated[str, Field(pattern=rf"^({_LABEL})?$", max_length=63)]
Text = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[ -~]+$")]


def _check_absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(f"{path} must be an absolute path")
    return path


class GpuProfile(DriverConfig):
    """GPUs and their partitions, which share the resources of the GPU (DRAPartitionableDevices)."""

    count: int = Field(default=2, ge=0, le=1024)
    """Number of GPUs on each node."""

    prefix: Prefix = "gpu"
    """The prefix of the device names: ``gpu-0``, and ``gpu-0-2g-1`` for a partition of two compute
    slices."""

    pool: Pool = ""
    """The pool of the devices. If empty, the driver uses the pool that is named after the node."""

    model: Text = "Simulated G1"
    """The value of the attribute ``model``."""

    architecture: Text = "simulated"
    """The value of the attribute ``architecture``."""

    driver_version: str = Field(default="1.2.0", pattern=_VERSION, max_length=64)
    """The value of the attribute ``driverVersion``."""

    memory_gi: int = Field(default=40, ge=1, le=4096)
    """Memory of a GPU in GiB."""

    compute_slices: int = Field(default=4, ge=1, le=8)
    """Number of compute slices of a GPU."""

    partitions: tuple[Annotated[int, Field(ge=1, le=8)], ...] = (1, 2)
    """Sizes of the partitions, in compute slices. A GPU has as many partitions of each size as fit.
    If empty, there are only whole GPUs."""

    @model_validator(mode="after")
    def _partitions_fit(self) -> Self:
        if len(set(self.partitions)) != len(self.partitions):
            raise ValueError("partitions has a size twice")
        if any(size > self.compute_slices for size in self.partitions):
            raise ValueError(
                f"partitions has a size above computeSlices ({self.compute_slices}); a partition "
                "must fit on a GPU"
            )
        return self


class NicProfile(DriverConfig):
    """Network interfaces, whose bandwidth claims share (DRAConsumableCapacity)."""

    count: int = Field(default=1, ge=0, le=1024)
    """Number of interfaces on each node."""

    prefix: Prefix = "nic"
    """The prefix of the device names: ``nic-0``."""

    pool: Pool = ""
    """The pool of the devices. If empty, the driver uses the pool that is named after the node."""

    model: Text = "Simulated N1"
    """The value of the attribute ``model``."""

    bandwidth_gbps: int = Field(default=100, ge=1, le=10_000)
    """Bandwidth of an interface in Gbit/s. A claim gets at least 1, in steps of 1."""

    vlans: tuple[Annotated[int, Field(ge=1, le=4094)], ...] = Field(
        default=(100, 200, 300), min_length=1, max_length=16
    )
    """The VLANs of an interface. ``listAttributes`` publishes them."""

    list_attributes: bool = False
    """Whether to publish list attributes, which need the feature gate DRAListTypeAttributes."""


class CpuProfile(DriverConfig):
    """CPUs, in a separate pool."""

    count: int = Field(default=8, ge=0, le=16_384)
    """Number of CPUs on each node, distributed across its NUMA nodes."""

    prefix: Prefix = "cpu"
    """The prefix of the device names: ``cpu-0``, or ``cpu-numa-0`` with ``capacity``."""

    pool: Pool = "cpus"
    """The pool of the devices. If empty, the driver uses the pool that is named after the node."""

    grouping: Literal["capacity", "devices"] = "capacity"
    """``capacity`` publishes one device for each NUMA node, and each claim consumes some of its
    CPUs (DRAConsumableCapacity). ``devices`` publishes each CPU as a device."""


class SimulatedConfig(DriverConfig):
    """The configuration of the driver ``simulated``."""

    driver_name: str = Field(
        default=DRIVER_NAME, pattern=rf"^[a-z]([-a-z0-9]*[a-z0-9])?(\.{_LABEL})*$", max_length=63
    )
    """The driver's name. Two simulated drivers on the same node need different names."""

    numa_nodes: int = Field(default=2, ge=1, le=64)
    """Number of NUMA nodes, each with a PCIe root. The driver distributes devices across them."""

    gpu: GpuProfile = GpuProfile()
    nic: NicProfile = NicProfile()
    cpu: CpuProfile = CpuProfile()

    control_file: Annotated[Path, AfterValidator(_check_absolute)] | None = None
    """A JSON file that makes devices fail. Optional. The driver polls it five times a second.
    The default is ``control.json`` in the driver's data directory under ``/var/lib/kubelet``."""

    @property
    def control(self) -> Path:
        """The path of the control file."""
        default = driver_directory(Path("/var/lib/kubelet"), self.driver_name) / "control.json"
        return self.control_file or default

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        prefixes = {"gpu": self.gpu.prefix, "nic": self.nic.prefix, "cpu": self.cpu.prefix}
        for (one, first), (other, second) in permutations(prefixes.items(), 2):
            if f"{second}-".startswith(f"{first}-"):
                raise ValueError(
                    f"{other}.prefix {second!r} starts with {one}.prefix: two devices could have "
                    "the same name"
                )
        return self


# ------------------------------------------------------------ parameters

OUR_VARIABLES = "SIMULATED_"
"""The prefix of the driver's own environment variables."""

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=64)]


class SimulatedParameters(DeviceParameters):
    """Opaque parameters of simulated devices. All of them are optional."""

    sharing: Literal["exclusive", "timeSlicing"] = "exclusive"
    """How the containers of a claim share a device."""

    time_slice_milliseconds: int | None = Field(default=None, ge=1, le=1000)
    """The length of a time slice. Valid only with ``timeSlicing``."""

    vlan: int | None = Field(default=None, ge=1, le=4094)
    """The VLAN of an interface."""

    env: dict[Variable, Annotated[str, Field(max_length=256, pattern=r"^[^\x00]*$")]] = Field(
        default_factory=dict, max_length=16
    )
    """Environment variables of the containers. If two devices set the same variable in one
    container, the last value applies."""

    @model_validator(mode="after")
    def _time_slices_are_for_time_slicing(self) -> Self:
        if self.time_slice_milliseconds is not None and self.sharing != "timeSlicing":
            raise ValueError("timeSliceMilliseconds needs sharing: timeSlicing")
        if ours := [name for name in self.env if name.startswith(OUR_VARIABLES)]:
            raise ValueError(f"env: {ours[0]} is one of the driver's own variables")
        return self
