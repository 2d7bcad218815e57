"""
Follows a collection without end: all its objects, then every change, despite errors.

A watch that ends is resumed at the last version (bookmarks included); one that cannot be resumed
(410) starts with a new list. Errors are retried with backoff. The consumer decides what the objects
mean, and how much of them it keeps.

It must not know kinds, or other watchers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from drakit.backoff import Backoff
from drakit.kube.errors import ApiError, GoneError, TooManyRequestsError, UnavailableError
from drakit.kube.listing import Listing, SkippedLog
from drakit.kube.watch import WatchEvent

__all__ = ("Applied", "Change", "Collection", "Deleted", "Reflector", "Replaced")

logger: logging.Logger = logging.getLogger(__name__)

HEALTHY_SECONDS = 5.0
"""A watch that lasted this long, or received anything, is resumed at once when it ends: servers end
watches every few minutes. One that ends before is a failure: otherwise it would be a hot loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replaced:
    """All objects: those that the consumer knows and that are missing here have been deleted."""

    items: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """An object is new, or has changed. It may be repeated."""

    object: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Deleted:
    """An object is gone, or no longer matches the selectors; this is its last state."""

    object: dict[str, Any]


Change = Replaced | Applied | Deleted


class Collection(Protocol):
    """The requests that the reflector needs of a session."""

    async def list(
        self, path: str, *, params: Mapping[str, str] | None = None
    ) -> Listing[dict[str, Any]]: ...

    def watch(
        self, path: str, *, resource_version: str, params: Mapping[str, str] | None = None
    ) -> AsyncGenerator[WatchEvent]: ...


class Reflector:
    """Follows one collection of one session. One consumer reads its changes."""

    def __init__(
        self,
        session: Collection,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        retry_seconds: float = 0.5,
        retry_limit_seconds: float = 30.0,
    ) -> None:
        self._session = session
        self._path = path
        self._params = dict(params or {})
        self._backoff = Backoff(first_seconds=retry_seconds, limit_seconds=retry_limit_seconds)
        self._version: str | None = None
        self._heard_at: float | None = None
        self._skipped = SkippedLog()
        self.synced: bool = False
        """Whether the collection has been listed once."""
        self.last_error: ApiError | None = None
        """Why it is not watching at the moment; None if it is, or is about to start."""

    def silent_seconds(self) -> float:
        """Seconds since the server last sent anything, bookmarks included; for health checks."""
        if self._heard_at is None:
            return float("inf")
        return asyncio.get_running_loop().time() - self._heard_at

    async def changes(self) -> AsyncGenerator[Change]:
        """Yield :class:`Replaced` first and after each gap, otherwise one change at a time."""
        while True:
            try:
                if self._version is None:
                    listing = await self._session.list(self._path, params=self._params)
                    for each in listing.skipped:
                        self._skipped.log(each.metadata, each.reason, path=self._path)
                    self._heard(listing.resource_version)
                    self.synced = True
                    yield Replaced(items=listing.items)
                async with aclosing(self._watched()) as watched:
                    async for change in watched:
                        yield change
            except GoneError as error:
                self._version = None
                await self._wait(error)
            except ApiError as error:
                await self._wait(error)

    async def _watched(self) -> AsyncGenerator[Change]:
        """One watch. Returns if it may be resumed at once, otherwise raises the reason."""
        assert self._version is not None
        loop = asyncio.get_running_loop()
        began, events = loop.time(), 0
        try:
            stream = self._session.watch(
                self._path, resource_version=self._version, params=self._params
            )
            async with aclosing(stream):
                async for event in stream:
                    events += 1
                    self._recovered()
                    self._heard(event.object["metadata"]["resourceVersion"])
                    if event.unreadable and event.type != "DELETED":
                        self._skipped.log(
                            event.object["metadata"], event.unreadable, path=self._path
                        )
                    elif event.type == "DELETED":
                        yield Deleted(object=event.object)
                    elif event.type != "BOOKMARK":
                        yield Applied(object=event.object)
        finally:
            if events or loop.time() - began >= HEALTHY_SECONDS:
                self._recovered()
        if not events and loop.time() - began < HEALTHY_SECONDS:
            why = "the watch ended at once, without an event"
            raise UnavailableError.no_answer("WATCH", self._path, why=why)

    def _heard(self, version: str) -> None:
        self._version = version
        self._heard_at = asyncio.get_running_loop().time()

    def _recovered(self) -> None:
        self._backoff.succeeded()
        if self.last_error is not None:
            logger.info("watching again", extra={"path": self._path})
            self.last_error = None

    async def _wait(self, error: ApiError) -> None:
        seconds = self._backoff.next_seconds()
        if isinstance(error, TooManyRequestsError | UnavailableError):
            seconds = max(seconds, min(error.retry_after_seconds or 0, 60))
        # A single failure of a watch is normal: a server restarts, a balancer cuts an idle
        # connection. It is worth a warning when the next attempt fails too.
        level = logging.WARNING if self._backoff.failures == 2 else logging.DEBUG
        logger.log(
            level,
            "cannot list or watch, retrying",
            extra={"path": self._path, "error": str(error), "seconds": round(seconds, 1)},
        )
        self.last_error = error
        await asyncio.sleep(seconds)
