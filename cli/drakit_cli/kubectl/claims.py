"""
``kubectl drakit claims``: claims with their state, node, devices, and pods.

It must not know sessions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drakit_cli.kubectl.gather import CLAIMS, Gathered
from drakit_cli.kubectl.output import Output
from drakit_explain.broken import node_of_claim
from drakit_explain.model import ClaimFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimRow:
    """One claim."""

    namespace: str
    name: str
    state: str
    node: str
    """The only node that can use it; empty if there are several, or if it is not allocated."""

    devices: tuple[str, ...]
    pods: tuple[str, ...]
    classes: tuple[str, ...]


def rows(found: Gathered, namespace: str | None) -> list[ClaimRow]:
    """Return the claims of a namespace, or of all."""
    claims = found.world.of(ClaimFacts).values()
    return [
        _row(each)
        for each in sorted(claims, key=lambda claim: (claim.namespace, claim.name))
        if namespace in (None, each.namespace)
    ]


def body(found: Gathered, namespace: str | None) -> dict[str, Any]:
    """Return the claims for programs."""
    return {
        "claims": [
            {
                "namespace": each.namespace,
                "name": each.name,
                "state": each.state,
                "node": each.node,
                "devices": list(each.devices),
                "pods": list(each.pods),
                "deviceClasses": list(each.classes),
            }
            for each in rows(found, namespace)
        ],
        "notEvaluated": _gaps(found, namespace),
    }


def show(found: Gathered, namespace: str | None, output: Output) -> None:
    """Print the claims."""
    claims = rows(found, namespace)
    if not claims:
        output.line(f"No claims in namespace {namespace}." if namespace else "No claims.")
    else:
        output.table(
            ("NAMESPACE", "NAME", "STATE", "NODE", "DEVICES", "PODS")
            + (("CLASSES",) if output.wide else ()),
            [
                [each.namespace, each.name, each.state, each.node]
                + [", ".join(each.devices), ", ".join(each.pods)]
                + ([", ".join(each.classes)] if output.wide else [])
                for each in claims
            ],
        )
    output.lines("Not evaluated", _gaps(found, namespace))


def _gaps(found: Gathered, namespace: str | None) -> list[str]:
    return [
        gap.what
        for gap in found.gaps
        if not (gap.kind == CLAIMS.plural and gap.where == "other namespaces" and namespace)
    ]


def _row(claim: ClaimFacts) -> ClaimRow:
    requests = [each for one in claim.requests for each in (one.alternatives or (one,))]
    return ClaimRow(
        namespace=claim.namespace,
        name=claim.name,
        state=_state(claim),
        node=node_of_claim(claim) or "",
        devices=tuple(dict.fromkeys("/".join(each.device) for each in claim.results)),
        pods=tuple(sorted(claim.reserved_for)),
        classes=tuple(dict.fromkeys(each.device_class for each in requests)),
    )


def _state(claim: ClaimFacts) -> str:
    if claim.deleting:
        return "deleting"
    if not claim.allocated:
        return "pending"
    return "in use" if claim.consumers else "allocated"
