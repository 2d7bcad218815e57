"""
Brings the store up to date with the endpoints of a driver: only what differs, and not too often.

A store that fails is tried again for as long as it takes: devices are published all the same, and
what is not stored is only what a restart would remember.

While one instance of a driver replaces another, both have endpoints of the same names. Only the
primary one writes; whoever becomes it reads first what the other has left.

It must not know why an endpoint is stored as it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from drakit.backoff import Backoff
from drakit_nodeplugin.devices.stored import EndpointStore, StoredEndpoint

__all__ = ("EndpointWriter",)

logger = logging.getLogger(__name__)

PACE_SECONDS = 1.0
"""Between two rounds of writes: a driver whose devices come and go by the thousand writes its names
once a second."""

RETRY_SECONDS = (1.0, 60.0)
"""First and longest delay after a failure."""


class EndpointWriter:
    """What the store has, and what it is to have."""

    def __init__(
        self,
        driver: str,
        store: EndpointStore,
        *,
        primary: asyncio.Event,
        rows: Callable[[], Mapping[str, StoredEndpoint]],
        on_loaded: Callable[[Mapping[str, StoredEndpoint]], None],
        on_written: Callable[[], None],
    ) -> None:
        """Nothing is written while `primary` is not set. `rows` says what is to be stored, by name;
        `on_loaded` hears of what others have stored, before the start or until this instance became
        the primary one, `on_written` whenever the store has got what it was to have."""
        self._driver = driver
        self._store = store
        self._primary = primary
        self._rows = rows
        self._on_loaded = on_loaded
        self._on_written = on_written
        self._wanted = asyncio.Event()
        self._told: str | None = None
        self._stored: dict[str, StoredEndpoint] = {}
        self._loaded = False
        self._current = False
        """Whether nobody else can have written since the store was read."""

    @property
    def loaded(self) -> bool:
        """Whether it is known what others have stored; of a primary instance: all of it."""
        return self._loaded and (self._current or not self._primary.is_set())

    @property
    def current(self) -> bool:
        """Whether this instance is the primary one, as of the last look, and has read the store."""
        return self._current

    @property
    def stored(self) -> Mapping[str, StoredEndpoint]:
        """What the store has, by the endpoint's name."""
        return self._stored

    def changed(self) -> None:
        """Something is to be stored, perhaps."""
        self._wanted.set()

    def look(self) -> None:
        """See whether this instance is the primary one; nobody tells when it is not any more."""
        if not self._primary.is_set():
            self._current = False
        elif not self._current:
            self._wanted.set()

    async def load(self) -> bool:
        """Read what was stored before the start; give whether that could be done."""
        if self._loaded:
            return True
        try:
            await self._read()
        except Exception as error:
            self._failed("stored endpoints cannot be read, trying again", error)
            return False
        return True

    async def run(self) -> None:
        """Write until cancelled."""
        first, limit = RETRY_SECONDS
        backoff = Backoff(first_seconds=first, limit_seconds=limit)
        while True:
            if await self.load():
                break
            await asyncio.sleep(backoff.next_seconds())
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            self.look()
            if not self._primary.is_set():
                continue  # all of it is written when it is
            try:
                if not self._current:
                    await self._read()
                await self._write()
            except Exception as error:
                self._failed("endpoints cannot be stored, trying again", error)
                self._wanted.set()
                await asyncio.sleep(backoff.next_seconds())
                continue
            backoff.succeeded()
            self._told = None
            await asyncio.sleep(PACE_SECONDS)

    async def _read(self) -> None:
        primary = self._primary.is_set()
        rows = await self._store.endpoints()
        self._loaded, self._current = True, primary
        self._stored = {row.name: row for row in rows}
        self._on_loaded(self._stored)

    async def _write(self) -> None:
        rows = self._rows()
        new = {name: row for name, row in rows.items() if self._stored.get(name) != row}
        if new and self._primary.is_set():
            # At once: of a driver with many endpoints they come, and go, together.
            await self._store.write_endpoints(new.values())
            self._stored.update(new)
        gone = [name for name in self._stored if name not in rows]
        if gone and self._primary.is_set():
            await self._store.forget_endpoints(gone)
            for name in gone:
                del self._stored[name]
        self._on_written()

    def _failed(self, message: str, error: Exception) -> None:
        # Anything may be raised: the store is an own layer's, whose errors are not known here.
        if self._told != str(error):
            self._told = str(error)
            logger.warning(message, extra={"driver": self._driver, "error": self._told})
