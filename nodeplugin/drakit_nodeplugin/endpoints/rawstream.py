"""
A stream of messages from another process, of which only the last one counts.

Messages are read as they come, as bytes: what nobody takes is never parsed. Who sends more than
anybody could need is cut off, since reading alone costs this loop's time.

It must not know what is in a message, or who sends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from drakit.rate_limiter import RateLimiter
from drakit.tasks import cancelled_by_owner

__all__ = ("FloodError", "LatestMessages")

PACE_SECONDS = 0.05
"""From one taking of a message to the next; the first is taken at once."""

MAX_A_SECOND = 100.0
"""Messages that may come for ever."""

MAX_AT_ONCE = 200.0
"""Messages that may come in one go, as when a bus is plugged in."""


class FloodError(Exception):
    """More messages came than anybody could need. The text says of which rate."""

    def __init__(self) -> None:
        super().__init__(f"it sent more than {MAX_A_SECOND:.0f} messages a second")


class LatestMessages:
    """Reads one stream until it ends, and gives the last message that nobody has taken yet."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._latest: bytes | None = None
        self._over: Exception | None = None
        self._taken_at = -PACE_SECONDS
        self._task = self._loop.create_task(self._read(stream))

    async def wait(self) -> None:
        """Wait until there is a message to be taken, or the stream has ended."""
        await self._news.wait()

    async def next(self) -> bytes:
        """
        Wait for the next message; raise what ended the stream, :class:`FloodError` for a flood, and
        StopAsyncIteration if it just ended. What is over gives nothing any more.
        """
        while True:
            await self._news.wait()
            if self._over is None:
                # A moment later there may be a newer one.
                await asyncio.sleep(max(0.0, self._taken_at + PACE_SECONDS - self._loop.time()))
            if self._over is not None:
                raise self._over
            self._news.clear()
            latest, self._latest = self._latest, None
            if latest is not None:
                self._taken_at = self._loop.time()
                return latest

    def end(self, error: Exception) -> None:
        """Read no more; who waits for a message gets this error, unless the stream ended before."""
        self._end(error)
        self._task.cancel()

    def _end(self, error: Exception) -> None:
        if self._over is None:
            self._over, self._latest = error, None
            self._news.set()

    async def _read(self, stream: AsyncIterator[bytes]) -> None:
        try:
            await self._read_all(stream)
        except asyncio.CancelledError:
            if cancelled_by_owner():
                raise
            self._end(ConnectionError("its connection was closed"))
        except Exception as error:
            self._end(error)
        else:
            self._end(StopAsyncIteration())

    async def _read_all(self, stream: AsyncIterator[bytes]) -> None:
        allowance = RateLimiter(burst=MAX_AT_ONCE, per_second=MAX_A_SECOND)
        async for message in stream:
            if not allowance.take():
                raise FloodError
            self._latest = message
            self._news.set()
