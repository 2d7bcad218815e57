"""
Whether the service accounts of drakit's releases have the permissions that they need.

The API server decides: one SubjectAccessReview for each permission. A review stores nothing, but
only administrators may create one.

It must not know how the permissions are granted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drakit_cli.kubectl.gather import Gap
from drakit_cli.kubectl.releases import NODEPLUGIN, OPERATOR, Release, Releases, Workload
from drakit_daemon.kube import ApiError, ForbiddenError, Session, resource_path
from drakit_formats.resource.raw import child

_REVIEWS = resource_path("authorization.k8s.io/v1", "subjectaccessreviews")

_READ = ("list", "watch")
_RESOURCE = "resource.k8s.io"


@dataclass(frozen=True, kw_only=True, slots=True)
class Permission:
    """A verb on a resource, in all namespaces or in one."""

    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        of = f"{self.resource}.{self.group}" if self.group else self.resource
        return f"{self.verb} {of}"

    def attributes(self) -> dict[str, str]:
        """Write it as a SubjectAccessReview has it."""
        found = {"verb": self.verb, "group": self.group, "resource": self.resource}
        return found | {"namespace": self.namespace, "name": self.name}


@dataclass(frozen=True, kw_only=True, slots=True)
class Denied:
    """The permissions that a workload needs and does not have."""

    release: Release
    workload: Workload
    permissions: tuple[Permission, ...]


NEEDED: Mapping[str, Sequence[tuple[str, str, Sequence[str]]]] = {
    OPERATOR: (
        (_RESOURCE, "resourceclaims", _READ),
        (_RESOURCE, "resourceclaimtemplates", _READ),
        (_RESOURCE, "resourceslices", _READ),
        (_RESOURCE, "deviceclasses", _READ),
        ("", "pods", _READ),
        ("", "nodes", _READ),
        ("events.k8s.io", "events", ("create",)),
    ),
    NODEPLUGIN: (
        (_RESOURCE, "resourceslices", (*_READ, "create", "update", "delete")),
        (_RESOURCE, "resourceclaims", ("get",)),
        ("", "nodes", ("get",)),
        ("events.k8s.io", "events", ("create",)),
    ),
}
"""Group, resource and verbs that a component cannot do without, in all namespaces."""


async def find_denied(session: Session, releases: Releases) -> tuple[list[Denied], list[Gap]]:
    """Return what the workloads of releases may not do, and what could not be asked."""
    pairs = [(release, each) for release in releases.releases for each in release.workloads]
    try:
        found = await asyncio.gather(*(_denied(session, *pair) for pair in pairs))
    except ApiError as error:
        forbidden = isinstance(error, ForbiddenError)
        gap = Gap(
            kind="subjectaccessreviews",
            group="authorization.k8s.io",
            what="no permission to create SubjectAccessReviews" if forbidden else str(error),
            effect="the permissions of drakit's service accounts are not checked",
            forbidden=forbidden,
        )
        return [], [gap]
    return [each for each in found if each.permissions], []


async def _denied(session: Session, release: Release, workload: Workload) -> Denied:
    async def denied(permission: Permission) -> bool:
        answer = await session.create(_REVIEWS, _review(workload, permission))
        return child(answer, "status").get("allowed") is False

    needed = list(_needed(release, workload))
    answers = await asyncio.gather(*map(denied, needed))
    missing = tuple(each for each, no in zip(needed, answers, strict=True) if no)
    return Denied(release=release, workload=workload, permissions=missing)


def _needed(release: Release, workload: Workload) -> Iterator[Permission]:
    for group, resource, verbs in NEEDED.get(workload.component, ()):
        yield from _of(verbs, group, resource)
    if workload.component == OPERATOR and release.lease:
        yield from _of(
            ("get", "update"),
            "coordination.k8s.io",
            "leases",
            namespace=workload.namespace,
            name=release.lease,
        )


def _of(
    verbs: Iterable[str], group: str, resource: str, *, namespace: str = "", name: str = ""
) -> Iterator[Permission]:
    for verb in verbs:
        yield Permission(verb=verb, group=group, resource=resource, namespace=namespace, name=name)


def _review(workload: Workload, permission: Permission) -> dict[str, Any]:
    namespace = workload.namespace
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{namespace}:{workload.service_account}",
            "groups": [
                "system:authenticated",
                "system:serviceaccounts",
                f"system:serviceaccounts:{namespace}",
            ],
            "resourceAttributes": permission.attributes(),
        },
    }
