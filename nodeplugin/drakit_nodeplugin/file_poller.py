"""
Looks at files of all drivers of the process, again and again, in one hop to a thread.

Each driver has several things that nobody tells of: its sockets, locks, CDI files and checkpoint,
which others may remove or change. A look at one is a few microseconds, the way to a thread and back
a hundred. With fifty drivers the ways would be a few percent of a processor, so they are made
together, and only who has something to do is woken.

Looks that can hang together, as they are at one disk, belong together; those at another disk must
not wait for them.

It must not know what is looked at, or what is done then.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass

__all__ = ("FilePoller",)

PERIOD_SECONDS = 1.0
"""Between two rounds: half of the 2 s within which a CDI file must be back, and how long slices
wait when the instance that published them has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waiting:
    look: Callable[[], bool]
    rounds: int


class FilePoller:
    """Those who wait for something that a look can see; in one loop."""

    def __init__(self, *, period_seconds: float = PERIOD_SECONDS) -> None:
        self._period_seconds = period_seconds
        self._waiting: dict[asyncio.Future[None], _Waiting] = {}

    async def until(self, look: Callable[[], bool], *, rounds: int = 1) -> None:
        """
        Wait until a look says that there is something to do; it is made in each round, or in one of
        so many.

        It is made in a thread, and may block. One that raises says so too: whoever waits looks more
        closely then, and knows what to do about it.
        """
        something: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[something] = _Waiting(look=look, rounds=rounds)
        try:
            await something
        finally:
            del self._waiting[something]

    async def run(self) -> None:
        """Look until cancelled."""
        for number in itertools.count():
            await asyncio.sleep(self._period_seconds)
            due = [
                (something, waiting.look)
                for something, waiting in self._waiting.items()
                if number % waiting.rounds == 0
            ]
            for something in await asyncio.to_thread(_look, due) if due else ():
                if not something.done():  # who waited may have been cancelled
                    something.set_result(None)


def _look(
    due: Collection[tuple[asyncio.Future[None], Callable[[], bool]]],
) -> list[asyncio.Future[None]]:
    return [something for something, look in due if _says(look)]


def _says(look: Callable[[], bool]) -> bool:
    with contextlib.suppress(Exception):
        return look()
    return True
