"""
One source of a driver's devices: keeps it connected, and calls it for claims.

:class:`Endpoint` implements the common behavior of all kinds: the life cycle (:class:`Lifecycle`)
and the calls with their error messages (:class:`Caller`). A kind supplies a :class:`.Connection`,
and a function that creates the next one. The endpoint forwards a connection's reports as they
arrive, but none after the connection has ended. The listener decides how a stop of the endpoint
affects its devices.

In calls to a connection, pools have the driver's names. If the connection raises an exception, the
result for every claim of the call is an error with a message for users. Results are validated. The
engine decides the order of calls, limits their duration and abandons them.

Does not depend on slices, gRPC or the kubelet.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

from drakit.device import AllocatedClaim, Inventory, PreparedDevice
from drakit.driver import DriverError
from drakit_daemon.backoff import Backoff
from drakit_daemon.tasks import cancelled_by_owner
from drakit_driver.runtime.contract import (
    CallError,
    CallOperation,
    Calls,
    Connection,
    ConnectionEndedError,
    DriverTraits,
    EndpointListener,
    Reports,
    Update,
    overdue,
)
from drakit_driver.runtime.failures import (
    CallCancelledError,
    CallOverdueError,
    DeviceFailedError,
    EndpointStoppedError,
    failure_of,
    kind_and_text,
    text_of,
    unusable_result,
)
from drakit_driver.runtime.policies import AnyPolicies, PolicyFeed
from drakit_formats.resource.nodes import short_pool

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- calls


SLOW_CALL_SECONDS = 5.0
"""Time after which a call in flight is logged and reported."""


class Caller(ABC):
    """Makes the calls to one driver, for a :class:`.CallableEndpoint`."""

    def __init__(self, driver: str, *, traits: DriverTraits, node: str) -> None:
        """Create a caller. `node` is the node name, which is also the API name of the default
        pool."""
        self.traits = traits
        self._driver = driver
        self._node = node
        self._slow_calls: dict[object, str] = {}

    @property
    def slow_calls(self) -> Sequence[str]:
        """Implement :attr:`.HostedEndpoint.slow_calls`."""
        return [*self._slow_calls.values()]

    @abstractmethod
    async def _connection(self, ended: object = None) -> Calls | EndpointStoppedError:
        """Return the connection to call, or the reason why there is none. If the connection `ended`
        during a call, wait for its replacement, if any."""

    async def prepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, Sequence[PreparedDevice] | CallError]:
        """Implement :meth:`.CallableEndpoint.prepare`."""
        return await self._watched("prepare", batch)

    async def unprepare(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, CallError | None]:
        """Implement :meth:`.CallableEndpoint.unprepare`."""
        return await self._watched("unprepare", batch)

    async def check(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, bool | CallError]:
        """Implement :meth:`.CallableEndpoint.check`."""
        return await self._watched("check", batch)

    async def _call(
        self, operation: CallOperation, batch: Sequence[AllocatedClaim]
    ) -> dict[str, Any]:
        try:
            items = [
                replace(
                    item,
                    devices=tuple(
                        [replace(d, pool=short_pool(self._node, d.pool)) for d in item.devices]
                    ),
                )
                for item in batch
            ]
            connection = await self._connection()
            if isinstance(connection, EndpointStoppedError):
                raise connection
            try:
                answers: dict[str, Any] = dict(await getattr(connection, operation)(items))
            except ConnectionEndedError:
                # Retry with the next connection: calls are idempotent, and the kubelet would retry
                # only after 10 s or more.
                successor = await self._connection(connection)
                if successor is connection or isinstance(successor, EndpointStoppedError):
                    raise
                answers = dict(await getattr(successor, operation)(items))
        except asyncio.CancelledError:
            if cancelled_by_owner():
                raise
            failure = self._failure(CallCancelledError(), operation, batch)
        except Exception as error:
            failure = self._failure(error, operation, batch)
            if cancelled_by_owner():
                if isinstance(failure, DeviceFailedError):
                    what = self.traits.method(operation)
                    logger.error(
                        "call failed after its timeout or cancellation",
                        extra={"driver": self._driver, "call": what, "error": str(failure)},
                    )
                raise asyncio.CancelledError from None
        else:
            return self._results(operation, batch, answers)
        return dict.fromkeys([item.claim.uid for item in batch], failure)

    async def _watched(
        self, operation: CallOperation, batch: Sequence[AllocatedClaim]
    ) -> dict[str, Any]:
        """Make a call. If it takes a long time, log and report it."""
        call = object()

        def report() -> None:
            what = self.traits.method(operation)
            claims = ", ".join(str(item.claim) for item in batch[:3])
            text = f"it has not responded to {what} for {SLOW_CALL_SECONDS:.0f} s (claim {claims})"
            self._slow_calls[call] = text
            facts = {"driver": self._driver, "call": what, "claims": claims}
            logger.warning("driver has not responded to a call yet", extra=facts)

        timer = asyncio.get_running_loop().call_later(SLOW_CALL_SECONDS, report)
        try:
            return await self._call(operation, batch)
        finally:
            timer.cancel()
            self._slow_calls.pop(call, None)

    # ------------------------------------------------------------ results

    def _results(
        self, operation: CallOperation, batch: Sequence[AllocatedClaim], answers: dict[str, Any]
    ) -> dict[str, Any]:
        """Return each claim's result, or a DeviceFailedError."""
        results: dict[str, Any] = {}
        for item in batch:
            uid = item.claim.uid
            if operation == "check":
                results[uid] = answers.pop(uid, False) is True
                continue
            if uid not in answers:
                results[uid] = self._unusable(operation, "nothing for this claim")
                continue
            results[uid] = answer = answers.pop(uid)
            if operation == "prepare" and not isinstance(answer, Exception):
                try:
                    number = len(cast("Sequence[PreparedDevice]", answer))
                except Exception as error:  # a result of the wrong type fails only its own claim
                    results[uid] = self._failure(error, operation, batch)
                    continue
                if number != len(item.devices):
                    count = f"{number} Edits for {len(item.devices)} devices of a claim"
                    results[uid] = self._unusable(operation, count)
        if answers:
            what = self.traits.method(operation)
            text = f"its response to {what} has results for claims that were not requested"
            logger.error(
                "driver returned results for unrequested claims",
                extra={"driver": self._driver, "error": text},
            )
        return results

    def _unusable(self, operation: CallOperation, answer: str) -> DeviceFailedError:
        what = self.traits.method(operation)
        return unusable_result(answer, driver=self._driver, what=what)

    def _failure(
        self, error: Exception, operation: CallOperation, batch: Sequence[AllocatedClaim]
    ) -> CallError:
        if isinstance(error, EndpointStoppedError):
            return error
        if isinstance(error, ConnectionEndedError):
            return EndpointStoppedError(driver=self._driver, reason=error.reason)
        if isinstance(error, CallOverdueError):
            return overdue(self._driver, self.traits, operation, batch)
        return failure_of(error, driver=self._driver, what=self.traits.method(operation))


# ---------------------------------------------------------------- policies

POLICIES_PACE_SECONDS = 0.5
"""Minimum time between two `apply_policies` calls, because a chart upgrade can change many policies
at the same time."""

POLICIES_RETRY_SECONDS = 60.0
"""Delay before refused policies are applied again."""


async def follow_policies(
    feed: PolicyFeed,
    apply: Callable[[AnyPolicies], Awaitable[Mapping[str, str]]],
    *,
    driver: str,
    applied: Callable[[], None] = lambda: None,
) -> None:
    """
    Make a driver apply its policies when it connects and after each change, until its connection
    ends. Refused policies are retried, because the reason may be the state of the node.

    `apply` returns the problems of invalid policies, keyed by name. If there are any, no policy has
    been applied. It raises DeviceFailedError if the driver refuses the policies. `applied` is
    called each time the driver has applied policies.
    """
    feed.connected()
    policies: AnyPolicies | None = None
    refusal: str | None = None
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(None if refusal is None else POLICIES_RETRY_SECONDS):
                policies = await feed.next(policies)
        assert policies is not None
        previous, refusal = refusal, None
        invalid: Mapping[str, str] = {}
        try:
            invalid = await apply(policies)
        except ConnectionEndedError:
            return
        except (DeviceFailedError, CallCancelledError) as error:
            refusal = str(error)
            if refusal != previous:
                facts = {"driver": driver, "error": refusal}
                logger.error("driver refuses its policies; the previous ones remain", extra=facts)
        if invalid:
            feed.invalid(policies, invalid)
        else:
            feed.report(policies, refusal)
            if refusal is None:
                # Report the policies first, because clients that see the devices must find the
                # policies in effect.
                applied()
        await asyncio.sleep(POLICIES_PACE_SECONDS)


# ---------------------------------------------------------------- life cycle

RECONNECT_SECONDS = (1.0, 60.0)
"""Initial and maximum delay before an endpoint is reconnected. The delay doubles after each
failure."""

STEADY_SECONDS = 60.0
"""How long a connection must last to reset the delay to its minimum. A connection that lists its
devices and then ends immediately is treated as a failure."""

HAND_OVER_SECONDS = 2.0
"""How long the successor of an ended connection has to list its devices. During this time, calls
wait for it, and no stop is reported. A backend update takes a tenth of this time."""

SILENT_SECONDS = 10.0
"""How long a new connection has to list its devices before its silence is reported."""

ConnectionT = TypeVar("ConnectionT", bound=Reports)


class Lifecycle(Generic[ConnectionT]):
    """Keeps one endpoint connected, and forwards its reports to its listener."""

    def __init__(
        self,
        endpoint: str,
        connect: Callable[[], Awaitable[ConnectionT]],
        *,
        listener: EndpointListener,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        has_successor: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create a life cycle. `connect` creates the next connection, and raises if that is
        currently impossible. `pause` is called with a delay in seconds before each reconnect, and
        may return earlier if there is no need to wait. `has_successor` returns whether the other
        side of the connection is being replaced."""
        self._endpoint = endpoint
        self._connect = connect
        self._listener = listener
        self._pause = pause
        self._has_successor = has_successor
        self._hand_over: asyncio.TimerHandle | None = None
        """The timer that ends the hand-over. None unless the successor of a connection is
        awaited."""
        self._news = asyncio.Event()
        """Set, and replaced by a new event, when a connection or a hand-over ends."""
        self._closing: set[asyncio.Task[None]] = set()
        """Tasks that close connections after a hand-over."""
        self._backoff = Backoff(*RECONNECT_SECONDS, jitter=0)
        self._reason: str | None = "it has not started yet"
        self._previous: str | None = None
        """The reason for the last stop. None once the endpoint has listed its devices again."""
        self._reported: str | None = None
        """The last stop reason reported to the listener. None once devices have been reported."""

        self.connection: ConnectionT | None = None
        """The latest connection, or None."""

    @property
    def stop_reason(self) -> str | None:
        """The reason why the endpoint cannot be called now. None if it can, or if calls wait for
        the next connection."""
        if self._hand_over is not None:
            return None
        if self._reason is not None or self.connection is None:
            return self._reason
        reason = self.connection.unavailable
        # That a new connection has not listed its devices explains nothing, so also report the
        # earlier cause to users.
        unexplained = reason is not None and self._previous not in (None, reason)
        return f"{reason} (before that: {self._previous})" if unexplained else reason

    async def start(self) -> None:
        """
        Connect for the first time.

        Raises :class:`DriverError` if the endpoint rejects its configuration. Any other failure is
        a stop, and :meth:`run` retries.
        """
        try:
            await self._make_connection()
        except DriverError as error:
            self._reason = text_of(error)
            raise
        if (reason := self.stop_reason) is not None and self._reason is None:
            self._report_stop(reason)

    async def run(self) -> None:
        """Keep the endpoint connected until canceled. A cancellation is not reported as a stop, so
        the devices remain unchanged."""
        while True:
            if self.connection is None:
                await self._pause(self._backoff.next_seconds())
                try:
                    await self._make_connection()
                except DriverError as error:
                    self._stopped(text_of(error))
            if self.connection is not None:
                await self._follow(self.connection)

    async def close(self) -> None:
        """End the connection."""
        self._reason = "the node plugin is stopping"
        self._end_hand_over()
        if self.connection is not None:
            await self.connection.close()
            self.connection = None
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _make_connection(self) -> None:
        try:
            self.connection = await self._connect()
        except DriverError:
            raise
        except Exception as error:
            self._stopped(f"it could not be started: {_reason_of(error)}")
        else:
            self._reason = None

    async def _follow(self, connection: ConnectionT) -> None:
        """Forward the updates of one connection until it ends."""
        loop = asyncio.get_running_loop()
        silent = loop.call_later(SILENT_SECONDS, self._report_silence, connection)
        listed_at: float | None = None
        ended = ConnectionEndedError("its stream ended")
        try:
            async for update in connection.inventories():
                if isinstance(update, Inventory):
                    silent.cancel()
                    listed_at = loop.time() if listed_at is None else listed_at
                    self._previous = self._reported = None
                self._pass_on(update)
                self._end_hand_over()
        except asyncio.CancelledError:
            if cancelled_by_owner():
                raise
            ended = ConnectionEndedError("its connection was closed")
        except ConnectionEndedError as error:
            ended = error
        except Exception as error:
            logger.exception("endpoint failed", extra={"endpoint": self._endpoint})
            ended = ConnectionEndedError(f"its stream failed: {_reason_of(error)}")
        finally:
            silent.cancel()
        steady = listed_at is not None and loop.time() - listed_at >= STEADY_SECONDS
        if steady and not ended.disorderly:
            self._backoff.succeeded()
        self.connection = None
        if self._hand_over is None and not ended.disorderly and self._has_successor():
            facts = {"endpoint": self._endpoint, "reason": ended.reason}
            logger.info("endpoint is handed over", extra=facts)
            self._reason = self._previous = ended.reason
            self._hand_over = loop.call_later(HAND_OVER_SECONDS, self._stopped, ended.reason)
            closing = loop.create_task(self._retire(connection))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self._notify()
        else:
            self._stopped(ended.reason)
            self._notify()
            await connection.close()

    def _pass_on(self, update: Update) -> None:
        """Pass an update to the listener. If that fails, assume that the update is the cause, and
        end this connection instead of the daemon, which also serves other endpoints."""
        try:
            if isinstance(update, Inventory):
                self._listener.replaced(self._endpoint, update)
            else:
                self._listener.reported(self._endpoint, update)
        except Exception as error:
            logger.exception("endpoint's update failed", extra={"endpoint": self._endpoint})
            raise ConnectionEndedError(
                "an internal error prevented the node plugin from processing its report; see the "
                "log of the node plugin on this node"
            ) from error

    async def _retire(self, connection: ConnectionT) -> None:
        """Close a connection that was handed over."""
        await connection.close()

    def _notify(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _end_hand_over(self) -> None:
        if self._hand_over is not None:
            self._hand_over.cancel()
            self._hand_over = None
            self._notify()

    async def _until_replaced(self, ended: object) -> None:
        """Wait until no hand-over is in progress. `ended` is a connection that has ended, although
        :meth:`run` may not have noticed that yet."""
        while self._hand_over is not None or (
            ended is not None and ended is self.connection and self._has_successor()
        ):
            await self._news.wait()

    def _stopped(self, reason: str) -> None:
        self._end_hand_over()
        self._reason = self._previous = reason
        logger.error("endpoint stopped", extra={"endpoint": self._endpoint, "reason": reason})
        self._report_stop(reason)

    def _report_silence(self, connection: ConnectionT) -> None:
        if connection.unavailable is not None and (reason := self.stop_reason) is not None:
            logger.error("endpoint is silent", extra={"endpoint": self._endpoint, "reason": reason})
            self._report_stop(reason)

    def _report_stop(self, reason: str) -> None:
        if reason != self._reported:
            try:
                self._listener.stopped(self._endpoint, reason)
            except Exception:
                facts = {"endpoint": self._endpoint}
                logger.exception("endpoint's stop could not be reported", extra=facts)
            else:
                self._reported = reason


def _reason_of(error: Exception) -> str:
    if isinstance(error, ConnectionEndedError):
        return error.reason
    return kind_and_text(error)


# ---------------------------------------------------------------- endpoint


class Endpoint(Lifecycle[Connection], Caller):
    """An endpoint of any kind. Implements :class:`.HostedEndpoint`."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Awaitable[Connection]],
        *,
        traits: DriverTraits,
        listener: EndpointListener,
        node: str,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        has_successor: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Create an endpoint. `connect` creates the next connection. It may wait for the source to
        appear, and raises if that is currently impossible. `node` is the node name. For the other
        parameters, see :class:`Lifecycle`.
        """
        Caller.__init__(self, name, traits=traits, node=node)
        super().__init__(name, connect, listener=listener, pause=pause, has_successor=has_successor)
        self.name = name

    async def ended(self) -> None:
        """Implement :meth:`.HostedEndpoint.ended`."""

    @property
    def blocked(self) -> str | None:
        """Implement :attr:`.HostedEndpoint.blocked`."""
        return None if self.connection is None else self.connection.blocked

    def unavailable(self) -> EndpointStoppedError | None:
        """Implement :meth:`.HostedEndpoint.unavailable`."""
        reason = self.stop_reason
        return None if reason is None else EndpointStoppedError(driver=self.name, reason=reason)

    async def _connection(self, ended: object = None) -> Connection | EndpointStoppedError:
        if ended is not None or self._hand_over is not None:
            await self._until_replaced(ended)
        if (stopped := self.unavailable()) is not None:
            return stopped
        assert self.connection is not None
        return self.connection
