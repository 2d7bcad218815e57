"""
The values of a release that the doctor checks, read from the configuration files that the chart
makes of them.

It must not know sessions, or what is right or wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from drakit_formats.resource.raw import Object, child, children, text

__all__ = ("Values", "nodeplugin_values")

_DRIVERS = {
    "hostdev": ("hostdev.drakit.dev", "hostdev.enabled"),
    "simulated": ("simulated.drakit.dev", "simulated.config.driverName"),
}
"""The default names of the drivers that ship with drakit, and the value that changes each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """The node plugin's values that are checked."""

    drivers: Mapping[str, str] = field(default_factory=dict[str, str])
    """The drivers that always publish, each with the value that names or disables it."""

    plugin_driver: str = ""
    """The driver of device plugins; it publishes when one registers. Empty if disabled."""

    backends: Mapping[str, str] = field(default_factory=dict[str, str])
    """The drivers of backends, each with its value; they publish when a backend registers."""

    directories: Mapping[str, str] = field(default_factory=dict[str, str])
    """The parents of the directories of backends and device plugins, each with its value."""

    partitions: bool = False
    shares: bool = False
    lists: bool = False
    """The devices that the driver ``simulated`` publishes."""

    @property
    def claimed(self) -> Mapping[str, str]:
        """All names of drivers that are claimed on a node, each with its value."""
        own = {self.plugin_driver: "devicePlugins.driverName"} if self.plugin_driver else {}
        return {**self.drivers, **self.backends, **own}


def nodeplugin_values(content: Object) -> Values:
    """Read the node plugin's configuration; a malformed one raises AttributeError or TypeError."""
    entries = children(content, "drivers")
    simulated = [child(each, "config") for each in entries if each.get("driver") == "simulated"]
    plugins = child(content, "devicePlugins")
    sections = {key: child(content, key) for key in ("backends", "devicePlugins")}
    return Values(
        drivers=dict(pair for each in entries if (pair := _driver(each))[0]),
        plugin_driver=text(plugins, "driverName") if plugins.get("enabled") else "",
        backends={
            text(child(sections["backends"], "allowed", entry), "driver"): (
                f"backends.allowed.{entry}"
            )
            for entry in child(sections["backends"], "allowed")
            if sections["backends"].get("enabled")
        },
        directories={
            text(section, "directory"): f"{key}.directory"
            for key, section in sections.items()
            if section.get("enabled")
        },
        partitions=any(child(each, "gpu").get("partitions") for each in simulated),
        shares=any(child(each, "nic").get("count") or _shares_cpus(each) for each in simulated),
        lists=any(child(each, "nic").get("listAttributes") for each in simulated),
    )


def _shares_cpus(config: Object) -> bool:
    cpu = child(config, "cpu")
    return bool(cpu.get("count")) and cpu.get("grouping") == "capacity"


def _driver(entry: Object) -> tuple[str, str]:
    name, value = _DRIVERS.get(text(entry, "driver"), ("", "nodeplugin.drivers"))
    if own := text(entry, "name"):
        return own, "nodeplugin.drivers"
    return text(entry, "config", "driverName") or name, value
