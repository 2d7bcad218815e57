"""
Publishes the devices of one driver on this node as ResourceSlices.

The publisher watches the slices in the API server, and restores slices that another client deletes.
(The kubelet deletes the slices of its node when it starts.) One :class:`PoolPublisher` runs for
each pool, so an error in one pool does not delay others. It updates the slices in rounds of writes.
A round begins 0.2 s after the first change, and at least 1 s after the previous round. The
publisher reverts changes that other clients make to these slices, with a backoff. It passes the
taints that were published before a restart, and the names of the published pools, to the device
manager. Publishing never calls a driver.

:mod:`.plan` decides which slices are written, and :mod:`.api` interprets the responses.

Does not depend on gRPC, endpoints, claims or the checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from drakit_daemon.backoff import Backoff
from drakit_daemon.kube import ApiError, Session, TooManyRequestsError, UnavailableError
from drakit_daemon.kube.reflector import Applied, Deleted, Reflector, Replaced
from drakit_formats.resource.device import Feature
from drakit_formats.resource.nodes import short_pool
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.devices.model import DesiredPool
from drakit_nodeplugin.slices.api import (
    RETRY_SECONDS,
    DroppedError,
    NodeOwner,
    OnWrite,
    PoolContext,
    PoolWriter,
    SliceApi,
    SliceStore,
    StaleError,
    Verdict,
)
from drakit_nodeplugin.slices.contents import (
    StoredSlice,
    choose,
    describe,
    effects,
    keep_published,
    published_taints,
)
from drakit_nodeplugin.slices.plan import Plan, PoolIdentity, planning, slices_by_index

logger = logging.getLogger(__name__)

FORGET_SECONDS = 600.0
"""Minimum time between two retries of dropped fields, which cost writes. A retry is due when the
watch restarts, because the API server may have been upgraded."""

SETTLE_SECONDS = 0.2
"""Delay from the first change to the write, so that an unplugged hub causes one write."""

PACE_SECONDS = 1.0
"""Minimum time between two rounds of writes, so that flapping devices do not load the API
server."""

MAX_RETRY_AFTER_SECONDS = 60.0

UNDO_SECONDS = (2.0, 60.0)
"""Initial and maximum delay before another client's repeated change is reverted, because an
administrator's tool may in turn undo the revert."""

MAX_CHECKS = 3
"""Maximum number of plans to check with dry runs in a round. One response names all invalid devices
in a slice, but a cluster policy may name only one device in each response."""

QUIET_SECONDS = 600.0
"""How long other clients must make no changes before the delay of reverts starts again at its
initial value."""


class SlicePublisher:
    """Publishes all pools of one driver."""

    def __init__(
        self,
        *,
        manager: DeviceManager,
        session: asyncio.Future[Session],
        node: str,
        on_rejected: Callable[[Mapping[str, str]], None],
        on_name_taken: Callable[[str], None],
        on_dropped: Callable[[str], None],
        on_write: OnWrite,
    ) -> None:
        """
        Create a publisher. `on_rejected` is called with the reasons for newly rejected devices,
        keyed as in `rejected`, and `on_name_taken` with a message about an object that has the name
        of a slice. `on_dropped` is called with a message about the fields that the API server
        drops, once for each feature.
        """
        self._manager = manager
        self._session = session
        self._node = node
        self._on_rejected = on_rejected
        self._on_name_taken = on_name_taken
        self._on_dropped = on_dropped
        self._on_write = on_write
        self._store = SliceStore()
        self.listed = self._store.listed
        """Set once the slices in the API server have been listed."""
        self._pools: dict[str, PoolPublisher] = {}
        self._reflector: Reflector[StoredSlice] | None = None
        self._dropped: frozenset[Feature] = frozenset()
        self._reported: frozenset[Feature] = frozenset()
        self._kept: set[Feature | str] = set()
        self._forgot_at = float("-inf")

    # ------------------------------------------------------------ for probes and metrics

    @property
    def dropped(self) -> frozenset[Feature]:
        """The device features that the API server is known to drop."""
        return self._dropped

    def explain_dropped(self) -> Mapping[str, str]:
        """Return a description of each feature that the API server drops, keyed by the feature name
        in reports."""
        return {
            feature.name.title().replace("_", ""): self._sentence({feature})
            for feature in Feature
            if feature in self._dropped
        }

    @property
    def published_count(self) -> int:
        """The number of published devices in the API server."""
        return self._store.device_count

    @property
    def rejected(self) -> Mapping[str, str]:
        """The reasons why desired devices are not published, keyed by ``pool/device`` with the
        driver's pool names. In the pool that is named after the node, the key is only the device
        name."""
        rejected: dict[str, str] = {}
        for pool in self._pools.values():
            rejected |= qualified(short_pool(self._node, pool.name), pool.rejected)
        return rejected

    @property
    def last_error(self) -> str | None:
        """The reasons why slices are not in the desired state, from the last attempts, or None."""
        if not self.listed.is_set() and self._reflector is not None:
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
            kept=self._kept,
            on_name_taken=self._on_name_taken,
            on_rejected=self._on_rejected,
        )
        async with asyncio.TaskGroup() as group:

            def find(names: Collection[str], settle_seconds: float = SETTLE_SECONDS) -> None:
                """Publish these pools as well."""
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
        """Wake the publishers of the pools that have changed. Each pool has its own pace."""
        seen, before = self._manager.revision.number, self._manager.publication()
        while True:
            seen = await self._manager.revision.after(seen)
            now = self._manager.publication()
            for name, pool in self._pools.items():
                changed = now.complete != before.complete or (name in now.held) != (
                    name in before.held
                )
                if changed or now.pools.get(name) != before.pools.get(name):
                    pool.changed.set()
            before = now
            if self.listed.is_set():
                self._manager.observe_published(self._store.pools())

    async def _find(self, find: Callable[[Collection[str]], None]) -> None:
        """Publish new pools. They share one rate limit, because a backend may keep renaming its
        pools."""
        seen = self._manager.revision.number
        while True:
            seen = await self._manager.revision.after(seen)
            if self.listed.is_set():
                if new := self._manager.publication().pools.keys() - self._pools.keys():
                    find(new)
                await asyncio.sleep(PACE_SECONDS)

    async def _watch(self, api: SliceApi, owner: NodeOwner, find: Callable[..., None]) -> None:
        self._reflector = Reflector(api, "resourceslices", keep=api.project)
        async for change in self._reflector.changes():
            match change:
                case Replaced(items=items):
                    again = self.listed.is_set()
                    if not again:
                        self._manager.adopt(published_taints(items))
                    if self._store.replace_all(items):
                        owner.forget()
                    for pool in self._pools.values():
                        pool.changed.set()
                    if again:
                        find(self._store.pools())
                        self._forget()
                    else:
                        find(self._store.pools() | self._manager.publication().pools.keys(), 0.0)
                case Applied(object=new):
                    if self._store.apply(new):
                        find({new.pool})
                        self._pools[new.pool].changed.set()
                case Deleted(object=gone):
                    if self._store.remove(gone.name, gone.uid):
                        owner.forget()
                        if (pool := self._pools.get(gone.pool)) is not None:
                            pool.changed.set()
            self._manager.observe_published(self._store.pools())

    # ------------------------------------------------------------ dropped fields

    def _drops(self, features: Collection[Feature]) -> bool:
        """Record the features that are missing from a response. Return whether this invalidates
        plans."""
        new = frozenset(features) - self._dropped
        if not new:
            return False
        self._dropped |= new
        if unreported := new - self._reported:
            self._reported |= unreported
            note = self._sentence(unreported)
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

    def _sentence(self, features: Collection[Feature]) -> str:
        pools = self._manager.publication().pools.values()
        return f"the API server does not support {describe(features)}; {effects(features, pools)}"

    def _forget(self) -> None:
        """Handle a restart of the watch: the API server may have been replaced."""
        self._kept.clear()
        now = asyncio.get_running_loop().time()
        if now - self._forgot_at < FORGET_SECONDS:
            return
        self._forgot_at = now
        self._dropped = frozenset()
        for pool in self._pools.values():
            pool.forget()


class PoolPublisher:
    """Publishes one pool. All times are in loop time."""

    def __init__(self, name: str, context: PoolContext) -> None:
        self.name = name
        self.last_error: str | None = None
        """The error of the last round, or of one of its slices, or None."""

        self.rejected: Mapping[str, str] = {}
        """The reasons why desired devices are not published, keyed by name."""

        self._context = context
        self._facts = {"driver": context.manager.driver, "pool": name}
        self.changed = asyncio.Event()
        """Set when there may be something to write."""
        self.changed.set()
        self._not_before = 0.0
        self._backoff = Backoff(*RETRY_SECONDS)
        self._settled = False
        """Whether a round has ended since the start or the last :meth:`forget`. Before that,
        changes by other clients cannot be detected."""

        self._undo_backoff = Backoff(*UNDO_SECONDS, jitter=0)
        self._undone_at = float("-inf")
        self._undo_not_before = 0.0
        self._again_at: float | None = None
        self._writer = PoolWriter(name, context)

    def forget(self) -> None:
        """Compare everything again, because the API server may accept slices that it rejected
        before."""
        self._writer.forget()
        self._settled = False
        self.changed.set()

    async def run(self, settle: float) -> None:
        """Publish until canceled, or until the pool is neither desired nor published. The first
        round begins after `settle` seconds."""
        loop = asyncio.get_running_loop()
        gone = False
        while True:
            if gone:  # the pause between rounds also applies to a pool that appears repeatedly
                await asyncio.sleep(self._not_before - loop.time())
                if not self._wanted():
                    return
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(self._again_at):
                        await self.changed.wait()
            gone = False
            await asyncio.sleep(max(settle, self._not_before - loop.time()))
            settle = SETTLE_SECONDS
            self.changed.clear()
            try:
                gone = await self._round()
            except StaleError:
                self._not_before = loop.time() + PACE_SECONDS
                self.changed.set()
            except DroppedError:
                settle = 0.0
                self.changed.set()
            # a bug must not affect the pools of other drivers
            except Exception as error:
                self._failed(error)
            else:
                self._backoff.succeeded()

    def _wanted(self) -> bool:
        publication = self._context.manager.publication()
        names = publication.pools.keys() | publication.held | self._context.store.pools()
        return self.name in names

    def _failed(self, error: Exception) -> None:
        """Log a round's error, and schedule the next attempt."""
        seconds = max(self._backoff.next_seconds(), PACE_SECONDS)
        if isinstance(error, TooManyRequestsError | UnavailableError):
            seconds = max(seconds, min(error.retry_after_seconds or 0.0, MAX_RETRY_AFTER_SECONDS))
        facts = self._facts | {"seconds": round(seconds, 1)}
        if isinstance(error, ApiError):
            self.last_error = str(error)
            facts |= {"error": self.last_error}
            logger.warning("slices not published; the write is retried", extra=facts)
        else:
            self.last_error = "an internal error of the node plugin; see its log on this node"
            logger.exception(
                "an internal error of the node plugin: slices not published; the write is retried",
                extra=facts,
            )
        self._not_before = asyncio.get_running_loop().time() + seconds
        self.changed.set()

    # ------------------------------------------------------------ one round

    async def _round(self) -> bool:
        """Write the differences. Return whether the pool is neither desired nor published."""
        publication = self._context.manager.publication()
        pool = publication.pools.get(self.name)
        self._again_at = None
        if self.name in publication.held or (pool is None and not publication.complete):
            return False
        if pool is None:
            plan = Plan(delete=self._context.store.of_pool(self.name))
        else:
            plan = await self._accepted_plan(pool)
            if undone := self._foreign() & {each.name for each in (*plan.delete, *plan.replace)}:
                self._undo(sorted(undone))
        if await self._writer.write(plan):
            self.changed.set()
        self._settled = True
        self._not_before = asyncio.get_running_loop().time() + PACE_SECONDS
        if self._writer.error is not None:
            self._check_again(self._writer.retry_at)
        self.last_error = self._writer.error
        return pool is None

    def _check_again(self, at: float) -> None:
        self._again_at = at if self._again_at is None else min(at, self._again_at)

    async def _accepted_plan(self, pool: DesiredPool) -> Plan:
        """Return a plan whose writes the API server accepts, according to dry runs."""
        writer = self._writer
        identity = await self._identity()
        if asyncio.get_running_loop().time() >= writer.retry_at:
            writer.refused.clear()
            writer.refused_layout.clear()
        for _ in range(MAX_CHECKS):
            plan = await self._plan(pool, identity)
            writer.refused_devices = {
                name: each for name, each in writer.refused_devices.items() if name in plan.rejected
            }
            if plan.rejected != self.rejected:
                self._report(plan.rejected)
            verdict = await writer.check(plan)
            if verdict is Verdict.ACCEPTED:
                writer.refused_layout.clear()
                return plan
            if verdict is Verdict.REFUSED:
                break
        # If no plan is accepted, still write taints: a failing device must get its taint, and a
        # vanished device must not be allocated.
        names = {name for each in self._context.store.of_pool(self.name) for name in each.devices}
        wanted = choose(pool, self._context.dropped()).devices
        kept = tuple(keep_published(each) for name, each in wanted.items() if name in names)
        if not names:
            return Plan()
        published = DesiredPool(
            devices=kept, keeps_counter_sets=True, partition_type_attribute=None
        )
        plan = await self._plan(published, identity)
        return plan if await writer.check(plan) is Verdict.ACCEPTED else Plan()

    async def _plan(self, pool: DesiredPool, identity: PoolIdentity) -> Plan:
        now = asyncio.get_running_loop().time()
        writer = self._writer
        stored = self._context.store.of_pool(self.name)
        left = dict(writer.refused)
        foreign = self._foreign()
        if foreign and now < self._undo_not_before:
            self._check_again(self._undo_not_before)
            left |= {name: known.content for name in foreign if (known := writer.known.get(name))}
            kept = slices_by_index(identity, stored, known=writer.known)
            names = {each.name for each in kept.values()}
            stored = [each for each in stored if each.name not in foreign or each.name in names]
        steps = planning(
            pool,
            identity=identity,
            stored=stored,
            known=writer.known,
            left=left,
            dropped=self._context.dropped(),
            refused=writer.refused_devices,
        )
        while True:
            try:
                next(steps)
            except StopIteration as end:
                plan: Plan = end.value
                break
            # let other tasks run, because planning the pool of a full node takes as long as
            # handling many claims
            await asyncio.sleep(0)
        names = {each.name for each in stored}
        writer.known = {
            name: each for name, each in (writer.known | {**plan.known}).items() if name in names
        }
        return plan

    def _undo(self, slices: Collection[str]) -> None:
        """Delay the next revert."""
        now = asyncio.get_running_loop().time()
        if now - self._undone_at >= QUIET_SECONDS:
            self._undo_backoff.succeeded()
        self._undone_at = now
        self._undo_not_before = now + self._undo_backoff.next_seconds()
        logger.warning(
            "another client changed slices of this node plugin; they are restored",
            extra=self._facts | {"slices": slices},
        )

    async def _identity(self) -> PoolIdentity:
        context = self._context
        stored = context.store.of_pool(self.name)
        uid = await context.owner.uid()
        if any(each.owners != (uid,) for each in stored):
            # An administrator may have replaced the Node.
            uid = await context.owner.uid(again=True)
        return PoolIdentity(
            driver=context.manager.driver,
            node=context.node,
            node_uid=uid,
            pool=self.name,
            secret=self._writer.secret,
        )

    def _foreign(self) -> set[str]:
        """Return the slices that other clients have created or changed since the last round."""
        if not self._settled:
            return set()
        known = self._writer.known
        return {
            each.name
            for each in self._context.store.of_pool(self.name)
            if each.name not in known or known[each.name].version != each.version
        }

    def _report(self, rejected: Mapping[str, str]) -> None:
        new = {name: why for name, why in rejected.items() if self.rejected.get(name) != why}
        self.rejected = rejected
        for name, why in new.items():
            logger.error("device is rejected", extra=self._facts | {"device": name, "error": why})
        if new:
            pool = short_pool(self._context.node, self.name)
            self._context.on_rejected(qualified(pool, new))


def qualified(pool: str, rejected: Mapping[str, str]) -> dict[str, str]:
    """Return the rejections keyed by ``pool/device``, with the driver's name for the pool. For the
    default pool, which is named after the node, the key is only the device name."""
    return {f"{pool}/{device}".lstrip("/"): why for device, why in rejected.items()}
