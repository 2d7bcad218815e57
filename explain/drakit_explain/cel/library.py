"""
Evaluates selectors with a Python library, if the helper program is not installed.

The library (``cel-expr-python``, a binding of Google's C++ CEL) does not have Kubernetes'
extensions: quantities, semantic versions and its string functions. An expression that needs them is
reported as *not evaluated*. The same applies if the library returns an error that Kubernetes might
not return.

Does not depend on slices or claims.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from cel_expr_python import cel  # pyright: ignore[reportMissingTypeStubs]
from cel_expr_python.ext import ext_bindings  # pyright: ignore[reportMissingTypeStubs]

from drakit_explain.selectors import FeatureGates, Reads, SelectorResult

NEEDS_KUBERNETES = "needs Kubernetes' own CEL compiler; install drakit-cel"

_SHAREABLE = "allowMultipleAllocations"
_INDEX = re.compile(r"""\[\s*(?:"([^"\\]*)"|'([^'\\]*)')\s*\]""")
_MISSING_KEY = re.compile(r"[Kk]ey not found.*?[\"']?([\w./-]+)[\"']?$")


class Library:
    """Evaluates selectors in this process."""

    def __init__(self) -> None:
        self._environment = cel.NewEnv(
            variables={"device": cel.Type.DYN}, extensions=[ext_bindings.ExtBindings()]
        )
        self._compile = lru_cache(maxsize=512)(self._compiled)
        self._gates = FeatureGates()

    def use(self, gates: FeatureGates) -> None:
        """Evaluate with these feature gates from now on. Regardless of the gates, the library does
        not support list attributes."""
        if gates != self._gates:
            self._gates = gates
            self._compile.cache_clear()

    def reads(self, expressions: Sequence[str], **_: float) -> list[Reads]:
        """Return all fields of a device for each expression, because the library does not report
        which fields an expression reads."""
        return [Reads(everything=True) for _ in expressions]

    def select(
        self, expression: str, devices: Sequence[Mapping[str, Any]], **_: float
    ) -> list[SelectorResult]:
        """Evaluate an expression for each device."""
        program = self._compile(expression)
        if program is None:
            return [SelectorResult(unknown=NEEDS_KUBERNETES)] * len(devices)
        domains = {one or other for one, other in _INDEX.findall(expression)}
        return [self._select(program, _variables(device, domains)) for device in devices]

    def close(self) -> None:
        """Do nothing: the library has no process to stop."""

    def _compiled(self, expression: str) -> Any:
        if not self._gates.consumable_capacity and _SHAREABLE in expression:
            # Kubernetes does not have this field then, so its compiler rejects the expression.
            return None
        try:
            return self._environment.compile(expression)
        except Exception:  # the library does not define an error class
            return None

    def _select(self, program: Any, variables: Mapping[str, Any] | None) -> SelectorResult:
        if variables is None:
            return SelectorResult(unknown=NEEDS_KUBERNETES)
        try:
            result = program.eval(data={"device": variables})
            value = result.plain_value()
            kind = str(result.type().name())
        except Exception as error:
            return SelectorResult(unknown=f"{NEEDS_KUBERNETES} ({error})")
        if isinstance(value, bool):
            return SelectorResult(selected=value)
        found = _MISSING_KEY.search(str(value))
        if found is not None:
            return SelectorResult(error=f"no such key: {found[1]}")
        return SelectorResult(unknown=f"{NEEDS_KUBERNETES} (result of type {kind})")


def _variables(device: Mapping[str, Any], domains: set[str]) -> Mapping[str, Any] | None:
    """Build the variable ``device``, or return None if it has values that the library does not
    support."""
    driver = device["driver"]
    # An unknown domain is an empty map, as in Kubernetes.
    attributes: dict[str, dict[str, Any]] = {domain: {} for domain in domains}
    for name, typed in device["attributes"].items():
        domain, identifier = _split(name, driver)
        value = _value(typed)
        if value is None:
            return None
        attributes.setdefault(domain, {})[identifier] = value
    capacity: dict[str, dict[str, Any]] = {domain: {} for domain in domains}
    for name, typed in device["capacity"].items():
        domain, identifier = _split(name, driver)
        capacity.setdefault(domain, {})[identifier] = _opaque(typed["value"])
    return {
        "driver": driver,
        _SHAREABLE: device[_SHAREABLE],
        "attributes": attributes,
        "capacity": capacity,
    }


def _split(name: str, driver: str) -> tuple[str, str]:
    domain, slash, identifier = name.partition("/")
    return (domain, identifier) if slash else (driver, name)


def _value(typed: Mapping[str, Any]) -> Any:
    if "version" in typed:
        return _opaque(typed["version"])
    return next((typed[kind] for kind in ("string", "int", "bool") if kind in typed), None)


def _opaque(value: str) -> bytes:
    """Return a value that, like a quantity or version, does not equal any string. It does not
    support any functions."""
    return value.encode()
