"""
drakit: Kubernetes Dynamic Resource Allocation for device vendors, in Python.

The public API consists of the names here, those in :mod:`drakit.testing`, and the entry points
``drakit.drivers`` and ``pytest11``. All other modules are internal and may change in any release.
Names are loaded on first use, so importing the package does not load pydantic, gRPC or a Kubernetes
client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drakit.device import AllocatedClaim as AllocatedClaim
    from drakit.device import AllocatedDevice as AllocatedDevice
    from drakit.device import AttributeValue as AttributeValue
    from drakit.device import Capacity as Capacity
    from drakit.device import CapacityRange as CapacityRange
    from drakit.device import ClaimConfig as ClaimConfig
    from drakit.device import ClaimConsumer as ClaimConsumer
    from drakit.device import ClaimData as ClaimData
    from drakit.device import ClaimOwner as ClaimOwner
    from drakit.device import ClaimReference as ClaimReference
    from drakit.device import Condition as Condition
    from drakit.device import ConditionStatus as ConditionStatus
    from drakit.device import CounterSet as CounterSet
    from drakit.device import Device as Device
    from drakit.device import DeviceNode as DeviceNode
    from drakit.device import Edits as Edits
    from drakit.device import Health as Health
    from drakit.device import HeldDevice as HeldDevice
    from drakit.device import HeldNode as HeldNode
    from drakit.device import Hook as Hook
    from drakit.device import IntelRdt as IntelRdt
    from drakit.device import Inventory as Inventory
    from drakit.device import Mount as Mount
    from drakit.device import NetDevice as NetDevice
    from drakit.device import NetworkData as NetworkData
    from drakit.device import NodeAllocatableResource as NodeAllocatableResource
    from drakit.device import OtherDevice as OtherDevice
    from drakit.device import PolicyConflict as PolicyConflict
    from drakit.device import PolicyOutcome as PolicyOutcome
    from drakit.device import PreparedDevice as PreparedDevice
    from drakit.device import RejectedDevice as RejectedDevice
    from drakit.device import RejectionReason as RejectionReason
    from drakit.device import Taint as Taint
    from drakit.device import TaintEffect as TaintEffect
    from drakit.device import Topology as Topology
    from drakit.device import Version as Version
    from drakit.driver import DeviceParameters as DeviceParameters
    from drakit.driver import DevicePolicy as DevicePolicy
    from drakit.driver import Driver as Driver
    from drakit.driver import DriverConfig as DriverConfig
    from drakit.driver import DriverError as DriverError
    from drakit.driver import Node as Node
    from drakit.driver import NoParameters as NoParameters
    from drakit.driver import ParameterVersion as ParameterVersion
    from drakit.driver import Policy as Policy
    from drakit.driver import PolicyResource as PolicyResource
    from drakit.driver import ReleasePendingError as ReleasePendingError
    from drakit.quantity import parse_quantity as parse_quantity
    from drakit.settings import Duration as Duration

_HOMES = {
    "AllocatedClaim": "drakit.device",
    "AllocatedDevice": "drakit.device",
    "AttributeValue": "drakit.device",
    "Capacity": "drakit.device",
    "CapacityRange": "drakit.device",
    "ClaimConfig": "drakit.device",
    "ClaimConsumer": "drakit.device",
    "ClaimData": "drakit.device",
    "ClaimOwner": "drakit.device",
    "ClaimReference": "drakit.device",
    "Condition": "drakit.device",
    "ConditionStatus": "drakit.device",
    "CounterSet": "drakit.device",
    "Device": "drakit.device",
    "DeviceNode": "drakit.device",
    "DeviceParameters": "drakit.driver",
    "DevicePolicy": "drakit.driver",
    "Driver": "drakit.driver",
    "DriverConfig": "drakit.driver",
    "DriverError": "drakit.driver",
    "Duration": "drakit.settings",
    "Edits": "drakit.device",
    "Health": "drakit.device",
    "HeldDevice": "drakit.device",
    "HeldNode": "drakit.device",
    "Hook": "drakit.device",
    "IntelRdt": "drakit.device",
    "Inventory": "drakit.device",
    "Mount": "drakit.device",
    "NetDevice": "drakit.device",
    "NetworkData": "drakit.device",
    "NoParameters": "drakit.driver",
    "Node": "drakit.driver",
    "NodeAllocatableResource": "drakit.device",
    "OtherDevice": "drakit.device",
    "ParameterVersion": "drakit.driver",
    "Policy": "drakit.driver",
    "PolicyConflict": "drakit.device",
    "PolicyOutcome": "drakit.device",
    "PreparedDevice": "drakit.device",
    "PolicyResource": "drakit.driver",
    "RejectedDevice": "drakit.device",
    "RejectionReason": "drakit.device",
    "ReleasePendingError": "drakit.driver",
    "Taint": "drakit.device",
    "TaintEffect": "drakit.device",
    "Topology": "drakit.device",
    "Version": "drakit.device",
    "parse_quantity": "drakit.quantity",
}

__all__ = (
    "AllocatedClaim",
    "AllocatedDevice",
    "AttributeValue",
    "Capacity",
    "CapacityRange",
    "ClaimConfig",
    "ClaimConsumer",
    "ClaimData",
    "ClaimOwner",
    "ClaimReference",
    "Condition",
    "ConditionStatus",
    "CounterSet",
    "Device",
    "DeviceNode",
    "DeviceParameters",
    "DevicePolicy",
    "Driver",
    "DriverConfig",
    "DriverError",
    "Duration",
    "Edits",
    "Health",
    "HeldDevice",
    "HeldNode",
    "Hook",
    "IntelRdt",
    "Inventory",
    "Mount",
    "NetDevice",
    "NetworkData",
    "NoParameters",
    "Node",
    "NodeAllocatableResource",
    "OtherDevice",
    "ParameterVersion",
    "Policy",
    "PolicyConflict",
    "PolicyOutcome",
    "PolicyResource",
    "PreparedDevice",
    "RejectedDevice",
    "RejectionReason",
    "ReleasePendingError",
    "Taint",
    "TaintEffect",
    "Topology",
    "Version",
    "parse_quantity",
)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
