"""
Complaints: what the node plugin's log says of a driver that cannot be used.

It must not know how the log comes to be, or who waits for the driver.
"""

from __future__ import annotations

import re

__all__ = ("last_line", "left_out", "refused", "stopped", "unready")

MAX_CHARACTERS = 1000
"""Of a complaint; what is longer was made by the driver."""

_LEFT_OUT = re.compile(r"device is left out .*?device=(?P<device>\S+) error=(?P<reason>.*)$", re.M)
_REFUSED = re.compile(r"backend needs attention .*?reason=BackendRefused note=(?P<note>.*)$", re.M)
_STOPPED = re.compile(r"^\S+ ERROR +endpoint stopped .*?reason=(?P<reason>.*)$", re.M)
_UNREADY = re.compile(r"probe fails .*?probe=/readyz reason=(?P<reason>.*)$", re.M)


def left_out(log: str) -> str | None:
    """Say which device was left out last, and why."""
    found = [*_LEFT_OUT.finditer(log)]
    if not found:
        return None
    return f"device {found[-1]['device']} is left out: {found[-1]['reason']}"[:MAX_CHARACTERS]


def refused(log: str) -> str | None:
    """Say why a backend was refused last."""
    notes = [match["note"] for match in _REFUSED.finditer(log)]
    return f"the backend is refused: {notes[-1]}"[:MAX_CHARACTERS] if notes else None


def stopped(log: str) -> str | None:
    """Say why the driver stopped last."""
    reasons = [match["reason"] for match in _STOPPED.finditer(log)]
    return f"the driver stopped: {reasons[-1]}"[:MAX_CHARACTERS] if reasons else None


def unready(log: str) -> str | None:
    """Return the latest reason why the node plugin was not ready."""
    reasons = [match["reason"] for match in _UNREADY.finditer(log)]
    return f"the node plugin is not ready: {reasons[-1]}"[:MAX_CHARACTERS] if reasons else None


def last_line(text: str) -> str | None:
    """Give the last line that says anything."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:MAX_CHARACTERS] if lines else None
