"""
GPUs: each is a device, and so are the partitions that it can be cut into.

A GPU has a set of counters, for its compute slices and its memory. The whole GPU takes all of them,
a partition some: so the scheduler gives out the GPU, or partitions that fit beside each other.
Where the API server knows no counters there are whole GPUs only.

It must not know claims, health or taints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from drakit import AttributeValue, CounterSet, Device, Topology, Version
from drakit_drivers.simulated.config import GpuProfile
from drakit_drivers.simulated.places import pci_place

__all__ = ("counter_sets", "gpus", "whole_gpus")

_FUNCTION = 0


def gpus(profile: GpuProfile, *, numa_nodes: int) -> list[Device]:
    """List all GPUs, each with its partitions behind it, the largest first."""
    return [
        device
        for index in range(profile.count)
        for device in _gpu(
            profile, index, pci_place(index, numa_nodes=numa_nodes, function=_FUNCTION)
        )
    ]


def whole_gpus(profile: GpuProfile, *, numa_nodes: int) -> list[Device]:
    """List the GPUs without partitions and counters."""
    places = (
        pci_place(index, numa_nodes=numa_nodes, function=_FUNCTION)
        for index in range(profile.count)
    )
    return [_whole(profile, index, place, consumes={}) for index, place in enumerate(places)]


def counter_sets(profile: GpuProfile) -> list[CounterSet]:
    """List what the partitions of each GPU share; nothing if there are none."""
    if not profile.partitions:
        return []
    return [
        CounterSet(
            name=_name(profile, index),
            counters=_amounts(profile, profile.compute_slices),
            pool=profile.pool,
        )
        for index in range(profile.count)
    ]


def _gpu(profile: GpuProfile, index: int, place: Topology) -> Iterator[Device]:
    name = _name(profile, index)
    if not profile.partitions:
        yield _whole(profile, index, place, consumes={})
        return
    amounts = _amounts(profile, profile.compute_slices)
    yield _whole(profile, index, place, consumes={name: amounts})
    for size in sorted(profile.partitions, reverse=True):
        for number in range(profile.compute_slices // size):
            amounts = _amounts(profile, size)
            yield Device(
                name=f"{name}-{size}g-{number}",
                pool=profile.pool,
                attributes={
                    "type": "partition",
                    **_said_of(profile, index),
                    "parent": name,
                    "profile": f"{size}g",
                    "computeSlices": size,
                },
                capacity={"memory": amounts["memory"]},
                topology=place,
                consumes={name: amounts},
            )


def _whole(
    profile: GpuProfile, index: int, place: Topology, *, consumes: Mapping[str, Mapping[str, str]]
) -> Device:
    return Device(
        name=_name(profile, index),
        pool=profile.pool,
        attributes={
            "type": "gpu",
            **_said_of(profile, index),
            "computeSlices": profile.compute_slices,
        },
        capacity={"memory": f"{profile.memory_gi}Gi"},
        topology=place,
        consumes=consumes,
    )


def _said_of(profile: GpuProfile, index: int) -> dict[str, AttributeValue]:
    return {
        "index": index,
        "model": profile.model,
        "architecture": profile.architecture,
        "driverVersion": Version(profile.driver_version),
    }


def _name(profile: GpuProfile, index: int) -> str:
    return f"{profile.prefix}-{index}"


def _amounts(profile: GpuProfile, size: int) -> dict[str, str]:
    """What so many compute slices of a GPU take of its counters."""
    mebibytes = profile.memory_gi * 1024 * size // profile.compute_slices
    return {"compute": str(size), "memory": f"{mebibytes}Mi"}
