"""
A driver's event loop as seen from the daemon: calls into the loop, its watchdog, and its shutdown.

* A call runs in the driver's loop. A cancellation is forwarded, and the caller in the daemon's loop
  continues only after the call in the driver's loop has ended.
* The daemon's loop polls the driver's loop once a second. A driver that blocks affects only its own
  calls, so a blocked loop is only logged and reported in a gauge. It does not cause a restart,
  because the driver's thread cannot be killed.
* The loop ends as with :func:`asyncio.run`, but each step has a time limit, because a vendor's task
  that swallows its cancellation must not prevent the driver's restart. Tasks that the driver leaves
  behind are leaks, and the log names them for the driver's author.

The claims engine orders calls and limits their duration. The module does not depend on drivers,
devices or claims.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from drakit_driver.runtime.contract import ConnectionEndedError
from drakit_driver.runtime.failures import CallCancelledError, traceback_of

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- calls

ENDING = "it ended in the meantime"
"""The reason given for calls that fail while the driver's loop is ending, before its thread can
report a more specific reason."""

ResultT = TypeVar("ResultT")

_Task = asyncio.Task[Any]


@dataclass(eq=False, slots=True)
class _Call:
    is_canceled: bool = False
    """Whether the caller has canceled the call. Written in the daemon's loop."""

    task: _Task | None = None
    """The task of the call, once the call has begun. Written in the driver's loop."""

    def cancel(self) -> None:
        """Cancel the call. Call this method in the driver's loop."""
        if self.task is not None and not self.task.cancelling():
            self.task.cancel()


class DriverLoop:
    """A driver's loop, which may run in another thread and is called from the daemon's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # Written in the daemon's loop.
        self._open: dict[Future[Any], Coroutine[Any, Any, Any]] = {}
        self._closed: str | None = None
        # Written in the driver's loop.
        self._is_ending = False

    # ------------------------------------------------------------ in the daemon's loop

    @property
    def stop_reason(self) -> str | None:
        """The reason why calls are no longer possible, or None."""
        return ENDING if self._closed is None and self._is_ending else self._closed

    async def call(
        self, function: Callable[..., Coroutine[Any, Any, ResultT]], *arguments: Any
    ) -> ResultT:
        """
        Call an async function in the driver's loop, in the caller's context.

        Raises the function's exception; :class:`ConnectionEndedError` if the loop has ended;
        :class:`CallCancelledError` if the function was canceled, but not by the caller. If the
        caller is canceled, so is the function, and the caller waits until it ends. A second
        cancellation ends the wait.
        """
        if (reason := self.stop_reason) is not None:
            raise ConnectionEndedError(reason)
        call = _Call()
        running = self._run(call, function, arguments)
        try:
            future = asyncio.run_coroutine_threadsafe(running, self._loop)
        except RuntimeError:  # the loop has just been closed
            running.close()
            raise ConnectionEndedError(ENDING) from None
        self._open[future] = running
        answer = asyncio.wrap_future(future)
        try:
            await asyncio.wait({answer})
        except asyncio.CancelledError:
            # Canceling the future itself would not wait until the call ends in the other loop.
            call.is_canceled = True
            self.notify(call.cancel)
            await asyncio.wait({answer})
            with suppress(ConnectionEndedError, CallCancelledError):
                self._result(answer)  # raises the function's exception
            raise
        finally:
            del self._open[future]
        return self._result(answer)

    def _result(self, answer: asyncio.Future[ResultT | Exception]) -> ResultT:
        if answer.cancelled() and not self._is_ending:
            raise CallCancelledError
        # a SystemExit raised by the function would end the loop
        if answer.cancelled() or answer.exception() is not None:
            raise ConnectionEndedError(ENDING)
        result = answer.result()
        if isinstance(result, Exception):
            raise result
        return result

    def notify(self, function: Callable[[], object]) -> None:
        """Call a function in the driver's loop, unless the loop has just been closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def close(self, reason: str) -> None:
        """Record that the loop is closed. Open calls fail with this reason."""
        self._closed = reason
        for future, running in self._open.items():
            if inspect.getcoroutinestate(running) == inspect.CORO_CREATED:
                # Close the coroutine, because Python warns about coroutines that never began.
                running.close()
            if not future.done():
                future.set_result(ConnectionEndedError(reason))

    # ------------------------------------------------------------ in the driver's loop

    async def _run(
        self,
        call: _Call,
        function: Callable[..., Coroutine[Any, Any, ResultT]],
        arguments: tuple[Any, ...],
    ) -> ResultT | Exception:
        """Run the call. Return an exception instead of raising it, because the caller may no longer
        be waiting."""
        if self._is_ending:
            return ConnectionEndedError(ENDING)
        if call.is_canceled:
            raise asyncio.CancelledError
        call.task = asyncio.current_task()
        try:
            return await function(*arguments)
        except Exception as error:
            return error
        except (KeyboardInterrupt, SystemExit):
            self.end()  # uvloop still runs callbacks that are ready
            raise

    def end(self) -> None:
        """Reject further calls, because the loop is about to end and will cancel its tasks."""
        self._is_ending = True


# ---------------------------------------------------------------- the watchdog

PERIOD_SECONDS = 1.0
"""Time between two checks of the loop."""

LOG_SECONDS = (2, 10, 60, 300)
"""How long a loop must be blocked before each log line. After the last one, a line is logged every
300 s."""

INNERMOST = 3
"""Number of frames to log in addition to the driver's own."""

_OURS = frozenset({"drakit", "drakit_daemon", "drakit_driver", "drakit_formats"})


class Watchdog:
    """Watches one event loop that runs in a separate thread."""

    def __init__(
        self, driver: str, *, loop: asyncio.AbstractEventLoop, thread: int, package: str
    ) -> None:
        """Create a watchdog. `thread` is the identifier of the loop's thread. `package` is the
        package of the driver class: a call in that package best explains why the loop is
        blocked."""
        self._driver = driver
        self._loop = loop
        self._thread = thread
        self._package = package
        self._answered_at: float | None = None
        """The time at which the loop last responded. All loops use the same clock."""
        self.blocked: str | None = None
        """The call that blocks the driver's loop. None while the loop responds."""

    async def run(self) -> None:
        """Watch until canceled, or until the loop is closed."""
        while True:
            self._answered_at = None
            asked_at = asyncio.get_running_loop().time()
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:
                return
            await self._wait(asked_at)

    def _answer(self) -> None:
        """Record that the loop responds. Called in the watched loop."""
        self._answered_at = self._loop.time()

    async def _wait(self, asked_at: float) -> None:
        """Wait for a response, however long it takes."""
        waited = 0.0
        log_after = LOG_SECONDS[0]
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            if (answered_at := self._answered_at) is not None:
                break
            # Count the periods instead of using the clock: a pause of the whole process is not the
            # driver's fault.
            waited += PERIOD_SECONDS
            if waited >= log_after:
                last = LOG_SECONDS[-1]
                log_after = next((each for each in LOG_SECONDS if each > waited), waited + last)
                self._log_blocked(waited)
        if self.blocked is not None:
            self.blocked = None
            facts = {"driver": self._driver, "seconds": round(answered_at - asked_at, 1)}
            logger.info("driver responds again", extra=facts)

    def _log_blocked(self, seconds: float) -> None:
        where = where_is(self._thread, package=self._package)
        self.blocked = f"its event loop is blocked in {where}"
        facts = {"driver": self._driver, "seconds": seconds, "where": where}
        logger.warning("driver blocks its event loop", extra=facts)


def where_is(thread: int, *, package: str) -> str:
    """Return the current calls of a thread: the innermost call in the driver's own code, and then
    the innermost calls of the stack."""
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
    return " > ".join([*first, *reversed(inner)]) or "a call without a Python stack frame"


def _first(calls: Sequence[tuple[str, str]], fits: Callable[[str], bool]) -> int | None:
    return next((index for index, (name, _) in enumerate(calls) if fits(name)), None)


# ---------------------------------------------------------------- shutdown of the loop

CALLS_SECONDS = 30.0
"""How long canceled calls have to clean up."""

TASKS_SECONDS = 5.0
"""How long the driver's leaked tasks, generators and threads have to end."""

MAX_NAMED = 10
"""Maximum number of tasks to name in a log line."""

MAX_EXITS = 10
"""Maximum number of times that tasks may raise SystemExit through the loop during one shutdown
step."""

_OUR_CODE = str(Path(__file__).parent)

_left: set[_Task] = set()
"""Tasks that did not end. These references keep them alive, because the garbage collector would run
their cleanup in the thread of the daemon's loop."""


def end_loop(
    loop: asyncio.AbstractEventLoop,
    *,
    stream: AsyncIterator[object] | None,
    executor: Executor,
    driver: str,
) -> None:
    """End everything that runs in a loop, and close it. Called in the loop's thread. Does not
    raise."""
    steps = (
        _end_calls(),
        _close(getattr(stream, "aclose", None), driver),
        _end_leaked_tasks(driver),
        _close(loop.shutdown_asyncgens, driver),
    )
    for step in steps:
        _run(loop, step, driver)
    loop.close()
    # Use a separate thread, because shutdown waits for jobs, and a job may hang.
    ending = threading.Thread(target=executor.shutdown, name=f"{driver}-end", daemon=True)
    try:
        ending.start()
    except RuntimeError:  # the process may have no threads left
        return
    ending.join(TASKS_SECONDS)
    if ending.is_alive():
        logger.error(
            "driver's threads did not stop in time and are abandoned", extra={"driver": driver}
        )


def _run(loop: asyncio.AbstractEventLoop, step: Coroutine[Any, Any, None], driver: str) -> None:
    """Run one shutdown step to completion, even if other tasks raise through the loop in the
    meantime."""
    task = loop.create_task(step)
    for _ in range(MAX_EXITS):
        try:
            return loop.run_until_complete(task)
        except BaseException as error:
            facts = {"driver": driver, "exception": traceback_of(error)}
            logger.error("driver failed while its event loop ended", extra=facts)
            if task.done():
                return None
    return None


async def _end_calls() -> None:
    """Cancel the tasks that the runtime started, including driver calls and their subtasks, and
    wait for them. Tasks that the driver itself started are not included."""
    calls = {task for task in _other_tasks() if _is_ours(task)}
    for call in calls:
        # a second cancellation would interrupt the cleanup of a canceled call
        if not call.cancelling():
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
        logger.error("driver's tasks did not stop in time and are abandoned", extra=facts)


async def _close(close: Callable[[], Awaitable[object]] | None, driver: str) -> None:
    """Run `close`, such as the ``aclose`` of a stream, in the loop in which the generators ran, so
    that they can clean up. Closing a generator that has already ended does nothing."""
    if close is None:
        return
    closing = asyncio.ensure_future(close())
    await asyncio.wait({closing}, timeout=TASKS_SECONDS)
    if closing.done() and not closing.cancelled() and (error := closing.exception()) is not None:
        facts = {"driver": driver, "exception": traceback_of(error)}
        logger.error("driver failed to end its stream", extra=facts)


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
