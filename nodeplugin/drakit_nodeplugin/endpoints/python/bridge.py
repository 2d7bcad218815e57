"""
Calls from one event loop into another, which runs in a thread of its own.

Waking a loop of another thread costs more than the call that it is woken for. So calls that begin
in one turn of the home loop wake the other loop once, and results that are ready together wake the
home loop once. A call that is cancelled is cancelled there as well, and ends here only after it has
ended there.

The order of calls and their time limits are :mod:`drakit_nodeplugin.endpoints.batches`'s. It must
not know drivers, devices or claims.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from typing import Any, TypeVar

from drakit_nodeplugin.endpoints.contract import ConnectionEndedError
from drakit_nodeplugin.endpoints.failures import CallCancelledError

__all__ = ("Bridge",)

logger = logging.getLogger(__name__)

ENDING = "it ended meanwhile"
"""Why calls fail while the other loop ends, before its thread can report more."""

ResultT = TypeVar("ResultT")

_Loop = asyncio.AbstractEventLoop
_Outcome = tuple[Any, Exception | None]


class _Call:
    """One call. Each field is written in one of the loops alone, and read in both."""

    __slots__ = (
        "answer",
        "context",
        "function",
        "has_begun",
        "is_cancelled",
        "outcome",
        "settled",
        "task",
    )

    def __init__(self, function: Callable[[], Awaitable[Any]], home: _Loop) -> None:
        # Written at home.
        self.function = function
        self.context: Context = copy_context()
        self.answer: asyncio.Future[_Outcome] = home.create_future()
        self.settled: _Outcome | None = None
        # Written there.
        self.outcome: _Outcome | None = None
        self.task: asyncio.Task[None] | None = None
        self.has_begun = False
        self.is_cancelled = False


_Handler = Callable[[_Call], None]


class _Mailbox:
    """One direction: what is put in during one turn of the sender's loop costs one wake-up."""

    def __init__(self, *, sender: _Loop, receiver: _Loop, lost: _Handler) -> None:
        self._sender = sender
        self._receiver = receiver
        self._lost = lost
        self._letters: deque[tuple[_Handler, _Call]] = deque()
        self._is_due = False

    def put(self, handler: _Handler, call: _Call) -> None:
        """Have the handler called with it in the receiver's loop; called in the sender's."""
        self._letters.append((handler, call))
        if not self._is_due:
            self._is_due = True
            # Not at once: writing to the other loop gives up the interpreter lock, and the other
            # thread would begin and answer the first call while the others are still to be sent.
            self._sender.call_soon(self._send)

    def _send(self) -> None:
        self._is_due = False
        try:
            self._receiver.call_soon_threadsafe(self.deliver)
        except RuntimeError:  # the receiver was closed a moment ago
            while self._letters:
                self._lost(self._letters.popleft()[1])

    def deliver(self) -> None:
        """Call all handlers; called in the receiver's loop, or after the sender has ended."""
        while self._letters:
            handler, call = self._letters.popleft()
            handler(call)


class Bridge:
    """Calls from the loop `home` into the loop `there`, which may be in another thread."""

    def __init__(self, *, home: _Loop, there: _Loop) -> None:
        self._home = home
        self._there = there
        self._calls = _Mailbox(sender=home, receiver=there, lost=self._stopped)
        self._answers = _Mailbox(sender=there, receiver=home, lost=_forget)
        # Written at home.
        self._open: set[_Call] = set()
        self._closed: str | None = None
        # Written there.
        self._ending = False

    # ------------------------------------------------------------ at home

    @property
    def stop_reason(self) -> str | None:
        """Why nothing can be called any more; None while it can."""
        if self._closed is None and (self._ending or self._there.is_closed()):
            return ENDING
        return self._closed

    async def call(self, function: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """
        Call an async function in the other loop, in the caller's context.

        What it raises is raised here, but for :class:`ConnectionEndedError` if its loop has ended,
        and :class:`CallCancelledError` if it was cancelled, but not from here. If the caller is
        cancelled, so is the function, and its end is waited for; a second cancellation ends the
        wait.
        """
        if (reason := self.stop_reason) is not None:
            raise ConnectionEndedError(reason)
        call = _Call(function, self._home)
        self._open.add(call)
        self._calls.put(self._arrive, call)
        try:
            value, error = await call.answer
        except asyncio.CancelledError:
            error = await self._cancel(call)
            if error is None or isinstance(error, ConnectionEndedError | CallCancelledError):
                raise
            raise error from None
        finally:
            self._open.discard(call)
        if error is not None:
            raise error
        return value

    async def _cancel(self, call: _Call) -> Exception | None:
        """Cancel a call there, and return what it raised once it has ended."""
        if call.settled is None:
            call.answer = self._home.create_future()
            self._calls.put(self._leave, call)
            await call.answer
        assert call.settled is not None
        return call.settled[1]

    def close(self, reason: str) -> None:
        """The other loop has ended: what it did not answer any more fails with the reason."""
        self._closed = reason
        self._answers.deliver()
        for call in self._open:
            self._settle(call, (None, ConnectionEndedError(reason)))

    def _answered(self, call: _Call) -> None:
        assert call.outcome is not None
        self._settle(call, call.outcome)

    def _stopped(self, call: _Call) -> None:
        self._settle(call, (None, ConnectionEndedError(ENDING)))

    def _settle(self, call: _Call, outcome: _Outcome) -> None:
        if call.settled is None:
            call.settled = outcome
            if not call.answer.done():  # cancelled, but its caller has not resumed yet
                call.answer.set_result(outcome)

    # ------------------------------------------------------------ there

    def end(self) -> None:
        """The loop is about to end and will cancel its tasks: begin nothing any more."""
        self._ending = True

    def _arrive(self, call: _Call) -> None:
        if self._ending:
            self._answer(call, (None, ConnectionEndedError(ENDING)))
        else:
            call.task = self._there.create_task(self._run(call), context=call.context)
            # SystemExit is the error of the loop as well, which reports it.
            call.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _run(self, call: _Call) -> None:
        call.has_begun = True
        outcome: _Outcome
        try:
            if call.is_cancelled:
                raise asyncio.CancelledError
            outcome = await call.function(), None
        except asyncio.CancelledError:
            ended = ConnectionEndedError(ENDING) if self._ending else CallCancelledError()
            outcome = None, ended
        except Exception as error:
            outcome = None, error
        except BaseException:  # SystemExit is on its way through the loop, and ends it
            self.end()
            self._answer(call, (None, ConnectionEndedError(ENDING)))
            raise
        self._answer(call, outcome)

    def _answer(self, call: _Call, outcome: _Outcome) -> None:
        if call.outcome is None:
            call.outcome = outcome
            self._answers.put(self._answered, call)

    def _leave(self, call: _Call) -> None:
        """The caller gives up. A task that has not begun would end without a word."""
        call.is_cancelled = True
        if call.task is not None and call.has_begun and not call.task.cancelling():
            call.task.cancel()


def _forget(call: _Call) -> None:
    """Nobody waits at home any more."""
