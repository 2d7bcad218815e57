"""
The only module that imports Kopf. It hides the client libraries that Kopf would import, and
replaces Kopf's discovery and watch with the operator's source of events.

``import kopf`` imports kubernetes-asyncio, kubernetes and pykube if they are installed, to offer
their logins (Kopf 1.45). That takes 40 MiB that are never used, because Kopf gets the operator's
session.

Kopf's watch has three problems. It does not wait for handlers, so its backlog is unbounded (18 KiB
per object at the peak). It loses deletions between a watch and the next list. A response such as
401 or 404 ends the operator. This replacement would be unnecessary if Kopf accepted a source of
events, as ``spawn_tasks`` accepts its memories.
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
"""How long to wait for Kopf to stop."""

NOTIFY_SECONDS = 1.0
"""How often Kopf is notified of the resources to watch."""

_UNWANTED = ("kubernetes_asyncio", "kubernetes", "pykube")


@contextmanager
def _hidden(*names: str) -> Generator[None]:
    """Make imports of these packages fail in the block. Packages that are already loaded stay
    loaded."""
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
"""Kopf does not start without the namespaces resource, even if it serves all namespaces."""


class Source(Protocol):
    """The source of Kopf's events."""

    @property
    def resources(self) -> Collection[Resource]:
        """The resources that have handlers, whether or not the cluster has them."""
        ...

    def events(self, resource: Resource) -> AsyncIterator[Mapping[str, Any]]:
        """
        Return the watch events of a resource, endlessly. Must not raise.

        Handlers get them unchanged, with all of their keys. Kopf stores nothing about objects that
        have only ``metadata``.
        """
        ...


async def run(
    source: Source,
    registry: kopf.OperatorRegistry,
    *,
    on_started: Callable[[], None] = lambda: None,
) -> None:
    """Run Kopf with the handlers of a registry until canceled. If Kopf fails, raise its error."""
    # The identity is unused without peering. By default, Kopf looks up the user's name, but images
    # do not have users.
    identity: Any = "drakit"
    insights = Insights()
    token = _source.set(source)
    try:
        # Don't use kopf.operator: when it ends, it cancels all tasks of the loop, including the
        # operator's.
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
    """Repeatedly notify Kopf of the found resources. Kopf finds them without requests, and
    therefore before it starts to wait for the notification."""
    while True:
        async with insights.revised:
            insights.revised.notify_all()
        await asyncio.sleep(NOTIFY_SECONDS)


_source: ContextVar[Source] = ContextVar("_source")
"""The source of the Kopf instance to which a task belongs."""


class _Memories(ResourceMemories):
    """Stores nothing about objects whose facts are in the store. By default, Kopf would keep 0.8
    KiB for each object forever."""

    async def recall(self, raw_body: Any, **options: Any) -> ResourceMemory:
        if raw_body.keys() == {"metadata"}:
            return ResourceMemory()
        return await super().recall(raw_body, **options)

    async def recall_memo(
        self, raw_body: Any, *, memobase: Any = None, ephemeral: bool = True
    ) -> Any:
        """Store nothing about an object in an admission request, because its deletion would not be
        reported."""
        return await super().recall_memo(raw_body, memobase=memobase, ephemeral=True)


async def _scan_resources(**_: Any) -> Collection[Resource]:
    return [*_source.get().resources, _NAMESPACES]


async def _infinite_watch(*, resource: Resource, **_: Any) -> AsyncIterator[Any]:
    async for event in _source.get().events(resource):
        yield event


scanning.scan_resources = _scan_resources
watching.infinite_watch = _infinite_watch
