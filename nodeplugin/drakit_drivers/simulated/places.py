"""
Where simulated devices seem to sit in the machine.

It must not know what kind of devices they are.
"""

from __future__ import annotations

from drakit import Topology

__all__ = ("pci_place",)

_SLOTS = 32
"""Devices of a PCI bus."""


def pci_place(index: int, *, numa_nodes: int, function: int) -> Topology:
    """
    Give the place of the PCI device of a number: the NUMA nodes get one in turn.

    :param function: tells devices of different kinds apart that have one number.
    """
    numa, slot = index % numa_nodes, index // numa_nodes
    return Topology(
        numa_node=numa,
        pcie_root=f"pci{numa:04x}:00",
        pci_bus_id=f"{numa:04x}:{1 + slot // _SLOTS:02x}:{slot % _SLOTS:02x}.{function}",
    )
