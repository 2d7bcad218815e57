"""
From a backend's messages to the library's plain values, and from claims to messages.

Nothing is checked here but the number of edits: the values that the API or CDI refuses are found
where devices of any driver are checked. A message without a value in our types (a taint without an
effect, an attribute without a value) becomes one that those checks name and refuse, so that it
costs its own device alone.

It must not know gRPC, connections, or which values are allowed where.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from sys import intern
from typing import Any, cast

from drakit.device import (
    AllocatedClaim,
    AllocatedDevice,
    AttributeValue,
    Capacity,
    CapacityRange,
    CounterSet,
    Device,
    DeviceNode,
    Edits,
    Health,
    Hook,
    HookName,
    IntelRdt,
    Mount,
    NetDevice,
    Taint,
    TaintEffect,
    Topology,
    Version,
)
from drakit_nodeplugin.endpoints.python.parameters import merged
from drakit_proto.backend.v1 import backend_pb2 as pb

__all__ = (
    "MAX_EDITS",
    "claim_message",
    "counter_set_of",
    "device_of",
    "edits_of",
    "entries_of",
    "health_of",
)

MAX_EDITS = 1000
"""Entries of the edits of one device: ten times what the largest drivers need."""

MAX_HEALTH_MESSAGE = 1024
"""Characters."""


_EFFECTS: Mapping[int, str] = {
    pb.TAINT_EFFECT_UNSPECIFIED: "unspecified",
    pb.TAINT_EFFECT_NONE: "None",
    pb.TAINT_EFFECT_NO_SCHEDULE: "NoSchedule",
    pb.TAINT_EFFECT_NO_EXECUTE: "NoExecute",
}
_NO_TOPOLOGY = Topology()
_NOTHING: dict[str, Any] = {}
"""Most mappings of most devices are empty; one for all of them saves memory."""


# ------------------------------------------------------------ devices


def device_of(message: pb.Device) -> Device:
    """Make a device; it may be one that the API refuses."""
    return Device(
        name=message.name,
        pool=intern(message.pool),
        attributes=_mapping(message.attributes, _attribute),
        capacity=_mapping(message.capacity, _capacity),
        topology=_topology(message.topology) if message.HasField("topology") else _NO_TOPOLOGY,
        consumes=_mapping(message.consumes, _amounts),
        allow_multiple_allocations=message.allow_multiple_allocations,
        taints=tuple([_taint(each) for each in message.taints]),
        health=health_of(message.health) if message.HasField("health") else None,
    )


def counter_set_of(message: pb.CounterSet) -> CounterSet:
    """Make a counter set; it may be one that the API refuses."""
    return CounterSet(
        name=message.name, pool=intern(message.pool), counters=_mapping(message.counters, str)
    )


def health_of(message: pb.Health) -> Health:
    """Make a health; an unknown status means that the health is unknown."""
    text = message.message[:MAX_HEALTH_MESSAGE]
    match message.status:
        case pb.HEALTH_STATUS_HEALTHY:
            return Health("healthy", text)
        case pb.HEALTH_STATUS_UNHEALTHY:
            return Health.unhealthy(text, evict_pods=message.broken)
        case _:
            return Health.unknown(text)


def _attribute(message: pb.Attribute) -> AttributeValue:
    match message.WhichOneof("value"):
        case "string":
            return intern(message.string)
        case "int":
            return message.int
        case "bool":
            return message.bool
        case "version":
            return Version(message.version)
        case "strings":
            return tuple(message.strings.values)
        case "ints":
            return tuple(message.ints.values)
        case "bools":
            return tuple(message.bools.values)
        case "versions":
            return tuple([Version(each) for each in message.versions.values])
        case _:
            return cast("AttributeValue", None)


def _capacity(message: pb.Capacity) -> str | Capacity:
    span = message.valid_range if message.HasField("valid_range") else None
    if not (message.default or message.valid_values or span):
        return message.value
    return Capacity(
        value=message.value,
        default=message.default or None,
        valid_values=tuple(message.valid_values),
        valid_range=None
        if span is None
        else CapacityRange(min=span.min, max=span.max or None, step=span.step or None),
    )


def _topology(message: pb.Topology) -> Topology:
    return Topology(
        numa_node=message.numa_node if message.HasField("numa_node") else None,
        pcie_root=message.pcie_root or None,
        pci_bus_id=message.pci_bus_id or None,
    )


def _amounts(message: pb.CounterAmounts) -> Mapping[str, str]:
    return _mapping(message.counters, str)


def _taint(message: pb.Taint) -> Taint:
    # An unknown effect, of a later version, is refused as well: its meaning is unknown.
    effect = _EFFECTS.get(message.effect, str(message.effect))
    return Taint(key=message.key, value=message.value, effect=cast("TaintEffect", effect))


def _mapping(given: Any, convert: Callable[[Any], Any]) -> Mapping[str, Any]:
    if not given:
        return _NOTHING
    return {intern(key): convert(value) for key, value in given.items()}


# ------------------------------------------------------------ edits


def entries_of(message: pb.Edits) -> int:
    """Count the entries of a device's edits. A count above :data:`MAX_EDITS` may be too low; such
    edits must not be converted."""
    count = (
        len(message.env)
        + len(message.mounts)
        + len(message.hooks)
        + len(message.device_nodes)
        + len(message.net_devices)
        + len(message.additional_gids)
        + len(message.cdi_devices)
        + len(message.intel_rdt.schemata)
    )
    if count > MAX_EDITS:
        return count  # access to a message takes a thousand bytes, and there may be many
    return (
        count
        + sum(len(mount.options) for mount in message.mounts)
        + sum(len(hook.args) + len(hook.env) for hook in message.hooks)
    )


def edits_of(message: pb.Edits) -> Edits:
    """Make the edits of a device; they may be some that CDI refuses."""
    return Edits(
        env=_env(message.env),
        device_nodes=tuple([_device_node(node) for node in message.device_nodes]),
        mounts=tuple([_mount(mount) for mount in message.mounts]),
        hooks=tuple([_hook(hook) for hook in message.hooks]),
        net_devices=tuple(
            [
                NetDevice(host_interface_name=each.host_interface_name, name=each.name)
                for each in message.net_devices
            ]
        ),
        additional_gids=tuple(message.additional_gids),
        intel_rdt=_intel_rdt(message.intel_rdt) if message.HasField("intel_rdt") else None,
        cdi_devices=tuple(message.cdi_devices),
    )


def _env(given: Mapping[str, str]) -> Mapping[str, str]:
    # Maps of messages have no order, but the same edits must give the same file.
    return dict(sorted(given.items()))


def _device_node(message: pb.DeviceNode) -> DeviceNode:
    return DeviceNode(
        path=message.path,
        host_path=message.host_path or None,
        type=message.type or None,
        major=message.major if message.HasField("major") else None,
        minor=message.minor if message.HasField("minor") else None,
        permissions=message.permissions or None,
        file_mode=message.file_mode if message.HasField("file_mode") else None,
        uid=message.uid if message.HasField("uid") else None,
        gid=message.gid if message.HasField("gid") else None,
    )


def _mount(message: pb.Mount) -> Mount:
    mount = Mount(
        host_path=message.host_path,
        container_path=message.container_path,
        type=message.type or None,
    )
    return replace(mount, options=tuple(message.options)) if message.options else mount


def _hook(message: pb.Hook) -> Hook:
    return Hook(
        name=cast("HookName", message.name),
        path=message.path,
        args=tuple(message.args),
        env=_env(message.env),
        timeout_seconds=message.timeout_seconds if message.HasField("timeout_seconds") else None,
    )


def _intel_rdt(message: pb.IntelRdt) -> IntelRdt:
    return IntelRdt(
        clos_id=message.clos_id or None,
        l3_cache_schema=message.l3_cache_schema or None,
        mem_bw_schema=message.mem_bw_schema or None,
        schemata=tuple(message.schemata),
        enable_monitoring=message.enable_monitoring,
    )


# ------------------------------------------------------------ claims


def claim_message(item: AllocatedClaim) -> pb.Claim:
    """Make the message of a claim; its pools are in the driver's words."""
    claim = item.claim
    return pb.Claim(
        namespace=claim.namespace,
        name=claim.name,
        uid=claim.uid,
        devices=[_allocated(device) for device in item.devices],
    )


def _allocated(device: AllocatedDevice) -> pb.AllocatedDevice:
    return pb.AllocatedDevice(
        name=device.name,
        pool=device.pool,
        request=device.request,
        share_id=device.share_id,
        admin_access=device.admin_access,
        consumed_capacity=device.consumed_capacity,
        configs=[_json(config) for config in device.configs],
        parameters=_json(merged(device.configs)),
    )


def _json(value: Mapping[str, Any]) -> str:
    # In ASCII: a user's text can contain lone surrogates, which no protobuf text can.
    return json.dumps(value, separators=(",", ":"))
