"""
One connection to a backend, with its streams and calls, and the endpoint of the backend's driver.
The endpoint exists even while the backend is unavailable.

A connection lasts as long as its device stream. The health stream is optional, and is reopened when
it ends. Messages are received as they arrive, but after each pause only the latest is parsed. A
backend that floods the stream is disconnected, and reads of large messages are throttled.
:mod:`.directory` finds the backend's socket, :mod:`.claimcalls` makes the calls for claims, and
:mod:`drakit_driver.runtime.endpoint` implements the life cycle and the error messages.

Knows only the identity of claims. Does not depend on slices or the kubelet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import grpc

from drakit.device import ClaimReference, Inventory
from drakit.driver import DriverError, Node
from drakit_daemon.backoff import Backoff
from drakit_daemon.logs import ProblemLog
from drakit_daemon.rate_limiter import RateLimiter
from drakit_driver.runtime.backend import health_of, json_of, message_of
from drakit_driver.runtime.contract import (
    MAX_DEVICES,
    Connection,
    ConnectionEndedError,
    DeviceKey,
    DriverTraits,
    HealthReport,
    HostedEndpoint,
    PolicyTraits,
    Update,
)
from drakit_driver.runtime.endpoint import Endpoint, follow_policies
from drakit_driver.runtime.failures import DeviceFailedError, printable
from drakit_driver.runtime.latest_value import LatestValue, pause_after
from drakit_driver.runtime.policies import (
    MAX_PROBLEM,
    AnyPolicies,
    HeldClaims,
    PolicyFeed,
)
from drakit_formats.resource.nodes import device_place
from drakit_nodeplugin.endpoints.allowlist import Rights
from drakit_nodeplugin.endpoints.backend.claimcalls import LOST_SECONDS, BackendClaims
from drakit_nodeplugin.endpoints.backend.convert import EarlyHealth, InventoryReader, place_in
from drakit_nodeplugin.endpoints.backend.directory import (
    SERVICE,
    BackendDirectory,
    BackendSocket,
    identify,
)
from drakit_nodeplugin.endpoints.sources import HostContext
from drakit_nodeplugin.endpoints.wire import (
    MAX_MESSAGE_BYTES,
    MAX_PART_BYTES,
    CallFailedError,
    Client,
    GarbageError,
    Turns,
    parse,
    parts,
)
from drakit_proto.backend.v1 import backend_pb2 as pb

logger = logging.getLogger(__name__)

HEALTH_AGAIN_SECONDS = (1.0, 60.0)
"""Initial and maximum delay before an ended health stream is reopened."""

IGNORED_SECONDS = 60.0
"""Minimum time between two log lines about health that cannot be parsed."""

STEADY_SECONDS = 60.0
CLOSE_SECONDS = 3.0
RESPONSE_SECONDS = 30.0
"""How long calls in flight can continue on a connection that was handed over."""

LOST = "the connection to its backend was lost"

LABELS_SECONDS = 5.0
"""How often to check whether the node labels have changed."""

_HEALTH = frozenset({pb.WatchHealthResponse.DEVICES_FIELD_NUMBER})


class BackendConnection(BackendClaims):
    """One connection to a backend. Implements :class:`.Connection`."""

    blocked: str | None = None
    """The call that blocks the event loop. Always None, because a backend does not run an event
    loop in this process."""

    def __init__(
        self, driver: str, client: Client, *, rights: Rights, policies: PolicyFeed | None = None
    ) -> None:
        """Create a connection, which takes over and closes the client. `policies` is the feed of a
        driver that has policies."""
        latest = LatestValue[bytes]()
        super().__init__(driver, client, rights=rights, latest=latest, policies=policies)
        self._loop = asyncio.get_running_loop()
        self.has_metadata_files = False
        """Whether containers get metadata files. Known once :meth:`start` has returned."""
        self._has_listed = False
        """Whether the backend has sent its first device list."""
        self._reader = InventoryReader()
        self._early = EarlyHealth()
        self._ignored = ProblemLog(
            logger,
            "health that the backend reported is ignored",
            facts={"driver": driver},
            pause_seconds=IGNORED_SECONDS,
        )
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ life cycle

    async def start(self, *, node: Node, version: str) -> None:
        """Request the backend's name, and start its streams. Raises
        :class:`ConnectionEndedError`."""
        labels = node.labels
        try:
            info = await identify(self._client, node=node, version=version)
        except CallFailedError as error:
            raise ConnectionEndedError(f"its backend {error}") from None
        self.needs_claim_data = info.claim_data
        self.has_metadata_files = info.metadata_files
        if info.driver_name != self._driver:
            raise ConnectionEndedError(
                "the backend on its socket now reports a different driver name"
            )
        self._begin(self._watch_devices(), "devices")
        self._begin(self._watch_health(), "health")
        self._begin(self._describe_node(node, version=version, labels=labels), "labels")
        if self._policies is not None:
            policies = BackendPolicies(self._driver, self._client, self._policies, self._latest)
            self._begin(policies.run(), "policies")

    async def _describe_node(
        self, node: Node, *, version: str, labels: Mapping[str, str] | None
    ) -> None:
        """Send the node labels whenever they change."""
        while True:
            await asyncio.sleep(LABELS_SECONDS)
            if (current := node.labels) == labels:
                continue
            with suppress(CallFailedError):  # the next check retries
                await identify(self._client, node=node, version=version)
                labels = current

    async def listed(self, *, timeout_seconds: float) -> None:
        """Wait for the first device list, or for the end of the connection, until a timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._latest.wait()

    @property
    def unavailable(self) -> str | None:
        """The reason why calls are currently impossible, or None."""
        if (over := self._latest.over) is not None:
            return over.reason
        if self._has_listed:
            return None
        waits = None if self._policies is None else self._policies.stop_reason
        return waits or "it has not listed its devices yet"

    async def close(self) -> None:
        """End the connection and all of its calls."""
        self._latest.end(ConnectionEndedError("the node plugin has closed the connection"))
        tasks = {*self._tasks}
        for task in tasks:
            task.cancel()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                if tasks:
                    await asyncio.wait(tasks)
                await self._client.close()
        except TimeoutError:
            logger.warning(
                "backend's connection did not close in time", extra={"driver": self._driver}
            )

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._loop.create_task(work, name=f"{self._driver} {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------ devices

    async def inventories(self) -> AsyncIterator[Update]:
        """Yield the backend's reports. Raises :class:`ConnectionEndedError` when the connection
        ends."""
        while True:
            raw, health = await self._latest.next()
            turns = Turns()
            if raw is not None and (inventory := await self._read(raw, turns)) is not None:
                health.update(self._early.list(inventory))
                yield inventory
            unlisted = self._early.unlisted()
            if health or unlisted:
                yield HealthReport(devices=health, unlisted=unlisted)
            self._latest.hold(pause_after(turns.worked_seconds))

    async def _read(self, raw: bytes, turns: Turns) -> Inventory | None:
        """Return the inventory of a message, or None if it is unchanged."""
        try:
            inventory = await self._reader.read(raw, turns)
        except GarbageError as error:
            self._latest.end(_disorder(f"sent an invalid list of devices: {error}"))
            inventory = None
        if self._latest.over is not None:
            raise self._latest.over  # the connection has ended, so its devices are no longer valid
        if inventory is not None:
            self._listed, self._by_key = inventory, None
        return inventory

    async def _watch_devices(self) -> None:
        """Receive device lists until the stream ends, and then end the connection."""
        try:
            async with aclosing(self._client.stream("WatchDevices")) as messages:
                async for raw in messages:
                    self._has_listed = True
                    self._latest.replace(raw)
            ended = ConnectionEndedError("its backend ended its stream of devices")
        except GarbageError as error:
            # A flood of messages also raises GarbageError.
            ended = _disorder(f"sent {error}; it must list its devices only after a change")
        except CallFailedError as error:
            facts = {"driver": self._driver, "error": str(error)[:200]}
            logger.info("backend's stream ended", extra=facts)
            ended = ConnectionEndedError(LOST if error.may_be_lost else f"its backend {error}")
        except Exception:
            logger.exception("backend's stream failed", extra={"driver": self._driver})
            ended = ConnectionEndedError(
                "an internal error prevented the node plugin from reading its devices; see the log "
                "of the node plugin on this node"
            )
        self._latest.end(ended)

    # ------------------------------------------------------------ health

    async def _watch_health(self) -> None:
        """Receive health messages while the connection lasts. Failures end only the health
        stream."""
        backoff = Backoff(*HEALTH_AGAIN_SECONDS, jitter=0)
        problems = ProblemLog(
            logger, "backend's stream of health ended", facts={"driver": self._driver}
        )
        while self._latest.over is None:
            began_at = self._loop.time()
            problem = await self._health_problem()
            if problem is None:
                return
            if self._latest.over is None:
                problems.report(problem)
            if self._loop.time() - began_at > STEADY_SECONDS:
                backoff.succeeded()
            await asyncio.sleep(backoff.next_seconds())

    async def _health_problem(self) -> str | None:
        """Read one health stream until it ends. Return how it ended, or None if the backend does
        not serve health streams."""
        try:
            # Don't skip messages, because each message is about different devices.
            async with aclosing(self._client.stream("WatchHealth", skips=False)) as messages:
                async for raw in messages:
                    turns = Turns()
                    try:
                        await self._take_health(raw, turns)
                    # Continue, because the next message is independent of this one.
                    except GarbageError as error:
                        self._ignored.report(f"an invalid health message: {error}")
                    await asyncio.sleep(pause_after(turns.worked_seconds))
        except CallFailedError as error:
            if error.code is grpc.StatusCode.UNIMPLEMENTED:
                return None
            return LOST if error.may_be_lost else f"its backend {error}"
        except GarbageError as error:
            return f"its backend sent an invalid health message: {error}"
        except Exception:
            logger.exception("backend's stream failed", extra={"driver": self._driver})
            return "an internal error prevented the node plugin from reading the stream of health"
        return "the backend closed its stream of health"

    async def _take_health(self, raw: bytes, turns: Turns) -> None:
        for number, (_, part) in enumerate(parts(raw, _HEALTH, limit=len(raw))):
            if number == MAX_DEVICES:
                raise GarbageError(f"more than {MAX_DEVICES:,} devices")
            try:
                if len(part) > MAX_PART_BYTES:
                    raise GarbageError(f"a message of more than {MAX_PART_BYTES // 1024} KiB")
                message = parse(pb.DeviceHealth, part)
            except GarbageError as error:  # the error affects only one device
                self._ignored.report(f"the health of {_device_in(part)}: {error}")
                continue
            key, health = DeviceKey(message.pool, message.name), health_of(message.health)
            if self._early.keep(key, health):
                self._latest.wake()
            else:
                self._latest.report(key, health)
            await turns.give_way()


def _device_in(part: bytes) -> str:
    """Return the name of the device in a health message that cannot be parsed."""
    try:
        return device_place(*place_in(part, pb.DeviceHealth))
    except GarbageError:
        return "an unknown device"


def _disorder(text: str) -> ConnectionEndedError:
    text = f"its backend {text}; this is a bug in the backend"
    return ConnectionEndedError(text, disorderly=True)


# ---------------------------------------------------------------- policies

APPLY_SECONDS = 45.0
"""Time limit for ApplyPolicies. A Python driver has 30 s for its own method."""

HELD_SECONDS = 10.0
"""Time limit for UpdateHeldDevices."""

HELD_PACE_SECONDS = 0.5
"""Minimum time between two messages about held devices. A batch of pods changes the held devices
often."""

MAX_RESPONSE_BYTES = 1024 * 1024
"""Maximum size of a response to ApplyPolicies, enough for a problem of 1,024 characters for each of
256 policies."""


class BackendPolicies:
    """Sends policies and held devices over one connection."""

    def __init__(
        self, driver: str, client: Client, feed: PolicyFeed, latest: LatestValue[bytes]
    ) -> None:
        """Create the sender. `latest` signals the end of the connection."""
        self._driver = driver
        self._client = client
        self._feed = feed
        self._latest = latest

    async def run(self) -> None:
        """Until canceled, send all changes. Held devices are sent before policies."""
        try:
            if (sent := await self._send_held(None)) is None:
                return
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_held(sent))
                group.create_task(follow_policies(self._feed, self._apply, driver=self._driver))
        except Exception:
            logger.exception("policies cannot be sent", extra={"driver": self._driver})
            self._latest.end(ConnectionEndedError("the node plugin failed to send its policies"))

    async def _apply(self, policies: AnyPolicies) -> Mapping[str, str]:
        request = pb.ApplyPoliciesRequest(
            policies=[
                pb.Policy(
                    name=each.name,
                    created=int(each.created.timestamp()),
                    generation=each.generation,
                    spec=json_of(each.spec),
                )
                for each in policies.values()
            ]
        )
        if request.ByteSize() > MAX_MESSAGE_BYTES:
            raise DeviceFailedError(
                f"the policies of driver {self._driver} are larger than 4 MiB together; delete some"
            )
        try:
            raw = await self._client.call(
                "ApplyPolicies", request.SerializeToString(), timeout_seconds=APPLY_SECONDS
            )
            return self._invalid(raw, policies)
        except CallFailedError as error:
            if error.may_be_lost and (ended := await self._latest.ended_within(LOST_SECONDS)):
                raise ended from None
            raise DeviceFailedError(f"its backend {error}") from None
        except GarbageError as error:
            raise DeviceFailedError(
                f"its backend responded to ApplyPolicies with {error}"
            ) from None

    def _invalid(self, raw: bytes, policies: AnyPolicies) -> Mapping[str, str]:
        """Return the problems of individual policies from a response. Raises DeviceFailedError if
        the backend refused all policies."""
        if len(raw) > MAX_RESPONSE_BYTES:
            raise GarbageError("more than 1 MiB")
        answer = parse(pb.ApplyPoliciesResponse, raw)
        if answer.error:
            raise DeviceFailedError(printable(answer.error))
        return {
            each.name: printable(each.problem[:MAX_PROBLEM])
            for each in answer.invalid
            if each.name in policies
        }

    async def _follow_held(self, sent: HeldClaims | None) -> None:
        while sent is not None:
            await self._feed.held_changed.wait()
            self._feed.held_changed.clear()
            sent = await self._send_held(sent)
            await asyncio.sleep(HELD_PACE_SECONDS)

    async def _send_held(self, sent: HeldClaims | None) -> HeldClaims | None:
        """Send the held devices, unless they are unchanged, and return the held devices that the
        backend now has. A failure ends the connection, because a backend that does not receive them
        might rename a held device."""
        held = self._feed.held_claims()
        if held == sent:
            return held
        request = held_message(held)
        try:
            if request.ByteSize() > MAX_MESSAGE_BYTES:
                raise CallFailedError("cannot receive the held devices, which exceed 4 MiB")
            await self._client.call(
                "UpdateHeldDevices", request.SerializeToString(), timeout_seconds=HELD_SECONDS
            )
        except CallFailedError as error:
            if error.code is not grpc.StatusCode.UNIMPLEMENTED:
                self._latest.end(ConnectionEndedError(f"its backend {error}"))
                return None
        return held


def held_message(held: HeldClaims) -> pb.UpdateHeldDevicesRequest:
    """Build the message about held devices, grouped by claim."""
    claims: dict[ClaimReference, pb.HeldClaim] = {}
    for name, of_device in held.items():
        for claim, each in of_device.items():
            if claim not in claims:
                claims[claim] = message_of(claim, pb.HeldClaim)
            nodes_of = [message_of(n, pb.HeldNode, former=not n.current) for n in each.nodes]
            claims[claim].devices.add(name=name, nodes=nodes_of)
    return pb.UpdateHeldDevicesRequest(claims=claims.values())


# ---------------------------------------------------------------- the endpoint

LIST_SECONDS = 2.0
"""Maximum time for which the daemon's start waits for a backend's name, and then again for its
devices. After that, the daemon starts serving without them."""

EARLY_AT_ONCE = 5
EARLY_AGAIN_SECONDS = 60.0
"""After this period, one more immediate connection to a new socket is allowed, in addition to the
initial EARLY_AT_ONCE. A new socket means a new backend. If a backend crashes more often, its
connections are delayed as for any other endpoint."""

_TRAITS = DriverTraits(
    side_effects=True,
    checks=True,
    health=True,
    network_devices=True,
    batches=frozenset({"prepare", "unprepare", "check"}),
    claim_data=True,
)
"""All backends have the same traits, because the traits must be known even without a connection. A
method that a backend does not implement costs one call per connection. Three traits differ: the
entry's policies, whether a backend needs claim data, and whether containers get metadata files.
Until it is known whether a backend needs claim data, the data is read."""


class BackendSource:
    """The source for the driver of a backend. Implements :class:`.DriverSource`."""

    foreign = True

    def __init__(self, driver: str, directory: BackendDirectory) -> None:
        """Create the source. The backend registers in `directory`."""
        resource = directory.policies(driver)
        policies = None if resource is None else PolicyTraits(resource=resource, type=None)
        self.traits = replace(_TRAITS, policies=policies)
        self.name = driver
        self.where = f"backend {driver}"
        self.expected: Collection[str] = (driver,)
        self._directory = directory

    def endpoint(self, context: HostContext) -> HostedEndpoint:
        """Create the endpoint."""
        return BackendEndpoint(self.name, self._directory, context, traits=self.traits)


class BackendEndpoint(Endpoint):
    """Keeps one backend connected, and calls it."""

    def __init__(
        self,
        driver: str,
        directory: BackendDirectory,
        context: HostContext,
        *,
        traits: DriverTraits,
    ) -> None:
        super().__init__(
            driver,
            self._connect_backend,
            traits=traits,
            listener=context.listener,
            node=context.node,
            pause=self._await_socket,
            has_successor=self._is_replaced,
        )
        self._directory = directory
        self._policies = context.policies
        self._socket: BackendSocket | None = None
        """The socket of the last connection."""
        self._early = RateLimiter(burst=EARLY_AT_ONCE, per_second=1 / EARLY_AGAIN_SECONDS)
        self._is_running = False

    async def start(self) -> None:
        """Connect if the backend exists. Otherwise, :meth:`run` waits for it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LIST_SECONDS):
                await self._directory.at_start(self.name)
        # If there is no backend, report nothing, so that devices remain published for the start
        # grace period.
        with suppress(DriverError, TimeoutError):
            async with asyncio.timeout(2 * LIST_SECONDS):
                await super().start()

    async def run(self) -> None:
        """Implement :meth:`.Endpoint.run`."""
        self._is_running = True
        await super().run()

    async def _connect_backend(self) -> BackendConnection:
        socket = self._directory.socket(self.name)
        if socket is None and not self._is_running:
            raise DriverError(self._directory.place(self.name))
        socket = self._socket = await self._directory.wait(self.name)
        try:
            opened = await asyncio.to_thread(socket.open)
        except OSError:
            raise ConnectionEndedError("its socket was replaced or removed") from None
        client = Client(opened, SERVICE)
        connection = BackendConnection(
            self.name, client, rights=socket.rights, policies=self._policies
        )
        try:
            await connection.start(node=self._directory.node, version=self._directory.version)
            await connection.listed(timeout_seconds=LIST_SECONDS)
        except BaseException:
            await connection.close()
            raise
        self.traits = replace(
            self.traits,
            claim_data=connection.needs_claim_data,
            metadata_files=connection.has_metadata_files,
        )
        return connection

    def _is_replaced(self) -> bool:
        return self._socket is not None and self._directory.has_successor(self._socket)

    async def _retire(self, connection: Connection) -> None:
        """Close a connection after its calls in flight have ended, or after RESPONSE_SECONDS. Until
        then, no other process works on the claims of these calls."""
        assert isinstance(connection, BackendConnection)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(RESPONSE_SECONDS):
                    await connection.idle.wait()
        finally:
            await connection.close()

    async def _await_socket(self, seconds: float) -> None:
        """Wait before the next connection. If a new socket appears, stop waiting."""
        if self._socket is not None:
            self._directory.lost(self._socket)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._directory.wait(self.name, other_than=self._socket)
                if not self._early.take():
                    await asyncio.sleep(seconds)
