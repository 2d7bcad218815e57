"""
Keeps the ResourceSlices of one driver on this node as its devices say.

It watches what the API server holds, so that slices which somebody else deletes (the kubelet wipes
its node's slices at its start) are back at once, and writes only what differs. What is to be
written is decided in :mod:`.desired`. Publishing never calls a driver.

It must not know gRPC, endpoints, claims or the checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable

from drakit.kube import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    NotFoundError,
    Session,
    resource_path,
)
from drakit.kube.reflector import Applied, Deleted, Reflector, Replaced
from drakit.resource.raw import Object, text
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.slices.desired import API_VERSION, Plan, PoolIdentity, plan

__all__ = ("SlicePublisher",)

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 0.2
"""From the first change to the write: a hub that is unplugged is one write."""

PACE_SECONDS = 1.0
"""Between two rounds of writes: devices that flap must not load the API server."""

RETRY_SECONDS = (1.0, 60.0)
"""First and longest delay after a failed write; it doubles in between, with jitter."""

SLICES = resource_path(API_VERSION, "resourceslices")


class SlicePublisher:
    """Publishes the pool of one driver."""

    def __init__(
        self,
        *,
        manager: DeviceManager,
        session: asyncio.Future[Session],
        node: str,
        primary: asyncio.Event,
    ) -> None:
        """While `primary` is not set another instance of the driver publishes: two with different
        configurations would undo each other's writes for as long as an update takes."""
        self._primary = primary
        self._manager = manager
        self._session = session
        self._node = node
        self._query = {"fieldSelector": f"spec.driver={manager.driver},spec.nodeName={node}"}
        self._stored: dict[str, Object] | None = None
        self._node_uid: str | None = None
        self.last_error: str | None = None
        """Why the last round failed; None after one that succeeded."""

    async def run(self) -> None:
        """Watch and write until cancelled."""
        session = await asyncio.shield(self._session)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(session))
            group.create_task(self._write(session))

    async def _watch(self, session: Session) -> None:
        reflector = Reflector(session, SLICES, params=self._query)
        async for change in reflector.changes():
            match change:
                case Replaced(items=items):
                    self._hold(items)
                case Applied(object=item) if self._stored is not None:
                    self._store(item)
                case Deleted(object=item) if self._stored is not None:
                    self._stored.pop(text(item, "metadata", "name"), None)
                    # The Node may have been deleted and made anew, which takes its slices along.
                    self._node_uid = None
                case _:
                    continue
            self._manager.changed.set()

    def _hold(self, items: Iterable[Object]) -> None:
        self._stored = {text(item, "metadata", "name"): item for item in items}

    def _store(self, body: Object) -> None:
        """Keep the newer of two: our own write is answered before the watch tells of it."""
        assert self._stored is not None
        name = text(body, "metadata", "name")
        old = self._stored.get(name)
        if old is None or _version(old) <= _version(body):
            self._stored[name] = body

    async def _write(self, session: Session) -> None:
        delay, longest = RETRY_SECONDS
        while True:
            await self._manager.changed.wait()
            await self._primary.wait()
            await asyncio.sleep(SETTLE_SECONDS)
            self._manager.changed.clear()
            try:
                wrote = await self._round(session)
            except ApiError as error:
                self.last_error = str(error)
                logger.warning(
                    "slices not published, trying again",
                    extra={
                        "driver": self._manager.driver,
                        "error": str(error),
                        "seconds": delay,
                    },
                )
                # Spread over time, or all nodes of a cluster return at the same moment.
                await asyncio.sleep(delay * random.uniform(0.8, 1.2))  # noqa: S311
                delay = min(delay * 2, longest)
                self._manager.changed.set()
                continue
            self.last_error = None
            delay = RETRY_SECONDS[0]
            if wrote:
                await asyncio.sleep(PACE_SECONDS - SETTLE_SECONDS)

    async def _round(self, session: Session) -> bool:
        """Write what differs; give whether anything was written."""
        devices = self._manager.devices
        if devices is None or self._stored is None:
            return False
        if self._node_uid is None:
            node = await session.get(resource_path("v1", "nodes", name=self._node))
            self._node_uid = text(node, "metadata", "uid")
        pool = PoolIdentity(driver=self._manager.driver, node=self._node, node_uid=self._node_uid)
        todo = plan(devices, pool=pool, stored=list(self._stored.values()))
        if todo.empty:
            return False
        await self._apply(session, todo)
        logger.info(
            "slices published",
            extra={
                "driver": self._manager.driver,
                "devices": len(devices),
                "creates": len(todo.create),
                "updates": len(todo.replace),
                "deletes": len(todo.delete),
            },
        )
        return True

    async def _apply(self, session: Session, todo: Plan) -> None:
        assert self._stored is not None
        try:
            for body in todo.delete:
                name = text(body, "metadata", "name")
                try:
                    await session.delete(
                        _path(name),
                        uid=text(body, "metadata", "uid"),
                        resource_version=text(body, "metadata", "resourceVersion"),
                    )
                except NotFoundError:
                    logger.debug("slice was deleted already", extra={"slice": name})
                self._stored.pop(name, None)
            for body in todo.replace:
                name = text(body, "metadata", "name")
                self._store(await session.replace(_path(name), body))
            for body in todo.create:
                self._store(await session.create(SLICES, body))
        except (ConflictError, AlreadyExistsError, NotFoundError):
            # What we hold is older than what the API server holds: look again at once.
            self._hold((await session.list(SLICES, params=self._query)).items)
            raise


def _path(name: str) -> str:
    return resource_path(API_VERSION, "resourceslices", name=name)


def _version(body: Object) -> int:
    """Compare versions of one object; they are integers that grow (KEP-5504)."""
    version = text(body, "metadata", "resourceVersion")
    return int(version) if version.isdigit() else 0
