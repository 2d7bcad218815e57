from __future__ import annotations

import shutil
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from drakit_driver.runtime.order import Order
from drakit_nodeplugin.claims.queue import ClaimQueue
from drakit_nodeplugin.kubelet.server import DriverServer
from drakit_nodeplugin.kubelet.sockets import socket_paths
from tests.fakes.kubelet import FakeKubelet, HeldClaims

DRIVER = "camera.example.com"


@pytest.fixture
def root():
    """A kubelet root with a path that is short enough for sockets, which `tmp_path` may not be."""
    folder = Path(tempfile.mkdtemp(prefix="dk", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def claims() -> HeldClaims:
    return HeldClaims()


@pytest.fixture
def queue(claims) -> ClaimQueue:
    """The queue of the active instance."""
    return ClaimQueue(DRIVER, claims, order=Order())


@pytest.fixture
async def kubelet(root):
    async with FakeKubelet(root) as kubelet:
        yield kubelet


@pytest.fixture
def serve(root, queue):
    """Serve the driver of the active instance within a block: ``async with serve() as server``.
    With ``active=False``, another instance is active."""

    @asynccontextmanager
    async def serve(*, instance_uid="pod-1", active=True, health=None, **options):
        paths = socket_paths(DRIVER, kubelet_root=root, instance_uid=instance_uid)
        server = DriverServer(paths, reports_health=health is not None, **options)
        try:
            await server.start()
            if active:
                server.serve(queue, health)
            yield server
        finally:
            await server.stop()

    return serve
