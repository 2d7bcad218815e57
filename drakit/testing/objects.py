"""
Requests to an API server: paths, selectors, merge patches, errors.

It must not know the stored objects, or HTTP.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

__all__ = ("Object", "ObjectKey", "ObjectPath", "StatusError", "merge", "selected")

Object: TypeAlias = dict[str, Any]
ObjectKey: TypeAlias = tuple[str, str, str]
"""Collection, namespace (may be empty), name."""


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
    """The parts of a path."""

    collection: str
    """Group, version and resource, as ``/apis/resource.k8s.io/v1/resourceclaims``."""

    namespace: str | None
    name: str | None
    subresource: str | None

    @staticmethod
    def parse(path: str) -> ObjectPath:
        """Read a path of the usual shape."""
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
        """The key of the object."""
        return self.collection, self.namespace or "", self.name or ""

    def holds(self, key: ObjectKey) -> bool:
        """Return whether an object is in the collection."""
        return key[0] == self.collection and self.namespace in (None, key[1])


def merge(target: Any, patch: Any) -> Any:
    """JSON merge patch."""
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
    """Return whether an object matches the field and label selectors (equality only)."""
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
