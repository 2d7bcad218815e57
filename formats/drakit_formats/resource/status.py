"""
Checks the results of prepared devices other than edits, and converts them to entries of a claim's
status (``ResourceClaim.status.devices[]``).

The results come from vendors, some of which are hostile: a value of the wrong type results in a
message, and accepted values have a bounded size. The limits are those of ``resource.k8s.io/v1`` in
Kubernetes 1.36 and 1.37.

Does not depend on clients or claims.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from ipaddress import ip_interface
from math import isfinite
from typing import Any, cast, get_args

from drakit.device import Condition, ConditionStatus, NetworkData, PreparedDevice
from drakit_formats.resource.inventory import attribute_problems, shown
from drakit_formats.resource.limits import label_key_problem
from drakit_formats.resource.objects import Object, children, text

MAX_CONDITIONS = 8
MAX_REASON = 1024
MAX_CONDITION_MESSAGE = 1024
"""Maximum length of a condition's message, in characters. The API accepts 32,768, which would be 8
MiB for the devices of one claim."""
MAX_DATA_BYTES = 10 * 1024
MAX_DATA_DEPTH = 16
"""Maximum nesting depth of mappings and lists. Some functions that read JSON recurse once per
level."""
MAX_IPS = 16
MAX_INTERFACE_NAME = 256
MAX_HARDWARE_ADDRESS = 128

_REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
_STATUSES = get_args(ConditionStatus)


# ---------------------------------------------------------------- checks


def checked(prepared: PreparedDevice) -> PreparedDevice:
    """
    Return a result with shortened messages. If the API server would reject the result, raise
    ValueError with the reason, as a clause that begins with the field. Edits and data are checked
    elsewhere.
    """
    if problem := next(_problems(prepared), None):
        raise ValueError(problem)
    if all(len(each.message) <= MAX_CONDITION_MESSAGE for each in prepared.conditions):
        return prepared
    conditions = [
        replace(each, message=each.message[:MAX_CONDITION_MESSAGE]) for each in prepared.conditions
    ]
    return replace(prepared, conditions=tuple(conditions))


def data_copy(data: object) -> dict[str, Any]:
    """Return a driver's data as plain JSON values. Raises ValueError with the problem."""
    if not isinstance(data, Mapping):
        raise ValueError(f"data is of type {type(data).__name__}, not a mapping")
    try:
        written = json.dumps(dict(cast("Mapping[str, Any]", data)), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"data cannot be written as JSON: {str(error)[:200]}") from None
    return data_of(written)


def data_of(written: str) -> dict[str, Any]:
    """Parse a JSON object of limited size and depth. Raises ValueError with the problem."""
    # The API server escapes each of these characters as six characters before it measures the size.
    if len(written.encode()) + 5 * sum(map(written.count, "<>&")) > MAX_DATA_BYTES:
        raise ValueError(f"data is larger than {MAX_DATA_BYTES // 1024} KiB as JSON")
    try:
        value: object = json.loads(written, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise ValueError("data is not valid JSON") from None
    if not isinstance(value, dict):
        raise ValueError("data is not a JSON object")
    if (problem := _value_problem(cast("dict[str, Any]", value), MAX_DATA_DEPTH)) is not None:
        raise ValueError(f"data {problem}")
    return cast("dict[str, Any]", value)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _value_problem(value: object, levels: int) -> str | None:
    """Return the reason why a JSON value cannot be sent, or None if it can."""
    if isinstance(value, str):
        return None if _is_text(value) else "contains text that is not valid Unicode"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "contains an integer of more than 64 bits"
    if isinstance(value, float) and not isfinite(value):  # for example, 1e999 is valid JSON
        return "contains a number that is too large"
    if not isinstance(value, dict | list):
        return None
    if not levels:
        return f"has more than {MAX_DATA_DEPTH} levels"
    values: list[object] = []
    if isinstance(value, dict):
        for pair in cast("dict[str, object]", value).items():
            values += pair
    else:
        values = cast("list[object]", value)
    return next(filter(None, (_value_problem(each, levels - 1) for each in values)), None)


def _problems(prepared: PreparedDevice) -> Iterator[str]:
    conditions = cast("object", prepared.conditions)
    if not isinstance(conditions, tuple):
        yield f"conditions are of type {type(conditions).__name__}, not a tuple"
        return
    yield from _conditions_problems(cast("tuple[object, ...]", conditions))
    if prepared.network_data is not None:
        yield from _network_problems(prepared.network_data)
    for problem in attribute_problems(prepared.attributes):
        yield f"attributes are invalid: {problem}"


def _conditions_problems(conditions: Sequence[object]) -> Iterator[str]:
    if len(conditions) > MAX_CONDITIONS:
        yield f"conditions have {len(conditions)} entries, more than {MAX_CONDITIONS}"
        return
    types: set[str] = set()
    for each in conditions:
        if not isinstance(each, Condition):
            yield f"conditions contain {shown(each)}, which is not a Condition"
            return
        for name in ("type", "status", "reason", "message"):
            if not _is_text(getattr(each, name)):
                yield f"condition has a {name} that is not a string: {shown(getattr(each, name))}"
                return
        where = f"condition {shown(each.type)}"
        if each.type in types:
            yield f"{where} is given twice"
        types.add(each.type)
        if (problem := label_key_problem(each.type, needs_domain=False)) is not None:
            yield f"{where} has a type that {problem}"
        if each.status not in _STATUSES:
            yield f"{where} has status {shown(each.status)}, not True, False or Unknown"
        if len(each.reason) > MAX_REASON or not _REASON.fullmatch(each.reason):
            yield (
                f"{where} has reason {shown(each.reason)}, which is not a word of at most "
                f"{MAX_REASON:,} letters, digits, '_', ',' and ':' that begins with a letter"
            )


def _network_problems(network: object) -> Iterator[str]:
    if not isinstance(network, NetworkData):
        yield f"network_data is of type {type(network).__name__}, not a NetworkData"
        return
    for name, limit in (
        ("interface_name", MAX_INTERFACE_NAME),
        ("hardware_address", MAX_HARDWARE_ADDRESS),
    ):
        value = getattr(network, name)
        if not _is_text(value) or len(value.encode()) > limit:
            yield f"network_data.{name} is not a string of at most {limit} bytes"
    ips = cast("object", network.ips)
    if not isinstance(ips, tuple) or len(cast("tuple[object, ...]", ips)) > MAX_IPS:
        yield f"network_data.ips is not a tuple of at most {MAX_IPS} addresses"
        return
    for each in cast("tuple[object, ...]", ips):
        if not _is_interface_address(each):
            yield (
                f"network_data.ips contains {shown(each)}, which is not an address in CIDR "
                "notation in canonical form, such as 192.0.2.5/24"
            )
            return
    if len(set(network.ips)) < len(network.ips):
        yield "network_data.ips contains an address twice"


def _is_text(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_interface_address(value: object) -> bool:
    if not isinstance(value, str) or "%" in value:
        return False
    try:
        interface = ip_interface(value)
    except ValueError:
        return False
    mapped = interface.version == 6 and interface.ip.ipv4_mapped is not None
    return str(interface) == value and not mapped


# ---------------------------------------------------------------- entries


def has_status(prepared: PreparedDevice) -> bool:
    """Return whether a result contains anything for the status of its claim."""
    return bool(
        prepared.conditions or prepared.data is not None or prepared.network_data is not None
    )


def status_entry(
    prepared: PreparedDevice,
    *,
    driver: str,
    pool: str,
    device: str,
    share_id: str | None,
    stored: Object,
    now: str,
) -> dict[str, Any]:
    """
    Convert a result to an entry of ``status.devices[]``.

    `stored` is the claim's current entry, or empty. A condition with an unchanged status keeps its
    ``lastTransitionTime``. Any other condition gets `now`, an RFC 3339 time.
    """
    entry: dict[str, Any] = {"driver": driver, "pool": pool, "device": device}
    if share_id is not None:
        entry["shareID"] = share_id
    if prepared.conditions:
        before = {
            (text(each, "type"), text(each, "status")): text(each, "lastTransitionTime")
            for each in children(stored, "conditions")
        }
        entry["conditions"] = [
            {
                "type": each.type,
                "status": each.status,
                "reason": each.reason,
                "message": each.message[:MAX_CONDITION_MESSAGE],
                "lastTransitionTime": before.get((each.type, each.status)) or now,
            }
            for each in prepared.conditions
        ]
    if prepared.data is not None:
        entry["data"] = prepared.data
    if prepared.network_data is not None:
        entry["networkData"] = network_data_body(prepared.network_data)
    return entry


def network_data_body(network: NetworkData) -> dict[str, Any]:
    """Convert network data to the ``networkData`` of a claim's status or a metadata file."""
    fields = {
        "interfaceName": network.interface_name,
        "ips": list(network.ips),
        "hardwareAddress": network.hardware_address,
    }
    return {key: value for key, value in fields.items() if value}
