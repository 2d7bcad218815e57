"""
What a backend reports: inventories from its list of devices, and health from the stream beside it.

A backend lists all of its devices at each change, and most of them are unchanged: those keep their
objects, so that nobody compares them again. Their bytes identify most of them; the others have the
same content in other bytes, because maps of messages have no order. The device manager decides
whether a device can be published; only messages that cannot be parsed, and more devices than any
node has, are refused here.

It must not know gRPC, or the receiver of the inventories.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Generic, TypeVar

from google.protobuf.message import Message

from drakit.device import CounterSet, Device, Health, Inventory
from drakit.resource.limits import MAX_POOL_NAME_LENGTH
from drakit_nodeplugin.endpoints.backend.convert import counter_set_of, device_of
from drakit_nodeplugin.endpoints.contract import DeviceKey
from drakit_nodeplugin.endpoints.unchanged import MAX_DEVICES, is_unchanged, same_inventory
from drakit_nodeplugin.endpoints.wire import MAX_PART_BYTES, GarbageError, Turns, parse, parts
from drakit_proto.backend.v1 import backend_pb2 as pb

__all__ = ("EarlyHealth", "InventoryReader")

_DEVICES = pb.WatchDevicesResponse.DEVICES_FIELD_NUMBER
_COUNTER_SETS = pb.WatchDevicesResponse.COUNTER_SETS_FIELD_NUMBER
_FALLBACK = pb.WatchDevicesResponse.FALLBACK_FIELD_NUMBER
_LISTED = frozenset({_DEVICES, _COUNTER_SETS, _FALLBACK})
_OF_FALLBACK = frozenset({pb.Fallback.DEVICES_FIELD_NUMBER})

MAX_EARLY = 1024
"""Devices that are not listed, with a health; of more, the oldest are forgotten."""

MAX_NAME = 63

ThingT = TypeVar("ThingT", Device, CounterSet)
MessageT = TypeVar("MessageT", bound=Message)


class InventoryReader:
    """Makes the inventories of one connection, a few devices in a turn."""

    def __init__(self) -> None:
        self._devices: dict[bytes, Device] = {}
        """By a digest of their bytes, which would take several times the memory."""
        self._counter_sets: dict[bytes, CounterSet] = {}
        self._before: Inventory | None = None

    async def read(self, raw: bytes, turns: Turns) -> Inventory | None:
        """Return the inventory of a message, or None if it equals the one before. Raises
        :class:`GarbageError`."""
        devices = _Things("devices", self._devices, pb.Device, device_of)
        fallback = _Things("devices", self._devices, pb.Device, device_of)
        sets = _Things("counter sets", self._counter_sets, pb.CounterSet, counter_set_of)
        has_fallback = False
        for number, part in parts(raw, _LISTED, limit=len(raw)):
            if number == _DEVICES:
                devices.add(part)
            elif number == _COUNTER_SETS:
                sets.add(part)
            else:
                has_fallback = True
                for _, device in parts(part, _OF_FALLBACK):
                    fallback.add(device)
                    await turns.give_way()
            await turns.give_way()
        self._devices = devices.known | fallback.known
        self._counter_sets = sets.known
        inventory = Inventory(
            devices=tuple(devices.listed),
            counter_sets=tuple(sets.listed),
            fallback=tuple(fallback.listed) if has_fallback else None,
        )
        before, self._before = self._before, inventory
        return None if before is not None and same_inventory(inventory, before) else inventory


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
        """Return the equal one of the message before, if there is one."""
        if self._by_name is None:
            self._by_name = {(each.pool, each.name): each for each in self._before.values()}
        old = self._by_name.get((thing.pool, thing.name))
        return thing if old is None or not is_unchanged(thing, old) else old


class EarlyHealth:
    """
    The health of devices that are not listed yet, until they are.

    A backend's two streams have no common order. The devices that are kept are bounded, because the
    backend may never list them.
    """

    def __init__(self) -> None:
        # Plain tuples are faster to make: each change may make thousands of them.
        self._listed: set[tuple[str, str]] = set()
        self._health: dict[DeviceKey, Health] = {}

    def keep(self, key: DeviceKey, health: Health) -> bool:
        """Keep the health of a device if it is not listed; return whether that is so."""
        if key in self._listed:
            return False
        if len(key.name) <= MAX_NAME and len(key.pool) <= MAX_POOL_NAME_LENGTH:
            self._health.pop(key, None)
            self._health[key] = health
            if len(self._health) > MAX_EARLY:
                del self._health[next(iter(self._health))]
        return True

    def list(self, inventory: Inventory) -> Mapping[DeviceKey, Health]:
        """Record the devices that are listed now, and return the health kept for them."""
        devices = (*inventory.devices, *(inventory.fallback or ()))
        self._listed = {(device.pool, device.name) for device in devices}
        return {key: self._health.pop(key) for key in [*self._health] if key in self._listed}
