"""
Writes the slices of one pool, and learns from the API server's answers what it does not accept.

* A slice that it refuses is tried again later, since a policy of the cluster may have refused it.
  The other slices are written all the same.
* A device that a refusal names is left out while it stays the same.
* An API server that does not know taints drops them silently. So before a write that could publish
  a device without a taint that repels pods, a dry run shows whether taints are kept.

When slices are written is decided in :mod:`.pool_publisher`, and which in :mod:`.plan`.

It must not know how slices are watched, or other pools.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from drakit.backoff import Backoff
from drakit.kube import AlreadyExistsError, ConflictError, InvalidError, NotFoundError
from drakit.resource.features import Feature, dropped_from_slice, refusal
from drakit.resource.raw import children, text
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.devices.model import DesiredDevice, DesiredPool
from drakit_nodeplugin.slices.api import NodeOwner, SliceApi, SliceStore
from drakit_nodeplugin.slices.contents import SliceContent, StoredSlice, same_content
from drakit_nodeplugin.slices.plan import KnownSlice, Plan, SliceWrite

__all__ = (
    "DroppedError",
    "PoolContext",
    "PoolWriter",
    "StaleError",
    "may_lose_taints",
)

logger = logging.getLogger(__name__)


class StaleError(Exception):
    """The plan is outdated: plan again."""


class DroppedError(Exception):
    """The API server drops fields, so the plan is wrong: plan again at once. Published devices may
    lack these fields, or the pool may be incomplete. Raised once for each feature."""


def may_lose_taints(write: SliceWrite) -> bool:
    """Return whether an API server without taints would publish devices that must have some."""
    return _repels_pods(write) and not _has_taints(write.stored)


def _repels_pods(write: SliceWrite) -> bool:
    """Return whether a device of the slice has a taint that repels pods."""
    devices = write.content.devices
    if any(taint.effect != "None" for each in devices.values() for taint in each.taints):
        return True
    # A device that is only known by name keeps its driver's published taints.
    return any(
        text(taint, "effect") != "None"
        for source in write.sources
        for name, body in source.bodies()[0].items()
        if name in devices and devices[name].device is None
        for taint in children(body, "taints")
    )


def _has_taints(stored: StoredSlice | None) -> bool:
    """Return whether a published slice has taints. Then no API server drops those of its next
    version, so its answer proves nothing about the taints of other slices."""
    return stored is not None and any(
        children(body, "taints") for body in stored.bodies()[0].values()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolContext:
    """What the pools of a driver share."""

    manager: DeviceManager
    node: str
    owner: NodeOwner
    api: SliceApi
    store: SliceStore
    primary: asyncio.Event
    dropped: Callable[[], Collection[Feature]]
    """Returns the features that the API server is known to drop."""

    on_dropped: Callable[[Collection[Feature]], bool]
    """Receives the features that an answer lacks; returns whether plans are wrong by that."""

    taints_kept: asyncio.Event
    """Set once a dry run has shown that the API server keeps taints."""

    on_left_out: Callable[[Mapping[str, str]], None]
    """Receives why devices are not published, by ``pool/device`` with the driver's pool names."""


class PoolWriter:
    """The writes of one pool. Times are the loop's."""

    def __init__(self, pool: str, context: PoolContext, *, retry: Backoff) -> None:
        """`retry` delays the next attempt to write refused slices."""
        self.known: dict[str, KnownSlice] = {}
        """The slices that were correct after their last write or check, by name."""

        self.error: str | None = None
        """Why slices are refused; None if none is."""

        self.refused: dict[str, SliceContent] = {}
        """The refused contents, by the slice's name."""

        self.retry_at = 0.0
        """When refused slices are tried again."""

        self._context = context
        self._pool = pool
        self._facts = {"driver": context.manager.driver, "pool": pool}
        self._retry = retry
        self._refused_devices: dict[str, tuple[DesiredDevice, str]] = {}

    def forget(self) -> None:
        """The API server may accept other slices than before."""
        self.known.clear()
        self.refused.clear()
        self._refused_devices.clear()

    # ------------------------------------------------------------ before a plan

    def begin_round(self, pool: DesiredPool, now: float) -> tuple[DesiredPool, Mapping[str, str]]:
        """Return the pool without refused devices, and why these are left out, by name."""
        if now >= self.retry_at:
            self.refused.clear()
        if not self._refused_devices:
            return pool, {}
        wanted = {each.name: each for each in pool.devices}
        self._refused_devices = {
            name: (device, why)
            for name, (device, why) in self._refused_devices.items()
            if name in wanted and _is_unchanged(device, wanted[name])
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
        # Before anything is written: a broken device must not be offered to pods for a moment.
        for write in writes:
            if not self._context.taints_kept.is_set() and may_lose_taints(write):
                again |= await self._try(write, errors, dry_run=True)
        for each in plan.delete:
            await self._delete(each)
        for write in writes:
            if write.name not in errors:
                again |= await self._try(write, errors)
        logger.info(
            "slices published",
            extra=self._facts
            | {
                "creates": len(plan.create),
                "updates": len(plan.replace),
                "deletes": len(plan.delete),
            },
        )
        return again

    async def _delete(self, stored: StoredSlice) -> None:
        self._check_primary()
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
        """Write one slice. A refusal goes to `errors`; returns whether it names devices, without
        which there is something to write."""
        if not dry_run:
            self._check_primary()
        api, body = self._context.api, write.body()
        try:
            answer = await api.write(body, exists=write.stored is not None, dry_run=dry_run)
        except InvalidError as error:
            errors[write.name] = error
            return self._refuse(write, body, error)
        except (ConflictError, AlreadyExistsError, NotFoundError):
            # The store is outdated.
            await self._read(write.name)
            raise
        dropped = dropped_from_slice(body, answer)
        if dry_run:
            # Another pool may have reported it already.
            if self._context.on_dropped(dropped) or Feature.TAINTS in dropped:
                raise DroppedError
            self._context.taints_kept.set()
            return False
        self._written(write, answer)
        if self._context.on_dropped(dropped):
            raise DroppedError
        return False

    def _check_primary(self) -> None:
        if not self._context.primary.is_set():
            raise StaleError

    def _written(self, write: SliceWrite, answer: Mapping[str, Any]) -> None:
        stored = StoredSlice.of(answer)
        self._context.store.apply(stored)
        self.known[write.name] = KnownSlice(
            version=stored.version, content=write.content, owner=write.pool.node_uid
        )
        self.refused.pop(write.name, None)

    def _refuse(self, write: SliceWrite, body: Mapping[str, object], error: InvalidError) -> bool:
        found = refusal(error.details, body)
        if self._context.on_dropped(found.features):
            raise DroppedError from error
        logger.error(
            "slice is refused by the API server",
            extra=self._facts | {"slice": write.name, "error": str(error)},
        )
        self.refused[write.name] = write.content
        named = {name: why for name, why in found.devices.items() if name in write.content.devices}
        for name, why in named.items():
            device = write.content.devices[name]
            self._refused_devices[name] = (device, f"the API server refuses it: {why}")
        return bool(named)

    async def _read(self, name: str) -> None:
        """Read one slice: the stored one is outdated."""
        store = self._context.store
        held = store.find(name)
        try:
            store.correct(await self._context.api.get(name), held=held)
        except NotFoundError:
            if (gone := store.find(name)) is not None:
                store.remove(name, gone.uid)


def _is_unchanged(old: DesiredDevice, new: DesiredDevice) -> bool:
    return same_content(
        SliceContent(devices={old.name: old}), SliceContent(devices={new.name: new})
    )
