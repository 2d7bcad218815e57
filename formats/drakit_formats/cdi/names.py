"""
CDI's names: kinds (``vendor.example.com/class``), devices, and both together.

A runtime rejects the whole file for one invalid name, so names are checked before a write.

It must not know files, or what a name refers to.
"""

from __future__ import annotations

import re

__all__ = (
    "InvalidNameError",
    "check_device_name",
    "qualified_name",
    "split_kind",
    "split_qualified_name",
    "transient_file_name",
)

_KIND_PART = re.compile(r"[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?")
_DEVICE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_FILE_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?")


class InvalidNameError(ValueError):
    """A kind, device or file name that CDI does not allow; the text is a sentence."""


def split_kind(kind: str) -> tuple[str, str]:
    """Split a kind into vendor and class, and check both."""
    vendor, slash, class_ = kind.partition("/")
    if not slash:
        raise InvalidNameError(f"CDI kind {kind!r} must have the form vendor/class")
    for part, what in ((vendor, "vendor"), (class_, "class")):
        if not _KIND_PART.fullmatch(part):
            raise InvalidNameError(
                f"the {what} {part!r} of CDI kind {kind!r} must begin with a letter, end with a "
                "letter or digit, and contain only letters, digits, '_', '-' and '.'"
            )
    return vendor, class_


def check_device_name(name: str) -> None:
    """Raise for a name that runtimes reject."""
    if not _DEVICE_NAME.fullmatch(name):
        raise InvalidNameError(
            f"CDI device name {name!r} must begin and end with a letter or digit, and contain "
            "only letters, digits, '_', '-', '.' and ':'"
        )


def qualified_name(kind: str, name: str) -> str:
    """Return a device's name as the kubelet passes it to the runtime: ``vendor/class=name``."""
    split_kind(kind)
    check_device_name(name)
    return f"{kind}={name}"


def split_qualified_name(name: str) -> tuple[str, str]:
    """Split a qualified name into kind and device, and check both."""
    kind, equals, device = name.partition("=")
    if not equals:
        raise InvalidNameError(f"qualified CDI name {name!r} must have the form vendor/class=name")
    split_kind(kind)
    check_device_name(device)
    return kind, device


def transient_file_name(kind: str, identifier: str) -> str:
    """Return the file name of a generated, transient spec: ``vendor-class_identifier.json``."""
    vendor, class_ = split_kind(kind)
    if not _FILE_ID.fullmatch(identifier):
        raise InvalidNameError(
            f"the identifier {identifier!r} of a CDI file must begin and end with a letter or "
            "digit, and contain only letters, digits, '_', '-' and '.'"
        )
    return f"{vendor}-{class_}_{identifier}.json"
