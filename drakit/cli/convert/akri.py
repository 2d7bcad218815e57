"""
Reads Configurations of akri whose discovery handler is udev.

A rule is a list of conditions, such as ``KERNEL=="video[0-9]*", ENV{ID_VENDOR}=="Acme"``. Values of
``KERNEL``, ``SUBSYSTEM``, ``ATTR`` and ``ENV`` are globs; those of the other keys are regular
expressions of the whole value. Every instance of a Configuration is the resource
``akri.sh/<name>``, with ``capacity`` users.

It must not know how a policy is written out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from drakit.cli.convert.documents import Document, Value, read_text
from drakit.cli.convert.regexes import UnsupportedRegexError, globs_of, literal_of
from drakit.cli.convert.result import Converted, Remark, resource_name, sharing
from drakit.cli.convert.subsystems import directory_of, has_units, subsystem_of

__all__ = ("read",)

_CONDITION = re.compile(
    r'\s*(?P<key>[A-Z]+)(\{(?P<name>[^{}"]+)\})?\s*(?P<operator>[=!:+-]?=|==)\s*"(?P<value>[^"]*)"\s*'
)
_USB = {"idVendor": "vendorID", "idProduct": "productID", "serial": "serial"}
_PCI = {"vendor": "vendorID", "device": "deviceID", "class": "classID"}
_PARENT = {"SUBSYSTEMS": "subsystem", "DRIVERS": "driver"}

_NAMED_BY_PORT = ("hid", "pci", "usb", "usb-serial")
"""Subsystems whose kernel names, such as ``1-2.3``, are not those of device nodes."""

_WITHOUT_COUNTERPART = {
    "brokerSpec": "drakit starts no pods; write a workload that claims the device",
    "instanceServiceSpec": "drakit creates no Services; write one for your workload",
    "configurationServiceSpec": "drakit creates no Services; write one for your workload",
}
_KNOWN = ("discoveryHandler", "capacity", "brokerProperties", *_WITHOUT_COUNTERPART)


class _UnsupportedError(ValueError):
    """A condition has no field in a matcher."""


@dataclass
class _Matcher:
    """The conditions of a rule so far."""

    subsystem: str | None = None
    kernel: str | None = None
    paths: list[str] = field(default_factory=list[str])
    driver: str | None = None
    usb: dict[str, str] = field(default_factory=dict[str, str])
    pci: dict[str, str] = field(default_factory=dict[str, str])
    properties: dict[str, str] = field(default_factory=dict[str, str])
    parent: dict[str, str] = field(default_factory=dict[str, str])

    def as_spec(self) -> dict[str, Any]:
        subsystem, paths = self.subsystem, self.paths
        if self.kernel and subsystem in _NAMED_BY_PORT:
            raise _UnsupportedError(
                f"KERNEL is not the name of a device node in the subsystem {subsystem}; describe "
                "the device by its attributes"
            )
        if self.kernel:
            path, subsystem = directory_of(self.kernel, subsystem)
            paths = [*paths, path]
        if not subsystem and paths:
            subsystem = subsystem_of(paths[0])
        if not subsystem:
            raise _UnsupportedError(
                "its subsystem is not known; find it on a node with 'drakit node devices', and add "
                'SUBSYSTEM=="..." to the rule'
            )
        if len(paths) > 1:
            raise _UnsupportedError("it has KERNEL and DEVNAME; remove one of them")
        found = {
            "paths": paths,
            "driver": self.driver,
            "usb": self.usb,
            "pci": self.pci,
            "udevProperties": self.properties,
            "parent": self.parent,
        }
        return {"subsystem": subsystem, **{key: value for key, value in found.items() if value}}


def read(document: Document) -> Iterator[Converted | Remark]:
    """Read a Configuration."""
    if not isinstance(document.content, dict):
        raise document.error("must be a Kubernetes object of the kind Configuration")
    if document.get("kind").content != "Configuration":
        return
    if not document.get("apiVersion").text().startswith("akri.sh/"):
        return
    name = document.get("metadata", "name").text()
    if not name:
        raise document.error("metadata.name is missing")
    spec = document.get("spec")
    handler = spec.get("discoveryHandler")
    if handler.get("name").text() != "udev":
        text = f"hostdev finds no devices of the discovery handler {handler.get('name').text()!r}"
        yield Remark(place=handler.get("name").place, text=text, is_missing=True)
        return
    yield from _configuration(name, spec, read_text(handler.get("discoveryDetails")))


def _configuration(name: str, spec: Value, details: Value) -> Iterator[Converted | Remark]:
    for key, text in _WITHOUT_COUNTERPART.items():
        if spec.get(key):
            yield Remark(place=spec.get(key).place, text=text, is_missing=True)
    for other in (
        *spec.unknown(*_KNOWN),
        *spec.get("discoveryHandler").unknown("name", "discoveryDetails"),
        *details.unknown("udevRules", "groupRecursive", "permissions"),
    ):
        yield Remark(place=other.place, text="a policy has no field for it", is_missing=True)
    matchers: list[dict[str, Any]] = []
    for rule in details.get("udevRules").items():
        try:
            matchers.append(_matcher(rule))
        except _UnsupportedError as error:
            yield Remark(place=rule.place, text=f"{rule.text()}: {error}", is_missing=True)
    if not details.get("udevRules"):
        raise details.error("has no udevRules")
    remarks: list[Remark] = []
    users = sharing(spec.get("capacity").number(1), spec.get("capacity").place, remarks)
    container = _container(spec.get("brokerProperties"), details.get("permissions"), remarks)
    yield from remarks
    if not matchers:
        return
    together = details.get("groupRecursive").flag(False)
    if together and not all(has_units(matcher["subsystem"]) for matcher in matchers):
        together = False
        text = "a policy cannot group devices of these subsystems: each device node became a device"
        yield Remark(place=details.get("groupRecursive").place, text=text, is_missing=True)
    resource = resource_name("akri.sh", name)
    yield Converted(
        name=name,
        place=spec.place,
        spec={
            "match": matchers,
            **({"group": "Unit"} if together else {}),
            **users,
            **({"container": container} if container else {}),
            **({"deviceClass": {"extendedResourceName": resource}} if resource else {}),
        },
    )


def _container(properties: Value, permissions: Value, remarks: list[Remark]) -> dict[str, Any]:
    container: dict[str, Any] = {}
    if permissions.text() not in ("", "rwm"):
        container["permissions"] = permissions.text()
    env = {key: properties.get(key).text() for key in properties.mapping()}
    if env:
        container["env"] = env
        text = "these variables became container.env, which only containers with the claim get"
        remarks.append(Remark(place=properties.place, text=text))
    return container


def _matcher(rule: Value) -> dict[str, Any]:
    text = rule.text()
    if len(text) > 4096:
        raise rule.error("has more than 4096 characters; split it")
    matcher = _Matcher()
    at = 0
    while at < len(text):
        condition = _CONDITION.match(text, at)
        if not condition:
            raise rule.error(f'{text[at : at + 40]!r} must be a condition like KERNEL=="video0"')
        _add(matcher, condition)
        at = condition.end()
        if at < len(text) and text[at] != ",":
            raise rule.error(f"{text[at : at + 40]!r} must begin with a comma")
        at += 1
    return matcher.as_spec()


def _add(matcher: _Matcher, condition: re.Match[str]) -> None:
    key, name, value = condition["key"], condition["name"] or "", condition["value"]
    label = f"{key}{{{name}}}" if name else key
    if condition["operator"] != "==":
        raise _UnsupportedError(
            f"{label}{condition['operator']} has no counterpart, because matchers cannot exclude "
            "devices; describe the wanted devices"
        )
    if key in ("KERNEL", "SUBSYSTEM", "ENV", "ATTR") and "|" in value:
        raise _UnsupportedError(f"{label} has alternatives; write one rule for each")
    if key == "SUBSYSTEM":
        if re.search(r"[*?\[]", value):
            raise _UnsupportedError("SUBSYSTEM has a wildcard; write one rule for each subsystem")
        matcher.subsystem = value
    elif key == "KERNEL":
        matcher.kernel = value
    elif key == "ENV" and name == "DEVNAME":
        matcher.paths = [value]
    elif key == "ENV":
        matcher.properties[name] = value
    elif key == "DRIVER":
        matcher.driver = _literal(label, value)
    elif key in _PARENT:
        matcher.parent[_PARENT[key]] = _literal(label, value)
    elif key == "KERNELS":
        matcher.parent["name"] = _one_glob(label, value)
    elif key in ("ATTR", "ATTRS") and name in _USB:
        matcher.usb[_USB[name]] = _literal(label, value)
    elif key == "ATTRS" and name in _PCI:
        matcher.pci[_PCI[name]] = _literal(label, value).removeprefix("0x")
    else:
        raise _UnsupportedError(f"{label} has no field in a matcher")


def _literal(label: str, value: str) -> str:
    found = literal_of(value)
    if found is None:
        raise _UnsupportedError(f"{label} must be one exact value, and not a pattern")
    return found


def _one_glob(label: str, value: str) -> str:
    try:
        globs = globs_of(value, anchored=True).texts
    except UnsupportedRegexError as error:
        raise _UnsupportedError(f"no glob can express {label}: {error}") from error
    if len(globs) != 1:
        raise _UnsupportedError(f"{label} has several values; write one rule for each")
    (only,) = globs
    return only
