"""
The CDI version that a spec needs: an older runtime rejects a file of a newer version, and every
runtime rejects a file with fields that its version does not have.

It must not know where a spec comes from, or whether it is otherwise valid: a field whose value is
of a wrong type needs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from drakit_formats.cdi.checks import Found, add
from drakit_formats.cdi.problems import has_errors, shown

__all__ = ("check_version", "required_version")

_VERSIONS = (
    "0.1.0",
    "0.2.0",
    "0.3.0",
    "0.4.0",
    "0.5.0",
    "0.6.0",
    "0.7.0",
    "0.8.0",
    "1.0.0",
    "1.1.0",
)
"""All that were published, oldest first."""

_EARLIEST = "0.3.0"
"""No runtime reads an earlier one."""

_AGE = {version: age for age, version in enumerate(_VERSIONS)}

Object = Mapping[str, Any]


def required_version(spec: object) -> str:
    """Find the lowest ``cdiVersion`` with which runtimes accept this spec."""
    return max((version for version, _ in _needs(spec)), key=_AGE.__getitem__, default=_EARLIEST)


def check_version(spec: object, found: Found) -> None:
    """Check the ``cdiVersion`` of a spec: unknown, too low, or higher than needed."""
    given = _object(spec).get("cdiVersion")
    if not isinstance(given, str) or not given:
        return  # reported with the fields
    version = given.removeprefix("v")
    if version not in _AGE:
        known = f"{_EARLIEST} to {_VERSIONS[-1]}"
        add(found, "cdiVersion", "error", f"is not a CDI version ({known}): {shown(given)}")
        return
    if version != given:
        add(
            found,
            "cdiVersion",
            "warning",
            f"has a 'v' prefix, which semantic versions do not have: {given!r}",
        )
    for needed, field in _needs(spec):
        if _AGE[needed] > _AGE[version]:
            text = f"is too low: {field} needs {needed}, but this is {version}"
            add(found, "cdiVersion", "error", text)
    needed = required_version(spec)
    if _AGE[version] < _AGE[_EARLIEST]:
        text = f"is too low: runtimes read {_EARLIEST} and newer, but this is {version}"
        add(found, "cdiVersion", "error", text)
    elif _AGE[needed] < _AGE[version] and not has_errors(found):  # otherwise its needs are unknown
        text = f"is higher than needed: with {needed} instead of {version}, older runtimes read it"
        add(found, "cdiVersion", "warning", text)


def _needs(spec: object) -> list[tuple[str, str]]:
    """
    Return the fields that need more than the earliest version: the version, and the field.

    As the reference library finds it (``specs-go/version.go``).
    """
    whole, needs = _object(spec), list[tuple[str, str]]()
    if whole.get("annotations"):
        needs.append(("0.6.0", "annotations"))
    kind = whole.get("kind")
    if isinstance(kind, str) and "." in kind.partition("/")[2]:
        needs.append(("0.6.0", "kind"))
    _edits_need(whole, "", needs)
    for index, entry in enumerate(_list(whole.get("devices"))):
        path, device = f"devices[{index}].", _object(entry)
        name = device.get("name")
        if isinstance(name, str) and "0" <= name[:1] <= "9":
            needs.append(("0.5.0", f"{path}name"))
        if device.get("annotations"):
            needs.append(("0.6.0", f"{path}annotations"))
        _edits_need(device, path, needs)
    return needs


def _edits_need(holder: Object, path: str, needs: list[tuple[str, str]]) -> None:
    edits, path = _object(holder.get("containerEdits")), f"{path}containerEdits."
    for version, field, inner in (
        ("0.4.0", "mounts", "type"),
        ("0.5.0", "deviceNodes", "hostPath"),
    ):
        for index, element in enumerate(_list(edits.get(field))):
            if _object(element).get(inner):
                needs.append((version, f"{path}{field}[{index}].{inner}"))
    if edits.get("additionalGids"):
        needs.append(("0.7.0", f"{path}additionalGids"))
    if edits.get("netDevices"):
        needs.append(("1.1.0", f"{path}netDevices"))
    if edits.get("intelRdt") is not None:
        rdt = _object(edits["intelRdt"])
        needs.append(("0.7.0", f"{path}intelRdt"))
        # An empty list counts, as it does for the reference library.
        if rdt.get("schemata") is not None:
            needs.append(("1.1.0", f"{path}intelRdt.schemata"))
        if rdt.get("enableMonitoring"):
            needs.append(("1.1.0", f"{path}intelRdt.enableMonitoring"))


def _object(value: object) -> Object:
    return cast("Object", value) if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []
