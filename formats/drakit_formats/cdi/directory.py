"""
The directory of generated CDI files. Writes are atomic, and the files of other programs are left
unchanged.

Runtimes watch the directory and can read each ``*.json`` file in it at any moment. Therefore, a
file is written under a temporary name, which runtimes ignore, and then renamed.

A node plugin verifies the files of a whole pod within milliseconds, so this module uses system
calls and few objects. The functions block, so a daemon calls them in a thread. Does not depend on
claims.
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

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\.json")
_TEMPORARY = re.compile(r"\.(?P<name>.+\.json)\.[0-9a-f]{8}\.drakit")
_ESCAPED = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that JSON allows in a string, but that YAML parsers reject or treat as line breaks."""

_ENCODER = json.JSONEncoder(ensure_ascii=False)
_ATTEMPTS = 3
"""Maximum number of attempts to write a file. A new node plugin of the same driver may remove the
old plugin's temporary file, and an admin may remove the directory (/run is a tmpfs)."""


class DamagedSpecError(ValueError):
    """A file in the directory is not a CDI spec."""


def dump_spec(spec: Mapping[str, Any]) -> str:
    """Return the content of a spec's file: one line of JSON that is also valid YAML."""
    text = _ENCODER.encode(spec)
    if not text.isascii() or "\x7f" in text:
        text = _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return f"{text}\n"


class SpecDirectory:
    """
    A directory of generated CDI files, usually ``/var/run/cdi``.

    Several processes may use it, for different drivers or the same driver, because each call is
    atomic. An invalid file name raises ValueError.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        """
        Use a directory, which does not have to exist yet.

        `durable` means that a written file survives a power failure. A caller that compares all
        files after each boot does not need that, and saves a flush per file.
        """
        self.path = path
        self._folder = str(path)
        self._durable = durable

    def write(self, file_name: str, spec: Mapping[str, Any]) -> bool:
        """Write a spec atomically. Return whether the file changed."""
        return self.write_text(file_name, dump_spec(spec))

    def write_text(self, file_name: str, text: str) -> bool:
        """Write the content of a spec's file atomically. Return whether the file changed."""
        target, data = self._target(file_name), text.encode()
        with suppress(FileNotFoundError):
            if _read(target) == data:
                return False
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._replace(file_name, data)
                break
            except FileNotFoundError:
                if attempt == _ATTEMPTS:
                    raise
                self.path.mkdir(mode=0o755, parents=True, exist_ok=True)
        return True

    def read(self, file_name: str) -> dict[str, Any] | None:
        """Return the spec in a file, or None if the file does not exist."""
        target = self._target(file_name)
        try:
            spec = json.loads(_read(target))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DamagedSpecError(f"CDI file {target} is not JSON: {error}") from error
        if not isinstance(spec, dict):
            raise DamagedSpecError(f"CDI file {target} is not a JSON object")
        return cast("dict[str, Any]", spec)

    def read_text(self, file_name: str) -> str | None:
        """
        Return the content of a file, or None if the file does not exist.

        Bytes that are not UTF-8 are replaced, so the parser reports the damage.
        """
        try:
            return _read(self._target(file_name)).decode(errors="replace")
        except FileNotFoundError:
            return None

    def remove(self, file_name: str) -> None:
        """Remove a file, if it exists."""
        with suppress(FileNotFoundError):
            os.unlink(self._target(file_name))

    def names(self, prefix: str) -> tuple[str, ...]:
        """Return the names of the files with this prefix, in order. Empty if the directory does not
        exist."""
        found = [
            name
            for name in self._listing()
            if name.startswith(prefix) and name.endswith(".json") and name[0] != "."
        ]
        return tuple(sorted(found))

    def clean_temporary(self, prefix: str) -> None:
        """Remove temporary files with this prefix that were left behind by a crash during a
        write."""
        for name in self._listing():
            match = _TEMPORARY.fullmatch(name)
            if match and match["name"].startswith(prefix):
                (self.path / name).unlink(missing_ok=True)

    def _target(self, file_name: str) -> str:
        if not _FILE_NAME.fullmatch(file_name):
            raise ValueError(
                f"{file_name!r} is not a valid name for a CDI file (letters, digits, ._-, .json)"
            )
        return f"{self._folder}/{file_name}"

    def _listing(self) -> list[str]:
        try:
            return os.listdir(self._folder)
        except FileNotFoundError:
            return []

    def _replace(self, file_name: str, data: bytes) -> None:
        temporary = f"{self._folder}/.{file_name}.{secrets.token_hex(4)}.drakit"
        try:
            # Create the file with mode 0644, because a runtime may not run as root.
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                os.fchmod(descriptor, 0o644)  # set the mode regardless of the umask
                file.write(data)
                if self._durable:
                    # Without the flush, a power failure may leave an empty file under the final
                    # name.
                    os.fsync(descriptor)
            os.rename(temporary, f"{self._folder}/{file_name}")
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Read one byte more than the size, so that a single read also detects the end of the file.
        size = os.fstat(descriptor).st_size + 1
        chunks: list[bytes] = []
        while chunk := os.read(descriptor, size):
            chunks.append(chunk)
        return b"".join(chunks)
    finally:
        os.close(descriptor)
