"""
The fields of a CDI spec and their rules, from version 1.1 of the specification.

The same tables check edits while they are written (:mod:`.spec`), and files of other programs
(:mod:`.lint`). The rules come from the reference library, tags.cncf.io/container-device-interface
1.1.1 (``pkg/cdi``, ``pkg/parser``), from the text of the specification, and from OCI runtimes,
which apply the edits. tests/data/cdi contains a file for each rule, and documents where runtimes
accept more.

A rule returns None for a valid value, or the end of a sentence that begins with the field. Rules
whose names end in `advice` report values that work, but probably not as intended.

Does not depend on versions or files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from drakit_formats.cdi.checks import (
    Check,
    Found,
    InvalidNameError,
    Listing,
    Record,
    add,
    check_device_name,
    flag,
    kind_of,
    number,
    shown,
    split_kind,
    text,
)

# ---------------------------------------------------------------- rules for strings and numbers

_NODE_TYPES = ("b", "c", "u", "p")
_HOOK_NAMES = (
    "prestart",
    "createRuntime",
    "createContainer",
    "startContainer",
    "poststart",
    "poststop",
)
_PERMISSIONS = re.compile(r"[rwm]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DNS_SUBDOMAIN = re.compile(
    r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*"
)
_ANNOTATION_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?")

_VENDOR_CHARACTERS = 253
_CLASS_CHARACTERS = 63
_ANNOTATION_NAME_CHARACTERS = 63
_CLOS_ID_BYTES = 4096
"""The reference library's limit, which is the maximum length of a path."""

_INTERFACE_BYTES = 15
"""The maximum length of an interface name in Linux: IFNAMSIZ without the null byte."""


def _kind_rule(value: str) -> str | None:
    try:
        split_kind(value)
    except InvalidNameError as error:
        return f"is invalid: {error}"
    return None


def _kind_advice(value: str) -> str | None:
    vendor, class_ = split_kind(value)
    if len(vendor) > _VENDOR_CHARACTERS or not _DNS_SUBDOMAIN.fullmatch(vendor):
        return (
            "has a vendor that is not a DNS subdomain, as the specification requires: "
            f"{shown(vendor)}"
        )
    if len(class_) > _CLASS_CHARACTERS:
        return f"has a class of more than {_CLASS_CHARACTERS} characters: {shown(class_)}"
    return None


def _device_name_rule(value: str) -> str | None:
    try:
        check_device_name(value)
    except InvalidNameError as error:
        return f"is invalid: {error}"
    return None


def _annotation_key_rule(value: str) -> str | None:
    prefix, slash, name = value.rpartition("/")
    if slash and (len(prefix) > _VENDOR_CHARACTERS or not _DNS_SUBDOMAIN.fullmatch(prefix.lower())):
        return "has a prefix before its '/' that is not a DNS subdomain"
    if len(name) > _ANNOTATION_NAME_CHARACTERS or not _ANNOTATION_NAME.fullmatch(name):
        return (
            "must be a name of at most 63 letters, digits, '_', '-' and '.', that begins and ends "
            "with a letter or digit, optionally after a DNS subdomain and '/'"
        )
    return None


def _env_rule(value: str) -> str | None:
    return None if value.find("=") > 0 else f"must have the form NAME=value, not {shown(value)}"


def _env_advice(value: str) -> str | None:
    name = value.partition("=")[0]
    return f"has a control character in its name {shown(name)}" if _CONTROL.search(name) else None


def _not_empty_rule(value: str) -> str | None:
    return None if value else "must not be empty"


def _path_rule(value: str) -> str | None:
    return None if value.startswith("/") else f"must be an absolute path, not {shown(value)}"


def _path_advice(value: str) -> str | None:
    return f"contains '..': {shown(value)}" if ".." in value.split("/") else None


def _node_type_rule(value: str) -> str | None:
    if value in _NODE_TYPES:
        return None
    return f"must be one of {', '.join(_NODE_TYPES)}, not {shown(value)}"


def _permissions_rule(value: str) -> str | None:
    if value == "none" or _PERMISSIONS.fullmatch(value):
        return None
    return f"must be letters of 'rwm', or 'none', not {shown(value)}"


def _permissions_advice(value: str) -> str | None:
    if not value:
        return "is empty, which gives all of 'rwm'; for no permission, write 'none'"
    if value == "none" or len(set(value)) == len(value):
        return None
    return f"has a letter twice: {shown(value)}"


def _hook_name_rule(value: str) -> str | None:
    if value in _HOOK_NAMES:
        return None
    return f"must be one of {', '.join(_HOOK_NAMES)}, not {shown(value)}"


def _clos_id_rule(value: str) -> str | None:
    if value == "/":  # the root directory is a class
        return None
    if value in (".", "..") or "/" in value or "\n" in value:
        return f"must be a file's name, or '/', not {shown(value)}"
    if len(value.encode()) >= _CLOS_ID_BYTES:
        return f"must be shorter than {_CLOS_ID_BYTES} bytes"
    return None


def _interface_name_rule(value: str) -> str | None:
    if not value:
        return "must not be empty"
    if (
        value in (".", "..")
        or re.search(r"[/:\s]", value)
        or len(value.encode()) > _INTERFACE_BYTES
    ):
        return (
            f"must be a name of at most {_INTERFACE_BYTES} bytes that Linux allows for a network "
            f"interface, without '/', ':' and white space, not {shown(value)}"
        )
    return None


def _gid_advice(value: int) -> str | None:
    return None if value else "is 0, which runtimes ignore"


# ---------------------------------------------------------------- fields

_UINT32 = 2**32 - 1
_GID = 2**31 - 1
"""The highest group ID with which runc can start a process."""

_INT32 = 2**31 - 1
_MAJOR, _MINOR = 2**12 - 1, 2**20 - 1
"""The limits of device numbers in Linux (``linux/kdev_t.h``)."""

_FILE_MODE = 0o777
_ANNOTATION_BYTES = 256 * 1024
"""Maximum size of all keys and values together, as in Kubernetes."""


def _values(elements: list[Any], field: str) -> list[Any]:
    objects = cast("list[dict[str, Any]]", [e for e in elements if isinstance(e, dict)])
    return [entry.get(field) for entry in objects]


def _twice(values: list[Any]) -> list[str]:
    # Skip missing values and values of the wrong type, because other checks report them.
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
        # If major is missing, the reference library sets both numbers to those of the host's
        # device.
        wrong = "is ignored by runtimes, because major is missing"
        add(found, f"{path}.minor", "warning", wrong)


def _mount(mount: dict[str, Any], path: str, found: Found) -> None:
    options = mount.get("options")
    source = mount.get("hostPath")
    if isinstance(options, list) and ("bind" in options or "rbind" in options):
        if isinstance(source, str) and source and (wrong := _path_rule(source)):
            add(found, f"{path}.hostPath", "error", wrong)
    elif mount.get("type") in (None, "", "none", "bind"):
        # OCI runtimes look only at the options. Without 'bind' or 'rbind' there, they would mount a
        # file system of this type, which does not exist.
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
    if sum(len(text.encode(errors="surrogatepass")) for text in texts) > _ANNOTATION_BYTES:
        add(found, path, "error", f"must not have more than {_ANNOTATION_BYTES} bytes in total")


_annotation_key = text(_annotation_key_rule)
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
    # An empty `intelRdt` is also an edit: it gives the container its own group.
    return edits.get("intelRdt") is not None or any(
        entry for name, entry in edits.items() if name != "intelRdt"
    )


_DEVICE_NODE = Record(
    {
        "path": text(_path_rule, advice=_path_advice),
        "hostPath": text(_path_rule, advice=_path_advice, may_be_empty=True),
        "type": text(_node_type_rule, may_be_empty=True),
        "major": number(0, _MAJOR),
        "minor": number(0, _MINOR),
        "fileMode": number(0, _FILE_MODE, octal=True),
        "permissions": text(_permissions_rule, advice=_permissions_advice, may_be_empty=True),
        "uid": number(0, _UINT32),
        "gid": number(0, _UINT32),
    },
    required=("path",),
    whole=_device_node,
)

_MOUNT = Record(
    {
        "hostPath": text(_not_empty_rule, advice=_path_advice),
        "containerPath": text(_path_rule, advice=_path_advice),
        "type": text(),
        "options": Listing(text(_not_empty_rule)),
    },
    required=("hostPath", "containerPath"),
    whole=_mount,
)

_HOOK = Record(
    {
        "hookName": text(_hook_name_rule),
        "path": text(_path_rule, advice=_path_advice),
        "args": Listing(text()),
        "env": Listing(text(_env_rule, advice=_env_advice), whole=_env),
        "timeout": number(1, _INT32),
    },
    required=("hookName", "path"),
)

_NET_DEVICE = Record(
    {
        "hostInterfaceName": text(_interface_name_rule),
        "name": text(_interface_name_rule),
    },
    required=("hostInterfaceName", "name"),
)

_INTEL_RDT = Record(
    {
        "closID": text(_clos_id_rule),
        "l3CacheSchema": text(),
        "memBwSchema": text(),
        "schemata": Listing(text(_not_empty_rule)),
        "enableMonitoring": flag,
    },
    gone={
        "enableCMT": "; CDI 1.1 replaced it with 'enableMonitoring'",
        "enableMBM": "; CDI 1.1 replaced it with 'enableMonitoring'",
    },
)

check_edits: Record = Record(
    {
        "env": Listing(text(_env_rule, advice=_env_advice), whole=_env),
        "deviceNodes": Listing(_DEVICE_NODE, whole=_last_wins("path")),
        "netDevices": Listing(_NET_DEVICE, whole=_net_devices),
        "hooks": Listing(_HOOK),
        "mounts": Listing(_MOUNT, whole=_last_wins("containerPath")),
        "intelRdt": _INTEL_RDT,
        "additionalGids": Listing(number(0, _GID, advice=_gid_advice)),
    }
)
"""Checks the ``containerEdits`` of a device or of a whole spec."""

_DEVICE = Record(
    {
        "name": text(_device_name_rule),
        "annotations": _annotations,
        "containerEdits": check_edits,
    },
    required=("name", "containerEdits"),
    whole=_device,
)

check_spec: Check = Record(
    {
        "cdiVersion": text(_not_empty_rule),
        "kind": text(_kind_rule, advice=_kind_advice),
        "annotations": _annotations,
        "devices": Listing(_DEVICE, whole=_devices),
        "containerEdits": check_edits,
    },
    required=("cdiVersion", "kind", "devices"),
)
"""Checks a whole spec, except for its version."""
