"""
The stored and the desired content of one slice: its JSON, and the difference between two contents.
Pure functions.

As parsed JSON, the devices of a full node would need more memory than the rest of the node plugin.
Therefore, the rarely needed parts of a stored slice remain compressed JSON. :mod:`.packing` decides
which slice contains a device, and :mod:`.plan` decides when to write a difference.

Does not depend on pools, generations or the API server.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import IntEnum
from functools import lru_cache
from typing import Any

import orjson

from drakit.device import CounterSet
from drakit_formats.resource.device import (
    Feature,
    counter_set_body,
    device_body,
    same_counter_sets,
    same_device,
    without,
)
from drakit_formats.resource.objects import Object, child, children, text
from drakit_nodeplugin.devices.model import (
    DesiredDevice,
    DesiredPool,
    PublishedTaints,
    StampedTaint,
    keep_places,
)
from drakit_nodeplugin.devices.taints import DOMAIN

_SELECTIONS = ("nodeSelector", "allNodes", "perDeviceNodeSelection")
"""The fields of a spec, besides ``nodeName``, that select nodes. The node plugin's own slices use
only ``nodeName``."""

_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSlice:
    name: str
    uid: str
    version: str
    """The slice's ``metadata.resourceVersion``."""

    driver: str
    node: str
    """The node that the slice names. Empty if it does not name a single node."""

    pool: str
    generation: int
    """The generation of the pool, not of the object."""

    count: int
    """The number of slices of the pool at this generation (``resourceSliceCount``)."""

    owners: tuple[str, ...]
    """The UIDs in the owner references."""

    foreign_selection: bool
    """Whether the slice selects nodes by fields other than ``nodeName``. The node plugin's own
    slices never do."""

    devices: tuple[str, ...]
    """The device names, in order."""

    counter_sets: tuple[str, ...]
    partition_type: str
    """The attribute that contains the partition type, or an empty string."""

    metadata: Mapping[str, Any]
    """The metadata without managed fields. Entries of other clients are kept when the slice is
    replaced."""

    content: bytes
    """The devices and counter sets, as compressed JSON."""

    @classmethod
    def of(cls, body: Object) -> StoredSlice:
        """Project a ResourceSlice of ``resource.k8s.io/v1``."""
        devices, sets = children(body, "spec", "devices"), children(body, "spec", "sharedCounters")
        spec = child(body, "spec")
        metadata = {k: v for k, v in child(body, "metadata").items() if k != "managedFields"}
        pool = child(spec, "pool")
        return cls(
            name=text(metadata, "name"),
            uid=text(metadata, "uid"),
            version=text(metadata, "resourceVersion"),
            driver=text(spec, "driver"),
            node=text(spec, "nodeName"),
            pool=text(pool, "name"),
            generation=int(pool.get("generation") or 0),
            count=int(pool.get("resourceSliceCount") or 0),
            owners=tuple(text(owner, "uid") for owner in children(metadata, "ownerReferences")),
            foreign_selection=any(spec.get(key) for key in _SELECTIONS),
            devices=tuple(text(device, "name") for device in devices),
            counter_sets=tuple(text(each, "name") for each in sets),
            partition_type=text(spec, "partitionTypeAttribute"),
            metadata=metadata,
            # The fastest level is sufficient, because most of the content is repeated names.
            content=zlib.compress(orjson.dumps([devices, sets]), 1),
        )

    def bodies(self) -> tuple[dict[str, Object], dict[str, Object]]:
        """Return the JSON of the devices and of the counter sets, each keyed by name."""
        devices, sets = orjson.loads(zlib.decompress(self.content))
        return (
            {text(device, "name"): device for device in devices},
            {text(each, "name"): each for each in sets},
        )


def published_taints(slices: Iterable[StoredSlice]) -> dict[tuple[str, str], PublishedTaints]:
    """Return the taints of all tainted devices, keyed by pool and name."""
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
    """Parse an API time (RFC 3339) to a Unix timestamp. Return None if it is malformed."""
    try:
        return int(datetime.fromisoformat(time).timestamp())
    except ValueError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceContent:
    """The desired content of a slice."""

    devices: Mapping[str, DesiredDevice] = field(default_factory=dict[str, DesiredDevice])
    """The devices, in the order in which the allocator tries them."""

    counter_sets: Mapping[str, CounterSet | None] = field(
        default_factory=dict[str, "CounterSet | None"]
    )
    """The counter sets, keyed by name. The value None keeps the published content."""

    partition_type: str | None = ""
    """The attribute that contains the partition type. None keeps the published one."""


def partition_type_of(devices: Collection[DesiredDevice], attribute: str | None) -> str | None:
    """Return the partition type attribute for a slice with these devices. The API requires that at
    least one device consumes counters, and that every device that does has the attribute."""
    if not attribute:
        return attribute
    if any(each.device is None for each in devices):
        return None
    consumers = [each.device for each in devices if each.device and each.device.consumes]
    names = (attribute, attribute.rpartition("/")[2])
    typed = all(
        any(isinstance(each.attributes.get(name), str) for name in names) for each in consumers
    )
    return attribute if consumers and typed else ""


def keep_published(device: DesiredDevice) -> DesiredDevice:
    """Return the device as it is published, but with the node plugin's current taints."""
    return replace(
        device, device=None, taints=tuple(each for each in device.taints if _is_ours(each.key))
    )


class Difference(IntEnum):
    """The kind of write that a slice needs."""

    NONE = 0
    TAINTS = 1
    """Only taints differ. Any number of slices can then be written in the same generation."""

    CONTENT = 2


# ---------------------------------------------------------------- dropped fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The part of a pool that is published."""

    devices: Mapping[str, DesiredDevice]
    counter_sets: Mapping[str, CounterSet]
    keeps_counter_sets: bool
    """Whether other published counter sets are kept."""

    partition_type: str | None
    """The attribute that contains the partition type. None keeps the published one."""

    rejected: Mapping[str, str]
    """The reasons why devices are not published, keyed by device name."""


def choose(pool: DesiredPool, dropped: Collection[Feature]) -> Chosen:
    """Return the part of a pool to publish if the API server drops these features."""
    sets = {each.name: each for each in pool.counter_sets}
    keeps_sets = pool.keeps_counter_sets
    devices = {device.name: device for device in pool.devices}
    partition_type = pool.partition_type_attribute
    if Feature.PARTITION_TYPES in dropped:
        partition_type = ""
    if not dropped:
        return Chosen(
            devices=devices,
            counter_sets=sets,
            keeps_counter_sets=keeps_sets,
            partition_type=partition_type,
            rejected={},
        )
    if pool.fallback is not None and _uses(devices.values(), dropped):
        devices = {device.name: device for device in pool.fallback}
    if Feature.COUNTERS in dropped:
        sets, keeps_sets = {}, False
    kept: dict[str, DesiredDevice] = {}
    rejected: dict[str, str] = {}
    for name, device in devices.items():
        if (safe := _without(device, dropped)) is not None:
            kept[name] = safe
        else:
            needed = [feature for feature in dropped if _without(device, {feature}) is None]
            rejected[name] = (
                f"the device cannot be published safely without its {_listed(needed)}, which the "
                f"API server does not support"
            )
    return Chosen(
        devices=kept,
        counter_sets=sets,
        keeps_counter_sets=keeps_sets,
        partition_type=partition_type,
        rejected=rejected,
    )


def describe(dropped: Collection[Feature]) -> str:
    """Describe dropped device fields for users, with the feature gates that are probably
    disabled."""
    if {*dropped} == {Feature.OTHER}:
        return "some device fields"
    return f"these device fields: {_listed(dropped)}"


def _listed(features: Collection[Feature]) -> str:
    names = sorted(
        f"{feature.value} (feature gate {feature.gate})" if feature.gate else feature.value
        for feature in features
        if feature is not Feature.OTHER
    )
    return " and ".join([*names, "others"] if Feature.OTHER in features else names)


_EFFECTS = {
    Feature.TAINTS: "devices with a NoSchedule or NoExecute taint are not published",
    Feature.COUNTERS: "devices that consume counters are not published",
    Feature.LIST_ATTRIBUTES: "devices are published without these attributes",
    Feature.MULTIPLE_ALLOCATIONS: "each device can be allocated to only one claim at a time",
    Feature.BINDING_CONDITIONS: "devices with binding conditions are not published",
    Feature.COMPATIBILITY_GROUPS: "devices with compatibility groups are not published",
    Feature.NODE_ALLOCATABLE_RESOURCES: (
        "devices that provide resources of the node are not published, and overheads are ignored"
    ),
    Feature.PARTITION_TYPES: "slices do not name the attribute with the type of partitions",
    Feature.EXTRA: "devices with extra fields are not published",
    Feature.OTHER: "devices are published without the unsupported fields",
}


def effects(dropped: Collection[Feature], pools: Iterable[DesiredPool]) -> str:
    """Describe for users how the node plugin publishes devices with these features, which the API
    server drops."""
    affected = [pool for pool in pools if _uses(pool.devices, dropped)]
    if affected and all(pool.fallback is not None for pool in affected):
        replaced = "the node plugin publishes the driver's fallback instead"
        # A fallback does not replace devices that have taints.
        kept = {*dropped} & {Feature.TAINTS}
        return " and ".join([replaced, *(_EFFECTS[feature] for feature in kept)])
    return " and ".join(_EFFECTS[feature] for feature in Feature if feature in dropped)


def _uses(devices: Collection[DesiredDevice], dropped: Collection[Feature]) -> bool:
    # Taints change often, so they must not cause switches between the devices and the fallback.
    lasting = {*dropped} - {Feature.TAINTS}
    return any(
        device.device is not None and without(device.device, lasting) is not device.device
        for device in devices
    )


def _without(device: DesiredDevice, dropped: Collection[Feature]) -> DesiredDevice | None:
    if Feature.TAINTS in dropped:
        if any(taint.effect != "None" for taint in device.taints):
            return None
        device = replace(device, taints=())
    if device.device is None:
        return device  # the API server accepted the published device
    safe = without(device.device, dropped)
    if safe is None:
        return None
    return device if safe is device.device else replace(device, device=safe)


# ---------------------------------------------------------------- differences


def compare(stored: StoredSlice, wanted: SliceContent) -> Difference:
    """Return how a slice in the API server differs from its desired content."""
    if stored.foreign_selection or list(stored.devices) != list(wanted.devices):
        return Difference.CONTENT
    if wanted.partition_type not in (None, stored.partition_type):
        return Difference.CONTENT
    if set(stored.counter_sets) != set(wanted.counter_sets):
        return Difference.CONTENT
    devices, sets = stored.bodies()
    for name, counter_set in wanted.counter_sets.items():
        if counter_set is not None and not same_counter_sets(
            [counter_set_body(counter_set)], [sets[name]]
        ):
            return Difference.CONTENT
    difference = Difference.NONE
    for name, device in wanted.devices.items():
        if device.device is not None and not same_device(device_body(device.device), devices[name]):
            return Difference.CONTENT
        if {_key(taint) for taint in device.taints} != _comparable(devices[name], device):
            difference = Difference.TAINTS
    return difference


def compare_contents(before: SliceContent, wanted: SliceContent) -> Difference | None:
    """Return the difference between the previous and the current desired content of a slice, or
    None if only :func:`compare` can decide. Unchanged parts are the same objects."""
    if list(before.devices) != list(wanted.devices):
        return Difference.CONTENT
    if wanted.partition_type is not None and before.partition_type != wanted.partition_type:
        return None if before.partition_type is None else Difference.CONTENT
    if before.counter_sets.keys() != wanted.counter_sets.keys():
        return Difference.CONTENT
    for name, counter_set in wanted.counter_sets.items():
        old_set = before.counter_sets[name]
        if counter_set is None or old_set is counter_set:
            continue
        if old_set is None:
            return None
        if not same_counter_sets([counter_set_body(counter_set)], [counter_set_body(old_set)]):
            return Difference.CONTENT
    difference = Difference.NONE
    for name, device in wanted.devices.items():
        old = before.devices[name]
        if old is device:
            continue
        if device.device is not None and old.device is not device.device:
            if old.device is None:
                return None
            if not same_device(device_body(device.device), device_body(old.device)):
                return Difference.CONTENT
        full = device.device is not None
        known = {_key(taint) for taint in old.taints if full or _is_ours(taint.key)}
        if {*map(_key, device.taints)} != known:
            difference = Difference.TAINTS
    return difference


def same_desired(before: DesiredDevice, wanted: DesiredDevice) -> bool:
    """Return whether a device is published in the same way as before."""
    old, new = (SliceContent(devices={each.name: each}) for each in (before, wanted))
    return same_content(old, new)


def same_content(before: SliceContent, wanted: SliceContent) -> bool:
    """Return whether two desired contents have the same JSON."""
    return compare_contents(before, wanted) is Difference.NONE


# ---------------------------------------------------------------- JSON


def slice_spec(content: SliceContent, *, stored: Sequence[StoredSlice]) -> dict[str, Any]:
    """
    Return the part of ``ResourceSlice.spec`` for a content.

    `stored` are the published slices that contain its devices. If only the name of a device is
    known, its published body is kept, except for the node plugin's taints. A taint that is already
    published keeps the time at which it was added.
    """
    devices: dict[str, Object] = {}
    sets: dict[str, Object] = {}
    partition_type = content.partition_type
    for each in stored:
        more, more_sets = each.bodies()
        devices |= more
        sets |= more_sets
        if content.partition_type is None:
            partition_type = each.partition_type or partition_type
    spec: dict[str, Any] = {}
    if content.devices or not content.counter_sets:
        # In a slice with counter sets, the API server rejects even an empty list of devices.
        spec["devices"] = [
            _device(device, devices.get(name, {})) for name, device in content.devices.items()
        ]
    if partition_type and any(each.get("consumesCounters") for each in spec.get("devices", ())):
        spec["partitionTypeAttribute"] = partition_type
    if content.counter_sets:
        spec["sharedCounters"] = [
            dict(sets.get(name, {})) if counter_set is None else counter_set_body(counter_set)
            for name, counter_set in sorted(content.counter_sets.items())
        ]
    return spec


def _device(wanted: DesiredDevice, stored: Object) -> dict[str, Any]:
    times = _stored_taints(stored) if wanted.taints else {}
    taints = [_taint_body(taint, times.get(_key(taint))) for taint in wanted.taints]
    if wanted.device is not None:
        return device_body(wanted.device, taints=taints)
    # Keep the driver's own taints, because only the driver knows when they end.
    own = [dict(each) for each in children(stored, "taints") if not _is_ours(text(each, "key"))]
    taints = own + taints
    rest = {key: value for key, value in stored.items() if key != "taints"}
    return rest | ({"taints": taints} if taints else {})


def _key(taint: StampedTaint) -> tuple[str, str, str]:
    return taint.key, taint.value, taint.effect


def _is_ours(key: str) -> bool:
    return key.startswith(DOMAIN)


def _comparable(body: Object, wanted: DesiredDevice) -> set[tuple[str, str, str]]:
    """Return those published taints of a device that must equal the desired ones."""
    found = _stored_taints(body)
    return {key for key in found if wanted.device is not None or _is_ours(key[0])}


def _stored_taints(body: Object) -> dict[tuple[str, str, str], str]:
    """Return the times at which the taints of a device were added."""
    return {
        (text(taint, "key"), text(taint, "value"), text(taint, "effect")): text(taint, "timeAdded")
        for taint in children(body, "taints")
    }


def _taint_body(taint: StampedTaint, added: str | None) -> dict[str, Any]:
    body: dict[str, Any] = {"key": taint.key, "effect": taint.effect}
    if taint.value:
        body["value"] = taint.value
    body["timeAdded"] = added or _rfc3339(taint.added_at)
    return body


def _rfc3339(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def published_order(
    devices: Mapping[str, DesiredDevice], published: Iterable[str]
) -> dict[str, DesiredDevice]:
    """Return the devices of a pool in the driver's order. A device that is known only by name has a
    position only if it is published."""
    listed = [name for name, each in devices.items() if each.device is not None]
    names = keep_places(listed, (name for name in published if name in devices))
    return {name: devices[name] for name in (*names, *devices)}


# Cache the keys, because each round sorts the device names of all slices.
@lru_cache(maxsize=16384)
def natural_order(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key that sorts ``kvm-10`` after ``kvm-9``. The allocator takes devices in this
    order."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(name))
