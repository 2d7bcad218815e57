"""
From devices and what the API server holds to the writes that are needed: all pure.

The rules of a pool: only slices of its highest generation count for the scheduler, and fewer than
``resourceSliceCount`` of them make the pool incomplete. So one changed slice keeps the
generation, and anything else writes all of the pool anew under the next one. Semantics:
``resource.k8s.io/v1`` ResourceSlice, KEP-4381.

It must not know the API server's client, clocks, or where devices come from.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from drakit.device import Device
from drakit.resource.device import device_body, same_device
from drakit.resource.raw import Object, child, children, text
from drakit_nodeplugin.slices.packing import PackingLimits, pack

__all__ = ("Plan", "PoolIdentity", "plan", "slice_name")

API_VERSION = "resource.k8s.io/v1"

_INDEX = re.compile(r"(?P<index>[0-9a-f]{5})-")
MAX_OBJECT_NAME = 253


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolIdentity:
    """The pool of one driver on one node; it has the node's name."""

    driver: str
    node: str
    node_uid: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Writes, in the order in which they are made."""

    delete: list[Object] = field(default_factory=list[Object])
    """Slices as the API server holds them."""
    replace: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Whole objects, with the resourceVersion on which they build."""
    create: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def empty(self) -> bool:
        """Whether the API server holds all that is wanted already."""
        return not (self.delete or self.replace or self.create)


def slice_name(pool: PoolIdentity, index: int) -> str:
    """
    Give the name of a pool's slice; the same after a restart and for every instance.

    It begins with the index in hexadecimal, since the allocator walks slices in the order of
    their names, and ends in a digest, since two drivers and two nodes may join to one text.
    """
    identity = f"{pool.driver}/{pool.node}".encode()
    end = f"-{hashlib.sha256(identity).hexdigest()[:8]}"
    name = f"{index:05x}-{pool.driver}-{pool.node}"
    return name[: MAX_OBJECT_NAME - len(end)].rstrip(".-") + end


def plan(
    devices: Sequence[Device],
    *,
    pool: PoolIdentity,
    stored: Sequence[Object],
    limits: PackingLimits | None = None,
) -> Plan:
    """
    Say what to write so that the pool holds exactly these devices.

    `stored` are all slices of this driver on this node. A pool without devices keeps one empty
    slice, by which observers tell a driver without devices from no driver.
    """
    generation = max((_generation(body) for body in stored), default=0)
    current, obsolete = _current(stored, pool=pool, generation=generation)
    placed = {
        text(device, "name"): index
        for index, body in current.items()
        for device in children(body, "spec", "devices")
    }
    homes = pack([device.name for device in devices], placed=placed, limits=limits)
    count = max(homes.values(), default=0) + 1
    contents: list[list[dict[str, Any]]] = [[] for _ in range(count)]
    for device in sorted(devices, key=lambda device: _natural(device.name)):
        contents[homes[device.name]].append(device_body(device))

    obsolete += [body for index, body in current.items() if index >= count]
    missing = [index for index in range(count) if index not in current]
    changed = [
        index
        for index in range(count)
        if index in current
        and not _same_slice(current[index], contents[index], pool=pool, count=count)
    ]
    if missing or len(changed) > 1:
        generation += 1
        changed = [index for index in range(count) if index in current]
    write = {
        index: _slice_body(
            contents[index], pool=pool, index=index, count=count, generation=generation
        )
        for index in (*changed, *missing)
    }
    return Plan(
        delete=list(obsolete),
        replace=[_upon(current[index], write[index]) for index in changed],
        create=[write[index] for index in missing],
    )


def _current(
    stored: Sequence[Object], *, pool: PoolIdentity, generation: int
) -> tuple[dict[int, Object], list[Object]]:
    """Sort what is stored into slices that are ours to keep, by index, and obsolete ones."""
    current: dict[int, Object] = {}
    obsolete: list[Object] = []
    for body in sorted(stored, key=lambda body: text(body, "metadata", "name")):
        name = text(body, "metadata", "name")
        form = _INDEX.match(name)
        index = int(form["index"], 16) if form else -1
        ours = (
            text(body, "spec", "pool", "name") == pool.node
            and _generation(body) == generation
            and name == slice_name(pool, max(index, 0))
        )
        if ours and index not in current:
            current[index] = body
        else:
            obsolete.append(body)
    return current, obsolete


def _generation(body: Object) -> int:
    return int(child(body, "spec", "pool").get("generation") or 0)


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort ``kvm-10`` behind ``kvm-9``: the allocator takes devices in this order."""
    return tuple(
        (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)
    )


def _same_slice(
    stored: Object, devices: Sequence[Object], *, pool: PoolIdentity, count: int
) -> bool:
    have = children(stored, "spec", "devices")
    owners = {text(owner, "uid") for owner in children(stored, "metadata", "ownerReferences")}
    return (
        child(stored, "spec", "pool").get("resourceSliceCount") == count
        and owners == {pool.node_uid}
        and len(have) == len(devices)
        and all(same_device(ours, theirs) for ours, theirs in zip(devices, have, strict=True))
    )


def _slice_body(
    devices: list[dict[str, Any]], *, pool: PoolIdentity, index: int, count: int, generation: int
) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": "ResourceSlice",
        "metadata": {
            "name": slice_name(pool, index),
            "ownerReferences": [
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "name": pool.node,
                    "uid": pool.node_uid,
                    "controller": True,
                }
            ],
        },
        "spec": {
            "driver": pool.driver,
            "nodeName": pool.node,
            "pool": {
                "name": pool.node,
                "generation": generation,
                "resourceSliceCount": count,
            },
            "devices": devices,
        },
    }


def _upon(stored: Object, body: dict[str, Any]) -> dict[str, Any]:
    """Give a body that replaces a stored one; what others put into its metadata stays."""
    metadata = dict(child(stored, "metadata"))
    metadata["ownerReferences"] = body["metadata"]["ownerReferences"]
    return body | {"metadata": metadata}
