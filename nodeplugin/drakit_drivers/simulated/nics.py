"""
Network interfaces: one device each, whose bandwidth claims share.

Where the API server knows no consumable capacity an interface is one claim's, with all that it has.

It must not know claims, health or taints.
"""

from __future__ import annotations

from drakit import AttributeValue, Device
from drakit_drivers.simulated.config import NicProfile
from drakit_drivers.simulated.places import pci_place
from drakit_drivers.simulated.sharing import in_steps

__all__ = ("nics", "whole_nics")

_FUNCTION = 1
_GIGA = "G"


def nics(profile: NicProfile, *, numa_nodes: int) -> list[Device]:
    """List the interfaces; a claim that asks for no bandwidth gets 1 Gbit/s."""
    lists: dict[str, AttributeValue] = {"vlans": profile.vlans} if profile.list_attributes else {}
    return [
        Device(
            name=f"{profile.prefix}-{index}",
            pool=profile.pool,
            attributes=_said_of(profile, index) | lists,
            capacity={"bandwidth": in_steps(profile.bandwidth_gbps, unit=_GIGA)},
            topology=pci_place(index, numa_nodes=numa_nodes, function=_FUNCTION),
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
            attributes=_said_of(profile, index),
            capacity={"bandwidth": f"{profile.bandwidth_gbps}{_GIGA}"},
            topology=pci_place(index, numa_nodes=numa_nodes, function=_FUNCTION),
        )
        for index in range(profile.count)
    ]


def _said_of(profile: NicProfile, index: int) -> dict[str, AttributeValue]:
    return {
        "type": "nic",
        "index": index,
        "model": profile.model,
        "macAddress": f"02:00:00:00:{index >> 8:02x}:{index & 0xFF:02x}",
    }
