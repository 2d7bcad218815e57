"""
Polls the files of all drivers of the process, together in one thread hop per round.

Each driver has files that others may remove or change without notice: sockets, locks, CDI files and
a checkpoint. Checking one takes a few microseconds, a round trip to a thread a hundred. With fifty
drivers, separate round trips would cost a few percent of a processor. So one thread checks all, and
only those with something to do are woken.

Checks that can hang together, because they use the same disk, belong to one poller; checks of
another disk must not wait for them. It must not know what is checked, or what happens then.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass

__all__ = ("FilePoller",)

PERIOD_SECONDS = 1.0
"""Between two rounds: half of the 2 s within which a CDI file must be restored, and how long slices
wait after the instance that published them has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waiter:
    check: Callable[[], bool]
    rounds: int


class FilePoller:
    """Wakes waiters when their check finds something; used in one event loop."""

    def __init__(self, *, period_seconds: float = PERIOD_SECONDS) -> None:
        self._period_seconds = period_seconds
        self._waiters: dict[asyncio.Future[None], _Waiter] = {}

    async def until(self, check: Callable[[], bool], *, rounds: int = 1) -> None:
        """
        Wait until a check finds something to do. It runs in each round, or in one of several.

        It runs in a thread, and may block. A check that raises also wakes its waiter, which then
        finds the error itself, and knows how to handle it.
        """
        found: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[found] = _Waiter(check=check, rounds=rounds)
        try:
            await found
        finally:
            del self._waiters[found]

    async def run(self) -> None:
        """Poll until cancelled."""
        for number in itertools.count():
            await asyncio.sleep(self._period_seconds)
            due = [
                (found, waiter.check)
                for found, waiter in self._waiters.items()
                if number % waiter.rounds == 0
            ]
            for found in await asyncio.to_thread(_poll, due) if due else ():
                if not found.done():  # the waiter may have been cancelled
                    found.set_result(None)


def _poll(
    due: Collection[tuple[asyncio.Future[None], Callable[[], bool]]],
) -> list[asyncio.Future[None]]:
    return [found for found, check in due if _finds_something(check)]


def _finds_something(check: Callable[[], bool]) -> bool:
    with contextlib.suppress(Exception):
        return check()
    return True
