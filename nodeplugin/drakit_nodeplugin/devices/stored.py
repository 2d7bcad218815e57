"""
What the checkpoint keeps of endpoints: names alone, so that what had begun can be finished.

As in the kubelet's own checkpoint: after a restart an endpoint that was there exists as a stopped
one, until it returns or its grace period has ended.

It must not know how it is stored, or devices beyond their names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

__all__ = ("EndpointStore", "StoredEndpoint")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredEndpoint:
    """An endpoint that had devices."""

    name: str
    pools: Mapping[str, tuple[str, ...]]
    """Names of devices by the pool's name in the API."""

    stopped_at: float | None = None
    """Since when it is away, seconds since 1970; None if it was there when this was stored."""

    removing: bool = False
    """Its grace period has ended: its pools are being deleted."""


class EndpointStore(Protocol):
    """What the device manager needs of the checkpoint. Raises CheckpointError where it fails."""

    async def endpoints(self) -> list[StoredEndpoint]:
        """Give all of them."""
        ...

    async def write_endpoints(self, endpoints: Collection[StoredEndpoint]) -> None:
        """Store some, in place of what was stored of them: all of them or none."""
        ...

    async def forget_endpoints(self, names: Collection[str]) -> None:
        """Remove endpoints; one that is not there is fine."""
        ...
