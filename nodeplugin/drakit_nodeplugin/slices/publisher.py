"""
Publishes the devices of one driver on this node as ResourceSlices.

It watches the slices at the API server, and restores slices that another client deletes. (The
kubelet deletes the slices of its node at its start.) One :mod:`.pool_publisher` runs for each pool.
Publishing never calls a driver.

It must not know gRPC, endpoints, claims or the checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping

from drakit.kube import Session
from drakit.kube.reflector import Applied, Deleted, Reflector, Replaced
from drakit.resource.features import Feature
from drakit.resource.pools import short_pool
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.slices.api import NodeOwner, OnWrite, SliceApi, SliceStore, slice_of
from drakit_nodeplugin.slices.contents import StoredSlice, describe, effects
from drakit_nodeplugin.slices.pool_publisher import (
    PACE_SECONDS,
    SETTLE_SECONDS,
    PoolContext,
    PoolPublisher,
    qualified,
)

__all__ = ("SlicePublisher",)

logger = logging.getLogger(__name__)

FORGET_SECONDS = 600.0
"""Minimum time between two retries of dropped fields, which cost writes. When the watch restarts,
the API server may be a newer one."""


class SlicePublisher:
    """Publishes all pools of one driver."""

    def __init__(
        self,
        *,
        manager: DeviceManager,
        session: asyncio.Future[Session],
        node: str,
        on_first_list: Callable[[Collection[StoredSlice]], None],
        on_pools: Callable[[Collection[str]], None],
        on_left_out: Callable[[Mapping[str, str]], None],
        on_name_taken: Callable[[str], None],
        on_dropped: Callable[[str], None],
        on_write: OnWrite,
    ) -> None:
        """
        `on_first_list` receives the slices that were published before, and is called before the
        manager is; `on_pools` the pools that the API server holds, whenever these or the desired
        ones change; `on_left_out` the reasons for devices that are newly not published, as in
        `left_out`; `on_name_taken` a sentence on an object that has the name of one of our slices;
        `on_dropped` a sentence on the fields that the API server drops, once.
        """
        self._manager = manager
        self._session = session
        self._node = node
        self._on_first_list = on_first_list
        self._on_pools = on_pools
        self._on_left_out = on_left_out
        self._on_name_taken = on_name_taken
        self._on_dropped = on_dropped
        self._on_write = on_write
        self._store = SliceStore()
        self._pools: dict[str, PoolPublisher] = {}
        self._reflector: Reflector[StoredSlice] | None = None
        self._dropped: frozenset[Feature] = frozenset()
        self._reported: frozenset[Feature] = frozenset()
        self._taints_kept = asyncio.Event()
        self._forgot_at = float("-inf")

    # ------------------------------------------------------------ for probes and metrics

    @property
    def listed(self) -> bool:
        """Whether the API server has listed its slices once."""
        return self._store.listed.is_set()

    @property
    def dropped(self) -> frozenset[Feature]:
        """The features of devices that the API server is known to drop."""
        return self._dropped

    @property
    def published_count(self) -> int:
        """The number of devices that the API server holds."""
        return self._store.device_count

    @property
    def left_out(self) -> Mapping[str, str]:
        """The reasons why desired devices are not published, by ``pool/device`` with the driver's
        pool names; devices of the pool with the node's name by their names alone."""
        left_out: dict[str, str] = {}
        for pool in self._pools.values():
            left_out |= qualified(short_pool(self._node, pool.name), pool.left_out)
        return left_out

    @property
    def last_error(self) -> str | None:
        """The reason why slices are not in the desired state, as of the last attempts; None if
        nothing failed."""
        if not self.listed and self._reflector is not None:
            return None if (error := self._reflector.last_error) is None else str(error)
        errors = {name: each.last_error for name, each in sorted(self._pools.items())}
        return "; ".join(f"pool {name}: {text}" for name, text in errors.items() if text) or None

    # ------------------------------------------------------------ running

    async def run(self) -> None:
        """Watch and write until canceled."""
        session = await asyncio.shield(self._session)
        api = SliceApi(
            session, driver=self._manager.driver, node=self._node, on_write=self._on_write
        )
        owner = NodeOwner(session, self._node)
        context = PoolContext(
            manager=self._manager,
            node=self._node,
            owner=owner,
            api=api,
            store=self._store,
            dropped=lambda: self._dropped,
            on_dropped=self._drops,
            taints_kept=self._taints_kept,
            on_name_taken=self._on_name_taken,
            on_left_out=self._on_left_out,
        )
        async with asyncio.TaskGroup() as group:

            def find(names: Collection[str], settle_seconds: float = SETTLE_SECONDS) -> None:
                """Publish these pools too."""
                for name in names:
                    if name not in self._pools:
                        pool = self._pools[name] = PoolPublisher(name, context)
                        group.create_task(self._publish(pool, settle_seconds))

            group.create_task(self._watch(api, owner, find))
            group.create_task(self._wake())
            group.create_task(self._find(find))

    async def _publish(self, pool: PoolPublisher, settle_seconds: float) -> None:
        await pool.run(settle_seconds)
        del self._pools[pool.name]

    async def _wake(self) -> None:
        """Wake the pools at each change; each has its own pace."""
        seen = self._manager.revision.number
        while True:
            seen = await self._manager.revision.after(seen)
            self._wake_all()
            if self.listed:
                self._on_pools(self._store.pools())

    async def _find(self, find: Callable[[Collection[str]], None]) -> None:
        """Publish new pools. They share one rate limit: a backend may keep renaming its pools."""
        seen = self._manager.revision.number
        while True:
            seen = await self._manager.revision.after(seen)
            if self.listed:
                find(self._manager.publication().pools)
                await asyncio.sleep(PACE_SECONDS)

    def _wake_all(self) -> None:
        for pool in self._pools.values():
            pool.wake()

    async def _watch(self, api: SliceApi, owner: NodeOwner, find: Callable[..., None]) -> None:
        self._reflector = Reflector(api, "resourceslices", keep=slice_of)
        async for change in self._reflector.changes():
            match change:
                case Replaced(items=items):
                    again = self.listed
                    if not again:
                        self._on_first_list(items)
                    if self._store.replace_all(items):
                        owner.forget()
                    self._wake_all()
                    if again:
                        find(self._store.pools())
                        self._forget()
                    else:
                        find(self._store.pools() | self._manager.publication().pools.keys(), 0.0)
                case Applied(object=new):
                    if self._store.apply(new):
                        find({new.pool})
                        self._pools[new.pool].wake()
                case Deleted(object=gone):
                    if self._store.remove(gone.name, gone.uid):
                        owner.forget()
                        if (pool := self._pools.get(gone.pool)) is not None:
                            pool.wake()
            self._on_pools(self._store.pools())

    # ------------------------------------------------------------ dropped fields

    def _drops(self, features: Collection[Feature]) -> bool:
        """Record the features that an answer lacks; return whether this invalidates plans."""
        new = frozenset(features) - self._dropped
        if not new:
            return False
        self._dropped |= new
        if unreported := new - self._reported:
            self._reported |= unreported
            pools = self._manager.publication().pools.values()
            note = (
                f"the API server does not support {describe(unreported)}; "
                f"{effects(unreported, pools)}"
            )
            logger.warning(
                "the API server drops fields of slices",
                extra={"driver": self._manager.driver, "error": note},
            )
            self._on_dropped(note)
        if all(feature is Feature.OTHER for feature in new):
            return False  # a plan cannot avoid unknown fields
        for pool in self._pools.values():
            pool.forget()
        return True

    def _forget(self) -> None:
        """Note that the watch restarted: the API server may be another one."""
        self._taints_kept.clear()
        now = asyncio.get_running_loop().time()
        if now - self._forgot_at < FORGET_SECONDS:
            return
        self._forgot_at = now
        self._dropped = frozenset()
        for pool in self._pools.values():
            pool.forget()
