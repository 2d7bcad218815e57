"""
The contracts of endpoints: towards the host and the engine, towards the connection of each kind,
and towards the listener.

* The host runs a :class:`HostedEndpoint`, and the engine calls it. :mod:`.endpoint` has the one
  implementation for a single endpoint.
* A :class:`Connection` is one connection to a source of devices: a Python driver in its thread, a
  backend behind its socket, a device plugin. It reports devices and their health, and is called for
  claims. It does not reconnect, order calls, limit their time or word their errors.
* An :class:`EndpointListener` decides the state of devices when an endpoint stops.

Does not depend on how any kind of endpoint works.
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
"""Devices of an endpoint, or of all device plugins of a node. The limit is above the numbers for
which publishing was measured, and low enough to iterate over all devices at each change."""


CALL_SECONDS = 300.0
"""Time limit of a call, from its start. The kubelet gets its answer long before that, and
retries."""

CallOperation = Literal["prepare", "unprepare", "check"]
"""The methods of :class:`Calls`."""

CallError = DeviceFailedError | EndpointStoppedError
"""The result of a call for a claim that failed."""


class ConnectionEndedError(Exception):
    """A connection has ended. The text is the reason, and appears in a pod's Event."""

    def __init__(self, reason: str, *, disorderly: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.disorderly = disorderly
        """The connection did harm while it lived: a long life does not reset its backoff."""


class DeviceKey(NamedTuple):
    """A device of one driver on this node."""

    pool: str
    """The driver's name of the pool: empty for the pool that has the node's name."""
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthReport:
    """The health of some devices; the health of all others is unchanged."""

    devices: Mapping[DeviceKey, Health]

    unlisted: Mapping[DeviceKey, Health] = field(default_factory=dict[DeviceKey, Health])
    """The health of devices of pools that no node owns, all of them; the key has the pool's name
    in the API. Only drivers of network devices report it."""


Update = Inventory | HealthReport
"""A report of a connection: all of its devices, or the health of some."""

MALFORMED_HEALTH = Health.unknown("its driver reports malformed health")

_STATUSES = ("healthy", "unhealthy", "unknown")


def validated_health(reported: object) -> Health:
    """Return a reported health, or :data:`MALFORMED_HEALTH`: drivers make these objects."""
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
    """Follows what endpoints have; called in the daemon's loop, and returns at once."""

    def replaced(self, endpoint: str, inventory: Inventory) -> None:
        """Notify that the endpoint is available and has exactly these devices."""
        ...

    def reported(self, endpoint: str, report: HealthReport) -> None:
        """Notify changed health; devices that the endpoint does not have are ignored."""
        ...

    def stopped(self, endpoint: str, reason: str) -> None:
        """Notify that the endpoint is unavailable; called again if the reason changes."""
        ...


class Calls(Protocol):
    """
    Calls for claims, in the daemon's loop.

    A batch has at least one claim. Unless the call is one of :attr:`.DriverTraits.batches`, it has
    exactly one. Pools have the driver's names. No two calls for the same device or counter set run
    at the same time, calls for others do.

    A call answers for every claim of the batch, by UID. It may raise:

    * :class:`.DeviceFailedError`: the batch failed, with this sentence;
    * :class:`drakit.driver.DriverError`: the batch failed, and the text becomes the sentence;
    * :class:`ConnectionEndedError`: the connection ended meanwhile;
    * :class:`.CallOverdueError`: the other side did not answer within its own deadline;
    * anything else: a bug, which is logged.

    A call is canceled when its caller no longer waits, or after its time limit. It must then
    return or raise only after the work has really ended, because the next call for its devices
    begins at that moment.
    """

    async def prepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, Sequence[PreparedDevice] | DeviceFailedError]:
        """Make the devices ready; return the results of each claim's devices, in their order."""
        ...

    async def unprepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, DeviceFailedError | None]:
        """Undo the prepare, and reset the devices if the driver has that trait; None is success."""
        ...

    async def check(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, bool]:
        """Return whether all devices of each claim are still prepared correctly."""
        ...


class Reports(Protocol):
    """The reports of a connection about itself: enough for its life cycle."""

    @property
    def unavailable(self) -> str | None:
        """The reason why calls are currently impossible; None while they are possible, which is
        never before the first inventory."""
        ...

    def inventories(self) -> AsyncIterator[Update]:
        """
        List and watch: first an inventory, then each change of it and of health.

        The connection limits the rate, preferably with a :class:`.LatestValue`: if the reader is
        late, it gets only the latest inventory. It ends or raises when the connection does,
        preferably with :class:`ConnectionEndedError`; from then on `unavailable` has that reason.
        """
        ...

    async def close(self) -> None:
        """End the connection; prepared claims stay prepared. Returns within seconds, even if the
        other side hangs, and raises nothing."""
        ...


class Connection(Reports, Calls, Protocol):
    """One life of an endpoint."""

    @property
    def blocked(self) -> str | None:
        """The call that blocks its event loop; None while the loop responds, or if it has no loop
        of its own."""
        ...


# ---------------------------------------------------------------- traits of a driver


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTraits:
    """The policies of a driver."""

    resource: PolicyResource
    type: type[DevicePolicy] | None
    """The type of their spec. None for a backend, which checks them itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverTraits:
    """The calls that a driver needs."""

    side_effects: bool = True
    """Its prepare has effects that must be undone. An intent is stored before the call."""

    checks: bool = False
    """Whether it checks prepared devices."""

    resets: bool = False
    """Whether it resets a device after the unprepare."""

    polls_health: bool = False
    """Whether it is polled for the health of each device."""

    health: bool = False
    """Whether it reports health in any way. If so, the plugin serves the kubelet's health
    stream."""

    metadata_files: bool = False
    """Whether containers get metadata files with the attributes of its devices."""

    network_devices: bool = False
    """Whether it also prepares devices of pools that do not belong to the node. A controller
    publishes them, so that no inventory has them."""

    batches: Collection[CallOperation] = frozenset()
    """The calls that take all claims of a request together, such as those of a pod. Other calls are
    of a single claim."""

    claim_data: bool = False
    """Whether it needs the claim's data besides its identity and devices."""

    parameters_type: type[DeviceParameters] | None = None
    parameter_versions: Sequence[ParameterVersion] = ()
    """The versions of the parameters; empty if users write none."""

    policies: PolicyTraits | None = None
    """Its policies, which configure it while it runs; None if it has none."""

    def method(self, operation: CallOperation) -> str:
        """Return the name of a call, for sentences."""
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
    text = f"driver {driver} did not answer {traits.method(operation)} within {CALL_SECONDS:.0f} s"
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
    """The policies of a driver that has some."""


class CallableEndpoint(Protocol):
    """
    The endpoint that the claims engine calls.

    `prepare`, `unprepare` and `check` are calls of :class:`Calls` that raise nothing: each claim's
    result can be an error instead. Pools have their names in the API. :mod:`.endpoint` has the one
    implementation.
    """

    @property
    def traits(self) -> DriverTraits:
        """The calls that it needs; also known while it is stopped."""
        ...

    def unavailable(self) -> EndpointStoppedError | None:
        """Return why it cannot be called now; None if it can."""
        ...

    async def prepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, Sequence[PreparedDevice] | CallError]:
        """Make the devices of claims ready; return the results of each claim's devices, in their
        order."""
        ...

    async def unprepare(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, CallError | None]:
        """Undo the prepare, and reset the devices if the driver has that trait."""
        ...

    async def check(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, bool | CallError]:
        """Return whether all devices of each claim are still prepared correctly."""
        ...


class HostedEndpoint(CallableEndpoint, Protocol):
    """A callable endpoint with the life cycle that the host controls."""

    @property
    def blocked(self) -> str | None:
        """The call that blocks its event loop; None while the loop responds, or if it has no loop
        of its own."""
        ...

    @property
    def slow_calls(self) -> Sequence[str]:
        """A sentence on each call in flight that takes long."""
        ...

    async def start(self) -> None:
        """Connect for the first time, before any call; returns within seconds. Raises
        :class:`drakit.driver.DriverError` if a configuration is refused, and nothing else."""
        ...

    async def run(self) -> None:
        """Keep the endpoint connected until canceled; report its devices to the listener."""
        ...

    async def close(self) -> None:
        """End it within seconds; prepared claims stay prepared. Called after the end of
        :meth:`run`."""
        ...

    async def ended(self) -> None:
        """Wait, after :meth:`close`, until nothing of it runs in this process any more. That can
        take long: nothing can end the thread of a Python driver."""
        ...
