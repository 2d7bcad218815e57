"""
Calls that begin in the same turn of the event loop, made as one.

The engine begins the claims of a pod in one turn, each in a task of its own; a driver that wants
them together gets them so without anybody having to hand the batch around. One who gives up leaves
the call alone while another waits for it; the last one cancels it. One that would have to wait for
something is called for itself, as all others would wait with it.

It must not know drivers or claims.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

__all__ = ("Together",)

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class _Round(Generic[ItemT, ResultT]):
    """The calls of one turn."""

    def __init__(self) -> None:
        self.items: dict[asyncio.Future[ResultT | Exception], ItemT] = {}
        """By the future on which their callers wait; those who gave up are not in it."""
        self.apart: dict[asyncio.Future[ResultT | Exception], _Round[ItemT, ResultT]] = {}
        """Calls for those who are called for themselves."""
        self.task: asyncio.Task[Sequence[ResultT | Exception]] | None = None

    def leave(self, waiting: asyncio.Future[ResultT | Exception]) -> None:
        if (own := self.apart.pop(waiting, None)) is not None:
            own.leave(waiting)
            return
        self.items.pop(waiting, None)
        if not self.items and self.task is not None:
            self.task.cancel()


class Together(Generic[ItemT, ResultT]):
    """Collects items and calls a function once for those of a turn; used in one event loop."""

    def __init__(
        self,
        call: Callable[[Sequence[ItemT]], Coroutine[Any, Any, Sequence[ResultT | Exception]]],
        *,
        apart: Callable[[ItemT], bool],
    ) -> None:
        """`call` gives a result or an error for each item, in order; what it raises is for all.
        `apart` says whether an item is called for itself, and is asked just before."""
        self._call = call
        self._apart = apart
        self._open: _Round[ItemT, ResultT] | None = None
        self._tasks: set[asyncio.Task[Sequence[ResultT | Exception]]] = set()

    async def call(self, item: ItemT) -> ResultT:
        """Have an item called with all others of this turn; gives its result, or raises it."""
        loop = asyncio.get_running_loop()
        if self._open is None:
            self._open = _Round()
            # It runs in the next turn, after all tasks that were begun together.
            loop.call_soon(self._begin, self._open)
        here = self._open
        waiting: asyncio.Future[ResultT | Exception] = loop.create_future()
        here.items[waiting] = item
        try:
            result = await waiting
        finally:
            here.leave(waiting)
        if isinstance(result, Exception):
            raise result
        return result

    def _begin(self, here: _Round[ItemT, ResultT]) -> None:
        self._open = None
        for waiting in [waiting for waiting in here.items if waiting.cancelled()]:
            del here.items[waiting]
        for waiting in [waiting for waiting, item in here.items.items() if self._apart(item)]:
            own = here.apart[waiting] = _Round()
            own.items[waiting] = here.items.pop(waiting)
        # These first: one that waits may need something of theirs, too, and would hold it.
        for each in (here, *here.apart.values()):
            self._begin_one(each)

    def _begin_one(self, here: _Round[ItemT, ResultT]) -> None:
        if not here.items:
            return
        callers = list(here.items)
        here.task = asyncio.get_running_loop().create_task(self._call([*here.items.values()]))
        self._tasks.add(here.task)
        here.task.add_done_callback(lambda task: self._ended(task, callers))

    def _ended(
        self,
        task: asyncio.Task[Sequence[ResultT | Exception]],
        callers: Sequence[asyncio.Future[ResultT | Exception]],
    ) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or not isinstance(error, Exception | None):
            for waiting in callers:
                waiting.cancel()
            return
        results = task.result() if error is None else [error] * len(callers)
        for waiting, result in zip(callers, results, strict=True):
            if not waiting.done():
                waiting.set_result(result)
