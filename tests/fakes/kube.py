"""
An API server in memory, over real HTTP, for tests of everything that talks to Kubernetes.

    async with FakeApiServer() as server:
        server.store("/apis/resource.k8s.io/v1/namespaces/lab/resourceclaims/cam", {"spec": {}})
        session = await connect(server.write_kubeconfig(tmp_path), user_agent="test")
        ...
        assert ("POST", "/api/v1/namespaces/lab/events") in server.requests

What it does as the real one: resource versions, ``AlreadyExists`` and ``Conflict``, delete
preconditions, finalizers, generations, writes without a change that write nothing, ``status`` apart
from the rest, dry runs, equality selectors, pages that expire, watches with history, bookmarks and
410.
What it does not: schemas, defaults, admission, authorisation; server-side apply is a merge that
replaces lists and knows no field owners.

Kinds are not registered: any path of the usual shape works; ``served`` restricts a group to the
versions that a cluster serves. To see what happens when a server
misbehaves: ``fail``, ``delay``, ``token``, ``expire_history``, ``expire_pages``, ``drop_watches``,
``end_watches_at_once`` and ``send_to_watches``.
"""

from __future__ import annotations

import asyncio
import copy
import json
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

Object = dict[str, Any]


class StatusError(Exception):
    """An answer of kind Status that is not a success."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str = "",
        *,
        details: Object | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.headers = code, headers or {}
        self.body = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message or reason,
            "reason": reason,
            "details": details or {},
            "code": code,
        }


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a path names."""

    collection: str  # group, version and resource, as "/apis/resource.k8s.io/v1/resourceclaims"
    namespace: str | None
    name: str | None
    subresource: str | None

    @staticmethod
    def parse(path: str) -> Target:
        parts = path.strip("/").split("/")
        depth = 2 if parts[0] == "api" else 3
        prefix, rest = "/" + "/".join(parts[:depth]), parts[depth:]
        namespace = None
        if rest[0] == "namespaces" and len(rest) > 2 and rest[2] != "status":
            namespace, rest = rest[1], rest[2:]
        name, subresource = (*rest[1:3], None, None)[:2]
        return Target(
            collection=f"{prefix}/{rest[0]}",
            namespace=namespace,
            name=name,
            subresource=subresource,
        )

    @property
    def key(self) -> tuple[str, str, str]:
        return self.collection, self.namespace or "", self.name or ""

    def holds(self, key: tuple[str, str, str]) -> bool:
        return key[0] == self.collection and self.namespace in (None, key[1])


def merge(target: Any, patch: Any) -> Any:
    """JSON merge patch."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def selected(obj: Object | None, params: dict[str, str]) -> bool:
    """Whether an object matches the field and label selectors (equality only)."""
    if obj is None:
        return False
    for term in filter(None, params.get("fieldSelector", "").split(",")):
        name, _, wanted = term.replace("==", "=").partition("=")
        value: Any = obj
        for step in name.rstrip("!").split("."):
            value = value.get(step, {}) if isinstance(value, dict) else {}
        if ((value or "") == wanted) == name.endswith("!"):
            return False
    labels = obj["metadata"].get("labels") or {}
    terms = filter(None, params.get("labelSelector", "").split(","))
    return all(labels.get(k) == v for k, _, v in (t.partition("=") for t in terms))


@dataclass(frozen=True)
class Change:
    version: int
    key: tuple[str, str, str]
    old: Object | None
    new: Object | None

    def event(self, target: Target, params: dict[str, str]) -> Object | None:
        """The watch event that a watcher with these selectors gets, if any."""
        if not target.holds(self.key):
            return None
        was, now = selected(self.old, params), selected(self.new, params)
        if now:
            return {"type": "MODIFIED" if was else "ADDED", "object": self.new}
        if not was:
            return None
        gone = copy.deepcopy(self.old) or {}
        gone["metadata"]["resourceVersion"] = str(self.version)
        return {"type": "DELETED", "object": gone}


class FakeCluster:
    """The objects and their history; no HTTP, so that tests on a virtual clock can use it alone."""

    def __init__(self) -> None:
        self.version = 100
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.history: list[Change] = []
        self.oldest_version = 0
        self.watchers: list[asyncio.Queue[Any]] = []

    def request(
        self, method: str, path: str, params: dict[str, str] | None = None, body: Any = None
    ) -> tuple[int, Object]:
        """Answer one request that is not a watch; StatusError if it is refused."""
        target, params = Target.parse(path), params or {}
        if params.get("dryRun"):
            return self._scratch().request(method, path, params | {"dryRun": ""}, body)
        match method:
            case "GET" if target.name:
                return 200, copy.deepcopy(self._found(target))
            case "GET":
                return 200, self._list(target, params)
            case "POST":
                return 201, self._create(target, body)
            case "PUT":
                return 200, self._update(target, body, self._found(target))
            case "PATCH":
                return self._patch(target, body, upsert="fieldManager" in params)
            case "DELETE" if target.name:
                return 200, self._delete(target, body or {})
        raise StatusError(405, "MethodNotAllowed")

    def _scratch(self) -> FakeCluster:
        """The same objects in a cluster that nobody watches."""
        scratch = FakeCluster()
        scratch.version, scratch.oldest_version = self.version, self.oldest_version
        scratch.objects = copy.deepcopy(self.objects)
        return scratch

    def _found(self, target: Target) -> Object:
        try:
            return self.objects[target.key]
        except KeyError:
            kind = target.collection.rpartition("/")[2]
            raise StatusError(
                404,
                "NotFound",
                f'{kind} "{target.name}" not found',
                details={"name": target.name, "kind": kind},
            ) from None

    def _list(self, target: Target, params: dict[str, str]) -> Object:
        keys = sorted(key for key in self.objects if target.holds(key))
        items = [o for o in (self.objects[key] for key in keys) if selected(o, params)]
        version, start = str(self.version), 0
        if token := params.get("continue"):
            version, _, offset = token.partition(".")
            start = int(offset)
            if int(version) < self.oldest_version:
                raise StatusError(410, "Expired", "the provided continue parameter is too old")
        metadata: Object = {"resourceVersion": version}
        end = start + int(params.get("limit") or len(items) or 1)
        if end < len(items):
            metadata["continue"] = f"{version}.{end}"
        return {"kind": "List", "metadata": metadata, "items": copy.deepcopy(items[start:end])}

    def _create(self, target: Target, body: Object) -> Object:
        obj = copy.deepcopy(body)
        meta = obj.setdefault("metadata", {})
        if not meta.get("name"):
            meta["name"] = meta.get("generateName", "") + uuid.uuid4().hex[:5]
        if target.namespace:
            meta["namespace"] = target.namespace
        key = (target.collection, target.namespace or "", meta["name"])
        if key in self.objects:
            raise StatusError(409, "AlreadyExists", f'"{meta["name"]}" already exists')
        meta |= {
            "uid": meta.get("uid") or str(uuid.uuid4()),
            "generation": 1,
            "creationTimestamp": "2026-01-01T00:00:00Z",
        }
        return self._commit(key, None, obj)

    def _update(self, target: Target, body: Object, old: Object) -> Object:
        new, meta = copy.deepcopy(body), old["metadata"]
        wanted = new.setdefault("metadata", {}).get("resourceVersion")
        if wanted and wanted != meta["resourceVersion"]:
            raise StatusError(409, "Conflict", "the object has been modified")
        if new["metadata"].get("uid", meta["uid"]) != meta["uid"]:
            raise StatusError(409, "Conflict", "Precondition failed: UID in precondition")
        if target.subresource == "status":
            new = {**old, "status": new.get("status", {})}
        elif "status" in old:
            new["status"] = old["status"]
        fixed = ("uid", "creationTimestamp", "name", "namespace", "generation", "deletionTimestamp")
        new["metadata"] = {**new["metadata"], **{k: meta[k] for k in fixed if k in meta}}
        new["metadata"]["resourceVersion"] = meta["resourceVersion"]
        if new == old:  # as the real server: nothing is written
            return copy.deepcopy(old)
        apart = {"metadata", "status"}
        if {k: new.get(k) for k in new.keys() - apart} != {
            k: old.get(k) for k in old.keys() - apart
        }:
            new["metadata"]["generation"] = meta["generation"] + 1
        if "deletionTimestamp" in meta and not new["metadata"].get("finalizers"):
            return self._commit(target.key, old, None)
        return self._commit(target.key, old, new)

    def _patch(self, target: Target, body: Object, *, upsert: bool) -> tuple[int, Object]:
        if upsert and target.key not in self.objects:
            return 201, self._create(target, merge(body, {"metadata": {"name": target.name}}))
        old = self._found(target)
        return 200, self._update(target, merge(old, body), old)

    def _delete(self, target: Target, options: Object) -> Object:
        old = self._found(target)
        for name, wanted in (options.get("preconditions") or {}).items():
            if wanted != old["metadata"][name]:
                raise StatusError(409, "Conflict", f"Precondition failed: {name}")
        if old["metadata"].get("finalizers"):
            new = merge(old, {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
            return old if new == old else self._commit(target.key, old, new)
        return self._commit(target.key, old, None)

    def _commit(self, key: tuple[str, str, str], old: Object | None, new: Object | None) -> Object:
        self.version += 1
        if new is None:
            del self.objects[key]
        else:
            new["metadata"]["resourceVersion"] = str(self.version)
            self.objects[key] = new
        change = Change(self.version, key, copy.deepcopy(old), copy.deepcopy(new))
        self.history.append(change)
        for watcher in self.watchers:
            watcher.put_nowait(change)
        return copy.deepcopy(new if new is not None else old) or {}


@dataclass
class Fault:
    """What happens to matching requests instead of, or before, an answer."""

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
    """The API server; see the module's docstring."""

    token: str | None = None  # requests with another bearer token are answered 401
    end_watches_at_once: bool = False  # watches are accepted, and end without an event
    served: dict[str, list[str]] = field(default_factory=dict)  # versions by group; else any is
    requests: list[tuple[str, str]] = field(default_factory=list)  # (method or WATCH, path)
    queries: list[dict[str, str]] = field(default_factory=list)  # as long as requests
    headers: list[dict[str, str]] = field(default_factory=list)
    cluster: FakeCluster = field(default_factory=FakeCluster)
    url: str = ""
    _faults: list[Fault] = field(default_factory=list)
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

    # What tests do with it.

    def write_kubeconfig(self, folder: Path, *, token: str | None = None) -> Path:
        """Write a kubeconfig that leads here (with ``token``, or the one that is asked for)."""
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
        """Put an object at its path, status included, as if somebody else had written it."""
        target = Target.parse(path)
        if target.key not in self.cluster.objects:
            named = merge(obj, {"metadata": {"name": target.name}})
            return self.cluster._create(target, named)
        old = self.cluster.objects[target.key]
        new = merge(obj, {"metadata": old["metadata"] | (obj.get("metadata") or {})})
        return self.cluster._commit(target.key, old, new)

    def remove(self, path: str) -> None:
        """Delete an object at once, whatever its finalizers."""
        key = Target.parse(path).key
        self.cluster._commit(key, self.cluster.objects[key], None)

    def object(self, path: str) -> Object | None:
        return copy.deepcopy(self.cluster.objects.get(Target.parse(path).key))

    def objects(self, path: str) -> list[Object]:
        return self.cluster._list(Target.parse(path), {})["items"]

    def writes(self) -> list[tuple[str, str]]:
        return [r for r in self.requests if r[0] not in ("GET", "WATCH")]

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
        """Refuse the next requests of this method ("WATCH" too) whose path begins so."""
        error = StatusError(status, reason, message, details=details, headers=headers)
        self._faults.append(Fault(method, path, times, error=error, disconnect=disconnect))

    def delay(self, seconds: float, method: str = "*", path: str = "/", *, times: int = 1) -> None:
        """Answer the next such requests late."""
        self._faults.append(Fault(method, path, times, delay_seconds=seconds))

    def heal(self) -> None:
        """Forget all faults that are still to come."""
        self._faults.clear()

    def expire_history(self) -> None:
        """Compact: watches and pages from before now get 410."""
        self.cluster.history.clear()
        self.cluster.oldest_version = self.cluster.version = self.cluster.version + 1

    expire_pages = expire_history

    @property
    def watch_count(self) -> int:
        return len(self.cluster.watchers)

    def drop_watches(self) -> None:
        """End all watches as a server does whose timeout has passed."""
        for watcher in self.cluster.watchers:
            watcher.put_nowait(None)

    def send_to_watches(self, event: Object) -> None:
        """Send any event as it is, as ``{"type": "ERROR", "object": {...}}``."""
        for watcher in self.cluster.watchers:
            watcher.put_nowait(event)

    def send_bookmark(self) -> None:
        version = {"resourceVersion": str(self.cluster.version)}
        self.send_to_watches({"type": "BOOKMARK", "object": {"metadata": version}})

    # The HTTP side.

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
            if (group := self._discovered(request.path)) is not None:
                return web.json_response(group)
            if not self._serves(request.path):
                return web.Response(status=404, text="404 page not found\n")
            if watch:
                return await self._watch(request, params)
            text = await request.text()
            body = json.loads(text) if text else None
            status, answer = self.cluster.request(request.method, request.path, params, body)
        except StatusError as error:
            return web.json_response(error.body, status=error.code, headers=error.headers)
        return web.json_response(answer, status=status)

    def _discovered(self, path: str) -> Object | None:
        """The answer to ``/apis/<group>``; nothing if the path is another, or nobody serves it."""
        match path.strip("/").split("/"):
            case ["apis", group] if versions := self.served.get(group, ["v1"]):
                named = [{"groupVersion": f"{group}/{each}", "version": each} for each in versions]
                return {"kind": "APIGroup", "apiVersion": "v1", "name": group, "versions": named}
        return None

    def _serves(self, path: str) -> bool:
        match path.strip("/").split("/"):
            case ["apis", group, *rest]:
                return bool(rest) and rest[0] in self.served.get(group, rest[:1])
        return True

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
        response, target = web.StreamResponse(), Target.parse(request.path)
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
        for change in self.cluster.history:
            if change.version > since:
                watcher.put_nowait(change)
        self.cluster.watchers.append(watcher)
        try:
            async with asyncio.timeout(float(params.get("timeoutSeconds") or 60)):
                while (item := await watcher.get()) is not None:
                    event = item.event(target, params) if isinstance(item, Change) else item
                    if event is not None:
                        await self._send(response, event)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self.cluster.watchers.remove(watcher)
        return response

    @staticmethod
    async def _send(response: web.StreamResponse, event: Object) -> None:
        await response.write(json.dumps(event).encode() + b"\n")
