"""
The host's udev database: the results of its rules for a device (serial, stable links).

Most hosts have it, minimal ones do not. It has one file per device, ``data/{b,c}MAJOR:MINOR``, with
lines ``E:KEY=VALUE`` and ``S:LINK`` (below ``/dev``).

It must not know sysfs, or the use of the properties.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from drakit_drivers.hostdev.files import read_attribute

__all__ = ("UdevDatabase", "UdevEntry")


@dataclass(frozen=True, kw_only=True, slots=True)
class UdevEntry:
    """The database's entry of one device."""

    properties: Mapping[str, str] = field(default_factory=dict[str, str])
    links: tuple[str, ...] = ()
    """Symbolic links to the device node, as absolute paths on the host, in order."""


class UdevDatabase:
    """Reads the host's udev database."""

    def __init__(self, root: Path) -> None:
        self._data = root / "data"

    def entry(self, node_type: str, number: str) -> UdevEntry:
        """
        Look up a device by its type (``b`` or ``c``) and ``MAJOR:MINOR``.

        The entry is empty if udev has not processed the device, or does not run on the host. Raises
        UnreadableError.
        """
        text = read_attribute(self._data, f"{node_type}{number}") or ""
        properties: dict[str, str] = {}
        links: list[str] = []
        for line in text.splitlines():
            if line.startswith("S:"):
                links.append(f"/dev/{line[2:]}")
            elif line.startswith("E:") and "=" in line:
                key, _, value = line[2:].partition("=")
                properties[key] = value
        return UdevEntry(properties=properties, links=tuple(sorted(links)))
