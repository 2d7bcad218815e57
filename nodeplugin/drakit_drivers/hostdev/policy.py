"""
The fields that an administrator writes: the policies, which select devices and define how pods get
them, and the configuration of the driver.

The same model validates policies in the cluster (the custom resource ``HostDevicePolicy``) and
policies in a configuration file. Every field has limits, and errors name the field and the remedy.
:mod:`.matching` defines how policies describe devices, and :mod:`.container` how devices appear in
containers. :mod:`.host` checks at startup whether ``sysRoot`` and ``devRoot`` exist.

Does not depend on the host: policies and configuration are validated without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, Field, StrictBool, StrictInt, field_validator, model_validator

from drakit import AttributeValue, DevicePolicy, DriverConfig, Duration, Policy, Version
from drakit_drivers.hostdev.container import HARMLESS_MOUNTS, Choice, Container, is_below
from drakit_drivers.hostdev.dangerous import danger_of_path, matches_everything
from drakit_drivers.hostdev.matching import Matcher, has_wildcard

MAX_EXTRA_ATTRIBUTES = 4
"""Maximum number of attributes that a policy can add. The API allows 32 attributes and capacities
per device in total."""

OWN_ATTRIBUTES = frozenset(
    """
    byIdLink byPathLink devname devtype driver drmConnected drmNode hidName identity inputKind
    inputName iommuGroup major minor netAddress netInterface nodeCount path pciClass pciDeviceID
    pciSubsystemDeviceID pciSubsystemVendorID pciVendorID policy serial soundCardID soundNode
    soundPcmCount subsystem tpmVersion ttyPort uartType usbClass usbInterface usbManufacturer
    usbPath usbPort usbProduct usbProductID usbSpeed usbVendorID usbVersion videoCapture videoName
    videoOutput
    """.split()  # noqa: SIM905  (a list of strings would be one line for each)
)
"""The names, without a domain, of the driver's own attributes, which policies cannot set.
:mod:`.policy_devices` sets them, and docs/reference/attributes.md explains them."""

_LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"
_DOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"

LabelKey = Annotated[
    str, Field(pattern=rf"^({_DOMAIN}/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=317)
]
LabelValue = Annotated[str, Field(pattern=_LABEL_VALUE)]
AttributeName = Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$", max_length=32)]
NamespaceName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
PolicyName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=40)]
"""The value of the device attribute ``policy``, and the prefix of device names. The limit of 40
characters leaves room for the rest of the device name."""


class LabelRequirement(DevicePolicy):
    """A requirement for one label."""

    key: LabelKey
    """The label key."""

    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """As in Kubernetes: ``NotIn`` also selects objects without the label."""

    values: tuple[LabelValue, ...] = Field(default=(), max_length=64)
    """The label values. Only for ``In`` and ``NotIn``."""

    @model_validator(mode="after")
    def _values_fit_the_operator(self) -> Self:
        if bool(self.values) != (self.operator in ("In", "NotIn")):
            raise ValueError("operators In and NotIn need values, and the others have none")
        return self

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Return whether an object with these labels meets the requirement."""
        value = labels.get(self.key)
        match self.operator:
            case "In":
                return value in self.values
            case "NotIn":
                return value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None


class LabelSelector(DevicePolicy):
    """A LabelSelector. An object must meet all requirements."""

    match_labels: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=32)
    """Labels that an object must have."""

    match_expressions: tuple[LabelRequirement, ...] = Field(default=(), max_length=32)
    """Label requirements that an object must meet."""

    @model_validator(mode="before")
    @classmethod
    def _is_a_label_selector(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            names = {str(name) for name in cast("Mapping[object, object]", value)}
            if other := sorted(names - {"matchLabels", "matchExpressions"}):
                raise ValueError(f"{other[0]}: write labels below matchLabels")
        return cast("object", value)

    @model_validator(mode="after")
    def _is_not_empty(self) -> Self:
        if not self.match_labels and not self.match_expressions:
            raise ValueError(
                "must have matchLabels or matchExpressions; to select everything, omit it"
            )
        return self

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Return whether the selector matches an object with these labels."""
        return self.match_labels.items() <= labels.items() and all(
            each.holds(labels) for each in self.match_expressions
        )


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

    create: Choice = "Always"
    """Whether the operator creates the DeviceClass."""

    name: str | None = Field(default=None, pattern=rf"^{_DOMAIN}$", max_length=253)
    """The name of the DeviceClass. Defaults to ``<policy>.drakit.dev``."""

    extended_resource_name: str | None = Field(
        default=None,
        pattern=rf"^{_DOMAIN}/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        max_length=317,
    )
    """The extended resource that pods can request in ``resources.limits`` instead of using a
    claim, such as ``example.com/serial``. Requires the feature gate DRAExtendedResource. A policy
    outside the chart's values also requires a prefix in the chart's value
    ``hostdev.extendedResourcePrefixes``."""

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


class AllowedNamespaces(DevicePolicy):
    """The namespaces whose claims can use the DeviceClass: those with one of the names, and those
    that the selector selects."""

    names: tuple[NamespaceName, ...] = Field(default=(), max_length=64)
    """The names of namespaces."""

    selector: LabelSelector | None = None
    """A selector for namespaces, by their labels."""

    @model_validator(mode="after")
    def _is_not_empty(self) -> Self:
        if not self.names and self.selector is None:
            raise ValueError("must have names or a selector; to allow all namespaces, omit it")
        return self


class Allow(DevicePolicy):
    """Exceptions to the safety rules of the driver."""

    unstable_identity: Choice = "Never"
    """Whether to publish devices without a stable identity, such as usbip devices without a serial
    number, under the names that the kernel assigns. After a reboot, a name can refer to another
    device."""

    dangerous: Choice = "Never"
    """Whether to publish devices that give a container control of the node or its data, such as
    ``/dev/mem``, consoles and USB sticks. Also allows matchers that match all devices, and mounts
    of any host path. This field has no effect unless the configuration of the driver sets
    ``allowDangerous``."""


class HostDevicePolicySpec(DevicePolicy):
    """Selects devices of nodes, and defines how pods share and use them."""

    node_selector: LabelSelector | None = None
    """The nodes to which the policy applies, by their labels. If unset, the policy applies to all
    nodes."""

    match: tuple[Matcher, ...] = Field(max_length=16, json_schema_extra={"minItems": 1})
    """Matchers that select devices. The policy publishes devices that at least one matcher
    matches."""

    group: Literal["Node", "Unit", "Set"] = "Node"
    """``Node``: the driver publishes each device node as a device. ``Unit``: the driver publishes
    all matching device nodes of a physical unit as one device. Examples of units are a camera with
    four video nodes, and a sound card. ``Set``: the driver publishes all device nodes that match on
    a Kubernetes node as one device. Each matcher must match exactly one unit."""

    identity: Literal["Device", "Port"] = "Device"
    """The properties that identify a USB device. ``Device``: its vendor and product IDs with its
    serial number, or with its port if it has no serial number. ``Port``: only the port, so that
    every matching device in this port has the same name. Use ``Port`` for a device that changes its
    IDs or serial number when a program loads its firmware."""

    sharing: Sharing = Sharing()
    """Whether claims can share a device, and how many claims can share it."""

    container: Container = Container()
    """How the device appears in a container: path, permissions, variables and mounts."""

    attributes: dict[AttributeName, Attribute] = Field(
        default_factory=dict, max_length=MAX_EXTRA_ATTRIBUTES
    )
    """Additional attributes of each device, keyed by name."""

    on_vanish: Literal["Taint", "Evict"] = "Taint"
    """The action when a device is unplugged, or gets a different device number, while pods use it.
    ``Taint``: the node plugin taints the device, so that no new pod gets it. ``Evict``: Kubernetes
    also evicts the pods that use the device, unless it returns within a few seconds with the same
    number."""

    device_class: DeviceClass = DeviceClass()
    """The DeviceClass that selects the devices of the policy."""

    allowed_namespaces: AllowedNamespaces | None = None
    """The namespaces whose claims can use the DeviceClass of the policy. If unset, all namespaces
    can. Requires the chart's value ``hostdev.restrictNamespaces``."""

    allow: Allow = Allow()
    """Exceptions to the safety rules of the driver."""

    @field_validator("match")
    @classmethod
    def _at_least_one(cls, match: tuple[Matcher, ...]) -> tuple[Matcher, ...]:
        # With min_length, pydantic would also report an invalid matcher as missing.
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
        if self.allow.dangerous == "Never":
            for danger, way, condition in self.dangers():
                remedy = f"{way}, or " if way else ""
                yield f"{danger}; {remedy}set allow.dangerous: Always{condition}"
        has_blocks = any(matcher.subsystem == "block" for matcher in self.match)
        if has_blocks and self.sharing.mode != "Exclusive":
            yield (
                f"sharing.mode: {self.sharing.mode} is not supported for block devices, because "
                "two pods could write to the same blocks; use Exclusive"
            )
        if has_blocks and self.group != "Node":
            yield f"group: {self.group} is not supported for block devices; use Node"
        if self.group != "Node" and not self.container.path_fits_several_nodes:
            yield (
                f"container.path: a {self.group.lower()} can have several device nodes; end the "
                "path in '/', or write '*' in its last component"
            )

    def dangers(self) -> Iterator[tuple[str, str, str]]:
        """Yield every setting that needs ``allow.dangerous``. Each comes with a harmless
        alternative, if any, and with the condition for setting ``allow.dangerous``."""
        for index, matcher in enumerate(self.match):
            place = f"match[{index}]"
            if not any(value for name, value in matcher if name not in ("subsystem", "exclude")):
                yield (
                    f"{place}: matches every device of {matcher.subsystem}",
                    "describe the devices that pods can claim, for example by paths",
                    "",
                )
            for number, path in enumerate(matcher.paths):
                danger = danger_of_path(path)
                if danger:
                    is_tpm = path.startswith("/dev/tpm")
                    yield (
                        f"{place}.paths[{number}]: {path} is dangerous: it {danger}",
                        "use subsystem tpmrm and /dev/tpmrm*" * is_tpm,
                        " only if every pod that can claim it may control the node",
                    )
                if matches_everything(path):
                    yield (
                        f"{place}.paths[{number}]: {path} matches every device",
                        "name the devices that pods can claim",
                        "",
                    )
        for index, mount in enumerate(self.container.mounts):
            if not is_below(mount.host_path, HARMLESS_MOUNTS):
                yield (
                    f"container.mounts[{index}].hostPath: {mount.host_path} is not under "
                    f"{', '.join(HARMLESS_MOUNTS)}",
                    "",
                    " only if every pod that can claim the device may read it",
                )

    @property
    def subsystems(self) -> tuple[str, ...]:
        """The subsystems of the policy's matchers."""
        return tuple(dict.fromkeys(matcher.subsystem for matcher in self.match))

    @property
    def single_path(self) -> str | None:
        """The single path that the policy can match, or None if it can match others."""
        if len(self.match) == 1 and len(self.match[0].paths) == 1:
            path = self.match[0].paths[0]
            return None if has_wildcard(path) else path
        return None


HostPolicy = Policy[HostDevicePolicySpec]


def policy_of_file(name: str, spec: HostDevicePolicySpec) -> HostPolicy:
    """Return a policy from a configuration file. It takes precedence over policies in the
    cluster."""
    return Policy(name=name, created=datetime.min.replace(tzinfo=UTC), generation=0, spec=spec)


def policies_of_node(
    policies: Iterable[HostPolicy], labels: Mapping[str, str] | None
) -> list[HostPolicy]:
    """Return the policies for a node, in order of precedence. While the node's labels are unknown,
    return only policies without a node selector."""
    chosen = (
        policy
        for policy in policies
        if (selector := policy.spec.node_selector) is None
        or (labels is not None and selector.selects(labels))
    )
    return sorted(chosen, key=lambda policy: (policy.created, policy.name))


# ------------------------------------------------------------ configuration


def _check_absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(f"{path} must be an absolute path")
    return path


AbsolutePath = Annotated[Path, AfterValidator(_check_absolute)]


class HostDevicesConfig(DriverConfig):
    """The configuration of the driver ``hostdev``."""

    policies: dict[PolicyName, HostDevicePolicySpec] = Field(default_factory=dict, max_length=256)
    """The policies, keyed by name. If two policies match a device, the policy whose name sorts
    first publishes it. A policy in this file takes precedence over a policy in the cluster that
    matches the same device."""

    allow_dangerous: bool = False
    """Whether policies can set ``allow.dangerous``. If false, the driver refuses everything that
    needs it: devices that give a container control of the node or its data, matchers that match all
    devices, and mounts of any host path."""

    rescan_interval: Duration = Field(
        default=timedelta(seconds=10), ge=timedelta(seconds=1), le=timedelta(hours=1)
    )
    """The interval between full scans. The kernel reports immediately when a device is plugged in
    or unplugged. The scan detects other changes, such as a mount."""

    sys_root: AbsolutePath = Path("/sys")
    """The mount point of sysfs."""

    udev_root: AbsolutePath = Path("/run/udev")
    """The mount point of the host's udev database. Optional."""

    dev_root: AbsolutePath = Path("/dev")
    """The mount point of the host's ``/dev``. Containers always get ``/dev`` paths."""

    mountinfo: AbsolutePath = Path("/proc/1/mountinfo")
    """The host's mounts. If the file cannot be read, the driver publishes no new block device."""

    swaps: AbsolutePath = Path("/proc/swaps")
    """The host's swap areas. If the file cannot be read, the driver publishes no new block
    device."""
