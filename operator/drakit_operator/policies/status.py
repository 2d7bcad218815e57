"""
Computes the desired DeviceClass and status of a HostDevicePolicy from the facts in the store, with
pure functions.

The status summarizes the reports of the nodes (NodeDeviceReport). It covers the nodes to which the
policy applies: they are ready, the policy's selector selects them, and they have a current report
of the driver. Lists in the status are bounded, because a policy can apply to thousands of nodes.

Does not depend on queues, clocks, Kopf or sessions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from drakit.text import plural
from drakit_explain.model import ClassFacts, NodeFacts, PolicyFacts, PolicyReport, ReportFacts
from drakit_explain.reports import HOSTDEV as DRIVER
from drakit_explain.reports import policy_selector
from drakit_explain.wording import cut
from drakit_explain.world import Name, World
from drakit_formats.resource.nodes import selects_labels
from drakit_operator.statuses import Condition, Object, Status

POLICY_LABEL = "drakit.dev/policy"
MANAGER = "drakit-operator"

LISTED = 20
"""Maximum number of conflicts and problems to list in the status, which is enough to find the
cause."""

NAMED = 3
"""Maximum number of nodes or other objects to name in a condition message."""

# ------------------------------------------------------------ the DeviceClass


def desired_class(policy: PolicyFacts, *, api_version: str) -> Object | None:
    """
    Return the DeviceClass of a policy, or None if it does not need one.

    The policy owns the DeviceClass, so the garbage collector deletes it with the policy.
    """
    if not policy.create_class or policy.deleting:
        return None
    spec: Object = {"selectors": [{"cel": {"expression": policy_selector(policy.name)}}]}
    if policy.extended_resource:
        spec["extendedResourceName"] = policy.extended_resource
    return {
        "apiVersion": api_version,
        "kind": "DeviceClass",
        "metadata": {
            "name": policy.class_name,
            "labels": {"app.kubernetes.io/managed-by": MANAGER, POLICY_LABEL: policy.name},
            "ownerReferences": [policy.reference.body() | {"controller": True}],
        },
        "spec": spec,
    }


# ------------------------------------------------------------ the status


@dataclass(frozen=True, slots=True)
class _NodeState:
    """The state of a policy on one node."""

    node: str
    state: Literal["applied", "behind", "refused", "problem", "in use"]
    report: PolicyReport
    message: str = ""
    listed: bool = True
    """Whether the report contains the policy. If there are many policies, the report omits some
    that are in effect."""


def status_of(policy: PolicyFacts, world: World, *, class_problem: str) -> Status:
    """
    Return the status of a policy.

    :param class_problem: why its DeviceClass cannot be maintained. Empty if there is no problem.
    """
    answers = sorted(_answers(policy, world), key=lambda each: each.node)
    applied = sum(each.state == "applied" for each in answers)
    problems = [{"node": each.node, "message": each.message} for each in answers if each.message]
    matched_twice = dict.fromkeys(
        (each.node, device.device, device.policy)
        for each in answers
        for device in each.report.conflicts
    )
    conflicts = [
        {"node": node, "device": device, "policy": other} for node, device, other in matched_twice
    ]
    has_class = policy.create_class and not class_problem
    fields: Object = {
        "deviceClass": policy.class_name if has_class else None,
        "observedGeneration": policy.generation,
        "desiredNodes": len(answers),
        "appliedNodes": applied,
        "nodes": sum(each.report.matched > 0 for each in answers),
        "devices": sum(each.report.published for each in answers),
        "conflicts": conflicts[:LISTED],
        "problems": problems[:LISTED],
    }
    return Status(
        conditions=(
            _accepted(answers, policy, class_problem),
            _applied(answers, policy, applied),
            _conflicting(answers, conflicts, _same_resource(policy, world)),
        ),
        fields=fields,
    )


def _unknown(condition: str, answers: Sequence[_NodeState]) -> Condition | None:
    """Return the condition to use while no node has reported it, or None if a node has."""
    if not answers:
        message = (
            "no ready node that nodeSelector selects reports the driver: check nodeSelector, and "
            "that the node plugin with hostdev.enabled runs on the nodes"
        )
        return Condition(condition, "Unknown", "NoNodes", message)
    if all(each.state == "behind" for each in answers):
        message = "no node has checked this generation yet"
        return Condition(condition, "Unknown", "Pending", message)
    return None


def _accepted(answers: Sequence[_NodeState], policy: PolicyFacts, class_problem: str) -> Condition:
    if class_problem:
        return Condition("Accepted", "False", "DeviceClassConflict", class_problem)
    if refused := [each for each in answers if each.state == "refused"]:
        message = (
            f"generation {policy.generation} is refused by {plural(len(refused), 'node')} "
            f"({_names(refused)}): {refused[0].message}"
        )
        return Condition("Accepted", "False", "Refused", message)
    known = sum(each.state != "behind" for each in answers)
    message = f"{known} of {plural(len(answers), 'node')} accept it, and none refuses it"
    return _unknown("Accepted", answers) or Condition("Accepted", "True", "Accepted", message)


_NOT_APPLIED = {
    "refused": "Refused",
    "problem": "NodeProblems",
    "behind": "Progressing",
    "in use": "DevicesInUse",
}
"""The condition reasons for each node state, the most serious state first."""


def _applied(answers: Sequence[_NodeState], policy: PolicyFacts, applied: int) -> Condition:
    if not answers and (unknown := _unknown("Applied", answers)):
        return unknown
    message = f"{applied} of {plural(len(answers), 'node')} apply generation {policy.generation}; "
    for state, reason in _NOT_APPLIED.items():
        if found := [each for each in answers if each.state == state]:
            why = f"{_names(found)}: {found[0].message}"
            why = f"waiting for {_names(found)}" if state == "behind" else why
            return Condition("Applied", "False", reason, f"{message}{why}")
    reason, why = "Applied", ""
    if rejecting := [each for each in answers if each.report.rejected]:
        reason = "DevicesRejected"
        number = plural(sum(each.report.rejected for each in rejecting), "device")
        example = rejecting[0].report.rejected_example
        why = f"not published on {_names(rejecting)}: {number}, such as {example}"
    elif omitting := [each for each in answers if not each.listed]:
        why = f"its devices on {_names(omitting)} are not counted: too many policies"
    elif not any(each.report.matched for each in answers):
        reason = "NoDeviceMatched"
        why = (
            "no node has a device that it matches: connect a device, or check spec.match "
            "('drakit node devices' in a pod of the node plugin lists devices)"
        )
    return Condition("Applied", "True", reason, f"{message}{why}".removesuffix("; "))


def _conflicting(
    answers: Sequence[_NodeState], conflicts: Sequence[Object], same_resource: str
) -> Condition:
    if same_resource:
        return Condition("Conflicting", "True", "ExtendedResourceUsedTwice", same_resource)
    if conflicts:
        message = "other policies also match {}: policy {policy} matches {device} on {node}".format(
            plural(len(conflicts), "device"), **conflicts[0]
        )
        return Condition("Conflicting", "True", "DevicesMatchedTwice", message)
    return _unknown("Conflicting", answers) or Condition(
        "Conflicting", "False", "NoConflict", "no other policy matches its devices"
    )


def _same_resource(policy: PolicyFacts, world: World) -> str:
    """Return a phrase that names the other objects that have the same extended resource as a
    policy. Empty if there are none."""
    resource, policies = policy.extended_resource, world.of(PolicyFacts).values()
    if not resource or not policy.create_class:
        return ""
    owners = {each.uid for each in policies}
    others = [
        f"HostDevicePolicy {each.name}"
        for each in policies
        if each.extended_resource == resource and each.create_class and each.uid != policy.uid
    ] + [
        f"DeviceClass {each.name}"
        for each in world.of(ClassFacts).values()
        if each.extended_resource == resource and each.owner not in owners
    ]
    if not others:
        return ""
    return (
        f"the extended resource {resource} is also that of {', '.join(sorted(others)[:NAMED])}, "
        "and pods that request it get devices of the youngest DeviceClass only: set another "
        "extendedResourceName, or match all devices with one policy"
    )


def _answers(policy: PolicyFacts, world: World) -> Iterator[_NodeState]:
    nodes = world.of(NodeFacts)
    for report in world.of(ReportFacts).values():
        if report.driver != DRIVER or report.outdated:
            continue
        if nodes:  # without permission to read nodes, all reports are used
            node = nodes.get(Name("", report.node))
            if node is None or not node.ready:
                continue
            if not selects_labels(policy.node_selector, node.labels):
                continue
        yield _answer(policy, report)


def _answer(policy: PolicyFacts, report: ReportFacts) -> _NodeState:
    name, uid, node = policy.name, policy.uid, report.node
    found = next((each for each in report.policies if each.name == name), None)
    nothing = PolicyReport(name=name, uid=uid, observed_generation=0, matched=0, published=0)
    if found is None:
        omitted = report.policies_omitted
        return _NodeState(node, "applied" if omitted else "behind", nothing, listed=not omitted)
    if found.uid != uid:  # the report is about an earlier policy with the same name
        return _NodeState(node, "behind", nothing)
    if found.observed_generation != policy.generation:
        return _NodeState(node, "behind", found)
    in_effect = found.generation == policy.generation
    if found.problem and not in_effect:
        return _NodeState(node, "refused", found, found.problem)
    # A driver that refuses its policies does not apply the new generation.
    if problem := report.refused or found.problem:
        return _NodeState(node, "problem", found, problem)
    if not in_effect:
        return _NodeState(node, "behind", found)
    if found.in_use:
        example = found.in_use_by and f", such as: {found.in_use_by}"
        message = (
            f"claims hold {plural(found.in_use, 'device')} in a form that the policy no longer "
            f"offers{example}; delete the pods that use them"
        )
        return _NodeState(node, "in use", found, message)
    return _NodeState(node, "applied", found)


def _names(answers: Sequence[_NodeState]) -> str:
    return cut([each.node for each in answers], NAMED)
