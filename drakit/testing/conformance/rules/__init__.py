"""
The rules of the contract, a module a subject; :func:`rules` finds them.

They must not know how the kit is made: what it has in public is what they use.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Sequence
from importlib import import_module
from types import ModuleType

from drakit.testing.conformance.rule import Rule

__all__ = ("collect", "rules")


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
