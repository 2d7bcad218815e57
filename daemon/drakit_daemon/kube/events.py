"""
Kubernetes Events: deduplicated notes for people about an object.

The same note about the same object is one Event with a count (``series``), also after a restart and
from another replica: its name is a digest of its content. If another reporter has taken the name,
the Event gets one that nobody can guess. :meth:`EventRecorder.record` limits the rate of Events
about one object; callers of :meth:`EventRecorder.write` have a limit of their own.

It must not know why an Event is emitted.
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
from typing import Any, Generic, Literal, Protocol, TypeVar

from drakit_daemon.kube.request import (
    AlreadyExistsError,
    ApiError,
    ForbiddenError,
    NotFoundError,
    resource_path,
)
from drakit_daemon.rate_limiter import RateLimiter

logger: logging.Logger = logging.getLogger(__name__)

_API_VERSION = "events.k8s.io/v1"
_MAX_NOTE_CHARACTERS = 1024
_MAX_WORD_CHARACTERS = 128
_MAX_OBJECT_NAME_CHARACTERS = 230
"""The part of an Event's name, which has 253 characters at most, before the digest."""

Value = TypeVar("Value")


class Events(Protocol):
    """The requests that a recorder needs of a session."""

    async def get(self, path: str, *, timeout_seconds: float | None = None) -> dict[str, Any]: ...
    async def create(
        self, path: str, body: Mapping[str, Any], *, timeout_seconds: float | None = None
    ) -> dict[str, Any]: ...
    async def patch(
        self, path: str, body: Mapping[str, Any], *, timeout_seconds: float | None = None
    ) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EventTimings:
    """Seconds on the loop's clock, and limits of what is written and kept."""

    same_seconds: float = 600.0
    """How long a note is remembered; after that the server decides whether the Event exists."""

    count_seconds: float = 30.0
    """Between two writes of a count: a note that repeats each second needs no write each second."""

    burst: int = 10
    """New notes about one object before their rate is limited (:meth:`EventRecorder.record`)."""

    refill_seconds: float = 60.0
    """The pause after which an object may have one more."""

    request_seconds: float = 5.0
    """Time limit of a write; the caller waits for it."""

    capacity: int = 2048
    """Notes and objects that are remembered; the least recently used are forgotten first."""


@dataclass(slots=True)
class _Series:
    path: str
    emitted_at: float
    written_at: float
    count: int = 1


@dataclass(slots=True)
class _Bounded(Generic[Value]):
    """A mapping that forgets the least recently used items."""

    capacity: int
    items: OrderedDict[tuple[str, ...], Value] = field(
        default_factory=lambda: OrderedDict[tuple[str, ...], Value]()
    )

    def get(self, key: tuple[str, ...]) -> Value | None:
        if key not in self.items:
            return None
        self.items.move_to_end(key)
        return self.items[key]

    def put(self, key: tuple[str, ...], value: Value) -> None:
        self.items[key] = value
        self.items.move_to_end(key)
        while len(self.items) > self.capacity:
            self.items.popitem(last=False)


class EventRecorder:
    """Emits Events about objects, in the name of one controller."""

    def __init__(
        self,
        session: Events,
        *,
        controller: str,
        instance: str,
        shared: bool = True,
        timings: EventTimings | None = None,
    ) -> None:
        """
        ``controller`` is a qualified name (``drakit.dev/operator``), and ``instance`` is one of its
        instances. If Events are ``shared``, all instances update the same Event for a text;
        otherwise each instance writes its own.
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
    ) -> None:
        """
        Emit an Event as :meth:`write` does, but only log an error of the API server, and drop new
        notes about an object that has too many.
        """
        reference = _reference(regarding)
        note = _sendable(note)
        about = _about(reference)
        repeated = self._recent((*about, type, reason, note), asyncio.get_running_loop().time())
        if repeated is None and not self._within_rate(about):
            logger.info("too many events about one object", extra=_facts(reference, reason))
            return
        try:
            await self.write(regarding, reason=reason, action=action, note=note, type=type)
        except ApiError as error:
            facts = _facts(reference, reason) | {"error": str(error)}
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
        Emit an Event about an object. Raises :class:`ApiError` if it could not be written. Return
        False if its namespace is being deleted, or no longer exists: nobody could read it.

        ``regarding`` is the object, or a reference to it (kind, apiVersion, name, namespace, uid);
        objects of a list need their kind and apiVersion added. ``reason`` is one of a few words in
        CamelCase, ``action`` what was attempted. The same cause must have the same note.
        """
        reference = _reference(regarding)
        note = _sendable(note)
        key = (*_about(reference), type, reason, note)
        now = asyncio.get_running_loop().time()
        series = self._recent(key, now)
        if series is not None:
            await self._repeat(series, now)
            return True
        event = self._event(reference, type=type, reason=reason, action=action, note=note)
        try:
            await self._emit(key, event, now)
        except (ForbiddenError, NotFoundError) as error:
            if not _namespace_is_gone(error):
                raise
            logger.debug("namespace of the Event is gone", extra=_facts(reference, reason))
            return False
        return True

    def _recent(self, key: tuple[str, ...], now: float) -> _Series | None:
        series = self._series.get(key)
        if series is None or now >= series.emitted_at + self._timings.same_seconds:
            return None
        return series

    async def _emit(self, key: tuple[str, ...], event: dict[str, Any], now: float) -> None:
        metadata, seconds = event["metadata"], self._timings.request_seconds
        namespace = metadata["namespace"]
        path = resource_path(_API_VERSION, "events", namespace=namespace, name=metadata["name"])
        series = _Series(path, emitted_at=now, written_at=now)
        self._series.put(key, series)  # before the write: the note may repeat during it
        try:
            collection = resource_path(_API_VERSION, "events", namespace=namespace)
            try:
                await self._session.create(collection, event, timeout_seconds=seconds)
            except AlreadyExistsError:  # from before a restart, or long ago
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
                await self._write_count(series, now)
        except BaseException:
            self._series.items.pop(key, None)  # not emitted: the next attempt may succeed
            raise

    async def _repeat(self, series: _Series, now: float) -> None:
        series.count += 1
        series.emitted_at = now
        if now >= series.written_at + self._timings.count_seconds:
            await self._write_count(series, now)

    async def _write_count(self, series: _Series, now: float) -> None:
        series.written_at = now
        body = {"series": {"count": max(series.count, 2), "lastObservedTime": _timestamp()}}
        try:
            await self._session.patch(
                series.path, body, timeout_seconds=self._timings.request_seconds
            )
        except NotFoundError:
            # The server has deleted it (after an hour, by default): the next one is new.
            series.emitted_at = -self._timings.same_seconds

    def _within_rate(self, about: tuple[str, ...]) -> bool:
        limiter = self._limiters.get(about)
        if limiter is None:
            limiter = RateLimiter(
                burst=self._timings.burst, per_second=1 / self._timings.refill_seconds
            )
            self._limiters.put(about, limiter)
        return limiter.take()

    def _event(
        self, reference: Mapping[str, str], *, type: str, reason: str, action: str, note: str
    ) -> dict[str, Any]:
        # Everything that distinguishes two Events, so that the same cause has the same name.
        about = (reference["kind"], reference.get("uid", ""), type, reason, note)
        parts = (*self._author, *about)
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        return {
            "apiVersion": _API_VERSION,
            "kind": "Event",
            "metadata": {
                "name": f"{reference['name'][:_MAX_OBJECT_NAME_CHARACTERS].rstrip('.-')}.{digest}",
                # Events about objects without a namespace belong to "default".
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
    """Return an object reference for an object or a reference."""
    metadata: Mapping[str, Any] = regarding.get("metadata") or regarding
    found = {
        "apiVersion": regarding.get("apiVersion"),
        "kind": regarding.get("kind"),
        **{k: metadata.get(k) for k in ("name", "namespace", "uid", "resourceVersion")},
    }
    if not found["kind"] or not found["name"]:
        raise ValueError(f"an event needs the kind and name of its object: {found}")
    return {name: value for name, value in found.items() if value}


def _about(reference: Mapping[str, str]) -> tuple[str, ...]:
    return (reference.get("uid") or reference["name"], reference["kind"])


def _sendable(note: str) -> str:
    # Vendors write parts of it: half of a surrogate pair cannot be sent.
    return note.encode(errors="backslashreplace").decode()


def _shortened(note: str) -> str:
    # The API's limit counts bytes.
    encoded = note.encode()
    if len(encoded) <= _MAX_NOTE_CHARACTERS:
        return note
    return encoded[: _MAX_NOTE_CHARACTERS - 3].decode(errors="ignore") + "…"


def _facts(reference: Mapping[str, str], reason: str) -> dict[str, str]:
    name = "/".join(filter(None, (reference.get("namespace"), reference["name"])))
    return {"object": f"{reference['kind']} {name}", "reason": reason}


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
