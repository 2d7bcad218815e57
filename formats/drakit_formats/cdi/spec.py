"""
Builds a CDI spec from a driver's edits. The spec is checked, and has the lowest version that works:
an older runtime rejects a file with a newer version, and every runtime rejects a file with fields
that the file's version does not have.

Edits come from vendors, so they can contain anything. Each field is checked while it is written, by
the tables of :mod:`.fields` that also check the files of other programs. The linter finds no
problems in a built spec, so the spec is not checked again. The linter's warnings are errors here,
because the driver's author can fix their causes.

Names of devices that other CDI files define are also checked, but are not part of the spec: the
runtime gets them in addition to the names of the devices in the spec. The same applies to the
identities of device nodes, which only the node plugin compares.

CDI requires that a device has at least one edit. A device without edits, which claims may merely
reserve, gets the environment variable ``DRAKIT_DEVICE_<NAME>`` with its qualified name. The
variable is harmless, and identifies the device in the container.

Does not depend on files or claims.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeAlias, TypeVar, cast

from drakit.device import DeviceNode, Edits, Hook, IntelRdt, Mount, NetDevice
from drakit_formats.cdi.checks import (
    Found,
    InvalidNameError,
    Listing,
    Record,
    add,
    check_device_name,
    has_errors,
    kind_of,
    shown,
    split_kind,
    split_qualified_name,
)
from drakit_formats.cdi.fields import check_edits

# ---------------------------------------------------------------- versions

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
"""All published versions, oldest first."""

_EARLIEST = "0.3.0"
"""The earliest version that runtimes read."""

_AGE = {version: age for age, version in enumerate(_VERSIONS)}

Object = Mapping[str, Any]
_NO_FIELDS: Object = {}
_NO_ELEMENTS: list[object] = []

ValueT = TypeVar("ValueT")


def required_version(spec: object) -> str:
    """Find the lowest ``cdiVersion`` with which runtimes accept this spec."""
    return max((version for version, _ in _needs(spec)), key=_AGE.__getitem__, default=_EARLIEST)


def check_version(spec: object, found: Found) -> None:
    """Check the ``cdiVersion`` of a spec: it may be unknown, too low, or higher than needed."""
    given = _or_empty(spec, _NO_FIELDS).get("cdiVersion")
    if not isinstance(given, str) or not given:
        return  # the check of the fields reports the problem
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
    # With errors, the needed version is uncertain.
    elif _AGE[needed] < _AGE[version] and not has_errors(found):
        text = f"is higher than needed: with {needed} instead of {version}, older runtimes read it"
        add(found, "cdiVersion", "warning", text)


def _needs(spec: object) -> list[tuple[str, str]]:
    """
    Return the fields that need a later version than the earliest one, as pairs of version and
    field.

    The rules are those of the reference library (``specs-go/version.go``).
    """
    whole, needs = _or_empty(spec, _NO_FIELDS), list[tuple[str, str]]()
    if whole.get("annotations"):
        needs.append(("0.6.0", "annotations"))
    kind = whole.get("kind")
    if isinstance(kind, str) and "." in kind.partition("/")[2]:
        needs.append(("0.6.0", "kind"))
    _edits_need(whole, "", needs)
    for index, entry in enumerate(_or_empty(whole.get("devices"), _NO_ELEMENTS)):
        path, device = f"devices[{index}].", _or_empty(entry, _NO_FIELDS)
        name = device.get("name")
        if isinstance(name, str) and "0" <= name[:1] <= "9":
            needs.append(("0.5.0", f"{path}name"))
        if device.get("annotations"):
            needs.append(("0.6.0", f"{path}annotations"))
        _edits_need(device, path, needs)
    return needs


def _edits_need(holder: Object, path: str, needs: list[tuple[str, str]]) -> None:
    edits, path = _or_empty(holder.get("containerEdits"), _NO_FIELDS), f"{path}containerEdits."
    for version, field, inner in (
        ("0.4.0", "mounts", "type"),
        ("0.5.0", "deviceNodes", "hostPath"),
    ):
        for index, element in enumerate(_or_empty(edits.get(field), _NO_ELEMENTS)):
            if _or_empty(element, _NO_FIELDS).get(inner):
                needs.append((version, f"{path}{field}[{index}].{inner}"))
    if edits.get("additionalGids"):
        needs.append(("0.7.0", f"{path}additionalGids"))
    if edits.get("netDevices"):
        needs.append(("1.1.0", f"{path}netDevices"))
    if edits.get("intelRdt") is not None:
        rdt = _or_empty(edits["intelRdt"], _NO_FIELDS)
        needs.append(("0.7.0", f"{path}intelRdt"))
        # As in the reference library, even an empty list needs this version.
        if rdt.get("schemata") is not None:
            needs.append(("1.1.0", f"{path}intelRdt.schemata"))
        if rdt.get("enableMonitoring"):
            needs.append(("1.1.0", f"{path}intelRdt.enableMonitoring"))


def _or_empty(value: object, empty: ValueT) -> ValueT:
    """Return a value of a spec, or `empty` if the value has another type."""
    return value if isinstance(value, type(empty)) else empty


# ---------------------------------------------------------------- edits

Spec: TypeAlias = dict[str, Any]
"""A CDI spec, with the same structure as its JSON file."""

MAX_IDENTITY = 256
"""Maximum length of the identity of a device node. The checkpoint stores it with each claim."""

_TYPES: Mapping[str, type] = {
    "": Edits,
    "deviceNodes": DeviceNode,
    "netDevices": NetDevice,
    "hooks": Hook,
    "mounts": Mount,
    "intelRdt": IntelRdt,
}
"""The types of edits and their parts, keyed by their field in ``containerEdits``."""


class InvalidEditsError(ValueError):
    """CDI does not allow the edits or the names of devices. The message is a sentence."""


def build_spec(kind: str, devices: Iterable[tuple[str, Edits]]) -> Spec:
    """
    Build the spec of one file: the devices of one kind, each with its edits.

    Raises only :class:`InvalidEditsError`, whatever the edits contain.
    """
    entries: dict[str, Spec] = {}
    try:
        split_kind(kind)
        for name, edits in devices:
            check_device_name(name)
            if name in entries:
                raise InvalidEditsError(f"CDI device {kind}={name} is defined twice")
            try:
                written = container_edits(edits, kind=kind)
            except InvalidEditsError as error:
                raise InvalidEditsError(f"CDI device {kind}={name}: {error}") from error.__cause__
            if not written:
                variable = f"DRAKIT_DEVICE_{re.sub(r'[^A-Z0-9]', '_', name.upper())}"
                written = {"env": [f"{variable}={kind}={name}"]}
            entries[name] = {"name": name, "containerEdits": written}
    except InvalidNameError as error:
        raise InvalidEditsError(str(error)) from None
    if not entries:
        raise InvalidEditsError(f"a CDI spec of kind {kind} needs at least one device")
    spec: Spec = {"kind": kind, "devices": list(entries.values())}
    return {"cdiVersion": required_version(spec), **spec}


def container_edits(edits: Edits, *, kind: str = "") -> Spec:
    """
    Return the ``containerEdits`` of a device. Empty if there are no edits.

    `cdi_devices` must not contain names of `kind`. Raises only :class:`InvalidEditsError`, whatever
    the edits contain. Its message does not name the device.
    """
    found: Found = []
    try:
        written = _write(edits, check_edits, "", "", found)
        _check_others(edits.cdi_devices, kind)
    except InvalidEditsError:
        raise
    except Exception as error:
        # Reading an attribute of a vendor's object can raise any error.
        raise InvalidEditsError(f"its edits cannot be read: {shown(error)}") from error
    if found:
        raise InvalidEditsError(str(found[0]))
    return written


def _write(part: object, record: Record, field: str, path: str, found: Found) -> Spec:
    """Convert a part of the edits to an object in the spec. Unset fields are omitted."""
    if not isinstance(part, _TYPES[field]):
        raise _wrong_type(part, _TYPES[field], path or "the driver's answer")
    prefix = f"{path}." if path else ""
    written: Spec = {}
    for name, check in record.fields.items():
        value: Any = getattr(part, _attribute(name))
        at = prefix + name
        if isinstance(check, Listing):
            value = _write_all(value, check, name, at, found)
        elif value is None:
            if name in record.required:
                raise InvalidEditsError(f"{at} is missing")
            continue
        elif isinstance(check, Record):
            value = _write(value, check, name, at, found)
        else:
            check(value, at, found)
        # False and an empty list mean the same as an absent field, but can need a newer version.
        if value is not False and value != []:
            written[name] = value
    if isinstance(part, DeviceNode):
        _check_node(part, path)
        if part.host_path == part.path:  # the field requires CDI 0.5
            written.pop("hostPath", None)
    if record.whole:
        record.whole(written, path, found)
    return written


@cache
def _attribute(field: str) -> str:
    """Return the name of the edits' attribute for a field of the spec, such as `host_path` for
    `hostPath`."""
    others = {"hookName": "name", "timeout": "timeout_seconds"}
    return others.get(field) or re.sub("[A-Z]+", lambda upper: f"_{upper[0].lower()}", field)


def _write_all(values: object, check: Listing, field: str, path: str, found: Found) -> list[Any]:
    if field == "env":
        values = _variables(values, path)
    # A string is also iterable, but a list of its characters is never intended.
    if not isinstance(values, (tuple, list)):
        raise InvalidEditsError(f"{path} must be a tuple, not {kind_of(values)}")
    written = list(cast("Iterable[Any]", values))
    for index, value in enumerate(written):
        if isinstance(check.of, Record):
            written[index] = _write(value, check.of, field, f"{path}[{index}]", found)
        else:
            check.of(value, f"{path}[{index}]", found)
    if check.whole and len(written) > 1:  # the rules for the whole list compare its elements
        check.whole(written, path, found)
    return written


def _variables(env: object, path: str) -> list[str]:
    if not isinstance(env, Mapping):
        raise _wrong_type(env, Mapping, path)
    variables: list[str] = []
    for name, value in cast("Mapping[object, object]", env).items():
        if not isinstance(name, str) or not isinstance(value, str):
            wrong = value if isinstance(name, str) else name
            raise _wrong_type(wrong, str, f"{path}[{shown(name)}]")
        if "=" in name:
            raise InvalidEditsError(f"{path} has '=' in the name {shown(name)}")
        # Don't use an f-string, because a member of a string enumeration may format differently.
        variables.append(name + "=" + value)
    return variables


def _check_node(node: DeviceNode, path: str) -> None:
    """Check the combination of a node's numbers, and its identity, which is not written to the
    spec."""
    if (node.major is None) != (node.minor is None):
        raise InvalidEditsError(f"{path} must have both major and minor, or neither")
    identity = cast("object", node.identity)
    if identity is None:
        return
    if not isinstance(identity, str):
        raise _wrong_type(identity, str, f"{path}.identity")
    if not 0 < len(identity) <= MAX_IDENTITY:
        raise InvalidEditsError(f"{path}.identity must have 1 to {MAX_IDENTITY} characters")
    if not identity.isprintable():
        raise InvalidEditsError(f"{path}.identity must contain printable characters only")
    if node.type not in ("b", "c") or node.major is None:
        raise InvalidEditsError(
            f"{path} has an identity, so it must have the type b or c, and a major and a minor"
        )


def _check_others(names: object, kind: str) -> None:
    """Check the names of devices that other CDI files define."""
    if not isinstance(names, (tuple, list)):
        raise InvalidEditsError(f"cdi_devices must be a tuple, not {kind_of(names)}")
    for index, name in enumerate(cast("Iterable[object]", names)):
        path = f"cdi_devices[{index}]"
        if not isinstance(name, str):
            raise _wrong_type(name, str, path)
        try:
            other, _ = split_qualified_name(name)
        except InvalidNameError:
            raise InvalidEditsError(
                f"{path} must be a qualified CDI name (vendor/class=name), not {shown(name)}"
            ) from None
        # Names of this kind contain a claim's UID. A name with the UID of another claim would keep
        # that claim alive.
        if other == kind:
            raise InvalidEditsError(
                f"{path} must not use the CDI kind of drakit's own files, as {shown(name)} does"
            )


def _wrong_type(value: object, type_: type[Any], path: str) -> InvalidEditsError:
    return InvalidEditsError(f"{path} must be of type {type_.__name__}, not {kind_of(value)}")
