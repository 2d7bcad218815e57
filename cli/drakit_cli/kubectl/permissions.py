"""
Finds the permissions that the service accounts of drakit's releases, and the user, lack.

The API server checks each permission in an access review, which it does not store. Only
administrators can create reviews for a service account. All users can create them for themselves.
Does not depend on findings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple

from drakit_cli.kubectl.gather import Gap
from drakit_cli.kubectl.releases import NODEPLUGIN, OPERATOR, PART_OF, Release, Releases, Workload
from drakit_daemon.kube import ApiError, ForbiddenError, Session, resource_path
from drakit_explain.kinds import REPORTS
from drakit_formats.resource.objects import child

_REVIEWS = resource_path("authorization.k8s.io/v1", "subjectaccessreviews")
_SELF_REVIEWS = resource_path("authorization.k8s.io/v1", "selfsubjectaccessreviews")


@dataclass(frozen=True, kw_only=True, slots=True)
class Permission:
    """A verb on a resource, in one or all namespaces, or on an API server path."""

    verb: str
    group: str = ""
    resource: str = ""
    """The plural name of the resource. Empty for a path."""

    namespace: str = ""
    name: str = ""
    path: str = ""
    essential: bool = True
    """Whether a release does not work at all without the permission. Otherwise, only some functions
    do not work."""

    @property
    def of(self) -> str:
        """The resource in kubectl's notation, or the path."""
        return self.path or (f"{self.resource}.{self.group}" if self.group else self.resource)

    def __str__(self) -> str:
        return f"{self.verb} {self.of}"

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of an access review."""
        if self.path:
            return {"nonResourceAttributes": {"path": self.path, "verb": self.verb}}
        resource, _, part = self.resource.partition("/")
        found = {"verb": self.verb, "group": self.group, "resource": resource, "subresource": part}
        return {"resourceAttributes": found | {"namespace": self.namespace, "name": self.name}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Denied:
    """The permissions of the chart's roles that a workload lacks."""

    release: Release
    workload: Workload
    permissions: tuple[Permission, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the chart's roles that applies to all namespaces."""

    of: str
    """The resource with its group, or a path."""

    words: str
    """The verbs. A verb that the component cannot work without ends with an exclamation mark."""

    only: Literal["", "hostdev", "claimStatus", "maintenance", "taints"] = ""
    """The part of a release that needs the rule."""

    each_driver: bool = False
    """Whether the rule applies only to the names of the release's drivers."""

    def permissions(self, names: Iterable[str] = ("",)) -> Iterator[Permission]:
        """Return one permission for each verb and name."""
        is_path = self.of.startswith("/")
        resource, _, group = ("", "", "") if is_path else self.of.partition(".")
        for word, name in product(self.words.split(), names):
            yield Permission(
                verb=word.rstrip("!"),
                group=group,
                resource=resource,
                path=self.of if is_path else "",
                name=name,
                essential=word.endswith("!"),
            )


RULES: Mapping[str, Sequence[Rule]] = {
    OPERATOR: (
        Rule("resourceclaims.resource.k8s.io", "get list! watch!"),
        Rule("resourceclaimtemplates.resource.k8s.io", "get list! watch!"),
        Rule("resourceslices.resource.k8s.io", "get list! watch!"),
        Rule("deviceclasses.resource.k8s.io", "get list! watch!"),
        Rule("devicetaintrules.resource.k8s.io", "get list watch"),
        Rule("pods", "get list! watch!"),
        Rule("nodes", "get list! watch!"),
        Rule("namespaces", "get list watch"),
        Rule("resourcequotas", "get list watch"),
        Rule("nodedevicereports.drakit.dev", "get list watch"),
        Rule("hostdevicepolicies.drakit.dev", "get list watch", "hostdev"),
        Rule("hostdevicepolicies/status.drakit.dev", "patch", "hostdev"),
        Rule("nodedevicereports/status.drakit.dev", "patch"),
        Rule("devicedrivers.drakit.dev", "get list watch create delete"),
        Rule("devicedrivers/status.drakit.dev", "patch"),
        Rule("deviceclasses.resource.k8s.io", "create patch delete", "hostdev"),
        Rule("devicemaintenances.drakit.dev", "get list watch", "maintenance"),
        Rule("devicemaintenances/status.drakit.dev", "patch", "maintenance"),
        Rule("devicetaintrules.resource.k8s.io", "create delete", "taints"),
        Rule("pods/eviction", "create", "maintenance"),
        Rule("events.events.k8s.io", "get create! patch"),
        Rule("/metrics", "get"),
    ),
    NODEPLUGIN: (
        Rule("resourceslices.resource.k8s.io", "get list! watch! create! update! delete!"),
        Rule("resourceclaims.resource.k8s.io", "get!"),
        Rule("resourceclaims/status.resource.k8s.io", "patch", "claimStatus"),
        Rule(
            "resourceclaims/driver.resource.k8s.io",
            *("associated-node:patch", "claimStatus"),
            each_driver=True,
        ),
        Rule("nodes", "get!"),
        Rule("events.events.k8s.io", "get create! patch"),
        Rule("hostdevicepolicies.drakit.dev", "get list! watch!", "hostdev"),
        Rule("devicemaintenances.drakit.dev", "get list watch", "maintenance"),
        Rule("nodedevicereports.drakit.dev", "get create patch delete"),
        Rule("nodedevicereports/status.drakit.dev", "patch"),
    ),
}
"""The rules of the chart's roles for each component. A test compares them with the chart."""


async def find_denied(session: Session, releases: Releases) -> tuple[list[Denied], list[Gap]]:
    """Return the permissions that the releases' workloads lack, and the gaps in the check."""
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
    namespace = workload.namespace
    subject = {
        "user": f"system:serviceaccount:{namespace}:{workload.service_account}",
        "groups": [
            "system:authenticated",
            "system:serviceaccounts",
            f"system:serviceaccounts:{namespace}",
        ],
    }
    needed = list(_needed(release, workload))
    missing = await _missing(session, _REVIEWS, "SubjectAccessReview", subject, needed)
    return Denied(release=release, workload=workload, permissions=missing)


async def _missing(
    session: Session, path: str, kind: str, subject: Mapping[str, Any], needed: Sequence[Permission]
) -> tuple[Permission, ...]:
    async def denied(permission: Permission) -> bool:
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": kind,
            "spec": {**subject, **permission.attributes()},
        }
        return child(await session.create(path, body), "status").get("allowed") is False

    answers = await asyncio.gather(*map(denied, needed))
    return tuple(each for each, no in zip(needed, answers, strict=True) if no)


def _needed(release: Release, workload: Workload) -> Iterator[Permission]:
    has = {
        "": True,
        "hostdev": "hostdev.drakit.dev" in release.values.claimed,
        "claimStatus": release.values.claim_status,
        "maintenance": release.values.maintenance,
        "taints": release.values.maintenance or release.driver_taints,
    }
    for rule in RULES.get(workload.component, ()):
        if has[rule.only]:
            yield from rule.permissions(release.values.claimed if rule.each_driver else ("",))
    if workload.component == OPERATOR and release.lease:
        for verb in ("get", "update"):
            yield Permission(
                verb=verb,
                group="coordination.k8s.io",
                resource="leases",
                namespace=workload.namespace,
                name=release.lease,
            )


# ---------------------------------------------------------------- the user

COMMANDS: Sequence[tuple[str, str, Sequence[str], str]] = (
    ("", "pods", ("get",), "explain pod/NAME"),
    ("resource.k8s.io", "resourceclaims", ("get",), "explain claim/NAME"),
    ("", "resourcequotas", ("list",), "explain: quotas that prevent the creation of a claim"),
    ("", "namespaces", ("get",), "explain: whether a namespace allows admin access"),
    ("", "events", ("list",), "explain: the errors that a kubelet reports"),
)
"""The resources that commands read and the doctor does not: group, resource, verbs, and purpose."""


class Lacking(NamedTuple):
    """A permission that a command needs and the user lacks."""

    permission: Permission
    command: str


async def find_lacking(session: Session, namespace: str) -> tuple[list[Lacking], list[Gap]]:
    """Return the permissions in a namespace that the user lacks and the commands need."""
    needed = {
        Permission(verb=verb, group=group, resource=resource, namespace=namespace): command
        for group, resource, verbs, command in COMMANDS
        for verb in verbs
    }
    try:
        missing = await _missing(
            session, _SELF_REVIEWS, "SelfSubjectAccessReview", {}, list(needed)
        )
    except ApiError as error:
        gap = Gap(
            kind="selfsubjectaccessreviews",
            what=f"your permissions cannot be read: {error}",
            effect="it is unknown which commands work",
        )
        return [], [gap]
    return [Lacking(each, needed[each]) for each in missing], []


VIEWER_LABELS = dict([PART_OF]) | {"app.kubernetes.io/component": "viewer"}


def find_viewer(releases: Releases, gaps: Iterable[Gap]) -> str:
    """Return the name of the ClusterRole for viewers, in the form used in commands, or an empty
    string."""
    for each in releases.releases:
        if operator := each.workload(OPERATOR):  # Only releases with an operator have the role.
            return f"{operator.name.removesuffix('-operator')}-viewer"
    # The cluster has drakit's kinds, so a release that the user cannot list may have the role.
    if {REPORTS.plural, "deployments"} <= {gap.kind for gap in gaps if gap.forbidden}:
        labels = ",".join(f"{key}={value}" for key, value in VIEWER_LABELS.items())
        first = "'{.items[0].metadata.name}'"
        return f'"$(kubectl get clusterroles -l {labels} -o jsonpath={first})"'
    return ""


def commands_that_grant(lacking: Iterable[Lacking], viewer: str) -> str:
    """Return the command that grants a user the missing permissions in one namespace."""
    all_of = list(lacking)
    namespace = all_of[0].permission.namespace
    if viewer:
        return (
            f"ask an administrator: kubectl -n {namespace} create rolebinding drakit-viewer-USER "
            f"--clusterrole={viewer} --user=USER"
        )
    verbs = sorted({each.permission.verb for each in all_of})
    resources = sorted({each.permission.of for each in all_of})
    role = "drakit-user"
    return (
        f"ask an administrator: kubectl -n {namespace} create role {role} "
        f"--verb={','.join(verbs)} --resource={','.join(resources)} && kubectl -n {namespace} "
        f"create rolebinding {role} --role={role} --user=USER"
    )
