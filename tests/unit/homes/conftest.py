"""Fixtures: each home of a driver, and the Go driver of the suite."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest

from drakit import Inventory
from e2e.images.go import go_program
from tests.programs import WITHOUT_GO
from tests.unit.endpoints.backend.conftest import ANY, Found, allowed_backends, quick, sockets
from tests.unit.homes.homes import GO, HOMES, Home, at_home

__all__ = ("quick", "sockets")

MODULE = Path(__file__).parents[3] / "proto/go"

Start = Callable[[Inventory], AbstractAsyncContextManager[Home]]


@pytest.fixture(scope="session")
def program() -> Path:
    """The Go driver of the suite."""
    if WITHOUT_GO:
        pytest.skip(WITHOUT_GO)
    return go_program(MODULE / "testdata/scripted", name="scripted", imported=[MODULE])


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
