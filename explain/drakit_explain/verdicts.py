"""
Verdicts of Kubernetes' own allocator: what the helper is asked, and what its answer means.

The bodies are JSON of the API, which tenants write: a question has only what the allocator reads,
with all fields of it, also those that drakit does not know.

It must not depend on processes, or on the facts of the explainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from drakit_formats.resource.objects import Object

MAX_NODES = 64
"""Nodes in one question, as in ``operator/cel/verdict.go``."""

MAX_BYTES = 4 << 20
"""Bytes of a question, as in ``operator/cel/verdict.go``."""


class VerdictOutcome(Enum):
    """The possible answers for a node; the values are those of the helper."""

    ALLOCATED = "allocated"
    UNAVAILABLE = "unavailable"
    """The claims cannot be allocated on this node."""

    FATAL = "fatal"
    """The scheduler gives up the pod, whatever other nodes have."""

    UNDECIDED = "undecided"
    """Nothing is certain; the text names the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The allocator's answer for one node."""

    outcome: VerdictOutcome
    text: str = ""
    """The allocator's words, if it returned an error. They can contain a tenant's words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictQuestion:
    """A pod's claims, and what the scheduler would look at to allocate them."""

    nodes: Sequence[Object]
    claims: Sequence[Object]
    """The claims to allocate, in the order of the pod."""

    classes: Sequence[Object]
    """The classes of the claims. The scheduler does not ask its allocator if one is missing."""

    slices: Sequence[Object]
    """All slices of each pool, with the taints of DeviceTaintRules, in ``resource.k8s.io/v1``."""

    in_use: Sequence[Object]
    """The results of all allocated claims."""

    gates: Mapping[str, bool]
    """The cluster's feature gates. One that is missing is off."""

    def body(self) -> dict[str, Any]:
        """Return the question as the helper reads it."""
        return {
            "nodes": [_node(each) for each in self.nodes[:MAX_NODES]],
            "claims": [_claim(each) for each in self.claims],
            "classes": [_class(each) for each in self.classes],
            "slices": [_object(each) for each in self.slices],
            "inUse": list(self.in_use),
            "gates": dict(self.gates),
        }


def parse_verdicts(answer: Any, *, nodes: int) -> tuple[Verdict, ...]:
    """
    Return a verdict for each node of a question.

    All are undecided if the question has fields that the helper's release of Kubernetes does not
    have, because the allocator did not see them.
    """
    found = [_verdict(each) for each in answer["verdicts"]]
    if len(found) != min(nodes, MAX_NODES):
        raise ValueError(f"{len(found)} verdicts for {nodes} nodes")
    unknown = _texts(answer.get("unknown") or ())
    if unknown:
        return undecided(f"the allocator has no {unknown[0]}", nodes=nodes)
    beyond = undecided(f"a question has at most {MAX_NODES} nodes", nodes=nodes - len(found))
    return (*found, *beyond)


def undecided(text: str, *, nodes: int) -> tuple[Verdict, ...]:
    """Return that nothing is certain on some nodes."""
    return (Verdict(outcome=VerdictOutcome.UNDECIDED, text=text),) * nodes


def _verdict(answer: Any) -> Verdict:
    (text,) = _texts([answer.get("text", "")])
    return Verdict(outcome=VerdictOutcome(answer["outcome"]), text=text)


def _texts(texts: Iterable[Any]) -> list[str]:
    for each in (found := list(texts)):
        if not isinstance(each, str):
            raise TypeError(f"a text is a {type(each).__name__}")
    return found


def _node(body: Object) -> Object:
    metadata = _picked(body["metadata"], "name", "labels")
    status: Object = body.get("status") or {}
    return {"metadata": metadata, "status": _picked(status, "declaredFeatures")}


def _claim(body: Object) -> Object:
    spec: Object = body["spec"]
    if devices := spec.get("devices"):
        spec = {**spec, "devices": without_config(devices)}
    return {**_object(body), "spec": spec}


def _class(body: Object) -> Object:
    return {**_object(body), "spec": without_config(body.get("spec") or {})}


def _object(body: Object) -> Object:
    metadata = _picked(body["metadata"], "namespace", "name", "uid")
    return {"metadata": metadata, "spec": body.get("spec") or {}}


def _picked(body: Object, *names: str) -> Object:
    return {name: body[name] for name in names if name in body}


def without_config(body: Object) -> Object:
    """Return a body without the drivers' parameters: the allocator only copies them."""
    return {name: value for name, value in body.items() if name != "config"}
