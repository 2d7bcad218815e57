"""
The directories of the node plugin on this node, and the drivers that have files there.

Settings come from the plugin's own configuration file; the command line takes precedence. It must
not know what is in the files.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drakit_cli.errors import UsageError

if TYPE_CHECKING:
    from drakit_nodeplugin.config import NodePluginConfig

__all__ = ("checkpoint_path", "drivers", "find_place", "read_boot")


def find_place(options: argparse.Namespace) -> NodePluginConfig:
    """Read the settings; raise :class:`.errors.UsageError`."""
    from drakit_nodeplugin.config import ConfigError, NodePluginConfig, load_config

    given: dict[str, Any] = {
        "kubeletRoot": options.kubelet_root and options.kubelet_root.absolute(),
        "cdiDirectory": options.cdi_dir and options.cdi_dir.absolute(),
    }
    given = {key: value for key, value in given.items() if value is not None}
    file: Path = options.config or options.default_config
    if options.config is None and not file.exists():
        # Outside of the container: drivers need not be configured to be looked at.
        return NodePluginConfig.model_construct(**given)
    try:
        return load_config(file, **given)
    except ConfigError as error:
        raise UsageError(str(error)) from error


def drivers(place: NodePluginConfig, only: str | None) -> list[str]:
    """Return the drivers that have a checkpoint; only the requested one, if there is one."""
    if only is not None:
        if "/" in only or only in ("", ".", ".."):
            raise UsageError(f"{only!r} is not a valid driver name")
        return [only]
    folders = place.drivers_directory.glob("*/checkpoint.db")
    return sorted(path.parent.name for path in folders)


def checkpoint_path(place: NodePluginConfig, driver: str) -> Path:
    """Return the path of a driver's checkpoint."""
    return place.drivers_directory / driver / "checkpoint.db"


def read_boot(place: NodePluginConfig) -> str | None:
    """Return the ID of this boot; None if it cannot be read."""
    try:
        return place.boot_id_file.read_text().strip() or None
    except OSError:
        return None
