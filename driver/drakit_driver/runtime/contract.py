"""
The interfaces between an endpoint and its host, the claims engine, its connections, and its
listener.

* The host runs a :class:`HostedEndpoint`, and the engine calls it. :mod:`.endpoint` implements it
  for a single endpoint.
* A :class:`Connection` is one connection to a source of devices: a Python driver in its thread, a
  backend behind its socket, a device plugin. It reports devices and their health, and handles calls
  for claims. It does not reconnect, order calls, limit their duration or write their error
  messages.
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
"""Maximum number of devices per endpoint, or for all device plugins on a node together. The limit
is higher than the numbers for which publishing was measured, and low enough that all devices can be
iterated over at each change."""


CALL_SECONDS = 300.0
"""Time limit for a call, from its start. The kubelet gets a response long before that, and
retries."""

CallOperation = Literal["prepare", "unprepare", "check"]
"""The names of the methods of :class:`Calls`."""

CallError = DeviceFailedError | EndpointStoppedError
"""The result for a claim whose call failed."""


class ConnectionEndedError(Exception):
    """A connection has ended. The message is the reason, which appears in an Event of the pod."""

    def __init__(self, reason: str, *, disorderly: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.disorderly = disorderly
        """Whether the other side behaved in a harmful way. If so, the backoff is not reset, however
        long the connection lasted."""


class DeviceKey(NamedTuple):
    """A device of one driver on this node."""

    pool: str
    """The driver's name for the pool. Empty for the pool that is named after the node."""
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthReport:
    """The health of some devices. The health of all others is unchanged."""

    devices: Mapping[DeviceKey, Health]

    unlisted: Mapping[DeviceKey, Health] = field(default_factory=dict[DeviceKey, Health])
    """The health of all devices in pools that no node owns. The key contains the API name of the
    pool. Only drivers of network devices report it."""


Update = Inventory | HealthReport
"""A report from a connection: all of its devices, or the health of some."""

MALFORMED_HEALTH = Health.unknown("its driver reports malformed health")

_STATUSES = ("healthy", "unhealthy", "unknown")


def validated_health(reported: object) -> Health:
    """Return the reported health, or :data:`MALFORMED_HEALTH` if it is invalid. Drivers create
    these objects, so they can have any type."""
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
    """Follows the state of endpoints. The methods are called in the daemon's loop, and must return
    immediately."""

    def replaced(self, endpoint: str, inventory: Inventory) -> None:
        """Called when the endpoint is available and has exactly these devices."""
        ...

    def reported(self, endpoint: str, report: HealthReport) -> None:
        """Called when the health of devices has changed. Devices that the endpoint does not have
        are ignored."""
        ...

    def stopped(self, endpoint: str, reason: str) -> None:
        """Called when the endpoint becomes unavailable, and again if the reason changes."""
        ...


class Calls(Protocol):
    """
    Calls for claims, made in the daemon's loop.

    A batch has at least one claim. Unless the operation is in :attr:`.DriverTraits.batches`, it has
    exactly one. Pools have the driver's names. Two calls for the same device or counter set never
    run at the same time. Other calls can run concurrently.

    A call returns a result for every claim of the batch, keyed by UID. It may raise:

    * :class:`.DeviceFailedError`: the batch failed, with this sentence;
    * :class:`drakit.driver.DriverError`: the batch failed, and the message becomes the sentence;
    * :class:`ConnectionEndedError`: the connection ended during the call;
    * :class:`.CallOverdueError`: the other side did not respond within its own deadline;
    * anything else: a bug, which is logged.

    A call is canceled when its caller no longer waits, or after its time limit. It must then not
    return or raise before the work has actually ended, because the next call for its devices begins
    at that point.
    """

    async def prepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, Sequence[PreparedDevice] | DeviceFailedError]:
        """Make the devices ready. Return the results for each claim's devices, in their order."""
        ...

    async def unprepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, DeviceFailedError | None]:
        """Undo the prepare, and reset the devices if the driver supports that. None means
        success."""
        ...

    async def check(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, bool]:
        """Return whether all devices of each claim are still prepared correctly."""
        ...


class Reports(Protocol):
    """The part of a connection that its life cycle needs: its state and its updates."""

    @property
    def unavailable(self) -> str | None:
        """The reason why calls are currently impossible, or None if they are possible. Before
        the first inventory, there is always a reason."""
        ...

    def inventories(self) -> AsyncIterator[Update]:
        """
        List and watch the devices: yield an inventory first, and then each change to the inventory
        or to device health.

        The connection limits the rate, preferably with a :class:`.LatestValue`: if the reader is
        late, it gets only the latest inventory. The iterator ends or raises when the connection
        does, preferably with :class:`ConnectionEndedError`. From then on, `unavailable` returns the
        reason.
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
        """The call that blocks the connection's event loop. None while the loop responds, or if the
        connection has no loop of its own."""
        ...


# ---------------------------------------------------------------- driver traits


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTraits:
    """How a driver's policies are read."""

    resource: PolicyResource
    type: type[DevicePolicy] | None
    """The type of the policy spec. None for a backend, which validates policies itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverTraits:
    """The calls that a driver needs, and the features that it uses."""

    side_effects: bool = True
    """Whether prepare has effects that must be undone. If so, the intent to prepare is stored
    before the call."""

    checks: bool = False
    """Whether the driver can check prepared devices."""

    resets: bool = False
    """Whether the driver resets a device after unprepare."""

    polls_health: bool = False
    """Whether the driver is polled for the health of each device."""

    health: bool = False
    """Whether the driver reports health in any way. If so, the plugin serves the kubelet's health
    stream."""

    metadata_files: bool = False
    """Whether containers get metadata files with the attributes of their devices."""

    network_devices: bool = False
    """Whether the driver also prepares devices in pools that do not belong to the node. A
    controller publishes those devices, so they are not in any inventory."""

    batches: Collection[CallOperation] = frozenset()
    """The operations that take all claims of a kubelet request, such as those of a pod, in one
    call. For other operations, each call takes a single claim."""

    claim_data: bool = False
    """Whether the driver needs the claim's data in addition to its identity and devices."""

    parameters_type: type[DeviceParameters] | None = None
    parameter_versions: Sequence[ParameterVersion] = ()
    """The parameter versions that the driver accepts. Empty if users write parameters without a
    version."""

    policies: PolicyTraits | None = None
    """The policies that configure the driver while it runs. None if the driver does not use
    policies."""

    def method(self, operation: CallOperation) -> str:
        """Return the name of the driver method for an operation, for messages."""
        # The method `check` takes one device, even if its claims come together.
        takes_claims = operation in self.batches and operation != "check"
        return f"{operation}_claims" if takes_claims else operation


def traits_of(kind: type[Driver[Any, Any]]) -> DriverTraits:
    """Read the traits from a driver class."""

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
    """The parameters that the host passes to an endpoint."""

    listener: EndpointListener
    node: str
    """The node's name."""

    policies: PolicyFeed | None = None
    """The policies of a driver that has policies."""


class CallableEndpoint(Protocol):
    """
    The endpoint that the claims engine calls.

    `prepare`, `unprepare` and `check` correspond to :class:`Calls`, but do not raise: each claim's
    result can be an error instead. Pools have their API names. :mod:`.endpoint` contains the
    implementation.
    """

    @property
    def traits(self) -> DriverTraits:
        """The driver traits. Also available while the driver is stopped."""
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
        """Undo the prepare, and reset the devices if the driver supports that."""
        ...

    async def check(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, bool | CallError]:
        """Return whether all devices of each claim are still prepared correctly."""
        ...


class HostedEndpoint(CallableEndpoint, Protocol):
    """A callable endpoint with a life cycle that the host controls."""

    @property
    def blocked(self) -> str | None:
        """The call that blocks the endpoint's event loop. None while the loop responds, or if the
        endpoint has no loop of its own."""
        ...

    @property
    def slow_calls(self) -> Sequence[str]:
        """A description of each call in flight that is taking a long time."""
        ...

    async def start(self) -> None:
        """Connect for the first time, before any call for claims. Returns within seconds. Raises
        :class:`drakit.driver.DriverError` only if a configuration is rejected."""
        ...

    async def run(self) -> None:
        """Keep the endpoint connected until canceled, and report its devices to the listener."""
        ...

    async def close(self) -> None:
        """Close the endpoint within seconds. Prepared claims remain prepared. Called after
        :meth:`run` has ended."""
        ...

    async def ended(self) -> None:
        """After :meth:`close`, wait until no part of the endpoint is running in this process. This
        can take a long time, because the thread of a Python driver cannot be killed."""
        ...
