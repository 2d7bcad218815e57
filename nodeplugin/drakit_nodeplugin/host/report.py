"""
Builds the NodeDeviceReport of one driver on one node from facts.

Users, the operator and ``kubectl drakit`` read these reports. The content is bounded, and stable:
lists are sorted, and nothing changes with time alone. Its fields are described in
``charts/drakit/crds/nodedevicereports.yaml``.

It must not know the API server, or the sources of the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from drakit.device import LeftOut, PolicyOutcome
from drakit_nodeplugin.devices.model import EndpointStatus
from drakit_nodeplugin.host.policies import PolicyState

__all__ = (
    "API_VERSION",
    "KIND",
    "MAX_NAME",
    "MAX_STUCK",
    "PLURAL",
    "DeviceCounts",
    "ReportFacts",
    "StuckClaim",
    "body_of",
    "report_name",
    "status_of",
)

API_VERSION = "drakit.dev/v1alpha1"
KIND = "NodeDeviceReport"
PLURAL = "nodedevicereports"

MAX_NAME = 253
"""Characters of an object's name."""

MAX_LISTED = 100
"""Entries of a list; the rest is counted."""

MAX_STUCK = 20
"""Stuck claims that are named."""

MAX_CONFLICTS = 10

MAX_LABEL = 256
"""Characters of the name by which users know a device."""

MAX_MESSAGE = 512
MAX_PROBLEM = 1024

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCounts:
    """Numbers of devices."""

    published: int
    healthy: int
    unhealthy: int
    allocated: int
    gone: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StuckClaim:
    """A claim whose prepare or unprepare does not end."""

    namespace: str
    name: str
    uid: str
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportFacts:
    """The content of a report, unbounded."""

    registration: str
    """``Registered``, ``Pending`` or ``Rejected``."""

    registration_message: str
    endpoints: Sequence[EndpointStatus]
    devices: DeviceCounts
    left_out: Collection[LeftOut]
    left_out_count: int
    """The number in total, including those that are not listed."""

    claims: Mapping[str, int]
    """Numbers of claims by state."""

    stuck: Sequence[StuckClaim]
    stuck_count: int
    """The number in total, including those that are not listed."""

    policies: Sequence[PolicyState] = ()
    outcomes: Collection[PolicyOutcome] = ()
    refusal: str | None = None
    """The reason why the driver refused its newest policies."""


def report_name(node: str, driver: str) -> str | None:
    """Return the name of a report; None if it would be too long for an object."""
    name = f"{node}.{driver}"
    return name if len(name) <= MAX_NAME else None


def body_of(*, node: str, node_uid: str, driver: str, status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object for a server-side apply."""
    owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": report_name(node, driver), "ownerReferences": [owner]},
        "spec": {"nodeName": node, "driver": driver},
        "status": status,
    }


def status_of(facts: ReportFacts) -> dict[str, Any]:
    """Return the content of a report."""
    registration = {"state": facts.registration}
    if facts.registration_message:
        registration["message"] = _cut(facts.registration_message, MAX_MESSAGE)
    left_out, _ = _first(
        facts.left_out, MAX_LISTED, key=lambda each: (each.device, each.policy, each.reason)
    )
    endpoints, more_endpoints = _first(facts.endpoints, MAX_LISTED, key=lambda each: each.name)
    stuck, _ = _first(facts.stuck, MAX_STUCK, key=lambda each: each.uid)
    status: dict[str, Any] = {
        "registration": registration,
        "endpoints": [_endpoint(each) for each in endpoints],
        "devices": {
            "published": facts.devices.published,
            "healthy": facts.devices.healthy,
            "unhealthy": facts.devices.unhealthy,
            "gone": facts.devices.gone,
            "allocated": facts.devices.allocated,
            "leftOut": facts.left_out_count,
        },
        "leftOut": [_left_out(each) for each in left_out],
        "claims": {
            "prepared": facts.claims.get("prepared", 0),
            "preparing": facts.claims.get("preparing", 0),
            "unpreparing": facts.claims.get("unpreparing", 0),
            "stuck": facts.stuck_count,
        },
        "stuckClaims": [
            {"namespace": each.namespace, "name": each.name, "uid": each.uid, "state": each.state}
            for each in stuck
        ],
    }
    policies, more_policies = _policies(facts)
    status["policies"] = policies
    omitted = {
        "leftOutOmitted": facts.left_out_count - len(left_out),
        "endpointsOmitted": more_endpoints,
        "stuckClaimsOmitted": facts.stuck_count - len(stuck),
        "policiesOmitted": more_policies,
    }
    status |= {key: count for key, count in omitted.items() if count > 0}
    if facts.refusal:
        status["policiesRefused"] = _cut(facts.refusal, MAX_PROBLEM)
    return status


def _endpoint(endpoint: EndpointStatus) -> dict[str, Any]:
    body = {"name": _cut(endpoint.name, MAX_LABEL), "state": endpoint.state}
    if endpoint.reason:
        body["message"] = _cut(endpoint.reason, MAX_MESSAGE)
    return body


def _left_out(left_out: LeftOut) -> dict[str, Any]:
    body = {"device": _cut(left_out.device, MAX_LABEL), "reason": left_out.reason}
    if left_out.policy:
        body["policy"] = _cut(left_out.policy, MAX_NAME)
    if left_out.message:
        body["message"] = _cut(left_out.message, MAX_MESSAGE)
    return body


def _policies(facts: ReportFacts) -> tuple[list[dict[str, Any]], int]:
    """Return the first policies, and the number of the others. Policies with a problem come first,
    then those that match a device, so that these are not omitted."""
    outcomes = {each.policy: each for each in facts.outcomes}
    shown = [_policy(each, outcomes.get(each.name)) for each in facts.policies]
    shown.sort(key=lambda each: ("problem" not in each, not each["matched"], each["name"]))
    first = sorted(shown[:MAX_LISTED], key=lambda each: each["name"])
    return first, len(shown) - len(first)


def _policy(state: PolicyState, outcome: PolicyOutcome | None) -> dict[str, Any]:
    if outcome is None:
        outcome = PolicyOutcome(policy=state.name)
    body: dict[str, Any] = {
        "name": state.name,
        "observedGeneration": state.observed_generation,
        "matched": outcome.matched,
        "published": outcome.published,
    }
    if state.generation is not None:
        body["generation"] = state.generation
    if problem := state.problem or outcome.problem:
        body["problem"] = _cut(problem, MAX_PROBLEM)
    if outcome.conflicts:
        conflicts, more = _first(
            outcome.conflicts, MAX_CONFLICTS, key=lambda each: (each.device, each.policy)
        )
        body["conflicts"] = [
            {"device": _cut(each.device, MAX_LABEL), "policy": _cut(each.policy, MAX_NAME)}
            for each in conflicts
        ]
        if more:
            body["conflictsOmitted"] = more
    return body


def _first(
    items: Collection[ItemT], limit: int, *, key: Callable[[ItemT], Any]
) -> tuple[list[ItemT], int]:
    """Return the first items by a key, and the number of the others."""
    ordered = sorted(items, key=key)
    return ordered[:limit], max(0, len(ordered) - limit)


def _cut(text: str, limit: int) -> str:
    # A file name that is not valid UTF-8 contains surrogates.
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
