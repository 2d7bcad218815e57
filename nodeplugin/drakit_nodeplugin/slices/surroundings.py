"""
What the publishers of all pools of a driver share.

It must not know pools.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from drakit.resource.features import Feature
from drakit_nodeplugin.devices.pools import Publication
from drakit_nodeplugin.devices.revision import Revision
from drakit_nodeplugin.slices.api import SliceApi
from drakit_nodeplugin.slices.store import SliceStore
from drakit_nodeplugin.slices.taintcheck import TaintCheck

__all__ = ("NodeOwner", "PublicationSource", "Surroundings")


class PublicationSource(Protocol):
    """Who says what is to be published of one driver."""

    @property
    def driver(self) -> str:
        """The driver's name."""
        ...

    @property
    def revision(self) -> Revision:
        """Advances whenever `publication` would give something else."""
        ...

    def publication(self) -> Publication:
        """Give what is to be published; asked once a second and pool at most."""
        ...


class NodeOwner(Protocol):
    """Who knows our Node, the owner of our slices."""

    async def uid(self, *, again: bool = False) -> str:
        """Give its UID, read again if asked to; ApiError if it cannot be read."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What the pools of a driver share."""

    source: PublicationSource
    node: str
    owner: NodeOwner
    api: SliceApi
    store: SliceStore
    primary: asyncio.Event
    dropped: Callable[[], Collection[Feature]]
    """The features that the API server is known to drop."""

    on_dropped: Callable[[Collection[Feature]], bool]
    """Told what an answer lacks; tells whether plans have become wrong by it."""

    taints: TaintCheck
    on_left_out: Callable[[Mapping[str, str]], None]
    """Told why devices are not published, by ``pool/device`` in the driver's words."""
