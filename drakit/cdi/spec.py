"""
From a driver's edits to a CDI spec: checked, and of the lowest version that works.

CDI demands that a device edits something. A device that has nothing to edit (a claim may just
reserve it) gets one environment variable, ``DRAKIT_DEVICE_<NAME>`` with its qualified name: it is
harmless, and shows in the container which device that was.

It must not know files, claims, or which driver made the edits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from drakit.cdi.names import InvalidNameError, check_device_name, qualified_name, split_kind
from drakit.cdi.version import required_version
from drakit.device import DeviceNode, Edits, Mount

__all__ = ("InvalidEditsError", "Spec", "build_spec")

Spec: TypeAlias = dict[str, Any]
"""A CDI spec as it stands in its JSON file."""

_NODE_TYPES = ("b", "c", "u", "p")
_PERMISSIONS = re.compile(r"[rwm]{1,3}")
_ENV_NAME = re.compile(r"[^=\x00-\x1f\x7f]+")


class InvalidEditsError(ValueError):
    """Edits, or names of devices, that CDI does not allow; the text is a sentence."""


def build_spec(kind: str, devices: Iterable[tuple[str, Edits]]) -> Spec:
    """Make the spec of one file: the devices of one kind, each with its edits."""
    entries: dict[str, Spec] = {}
    try:
        split_kind(kind)
        for name, edits in devices:
            check_device_name(name)
            if name in entries:
                raise InvalidEditsError(f"CDI device {kind}={name} is given twice")
            entries[name] = {"name": name, "containerEdits": _container_edits(kind, name, edits)}
    except InvalidNameError as error:
        raise InvalidEditsError(str(error)) from None
    if not entries:
        raise InvalidEditsError(f"a CDI spec of kind {kind} needs at least one device")
    spec: Spec = {"kind": kind, "devices": list(entries.values())}
    return {"cdiVersion": required_version(spec), **spec}


def _container_edits(kind: str, name: str, edits: Edits) -> Spec:
    device = qualified_name(kind, name)
    paths = [node.path for node in edits.device_nodes]
    for path in paths:
        if paths.count(path) > 1:
            raise InvalidEditsError(f"CDI device {device}: device node {path} is given twice")
    built: Spec = {}
    if edits.env:
        built["env"] = _env(device, edits.env)
    if edits.device_nodes:
        built["deviceNodes"] = [_device_node(device, node) for node in edits.device_nodes]
    if edits.mounts:
        built["mounts"] = [_mount(device, mount) for mount in edits.mounts]
    return built or {"env": [f"DRAKIT_DEVICE_{re.sub(r'[^A-Z0-9]', '_', name.upper())}={device}"]}


def _env(device: str, env: Mapping[str, str]) -> list[str]:
    for name, value in env.items():
        if not _ENV_NAME.fullmatch(name):
            raise InvalidEditsError(
                f"CDI device {device}: environment variable name {name!r} is empty, or has '=' or "
                "a control character in it"
            )
        if "\0" in value:
            raise InvalidEditsError(
                f"CDI device {device}: the value of environment variable {name} has a null byte"
            )
    return [f"{name}={value}" for name, value in env.items()]


def _device_node(device: str, node: DeviceNode) -> Spec:
    where = f"CDI device {device}: device node {node.path!r}"
    _check_path(node.path, f"{where}: its path")
    built: Spec = {"path": node.path}
    if node.host_path is not None and node.host_path != node.path:
        _check_path(node.host_path, f"{where}: its host path")
        # Only where it differs: the field needs CDI 0.5.
        built["hostPath"] = node.host_path
    if node.type is not None and node.type not in _NODE_TYPES:
        raise InvalidEditsError(f"{where}: type {node.type!r} is none of {', '.join(_NODE_TYPES)}")
    if (node.major is None) != (node.minor is None):
        raise InvalidEditsError(f"{where}: give both major and minor, or neither")
    if node.permissions is not None and (
        not _PERMISSIONS.fullmatch(node.permissions)
        or len(set(node.permissions)) != len(node.permissions)
    ):
        raise InvalidEditsError(
            f"{where}: permissions {node.permissions!r} must be letters of 'rwm', each once"
        )
    if node.file_mode is not None and not 0 <= node.file_mode <= 0o777:
        raise InvalidEditsError(f"{where}: file mode {node.file_mode:o} is not within 0 and 777")
    numbers = {"major": node.major, "minor": node.minor, "uid": node.uid, "gid": node.gid}
    for what, number in numbers.items():
        if number is not None and not 0 <= number < 2**32:
            raise InvalidEditsError(f"{where}: {what} {number} is not within 0 and 2^32-1")
    fields = {
        "type": node.type,
        "major": node.major,
        "minor": node.minor,
        "fileMode": node.file_mode,
        "permissions": node.permissions,
        "uid": node.uid,
        "gid": node.gid,
    }
    return built | {name: value for name, value in fields.items() if value is not None}


def _mount(device: str, mount: Mount) -> Spec:
    where = f"CDI device {device}: mount {mount.container_path!r}"
    _check_path(mount.host_path, f"{where}: its host path")
    _check_path(mount.container_path, f"{where}: its container path")
    if not {"bind", "rbind"} & set(mount.options):
        # Without it runc looks for a file system type, of which a mount here has none.
        raise InvalidEditsError(f"{where}: its options must have 'bind' or 'rbind' among them")
    return {
        "hostPath": mount.host_path,
        "containerPath": mount.container_path,
        "options": list(mount.options),
    }


def _check_path(path: str, what: str) -> None:
    if not path.startswith("/") or "\0" in path or ".." in path.split("/"):
        raise InvalidEditsError(f"{what} must be absolute, without '..' and null bytes: {path!r}")
