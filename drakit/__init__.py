"""
drakit: Kubernetes Dynamic Resource Allocation for device vendors, in Python.

This is the vendor's whole vocabulary. Names are loaded when first used, so that importing the
package costs neither pydantic nor anything of Kubernetes or gRPC.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drakit.device import AllocatedDevice as AllocatedDevice
    from drakit.device import AttributeValue as AttributeValue
    from drakit.device import ClaimReference as ClaimReference
    from drakit.device import Device as Device
    from drakit.device import DeviceNode as DeviceNode
    from drakit.device import Edits as Edits
    from drakit.device import Hook as Hook
    from drakit.device import IntelRdt as IntelRdt
    from drakit.device import Mount as Mount
    from drakit.device import NetDevice as NetDevice
    from drakit.device import Version as Version
    from drakit.driver import Driver as Driver
    from drakit.driver import DriverConfig as DriverConfig
    from drakit.driver import DriverError as DriverError
    from drakit.driver import Node as Node
    from drakit.settings import Duration as Duration

_HOMES = {
    "AllocatedDevice": "drakit.device",
    "AttributeValue": "drakit.device",
    "ClaimReference": "drakit.device",
    "Device": "drakit.device",
    "DeviceNode": "drakit.device",
    "Driver": "drakit.driver",
    "DriverConfig": "drakit.driver",
    "DriverError": "drakit.driver",
    "Duration": "drakit.settings",
    "Edits": "drakit.device",
    "Hook": "drakit.device",
    "IntelRdt": "drakit.device",
    "Mount": "drakit.device",
    "NetDevice": "drakit.device",
    "Node": "drakit.driver",
    "Version": "drakit.device",
}

__all__ = (
    "AllocatedDevice",
    "AttributeValue",
    "ClaimReference",
    "Device",
    "DeviceNode",
    "Driver",
    "DriverConfig",
    "DriverError",
    "Duration",
    "Edits",
    "Hook",
    "IntelRdt",
    "Mount",
    "NetDevice",
    "Node",
    "Version",
)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
