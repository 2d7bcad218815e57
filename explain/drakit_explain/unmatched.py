"""
Why no published device matches a request: matching devices are in slices that do not count, or a
selector names a driver, an attribute or a value that no device has.

Does not depend on pods, or on which devices are allocated.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from itertools import islice

from drakit_explain.allocation import NotEvaluatedError
from drakit_explain.devices import DeviceFacts, Version
from drakit_explain.model import Request, SliceFacts
from drakit_explain.pools import newest, place_includes
from drakit_explain.reports import dropped_fields
from drakit_explain.selectors import only_driver
from drakit_explain.world import World

_CHANGES_MATCHES = (
    "BindingConditions",
    "CompatibilityGroups",
    "Counters",
    "Extra",
    "ListAttributes",
    "NodeAllocatableResources",
    "Other",
    "Taints",
)
"""Features of devices without which others are published, or the same with fewer attributes."""

MAX_COMPARED = 256
"""Devices whose attributes are compared with a selector."""

_NAMED = 3

_ACCESS = re.compile(
    r"""device\.(?P<field>attributes|capacity)\[(?P<q>['"])(?P<domain>[^'"]+)(?P=q)\]"""
    r"""(?:\.(?P<name>\w+)|\[['"](?P<key>[^'"]+)['"]\])"""
    r"""(?:\s*(?P<operator>==|!=|<=|>=|<|>)\s*(?:(?P<v>['"])(?P<value>[^'"]*)(?P=v)|(?P<other>\S+)))?"""
)
"""An attribute or a capacity in a selector, and the text that it is compared with."""

_TEST = re.compile(
    r"""['"](?P<name>\w+)['"]\s+in\s+device\.(?P<field>attributes|capacity)"""
    r"""\[['"](?P<domain>[^'"]+)['"]\]"""
)


def why_unmatched(request: Request, world: World) -> str:
    """Return why no device matches a request, as a clause; empty if that is unknown."""
    texts = [text for _, text in world.expressions(request)]
    if why := _uncounted(request, world) or _misspelt_driver(texts, world):
        return why
    drivers = {each.driver for each in world.slices() if each.devices}
    lost = dropped_fields([*drivers & {*map(only_driver, texts)}], _CHANGES_MATCHES, world)
    if lost:
        lost = f"check whether the selectors need fields that the API server drops ({lost})"
    return "; ".join(filter(None, (_absent(texts, world), lost)))


def why_it_fails(failure: str, texts: Collection[str], device: DeviceFacts, driver: str) -> str:
    """
    Return how to correct a selector that compares a version or a quantity like a string.

    :param texts: the selectors of the request, of which one fails.
    """
    if "overload" not in failure:
        return ""
    for each in (match for text in texts for match in _ACCESS.finditer(text)):
        name, operator = each["name"] or each["key"], each["operator"]
        access, given = each[0].partition(operator or " ")[0].strip(), each["value"]
        if operator is None:
            continue
        if each["field"] == "capacity":
            amount = each["other"] if given is None else f'quantity("{given}")'
            return (
                f"{name} is a quantity, which is compared with compareTo: "
                f"{access}.compareTo({amount}) {operator} 0"
            )
        if given is not None and isinstance(device.attribute(name, driver), Version):
            return (
                f"{name} is a version, which is compared with compareTo: "
                f'{access}.compareTo(semver("{given}")) {operator} 0'
            )
    return ""


def domain_of(key: str, texts: Collection[str]) -> str:
    """Return the domain of the attribute or capacity that selectors read by a name, if any does."""
    found = (match for text in texts for match in _ACCESS.finditer(text))
    return next((each["domain"] for each in found if key in (each["name"], each["key"])), "")


# ---- slices that do not count


def _uncounted(request: Request, world: World) -> str:
    for of in world.uncounted():
        if not of.unread:
            try:
                number = world.selected(request, of).matches.bit_count()
            except NotEvaluatedError:
                continue
            if number and (why := _why_uncounted(of, world)):
                devices = "1 device that matches is" if number == 1 else f"{number} that match are"
                return f"{devices} in ResourceSlice {of.name} {why}"
    return ""


def _why_uncounted(of: SliceFacts, world: World) -> str:
    current = newest(world.slices_of_pool(of.of_pool))
    generation = max(each.generation for each in current)
    if of.generation < generation:
        return (
            f"of generation {of.generation}, but the scheduler only uses generation {generation} "
            f"of pool {of.pool}, which has no such device; check the log of the driver"
        )
    views = world.views().values()
    if of.place is not None and not any(place_includes(of.place, each) for each in views):
        if node := of.place.node:
            return (
                f"of node {node}, which does not exist; delete the slice if the node does not "
                f"return"
            )
        return (
            "whose node selector matches no node; correct it in the driver, or the labels of the "
            "nodes"
        )
    if len(current) != of.pool_slices:
        return (
            f"of a pool with {len(current)} of {of.pool_slices} slices; they count when the driver "
            f"has published all of them"
        )
    return ""


# ---- names and values


def _misspelt_driver(texts: Collection[str], world: World) -> str:
    published = {each.driver for each in world.slices() if each.devices}
    for driver in filter(None, map(only_driver, texts)):
        if driver not in published and (close := get_close_matches(driver, published, n=1)):
            return f"no slice of driver {driver} has devices, but driver {close[0]} publishes some"
    return ""


def _devices(world: World) -> Iterator[tuple[str, DeviceFacts]]:
    return ((of.driver, each) for of in world.slices() for each in of.devices)


def _absent(texts: Collection[str], world: World) -> str:
    """Return the first attribute, capacity or value of selectors that no device has."""
    accesses = [match for text in texts for match in _ACCESS.finditer(text)]
    tests = [match for text in texts for match in _TEST.finditer(text)]
    if not accesses and not tests:
        return ""
    attributes: dict[str, dict[str, None]] = {}
    capacities: set[str] = set()
    for driver, device in islice(_devices(world), MAX_COMPARED):
        for name, value in zip(device.kind.attributes, device.values, strict=True):
            values = attributes.setdefault(_full(name, driver), {})
            if isinstance(value, str):
                values[value] = None
        capacities.update(_full(each.name, driver) for each in device.kind.capacity)
    if not attributes and not capacities:
        return ""
    for each in accesses:
        name = f"{each['domain']}/{each['name'] or each['key']}"
        known = attributes if each["field"] == "attributes" else capacities
        if name not in known:
            return _unknown(name, known)
        values = attributes.get(name, {})
        value = each["value"]
        if each["operator"] == "==" and value is not None and values and value not in values:
            close = get_close_matches(value, values, n=_NAMED, cutoff=0.3) or list(values)[:_NAMED]
            have = ", ".join(f'"{one}"' for one in close)
            more = f" and {len(values) - len(close)} others" if len(values) > len(close) else ""
            return f'no device has the value "{value}" of {name}: they have {have}{more}'
    for each in tests:
        name = f"{each['domain']}/{each['name']}"
        known = attributes if each["field"] == "attributes" else capacities
        if name not in known:
            return _unknown(name, known)
    return ""


def _full(name: str, driver: str) -> str:
    return name if "/" in name else f"{driver}/{name}"


def _unknown(name: str, known: Collection[str]) -> str:
    same = [each for each in sorted(known) if each.endswith(f"/{name.rpartition('/')[2]}")]
    close = same[:1] or get_close_matches(name, sorted(known), n=1)
    return f"no device has {name}" + (f", but some have {close[0]}" if close else "")
