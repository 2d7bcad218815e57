"""
Provides typed access to the fields of JSON objects from the API, and converts objects between the
versions of ``resource.k8s.io`` that clusters serve.

The functions treat an absent field, null and an empty value alike. ``v1`` and ``v1beta2`` have the
same form. In ``v1beta1``, all fields of a device except its name are in ``basic``, and the fields
of a request are at the top level, next to its name. Unknown fields are kept. Classes, and a claim's
identity and allocation, have the same form in all three versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

# ---------------------------------------------------------------- reading

Object = Mapping[str, Any]

_NOTHING: Object = {}


# Don't share code between these three functions: a large cluster has millions of fields, and a
# further call for each would be slow.


def child(body: Object, *path: str) -> Object:
    """Return the object at a path. Empty if there is none."""
    for key in path:
        body = body.get(key) or _NOTHING
    return body


def children(body: Object, *path: str) -> list[Object]:
    """Return the list of objects at a path. Empty if there is none."""
    found: Any = body
    for key in path:
        found = found.get(key) or _NOTHING
    return found or []


def text(body: Object, *path: str) -> str:
    """Return the string at a path. Empty if there is none."""
    found: Any = body
    for key in path:
        found = found.get(key) or _NOTHING
    return str(found or "")


MAX_WORDS = 256


def words(body: Object, *path: str, most: int = MAX_WORDS) -> str:
    """Return the message at a path, from a driver or another component, as one printable line of at
    most `most` characters."""
    line = " ".join(text(body, *path)[:most].split())
    return "".join(each if each.isprintable() else "?" for each in line)


# ---------------------------------------------------------------- versions

GROUP = "resource.k8s.io"
VERSIONS = ("v1", "v1beta2", "v1beta1")
"""Versions that drakit can read and write, the preferred one first."""

RULE_VERSIONS = ("v1", "v1beta2", "v1alpha3")
"""The versions that may contain DeviceTaintRules. Only discovery shows whether a cluster serves
them."""

_OF_DEVICE = ("name", "basic")


def to_version(body: Object, version: str) -> dict[str, Any]:
    """Convert a ResourceSlice of ``v1`` to another version, such as ``v1beta1``."""
    converted = {**body, "apiVersion": f"{GROUP}/{_known(version)}"}
    return _with_devices(converted, _below_basic) if version == "v1beta1" else converted


def from_version(body: Object, version: str = "") -> dict[str, Any]:
    """
    Convert a ResourceSlice from any of the versions to ``v1``.

    The slice's ``apiVersion`` contains the version. Items of a list do not have this field, so the
    caller must pass their version. Without either, the version is ``v1``.
    """
    version = version or text(body, "apiVersion").rpartition("/")[2] or VERSIONS[0]
    converted = {**body, "apiVersion": f"{GROUP}/{VERSIONS[0]}"}
    return _with_devices(converted, _flat) if _known(version) == "v1beta1" else converted


def requests_from_version(spec: Object, version: str) -> Object:
    """Convert the spec of a ResourceClaim from any of the versions to ``v1``."""
    if _known(version) != "v1beta1" or not (requests := children(spec, "devices", "requests")):
        return spec
    devices = cast("Object", spec["devices"])
    return {**spec, "devices": {**devices, "requests": [_exactly(each) for each in requests]}}


def _exactly(request: Object) -> Object:
    if request.get("firstAvailable"):
        return request
    rest = {key: value for key, value in request.items() if key != "name"}
    return {"name": request["name"], "exactly": rest}


def _known(version: str) -> str:
    if version not in VERSIONS:
        raise ValueError(f"ResourceSlices of {GROUP}/{version} are unknown")
    return version


def _with_devices(
    body: dict[str, Any], convert: Callable[[Object], dict[str, Any]]
) -> dict[str, Any]:
    devices = children(body, "spec", "devices")
    if devices:
        spec = cast("Object", body["spec"])
        body["spec"] = {**spec, "devices": [convert(device) for device in devices]}
    return body


def _below_basic(device: Object) -> dict[str, Any]:
    # An empty ``basic`` is also required, because it defines the kind of device.
    rest = {key: value for key, value in device.items() if key != "name"}
    return {"name": device["name"], "basic": rest} if "name" in device else {"basic": rest}


def _flat(device: Object) -> dict[str, Any]:
    rest = {key: value for key, value in device.items() if key not in _OF_DEVICE}
    named = {"name": device["name"]} if "name" in device else {}
    return {**named, **cast("Object", device.get("basic") or {}), **rest}
