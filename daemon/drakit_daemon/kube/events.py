"""
Kubernetes Events: messages to users about an object, without duplicates.

The same message about the same object is one Event with a count (``series``), even after a restart
or from another replica, because the name of the Event is a hash of its content. If another reporter
has already used the name, the Event gets an unpredictable name. :meth:`EventRecorder.record` limits
the rate of Events from one source about one object. Callers of :meth:`EventRecorder.write` must
limit the rate themselves.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, Literal, TypeVar

from drakit.text import escaped
from drakit_daemon.kube.request import (
    AlreadyExistsError,
    ApiError,
    ForbiddenError,
    NotFoundError,
    resource_path,
)
from drakit_daemon.kube.session import Session
from drakit_daemon.rate_limiter import RateLimiter

logger: logging.Logger = logging.getLogger(__name__)

_API_VERSION = "events.k8s.io/v1"
_MAX_NOTE_CHARACTERS = 1024
_MAX_WORD_CHARACTERS = 128
_MAX_OBJECT_NAME_CHARACTERS = 230
"""Maximum length of an Event's name before the hash. The whole name can have 253 characters."""

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class EventTimings:
    """Timings (in seconds on the loop's clock) and limits for writing and caching Events."""

    same_seconds: float = 600.0
    """How long an Event is cached. After that, the API server determines whether the Event already
    exists."""

    count_seconds: float = 30.0
    """Minimum time between two updates of a count, so that an Event that repeats every second is
    not updated every second."""

    burst: int = 10
    """Maximum number of new Events from one source about one object before their rate is limited
    (:meth:`EventRecorder.record`)."""

    refill_seconds: float = 60.0
    """How long it takes until another new Event from the source about the object is allowed."""

    request_seconds: float = 5.0
    """The time limit for a write. The caller waits for it."""

    capacity: int = 2048
    """Maximum number of Events, and of objects, to cache. The least recently used ones are dropped
    first."""


@dataclass(slots=True)
class _Series:
    path: str
    emitted_at: float
    written_at: float
    count: int = 1


@dataclass(slots=True)
class _Bounded(Generic[Value]):
    """A mapping that drops its least recently used items."""

    capacity: int
    items: OrderedDict[str, Value] = field(default_factory=lambda: OrderedDict[str, Value]())

    def get(self, key: str) -> Value | None:
        if key not in self.items:
            return None
        self.items.move_to_end(key)
        return self.items[key]

    def put(self, key: str, value: Value) -> None:
        self.items[key] = value
        self.items.move_to_end(key)
        while len(self.items) > self.capacity:
            self.items.popitem(last=False)


class EventRecorder:
    """Emits Events about objects on behalf of one controller."""

    def __init__(
        self,
        session: Session,
        *,
        controller: str,
        instance: str,
        shared: bool = True,
        timings: EventTimings | None = None,
    ) -> None:
        """
        ``controller`` is a qualified name (``drakit.dev/operator``), and ``instance`` is one of its
        instances. If Events are ``shared``, all instances update one Event for the same message.
        Otherwise, each instance writes its own Event.
        """
        self._session = session
        self._controller = controller
        self._instance = instance[:_MAX_WORD_CHARACTERS]
        self._author = (controller,) if shared else (controller, self._instance)
        self._timings = timings or EventTimings()
        self._series: _Bounded[_Series] = _Bounded(self._timings.capacity)
        self._limiters: _Bounded[RateLimiter] = _Bounded(self._timings.capacity)

    async def record(
        self,
        regarding: Mapping[str, Any],
        *,
        reason: str,
        action: str,
        note: str,
        type: Literal["Normal", "Warning"] = "Warning",
        source: str = "",
    ) -> None:
        """
        Emit an Event as :meth:`write` does, but log an API server error instead of raising it, and
        drop new Events about an object that already has too many from this source, such as a
        driver.
        """
        event = self._event(regarding, type=type, reason=reason, action=action, note=note)
        series = self._recent(event)
        if series is None and not self._within_rate(event, source):
            logger.info("too many events about one object", extra=_facts(event))
            return
        try:
            await self._emit(event, series)
        except ApiError as error:
            facts = _facts(event) | {"error": str(error)}
            logger.warning("Event could not be written", extra=facts)

    async def write(
        self,
        regarding: Mapping[str, Any],
        *,
        reason: str,
        action: str,
        note: str,
        type: Literal["Normal", "Warning"] = "Warning",
    ) -> bool:
        """
        Emit an Event about an object. Raises :class:`ApiError` if it could not be written. Returns
        False if the object's namespace is being deleted or no longer exists, because then nobody
        could read the Event.

        ``regarding`` is the object, or a reference to it (kind, apiVersion, name, namespace, uid).
        For an item of a list, the caller must add the kind and apiVersion. ``reason`` is a short
        CamelCase word from a small set, and ``action`` is the attempted action. The same cause must
        have the same note.
        """
        event = self._event(regarding, type=type, reason=reason, action=action, note=note)
        return await self._emit(event, self._recent(event))

    async def _emit(self, event: dict[str, Any], series: _Series | None) -> bool:
        if series is not None:
            await self._repeat(series)
            return True
        try:
            await self._create(event)
        except (ForbiddenError, NotFoundError) as error:
            if not _namespace_is_gone(error):
                raise
            logger.debug("namespace of the Event is gone", extra=_facts(event))
            return False
        return True

    def _recent(self, event: Mapping[str, Any]) -> _Series | None:
        series = self._series.get(_path(event))
        if series is None or _now() >= series.emitted_at + self._timings.same_seconds:
            return None
        return series

    async def _create(self, event: dict[str, Any]) -> None:
        metadata, seconds = event["metadata"], self._timings.request_seconds
        path = _path(event)
        collection = path.rpartition("/")[0]
        series = _Series(path, emitted_at=_now(), written_at=_now())
        self._series.put(path, series)  # before the write, because the note may repeat during it
        try:
            try:
                await self._session.create(collection, event, timeout_seconds=seconds)
            # The Event was written before a restart, or is no longer cached.
            except AlreadyExistsError:
                there = await self._session.get(path, timeout_seconds=seconds)
                reporter = (there.get("reportingController"), there.get("reportingInstance"))
                if reporter[: len(self._author)] != self._author:
                    stem, _ = metadata["name"].rsplit(".", 1)
                    metadata["name"] = f"{stem}.{secrets.token_hex(8)}"
                    series.path = f"{collection}/{metadata['name']}"
                    await self._session.create(collection, event, timeout_seconds=seconds)
                    return
                counted: dict[str, Any] = there.get("series") or {}
                series.count = int(counted.get("count") or 1) + 1
                await self._write_count(series)
        except BaseException:
            self._series.items.pop(path, None)  # not emitted, but the next attempt may succeed
            raise

    async def _repeat(self, series: _Series) -> None:
        series.count += 1
        series.emitted_at = _now()
        if series.emitted_at >= series.written_at + self._timings.count_seconds:
            await self._write_count(series)

    async def _write_count(self, series: _Series) -> None:
        series.written_at = _now()
        body = {"series": {"count": max(series.count, 2), "lastObservedTime": _timestamp()}}
        try:
            await self._session.patch(
                series.path, body, timeout_seconds=self._timings.request_seconds
            )
        except NotFoundError:
            # The server has deleted the Event (by default, after an hour), so the next repetition
            # creates a new one.
            series.emitted_at = -self._timings.same_seconds

    def _within_rate(self, event: Mapping[str, Any], source: str) -> bool:
        reference: Mapping[str, str] = event["regarding"]
        about = f"{reference['kind']}/{reference.get('uid') or reference['name']} {source}"
        limiter = self._limiters.get(about)
        if limiter is None:
            limiter = RateLimiter(
                burst=self._timings.burst, per_second=1 / self._timings.refill_seconds
            )
            self._limiters.put(about, limiter)
        return limiter.take()

    def _event(
        self, regarding: Mapping[str, Any], *, type: str, reason: str, action: str, note: str
    ) -> dict[str, Any]:
        reference = _reference(regarding)
        note = escaped(note)  # the note contains strings from vendors and tenants
        # The hash covers everything that distinguishes two Events, so that the same cause has the
        # same name.
        about = (reference["kind"], reference.get("uid", ""), type, reason, note)
        parts = (*self._author, *about)
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        return {
            "apiVersion": _API_VERSION,
            "kind": "Event",
            "metadata": {
                "name": f"{reference['name'][:_MAX_OBJECT_NAME_CHARACTERS].rstrip('.-')}.{digest}",
                # Events about cluster-scoped objects belong to "default".
                "namespace": reference.get("namespace") or "default",
            },
            "eventTime": _timestamp(),
            "type": type,
            "reason": reason[:_MAX_WORD_CHARACTERS],
            "action": action[:_MAX_WORD_CHARACTERS],
            "note": _shortened(note),
            "regarding": reference,
            "reportingController": self._controller,
            "reportingInstance": self._instance,
        }


def _namespace_is_gone(error: ApiError) -> bool:
    """Return whether the server refused an Event because its namespace is being deleted, or no
    longer exists."""
    if isinstance(error, NotFoundError):
        return error.details.get("kind") == "namespaces"
    causes: list[Mapping[str, Any]] = error.details.get("causes") or []
    return any(cause.get("reason") == "NamespaceTerminating" for cause in causes)


def _reference(regarding: Mapping[str, Any]) -> dict[str, str]:
    """Return a reference to an object. If a reference is given, return it."""
    metadata: Mapping[str, Any] = regarding.get("metadata") or regarding
    found = {
        "apiVersion": regarding.get("apiVersion"),
        "kind": regarding.get("kind"),
        **{k: metadata.get(k) for k in ("name", "namespace", "uid", "resourceVersion")},
    }
    if not found["kind"] or not found["name"]:
        raise ValueError(f"an event needs the kind and name of its object: {found}")
    return {name: value for name, value in found.items() if value}


def _shortened(note: str) -> str:
    # The API limits the number of bytes, not characters.
    encoded = note.encode()
    if len(encoded) <= _MAX_NOTE_CHARACTERS:
        return note
    return encoded[: _MAX_NOTE_CHARACTERS - 3].decode(errors="ignore") + "…"


def _path(event: Mapping[str, Any]) -> str:
    """Return the API path of an Event, which is the same for its repetitions."""
    metadata = event["metadata"]
    return resource_path(
        _API_VERSION, "events", namespace=metadata["namespace"], name=metadata["name"]
    )


def _facts(event: Mapping[str, Any]) -> dict[str, str]:
    reference: Mapping[str, str] = event["regarding"]
    name = "/".join(filter(None, (reference.get("namespace"), reference["name"])))
    return {"object": f"{reference['kind']} {name}", "reason": event["reason"]}


def _now() -> float:
    return asyncio.get_running_loop().time()


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
