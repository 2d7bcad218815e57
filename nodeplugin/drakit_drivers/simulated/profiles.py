"""
The profiles: GPUs with partitions, network interfaces and CPUs, and their places in the machine.

A GPU has a set of counters, for its compute slices and its memory. The whole GPU consumes all of
them, a partition some: so the scheduler allocates the GPU, or partitions that fit beside each
other. Claims share a network interface by its bandwidth, and a NUMA node by its CPUs. Each kind has
a plain form as well, for API servers that know neither counters nor shares: whole GPUs, whole
interfaces, single CPUs. :mod:`.inventory` combines the profiles.

It must not know claims, health or taints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from drakit import (
    AttributeValue,
    Capacity,
    CapacityRange,
    CounterSet,
    Device,
    Topology,
    Version,
)
from drakit_drivers.simulated.config import CpuProfile, GpuProfile, NicProfile

_GPU_FUNCTION, _NIC_FUNCTION = 0, 1
"""PCI functions, which distinguish devices of two kinds with the same number."""

_SLOTS = 32
"""Devices of a PCI bus."""

_GIGA = "G"


# ------------------------------------------------------------ GPUs


def gpus(profile: GpuProfile, *, numa_nodes: int) -> list[Device]:
    """List all GPUs, each followed by its partitions, the largest first."""
    return [
        device
        for index in range(profile.count)
        for device in _gpu(
            profile, index, _pci_place(index, numa_nodes=numa_nodes, function=_GPU_FUNCTION)
        )
    ]


def whole_gpus(profile: GpuProfile, *, numa_nodes: int) -> list[Device]:
    """List the GPUs without partitions and counters."""
    places = (
        _pci_place(index, numa_nodes=numa_nodes, function=_GPU_FUNCTION)
        for index in range(profile.count)
    )
    return [_whole(profile, index, place, consumes={}) for index, place in enumerate(places)]


def counter_sets(profile: GpuProfile) -> list[CounterSet]:
    """List the counters that the partitions of each GPU share; none without partitions."""
    if not profile.partitions:
        return []
    return [
        CounterSet(
            name=_gpu_name(profile, index),
            counters=_amounts(profile, profile.compute_slices),
            pool=profile.pool,
        )
        for index in range(profile.count)
    ]


def _gpu(profile: GpuProfile, index: int, place: Topology) -> Iterator[Device]:
    name = _gpu_name(profile, index)
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
                    **_gpu_attributes(profile, index),
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
        name=_gpu_name(profile, index),
        pool=profile.pool,
        attributes={
            "type": "gpu",
            **_gpu_attributes(profile, index),
            "computeSlices": profile.compute_slices,
        },
        capacity={"memory": f"{profile.memory_gi}Gi"},
        topology=place,
        consumes=consumes,
    )


def _gpu_attributes(profile: GpuProfile, index: int) -> dict[str, AttributeValue]:
    return {
        "index": index,
        "model": profile.model,
        "architecture": profile.architecture,
        "driverVersion": Version(profile.driver_version),
    }


def _gpu_name(profile: GpuProfile, index: int) -> str:
    return f"{profile.prefix}-{index}"


def _amounts(profile: GpuProfile, size: int) -> dict[str, str]:
    """Return what this many compute slices of a GPU consume of its counters."""
    mebibytes = profile.memory_gi * 1024 * size // profile.compute_slices
    return {"compute": str(size), "memory": f"{mebibytes}Mi"}


# ------------------------------------------------------------ network interfaces


def nics(profile: NicProfile, *, numa_nodes: int) -> list[Device]:
    """List the interfaces; a claim that requests no bandwidth gets 1 Gbit/s."""
    lists: dict[str, AttributeValue] = {"vlans": profile.vlans} if profile.list_attributes else {}
    return [
        Device(
            name=f"{profile.prefix}-{index}",
            pool=profile.pool,
            attributes=_nic_attributes(profile, index) | lists,
            capacity={"bandwidth": _in_steps(profile.bandwidth_gbps, unit=_GIGA)},
            topology=_pci_place(index, numa_nodes=numa_nodes, function=_NIC_FUNCTION),
            allow_multiple_allocations=True,
        )
        for index in range(profile.count)
    ]


def whole_nics(profile: NicProfile, *, numa_nodes: int) -> list[Device]:
    """List the interfaces as devices that are not shared, without lists."""
    return [
        Device(
            name=f"{profile.prefix}-{index}",
            pool=profile.pool,
            attributes=_nic_attributes(profile, index),
            capacity={"bandwidth": f"{profile.bandwidth_gbps}{_GIGA}"},
            topology=_pci_place(index, numa_nodes=numa_nodes, function=_NIC_FUNCTION),
        )
        for index in range(profile.count)
    ]


def _nic_attributes(profile: NicProfile, index: int) -> dict[str, AttributeValue]:
    return {
        "type": "nic",
        "index": index,
        "model": profile.model,
        "macAddress": f"02:00:00:00:{index >> 8:02x}:{index & 0xFF:02x}",
    }


# ------------------------------------------------------------ CPUs


def cpus(profile: CpuProfile, *, numa_nodes: int) -> list[Device]:
    """List the CPUs as the profile groups them."""
    if profile.grouping == "devices":
        return single_cpus(profile, numa_nodes=numa_nodes)
    amounts = [len(range(numa, profile.count, numa_nodes)) for numa in range(numa_nodes)]
    return [
        Device(
            name=f"{profile.prefix}-numa-{numa}",
            pool=profile.pool,
            attributes={"type": "cpu", "index": numa},
            capacity={"cpus": _in_steps(amount)},
            topology=Topology(numa_node=numa),
            allow_multiple_allocations=True,
        )
        for numa, amount in enumerate(amounts)
        if amount
    ]


def single_cpus(profile: CpuProfile, *, numa_nodes: int) -> list[Device]:
    """List each CPU as a device."""
    return [
        Device(
            name=f"{profile.prefix}-{index}",
            pool=profile.pool,
            attributes={"type": "cpu", "index": index},
            capacity={"cpus": "1"},
            topology=Topology(numa_node=index % numa_nodes),
        )
        for index in range(profile.count)
    ]


# ------------------------------------------------------------ places and shares


def _pci_place(index: int, *, numa_nodes: int, function: int) -> Topology:
    """
    Return the place of the PCI device with this number: devices are spread over the NUMA nodes.

    :param function: distinguishes devices of two kinds with the same number.
    """
    numa, slot = index % numa_nodes, index // numa_nodes
    return Topology(
        numa_node=numa,
        pcie_root=f"pci{numa:04x}:00",
        pci_bus_id=f"{numa:04x}:{1 + slot // _SLOTS:02x}:{slot % _SLOTS:02x}.{function}",
    )


def _in_steps(amount: int, *, unit: str = "") -> Capacity:
    """Return a capacity of which a claim takes at least one, and one if it requests none."""
    if amount == 1:
        # The API requires room for a step above the minimum.
        return Capacity(value=f"1{unit}")
    one = f"1{unit}"
    return Capacity(
        value=f"{amount}{unit}", default=one, valid_range=CapacityRange(min=one, step=one)
    )
