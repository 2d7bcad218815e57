"""
Follows a collection continuously: yields all its objects, then every change, and recovers from
errors.

A watch that ends is resumed at the last version, which bookmarks also update. If a watch cannot be
resumed (410) or is denied (403, 404), the reflector gets all objects again: by a list in pages, or
by a stream (WatchList, KEP-3157) if the API server supports it. Errors are retried with backoff.
The reflector keeps only the part of each object that the consumer needs, so that the whole
collection is never in memory.

Does not depend on kinds, or on other watchers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from drakit_daemon.backoff import Backoff
from drakit_daemon.kube.listing import Listing, SkippedLog, WatchEvent
from drakit_daemon.kube.request import (
    ApiError,
    ForbiddenError,
    GoneError,
    NotFoundError,
    TooManyRequestsError,
    UnavailableError,
)

logger: logging.Logger = logging.getLogger(__name__)

KeptT = TypeVar("KeptT")

PAGE_SIZE = 500
"""The number of objects per page of a list, as in Kubernetes clients. If a page is too large, fewer
objects are requested."""

HEALTHY_SECONDS = 12.0
"""Minimum duration of a watch without events that is resumed immediately when it ends, because
servers end watches every few minutes. A shorter watch that received nothing is treated as a
failure, so that the reflector does not retry in a hot loop. This time is longer than the request
timeout of a session (10 s), so a server that hangs is also treated as a failure."""

_ALL_FIRST = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
_ALL_SENT = "k8s.io/initial-events-end"
"""The annotation of the bookmark after all initial objects."""

_NOT_SUPPORTED = (400, 422)
"""The status codes that an API server returns if the feature WatchList is disabled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replaced(Generic[KeptT]):
    """All objects of the collection. Objects that the consumer knows but that are missing here have
    been deleted."""

    items: list[KeptT]


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied(Generic[KeptT]):
    """An object is new or has changed. The same change may be reported again."""

    object: KeptT


@dataclass(frozen=True, kw_only=True, slots=True)
class Deleted(Generic[KeptT]):
    """An object is gone, or no longer matches the selectors. `object` is its last state."""

    object: KeptT


Change = Replaced[KeptT] | Applied[KeptT] | Deleted[KeptT]


class Collection(Protocol):
    """The session's methods that the reflector uses to read a collection."""

    async def read_list(
        self,
        path: str,
        keep: Callable[[dict[str, Any]], KeptT],
        *,
        params: Mapping[str, str] | None = None,
        page_size: int = PAGE_SIZE,
    ) -> Listing[KeptT]: ...

    def watch(
        self, path: str, *, resource_version: str, params: Mapping[str, str] | None = None
    ) -> AsyncGenerator[WatchEvent]: ...


class Reflector(Generic[KeptT]):
    """Follows one collection with one session. Only one consumer can iterate over the changes."""

    def __init__(
        self,
        session: Collection,
        path: str,
        *,
        keep: Callable[[dict[str, Any]], KeptT],
        keep_unreadable: Callable[[Mapping[str, Any], str], KeptT] | None = None,
        params: Mapping[str, str] | None = None,
        streams: bool = False,
        on_error: Callable[[ApiError], None] = lambda error: None,
        retry_seconds: float = 0.5,
        retry_limit_seconds: float = 30.0,
    ) -> None:
        """
        :param keep: returns the part of an object that the consumer needs.
        :param keep_unreadable: returns the known part of an object that cannot be read, from its
            metadata and the reason. Without it, such objects are logged and skipped.
        :param streams: whether to request all objects with a watch, if the API server supports it.
        :param on_error: called after each failed list or watch.
        """
        self._session = session
        self._path = path
        self._keep = keep
        self._keep_unreadable = keep_unreadable
        self._params = dict(params or {})
        self._streams = streams
        self._on_error = on_error
        self._backoff = Backoff(first_seconds=retry_seconds, limit_seconds=retry_limit_seconds)
        self._version: str | None = None
        self._heard_at: float | None = None
        self._failing_since: float | None = None
        self._skipped = SkippedLog()
        self.synced: bool = False
        """Whether the collection has been listed once."""
        self.last_error: ApiError | None = None
        """The reason why the reflector is currently not watching. None if it is watching or about
        to watch."""

    def silent_seconds(self) -> float:
        """The seconds since the server last sent anything, including bookmarks, or kept a new watch
        open for HEALTHY_SECONDS. Used by health checks."""
        if self._heard_at is None:
            return float("inf")
        return asyncio.get_running_loop().time() - self._heard_at

    def failing_seconds(self) -> float:
        """How many seconds errors have prevented the reflector from watching. 0 if it is
        watching."""
        if self._failing_since is None:
            return 0.0
        return asyncio.get_running_loop().time() - self._failing_since

    async def changes(self) -> AsyncGenerator[Change[KeptT]]:
        """Yield :class:`Replaced` first and after each gap, and otherwise one change at a time."""
        while True:
            try:
                if self._version is None and not self._streams:
                    yield await self._list()
                async with aclosing(self._watched()) as watched:
                    async for change in watched:
                        yield change
            except (GoneError, ForbiddenError, NotFoundError) as error:
                # After a denial, the consumer may drop its objects, so it needs all of them again.
                self._version = None
                await self._wait(error)
            except ApiError as error:
                if self._streams and self._version is None and error.status in _NOT_SUPPORTED:
                    self._streams = False
                    continue
                await self._wait(error)

    async def _list(self) -> Replaced[KeptT]:
        listing = await self._session.read_list(
            self._path, self._keep, params=self._params, page_size=PAGE_SIZE
        )
        skipped = [self._unreadable(each.metadata, each.reason) for each in listing.skipped]
        self._heard(listing.resource_version)
        self.synced = True
        return Replaced(items=[*listing.items, *(each for found in skipped for each in found)])

    async def _watched(self) -> AsyncGenerator[Change[KeptT]]:
        """Run one watch, and yield its changes. Return if the watch can be resumed immediately.
        Otherwise, raise an error. If the watch begins with all objects, the reflector has recovered
        only after it has received them."""
        loop = asyncio.get_running_loop()
        began, events = loop.time(), 0
        all_first = self._version is None
        first: dict[str, KeptT] = {}
        healthy = None if all_first else loop.call_later(HEALTHY_SECONDS, self._kept_open)
        try:
            stream = self._session.watch(
                self._path,
                resource_version=self._version or "",
                params=self._params | (_ALL_FIRST if all_first else {}),
            )
            async with aclosing(stream):
                async for event in stream:
                    metadata: Mapping[str, Any] = event.object["metadata"]
                    events += 1
                    if all_first and event.type == "BOOKMARK":
                        all_first = _ALL_SENT not in (metadata.get("annotations") or {})
                        if not all_first:
                            self._recovered()
                            self._heard(metadata["resourceVersion"])
                            self.synced = True
                            items = list(first.values())
                            # Free the objects, because the consumer gets its own list now.
                            first.clear()
                            yield Replaced(items=items)
                            del items
                        continue
                    if not all_first:
                        self._recovered()
                        self._heard(metadata["resourceVersion"])
                    for kept in self._kept(event):
                        if all_first:
                            first.pop(metadata["uid"], None)
                            if event.type != "DELETED":
                                first[metadata["uid"]] = kept
                        elif event.type == "DELETED":
                            yield Deleted(object=kept)
                        else:
                            yield Applied(object=kept)
        finally:
            if healthy is not None:
                healthy.cancel()
        if all_first:
            # The server ends each watch after some minutes, but a list can take longer.
            self._streams = False
            why = "the watch ended before all objects were sent"
            raise UnavailableError.no_response("WATCH", self._path, why=why)
        if not events and loop.time() - began < HEALTHY_SECONDS:
            why = "the watch ended at once, without an event"
            raise UnavailableError.no_response("WATCH", self._path, why=why)

    def _kept(self, event: WatchEvent) -> list[KeptT]:
        """Return the kept part of an event's object, or an empty list for a bookmark."""
        if event.type == "BOOKMARK":
            return []
        if event.unreadable and (event.type != "DELETED" or self._keep_unreadable is not None):
            return self._unreadable(event.object["metadata"], event.unreadable)
        return [self._keep(event.object)]

    def _unreadable(self, metadata: Mapping[str, Any], reason: str) -> list[KeptT]:
        if self._keep_unreadable is not None:
            return [self._keep_unreadable(metadata, reason)]
        self._skipped.log(metadata, reason, path=self._path)
        return []

    def _heard(self, version: str) -> None:
        self._version = version
        self._heard_at = asyncio.get_running_loop().time()

    def _kept_open(self) -> None:
        """Record that a watch without events is healthy, because the server has kept it open."""
        self._heard_at = asyncio.get_running_loop().time()
        self._recovered()

    def _recovered(self) -> None:
        self._backoff.succeeded()
        self._failing_since = None
        if self.last_error is not None:
            logger.info("watching again", extra={"path": self._path})
            self.last_error = None

    async def _wait(self, error: ApiError) -> None:
        seconds = self._backoff.next_seconds()
        if isinstance(error, TooManyRequestsError | UnavailableError):
            seconds = max(seconds, min(error.retry_after_seconds or 0, 60))
        # A single watch failure is normal: a server restarts, or a load balancer closes an idle
        # connection. Log a warning only if the next attempt also fails.
        level = logging.WARNING if self._backoff.failures == 2 else logging.DEBUG
        logger.log(
            level,
            "cannot list or watch, retrying",
            extra={"path": self._path, "error": str(error), "seconds": round(seconds, 1)},
        )
        self.last_error = error
        if self._failing_since is None:
            self._failing_since = asyncio.get_running_loop().time()
        self._on_error(error)
        await asyncio.sleep(seconds)
