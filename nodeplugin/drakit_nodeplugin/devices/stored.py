"""
The device manager's state in the checkpoint: the endpoints of a driver, and the devices that claims
still hold.

The names of endpoints and devices are stored, so that removals can be finished after a restart. As
with the kubelet's own checkpoint, an endpoint is treated as stopped after a restart, until it
returns or its grace period has ended. Only differences are written, at most once a second. Failed
writes are retried. Publishing does not wait for writes.

Only the checkpoint shows whether a claim holds a device that its endpoint no longer lists.
Therefore, such a device remains until a checkpoint query no longer finds such a claim. The first
query is made immediately, and others follow periodically.

Knows only the names of devices. Does not depend on taints.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress

from drakit_daemon.backoff import Backoff
from drakit_daemon.logs import ProblemLog
from drakit_driver.runtime.contract import DeviceKey
from drakit_nodeplugin.state.checkpoint import Checkpoint, CheckpointError
from drakit_nodeplugin.state.records import StoredEndpoint

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- endpoints

PACE_SECONDS = 1.0
"""Minimum time between two rounds of writes. Even a driver with thousands of changing devices
writes their names at most once a second."""

RETRY_SECONDS = (1.0, 60.0)
"""Initial and maximum delay after a failure."""


class EndpointWriter:
    """Writes changed endpoint rows to the store."""

    def __init__(
        self,
        driver: str,
        store: Checkpoint,
        *,
        rows: Callable[[], Mapping[str, StoredEndpoint]],
        on_loaded: Callable[[Mapping[str, StoredEndpoint]], None],
        on_written: Callable[[], None],
    ) -> None:
        """
        Create a writer. `rows` returns the desired rows, keyed by name. `on_loaded` is called with
        the rows from before the start. `on_written` is called whenever the store is up to date.
        """
        self._store = store
        self._rows = rows
        self._on_loaded = on_loaded
        self._on_written = on_written
        self._wanted = asyncio.Event()
        facts = {"driver": driver}
        self._unreadable = ProblemLog(
            logger, "stored endpoints cannot be read, retrying", facts=facts
        )
        self._unwritable = ProblemLog(logger, "endpoints cannot be stored, retrying", facts=facts)
        self.stored: dict[str, StoredEndpoint] = {}
        """The rows in the store, keyed by endpoint name."""

        self.loaded = False
        """Whether the rows from before the start are known."""

    def changed(self) -> None:
        """Record that the desired rows may differ from the stored ones."""
        self._wanted.set()

    async def load(self) -> bool:
        """Read the rows from before the start. Return whether that succeeded."""
        if self.loaded:
            return True
        try:
            rows = await self._store.endpoints()
        except CheckpointError as error:
            self._unreadable.report(str(error))
            return False
        self.loaded = True
        self.stored = {row.name: row for row in rows}
        self._on_loaded(self.stored)
        return True

    async def run(self) -> None:
        """Write until canceled."""
        backoff = Backoff(*RETRY_SECONDS)
        while True:
            if await self.load():
                break
            await asyncio.sleep(backoff.next_seconds())
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self._write()
            except CheckpointError as error:
                self._unwritable.report(str(error))
                self._wanted.set()
                await asyncio.sleep(backoff.next_seconds())
                continue
            backoff.succeeded()
            self._unwritable.report(None)
            await asyncio.sleep(PACE_SECONDS)

    async def _write(self) -> None:
        rows = self._rows()
        new = {name: row for name, row in rows.items() if self.stored.get(name) != row}
        if new:
            # Use one transaction, because a driver's endpoints often appear and disappear together.
            await self._store.write_endpoints(new.values())
            self.stored.update(new)
        gone = [name for name in self.stored if name not in rows]
        if gone:
            await self._store.forget_endpoints(gone)
            for name in gone:
                del self.stored[name]
        self._on_written()


# ---------------------------------------------------------------- gone devices

GONE_SECONDS = 1.0
"""Time between two checks for claims that hold gone devices."""


class GoneDevices:
    """Checks whether claims still hold the gone devices of one driver."""

    def __init__(
        self,
        driver: str,
        checkpoint: Checkpoint,
        *,
        gone: Callable[[], Iterable[DeviceKey]],
        on_free: Callable[[Collection[DeviceKey]], None],
    ) -> None:
        """Create the object. `gone` returns the current gone devices. `on_free` is called with the
        gone devices that no claim holds."""
        self._checkpoint = checkpoint
        self._gone = gone
        self._on_free = on_free
        self._changed = asyncio.Event()
        self._problems = ProblemLog(
            logger,
            "devices that are gone stay published: the checkpoint cannot be read",
            facts={"driver": driver},
        )

    def changed(self) -> None:
        """Record that the set of gone devices may have changed."""
        self._changed.set()

    async def run(self) -> None:
        """Check until canceled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(GONE_SECONDS if any(self._gone()) else None):
                    await self._changed.wait()
            self._changed.clear()
            await self._check()

    async def _check(self) -> None:
        # Get the gone devices before the query: a device that vanishes after the query may have
        # been given to a claim in between.
        gone = frozenset(self._gone())
        if not gone:
            return
        try:
            used = await self._checkpoint.devices_in_use()
        except CheckpointError as error:
            self._problems.report(str(error))
            return
        self._problems.report(None)
        if free := [key for key in gone if key.name not in used.get(key.pool, ())]:
            self._on_free(free)
