"""
Inventories of what a backend lists, made a few devices at a time.

A backend says all of its devices at each change, and most are as they were: those stay the objects
that they were, so that nobody looks at them again. Most are known by their bytes; others say the
same in other bytes, as maps of messages have no order. Whether a device can be published is the
device manager's question; what is refused here are messages that are none, and more devices than
any node has.

It must not know gRPC, or who takes the inventories.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from operator import is_
from typing import Generic, TypeVar

from google.protobuf.message import Message

from drakit.device import CounterSet, Device, Inventory
from drakit_nodeplugin.endpoints.backend.convert import counter_set_of, device_of
from drakit_nodeplugin.endpoints.backend.pacing import Turns
from drakit_nodeplugin.endpoints.python.stream import MAX_DEVICES
from drakit_nodeplugin.endpoints.wire import (
    MAX_PART_BYTES,
    MAX_UNKNOWN,
    GarbageError,
    parse,
    parts,
)
from drakit_proto.backend.v1 import backend_pb2 as pb

__all__ = ("InventoryReader",)

_DEVICES = pb.WatchDevicesResponse.DEVICES_FIELD_NUMBER
_COUNTER_SETS = pb.WatchDevicesResponse.COUNTER_SETS_FIELD_NUMBER
_FALLBACK = pb.WatchDevicesResponse.FALLBACK_FIELD_NUMBER
MAX_FALLBACKS = 16
"""Times that a message has the field: once, but protobuf allows to say it again, and adds it up."""

_LISTED = frozenset({_DEVICES, _COUNTER_SETS, _FALLBACK})
_OF_FALLBACK = frozenset({pb.Fallback.DEVICES_FIELD_NUMBER})

ThingT = TypeVar("ThingT", Device, CounterSet)
MessageT = TypeVar("MessageT", bound=Message)


class InventoryReader:
    """Reads the inventories of one connection."""

    def __init__(self) -> None:
        self._devices: dict[bytes, Device] = {}
        """By a digest of their messages; their bytes would take several times the memory."""
        self._counter_sets: dict[bytes, CounterSet] = {}
        self._before: Inventory | None = None

    async def read(self, raw: bytes, turns: Turns) -> Inventory | None:
        """Give the inventory of a message, or None if it equals the one before. Raises
        :class:`GarbageError`."""
        devices = _Things("devices", self._devices, pb.Device, device_of)
        fallback = _Things("devices", self._devices, pb.Device, device_of)
        sets = _Things("counter sets", self._counter_sets, pb.CounterSet, counter_set_of)
        fallbacks = 0
        for number, part in parts(raw, _LISTED, limit=len(raw)):
            if number == _DEVICES:
                devices.add(part)
            elif number == _COUNTER_SETS:
                sets.add(part)
            else:
                fallbacks += 1
                if fallbacks > MAX_FALLBACKS:
                    raise GarbageError("many fallbacks")
                for _, device in parts(
                    part, _OF_FALLBACK, max_unknown=MAX_UNKNOWN // MAX_FALLBACKS
                ):
                    fallback.add(device)
                    await turns.give_way()
            await turns.give_way()
        self._devices = devices.known | fallback.known
        self._counter_sets = sets.known
        inventory = Inventory(
            devices=tuple(devices.listed),
            counter_sets=tuple(sets.listed),
            fallback=tuple(fallback.listed) if fallbacks else None,
        )
        before, self._before = self._before, inventory
        return None if before is not None and _same(inventory, before) else inventory


class _Things(Generic[MessageT, ThingT]):
    """The devices, or the counter sets, of one message."""

    def __init__(
        self,
        plural: str,
        before: dict[bytes, ThingT],
        kind: type[MessageT],
        convert: Callable[[MessageT], ThingT],
    ) -> None:
        self._plural = plural
        self._before = before
        self._by_name: dict[tuple[str, str], ThingT] | None = None
        self._kind = kind
        self._convert = convert
        self.known: dict[bytes, ThingT] = {}
        self.listed: list[ThingT] = []

    def add(self, raw: bytes) -> None:
        if len(raw) > MAX_PART_BYTES:
            raise GarbageError(f"one of {self._plural} of more than {MAX_PART_BYTES // 1024} KiB")
        if len(self.listed) == MAX_DEVICES:
            raise GarbageError(f"more than {MAX_DEVICES:,} {self._plural}")
        digest = blake2b(raw, digest_size=16).digest()
        thing = self.known.get(digest) or self._before.get(digest)
        if thing is None:
            thing = self._as_before(self._convert(parse(self._kind, raw)))
        self.known[digest] = thing
        self.listed.append(thing)

    def _as_before(self, thing: ThingT) -> ThingT:
        """Give the one of before that says the same, if there is one."""
        if self._by_name is None:
            self._by_name = {(each.pool, each.name): each for each in self._before.values()}
        old = self._by_name.get((thing.pool, thing.name))
        return thing if old is None or _kinds(old) != _kinds(thing) or old != thing else old


def _kinds(thing: Device | CounterSet) -> Mapping[str, object]:
    """Give the types of its attributes' values: Python takes 1 and True for equal."""
    if isinstance(thing, CounterSet):
        return {}
    return {
        name: [*map(type, value)] if isinstance(value, tuple) else type(value)
        for name, value in thing.attributes.items()
    }


def _same(one: Inventory, other: Inventory) -> bool:
    """Compare by identity: what is as it was is the same object."""
    if (one.fallback is None) != (other.fallback is None):
        return False
    pairs = (
        (one.devices, other.devices),
        (one.counter_sets, other.counter_sets),
        (one.fallback or (), other.fallback or ()),
    )
    return all(len(new) == len(old) and all(map(is_, new, old)) for new, old in pairs)
