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
from dataclasses import dataclass
from itertools import chain, count

__all__ = ("Watchdog", "Watched", "where_is")

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0
"""Between two looks."""

TELL_SECONDS = (2, 10, 60, 300)
"""How long a loop must have been blocked to be told of in the log; after the last, each time that
it has lasted so long again."""

INNERMOST = 3
"""Frames that are named besides the driver's own."""

_OURS = frozenset({"drakit", "drakit_nodeplugin"})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Watched:
    """A thread that runs an event loop."""

    loop: asyncio.AbstractEventLoop
    thread: int
    """Its identifier."""
    package: str
    """The package of the driver's class: a call of it says most."""


class _Ping:
    """A sign of life that was asked for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.answered_at: float | None = None
        """By the loops' clock: all have the same."""

    def answer(self) -> None:
        """Called in the loop that is watched."""
        self.answered_at = self._loop.time()


class Watchdog:
    """Watches the loop of one driver, whichever it has at the moment."""

    def __init__(self, driver: str, watched: Callable[[], Watched | None]) -> None:
        """`watched` gives the present loop; None while there is none."""
        self._driver = driver
        self._watched = watched
        self.blocked: str | None = None
        """What the driver's loop is blocked in; None while it answers."""

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            watched = self._watched()
            if watched is None:
                await asyncio.sleep(PERIOD_SECONDS)
            else:
                await self._ask(watched)

    async def _ask(self, watched: Watched) -> None:
        """Ask once, and wait for the answer however long it takes."""
        asked_at = asyncio.get_running_loop().time()
        ping = _Ping(watched.loop)
        try:
            watched.loop.call_soon_threadsafe(ping.answer)
        except RuntimeError:
            await asyncio.sleep(PERIOD_SECONDS)  # closed a moment ago
            return
        waited = 0.0
        due = _tell_at()
        tell_at = next(due)
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            if ping.answered_at is not None or self._watched() is not watched:
                break
            # Not by the clock: when all of the process stood still, that was not the driver.
            waited += PERIOD_SECONDS
            if waited >= tell_at:
                tell_at = next(due)
                self._tell(watched, waited)
        if self.blocked is not None:
            self.blocked = None
            if ping.answered_at is not None:
                facts = {"driver": self._driver, "seconds": round(ping.answered_at - asked_at, 1)}
                logger.info("driver answers again", extra=facts)

    def _tell(self, watched: Watched, seconds: float) -> None:
        where = where_is(watched.thread, package=watched.package)
        self.blocked = f"its event loop is blocked in {where}"
        facts = {"driver": self._driver, "seconds": seconds, "where": where}
        logger.warning("driver blocks its event loop", extra=facts)


def _tell_at() -> Iterator[int]:
    last = TELL_SECONDS[-1]
    return chain(TELL_SECONDS, count(2 * last, last))


def where_is(thread: int, *, package: str) -> str:
    """Say what a thread is doing: the driver's innermost call, then those that it has made."""
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
