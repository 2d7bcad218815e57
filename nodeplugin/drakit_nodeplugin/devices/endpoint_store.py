"""
The endpoints of a driver in the checkpoint. Only names are stored, so that a restart finishes
removals that have begun.

As in the kubelet's own checkpoint, an endpoint exists after a restart as a stopped one, until it
returns or its grace period has ended. Only differences are written, and at most once a second. A
failed write is retried. Devices are published regardless.

While one instance of a driver replaces another, both have endpoints of the same names. Only the
primary instance writes. An instance that becomes primary first reads the rows of the other.

It must not know the reasons for an endpoint's state, the format of rows, or devices beyond their
names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from drakit.backoff import Backoff
from drakit.logs import ProblemLog
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
        primary: asyncio.Event,
        rows: Callable[[], Mapping[str, StoredEndpoint]],
        on_loaded: Callable[[Mapping[str, StoredEndpoint]], None],
        on_written: Callable[[], None],
    ) -> None:
        """
        Nothing is written while `primary` is not set. `rows` returns the desired rows, by name.

        `on_loaded` receives the rows of others: at the start, and when this instance becomes the
        primary one. `on_written` is called whenever the store is up to date.
        """
        self._store = store
        self._primary = primary
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

        self.current = False
        """Whether no other instance can have written since the store was read: this instance was
        primary at the last check, and has read the store."""

        self._loaded = False

    @property
    def loaded(self) -> bool:
        """Whether the rows of others are known; for a primary instance, all of them."""
        return self._loaded and (self.current or not self._primary.is_set())

    def changed(self) -> None:
        """Note that the desired rows may differ from the stored ones."""
        self._wanted.set()

    def check_primary(self) -> None:
        """Check whether this instance is primary: nothing notifies it when it no longer is."""
        if not self._primary.is_set():
            self.current = False
        elif not self.current:
            self._wanted.set()

    async def load(self) -> bool:
        """Read the rows from before the start; return whether that succeeded."""
        if self._loaded:
            return True
        try:
            await self._read()
        except CheckpointError as error:
            self._unreadable.report(str(error))
            return False
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
            self.check_primary()
            if not self._primary.is_set():
                continue  # all rows are written once this instance is primary
            try:
                if not self.current:
                    await self._read()
                await self._write()
            except CheckpointError as error:
                self._unwritable.report(str(error))
                self._wanted.set()
                await asyncio.sleep(backoff.next_seconds())
                continue
            backoff.succeeded()
            self._unwritable.report(None)
            await asyncio.sleep(PACE_SECONDS)

    async def _read(self) -> None:
        primary = self._primary.is_set()
        rows = await self._store.endpoints()
        self._loaded, self.current = True, primary
        self.stored = {row.name: row for row in rows}
        self._on_loaded(self.stored)

    async def _write(self) -> None:
        rows = self._rows()
        new = {name: row for name, row in rows.items() if self.stored.get(name) != row}
        if new and self._primary.is_set():
            # In one transaction: the endpoints of a driver often come and go together.
            await self._store.write_endpoints(new.values())
            self.stored.update(new)
        gone = [name for name in self.stored if name not in rows]
        if gone and self._primary.is_set():
            await self._store.forget_endpoints(gone)
            for name in gone:
                del self.stored[name]
        self._on_written()
