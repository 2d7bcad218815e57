"""
The driver contract: a vendor's class lists its devices and prepares them for claims.

The docstrings here are the manual. The node plugin decides how to run a driver (in its own thread
and event loop, so that a driver that blocks affects only itself), how to store claims and how to
write slices. A driver does not need to know anything about Kubernetes. The data types are defined
in :mod:`drakit.device`.

Does not depend on Kubernetes clients, gRPC, or either daemon.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from types import NoneType
from typing import Any, ClassVar, ForwardRef, Generic, Protocol, cast, get_args, get_origin

from typing_extensions import TypeVar, get_original_bases

from drakit.device import (
    AllocatedClaim,
    AllocatedDevice,
    ClaimReference,
    Device,
    Edits,
    Health,
    HeldDevice,
    Inventory,
    PreparedDevice,
)
from drakit.settings import Settings


class DriverConfig(Settings):
    """
    Base class for the configuration of a driver. An unknown key is an error.

    Fields are snake_case in Python and camelCase in files.
    """


class DeviceParameters(Settings):
    """
    Base class for the opaque parameters that users write in claims and DeviceClasses.

    Fields are snake_case in Python and camelCase in manifests. If the parameters are invalid or
    contain unknown keys, the claim fails, and the error names the field. Users are not trusted:
    give every field a type and bounds.
    """


class NoParameters(DeviceParameters):
    """The parameters type of a driver that does not accept parameters: a claim with parameters
    fails. Without this type, the parameters of such a driver would be silently ignored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterVersion:
    """
    A version of a driver's opaque parameters: the ``apiVersion`` and ``kind`` that users write.

    A driver lists all versions that it accepts in `Driver.parameter_versions`, for example an
    earlier version of its own, or the format of another project::

        class GpuConfig(DeviceParameters):
            interval: str = "Default"

        class GpuConfigAlpha(DeviceParameters):
            sharing: Sharing = Sharing()

        class Gpus(Driver[DriverConfig, GpuConfig]):
            parameter_versions = (
                ParameterVersion("gpu.example.com/v1", "GpuConfig"),
                ParameterVersion(
                    "gpu.example.com/v1alpha1",
                    "GpuConfig",
                    type=GpuConfigAlpha,
                    convert=lambda old: GpuConfig(interval=old.sharing.interval),
                ),
            )
    """

    api_version: str = field(kw_only=False)
    """The ``apiVersion``. An empty string stands for parameters that have neither ``apiVersion``
    nor ``kind``."""

    kind: str = field(default="", kw_only=False)

    type: type[DeviceParameters] | None = None
    """The parameters type of this version, without ``apiVersion`` and ``kind``. By default, the
    driver's own parameters type."""

    convert: Callable[[Any], DeviceParameters] | None = None
    """Converts an object of `type` to the driver's parameters type. Required, unless `type` is that
    type or derives from it. To reject parameters, raise ``ValueError``: users see its message.
    Leave fields without a counterpart unset, so that they do not override parameters of the
    DeviceClass. The function runs in the driver's thread, and must not block."""


class DevicePolicy(Settings, defer_build=True):
    """
    Base class for the ``spec`` of policies, which configure a driver while it runs.

    Fields are snake_case in Python and camelCase in manifests. An invalid policy does not affect
    the others: its last valid version stays in effect, and the error names the field.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyResource:
    """
    The cluster-scoped custom resource for a driver's policies.

    The vendor installs the CustomResourceDefinition, and grants the node plugin the verbs ``get``,
    ``list`` and ``watch``. For a driver in its own container, the field ``policies`` of its
    entry in ``backends.allowed`` names the resource, and the chart grants the verbs.
    """

    group: str

    version: str

    plural: str


PolicyT = TypeVar("PolicyT", bound=DevicePolicy, default=Any)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy(Generic[PolicyT]):
    """The last valid version of a policy in the cluster."""

    name: str

    created: datetime
    """``metadata.creationTimestamp``, in UTC."""

    generation: int
    """``metadata.generation`` of this version."""

    spec: PolicyT


class DriverError(Exception):
    """
    A device cannot be prepared, unprepared or listed.

    Users see the message in Events: write a sentence that names the problem and the remedy. Omit
    times and counters, so that Kubernetes can deduplicate the Events.
    """


class ReleasePendingError(DriverError):
    """
    `unprepare` or `reset` has started work that takes a long time, such as erasing the device
    memory.

    The pod can terminate, but the device stays reserved. The node plugin repeats the call every few
    seconds until it succeeds.
    """


class Node(Protocol):
    """The node on which the driver runs."""

    @property
    def name(self) -> str:
        """The ``metadata.name`` of the Node."""
        ...

    @property
    def labels(self) -> Mapping[str, str] | None:
        """The Node's labels, as last read from the API server. None before the first read."""
        ...


ConfigT = TypeVar("ConfigT", bound=DriverConfig, default=DriverConfig)
ParametersT = TypeVar("ParametersT", bound=DeviceParameters, default=Any)
ParametersOrNone = TypeVar("ParametersOrNone")
ValueT = TypeVar("ValueT")


class Driver(ABC, Generic[ConfigT, ParametersT, PolicyT]):
    """
    A driver publishes the devices of a node, and prepares them for claims.

    The type arguments are the types of the configuration, opaque parameters and policies: ``class
    Lamps(Driver[LampConfig, LampParameters])``. All are optional. Without a parameters type, the
    driver gets the unvalidated parameters in `AllocatedDevice.configs`.

    A driver runs in the node plugin, or unchanged in its own container with other privileges,
    where ``drakit-driver`` calls it for the node plugin.

    The node plugin creates one driver object and calls all its methods in a single thread, so state
    needs no lock. `__init__` and `close` can block. All other methods run in the thread's event
    loop. A method that blocks delays all other calls to the driver, and the node plugin logs the
    name of the method.

    Methods can be synchronous or asynchronous, except for `devices`. A driver overrides either
    `prepare`, which prepares one device, or `prepare_claims`, which prepares a batch of claims. The
    same applies to `unprepare` and `unprepare_claims`, independently.

    Calls for different devices run concurrently. Calls never overlap if they involve the same
    device (pool and name), or devices that consume from the same counter set. The next call begins
    only after the previous one has ended, including its cleanup after a cancellation.
    """

    name: ClassVar[str]
    """The driver's immutable name: a DNS subdomain of at most 63 characters
    (``camera.example.com``)."""

    config_type: ClassVar[type[DriverConfig]] = DriverConfig
    """The type of the configuration, if it is not the first type argument. If the configuration is
    invalid, the node plugin does not start. The error names the file, the key and the problem."""

    parameters_type: ClassVar[type[DeviceParameters] | None] = None
    """The type of the opaque parameters, if it is not the second type argument."""

    parameter_versions: ClassVar[Sequence[ParameterVersion]] = ()
    """The versions of the opaque parameters that the driver accepts. If empty, users write the
    parameters without ``apiVersion`` and ``kind``. Otherwise, a claim with any other version fails,
    and the error lists the accepted versions. Parameters without ``apiVersion`` and ``kind`` have
    the driver's parameters type, unless a version with an empty `ParameterVersion.api_version` is
    listed. Keep a version in the list while claims that use it exist: the node plugin stores the
    parameters of a prepared claim as users wrote them."""

    policy_type: ClassVar[type[DevicePolicy] | None] = None
    """The type of the policy spec, if it is not the third type argument. Without it, the driver has
    no policies."""

    policy_resource: ClassVar[PolicyResource | None] = None
    """The custom resource for the driver's policies. Required with `policy_type`."""

    side_effects: ClassVar[bool]
    """Whether preparing a device has effects besides returning edits. The default is true if the
    driver defines `unprepare`, `unprepare_claims` or `reset`. If false, preparing needs one fewer
    disk write, and the node plugin never calls these three methods."""

    metadata_files: ClassVar[bool] = False
    """
    Whether containers can read the attributes of their devices in metadata files (KEP-5304).

    The node plugin then writes a file for each request of a claim. It contains the published
    attributes of the devices, `PreparedDevice.attributes` and `PreparedDevice.network_data`.
    Containers find it in ``/var/run/kubernetes.io/dra-device-attributes``, as
    ``resourceclaims/<claim>/<request>/<driver>-metadata.json``. For a claim from a template, the
    file is in ``resourceclaimtemplates/<name in the pod>`` instead. The limits are 32 attributes
    per device and 128 KiB per claim.

    If a device is prepared again (see `Device.prepare_again`), the file is replaced, with a higher
    ``metadata.generation``. Running containers keep the content that they were started with.
    """

    claim_data: ClassVar[bool] = False
    """Whether the driver gets the rest of the claim: labels, annotations, owners, consumers, the
    sources of configs, and the devices of other drivers. The driver gets them as :class:`ClaimData`
    in `AllocatedDevice.claim_data`."""

    reports_health: ClassVar[bool] = False
    """Whether the driver sets `Device.health`. Not needed if the driver defines the method
    `health`."""

    health_period_seconds: ClassVar[float] = 10.0
    """The delay from the end of one `health` call for a device to the start of the next, in
    seconds."""

    held_devices: Callable[[], Mapping[str, HeldDevice]]
    """For a driver with policies, returns the devices held by claims, keyed by name, or by
    ``pool/name`` in a named pool. The node plugin sets this attribute, and starts to iterate over
    `devices` when the held devices are known. While a claim holds a device, the driver must neither
    rename the device nor switch it to a different policy. The result can contain a device for a few
    seconds after it is unprepared."""

    def __init__(self, config: ConfigT, node: Node) -> None:
        self.config = config
        self.node = node
        self.held_devices = dict[str, HeldDevice]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        config, parameters, policy = _type_arguments(cls)
        _infer(cls, "config_type", config)
        _infer(cls, "parameters_type", parameters)
        _infer(cls, "policy_type", policy)

    @classmethod
    def name_of(cls, config: ConfigT) -> str:
        """Return the driver's name. Override this method if the name depends on the configuration.
        The default is `name`."""
        return cls.name

    @abstractmethod
    def devices(self) -> AsyncIterator[Collection[Device] | Inventory]:
        """
        List and watch the devices: yield the complete list of devices, and yield it again after
        every change.

        Implement it as an async generator that runs until it is closed. An unchanged collection has
        no effect, so polling every few seconds is fine. On a node without the hardware, yield an
        empty collection. If the hardware cannot be queried, raise an exception.

        The node plugin treats the driver as stopped if the generator ends or raises, or if it
        yields an invalid value or more than 16,384 devices. The same applies if it yields more than
        2,000 times a second, or yields large collections without awaiting in between. The node
        plugin then taints the devices, prepares none of them, and restarts the driver with a
        backoff from 1 s to 1 min. After a grace period (5 min by default), it unpublishes the
        devices.
        """

    # ------------------------------------------------------------ policies

    def apply_policies(self, policies: Mapping[str, Policy[PolicyT]]) -> Awaitable[None] | None:
        """
        Apply all policies in the cluster. They are keyed by name, and replace the previous ones.

        The node plugin calls this method before it iterates over `devices`, and after each change.
        Changes in quick succession result in a single call. If the API server is unreachable, the
        node plugin passes the policies that it last stored on this node. The driver evaluates node
        selectors (`Node.labels`), decides which of two policies gets a device, and yields a new
        :class:`Inventory`.

        If this method raises, the previous policies must stay in effect. The node plugin reports
        the message of a :class:`DriverError`, and retries after the next change, or after a minute.
        It does not iterate over `devices` until this method has succeeded once. If only one policy
        has a problem, do not raise: report the problem in `PolicyOutcome.problem`.
        """
        return _nothing()

    # ------------------------------------------------------------ preparing

    def prepare(
        self, claim: ClaimReference, device: AllocatedDevice[ParametersT]
    ) -> Awaitable[Edits | PreparedDevice] | Edits | PreparedDevice:
        """
        Prepare a device for a claim, and return the edits for its containers, directly or in a
        :class:`PreparedDevice`.

        The node plugin calls this method for each allocated device. The method must be idempotent:
        the node plugin calls it again for the same claim and device after a failure, a crash or a
        reboot. The repeated call must return the same result and ensure that all side effects are
        in place.

        If a call takes longer than 5 min, or the pod is deleted, the node plugin cancels the call
        (``asyncio.CancelledError``), and calls `unprepare` after the call has ended. Clean up in
        ``finally``, and return quickly. A call that never awaits cannot be canceled.

        If a call raises, the claim is not prepared, and the node plugin calls `unprepare` for all
        devices of the claim. If containers may already use the claim, it stays prepared instead.
        An unhealthy device can also be prepared, for a pod that tolerates its taint. Raise only if
        the pod cannot use it. For a device with `Device.prepare_again`, the claim is in use: return
        the new edits, and do not disturb the containers.

        The default implementation returns `Device.edits`, and raises an error if the device is no
        longer listed.
        """
        return _published_edits(device, node=self.node.name)

    def prepare_claims(
        self, claims: Sequence[AllocatedClaim[ParametersT]]
    ) -> (
        Awaitable[Mapping[str, Sequence[Edits | PreparedDevice] | Exception]]
        | Mapping[str, Sequence[Edits | PreparedDevice] | Exception]
    ):
        """
        Prepare a batch of claims, such as the claims of a pod.

        Return a mapping from each claim UID to the results for its devices (see `prepare`), in the
        order of `AllocatedClaim.devices`, or to an exception if the claim failed. If this method
        raises, all claims fail. The node plugin does not cancel a call while any of its claims is
        still needed.
        """
        return _by_claim(claims, self._prepare_all)

    # ------------------------------------------------------------ unpreparing

    def unprepare(
        self, claim: ClaimReference, device: AllocatedDevice[ParametersT | None]
    ) -> Awaitable[None] | None:
        """
        Undo `prepare`. The claim object and the device might no longer exist.

        The node plugin calls this method after all containers have terminated, even if `prepare`
        failed halfway or never ran. The call can be repeated, so return normally if there is
        nothing to undo. If the method raises, the device stays reserved, the pod waits, and the
        node plugin retries every few seconds.

        If the checkpoint is damaged and no longer contains a claim, the node plugin cannot call
        this method for that claim. If side effects can outlive a pod, detect and undo them in
        `__init__`.
        """
        return _nothing()

    def unprepare_claims(
        self, claims: Sequence[AllocatedClaim[ParametersT | None]]
    ) -> Awaitable[Mapping[str, Exception | None]] | Mapping[str, Exception | None]:
        """Unprepare a batch of claims. Return a mapping from each claim UID to None, or to an
        exception if the claim failed."""
        return _by_claim(claims, self._unprepare_all)

    def reset(self, device: AllocatedDevice[ParametersT | None]) -> Awaitable[None] | None:
        """
        Reset a device to the state that the next claim expects.

        The node plugin calls this method after each successful `unprepare`, except for shares and
        for admin access, because other claims may be using the device. If this method raises, the
        device stays reserved, and the node plugin retries both calls.
        """
        return _nothing()

    # ------------------------------------------------------------ checking

    def check(
        self, claim: ClaimReference, device: AllocatedDevice[ParametersT]
    ) -> Awaitable[bool] | bool:
        """
        Return whether a device that was prepared since the last boot is still prepared correctly.

        The node plugin calls this method when the kubelet requests a prepared claim again, after a
        restart of the kubelet or for another pod. If `check` returns False or raises, the node
        plugin calls `prepare` again, without `unprepare`, because containers may be using the
        device. Without `check`, the node plugin responds from the checkpoint.
        """
        return _is_prepared()

    def health(self, device: Device) -> Awaitable[Health] | Health:
        """
        Check the health of a device.

        The node plugin calls this method periodically for each device, concurrently with other
        calls. If a call raises, or takes longer than 30 s, the health of the device is unknown.
        """
        return _unknown()

    def close(self) -> None:
        """Release the resources that `__init__` acquired. Do not change prepared devices, because
        containers may still be using them."""

    # ------------------------------------------------------------ internals of the default methods

    async def _prepare_all(
        self, item: AllocatedClaim[ParametersT]
    ) -> Sequence[Edits | PreparedDevice]:
        return await _all([partial(self.prepare, item.claim, device) for device in item.devices])

    async def _unprepare_all(self, item: AllocatedClaim[ParametersT | None]) -> None:
        await _all([partial(self.unprepare, item.claim, device) for device in item.devices])


PREPARE_METHODS = ("prepare", "prepare_claims")
UNDO_METHODS = ("unprepare", "unprepare_claims", "reset")


def overrides(kind: type[object], *methods: str) -> bool:
    """Return whether a driver class or one of its base classes overrides any of these methods."""
    return any(getattr(kind, method) is not getattr(Driver, method) for method in methods)


# ------------------------------------------------------------ type arguments: Driver[Config, ...]


def _type_arguments(kind: type[Any]) -> list[Any]:
    """Return the arguments that a class passes to `Driver`, directly or through generic base
    classes. A missing argument is returned as a TypeVar, Any or `DriverConfig`."""
    found: list[Any] = [ConfigT, ParametersT, PolicyT]
    if kind is Driver:
        return found
    for base in get_original_bases(kind):
        origin: Any = get_origin(base) or base
        if not (isinstance(origin, type) and issubclass(origin, Driver)):
            continue
        declared: tuple[Any, ...] = getattr(cast("Any", origin), "__parameters__", ())
        arguments = get_args(base)
        given = dict(zip(declared, arguments, strict=False))
        # Python before 3.13 does not fill in TypeVar defaults. A base without brackets has no
        # arguments.
        for variable in declared[len(arguments) :]:
            given[variable] = getattr(variable, "__default__", variable)
        for index, argument in enumerate(_type_arguments(cast("Any", origin))):
            if not _is_given(found[index]):
                found[index] = given.get(argument, argument)
    return found


def _is_given(argument: object) -> bool:
    if isinstance(argument, ForwardRef):
        return True
    return isinstance(argument, type) and argument not in (Any, DriverConfig)


def _infer(kind: type[Driver[Any, Any]], name: str, argument: object) -> None:
    """Set one of the types, unless the class or one of its bases already sets it. Raise TypeError
    if the two contradict each other."""
    explicit = any(name in vars(base) for base in kind.__mro__ if base is not Driver)
    # A forward reference could not be resolved later.
    if isinstance(argument, ForwardRef) and not explicit:
        raise TypeError(
            f"{kind.__qualname__}: the type argument {argument.__forward_arg__!r} of Driver is a "
            f"string; give the class itself, or set {name}"
        )
    if (get_origin(argument) is not None or argument is NoneType) and not explicit:
        shown = "None" if argument is NoneType else str(argument)
        raise TypeError(
            f"{kind.__qualname__}: the type argument {shown} of Driver is not a class; give one "
            f"class, or set {name}"
        )
    if not (_is_given(argument) and isinstance(argument, type)):
        return
    if not explicit:
        setattr(kind, name, argument)
        return
    value = cast("object", getattr(kind, name))
    if not (isinstance(value, type) and issubclass(value, argument)):
        shown = value.__name__ if isinstance(value, type) else repr(value)
        raise TypeError(
            f"{kind.__qualname__}: {name} is {shown}, but the type argument of Driver is "
            f"{argument.__name__}; remove {name}, or correct one of the two"
        )


# ------------------------------------------------------------ the default methods

# The defaults are async, like the methods of most drivers, so tests can await either.


async def _published_edits(device: AllocatedDevice[Any], *, node: str) -> Edits:
    if device.edits is None:
        raise DriverError(
            f"device {device.name} is no longer on node {node}; delete the pod to get another "
            "device"
        )
    return device.edits


async def _call(function: Callable[[], Awaitable[ValueT] | ValueT]) -> ValueT:
    """Call a sync or async function."""
    value = function()
    if inspect.isawaitable(value):
        return await cast("Awaitable[ValueT]", value)
    return value


async def _all(calls: Sequence[Callable[[], Awaitable[ValueT] | ValueT]]) -> list[ValueT]:
    """Call functions concurrently. Raise the first exception after all calls have ended."""
    results = await asyncio.gather(*map(_call, calls), return_exceptions=True)
    values: list[ValueT] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        values.append(result)
    return values


async def _by_claim(
    claims: Sequence[AllocatedClaim[ParametersOrNone]],
    function: Callable[[AllocatedClaim[ParametersOrNone]], Awaitable[ValueT]],
) -> dict[str, ValueT | Exception]:
    """Call a function for each claim concurrently. A failure affects only its own claim."""
    results = await asyncio.gather(*map(function, claims), return_exceptions=True)
    by_claim: dict[str, ValueT | Exception] = {}
    for item, result in zip(claims, results, strict=True):
        if isinstance(result, asyncio.CancelledError):
            # If the whole batch had been canceled, gather() itself would have raised.
            result = RuntimeError("the driver canceled its own call, which is a bug in the driver")
        if isinstance(result, BaseException) and not isinstance(result, Exception):
            raise result
        by_claim[item.claim.uid] = result
    return by_claim


async def _nothing() -> None:
    return


async def _is_prepared() -> bool:
    return True


async def _unknown() -> Health:
    return Health.unknown()
