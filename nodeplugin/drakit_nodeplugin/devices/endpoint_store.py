"""
The endpoints of a driver in the checkpoint. Only names are stored, so that a restart finishes
removals that have begun.

As in the kubelet's own checkpoint, an endpoint exists after a restart as a stopped one, until it
returns or its grace period has ended. Only differences are written, and at most once a second. A
failed write is retried. Devices are published regardless.

It must not know the reasons for an endpoint's state, the format of rows, or devices beyond their
names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from drakit_daemon.backoff import Backoff
from drakit_daemon.logs import ProblemLog
from drakit_nodeplugin.state.checkpoint import Checkpoint, CheckpointError
from drakit_nodeplugin.state.records import StoredEndpoint

__all__ = ("EndpointWriter",)

logger = logging.getLogger(__name__)

PACE_SECONDS = 1.0
"""Minimum time between two rounds of writes. A driver whose devices change by the thousand writes
their names once a second."""

RETRY_SECONDS = (1.0, 60.0)
"""First and longest delay after a failure."""


class EndpointWriter:
    """Brings the store up to date."""

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
        `rows` returns the desired rows, by name. `on_loaded` receives the rows from before the
        start; `on_written` is called whenever the store is up to date.
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
        """The rows in the store, by the endpoint's name."""

        self.loaded = False
        """Whether the rows from before the start are known."""

    def changed(self) -> None:
        """Note that the desired rows may differ from the stored ones."""
        self._wanted.set()

    async def load(self) -> bool:
        """Read the rows from before the start; return whether that succeeded."""
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
        first, limit = RETRY_SECONDS
        backoff = Backoff(first_seconds=first, limit_seconds=limit)
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
            # In one transaction: the endpoints of a driver often come and go together.
            await self._store.write_endpoints(new.values())
            self.stored.update(new)
        gone = [name for name in self.stored if name not in rows]
        if gone:
            await self._store.forget_endpoints(gone)
            for name in gone:
                del self.stored[name]
        self._on_written()
