"""
The inventory: the profiles' devices, as the control file changes them.

It must not know files, or the rules of the profiles.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from drakit import Device, Health, Inventory, Taint
from drakit_drivers.simulated.config import SimulatedConfig
from drakit_drivers.simulated.control import Control, matches
from drakit_drivers.simulated.profiles import (
    counter_sets,
    cpus,
    gpus,
    nics,
    single_cpus,
    whole_gpus,
    whole_nics,
)


def all_devices(config: SimulatedConfig) -> Inventory:
    """Combine the profiles' devices; the fallback needs no optional feature of the API."""
    numa = config.numa_nodes
    return Inventory(
        devices=(
            *gpus(config.gpu, numa_nodes=numa),
            *nics(config.nic, numa_nodes=numa),
            *cpus(config.cpu, numa_nodes=numa),
        ),
        counter_sets=tuple(counter_sets(config.gpu)),
        fallback=(
            *whole_gpus(config.gpu, numa_nodes=numa),
            *whole_nics(config.nic, numa_nodes=numa),
            *single_cpus(config.cpu, numa_nodes=numa),
        ),
    )


def commanded(inventory: Inventory, control: Control, *, driver: str) -> Inventory:
    """
    Return the inventory as the control file changes it.

    :param driver: the domain of taints that have none.
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
    """Return the names that match a device in the control file: that of its GPU, and its own."""
    parent = device.attributes.get("parent")
    return (parent, device.name) if isinstance(parent, str) else (device.name,)


def without_device(inventory: Inventory, control: Control) -> list[str]:
    """Return the patterns of the control file that match no device."""
    names = {
        name
        for device in (*inventory.devices, *(inventory.fallback or ()))
        for name in names_of(device)
    }
    return sorted({pattern for pattern in control.patterns() if not matches(pattern, names)})


def _commanded(devices: Collection[Device], control: Control, driver: str) -> tuple[Device, ...]:
    return tuple(
        replace(
            device,
            health=_health(device, control),
            taints=_taints(device, control, driver),
        )
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
