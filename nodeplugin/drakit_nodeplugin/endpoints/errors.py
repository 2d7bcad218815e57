"""
What an endpoint cannot do.

It must not know claims, slices or gRPC.
"""

from __future__ import annotations

__all__ = ("DeviceFailedError", "EndpointStoppedError", "text_of")


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


def text_of(error: BaseException) -> str:
    """Give an exception's text; vendors write exceptions whose text cannot be made."""
    try:
        return str(error)
    except Exception:
        return f"{type(error).__name__}, which has no text"
