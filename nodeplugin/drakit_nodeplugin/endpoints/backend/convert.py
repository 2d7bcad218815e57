"""
Converts a backend's messages to the library's plain values and inventories.

The values that the API or CDI refuses are found where devices of any driver are checked. Some
messages have no equivalent in our types: a taint without an effect, an attribute without a value.
They become values that those checks name and refuse, so that only their device is rejected. Only
messages that cannot be parsed, more devices than any node has, and too many edits are refused here.

A backend lists all of its devices at each change, and most of them are unchanged: those keep their
objects, so that they are not compared again. Their bytes identify most of them; the others have the
same content in other bytes, because maps of messages have no order.

It must not know gRPC, connections, or which values are allowed where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from sys import intern
from typing import Any, Generic, TypeVar, cast, get_args

import orjson
from google.protobuf.message import Message

from drakit.device import (
    AttributeValue,
    Capacity,
    CapacityRange,
    Condition,
    ConditionStatus,
    CounterSet,
    Device,
    DeviceNode,
    Edits,
    Health,
    Hook,
    HookName,
    IntelRdt,
    Inventory,
    Mount,
    NetDevice,
    NetworkData,
    NodeAllocatableResource,
    PolicyConflict,
    PolicyOutcome,
    PreparedDevice,
    RejectedDevice,
    RejectionReason,
    Taint,
    TaintEffect,
    Topology,
    Version,
)
from drakit_driver.runtime.backend import MAX_DEVICE_BYTES, TOO_LARGE
from drakit_driver.runtime.contract import MAX_DEVICES, DeviceKey
from drakit_driver.runtime.snapshot import is_unchanged, same_inventory
from drakit_formats.resource.limits import MAX_ATTRIBUTES_AND_CAPACITIES, MAX_POOL_NAME_LENGTH
from drakit_formats.resource.nodes import device_place
from drakit_formats.resource.status import (
    MAX_CONDITION_MESSAGE,
    MAX_CONDITIONS,
    MAX_IPS,
    data_of,
    prepared_problem,
)
from drakit_nodeplugin.endpoints.wire import GarbageError, Turns, parse, parts
from drakit_proto.backend.v1 import backend_pb2 as pb

MAX_EDITS = 1000
"""Entries of the edits of one device: ten times what the largest drivers need."""

MAX_HEALTH_MESSAGE = 1024
"""Characters of a health message."""


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
        compatibility_groups=_mapping(message.compatibility_groups, _groups),
        allow_multiple_allocations=message.allow_multiple_allocations,
        binding_conditions=tuple(message.binding_conditions),
        binding_failure_conditions=tuple(message.binding_failure_conditions),
        binds_to_node=message.binds_to_node,
        node_allocatable_resources=_mapping(message.node_allocatable_resources, _resource),
        extra=_extra(message.extra) if message.extra else _NOTHING,
        taints=tuple([_taint(each) for each in message.taints]),
        health=health_of(message.health) if message.HasField("health") else None,
        evict_if_gone=message.evict_if_gone,
        prepare_again=message.prepare_again,
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


def _groups(message: pb.CompatibilityGroups) -> tuple[str, ...]:
    return tuple(message.names)


def _resource(message: pb.NodeAllocatableResource) -> NodeAllocatableResource:
    return NodeAllocatableResource(
        device_multiplier=message.device_multiplier or None,
        capacity_key=message.capacity_key or None,
        capacity_multiplier=message.capacity_multiplier or None,
        overhead_per_pod=message.overhead_per_pod or None,
        overhead_per_container=message.overhead_per_container or None,
    )


def _extra(given: str) -> Mapping[str, Any]:
    try:
        return orjson.loads(given)
    except orjson.JSONDecodeError:
        return cast("Mapping[str, Any]", given)  # text, which the check of devices refuses


def _taint(message: pb.Taint) -> Taint:
    # An unknown effect, of a later version, is refused as well: its meaning is unknown.
    effect = _EFFECTS.get(message.effect, str(message.effect))
    return Taint(key=message.key, value=message.value, effect=cast("TaintEffect", effect))


def _mapping(given: Any, convert: Callable[[Any], Any]) -> Mapping[str, Any]:
    if not given:
        return _NOTHING
    return {intern(key): convert(value) for key, value in given.items()}


# ------------------------------------------------------------ reports

MAX_CONFLICTS = 100
"""Conflicts of a policy that are kept; the report names fewer."""

MAX_TEXT_BYTES = 1024
"""Characters of a text in a report, which shortens most further."""

_REASONS = frozenset(get_args(RejectionReason)) - {"Refused"}
"""The node plugin itself sets the other one."""


def rejected_of(message: pb.RejectedDevice) -> RejectedDevice:
    """Make a rejected device; a word that is no reason becomes ``Other``."""
    reason = message.reason if message.reason in _REASONS else "Other"
    return RejectedDevice(
        device=message.device[:MAX_TEXT_BYTES],
        reason=cast("RejectionReason", reason),
        message=message.message[:MAX_TEXT_BYTES],
        policy=intern(message.policy[:MAX_TEXT_BYTES]),
    )


def outcome_of(message: pb.PolicyOutcome) -> PolicyOutcome:
    """Make the result of a policy."""
    return PolicyOutcome(
        policy=message.policy[:MAX_TEXT_BYTES],
        matched=message.matched,
        published=message.published,
        in_use=message.in_use,
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
        identity=message.identity if message.HasField("identity") else None,
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


# ------------------------------------------------------------ what others can read


def prepared_of(edits: Edits, message: pb.PreparedDevice | None) -> PreparedDevice:
    """Make the result for a device; raise ValueError with the problem of one that the API would
    refuse."""
    if message is None:
        return PreparedDevice(edits=edits)
    # Counted first: access to a message takes a thousand bytes, and there may be many.
    for name, given, limit in (
        ("conditions", message.conditions, MAX_CONDITIONS),
        ("network_data.ips", message.network_data.ips, MAX_IPS),
        ("attributes", message.attributes, MAX_ATTRIBUTES_AND_CAPACITIES),
    ):
        if len(given) > limit:
            raise ValueError(f"{name} have {len(given):,} entries, more than {limit}")
    network = message.network_data
    prepared = PreparedDevice(
        edits=edits,
        conditions=tuple(
            [
                Condition(
                    type=each.type,
                    status=cast("ConditionStatus", each.status),
                    reason=each.reason,
                    message=each.message[:MAX_CONDITION_MESSAGE],
                )
                for each in message.conditions
            ]
        ),
        data=data_of(message.data) if message.data else None,
        network_data=NetworkData(
            interface_name=network.interface_name,
            ips=tuple(network.ips),
            hardware_address=network.hardware_address,
        )
        if message.HasField("network_data")
        else None,
        attributes=_mapping(message.attributes, _attribute),
    )
    if (problem := prepared_problem(prepared)) is not None:
        raise ValueError(problem)
    return prepared


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
"""Devices that are not listed, with a health; of more, the oldest are forgotten."""

MAX_NAME = 63

MAX_ATTRIBUTE_NAME = 256
"""Bytes of the name of an attribute; longer ones are refused by the check."""

ThingT = TypeVar("ThingT", Device, CounterSet)
ReportT = TypeVar("ReportT")
MessageT = TypeVar("MessageT", bound=Message)


class InventoryReader:
    """Builds the inventories of one connection, a few devices per turn of the event loop."""

    def __init__(self) -> None:
        self._devices: dict[bytes, Device] = {}
        """Devices by a digest of their bytes. The bytes would take several times the memory."""
        self._counter_sets: dict[bytes, CounterSet] = {}
        self._before: Inventory | None = None

    async def read(self, raw: bytes, turns: Turns) -> Inventory | None:
        """Return the inventory of a message, or None if it equals the one before. Raises
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

        devices = _Collection("devices", self._devices, pb.Device, device_of, refuse)
        fallback = _Collection("devices", self._devices, pb.Device, device_of, refuse)
        counter_sets = ("counter sets", self._counter_sets, pb.CounterSet, counter_set_of)
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


class _Collection(Generic[MessageT, ThingT]):
    """The devices, or the counter sets, of one message."""

    def __init__(
        self,
        plural: str,
        before: dict[bytes, ThingT],
        kind: type[MessageT],
        convert: Callable[[MessageT], ThingT],
        refuse: Callable[[bytes, type[Message], GarbageError], None],
    ) -> None:
        """`refuse` gets the bytes of one that cannot be used, and why."""
        self._plural = plural
        self._before = before
        self._by_name: dict[tuple[str, str], ThingT] | None = None
        self._kind = kind
        self._convert = convert
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
            thing = self._as_before(self._convert(message))
        self.known[digest] = thing
        self.listed.append(thing)

    def _as_before(self, thing: ThingT) -> ThingT:
        """Return the equal one of the message before, if there is one."""
        if self._by_name is None:
            self._by_name = {(each.pool, each.name): each for each in self._before.values()}
        old = self._by_name.get((thing.pool, thing.name))
        return thing if old is None or not is_unchanged(thing, old) else old


def place_in(part: bytes, kind: type[Message]) -> tuple[str, str]:
    """Return the pool and the name in a message that cannot be parsed as a whole; raises
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
    The health of devices that are not listed, until they are.

    A backend's two streams have no common order, and devices of pools that no node owns are never
    listed. The number of devices that are kept is bounded.
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

    def unlisted(self) -> Mapping[DeviceKey, Health]:
        """Return the health of the devices that are not listed, and that can be of a pool that no
        node owns."""
        return {key: health for key, health in self._health.items() if key.pool}
