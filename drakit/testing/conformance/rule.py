"""
A rule: what a driver must do, which behaviour of the kubelet needs it, and how that is seen.

A module of :mod:`.rules` is made of functions like this::

    @rule("prepare-again", "a claim that is prepared again gets the same devices",
          why="the kubelet forgets at its restart what is prepared, and asks again")
    async def prepare_again(kit: Kit) -> None:
        device, *_ = await kit.devices()
        claim = kit.claim(device)
        first = (await kit.prepare(claim))[claim.uid]
        again = (await kit.prepare(claim))[claim.uid]
        if again != first:
            kit.fail("the second prepare of a claim gave other devices than the first")

The kit is a fresh one, its driver is started, registered and has published devices. What the rule
leaves behind is cleaned up.

It must not know kits from inside, or how rules are run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from drakit.testing.conformance.kit import Kit

__all__ = ("Check", "Rule", "rule")

Check: TypeAlias = "Callable[[Kit], Awaitable[None]]"

DEFAULT_SECONDS = 90.0
"""Time limit of a rule: some rules start the node plugin several times."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule of the contract."""

    id: str
    """Words with dashes, as ``prepare-again``: what one types, and the name of its test."""

    title: str
    """The requirement, as a sentence without a period."""

    why: str
    """The behavior of the kubelet or the cluster that requires it."""

    check: Check
    """Raises if the driver violates the rule: `Kit.fail`, or what the kit itself raises."""

    kinds: frozenset[str] = frozenset({"python", "backend", "device-plugin"})
    """The kinds of targets that it is about (`Target.kind`); for others it is skipped."""

    seconds: float = DEFAULT_SECONDS
    """Time limit of its check, after the kit has started."""


def rule(
    id: str,
    title: str,
    *,
    why: str,
    kinds: Collection[str] = ("python", "backend", "device-plugin"),
    seconds: float = DEFAULT_SECONDS,
) -> Callable[[Check], Rule]:
    """Make a function that checks a rule the rule itself."""

    def decorate(check: Check) -> Rule:
        return Rule(
            id=id, title=title, why=why, check=check, kinds=frozenset(kinds), seconds=seconds
        )

    return decorate
