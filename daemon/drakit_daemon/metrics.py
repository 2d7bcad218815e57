"""
The metric types of prometheus-client and the text format, without the client's HTTP servers.

A normal import of the package also imports modules such as the standard library's HTTP servers.
They take 1 MiB on every node, but are not needed, because :mod:`.probes` serves the metrics.
Therefore, the two required modules are imported below an empty package, and then removed from
``sys.modules``. If a vendor's driver imports the package, it gets the complete one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.samples import Sample

__all__ = ("CollectorRegistry", "Counter", "Gauge", "Histogram", "text_of")

_PACKAGE = "prometheus_client"


def _import(*names: str) -> list[Any]:
    """Import modules of the package without the package itself, unless it is already imported."""
    spec = None if _PACKAGE in sys.modules else find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return [import_module(f"{_PACKAGE}.{name}") for name in names]
    package = ModuleType(_PACKAGE)
    package.__path__ = spec.submodule_search_locations
    sys.modules[_PACKAGE] = package
    try:
        return [import_module(f"{_PACKAGE}.{name}") for name in names]
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
            del sys.modules[name]


if not TYPE_CHECKING:
    _registry, _metrics = _import("registry", "metrics")
    CollectorRegistry = _registry.CollectorRegistry
    Counter, Gauge, Histogram = _metrics.Counter, _metrics.Gauge, _metrics.Histogram


def text_of(registry: CollectorRegistry) -> bytes:
    """Return all metrics of a registry in Prometheus' text format."""
    lines: list[str] = []
    for metric in registry.collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        created_name = f"{metric.name}_created"
        samples = [each for each in metric.samples if each.name != created_name]
        created = [each for each in metric.samples if each.name == created_name]
        lines += _family(name, metric.type, metric.documentation, samples)
        if created:
            lines += _family(created_name, "gauge", metric.documentation, created)
    return "".join(f"{line}\n" for line in lines).encode()


def _family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> Iterable[str]:
    yield f"# HELP {name} {_escaped(text)}"
    yield f"# TYPE {name} {kind}"
    for sample in samples:
        labels = ",".join(
            f'{label}="{_escaped(value, quotes=True)}"'
            for label, value in sorted(sample.labels.items())
        )
        yield (
            f"{sample.name}{{{labels}}} {_number(sample.value)}"
            if labels
            else (f"{sample.name} {_number(sample.value)}")
        )


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text


def _number(value: float) -> str:
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(text := repr(float(value)), text)
