"""Many nodes' publishers start at once at an API server that rejects most of their requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest

from drakit_nodeplugin.slices.publisher import SlicePublisher
from tests.fakes.kube import FakeApiServer, StatusError
from tests.fakes.tasks import running
from tests.unit.slices.conftest import NODES, SLICES, Link
from tests.unit.slices.world import FakeSource, many, pool

pytestmark = pytest.mark.looptime

NODE_NAMES = [f"node-{number}" for number in range(20)]
DEVICES = 150
SLICES_PER_NODE = 3
PER_SECOND = 5
"""Requests that the API server answers in a second; it rejects the others with 429."""


class Throttled(Link):
    """A link whose API server answers a few requests per second, and rejects all others."""

    rejected: int = 0

    def throttle(self) -> None:
        answered: Counter[int] = Counter()

        def refuse(method: str, path: str, body: Any) -> StatusError | None:
            second = int(asyncio.get_running_loop().time())
            answered[second] += 1
            if answered[second] <= PER_SECOND:
                return None
            self.rejected += 1
            return StatusError(429, "TooManyRequests", "too many requests, please try again later")

        self.refuse = refuse


def publisher(link: Link, node: str) -> SlicePublisher:
    source = FakeSource()
    source.publish({node: pool(*many(DEVICES))})
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_result(link)
    return SlicePublisher(
        manager=source,  # pyright: ignore[reportArgumentType]
        session=future,
        node=node,
        on_rejected=lambda devices: None,
        on_name_taken=lambda text: None,
        on_dropped=lambda text: None,
        on_write=lambda verb, seconds, ok: None,
    )


def complete(server: FakeApiServer) -> set[str]:
    """Return the nodes whose pool has all its slices and devices, of one generation."""
    found: dict[str, list[dict[str, Any]]] = {}
    for body in server.objects(SLICES):
        found.setdefault(body["spec"]["nodeName"], []).append(body["spec"])
    return {
        node
        for node, specs in found.items()
        if len(specs) == SLICES_PER_NODE
        and {spec["pool"]["resourceSliceCount"] for spec in specs} == {SLICES_PER_NODE}
        and len({spec["pool"]["generation"] for spec in specs}) == 1
        and sum(len(spec["devices"]) for spec in specs) == DEVICES
    }


async def test_every_node_has_all_its_slices_after_a_restart_in_which_they_were_deleted():
    server = FakeApiServer()
    for node in NODE_NAMES:
        server.store(f"{NODES}/{node}", {"metadata": {"uid": f"{node}-uid"}})
    for wiped in (False, True):
        link = Throttled(server)
        link.throttle()
        async with AsyncExitStack() as stack:
            for node in NODE_NAMES:
                await stack.enter_async_context(running(publisher(link, node).run()))
            if wiped:
                # As kubelets do when they start: some plugins have seen their slices by then.
                for number, body in enumerate(list(server.objects(SLICES))):
                    server.remove(f"{SLICES}/{body['metadata']['name']}")
                    if number % 10 == 0:
                        await asyncio.sleep(0.5)
            await asyncio.sleep(600)
            assert complete(server) == set(NODE_NAMES)
        assert link.rejected > len(NODE_NAMES)
        verbs = Counter(method for _, method, _ in link.writes)
        assert verbs["POST"] >= len(NODE_NAMES) * SLICES_PER_NODE
