"""
Finds the kinds that the API server serves and that the operator may list and watch.

The question is asked before each run of Kopf, so that an upgrade of the control plane and a change
of permissions need no restart.

It must not know Kopf, the store, or what is explained without a kind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from drakit.kube import ForbiddenError
from drakit.kube.discovery import served_versions, version_of
from drakit.resource.raw import child
from drakit_operator.kinds import Kind, Served

__all__ = ("Absence", "Client", "Coverage", "KindsMissingError", "discover")

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
VERBS = ("list", "watch")


class Client(Protocol):
    """The used part of a session."""

    async def get(
        self,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> dict[str, Any]: ...

    async def create(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        dry_run: bool = False,
        timeout_seconds: float | None = None,
    ) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Absence:
    """Why a kind is left out."""

    reason: str
    forbidden: bool
    """Objects of the kind may exist. Otherwise the cluster does not have the kind at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """The kinds that can be watched, and those that are left out."""

    served: tuple[Served, ...]
    left_out: Mapping[Kind, Absence]


class KindsMissingError(Exception):
    """Kinds are left out without which nothing can be explained."""

    def __init__(self, left_out: Mapping[Kind, Absence]) -> None:
        super().__init__("; ".join(f"{kind}: {each.reason}" for kind, each in left_out.items()))


async def discover(client: Client, kinds: Sequence[Kind]) -> Coverage:
    """Find the version of each kind, and whether it may be listed and watched. Raises ApiError."""
    groups = {kind.group for kind in kinds if kind.group}
    versions = {group: await _group_versions(client, group) for group in groups}
    found = await asyncio.gather(
        *(_find(client, kind, versions.get(kind.group, ())) for kind in kinds)
    )
    return Coverage(
        served=tuple(each for each in found if isinstance(each, Served)),
        left_out={
            kind: each for kind, each in zip(kinds, found, strict=True) if isinstance(each, Absence)
        },
    )


async def _group_versions(client: Client, group: str) -> tuple[str, ...] | None:
    """Return the served versions; None if they may not be read."""
    try:
        return await served_versions(client, group)
    except ForbiddenError:  # the role system:discovery has been restricted
        return None


async def _find(client: Client, kind: Kind, served: Sequence[str] | None) -> Served | Absence:
    version: str | None = kind.versions[0]
    if kind.group and served is not None:
        known = [each for each in kind.versions if each in served]
        version = await _version_of(client, kind, known)
    if version is None:
        wanted = ", ".join(kind.versions)
        return Absence(
            reason=f"the API server serves it in none of the versions {wanted}", forbidden=False
        )
    allowed = await asyncio.gather(*(_may(client, verb, kind) for verb in VERBS))
    denied = [verb for verb, may in zip(VERBS, allowed, strict=True) if not may]
    if denied:
        verbs = " and ".join(denied)
        return Absence(
            reason=f"the operator may not {verbs} it; allow these verbs in all namespaces",
            forbidden=True,
        )
    return Served(kind=kind, version=version)


async def _version_of(client: Client, kind: Kind, known: Sequence[str]) -> str | None:
    try:
        return await version_of(client, kind.group, kind.plural, known)
    except ForbiddenError:
        return next(iter(known), None)


async def _may(client: Client, verb: str, kind: Kind) -> bool:
    """Ask for a permission; without an answer about it, the list decides."""
    attributes = {"verb": verb, "group": kind.group, "resource": kind.plural}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    try:
        answer = await client.create(REVIEWS, review)
    except ForbiddenError:
        return True
    return bool(child(answer, "status").get("allowed"))
