"""
A driver that lists the inventory whose name is in a file, and the inventories by name.

The node plugin of :mod:`e2e.test_fields` loads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from drakit import (
    Capacity,
    CapacityRange,
    CounterSet,
    Device,
    Driver,
    DriverConfig,
    Inventory,
    NodeAllocatableResource,
)

DRIVER = "listed.test.drakit.dev"
ATTACHED, FAILED = f"{DRIVER}/attached", f"{DRIVER}/failed"
PROFILE = f"{DRIVER}/profile"

LOOK_SECONDS = 0.1


def _rated(*numbers: int) -> tuple[Device, ...]:
    return tuple(Device(name=f"dev-{number}", attributes={"number": number}) for number in numbers)


def _partition(name: str, *groups: str) -> Device:
    return Device(
        name=name,
        attributes={"profile": "half"},
        consumes={"card": {"slots": "1"}},
        compatibility_groups={"card": groups} if groups else {},
    )


_CARD = CounterSet(name="card", counters={"slots": "4"})

INVENTORIES: Mapping[str, Inventory] = {
    # Two slices for each order.
    "falling": Inventory(devices=_rated(*range(69, -1, -1)), ordered=True),
    "another-first": Inventory(
        devices=_rated(2, *(n for n in range(69, -1, -1) if n != 2)), ordered=True
    ),
    "attached": Inventory(
        devices=[
            Device(
                name="remote",
                binding_conditions=(ATTACHED,),
                binding_failure_conditions=(FAILED,),
                binds_to_node=True,
            )
        ]
    ),
    "mapped-in-1.36": Inventory(
        devices=[
            Device(
                name=f"ccx-{number}",
                extra={"nodeAllocatableResourceMappings": {"cpu": {"allocationMultiplier": "3"}}},
            )
            for number in range(2)
        ],
    ),
    "in-no-release": Inventory(
        devices=[Device(name="future", extra={"inNoRelease": {"a": [1]}})],
        fallback=[Device(name="present")],
    ),
    "mapped": Inventory(
        devices=[
            Device(
                name=f"ccx-{number}",
                node_allocatable_resources={
                    "cpu": NodeAllocatableResource(device_multiplier="3"),
                    "memory": NodeAllocatableResource(overhead_per_pod="64Mi"),
                },
            )
            for number in range(2)
        ]
    ),
    "grouped": Inventory(
        devices=[_partition("mig", "mig"), _partition("vgpu", "vgpu"), _partition("mig-2", "mig")],
        counter_sets=[_CARD],
        partition_type_attribute=PROFILE,
    ),
    "fractions": Inventory(
        devices=[
            Device(
                name="shared",
                capacity={
                    "cores": Capacity(
                        value="2",
                        default="500m",
                        valid_range=CapacityRange(min="500m", step="250m"),
                    )
                },
                allow_multiple_allocations=True,
            )
        ]
    ),
}


class ListedConfig(DriverConfig):
    file: Path
    """The file with the name of the inventory."""


class Listed(Driver[ListedConfig]):
    name: ClassVar[str] = DRIVER
    config_type = ListedConfig

    async def devices(self) -> AsyncIterator[Inventory]:
        before: Any = None
        while True:
            name = self.config.file.read_text()
            if name != before:
                before = name
                yield INVENTORIES[name]
            await asyncio.sleep(LOOK_SECONDS)
