"""
The pods of a workload, and one answer for all of them.

It must not know how a pod is explained, or how an answer is printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drakit_cli.answers import CommandError
from drakit_cli.kubectl.explain import UNDECIDED_CODE, Report
from drakit_cli.kubectl.gather import MissingError, UnreachableError, sentence_of
from drakit_cli.kubectl.pods import SeenPod, list_pods, read_object
from drakit_cli.kubectl.targets import DAEMON_SET, DEPLOYMENT, JOB, POD_GROUP, Target
from drakit_daemon.kube import ApiError, Session
from drakit_daemon.kube.discovery import served_versions, version_of
from drakit_explain.broken import is_placed
from drakit_explain.model import PodFacts
from drakit_explain.pending import Verdict
from drakit_formats.resource.objects import Object, child, text

# ---------------------------------------------------------------- pods


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A workload and its pods."""

    target: Target
    namespace: str
    desired: int
    """The pods that it wants to have at the same time; 0 if that is unknown."""

    pods: tuple[SeenPod, ...]


async def find_workload(session: Session, namespace: str, target: Target) -> Workload:
    """
    Read a workload and its pods.

    :raises MissingError: it does not exist.
    :raises UnreachableError: it or its pods may not be read.
    """
    if target.kind is POD_GROUP:
        listed = await list_pods(session, namespace, {})
        pods = [each for each in listed if each.facts.group == target.name]
        body = await _read_group(session, namespace, target, has_pods=bool(pods))
        desired = int(child(body, "spec", "schedulingPolicy", "gang").get("minCount") or 0)
    else:
        body = await read_object(session, target.kind, namespace, target.name)
        labels = child(body, "spec", "selector", "matchLabels")
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        listed = await list_pods(session, namespace, {"labelSelector": selector})
        pods = [each for each in listed if _is_of(each, target, text(body, "metadata", "uid"))]
        desired = _desired(target, body)
    return Workload(target=target, namespace=namespace, desired=desired, pods=tuple(pods))


async def _read_group(
    session: Session, namespace: str, target: Target, *, has_pods: bool
) -> Object:
    """
    Read a PodGroup, in the version that the cluster serves; none lasts longer than a release.

    Its pods name it, so their answer needs no permission to read it. In Kubernetes 1.35, they name
    a part of another object.
    """
    kind, name = target.kind, target.name
    try:
        served = await served_versions(session, kind.group)
        version = await version_of(session, kind.group, kind.plural, served)
    except ApiError as error:
        raise UnreachableError(sentence_of(error)) from None
    if version is not None:
        try:
            return await read_object(session, replace(kind, version=version), namespace, name)
        except CommandError:
            if not has_pods:
                raise
    elif not has_pods:
        raise MissingError(
            f'no pod in namespace "{namespace}" is of PodGroup "{name}", and the API server does '
            "not serve PodGroups: they need the feature gate GenericWorkload"
        )
    return {}


def _is_of(pod: SeenPod, target: Target, uid: str) -> bool:
    """Return whether a workload controls a pod; a Deployment does so by its ReplicaSets."""
    if target.kind is DEPLOYMENT:
        return pod.owner_name == f"{target.name}-{pod.template_hash}"
    return pod.owner_uid == uid


def _desired(target: Target, body: Object) -> int:
    spec, status = child(body, "spec"), child(body, "status")
    if target.kind is DAEMON_SET:
        return int(status.get("desiredNumberScheduled") or 0)
    if target.kind is JOB:
        if spec.get("suspend") or status.get("completionTime"):
            return 0
        parallel = int(spec.get("parallelism", 1))
        return min(parallel, int(spec.get("completions") or parallel))
    return int(spec.get("replicas", 1))


# ---------------------------------------------------------------- the answer

_ORDER = (
    Verdict.BROKEN,
    Verdict.BLOCKED,
    Verdict.DELETING,
    Verdict.UNDECIDED,
    Verdict.FITS,
    Verdict.STARTING,
    Verdict.NOT_PENDING,
)
"""The worst first."""

_WORDS = {
    Verdict.BROKEN: ("has a problem", "have a problem"),
    Verdict.BLOCKED: ("waits for devices", "wait for devices"),
    Verdict.DELETING: ("is not deleted", "are not deleted"),
    Verdict.UNDECIDED: ("is undecided", "are undecided"),
    Verdict.FITS: ("waits, but not for devices", "wait, but not for devices"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Pods with one verdict and the same reasons."""

    reports: tuple[Report, ...]

    @property
    def first(self) -> Report:
        return self.reports[0]

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.reports]

    @property
    def words(self) -> str:
        """What the pods do, such as ``2 wait for devices``."""
        one, many = _WORDS[self.first.verdict]
        return f"{len(self.reports)} {one if len(self.reports) == 1 else many}"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadReport:
    """One answer for all pods of a workload."""

    workload: Workload
    reports: tuple[Report, ...]
    """In the order of the pods."""

    @property
    def judged(self) -> list[Report]:
        """The answers that count: a failed pod that has a successor is not a problem."""
        pods = {each.facts.name: each.facts for each in self.workload.pods}
        missing = self.counts["missing"]
        return [each for each in self.reports if missing or pods[each.name].phase != "Failed"]

    @property
    def exit_code(self) -> int:
        return worst_code(self.judged)

    @property
    def verdict(self) -> Verdict:
        verdicts = {each.verdict for each in self.judged}
        return next((each for each in _ORDER if each in verdicts), Verdict.NOT_PENDING)

    @property
    def groups(self) -> list[Group]:
        """The pods that wait or have a problem, by reason, the worst first."""
        return group_by_reason(
            each
            for each in self.judged
            if each.exit_code or each.verdict not in (Verdict.STARTING, Verdict.NOT_PENDING)
        )

    @property
    def counts(self) -> dict[str, int]:
        """The pods by what they do; a pod that runs can have a problem, too."""
        pods = [each.facts for each in self.workload.pods]
        alive = [each for each in pods if each.phase not in ("Succeeded", "Failed")]
        return {
            "desired": self.workload.desired,
            "running": sum(each.phase == "Running" and not _starts(each) for each in pods),
            "starting": sum(_starts(each) for each in pods),
            "waiting": sum(each.phase == "Pending" and each.node is None for each in pods),
            "succeeded": sum(each.phase == "Succeeded" for each in pods),
            "failed": sum(each.phase == "Failed" for each in pods),
            "missing": max(self.workload.desired - len(alive) - self._succeeded, 0),
        }

    @property
    def _succeeded(self) -> int:
        if self.workload.target.kind is not JOB:
            return 0
        return sum(each.facts.phase == "Succeeded" for each in self.workload.pods)

    @property
    def sentence(self) -> str:
        """Count the pods, as in ``14 of 16 pods run; 2 wait for devices``."""
        counts = self.counts
        total = max(counts["desired"], len(self.workload.pods))
        parts = [f"{counts['running']} of {total} {'pod runs' if total == 1 else 'pods run'}"]
        parts += [each.words for each in self.groups]
        for key, one, many in (
            ("starting", "is starting", "are starting"),
            ("succeeded", "has succeeded", "have succeeded"),
            ("failed", "has failed", "have failed"),
            ("missing", "is not created", "are not created"),
        ):
            number = counts[key]
            if number and not (key == "starting" and self.verdict is Verdict.BROKEN):
                parts.append(f"{number} {one if number == 1 else many}")
        named = f"{self.workload.target.kind.kind} {self.workload.namespace}"
        return f"{named}/{self.workload.target.name}: {'; '.join(parts)}"

    def body(self) -> dict[str, Any]:
        """Write it for programs."""
        bodies = [(group, group.first.body()) for group in self.groups]
        return {
            "object": {
                "kind": self.workload.target.kind.kind,
                "namespace": self.workload.namespace,
                "name": self.workload.target.name,
            },
            "verdict": self.verdict.value,
            "message": self.sentence,
            "pods": self.counts,
            "groups": [
                {
                    "pods": group.names,
                    **{key: body[key] for key in body if key != "object"},
                }
                for group, body in bodies
            ],
        }


def _starts(pod: PodFacts) -> bool:
    return is_placed(pod) and (pod.phase == "Pending" or pod.is_starting)


def worst_code(reports: Sequence[Report]) -> int:
    """Return 1 if an answer is a problem, else 4 if one is undecided, else 0."""
    codes = {each.exit_code for each in reports}
    return 1 if 1 in codes else UNDECIDED_CODE if UNDECIDED_CODE in codes else 0


def group_by_reason(reports: Iterable[Report]) -> list[Group]:
    """Group answers with one verdict and the same reasons, the worst verdict first."""
    found: dict[tuple[Verdict, tuple[str, ...]], list[Report]] = {}
    for each in reports:
        found.setdefault((each.verdict, each.codes), []).append(each)
    keys = sorted(found, key=lambda key: _ORDER.index(key[0]))
    return [Group(reports=tuple(found[key])) for key in keys]
