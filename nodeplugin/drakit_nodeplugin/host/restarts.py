"""
Finds out why the previous process ended, if the container was restarted.

A process records in a file that it is running, in which pod and in which boot, and finally the
reason why it ended. The next process in the same pod and boot reads the record. A process that is
killed cannot record a reason.

Functions block. The module does not depend on drivers, or on how the reason is reported.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import orjson

from drakit.layout import private_directory, write_private

logger = logging.getLogger(__name__)

MAX_REASON = 500
"""Maximum length of a reason, which becomes part of an Event note."""

KILLED = (
    "it was killed, for example because it exceeded its memory limit: see Last State in "
    "'kubectl describe pod'"
)
STOPPED = "it was asked to stop, for example because its liveness probe failed"
FAILED = "it failed ('kubectl logs --previous' shows its log)"


class ProcessNote:
    """The record of this process."""

    def __init__(self, file: Path, *, instance_uid: str, boot_id: str) -> None:
        self._file = file
        self._process = {"instance": instance_uid, "boot": boot_id}

    def begin(self) -> str | None:
        """Record that this process is running. Return the reason why the previous process in this
        pod ended, or None if there was no such process."""
        reason: str | None = None
        try:
            before: Any = orjson.loads(self._file.read_bytes())
            if {key: before.get(key) for key in self._process} == self._process:
                reason = str(before.get("end") or KILLED)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, AttributeError) as error:
            logger.warning("note of the former process cannot be read", extra=self._facts(error))
        self._write("")
        return reason

    def end(self, error: BaseException | None) -> None:
        """Record the reason why this process ends. `error` is None if the process was asked to
        stop."""
        while isinstance(error, BaseExceptionGroup):
            error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
        reason = STOPPED if error is None else f"{FAILED}: {error}"
        self._write(reason[:MAX_REASON])

    def _write(self, end: str) -> None:
        try:
            private_directory(self._file.parent)
            write_private(self._file, orjson.dumps(self._process | {"end": end}))
        except OSError as error:
            logger.warning("note of this process cannot be written", extra=self._facts(error))

    def _facts(self, error: Exception) -> dict[str, str]:
        return {"file": str(self._file), "error": str(error)}
