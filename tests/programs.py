"""
Programs in Go that tests run, made from the pinned modules of this repository.

A program that happens to be on the PATH or in a cache is never used: only Go itself, of the version
that the modules need, and what a target of make has built from this checkout.
"""

from __future__ import annotations

import pytest

from e2e.cluster.api import ClusterError
from e2e.cluster.local import binaries
from e2e.images.prometheus import prometheus_program


def _without_go() -> str:
    """Return the reason why no program can be built here, or an empty string."""
    try:
        binaries.go_version()
    except ClusterError as error:
        return str(error)
    return ""


WITHOUT_GO = _without_go()

needs_go = pytest.mark.skipif(bool(WITHOUT_GO), reason=WITHOUT_GO)
"""For tests that build a program from a module of this repository."""


def helm() -> str:
    """Return the path of helm, as the test clusters have it; skip the test if it is not built."""
    if WITHOUT_GO:
        pytest.skip(WITHOUT_GO)
    built = (binaries.programs_folder(minor=minor) / "helm" for minor in binaries.minors())
    found = next((program for program in built if program.is_file()), None)
    if found is None:
        pytest.skip("this checkout has no helm yet: `make cluster-programs` builds it")
    return str(found)


def promtool() -> str:
    """Return the path of promtool; it is built if it is not in the cache. Skip the test without
    Go."""
    if WITHOUT_GO:
        pytest.skip(WITHOUT_GO)
    return str(prometheus_program("promtool"))
