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
from collections.abc import Callable, Collection

__all__ = ("Looks",)

PERIOD_SECONDS = 1.0
"""Between two rounds: half of the 2 s within which a CDI file must be back, and how long slices
wait when the instance that published them has ended."""

Look = Callable[[], bool]


class Looks:
    """Those who wait for something that a look can see; in one loop."""

    def __init__(self, *, period_seconds: float = PERIOD_SECONDS) -> None:
        self._period_seconds = period_seconds
        self._waiting: dict[asyncio.Future[None], Look] = {}

    async def until(self, look: Look) -> None:
        """
        Wait until a look says that there is something to do; the first is made in the next round.

        It is made in a thread, and may block. One that raises says so too: whoever waits looks more
        closely then, and knows what to do about it.
        """
        something: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[something] = look
        try:
            await something
        finally:
            del self._waiting[something]

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(self._period_seconds)
            if not self._waiting:
                continue
            for something in await asyncio.to_thread(_look, [*self._waiting.items()]):
                if not something.done():  # who waited may have been cancelled
                    something.set_result(None)


def _look(waiting: Collection[tuple[asyncio.Future[None], Look]]) -> list[asyncio.Future[None]]:
    return [something for something, look in waiting if _says(look)]


def _says(look: Look) -> bool:
    with contextlib.suppress(Exception):
        return look()
    return True
