"""
Keeps the slices of one pool up to date with its devices, in rounds of writes.

A round begins 0.2 s after the first change, and at least 1 s after the last round. An error of one
pool delays no other. Changes that other clients make to our slices are undone, with a backoff.
:mod:`.plan` decides which slices are written.

The answers of the API server show what it does not accept:

* Another client may have created a slice of another driver or node under the name of ours. Our
  slices then get names that nobody can guess.
* A slice that it rejects is retried later, since a policy of the cluster may have rejected it. The
  other slices are still written.
* A device that a rejection names is left out until it changes.
* An API server that does not know taints drops them silently. So before a write that could publish
  a device without a taint that repels pods, a dry run shows whether taints are kept.

It must not know how slices are watched, or other pools.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from drakit.backoff import Backoff
from drakit.kube import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    InvalidError,
    NotFoundError,
    TooManyRequestsError,
    UnavailableError,
)
from drakit.resource.features import Feature, dropped_from_slice, refusal
from drakit.resource.pools import short_pool
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.devices.model import DesiredDevice, DesiredPool
from drakit_nodeplugin.slices.api import NodeOwner, SliceApi, SliceStore
from drakit_nodeplugin.slices.contents import SliceContent, StoredSlice, same_content
from drakit_nodeplugin.slices.plan import (
    KnownSlice,
    Plan,
    PoolIdentity,
    SliceWrite,
    planning,
    slices_by_index,
)

__all__ = ("PoolContext", "PoolPublisher", "qualified")

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 0.2
"""Time from the first change to the write. An unplugged hub causes one write."""

PACE_SECONDS = 1.0
"""Minimum time between two rounds of writes. Devices that flap must not load the API server."""

RETRY_SECONDS = (2.0, 60.0)
"""First and longest delay after a failed write; it doubles in between, with jitter."""

MAX_RETRY_AFTER_SECONDS = 60.0

UNDO_SECONDS = (2.0, 60.0)
"""First and longest delay before a repeated change by another client is undone. An admin's tool
may revert our change again."""

QUIET_SECONDS = 600.0
"""The time without foreign changes after which the next one is undone at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolContext:
    """The objects that the pools of a driver share."""

    manager: DeviceManager
    node: str
    owner: NodeOwner
    api: SliceApi
    store: SliceStore
    dropped: Callable[[], Collection[Feature]]
    """Returns the features that the API server is known to drop."""

    on_dropped: Callable[[Collection[Feature]], bool]
    """Receives the features that an answer lacks; returns whether this invalidates plans."""

    taints_kept: asyncio.Event
    """Set once a dry run has shown that the API server keeps taints."""

    on_name_taken: Callable[[str], None]
    """Receives a sentence on an object that has the name of a slice."""

    on_left_out: Callable[[Mapping[str, str]], None]
    """Receives the reasons why devices are not published, by ``pool/device`` with the driver's pool
    names."""


class PoolPublisher:
    """Publishes one pool. Times are the loop's."""

    def __init__(self, name: str, context: PoolContext) -> None:
        self.name = name
        self.last_error: str | None = None
        """The error of the last round, or of one of its slices; None if nothing failed."""

        self.left_out: Mapping[str, str] = {}
        """The reasons why desired devices are not published, by name."""

        self._context = context
        self._facts = {"driver": context.manager.driver, "pool": name}
        self._changed = asyncio.Event()
        self._changed.set()
        self._not_before = 0.0
        self._backoff = _backoff(RETRY_SECONDS)
        self._settled = False
        """Whether our last round was the last write, as far as we know."""

        self._undo_backoff = _backoff(UNDO_SECONDS, jitter=0.0)
        self._undone_at = float("-inf")
        self._undo_not_before = 0.0
        self._again_at: float | None = None
        self._writer = _Writer(name, context)

    def wake(self) -> None:
        """Notify the publisher of a change."""
        self._changed.set()

    def forget(self) -> None:
        """Compare everything again: the API server may accept other slices than before."""
        self._writer.forget()
        self._settled = False
        self._changed.set()

    async def run(self, settle: float) -> None:
        """Publish until canceled, or until the pool is neither desired nor published. The first
        round begins after `settle` seconds."""
        loop = asyncio.get_running_loop()
        gone = False
        while True:
            if gone:  # the pause between rounds applies to a pool that appears repeatedly, too
                await asyncio.sleep(self._not_before - loop.time())
                if not self._wanted():
                    return
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(self._again_at):
                        await self._changed.wait()
            gone = False
            await asyncio.sleep(max(settle, self._not_before - loop.time()))
            settle = SETTLE_SECONDS
            self._changed.clear()
            try:
                gone = await self._round()
            except _StaleError:
                self._not_before = loop.time() + PACE_SECONDS
                self._changed.set()
            except _DroppedError:
                settle = 0.0
                self._changed.set()
            except Exception as error:  # even a bug of ours: the pools of other drivers continue
                self._failed(error)
            else:
                self._backoff.succeeded()

    def _wanted(self) -> bool:
        publication = self._context.manager.publication()
        names = publication.pools.keys() | publication.held | self._context.store.pools()
        return self.name in names

    def _failed(self, error: Exception) -> None:
        """Log the error of a round, and schedule the next attempt."""
        seconds = max(self._backoff.next_seconds(), PACE_SECONDS)
        if isinstance(error, TooManyRequestsError | UnavailableError):
            seconds = max(seconds, min(error.retry_after_seconds or 0.0, MAX_RETRY_AFTER_SECONDS))
        facts = self._facts | {"seconds": round(seconds, 1)}
        if isinstance(error, ApiError):
            self.last_error = str(error)
            facts |= {"error": self.last_error}
            logger.warning("slices not published; the write is retried", extra=facts)
        else:
            self.last_error = f"an internal error of the node plugin: {error!r}"
            logger.exception(
                "an internal error of the node plugin: slices not published; the write is retried",
                extra=facts,
            )
        self._not_before = asyncio.get_running_loop().time() + seconds
        self._changed.set()

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
        )
        while True:
            try:
                next(steps)
            except StopIteration as end:
                plan: Plan = end.value
                break
            await asyncio.sleep(0)  # planning a full node's pool takes as long as many claims
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
            "another client changed slices of this node plugin; they are restored",
            extra=self._facts | {"slices": slices},
        )

    async def _identity(self, stored: Collection[StoredSlice]) -> PoolIdentity:
        context = self._context
        uid = await context.owner.uid()
        if any(each.owners != (uid,) for each in stored):
            # An admin may have replaced the Node.
            uid = await context.owner.uid(again=True)
        return PoolIdentity(
            driver=context.manager.driver,
            node=context.node,
            node_uid=uid,
            pool=self.name,
            secret=self._writer.secret,
        )

    def _foreign(self, stored: Collection[StoredSlice]) -> set[str]:
        """Return the slices that other clients have created or changed since our last round."""
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


# ---------------------------------------------------------------- writes


class _StaleError(Exception):
    """The plan is outdated: plan again."""


class _DroppedError(Exception):
    """The API server drops fields, so the plan is wrong: plan again at once. Published devices may
    lack these fields, or the pool may be incomplete. Raised once for each feature."""


class _Writer:
    """The writes of one pool. Times are the loop's."""

    def __init__(self, pool: str, context: PoolContext) -> None:
        self.known: dict[str, KnownSlice] = {}
        """The slices that were correct after their last write or check, by name."""

        self.error: str | None = None
        """The reason why slices are rejected; None if none is."""

        self.refused: dict[str, SliceContent] = {}
        """The rejected contents, by the slice's name."""

        self.retry_at = 0.0
        """The time at which rejected slices are retried."""

        self.secret = b""
        """The secret in the names of new slices; empty until a name is taken."""

        self._renaming = False
        """Whether a name was taken in the last round."""

        self._context = context
        self._pool = pool
        self._facts = {"driver": context.manager.driver, "pool": pool}
        self._retry = _backoff(RETRY_SECONDS)
        self._refused_devices: dict[str, tuple[DesiredDevice, str]] = {}

    def forget(self) -> None:
        """Retry rejected slices: the API server may accept other slices than before."""
        self.known.clear()
        self.refused.clear()
        self._refused_devices.clear()

    # ------------------------------------------------------------ before a plan

    def begin_round(self, pool: DesiredPool, now: float) -> tuple[DesiredPool, Mapping[str, str]]:
        """Return the pool without refused devices, and the reasons for those, by name."""
        if now >= self.retry_at:
            self.refused.clear()
        if not self._refused_devices:
            return pool, {}
        wanted = {each.name: each for each in pool.devices}
        self._refused_devices = {
            name: (device, why)
            for name, (device, why) in self._refused_devices.items()
            if name in wanted and same_content(_alone(device), _alone(wanted[name]))
        }
        left_out = {name: why for name, (_, why) in self._refused_devices.items()}
        kept = tuple(each for each in pool.devices if each.name not in left_out)
        return replace(pool, devices=kept), left_out

    # ------------------------------------------------------------ a plan

    async def write(self, plan: Plan) -> bool:
        """Make the writes of a plan; return whether the rest of the pool must be planned again,
        without devices that the API server refuses."""
        errors: dict[str, InvalidError] = {}
        again = False
        if not plan.empty:
            again = await self._write_all(plan, errors)
        self._renaming = False
        if errors:
            self.error = "; ".join(map(str, errors.values()))
            self.retry_at = asyncio.get_running_loop().time() + self._retry.next_seconds()
        if not self.refused:
            self.error = None
            self._retry.succeeded()
        return again

    async def _write_all(self, plan: Plan, errors: dict[str, InvalidError]) -> bool:
        again = False
        writes = (*plan.replace, *plan.create)
        # Checked before any write: a broken device must not be available even briefly.
        for write in writes:
            if not self._context.taints_kept.is_set() and write.may_lose_taints:
                again |= await self._try(write, errors, dry_run=True)
        for each in plan.delete:
            await self._delete(each)
        for write in writes:
            if write.name not in errors:
                again |= await self._try(write, errors)
        facts = {"creates": len(plan.create), "updates": len(plan.replace)}
        logger.info("slices published", extra=self._facts | facts | {"deletes": len(plan.delete)})
        return again

    async def _delete(self, stored: StoredSlice) -> None:
        try:
            await self._context.api.delete(stored)
        except ConflictError:
            await self._read(stored.name)
            raise
        self._context.store.remove(stored.name, stored.uid)
        self.known.pop(stored.name, None)

    async def _try(
        self, write: SliceWrite, errors: dict[str, InvalidError], *, dry_run: bool = False
    ) -> bool:
        """Write one slice. A rejection is added to `errors`. Returns whether it names devices; the
        slice can then be written without them."""
        api, body = self._context.api, write.body()
        try:
            answer = await api.write(body, exists=write.stored is not None, dry_run=dry_run)
        except InvalidError as error:
            errors[write.name] = error
            return self._refuse(write, body, error)
        except AlreadyExistsError:
            found = await self._read(write.name)
            if found is None or not self._is_ours(found):
                self._rename(write.name, found)
            raise
        except (ConflictError, NotFoundError):
            # The store is outdated.
            await self._read(write.name)
            raise
        dropped = dropped_from_slice(body, answer)
        if dry_run:
            # Another pool may have reported it already.
            if self._context.on_dropped(dropped) or Feature.TAINTS in dropped:
                raise _DroppedError
            self._context.taints_kept.set()
            return False
        stored = StoredSlice.of(answer)
        self._context.store.apply(stored)
        self.known[write.name] = KnownSlice(
            version=stored.version, content=write.content, owner=write.pool.node_uid
        )
        self.refused.pop(write.name, None)
        if self._context.on_dropped(dropped):
            raise _DroppedError
        return False

    def _refuse(self, write: SliceWrite, body: Mapping[str, object], error: InvalidError) -> bool:
        found = refusal(error.details, body)
        if self._context.on_dropped(found.features):
            raise _DroppedError from error
        logger.error(
            "the API server rejects a slice",
            extra=self._facts | {"slice": write.name, "error": str(error)},
        )
        self.refused[write.name] = write.content
        named = {name: why for name, why in found.devices.items() if name in write.content.devices}
        for name, why in named.items():
            device = write.content.devices[name]
            self._refused_devices[name] = (device, f"the API server rejects it: {why}")
        return bool(named)

    def _rename(self, name: str, found: StoredSlice | None) -> None:
        """Give new slices names that nobody can guess, from the next round on."""
        self.secret = secrets.token_bytes(16)
        if found is not None:  # else it is deleted already, and may have been ours
            node = f"node {found.node}" if found.node else "not bound to one node"
            note = (
                f"the node plugin uses different names for new slices of pool {self._pool} of "
                f"driver {self._context.manager.driver}, because ResourceSlice {name} already "
                f"exists (driver {found.driver}, pool {found.pool}, {node}); identify the client "
                f"that created it, and delete the slice"
            )
            logger.warning("a slice's name is taken", extra=self._facts | {"error": note})
            self._context.on_name_taken(note)
        if not self._renaming:
            self._renaming = True
            raise _StaleError

    def _is_ours(self, found: StoredSlice) -> bool:
        context = self._context
        ours = (context.manager.driver, context.node, self._pool)
        return (found.driver, found.node, found.pool) == ours

    async def _read(self, name: str) -> StoredSlice | None:
        """Read one slice, because the stored one is outdated; it may be another node's now."""
        store = self._context.store
        held = store.find(name)
        try:
            found = await self._context.api.get(name)
        except NotFoundError:
            found = None
        if found is not None and self._is_ours(found):
            store.correct(found, held=held)
        elif (gone := store.find(name)) is not None and gone.pool == self._pool:
            store.remove(name, gone.uid)
        return found


def _alone(device: DesiredDevice) -> SliceContent:
    return SliceContent(devices={device.name: device})
