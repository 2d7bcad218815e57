"""
Rules for single texts and numbers of a CDI spec; :mod:`.fields` maps fields to rules.

A rule returns None for a valid value, or the end of a sentence that begins with the field. Rules
whose names end in `advice` report values that work, but probably not as intended.

It must not know fields, only their values.
"""

from __future__ import annotations

import re

from drakit_formats.cdi.names import InvalidNameError, check_device_name, split_kind
from drakit_formats.cdi.problems import shown

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
"""The reference library's limit: that of a path."""

_INTERFACE_BYTES = 15
"""Linux: IFNAMSIZ less the null byte."""


def kind(value: str) -> str | None:
    try:
        split_kind(value)
    except InvalidNameError as error:
        return f"is invalid: {error}"
    return None


def kind_advice(value: str) -> str | None:
    vendor, class_ = split_kind(value)
    if len(vendor) > _VENDOR_CHARACTERS or not _DNS_SUBDOMAIN.fullmatch(vendor):
        return (
            "has a vendor that is not a DNS subdomain, as the specification requires: "
            f"{shown(vendor)}"
        )
    if len(class_) > _CLASS_CHARACTERS:
        return f"has a class of more than {_CLASS_CHARACTERS} characters: {shown(class_)}"
    return None


def device_name(value: str) -> str | None:
    try:
        check_device_name(value)
    except InvalidNameError as error:
        return f"is invalid: {error}"
    return None


def annotation_key(value: str) -> str | None:
    prefix, slash, name = value.rpartition("/")
    if slash and (len(prefix) > _VENDOR_CHARACTERS or not _DNS_SUBDOMAIN.fullmatch(prefix.lower())):
        return "has a prefix before its '/' that is not a DNS subdomain"
    if len(name) > _ANNOTATION_NAME_CHARACTERS or not _ANNOTATION_NAME.fullmatch(name):
        return (
            "must be a name of at most 63 letters, digits, '_', '-' and '.', that begins and ends "
            "with a letter or digit, optionally after a DNS subdomain and '/'"
        )
    return None


def env(value: str) -> str | None:
    return None if value.find("=") > 0 else f"must have the form NAME=value, not {shown(value)}"


def env_advice(value: str) -> str | None:
    name = value.partition("=")[0]
    return f"has a control character in its name {shown(name)}" if _CONTROL.search(name) else None


def not_empty(value: str) -> str | None:
    return None if value else "must not be empty"


def path(value: str) -> str | None:
    return None if value.startswith("/") else f"must be an absolute path, not {shown(value)}"


def path_advice(value: str) -> str | None:
    return f"contains '..': {shown(value)}" if ".." in value.split("/") else None


def optional_path(value: str) -> str | None:
    return path(value) if value else None


def node_type(value: str) -> str | None:
    if not value or value in _NODE_TYPES:
        return None
    return f"must be one of {', '.join(_NODE_TYPES)}, not {shown(value)}"


def permissions(value: str) -> str | None:
    if not value or value == "none" or _PERMISSIONS.fullmatch(value):
        return None
    return f"must be letters of 'rwm', or 'none', not {shown(value)}"


def permissions_advice(value: str) -> str | None:
    if not value:
        return "is empty, which gives all of 'rwm'; for no permission, write 'none'"
    if value == "none" or len(set(value)) == len(value):
        return None
    return f"has a letter twice: {shown(value)}"


def hook_name(value: str) -> str | None:
    if value in _HOOK_NAMES:
        return None
    return f"must be one of {', '.join(_HOOK_NAMES)}, not {shown(value)}"


def clos_id(value: str) -> str | None:
    if value == "/":  # the root's class
        return None
    if value in (".", "..") or "/" in value or "\n" in value:
        return f"must be a file's name, or '/', not {shown(value)}"
    if len(value.encode()) >= _CLOS_ID_BYTES:
        return f"must be shorter than {_CLOS_ID_BYTES} bytes"
    return None


def interface_name(value: str) -> str | None:
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


def gid_advice(value: int) -> str | None:
    return None if value else "is 0, which runtimes ignore"
