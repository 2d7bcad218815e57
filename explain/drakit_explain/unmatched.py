"""
Explains why no published device matches a request. Matching devices may be in slices that are not
used. A selector may name a driver, an attribute or a value that no device has. The policy of the
class may not publish any devices.

Does not depend on pods.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import get_close_matches

from drakit.text import plural
from drakit_explain.allocation import NotEvaluatedError
from drakit_explain.devices import DeviceFacts, ListValue, Version, unpacked
from drakit_explain.model import PolicyFacts, Request, SliceFacts
from drakit_explain.pools import newest, place_includes
from drakit_explain.reports import dropped_fields, policy_of_class
from drakit_explain.selectors import only_driver
from drakit_explain.world import Name, World
from drakit_formats.resource.objects import children, words

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
"""Device features without which a driver publishes different devices, or the same devices with
fewer attributes."""

MAX_COMPARED = 256
"""Maximum number of an attribute's values, and of names, to search for similar ones."""

_NAMED = 3

_ACCESS = re.compile(
    r"""device\.(?P<field>attributes|capacity)\[(?P<q>['"])(?P<domain>[^'"]+)(?P=q)\]"""
    r"""(?:\.(?P<name>\w+)|\[['"](?P<key>[^'"]+)['"]\])"""
    r"""(?:\s*(?P<operator>==|!=|<=|>=|<|>)\s*(?:(?P<v>['"])(?P<value>[^'"]*)(?P=v)|(?P<other>\S+)))?"""
)
"""Matches an attribute or a capacity in a selector, and the string with which it is compared."""

_TEST = re.compile(
    r"""['"](?P<name>\w+)['"]\s+in\s+device\.(?P<field>attributes|capacity)"""
    r"""\[['"](?P<domain>[^'"]+)['"]\]"""
)


def why_unmatched(request: Request, world: World) -> str:
    """Return the reason why no device matches a request, as a clause. Empty if that is unknown."""
    texts = [text for _, text in world.expressions(request)]
    if why := (
        uncounted(request, world)
        or _unpublished(policy_of_class(request.device_class, world), world)
        or _misspelt_driver(texts, world)
    ):
        return why
    drivers = {each.driver for each in world.slices() if each.devices}
    lost = dropped_fields([*drivers & {*map(only_driver, texts)}], _CHANGES_MATCHES, world)
    if lost:
        lost = f"check whether the selectors need fields that the API server drops ({lost})"
    return "; ".join(filter(None, (_absent(texts, world), lost)))


def why_it_fails(failure: str, texts: Collection[str], device: DeviceFacts, driver: str) -> str:
    """
    Return advice on how to correct a selector that compares a version or quantity as if it were a
    string.

    :param texts: the selectors of the request, one of which fails.
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
    """Return the domain of the attribute or capacity that selectors read under this name, if
    any."""
    found = (match for text in texts for match in _ACCESS.finditer(text))
    return next((each["domain"] for each in found if key in (each["name"], each["key"])), "")


# ---- slices that are not used


def uncounted(request: Request, world: World) -> str:
    """If a request matches devices in a slice that is not used, return the slice and the reason why
    it is not used, as a clause with the remedy. Empty if there is no such slice."""
    for of in world.uncounted():
        if not of.unread:
            try:
                number = world.selected(request, of).matches.bit_count()
            except NotEvaluatedError:
                continue
            if number and (why := _why_uncounted(of, world)):
                match = "matches is" if number == 1 else "match are"
                devices = f"{plural(number, 'device')} that {match}"
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
            f"of a pool with {len(current)} of {of.pool_slices} slices; the scheduler uses the "
            f"pool when the driver has published all of them"
        )
    return ""


# ---- the policy of a class


_WITHOUT_DEVICES = ("DevicesRejected", "NoDeviceMatched", "NoNodes", "NodeProblems", "Refused")
"""The reasons of the condition Applied that explain why a policy does not publish any device."""


def _unpublished(policy: str, world: World) -> str:
    """Return the reason why a HostDevicePolicy does not publish any device, with the message from
    its status."""
    found = world.of(PolicyFacts).get(Name("", policy))
    if found is None or found.status.get("devices"):
        return ""
    conditions = {each.get("type"): each for each in children(found.status, "conditions")}
    applied = conditions.get("Applied", {})
    if applied.get("reason") not in _WITHOUT_DEVICES:
        return ""
    return f"HostDevicePolicy {policy} publishes no device: {words(applied, 'message')}"


# ---- names and values


def _misspelt_driver(texts: Collection[str], world: World) -> str:
    published = {each.driver for each in world.slices() if each.devices}
    for driver in filter(None, map(only_driver, texts)):
        # Drivers of one vendor have similar names.
        close = get_close_matches(driver, published, n=1, cutoff=0.8)
        if driver not in published and close:
            return f"no slice of driver {driver} has devices, but driver {close[0]} publishes some"
    return ""


def _absent(texts: Collection[str], world: World) -> str:
    """Return the first attribute, capacity or value of selectors that no device has."""
    accesses = [(text, match) for text in texts for match in _ACCESS.finditer(text)]
    tests = [match for text in texts for match in _TEST.finditer(text)]
    if not accesses and not tests:
        return ""
    compared: dict[str, set[tuple[str, str]]] = {}  # for each full name, the selector and the value
    for text, each in accesses:
        if each["value"] is not None:
            compared.setdefault(_accessed(each), set()).add((text, each["value"]))
    attributes, capacities = _published(compared, world)
    possible = {
        (text, name)
        for name, of in compared.items()
        for text, value in of
        if value in attributes.get(name, ())
    }
    if not attributes and not capacities:
        return ""
    for text, each in accesses:
        name = _accessed(each)
        known = attributes if each["field"] == "attributes" else capacities
        if name not in known:
            return _unknown(name, known)
        values, value = attributes.get(name), each["value"]
        if each["operator"] != "==" or value is None or not values or value in values:
            continue
        # Lists, and values of unknown types, cannot be compared with a string.
        if any(one is None or isinstance(one, ListValue) for one in values):
            continue
        if "||" not in text or (text, name) not in possible:
            return _other_value(each, name, value, values)
    for each in tests:
        known = attributes if each["field"] == "attributes" else capacities
        if (name := _accessed(each)) not in known:
            return _unknown(name, known)
    return ""


def _accessed(match: re.Match[str]) -> str:
    """Return the full name of an attribute or a capacity that a selector reads."""
    groups = match.groupdict()
    return f"{groups['domain']}/{groups['name'] or groups.get('key')}"


def _published(
    compared: Collection[str], world: World
) -> tuple[dict[str, dict[object, None]], set[str]]:
    """Return the attributes and the capacities of all devices. Only the attributes in `compared`
    have values."""
    attributes: dict[str, dict[object, None]] = {}
    capacities: set[str] = set()
    kinds: dict[tuple[str, int], list[tuple[str, int]]] = {}
    seen: set[int] = set()
    for of in world.slices():
        for group in of.devices.groups:
            kind, key = group.kind, (of.driver, id(group.kind))
            if key not in kinds:
                names = [_full(name, of.driver) for name in kind.attributes]
                kinds[key] = [(each, at) for at, each in enumerate(names) if each in compared]
                attributes |= {each: {} for each in names if each not in attributes}
                capacities.update(_full(each.name, of.driver) for each in kind.capacity)
            for name, at in kinds[key]:
                if id(group.columns[at]) not in seen:
                    seen.add(id(group.columns[at]))
                    attributes[name].update(dict.fromkeys(unpacked(group.columns[at])))
    return attributes, capacities


def _other_value(access: re.Match[str], name: str, value: str, values: Collection[object]) -> str:
    """Return a clause which states that no device has this value of an attribute, with the existing
    values. If a value differs only by its type, return a clause about the quotes."""
    shown = {f'"{each}"' if isinstance(each, str) else f"{each}".lower() for each in values}
    if value in shown:
        read = access[0].partition("==")[0].strip()
        return f"{name} is not a string, so compare it without quotes ({read} == {value})"
    some = sorted(shown)[:MAX_COMPARED]
    close = get_close_matches(f'"{value}"', some, n=_NAMED, cutoff=0.3) or some[:_NAMED]
    more = f" and {len(shown) - len(close)} others" if len(shown) > len(close) else ""
    return f'no device has the value "{value}" of {name}: they have {", ".join(close)}{more}'


def _full(name: str, driver: str) -> str:
    return name if "/" in name else f"{driver}/{name}"


def _unknown(name: str, known: Collection[str]) -> str:
    same = [each for each in sorted(known) if each.endswith(f"/{name.rpartition('/')[2]}")]
    close = same[:1] or get_close_matches(name, sorted(known)[:MAX_COMPARED], n=1)
    return f"no device has {name}" + (f", but some have {close[0]}" if close else "")
