"""
The only module that imports Kopf: without the client libraries that Kopf would import, and with a
source of ours in place of its discovery and its watch.

``import kopf`` imports kubernetes-asyncio, kubernetes and pykube if they are merely installed, to
offer their logins (Kopf 1.45): 40 MiB that are never used, because Kopf gets our own session.

Kopf's watch does not wait for handlers, so that its backlog has no bound (18 KiB an object at the
peak); it loses deletions between a watch and the next list; and an answer such as 401 or 404 ends
the operator. Both functions could stay if Kopf took a source of events as ``spawn_tasks`` takes its
memories.

It must not know what Kopf is used for.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

__all__ = ("Resource", "Source", "kopf", "run")

STOP_SECONDS = 2.0
"""Longest wait for Kopf's end."""

NOTIFY_SECONDS = 1.0
"""Pause between two looks of Kopf at what must be watched."""

_UNWANTED = ("kubernetes_asyncio", "kubernetes", "pykube")


@contextmanager
def _hidden(*names: str) -> Generator[None]:
    """Make imports of these packages fail within; what is already loaded stays loaded."""
    loaded = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(dict.fromkeys(names, None))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(loaded)


with _hidden(*_UNWANTED):
    import kopf
    from kopf._cogs.clients import scanning, watching
    from kopf._cogs.structs.references import Insights, Resource
    from kopf._core.reactor.inventory import ResourceMemories, ResourceMemory

_NAMESPACES = Resource(group="", version="v1", plural="namespaces", preferred=True)
"""Kopf does not start without it, although it serves all namespaces."""


class Source(Protocol):
    """Where Kopf's events come from."""

    @property
    def resources(self) -> Collection[Resource]:
        """The resources that have handlers, whether the cluster has them or not."""
        ...

    def events(self, resource: Resource) -> AsyncIterator[Mapping[str, Any]]:
        """
        Return the watch events of a resource, without end. It must not raise.

        Handlers get them as they are, with all of their keys. Kopf remembers nothing of objects
        that have ``metadata`` only.
        """
        ...


async def run(
    source: Source,
    registry: kopf.OperatorRegistry,
    *,
    on_started: Callable[[], None] = lambda: None,
) -> None:
    """Run Kopf with the handlers of a registry until canceled; raises what ended Kopf."""
    # Unused without peering. By default, Kopf asks for the user's name, and images have none.
    identity: Any = "drakit"
    insights = Insights()
    token = _source.set(source)
    try:
        # Not kopf.operator: at its end, that cancels all tasks of the loop, ours included.
        tasks = await kopf.spawn_tasks(
            registry=registry,
            memories=_Memories(),
            insights=insights,
            clusterwide=True,
            standalone=True,
            identity=identity,
        )
    finally:
        _source.reset(token)
    running = [*tasks, asyncio.create_task(_notify(insights), name="discovery of Kopf")]
    on_started()
    try:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=STOP_SECONDS)


async def _notify(insights: Insights) -> None:
    """Repeat what Kopf has found: without requests it finds it before it waits for it."""
    while True:
        async with insights.revised:
            insights.revised.notify_all()
        await asyncio.sleep(NOTIFY_SECONDS)


_source: ContextVar[Source] = ContextVar("_source")
"""The source of the Kopf to which a task belongs."""


class _Memories(ResourceMemories):
    """Remembers nothing of objects whose facts are in the store: 0.8 KiB each, without end."""

    async def recall(self, raw_body: Any, **options: Any) -> ResourceMemory:
        if raw_body.keys() == {"metadata"}:
            return ResourceMemory()
        return await super().recall(raw_body, **options)

    async def recall_memo(
        self, raw_body: Any, *, memobase: Any = None, ephemeral: bool = True
    ) -> Any:
        """Remember nothing of an object in an admission request: nobody reports its deletion."""
        return await super().recall_memo(raw_body, memobase=memobase, ephemeral=True)


async def _scan_resources(**_: Any) -> Collection[Resource]:
    return [*_source.get().resources, _NAMESPACES]


async def _infinite_watch(*, resource: Resource, **_: Any) -> AsyncIterator[Any]:
    async for event in _source.get().events(resource):
        yield event


scanning.scan_resources = _scan_resources
watching.infinite_watch = _infinite_watch
