"""
Parses the arguments that name an object, in kubectl's notation.

Does not depend on sessions or explanations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from drakit_cli.answers import UsageError


@dataclass(frozen=True, slots=True)
class ObjectKind:
    """A kind of object that can be explained."""

    kind: str
    group: str = ""
    short: tuple[str, ...] = ()
    """Alternative names."""

    _: KW_ONLY
    version: str = "v1"
    namespaced: bool = True

    @property
    def plural(self) -> str:
        """The name of the kind in API paths."""
        return f"{self.singular}{'es' if self.singular.endswith('s') else 's'}"

    @property
    def singular(self) -> str:
        return self.kind.lower()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.plural, self.singular, *self.short)

    @property
    def word(self) -> str:
        """The name of the kind in sentences, such as ``pod`` or ``DeviceClass``."""
        return self.singular if self.kind in ("Pod", "Node") else self.kind

    @property
    def api(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


_RESOURCE = "resource.k8s.io"

POD = ObjectKind("Pod", short=("po",))
NODE = ObjectKind("Node", short=("no",), namespaced=False)
CLAIM = ObjectKind("ResourceClaim", _RESOURCE, ("claims", "claim"))
TEMPLATE = ObjectKind("ResourceClaimTemplate", _RESOURCE, ("templates", "template"))
CLASS = ObjectKind("DeviceClass", _RESOURCE, ("classes", "class"), namespaced=False)
SLICE = ObjectKind("ResourceSlice", _RESOURCE, ("slices", "slice"), namespaced=False)
JOB = ObjectKind("Job", "batch")
DEPLOYMENT = ObjectKind("Deployment", "apps", ("deploy",))
STATEFUL_SET = ObjectKind("StatefulSet", "apps", ("sts",))
DAEMON_SET = ObjectKind("DaemonSet", "apps", ("ds",))
REPLICA_SET = ObjectKind("ReplicaSet", "apps", ("rs",))
POD_GROUP = ObjectKind("PodGroup", "scheduling.k8s.io", version="v1alpha2")
"""The version in Kubernetes 1.36. Other releases serve other versions."""

WORKLOADS = (JOB, DEPLOYMENT, STATEFUL_SET, DAEMON_SET, REPLICA_SET, POD_GROUP)
KINDS = (POD, CLAIM, TEMPLATE, CLASS, SLICE, NODE, *WORKLOADS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The object that a user specified."""

    kind: ObjectKind
    name: str


def qualified_name(kind: str, name: str, *, group: str | None = None) -> str:
    """
    Return the name of an object as ``kubectl get -o name`` prints it.

    :param group: the API group. None for a kind that can be explained.
    """
    if group is None:
        group = next((each.group for each in KINDS if each.kind == kind), "")
    return f"{kind.lower()}{group and f'.{group}'}/{name}"


def find_kind(word: str) -> ObjectKind | None:
    """Return the kind for a word such as ``po``, ``Pods`` or ``jobs.batch``, or None if it is not a
    kind."""
    name, _, group = word.lower().partition(".")
    for each in KINDS:
        if name in each.names and group in ("", each.group, f"{each.version}.{each.group}"):
            return each
    return None


def parse_target(words: Sequence[str]) -> Target | None:
    """
    Parse an object that is specified as NAME, KIND/NAME or KIND NAME. Return None if there are no
    words.

    :raises UsageError: the words do not specify exactly one object.
    """
    if not words:
        return None
    if len(words) > 2:
        raise UsageError(
            f"{' '.join(words)!r} names several objects: give one, as KIND NAME or KIND/NAME"
        )
    word, name = words[0], words[-1]
    if len(words) == 1:
        word, slash, name = words[0].partition("/")
        if not slash:
            word, name = "pod", word
    kind = find_kind(word)
    if kind is None:
        known = ", ".join(each.singular for each in KINDS)
        raise UsageError(f"{word!r} is not a kind that can be explained: use {known}")
    if not name or "/" in name:
        raise UsageError(f"{' '.join(words)!r} is malformed: give KIND NAME or KIND/NAME")
    return Target(kind=kind, name=name)
