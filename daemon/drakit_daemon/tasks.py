"""
Owners of background tasks: a part of a daemon that ends without a stop request ends the daemon.

``asyncio.TaskGroup`` notices exceptions only. It does not notice a loop that returns, or a
cancellation that a library raises itself (closing a ``grpc.aio`` channel does that to its reader).
The composition root decides what follows when a part has ended, and limits the time of the exit.

It must not know what the parts do.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Mapping


class TaskEndedError(Exception):
    """A part that must run until it is stopped has ended."""

    def __init__(self, name: str, how: str) -> None:
        super().__init__(f"{name} {how}")
        self.name = name


def cancelled_by_owner() -> bool:
    """Return whether our own stop caused a cancellation, rather than a library."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def until_stopped(name: str, part: Callable[[], Awaitable[None]]) -> None:
    """Run one part of a daemon; any end except our stop is an error."""
    try:
        await part()
    except asyncio.CancelledError:
        if cancelled_by_owner():
            raise
        raise TaskEndedError(name, "was canceled, but not by its owner") from None
    raise TaskEndedError(name, "returned, but must run until it is stopped")


async def run(parts: Mapping[str, Callable[[], Awaitable[None]]]) -> None:
    """Run parts concurrently; the first that ends stops the others and is raised."""
    async with asyncio.TaskGroup() as group:
        for name, part in parts.items():
            group.create_task(until_stopped(name, part), name=name)


LEFT_THREADS_SECONDS = 3.0
"""The grace period of threads that still run when everything else has ended."""


def limit_exit(code: int) -> None:
    """
    Limit the time that the process takes to exit, even if a driver has left a thread that does not
    end.

    At exit, Python waits without a limit for the threads of executors.
    """
    timer = threading.Timer(LEFT_THREADS_SECONDS, os._exit, (code,))
    timer.daemon = True
    timer.start()
