"""Fixtures: each home of a driver, and the Go driver of the suite."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest

from drakit import Inventory
from e2e.images.go import ENVIRONMENT
from tests.unit.endpoints.backend.conftest import ANY, Found, allowed_backends, quick, sockets
from tests.unit.homes.homes import GO, HOMES, Home, at_home
from tools.programs import go_is_there

__all__ = ("quick", "sockets")

MODULE = Path(__file__).parents[3] / "proto/go"

Start = Callable[[Inventory], AbstractAsyncContextManager[Home]]


@pytest.fixture(scope="session")
def program(tmp_path_factory) -> Path:
    """The Go driver of the suite."""
    if not go_is_there():
        pytest.skip(
            "the driver of the Go module needs Go: install it as https://go.dev/doc/install says"
        )
    built = tmp_path_factory.mktemp("go") / "scripted"
    build = ["go", "build", "-o", built, "./testdata/scripted"]
    subprocess.run(build, cwd=MODULE, check=True, timeout=600, env=os.environ | ENVIRONMENT)
    return built


@pytest.fixture
async def found(sockets, quick) -> Found:
    """Watched directories of backends, with an entry that permits all that an entry can."""
    entry = {
        **ANY,
        "netDevices": ["eth*"],
        "cdiDevices": ["vendor.example/class"],
        "additionalGids": [44],
    }
    return Found(sockets.parent, allowed_backends(gpu=entry))


@pytest.fixture(params=HOMES)
def kind(request) -> str:
    return request.param


@pytest.fixture
async def start(kind, found, request) -> Start:
    """Start a driver in its home, with the devices that it lists first."""
    program = request.getfixturevalue("program") if kind == GO else None
    return partial(at_home, kind, found=found, program=program)
