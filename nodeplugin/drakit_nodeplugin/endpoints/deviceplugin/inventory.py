"""
From what a device plugin lists to an inventory: all pure.

A device that cannot be published is left out, alone and with a sentence; whatever else a plugin
lists is taken as it is, for it says all of it again at every change.

It must not know connections, or who is told of an inventory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from drakit.device import AttributeValue, Device, Health, Inventory, Topology
from drakit.resource.limits import MAX_STRING_BYTES
from drakit_nodeplugin.endpoints.deviceplugin.names import MAX_DEVICE_ID, device_name, pool_of
from drakit_nodeplugin.endpoints.deviceplugin.room import MAX_DEVICES, TooManyDevicesError

__all__ = ("Listed", "listed")

MAX_LEFT_OUT = 5
"""Sentences on what is left out of a list: who reads the first ones knows what is wrong."""

MAX_SHOWN = 64
"""Characters of a plugin's text in a sentence."""

HEALTHY = "Healthy"


class _Node(Protocol):
    @property
    def ID(self) -> int: ...


class _Topology(Protocol):
    @property
    def nodes(self) -> Iterable[_Node]: ...


class ListedDevice(Protocol):
    """A device as the plugin lists it (v1beta1 ``Device``)."""

    @property
    def ID(self) -> str: ...
    @property
    def health(self) -> str: ...
    @property
    def topology(self) -> _Topology: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """What a device plugin has."""

    inventory: Inventory = field(default_factory=lambda: Inventory(devices=()))
    ids: Mapping[str, str] = field(default_factory=dict[str, str])
    """The plugin's IDs by the devices' names."""

    left_out: tuple[str, ...] = ()
    """Sentences on what is left out, each once; only the first of many."""

    facts: Mapping[str, tuple[str, tuple[int, ...]]] = field(
        default_factory=dict[str, tuple[str, tuple[int, ...]]], repr=False
    )
    """For the next list alone: what was said of each device, by name."""


def listed(devices: Iterable[ListedDevice], *, resource: str, before: Listed | None) -> Listed:
    """
    Give the devices that can be published; those that are as they were `before` are the very same.

    Of an iterator without end no more is taken than can be published. Raises
    :class:`TooManyDevicesError`.
    """
    pool = pool_of(resource)
    old = before or Listed()
    known = {device.name: device for device in old.inventory.devices}
    made: dict[str, Device] = {}
    ids: dict[str, str] = {}
    facts: dict[str, tuple[str, tuple[int, ...]]] = {}
    problems: dict[str, None] = {}
    for count, given in enumerate(devices):
        if count == MAX_DEVICES:
            raise TooManyDevicesError
        identity = given.ID
        if problem := _problem(identity):
            problems[f"the device plugin of {resource} lists a device {problem}"] = None
            continue
        name = device_name(identity)
        if name in ids:
            # As the kubelet does: of two with one ID the last one counts.
            problems[
                f"the device plugin of {resource} lists the device ID {_shown(identity)} more than "
                f"once; what it says of it last counts"
            ] = None
        said = given.health, tuple(sorted({node.ID for node in given.topology.nodes}))
        ids[name], facts[name] = identity, said
        if name in known and old.facts.get(name) == said:
            made[name] = known[name]
        else:
            made[name] = _device(name, identity, pool=pool, resource=resource, said=said)
    return Listed(
        inventory=Inventory(devices=tuple(made.values())),
        ids=ids,
        left_out=tuple(problems)[:MAX_LEFT_OUT],
        facts=facts,
    )


def _problem(identity: str) -> str | None:
    if not identity:
        return "without an ID; it is left out"
    if len(identity) > MAX_DEVICE_ID:
        return (
            f"whose ID is longer than {MAX_DEVICE_ID} characters ({_shown(identity)}); it is left "
            f"out"
        )
    return None


def _device(
    name: str, identity: str, *, pool: str, resource: str, said: tuple[str, tuple[int, ...]]
) -> Device:
    health, nodes = said
    nodes = tuple(node for node in nodes if 0 <= node < 2**31)  # some say -1 where there is none
    texts = {"resource": resource, "id": identity}
    if len(nodes) > 1:
        texts["numaNodes"] = ",".join(map(str, nodes))
    attributes: dict[str, AttributeValue] = {
        attribute: text
        for attribute, text in texts.items()
        if text.isprintable() and len(text.encode()) <= MAX_STRING_BYTES
    }
    return Device(
        name=name,
        pool=pool,
        attributes=attributes,
        topology=Topology(numa_node=nodes[0]) if len(nodes) == 1 else Topology(),
        health=_health(health, resource),
    )


def _health(said: str, resource: str) -> Health:
    if said == HEALTHY:
        return Health.healthy()
    word = "Unhealthy" if said == "Unhealthy" else f"{_shown(said)}, which is not Healthy"
    return Health.unhealthy(f"the device plugin of {resource} says that it is {word}")


def _shown(text: str) -> str:
    return repr(text[:MAX_SHOWN]) + ("..." if len(text) > MAX_SHOWN else "")
