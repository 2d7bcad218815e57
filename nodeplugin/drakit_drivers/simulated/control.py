"""
The control file: what becomes of devices, as somebody commands it who wants to see what follows.

A file that cannot be read or understood is reported once, and what it said before stays: it may be
half written. A file that is missing commands nothing.

It must not know which devices there are.
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

__all__ = ("Control", "ControlFile", "Stamp", "TaintCommand")

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
"""From one look at the file to the next."""

MAX_BYTES = 1024 * 1024

Pattern = Annotated[str, Field(min_length=1, max_length=253)]
Stamp = tuple[int, int, int]
"""Tells one content of a file from the next: times and size change, or the file itself."""


class HealthCommand(DriverConfig):
    """How a device is from now on."""

    status: Literal["healthy", "unhealthy", "unknown"]
    message: str = Field(default="", max_length=1024)
    broken: bool = False
    """Pods that use it are evicted, if it stays so."""

    def health(self) -> Health:
        """Give it as the driver says it."""
        return Health(self.status, self.message, self.broken)


class TaintCommand(DriverConfig):
    """A taint that a device has from now on."""

    key: str = Field(min_length=1, max_length=253)
    """With the driver's name before it if it has no domain."""

    value: str = Field(default="", max_length=63)
    effect: TaintEffect = "NoSchedule"


class Control(DriverConfig):
    """
    What the file says.

    Devices are named, or given as a pattern (``gpu-*``, ``*``). What is said of a GPU holds for its
    partitions, too.
    """

    health: dict[Pattern, HealthCommand] = Field(default_factory=dict)
    """How devices are; of several that fit the last counts."""

    taints: dict[Pattern, tuple[TaintCommand, ...]] = Field(default_factory=dict)
    """Taints of devices; of several that fit all count."""

    missing: tuple[Pattern, ...] = ()
    """Devices that are gone."""

    stop: str = Field(default="", max_length=1024)
    """Why the driver's stream ends. It begins anew once this is taken out."""

    fail_prepare: dict[Pattern, Annotated[str, Field(min_length=1, max_length=1024)]] = Field(
        default_factory=dict
    )
    """Devices that cannot be prepared, and the text of the error."""

    def patterns(self) -> list[str]:
        """All devices that are named, or given as a pattern."""
        return [*self.health, *self.taints, *self.missing, *self.fail_prepare]


def matches(pattern: str, names: Iterable[str]) -> bool:
    """Say whether a pattern is for a device of one of these names: its own, or its GPU's."""
    return any(fnmatchcase(name, pattern) for name in names)


class ControlFile:
    """Reads the file, and again whenever it has changed; one reader at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: Stamp | None = None
        self._bad: str | None = None
        self._last = Control()

    async def follow(self) -> AsyncGenerator[Control, None]:
        """Give what the file says, now and after each change, until it is closed."""
        yield await asyncio.to_thread(self.look) or self._last
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if control := await asyncio.to_thread(self.look):
                yield control

    @property
    def last(self) -> Control:
        """What the file said when it could be understood last."""
        return self._last

    def look(self) -> Control | None:
        """Read the file; None if nothing has changed, or it cannot be understood."""
        stamp = _stamp(self._path)
        if stamp == self._seen:
            # Not at the first look: whoever writes it may not have been done.
            if self._bad:
                logger.warning(
                    "control file is not understood, what it said before stays",
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
        return None  # opening a pipe would wait for whoever writes to it
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
