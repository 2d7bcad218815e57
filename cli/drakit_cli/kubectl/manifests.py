"""
Reads the objects of a manifest, and determines the pods and claims that controllers would create
for them.

Each object is created in a dry run, so that the API server applies defaults and admission, and
reports misspelled fields and exceeded quotas. If the API server cannot be used for this, this
module adds the defaults that matter for devices. Kinds that do not affect devices are ignored. Does
not depend on the explanations.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, cast

import yaml

from drakit_cli.answers import UsageError
from drakit_cli.kubectl.explain import user_of
from drakit_cli.kubectl.gather import UnreachableError, sentence_of
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
    ObjectKind,
)
from drakit_daemon.kube import (
    AlreadyExistsError,
    ApiError,
    ForbiddenError,
    NotFoundError,
    Session,
    UnauthorizedError,
    resource_path,
)
from drakit_explain.kinds import UNREADABLE, problem_of
from drakit_explain.model import ClaimFacts, ClassFacts, PodFacts, TemplateFacts
from drakit_explain.projection import project_claim, project_class, project_pod, project_template
from drakit_formats.resource.objects import Object, child, children, requests_from_version, text

CRON_JOB = ObjectKind("CronJob", "batch")

_WORKLOADS = (DEPLOYMENT, STATEFUL_SET, DAEMON_SET, REPLICA_SET, JOB, CRON_JOB)
_EXPLAINED = (POD, *_WORKLOADS, CLAIM, TEMPLATE)
_KINDS = {(each.group, each.kind): each for each in (POD, *_WORKLOADS, CLAIM, TEMPLATE, CLASS)}

_LOOKED_UP = ("Namespace", "ServiceAccount", "PriorityClass", "RuntimeClass")
"""The kinds that a pod can refer to by name, and for which the API server rejects the pod if the
object is missing."""

MAX_NAME = 58
"""Maximum number of characters of a workload's name to use in its pods' names. Controllers truncate
longer names in the same way."""

_FIELD_MANAGER = "kubectl-drakit"


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """An object of a manifest."""

    kind: ObjectKind
    version: str
    """The ``apiVersion``."""

    namespace: str
    name: str
    body: dict[str, Any]
    old: Object | None = None
    """The existing object with this name in the cluster, if any."""

    refusal: str = ""
    """The reason why the API server rejects the object."""

    @property
    def title(self) -> str:
        """The kind and the name, as used in sentences."""
        return f"{self.kind.word} {'/'.join(filter(None, (self.namespace, self.name)))}"

    @property
    def path(self) -> str:
        """The API path of the object."""
        where = self.namespace or None
        return resource_path(self.version, self.kind.plural, namespace=where, name=self.name)

    @property
    def collection(self) -> str:
        return resource_path(self.version, self.kind.plural, namespace=self.namespace or None)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPod:
    """A pod in a manifest, or the first pod of a workload."""

    source: Document
    """The pod or the workload."""

    facts: PodFacts
    pods: int = 1
    """The number of equal pods that the workload runs at the same time. For a DaemonSet, 1."""

    refusal: str = ""
    """The reason why the API server rejects a claim of the pod, as a clause."""

    @property
    def kind(self) -> str:
        """The kind of the object in the manifest."""
        return self.source.kind.kind


@dataclass(kw_only=True, slots=True)
class Manifest:
    """The objects that would exist after the manifest was applied."""

    pods: list[PlannedPod] = field(default_factory=list[PlannedPod])
    facts: list[ClaimFacts | TemplateFacts | ClassFacts] = field(
        default_factory=list["ClaimFacts | TemplateFacts | ClassFacts"]
    )
    templates: dict[str, Object] = field(default_factory=dict[str, Object])
    """The specs of ResourceClaimTemplates in ``resource.k8s.io/v1``, keyed by path."""

    refused: list[Document] = field(default_factory=list[Document])
    unchecked: list[str] = field(default_factory=list[str])
    """The kinds that the API server did not check, with the reasons."""


# ---------------------------------------------------------------- documents


class _Loader(yaml.SafeLoader):
    """Parses a date as a string, as Kubernetes does."""


_Loader.yaml_implicit_resolvers = {
    first: [each for each in resolvers if each[0] != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_documents(content: str, namespace: str) -> tuple[list[Document], set[str]]:
    """
    Parse the YAML or JSON documents of a manifest. Return the relevant objects, and the names of
    other objects that the API server looks up for a pod.

    :param namespace: the namespace of objects that do not name one.
    :raises UsageError: the manifest is malformed, or contains no object that can be explained.
    """
    try:
        # Convert all values to JSON types.
        bodies = json.loads(json.dumps(list(yaml.load_all(content, _Loader)), allow_nan=False))
    except (yaml.YAMLError, OverflowError, *UNREADABLE) as error:
        raise UsageError(f"the manifest is not valid YAML: {error}") from None
    names: set[str] = set()
    found = list(_documents(bodies, namespace, names))
    if not any(each.kind in _EXPLAINED for each in found):
        kinds = ", ".join(sorted(each.kind for each in _EXPLAINED))
        raise UsageError(f"the manifest has none of the kinds {kinds}")
    return found, names


def _documents(bodies: Any, namespace: str, names: set[str]) -> Iterator[Document]:
    for body in cast("list[Any]", bodies) if isinstance(bodies, list) else [bodies]:
        if body is None:
            continue
        if not isinstance(body, dict):
            raise UsageError("a document of the manifest is not an object")
        of = cast("dict[str, Any]", body)
        kind, version = text(of, "kind"), text(of, "apiVersion")
        if kind.endswith("List"):
            yield from _documents(of.get("items"), namespace, names)
        elif not kind or not version:
            missing = "apiVersion" if kind else "kind"
            raise UsageError(f"the manifest is malformed: an object has no {missing}")
        elif known := _KINDS.get((version.rpartition("/")[0], kind)):
            yield _document(known, version, of, namespace)
        elif kind in _LOOKED_UP:
            names.add(text(of, "metadata", "name"))


def _document(kind: ObjectKind, version: str, body: dict[str, Any], namespace: str) -> Document:
    of: Any = body.get("metadata") or {}
    if not isinstance(of, dict):
        raise UsageError(f"a {kind.kind} of the manifest is malformed: metadata is not an object")
    of = cast("dict[str, Any]", of)
    name = of.get("name") or f"{of.get('generateName') or ''}xxxxx"
    inside = of.get("namespace") or namespace
    if not (isinstance(name, str) and isinstance(inside, str)):
        wrong, where = (name, "name") if isinstance(inside, str) else (inside, "namespace")
        raise UsageError(
            f"a {kind.kind} of the manifest is malformed: metadata.{where} must be a string; quote "
            f'it: "{wrong}"'
        )
    inside = inside if kind.namespaced else ""
    named = {**of, "name": name, **({"namespace": inside} if inside else {})}
    return Document(
        kind=kind, version=version, namespace=inside, name=name, body={**body, "metadata": named}
    )


# ---------------------------------------------------------------- the API server


async def complete(
    session: Session, documents: Sequence[Document], names: Collection[str]
) -> Manifest:
    """
    Return the objects with the API server's defaults, and the pods of workloads.

    :param names: the names of objects that the manifest contains, but that may be missing from the
        cluster.
    :raises UsageError: an object that the API server did not check is malformed.
    """
    of = _Completion(session, names)
    for document in sorted(documents, key=lambda each: each.kind in (POD, *_WORKLOADS)):
        try:
            await of.add(document)
        except UNREADABLE as error:
            raise UsageError(
                f"the {document.title} of the manifest is malformed: {problem_of(error)}"
            ) from None
    if not any(each.kind in (POD, *_WORKLOADS) for each in documents):
        of.manifest.pods.extend(of.users)
    return of.manifest


class _Completion:
    def __init__(self, session: Session, names: Collection[str]) -> None:
        self.manifest = Manifest()
        self.users: list[PlannedPod] = []
        """A pod without other rules for each claim and template."""

        self._session = session
        self._names = names

    async def add(self, document: Document) -> None:
        """Check and read an object."""
        checked = await self._check(document)
        if checked.refusal:
            self.manifest.refused.append(checked)
        elif document.kind is POD:
            await self._add_pod(checked, checked)
        elif document.kind in _WORKLOADS:
            await self._add_workload(checked)
        else:
            _read_resource(checked, self.manifest)
            fact = self.manifest.facts[-1]
            if not isinstance(fact, ClassFacts):
                self.users.append(PlannedPod(source=checked, facts=user_of(fact)))

    async def _add_workload(self, of: Document) -> None:
        spec = child(of.body, "spec")
        suspended = bool(spec.get("suspend"))
        if of.kind is CRON_JOB:
            spec = child(spec, "jobTemplate", "spec")
        number = int(spec.get("parallelism" if of.kind in (JOB, CRON_JOB) else "replicas", 1))
        if completions := spec.get("completions"):
            number = min(number, int(completions))
        pod = await self._check(_pod_of(of, child(spec, "template")))
        if pod.refusal:
            self.manifest.refused.append(replace(of, refusal=f"its pods: {pod.refusal}"))
        else:
            await self._add_pod(of, pod, 0 if suspended else max(number, 0))

    async def _add_pod(self, source: Document, pod: Document, number: int = 1) -> None:
        refusals = [] if pod.old else [each async for each in self._refused_claims(pod)]
        facts = project_pod(pod.body if pod.old else _with_controllers(pod, source.kind))
        facts = replace(facts, name=source.name)
        _check_types(facts)
        refusal = "; ".join(refusals)
        self.manifest.pods.append(
            PlannedPod(source=source, facts=facts, pods=number, refusal=refusal)
        )

    async def _refused_claims(self, pod: Document) -> AsyncIterator[str]:
        """Try to create the claims that the resource claim controller would create."""
        for each in children(pod.body, "spec", "resourceClaims"):
            name = each.get("resourceClaimTemplateName")
            if not isinstance(name, str):
                continue
            path = _path_of(TEMPLATE, pod.namespace, name)
            spec = self.manifest.templates.get(path)
            if spec is None:
                try:
                    spec = child(await self._session.get(path), "spec")
                except (ApiError, ValueError):
                    # Skip the claim, because the explanation of the pod reports that the template
                    # is missing.
                    continue
            claim = {
                "apiVersion": CLAIM.api,
                "kind": CLAIM.kind,
                "metadata": child(spec, "metadata"),
                "spec": child(spec, "spec"),
            }
            checked = await self._check(_document(CLAIM, CLAIM.api, claim, pod.namespace))
            if checked.refusal and checked.refusal != _NOT_SERVED.format(CLAIM.api):
                yield (
                    f'the API server does not accept its claim from ResourceClaimTemplate "{name}"'
                    f": {checked.refusal}"
                )

    async def _check(self, document: Document) -> Document:
        """
        Return an object as the API server would store it.

        If the object exists, update it instead of creating it, because the existing object may use
        up a quota.
        """
        try:
            with suppress(NotFoundError, ForbiddenError):
                document = replace(document, old=await self._session.get(document.path))
            if document.old is None:
                body = await self._session.create(
                    document.collection, document.body, dry_run=True, strict=True
                )
            else:
                metadata = {**child(document.body, "metadata")}
                metadata.pop("managedFields", None)
                body = await self._session.apply(
                    document.path,
                    {**document.body, "metadata": metadata},
                    field_manager=_FIELD_MANAGER,
                    dry_run=True,
                )
        except ApiError as error:
            return self._not_created(document, error)
        return replace(document, body=_with_defaults(document, body))

    def _not_created(self, document: Document, error: ApiError) -> Document:
        """Return an object with the reason why the API server refuses to create it."""
        if isinstance(error, UnauthorizedError):
            raise UnreachableError(sentence_of(error))
        why = " ".join(error.message.split())
        if isinstance(error, ForbiddenError) and error.verb:
            why = f"no permission to {error.verb} {error.resource}"
        elif isinstance(error, NotFoundError) and error.details.get("kind") != "namespaces":
            return replace(document, refusal=_NOT_SERVED.format(document.version))
        elif error.is_refusal and not (
            "does not support dry run" in why
            or isinstance(error, AlreadyExistsError)
            # The error may be about another object in the manifest that does not exist in the
            # cluster yet.
            or any(f'"{each}" not found' in why for each in self._names)
            or any(f"name {each} was found" in why for each in self._names)
        ):
            return replace(document, refusal=why)
        what = f"{document.kind.plural}: {why}"
        if what not in self.manifest.unchecked:
            self.manifest.unchecked.append(what)
        body: Object = document.body
        if old := document.old:
            body = {**old, "spec": _applied(child(old, "spec"), child(body, "spec"))}
        return replace(document, body=_with_defaults(document, body))


def _applied(old: Any, new: Any) -> Any:
    """Return an existing value with the fields that a manifest sets."""
    if isinstance(old, dict) and isinstance(new, dict):
        before = cast("dict[str, Any]", old)
        fields = cast("dict[str, Any]", new).items()
        return {**before, **{key: _applied(before.get(key), value) for key, value in fields}}
    if isinstance(old, list) and isinstance(new, list):
        items, others = cast("list[Any]", old), cast("list[Any]", new)
        if len(items) == len(others):
            return list(map(_applied, items, others))
    return cast("Any", new)


_NOT_SERVED = "it does not serve {}"


def _path_of(kind: ObjectKind, namespace: str, name: str) -> str:
    where = namespace if kind.namespaced else None
    return resource_path(kind.api, kind.plural, namespace=where, name=name)


# ---------------------------------------------------------------- without the API server


def _with_defaults(document: Document, of: Object) -> dict[str, Any]:
    """Return an object with a UID, and with defaults for the requests of a claim."""
    uid = text(document.old or {}, "metadata", "uid") or f"{document.kind.kind}/{document.name}"
    body = {**of, "metadata": {**child(of, "metadata"), "uid": uid}}
    if document.kind is CLAIM:
        body["spec"] = _with_modes(child(body, "spec"))
    if document.kind is TEMPLATE:
        spec = child(body, "spec")
        body["spec"] = {**spec, "spec": _with_modes(child(spec, "spec"))}
    return body


def _with_modes(spec: Object) -> dict[str, Any]:
    requests = [_with_mode(each) for each in children(spec, "devices", "requests")]
    return {**spec, "devices": {**child(spec, "devices"), "requests": requests}}


def _with_mode(request: Object) -> Object:
    if exact := child(request, "exactly"):
        return {**request, "exactly": _with_mode(exact)}
    if options := children(request, "firstAvailable"):
        return {**request, "firstAvailable": [_with_mode(each) for each in options]}
    mode = request.get("allocationMode") or "ExactCount"
    count = {"count": request.get("count") or 1} if mode == "ExactCount" else {}
    return {**request, "allocationMode": mode, **count}


# ---------------------------------------------------------------- facts


def _check_types(fact: Any) -> None:
    """Raise ValueError if an object that the API server did not check has a number or a list
    instead of a string."""
    hash(fact)
    for each in fields(fact):
        value = getattr(fact, each.name)
        for one in cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,):
            if is_dataclass(one):
                _check_types(one)
            elif str(each.type).startswith(("str", "tuple[str, ...]")) and not isinstance(
                one, str | None
            ):
                raise ValueError(f"{one!r} is not a string")


def _read_resource(of: Document, manifest: Manifest) -> None:
    version = of.version.rpartition("/")[2]
    body: Object = {**of.body, "status": {}}
    if of.kind is CLAIM:
        manifest.facts.append(project_claim(body, version))
    elif of.kind is TEMPLATE:
        manifest.facts.append(project_template(body, version))
        spec = child(body, "spec")
        converted = {**spec, "spec": requests_from_version(child(spec, "spec"), version)}
        manifest.templates[_path_of(of.kind, of.namespace, of.name)] = converted
    else:
        manifest.facts.append(project_class(body))
    _check_types(manifest.facts[-1])


def _pod_of(of: Document, template: Object) -> Document:
    """Return the pod that the controller of a workload would create."""
    spec = {**child(template, "spec")}
    if of.kind is STATEFUL_SET:
        names = [
            text(each, "metadata", "name")
            for each in children(of.body, "spec", "volumeClaimTemplates")
        ]
        spec["volumes"] = [
            *(each for each in children(spec, "volumes") if each.get("name") not in names),
            *(
                {"name": name, "persistentVolumeClaim": {"claimName": f"{name}-{of.name}-0"}}
                for name in names
            ),
        ]
    metadata = {**child(template, "metadata"), "name": f"{of.name[:MAX_NAME]}-xxxxx"}
    body = {"apiVersion": POD.api, "kind": POD.kind, "metadata": metadata, "spec": spec}
    return _document(POD, POD.api, body, of.namespace)


def _with_controllers(pod: Document, kind: ObjectKind) -> Object:
    """Return a new pod with the defaults that affect which node it can use."""
    spec = child(pod.body, "spec")
    added = _TOLERATED + (_TOLERATED_BY_DAEMONS if kind is DAEMON_SET else ())
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
    return {**pod.body, "spec": completed, "status": {"phase": "Pending"}}


_NODE = "node.kubernetes.io"
_TOLERATED = ((f"{_NODE}/not-ready", "NoExecute"), (f"{_NODE}/unreachable", "NoExecute"))
_TOLERATED_BY_DAEMONS = tuple(
    (f"{_NODE}/{name}", "NoSchedule")
    for name in ("disk-pressure", "memory-pressure", "pid-pressure", "unschedulable")
)


def _with_requests(container: Object) -> Object:
    """Return a container with a request for each of its limits."""
    resources = child(container, "resources")
    requests = {**child(resources, "limits"), **child(resources, "requests")}
    return {**container, "resources": {**resources, "requests": requests}}
