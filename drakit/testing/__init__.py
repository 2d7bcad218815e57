"""
A test kit for drivers: a fake kubelet, a fake API server, and the rules of the driver contract::

    from drakit.testing import conformance_tests

    test_conformance = conformance_tests("my_pkg:MyDriver", config={"directory": "{root}/cameras"})

The names here are public, and the modules below are internal. Names are loaded on first use. The
package requires the extra ``drakit[testing]``. Code that runs on a node must not import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drakit.testing.apiserver import FakeApiServer as FakeApiServer
    from drakit.testing.conformance.kit import Kit as Kit
    from drakit.testing.conformance.kit import open_kit as open_kit
    from drakit.testing.conformance.targets import parse_target as parse_target
    from drakit.testing.kubelet import FakeKubelet as FakeKubelet
    from drakit.testing.suite import conformance_tests as conformance_tests

_HOMES = {
    "FakeApiServer": "drakit.testing.apiserver",
    "FakeKubelet": "drakit.testing.kubelet",
    "Kit": "drakit.testing.conformance.kit",
    "conformance_tests": "drakit.testing.suite",
    "open_kit": "drakit.testing.conformance.kit",
    "parse_target": "drakit.testing.conformance.targets",
}

__all__ = ("FakeApiServer", "FakeKubelet", "Kit", "conformance_tests", "open_kit", "parse_target")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
