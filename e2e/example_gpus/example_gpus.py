"""
Simulated GPUs with the name, attributes and parameters of another project's driver.

The driver has its own parameters, and also accepts those of Kubernetes' example driver, so that the
manifests of that driver work unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from pydantic import Field

from drakit import (
    AllocatedDevice,
    ClaimReference,
    Device,
    DeviceParameters,
    Driver,
    DriverConfig,
    Edits,
    ParameterVersion,
    Version,
)

Interval = Literal["Default", "Short", "Medium", "Long"]
Partitions = Annotated[int, Field(ge=1, le=64)]


class GpusConfig(DriverConfig):
    count: Annotated[int, Field(ge=1, le=64)] = 8


class GpuParameters(DeviceParameters):
    """The driver's own parameters."""

    interval: Interval | None = None
    partitions: Partitions | None = None


class TimeSlicing(DeviceParameters):
    interval: Interval = "Default"


class SpacePartitioning(DeviceParameters):
    partition_count: Partitions = 1


class Sharing(DeviceParameters):
    strategy: Literal["TimeSlicing", "SpacePartitioning"]
    time_slicing_config: TimeSlicing = TimeSlicing()
    space_partitioning_config: SpacePartitioning = SpacePartitioning()


class GpuConfig(DeviceParameters):
    """``gpu.resource.example.com/v1alpha1``, as the example driver defines it."""

    sharing: Sharing | None = None


def from_example(config: GpuConfig) -> GpuParameters:
    sharing = config.sharing
    if sharing is None:
        return GpuParameters()
    if sharing.strategy == "TimeSlicing":
        return GpuParameters(interval=sharing.time_slicing_config.interval)
    return GpuParameters(partitions=sharing.space_partitioning_config.partition_count)


class Gpus(Driver[GpusConfig, GpuParameters]):
    name = "gpu.example.com"
    side_effects = False
    claim_data = True
    parameter_versions = (
        ParameterVersion("gpus.drakit.test/v1", "GpuParameters"),
        ParameterVersion(
            "gpu.resource.example.com/v1alpha1", "GpuConfig", type=GpuConfig, convert=from_example
        ),
    )

    async def devices(self) -> AsyncIterator[list[Device]]:
        yield [
            Device(
                name=f"gpu-{index}",
                attributes={
                    "index": index,
                    "uuid": f"gpu-{self.node.name}-{index}",
                    "model": "LATEST-GPU-MODEL",
                    "driverVersion": Version("1.0.0"),
                },
                capacity={"memory": "80Gi"},
            )
            for index in range(self.config.count)
        ]
        await asyncio.Event().wait()

    def prepare(self, claim: ClaimReference, device: AllocatedDevice[GpuParameters]) -> Edits:
        number = device.name.removeprefix("gpu-")
        parameters = device.parameters
        env = {f"GPU_DEVICE_{number}": device.name}
        if parameters.interval is not None:
            env[f"GPU_DEVICE_{number}_SHARING_STRATEGY"] = "TimeSlicing"
            env[f"GPU_DEVICE_{number}_TIMESLICE_INTERVAL"] = parameters.interval
        if parameters.partitions is not None:
            env[f"GPU_DEVICE_{number}_SHARING_STRATEGY"] = "SpacePartitioning"
            env[f"GPU_DEVICE_{number}_PARTITION_COUNT"] = str(parameters.partitions)
        if device.admin_access:
            env["DRA_ADMIN_ACCESS"] = "true"
        if device.published is not None:
            env[f"GPU_DEVICE_{number}_UUID"] = str(device.published.attributes["uuid"])
        if device.claim_data is not None:
            consumers = device.claim_data.reserved_for
            env["GPU_CONSUMER"] = ",".join(each.name for each in consumers)
        return Edits(env=env)
