"""
What the engine answers for a claim, in words of its own: the front door translates it.

It must not know gRPC, or how a claim is prepared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from drakit.device import ClaimReference

__all__ = ("ClaimService", "PrepareAnswer", "PreparedDevice")


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedDevice:
    """A device of a prepared claim, as the kubelet wants to hear of it."""

    requests: tuple[str, ...]
    """Base request names, without ``/subrequest``: pods refer to those."""

    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    """Qualified CDI names (``vendor/class=name``)."""

    share_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareAnswer:
    """The devices of a claim, or why there are none."""

    devices: tuple[PreparedDevice, ...] = ()
    error: str | None = None
    """A sentence for the pod's Event; None is success."""


class ClaimService(Protocol):
    """What the front door of one driver needs: every UID asked for is answered exactly once."""

    async def prepare(self, claims: Sequence[ClaimReference]) -> Mapping[str, PrepareAnswer]:
        """Prepare the claims of a pod; errors are answers, one claim's does not touch another."""
        ...

    async def unprepare(self, claims: Sequence[ClaimReference]) -> Mapping[str, str | None]:
        """Unprepare claims; None is success, which not being prepared is as well."""
        ...
