"""
The admin's configuration: which devices to simulate, how many, and under which names.

It must not know what is published, or the node.
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from drakit import DriverConfig
from drakit.layout import driver_directory

__all__ = ("DRIVER_NAME", "CpuProfile", "GpuProfile", "NicProfile", "SimulatedConfig")

DRIVER_NAME = "simulated.drakit.dev"

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_VERSION = r"^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)$"

# Room is left for what comes after it: `-<number>-<size>g-<number>`.
Prefix = Annotated[str, Field(pattern=rf"^{_LABEL}$", max_length=40)]
Pool = Annotated[str, Field(pattern=rf"^({_LABEL})?$", max_length=63)]
Text = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[ -~]+$")]


def _check_absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(f"{path} must be an absolute path")
    return path


class GpuProfile(DriverConfig):
    """GPUs, whole or in partitions that share what the GPU has (DRAPartitionableDevices)."""

    count: int = Field(default=2, ge=0, le=1024)
    """How many a node has; 0: none."""

    prefix: Prefix = "gpu"
    """Begins their names: ``gpu-0``, and ``gpu-0-2g-1`` for a partition of two compute slices."""

    pool: Pool = ""
    """Their pool; empty: the pool that has the node's name."""

    model: Text = "Simulated G1"
    architecture: Text = "simulated"
    driver_version: str = Field(default="1.2.0", pattern=_VERSION, max_length=64)
    memory_gi: int = Field(default=40, ge=1, le=4096)
    """Memory of a GPU, in GiB."""

    compute_slices: int = Field(default=4, ge=1, le=8)
    """Into how many parts a GPU can be cut."""

    partitions: tuple[Annotated[int, Field(ge=1, le=8)], ...] = (1, 2)
    """Sizes of the partitions, in compute slices: of each as many as a GPU has room for. Without
    any there are whole GPUs only."""

    @model_validator(mode="after")
    def _partitions_fit(self) -> Self:
        if len(set(self.partitions)) != len(self.partitions):
            raise ValueError("partitions lists a size twice")
        if any(size > self.compute_slices for size in self.partitions):
            raise ValueError(
                f"partitions lists a size of more than the {self.compute_slices} computeSlices of "
                "a "
                f"GPU"
            )
        return self


class NicProfile(DriverConfig):
    """Network interfaces whose bandwidth claims share (DRAConsumableCapacity)."""

    count: int = Field(default=1, ge=0, le=1024)
    """How many a node has; 0: none."""

    prefix: Prefix = "nic"
    """Begins their names: ``nic-0``."""

    pool: Pool = ""
    """Their pool; empty: the pool that has the node's name."""

    model: Text = "Simulated N1"
    bandwidth_gbps: int = Field(default=100, ge=1, le=10_000)
    """Bandwidth of an interface, in Gbit/s: 1 at least goes to each claim, in steps of 1."""

    vlans: tuple[Annotated[int, Field(ge=1, le=4094)], ...] = Field(
        default=(100, 200, 300), min_length=1, max_length=16
    )
    """The VLANs that they can be in, published as a list attribute; see `list_attributes`."""

    list_attributes: bool = False
    """Publish attributes that are lists, where the cluster has DRAListTypeAttributes (alpha)."""


class CpuProfile(DriverConfig):
    """CPUs by NUMA node, in a pool of their own."""

    count: int = Field(default=8, ge=0, le=16_384)
    """How many a node has, spread over its NUMA nodes; 0: none."""

    prefix: Prefix = "cpu"
    """Begins their names: ``cpu-0``, or ``cpu-numa-0`` where they are shared by capacity."""

    pool: Pool = "cpus"
    """Their pool; empty: the pool that has the node's name."""

    grouping: Literal["capacity", "devices"] = "capacity"
    """``capacity``: a device per NUMA node, of which claims take a number of CPUs
    (DRAConsumableCapacity); ``devices``: a device per CPU."""


class SimulatedConfig(DriverConfig):
    """The config of the driver ``simulated``."""

    driver_name: str = Field(
        default=DRIVER_NAME, pattern=rf"^[a-z]([-a-z0-9]*[a-z0-9])?(\.{_LABEL})*$", max_length=63
    )
    """The driver's name; of several that simulate one node, each has its own."""

    numa_nodes: int = Field(default=2, ge=1, le=64)
    """NUMA nodes of the machine, each with a PCIe root; devices are spread over them."""

    gpu: GpuProfile = GpuProfile()
    nic: NicProfile = NicProfile()
    cpu: CpuProfile = CpuProfile()

    control_file: Annotated[Path, AfterValidator(_check_absolute)] | None = None
    """JSON that controls how devices fail; it may be missing. The driver polls it five times a
    second. The default is ``control.json`` in the driver's data directory below
    ``/var/lib/kubelet``."""

    @property
    def control(self) -> Path:
        """The control file."""
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
