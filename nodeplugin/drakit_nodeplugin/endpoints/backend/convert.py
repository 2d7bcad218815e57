"""
Converts a backend's messages to inventories and results, within limits.

The validation that applies to all drivers finds values that the API or CDI does not accept, so that
only the affected device is rejected. This module rejects only messages that cannot be parsed, an
implausible number of devices, and too many edits. :mod:`drakit_driver.runtime.backend` converts
each value.

A backend lists all of its devices at each change, and most of them are unchanged. Unchanged devices
keep their objects, so that they do not have to be compared again. Most of them are recognized by
their bytes. Others have the same content but different bytes, because protobuf maps are unordered.

Does not depend on gRPC or connections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from sys import intern
from typing import Generic, TypeVar, cast, get_args

from google.protobuf.message import Message

from drakit.device import (
    CounterSet,
    Device,
    Edits,
    Health,
    Inventory,
    PolicyConflict,
    PolicyOutcome,
    PreparedDevice,
    RejectedDevice,
    RejectionReason,
)
from drakit_driver.runtime.backend import MAX_DEVICE_BYTES, TOO_LARGE, value_of
from drakit_driver.runtime.contract import MAX_DEVICES, DeviceKey
from drakit_driver.runtime.snapshot import is_unchanged, same_inventory
from drakit_formats.resource.limits import MAX_ATTRIBUTES_AND_CAPACITIES, MAX_POOL_NAME_LENGTH
from drakit_formats.resource.nodes import device_place
from drakit_formats.resource.status import (
    MAX_CONDITIONS,
    MAX_IPS,
    checked,
    data_of,
)
from drakit_nodeplugin.endpoints.wire import GarbageError, Turns, parse, parts
from drakit_proto.backend.v1 import backend_pb2 as pb

MAX_EDITS = 1000
"""Maximum number of edits per device: ten times as many as the largest drivers need."""

# ------------------------------------------------------------ reports

MAX_CONFLICTS = 100
"""Maximum number of conflicts to keep per policy. The report lists fewer."""

MAX_TEXT_BYTES = 1024
"""Maximum size of a string in a report. Most strings are later truncated further."""

_REASONS = frozenset(get_args(RejectionReason)) - {"Refused"}
"""The reasons that a backend can set: all except the one that only the node plugin sets."""


def rejected_of(message: pb.RejectedDevice) -> RejectedDevice:
    """Convert a rejected device. An unknown reason becomes ``Other``."""
    reason = message.reason if message.reason in _REASONS else "Other"
    return RejectedDevice(
        device=message.device[:MAX_TEXT_BYTES],
        reason=cast("RejectionReason", reason),
        message=message.message[:MAX_TEXT_BYTES],
        policy=intern(message.policy[:MAX_TEXT_BYTES]),
    )


def outcome_of(message: pb.PolicyOutcome) -> PolicyOutcome:
    """Convert the outcome of a policy."""
    return PolicyOutcome(
        policy=message.policy[:MAX_TEXT_BYTES],
        matched=message.matched,
        published=message.published,
        in_use=message.in_use,
        in_use_by=message.in_use_by[:MAX_TEXT_BYTES],
        problem=message.problem[:MAX_TEXT_BYTES],
        conflicts=tuple(
            [
                PolicyConflict(
                    device=each.device[:MAX_TEXT_BYTES], policy=each.policy[:MAX_TEXT_BYTES]
                )
                for each in message.conflicts[:MAX_CONFLICTS]
            ]
        ),
    )


# ------------------------------------------------------------ edits


def entries_of(edits: pb.Edits | Edits) -> int:
    """Count the entries of a device's edits. The fields have the same names in the message and the
    class. A count above :data:`MAX_EDITS` may be incomplete: such edits must not be converted."""
    rdt = edits.intel_rdt
    count = (
        len(edits.env)
        + len(edits.mounts)
        + len(edits.hooks)
        + len(edits.device_nodes)
        + len(edits.net_devices)
        + len(edits.additional_gids)
        + len(edits.cdi_devices)
        + (len(rdt.schemata) if rdt is not None else 0)
    )
    if count > MAX_EDITS:
        # Stop here: each access to a message allocates a thousand bytes, and there may be many.
        return count
    return (
        count
        + sum(len(mount.options) for mount in edits.mounts)
        + sum(len(hook.args) + len(hook.env) for hook in edits.hooks)
    )


# ------------------------------------------------------------ results of a prepare


def prepared_of(edits: Edits, message: pb.PreparedDevice | None) -> PreparedDevice:
    """Convert the result for a device. Raises ValueError with the problem if the API would not
    accept it."""
    if message is None:
        return PreparedDevice(edits=edits)
    # Count before converting: each access to a message allocates a thousand bytes, and there may be
    # many.
    for name, given, limit in (
        ("conditions", message.conditions, MAX_CONDITIONS),
        ("network_data.ips", message.network_data.ips, MAX_IPS),
        ("attributes", message.attributes, MAX_ATTRIBUTES_AND_CAPACITIES),
    ):
        if len(given) > limit:
            raise ValueError(f"{name} have {len(given):,} entries, more than {limit}")
    data = data_of(message.data) if message.data else None
    return checked(value_of(message, PreparedDevice, edits=edits, data=data))


# ---------------------------------------------------------------- inventories

_DEVICES = pb.WatchDevicesResponse.DEVICES_FIELD_NUMBER
_COUNTER_SETS = pb.WatchDevicesResponse.COUNTER_SETS_FIELD_NUMBER
_FALLBACK = pb.WatchDevicesResponse.FALLBACK_FIELD_NUMBER
_PARTITION_TYPE = pb.WatchDevicesResponse.PARTITION_TYPE_ATTRIBUTE_FIELD_NUMBER
_ORDERED = pb.WatchDevicesResponse.ORDERED_FIELD_NUMBER
_FLAGS = frozenset({_ORDERED})
_REJECTED = pb.WatchDevicesResponse.REJECTED_FIELD_NUMBER
_OUTCOMES = pb.WatchDevicesResponse.POLICIES_FIELD_NUMBER
_WITHDRAWN = pb.WatchDevicesResponse.WITHDRAWN_FIELD_NUMBER
_LISTED = frozenset(
    {_DEVICES, _COUNTER_SETS, _FALLBACK, _PARTITION_TYPE, _REJECTED, _OUTCOMES, _WITHDRAWN}
)
_OF_FALLBACK = frozenset({pb.Fallback.DEVICES_FIELD_NUMBER})

MAX_EARLY = 1024
"""Maximum number of unlisted devices whose health to keep. The oldest are forgotten first."""

MAX_NAME = 63

MAX_ATTRIBUTE_NAME = 256
"""Maximum size of an attribute name. Validation rejects longer names anyway."""

ThingT = TypeVar("ThingT", Device, CounterSet)
ReportT = TypeVar("ReportT")


class InventoryReader:
    """Builds the inventories of one connection, a few devices per event loop iteration."""

    def __init__(self) -> None:
        self._devices: dict[bytes, Device] = {}
        """The devices, keyed by a digest of their bytes. The bytes themselves would take several
        times as much memory."""
        self._counter_sets: dict[bytes, CounterSet] = {}
        self._before: Inventory | None = None

    async def read(self, raw: bytes, turns: Turns) -> Inventory | None:
        """Return the inventory of a message, or None if it is unchanged. Raises
        :class:`GarbageError`."""
        rejected: list[RejectedDevice] = []
        withdrawn: list[str] = []

        def refuse(part: bytes, kind: type[Message], error: GarbageError) -> None:
            pool, name = place_in(part, kind)
            prefix = "it" if kind is pb.Device else "as a counter set, it"
            report = RejectedDevice(
                device=device_place(pool, name), reason="Invalid", message=f"{prefix} is {error}"
            )
            _add(rejected, report, "rejected devices")
            if kind is pb.Device:
                _add(withdrawn, f"{pool}/{name}", "withdrawn devices")

        devices = _Collection("devices", self._devices, pb.Device, Device, refuse)
        fallback = _Collection("devices", self._devices, pb.Device, Device, refuse)
        counter_sets = ("counter sets", self._counter_sets, pb.CounterSet, CounterSet)
        sets = _Collection(*counter_sets, refuse)
        has_fallback = ordered = False
        partition_type = ""
        outcomes: list[PolicyOutcome] = []
        for number, part in parts(raw, _LISTED, limit=len(raw), flags=_FLAGS):
            if number == _DEVICES:
                devices.add(part)
            elif number == _COUNTER_SETS:
                sets.add(part)
            elif number == _ORDERED:
                ordered = True
            elif number == _PARTITION_TYPE:
                partition_type = part[:MAX_ATTRIBUTE_NAME].decode(errors="replace")
            elif number == _REJECTED:
                _add(rejected, rejected_of(parse(pb.RejectedDevice, part)), "rejected devices")
            elif number == _OUTCOMES:
                _add(outcomes, outcome_of(parse(pb.PolicyOutcome, part)), "policies")
            elif number == _WITHDRAWN:
                _add(withdrawn, _name(part), "withdrawn devices")
            else:
                has_fallback = True
                for _, device in parts(part, _OF_FALLBACK, limit=len(part)):
                    fallback.add(device)
                    await turns.give_way()
            await turns.give_way()
        self._devices = devices.known | fallback.known
        self._counter_sets = sets.known
        inventory = Inventory(
            devices=tuple(devices.listed),
            counter_sets=tuple(sets.listed),
            fallback=tuple(fallback.listed) if has_fallback else None,
            ordered=ordered,
            partition_type_attribute=partition_type,
            rejected=tuple(rejected),
            policies=tuple(outcomes),
            withdrawn=tuple(withdrawn),
        )
        before, self._before = self._before, inventory
        return None if before is not None and same_inventory(inventory, before) else inventory


class _Collection(Generic[ThingT]):
    """The devices or counter sets of one message."""

    def __init__(
        self,
        plural: str,
        before: dict[bytes, ThingT],
        kind: type[Message],
        of: type[ThingT],
        refuse: Callable[[bytes, type[Message], GarbageError], None],
    ) -> None:
        """Create a collection. `refuse` is called with the bytes of an unusable member and the
        reason."""
        self._plural = plural
        self._before = before
        self._by_name: dict[tuple[str, str], ThingT] | None = None
        self._kind = kind
        self._of = of
        self._refuse = refuse
        self.known: dict[bytes, ThingT] = {}
        self.listed: list[ThingT] = []

    def add(self, raw: bytes) -> None:
        if len(self.listed) == MAX_DEVICES:
            raise GarbageError(f"more than {MAX_DEVICES:,} {self._plural}")
        digest = blake2b(raw, digest_size=16).digest()
        thing = self.known.get(digest) or self._before.get(digest)
        if thing is None:
            try:
                if len(raw) > MAX_DEVICE_BYTES:
                    raise GarbageError(TOO_LARGE)
                message = parse(self._kind, raw)
            except GarbageError as error:
                self._refuse(raw, self._kind, error)
                return
            thing = self._as_before(value_of(message, self._of))
        self.known[digest] = thing
        self.listed.append(thing)

    def _as_before(self, thing: ThingT) -> ThingT:
        """Return the equal object from the previous message, if any."""
        if self._by_name is None:
            self._by_name = {(each.pool, each.name): each for each in self._before.values()}
        old = self._by_name.get((thing.pool, thing.name))
        return thing if old is None or not is_unchanged(thing, old) else old


def place_in(part: bytes, kind: type[Message]) -> tuple[str, str]:
    """Return the pool and the name in a message that cannot be parsed as a whole. Raises
    :class:`GarbageError`."""
    numbers = [kind.DESCRIPTOR.fields_by_name[each].number for each in ("pool", "name")]
    texts = dict(parts(part, frozenset(numbers), limit=len(part)))
    pool, name = (_name(texts.get(each, b"")) for each in numbers)
    return pool, name


def _add(listed: list[ReportT], report: ReportT, plural: str) -> None:
    if len(listed) == MAX_DEVICES:
        raise GarbageError(f"more than {MAX_DEVICES:,} {plural}")
    listed.append(report)


def _name(part: bytes) -> str:
    return part[:MAX_TEXT_BYTES].decode(errors="replace")


class EarlyHealth:
    """
    The health of devices that are not listed yet.

    Messages on a backend's two streams can arrive in any order, and devices in pools that no node
    owns are never listed. The number of kept devices is limited.
    """

    def __init__(self) -> None:
        # Use plain tuples, which are faster to create: each change may create thousands of them.
        self._listed: set[tuple[str, str]] = set()
        self._health: dict[DeviceKey, Health] = {}

    def keep(self, key: DeviceKey, health: Health) -> bool:
        """Keep the health of a device if the device is not listed. Return whether it was kept."""
        if key in self._listed:
            return False
        if len(key.name) <= MAX_NAME and len(key.pool) <= MAX_POOL_NAME_LENGTH:
            self._health.pop(key, None)
            self._health[key] = health
            if len(self._health) > MAX_EARLY:
                del self._health[next(iter(self._health))]
        return True

    def list(self, inventory: Inventory) -> Mapping[DeviceKey, Health]:
        """Record the listed devices, and return the health kept for them."""
        devices = (*inventory.devices, *(inventory.fallback or ()))
        self._listed = {(device.pool, device.name) for device in devices}
        return {key: self._health.pop(key) for key in [*self._health] if key in self._listed}

    def unlisted(self) -> Mapping[DeviceKey, Health]:
        """Return the health of unlisted devices that may belong to a pool that no node owns."""
        return {key: health for key, health in self._health.items() if key.pool}
