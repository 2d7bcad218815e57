"""
What an endpoint cannot do.

It must not know claims, slices or gRPC.
"""

from __future__ import annotations

import traceback
from typing import Self

from drakit_nodeplugin.endpoints.python.plain import name_of_type

__all__ = (
    "BadParametersError",
    "DeviceFailedError",
    "EndpointStoppedError",
    "text_of",
    "traceback_of",
)

MAX_TEXT = 2000
"""Characters of an exception's text that go on; of an Event's message there are 1,024."""

MAX_TRACEBACK = 20_000
"""Characters of a traceback in the log."""

MAX_FRAMES = 40
"""Of each exception in it, from the outermost."""


class EndpointStoppedError(Exception):
    """The source of a driver's devices is away: nothing can be prepared or confirmed."""

    def __init__(self, *, driver: str, reason: str) -> None:
        super().__init__(
            f"driver {driver} is stopped: {reason}; it is started again by itself, and the pod "
            f"is tried again"
        )
        self.driver, self.reason = driver, reason


class DeviceFailedError(Exception):
    """A device of a claim could not be prepared or unprepared; the text is the driver's."""

    def __init__(self, text: str, *, index: int | None = None) -> None:
        super().__init__(text)
        self.index = index
        """Which of the claim's devices; None if it is not about one of them."""

    def alone(self) -> Self:
        """Forget what caused it: that holds the driver's objects, and who shows it asks them."""
        self.__cause__ = self.__context__ = self.__traceback__ = None
        return self


class BadParametersError(DeviceFailedError):
    """The opaque parameters for a device do not fit: a fault of who wrote them."""


def text_of(error: BaseException) -> str:
    """
    Give an exception's text, fit for a message; vendors write exceptions whose text cannot be made,
    is empty or without end, or holds what no UTF-8 can.

    That calls the vendor's code: it is done in the driver's thread, and nowhere else.
    """
    try:
        text = str.__str__(str(error))[:MAX_TEXT].encode("utf-8", "backslashreplace").decode()
    except Exception:
        text = ""
    return text or f"{name_of_type(type(error))}, which has no text"


def traceback_of(error: BaseException) -> str:
    """
    Give an exception's traceback, and those of what caused it, as a text that is not too long.

    As the log would make it, which calls the vendor's code, too, and holds the log's lock
    meanwhile: one that does not end would end all that is logged.
    """
    try:
        text = "".join(traceback.format_exception(error, limit=MAX_FRAMES))
        text = str.__str__(text).encode("utf-8", "backslashreplace").decode()
    except Exception:
        return f"{name_of_type(type(error))}, whose traceback cannot be shown"
    if len(text) > MAX_TRACEBACK:
        # The error itself stands at the end, what caused it at the begin.
        text = f"{text[: MAX_TRACEBACK // 2]}\n...\n{text[-MAX_TRACEBACK // 2 :]}"
    return text
