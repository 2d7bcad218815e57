"""
Endpoints that still take one claim at a time, and an engine that still gives one: until both use
batches.

It must not know how any kind of endpoint works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from drakit.device import AllocatedClaim, AllocatedDevice, ClaimReference, Edits
from drakit_nodeplugin.endpoints.endpoint import HostedEndpoint
from drakit_nodeplugin.endpoints.errors import EndpointStoppedError
from drakit_nodeplugin.endpoints.traits import DriverTraits

__all__ = ("FormerEndpoint", "for_engine")


class FormerEndpoint(Protocol):
    """An endpoint that takes one claim at a time."""

    @property
    def traits(self) -> DriverTraits: ...
    @property
    def blocked(self) -> str | None: ...
    def away(self) -> EndpointStoppedError | None: ...
    async def prepare(
        self, claim: ClaimReference, devices: Sequence[AllocatedDevice]
    ) -> Sequence[Edits]: ...
    async def unprepare(
        self, claim: ClaimReference, devices: Sequence[AllocatedDevice]
    ) -> None: ...
    async def check(self, claim: ClaimReference, devices: Sequence[AllocatedDevice]) -> bool: ...
    async def start(self) -> None: ...
    async def run(self) -> None: ...
    async def close(self) -> None: ...


_Begin = Callable[[Sequence[AllocatedClaim]], Mapping[str, asyncio.Future[Any]]]


class _OneByOne:
    """Collects the claims of one turn of the event loop to batches."""

    def __init__(self, endpoint: HostedEndpoint) -> None:
        self.traits = endpoint.traits
        self.away = endpoint.unavailable
        self._endpoint = endpoint
        self._open: dict[str, tuple[_Begin, dict[asyncio.Future[Any], AllocatedClaim]]] = {}

    async def prepare(
        self, claim: ClaimReference, devices: Sequence[AllocatedDevice]
    ) -> Sequence[Edits]:
        return await self._call("prepare", self._endpoint.prepare, claim, devices)

    async def unprepare(self, claim: ClaimReference, devices: Sequence[AllocatedDevice]) -> None:
        await self._call("unprepare", self._endpoint.unprepare, claim, devices)

    async def check(self, claim: ClaimReference, devices: Sequence[AllocatedDevice]) -> bool:
        return await self._call("check", self._endpoint.check, claim, devices)

    async def _call(
        self, what: str, begin: _Begin, claim: ClaimReference, devices: Sequence[AllocatedDevice]
    ) -> Any:
        loop = asyncio.get_running_loop()
        if what not in self._open:
            self._open[what] = (begin, {})
            loop.call_soon(self._begin, what)
        waiting: asyncio.Future[asyncio.Future[Any]] = loop.create_future()
        self._open[what][1][waiting] = AllocatedClaim(claim=claim, devices=tuple(devices))
        return await (await waiting)

    def _begin(self, what: str) -> None:
        begin, waiting = self._open.pop(what)
        items = {future: item for future, item in waiting.items() if not future.done()}
        futures = begin(list(items.values()))
        for future, item in items.items():
            future.set_result(futures[item.claim.uid])


def for_engine(endpoint: HostedEndpoint | FormerEndpoint) -> Any:
    """Return an endpoint as one that takes one claim at a time."""
    return endpoint if hasattr(endpoint, "away") else _OneByOne(endpoint)  # pyright: ignore[reportArgumentType]
