"""
The kinds of objects that a user can name, by the words of kubectl, and the object that arguments
name.

It must not know sessions, or what is explained about an object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drakit_cli.answers import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectKind:
    """A kind of objects that can be explained."""

    kind: str
    group: str = ""
    version: str = "v1"
    names: tuple[str, ...]
    """The words for it: first the plural, as in paths, and the singular."""

    namespaced: bool = True

    @property
    def plural(self) -> str:
        return self.names[0]

    @property
    def word(self) -> str:
        """The word in sentences, such as ``pod`` or ``DeviceClass``."""
        return self.names[1] if self.kind in ("Pod", "Node") else self.kind

    @property
    def api(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


_RESOURCE = "resource.k8s.io"

POD = ObjectKind(kind="Pod", names=("pods", "pod", "po"))
NODE = ObjectKind(kind="Node", names=("nodes", "node", "no"), namespaced=False)
CLAIM = ObjectKind(
    kind="ResourceClaim",
    group=_RESOURCE,
    names=("resourceclaims", "resourceclaim", "claims", "claim"),
)
TEMPLATE = ObjectKind(
    kind="ResourceClaimTemplate",
    group=_RESOURCE,
    names=("resourceclaimtemplates", "resourceclaimtemplate", "templates", "template"),
)
CLASS = ObjectKind(
    kind="DeviceClass",
    group=_RESOURCE,
    names=("deviceclasses", "deviceclass", "classes", "class"),
    namespaced=False,
)
SLICE = ObjectKind(
    kind="ResourceSlice",
    group=_RESOURCE,
    names=("resourceslices", "resourceslice", "slices", "slice"),
    namespaced=False,
)
JOB = ObjectKind(kind="Job", group="batch", names=("jobs", "job"))
DEPLOYMENT = ObjectKind(
    kind="Deployment", group="apps", names=("deployments", "deployment", "deploy")
)
STATEFUL_SET = ObjectKind(
    kind="StatefulSet", group="apps", names=("statefulsets", "statefulset", "sts")
)
DAEMON_SET = ObjectKind(kind="DaemonSet", group="apps", names=("daemonsets", "daemonset", "ds"))
REPLICA_SET = ObjectKind(kind="ReplicaSet", group="apps", names=("replicasets", "replicaset", "rs"))
POD_GROUP = ObjectKind(
    kind="PodGroup", group="scheduling.k8s.io", version="v1alpha2", names=("podgroups", "podgroup")
)
"""Its version is that of Kubernetes 1.36: other releases serve others."""

WORKLOADS = (JOB, DEPLOYMENT, STATEFUL_SET, DAEMON_SET, REPLICA_SET, POD_GROUP)
KINDS = (POD, CLAIM, TEMPLATE, CLASS, SLICE, NODE, *WORKLOADS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The object that a user asks about."""

    kind: ObjectKind
    name: str


def find_kind(word: str) -> ObjectKind | None:
    """Return the kind of a word such as ``po``, ``Pods`` or ``jobs.batch``; None if unknown."""
    name, _, group = word.lower().partition(".")
    for each in KINDS:
        if name in each.names and group in ("", each.group, f"{each.version}.{each.group}"):
            return each
    return None


def parse_target(words: Sequence[str]) -> Target | None:
    """
    Return the object of NAME, KIND/NAME or KIND NAME; None if there are no words.

    :raises UsageError: the words name no object.
    """
    if not words:
        return None
    if len(words) > 2:
        raise UsageError(f"{' '.join(words)!r} is more than one object")
    word, name = words[0], words[-1]
    if len(words) == 1:
        word, slash, name = words[0].partition("/")
        if not slash:
            word, name = "pod", word
    kind = find_kind(word)
    if kind is None:
        known = ", ".join(each.names[1] for each in KINDS)
        raise UsageError(f"{word!r} is none of the kinds {known}")
    if not name or "/" in name:
        raise UsageError(f"{' '.join(words)!r} is neither KIND NAME nor KIND/NAME")
    return Target(kind=kind, name=name)
