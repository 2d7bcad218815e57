"""
Turns a batch of claims into calls of a connection: one for each claim, or one for the batch.

A call waits until no earlier call for one of its devices or counter sets is in flight; its time
limit starts when it begins. A canceled call holds its devices until it has ended, because its
clean-up may undo something that the next call must find undone. This module words the errors of a
connection; the engine decides what follows from them.

It must not know how a connection works, its life cycle, slices, gRPC or the kubelet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

from drakit.device import AllocatedClaim, Edits
from drakit.resource.pools import short_pool
from drakit.tasks import cancelled_by_owner
from drakit_nodeplugin.endpoints.contract import (
    Calls,
    ConnectionEndedError,
    CounterSetKey,
    DeviceKey,
    DriverTraits,
    Granularity,
    WorkKey,
)
from drakit_nodeplugin.endpoints.failures import (
    CallCancelledError,
    CallNotBegunError,
    CallOverdueError,
    DeviceFailedError,
    EndpointStoppedError,
    failure_of,
    unusable_answer,
)

__all__ = ("CALL_SECONDS", "Batches")

logger = logging.getLogger(__name__)

CALL_SECONDS = 300.0
"""Time limit of a call, from its start. Before that, it may wait as long for an earlier call for
its devices. The kubelet gets its answer long before that, and retries."""

_Future = asyncio.Future[Any]


_Operation = Literal["prepare", "unprepare", "check"]
"""The methods of :class:`.Calls`."""


class _Work:
    """One call: waiting, running, or cleaning up after a cancellation."""

    __slots__ = ("ahead", "claims", "context", "is_begun", "keys", "operation", "task", "timer")

    def __init__(
        self,
        operation: _Operation,
        claims: dict[_Future, AllocatedClaim],
        keys: frozenset[WorkKey],
    ) -> None:
        self.operation: _Operation = operation
        self.claims = claims
        """Claims by the future of their caller, without abandoned claims."""
        self.keys = keys
        self.ahead = 0
        """The number of queues in which it is not the first."""
        self.context: Context | None = None
        """The context of the caller, if the call could not begin at once."""
        self.timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self.is_begun = False


class Batches:
    """The calls of one driver. Used only in the daemon's loop."""

    def __init__(
        self,
        driver: str,
        *,
        traits: DriverTraits,
        node: str,
        reach: Callable[[], Calls | EndpointStoppedError],
    ) -> None:
        """`node` is the node's name, after which pools are named in the API. `reach` returns the
        connection to call, or the reason why there is none."""
        self._driver = driver
        self._node = node
        self._reach = reach
        self._per_batch: dict[_Operation, bool] = {
            "prepare": traits.prepare_granularity is Granularity.BATCH,
            "unprepare": traits.unprepare_granularity is Granularity.BATCH,
            "check": traits.prepare_granularity is Granularity.BATCH,
        }
        """Whether the claims of a batch are one call."""
        # A call is in the queues of its keys until it has ended, and begins when it is the first
        # in all of them. It enters all of them at once: so the call that came first of all those
        # that have not ended is the first everywhere, and none waits forever.
        self._lines: dict[WorkKey, list[_Work]] = {}

    def prepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, asyncio.Future[Sequence[Edits]]]:
        """See :meth:`.HostedEndpoint.prepare`."""
        return self._begin("prepare", batch)

    def unprepare(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, asyncio.Future[None]]:
        """See :meth:`.HostedEndpoint.unprepare`."""
        return self._begin("unprepare", batch)

    def check(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, asyncio.Future[bool]]:
        """See :meth:`.HostedEndpoint.check`."""
        return self._begin("check", batch)

    # ------------------------------------------------------------ order

    def _begin(self, operation: _Operation, batch: Sequence[AllocatedClaim]) -> dict[str, _Future]:
        loop = asyncio.get_running_loop()
        futures: dict[str, _Future] = {}
        together: dict[_Future, AllocatedClaim] = {}
        together_keys: set[WorkKey] = set()
        apart: list[_Work] = []
        for given in batch:
            future: _Future = loop.create_future()
            futures[given.claim.uid] = future
            item, keys = self._in_driver_pools(given)
            if self._per_batch[operation] and self._lines.keys().isdisjoint(keys):
                together[future] = item
                together_keys |= keys
            else:
                # This claim must wait for a device, and the other claims of the batch must not.
                apart.append(_Work(operation, {future: item}, keys))
        works = apart
        if together:
            # Enqueued first: a waiting call may need one of these devices, and would block it.
            works = [_Work(operation, together, frozenset(together_keys)), *apart]
        for work in works:
            for future in work.claims:
                future.add_done_callback(partial(self._claim_done, work))
            self._enter(work)
        return futures

    def _in_driver_pools(self, given: AllocatedClaim) -> tuple[AllocatedClaim, frozenset[WorkKey]]:
        devices = [
            replace(device, pool=short_pool(self._node, device.pool)) for device in given.devices
        ]
        keys: set[WorkKey] = set()
        for device in devices:
            keys.add(DeviceKey(device.pool, device.name))
            keys.update([CounterSetKey(device.pool, name) for name in device.consumes])
        return replace(given, devices=tuple(devices)), frozenset(keys)

    def _enter(self, work: _Work) -> None:
        for key in work.keys:
            line = self._lines.setdefault(key, [])
            work.ahead += bool(line)
            line.append(work)
        if work.ahead:
            work.context = copy_context()
            work.timer = asyncio.get_running_loop().call_later(
                CALL_SECONDS, self._give_up, work, CallNotBegunError()
            )
        else:
            self._start(work)

    def _start(self, work: _Work) -> None:
        loop = asyncio.get_running_loop()
        if work.timer is not None:
            work.timer.cancel()
        work.timer = loop.call_later(
            CALL_SECONDS, self._give_up, work, CallOverdueError(), context=work.context
        )
        work.task = loop.create_task(self._run(work), context=work.context)

    def _leave(self, work: _Work) -> None:
        """End a call, or one that does not begin: the next one in its queues may begin."""
        if work.timer is not None:
            work.timer.cancel()
        keys, work.keys = work.keys, frozenset()  # it may be given up twice in one turn of the loop
        for key in keys:
            line = self._lines[key]
            first = line[0] is work
            line.remove(work)
            if not line:
                del self._lines[key]
            elif first:
                following = line[0]
                following.ahead -= 1
                if not following.ahead:
                    self._start(following)

    # ------------------------------------------------------------ giving up

    def _claim_done(self, work: _Work, future: _Future) -> None:
        work.claims.pop(future, None)
        if future.cancelled() and not work.claims:
            self._abandon(work)

    def _give_up(self, work: _Work, error: CallOverdueError) -> None:
        """End the wait for a call that has timed out."""
        self._fail(work, self._failure(error, work))
        self._abandon(work)

    def _abandon(self, work: _Work) -> None:
        """Cancel a call that no caller waits for; it leaves its queues once it has ended."""
        if work.task is None:
            self._leave(work)
        elif work.is_begun and not work.task.cancelling():  # a second time would cut its clean-up
            work.task.cancel()

    # ------------------------------------------------------------ one call

    async def _run(self, work: _Work) -> None:
        work.is_begun = True
        try:
            await self._call(work)
        except asyncio.CancelledError:
            if cancelled_by_owner():
                raise
            self._fail(work, self._failure(CallCancelledError(), work))
        except Exception as error:
            failure = self._failure(error, work)
            if cancelled_by_owner() and isinstance(failure, DeviceFailedError):
                facts = {"driver": self._driver, "call": self._what(work.operation)}
                logger.error(
                    "call failed after its timeout or cancellation",
                    extra=facts | {"error": str(failure)},
                )
            self._fail(work, failure)
        finally:
            self._leave(work)

    async def _call(self, work: _Work) -> None:
        due = {future: item for future, item in work.claims.items() if not future.done()}
        if not due:
            return
        calls = self._reach()
        if isinstance(calls, EndpointStoppedError):
            raise calls
        call = getattr(calls, work.operation)
        answers: dict[str, Any] = dict(await call(list(due.values())))
        for future, item in due.items():
            answer = self._read(work.operation, item, answers)
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        if answers:
            text = f"it answered {self._what(work.operation)} for claims that were not requested"
            logger.error(
                "driver answers for unrequested claims",
                extra={"driver": self._driver, "error": text},
            )

    def _read(self, operation: _Operation, item: AllocatedClaim, answers: dict[str, Any]) -> Any:
        """Return the answer for a claim, or a DeviceFailedError."""
        uid, what = item.claim.uid, self._what(operation)
        if operation == "check":
            return answers.pop(uid, False) is True
        if uid not in answers:
            return unusable_answer("nothing for this claim", driver=self._driver, what=what)
        answer = answers.pop(uid)
        if operation == "prepare" and not isinstance(answer, Exception):
            edits = cast("Sequence[Edits]", answer)
            if len(edits) != len(item.devices):
                count = f"{len(edits)} Edits for {len(item.devices)} devices of a claim"
                return unusable_answer(count, driver=self._driver, what=what)
        return answer

    def _fail(self, work: _Work, error: Exception) -> None:
        """Answer all claims that have no answer yet."""
        for future, item in work.claims.items():
            if future.done():
                continue
            if work.operation == "check" and not isinstance(error, EndpointStoppedError):
                # If the check fails, the state of the device is unknown.
                facts = {"driver": self._driver, "claim_uid": item.claim.uid, "error": str(error)}
                logger.warning("driver cannot check a claim", extra=facts)
                future.set_result(False)
            else:
                future.set_exception(error)

    def _failure(self, error: Exception, work: _Work) -> Exception:
        if isinstance(error, EndpointStoppedError):
            return error
        if isinstance(error, ConnectionEndedError):
            return EndpointStoppedError(driver=self._driver, reason=error.reason)
        what = self._what(work.operation)
        if not isinstance(error, CallOverdueError):
            return failure_of(error, driver=self._driver, what=what)
        if isinstance(error, CallNotBegunError):
            text = (
                f"driver {self._driver}: an earlier call for the device has not ended, and {what} "
                f"waited {CALL_SECONDS:.0f} s for it; if this persists, restart the node plugin on "
                f"this node"
            )
        else:
            text = f"driver {self._driver} did not answer {what} within {CALL_SECONDS:.0f} s"
        counts = [len(item.devices) for item in work.claims.values()]
        is_of_one_device = counts == [1] and not self._per_batch[work.operation]
        return DeviceFailedError(text, index=0 if is_of_one_device else None)

    def _what(self, operation: _Operation) -> str:
        """Return the name of a call, for sentences."""
        return f"{operation}_claims" if self._per_batch[operation] else operation
