"""
The node plugin's configuration: one file, some flags, some of the pod's environment.

Read once, by the composition root. An unknown key, or a value that cannot be, stops the plugin at
start with file, key and reason.

It must not know what the values are used for.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from drakit.settings import Address, Duration, Logging, Settings, describe, read_file
from drakit.settings import SettingsError as ConfigError

__all__ = ("ConfigError", "DriverEntry", "NodePluginConfig", "load_config")


class DriverEntry(Settings):
    """A driver that the plugin hosts."""

    driver: str
    """Name of an entry point of group ``drakit.drivers``, or ``module:Class``."""

    config: dict[str, Any] = Field(default_factory=dict[str, Any])
    """The driver's own configuration; the driver says what may stand in it."""


def _absolute(path: Any) -> Any:
    if not str(path).startswith("/"):
        raise ValueError("must be an absolute path")
    return path


AbsolutePath = Annotated[Path, BeforeValidator(_absolute)]


class NodePluginConfig(Settings):
    """The configuration file of ``drakit-nodeplugin``."""

    kubelet_root: AbsolutePath = Path("/var/lib/kubelet")
    """The kubelet's root directory. The plugin must see it under the same path as the kubelet,
    because the path of its socket is told to the kubelet."""

    cdi_directory: AbsolutePath = Path("/var/run/cdi")
    """Where CDI specs are written: one of the runtime's directories for generated specs."""

    boot_id_file: Annotated[AbsolutePath, Field(alias="bootIDFile")] = Path(
        "/proc/sys/kernel/random/boot_id"
    )
    """A file that holds another text after each boot of the node."""

    listen: Address = "[::]:8080"
    """Address of ``/healthz``, ``/readyz`` and ``/metrics``."""

    drain_timeout: Annotated[Duration, Field(gt=timedelta(0), le=timedelta(seconds=44))] = (
        timedelta(seconds=40)
    )
    """How long calls in flight may take at a stop; the kubelet itself waits 45 s."""

    logging: Logging = Logging()
    drivers: Annotated[tuple[DriverEntry, ...], Field(min_length=1)]
    """The drivers that this plugin hosts."""


def load_config(path: Path, **overrides: Any) -> NodePluginConfig:
    """
    Read a configuration file; what is given beside it (and is not None) comes first.

    Raises :class:`ConfigError`.
    """
    values = read_file(path)
    values.update({key: value for key, value in overrides.items() if value is not None})
    try:
        return NodePluginConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe(error, file=str(path))) from error
