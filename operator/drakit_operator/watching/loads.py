"""
Follows the pods that have a node, for what they request of it: :mod:`drakit.explain.loads`.

This watch goes past Kopf, which has one watch for a kind, and keeps a task and a memory for each
object: most of a cluster's pods neither use devices nor wait. A list in intervals would read all
pods again each time, or be outdated. Here the API server sends each pod once, and then its changes.

It must not know what is explained, or which pods wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from drakit.explain.loads import Load, Loads, load_of_pod
from drakit.kube import Listing, WatchEvent
from drakit.kube.reflector import Applied, Deleted, Reflector, Replaced
from drakit.resource.raw import Object, child, children

__all__ = ("LoadWatch", "Session")

logger = logging.getLogger(__name__)

PODS = "/api/v1/pods"
ON_NODES = {"fieldSelector": "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"}

OUTDATED_SECONDS = 180.0
"""If the watch sends nothing for this long, loads are unknown: bookmarks arrive every minute."""

TURN = 500
"""Pods that are projected in one turn of the loop."""

_OF_SPEC = ("nodeName", "priority", "overhead", "resources")
_OF_CONTAINER = ("resources", "restartPolicy")

Kept = TypeVar("Kept")


class Session(Protocol):
    """The used part of a session."""

    async def read_list(
        self,
        path: str,
        keep: Callable[[dict[str, Any]], Kept],
        *,
        params: Mapping[str, str] | None = None,
    ) -> Listing[Kept]: ...

    def watch(
        self, path: str, *, resource_version: str, params: Mapping[str, str] | None = None
    ) -> AsyncGenerator[WatchEvent]: ...


class LoadWatch:
    """Keeps loads up to date."""

    def __init__(self, session: Session) -> None:
        self._reflector = Reflector(_ReducedPods(session), PODS, params=ON_NODES)
        self.loads = Loads(self._is_current)

    def _is_current(self) -> bool:
        return self._reflector.synced and self._reflector.silent_seconds() < OUTDATED_SECONDS

    async def run(self) -> None:
        """Follow the pods until canceled; errors are retried without end."""
        async for change in self._reflector.changes():
            match change:
                case Replaced(items=items):
                    self.loads.replace(await _loads(items))
                case Applied(object=body):
                    if (load := _load(body)) is not None:
                        self.loads.apply(load)
                case Deleted(object=body):
                    self.loads.remove(str(child(body, "metadata").get("uid")))


class _ReducedPods:
    """Pods with the used fields only, so that a list of thousands is never in memory."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.watch = session.watch

    async def list(
        self, path: str, *, params: Mapping[str, str] | None = None
    ) -> Listing[dict[str, Any]]:
        return await self._session.read_list(path, _reduced, params=params)


def _reduced(body: Object) -> dict[str, Any]:
    spec = child(body, "spec")
    containers = {
        kind: [
            {key: each[key] for key in _OF_CONTAINER if key in each}
            for each in children(spec, kind)
        ]
        for kind in ("containers", "initContainers")
    }
    return {
        "metadata": {"uid": child(body, "metadata").get("uid")},
        "spec": {**{key: spec[key] for key in _OF_SPEC if key in spec}, **containers},
    }


async def _loads(pods: Sequence[Object]) -> list[Load]:
    """Project all pods, in turns: thousands take longer than a probe waits."""
    loads: list[Load] = []
    for number, each in enumerate(pods):
        if number % TURN == 0:
            await asyncio.sleep(0)
        if (load := _load(each)) is not None:
            loads.append(load)
    return loads


def _load(body: Object) -> Load | None:
    """Project a pod; one that cannot be read counts as one that requests nothing."""
    try:
        return load_of_pod(body)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        logger.debug("requests of a pod cannot be read", extra={"error": repr(error)})
        return None
