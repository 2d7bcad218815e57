"""
The driver contract: what a vendor's class says of its devices, and does for a claim.

The docstrings here are the manual. How a driver is run (a thread and loop of its own, so that one
that blocks harms nobody else), how claims are stored and slices written, is the node plugin's
business; a driver need not know Kubernetes.

It must not know Kubernetes clients, gRPC, or either daemon.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import ClassVar, Generic, Protocol, TypeVar, cast

from drakit.device import (
    AllocatedClaim,
    AllocatedDevice,
    ClaimReference,
    Device,
    DeviceNode,
    Edits,
    Health,
    Inventory,
)
from drakit.settings import Settings

__all__ = ("DeviceParameters", "Driver", "DriverConfig", "DriverError", "NoParameters", "Node")


class DriverConfig(Settings):
    """
    Base of a driver's typed configuration; an unknown key is an error that names it.

    Field names are snake_case in Python and camelCase in files.
    """


class DeviceParameters(Settings):
    """
    Base of the typed opaque parameters that users write in claims and DeviceClasses.

    Field names are snake_case in Python and camelCase in manifests. What does not fit fails the
    claim with the field's name. Users are not trusted: give every field a type and bounds.
    """


class NoParameters(DeviceParameters):
    """
    The `parameters_type` of a driver that takes no opaque parameters.

    A claim with parameters fails, and its Event reports that the driver takes none. A driver
    without a `parameters_type` gets them raw; if it ignores them, its users cannot see that.
    """


class DriverError(Exception):
    """A device cannot be prepared, unprepared or listed. The text ends in a pod's Event.

    Write a sentence that names what is wrong and what to do. Text without times and counters lets
    Events be deduplicated.
    """


class Node(Protocol):
    """The node on which the driver runs."""

    @property
    def name(self) -> str:
        """``metadata.name`` of the Node."""
        ...

    @property
    def labels(self) -> Mapping[str, str] | None:
        """The Node's labels as last read; None until the API server has answered once."""
        ...


ConfigT = TypeVar("ConfigT", bound=DriverConfig)
ValueT = TypeVar("ValueT")


class Driver(ABC, Generic[ConfigT]):
    """
    Devices of one kind on one node.

    One object is made per node plugin; all its methods are called in one thread that nothing else
    uses, so state needs no lock. `__init__` and `close` run outside of the thread's event loop and
    may block; the others run in it, and may block briefly: whoever blocks holds up this driver's
    other calls, and is named in the log.

    Methods may be plain functions or async ones, but for `devices`. Preparing has three grains: a
    driver defines `prepare` for one device, or `prepare_claim` for the devices of a claim, or
    `prepare_claims` for the claims of a pod; the larger ones call the smaller ones by default. The
    same holds for unpreparing; the two need not have the same grain.

    Calls for different devices run side by side. Two that have a device in common (pool and name),
    or devices that consume from the same counter set, never overlap. The next call begins only
    after the previous one has ended, including its cleanup after a cancellation.
    """

    name: ClassVar[str]
    """The driver's name: a DNS subdomain of at most 63 characters (``camera.example.com``). It is
    in every slice, allocation and DeviceClass, so it never changes."""

    config_type: ClassVar[type[DriverConfig]] = DriverConfig
    """The type of the driver's configuration. What fails its validation stops the plugin at start,
    with file, key and reason."""

    parameters_type: ClassVar[type[DeviceParameters] | None] = None
    """The type of the opaque parameters in claims and DeviceClasses. What fails its validation
    fails the claim, with the field's name. A driver without one gets them raw, as `configs`; one
    that takes none declares :class:`NoParameters`."""

    side_effects: ClassVar[bool] = True
    """Whether preparing does anything but say what the container gets. Set it to False only if it
    does not: then a crash leaves nothing to undo, preparing costs one write to disk less, and
    `unprepare` and `reset` are never called."""

    plain_devices: ClassVar[bool] = False
    """Whether devices never have taints of the driver's own, health, counters or list attributes:
    then a ResourceSlice holds twice as many (112 are placed of 128, else 56 of 64)."""

    reports_health: ClassVar[bool] = False
    """Whether devices are yielded with `Device.health`. Defining `health` says so, too."""

    health_period_seconds: ClassVar[float] = 10.0
    """How long after one `health` of a device has ended the next one begins."""

    def __init__(self, config: ConfigT, node: Node) -> None:
        self.config = config
        self.node = node
        self.inventory: Inventory | None = None
        """What `devices` yielded last; the node plugin keeps it here."""

    @classmethod
    def name_of(cls, config: ConfigT) -> str:
        """
        Give the driver's name where its configuration chooses it: by default it is `name`.

        For a class that is several drivers, such as one for hardware that is sold under several
        names. What holds for `name` holds for what this gives.
        """
        return cls.name

    @abstractmethod
    def devices(self) -> AsyncIterator[Collection[Device] | Inventory]:
        """
        Say which devices there are: all of them at once, and all again at every change.

        An async generator that runs until it is closed. What is yielded replaces what was yielded
        before; an equal collection costs nothing. If it ends or raises, or yields more than 2,000
        times a second, the driver counts as stopped: its devices get no new pods, are not prepared
        any more, and after a grace period (5 min) are not published any more either. It is
        started again, with a delay that grows from 1 s to 1 min.
        """

    # ------------------------------------------------------------ preparing

    def prepare(self, claim: ClaimReference, device: AllocatedDevice) -> Awaitable[Edits] | Edits:
        """
        Make a device ready for a claim, and say what its containers get.

        Called once per allocated device, those of a pod's claims concurrently. The pod waits; a
        call that takes longer than 5 min, or whose pod is deleted meanwhile, is cancelled, and
        `unprepare` is called once it has ended. It is called again for the same claim and device
        after a failure, a crash or a reboot, and must then give the same result and make sure that
        all side effects are there. If it raises, the claim is not prepared, `unprepare` is called
        for all of its devices, and the text of a :class:`DriverError` is shown to the user.

        The default gives the container the device's `node_paths`.
        """
        return _node_paths(self.inventory, device, node=self.node.name)

    def prepare_claim(
        self, claim: ClaimReference, devices: Sequence[AllocatedDevice]
    ) -> Awaitable[Sequence[Edits]] | Sequence[Edits]:
        """
        The same for all devices of a claim; gives the edits of each, in the same order.

        The default calls `prepare` for all of them side by side.
        """
        return _all([partial(self.prepare, claim, device) for device in devices])

    def prepare_claims(
        self, claims: Sequence[AllocatedClaim]
    ) -> (
        Awaitable[Mapping[str, Sequence[Edits] | Exception]]
        | Mapping[str, Sequence[Edits] | Exception]
    ):
        """
        The same for claims that come together, such as those of a pod.

        Gives by claim UID the edits of its devices, in their order, or why the claim failed; what
        is raised fails all of them. A claim that is given up meanwhile does not cancel the call, as
        long as another one waits for it. The default calls `prepare_claim` for each.
        """
        return _by_claim(claims, self.prepare_claim)

    # ------------------------------------------------------------ unpreparing

    def unprepare(self, claim: ClaimReference, device: AllocatedDevice) -> Awaitable[None] | None:
        """
        Undo `prepare`. The claim object may be gone, the device as well.

        Called once all containers are gone, also for a device whose prepare failed halfway or
        never ran. It may be called again; nothing to do is success. If it raises, the device stays
        reserved and the call is repeated. The default does nothing.
        """
        return _nothing()

    def unprepare_claim(
        self, claim: ClaimReference, devices: Sequence[AllocatedDevice]
    ) -> Awaitable[None] | None:
        """The same for all devices of a claim. The default calls `unprepare` for all of them."""
        return _undo_all([partial(self.unprepare, claim, device) for device in devices])

    def unprepare_claims(
        self, claims: Sequence[AllocatedClaim]
    ) -> Awaitable[Mapping[str, Exception | None]] | Mapping[str, Exception | None]:
        """The same for claims that come together: gives by claim UID None, or why it failed. The
        default calls `unprepare_claim` for each."""
        return _by_claim(claims, self.unprepare_claim)

    def reset(self, device: AllocatedDevice) -> Awaitable[None] | None:
        """
        Bring a device back to how the next claim must find it.

        Called after each `unprepare` that succeeded, but not for a share of a device, nor for a
        claim with admin access, as others may be using the device. If it raises, the device stays
        reserved and both calls are repeated. The default does nothing.
        """
        return _nothing()

    # ------------------------------------------------------------ looking

    def check(self, claim: ClaimReference, device: AllocatedDevice) -> Awaitable[bool] | bool:
        """
        Say whether a device that was prepared in this boot is still in order.

        Called when the kubelet asks again for a claim that is prepared (it was restarted, or
        another pod uses the claim). On False, or if it raises, `prepare` is called again, without
        an `unprepare` before: containers may be using the device. A driver that does not define it
        is not asked.
        """
        return _in_order()

    def health(self, device: Device) -> Awaitable[Health] | Health:
        """
        Look how a device is.

        Called for each device, again and again, beside other calls for it. A call that raises, or
        takes longer than 30 s, says that nobody knows. A driver that does not define it, and does
        not set `reports_health`, has no health: none is shown in the status of pods.
        """
        return _unknown()

    def close(self) -> None:
        """Release what `__init__` took. Prepared devices stay: the plugin only restarts."""


# The defaults are awaitable, as most drivers' methods are: who tests one awaits them.


async def _node_paths(inventory: Inventory | None, device: AllocatedDevice, *, node: str) -> Edits:
    """Give the device nodes of a device that was published, as itself or instead of others."""
    listed = inventory or Inventory(devices=())
    for published in chain(listed.devices, listed.fallback or ()):
        if (published.name, published.pool) == (device.name, device.pool):
            return Edits(device_nodes=tuple(DeviceNode(path=p) for p in published.node_paths))
    raise DriverError(
        f"device {device.name} is not on node {node} any more; delete the pod so that another "
        f"device is found for it"
    )


async def _call(function: Callable[[], Awaitable[ValueT] | ValueT]) -> ValueT:
    """Call a plain or async function."""
    value = function()
    if inspect.isawaitable(value):
        return await cast("Awaitable[ValueT]", value)
    return value


async def _all(calls: Sequence[Callable[[], Awaitable[ValueT] | ValueT]]) -> list[ValueT]:
    """Call functions side by side; what one raises is raised once all have ended."""
    results = await asyncio.gather(*map(_call, calls), return_exceptions=True)
    values: list[ValueT] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        values.append(result)
    return values


async def _undo_all(calls: Sequence[Callable[[], Awaitable[None] | None]]) -> None:
    await _all(calls)


async def _by_claim(
    claims: Sequence[AllocatedClaim],
    function: Callable[[ClaimReference, Sequence[AllocatedDevice]], Awaitable[ValueT] | ValueT],
) -> dict[str, ValueT | Exception]:
    """Call a function for each claim, side by side; one that fails does so alone."""
    results = await asyncio.gather(
        *(_call(partial(function, item.claim, item.devices)) for item in claims),
        return_exceptions=True,
    )
    by_claim: dict[str, ValueT | Exception] = {}
    for item, result in zip(claims, results, strict=True):
        if isinstance(result, asyncio.CancelledError):
            # Ours would have ended the wait for all of them.
            result = RuntimeError("it was cancelled, but not by its caller")
        if isinstance(result, BaseException) and not isinstance(result, Exception):
            raise result
        by_claim[item.claim.uid] = result
    return by_claim


async def _nothing() -> None:
    return


async def _in_order() -> bool:
    return True


async def _unknown() -> Health:
    return Health.unknown()
