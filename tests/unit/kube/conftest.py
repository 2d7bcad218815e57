from __future__ import annotations

import asyncio

from drakit_daemon.kube.request import error_of_status
from tests.fakes.kube import FakeCluster, StatusError


class ObjectSession:
    """A session on objects in memory, which counts its writes and can fail."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.writes: list[str] = []
        self.error: Exception | None = None

    async def ask(self, method, path, body=None, timeout_seconds=None):
        await asyncio.sleep(0.01)
        if method != "GET":
            self.writes.append(method)
        if self.error:
            raise self.error
        try:
            return self.cluster.request(method, path, {}, body)[1]
        except StatusError as error:
            raise error_of_status(error.body, method=method, path=path) from None

    async def get(self, path, *, timeout_seconds=None):
        return await self.ask("GET", path, None, timeout_seconds)

    async def create(self, path, body, *, timeout_seconds=None):
        return await self.ask("POST", path, body, timeout_seconds)

    async def replace(self, path, body, *, timeout_seconds=None):
        return await self.ask("PUT", path, body, timeout_seconds)

    async def patch(self, path, body, *, timeout_seconds=None):
        return await self.ask("PATCH", path, body, timeout_seconds)
