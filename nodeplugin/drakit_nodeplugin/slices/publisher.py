"""
Keeps the ResourceSlices of one driver on this node as its devices say.

It watches what the API server holds, so that slices which somebody else deletes (the kubelet wipes
its node's slices at its start) are back at once, and writes only what differs. What is to be
written is decided in :mod:`.plan`, and when in :mod:`.pool_publisher`, for each pool alone.
Publishing never calls a driver.

It must not know gRPC, endpoints, claims or the checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping

from drakit.kube import Session, resource_path
from drakit.kube.reflector import Applied, Deleted, Reflector, Replaced
from drakit.resource.features import Feature
from drakit_nodeplugin.devices.pools import short_pool
from drakit_nodeplugin.slices.api import OnWrite, SliceApi
from drakit_nodeplugin.slices.contents import describe
from drakit_nodeplugin.slices.pool_publisher import (
    PACE_SECONDS,
    SETTLE_SECONDS,
    PoolPublisher,
    in_words,
)
from drakit_nodeplugin.slices.store import SliceStore
from drakit_nodeplugin.slices.stored import StoredSlice
from drakit_nodeplugin.slices.surroundings import PublicationSource, Surroundings
from drakit_nodeplugin.slices.taintcheck import TaintCheck

__all__ = ("PublicationSource", "SlicePublisher")

logger = logging.getLogger(__name__)

FORGET_SECONDS = 600.0
"""What the API server drops is tried again when the watch has to begin anew, as the server may be
a newer one; but not more often than this, since it costs writes."""


class SlicePublisher:
    """Publishes all pools of one driver."""

    def __init__(
        self,
        *,
        source: PublicationSource,
        session: asyncio.Future[Session],
        node: str,
        primary: asyncio.Event,
        on_first_list: Callable[[Collection[StoredSlice]], None],
        on_pools: Callable[[Collection[str]], None],
        on_left_out: Callable[[Mapping[str, str]], None],
        on_dropped: Callable[[str], None] | None = None,
        on_write: OnWrite | None = None,
    ) -> None:
        """While `primary` is not set another instance of the driver publishes: two with different
        configurations would undo each other's writes for as long as an update takes.
        `on_first_list` is told what was published before, before the source is asked for anything;
        `on_pools` which pools the API server holds, whenever that or what is wanted changes;
        `on_left_out` why devices are newly not published, as in `left_out`; `on_dropped` once, in a
        sentence, what of devices it drops."""
        self._source = source
        self._session = session
        self._node = node
        self._primary = primary
        self._on_first_list = on_first_list
        self._on_pools = on_pools
        self._on_left_out = on_left_out
        self._on_dropped = on_dropped
        self._on_write = on_write
        self._store = SliceStore()
        self._pools: dict[str, PoolPublisher] = {}
        self._reflector: Reflector | None = None
        self._dropped: frozenset[Feature] = frozenset()
        self._reported: frozenset[Feature] = frozenset()
        self._taints = TaintCheck()
        self._forgot_at: float | None = None

    # ------------------------------------------------------------ what probes and metrics ask

    @property
    def listed(self) -> bool:
        """Whether the API server has told once what it holds."""
        return self._store.listed.is_set()

    @property
    def dropped(self) -> frozenset[Feature]:
        """What of devices the API server is known to drop."""
        return self._dropped

    @property
    def left_out(self) -> Mapping[str, str]:
        """Why devices are not published though they are wanted, by ``pool/device`` in the driver's
        words; those of the pool with the node's name by their names alone."""
        left_out: dict[str, str] = {}
        for pool in self._pools.values():
            left_out |= in_words(short_pool(self._node, pool.name), pool.left_out)
        return left_out

    @property
    def last_error(self) -> str | None:
        """Why slices are not as they are to be, as of the last attempts; None if all went well."""
        if not self.listed and self._reflector is not None:
            return None if (error := self._reflector.last_error) is None else str(error)
        errors = {name: each.last_error for name, each in sorted(self._pools.items())}
        return "; ".join(f"pool {name}: {text}" for name, text in errors.items() if text) or None

    # ------------------------------------------------------------ running

    async def run(self) -> None:
        """Watch and write until cancelled."""
        session = await asyncio.shield(self._session)
        api = SliceApi(
            session, driver=self._source.driver, node=self._node, on_write=self._on_write
        )
        owner = _Node(session, self._node)
        surroundings = Surroundings(
            source=self._source,
            node=self._node,
            owner=owner,
            api=api,
            store=self._store,
            primary=self._primary,
            dropped=lambda: self._dropped,
            on_dropped=self._drops,
            taints=self._taints,
            on_left_out=self._on_left_out,
        )
        async with asyncio.TaskGroup() as group:

            def find(names: Collection[str]) -> None:
                for name in names:
                    if name not in self._pools:
                        pool = self._pools[name] = PoolPublisher(name, surroundings)
                        group.create_task(self._publish(pool, find))

            group.create_task(self._watch(api, owner, find))
            group.create_task(self._wake())
            group.create_task(self._find(find))

    async def _publish(self, pool: PoolPublisher, find: Callable[[Collection[str]], None]) -> None:
        await pool.run()
        del self._pools[pool.name]
        # It may be wanted again since its last look, found while it was still here, and not woken.
        find({pool.name} & self._source.publication().pools.keys())

    async def _wake(self) -> None:
        """Tell the pools of each change; they know when they look."""
        seen = self._source.revision.number
        while True:
            seen = await self._source.revision.after(seen)
            for pool in self._pools.values():
                pool.wake()
            if self.listed:
                self._on_pools(self._store.pools())

    async def _find(self, find: Callable[[Collection[str]], None]) -> None:
        """Look for new pools."""
        await self._store.listed.wait()
        while True:
            seen = self._source.revision.number
            find(self._source.publication().pools)
            await asyncio.sleep(PACE_SECONDS - SETTLE_SECONDS)
            await self._source.revision.after(seen)
            await asyncio.sleep(SETTLE_SECONDS)

    async def _watch(
        self, api: SliceApi, owner: _Node, find: Callable[[Collection[str]], None]
    ) -> None:
        self._reflector = Reflector(api, "resourceslices")
        async for change in self._reflector.changes():
            match change:
                case Replaced(items=items):
                    again = self.listed
                    slices: list[StoredSlice] = [item["slice"] for item in items]
                    if not again:
                        self._on_first_list(slices)
                    if self._store.hold(slices):
                        owner.forget()
                    find(self._store.pools())
                    for pool in self._pools.values():
                        pool.wake()
                    if again:
                        self._forget()
                case Applied(object=item):
                    new: StoredSlice = item["slice"]
                    if self._store.apply(new):
                        find({new.pool})
                        self._pools[new.pool].wake()
                case Deleted(object=item):
                    gone: StoredSlice = item["slice"]
                    if self._store.remove(gone.name, gone.uid) is not None:
                        # The Node may have been deleted and made anew, which takes its slices.
                        owner.forget()
                        if (pool := self._pools.get(gone.pool)) is not None:
                            pool.wake()
            self._on_pools(self._store.pools())

    # ------------------------------------------------------------ what the API server drops

    def _drops(self, features: Collection[Feature]) -> bool:
        """Take in what an answer lacks; tell whether something else is to be published now."""
        new = frozenset(features) - self._dropped
        if not new:
            return False
        self._dropped |= new
        if unreported := new - self._reported:
            self._reported |= unreported
            note = (
                f"the API server does not support {describe(unreported)} of devices; the node "
                f"plugin publishes the affected devices without them, publishes the driver's "
                f"fallback, or leaves the devices out"
            )
            logger.warning(
                "fields of slices are dropped",
                extra={"driver": self._source.driver, "error": note},
            )
            if self._on_dropped is not None:
                self._on_dropped(note)
        if all(feature is Feature.OTHER for feature in new):
            return False  # there is nothing to do about it
        for pool in self._pools.values():
            pool.forget()
        return True

    def _forget(self) -> None:
        """The watch began anew: the API server may be another one."""
        self._taints.forget()
        now = asyncio.get_running_loop().time()
        if self._forgot_at is not None and now - self._forgot_at < FORGET_SECONDS:
            return
        self._forgot_at = now
        self._dropped = frozenset()
        for pool in self._pools.values():
            pool.forget()


class _Node:
    """Our Node, as far as its UID: it is the owner of our slices."""

    def __init__(self, session: Session, name: str) -> None:
        self._session = session
        self._path = resource_path("v1", "nodes", name=name)
        self._uid: str | None = None
        self._reading = asyncio.Lock()
        self._reads = 0

    def forget(self) -> None:
        self._uid = None

    async def uid(self, *, again: bool = False) -> str:
        reads = self._reads
        async with self._reading:  # many pools ask at once
            if self._uid is None or (again and self._reads == reads):
                node = await self._session.get(self._path)
                self._uid = str(node["metadata"]["uid"])
                self._reads += 1
            return self._uid
