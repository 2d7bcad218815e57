"""
What one slice is to hold: how that is written, and how it differs from what the API server holds.

Which slice a device stands in is :mod:`.packing`'s, and when a difference is written
:mod:`.plan`'s.

It must not know pools, generations, or the API server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any

from drakit.device import CounterSet
from drakit.resource.device import counter_set_body, device_body, same_counter_sets, same_device
from drakit.resource.raw import Object, children, text
from drakit_nodeplugin.devices.pools import DesiredDevice, StampedTaint
from drakit_nodeplugin.devices.taints import DOMAIN
from drakit_nodeplugin.slices.names import natural
from drakit_nodeplugin.slices.stored import StoredSlice

__all__ = ("Difference", "SliceContent", "compare", "compare_contents", "slice_spec")


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceContent:
    """What a slice is to hold. Only what was wanted is compared, never what became of it."""

    devices: Mapping[str, DesiredDevice] = field(default_factory=dict[str, DesiredDevice])
    counter_sets: Mapping[str, CounterSet | None] = field(
        default_factory=dict[str, "CounterSet | None"]
    )
    """None stands for what is published already."""


class Difference(IntEnum):
    """What must be written of a slice."""

    NONE = 0
    TAINTS = 1
    """Nothing but taints: any number of slices can be written so, under the same generation."""

    CONTENT = 2


def compare(stored: StoredSlice, wanted: SliceContent) -> Difference:
    """Say how a slice differs from what it is to hold."""
    names = sorted(wanted.devices, key=natural)
    if stored.odd or list(stored.devices) != names:
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
        if device.device is not None and not same_device(
            device_body(device.device), _bare(devices[name])
        ):
            return Difference.CONTENT
        if {_key(taint) for taint in device.taints} != _comparable(devices[name], device):
            difference = Difference.TAINTS
    return difference


def compare_contents(before: SliceContent, wanted: SliceContent) -> Difference | None:
    """The same of a slice that is known to be in order; None if that does not say enough."""
    if before.devices.keys() != wanted.devices.keys():
        return Difference.CONTENT
    if before.counter_sets.keys() != wanted.counter_sets.keys():
        return Difference.CONTENT
    for name, counter_set in wanted.counter_sets.items():
        old_set = before.counter_sets[name]
        if counter_set is None or old_set == counter_set:
            continue
        if old_set is None:
            return None
        if not same_counter_sets([counter_set_body(counter_set)], [counter_set_body(old_set)]):
            return Difference.CONTENT
    difference = Difference.NONE
    for name, device in wanted.devices.items():
        old = before.devices[name]
        if device.device is not None and old.device != device.device:
            if old.device is None:
                return None
            if not same_device(device_body(device.device), device_body(old.device)):
                return Difference.CONTENT
        full = device.device is not None
        known = {_key(taint) for taint in old.taints if full or _is_ours(taint.key)}
        if {*map(_key, device.taints)} != known:
            difference = Difference.TAINTS
    return difference


def slice_spec(content: SliceContent, *, stored: Sequence[StoredSlice]) -> dict[str, Any]:
    """
    Write a content as the part of ``ResourceSlice.spec`` that it is.

    `stored` is what is published of it: of a device that is only known by name all stays but our
    taints, and a taint that is there already keeps the time when it was added.
    """
    devices: dict[str, Object] = {}
    sets: dict[str, Object] = {}
    for each in stored:
        more, more_sets = each.bodies()
        devices |= more
        sets |= more_sets
    # Devices in the order in which the allocator is to take them.
    names = sorted(content.devices, key=natural)
    spec: dict[str, Any] = {}
    if names or not content.counter_sets:
        # Beside counters the API server refuses even an empty list.
        spec["devices"] = [_device(content.devices[name], devices.get(name, {})) for name in names]
    if content.counter_sets:
        spec["sharedCounters"] = [
            dict(sets.get(name, {})) if counter_set is None else counter_set_body(counter_set)
            for name, counter_set in sorted(content.counter_sets.items())
        ]
    return spec


def _device(wanted: DesiredDevice, stored: Object) -> dict[str, Any]:
    times = _stored_taints(stored)
    taints = [_taint_body(taint, times.get(_key(taint))) for taint in wanted.taints]
    if wanted.device is not None:
        return device_body(wanted.device, taints=taints)
    # Only its driver can say that the driver's own taints are over.
    own = [dict(each) for each in children(stored, "taints") if not _is_ours(text(each, "key"))]
    taints = own + taints
    return {"name": wanted.name} | _bare(stored) | ({"taints": taints} if taints else {})


def _bare(body: Object) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != "taints"}


def _key(taint: StampedTaint) -> tuple[str, str, str]:
    return taint.key, taint.value, taint.effect


def _is_ours(key: str) -> bool:
    return key.startswith(DOMAIN)


def _comparable(body: Object, wanted: DesiredDevice) -> set[tuple[str, str, str]]:
    """Give the stored taints of a device that must be those that are wanted."""
    found = _stored_taints(body)
    return {key for key in found if wanted.device is not None or _is_ours(key[0])}


def _stored_taints(body: Object) -> dict[tuple[str, str, str], str]:
    """Give the times of a device's taints."""
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
