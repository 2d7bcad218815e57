"""A publisher on a virtual clock, with an API server without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from drakit_daemon.kube import UnavailableError, WatchEvent
from drakit_daemon.kube.listing import read_list
from drakit_daemon.kube.request import JsonResponse, error_of_status
from drakit_nodeplugin.slices.publisher import SlicePublisher
from tests.fakes.kube import FakeApiServer, StatusError, Target
from tests.unit.slices.world import NODE, FakeSource

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
NODES = "/api/v1/nodes"


@dataclass
class Link:
    """A session that reaches the objects of a fake API server without a network."""

    server: FakeApiServer
    seconds: float = 0.01  # the time for a response
    watch_seconds: float = 0.01  # until the watch reports a change
    writes: list[tuple[float, str, str]] = field(default_factory=list)  # when, method, name
    dry_runs: list[tuple[str, str]] = field(default_factory=list)  # method, name
    asked: list[tuple[str, str]] = field(default_factory=list)
    refuse: Callable[[str, str, Any], StatusError | None] = lambda method, path, body: None
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: body
    broken: bool = False

    async def ask(
        self, method: str, path: str, params: Mapping[str, str] | None = None, body: Any = None
    ) -> dict[str, Any]:
        await asyncio.sleep(self.seconds)
        self.asked.append((method, path))
        name = Target.parse(path).name if path.count("/") > 3 else ""
        if method != "GET":
            now = asyncio.get_running_loop().time()
            name = name or (body or {})["metadata"]["name"]
            if params and params.get("dryRun"):
                self.dry_runs.append((method, name))
            else:
                self.writes.append((now, method, name))
        try:
            if self.broken:
                raise StatusError(503, "ServiceUnavailable", "the server is unavailable")
            if (group := self.server._discovered(path)) is not None:
                return group
            if not self.server._serves(path):
                raise StatusError(404, "", "404 page not found")
            if (error := self.refuse(method, path, body)) is not None:
                raise error
            if body is not None and method in ("POST", "PUT"):
                body = self.change(body)
            return self.server.cluster.request(method, path, dict(params or {}), body)[1]
        except StatusError as error:
            raise error_of_status(error.body, method=method, path=path) from None

    async def get(self, path, *, params=None, timeout_seconds=None):
        return await self.ask("GET", path, params)

    async def read_list(self, path, keep, *, params=None, page_size=100):
        async def fetch(params, *, max_bytes, metadata_only):
            return JsonResponse(body=await self.ask("GET", path, params))

        return await read_list(fetch, keep, params=params or {}, page_size=page_size)

    async def create(self, path, body, *, dry_run=False, timeout_seconds=None):
        return await self.ask("POST", path, {"dryRun": "All"} if dry_run else None, body)

    async def replace(self, path, body, *, dry_run=False, timeout_seconds=None):
        return await self.ask("PUT", path, {"dryRun": "All"} if dry_run else None, body)

    async def delete(self, path, *, uid=None, resource_version=None, timeout_seconds=None):
        wanted = {"uid": uid, "resourceVersion": resource_version}
        return await self.ask("DELETE", path, body={"preconditions": wanted})

    async def watch(
        self, path: str, *, resource_version: str, params: Mapping[str, str] | None = None
    ) -> AsyncGenerator[WatchEvent]:
        self.asked.append(("WATCH", path))
        cluster, target, since = self.server.cluster, Target.parse(path), int(resource_version)
        if not self.server._serves(path):
            raise error_of_status(
                {"code": 404, "message": "404 page not found"}, method="WATCH", path=path
            )
        if since < cluster.oldest_version:
            raise error_of_status(
                StatusError(410, "Expired", "too old").body, method="WATCH", path=path
            )
        events: asyncio.Queue[Any] = asyncio.Queue()
        for change in cluster.history:
            if change.version > since:
                events.put_nowait(change)
        cluster.watchers.append(events)
        try:
            while (change := await events.get()) is not None:
                await asyncio.sleep(self.watch_seconds)
                event = change.event(target, dict(params or {}))
                if event is not None:
                    yield WatchEvent(type=event["type"], object=event["object"])
        finally:
            cluster.watchers.remove(events)
        raise UnavailableError.no_response("WATCH", path, why="the connection broke")


class Published:
    """A running publisher, and queries for its state."""

    def __init__(self, server: FakeApiServer, link: Link) -> None:
        self.server, self.link = server, link
        self.source = FakeSource()
        self.dropped: list[str] = []
        self.taken: list[str] = []
        self.rejected: list[dict[str, str]] = []
        self.measured: list[tuple[str, bool]] = []
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start a publisher; one that runs ends first."""
        await self.stop()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.set_result(self.link)
        self.publisher = SlicePublisher(
            manager=self.source,
            session=future,
            node=NODE,
            on_rejected=self.rejected.append,
            on_name_taken=self.taken.append,
            on_dropped=self.dropped.append,
            on_write=lambda verb, seconds, ok: self.measured.append((verb, ok)),
        )
        self.task = asyncio.create_task(self.publisher.run())

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})

    def new_writes(self) -> list[str]:
        """Return the methods of the writes since the last call."""
        methods = [method for _, method, _ in self.link.writes]
        self.link.writes.clear()
        return methods

    async def settled(self, seconds: float = 5) -> list[str]:
        """Wait; return the methods of the writes."""
        await asyncio.sleep(seconds)
        return self.new_writes()

    async def publish(self, pools: Any, *, seconds: float = 5, **options: Any) -> list[str]:
        """Let the source report these pools, and wait; return the methods of the writes."""
        self.source.publish(pools, **options)
        return await self.settled(seconds)

    def slices(self, path: str = SLICES) -> list[dict[str, Any]]:
        return self.server.objects(path)

    def devices(self) -> set[str]:
        return {each["name"] for body in self.slices() for each in body["spec"].get("devices", ())}

    def generations(self) -> set[int]:
        return {body["spec"]["pool"]["generation"] for body in self.slices()}


@pytest.fixture
async def published() -> AsyncIterator[Published]:
    """A running publisher whose source has not reported yet."""
    server = FakeApiServer()
    server.store(f"{NODES}/{NODE}", {"metadata": {"uid": "node-uid"}})
    made = Published(server, Link(server))
    await made.start()
    yield made
    await made.stop()
