"""
Runs the parts of a daemon as background tasks. If a part ends without a stop request, the daemon
ends.

``asyncio.TaskGroup`` detects only exceptions. It does not detect that a loop returns, or that a
library cancels a task (closing a ``grpc.aio`` channel cancels its reader). The composition root
decides what happens when a part has ended, and limits the duration of the exit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping


class TaskEndedError(Exception):
    """A part that must run until it is stopped has ended."""

    def __init__(self, name: str, how: str) -> None:
        super().__init__(f"{name} {how}")
        self.name = name


def cancelled_by_owner() -> bool:
    """Return whether the owner canceled the current task. If it did not, a CancelledError comes
    from a library."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def until_stopped(name: str, part: Callable[[], Awaitable[None]]) -> None:
    """Run a part of a daemon until its owner stops it. If the part ends for any other reason, raise
    an error."""
    try:
        await part()
    except asyncio.CancelledError:
        if cancelled_by_owner():
            raise
        raise TaskEndedError(name, "was canceled, but not by its owner") from None
    raise TaskEndedError(name, "returned, but must run until it is stopped")


async def run(parts: Mapping[str, Callable[[], Awaitable[None]]]) -> None:
    """Run parts concurrently. If a part ends, stop the others, and raise the error."""
    async with asyncio.TaskGroup() as group:
        for name, part in parts.items():
            group.create_task(until_stopped(name, part), name=name)


def stop_signals() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


async def run_until(
    stopping: asyncio.Event,
    parts: Mapping[str, Callable[[], Awaitable[None]]],
    *,
    drain: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Run parts until a stop is requested. Then call `drain`, and cancel the parts. If a part ends
    earlier, raise an error."""
    running = asyncio.create_task(run(parts))
    asked = asyncio.create_task(stopping.wait())
    await asyncio.wait({running, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if running.done():
        await running
    if drain is not None:
        await drain()
    running.cancel()
    await asyncio.wait({running})


LEFT_THREADS_SECONDS = 3.0
"""How long to wait for threads that are still running when everything else has ended."""


def limit_exit(code: int, *, seconds: float = LEFT_THREADS_SECONDS) -> None:
    """
    Limit the time that the process takes to exit, even if a driver has left behind a thread that
    does not end.

    At exit, Python waits for the threads of executors without a time limit.
    """
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
