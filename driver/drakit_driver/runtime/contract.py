"""
The contracts between an endpoint and the host, the engine, its connections, and its listener.

* The host runs a :class:`HostedEndpoint`, and the engine calls it. :mod:`.endpoint` implements it
  for a single endpoint.
* A :class:`Connection` is one connection to a source of devices: a Python driver in its thread, a
  backend behind its socket, a device plugin. It reports devices and their health, and is called for
  claims. It does not reconnect, order calls, limit their time or word their errors.
* An :class:`EndpointListener` decides the state of devices when an endpoint stops.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, cast

from drakit.device import AllocatedClaim, Health, Inventory, PreparedDevice
from drakit.driver import (
    UNDO_METHODS,
    DeviceParameters,
    DevicePolicy,
    Driver,
    ParameterVersion,
    PolicyResource,
    overrides,
)
from drakit_driver.runtime.failures import DeviceFailedError, EndpointStoppedError
from drakit_driver.runtime.policies import PolicyFeed

MAX_DEVICES = 16_384
"""Maximum number of devices of an endpoint, or of all device plugins of a node. The limit exceeds
the numbers for which publishing was measured, and is low enough to iterate over all devices at each
change."""


CALL_SECONDS = 300.0
"""Time limit for a call, from its start. The kubelet gets a response long before that, and
retries."""

CallOperation = Literal["prepare", "unprepare", "check"]
"""The methods of :class:`Calls`."""

CallError = DeviceFailedError | EndpointStoppedError
"""The error of a failed call for a claim."""


class ConnectionEndedError(Exception):
    """A connection has ended. The message is the reason, and appears in a pod's Event."""

    def __init__(self, reason: str, *, disorderly: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.disorderly = disorderly
        """Whether the connection was harmful. If so, its backoff is not reset, however long it
        lasted."""


class DeviceKey(NamedTuple):
    """A device of one driver on this node."""

    pool: str
    """The driver's name of the pool. Empty for the pool that has the node's name."""
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthReport:
    """The health of some devices. The health of all others is unchanged."""

    devices: Mapping[DeviceKey, Health]

    unlisted: Mapping[DeviceKey, Health] = field(default_factory=dict[DeviceKey, Health])
    """The health of all devices in pools that no node owns. The key has the pool's name in the API.
    Only drivers of network devices report it."""


Update = Inventory | HealthReport
"""A report of a connection: all of its devices, or the health of some."""

MALFORMED_HEALTH = Health.unknown("its driver reports malformed health")

_STATUSES = ("healthy", "unhealthy", "unknown")


def validated_health(reported: object) -> Health:
    """Return a reported health, or :data:`MALFORMED_HEALTH`, because drivers create these
    objects."""
    if not (
        isinstance(reported, Health)
        and reported.status in _STATUSES
        and isinstance(cast("object", reported.message), str)
        and isinstance(cast("object", reported.evict_pods), bool)
    ):
        return MALFORMED_HEALTH
    text = reported.message.encode(errors="backslashreplace").decode()
    return reported if text == reported.message else replace(reported, message=text)


class EndpointListener(Protocol):
    """Follows the state of endpoints. Called in the daemon's loop; methods return immediately."""

    def replaced(self, endpoint: str, inventory: Inventory) -> None:
        """Handle that the endpoint is available and has exactly these devices."""
        ...

    def reported(self, endpoint: str, report: HealthReport) -> None:
        """Handle changed health. Devices that the endpoint does not have are ignored."""
        ...

    def stopped(self, endpoint: str, reason: str) -> None:
        """Handle that the endpoint is unavailable. Called again if the reason changes."""
        ...


class Calls(Protocol):
    """
    Calls for claims, in the daemon's loop.

    A batch has at least one claim. Unless the call is one of :attr:`.DriverTraits.batches`, it has
    exactly one. Pools are identified by the driver's names. Two calls for the same device or
    counter set never run at the same time; other calls do.

    A call returns a result for every claim of the batch, keyed by UID. It may raise:

    * :class:`.DeviceFailedError`: the batch failed, with this sentence;
    * :class:`drakit.driver.DriverError`: the batch failed, and the message becomes the sentence;
    * :class:`ConnectionEndedError`: the connection ended during the call;
    * :class:`.CallOverdueError`: the other side did not respond within its own deadline;
    * anything else: a bug, which is logged.

    A call is canceled when its caller no longer waits, or after its time limit. It must then return
    or raise only after the work has really ended, because the next call for its devices then
    begins.
    """

    async def prepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, Sequence[PreparedDevice] | DeviceFailedError]:
        """Make the devices ready. Return the results for each claim's devices, in their order."""
        ...

    async def unprepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, DeviceFailedError | None]:
        """Undo the prepare, and reset the devices if the driver has that trait. None means
        success."""
        ...

    async def check(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, bool]:
        """Return whether all devices of each claim are still prepared correctly."""
        ...


class Reports(Protocol):
    """A connection's reports about itself, as needed for its life cycle."""

    @property
    def unavailable(self) -> str | None:
        """The reason why calls are currently impossible, or None. Never None before the first
        inventory."""
        ...

    def inventories(self) -> AsyncIterator[Update]:
        """
        List and watch: yield first an inventory, then each change to it or to health.

        The connection limits the rate, preferably with a :class:`.LatestValue`: if the reader is
        late, it gets only the latest inventory. The iterator ends or raises when the connection
        does, preferably with :class:`ConnectionEndedError`. From then on, `unavailable` returns
        that reason.
        """
        ...

    async def close(self) -> None:
        """End the connection. Prepared claims remain prepared. Returns within seconds, even if the
        other side hangs, and does not raise."""
        ...


class Connection(Reports, Calls, Protocol):
    """One connection to a source of devices, from its start to its end."""

    @property
    def blocked(self) -> str | None:
        """The call that blocks its event loop. None while the loop responds, or if it has no
        separate loop."""
        ...


# ---------------------------------------------------------------- traits of a driver


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTraits:
    """The policies of a driver."""

    resource: PolicyResource
    type: type[DevicePolicy] | None
    """The type of the policies' spec. None for a backend, which checks them itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverTraits:
    """The calls that a driver needs."""

    side_effects: bool = True
    """Whether prepare has effects that must be undone. If so, an intent is stored before the
    call."""

    checks: bool = False
    """Whether the driver checks prepared devices."""

    resets: bool = False
    """Whether the driver resets a device after the unprepare."""

    polls_health: bool = False
    """Whether the driver is polled for the health of each device."""

    health: bool = False
    """Whether the driver reports health in any way. If so, the plugin serves the kubelet's health
    stream."""

    metadata_files: bool = False
    """Whether containers get metadata files with the attributes of its devices."""

    network_devices: bool = False
    """Whether the driver also prepares devices in pools that do not belong to the node. A
    controller publishes those devices, so they are in no inventory."""

    batches: Collection[CallOperation] = frozenset()
    """The calls that take all claims of a request together, such as those of a pod. Other calls
    take a single claim."""

    claim_data: bool = False
    """Whether the driver needs the claim's data in addition to its identity and devices."""

    parameters_type: type[DeviceParameters] | None = None
    parameter_versions: Sequence[ParameterVersion] = ()
    """The versions of the parameters. Empty if users do not write any."""

    policies: PolicyTraits | None = None
    """The policies that configure the driver while it runs. None if there are none."""

    def method(self, operation: CallOperation) -> str:
        """Return the name of a call, for messages."""
        return f"{operation}_claims" if operation in self.batches else operation


def traits_of(kind: type[Driver[Any, Any]]) -> DriverTraits:
    """Read the traits from a driver's class."""

    batches: set[CallOperation] = set()
    if overrides(kind, "prepare_claims"):
        batches |= {"prepare", "check"}
    if overrides(kind, "unprepare_claims"):
        batches.add("unprepare")
    polls = overrides(kind, "health")
    resource, policy_type = kind.policy_resource, kind.policy_type
    policies = None
    if resource is not None and policy_type is not None:
        policies = PolicyTraits(resource=resource, type=policy_type)
    return DriverTraits(
        side_effects=getattr(kind, "side_effects", overrides(kind, *UNDO_METHODS)),
        checks=overrides(kind, "check"),
        resets=overrides(kind, "reset"),
        polls_health=polls,
        health=polls or kind.reports_health,
        metadata_files=kind.metadata_files,
        batches=frozenset(batches),
        claim_data=kind.claim_data,
        parameters_type=kind.parameters_type,
        parameter_versions=tuple(kind.parameter_versions),
        policies=policies,
    )


def overdue(
    driver: str, traits: DriverTraits, operation: CallOperation, batch: Sequence[AllocatedClaim]
) -> DeviceFailedError:
    """Return the error for a call that has timed out."""
    text = (
        f"driver {driver} did not respond to {traits.method(operation)} within {CALL_SECONDS:.0f} s"
    )
    counts = [len(item.devices) for item in batch]
    is_of_one_device = counts == [1] and operation not in traits.batches
    return DeviceFailedError(text, index=0 if is_of_one_device else None)


# ---------------------------------------------------------------- between endpoint and host


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointContext:
    """The parameters that the host gives an endpoint."""

    listener: EndpointListener
    node: str
    """The node's name."""

    policies: PolicyFeed | None = None
    """The policies of a driver that has policies."""


class CallableEndpoint(Protocol):
    """
    The endpoint that the claims engine calls.

    `prepare`, `unprepare` and `check` correspond to :class:`Calls`, but do not raise: each claim's
    result can be an error instead. Pools are identified by their names in the API. :mod:`.endpoint`
    contains the implementation.
    """

    @property
    def traits(self) -> DriverTraits:
        """The calls that the driver needs. Also available while it is stopped."""
        ...

    def unavailable(self) -> EndpointStoppedError | None:
        """Return the reason why the endpoint cannot be called now, or None."""
        ...

    async def prepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, Sequence[PreparedDevice] | CallError]:
        """Make the devices of claims ready. Return the results for each claim's devices, in their
        order."""
        ...

    async def unprepare(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, CallError | None]:
        """Undo the prepare, and reset the devices if the driver has that trait."""
        ...

    async def check(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, bool | CallError]:
        """Return whether all devices of each claim are still prepared correctly."""
        ...


class HostedEndpoint(CallableEndpoint, Protocol):
    """A callable endpoint with a life cycle that the host controls."""

    @property
    def blocked(self) -> str | None:
        """The call that blocks its event loop. None while the loop responds, or if it has no
        separate loop."""
        ...

    @property
    def slow_calls(self) -> Sequence[str]:
        """A sentence about each call in flight that is taking a long time."""
        ...

    async def start(self) -> None:
        """Connect for the first time, before any call. Returns within seconds. Raises
        :class:`drakit.driver.DriverError` only if a configuration is rejected."""
        ...

    async def run(self) -> None:
        """Keep the endpoint connected until canceled, and report its devices to the listener."""
        ...

    async def close(self) -> None:
        """End the endpoint within seconds. Prepared claims remain prepared. Called after the end of
        :meth:`run`."""
        ...

    async def ended(self) -> None:
        """After :meth:`close`, wait until no part of the endpoint runs in this process. That can
        take a long time, because nothing can end the thread of a Python driver."""
        ...
