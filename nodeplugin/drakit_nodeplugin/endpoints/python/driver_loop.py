"""
The event loop of a driver, seen from outside: a watchdog notices when it is blocked, and
:func:`end_loop` ends it.

The daemon's loop asks the driver's for a sign of life once a second. A driver that blocks harms its
own calls alone, so this ends in the log and a gauge, not in a restart: nothing can end its thread.

The loop ends as :func:`asyncio.run` ends one, but each step has its time, because a vendor's task
that swallows its cancellation must not keep the driver from being started again. Tasks that the
driver left behind are leaks, and their names are logged for its author.

It must not know what drivers or their tasks do, or whether anybody waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor
from itertools import chain, count
from pathlib import Path
from typing import Any

from drakit_nodeplugin.endpoints.failures import traceback_of

__all__ = (
    "Watchdog",
    "end_loop",
    "where_is",
)

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- the watchdog

PERIOD_SECONDS = 1.0
"""Between two checks."""

LOG_SECONDS = (2, 10, 60, 300)
"""How long a loop must have been blocked to be logged; after the last, each time that it has lasted
as long again."""

INNERMOST = 3
"""Frames that are named besides the driver's own."""

_OURS = frozenset({"drakit", "drakit_nodeplugin"})


class Watchdog:
    """Watches one event loop, which runs in a thread of its own."""

    def __init__(
        self, driver: str, *, loop: asyncio.AbstractEventLoop, thread: int, package: str
    ) -> None:
        """`thread` is the thread's identifier. `package` is that of the driver's class: a call in
        it explains most."""
        self._driver = driver
        self._loop = loop
        self._thread = thread
        self.package = package
        self._answered_at: float | None = None
        """By the loops' clock: all have the same."""
        self.blocked: str | None = None
        """What the driver's loop is blocked in; None while it answers."""

    async def run(self) -> None:
        """Watch until cancelled, or until the loop is closed."""
        while True:
            self._answered_at = None
            asked_at = asyncio.get_running_loop().time()
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:
                return
            await self._wait(asked_at)

    def _answer(self) -> None:
        """Called in the loop that is watched."""
        self._answered_at = self._loop.time()

    async def _wait(self, asked_at: float) -> None:
        """Wait for an answer, however long it takes."""
        waited = 0.0
        due = _log_after()
        log_after = next(due)
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            if (answered_at := self._answered_at) is not None:
                break
            # Not by the clock: when all of the process stood still, that was not the driver.
            waited += PERIOD_SECONDS
            if waited >= log_after:
                log_after = next(due)
                self._log_blocked(waited)
        if self.blocked is not None:
            self.blocked = None
            facts = {"driver": self._driver, "seconds": round(answered_at - asked_at, 1)}
            logger.info("driver answers again", extra=facts)

    def _log_blocked(self, seconds: float) -> None:
        where = where_is(self._thread, package=self.package)
        self.blocked = f"its event loop is blocked in {where}"
        facts = {"driver": self._driver, "seconds": seconds, "where": where}
        logger.warning("driver blocks its event loop", extra=facts)


def _log_after() -> Iterator[int]:
    last = LOG_SECONDS[-1]
    return chain(LOG_SECONDS, count(2 * last, last))


def where_is(thread: int, *, package: str) -> str:
    """Return what a thread is doing: the driver's innermost call, then those that it has made."""
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage] - documented
    calls: list[tuple[str, str]] = []
    while frame is not None:
        code = frame.f_code
        text = f"{code.co_qualname} ({code.co_filename}, line {frame.f_lineno})"
        calls.append((str(frame.f_globals.get("__name__", "")).partition(".")[0], text))
        frame = frame.f_back
    own = _first(calls, lambda name: name == package)
    if own is None:
        own = _first(calls, lambda name: name not in sys.stdlib_module_names | _OURS)
    inner = [text for _, text in calls[: INNERMOST if own is None else min(own, INNERMOST)]]
    first = [] if own is None else [calls[own][1]]
    return " > ".join([*first, *reversed(inner)]) or "a call that cannot be seen"


def _first(calls: Sequence[tuple[str, str]], fits: Callable[[str], bool]) -> int | None:
    return next((index for index, (name, _) in enumerate(calls) if fits(name)), None)


# ---------------------------------------------------------------- the end of the loop

CALLS_SECONDS = 30.0
"""How long calls that were cancelled may take to undo what they began."""

TASKS_SECONDS = 5.0
"""The same for tasks that the driver left behind, for its generators, and for its threads."""

MAX_NAMED = 10
"""Tasks that a log line names."""

MAX_EXITS = 10
"""How often tasks may raise SystemExit through the loop while one step of its end runs."""

_Task = asyncio.Task[Any]

_OUR_CODE = str(Path(__file__).parent)

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
    return code is not None and code.co_filename.startswith(_OUR_CODE)


def _facts_of(tasks: set[_Task]) -> dict[str, object]:
    names = sorted(
        f"{task.get_name()} ({getattr(task.get_coro(), '__qualname__', 'unknown')})"
        for task in tasks
    )
    more = ", ..." if len(names) > MAX_NAMED else ""
    return {"count": len(names), "tasks": ", ".join(names[:MAX_NAMED]) + more}
