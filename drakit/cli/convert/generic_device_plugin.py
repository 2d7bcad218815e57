"""
Reads the configuration of generic-device-plugin: arguments ``--device`` of its DaemonSet, or YAML.

A device has a name and groups. A group has paths (globs), or USB devices, and a count. All paths of
a group together are one device of the resource ``<domain>/<name>``.

It must not know how a policy is written out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from drakit.cli.convert.documents import Document, Value, read_text
from drakit.cli.convert.result import Converted, Remark, resource_name, sharing
from drakit.cli.convert.subsystems import has_units, nodes_below, subsystem_of

__all__ = ("read",)

_APART = "apart"
"""Marks a spec, until it is written, whose devices are only parts of the extended resource."""

_DEFAULT_DOMAIN = "squat.ai"
_WORKLOADS = ("DaemonSet", "Deployment")


def read(document: Document) -> Iterator[Converted | Remark]:
    """Read a DaemonSet or Pod, a ConfigMap, or the configuration file itself."""
    domain, devices = _devices(document)
    for device in devices:
        yield from _device(device, domain)


def _devices(document: Value) -> tuple[str, list[Value]]:
    if isinstance(document.content, list):
        return _DEFAULT_DOMAIN, document.items()
    kind = document.get("kind").content
    if kind in _WORKLOADS:
        return _of_pod(document.get("spec", "template", "spec"))
    if kind == "Pod":
        return _of_pod(document.get("spec"))
    if kind == "ConfigMap":
        data = document.get("data")
        texts = [
            read_text(data.get(key)) for key in data.mapping() if key.endswith(("yaml", "yml"))
        ]
        found = [_of_file(text) for text in texts]
        domain = next((each for each, _ in found if each), _DEFAULT_DOMAIN)
        return domain, [device for _, devices in found for device in devices]
    if kind:
        return _DEFAULT_DOMAIN, []
    return _of_file(document)


def _of_file(document: Value) -> tuple[str, list[Value]]:
    if isinstance(document.content, list):
        return _DEFAULT_DOMAIN, document.items()
    devices = document.get("devices") or document.get("device")
    if not devices and document.get("name") and document.get("groups"):
        return _DEFAULT_DOMAIN, [document]
    return document.get("domain").text() or _DEFAULT_DOMAIN, devices.items()


def _of_pod(spec: Value) -> tuple[str, list[Value]]:
    domain, devices = _DEFAULT_DOMAIN, list[Value]()
    for container in spec.get("containers").items():
        words = [*container.get("command").items(), *container.get("args").items()]
        empty = Value(None, container.place)
        for word, following in pairwise([*words, empty]):
            flag, equals, value = word.text().partition("=")
            given = Value(value, word.place) if equals else following
            if flag == "--device":
                devices.append(_of_argument(given))
            elif flag == "--domain":
                domain = given.text() or domain
    return domain, devices


def _of_argument(value: Value) -> Value:
    text = value.text().strip()
    if re.fullmatch(r"[\w.-]+(,/[^,]+)+", text):  # of old versions: serial,/dev/ttyUSB*
        name, *paths = text.split(",")
        groups = [{"paths": [{"path": path}]} for path in paths]
        return Value({"name": name, "groups": groups}, value.place)
    return read_text(value)


def _device(device: Value, domain: str) -> Iterator[Converted | Remark]:
    name = device.get("name").text()
    groups = device.get("groups").items()
    if not name or not groups:
        raise device.error("must have a name and groups")
    for other in device.unknown("name", "groups"):
        yield Remark(place=other.place, text="a policy has no field for it", is_missing=True)
    # Groups that differ only in their paths are one policy, as they are one resource.
    specs: list[tuple[str, dict[str, Any]]] = []
    for group in groups:
        spec: dict[str, Any] | None = None
        for item in _group(group):
            if isinstance(item, Remark):
                yield item
            else:
                spec = item
        if spec is None:
            continue
        rest = {key: value for key, value in spec.items() if key != "match"}
        for _, known in specs:
            if rest == {key: value for key, value in known.items() if key != "match"}:
                known["match"] = _merged([*known["match"], *spec["match"]])
                break
        else:
            specs.append((group.place, spec))
    if len(specs) > 1:
        text = (
            f"its groups became {len(specs)} policies, because their settings differ; only the "
            f"devices of the first one are the resource {domain}/{name}"
        )
        yield Remark(place=device.place, text=text)
    for index, (place, spec) in enumerate(specs):
        is_whole = not spec.pop(_APART, False)
        resource = resource_name(domain, name)
        if resource and not index and is_whole:
            spec["deviceClass"] = {"extendedResourceName": resource}
        yield Converted(name=name, place=place, spec=spec)


def _group(group: Value) -> Iterator[dict[str, Any] | Remark]:
    for other in group.unknown("paths", "usb", "count"):
        yield Remark(place=other.place, text="a policy has no field for it", is_missing=True)
    paths, usb = group.get("paths").items(), group.get("usb").items()
    if bool(paths) == bool(usb):
        raise group.error("must have either paths or usb")
    remarks: list[Remark] = []
    matchers = _of_usb(usb, remarks) if usb else _of_paths(paths, remarks)
    users = sharing(group.get("count").number(1), group.get("count").place, remarks)
    container = _container(paths, remarks)
    together = len(paths) > 1 or any(nodes_below(path.get("path").text()) for path in paths)
    apart = together and not all(has_units(matcher["subsystem"]) for matcher in matchers)
    if apart:
        text = (
            "its paths were one device; they do not belong to one physical unit, so they became "
            "devices that pods claim separately, without the extended resource"
        )
        remarks.append(Remark(place=group.place, text=text, is_missing=True))
    elif len(paths) > 1:
        text = (
            "its paths were one device; the policy joins the nodes of one physical unit, so check "
            "that they belong to one unit, or let pods claim the devices separately"
        )
        remarks.append(Remark(place=group.place, text=text))
    elif together:
        text = "the whole directory was one device; the policy has one device for each unit"
        remarks.append(Remark(place=group.place, text=text))
    if len(usb) > 1:
        text = "its USB devices were one device; they became devices that pods claim separately"
        remarks.append(Remark(place=group.place, text=text, is_missing=True))
    yield from remarks
    if matchers:
        yield {
            "match": _merged(matchers),
            **({_APART: True} if apart else {"group": "Unit"} if together else {}),
            **users,
            **({"container": container} if container else {}),
        }


def _of_paths(paths: list[Value], remarks: list[Remark]) -> list[dict[str, Any]]:
    matchers: list[dict[str, Any]] = []
    for each in paths:
        for other in each.unknown("path", "mountPath", "permissions", "type", "readOnly"):
            text = "a policy has no field for it"
            remarks.append(Remark(place=other.place, text=text, is_missing=True))
        path = each.get("path").text()
        if not path:
            raise each.error("has no path")
        if each.get("type").text() not in ("", "Device"):
            text = f"{path} is mounted, and not a device; mount it with a volume of the pod"
            remarks.append(Remark(place=each.place, text=text, is_missing=True))
            continue
        below = nodes_below(path)
        subsystem = below[0] if below else subsystem_of(path)
        if not subsystem:
            text = (
                f"the subsystem of {path} is not known; find it on a node with 'drakit node "
                "devices', and write the matcher yourself"
            )
            remarks.append(Remark(place=each.place, text=text, is_missing=True))
            continue
        matchers.append({"subsystem": subsystem, "paths": [below[1] if below else path]})
    return matchers


def _of_usb(devices: list[Value], remarks: list[Remark]) -> list[dict[str, Any]]:
    matchers: list[dict[str, Any]] = []
    for each in devices:
        for other in each.unknown("vendor", "product", "serial"):
            text = "a policy has no field for it"
            remarks.append(Remark(place=other.place, text=text, is_missing=True))
        usb: dict[str, str] = {}
        for key, field in (("vendor", "vendorID"), ("product", "productID")):
            value = each.get(key).text().lower().removeprefix("0x")
            if not re.fullmatch("[0-9a-f]{1,4}", value):
                raise each.get(key).error(f"{value!r} must be up to four hexadecimal digits")
            usb[field] = value.zfill(4)
        if serial := each.get("serial").text():
            usb["serial"] = serial
        matchers.append({"subsystem": "usb", "usb": usb})
        text = (
            "containers get the node under /dev/bus/usb; for a serial adapter or a camera, write "
            "its subsystem (tty, video4linux) instead of usb; hostdev refuses dangerous devices, "
            "such as sticks, keyboards, modems and hubs"
        )
        remarks.append(Remark(place=each.place, text=text))
    return matchers


def _container(paths: list[Value], remarks: list[Remark]) -> dict[str, str]:
    found: dict[str, str] = {}
    permissions = {"".join(sorted(each.get("permissions").text() or "mrw")) for each in paths}
    if len(permissions) == 1 and permissions != {"mrw"}:
        found["permissions"] = permissions.pop()
    elif len(permissions) > 1:
        text = (
            "its paths have different permissions, and a policy has one value for all: set to 'rw'"
        )
        remarks.append(Remark(place=paths[0].place, text=text, is_missing=True))
    inside = {each.get("mountPath").text() or each.get("path").text() for each in paths}
    if not any(each.get("mountPath") for each in paths):
        return found
    if len(paths) == 1:
        found["path"] = inside.pop()
        return found
    text = (
        "a policy cannot set a separate path for each device node; they keep the host's paths, "
        "unless you set container.path to a directory, or to a name with '*'"
    )
    remarks.append(Remark(place=paths[0].get("mountPath").place, text=text, is_missing=True))
    return found


def _merged(matchers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join matchers that differ only in their paths."""
    found: list[dict[str, Any]] = []
    for each in matchers:
        same = next(
            (m for m in found if m["subsystem"] == each["subsystem"] and "paths" in m), None
        )
        if same and "paths" in each:
            same["paths"] = list(dict.fromkeys([*same["paths"], *each["paths"]]))
        else:
            found.append(dict(each))
    return found
