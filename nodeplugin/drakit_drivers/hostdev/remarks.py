"""
What an admin should read in the log about a look at the host: each remark once, while it holds.

Values that compare equal are the same remark, so a rescan that finds nothing new says nothing.

It must not know when a look is taken, or where the log goes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from drakit_drivers.hostdev.attributes import left_out
from drakit_drivers.hostdev.host import Look

__all__ = ("Diagnostic", "remarks")


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """A log line: a constant message and named facts."""

    level: int
    message: str
    facts: tuple[tuple[str, str], ...]


def _remark(level: int, message: str, **facts: str) -> Diagnostic:
    return Diagnostic(level, message, tuple(facts.items()))


def remarks(look: Look) -> Iterator[Diagnostic]:
    """Say what keeps devices, or parts of them, from being published."""
    if look.usage_unknown:
        yield _remark(logging.WARNING, "no block device is published", reason=look.usage_unknown)
    for place in look.misplaced:
        yield _remark(
            logging.WARNING,
            "path is of another subsystem than its policy",
            policy=place.policy,
            path=place.path,
            subsystem=place.subsystem,
        )
    for overlap in look.selection.overlaps:
        yield _remark(
            logging.WARNING,
            "two policies match a device, the first has it",
            path=overlap.path,
            first=overlap.first,
            second=overlap.second,
        )
    for name, refused in look.selection.refused.items():
        path, reason = refused.published.host.path, refused.reason
        yield _remark(
            logging.INFO, "device is not published", device=name, path=path, reason=reason
        )
    for name, published in look.selection.devices.items():
        too_long = left_out(published.host, policy=published.policy_name)
        if too_long:
            yield _remark(
                # A path that no selector can ask for is worth more than a long product name.
                logging.WARNING if "path" in too_long else logging.DEBUG,
                "attributes are too long to be published",
                device=name,
                attributes=", ".join(too_long),
            )
