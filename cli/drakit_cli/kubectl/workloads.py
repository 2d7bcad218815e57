"""
Finds the pods of a workload, and summarizes their explanations in one result.

Does not depend on how a pod is explained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from drakit_cli.answers import CommandError
from drakit_cli.kubectl.explain import COLORS, Report, worst_code
from drakit_cli.kubectl.gather import MissingError, UnreachableError, read_pages, sentence_of
from drakit_cli.kubectl.output import MAX_NAMES, Output, shortened
from drakit_cli.kubectl.pods import SeenPod, list_events, list_pods, read_object
from drakit_cli.kubectl.targets import DAEMON_SET, DEPLOYMENT, JOB, POD_GROUP, Target
from drakit_daemon.kube import ApiError, Session, resource_path
from drakit_daemon.kube.discovery import served_versions, version_of
from drakit_explain.broken import is_placed
from drakit_explain.model import PodFacts
from drakit_explain.pending import Verdict
from drakit_formats.resource.objects import Object, child, children, text, words

# ---------------------------------------------------------------- pods


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A workload and its pods."""

    target: Target
    namespace: str
    desired: int
    """The number of pods that the workload runs at the same time. 0 if unknown."""

    pods: tuple[SeenPod, ...]
    suspended: bool = False
    """Whether the workload is suspended, so that it does not create pods until it is resumed."""

    absent: str = ""
    """The reason why pods are not created, as a clause. Empty if unknown."""

    @property
    def missing(self) -> int:
        """The number of pods that have not been created."""
        pods = [each.facts for each in self.pods]
        alive = sum(each.phase not in ("Succeeded", "Failed") for each in pods)
        ended = sum(each.phase == "Succeeded" for each in pods) if self.target.kind is JOB else 0
        return max(self.desired - alive - ended, 0)


async def find_workload(session: Session, namespace: str, target: Target) -> Workload:
    """
    Read a workload and its pods.

    :raises MissingError: the workload does not exist.
    :raises UnreachableError: the user is not allowed to read the workload or its pods.
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
    found = Workload(
        target=target,
        namespace=namespace,
        desired=desired,
        pods=tuple(pods),
        suspended=bool(child(body, "spec").get("suspend")),
    )
    return replace(found, absent=await _absent(session, found, body)) if found.missing else found


async def _absent(session: Session, workload: Workload, body: Object) -> str:
    """Return the reason why some pods of a workload are not created."""
    uid, namespace = text(body, "metadata", "uid"), workload.namespace
    if workload.suspended:
        queue = text(body, "metadata", "labels", _QUEUE)
        of_queue = await said_by_kueue(session, namespace, uid) if queue else ""
        by = f", and queue {queue} of Kueue resumes it{of_queue}" if queue else ""
        return f"the {workload.target.kind.kind} is suspended (spec.suspend){by}"
    conditions = children(body, "status", "conditions")
    refused = [each for each in conditions if text(each, "type") in ("ReplicaFailure", "Failed")]
    said = next((words(each, "message", most=_MAX_MESSAGE) for each in refused), "")
    if not said and uid:
        try:
            events = await list_events(session, namespace, f"involvedObject.uid={uid}")
        except ApiError:
            # Continue without Events, because the explanation of the pods is more important.
            events = []
        created = [each for each in events if each.reason == "FailedCreate"]
        said = max(created).message if created else ""
    return said and f"the API server refuses them: {said}{_advice(said)}"


_QUEUE = "kueue.x-k8s.io/queue-name"
KUEUE = "kueue.x-k8s.io"
_MAX_MESSAGE = 768


def _advice(said: str) -> str:
    if "exceeded quota" in said:
        return "; delete unneeded objects, or ask an administrator for a larger quota"
    if "webhook" in said:
        return "; check the webhook, or change the pods as it asks"
    return ""


async def said_by_kueue(session: Session, namespace: str, uid: str) -> str:
    """Return the reason why Kueue does not admit an object, if the user is allowed to read its
    Workload."""

    def project(body: Object) -> str:
        if all(text(each, "uid") != uid for each in children(body, "metadata", "ownerReferences")):
            return ""
        return next(
            (
                words(each, "message", most=_MAX_MESSAGE)
                for each in children(body, "status", "conditions")
                if text(each, "type") in ("QuotaReserved", "Admitted")
                and text(each, "status") == "False"
            ),
            "",
        )

    try:
        served = await served_versions(session, KUEUE)
        version = await version_of(session, KUEUE, "workloads", served)
        if version is None:
            return ""
        path = resource_path(f"{KUEUE}/{version}", "workloads", namespace=namespace)
        listing = await read_pages(session, path, project)
    except ApiError:
        return ""
    said = next(filter(None, listing.items), "")
    return f": {said}" if said else ""


async def _read_group(
    session: Session, namespace: str, target: Target, *, has_pods: bool
) -> Object:
    """
    Read a PodGroup in the version that the cluster serves, which changes with each release.

    The pods refer to their group by name, so explaining them does not require permission to read
    it. In Kubernetes 1.35, they refer to a part of another object.
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
    """Return whether a workload controls a pod. A Deployment controls its pods through
    ReplicaSets."""
    if target.kind is DEPLOYMENT:
        return pod.owner_name == f"{target.name}-{pod.template_hash}"
    return pod.owner_uid == uid


def _desired(target: Target, body: Object) -> int:
    spec, status = child(body, "spec"), child(body, "status")
    if target.kind is DAEMON_SET:
        return int(status.get("desiredNumberScheduled") or 0)
    if target.kind is JOB:
        if status.get("completionTime"):
            return 0
        parallel = int(spec.get("parallelism", 1))
        return min(parallel, int(spec.get("completions") or parallel))
    return int(spec.get("replicas", 1))


# ---------------------------------------------------------------- the result

_ORDER = (
    Verdict.BROKEN,
    Verdict.BLOCKED,
    Verdict.DELETING,
    Verdict.UNDECIDED,
    Verdict.FITS,
    Verdict.STARTING,
    Verdict.NOT_PENDING,
)
"""The verdicts, the most serious first."""

_WORDS = {
    Verdict.BROKEN: ("has a problem", "have a problem"),
    Verdict.BLOCKED: ("waits for devices", "wait for devices"),
    Verdict.DELETING: ("is not deleted", "are not deleted"),
    Verdict.UNDECIDED: ("is undecided", "are undecided"),
    Verdict.FITS: ("waits, but not for devices", "wait, but not for devices"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Pods with the same verdict, reasons and cause."""

    reports: tuple[Report, ...]

    @property
    def first(self) -> Report:
        return self.reports[0]

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.reports]

    @property
    def words(self) -> str:
        """A summary of the pods, such as ``2 wait for devices``."""
        return _words(self.first.verdict, len(self.reports))


def _words(verdict: Verdict, pods: int) -> str:
    one, many = _WORDS[verdict]
    return f"{pods} {one if pods == 1 else many}"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadReport:
    """One combined result for all pods of a workload."""

    workload: Workload
    reports: tuple[Report, ...]
    """The reports, in the order of the pods."""

    @property
    def judged(self) -> list[Report]:
        """The reports that determine the result. A failed pod that has been replaced is not
        included."""
        pods = {each.facts.name: each.facts for each in self.workload.pods}
        missing = self.workload.missing
        return [each for each in self.reports if missing or pods[each.name].phase != "Failed"]

    @property
    def exit_code(self) -> int:
        refused = self.workload.absent and not self.workload.suspended
        return 1 if refused else worst_code(self.judged)

    @property
    def is_done(self) -> bool:
        """Whether nothing is pending."""
        return not self.workload.missing and all(each.is_done for each in self.judged)

    @property
    def verdict(self) -> Verdict:
        verdicts = {each.verdict for each in self.judged}
        return next((each for each in _ORDER if each in verdicts), Verdict.NOT_PENDING)

    @property
    def groups(self) -> list[Group]:
        """The pods that are waiting or have a problem, grouped by cause, the most serious first."""
        return group_by_cause(
            each
            for each in self.judged
            if each.exit_code or each.verdict not in (Verdict.STARTING, Verdict.NOT_PENDING)
        )

    @property
    def counts(self) -> dict[str, int]:
        """The number of pods in each state. A running pod can also have a problem, which these
        numbers do not show."""
        pods = [each.facts for each in self.workload.pods]
        return {
            "desired": self.workload.desired,
            "running": sum(each.phase == "Running" and not _starts(each) for each in pods),
            "starting": sum(_starts(each) for each in pods),
            "waiting": sum(each.phase == "Pending" and each.node is None for each in pods),
            "succeeded": sum(each.phase == "Succeeded" for each in pods),
            "failed": sum(each.phase == "Failed" for each in pods),
            "missing": self.workload.missing,
        }

    @property
    def sentence(self) -> str:
        """Count the pods, as in ``14 of 16 pods run; 2 wait for devices``."""
        counts = self.counts
        total = max(counts["desired"], len(self.workload.pods))
        parts = [f"{counts['running']} of {total} {'pod runs' if total == 1 else 'pods run'}"]
        verdicts = Counter[Verdict]()
        for each in self.groups:
            verdicts[each.first.verdict] += len(each.reports)
        parts += [_words(verdict, number) for verdict, number in verdicts.items()]
        for key, one, many in (
            ("starting", "is starting", "are starting"),
            ("succeeded", "has succeeded", "have succeeded"),
            ("failed", "has failed", "have failed"),
            ("missing", "is not created", "are not created"),
        ):
            number = counts[key]
            if number and not (key == "starting" and self.verdict is Verdict.BROKEN):
                parts.append(f"{number} {one if number == 1 else many}")
        if self.workload.absent:
            parts[-1] += f": {self.workload.absent}"
        named = f"{self.workload.target.kind.kind} {self.workload.namespace}"
        return f"{named}/{self.workload.target.name}: {'; '.join(parts)}"

    def body(self) -> dict[str, Any]:
        """Return the report as JSON."""
        bodies = [(group, group.first.body()) for group in self.groups]
        return {
            "object": {
                "kind": self.workload.target.kind.kind,
                "namespace": self.workload.namespace,
                "name": self.workload.target.name,
            },
            "verdict": self.verdict.value,
            "message": self.sentence,
            "absent": self.workload.absent,
            "pods": self.counts,
            "groups": [
                {"pods": group.names, **{key: body[key] for key in body if key != "object"}}
                for group, body in bodies
            ],
        }

    def show(self, output: Output) -> None:
        """Print one result for all pods, and explain one pod for each reason."""
        output.line(f"{self.sentence}.", color=COLORS[self.verdict])
        for group in self.groups:
            names = shortened(group.names, most=len(group.names) if output.wide else MAX_NAMES)
            output.line()
            output.line(f"{group.words}: {names}", color="head")
            group.first.show(output)


def _starts(pod: PodFacts) -> bool:
    return is_placed(pod) and (pod.phase == "Pending" or pod.is_starting)


def group_by_cause(reports: Iterable[Report]) -> list[Group]:
    """Group results with the same verdict, reasons and causes, the most serious first."""
    found: dict[object, list[Report]] = {}
    for each in reports:
        found.setdefault((each.verdict, each.codes, each.causes), []).append(each)
    groups = sorted(found.values(), key=lambda group: _ORDER.index(group[0].verdict))
    return [Group(reports=tuple(each)) for each in groups]
