"""
A stream of messages from another process, of which only the last one counts.

Messages are received as they come, as bytes: one that nobody takes is never parsed. A process that
floods the stream is cut off, because receiving alone costs time of this loop.

It must not know the meaning of a message, or its sender.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from drakit.rate_limiter import RateLimiter
from drakit.tasks import cancelled_by_owner
from drakit_nodeplugin.endpoints.latest_value import LatestValue

__all__ = ("FloodError", "LatestMessages")

MAX_PER_SECOND = 100.0
"""Messages that may come all the time."""

MAX_BURST = 200.0
"""Messages that may come at once, as when a bus is plugged in."""


class FloodError(Exception):
    """More messages came than anybody could need. The text names the rate."""

    def __init__(self) -> None:
        super().__init__(f"it sent more than {MAX_PER_SECOND:.0f} messages a second")


class LatestMessages:
    """Receives one stream until it ends, and returns the last message that nobody has taken."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self._latest = LatestValue[bytes]()
        self._task = asyncio.create_task(self._receive(stream))

    async def wait(self) -> None:
        """Wait for the next message, or the end of the stream, and leave it to `next`."""
        await self._latest.wait()

    async def next(self) -> bytes:
        """
        Wait for the next message; raises the error that ended the stream, :class:`FloodError` after
        a flood, and StopAsyncIteration at its end. A message that was not taken by then is lost.
        """
        while True:
            message, _ = await self._latest.next()
            if message is not None:
                return message

    def end(self, error: Exception) -> None:
        """Stop receiving; `next` raises this error, unless the stream ended before."""
        self._latest.end(error)
        self._task.cancel()

    async def _receive(self, stream: AsyncIterator[bytes]) -> None:
        limiter = RateLimiter(burst=MAX_BURST, per_second=MAX_PER_SECOND)
        try:
            async for message in stream:
                if not limiter.take():
                    raise FloodError
                self._latest.replace(message)
        except asyncio.CancelledError:
            if cancelled_by_owner():
                raise
            self._latest.end(ConnectionError("its connection was closed"))
        except Exception as error:
            self._latest.end(error)
        else:
            self._latest.end(StopAsyncIteration())
