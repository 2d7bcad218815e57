"""
Targets: the kinds of drivers that the kit can test, and how the node plugin hosts each.

* a Python driver, as ``module:Class`` or the name of an entry point of group ``drakit.drivers``;
* a gRPC backend, as ``backend:COMMAND``, which the kit starts, kills and starts again, or as
  ``unix:/path/to.sock``, which is already running and keeps running;
* a device plugin, as ``device-plugin:COMMAND``.

A backend or device plugin is tested with the entry that its users write into the chart's values:
the edits of its claims must be those that the entry allows.

Does not depend on rules, or on the node's lifecycle.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from drakit.testing.conformance.facts import TargetError
from drakit.testing.conformance.programs import python_environment

Setup: TypeAlias = "Callable[[Path], object] | str"
"""Prepares the node before the first start and after each reboot: a function that is called with
the kit's folder, or a shell command with the folder in ``$DRAKIT_ROOT``."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """The target's own program."""

    line: str
    """A shell command."""

    environment: Mapping[str, str]

    waits_for: Path | None = None
    """A path that must exist before the program is started."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A driver to be tested."""

    kind: Literal["python", "backend", "device-plugin"]
    """The kind of target."""

    parameters: Mapping[str, Any] | None = None
    """The opaque parameters for the target's claims, if any."""

    setup: Setup | None = None
    """The setup of the node, if any."""

    unplug: Setup | None = None
    """Removes at least one device from the running node, and leaves another one. None if that
    cannot be simulated."""

    jobs: int = 4
    """Maximum number of kits that can test the target at the same time."""

    lives_on: bool = False
    """Whether the target keeps running across kits, so that each kit must unprepare its claims."""

    @property
    def name(self) -> str:
        """The target's name in results."""
        raise NotImplementedError

    def config(self, root: Path) -> Mapping[str, Any]:
        """Return the node plugin configuration that hosts the target."""
        raise NotImplementedError

    def place(self, root: Path) -> None:
        """Create the files that must exist on the node before the node plugin starts for the first
        time."""

    def command(self, root: Path) -> Command | None:
        """Return the target's own program. Return None if the target runs in the node plugin or
        elsewhere."""
        return None


@dataclass(frozen=True, kw_only=True)
class PythonTarget(Target):
    """A Python driver that the node plugin hosts."""

    reference: str
    """``module:Class``, or the name of an entry point."""

    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The driver's configuration. ``{root}`` in its strings is the kit's folder."""

    kind: Literal["python"] = "python"

    @property
    def name(self) -> str:
        """The target in the form that the caller passed."""
        return self.reference

    def config(self, root: Path) -> Mapping[str, Any]:
        """Return the configuration with the driver's entry."""
        return {"drivers": [{"driver": self.reference, "config": _filled(self.values, root=root)}]}


ENTRY = "target"
"""The name of the entry, and of the directory, of a backend or device plugin."""


@dataclass(frozen=True, kw_only=True)
class _Allowed(Target):
    """A target that has a directory and an entry in the chart's values."""

    entry: Mapping[str, Any]
    """The target's entry of ``backends.allowed`` or ``devicePlugins.plugins``. ``{root}`` in its
    strings is the kit's folder."""

    def _directory(self, root: Path) -> Path:
        return root / "backends" / ENTRY

    def _entries(self, root: Path) -> Mapping[str, Any]:
        # The kit's programs run as the user of the kit.
        return {ENTRY: {"owner": {"uid": os.geteuid()}, **_filled(self.entry, root=root)}}

    def place(self, root: Path) -> None:
        """Create the target's directory."""
        self._directory(root).mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True, kw_only=True)
class _Backend(_Allowed):
    kind: Literal["backend"] = "backend"

    def config(self, root: Path) -> Mapping[str, Any]:
        """Return the configuration that enables backends, with the target's entry."""
        directory = str(root / "backends")
        allowed = self._entries(root)
        return {"backends": {"enabled": True, "directory": directory, "allowed": allowed}}


@dataclass(frozen=True, kw_only=True)
class BackendTarget(_Backend):
    """A backend that the kit starts, with its directory in ``$DRAKIT_BACKENDS``."""

    line: str
    """A shell command. ``{directory}`` is replaced with the backend's directory, and ``{root}``
    with the kit's folder."""

    @property
    def name(self) -> str:
        """The target in the form that the caller passed."""
        return f"backend:{self.line}"

    def command(self, root: Path) -> Command | None:
        """Return the program of the backend."""
        directory = str(self._directory(root))
        return Command(
            line=_filled(self.line, root=root, directory=directory),
            environment={"DRAKIT_BACKENDS": directory},
        )


@dataclass(frozen=True, kw_only=True)
class BackendSocketTarget(_Backend):
    """A backend that is already running. All rules use it in turn."""

    socket: Path
    jobs: int = 1
    lives_on: bool = True

    @property
    def name(self) -> str:
        """The target in the form that the caller passed."""
        return f"unix:{self.socket}"

    def command(self, root: Path) -> Command | None:
        """Return a relay. Killing it cuts the connection to the backend."""
        ends = (str(self._directory(root) / "target.sock"), str(self.socket))
        return Command(
            line=shlex.join(
                ["exec", sys.executable, "-m", "drakit.testing.conformance.programs", *ends]
            ),
            environment=python_environment(),
        )


@dataclass(frozen=True, kw_only=True)
class DevicePluginTarget(_Allowed):
    """A device plugin that the kit starts, with its directory in ``$DRAKIT_DEVICE_PLUGINS``."""

    line: str
    """A shell command. ``{directory}`` is replaced with the plugin's substitute for
    ``/var/lib/kubelet/device-plugins``, and ``{root}`` with the kit's folder. If the kit can create
    mounts, it also mounts the substitute at the usual path."""

    kind: Literal["device-plugin"] = "device-plugin"

    @property
    def name(self) -> str:
        """The target in the form that the caller passed."""
        return f"device-plugin:{self.line}"

    def config(self, root: Path) -> Mapping[str, Any]:
        """Return the configuration that enables device plugins, with the target's entry."""
        plugins = self._entries(root)
        directory = str(root / "device-plugins")
        return {"devicePlugins": {"enabled": True, "directory": directory, "plugins": plugins}}

    def command(self, root: Path) -> Command | None:
        """Return the program of the plugin. The kit starts it once it can register."""
        directory = self._directory(root)
        line = _filled(self.line, root=root, directory=str(directory))
        return Command(
            line=remapped(line, directory=str(directory)),
            environment={"DRAKIT_DEVICE_PLUGINS": str(directory)},
            waits_for=directory / "kubelet.sock",
        )

    def _directory(self, root: Path) -> Path:
        return root / "device-plugins" / ENTRY


# ------------------------------------------------------------ a device plugin's directory

DEVICE_PLUGINS = "/var/lib/kubelet/device-plugins"

PROBE_SECONDS = 5.0

# A mount needs an existing directory, and the host must not change. Therefore, a tmpfs covers the
# parent directory only for the plugin.
_SCRIPT = f"""set -e
if [ ! -d {DEVICE_PLUGINS} ]; then
  if [ -d /var/lib/kubelet ]; then cover=/var/lib/kubelet; else cover=/var/lib; fi
  mount -t tmpfs drakit "$cover"
  mkdir -p {DEVICE_PLUGINS}
fi
mount --bind "$1" {DEVICE_PLUGINS}
exec sh -c "$2"
"""


def remapped(line: str, *, directory: str) -> str:
    """Wrap a shell command so that it runs with the directory mounted at
    ``/var/lib/kubelet/device-plugins``. Return the command itself if mounting is not possible."""
    unshare = _unshare()
    if unshare is None:
        return line
    return shlex.join(["exec", *unshare, "sh", "-c", _SCRIPT, "sh", directory, line])


@cache
def _unshare() -> tuple[str, ...] | None:
    """Return the command that creates a mount namespace, or None if that is not possible here."""
    flags = ["--mount"] if os.geteuid() == 0 else ["--mount", "--map-root-user"]
    command = ("unshare", *flags)
    try:
        probe = subprocess.run(
            [*command, "true"], capture_output=True, timeout=PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return command if probe.returncode == 0 else None


# ------------------------------------------------------------ parsing


_REQUIRED = {
    "backend": ("driver", "backends.allowed"),
    "unix": ("driver", "backends.allowed"),
    "device-plugin": ("resources", "devicePlugins.plugins"),
}
"""The required key of an entry, and the chart value that contains the entry, keyed by target
form."""


def parse_target(
    text: str,
    *,
    config: Mapping[str, Any] | None = None,
    parameters: Mapping[str, Any] | None = None,
    setup: Setup | None = None,
    unplug: Setup | None = None,
) -> Target:
    """
    Parse a target: the argument of ``drakit conformance``. The other arguments are those of
    `conformance_tests`.

    :param text: ``module:Class``, the name of an installed driver, ``unix:/path/to.sock``,
        ``backend:COMMAND`` or ``device-plugin:COMMAND``.
    :raises TargetError: the string is malformed.
    """
    form, colon, rest = text.partition(":")
    if form in ("backend", "unix", "device-plugin") and colon:
        if not rest.strip():
            raise TargetError(f"{text!r}: the colon must be followed by a command or a path")
        key, setting = _REQUIRED[form]
        if not config or key not in config:
            raise TargetError(
                f"{text}: the configuration has no {key}: set the configuration (--config FILE) to "
                f"the entry of this driver in the chart's value {setting}"
            )
        match form:
            case "backend":
                target: Target = BackendTarget(line=rest, entry=config)
            case "device-plugin":
                target = DevicePluginTarget(line=rest, entry=config)
            case _:
                target = BackendSocketTarget(socket=_socket(rest), entry=config)
    elif re.fullmatch(r"[\w.-]+(:[\w.]+)?", text):
        target = PythonTarget(reference=text, values=config or {})
    else:
        raise TargetError(
            f"{text} is not a target; give module:Class, the name of an installed driver, "
            f"unix:/path/to.sock, backend:COMMAND or device-plugin:COMMAND"
        )
    return replace(target, parameters=parameters, setup=setup, unplug=unplug)


def _socket(path: str) -> Path:
    socket = Path("/" + path.lstrip("/")) if path.startswith("/") else Path(path).absolute()
    if not socket.is_socket():
        raise TargetError(f"unix:{path}: there is no socket; start the backend first")
    return socket


def _filled(value: Any, *, root: Path, directory: str = "{directory}") -> Any:
    """Replace the placeholders in nested strings with the kit's paths."""
    if isinstance(value, str):
        return value.replace("{root}", str(root)).replace("{directory}", directory)
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, Any]", value)
        return {
            _filled(key, root=root, directory=directory): _filled(
                item, root=root, directory=directory
            )
            for key, item in mapping.items()
        }
    if isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        return [_filled(item, root=root, directory=directory) for item in items]
    if isinstance(value, Path):
        return _filled(str(value), root=root, directory=directory)
    return value
