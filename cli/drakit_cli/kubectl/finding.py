"""
A finding of the doctor, and words that its checks share.

It must not know what is checked.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

MAX_NAMES = 3
"""Names in one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that is wrong, or that might be, and its remedy."""

    object: str
    """The kind and the name of the object."""

    what: str
    fix: str
    """A command, or a value of the chart."""

    problem: bool = True
    """Pods cannot use devices, or a release does not work; otherwise the state may be intended."""

    @property
    def severity(self) -> str:
        return "problem" if self.problem else "note"


def shortened(names: Collection[str]) -> str:
    """List a few names, and count the others."""
    listed = list(names)
    rest = len(listed) - MAX_NAMES
    return ", ".join(listed[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def is_or_are(names: Collection[str]) -> str:
    return "is" if len(names) == 1 else "are"
