"""
Reads pods: a single pod, or the pods of a namespace or workload. Also reads the resources that pods
request on their nodes, and the Events about claims that cannot be prepared.

Does not depend on the explanations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from drakit_cli.answers import CommandError
from drakit_cli.kubectl.gather import (
    Gathered,
    MissingError,
    UnreachableError,
    gap_of,
    read_pages,
    sentence_of,
)
from drakit_cli.kubectl.targets import ObjectKind
from drakit_daemon.kube import ApiError, NotFoundError, Session, resource_path
from drakit_explain.broken import claims_of_pod, is_placed
from drakit_explain.evidence import QUOTED, Event, Events
from drakit_explain.kinds import PODS, UNREADABLE, problem_of
from drakit_explain.loads import Load, Loads, load_of_pod
from drakit_explain.model import PodFacts
from drakit_explain.pending import waits
from drakit_explain.projection import project_pod
from drakit_formats.resource.objects import Object, child, children, text

SETTLE_SECONDS = 5.0
"""A pod that has not changed for this long is settled: the kubelet and controllers have had time to
act."""

DELETION_SECONDS = 30.0
"""How long after its grace period a pod that is being deleted is settled."""

# ---------------------------------------------------------------- pods


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenPod:
    """A pod's facts, with additional data."""

    facts: PodFacts
    settled: bool = False
    """Whether the pod has not changed for a while."""

    owner_uid: str = ""
    """The UID of the pod's controller."""

    owner_name: str = ""
    template_hash: str = ""
    """The label that distinguishes the ReplicaSets of a Deployment."""


def see_pod(body: Object) -> SeenPod:
    """Read a pod."""
    metadata = child(body, "metadata")
    owners = [each for each in children(metadata, "ownerReferences") if each.get("controller")]
    owner: Object = owners[0] if owners else {}
    return SeenPod(
        facts=project_pod(body),
        settled=_is_settled(body, datetime.now(UTC)),
        owner_uid=text(owner, "uid"),
        owner_name=text(owner, "name"),
        template_hash=text(metadata, "labels", "pod-template-hash"),
    )


async def read_object(session: Session, kind: ObjectKind, namespace: str, name: str) -> Object:
    """
    Read one object.

    :raises MissingError: the object does not exist.
    :raises UnreachableError: the user is not allowed to read it.
    """
    where = namespace if kind.namespaced else None
    try:
        return await session.get(resource_path(kind.api, kind.plural, namespace=where, name=name))
    except NotFoundError:
        inside = f' in namespace "{namespace}"' if where else ""
        raise MissingError(f'{kind.word} "{name}" does not exist{inside}') from None
    except ApiError as error:
        raise UnreachableError(sentence_of(error)) from None


async def read_pod(session: Session, kind: ObjectKind, namespace: str, name: str) -> SeenPod:
    """
    Read one pod.

    :raises CommandError: the pod cannot be read.
    """
    body = await read_object(session, kind, namespace, name)
    try:
        return see_pod(body)
    except UNREADABLE as error:
        raise CommandError(
            f"pod {namespace}/{name} has an unknown format: {problem_of(error)}; upgrade drakit"
        ) from None


async def list_pods(
    session: Session, namespace: str | None, params: Mapping[str, str]
) -> list[SeenPod]:
    """
    List the pods of a namespace, or of all namespaces. Pods that cannot be read are omitted.

    :raises UnreachableError: the user is not allowed to list them.
    """

    def keep(body: Object) -> SeenPod | None:
        try:
            return see_pod(body)
        except UNREADABLE:
            return None

    path = resource_path("v1", PODS.plural, namespace=namespace)
    try:
        listing = await read_pages(session, path, keep, params)
    except ApiError as error:
        raise UnreachableError(sentence_of(error)) from None
    found = [each for each in listing.items if each is not None]
    return sorted(found, key=lambda each: (each.facts.namespace, each.facts.name))


def _is_settled(body: Object, now: datetime) -> bool:
    metadata = child(body, "metadata")
    times = [
        *(metadata.get(key) for key in ("creationTimestamp", "deletionTimestamp")),
        *(each.get("lastTransitionTime") for each in children(body, "status", "conditions")),
    ]
    changed = [datetime.fromisoformat(str(each)) for each in times if each]
    seconds = DELETION_SECONDS if metadata.get("deletionTimestamp") else SETTLE_SECONDS
    return bool(changed) and (now - max(changed)).total_seconds() > seconds


# ---------------------------------------------------------------- requests of pods


async def with_loads(session: Session, found: Gathered, nodes: Collection[str]) -> Gathered:
    """Add the requests of the pods on some nodes."""
    if not nodes:
        return found
    ended = "status.phase!=Succeeded,status.phase!=Failed"
    selectors = [f"spec.nodeName={each},{ended}" for each in sorted(nodes)]
    if len(selectors) > _MAX_NODES_ONE_BY_ONE:
        selectors = [f"spec.nodeName!=,{ended}"]
    loads = Loads(nodes=nodes)
    path = resource_path("v1", PODS.plural)
    lists = (read_pages(session, path, _load, {"fieldSelector": each}) for each in selectors)
    try:
        listings = await asyncio.gather(*lists)
    except ApiError as error:
        gap = gap_of(
            error,
            PODS.plural,
            denied="list pods of all namespaces",
            failed="pods",
            effect="the free CPU, memory and number of pods of nodes are unknown",
            where="nodes",
        )
        return replace(found, gaps=[*found.gaps, gap])
    for load in (each for listing in listings for each in listing.items):
        if load is not None:
            loads.apply(load)
    found.world.loads = loads
    return found


_MAX_NODES_ONE_BY_ONE = 16
"""Maximum number of nodes to list pods for individually. For more nodes, it is faster to list all
pods."""


def _load(body: Object) -> Load | None:
    try:
        return load_of_pod(body)
    except UNREADABLE:
        return None  # ignored, although the node then has less room than computed


# ---------------------------------------------------------------- Events

_MAX_MESSAGE = 1024
"""Maximum length of a quoted Event. It is the API's limit for new Events."""

_MAX_OBJECTS_ONE_BY_ONE = 8
"""Maximum number of objects to list Events for individually. For more objects, all Events with the
relevant reasons are listed."""


async def with_events(session: Session, found: Gathered, pods: Sequence[PodFacts]) -> Gathered:
    """Add the Events that can explain why claims are not created, prepared or unprepared."""
    chosen = [pod for pod in pods if _has_events(pod) or waits(pod)]
    if not chosen:
        return found
    claims = [each for pod in chosen for each in claims_of_pod(pod, found.world)]
    uids = dict.fromkeys(each.uid for each in (*chosen, *claims))
    places = {pod.namespace for pod in chosen}
    namespace = places.pop() if len(places) == 1 else None
    selectors = [f"involvedObject.uid={each}" for each in uids]
    if len(uids) > _MAX_OBJECTS_ONE_BY_ONE:
        selectors = [f"reason={each}" for each in QUOTED]
    try:
        listings = await asyncio.gather(
            *(list_events(session, namespace, each) for each in selectors)
        )
    except ApiError as error:
        effect = "the reports of the kubelet, drivers and controllers are unknown"
        gap = gap_of(error, "events", denied="list Events", failed="Events", effect=effect)
        return replace(found, events=Events(hidden=gap.forbidden), gaps=[*found.gaps, gap])
    return replace(found, events=Events(each for listing in listings for each in listing))


def _has_events(pod: PodFacts) -> bool:
    """Return whether a pod or its claims may have a problem that only Events report."""
    has_claims = bool(pod.claims or pod.extended_claim)
    if pod.deleting:
        return pod.node is not None
    return is_placed(pod) and (pod.is_starting or (pod.phase == "Running" and has_claims))


async def list_events(session: Session, namespace: str | None, selector: str) -> list[Event]:
    """List the Events that a field selector selects; raises ApiError."""

    def project(body: Object) -> Event:
        times = (
            text(body, "series", "lastObservedTime"),
            text(body, "lastTimestamp"),
            text(body, "eventTime"),
        )
        return Event(
            # Some times contain fractions of a second.
            time=max(times).removesuffix("Z"),
            reason=text(body, "reason"),
            message=text(body, "message")[:_MAX_MESSAGE],
            uid=text(body, "involvedObject", "uid"),
        )

    path = resource_path("v1", "events", namespace=namespace)
    return (await read_pages(session, path, project, {"fieldSelector": selector})).items
