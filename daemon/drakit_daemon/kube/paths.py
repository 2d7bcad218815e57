"""
Paths of the API server: made from names, and read back for error sentences.

It must not know which kinds exist: any group, version and resource has a path of the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

__all__ = ("Target", "parse_path", "resource_path")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The resource that a path names; the core group is the empty string."""

    group: str
    resource: str
    namespace: str | None = None
    name: str | None = None
    subresource: str | None = None


def resource_path(
    api_version: str,
    resource: str,
    *,
    namespace: str | None = None,
    name: str | None = None,
    subresource: str | None = None,
) -> str:
    """
    Make the path of a collection (no name) or of an object.

    ``resource`` is the plural: ``resource_path("resource.k8s.io/v1", "resourceclaims", ...)``.
    """
    if subresource is not None and name is None:
        raise ValueError(f"a subresource needs a name: {resource}/{subresource}")
    parts = ["apis" if "/" in api_version else "api", *api_version.split("/")]
    if namespace is not None:
        parts += ["namespaces", namespace]
    parts += [part for part in (resource, name, subresource) if part is not None]
    if not all(parts):
        # An empty name would turn a request for one object into one for all of them.
        raise ValueError(f"a part of the path is empty: /{'/'.join(parts)}")
    return "/" + "/".join(quote(part, safe="") for part in parts)


def parse_path(path: str) -> Target | None:
    """Read a path back; None if it is not that of a resource (``/version``)."""
    parts = path.partition("?")[0].strip("/").split("/")
    match parts:
        case ["api", _, *rest] if rest:
            group = ""
        case ["apis", group, _, *rest] if rest:
            pass
        case _:
            return None
    namespace = None
    # ".../namespaces/lab" is the namespace itself, ".../namespaces/lab/pods" what is in it.
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    resource, name, subresource = (*rest, None, None)[:3]
    return Target(
        group=group,
        resource=resource or "",
        namespace=namespace,
        name=name,
        subresource=subresource,
    )
