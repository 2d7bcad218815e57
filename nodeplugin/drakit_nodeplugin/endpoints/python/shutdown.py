"""
The end of a driver's event loop: what still runs in it is cancelled, and what does not end is left.

As :func:`asyncio.run` does it, but each step has its time, because a vendor's task that swallows
its cancellation must not keep the driver from being started again. And tasks that the driver left
behind are named: they are leaks, and the log is where their author looks.

It must not know what the tasks do.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from drakit_nodeplugin.endpoints.errors import traceback_of

__all__ = ("end_loop",)

logger = logging.getLogger(__name__)

CALLS_SECONDS = 30.0
"""How long calls that were cancelled may take to undo what they began."""

TASKS_SECONDS = 5.0
"""The same for tasks that the driver left behind, for its generators, and for its threads."""

MAX_NAMED = 10
"""Tasks that a log line names."""

MAX_EXITS = 10
"""How often tasks may raise SystemExit through the loop while one step of its end runs."""

_Task = asyncio.Task[Any]

_OURS = str(Path(__file__).parent)

_left: set[_Task] = set()
"""Tasks that did not end. They are kept: as garbage they would run their clean-up in whichever
thread collects it, which may be that of the daemon's loop."""


def end_loop(
    loop: asyncio.AbstractEventLoop,
    *,
    stream: AsyncIterator[object] | None,
    executor: Executor,
    driver: str,
) -> None:
    """End all that runs in a loop, and close it; called in its thread, and raises nothing."""
    steps = (
        _end_calls(),
        _close(getattr(stream, "aclose", None), driver),
        _end_leaked_tasks(driver),
        _close(loop.shutdown_asyncgens, driver),
    )
    for step in steps:
        _run(loop, step, driver)
    loop.close()
    # Not in this thread: it would wait for a job that hangs.
    ending = threading.Thread(target=executor.shutdown, name=f"{driver}-end", daemon=True)
    try:
        ending.start()
    except RuntimeError:  # the process may have no more threads
        return
    ending.join(TASKS_SECONDS)
    if ending.is_alive():
        logger.error("driver's threads do not end and are left", extra={"driver": driver})


def _run(loop: asyncio.AbstractEventLoop, step: Coroutine[Any, Any, None], driver: str) -> None:
    """Run one step, whatever other tasks raise through the loop meanwhile."""
    task = loop.create_task(step)
    for _ in range(MAX_EXITS):
        try:
            return loop.run_until_complete(task)
        except BaseException as error:
            facts = {"driver": driver, "exception": traceback_of(error)}
            logger.error("driver fails as its loop ends", extra=facts)
            if task.done():
                return None
    return None


async def _end_calls() -> None:
    """End the tasks that we began: the driver's calls among them, with what those began."""
    calls = {task for task in _other_tasks() if _is_ours(task)}
    for call in calls:
        if not call.cancelling():  # a second time would cut the clean-up of one that was given up
            call.cancel()
    if calls:
        await asyncio.wait(calls, timeout=CALLS_SECONDS)


async def _end_leaked_tasks(driver: str) -> None:
    leaked = _other_tasks()
    if not leaked:
        return
    logger.warning("driver left tasks behind", extra={"driver": driver, **_facts_of(leaked)})
    for task in leaked:
        task.cancel()
    await asyncio.wait(leaked, timeout=TASKS_SECONDS)
    if left := _other_tasks():
        _left.update(left)
        facts = {"driver": driver, **_facts_of(left)}
        logger.error("driver's tasks do not end and are left", extra=facts)


async def _close(close: Callable[[], Awaitable[object]] | None, driver: str) -> None:
    """Let a generator clean up, in the loop in which it ran; it has nothing to do if it ended."""
    if close is None:
        return
    closing = asyncio.ensure_future(close())
    await asyncio.wait({closing}, timeout=TASKS_SECONDS)
    if closing.done() and not closing.cancelled() and (error := closing.exception()) is not None:
        facts = {"driver": driver, "exception": traceback_of(error)}
        logger.error("driver fails to end its stream", extra=facts)


def _other_tasks() -> set[_Task]:
    return asyncio.all_tasks() - {asyncio.current_task()}


def _is_ours(task: _Task) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and code.co_filename.startswith(_OURS)


def _facts_of(tasks: set[_Task]) -> dict[str, object]:
    names = sorted(
        f"{task.get_name()} ({getattr(task.get_coro(), '__qualname__', 'unknown')})"
        for task in tasks
    )
    more = ", ..." if len(names) > MAX_NAMED else ""
    return {"count": len(names), "tasks": ", ".join(names[:MAX_NAMED]) + more}
