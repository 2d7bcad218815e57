"""
What an endpoint cannot do.

It must not know claims, slices or gRPC.
"""

from __future__ import annotations

__all__ = ("BadParametersError", "DeviceFailedError", "EndpointStoppedError", "text_of")

MAX_TEXT = 2000
"""Characters of an exception's text that go on; of an Event's message there are 1,024."""


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


class BadParametersError(DeviceFailedError):
    """The opaque parameters for a device do not fit: a fault of who wrote them."""


def text_of(error: BaseException) -> str:
    """
    Give an exception's text, fit for a message; vendors write exceptions whose text cannot be made,
    is empty or without end, or holds what no UTF-8 can.
    """
    try:
        text = str(error)[:MAX_TEXT].encode("utf-8", "backslashreplace").decode()
    except Exception:
        text = ""
    return text or f"{type(error).__name__}, which has no text"
