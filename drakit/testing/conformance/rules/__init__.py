"""
The rules of the contract, one module per subject; :func:`rules` finds them.

A rule states what a driver must do, which behavior of the kubelet requires it, and how to verify
it:

    @rule("prepare-again", "a claim that is prepared again gets the same devices",
          why="a restarted kubelet prepares all claims of its pods again")
    async def prepare_again(kit: Kit) -> None:
        device, *_ = await kit.devices()
        claim = kit.claim(device)
        first = (await kit.prepare(claim))[claim.uid]
        again = (await kit.prepare(claim))[claim.uid]
        if again != first:
            kit.fail("the second prepare of a claim returned different devices")

Each rule gets a new kit, whose driver has started, registered and published devices. The kit cleans
up after the rule.

The rules do not depend on the internals of the kit: they use only its public names.
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
"""The time limit for a rule. Some rules start the node plugin several times."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule of the contract."""

    id: str
    """The rule ID in kebab case, such as ``prepare-again``. It selects the rule in commands, and
    names its test."""

    title: str
    """The requirement, as a sentence without a period."""

    why: str
    """The kubelet or cluster behavior that requires the rule."""

    check: Check
    """Raises if the driver violates the rule: `Kit.fail`, or an error of the kit itself."""

    kinds: frozenset[str] = frozenset({"python", "backend", "device-plugin"})
    """The kinds of targets that the rule applies to (`Target.kind`). For other kinds, the rule is
    skipped."""

    seconds: float = DEFAULT_SECONDS
    """The time limit for the check. It starts after the kit has started."""


def rule(
    id: str,
    title: str,
    *,
    why: str,
    kinds: Collection[str] = ("python", "backend", "device-plugin"),
    seconds: float = DEFAULT_SECONDS,
) -> Callable[[Check], Rule]:
    """Return a decorator that turns a check function into a rule."""

    def decorate(check: Check) -> Rule:
        return Rule(
            id=id, title=title, why=why, check=check, kinds=frozenset(kinds), seconds=seconds
        )

    return decorate


def rules() -> Sequence[Rule]:
    """Return the rules of all modules in this package, ordered by module name and then in
    definition order."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    return collect(import_module(f"{__name__}.{name}") for name in names)


def collect(modules: Iterable[ModuleType]) -> Sequence[Rule]:
    """Return the rules of modules. Raises ValueError if two have the same ID."""
    found: dict[str, Rule] = {}
    for module in modules:
        for value in vars(module).values():
            if not isinstance(value, Rule) or value.check.__module__ != module.__name__:
                continue
            if value.id in found:
                raise ValueError(f"there are two rules {value.id}")
            found[value.id] = value
    return tuple(found.values())
