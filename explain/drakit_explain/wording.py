"""
Phrases that explain why the devices of a request are unavailable: parts of one sentence.

The phrases are for readers of a pod's Events, and state what to check next. The same situation
results in the same phrases, regardless of the order of its facts.

Does not depend on pods, clients, or clocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from decimal import Decimal
from heapq import nsmallest

from drakit_explain.availability import NAMED_HOLDERS, Availability, Obstacle
from drakit_explain.model import ClaimFacts
from drakit_explain.nodes import NodeProblem, Unusable, is_condition
from drakit_explain.reports import UNAVAILABLE, UNHEALTHY

NAMED_WORDS = 3
"""Maximum number of taint keys, or of capacities, to name for one reason."""

_ADVICE = {
    "drakit.dev/gone": (
        "the taint drakit.dev/gone is removed when the device is connected again; otherwise the "
        "device is removed when its claim is unprepared"
    ),
    "drakit.dev/stopped": (
        "the taint drakit.dev/stopped is removed when the driver is available again on that node: "
        "check its log"
    ),
    UNHEALTHY: (
        "the taint drakit.dev/unhealthy is removed after 30 s (by default) of good health: check "
        "the device"
    ),
    UNAVAILABLE: (
        f"the taint {UNAVAILABLE} is removed when the plugin of the driver is registered on that "
        "node again: 'kubectl drakit drivers' shows why it is not"
    ),
    "drakit.dev/unpreparing": (
        "the taint drakit.dev/unpreparing is removed when an earlier claim is unprepared on that "
        "node"
    ),
}
"""The remedies for drakit's own taints: those of the node plugin (see its ``devices/taints.py``),
and the taint of a DeviceTaintRule that a DeviceDriver owns."""

_RESOURCES = NodeProblem.RESOURCES.value
_CONDITION = "condition"
"""The word for a taint that reflects a condition of a node."""

_RULES = {
    NodeProblem.SELECTOR.value: "its node selector or affinity excludes {them}",
    NodeProblem.TAINT.value: "it does not tolerate {their} taint {}",
    _CONDITION: "{they_have} the taint {}",
    NodeProblem.CORDONED.value: "{they_are} cordoned",
    _RESOURCES: "{they_have} too little {} left",
    NodeProblem.CLAIM.value: "its allocated claim {} is not available there",
}
"""The reasons why a pod cannot use nodes, keyed by the kind of rule."""

_NODES = {"them": "them", "their": "their", "they_have": "they have", "they_are": "they are"}
_ONE_NODE = {"them": "that node", "their": "the", "they_have": "it has", "they_are": "it is"}
"""The words for several nodes and for one in :data:`_RULES`."""

_ADVICE_FOR_OTHERS = (
    "ask the owner of the taint, or tolerate its key and effect{} {} in the request"
)
"""The advice for other taints. It includes the effect: the scheduler accepts a toleration without
an effect, but such a toleration does not prevent a pod from being evicted because of a NoExecute
taint."""


def state(found: Availability, *, of: str, reader: str | None) -> str:
    """
    Return the reasons why devices are unavailable. `of` describes whose devices they are, such as a
    request.

    Holders outside the reader's namespace are only counted. If the reader is None, all holders are
    named.
    """
    parts = list(_parts(found, reader))
    if len(parts) == 1:
        obstacle, phrase = parts[0]
        return f"{_amount(found.total, obstacle.devices)} of {of} {phrase}"
    phrases = "; ".join(f"{obstacle.devices} {phrase}" for obstacle, phrase in parts)
    return f"of the {found.total} devices of {of}, {phrases}"


def how_taints_end(found: Availability, said: Sequence[str]) -> str:
    """
    Return how the devices' taints can be removed, as clauses. Empty if that is unknown.

    :param said: the messages of drivers about unhealthy devices.
    """
    keys = found.tainted.words
    causes = [_ADVICE[key] for key in sorted(keys & _ADVICE.keys())]
    if said:
        words = f"{_ADVICE[UNHEALTHY]} ({'; '.join(said)})"
        causes = [words if each == _ADVICE[UNHEALTHY] else each for each in causes]
    if found.rules:
        plural = "s" if len(found.rules) > 1 else ""
        causes.append(
            f"DeviceTaintRule{plural} {_words(found.rules)} set{'' if plural else 's'} a taint, "
            f"which is removed when the rule is deleted"
        )
    return "; ".join(causes)


def advice(found: Availability, *, released: bool) -> str:
    """Return general advice. `released` means that releasing devices is enough."""
    parts: list[str] = []
    if released:
        whole = not found.partitioned.devices and not found.used_up.devices
        what = "enough of them are" if whole else "enough hardware or capacity is"
        what = "the device is" if whole and found.total == 1 else what
        parts.append(f"the claim can be allocated when {what} released")
    if found.elsewhere.devices and not found.releasable and not found.free:
        match {kind for kind, _ in _rules_of_nodes(found)}:
            case kinds if kinds == {_RESOURCES}:
                parts.append("reduce the requests of the pod, or free resources on those nodes")
            case kinds if kinds == {_CONDITION}:
                parts.append(
                    "check those nodes (kubectl describe node), or publish devices on the nodes "
                    "that the pod can use"
                )
            case _:
                parts.append(
                    "allow the pod to run on those nodes, or publish devices on the nodes that it "
                    "can use"
                )
    if found.tainted.words - _ADVICE.keys():
        effects = sorted({effect for key, effect in found.effects if key not in _ADVICE})
        plural = "s" if len(effects) > 1 else ""
        parts.append(_ADVICE_FOR_OTHERS.format(plural, " and ".join(effects)))
    return "; ".join(parts)


def _parts(found: Availability, reader: str | None) -> Iterator[tuple[Obstacle, str]]:
    if one := found.allocated.devices:
        holders = _holders(found.allocated, reader)
        yield found.allocated, f"{'is' if one == 1 else 'are'} allocated to {holders}"
    if one := found.partitioned.devices:
        verb = "shares" if one == 1 else "share"
        holders = _holders(found.partitioned, reader)
        yield found.partitioned, f"{verb} hardware with devices that are allocated to {holders}"
    if one := found.used_up.devices:
        verb = "has" if one == 1 else "have"
        words, holders = _words(found.used_up.words), _holders(found.used_up, reader)
        yield (
            found.used_up,
            f"{verb} too little {words} left ({_left(found)}), because shares are allocated to "
            f"{holders}",
        )
    if one := found.elsewhere.devices:
        verb = "is" if one == 1 else "are"
        yield found.elsewhere, f"{verb} on nodes that the pod cannot use ({_nodes(found)})"
    if one := found.tainted.devices:
        verb, words = "is" if one == 1 else "are", _words(found.tainted.words)
        near = f" ({cut(sorted(found.near), NAMED_WORDS)})" if found.near else ""
        yield (
            found.tainted,
            f"{verb} tainted with {words}, which the request does not tolerate{near}",
        )


def _left(found: Availability) -> str:
    """Return how much of each capacity is left, in the units of the slice."""
    several = found.used_up.devices > 1
    parts = [
        f"{'at most ' if several else ''}{quantity_text(left.amount)} of "
        f"{quantity_text(left.total)}{f' {name}' if len(found.left) > 1 else ''}, and the request "
        f"takes {quantity_text(left.needed)}"
        for name, left in sorted(found.left.items())
    ]
    return cut(parts, NAMED_WORDS)


def quantity_text(units: int) -> str:
    """Return an amount in billionths as a quantity, in the largest unit that does not require a
    fraction."""
    for suffixes, base in (("PTGMk", 1000), (("Pi", "Ti", "Gi", "Mi", "Ki"), 1024)):
        for power, suffix in zip(range(5, 0, -1), suffixes, strict=True):
            size = 10**9 * base**power
            if units and units % size == 0:
                return f"{units // size}{suffix}"
    return f"{Decimal(units) / 10**9:f}"


def _nodes(found: Availability) -> str:
    """Return the kinds of rules that prevent the pod from using nodes, as a phrase."""
    kinds: dict[str, list[str]] = {}
    for kind, detail in _rules_of_nodes(found):
        kinds.setdefault(kind, []).append(detail)
    return "; ".join(
        _RULES[kind].format(cut([each for each in details if each], NAMED_WORDS), **_NODES)
        for kind, details in kinds.items()
    )


def _rules_of_nodes(found: Availability) -> Iterator[tuple[str, str]]:
    """Return the rules that prevent the pod from using nodes, each with its detail."""
    for word in sorted(found.elsewhere.words):
        kind, _, detail = word.partition(" ")
        if kind == NodeProblem.TAINT.value and is_condition(detail):
            kind = _CONDITION
        yield kind, detail


def _amount(total: int, part: int) -> str:
    if total == 1:
        return "the only device"
    return f"all {total} devices" if part == total else f"{part} of the {total} devices"


def _words(words: Collection[str]) -> str:
    return cut(sorted(words), NAMED_WORDS)


def _holders(obstacle: Obstacle, reader: str | None) -> str:
    every = obstacle.claims.values()
    claims = [claim for claim in every if reader is None or claim.namespace == reader]
    first_of = nsmallest(NAMED_HOLDERS, claims, key=lambda claim: (claim.namespace, claim.name))
    named = [named_holder(claim) for claim in first_of]
    others = len(every) - len(claims)
    counted: list[str] = []
    if rest := len(claims) - len(named):
        counted.append(f"{rest} more")
    if others:
        plural = f"{others} claims in other namespaces"
        counted.append("a claim in another namespace" if others == 1 else plural)
    if not counted:
        return ", ".join(named)
    *first, last = named + counted
    return f"{', '.join(first)} and {last}" if first else last


def cut(words: list[str], most: int) -> str:
    """Join the first words, and add the number of the others."""
    rest = len(words) - most
    return ", ".join(words[:most]) + (f" and {rest} more" if rest > 0 else "")


def named_holder(claim: ClaimFacts) -> str:
    """Return the claim's name, with its first user and the number of others. If the claim is being
    deleted, add the finalizer that delays the deletion."""
    users = cut(claim.users, 1) or "no pod"
    if claim.held_by:
        users += f"; its deletion waits for finalizer {claim.held_by[0]}"
    return f"claim {claim.namespace}/{claim.name} ({users})"


def lacks(problem: Unusable | None) -> str:
    """Return the reason why a pod cannot use one node, in parentheses. Empty if that is unknown."""
    if problem is None:
        return ""
    return f" ({_RULES[problem.problem.value].format(problem.detail, **_ONE_NODE)})"


def shown(expression: str) -> str:
    """Shorten a selector to one line of at most 120 characters."""
    flat = " ".join(expression.split())
    return flat if len(flat) <= 120 else f"{flat[:117]}..."
