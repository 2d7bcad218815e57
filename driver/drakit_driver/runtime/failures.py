"""
Endpoint failures: errors whose messages appear in an Event of the pod. The node plugin derives
claim errors from them.

Does not depend on claims, slices or gRPC.
"""

from __future__ import annotations

import logging
import traceback
from typing import Self

from drakit.driver import DriverError, ReleasePendingError

logger = logging.getLogger(__name__)

MAX_TEXT = 1000
"""Maximum length of an exception message within an error. An Event's message can have 1,024
characters."""

MAX_TRACEBACK = 20_000
"""Maximum length of a traceback in the log."""

MAX_FRAMES = 40
"""Maximum number of frames of each exception in a traceback, starting with the outermost."""

MAX_NAME = 80
"""Maximum length of a type name in a message."""


class EndpointStoppedError(Exception):
    """The source of a driver's devices is unavailable. Nothing can be prepared or confirmed."""

    def __init__(self, *, driver: str, reason: str) -> None:
        super().__init__(
            f"driver {driver} is unavailable: {reason}; the kubelet retries the pod, and the node "
            "plugin restarts a driver that has ended"
        )
        self.driver, self.reason = driver, reason


class DeviceFailedError(Exception):
    """A device of a claim could not be prepared or unprepared. The message comes from the
    driver."""

    def __init__(self, text: str, *, index: int | None = None, pending: bool = False) -> None:
        super().__init__(text)
        self.index = index
        """The index of the failed device in the claim. None if no single device failed."""
        self.pending = pending
        """Whether the driver is still releasing the device. If so, the pod can terminate without
        waiting for it."""

    def alone(self) -> Self:
        """Remove the cause and return the error itself. The cause refers to the driver's objects,
        and logging it would run vendor code."""
        self.__cause__ = self.__context__ = self.__traceback__ = None
        return self


class BadParametersError(DeviceFailedError):
    """The opaque parameters for a device are invalid, because of a mistake in the claim or
    DeviceClass."""


class CallOverdueError(Exception):
    """The other side did not respond within its own deadline."""


class CallCancelledError(Exception):
    """The driver canceled its own call: the caller did not cancel it, and the connection still
    exists."""

    def __init__(self) -> None:
        super().__init__("the driver canceled its own call, which is a bug in the driver")


def failure_of(
    error: BaseException,
    *,
    driver: str,
    what: str,
    index: int | None = None,
) -> DeviceFailedError:
    """Return the error for an exception that a call has raised. `index` is the index of the failed
    device, if a single device failed."""
    if isinstance(error, DeviceFailedError):
        return error
    name = f"driver {driver}"
    if isinstance(error, DriverError):
        # A message about a single device does not need the driver name. Any other message begins
        # with it.
        text = text_of(error) if index is not None else f"{name}: {text_of(error)}"
    else:
        facts = {"driver": driver, "call": what, "exception": traceback_of(error)}
        logger.error("driver failed", extra=facts)
        text = f"{name} failed in {what}: {kind_and_text(error)}"
    return DeviceFailedError(text, index=index, pending=isinstance(error, ReleasePendingError))


def unusable_result(
    answer: str, *, driver: str, what: str, index: int | None = None
) -> DeviceFailedError:
    """Return the error for an unusable result."""
    text = f"driver {driver}: {what} returned {answer}; this is a bug in the driver"
    return DeviceFailedError(text, index=index)


def kind_of(value: object) -> str:
    """Return the name of a value's type, in printable characters."""
    name = type(value).__name__[:MAX_NAME]
    return name if name.isprintable() else ascii(name)


def text_of(error: BaseException) -> str:
    """
    Return an exception's message in a form that can be embedded in another message. For a vendor's
    exception, formatting may raise, and the message may be empty, very long or not valid UTF-8.

    Runs vendor code, so call it only in the driver's thread.
    """
    return _text(error) or kind_and_text(error)


def kind_and_text(error: BaseException) -> str:
    """Return an exception's type and message, as in :func:`text_of`: ``KeyError: 'a'``."""
    text, kind = _text(error), kind_of(error)
    return f"{kind}: {text}" if text else f"{kind} (no message)"


def _text(error: BaseException) -> str:
    try:
        text = str.__str__(str(error))[:MAX_TEXT].encode("utf-8", "backslashreplace").decode()
    except Exception:
        return ""
    return printable(text) if text.strip() else ""


def printable(text: str) -> str:
    """Format a driver's message for use in an error: as one line, with a limited length, and never
    empty. The driver can run in this process or elsewhere."""
    words = " ".join(text[:MAX_TEXT].split())
    if not words.isprintable():
        words = "".join(each if each.isprintable() else "?" for each in words)
    return words or "it gave no reason"


def traceback_of(error: BaseException) -> str:
    """
    Return an exception's traceback, including those of its causes, as a string of limited length.

    Call this in the driver's thread. The logging module would format the traceback while holding a
    lock, so a vendor's `__str__` that blocks would block all logging.
    """
    try:
        text = "".join(traceback.format_exception(error, limit=MAX_FRAMES))
        text = str.__str__(text).encode("utf-8", "backslashreplace").decode()
    except Exception:
        return f"{kind_of(error)}, whose traceback cannot be shown"
    # Keep the end, which contains the error itself.
    return text[-MAX_TRACEBACK:]
