"""
An in-memory store of a cluster's objects and their history. As in an API server, requests select
objects by path and selectors, and can modify them with merge patches.

The module does not use HTTP, so that tests on a virtual clock can use it directly;
:mod:`.apiserver` serves it. It does not support schemas, defaulting, admission or authorization.
Server-side apply merges objects, replaces lists, and does not record field owners.

Does not depend on kinds.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

# ---------------------------------------------------------------- objects

Object: TypeAlias = dict[str, Any]
ObjectKey: TypeAlias = tuple[str, str, str]
"""The collection, namespace (may be empty) and name of an object."""


class StatusError(Exception):
    """A failure response, of kind Status."""

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
        self.code: int = code
        self.headers: dict[str, str] = headers or {}
        self.body: Object = {
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
class ObjectPath:
    """The parts of an API path."""

    collection: str
    """The path of the group, version and resource, such as
    ``/apis/resource.k8s.io/v1/resourceclaims``."""

    namespace: str | None
    name: str | None
    subresource: str | None

    @staticmethod
    def parse(path: str) -> ObjectPath:
        """Parse an API path."""
        parts = path.strip("/").split("/")
        depth = 2 if parts[0] == "api" else 3
        prefix, rest = "/" + "/".join(parts[:depth]), parts[depth:]
        namespace = None
        if rest[0] == "namespaces" and len(rest) > 2 and rest[2] != "status":
            namespace, rest = rest[1], rest[2:]
        name, subresource = (*rest[1:3], None, None)[:2]
        return ObjectPath(
            collection=f"{prefix}/{rest[0]}",
            namespace=namespace,
            name=name,
            subresource=subresource,
        )

    @property
    def key(self) -> ObjectKey:
        """The key of the object at this path."""
        return self.collection, self.namespace or "", self.name or ""

    def holds(self, key: ObjectKey) -> bool:
        """Return whether this collection contains the object with a key."""
        return key[0] == self.collection and self.namespace in (None, key[1])


def merge(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged: Object = dict(cast("Object", target)) if isinstance(target, dict) else {}
    for key, value in cast("Object", patch).items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def selected(obj: Object | None, params: Mapping[str, str]) -> bool:
    """Return whether an object matches the field and label selectors in `params`. Only equality is
    supported."""
    if obj is None:
        return False
    for term in filter(None, params.get("fieldSelector", "").split(",")):
        name, _, wanted = term.replace("==", "=").partition("=")
        value: Any = obj
        for step in name.rstrip("!").split("."):
            value = cast("Object", value).get(step, {}) if isinstance(value, dict) else {}
        if ((value or "") == wanted) == name.endswith("!"):
            return False
    labels: Object = obj["metadata"].get("labels") or {}
    terms = filter(None, params.get("labelSelector", "").split(","))
    return all(labels.get(k) == v for k, _, v in (t.partition("=") for t in terms))


# ---------------------------------------------------------------- the cluster


@dataclass(frozen=True)
class Change:
    """A change to an object."""

    version: int
    key: ObjectKey
    old: Object | None
    new: Object | None

    def event(self, target: ObjectPath, params: dict[str, str]) -> Object | None:
        """Return the event that a watch of the target with these selectors gets, if any."""
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
    """An in-memory cluster without HTTP, which tests on a virtual clock can use directly."""

    def __init__(self) -> None:
        self.version: int = 100
        self.objects: dict[ObjectKey, Object] = {}
        self.history: list[Change] = []
        self.oldest_version: int = 0
        self.watchers: list[asyncio.Queue[Any]] = []
        self.without_status: set[str] = set()
        """Collections of custom resources without a status subresource."""

    def request(
        self, method: str, path: str, params: dict[str, str] | None = None, body: Any = None
    ) -> tuple[int, Object]:
        """Process a request that is not a watch. Raises StatusError if it is rejected."""
        target, params = ObjectPath.parse(path), params or {}
        if params.get("dryRun"):
            return self._scratch().request(method, path, params | {"dryRun": ""}, body)
        match method:
            case "GET" if target.name:
                return 200, copy.deepcopy(self._found(target))
            case "GET":
                return 200, self.list_objects(target, params)
            case "POST":
                return 201, self.create(target, body)
            case "PUT":
                return 200, self._update(target, body, self._found(target))
            case "PATCH":
                return self._patch(target, body, upsert="fieldManager" in params)
            case "DELETE" if target.name:
                return 200, self._delete(target, body or {})
            case _:
                raise StatusError(405, "MethodNotAllowed")

    def _scratch(self) -> FakeCluster:
        """Return a cluster with the same objects, but without watchers."""
        scratch = FakeCluster()
        scratch.version, scratch.oldest_version = self.version, self.oldest_version
        # Writes replace objects and never modify them in place, so a shallow copy is enough.
        scratch.objects = dict(self.objects)
        scratch.without_status = self.without_status
        return scratch

    def _found(self, target: ObjectPath) -> Object:
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

    def list_objects(self, target: ObjectPath, params: dict[str, str]) -> Object:
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

    def create(self, target: ObjectPath, body: Object) -> Object:
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
        return self.commit(key, None, obj)

    def _update(self, target: ObjectPath, body: Object, old: Object) -> Object:
        new, meta = copy.deepcopy(body), old["metadata"]
        wanted = new.setdefault("metadata", {}).get("resourceVersion")
        if wanted and wanted != meta["resourceVersion"]:
            raise StatusError(409, "Conflict", "the object has been modified")
        if new["metadata"].get("uid", meta["uid"]) != meta["uid"]:
            raise StatusError(409, "Conflict", "Precondition failed: UID in precondition")
        if target.subresource == "status":
            new = {**old, "status": new.get("status", {})}
        elif "status" in old and target.collection not in self.without_status:
            new["status"] = old["status"]
        fixed = ("uid", "creationTimestamp", "name", "namespace", "generation", "deletionTimestamp")
        new["metadata"] = {**new["metadata"], **{k: meta[k] for k in fixed if k in meta}}
        new["metadata"]["resourceVersion"] = meta["resourceVersion"]
        if new == old:  # like the real server, skip a no-op write
            return copy.deepcopy(old)
        apart = {"metadata", "status"}
        if {k: new.get(k) for k in new.keys() - apart} != {
            k: old.get(k) for k in old.keys() - apart
        }:
            new["metadata"]["generation"] = meta["generation"] + 1
        if "deletionTimestamp" in meta and not new["metadata"].get("finalizers"):
            return self.commit(target.key, old, None)
        return self.commit(target.key, old, new)

    def _patch(self, target: ObjectPath, body: Object, *, upsert: bool) -> tuple[int, Object]:
        if upsert and target.key not in self.objects:
            return 201, self.create(target, merge(body, {"metadata": {"name": target.name}}))
        old = self._found(target)
        return 200, self._update(target, merge(old, body), old)

    def _delete(self, target: ObjectPath, options: Object) -> Object:
        old = self._found(target)
        preconditions: Object = options.get("preconditions") or {}
        for name, wanted in preconditions.items():
            if wanted != old["metadata"][name]:
                raise StatusError(409, "Conflict", f"Precondition failed: {name}")
        if old["metadata"].get("finalizers"):
            new = merge(old, {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
            return old if new == old else self.commit(target.key, old, new)
        return self.commit(target.key, old, None)

    def commit(self, key: ObjectKey, old: Object | None, new: Object | None) -> Object:
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
