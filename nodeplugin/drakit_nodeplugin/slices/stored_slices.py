"""
The ResourceSlices of one driver on this node, as the API server holds them, and their names.

As parsed JSON, the devices of a full node would need more memory than the rest of the node plugin.
So the parts that are seldom needed stay compressed text.

The answer to a write and the watch both report a slice, in any order: the newer report counts.
After a restore of etcd a new slice has a lower version than an old one had. So a list, and a read
after a conflict, count whatever their versions are.

It must not know which slices are desired, or where slices come from.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson

from drakit.resource.raw import Object, child, children, text
from drakit_nodeplugin.devices.model import PublishedTaints

__all__ = (
    "PoolIdentity",
    "SliceStore",
    "StoredSlice",
    "natural",
    "published_taints",
    "slice_index",
    "slice_name",
)

_SELECTIONS = ("nodeSelector", "allNodes", "perDeviceNodeSelection")
"""Fields of a spec that select nodes; ours have ``nodeName`` alone."""


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
    """Whether it selects nodes in another way than our slices do."""

    devices: tuple[str, ...]
    """Names, in their order."""

    counter_sets: tuple[str, ...]
    metadata: Mapping[str, Any]
    """Without the managed fields. What others put there stays when the slice is replaced."""

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
        """Return the JSON of its devices and of its counter sets, by name."""
        devices, sets = orjson.loads(zlib.decompress(self.content))
        return (
            {text(device, "name"): device for device in devices},
            {text(each, "name"): each for each in sets},
        )


def published_taints(slices: Iterable[StoredSlice]) -> dict[tuple[str, str], PublishedTaints]:
    """Return the taints of all tainted devices, by pool and name."""
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
    """Read a time of the API (RFC 3339) as seconds since 1970; None if it is malformed."""
    try:
        return int(datetime.fromisoformat(time).timestamp())
    except ValueError:
        return None


class SliceStore:
    """Slices by name; empty until all have been listed once."""

    def __init__(self) -> None:
        self.listed = asyncio.Event()
        self._slices: dict[str, StoredSlice] = {}

    def of_pool(self, pool: str) -> list[StoredSlice]:
        """Return the slices of one pool."""
        return [each for each in self._slices.values() if each.pool == pool]

    def pools(self) -> set[str]:
        """Return the pools that have slices."""
        return {each.pool for each in self._slices.values()}

    def find(self, name: str) -> StoredSlice | None:
        """Return one slice."""
        return self._slices.get(name)

    def replace_all(self, slices: Iterable[StoredSlice]) -> bool:
        """Keep these slices alone; return whether any slice is gone."""
        before, self._slices = self._slices, {each.name: each for each in slices}
        self.listed.set()
        return bool(before.keys() - self._slices.keys())

    def correct(self, new: StoredSlice, *, held: StoredSlice | None) -> None:
        """Keep a slice that was read because `held` is outdated; if the store holds another one
        meanwhile, the newer of the two."""
        if self._slices.get(new.name) is held:
            self._slices[new.name] = new
        else:
            self.apply(new)

    def apply(self, new: StoredSlice) -> bool:
        """Keep the newer of two; return whether it is the new one."""
        old = self._slices.get(new.name)
        if old is not None and not _is_newer(new.version, old.version):
            return False
        self._slices[new.name] = new
        return True

    def remove(self, name: str, uid: str) -> bool:
        """Forget a deleted slice; return whether it was held. A new slice of the same name has
        another UID."""
        old = self._slices.get(name)
        if old is None or old.uid != uid:
            return False
        del self._slices[name]
        return True


def _is_newer(one: str, other: str) -> bool:
    """Compare resource versions of one object; they are integers that grow (KEP-5504)."""
    if not (one.isdigit() and other.isdigit()):
        return one != other
    return int(one) > int(other)


# ---------------------------------------------------------------- names of slices

MAX_OBJECT_NAME = 253

_INDEX = re.compile(r"(?P<index>[0-9a-f]{5})-")
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolIdentity:
    """A pool of one driver on one node."""

    driver: str
    node: str
    node_uid: str
    pool: str
    """Its name in the API: that of the node, or one that begins with it."""


def slice_name(pool: PoolIdentity, index: int) -> str:
    """
    Return the name of a pool's slice: the same after a restart and for every instance.

    It begins with the index in hexadecimal, since the allocator walks slices in the order of
    their names, and ends in a digest, since two drivers and two pools may join to one text.
    """
    identity = f"{pool.driver}/{pool.pool}".encode()
    end = f"-{hashlib.sha256(identity).hexdigest()[:8]}"
    name = f"{index:05x}-{pool.driver}-{pool.pool.replace('/', '-')}"
    return name[: MAX_OBJECT_NAME - len(end)].rstrip(".-") + end


def slice_index(pool: PoolIdentity, name: str) -> int | None:
    """Return the index in the name of a pool's slice; None for a name that we did not make."""
    form = _INDEX.match(name)
    if form is None:
        return None
    index = int(form["index"], 16)
    return index if slice_name(pool, index) == name else None


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort ``kvm-10`` behind ``kvm-9``: the allocator takes devices in this order."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(name))
