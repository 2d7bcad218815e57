"""
From a driver's edits to a CDI spec: checked, and of the lowest version that works.

Edits come from vendors, so they can contain anything. They are serialized as they are, and the
result is checked by the rules of :mod:`.fields` like the file of any other program: the linter
finds no problems in a built spec. Warnings of the linter are errors here, because the driver's
author can fix them.

Names of devices that other CDI files define are checked as well, but are not part of the spec: the
runtime gets them beside the names of ours. So are the identities of device nodes, which only the
node plugin compares.

CDI requires that a device has at least one edit. A device without edits (a claim may just reserve
it) gets one environment variable, ``DRAKIT_DEVICE_<NAME>`` with its qualified name: it is harmless,
and shows in the container which device that is.

It must not know files, claims, or which driver made the edits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar, cast

from drakit.cdi.checks import Found
from drakit.cdi.fields import check_edits
from drakit.cdi.names import (
    InvalidNameError,
    check_device_name,
    split_kind,
    split_qualified_name,
)
from drakit.cdi.problems import kind_of, shown
from drakit.cdi.version import required_version
from drakit.device import DeviceNode, Edits, Hook, IntelRdt, Mount, NetDevice

__all__ = ("InvalidEditsError", "Spec", "build_spec")

Spec: TypeAlias = dict[str, Any]
"""A CDI spec as in its JSON file."""

PartT = TypeVar("PartT")

MAX_IDENTITY = 256
"""Characters of the identity of a device node. The checkpoint keeps it with each claim."""


class InvalidEditsError(ValueError):
    """Edits, or names of devices, that CDI does not allow; the text is a sentence."""


class _WrongPartError(Exception):
    """A part of the edits is invalid; the text is a sentence without the device."""


def build_spec(kind: str, devices: Iterable[tuple[str, Edits]]) -> Spec:
    """
    Build the spec of one file: the devices of one kind, each with its edits.

    Raises :class:`InvalidEditsError`, and nothing else, whatever the edits contain.
    """
    entries: dict[str, Spec] = {}
    try:
        split_kind(kind)
        for name, edits in devices:
            check_device_name(name)
            if name in entries:
                raise InvalidEditsError(f"CDI device {kind}={name} is defined twice")
            entries[name] = {"name": name, "containerEdits": _container_edits(kind, name, edits)}
    except InvalidNameError as error:
        raise InvalidEditsError(str(error)) from None
    if not entries:
        raise InvalidEditsError(f"a CDI spec of kind {kind} needs at least one device")
    spec: Spec = {"kind": kind, "devices": list(entries.values())}
    return {"cdiVersion": required_version(spec), **spec}


def _container_edits(kind: str, name: str, edits: Edits) -> Spec:
    found: Found = []
    try:
        built = _write(edits)
        check_edits(built, "", found)
        _check_others(edits, kind)
    except _WrongPartError as error:
        raise InvalidEditsError(f"CDI device {kind}={name}: {error}") from None
    except Exception as error:
        # A vendor's objects can do anything when they are looked at.
        raise InvalidEditsError(
            f"CDI device {kind}={name}: its edits cannot be read: {shown(error)}"
        ) from error
    if found:
        raise InvalidEditsError(f"CDI device {kind}={name}: {found[0]}")
    return built or {
        "env": [f"DRAKIT_DEVICE_{re.sub(r'[^A-Z0-9]', '_', name.upper())}={kind}={name}"]
    }


def _write(edits: Edits) -> Spec:
    _expect(edits, Edits, "the driver's answer")
    return _present(
        env=_env(edits.env, "env"),
        deviceNodes=_each(edits.device_nodes, DeviceNode, _device_node, "deviceNodes"),
        netDevices=_each(edits.net_devices, NetDevice, _net_device, "netDevices"),
        hooks=_each(edits.hooks, Hook, _hook, "hooks"),
        mounts=_each(edits.mounts, Mount, _mount, "mounts"),
        intelRdt=None if edits.intel_rdt is None else _intel_rdt(edits.intel_rdt),
        additionalGids=_list(edits.additional_gids, "additionalGids"),
    )


def _check_others(edits: Edits, kind: str) -> None:
    """Check the names of devices that other CDI files define."""
    for index, name in enumerate(_list(edits.cdi_devices, "cdi_devices")):
        path = f"cdi_devices[{index}]"
        _expect(name, str, path)
        try:
            other, _ = split_qualified_name(name)
        except InvalidNameError:
            raise _WrongPartError(
                f"{path} must be a qualified CDI name (vendor/class=name), not {shown(name)}"
            ) from None
        # A claim's UID is found by such a name: with another claim's, that one would be kept alive.
        if other == kind:
            raise _WrongPartError(
                f"{path} must not use the CDI kind of drakit's own files, as {shown(name)} does"
            )


def _device_node(node: DeviceNode, path: str) -> Spec:
    if (node.major is None) != (node.minor is None):
        raise _WrongPartError(f"{path} must have both major and minor, or neither")
    if node.identity is not None:
        _check_identity(node, path)
    return _present(
        path=node.path,
        # Only where it differs: the field needs CDI 0.5.
        hostPath=None if node.host_path == node.path else node.host_path,
        type=node.type,
        major=node.major,
        minor=node.minor,
        fileMode=node.file_mode,
        permissions=node.permissions,
        uid=node.uid,
        gid=node.gid,
    )


def _check_identity(node: DeviceNode, path: str) -> None:
    """Check the identity of the hardware, which is compared but not written."""
    _expect(node.identity, str, f"{path}.identity")
    if not 0 < len(node.identity or "") <= MAX_IDENTITY:
        raise _WrongPartError(f"{path}.identity must have 1 to {MAX_IDENTITY} characters")
    if not (node.identity or "").isprintable():
        raise _WrongPartError(f"{path}.identity must contain printable characters only")
    if node.type not in ("b", "c") or node.major is None:
        raise _WrongPartError(
            f"{path} has an identity, so it must have the type b or c, and a major and a minor"
        )


def _mount(mount: Mount, path: str) -> Spec:
    return _present(
        hostPath=mount.host_path,
        containerPath=mount.container_path,
        type=mount.type,
        options=_list(mount.options, f"{path}.options"),
    )


def _hook(hook: Hook, path: str) -> Spec:
    return _present(
        hookName=hook.name,
        path=hook.path,
        args=_list(hook.args, f"{path}.args"),
        env=_env(hook.env, f"{path}.env"),
        timeout=hook.timeout_seconds,
    )


def _net_device(device: NetDevice, path: str) -> Spec:
    return {"hostInterfaceName": device.host_interface_name, "name": device.name}


def _intel_rdt(rdt: IntelRdt) -> Spec:
    _expect(rdt, IntelRdt, "intelRdt")
    return _present(
        closID=rdt.clos_id,
        l3CacheSchema=rdt.l3_cache_schema,
        memBwSchema=rdt.mem_bw_schema,
        schemata=_list(rdt.schemata, "intelRdt.schemata"),
        # False is the same as its absence, but for the version that the field needs.
        enableMonitoring=None if rdt.enable_monitoring is False else rdt.enable_monitoring,
    )


def _env(env: Mapping[str, str], path: str) -> list[str]:
    _expect(env, Mapping, path)
    for name, value in env.items():
        for text in (name, value):
            _expect(text, str, f"{path}[{shown(name)}]")
        if "=" in name:
            raise _WrongPartError(f"{path} has '=' in the name {shown(name)}")
    # Not by formatting: an enumeration's member may be a text that formats differently.
    return [name + "=" + value for name, value in env.items()]


def _each(
    parts: tuple[PartT, ...], type_: type[PartT], write: Callable[[PartT, str], Spec], path: str
) -> list[Spec]:
    written: list[Spec] = []
    for index, part in enumerate(_list(parts, path)):
        _expect(part, type_, f"{path}[{index}]")
        written.append(write(part, f"{path}[{index}]"))
    return written


def _list(values: Iterable[PartT], path: str) -> list[PartT]:
    # A string is iterable too, but a list of its characters is never intended.
    if not isinstance(values, (tuple, list)):
        raise _WrongPartError(f"{path} must be a tuple, not {kind_of(values)}")
    return list(cast("Iterable[PartT]", values))


def _expect(part: object, type_: type[Any], path: str) -> None:
    if not isinstance(part, type_):
        raise _WrongPartError(f"{path} must be of type {type_.__name__}, not {kind_of(part)}")


def _present(**fields: object) -> Spec:
    # An empty list is the same as its absence; an empty text or zero is not for us to drop.
    return {name: value for name, value in fields.items() if value is not None and value != []}
