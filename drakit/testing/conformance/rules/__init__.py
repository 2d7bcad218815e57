"""
The rules of the contract, a module a subject; :func:`rules` finds them.

A rule says what a driver must do, which behaviour of the kubelet needs it, and how that is seen:

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

They must not know how the kit is made: what it has in public is what they use.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from drakit.testing.conformance.kit import Kit

__all__ = ("Rule", "collect", "rule", "rules")

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


def rules() -> Sequence[Rule]:
    """Give all rules: those of each module here, in the modules' alphabetical order and as they
    stand in them."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    return collect(import_module(f"{__name__}.{name}") for name in names)


def collect(modules: Iterable[ModuleType]) -> Sequence[Rule]:
    """Give the rules of modules; raise ValueError if two have the same id."""
    found: dict[str, Rule] = {}
    for module in modules:
        for value in vars(module).values():
            if not isinstance(value, Rule) or value.check.__module__ != module.__name__:
                continue
            if value.id in found:
                raise ValueError(f"there are two rules {value.id}")
            found[value.id] = value
    return tuple(found.values())
