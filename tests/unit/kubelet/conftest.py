from __future__ import annotations

import asyncio
import shutil
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from drakit_nodeplugin.claims.queue import ClaimQueue
from drakit_nodeplugin.kubelet.ownership import Ownership, socket_paths
from drakit_nodeplugin.kubelet.server import DriverServer
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
async def kubelet(root):
    async with FakeKubelet(root) as kubelet:
        yield kubelet


@pytest.fixture
def serve(root, claims):
    """Serve a driver within a block: ``async with serve() as server``; stopped at its end."""

    @asynccontextmanager
    async def serve(**options):
        paths = socket_paths(
            DRIVER, kubelet_root=root, instance_uid=options.pop("instance_uid", "pod-1")
        )
        ownership = Ownership(DRIVER, paths)
        server = DriverServer(
            ownership, ClaimQueue(DRIVER, claims), **{"drain_seconds": 2.0, **options}
        )
        try:
            await server.start()
            yield server
        finally:
            await server.stop()
            await asyncio.to_thread(ownership.release)

    return serve
