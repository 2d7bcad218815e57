"""
The pods of a manifest as the API server and the controllers would create them, with the claims,
templates and classes beside them.

What decides about devices is filled in: names, namespace, requests that default to limits, and
tolerations that the API server and the DaemonSet controller add. Other kinds are ignored.

It must not know sessions, or what is explained about a pod.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import yaml

from drakit_cli.answers import UsageError
from drakit_cli.kubectl.targets import (
    CLAIM,
    CLASS,
    DAEMON_SET,
    DEPLOYMENT,
    JOB,
    POD,
    REPLICA_SET,
    STATEFUL_SET,
    TEMPLATE,
)
from drakit_daemon.kube import resource_path
from drakit_explain.kinds import UNREADABLE
from drakit_explain.model import ClaimFacts, ClassFacts, PodFacts, TemplateFacts
from drakit_explain.projection import project_claim, project_class, project_pod, project_template
from drakit_formats.resource.objects import (
    GROUP,
    Object,
    child,
    children,
    requests_from_version,
    text,
)

_WITH_TEMPLATE = frozenset(
    each.kind for each in (DEPLOYMENT, STATEFUL_SET, DAEMON_SET, REPLICA_SET, JOB)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPod:
    """A pod of a manifest, or the first one of a workload."""

    kind: str
    """That of the manifest."""

    facts: PodFacts
    priority_class: str = ""
    pods: int = 1
    """The equal pods that the workload wants at the same time; of a DaemonSet, one."""


@dataclass(kw_only=True, slots=True)
class Manifest:
    """What would exist."""

    pods: list[PlannedPod] = field(default_factory=list[PlannedPod])
    facts: list[ClaimFacts | TemplateFacts | ClassFacts] = field(
        default_factory=list["ClaimFacts | TemplateFacts | ClassFacts"]
    )
    bodies: dict[str, Object] = field(default_factory=dict[str, Object])
    """The objects that facts were read of, in ``resource.k8s.io/v1``, by path."""


def read_manifest(content: str, namespace: str) -> Manifest:
    """
    Read the YAML or JSON documents of a manifest.

    :param namespace: that of objects that name none.
    :raises UsageError: it is malformed, or has no pod.
    """
    manifest = Manifest()
    try:
        documents = list(yaml.safe_load_all(content))
    except yaml.YAMLError as error:
        raise UsageError(f"the manifest is no YAML: {error}") from None
    for body in _objects(documents):
        kind = text(body, "kind")
        try:
            _read(body, kind, namespace, manifest)
        except UNREADABLE as error:
            name = text(child(body, "metadata"), "name")
            raise UsageError(f"the {kind} {name} of the manifest is malformed: {error!r}") from None
    if not manifest.pods:
        kinds = ", ".join(sorted((POD.kind, "CronJob", *_WITH_TEMPLATE)))
        raise UsageError(f"the manifest has none of the kinds {kinds}")
    return manifest


def _objects(documents: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for document in documents:
        if document is None:
            continue
        if not isinstance(document, dict):
            raise UsageError("a document of the manifest is no object")
        body = cast("dict[str, Any]", document)
        if text(body, "kind").endswith("List"):
            yield from _objects(body.get("items") or [])
        else:
            yield body


def _read(body: Object, kind: str, namespace: str, manifest: Manifest) -> None:
    metadata = child(body, "metadata")
    inside = text(metadata, "namespace") or namespace
    name = text(metadata, "name") or f"{text(metadata, 'generateName')}xxxxx"
    named = {**metadata, "namespace": inside, "name": name, "uid": f"{kind}/{name}"}
    if kind == POD.kind:
        manifest.pods.append(_pod(kind, named, child(body, "spec")))
    elif kind in _WITH_TEMPLATE or kind == "CronJob":
        spec = (
            child(body, "spec", "jobTemplate", "spec") if kind == "CronJob" else child(body, "spec")
        )
        template = child(spec, "template")
        of_pod = {**child(template, "metadata"), **{key: named[key] for key in _NAMES}}
        number = int(spec.get("replicas" if "Job" not in kind else "parallelism", 1))
        if completions := spec.get("completions"):
            number = min(number, int(completions))
        manifest.pods.append(_pod(kind, of_pod, child(template, "spec"), pods=number))
    elif text(body, "apiVersion").startswith(f"{GROUP}/"):
        version = text(body, "apiVersion").removeprefix(f"{GROUP}/")
        _read_resource({**body, "metadata": named, "status": {}}, kind, version, manifest)


_NAMES = ("namespace", "name", "uid")


def _read_resource(body: Object, kind: str, version: str, manifest: Manifest) -> None:
    spec, metadata = child(body, "spec"), child(body, "metadata")
    namespace, name = text(metadata, "namespace"), text(metadata, "name")
    of_kind = {each.kind: each for each in (CLAIM, TEMPLATE, CLASS)}.get(kind)
    if of_kind is None:
        return
    if of_kind is CLAIM:
        manifest.facts.append(project_claim(body, version))
        spec = requests_from_version(spec, version)
    elif of_kind is TEMPLATE:
        manifest.facts.append(project_template(body, version))
        spec = {**spec, "spec": requests_from_version(child(spec, "spec"), version)}
    else:
        manifest.facts.append(project_class(body))
    where = namespace if of_kind.namespaced else None
    path = resource_path(of_kind.api, of_kind.plural, namespace=where, name=name)
    manifest.bodies[path] = {"metadata": metadata, "spec": spec}


# ---------------------------------------------------------------- pods


def _pod(kind: str, metadata: Object, spec: Object, *, pods: int = 1) -> PlannedPod:
    added = _TOLERATED + (_TOLERATED_BY_DAEMONS if kind == DAEMON_SET.kind else ())
    completed = {
        **spec,
        "schedulerName": spec.get("schedulerName") or "default-scheduler",
        "tolerations": [
            *children(spec, "tolerations"),
            *({"key": key, "operator": "Exists", "effect": effect} for key, effect in added),
        ],
        "containers": [_with_requests(each) for each in children(spec, "containers")],
        "initContainers": [_with_requests(each) for each in children(spec, "initContainers")],
    }
    body = {"metadata": metadata, "spec": completed, "status": {"phase": "Pending"}}
    return PlannedPod(
        kind=kind,
        facts=project_pod(body),
        priority_class=text(spec, "priorityClassName"),
        pods=pods,
    )


_NODE = "node.kubernetes.io"
_TOLERATED = ((f"{_NODE}/not-ready", "NoExecute"), (f"{_NODE}/unreachable", "NoExecute"))
_TOLERATED_BY_DAEMONS = tuple(
    (f"{_NODE}/{name}", "NoSchedule")
    for name in ("disk-pressure", "memory-pressure", "pid-pressure", "unschedulable")
)


def _with_requests(container: Object) -> Object:
    """Return a container with requests for all of its limits."""
    resources = child(container, "resources")
    requests = {**child(resources, "limits"), **child(resources, "requests")}
    return {**container, "resources": {**resources, "requests": requests}}
