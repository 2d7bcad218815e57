"""A driver's server in the test's loop, and the node plugin's endpoint that is its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from drakit import Driver
from drakit_driver.runtime.loading import LoadedDriver, load_driver
from drakit_driver.server import DriverServer, ServerNode
from tests.unit.endpoints.backend.conftest import endpoint, found, listener, quick, sockets
from tests.unit.endpoints.camera import NODE

__all__ = ("endpoint", "found", "listener", "quick", "sockets")


def loaded(
    driver: str | type[Driver[Any, Any]], values: Mapping[str, Any] | None = None
) -> tuple[LoadedDriver, ServerNode]:
    """Load a driver as the command line does."""
    node = ServerNode(NODE)
    reference = driver if isinstance(driver, str) else f"{driver.__module__}:{driver.__qualname__}"
    return load_driver(reference, values or {}, node=node, where="--driver", file="--config"), node


@asynccontextmanager
async def serving(
    driver: LoadedDriver, node: ServerNode, path: Path
) -> AsyncIterator[DriverServer]:
    """Serve a driver at a socket."""
    server = DriverServer(driver, node, path=path)
    await server.start()
    task = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        task.cancel()
        await asyncio.wait({task})
        await server.stop()
