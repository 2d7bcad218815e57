"""
The class of a Python driver: which methods of the contract it defines.

What a class leaves out does nothing, and that cannot be seen from outside. It must not know rules,
or the node.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from drakit.driver import Driver
from drakit.testing.conformance.errors import ConformanceError
from drakit.testing.conformance.targets import PythonTarget, Target

__all__ = ("class_of", "defines")

GROUP = "drakit.drivers"


def class_of(target: Target) -> type[object] | None:
    """Give the class of a Python driver; None for others. Raises ConformanceError if this process
    cannot load it, as the node plugin's could."""
    if not isinstance(target, PythonTarget):
        return None
    try:
        found = _loaded(target.reference)
    except (Exception, SystemExit) as error:
        raise ConformanceError(f"{target.reference} cannot be loaded: {error}") from error
    return cast("type[object]", found) if isinstance(found, type) else None


def defines(kind: type[object], *methods: str) -> bool:
    """Tell whether a driver defines one of these methods itself, or inherits it of its own."""
    return any(getattr(kind, method) is not getattr(Driver, method) for method in methods)


def _loaded(reference: str) -> object:
    module, colon, attribute = reference.partition(":")
    if not colon:
        return next(p for p in entry_points(group=GROUP) if p.name == reference).load()
    # As the node plugin finds it: a driver that is being written is not installed.
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    return getattr(import_module(module), attribute)
