"""
An in-memory Kubernetes API server for tests, served over HTTP.

    async with FakeApiServer() as server:
        server.store("/apis/resource.k8s.io/v1/namespaces/lab/resourceclaims/cam", {"spec": {}})
        session = await connect(server.write_kubeconfig(tmp_path), user_agent="test")
        ...
        assert ("POST", "/api/v1/namespaces/lab/events") in server.requests

Like the real server, it supports resource versions, ``AlreadyExists`` and ``Conflict`` errors,
delete preconditions, finalizers, generations, no-op writes, a separate ``status``, dry runs,
equality selectors, pagination with expiring tokens, watches with history, bookmarks and 410 errors,
and metadata-only lists. It does not support schemas, defaulting or admission. Server-side apply
merges objects, replaces lists, and does not record field owners.

Kinds are not registered: any path of the usual form works. ``served`` restricts a group to the
versions that a cluster serves, and ``forbidden`` denies verbs. To simulate failures, use ``fail``,
``delay``, ``token``, ``expire_history``, ``drop_watches``, ``end_watches_at_once``,
``send_to_watches`` and ``verbatim``.
"""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from drakit.testing.cluster import Change, FakeCluster, Object, ObjectPath, StatusError, merge

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

_VERBS = {"POST": "create", "PUT": "update"}


@dataclass
class Fault:
    """A fault for matching requests: a failure instead of the response, or a delay before it."""

    method: str
    path: str
    times: int
    delay_seconds: float = 0
    error: StatusError | None = None
    disconnect: bool = False

    def matches(self, request: web.Request) -> bool:
        watch = request.query.get("watch") in ("1", "true")
        method = "WATCH" if watch else request.method
        return (
            self.times > 0 and self.method in ("*", method) and request.path.startswith(self.path)
        )


@dataclass
class FakeApiServer:
    """
    An in-memory Kubernetes API server for tests, served over HTTP::

        async with FakeApiServer() as server:
            server.store("/apis/resource.k8s.io/v1/namespaces/lab/resourceclaims/cam", {"spec": {}})
            server.write_kubeconfig(tmp_path)

    It supports resource versions, conflicts, delete preconditions, finalizers, generations, a
    separate ``status``, dry runs, equality selectors, pagination, metadata-only lists, and watches
    with history and bookmarks. It does not support schemas, defaulting, admission or field
    ownership. Server-side apply merges objects and replaces lists. Any API path works.
    """

    token: str | None = None
    """The bearer token that requests must have. If None, the server accepts all requests."""

    watch_lists: bool = True
    """Whether a watch can begin with all existing objects (the feature gate WatchList). If not, the
    server rejects such watches."""

    end_watches_at_once: bool = False
    """Whether the server ends each watch immediately, without an event."""

    served: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """The served versions of each API group. By default, all versions are served."""

    forbidden: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """Pairs of a verb and a plural resource name that the server rejects with 403, such as
    ``("list", "nodes")``."""

    requests: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """The method and path of each request. The method of a watch is ``WATCH``."""

    queries: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    cluster: FakeCluster = field(default_factory=FakeCluster)

    dropped_device_fields: set[str] = field(default_factory=set[str])
    """Fields of ``ResourceSlice.spec.devices[]`` that the server drops from requests, like a server
    that does not support them."""

    texts: dict[str, str] = field(default_factory=dict[str, str])
    """Plain-text responses, keyed by path, such as ``/metrics``."""

    verbatim: dict[str, str] = field(default_factory=dict[str, str])
    """JSON strings with which the server replaces placeholders in responses, keyed by placeholder.
    Use them for values that are nested too deeply for Python's JSON encoder."""

    url: str = ""

    _faults: list[Fault] = field(default_factory=list[Fault])
    _runner: web.AppRunner | None = None

    async def __aenter__(self) -> FakeApiServer:
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0][:2])
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        self.drop_watches()
        await self._runner.cleanup()

    # ------------------------------------------------------------ for tests

    def write_kubeconfig(self, folder: Path, *, token: str | None = None) -> Path:
        """Write a kubeconfig for this server to a folder, and return its path."""
        token = token or self.token
        named = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "fake", "user": {"token": token} if token else {}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
        }
        path = folder / "kubeconfig"
        path.write_text(json.dumps(named))
        return path

    def store(self, path: str, obj: Object) -> Object:
        """Create or update the object at a path, including its status. Return the stored object."""
        target = ObjectPath.parse(path)
        if target.key not in self.cluster.objects:
            named = merge(obj, {"metadata": {"name": target.name}})
            return self.cluster.create(target, named)
        old = self.cluster.objects[target.key]
        new = merge(obj, {"metadata": old["metadata"] | (obj.get("metadata") or {})})
        return self.cluster.commit(target.key, old, new)

    def remove(self, path: str) -> None:
        """Delete the object at a path, ignoring its finalizers."""
        key = ObjectPath.parse(path).key
        self.cluster.commit(key, self.cluster.objects[key], None)

    def object(self, path: str) -> Object | None:
        """Return a copy of the object at a path, or None if it does not exist."""
        return copy.deepcopy(self.cluster.objects.get(ObjectPath.parse(path).key))

    def objects(self, path: str) -> list[Object]:
        """Return the objects in a collection."""
        return self.cluster.list_objects(ObjectPath.parse(path), {})["items"]

    def writes(self) -> list[tuple[str, str]]:
        """Return the method and path of each write request, except access reviews."""
        return [r for r in self.requests if r[0] not in ("GET", "WATCH") and r[1] != REVIEWS]

    def fail(
        self,
        method: str = "*",
        path: str = "/",
        *,
        status: int = 500,
        reason: str = "InternalError",
        message: str = "",
        details: Object | None = None,
        headers: dict[str, str] | None = None,
        disconnect: bool = False,
        times: int = 1,
    ) -> None:
        """
        Fail the next requests with this method and path prefix.

        `method` can be ``WATCH``, or ``*`` for any. `times` is the number of requests to fail. If
        `disconnect` is set, the server closes the connection instead of responding.
        """
        error = StatusError(status, reason, message, details=details, headers=headers)
        self._faults.append(Fault(method, path, times, error=error, disconnect=disconnect))

    def delay(self, seconds: float, method: str = "*", path: str = "/", *, times: int = 1) -> None:
        """Delay the responses to the next requests with this method and path prefix."""
        self._faults.append(Fault(method, path, times, delay_seconds=seconds))

    def heal(self) -> None:
        """Remove all pending faults."""
        self._faults.clear()

    def expire_history(self) -> None:
        """Compact the history. Watches and paginated lists that refer to an earlier resource
        version fail with 410."""
        self.cluster.history.clear()
        self.cluster.oldest_version = self.cluster.version = self.cluster.version + 1

    @property
    def watch_count(self) -> int:
        """Return the number of open watches."""
        return len(self.cluster.watchers)

    def drop_watches(self) -> None:
        """End all watches, as the real server does when they time out."""
        for watcher in self.cluster.watchers:
            watcher.put_nowait(None)

    def send_to_watches(self, event: Object) -> None:
        """Send an event, such as ``{"type": "ERROR", "object": {...}}``, to all watches."""
        for watcher in self.cluster.watchers:
            watcher.put_nowait(event)

    def send_bookmark(self) -> None:
        """Send a bookmark with the current resource version to all watches."""
        version = {"resourceVersion": str(self.cluster.version)}
        self.send_to_watches({"type": "BOOKMARK", "object": {"metadata": version}})

    # ------------------------------------------------------------ HTTP

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        params = dict(request.query)
        watch = params.get("watch") in ("1", "true")
        self.requests.append(("WATCH" if watch else request.method, request.path))
        self.queries.append(params)
        self.headers.append(dict(request.headers))
        try:
            await self._stumble(request)
            if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
                raise StatusError(401, "Unauthorized")
            if request.path in self.texts:
                return web.Response(text=self.texts[request.path])
            if (group := self._discovered(request.path)) is not None:
                return web.json_response(group)
            if not self._serves(request.path):
                return web.Response(status=404, text="404 page not found\n")
            if request.path == REVIEWS:
                return web.json_response(self._reviewed(await request.json()), status=201)
            self._authorize("WATCH" if watch else request.method, request.path)
            if watch:
                return await self._watch(request, params)
            text = await request.text()
            body = json.loads(text) if text else None
            if self.dropped_device_fields and "/resourceslices" in request.path and body:
                self._drop_fields(body)
            status, answer = self.cluster.request(request.method, request.path, params, body)
        except StatusError as error:
            return web.json_response(error.body, status=error.code, headers=error.headers)
        if "as=PartialObjectMetadata" in request.headers.get("Accept", ""):
            answer = _metadata_only(answer)
        return web.json_response(text=self._text(answer), status=status)

    def _drop_fields(self, body: Object) -> None:
        spec: Object = body.get("spec") or {}
        devices: list[Object] = spec.get("devices") or []
        for device in devices:
            for name in self.dropped_device_fields:
                device.pop(name, None)

    def _discovered(self, path: str) -> Object | None:
        """Return the response to ``/apis/<group>`` or ``/apis/<group>/<version>``. Return None for
        other paths, and for unserved groups and versions."""
        match path.strip("/").split("/"):
            case ["apis", group] if versions := self.served.get(group, ["v1"]):
                named = [{"groupVersion": f"{group}/{each}", "version": each} for each in versions]
                return {"kind": "APIGroup", "apiVersion": "v1", "name": group, "versions": named}
            case ["apis", group, version] if self._serves(path):
                prefix = f"/apis/{group}/{version}/"
                paths = {key[0] for key in self.cluster.objects if key[0].startswith(prefix)}
                found = {each.rpartition("/")[2] for each in paths}
                resources = [{"name": each} for each in sorted(found)]
                return {"kind": "APIResourceList", "apiVersion": "v1", "resources": resources}
            case _:
                return None

    def _authorize(self, method: str, path: str) -> None:
        target = ObjectPath.parse(path)
        resource = target.collection.rpartition("/")[2]
        verb = _VERBS.get(method, method.lower())
        if method == "GET" and not target.name:
            verb = "list"
        if (verb, resource) in self.forbidden:
            raise StatusError(403, "Forbidden", f"{resource} is forbidden: cannot {verb} it")

    def _reviewed(self, review: Object) -> Object:
        """Return a SelfSubjectAccessReview with its result."""
        attributes = review["spec"]["resourceAttributes"]
        denied = (attributes["verb"], attributes["resource"]) in self.forbidden
        return {**review, "status": {"allowed": not denied}}

    def _serves(self, path: str) -> bool:
        match path.strip("/").split("/"):
            case ["apis", group, *rest]:
                return bool(rest) and rest[0] in self.served.get(group, rest[:1])
            case ["api", *_]:
                return True
            case _:
                return False

    async def _stumble(self, request: web.Request) -> None:
        for fault in self._faults:
            if not fault.matches(request):
                continue
            fault.times -= 1
            await asyncio.sleep(fault.delay_seconds)
            if fault.disconnect and request.transport is not None:
                request.transport.abort()
            if fault.error is not None:
                raise fault.error
            return

    async def _watch(self, request: web.Request, params: dict[str, str]) -> web.StreamResponse:
        all_first = params.get("sendInitialEvents") == "true"
        if all_first and not self.watch_lists:
            text = (
                "sendInitialEvents is forbidden for watch unless the WatchList feature is enabled"
            )
            raise StatusError(422, "Invalid", text)
        response, target = web.StreamResponse(), ObjectPath.parse(request.path)
        response.content_type = "application/json"
        await response.prepare(request)
        since = int(params.get("resourceVersion") or 0)
        if since and since < self.cluster.oldest_version:
            expired = StatusError(410, "Expired", f"too old resource version: {since}")
            await self._send(response, {"type": "ERROR", "object": expired.body})
            return response
        if self.end_watches_at_once:
            return response
        watcher: asyncio.Queue[Any] = asyncio.Queue()
        if all_first:
            since = self.cluster.version
            for item in self.cluster.list_objects(target, params)["items"]:
                watcher.put_nowait({"type": "ADDED", "object": item})
            end = {"k8s.io/initial-events-end": "true"}
            metadata = {"resourceVersion": str(since), "annotations": end}
            watcher.put_nowait({"type": "BOOKMARK", "object": {"metadata": metadata}})
        for change in self.cluster.history:
            if change.version > since:
                watcher.put_nowait(change)
        self.cluster.watchers.append(watcher)
        try:
            async with asyncio.timeout(float(params.get("timeoutSeconds") or 60)):
                while (item := await watcher.get()) is not None:
                    event = item.event(target, params) if isinstance(item, Change) else item
                    if event is not None:
                        await self._send(response, _ordered(event))
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self.cluster.watchers.remove(watcher)
        return response

    async def _send(self, response: web.StreamResponse, event: Object) -> None:
        await response.write(self._text(event).encode() + b"\n")

    def _text(self, answer: Object) -> str:
        text = json.dumps(answer, separators=(",", ":"))
        for name, value in self.verbatim.items():
            text = text.replace(f'"{name}"', value)
        return text


_FIRST = ("name", "generateName", "namespace", "uid", "resourceVersion")


def _ordered(event: Object) -> Object:
    """Order an object's fields as the real server does, because clients may rely on the order."""
    if "metadata" not in event["object"]:
        return event
    body = dict(event["object"])
    metadata = _ordered_metadata(body.pop("metadata"))
    kind = {key: body.pop(key) for key in ("kind", "apiVersion") if key in body}
    return {"type": event["type"], "object": {**kind, "metadata": metadata, **body}}


def _ordered_metadata(metadata: Object) -> Object:
    first = {key: metadata[key] for key in _FIRST if key in metadata}
    last = {key: metadata[key] for key in ("managedFields",) if key in metadata}
    rest = {key: value for key, value in metadata.items() if key not in last}
    return {**first, **rest, **last}


def _metadata_only(answer: Object) -> Object:
    if "items" not in answer:
        metadata = _ordered_metadata(answer["metadata"])
        return {"kind": "PartialObjectMetadata", "metadata": metadata}
    items = [_metadata_only(item) for item in answer["items"]]
    return {**answer, "kind": "PartialObjectMetadataList", "items": items}
