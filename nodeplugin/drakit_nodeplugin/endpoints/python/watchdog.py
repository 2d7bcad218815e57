"""
Notices a driver that blocks its event loop, and names the call in which it does.

The daemon's loop asks the driver's for a sign of life once a second. A driver that blocks harms its
own calls alone, so this ends in the log and a gauge, not in a restart: nothing can end its thread.

It must not know what drivers do, or whether anybody waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count

__all__ = ("Watchdog", "where_is")

logger = logging.getLogger(__name__)

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
