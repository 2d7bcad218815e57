"""
What the engine answers for a claim, in words of its own: the front door translates it.

It must not know gRPC, or how a claim is prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from drakit.device import ClaimReference

__all__ = (
    "GERUND",
    "Answer",
    "ClaimService",
    "Operation",
    "PrepareAnswer",
    "PreparedDevice",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedDevice:
    """A device of a prepared claim, as the kubelet wants to hear of it."""

    requests: tuple[str, ...]
    """Base request names, without ``/subrequest``: pods refer to those."""

    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    """Qualified CDI names (``vendor/class=name``): our own, then those of others' devices."""

    share_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareAnswer:
    """The devices of a claim, or why there are none."""

    devices: tuple[PreparedDevice, ...] = ()
    error: str | None = None
    """A sentence for the pod's Event; None is success."""

    reason: str | None = None
    """For metrics and Events: one of a closed set of words, without data; None is success."""


Operation = Literal["prepare", "unprepare"]
"""What the kubelet asks for a claim."""

GERUND: Mapping[Operation, str] = {"prepare": "preparing", "unprepare": "unpreparing"}
"""How sentences speak of it."""

Answer = Callable[[str, PrepareAnswer], None]
"""Takes the answer of one claim by its UID, once, as soon as it is known."""


class ClaimService(Protocol):
    """
    What the front door of one driver needs.

    Each call answers every claim of its batch exactly once, whatever becomes of the others, and
    returns when all are answered. A call for a claim that another call works on waits for it.
    """

    async def prepare(self, claims: Sequence[ClaimReference], answer: Answer) -> None:
        """Prepare the claims of a pod; errors are answers, one claim's does not touch another."""
        ...

    async def unprepare(self, claims: Sequence[ClaimReference], answer: Answer) -> None:
        """Unprepare claims; not being prepared is success. Answers are without devices."""
        ...

    def abandon(self, uid: str) -> None:
        """Give up the preparing of a claim that is under way: its unprepare waits for that. The
        preparing is answered with an error soon, unless it can be ended no more."""
        ...
