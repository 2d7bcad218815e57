"""
The event loop of all daemons, and of the threads in which drivers run: uvloop if it is installed.

With uvloop, preparing a claim takes a quarter less CPU time. If a driver's image does not contain
uvloop, the standard loop is used.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

try:
    from uvloop import new_event_loop
except ImportError:  # pragma: no cover - the images of this project have it
    from asyncio import new_event_loop

__all__ = ("new_event_loop", "run", "run_in_thread")

ResultT = TypeVar("ResultT")


def run(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine as :func:`asyncio.run` does, in a loop from :func:`new_event_loop`."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


async def run_in_thread(
    name: str,
    main: Callable[[asyncio.Event], Coroutine[Any, Any, None]],
    *,
    stop_seconds: float,
) -> None:
    """
    Run a coroutine in a thread with its own event loop. If the coroutine fails, raise its error.

    If the caller is canceled, the event that was passed to the coroutine is set. The coroutine then
    has `stop_seconds` to return.
    """
    loop, stop, done = new_event_loop(), asyncio.Event(), Future[None]()

    def run_main() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(main(stop))
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    ended = asyncio.wrap_future(done)
    threading.Thread(target=run_main, name=name, daemon=True).start()
    try:
        await asyncio.shield(ended)
    finally:
        if not ended.done():
            with suppress(RuntimeError):  # the loop has just been closed
                loop.call_soon_threadsafe(stop.set)
            await asyncio.wait({ended}, timeout=stop_seconds)
