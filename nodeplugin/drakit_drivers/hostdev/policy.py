"""
The spec of a HostDevicePolicy: which devices of the host it publishes, and how pods get them.

The same model checks policies of the cluster (the custom resource ``HostDevicePolicy``) and those
of a configuration file. Every field has bounds, and errors name the field and the remedy.
:mod:`.matchers` has the description of devices.

It must not know the host: a policy is checked without one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    StrictBool,
    StrictInt,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from drakit import AttributeValue, DevicePolicy, Version
from drakit_drivers.hostdev.attribute_names import OWN_ATTRIBUTES
from drakit_drivers.hostdev.dangerous import danger_of_path, matches_everything
from drakit_drivers.hostdev.globs import has_wildcard
from drakit_drivers.hostdev.matchers import Matcher

__all__ = (
    "MAX_EXTRA_ATTRIBUTES",
    "Allow",
    "Attribute",
    "Container",
    "DeviceClass",
    "HostDevicePolicySpec",
    "PathMount",
    "PolicyName",
    "Sharing",
)

MAX_EXTRA_ATTRIBUTES = 4
"""Attributes that a policy can add: the API allows 32 of a device with its capacities."""

_HARMLESS_MOUNTS = ("/lib/firmware", "/run/udev/data", "/usr/lib/firmware", "/usr/share")
"""Directories of the host that contain neither secrets nor sockets."""

_PRIVATE_PLACES = ("/dev", "/proc", "/sys")
"""Directories of a container that the runtime fills."""

_LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"
_DOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"


# ------------------------------------------------------------ types of values


def _parse_mode(value: Any) -> int:
    # A number is refused: YAML reads 0660 as 432, and 660 as an unintended mode.
    if not isinstance(value, str) or not re.fullmatch(r"0?[0-7]{3}", value):
        raise ValueError('must be octal digits in quotes, like "0660"')
    return int(value, 8)


def _mode_text(mode: int) -> str:
    return f"{mode:04o}"


def _check_absolute(path: str) -> str:
    parts = path.split("/")
    if parts[0] or len(parts) < 2 or any(part in ("", ".", "..") for part in parts[1:]):
        raise ValueError(f"{path!r} must be an absolute path without '.', '..' and empty parts")
    if re.search(r"[\x00-\x1f\x7f]", path):
        raise ValueError(f"{path!r} has a control character")
    return path


def _check_container_path(path: str) -> str:
    _check_absolute(path.removesuffix("/"))
    if not path.startswith("/dev/") or path == "/dev/":
        raise ValueError(f"{path!r} must be under /dev/")
    if re.search(r"[?\[\]]", path) or path.count("*") > 1 or "*" in path.rpartition("/")[0]:
        raise ValueError(
            f"{path!r} can contain one '*', in its last component, and no other wildcard"
        )
    return path


Mode = Annotated[
    int,
    BeforeValidator(_parse_mode),
    PlainSerializer(_mode_text, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": "^0?[0-7]{3}$"}),
]
PathText = Annotated[str, Field(max_length=256), AfterValidator(_check_absolute)]
Id = Annotated[int, Field(ge=0, lt=2**32 - 1)]
LabelKey = Annotated[
    str, Field(pattern=rf"^({_DOMAIN}/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=317)
]
LabelValue = Annotated[str, Field(pattern=_LABEL_VALUE)]
Variable = Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)]
AttributeName = Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$", max_length=32)]
PolicyName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=40)]
"""The value of the device attribute ``policy``, and the prefix of device names. The limit
of 40 characters leaves room for the device."""


# ------------------------------------------------------------ sharing and the container's view


class Sharing(DevicePolicy):
    """Whether claims can share a device, and how many claims can share it."""

    mode: Literal["Exclusive", "Users", "Capacity"] = "Exclusive"
    """``Exclusive``: one claim at a time can hold the device. ``Users``: the driver publishes
    ``users`` entries for the device, and each claim gets one of these entries. ``Capacity``: the
    driver publishes the device once, with the capacity ``users``. A claim consumes one unit unless
    it requests more. If the cluster does not support DRAConsumableCapacity, the driver publishes
    entries, as with ``Users``."""

    users: int | None = Field(default=None, ge=1, le=1024)
    """The number of claims that can share a device. Required for ``Users`` and ``Capacity``."""

    @model_validator(mode="after")
    def _users_of_shared_devices(self) -> Self:
        if self.mode == "Exclusive" and self.users is not None:
            raise ValueError("users needs mode: Users or mode: Capacity")
        if self.mode != "Exclusive" and self.users is None:
            raise ValueError(
                f"mode: {self.mode} needs users, the number of claims that can share a device"
            )
        return self


class PathMount(DevicePolicy):
    """A host file or directory that the runtime mounts into containers, read-only."""

    host_path: PathText
    """The path on the host. Paths outside ``/lib/firmware``, ``/usr/lib/firmware``,
    ``/usr/share`` and ``/run/udev/data`` need ``allow.dangerous``."""

    container_path: PathText | None = None
    """The path in the container. Defaults to the path on the host."""

    @model_validator(mode="after")
    def _does_not_hide_the_runtime_s_own(self) -> Self:
        path = self.container_path or self.host_path
        if _is_below(path, _PRIVATE_PLACES):
            raise ValueError(
                f"containerPath: {path} is under {', '.join(_PRIVATE_PLACES)}, which the runtime "
                "fills; choose another path"
            )
        return self


class Container(DevicePolicy):
    """How the device appears in a container: path, permissions, variables and mounts."""

    path: str | None = Field(default=None, max_length=256)
    """The path of the device node in the container, under ``/dev``. Defaults to the path on the
    host. If the path ends in ``/``, it is a directory, and each device node keeps its name. If the
    last path component contains ``*``, the driver replaces ``*`` with the index of the device node
    within the device, starting at 0."""

    permissions: str = Field(default="rw", pattern=r"^[rwm]{1,3}$")
    """The cgroup permissions: ``r`` (read), ``w`` (write) and ``m`` (mknod), in any combination."""

    uid: Id | None = None
    """The user ID that owns the device node in the container. If unset, the runtime decides."""

    gid: Id | None = None
    """The group ID of the device node in the container. If unset, the runtime decides."""

    mode: Mode | None = None
    """The file mode of the device node in the container, such as ``"0660"``. If unset, the runtime
    decides."""

    env: dict[Variable, Annotated[str, Field(max_length=1024)]] = Field(
        default_factory=dict, max_length=32
    )
    """Additional environment variables of the container. The driver does not expand the values."""

    mounts: tuple[PathMount, ...] = Field(default=(), max_length=16)
    """Host files and directories that the runtime also mounts into the container."""

    by_id_links: bool = False
    """Whether the container also gets each device node at the path of its ``by-id`` link, such
    as ``/dev/serial/by-id/usb-1a86_USB_Serial-if00-port0``. A node without a udev daemon has no
    such links."""

    @field_validator("path")
    @classmethod
    def _below_dev(cls, path: str | None) -> str | None:
        return path if path is None else _check_container_path(path)

    @field_validator("permissions")
    @classmethod
    def _each_letter_once(cls, permissions: str) -> str:
        if len(set(permissions)) != len(permissions):
            raise ValueError(f"{permissions!r} contains a letter twice")
        return permissions

    @field_validator("env")
    @classmethod
    def _not_the_driver_s_own(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if name.startswith("HOSTDEV_"):
                raise ValueError(
                    f"{name}: names that begin with HOSTDEV_ are reserved for the driver; rename "
                    f"the variable"
                )
            if re.search(r"[\x00-\x1f\x7f]", value):
                raise ValueError(f"{name}: the value has a control character")
        return env

    @property
    def path_fits_several_nodes(self) -> bool:
        """Whether each node of a device gets another path."""
        return self.path is None or self.path.endswith("/") or "*" in self.path


# ------------------------------------------------------------ what else a policy decides


class Attribute(DevicePolicy):
    """A typed attribute value, as in a ResourceSlice. Set exactly one field."""

    string: str | None = Field(default=None, max_length=64)
    """A string of at most 64 bytes."""

    int: StrictInt | None = Field(default=None, ge=-(2**63), lt=2**63)
    """An integer."""

    bool: StrictBool | None = None
    """A boolean."""

    version: str | None = Field(
        default=None,
        max_length=64,
        pattern=r"^(0|[1-9][0-9]*)(\.(0|[1-9][0-9]*)){2}(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?$",
    )
    """A semantic version, such as ``1.2.3``."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if len([value for _, value in self if value is not None]) != 1:
            raise ValueError("must have exactly one of string, int, bool and version")
        if self.string is not None and len(self.string.encode()) > 64:
            raise ValueError("string: has more than 64 bytes; shorten it")
        return self

    @property
    def value(self) -> AttributeValue:
        """The value for :class:`drakit.Device`."""
        if self.version is not None:
            return Version(self.version)
        for value in (self.string, self.int, self.bool):
            if value is not None:
                return value
        raise AssertionError("validated: one field is set")


class DeviceClass(DevicePolicy):
    """The DeviceClass that selects the devices of the policy."""

    create: bool = True
    """Whether the operator creates the DeviceClass."""

    name: str | None = Field(default=None, pattern=rf"^{_DOMAIN}$", max_length=253)
    """The name of the DeviceClass. Defaults to ``<policy>.drakit.dev``."""

    extended_resource_name: str | None = Field(
        default=None,
        pattern=rf"^{_DOMAIN}/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        max_length=317,
    )
    """The extended resource that pods can request in ``resources.limits`` instead of using a
    claim, such as ``example.com/serial``. Requires the feature gate DRAExtendedResource."""

    @field_validator("extended_resource_name")
    @classmethod
    def _not_of_kubernetes(cls, name: str | None) -> str | None:
        domain = (name or "").partition("/")[0]
        if domain == "kubernetes.io" or domain.endswith(".kubernetes.io"):
            raise ValueError(f"{name!r} uses a domain of Kubernetes; use your own domain")
        if domain.startswith("requests."):
            raise ValueError(
                f"{name!r} begins with 'requests.', which is reserved for quotas; use another "
                f"domain"
            )
        return name


class Allow(DevicePolicy):
    """Exceptions to the safety rules of the driver."""

    unstable_identity: bool = False
    """Whether to publish devices without a stable identity, under the names that the kernel
    assigns. Examples are USB devices that have no serial number and whose controller has no
    address, such as usbip devices. After a reboot, the same name can refer to another device, so a
    claim can get a different device."""

    dangerous: bool = False
    """Whether to publish devices that give a container control of the node or its data, such as
    ``/dev/mem``, consoles and USB sticks. Also allows matchers that match all devices, and mounts
    of any host path. This field has no effect unless the configuration of the driver sets
    ``allowDangerous``."""


class HostDevicePolicySpec(DevicePolicy):
    """Selects devices of nodes, and defines how pods share and use them."""

    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=32)
    """Labels that a node must have for the policy to apply. If empty, the policy applies to all
    nodes."""

    match: tuple[Matcher, ...] = Field(max_length=16, json_schema_extra={"minItems": 1})
    """Matchers that select devices. The policy publishes devices that at least one matcher
    matches."""

    group: Literal["Node", "Unit"] = "Node"
    """``Node``: the driver publishes each device node as a device. ``Unit``: the driver publishes
    all matching device nodes of a physical unit as one device. Examples of units are a camera with
    four video nodes, and a sound card."""

    sharing: Sharing = Sharing()
    """Whether claims can share a device, and how many claims can share it."""

    container: Container = Container()
    """How the device appears in a container: path, permissions, variables and mounts."""

    attributes: dict[AttributeName, Attribute] = Field(
        default_factory=dict, max_length=MAX_EXTRA_ATTRIBUTES
    )
    """Additional attributes of each device, by name."""

    on_vanish: Literal["Taint", "Evict"] = "Taint"
    """The action when a device is unplugged, or gets a different device number, while pods use it.
    ``Taint``: the node plugin taints the device, so that no new pod gets it. ``Evict``: Kubernetes
    also evicts the pods that use the device. It evicts them immediately if the number has changed,
    and otherwise if the device does not return within a few seconds."""

    device_class: DeviceClass = DeviceClass()
    """The DeviceClass that selects the devices of the policy."""

    allow: Allow = Allow()
    """Exceptions to the safety rules of the driver."""

    @field_validator("match")
    @classmethod
    def _at_least_one(cls, match: tuple[Matcher, ...]) -> tuple[Matcher, ...]:
        # With min_length, pydantic also reports an invalid matcher as a missing one.
        if not match:
            raise ValueError("must have at least one matcher")
        return match

    @field_validator("attributes")
    @classmethod
    def _not_of_the_driver(cls, attributes: dict[str, Attribute]) -> dict[str, Attribute]:
        taken = sorted(attributes.keys() & OWN_ATTRIBUTES)
        if taken:
            raise ValueError(f"{taken[0]}: this attribute is reserved for the driver; rename yours")
        return attributes

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        problem = next(self._problems(), None)
        if problem:
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        if not self.allow.dangerous:
            yield from (f"{danger}; {remedy}" for danger, remedy in self.dangers())
        has_blocks = any(matcher.subsystem == "block" for matcher in self.match)
        if has_blocks and self.sharing.mode != "Exclusive":
            yield (
                f"sharing.mode: {self.sharing.mode} is not supported for block devices, because "
                "two pods could write to the same blocks; use Exclusive"
            )
        if has_blocks and self.group == "Unit":
            yield "group: Unit is not supported for block devices; use Node"
        if self.group == "Unit" and not self.container.path_fits_several_nodes:
            yield (
                "container.path: a unit can have several device nodes; end the path in '/', or "
                "write '*' in its last component"
            )

    def dangers(self) -> Iterator[tuple[str, str]]:
        """Yield what needs ``allow.dangerous``, each with its remedy."""
        for index, matcher in enumerate(self.match):
            place = f"match[{index}]"
            if not any(value for name, value in matcher if name != "subsystem"):
                yield (
                    f"{place}: matches every device of {matcher.subsystem}",
                    "describe the devices that pods can claim, for example by paths, or set "
                    "allow.dangerous: true",
                )
            for number, path in enumerate(matcher.paths):
                danger = danger_of_path(path)
                if danger:
                    yield (
                        f"{place}.paths[{number}]: {path} is dangerous: it {danger}",
                        "set allow.dangerous: true only if every pod that can claim it may control "
                        "the node",
                    )
                if matches_everything(path):
                    yield (
                        f"{place}.paths[{number}]: {path} matches every device",
                        "name the devices that pods can claim, or set allow.dangerous: true",
                    )
        for index, mount in enumerate(self.container.mounts):
            if not _is_below(mount.host_path, _HARMLESS_MOUNTS):
                yield (
                    f"container.mounts[{index}].hostPath: {mount.host_path} is not under "
                    f"{', '.join(_HARMLESS_MOUNTS)}",
                    "set allow.dangerous: true only if every pod that can claim the device may "
                    "read it",
                )

    @property
    def subsystems(self) -> tuple[str, ...]:
        """The subsystems of its matchers."""
        return tuple(dict.fromkeys(matcher.subsystem for matcher in self.match))

    @property
    def single_path(self) -> str | None:
        """The one path that the policy can match, if it has no wildcard."""
        if len(self.match) == 1 and len(self.match[0].paths) == 1:
            path = self.match[0].paths[0]
            return None if has_wildcard(path) else path
        return None


def _is_below(path: str, directories: tuple[str, ...]) -> bool:
    return any(path == directory or path.startswith(f"{directory}/") for directory in directories)
