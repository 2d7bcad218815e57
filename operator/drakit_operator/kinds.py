"""
Determines for each kind that the operator follows in which version the API server serves it, if at
all, and whether the operator may list and watch it.

These checks are repeated, so that a control plane upgrade or a change to permissions does not
require a restart.

Does not depend on the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from drakit_daemon.kube import ForbiddenError, Session, resource_path
from drakit_daemon.kube.discovery import served_versions, version_of
from drakit_explain.kinds import PODS, UNREADABLE, Kind, problem_of
from drakit_explain.world import Fact, Name
from drakit_formats.resource.objects import Object, child

SELECTED: Mapping[Kind, Mapping[str, str]] = {PODS: {"fieldSelector": "status.phase=Pending"}}
"""The list and watch parameters, keyed by kind. When a pod is no longer pending, the watch reports
it as deleted."""

OnSkipped = Callable[[Kind, Mapping[str, Any], str], None]
"""Called with the kind and the metadata of an object that cannot be read, and the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A kind, with the version in which the API server serves it."""

    kind: Kind
    version: str

    @property
    def path(self) -> str:
        """The URL path of the collection."""
        group = self.kind.group
        return resource_path(f"{group}/{self.version}" if group else self.version, self.kind.plural)

    def read(self, body: Object, *, on_skipped: OnSkipped) -> Fact:
        """Project an object. If this version of the operator cannot read the object, return only
        its name."""
        try:
            return self.kind.project(body, self.version)
        except UNREADABLE as error:
            metadata = child(body, "metadata")
            why = f"this version of drakit does not know its format: {problem_of(error)}"
            on_skipped(self.kind, metadata, f"{why}; upgrade drakit")
            return self.project_unreadable(metadata)

    def project_unreadable(self, metadata: Mapping[str, Any]) -> Fact:
        """Return only the fact that the object exists."""
        return self.kind.project({**self.kind.unknown, "metadata": metadata}, self.version)


def name_of(body: Object) -> Name:
    """Return an object's name within its kind."""
    metadata = body["metadata"]
    return Name(metadata.get("namespace") or "", metadata["name"])


# ---------------------------------------------------------------- discovery

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
VERBS = ("list", "watch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Absence:
    """The reason why a kind is not followed."""

    reason: str
    forbidden: bool
    """Whether objects of the kind may exist. If not, the cluster does not have the kind at all."""


async def find(client: Session, kind: Kind) -> Served | Absence:
    """Return the version of a kind, or why it cannot be listed and watched. Raises ApiError."""
    version: str | None = kind.versions[0]
    if kind.group:
        # Discovery can fail if the role system:discovery has been restricted.
        with suppress(ForbiddenError):
            served = await served_versions(client, kind.group)
            known = [each for each in kind.versions if each in served]
            version = next(iter(known), None)
            version = await version_of(client, kind.group, kind.plural, known)
    if version is None:
        wanted = " or ".join(kind.versions)
        return Absence(
            reason=f"the API server does not serve {kind.plural} in version {wanted}",
            forbidden=False,
        )
    allowed = await asyncio.gather(*(_may(client, verb, kind) for verb in VERBS))
    denied = [verb for verb, may in zip(VERBS, allowed, strict=True) if not may]
    if denied:
        verbs = " and ".join(denied)
        return Absence(
            reason=f"the operator is not allowed to {verbs} {kind.plural}: allow these verbs in "
            "all namespaces",
            forbidden=True,
        )
    return Served(kind=kind, version=version)


async def _may(client: Session, verb: str, kind: Kind) -> bool:
    """Return whether the operator has a permission. If the review is forbidden, return True: the
    list request itself then shows whether it is allowed."""
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
