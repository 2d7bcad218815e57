"""
The directory of CDI files that we write: whole files or none, and nobody else's touched.

Runtimes watch the directory and read every ``*.json`` in it at any moment, so a file appears by
rename, from a temporary file whose name they do not look at.

Functions block (a daemon calls them in a thread). It must not know claims, or what a spec means.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

__all__ = ("DamagedSpecError", "SpecDirectory")

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\.json")
_TEMPORARY = re.compile(r"\.(?P<name>.+\.json)\.[0-9a-f]{8}\.drakit")
_ATTEMPTS = 3
"""Writes begun for one file: a starting plugin of the same driver may clean away the temporary
file of one that is being replaced."""


class DamagedSpecError(ValueError):
    """A file of ours that holds no CDI spec any more."""


class SpecDirectory:
    """
    One directory of generated CDI files, usually ``/var/run/cdi``.

    Several processes may use it, for different drivers or the same one: each call is safe alone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, file_name: str, spec: Mapping[str, Any]) -> bool:
        """Put a spec in place, durably and at once; say whether the file had to be written."""
        target = self._target(file_name)
        data = json.dumps(spec, indent=2).encode() + b"\n"
        with suppress(FileNotFoundError):
            if target.read_bytes() == data:
                return False
        # Made again where the directory went (/run is a tmpfs that admins do empty).
        self.path.mkdir(mode=0o755, parents=True, exist_ok=True)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._replace(target, data)
                break
            except FileNotFoundError:
                if attempt == _ATTEMPTS:
                    raise
        return True

    def read(self, file_name: str) -> dict[str, Any] | None:
        """Give a file's spec; None if there is no such file."""
        target = self._target(file_name)
        try:
            spec = json.loads(target.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DamagedSpecError(f"CDI file {target} is no JSON: {error}") from error
        if not isinstance(spec, dict):
            raise DamagedSpecError(f"CDI file {target} is no JSON object")
        return cast("dict[str, Any]", spec)

    def remove(self, file_name: str) -> None:
        """Remove a file; one that is missing is fine."""
        self._target(file_name).unlink(missing_ok=True)

    def names(self, prefix: str) -> tuple[str, ...]:
        """List the files whose names begin so, in order; none where there is no directory."""
        return tuple(
            sorted(
                name
                for name in self._listing()
                if name.startswith(prefix) and _FILE_NAME.fullmatch(name)
            )
        )

    def clean_temporary(self, prefix: str) -> None:
        """Remove what a crash in the middle of `write` left of files whose names begin so."""
        for name in self._listing():
            match = _TEMPORARY.fullmatch(name)
            if match and match["name"].startswith(prefix):
                (self.path / name).unlink(missing_ok=True)

    def _target(self, file_name: str) -> Path:
        if not _FILE_NAME.fullmatch(file_name):
            raise ValueError(
                f"{file_name!r} is no name for a CDI file (letters, digits, ._-, .json)"
            )
        return self.path / file_name

    def _listing(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []

    def _replace(self, target: Path, data: bytes) -> None:
        temporary = self.path / f".{target.name}.{secrets.token_hex(4)}.drakit"
        try:
            # 0644 as CDI files are: a runtime may read them without being root.
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, 0o644)  # whatever the umask took away
                file.write(data)
                file.flush()
                # Else a power cut may leave a file that is in place, and empty.
                os.fsync(descriptor)
            temporary.rename(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
