"""
Devices in the form of a ResourceSlice, and the API's limits for one device.

Limits are checked before anything is sent, so that one bad device costs that device alone and the
error names it; the API server would refuse the whole slice. How devices are spread over slices is
the node plugin's business.

It must not know clients, pools, or where devices come from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from drakit.device import AttributeValue, Device, Version
from drakit.resource.quantity import parse_quantity
from drakit.resource.raw import Object, child

__all__ = (
    "device_body",
    "device_problems",
    "is_dns_label",
    "is_dns_subdomain",
    "same_device",
)

MAX_ATTRIBUTES_AND_CAPACITIES = 32
MAX_STRING_LENGTH = 64
"""The API server counts bytes."""
MAX_NAME_LENGTH = 63
MAX_IDENTIFIER_LENGTH = 32

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VERSION = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?",
    re.ASCII,
)


def is_dns_label(text: str) -> bool:
    """Tell whether a text is a DNS label of at most 63 characters (RFC 1123)."""
    return len(text) <= MAX_NAME_LENGTH and _LABEL.fullmatch(text) is not None


def is_dns_subdomain(text: str, *, max_length: int = 253) -> bool:
    """Tell whether a text is a DNS subdomain: labels joined by dots."""
    return len(text) <= max_length and all(_LABEL.fullmatch(part) for part in text.split("."))


def device_problems(device: Device) -> list[str]:
    """
    Say in sentences why the API server would not take a device; empty if it would.

    Also of values that are not of the types that they should have: vendors make them.
    """
    problems = _type_problems(device.name, device.attributes, device.capacity)
    if problems:
        return problems
    if not is_dns_label(device.name):
        problems.append("its name is not a DNS label of at most 63 characters (a-z, 0-9 and -)")
    count = len(device.attributes) + len(device.capacity)
    if count > MAX_ATTRIBUTES_AND_CAPACITIES:
        problems.append(
            f"it has {count} attributes and capacities, {MAX_ATTRIBUTES_AND_CAPACITIES} are allowed"
        )
    for name, value in device.attributes.items():
        if problem := _name_problem(name) or _value_problem(value):
            problems.append(f"attribute {name!r} {problem}")
    for name, amount in device.capacity.items():
        if problem := _name_problem(name):
            problems.append(f"capacity {name!r} {problem}")
        if problem := _amount_problem(amount):
            problems.append(f"capacity {name!r}: {problem}")
    return problems


def _type_problems(name: object, attributes: object, capacity: object) -> list[str]:
    problems: list[str] = []
    if not isinstance(name, str):
        problems.append(f"its name is no text, but {_kind(name)}")
    for what, given in (("attributes", attributes), ("capacity", capacity)):
        if not isinstance(given, Mapping):
            problems.append(f"its {what} are no mapping, but {_kind(given)}")
    return problems


def _kind(value: object) -> str:
    return f"of type {type(value).__name__}"


def _amount_problem(amount: object) -> str | None:
    if not isinstance(amount, str):
        return f'{amount!r} is {_kind(amount)}, not a quantity as text (such as "8" or "16Gi")'
    try:
        parse_quantity(amount)
    except ValueError as error:
        return str(error)
    return None


def _name_problem(name: object) -> str | None:
    if not isinstance(name, str):
        return f"has a name that is no text, but {_kind(name)}"
    domain, slash, identifier = name.rpartition("/")
    if slash and not is_dns_subdomain(domain, max_length=MAX_NAME_LENGTH):
        return "has a domain that is not a DNS subdomain of at most 63 characters"
    if len(identifier) > MAX_IDENTIFIER_LENGTH or not _IDENTIFIER.fullmatch(identifier):
        return f"is not a C identifier of at most {MAX_IDENTIFIER_LENGTH} characters"
    return None


def _value_problem(value: object) -> str | None:
    if isinstance(value, Version):
        text: object = value.text
        if not _is_version(text):
            return "is not a semantic version (such as 1.2.3) of at most 64 characters"
    elif isinstance(value, str):
        return _string_problem(value)
    elif not isinstance(value, int):
        return f"is {_kind(value)}, which is neither text, an integer, a boolean nor a Version"
    elif not -(2**63) <= value < 2**63:
        return "is not a 64-bit integer"
    return None


def _is_version(text: object) -> bool:
    return (
        isinstance(text, str)
        and len(text) <= MAX_STRING_LENGTH
        and _VERSION.fullmatch(text) is not None
    )


def _string_problem(value: str) -> str | None:
    try:
        size = len(value.encode())
    except UnicodeEncodeError:  # a file's name that is no UTF-8, for example
        return "has characters that cannot be written as UTF-8"
    return (
        f"has more than {MAX_STRING_LENGTH} bytes (in UTF-8)" if size > MAX_STRING_LENGTH else None
    )


def device_body(device: Device) -> dict[str, Any]:
    """Write a device as ``ResourceSlice.spec.devices[]`` (``resource.k8s.io/v1``)."""
    body: dict[str, Any] = {"name": device.name}
    if device.attributes:
        body["attributes"] = {name: _value_body(v) for name, v in device.attributes.items()}
    if device.capacity:
        body["capacity"] = {name: {"value": amount} for name, amount in device.capacity.items()}
    return body


def _value_body(value: AttributeValue) -> dict[str, Any]:
    match value:
        case bool():
            return {"bool": value}
        case int():
            return {"int": value}
        case str():
            return {"string": value}
        case Version():
            return {"version": value.text}


def same_device(ours: Object, stored: Object) -> bool:
    """Compare two devices of slices by meaning: quantities by value, absent fields as empty."""
    keys = {k for k, v in (*ours.items(), *stored.items()) if v and k != "capacity"}
    if any(ours.get(key) != stored.get(key) for key in keys):
        return False
    mine, theirs = child(ours, "capacity"), child(stored, "capacity")
    if mine.keys() != theirs.keys():
        return False
    return all(_same_capacity(mine[name], theirs[name]) for name in mine)


def _same_capacity(mine: Object, theirs: Object) -> bool:
    rest = {k: v for k, v in mine.items() if k != "value"}
    if rest != {k: v for k, v in theirs.items() if k != "value"}:
        return False
    return parse_quantity(mine["value"]) == parse_quantity(theirs["value"])
