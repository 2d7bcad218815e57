"""
The lowest CDI version that a spec needs: an older runtime refuses a file of a newer version.

It must not know where a spec comes from, or whether it is otherwise valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ("required_version",)

_EARLIEST = "0.3.0"
"""No runtime in use knows an earlier one."""


def _edits(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield spec.get("containerEdits", {})
    for device in spec.get("devices", ()):
        yield device.get("containerEdits", {})


def _has_mount_type(spec: Mapping[str, Any]) -> bool:
    return any(mount.get("type") for edits in _edits(spec) for mount in edits.get("mounts", ()))


def _has_host_path(spec: Mapping[str, Any]) -> bool:
    return any(
        node.get("hostPath") for edits in _edits(spec) for node in edits.get("deviceNodes", ())
    )


def _has_name_with_leading_digit(spec: Mapping[str, Any]) -> bool:
    return any(device["name"][:1].isdigit() for device in spec.get("devices", ()))


def _has_dot_in_class(spec: Mapping[str, Any]) -> bool:
    return "." in spec.get("kind", "").partition("/")[2]


def _has_annotations(spec: Mapping[str, Any]) -> bool:
    return any(part.get("annotations") for part in (spec, *spec.get("devices", ())))


_NEEDS: tuple[tuple[str, Callable[[Mapping[str, Any]], bool]], ...] = (
    ("0.6.0", _has_annotations),
    ("0.6.0", _has_dot_in_class),
    ("0.5.0", _has_name_with_leading_digit),
    ("0.5.0", _has_host_path),
    ("0.4.0", _has_mount_type),
)
"""What came with which version, newest first: the first that applies is the answer."""


def required_version(spec: Mapping[str, Any]) -> str:
    """Find the lowest ``cdiVersion`` with which runtimes accept this spec."""
    return next((version for version, applies in _NEEDS if applies(spec)), _EARLIEST)
