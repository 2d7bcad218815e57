"""
What is published of a pool where the API server drops fields that its devices use.

It must not know slices, or how it was noticed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from drakit.device import CounterSet
from drakit.resource.features import Feature, without
from drakit_nodeplugin.devices.pools import DesiredDevice, DesiredPool

__all__ = ("Chosen", "choose", "describe")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What of a pool is published."""

    devices: Mapping[str, DesiredDevice]
    counter_sets: Mapping[str, CounterSet] | None
    """None if what is published of them stays."""

    left_out: Mapping[str, str]
    """Why devices are not published, in sentences, by their names."""


def choose(pool: DesiredPool, dropped: Collection[Feature]) -> Chosen:
    """Say what is published of a pool by an API server that drops these features."""
    sets = pool.counter_sets
    named = None if sets is None else {each.name: each for each in sets}
    devices = {device.name: device for device in pool.devices}
    if not dropped:
        return Chosen(devices=devices, counter_sets=named, left_out={})
    if pool.fallback is not None and _uses(devices.values(), dropped):
        devices = {device.name: device for device in pool.fallback}
    if Feature.COUNTERS in dropped:
        named = {}
    kept: dict[str, DesiredDevice] = {}
    left_out: dict[str, str] = {}
    for name, device in devices.items():
        if (safe := _without(device, dropped)) is not None:
            kept[name] = safe
        else:
            needed = [feature for feature in dropped if _without(device, {feature}) is None]
            left_out[name] = (
                f"the API server does not support {describe(needed)} of devices, and "
                f"publishing this device without that is not safe"
            )
    return Chosen(devices=kept, counter_sets=named, left_out=left_out)


def describe(dropped: Collection[Feature]) -> str:
    """Name features for people, with the feature gates that are likely off."""
    names = sorted(
        f"{feature.value} (feature gate {feature.gate})" if feature.gate else "fields unknown to us"
        for feature in dropped
    )
    return " and ".join(names)


def _uses(devices: Collection[DesiredDevice], dropped: Collection[Feature]) -> bool:
    # Taints come and go: what is published must not become something else with each of them.
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
        return device  # what is published of it is what the API server takes
    safe = without(device.device, dropped)
    if safe is None:
        return None
    return device if safe is device.device else replace(device, device=safe)
