"""
Keeps the slices of one pool as its devices say: when it is time, one round of writes.

What is to be written is decided in :mod:`.plan`. A round begins 0.2 s after the first change,
and 1 s after the last one; an error of one pool holds no other up.

It must not know how slices are watched, or other pools.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import Any

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
from drakit_nodeplugin.devices.pools import DesiredPool, short_pool
from drakit_nodeplugin.slices.conflict_backoff import ConflictBackoff
from drakit_nodeplugin.slices.names import PoolIdentity, slice_index
from drakit_nodeplugin.slices.plan import KnownSlice, Plan, SliceWrite, planning
from drakit_nodeplugin.slices.refusals import Refusals
from drakit_nodeplugin.slices.stored import StoredSlice
from drakit_nodeplugin.slices.surroundings import Surroundings

__all__ = ("PoolPublisher", "in_words")

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 0.2
"""From the first change to the write: a hub that is unplugged is one write."""

PACE_SECONDS = 1.0
"""Between two rounds of writes: devices that flap must not load the API server."""

RETRY_SECONDS = (2.0, 60.0)
"""First and longest delay after a failed write; it doubles in between, with jitter."""

MAX_RETRY_AFTER_SECONDS = 60.0


class _StaleError(Exception):
    """What was planned is not right any more: plan anew."""


class _DroppedError(Exception):
    """It is not right as the API server drops fields: plan anew at once, as what it holds may lack
    them, or be part of a pool that is not whole. Each feature is noticed once."""


class PoolPublisher:
    """Publishes one pool."""

    def __init__(self, name: str, surroundings: Surroundings) -> None:
        self.name = name
        self.last_error: str | None = None
        """Why the last round failed, or a slice of it; None if nothing did."""

        self.left_out: Mapping[str, str] = {}
        """Why devices are not published though they are wanted, by name."""

        self._around = surroundings
        self._changed = asyncio.Event()
        self._changed.set()
        self._not_before = 0.0
        self._backoff = _backoff()
        self._known: dict[str, KnownSlice] = {}
        self._settled = False
        self._calm = ConflictBackoff()
        self._again_at: float | None = None
        self._refusals = Refusals(_backoff())

    def wake(self) -> None:
        """Something has changed."""
        self._changed.set()

    def forget(self) -> None:
        """The API server may take other things than before: look at everything again."""
        self._known.clear()
        self._settled = False
        self._refusals.forget()
        self._changed.set()

    async def run(self) -> None:
        """Publish until cancelled, or until the pool is not wanted any more, and gone."""
        loop = asyncio.get_running_loop()
        settle = 0.0  # who found the pool has waited already
        while True:
            try:
                async with asyncio.timeout_at(self._again_at):
                    await self._changed.wait()
            except TimeoutError:
                pass
            await asyncio.sleep(max(settle, self._not_before - loop.time()))
            settle = SETTLE_SECONDS
            if not self._around.primary.is_set():
                await self._around.primary.wait()
                self._settled = False  # what was written meanwhile, our other instance wrote
            self._changed.clear()
            try:
                gone = await self._round()
            except _StaleError:
                self._not_before = loop.time() + PACE_SECONDS
                self._changed.set()
            except _DroppedError:
                settle = 0.0
                self._changed.set()
            except ApiError as error:
                seconds = self._failed(error)
                logger.warning(
                    "slices not published, trying again",
                    extra=self._facts() | {"error": str(error), "seconds": round(seconds, 1)},
                )
            except Exception as error:
                # A fault of ours: the pools of other drivers go on.
                seconds = self._failed(error)
                logger.exception(
                    "a fault in the node plugin: slices not published, trying again",
                    extra=self._facts() | {"seconds": round(seconds, 1)},
                )
            else:
                self._backoff.succeeded()
                if gone and not self._changed.is_set():
                    return

    def _failed(self, error: Exception) -> float:
        """Have it tried again, and tell in how many seconds."""
        seconds = max(self._backoff.next_seconds(), PACE_SECONDS)
        if isinstance(error, TooManyRequestsError | UnavailableError):
            seconds = max(seconds, min(error.retry_after_seconds or 0.0, MAX_RETRY_AFTER_SECONDS))
        known = isinstance(error, ApiError)
        self.last_error = str(error) if known else f"a fault in the node plugin: {error!r}"
        self._not_before = asyncio.get_running_loop().time() + seconds
        self._changed.set()
        return seconds

    def _facts(self) -> dict[str, object]:
        return {"driver": self._around.source.driver, "pool": self.name}

    # ------------------------------------------------------------ one round

    async def _round(self) -> bool:
        """Write what differs; tell whether the pool is neither wanted nor there."""
        loop = asyncio.get_running_loop()
        publication = self._around.source.publication()
        pool = publication.pools.get(self.name)
        self._again_at = None
        if self.name in publication.held or (pool is None and not publication.complete):
            return False
        if pool is None:
            todo = Plan(delete=self._around.store.of_pool(self.name))
        else:
            todo = await self._planned(pool)
        refused = await self._apply(todo)
        now = loop.time()
        self._settled = True
        self._not_before = now + PACE_SECONDS
        self._refusals.round_ended(refused, now)
        if self._refusals.slices:
            self._look_again(self._refusals.until)
        self.last_error = self._refusals.error
        return pool is None

    def _look_again(self, at: float) -> None:
        self._again_at = at if self._again_at is None else min(at, self._again_at)

    async def _planned(self, pool: DesiredPool) -> Plan:
        now = asyncio.get_running_loop().time()
        self._refusals.retry(now)
        pool, refused_devices = self._refusals.left_out(pool)
        stored = self._around.store.of_pool(self.name)
        identity = await self._identity(stored)
        left = dict(self._refusals.slices)
        foreign = self._foreign(stored)
        if foreign and now < self._calm.until:
            self._look_again(self._calm.until)
            left |= {name: known.content for name in foreign if (known := self._known.get(name))}
            stored = [
                each
                for each in stored
                if each.name not in foreign or slice_index(identity, each.name) is not None
            ]
        steps = planning(
            pool,
            identity=identity,
            stored=stored,
            known=self._known,
            left=left,
            dropped=self._around.dropped(),
        )
        while True:
            try:
                next(steps)
            except StopIteration as end:
                todo: Plan = end.value
                break
            await asyncio.sleep(0)  # a full node's pool takes as long as many claims
        names = {each.name for each in stored}
        self._known = {n: each for n, each in (self._known | {**todo.known}).items() if n in names}
        self._report({**todo.left_out, **refused_devices})
        written = {each.name for each in (*todo.delete, *todo.replace)}
        if undone := sorted(foreign & written - todo.known.keys()):
            self._calm.undone(now)
            logger.warning(
                "somebody else writes our slices, undoing it",
                extra=self._facts() | {"slices": undone},
            )
        return todo

    async def _identity(self, stored: Collection[StoredSlice]) -> PoolIdentity:
        around = self._around
        uid = await around.owner.uid()
        if any(each.owners != (uid,) for each in stored):
            # The Node may have been deleted and made anew.
            uid = await around.owner.uid(again=True)
        return PoolIdentity(
            driver=around.source.driver, node=around.node, node_uid=uid, pool=self.name
        )

    def _foreign(self, stored: Collection[StoredSlice]) -> set[str]:
        """Give the slices that somebody else has made or changed since our last round."""
        if not self._settled:
            return set()
        return {
            each.name
            for each in stored
            if (known := self._known.get(each.name)) is None or known.version != each.version
        }

    def _report(self, left_out: Mapping[str, str]) -> None:
        new = {name: why for name, why in left_out.items() if self.left_out.get(name) != why}
        self.left_out = left_out
        for name, why in new.items():
            logger.error("device is left out", extra=self._facts() | {"device": name, "error": why})
        if new:
            pool = short_pool(self._around.node, self.name)
            self._around.on_left_out(in_words(pool, new))

    # ------------------------------------------------------------ writing

    async def _apply(self, todo: Plan) -> list[InvalidError]:
        """Make the writes; give why the API server has refused slices."""
        if todo.empty:
            return []
        writes = (*todo.replace, *todo.create)
        refused = await self._check_taints(writes)
        for each in todo.delete:
            self._check_primary()
            try:
                await self._around.api.delete(each)
            except ConflictError:
                await self._read(each.name)
                raise
            self._around.store.remove(each.name, each.uid)
            self._known.pop(each.name, None)
        for write in writes:
            if write.name in refused:
                continue
            self._check_primary()
            try:
                await self._write(write)
            except InvalidError as error:
                refused[write.name] = error
        logger.info(
            "slices published",
            extra=self._facts()
            | {
                "creates": len(todo.create),
                "updates": len(todo.replace),
                "deletes": len(todo.delete),
            },
        )
        return [*refused.values()]

    def _check_primary(self) -> None:
        if not self._around.primary.is_set():
            raise _StaleError

    async def _check_taints(self, writes: Collection[SliceWrite]) -> dict[str, InvalidError]:
        """Make sure that taints are kept before anything is written, or pods would be given broken
        devices for a moment; give why the API server would refuse slices, by name."""
        refused: dict[str, InvalidError] = {}
        for write in self._around.taints.needed(writes):
            try:
                _, dropped = await self._send(write, dry_run=True)
            except InvalidError as error:
                refused[write.name] = error
                continue
            # Another pool may have been told of it meanwhile.
            if self._around.on_dropped(dropped) or Feature.TAINTS in dropped:
                raise _DroppedError
            self._around.taints.kept()
        return refused

    async def _write(self, write: SliceWrite) -> None:
        answer, dropped = await self._send(write)
        stored = StoredSlice.of(answer)
        self._around.store.apply(stored)
        self._known[write.name] = KnownSlice(
            version=stored.version,
            content=write.content,
            owner=write.pool.node_uid,
        )
        self._refusals.written(write.name)
        if self._around.on_dropped(dropped):
            raise _DroppedError

    async def _send(
        self, write: SliceWrite, *, dry_run: bool = False
    ) -> tuple[dict[str, Any], Collection[Feature]]:
        """Give the answer to a write, and which features it lacks."""
        api, body = self._around.api, write.body()
        send = api.create if write.stored is None else api.replace
        try:
            answer = await send(body, dry_run=dry_run)
        except InvalidError as error:
            self._refuse(write, body, error)
            raise
        except (ConflictError, AlreadyExistsError, NotFoundError):
            # What we hold is not what the API server holds.
            await self._read(write.name)
            raise
        return answer, dropped_from_slice(body, answer)

    def _refuse(self, write: SliceWrite, body: Mapping[str, object], error: InvalidError) -> None:
        """Take in what the API server says of a slice that it does not take."""
        said = refusal(error.details, body)
        if self._around.on_dropped(said.features):
            raise _DroppedError from error
        logger.error(
            "slice is refused by the API server",
            extra=self._facts() | {"slice": write.name, "error": str(error)},
        )
        if self._refusals.refused(write.name, write.content, said.devices):
            self._changed.set()

    async def _read(self, name: str) -> None:
        """Look at one slice again: what we hold of it is wrong."""
        store = self._around.store
        held = store.find(name)
        try:
            store.correct(await self._around.api.get(name), held=held)
        except NotFoundError:
            for each in store.of_pool(self.name):
                if each.name == name:
                    store.remove(name, each.uid)


def _backoff() -> Backoff:
    return Backoff(first_seconds=RETRY_SECONDS[0], limit_seconds=RETRY_SECONDS[1])


def in_words(pool: str, left_out: Mapping[str, str]) -> dict[str, str]:
    """Name devices of a pool as drivers do: those of the pool with the node's name by their names
    alone."""
    return {f"{pool}/{device}".lstrip("/"): why for device, why in left_out.items()}
