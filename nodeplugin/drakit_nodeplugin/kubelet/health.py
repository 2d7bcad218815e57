"""
Device health for the kubelet. A stream sends all devices at the start, then changes, and
periodically all devices again.

The kubelet considers a device's health valid for a timeout, which each message contains. Therefore,
the stream sends the health of all devices again after a third of that time. Kubelet 1.36 requests
the v1alpha1 stream from every plugin, advertised or not, and logs an error every 5 s if the stream
is missing. For a driver without health, that stream stays open and sends nothing, so the pod status
does not change. Since 1.37, kubelets request only advertised services.

The source (:class:`.DeviceManager`) decides the health of a device.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import grpc.aio

from drakit_daemon import logs
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.devices.model import DeviceHealth
from drakit_proto.kubelet.drahealth.v1alpha1 import health_pb2 as v1alpha1
from drakit_proto.kubelet.drahealth.v1alpha1 import health_pb2_grpc as v1alpha1_grpc

logger = logging.getLogger(__name__)

PACE_SECONDS = 0.2
"""Minimum time between two messages. A driver with thousands of flapping devices causes at most
five messages per second."""

MAX_DEVICES = 500
"""Maximum number of devices in a message. Even with the longest device names and messages, the size
is below 1 MiB. The kubelet accepts 4 MiB."""

MAX_MESSAGE_BYTES = 1024
"""Maximum size of a device's message. The kubelet truncates longer messages by bytes, which can
split a character."""

CUT = "..."

MAX_LOGGED = 10
"""Maximum number of devices to list in a log line. Other devices are only counted."""

MAX_LOGGED_CHARACTERS = 200
"""Maximum length of a device's message in the log. These messages can come from vendors."""

GONE = "the driver no longer lists the device"


class HealthService:
    """The health service of one driver, in both versions, for any number of streams."""

    def __init__(self, *, driver: str, reports_health: bool, timeout_seconds: float) -> None:
        """Create the service. The kubelet considers a device's health valid for
        `timeout_seconds`."""
        self.timeout_seconds = max(1, math.ceil(timeout_seconds))
        """The timeout in whole seconds, as in the messages."""

        self._source: DeviceManager | None = None
        """The source of the health. None for a driver without health, and while another instance of
        the driver is active."""

        self._reports_health = reports_health
        self._driver = driver
        self._served = asyncio.Event()
        self._ended = asyncio.Event()
        """Set to end all streams that have started."""

        self._stopped = asyncio.Event()

    @property
    def versions(self) -> tuple[str, ...]:
        """The services that the driver advertises to the kubelet."""
        if not self._reports_health:
            return ()
        return ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server. Call it again for a replacement server."""
        v1alpha1_grpc.add_DRAResourceHealthServicer_to_server(
            cast("Any", HealthServicer(self, v1alpha1, "v1alpha1.NodeWatchResources")), server
        )
        if not self._reports_health:
            return
        # Import lazily, because most drivers do not report health, and don't need these messages.
        from drakit_proto.kubelet.drahealth.v1 import health_pb2 as v1
        from drakit_proto.kubelet.drahealth.v1 import health_pb2_grpc as v1_grpc

        v1_grpc.add_DRAResourceHealthServicer_to_server(
            cast("Any", HealthServicer(self, v1, "v1.NodeWatchResources")), server
        )

    def serve(self, source: DeviceManager | None) -> None:
        """Report the health from this source, including in streams that are already waiting for a
        source. If the source is None, end the streams. Streams that the kubelet opens after that
        wait for a source."""
        if not self._reports_health or self._stopped.is_set():
            return
        self._source = source
        if source is not None:
            self._served.set()
        else:
            self._served.clear()
            self._ended.set()
            self._ended = asyncio.Event()

    async def until_served(self) -> bool:
        """Wait until there is a source. Return False if the service has stopped."""
        # The source can be gone again before this task resumes.
        while self._source is None and not self._stopped.is_set():
            await _wait_first(self._served.wait(), self._stopped.wait(), until=math.inf)
        return not self._stopped.is_set()

    def end(self) -> None:
        """End all current and future streams, because they would delay the stop of the server."""
        self._stopped.set()
        self._ended.set()

    @contextmanager
    def stream(self, method: str) -> Generator[Subscription]:
        """Subscribe for one stream, and log the start and end of the stream."""
        log = StreamLog(self._driver, method)
        began = time.monotonic()
        log.info("health stream started")
        reason = "the plugin ended it"
        try:
            yield self.subscribe(log)
        except Exception as error:
            reason = f"it failed: {error}"
            raise
        except BaseException:  # a cancellation, or the generator was closed
            if not self._ended.is_set():
                reason = "the kubelet closed the stream"
            raise
        finally:
            seconds = round(time.monotonic() - began, 1)
            log.info("health stream ended", reason=reason, seconds=seconds)

    def subscribe(self, log: StreamLog) -> Subscription:
        """Return a subscription that logs its changes to `log`."""
        assert self._source is not None
        resend_seconds = self.timeout_seconds / 3
        return Subscription(self._source, resend_seconds=resend_seconds, ended=self._ended, log=log)


class HealthServicer:
    """One version of the service. The versions differ only in the module of their messages."""

    def __init__(self, service: HealthService, messages: Any, method: str) -> None:
        self._service = service
        self._messages = messages
        self._method = method

    async def NodeWatchResources(
        self, request: object, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        # Send metadata immediately: the first message may take a long time, and without metadata a
        # client cannot detect that the stream is open.
        await context.send_initial_metadata(())
        if not await self._service.until_served():
            return
        # A cancellation (the kubelet has disconnected) must propagate out of this function:
        # grpc.aio leaks the call if the stream swallows the cancellation
        # (github.com/grpc/grpc/issues/43360).
        with self._service.stream(self._method) as subscription:
            while (part := await subscription.next()) is not None:
                yield self._messages.NodeWatchResourcesResponse(
                    devices=[self._message(health) for health in part]
                )

    def _message(self, health: DeviceHealth) -> Any:
        return self._messages.DeviceHealth(
            device=self._messages.DeviceIdentifier(
                pool_name=health.pool, device_name=health.device
            ),
            health=getattr(self._messages, health.status.upper()),
            last_updated_time=health.changed_at,
            health_check_timeout_seconds=self._service.timeout_seconds,
            message=shown(health.message),
        )


class StreamLog:
    """
    Logs the events of one stream, which has its own request ID.

    The ID is set separately for each line, because a stream is an asynchronous generator, which may
    be closed in a different context from the one in which it was started.
    """

    def __init__(self, driver: str, method: str) -> None:
        self._request_id = logs.new_request_id()
        self._facts = {"driver": driver, "method": method}

    def info(self, message: str, **facts: object) -> None:
        with logs.request_scope(self._request_id):
            logger.info(message, extra=self._facts | facts)

    def changes(self, changes: Sequence[DeviceHealth]) -> None:
        """Log the changes that the kubelet receives, in one line of limited length."""
        named = [f"{each.pool}/{each.device} {_in_words(each)}" for each in changes[:MAX_LOGGED]]
        if len(changes) > MAX_LOGGED:
            named.append(f"and {len(changes) - MAX_LOGGED} more")
        unhealthy = sum(each.status == "unhealthy" for each in changes)
        self.info(
            "device health sent",
            devices=len(changes),
            unhealthy=unhealthy,
            changes="; ".join(named),
        )


def _in_words(health: DeviceHealth) -> str:
    message = health.message[:MAX_LOGGED_CHARACTERS]
    return f"{health.status} ({message})" if message else health.status


class Subscription:
    """The state of one subscriber: the reports that have been sent, and those to send next."""

    def __init__(
        self,
        source: DeviceManager,
        *,
        resend_seconds: float,
        ended: asyncio.Event,
        log: StreamLog,
    ) -> None:
        self._source = source
        self._log = log
        self._resend_seconds = resend_seconds
        self._ended = ended
        self._sent: Mapping[tuple[str, str], DeviceHealth] = {}
        self._states: Sequence[DeviceHealth] | None = None
        self._unsent: list[DeviceHealth] = []
        self._seen = 0
        self._polled_at = -math.inf
        self._resend_at = -math.inf

    async def next(self) -> Sequence[DeviceHealth] | None:
        """Wait for the devices of the next message. Return None when the streams have ended."""
        source = self._source
        while not self._unsent:
            if await self._wait_ended(until=self._polled_at + PACE_SECONDS):
                return None
            changed = await _wait_first(
                source.revision.after(self._seen), self._ended.wait(), until=self._resend_at
            )
            self._poll(source, resend=not changed)
        if self._ended.is_set():
            return None
        part, self._unsent = self._unsent[:MAX_DEVICES], self._unsent[MAX_DEVICES:]
        return part

    async def _wait_ended(self, *, until: float) -> bool:
        """Wait for the end of all streams, but no later than `until`. Return whether they ended."""
        if not self._ended.is_set():
            await _wait_first(self._ended.wait(), until=until)
        return self._ended.is_set()

    def _poll(self, source: DeviceManager, *, resend: bool) -> None:
        """Collect the devices to send: all devices, or those that have changed."""
        now = self._polled_at = asyncio.get_running_loop().time()
        self._seen = source.revision.number
        before, states = self._states, source.health_states()
        # Check the time here as well, because a source that changes continuously would otherwise
        # delay the resend.
        resend = resend or now >= self._resend_at
        if resend:
            self._resend_at = now + self._resend_seconds
        elif states is before:
            return
        current = {(state.pool, state.device): state for state in states}
        changed = [state for key, state in current.items() if self._sent.get(key) != state]
        gone = [_gone(state) for key, state in self._sent.items() if key not in current]
        if changed or gone:
            self._log.changes([*changed, *gone])
        self._unsent = [*(current.values() if resend else changed), *gone]
        self._sent, self._states = current, states


def _gone(state: DeviceHealth) -> DeviceHealth:
    """Return the last report for a device that is no longer listed: its health is unknown. Without
    it, the device would keep its previous health until the kubelet's timeout."""
    return DeviceHealth(
        pool=state.pool,
        device=state.device,
        status="unknown",
        message=GONE,
        changed_at=int(time.time()),
    )


async def _wait_first(*waits: Coroutine[Any, Any, object], until: float) -> bool:
    """Wait until one of the coroutines ends, or until a time (loop clock). Return whether one
    ended."""
    left_seconds = max(0.0, until - asyncio.get_running_loop().time())
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(
            tasks, timeout=left_seconds, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        for task in tasks:
            task.cancel()
    return bool(done)


def shown(message: str) -> str:
    """Make a message valid for gRPC, and short enough that the kubelet does not truncate it."""
    data = message.encode(errors="backslashreplace")
    if len(data) > MAX_MESSAGE_BYTES:
        data = data[: MAX_MESSAGE_BYTES - len(CUT)]
        return data.decode(errors="ignore") + CUT
    return data.decode()
