"""
The control file, with which users make devices fail.

If the file cannot be read or parsed, this is logged once, and its last valid content remains in
effect, because the file may be only partially written. Without a file, all devices are listed and
healthy.
"""

from __future__ import annotations

import asyncio
import logging
import stat
from collections.abc import AsyncGenerator, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, ValidationError

from drakit import DriverConfig, Health, TaintEffect

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""Time between two polls of the file."""

MAX_BYTES = 1024 * 1024

Pattern = Annotated[str, Field(min_length=1, max_length=253)]
Stamp = tuple[int, int, int]
"""Identifies the content of a file: modification time, size, and inode."""


class HealthCommand(DriverConfig):
    """A command that sets the health of a device."""

    status: Literal["healthy", "unhealthy", "unknown"]
    message: str = Field(default="", max_length=1024)
    broken: bool = False
    """Whether pods that use the device are evicted if it remains unhealthy."""

    def health(self) -> Health:
        """Return the health that the driver reports."""
        return Health(self.status, self.message, self.broken)


class TaintCommand(DriverConfig):
    """A command that adds a taint to a device."""

    key: str = Field(min_length=1, max_length=253)
    """The taint's key. A key without a domain gets the driver's name as its domain."""

    value: str = Field(default="", max_length=63)
    effect: TaintEffect = "NoSchedule"


class Control(DriverConfig):
    """
    The content of the control file.

    Keys are device names or patterns (``gpu-*``, ``*``). Entries for a GPU also apply to its
    partitions.
    """

    health: dict[Pattern, HealthCommand] = Field(default_factory=dict)
    """The health of devices. If several entries match, the last one applies."""

    taints: dict[Pattern, tuple[TaintCommand, ...]] = Field(default_factory=dict)
    """Taints of devices. All matching entries apply."""

    missing: tuple[Pattern, ...] = ()
    """Devices that the driver no longer lists."""

    stop: str = Field(default="", max_length=1024)
    """The reason why the driver stops. It starts again once this field is removed."""

    fail_prepare: dict[Pattern, Annotated[str, Field(min_length=1, max_length=1024)]] = Field(
        default_factory=dict
    )
    """Devices that cannot be prepared, with the error message."""

    def patterns(self) -> list[str]:
        """Return all device names and patterns in the file."""
        return [*self.health, *self.taints, *self.missing, *self.fail_prepare]


def matches(pattern: str, names: Iterable[str]) -> bool:
    """Return whether a pattern matches one of a device's names: its own name, or that of its
    GPU."""
    return any(fnmatchcase(name, pattern) for name in names)


class ControlFile:
    """Reads the control file, and rereads it after each change. Supports one reader at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: Stamp | None = None
        self._bad: str | None = None
        self._last = Control()

    async def follow(self) -> AsyncGenerator[Control, None]:
        """Yield the content of the file, now and after each change, until the generator is
        closed."""
        yield await asyncio.to_thread(self.poll) or self._last
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if control := await asyncio.to_thread(self.poll):
                yield control

    @property
    def last(self) -> Control:
        """The last valid content of the file."""
        return self._last

    def poll(self) -> Control | None:
        """Read the file if it has changed. Return its content, or None if that is unchanged or
        malformed."""
        stamp = _stamp(self._path)
        if stamp == self._seen:
            # Report a malformed file only at the second poll, because it may have been partially
            # written at the first.
            if self._bad:
                logger.warning(
                    "control file is malformed, its last valid content stays in effect",
                    extra={"file": str(self._path), "reason": self._bad},
                )
                self._bad = None
            return None
        self._seen = stamp
        try:
            control = _read(self._path) if stamp else Control()
        except (OSError, ValueError) as error:
            self._bad = _reason(error)
            return None
        self._bad = None
        if control == self._last:
            return None
        logger.info("control file has changed", extra={"file": str(self._path)})
        self._last = control
        return control


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None  # don't open a pipe, which would block until there is a writer
    return (status.st_mtime_ns, status.st_size, status.st_ino)


def _read(path: Path) -> Control:
    with path.open("rb") as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    return Control.model_validate_json(text) if text.strip() else Control()


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, ValidationError):
        problems = cast("list[Any]", error.errors(include_url=False, include_input=False))
        return "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}".removeprefix(": ")
            for problem in problems
        )
    return str(error)
