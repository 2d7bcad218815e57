"""
The CustomResourceDefinition of HostDevicePolicy: the model's schema, with the rules that it lacks.

The rules repeat checks of :mod:`drakit_drivers.hostdev.policy`, so that the API server rejects a
mistake at once. Checks that need lists of dangerous paths stay in the model.

It must not know how a schema is made of a model.
"""

from __future__ import annotations

from typing import Any

from drakit_drivers.hostdev.matching import RAW_DISK_SUBSYSTEMS
from drakit_drivers.hostdev.policy import HostDevicePolicySpec
from tools.crds.schema import Rules, structural

RULES: Rules = {
    "": (
        (
            "!self.match.exists(m, m.subsystem == 'block') || !has(self.sharing) || "
            "!has(self.sharing.mode) || self.sharing.mode == 'Exclusive'",
            "block devices cannot be shared, because two pods could write to the same blocks; "
            "use sharing.mode: Exclusive",
        ),
        (
            "!self.match.exists(m, m.subsystem == 'block') || !has(self.group) || "
            "self.group == 'Node'",
            "group: Unit is not supported for block devices; use Node",
        ),
        (
            "!has(self.group) || self.group == 'Node' || !has(self.container) || "
            "!has(self.container.path) || self.container.path.endsWith('/') || "
            "self.container.path.contains('*')",
            "with group: Unit, container.path must end in '/', or contain '*' in its last "
            "component",
        ),
    ),
    "match[].subsystem": (
        (
            f"!(self in [{', '.join(repr(each) for each in RAW_DISK_SUBSYSTEMS)}])",
            "devices of this subsystem can write to mounted disks; use a CSI driver for disks",
        ),
    ),
    "match[].paths[]": (
        ("self.startsWith('/dev/')", "each path must be below /dev/"),
        (
            "!self.contains('/../') && !self.contains('//')",
            "a path must not contain '..' or empty components",
        ),
    ),
    "sharing": (
        (
            "!has(self.users) || (has(self.mode) && self.mode != 'Exclusive')",
            "users needs mode: Users or mode: Capacity",
        ),
        (
            "has(self.users) || !has(self.mode) || self.mode == 'Exclusive'",
            "mode: Users and mode: Capacity need users, the number of claims that can share a "
            "device",
        ),
    ),
    "container.path": (
        ("self.startsWith('/dev/') && self != '/dev/'", "the path must be below /dev/"),
    ),
    "container.env": (
        (
            "!self.exists(key, key.startsWith('HOSTDEV_'))",
            "names that begin with HOSTDEV_ are reserved for the driver",
        ),
    ),
    "deviceClass.extendedResourceName": (
        (
            "!self.matches('^([^/]+[.])?kubernetes[.]io/') && !self.startsWith('requests.')",
            "use a domain of your own: the domain kubernetes.io and the prefix requests. are "
            "reserved",
        ),
    ),
}


def definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition."""
    spec = structural(HostDevicePolicySpec, RULES)
    matcher = spec["properties"]["match"]["items"]["properties"]
    for name in ("usb", "pci", "parent"):
        matcher[name]["minProperties"] = 1
    attribute = spec["properties"]["attributes"]["additionalProperties"]
    attribute |= {"minProperties": 1, "maxProperties": 1}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "hostdevicepolicies.drakit.dev"},
        "spec": {
            "group": "drakit.dev",
            "scope": "Cluster",
            "names": {
                "kind": "HostDevicePolicy",
                "listKind": "HostDevicePolicyList",
                "plural": "hostdevicepolicies",
                "singular": "hostdevicepolicy",
                "shortNames": ["hdp"],
                "categories": ["drakit"],
            },
            "versions": [
                {
                    "name": "v1alpha1",
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": _COLUMNS,
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "description": "HostDevicePolicy selects host devices that pods can "
                            "claim, and defines how pods share and use them.",
                            "required": ["spec"],
                            "properties": {
                                "apiVersion": {"type": "string"},
                                "kind": {"type": "string"},
                                "metadata": {"type": "object", "properties": {"name": _NAME}},
                                "spec": spec,
                                "status": _STATUS,
                            },
                        }
                    },
                }
            ],
        },
    }


_NAME = {"type": "string", "maxLength": 40, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}

_COLUMNS = [
    {
        "name": "Ready",
        "type": "string",
        "jsonPath": '.status.conditions[?(@.type=="Ready")].status',
        "description": "True if at least one node has matching devices, and all nodes that report "
        "the policy apply its current generation.",
    },
    {"name": "Nodes", "type": "integer", "jsonPath": ".status.nodes"},
    {"name": "Devices", "type": "integer", "jsonPath": ".status.devices"},
    {"name": "Healthy", "type": "integer", "jsonPath": ".status.healthy", "priority": 1},
    {"name": "Allocated", "type": "integer", "jsonPath": ".status.allocated"},
    {"name": "Class", "type": "string", "jsonPath": ".status.deviceClass"},
    {
        "name": "Reason",
        "type": "string",
        "jsonPath": '.status.conditions[?(@.type=="Ready")].reason',
        "priority": 1,
    },
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
]


def _count(description: str) -> dict[str, Any]:
    return {"type": "integer", "format": "int32", "minimum": 0, "description": description}


def _string(description: str, limit: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": limit, "description": description}


def _items(description: str, limit: int, properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "array",
        "maxItems": limit,
        "description": description,
        "x-kubernetes-list-type": "atomic",
        "items": {"type": "object", "required": list(properties), "properties": properties},
    }


_NODE = _string("The name of the node.", 253)

_STATUS = {
    "type": "object",
    "description": "The observed state of the policy in the cluster. The operator writes it.",
    "properties": {
        "observedGeneration": {
            "type": "integer",
            "format": "int64",
            "description": "The generation of the policy that the operator observed last.",
        },
        "conditions": {
            "type": "array",
            "maxItems": 8,
            "description": "`Ready` is true if at least one node has matching devices, and all "
            "nodes that report the policy apply its current generation.",
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
            "items": {
                "type": "object",
                "required": ["type", "status", "lastTransitionTime", "reason", "message"],
                "properties": {
                    "type": {"type": "string", "maxLength": 316},
                    "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                    "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
                    "lastTransitionTime": {"type": "string", "format": "date-time"},
                    "reason": {"type": "string", "minLength": 1, "maxLength": 1024},
                    "message": {"type": "string", "maxLength": 32768},
                },
            },
        },
        "deviceClass": _string("The DeviceClass that the operator maintains for the policy.", 253),
        "nodes": _count("The number of nodes with devices that the policy matches."),
        "matched": _count("The number of devices that the policy matches on all nodes."),
        "devices": _count("The number of published devices."),
        "healthy": _count("The number of published devices without a taint."),
        "allocated": _count("The number of devices that are allocated to claims."),
        "conflicts": _items(
            "Devices that another policy also matches. Lists at most 20 devices.",
            20,
            {
                "node": _NODE,
                "device": _string("The path of the device on the node.", 256),
                "policy": _string("The name of the other policy.", 253),
            },
        ),
        "problems": _items(
            "Nodes that cannot apply the policy, with reasons. Lists at most 20 nodes.",
            20,
            {"node": _NODE, "message": _string("The cause and the remedy.", 1024)},
        ),
        "kopf": {
            "type": "object",
            "description": "The state of the operator's framework.",
            "x-kubernetes-preserve-unknown-fields": True,
        },
    },
}
