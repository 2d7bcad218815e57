"""
Keeps the slices of one pool as its devices are: when it is time, one round of writes.

A round begins 0.2 s after the first change, and at least 1 s after the last round. An error of one
pool delays no other. Changes that somebody else makes to our slices are undone, with a backoff.
Which slices are written is decided in :mod:`.plan`, the requests are :mod:`.pool_writer`'s.

It must not know how slices are watched, or other pools.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping

from drakit.backoff import Backoff
from drakit.kube import ApiError, TooManyRequestsError, UnavailableError
from drakit.resource.pools import short_pool
from drakit_nodeplugin.devices.model import DesiredPool
from drakit_nodeplugin.slices.contents import StoredSlice
from drakit_nodeplugin.slices.plan import Plan, PoolIdentity, planning, slice_index
from drakit_nodeplugin.slices.pool_writer import DroppedError, PoolContext, PoolWriter, StaleError

__all__ = ("PoolPublisher", "qualified")

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 0.2
"""From the first change to the write: an unplugged hub is one write."""

PACE_SECONDS = 1.0
"""Between two rounds of writes: devices that flap must not load the API server."""

RETRY_SECONDS = (2.0, 60.0)
"""First and longest delay after a failed write; it doubles in between, with jitter."""

MAX_RETRY_AFTER_SECONDS = 60.0

UNDO_SECONDS = (2.0, 60.0)
"""First and longest delay before a repeated change by somebody else is undone. Another instance of
the driver, or an admin's tool, may undo in turn what we undo."""

QUIET_SECONDS = 600.0
"""After so long without anything to undo, the next change is undone at once."""


class PoolPublisher:
    """Publishes one pool. Times are the loop's."""

    def __init__(self, name: str, context: PoolContext) -> None:
        self.name = name
        self.last_error: str | None = None
        """Why the last round failed, or a slice of it; None if nothing failed."""

        self.left_out: Mapping[str, str] = {}
        """Why desired devices are not published, by name."""

        self._context = context
        self._facts = {"driver": context.manager.driver, "pool": name}
        self._changed = asyncio.Event()
        self._changed.set()
        self._not_before = 0.0
        self._backoff = _backoff(RETRY_SECONDS)
        self._settled = False
        """Whether a round of ours was the last to write, as far as we know."""

        self._undo_backoff = _backoff(UNDO_SECONDS, jitter=0.0)
        self._undone_at = float("-inf")
        self._undo_not_before = 0.0
        self._again_at: float | None = None
        self._writer = PoolWriter(name, context, retry=_backoff(RETRY_SECONDS))

    def wake(self) -> None:
        """Something has changed."""
        self._changed.set()

    def forget(self) -> None:
        """The API server may accept other slices than before: compare everything again."""
        self._writer.forget()
        self._settled = False
        self._changed.set()

    async def run(self, settle: float) -> None:
        """Publish until cancelled, or until the pool is neither desired nor published. The first
        round begins after `settle` seconds."""
        loop = asyncio.get_running_loop()
        gone = False
        while True:
            try:
                async with asyncio.timeout_at(self._not_before if gone else self._again_at):
                    await self._changed.wait()
            except TimeoutError:
                if gone:  # for as long as its pace: a pool that comes and goes has one as well
                    return
            gone = False
            await asyncio.sleep(max(settle, self._not_before - loop.time()))
            settle = SETTLE_SECONDS
            if not self._context.primary.is_set():
                await self._context.primary.wait()
                self._settled = False  # meanwhile our other instance wrote
            self._changed.clear()
            try:
                gone = await self._round()
            except StaleError:
                self._not_before = loop.time() + PACE_SECONDS
                self._changed.set()
            except DroppedError:
                settle = 0.0
                self._changed.set()
            except ApiError as error:
                seconds = self._failed(error)
                logger.warning(
                    "slices not published, trying again",
                    extra=self._facts | {"error": str(error), "seconds": round(seconds, 1)},
                )
            except Exception as error:
                # A fault of ours: the pools of other drivers go on.
                seconds = self._failed(error)
                logger.exception(
                    "a fault in the node plugin: slices not published, trying again",
                    extra=self._facts | {"seconds": round(seconds, 1)},
                )
            else:
                self._backoff.succeeded()

    def _failed(self, error: Exception) -> float:
        """Schedule the next attempt; return in how many seconds it is."""
        seconds = max(self._backoff.next_seconds(), PACE_SECONDS)
        if isinstance(error, TooManyRequestsError | UnavailableError):
            seconds = max(seconds, min(error.retry_after_seconds or 0.0, MAX_RETRY_AFTER_SECONDS))
        known = isinstance(error, ApiError)
        self.last_error = str(error) if known else f"a fault in the node plugin: {error!r}"
        self._not_before = asyncio.get_running_loop().time() + seconds
        self._changed.set()
        return seconds

    # ------------------------------------------------------------ one round

    async def _round(self) -> bool:
        """Write what differs; return whether the pool is neither desired nor published."""
        publication = self._context.manager.publication()
        pool = publication.pools.get(self.name)
        self._again_at = None
        if self.name in publication.held or (pool is None and not publication.complete):
            return False
        if pool is None:
            plan = Plan(delete=self._context.store.of_pool(self.name))
        else:
            plan = await self._plan(pool)
        if await self._writer.write(plan):
            self._changed.set()
        self._settled = True
        self._not_before = asyncio.get_running_loop().time() + PACE_SECONDS
        if self._writer.refused:
            self._check_again(self._writer.retry_at)
        self.last_error = self._writer.error
        return pool is None

    def _check_again(self, at: float) -> None:
        self._again_at = at if self._again_at is None else min(at, self._again_at)

    async def _plan(self, pool: DesiredPool) -> Plan:
        now = asyncio.get_running_loop().time()
        writer = self._writer
        pool, refused_devices = writer.begin_round(pool, now)
        stored = self._context.store.of_pool(self.name)
        identity = await self._identity(stored)
        left = dict(writer.refused)
        foreign = self._foreign(stored)
        if foreign and now < self._undo_not_before:
            self._check_again(self._undo_not_before)
            left |= {name: known.content for name in foreign if (known := writer.known.get(name))}
            stored = [
                each
                for each in stored
                if each.name not in foreign or slice_index(identity, each.name) is not None
            ]
        steps = planning(
            pool,
            identity=identity,
            stored=stored,
            known=writer.known,
            left=left,
            dropped=self._context.dropped(),
        )
        while True:
            try:
                next(steps)
            except StopIteration as end:
                plan: Plan = end.value
                break
            await asyncio.sleep(0)  # a full node's pool takes as long as many claims
        names = {each.name for each in stored}
        writer.known = {
            name: each for name, each in (writer.known | {**plan.known}).items() if name in names
        }
        self._report({**plan.left_out, **refused_devices})
        written = {each.name for each in (*plan.delete, *plan.replace)}
        if undone := sorted(foreign & written - plan.known.keys()):
            self._undo(undone, now)
        return plan

    def _undo(self, slices: Collection[str], now: float) -> None:
        """Delay the next undo."""
        if now - self._undone_at >= QUIET_SECONDS:
            self._undo_backoff.succeeded()
        self._undone_at = now
        self._undo_not_before = now + self._undo_backoff.next_seconds()
        logger.warning(
            "somebody else writes our slices, undoing it", extra=self._facts | {"slices": slices}
        )

    async def _identity(self, stored: Collection[StoredSlice]) -> PoolIdentity:
        context = self._context
        uid = await context.owner.uid()
        if any(each.owners != (uid,) for each in stored):
            # Somebody may have replaced the Node.
            uid = await context.owner.uid(again=True)
        return PoolIdentity(
            driver=context.manager.driver, node=context.node, node_uid=uid, pool=self.name
        )

    def _foreign(self, stored: Collection[StoredSlice]) -> set[str]:
        """Return the slices that somebody else has created or changed since our last round."""
        if not self._settled:
            return set()
        known = self._writer.known
        return {
            each.name
            for each in stored
            if each.name not in known or known[each.name].version != each.version
        }

    def _report(self, left_out: Mapping[str, str]) -> None:
        new = {name: why for name, why in left_out.items() if self.left_out.get(name) != why}
        self.left_out = left_out
        for name, why in new.items():
            logger.error("device is left out", extra=self._facts | {"device": name, "error": why})
        if new:
            pool = short_pool(self._context.node, self.name)
            self._context.on_left_out(qualified(pool, new))


def _backoff(seconds: tuple[float, float], *, jitter: float = 0.5) -> Backoff:
    return Backoff(first_seconds=seconds[0], limit_seconds=seconds[1], jitter=jitter)


def qualified(pool: str, left_out: Mapping[str, str]) -> dict[str, str]:
    """Prefix devices with the driver's name of their pool; the pool with the node's name has
    none."""
    return {f"{pool}/{device}".lstrip("/"): why for device, why in left_out.items()}
