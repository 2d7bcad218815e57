"""
Creates the inventory: GPUs with partitions, network interfaces and CPUs according to the profiles,
with their topology, and with the changes in the control file.

A GPU has a counter set for its compute slices and its memory. The whole GPU consumes all of them,
and a partition consumes some of them, so the scheduler allocates either the GPU, or partitions that
fit together. Claims share a network interface by its bandwidth, and a NUMA node by its CPUs. Each
kind also has a plain form, for API servers that support neither counters nor shares: whole GPUs,
whole interfaces, and individual CPUs.

Does not depend on claims or files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from drakit import (
    AttributeValue,
    Capacity,
    CapacityRange,
    CounterSet,
    Device,
    Health,
    Inventory,
    Taint,
    Topology,
    Version,
)
from drakit_drivers.simulated.config import CpuProfile, GpuProfile, NicProfile, SimulatedConfig
from drakit_drivers.simulated.control import Control, matches

_SLOTS = 32
"""Number of devices on a PCI bus."""


def all_devices(config: SimulatedConfig) -> Inventory:
    """Return the devices of all profiles. The fallback does not need any optional API feature."""
    gpu, nic, cpu, numa = config.gpu, config.nic, config.cpu, config.numa_nodes
    amounts = _amounts(gpu, gpu.compute_slices)
    return Inventory(
        devices=(*_gpus(gpu, numa), *_nics(nic, numa), *_cpus(cpu, numa)),
        counter_sets=tuple(
            CounterSet(name=f"{gpu.prefix}-{index}", counters=amounts, pool=gpu.pool)
            for index in range(gpu.count if gpu.partitions else 0)
        ),
        fallback=(
            *_gpus(gpu, numa, plain=True),
            *_nics(nic, numa, plain=True),
            *_single_cpus(cpu, numa),
        ),
    )


def _gpus(profile: GpuProfile, numa_nodes: int, *, plain: bool = False) -> Iterator[Device]:
    """Yield the GPUs, each followed by its partitions, largest first."""
    sizes = () if plain else sorted(profile.partitions, reverse=True)
    for index in range(profile.count):
        name = f"{profile.prefix}-{index}"
        place = _pci_place(index, numa_nodes, function=0)
        attributes: dict[str, AttributeValue] = {
            "index": index,
            "model": profile.model,
            "architecture": profile.architecture,
            "driverVersion": Version(profile.driver_version),
        }
        whole = {"type": "gpu", **attributes, "computeSlices": profile.compute_slices}
        yield Device(
            name=name,
            pool=profile.pool,
            attributes=whole,
            capacity={"memory": f"{profile.memory_gi}Gi"},
            topology=place,
            consumes={name: _amounts(profile, profile.compute_slices)} if sizes else {},
        )
        for size in sizes:
            amounts = _amounts(profile, size)
            for number in range(profile.compute_slices // size):
                yield Device(
                    name=f"{name}-{size}g-{number}",
                    pool=profile.pool,
                    attributes={
                        "type": "partition",
                        **attributes,
                        "parent": name,
                        "profile": f"{size}g",
                        "computeSlices": size,
                    },
                    capacity={"memory": amounts["memory"]},
                    topology=place,
                    consumes={name: amounts},
                )


def _amounts(profile: GpuProfile, size: int) -> dict[str, str]:
    """Return the counters that this many compute slices of a GPU consume."""
    mebibytes = profile.memory_gi * 1024 * size // profile.compute_slices
    return {"compute": str(size), "memory": f"{mebibytes}Mi"}


def _nics(profile: NicProfile, numa_nodes: int, *, plain: bool = False) -> Iterator[Device]:
    """Yield the interfaces. A claim that requests no bandwidth gets 1 Gbit/s."""
    has_lists = profile.list_attributes and not plain
    lists: dict[str, AttributeValue] = {"vlans": profile.vlans} if has_lists else {}
    whole = f"{profile.bandwidth_gbps}G"
    for index in range(profile.count):
        yield Device(
            name=f"{profile.prefix}-{index}",
            pool=profile.pool,
            attributes={
                "type": "nic",
                "index": index,
                "model": profile.model,
                "macAddress": f"02:00:00:00:{index >> 8:02x}:{index & 0xFF:02x}",
                **lists,
            },
            capacity={"bandwidth": whole if plain else _in_steps(profile.bandwidth_gbps, "G")},
            topology=_pci_place(index, numa_nodes, function=1),
            allow_multiple_allocations=not plain,
        )


def _cpus(profile: CpuProfile, numa_nodes: int) -> Iterator[Device]:
    """Yield the CPUs, grouped as in the profile."""
    if profile.grouping == "devices":
        yield from _single_cpus(profile, numa_nodes)
        return
    for numa in range(min(numa_nodes, profile.count)):
        yield Device(
            name=f"{profile.prefix}-numa-{numa}",
            pool=profile.pool,
            attributes={"type": "cpu", "index": numa},
            capacity={"cpus": _in_steps(len(range(numa, profile.count, numa_nodes)))},
            topology=Topology(numa_node=numa),
            allow_multiple_allocations=True,
        )


def _single_cpus(profile: CpuProfile, numa_nodes: int) -> Iterator[Device]:
    for index in range(profile.count):
        yield Device(
            name=f"{profile.prefix}-{index}",
            pool=profile.pool,
            attributes={"type": "cpu", "index": index},
            capacity={"cpus": "1"},
            topology=Topology(numa_node=index % numa_nodes),
        )


def _pci_place(index: int, numa_nodes: int, *, function: int) -> Topology:
    """
    Return the topology of the PCI device with this index. Devices are distributed across the NUMA
    nodes.

    :param function: distinguishes devices of two kinds with the same index.
    """
    numa, slot = index % numa_nodes, index // numa_nodes
    return Topology(
        numa_node=numa,
        pcie_root=f"pci{numa:04x}:00",
        pci_bus_id=f"{numa:04x}:{1 + slot // _SLOTS:02x}:{slot % _SLOTS:02x}.{function}",
    )


def _in_steps(amount: int, unit: str = "") -> Capacity:
    """Return a capacity that claims consume in steps of one unit. One unit is both the default and
    the minimum."""
    one = f"1{unit}"
    if amount == 1:  # the API requires room for a step above the minimum
        return Capacity(value=one)
    return Capacity(
        value=f"{amount}{unit}", default=one, valid_range=CapacityRange(min=one, step=one)
    )


# ------------------------------------------------------------ the control file


def commanded(inventory: Inventory, control: Control, *, driver: str) -> Inventory:
    """
    Return the inventory with the changes in the control file.

    :param driver: the domain of taints without a domain.
    """
    devices = _commanded(inventory.devices, control, driver)
    used = {(device.pool, name) for device in devices for name in device.consumes}
    return Inventory(
        devices=devices,
        counter_sets=tuple(
            counters
            for counters in inventory.counter_sets
            if (counters.pool, counters.name) in used
        ),
        fallback=_commanded(inventory.fallback or (), control, driver),
    )


def names_of(device: Device) -> tuple[str, ...]:
    """Return the names by which the control file can refer to a device: the name of its GPU, and
    its own."""
    parent = device.attributes.get("parent")
    return (parent, device.name) if isinstance(parent, str) else (device.name,)


def without_device(inventory: Inventory, control: Control) -> list[str]:
    """Return the patterns in the control file that do not match any device."""
    names = {
        name
        for device in (*inventory.devices, *(inventory.fallback or ()))
        for name in names_of(device)
    }
    return sorted({pattern for pattern in control.patterns() if not matches(pattern, names)})


def _commanded(devices: Collection[Device], control: Control, driver: str) -> tuple[Device, ...]:
    return tuple(
        replace(device, health=_health(device, control), taints=_taints(device, control, driver))
        for device in devices
        if not any(matches(pattern, names_of(device)) for pattern in control.missing)
    )


def _health(device: Device, control: Control) -> Health:
    health = Health.healthy()
    for pattern, command in control.health.items():
        if matches(pattern, names_of(device)):
            health = command.health()
    return health


def _taints(device: Device, control: Control, driver: str) -> tuple[Taint, ...]:
    return tuple(
        Taint(
            key=command.key if "/" in command.key else f"{driver}/{command.key}",
            value=command.value,
            effect=command.effect,
        )
        for pattern, commands in control.taints.items()
        if matches(pattern, names_of(device))
        for command in commands
    )
