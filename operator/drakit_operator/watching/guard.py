"""
The HTTP client for Kopf: it answers lists itself, and reduces each object that it passes on.

Kopf's parser fails on a deeply nested object, which ends Kopf, and its queues hold whole objects.
This client parses each event first, and removes the fields that no fact needs. It replaces an
unreadable object with a placeholder that has only its name.

Kopf lists nothing: it gets an empty list with the version of our own list (see :mod:`.census`). A
second list, or an error of a watch, means that there is a gap, and this run of Kopf must end.

It must not know the store, or facts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import parse_qs, urlsplit

import aiohttp
import orjson

from drakit.explain.projection import FOR_EXTENDED
from drakit.kube.errors import ApiError, GoneError
from drakit.kube.watch import WatchEvent, read_events
from drakit_operator.kinds import OnSkipped, Served

__all__ = ("GuardedClient",)

OnGap = Callable[[ApiError], None]

_UNUSED = (("metadata", "managedFields"),)
"""Paths that no fact of any kind needs."""


class GuardedClient:
    """The part of an :class:`aiohttp.ClientSession` that Kopf uses."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        *,
        server: str,
        kinds: Iterable[Served],
        versions: MutableMapping[Served, str],
        on_skipped: OnSkipped,
        on_gap: OnGap,
    ) -> None:
        """``versions`` has the version at which each kind's watch begins; each is used once."""
        self._on_gap = on_gap
        self._http = http
        self._closed = False
        self._server = server.rstrip("/")
        self._kinds = {served.path: served for served in kinds}
        self._versions = versions
        self._on_skipped = on_skipped

    @property
    def headers(self) -> Any:
        return self._http.headers

    @property
    def closed(self) -> bool:
        return self._closed or self._http.closed

    async def close(self) -> None:
        """Note that Kopf has ended. Kopf leaves requests behind, which a closed session would make
        fail, so its owner closes the session after it has canceled them."""
        self._closed = True

    async def request(self, method: str, url: str, **options: Any) -> Any:
        """Send a request, but answer lists of our kinds here, and guard their watches."""
        parts = urlsplit(url.removeprefix(self._server))
        served = self._kinds.get(parts.path)
        if served is None or method.upper() != "GET":
            return await self._http.request(method, url, **options)
        if "watch" not in parse_qs(parts.query):
            return _EmptyList(self._take_version(served))
        response = await self._http.request(method, url, **options)
        if response.status >= 400:
            return response
        return _GuardedWatch(response, served, on_skipped=self._on_skipped, on_gap=self._on_gap)

    def _take_version(self, served: Served) -> str:
        version = self._versions.pop(served, None)
        if version is None:
            error = GoneError(
                status=410,
                reason="Expired",
                message="its watch must restart after a new list",
                method="WATCH",
                path=served.path,
            )
            self._on_gap(error)
            raise error
        return version


class _Response:
    """The part of a response that Kopf uses."""

    status = 200
    headers: Mapping[str, str] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        pass


class _EmptyList(_Response):
    """An empty list: only its version matters, from which Kopf watches."""

    def __init__(self, version: str) -> None:
        self._version = version

    async def json(self) -> dict[str, Any]:
        return {"metadata": {"resourceVersion": self._version}, "items": []}


class _GuardedWatch(_Response):
    """The stream of a watch, event by event."""

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        served: Served,
        *,
        on_skipped: OnSkipped,
        on_gap: OnGap,
    ) -> None:
        self._on_gap = on_gap
        self._response = response
        self._kind = served.kind
        self._path = served.path
        self._on_skipped = on_skipped

    @property
    def content(self) -> Self:
        return self

    def close(self) -> None:
        self._response.close()

    async def iter_chunked(self, _: int) -> AsyncGenerator[bytes]:
        """Yield one line per event."""
        chunks = self._response.content.iter_any()
        try:
            async for event in read_events(chunks, path=self._path):
                yield self._line(event)
        except ApiError as error:
            self._on_gap(error)
            raise

    def _line(self, event: WatchEvent) -> bytes:
        body = event.object
        if event.unreadable:
            self._on_skipped(self._kind, body["metadata"], event.unreadable)
            body = {**self._kind.unknown, "metadata": body["metadata"]}
        for path in (*_UNUSED, *self._kind.unused):
            _drop(body, path)
        _drop_annotations(body)
        return orjson.dumps({"type": event.type, "object": body}) + b"\n"


def _drop_annotations(body: dict[str, Any]) -> None:
    """Remove all annotations but the mark that the scheduler sets, which has one value."""
    metadata: Any = body.get("metadata")
    if isinstance(metadata, dict):
        fields = cast("dict[str, Any]", metadata)
        given: Any = fields.pop("annotations", None)
        if isinstance(given, dict) and cast("dict[str, Any]", given).get(FOR_EXTENDED) == "true":
            fields["annotations"] = {FOR_EXTENDED: "true"}


def _drop(body: dict[str, Any], path: tuple[str, ...]) -> None:
    for step, key in enumerate(path[:-1]):
        inner: Any = body.get(key)
        if isinstance(inner, list) and path[step + 1] == "*":
            for item in cast("list[Any]", inner):
                if isinstance(item, dict):
                    _drop(cast("dict[str, Any]", item), path[step + 2 :])
            return
        if not isinstance(inner, dict):
            return
        body = cast("dict[str, Any]", inner)
    body.pop(path[-1], None)
