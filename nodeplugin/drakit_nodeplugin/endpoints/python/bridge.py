"""
Calls from one event loop into another, which runs in a thread of its own.

Waking a loop of another thread costs more than the call that it is woken for. So calls that begin
in one turn of the home loop wake the other loop once, and answers that are ready together wake the
home loop once. Calls that have a key in common never overlap, and that includes what a cancelled
call still does: its `finally` may undo something, and the next call must find it undone.

What is called, and what an end of the other loop means, is said by :mod:`.connection` and
:mod:`.endpoint`. It must not know drivers, devices or claims.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable, Collection, Hashable
from contextvars import Context, copy_context
from typing import Any

from drakit_nodeplugin.endpoints.errors import (
    CallCancelledError,
    CallNotBegunError,
    CallOverdueError,
    traceback_of,
)

__all__ = (
    "Bridge",
    "BridgeClosedError",
    "CallCancelledError",
    "CallNotBegunError",
    "CallOverdueError",
)

logger = logging.getLogger(__name__)

CLOSING = "it ended meanwhile"
"""Why calls fail while the other loop ends, before its thread can say more."""


class BridgeClosedError(Exception):
    """The other loop has ended, or is about to."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


_Loop = asyncio.AbstractEventLoop
_Outcome = tuple[Any, Exception | None]


class _Call:
    """One call. Each field is written in one of the loops alone, and read in both."""

    __slots__ = (
        "ahead",
        "answer",
        "began_at",
        "context",
        "function",
        "given_up",
        "keys",
        "outcome",
        "task",
        "timeout_seconds",
        "timer",
        "waits",
        "what",
    )

    def __init__(
        self,
        function: Callable[[], Any],
        what: str,
        keys: Collection[Hashable],
        timeout_seconds: float,
        home: _Loop,
    ) -> None:
        # Written at home.
        self.function = function
        self.what = what
        self.keys = keys if len(keys) < 2 else dict.fromkeys(keys)
        """Each of them once, whatever was given."""

        self.context: Context = copy_context()
        self.timeout_seconds = timeout_seconds
        self.answer: asyncio.Future[_Outcome] = home.create_future()
        self.timer: asyncio.TimerHandle | None = None
        self.given_up = False
        # Written there.
        self.ahead = 0
        """In how many lines it is not the first."""

        self.task: asyncio.Task[Any] | None = None
        self.began_at: float | None = None
        """By the loops' clock: both have the same."""

        self.waits = False
        self.outcome: _Outcome = (None, None)

    async def run(self) -> Any:
        """Call the function there, which may be a plain one."""
        value = self.function()
        return await value if inspect.isawaitable(value) else value


_Handler = Callable[[_Call], None]


class _Mailbox:
    """One direction: what is put in during one turn of the sender's loop costs one wake-up."""

    def __init__(self, *, sender: _Loop, receiver: _Loop, lost: _Handler) -> None:
        self._sender = sender
        self._receiver = receiver
        self._lost = lost
        self._letters: deque[tuple[_Handler, _Call]] = deque()
        self._due = False

    def put(self, handler: _Handler, call: _Call) -> None:
        """Have the handler called with it in the receiver's loop; called in the sender's."""
        self._letters.append((handler, call))
        if not self._due:
            self._due = True
            # Not at once: writing to the other loop gives up the interpreter lock, and the other
            # thread would begin and answer the first call while the others are still to be sent.
            self._sender.call_soon(self._send)

    def _send(self) -> None:
        self._due = False
        try:
            self._receiver.call_soon_threadsafe(self.deliver)
        except RuntimeError:  # the receiver was closed a moment ago
            while self._letters:
                self._lost(self._letters.popleft()[1])

    def deliver(self) -> None:
        """Call all handlers; called in the receiver's loop, or when the sender has ended."""
        while self._letters:
            handler, call = self._letters.popleft()
            handler(call)


class Bridge:
    """Calls from the loop `home` into the loop `there`, which may be in another thread."""

    def __init__(self, name: str, *, home: _Loop, there: _Loop) -> None:
        """The name is for log lines."""
        self._name = name
        self._home = home
        self._there = there
        self._calls = _Mailbox(sender=home, receiver=there, lost=self._stopped)
        self._answers = _Mailbox(sender=there, receiver=home, lost=_forget)
        # Written at home.
        self._open: set[_Call] = set()
        self._closed: str | None = None
        # Written there. A call stands in the lines of its keys until it has ended, and begins when
        # it is the first in all of them. It comes into all of them at once: so whichever came first
        # of all those that have not ended is the first everywhere, and none waits forever.
        self._lines: dict[Hashable, list[_Call]] = {}
        self._ending = False

    # ------------------------------------------------------------ at home

    @property
    def stop_reason(self) -> str | None:
        """Why nothing can be called any more; None while it can."""
        if self._closed is None and (self._ending or self._there.is_closed()):
            return CLOSING
        return self._closed

    async def call(
        self,
        function: Callable[[], Any],
        *,
        keys: Collection[Hashable],
        timeout_seconds: float,
        what: str = "",
    ) -> Any:
        """
        Call a plain or async function in the other loop, once all earlier calls that have one of
        its keys have ended there. One without keys waits for none. `what` is for log lines.

        It runs in the caller's context. What it raises is raised here, but for
        :class:`BridgeClosedError` if its loop has ended, :class:`CallOverdueError` if it did not
        answer within the timeout, counted from its begin, and :class:`CallNotBegunError` if it
        could not even begin within another one. If the caller is cancelled, so is the function;
        that is not waited for here, but by the next call of its keys.
        """
        if (reason := self.stop_reason) is not None:
            raise BridgeClosedError(reason)
        call = _Call(function, what, keys, timeout_seconds, self._home)
        call.timer = self._home.call_later(timeout_seconds, self._look_at, call)
        self._open.add(call)
        self._calls.put(self._arrive, call)
        try:
            value, error = await call.answer
        except asyncio.CancelledError:
            self._give_up(call)
            raise
        finally:
            call.timer.cancel()
            self._open.discard(call)
        if error is not None:
            raise error
        return value

    def busy(self, keys: Collection[Hashable]) -> bool:
        """
        Tell whether a call that was made by now has one of the keys, and has not ended there.

        One that is about to end may still count.
        """
        wanted = set(keys)
        # Only looked up, which is one step of CPython's own: a call that is not open any more is in
        # its lines until it has ended, or never begins.
        return any(key in self._lines for key in wanted) or any(
            not wanted.isdisjoint(call.keys) for call in self._open
        )

    def close(self, reason: str) -> None:
        """The other loop has ended: what it did not answer any more fails with the reason."""
        self._closed = reason
        self._answers.deliver()
        for call in self._open:
            self._fail(call, BridgeClosedError(reason))

    def _answered(self, call: _Call) -> None:
        if not call.answer.done():
            call.answer.set_result(call.outcome)

    def _stopped(self, call: _Call) -> None:
        self._fail(call, BridgeClosedError(CLOSING))

    def _fail(self, call: _Call, error: Exception) -> None:
        if not call.answer.done():
            call.answer.set_result((None, error))

    def _give_up(self, call: _Call) -> None:
        if not call.given_up:  # cancelled once: a second time would cut its tail
            call.given_up = True
            self._calls.put(self._leave, call)

    def _look_at(self, call: _Call) -> None:
        """A call has had its time, if it began when it was made."""
        began_at = call.began_at
        if began_at is not None:
            left = began_at + call.timeout_seconds - self._home.time()
            if left > 0:
                call.timer = self._home.call_later(left, self._look_at, call)
                return
        self._give_up(call)
        self._fail(call, CallNotBegunError() if call.waits else CallOverdueError())

    # ------------------------------------------------------------ there

    def end(self) -> None:
        """The loop is about to end and will cancel its tasks: begin nothing any more."""
        self._ending = True
        standing = {call for line in self._lines.values() for call in line if call.waits}
        for call in standing:
            call.waits = False
            self._answer(call, (None, BridgeClosedError(CLOSING)))
        lines = self._lines.items()
        self._lines = {key: rest for key, line in lines if (rest := line[:1]) and rest[0].task}

    def _arrive(self, call: _Call) -> None:
        if call.given_up:
            return
        if self._ending:
            self._answer(call, (None, BridgeClosedError(CLOSING)))
            return
        for key in call.keys:
            line = self._lines.get(key)
            if line is None:
                self._lines[key] = [call]
            else:
                line.append(call)
                call.ahead += 1
        if call.ahead:
            call.waits = True
        else:
            self._begin(call)

    def _step_out(self, call: _Call) -> None:
        """A call has ended, or does not want to begin: whoever is the first now may begin."""
        for key in call.keys:
            line = self._lines[key]
            first = line[0] is call
            line.remove(call)
            if not line:
                del self._lines[key]
            elif first:
                following = line[0]
                following.ahead -= 1
                if not following.ahead:
                    self._begin(following)

    def _begin(self, call: _Call) -> None:
        call.began_at = self._there.time()
        call.waits = False
        call.task = self._there.create_task(call.run(), context=call.context)
        call.task.add_done_callback(lambda task: self._ended(call, task))

    def _ended(self, call: _Call, task: asyncio.Task[Any]) -> None:
        outcome = self._outcome(task)  # before others begin: it may be the loop's end
        call.task = None
        self._step_out(call)
        self._answer(call, outcome)

    def _outcome(self, task: asyncio.Task[Any]) -> _Outcome:
        if task.cancelled():
            return None, BridgeClosedError(CLOSING) if self._ending else CallCancelledError()
        error = task.exception()
        if error is None:
            return task.result(), None
        if isinstance(error, Exception):
            return None, error
        self.end()  # SystemExit is on its way through the loop, and ends it
        return None, BridgeClosedError(CLOSING)

    def _answer(self, call: _Call, outcome: _Outcome) -> None:
        error = outcome[1]
        if not call.given_up:
            call.outcome = outcome
            self._answers.put(self._answered, call)
        elif not (error is None or isinstance(error, BridgeClosedError | CallCancelledError)):
            call.context.run(self._log_late, call.what, error)

    def _log_late(self, what: str, error: Exception) -> None:
        facts = {"endpoint": self._name, "call": what, "exception": traceback_of(error)}
        logger.error("call failed after it was given up", extra=facts)

    def _leave(self, call: _Call) -> None:
        if call.task is not None:
            call.task.cancel()
        elif call.waits:
            call.waits = False
            self._step_out(call)


def _forget(call: _Call) -> None:
    """Nobody waits at home any more."""
