"""
The fields of a CDI spec and their rules: version 1.1 of the specification.

The same tables check edits while they are written (:mod:`.spec`), and files of others
(:mod:`.lint`). The rules are those of the reference library,
tags.cncf.io/container-device-interface 1.1.1 (``pkg/cdi``, ``pkg/parser``), of the specification's
text, and of OCI runtimes, which apply the edits; tests/data/cdi has a file for each, and notes
where runtimes accept more.

It must not know versions, files, or where a spec comes from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from drakit_formats.cdi import rules
from drakit_formats.cdi.checks import Check, Found, Listing, Record, add, flag, number, text
from drakit_formats.cdi.problems import kind_of, shown

__all__ = ("check_edits", "check_spec")

_UINT32 = 2**32 - 1
_GID = 2**31 - 1
"""The highest group that runc starts a process with."""

_INT32 = 2**31 - 1
_MAJOR, _MINOR = 2**12 - 1, 2**20 - 1
"""The limits of Linux (``linux/kdev_t.h``)."""

_FILE_MODE = 0o777
_ANNOTATION_BYTES = 256 * 1024
"""All keys and values together, as in Kubernetes."""


def _values(elements: list[Any], field: str) -> list[Any]:
    objects = cast("list[dict[str, Any]]", [e for e in elements if isinstance(e, dict)])
    return [entry.get(field) for entry in objects]


def _twice(values: list[Any]) -> list[str]:
    # Values of a wrong type and missing ones are reported already.
    texts = [value for value in values if isinstance(value, str) and value]
    return [text for text, count in Counter(texts).items() if count > 1]


def _last_wins(field: str) -> Callable[[list[Any], str, Found], None]:
    def whole(elements: list[Any], path: str, found: Found) -> None:
        for value in _twice(_values(elements, field)):
            text = f"has {shown(value)} twice, and runtimes use only the last value"
            add(found, path, "warning", text)

    return whole


def _env(elements: list[Any], path: str, found: Found) -> None:
    names = [entry.partition("=")[0] for entry in elements if isinstance(entry, str)]
    for name in _twice(names):
        text = f"has {shown(name)} twice, and runtimes use only the last value"
        add(found, path, "warning", text)


def _device_node(node: dict[str, Any], path: str, found: Found) -> None:
    if node.get("minor") and not node.get("major"):
        # The reference library fills in both of the host's device if there is no major.
        wrong = "is ignored by runtimes, because major is missing"
        add(found, f"{path}.minor", "warning", wrong)


def _mount(mount: dict[str, Any], path: str, found: Found) -> None:
    options = mount.get("options")
    source = mount.get("hostPath")
    if isinstance(options, list) and ("bind" in options or "rbind" in options):
        if isinstance(source, str) and source and (wrong := rules.path(source)):
            add(found, f"{path}.hostPath", "error", wrong)
    elif mount.get("type") in (None, "", "none", "bind"):
        # An OCI runtime goes by the options alone, and the kernel knows no file system so called.
        wrong = "must include 'bind' or 'rbind', unless a file system type is set"
        add(found, f"{path}.options", "error", wrong)


def _net_devices(elements: list[Any], path: str, found: Found) -> None:
    for field in ("hostInterfaceName", "name"):
        for value in _twice(_values(elements, field)):
            add(found, path, "error", f"has the {field} {shown(value)} twice")


def _annotations(value: object, path: str, found: Found) -> None:
    if not isinstance(value, dict):
        add(found, path, "error", f"must be an object, not {kind_of(value)}")
        return
    entries = cast("dict[object, object]", value)
    for key, entry in entries.items():
        at = f"{path}[{shown(key)}]"
        _annotation_key(key, at, found)
        _annotation_value(entry, at, found)
    texts = (text for pair in entries.items() for text in pair if isinstance(text, str))
    if sum(map(len, texts)) > _ANNOTATION_BYTES:
        add(found, path, "error", f"must not have more than {_ANNOTATION_BYTES} bytes in total")


_annotation_key = text(rules.annotation_key)
_annotation_value = text()


def _devices(elements: list[Any], path: str, found: Found) -> None:
    if not elements:
        add(found, path, "error", "must contain at least one device")
    for name in _twice(_values(elements, "name")):
        add(found, path, "error", f"has a device {shown(name)} twice")


def _device(device: dict[str, Any], path: str, found: Found) -> None:
    edits = device.get("containerEdits")
    if isinstance(edits, dict) and not _edits_anything(cast("dict[str, Any]", edits)):
        add(found, f"{path}.containerEdits", "error", "must contain at least one edit")


def _edits_anything(edits: dict[str, Any]) -> bool:
    # An empty `intelRdt` does: the container gets a group of its own.
    return edits.get("intelRdt") is not None or any(
        entry for name, entry in edits.items() if name != "intelRdt"
    )


_DEVICE_NODE = Record(
    {
        "path": text(rules.path, advice=rules.path_advice),
        "hostPath": text(rules.optional_path, advice=rules.path_advice),
        "type": text(rules.node_type),
        "major": number(0, _MAJOR),
        "minor": number(0, _MINOR),
        "fileMode": number(0, _FILE_MODE, octal=True),
        "permissions": text(rules.permissions, advice=rules.permissions_advice),
        "uid": number(0, _UINT32),
        "gid": number(0, _UINT32),
    },
    required=("path",),
    whole=_device_node,
)

_MOUNT = Record(
    {
        "hostPath": text(rules.not_empty, advice=rules.path_advice),
        "containerPath": text(rules.path, advice=rules.path_advice),
        "type": text(),
        "options": Listing(text(rules.not_empty)),
    },
    required=("hostPath", "containerPath"),
    whole=_mount,
)

_HOOK = Record(
    {
        "hookName": text(rules.hook_name),
        "path": text(rules.path, advice=rules.path_advice),
        "args": Listing(text()),
        "env": Listing(text(rules.env, advice=rules.env_advice), whole=_env),
        "timeout": number(1, _INT32),
    },
    required=("hookName", "path"),
)

_NET_DEVICE = Record(
    {
        "hostInterfaceName": text(rules.interface_name),
        "name": text(rules.interface_name),
    },
    required=("hostInterfaceName", "name"),
)

_INTEL_RDT = Record(
    {
        "closID": text(rules.clos_id),
        "l3CacheSchema": text(),
        "memBwSchema": text(),
        "schemata": Listing(text(rules.not_empty)),
        "enableMonitoring": flag,
    },
    gone={
        "enableCMT": "; CDI 1.1 replaced it with 'enableMonitoring'",
        "enableMBM": "; CDI 1.1 replaced it with 'enableMonitoring'",
    },
)

check_edits: Record = Record(
    {
        "env": Listing(text(rules.env, advice=rules.env_advice), whole=_env),
        "deviceNodes": Listing(_DEVICE_NODE, whole=_last_wins("path")),
        "netDevices": Listing(_NET_DEVICE, whole=_net_devices),
        "hooks": Listing(_HOOK),
        "mounts": Listing(_MOUNT, whole=_last_wins("containerPath")),
        "intelRdt": _INTEL_RDT,
        "additionalGids": Listing(number(0, _GID, advice=rules.gid_advice)),
    }
)
"""Checks the ``containerEdits`` of a device or of a whole spec."""

_DEVICE = Record(
    {
        "name": text(rules.device_name),
        "annotations": _annotations,
        "containerEdits": check_edits,
    },
    required=("name", "containerEdits"),
    whole=_device,
)

check_spec: Check = Record(
    {
        "cdiVersion": text(rules.not_empty),
        "kind": text(rules.kind, advice=rules.kind_advice),
        "annotations": _annotations,
        "devices": Listing(_DEVICE, whole=_devices),
        "containerEdits": check_edits,
    },
    required=("cdiVersion", "kind", "devices"),
)
"""Checks a whole spec, except for its version."""
