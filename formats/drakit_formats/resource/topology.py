"""
The standard attributes for a device's location, which match devices across drivers.

It must not know how an attribute is checked or written.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ("TOPOLOGY_FIELDS",)

TOPOLOGY_FIELDS: Mapping[str, str] = {
    "resource.kubernetes.io/numaNode": "numa_node",
    "resource.kubernetes.io/pcieRoot": "pcie_root",
    "resource.kubernetes.io/pciBusID": "pci_bus_id",
}
"""The fields of :class:`~drakit.device.Topology`, by the attribute that each becomes."""
