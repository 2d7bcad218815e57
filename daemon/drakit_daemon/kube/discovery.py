"""
Finds the served versions of an API group and its resources without full discovery, and the minor
version of Kubernetes.

The callers interpret the versions. Does not depend on kinds, and does not cache results.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from drakit_daemon.kube.request import NotFoundError
from drakit_daemon.kube.session import Session

_RELEASE = re.compile(r"v?1\.(\d+)")


class VersionNotServedError(Exception):
    """The API server does not serve any known version of a group. The message is a sentence for
    logs."""

    def __init__(self, *, group: str, known: Sequence[str], served: Sequence[str]) -> None:
        wanted = ", ".join(known)
        has = f"serves it in {', '.join(served)}" if served else "does not serve it at all"
        super().__init__(
            f"drakit needs the API group {group} in one of the versions {wanted}, and the API "
            f"server {has}; enable one of them (--runtime-config={group}/{known[0]}=true) or "
            "upgrade the cluster"
        )


async def served_versions(session: Session, group: str) -> tuple[str, ...]:
    """Return the versions of a group that the API server serves. Empty if it does not serve the
    group."""
    try:
        response = await session.get(f"/apis/{group}")
    except NotFoundError:
        return ()
    versions: list[dict[str, Any]] = response.get("versions") or []
    return tuple(str(version.get("version")) for version in versions)


async def version_of(
    session: Session, group: str, plural: str, versions: Sequence[str]
) -> str | None:
    """Return the first of the given served versions that contains a resource, or None if none
    does."""
    for version in versions:
        try:
            response = await session.get(f"/apis/{group}/{version}")
        except NotFoundError:  # an upgrade may have just removed the version
            continue
        resources: list[dict[str, Any]] = response.get("resources") or []
        if any(each.get("name") == plural for each in resources):
            return version
    return None


async def served_version(session: Session, group: str, known: Sequence[str]) -> str:
    """
    Return the first of the known versions that the API server serves (``v1``, without the group).

    Raises VersionNotServedError if it serves none of them, and ApiError if it does not respond.
    """
    served = await served_versions(session, group)
    for version in known:
        if version in served:
            return version
    raise VersionNotServedError(group=group, known=known, served=served)


async def minor_release(session: Session) -> int | None:
    """
    Return the minor version that the API server reports, or None if it does not report a version
    1.x.

    Raises ApiError if the API server does not respond.
    """
    found = _RELEASE.match(str((await session.get("/version")).get("gitVersion")))
    return int(found[1]) if found else None
