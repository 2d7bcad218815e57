"""
A driver's devices and edits, in the form in which a device plugin passes them to the kubelet.

:mod:`.device_plugin` documents the rules, and serves the result.

Does not depend on gRPC, sockets or health.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from drakit.device import (
    AllocatedDevice,
    Capacity,
    ClaimReference,
    Device,
    DeviceNode,
    Edits,
    Inventory,
    Mount,
    Version,
)
from drakit.layout import MAX_SOCKET_PATH_BYTES
from drakit.quantity import parse_quantity
from drakit.settings import SettingsError
from drakit_driver.runtime.contract import MAX_DEVICES, DeviceKey, DriverTraits
from drakit_formats.cdi import InvalidEditsError, container_edits
from drakit_formats.resource.device import needed_features
from drakit_formats.resource.inventory import device_problems, shown
from drakit_formats.resource.limits import extended_resource_problem
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb

NAMESPACE = "device-plugin"
"""The namespace of the synthetic claims that drivers get. No real claim in a namespace of this name
refers to the driver's devices."""

_PLAIN_OPTIONS = frozenset({"ro", "rw", "bind", "rbind", "private", "rprivate", "nosuid", "nodev"})
"""Mount options that the kubelet passes on, that it implies, or that it may drop."""


# ---------------------------------------------------------------- options


@dataclass(frozen=True, kw_only=True, slots=True)
class Resource:
    """A resource, and the rule that selects its devices."""

    name: str
    """The resource name, as in a container's ``resources.limits``."""

    attribute: str = ""
    """The attribute that selects the resource's devices. If empty, all devices belong to the
    resource."""

    value: str = ""

    def selects(self, device: Device) -> bool:
        """Return whether a device belongs to the resource."""
        if not self.attribute:
            return True
        found = device.attributes.get(self.attribute)
        values = found if isinstance(found, tuple) else (found,)
        return self.value in [_in_words(value) for value in values]


def _in_words(value: object) -> str:
    if isinstance(value, Version):
        return value.text
    return str(value).lower() if isinstance(value, bool) else str(value)


def resource_of(text: str) -> Resource:
    """Parse a ``--resource`` option. Raises ValueError with a message for users."""
    name, colon, selector = text.partition(":")
    attribute, equals, value = selector.partition("=")
    if problem := extended_resource_problem(name):
        raise ValueError(f"{name!r} is not the name of a resource: {problem}")
    if colon and not (attribute and equals and value):
        raise ValueError(
            f"{text!r} must have the form NAME or NAME:ATTRIBUTE=VALUE, for example "
            f"{name}:model=large"
        )
    return Resource(name=name, attribute=attribute, value=value)


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePluginOptions:
    """The options for serving a driver as a device plugin."""

    resources: tuple[Resource, ...]
    shares: int | None = None
    """Maximum number of shares per device. If None, only the device's capacity limits the
    number."""

    unprepare_late: bool = False
    """Whether to undo the effects of a prepare only before the next prepare of the device."""

    directory: Path = Path("/var/lib/kubelet/device-plugins")
    """The kubelet's directory for device plugins."""


def check_supported(driver: str, traits: DriverTraits, options: DevicePluginOptions) -> None:
    """Raise :class:`SettingsError` if a driver needs a feature that a device plugin does not
    support."""
    name = f"driver {driver} cannot be a device plugin:"
    if traits.policies is not None:
        raise SettingsError(
            f"{name} it has policies, which only the node plugin reads from the API server; "
            f"set everything in the driver's configuration (--config), or use DRA"
        )
    if traits.network_devices:
        raise SettingsError(
            f"{name} it prepares devices that no node owns, and the kubelet knows only those of "
            f"its node; use DRA"
        )
    if traits.claim_data:
        raise SettingsError(
            f"{name} it needs the data of claims (claim_data), and there are no claims; use DRA"
        )
    if traits.side_effects and not options.unprepare_late:
        raise SettingsError(
            f"{name} it undoes what it prepares, and the kubelet does not notify a device plugin "
            f"when a pod ends; set --unprepare-late to undo it before the next pod gets the "
            f"device, set side_effects = False if there is nothing to undo, or use DRA"
        )
    if (kind := traits.parameters_type) is not None:
        try:
            kind.model_validate({})
        except ValidationError as error:
            fields = ", ".join(
                sorted({str(each["loc"][0]) for each in error.errors() if each["loc"]})
            )
            raise SettingsError(
                f"{name} its parameters {kind.__name__} are invalid without {fields or 'values'}, "
                f"and a pod that requests a resource has no parameters; give all fields defaults, "
                f"or use DRA"
            ) from None
    names = [resource.name for resource in options.resources]
    if not names:
        raise SettingsError(f"{name} it has no resource; set --resource, as in {driver}/device")
    for resource in names:
        if socket_path(options.directory, resource) is None:
            raise SettingsError(
                f"{name} the path of a socket in {options.directory} has more than "
                f"{MAX_SOCKET_PATH_BYTES} bytes, the limit of Linux; use a shorter directory"
            )


def socket_path(directory: Path, resource: str) -> Path | None:
    """Return the path of a resource's socket, or None if no path is short enough."""
    digest = hashlib.sha256(resource.encode()).hexdigest()[:16]
    for name in (f"{resource.replace('/', '_')}.sock", f"{digest}.sock"):
        if len(os.fsencode(directory / name)) <= MAX_SOCKET_PATH_BYTES:
            return directory / name
    return None


# ---------------------------------------------------------------- devices


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginDevice:
    """A device as the kubelet sees it: one of the driver's devices, or a share of one."""

    id: str
    device: Device
    allocated: AllocatedDevice
    """The device as passed to `prepare`."""

    claim: ClaimReference
    order: tuple[int, int]
    """The number of the share and the index of the device, for sorting."""

    @property
    def key(self) -> DeviceKey:
        """The key of the driver's device."""
        return DeviceKey(self.device.pool, self.device.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginDevices:
    """The devices of each resource, keyed by ID, and the reasons why others are not listed."""

    by_resource: Mapping[str, Mapping[str, PluginDevice]] = field(
        default_factory=dict[str, Mapping[str, PluginDevice]]
    )
    problems: tuple[str, ...] = ()


def plugin_devices(
    inventory: Inventory, *, driver: str, options: DevicePluginOptions
) -> PluginDevices:
    """Return the devices of an inventory as the kubelet expects them."""
    given = inventory.devices
    found: dict[str, dict[str, PluginDevice]] = {each.name: {} for each in options.resources}
    problems: list[str] = []
    if inventory.fallback is not None and any(map(_needs_fallback, given)):
        # Only devices that the kubelet cannot support make the fallback necessary. Malformed
        # devices are rejected in either case.
        problems += [
            _unlisted(each, f"is invalid: {why}") for each in given if (why := _wrong(each))
        ]
        given = inventory.fallback
    keys: set[DeviceKey] = set()
    count = 0
    for index, device in enumerate(given):
        try:
            key, resource, shares = _placed(device, options)
            if key in keys:
                raise _UnlistedError("is listed twice; the first entry is used")
            if count + shares > MAX_DEVICES:
                raise _UnlistedError(
                    f"exceeds the limit of {MAX_DEVICES:,} devices and shares; set --shares"
                )
            listed = [*_of_device(device, index, shares=shares, driver=driver, resource=resource)]
        except _UnlistedError as error:
            problems.append(_unlisted(device, str(error)))
            continue
        except Exception as error:  # the driver creates them, so any value can be malformed
            why = f"cannot be checked ({type(error).__name__}: {str(error)[:200]})"
            problems.append(_unlisted(device, why))
            continue
        keys.add(key)
        count += shares
        found[resource].update({each.id: each for each in listed})
    return PluginDevices(by_resource=found, problems=tuple(dict.fromkeys(problems)))


def _unlisted(device: object, why: str) -> str:
    return f"device {shown(getattr(device, 'name', device))} {why}"


def _wrong(device: object) -> str:
    return "; ".join(device_problems(device))


def _needs_fallback(device: Device) -> bool:
    return not _wrong(device) and bool(device.consumes or needed_features(device))


class _UnlistedError(Exception):
    """A device cannot be listed. The message continues a sentence that begins with the device
    name."""


def _placed(device: Device, options: DevicePluginOptions) -> tuple[DeviceKey, str, int]:
    """Return a device's key, its resource and the number of its shares. Raises
    :class:`_UnlistedError`."""
    if problem := device_problem(device):
        raise _UnlistedError(problem)
    shares = _share_count(device, options.shares)
    for resource in options.resources:
        if resource.selects(device):
            return DeviceKey(device.pool, device.name), resource.name, shares
    raise _UnlistedError("matches no --resource option")


def _of_device(
    device: Device, index: int, *, shares: int, driver: str, resource: str
) -> Iterator[PluginDevice]:
    request = re.sub(r"[^a-z0-9]+", "-", resource.partition("/")[2].lower()).strip("-")
    name = f"{device.pool}/{device.name}" if device.pool else device.name
    consumed: dict[str, str] = {}
    if device.allow_multiple_allocations:
        consumed = {key: _amounts(each)[1] for key, each in device.capacity.items()}
    for number in range(shares):
        identity = f"{name}::{number}" if device.allow_multiple_allocations else name
        uid = uuid.uuid5(uuid.NAMESPACE_DNS, f"{driver}/{identity}")
        share = str(uuid.uuid5(uid, "share")) if device.allow_multiple_allocations else None
        yield PluginDevice(
            id=identity,
            device=device,
            allocated=AllocatedDevice(
                name=device.name,
                pool=device.pool,
                request=request,
                share_id=share,
                consumed_capacity=consumed,
            ),
            claim=ClaimReference(namespace=NAMESPACE, name=identity, uid=str(uid)),
            order=(number, index),
        )


def device_problem(device: Device) -> str | None:
    """Return the reason why a device cannot be listed, or None."""
    if problem := _wrong(device):  # the same rules as for DRA
        return f"is invalid: {problem}"
    if device.consumes:
        return (
            "consumes counters, which the kubelet does not know: it would allocate devices that "
            "exclude each other; list only devices that can be used together, or set "
            "Inventory.fallback"
        )
    if needed := needed_features(device):
        names = " and ".join(sorted(each.value for each in needed))
        return f"needs its {names}, which the kubelet does not know; set Inventory.fallback"
    if problem := edits_problem(device.edits):
        return f"has edits that a device plugin cannot pass: {problem}"
    return None


def _share_count(device: Device, limit: int | None) -> int:
    """Return the number of shares of a valid device."""
    if not device.allow_multiple_allocations:
        return 1
    limits: list[int] = [] if limit is None else [limit]
    for capacity in device.capacity.values():
        value, amount = (parse_quantity(text) for text in _amounts(capacity))
        if amount > 0:
            limits.append(int(value // amount))
    if not limits:
        raise _UnlistedError(
            "can be shared by any number of claims, because no capacity is shared; set --shares"
        )
    if (shares := min(limits)) > MAX_DEVICES:
        raise _UnlistedError(
            f"has {shares:,} shares, and the limit is {MAX_DEVICES:,}; set --shares"
        )
    return shares


def _amounts(capacity: str | Capacity) -> tuple[str, str]:
    """Return the total amount of a capacity, and the amount that a share consumes by default."""
    if isinstance(capacity, Capacity):
        return capacity.value, capacity.default or capacity.value
    return capacity, capacity


def preferred(
    devices: Mapping[str, PluginDevice],
    *,
    available: Iterable[str],
    required: Collection[str],
    size: int,
) -> list[str]:
    """Return the IDs to allocate to a container: first the required ones, then others in the
    driver's order. Shares of different devices are preferred."""
    chosen = list(required)
    known = [devices[each] for each in available if each in devices and each not in chosen]
    taken: dict[DeviceKey, int] = defaultdict(int)
    for each in chosen:
        if each in devices:
            taken[devices[each].key] += 1
    ranked: list[tuple[int, int, int, str]] = []
    for device in sorted(known, key=lambda each: each.order):
        number, index = device.order
        ranked.append((taken[device.key], index, number, device.id))
        taken[device.key] += 1
    return [*chosen, *(each for *_, each in sorted(ranked))][: max(size, len(chosen))]


# ---------------------------------------------------------------- edits


def edits_problem(edits: Edits) -> str | None:
    """Return the reason why a device plugin cannot pass edits to a container, or None."""
    for given, what in (
        (edits.hooks, "hooks"),
        (edits.net_devices, "network devices"),
        (edits.additional_gids, "supplementary groups"),
        (edits.intel_rdt, "resctrl settings"),
    ):
        if given:
            return f"{what}; use DRA"
    for node in edits.device_nodes:
        if (node.file_mode, node.uid, node.gid) != (None, None, None):
            return f"the mode or owner of device node {node.path}; use DRA"
        if node.permissions == "none":
            return f"device node {node.path} without access; use DRA"
    for mount in edits.mounts:
        others = sorted({*mount.options, *((mount.type,) if mount.type else ())} - _PLAIN_OPTIONS)
        if others:
            return f"{', '.join(others)} of mount {mount.container_path}; use DRA"
    try:
        container_edits(edits)
    except InvalidEditsError as error:
        return str(error)
    return None


def response_of(edits: Iterable[Edits]) -> pb.ContainerAllocateResponse:
    """Return the response for one container, with the edits of all of its devices."""
    envs: dict[str, str] = {}
    nodes: dict[str, DeviceNode] = {}
    mounts: dict[str, Mount] = {}
    cdi: dict[str, None] = {}
    for each in edits:
        envs.update(each.env)
        nodes.update({node.path: node for node in each.device_nodes})
        mounts.update({mount.container_path: mount for mount in each.mounts})
        cdi.update(dict.fromkeys(each.cdi_devices))
    return pb.ContainerAllocateResponse(
        envs=envs,
        devices=[
            pb.DeviceSpec(
                container_path=node.path,
                host_path=node.host_path or node.path,
                permissions=node.permissions or "rwm",
            )
            for node in nodes.values()
        ],
        mounts=[
            pb.Mount(
                container_path=mount.container_path,
                host_path=mount.host_path,
                read_only="ro" in mount.options,
            )
            for mount in mounts.values()
        ],
        cdi_devices=[pb.CDIDevice(name=name) for name in cdi],
    )
