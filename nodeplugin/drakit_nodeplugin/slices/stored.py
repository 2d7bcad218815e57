"""
A ResourceSlice as the API server holds it, small enough to keep all of them.

As parsed JSON the devices of a full node would cost more memory than the whole plugin has: what is
seldom needed of them stays as compressed text.

It must not know what is wanted, or where slices come from.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson

from drakit.resource.raw import Object, child, children, text
from drakit_nodeplugin.devices.pools import PublishedTaints

__all__ = ("StoredSlice", "newer", "published_taints")

_SELECTIONS = ("nodeSelector", "allNodes", "perDeviceNodeSelection")
"""Fields of a spec that say where devices can be used; ours have ``nodeName`` alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSlice:
    """A slice of our driver on our node."""

    name: str
    uid: str
    version: str
    """Its ``resourceVersion``."""

    pool: str
    generation: int
    """The pool's, not the object's."""

    count: int
    """How many slices the pool has at this generation (``resourceSliceCount``)."""

    owners: tuple[str, ...]
    """UIDs."""

    odd: bool
    """Whether it says where its devices can be used in another way than ours do."""

    devices: tuple[str, ...]
    """Names, in their order."""

    counter_sets: tuple[str, ...]
    metadata: Mapping[str, Any]
    """All of it but the managed fields: what others put there stays when it is replaced."""

    content: bytes
    """Devices and counter sets as JSON, compressed."""

    @classmethod
    def of(cls, body: Object) -> StoredSlice:
        """Project a ResourceSlice of ``resource.k8s.io/v1``."""
        devices, sets = children(body, "spec", "devices"), children(body, "spec", "sharedCounters")
        metadata = {k: v for k, v in child(body, "metadata").items() if k != "managedFields"}
        pool = child(body, "spec", "pool")
        return cls(
            name=text(metadata, "name"),
            uid=text(metadata, "uid"),
            version=text(metadata, "resourceVersion"),
            pool=text(pool, "name"),
            generation=int(pool.get("generation") or 0),
            count=int(pool.get("resourceSliceCount") or 0),
            owners=tuple(text(owner, "uid") for owner in children(metadata, "ownerReferences")),
            odd=any(child(body, "spec").get(key) for key in _SELECTIONS),
            devices=tuple(text(device, "name") for device in devices),
            counter_sets=tuple(text(each, "name") for each in sets),
            metadata=metadata,
            # The fastest level: most of the text is the same names over and over.
            content=zlib.compress(orjson.dumps([devices, sets]), 1),
        )

    def bodies(self) -> tuple[dict[str, Object], dict[str, Object]]:
        """Give the JSON of its devices and of its counter sets, by name."""
        devices, sets = orjson.loads(zlib.decompress(self.content))
        return (
            {text(device, "name"): device for device in devices},
            {text(each, "name"): each for each in sets},
        )


def published_taints(slices: Iterable[StoredSlice]) -> dict[tuple[str, str], PublishedTaints]:
    """Give the taints of all devices that have some, by pool and name."""
    found: dict[tuple[str, str], PublishedTaints] = {}
    for each in slices:
        for name, body in each.bodies()[0].items():
            if taints := children(body, "taints"):
                found[each.pool, name] = {
                    (text(taint, "key"), text(taint, "effect")): _seconds(text(taint, "timeAdded"))
                    for taint in taints
                }
    return found


def _seconds(time: str) -> int | None:
    """Read a time of the API (RFC 3339) as seconds since 1970; None if it is none."""
    try:
        return int(datetime.fromisoformat(time).timestamp())
    except ValueError:
        return None


def newer(one: str, other: str) -> bool:
    """Compare resource versions of one object; they are integers that grow (KEP-5504)."""
    if not (one.isdigit() and other.isdigit()):
        return one != other
    return int(one) > int(other)
