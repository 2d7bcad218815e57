"""
The HTTP client that Kopf gets: it answers lists itself, and passes on no object as it came.

Kopf's parser fails on an object that is nested deep enough, which ends the whole of Kopf, and its
queues hold whole objects. Here each event is parsed first, and loses what no fact comes from. An
object that cannot be read is replaced by one of which nothing is known but its name.

Kopf lists nothing: it gets an empty list that ends where our own lists did (see :mod:`.census`). A
second list, or an error of a watch, means that there is a gap, and this run of Kopf has to end.

It must not know the store, or what facts are.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import parse_qs, urlsplit

import aiohttp
import orjson

from drakit.kube.errors import ApiError, GoneError
from drakit.kube.paths import resource_path
from drakit.kube.watch import WatchEvent, read_events
from drakit_operator.kinds import Kind

__all__ = ("GuardedClient",)

OnSkipped = Callable[[Kind, Mapping[str, Any], str], None]
OnGap = Callable[[ApiError], None]

_UNUSED = (("metadata", "managedFields"), ("metadata", "annotations"), ("metadata", "labels"))
"""Paths that no fact of any kind comes from."""


class GuardedClient:
    """As much of an :class:`aiohttp.ClientSession` as Kopf uses."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        *,
        server: str,
        kinds: Iterable[Kind],
        versions: MutableMapping[Kind, str],
        on_skipped: OnSkipped,
        on_gap: OnGap,
    ) -> None:
        """``versions`` says where the watch of a kind begins; each is used once, and removed."""
        self._on_gap = on_gap
        self._http = http
        self._server = server.rstrip("/")
        self._kinds = {resource_path(kind.group_version, kind.plural): kind for kind in kinds}
        self._versions = versions
        self._on_skipped = on_skipped

    @property
    def headers(self) -> Any:
        return self._http.headers

    @property
    def closed(self) -> bool:
        return self._http.closed

    async def close(self) -> None:
        await self._http.close()

    async def request(self, method: str, url: str, **options: Any) -> Any:
        """Send a request, but answer lists of our kinds, and guard their watches."""
        parts = urlsplit(url.removeprefix(self._server))
        kind = self._kinds.get(parts.path)
        if kind is None or method.upper() != "GET":
            return await self._http.request(method, url, **options)
        if "watch" not in parse_qs(parts.query):
            return _EmptyList(self._take_version(kind, parts.path))
        response = await self._http.request(method, url, **options)
        if response.status >= 400:
            return response
        return _GuardedWatch(
            response, kind, path=parts.path, on_skipped=self._on_skipped, on_gap=self._on_gap
        )

    def _take_version(self, kind: Kind, path: str) -> str:
        version = self._versions.pop(kind, None)
        if version is None:
            error = GoneError(
                status=410,
                reason="Expired",
                message="its watch has to start again after a new list",
                method="WATCH",
                path=path,
            )
            self._on_gap(error)
            raise error
        return version


class _Response:
    """What Kopf does with any response."""

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
    """A list without items: only its version matters, from which Kopf watches."""

    def __init__(self, version: str) -> None:
        self._version = version

    async def json(self) -> dict[str, Any]:
        return {"metadata": {"resourceVersion": self._version}, "items": []}


class _GuardedWatch(_Response):
    """The stream of a watch, event by event."""

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        kind: Kind,
        *,
        path: str,
        on_skipped: OnSkipped,
        on_gap: OnGap,
    ) -> None:
        self._on_gap = on_gap
        self._response = response
        self._kind = kind
        self._path = path
        self._on_skipped = on_skipped

    @property
    def content(self) -> Self:
        return self

    def close(self) -> None:
        self._response.close()

    async def iter_chunked(self, _: int) -> AsyncGenerator[bytes]:
        """Give one line an event."""
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
        return orjson.dumps({"type": event.type, "object": body}) + b"\n"


def _drop(body: dict[str, Any], path: tuple[str, ...]) -> None:
    for key in path[:-1]:
        inner: Any = body.get(key)
        if not isinstance(inner, dict):
            return
        body = cast("dict[str, Any]", inner)
    body.pop(path[-1], None)
