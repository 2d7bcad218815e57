"""
The desired DeviceClass and status of one HostDevicePolicy, from the facts of the store. Pure.

The status sums up what the nodes report (NodeDeviceReport) and what their ResourceSlices contain.
Lists in it are bounded: a policy can apply to thousands of nodes.

It must not know queues, clocks, Kopf or sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from drakit_explain.model import DeviceID, PolicyFacts, PolicyReport, ReportFacts, SliceFacts
from drakit_explain.world import World
from drakit_formats.crds import API_VERSION

DRIVER = "hostdev.drakit.dev"
"""The driver of HostDevicePolicies."""

POLICY_LABEL = "drakit.dev/policy"
MANAGER = "drakit-operator"

LISTED = 20
"""Conflicts and problems that the status lists: enough to find the cause."""

NAMED = 3
"""Nodes that the message of the condition names."""

Object = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The status of a policy, without times."""

    ready: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    fields: Mapping[str, Any]
    """The other fields of the status, as the API has them."""


# ------------------------------------------------------------ the DeviceClass


def desired_class(policy: PolicyFacts, *, api_version: str) -> Object | None:
    """
    Return the DeviceClass of a policy; None if it has none.

    The policy owns it, so the garbage collector deletes it with the policy.
    """
    if not policy.create_class or policy.deleting:
        return None
    expression = (
        f'device.driver == "{DRIVER}" && device.attributes["{DRIVER}"].policy == "{policy.name}"'
    )
    spec: Object = {"selectors": [{"cel": {"expression": expression}}]}
    if policy.extended_resource:
        spec["extendedResourceName"] = policy.extended_resource
    return {
        "apiVersion": api_version,
        "kind": "DeviceClass",
        "metadata": {
            "name": policy.class_name,
            "labels": {"app.kubernetes.io/managed-by": MANAGER, POLICY_LABEL: policy.name},
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": "HostDevicePolicy",
                    "name": policy.name,
                    "uid": policy.uid,
                    "controller": True,
                }
            ],
        },
        "spec": spec,
    }


def owns(policy: PolicyFacts, device_class: Mapping[str, Any]) -> bool:
    """Return whether a DeviceClass belongs to a policy: an admission policy allows no other."""
    owners: list[Mapping[str, Any]] = device_class["metadata"].get("ownerReferences") or []
    return any(each.get("uid") == policy.uid and each.get("controller") for each in owners)


# ------------------------------------------------------------ the status


def status_of(policy: PolicyFacts, world: World, *, class_problem: str) -> Status:
    """
    Return the status of a policy.

    :param class_problem: why its DeviceClass cannot be maintained; empty if it is in order.
    """
    reports = sorted(_reports(policy, world), key=lambda each: each[0])
    problems = [
        {"node": node, "message": report.problem} for node, report in reports if report.problem
    ]
    matching = [node for node, report in reports if report.matched]
    behind = [node for node, each in reports if each.observed_generation < policy.generation]
    conflicts = [
        {"node": node, "device": each.device, "policy": each.policy}
        for node, report in reports
        for each in report.conflicts
    ]
    fields: Object = {
        "observedGeneration": policy.generation,
        "nodes": len(matching),
        "matched": sum(report.matched for _, report in reports),
        **_devices(policy, world),
        "conflicts": conflicts[:LISTED],
        "problems": problems[:LISTED],
    }
    if policy.create_class and not class_problem:
        fields["deviceClass"] = policy.class_name
    if class_problem:
        return Status(
            ready="False", reason="DeviceClassConflict", message=class_problem, fields=fields
        )
    if problems:
        names = _names(each["node"] for each in problems)
        message = f"{_count(len(problems), 'node')} cannot apply the policy ({names}): "
        return Status(
            ready="False",
            reason="NodeProblems",
            message=message + problems[0]["message"],
            fields=fields,
        )
    if behind:
        message = (
            f"waiting for {_count(len(behind), 'node')} to report generation {policy.generation}: "
            f"{_names(behind)}"
        )
        return Status(ready="Unknown", reason="Pending", message=message, fields=fields)
    if not reports:
        message = (
            "no node reports this policy: check its nodeSelector, and that the node plugin with "
            "hostdev.enabled runs on the nodes"
        )
        return Status(ready="Unknown", reason="NoNodes", message=message, fields=fields)
    if not matching:
        message = (
            "no node has a device that the policy matches: connect a device, or check spec.match "
            "and spec.nodeSelector ('drakit node devices' in a pod of the node plugin lists "
            "devices)"
        )
        return Status(ready="False", reason="NoDeviceMatched", message=message, fields=fields)
    verb = "has" if len(matching) == 1 else "have"
    message = f"{_count(len(matching), 'node')} {verb} matching devices"
    if conflicts:
        message += f"; another policy also matches {_count(len(conflicts), 'device')}"
    return Status(ready="True", reason="Applied", message=message, fields=fields)


def _reports(policy: PolicyFacts, world: World) -> Iterator[tuple[str, PolicyReport]]:
    for report in world.of(ReportFacts).values():
        if report.driver != DRIVER:
            continue
        for outcome in report.policies:
            if outcome.name == policy.name:
                yield report.node, outcome


def _devices(policy: PolicyFacts, world: World) -> Object:
    counts = {"devices": 0, "healthy": 0, "allocated": 0}
    for each in world.of(SliceFacts).values():
        if each.driver != DRIVER:
            continue
        for device in each.devices:
            if device.attribute("policy", DRIVER) != policy.name:
                continue
            identity = DeviceID(each.driver, each.pool, device.name)
            counts["devices"] += 1
            counts["healthy"] += not device.taints
            counts["allocated"] += world.is_allocated(identity) or world.is_shared(identity)
    return counts


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _names(nodes: Iterable[str]) -> str:
    listed = list(nodes)
    shown = ", ".join(listed[:NAMED])
    return shown if len(listed) <= NAMED else f"{shown} and {len(listed) - NAMED} more"
