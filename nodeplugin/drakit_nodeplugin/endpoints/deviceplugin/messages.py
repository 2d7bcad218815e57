"""
Converts the messages of a device plugin: device lists to inventories with names that Kubernetes
accepts, and Allocate responses to the edits that a claim gives a container.

If a device cannot be published, it is rejected with a reason, and the other devices remain. The
edits equal those that a runtime would derive from the kubelet's response. If several entries have
the same path in the container, the first one applies. Responses that CDI does not allow are
rejected here, so that the error names the device plugin. The connection makes the calls, and
reports rejected devices.

A device name is a DNS label, but a device ID can be any string. An ID that is a label remains
unchanged. Otherwise, the characters that a label cannot contain are escaped, so that the name
remains readable:

    video-0         video-0
    0000:01:00.0    0000--k01--k00--p0
    GPU-8f4c        x--ygpu-8--nf4c

An escape is ``--`` and a letter of :data:`_LETTERS`, or ``--`` and two hexadecimal digits for each
byte in UTF-8. ``--y`` begins capital letters, and ``--n`` ends them. A name that would begin with
an escape gets an ``x`` as a prefix. An ID whose name would be too long becomes a readable prefix,
``--j`` and a hash; the list of present devices contains its ID. Different IDs always have different
names.

Does not depend on connections, claims, the checkpoint or the kubelet.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from drakit.device import (
    AttributeValue,
    Device,
    DeviceNode,
    Edits,
    Health,
    Inventory,
    Mount,
    Topology,
)
from drakit_driver.runtime.contract import MAX_DEVICES
from drakit_driver.runtime.failures import DeviceFailedError
from drakit_formats.cdi import InvalidEditsError, container_edits
from drakit_formats.resource.limits import MAX_STRING_BYTES, extended_resource_problem, is_dns_label
from drakit_nodeplugin.endpoints.allowlist import Rights
from drakit_nodeplugin.endpoints.host_paths import HostDeviceNodes, TooManyNodesError
from drakit_nodeplugin.endpoints.wire import GarbageError, parse, parts, quoted
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb

# ---------------------------------------------------------------- lists

MAX_DEVICE_BYTES = 4 * 1024
"""Maximum size of a device in a list: ten times the size of a long ID with many NUMA nodes."""

MAX_REJECTED = 5
"""Maximum number of problems to report for a list. The first ones are enough to find the cause."""

HEALTHY = "Healthy"

MAX_DEVICE_ID = 256
"""Maximum length of a device ID. The kubelet documents a limit of 63, but does not enforce it."""

MAX_NAME = 63
MAX_POOL = 160
"""Maximum length of a pool name. The node name precedes it, and both together can have 253
characters."""

_LETTERS = {".": "p", ":": "k", "/": "s", "_": "u", " ": "w", "-": "h"}
_UPPER, _LOWER, _HASH = "y", "n", "j"

_HASH_CHARACTERS = 26
"""Number of base32 characters of a hash: 130 bits."""

_PLAIN = re.compile(r"[a-z0-9]")
"""Matches the characters that are never escaped."""


# ------------------------------------------------------------ lists


class TooManyDevicesError(Exception):
    """A device plugin lists more devices than can be published."""

    def __init__(self, *, others: int = 0) -> None:
        if others:
            text = (
                f"its devices and the {others:,} devices of other device plugins on this node "
                f"exceed the limit of {MAX_DEVICES:,}"
            )
        else:
            text = f"it listed more than {MAX_DEVICES:,} devices"
        super().__init__(text)


class DeviceRoom:
    """The limit on the number of devices, which all device plugins on a node share."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

        self.reading = asyncio.Lock()
        """Held while a large message is parsed, because parsing several at the same time would take
        too much memory."""

    def take(self, resource: str, devices: int) -> None:
        """Set the number of a resource's devices. Raises :class:`TooManyDevicesError`."""
        others = sum(self._taken.values()) - self._taken.get(resource, 0)
        if others + devices > MAX_DEVICES:
            raise TooManyDevicesError(others=others)
        self._taken[resource] = devices

    def release(self, resource: str) -> None:
        """Release the share of a resource that no longer has devices."""
        self._taken.pop(resource, None)


class ListedDevice(NamedTuple):
    """A device as listed by the plugin."""

    identity: str
    health: str
    numa_nodes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedDevices:
    """The devices of a device plugin that can be published."""

    inventory: Inventory = field(default_factory=lambda: Inventory(devices=()))

    listed: Mapping[str, ListedDevice] = field(default_factory=dict[str, ListedDevice], repr=False)
    """The devices as listed by the plugin, keyed by published name."""

    rejected: tuple[str, ...] = ()
    """The distinct reasons for rejecting devices. If there are many, only the first ones are
    included."""


def devices_in(raw: bytes) -> Iterator[pb.Device]:
    """Parse the devices of a ListAndWatchResponse one by one, because 4 MiB can contain two million
    of them. Raises :class:`~drakit_nodeplugin.endpoints.wire.GarbageError`."""
    for _, part in parts(raw, frozenset({1}), limit=MAX_DEVICE_BYTES):
        yield parse(pb.Device, part)


def list_devices(
    devices: Iterable[pb.Device], *, resource: str, before: ListedDevices | None
) -> ListedDevices:
    """
    Return the devices that can be published. An unchanged device is the same object as in `before`.

    If `devices` is an iterator, it is not read beyond the number of devices that can be published.
    Raises :class:`TooManyDevicesError`.
    """
    pool = pool_of(resource)
    old = before or ListedDevices()
    known = {device.name: device for device in old.inventory.devices}
    made: dict[str, Device] = {}
    listed: dict[str, ListedDevice] = {}
    problems: dict[str, None] = {}
    for count, given in enumerate(devices):
        if count == MAX_DEVICES:
            raise TooManyDevicesError
        identity = given.ID
        if problem := _problem(identity):
            problems[f"the device plugin of {resource} lists a device {problem}"] = None
            continue
        name = device_name(identity)
        if name in listed:
            # As in the kubelet, the last device with an ID applies.
            problems[
                f"the device plugin of {resource} lists the device ID {quoted(identity)} more than "
                f"once; the last entry is used"
            ] = None
        nodes = tuple(sorted({node.ID for node in given.topology.nodes}))
        listed[name] = ListedDevice(identity, given.health, nodes)
        if name in known and old.listed[name] == listed[name]:
            made[name] = known[name]
        else:
            made[name] = _device(name, listed[name], pool=pool, resource=resource)
    return ListedDevices(
        inventory=Inventory(devices=tuple(made.values())),
        listed=listed,
        rejected=tuple(problems)[:MAX_REJECTED],
    )


def _problem(identity: str) -> str | None:
    if not identity:
        return "without an ID, and the device is not published"
    if len(identity) > MAX_DEVICE_ID:
        return (
            f"whose ID is longer than {MAX_DEVICE_ID} characters ({quoted(identity)}), and "
            f"the device is not published"
        )
    return None


def _device(name: str, listed: ListedDevice, *, pool: str, resource: str) -> Device:
    # Some plugins list -1 for a device without a NUMA node.
    nodes = tuple(node for node in listed.numa_nodes if 0 <= node < 2**31)
    texts = {"resource": resource, "id": listed.identity}
    if len(nodes) > 1:
        texts["numaNodes"] = ",".join(map(str, nodes))
    attributes: dict[str, AttributeValue] = {
        attribute: text
        for attribute, text in texts.items()
        if text.isprintable() and len(text.encode()) <= MAX_STRING_BYTES
    }
    return Device(
        name=name,
        pool=pool,
        attributes=attributes,
        topology=Topology(numa_node=nodes[0]) if len(nodes) == 1 else Topology(),
        health=_health(listed.health, resource),
    )


def _health(word: str, resource: str) -> Health:
    if word == HEALTHY:
        return Health.healthy()
    shown = "Unhealthy" if word == "Unhealthy" else f"{quoted(word)}, which is not Healthy"
    return Health.unhealthy(f"the device plugin of {resource} reports that the device is {shown}")


# ------------------------------------------------------------ device names


def device_name(identity: str) -> str:
    """Return the name for a device ID: a DNS label that is always the same for this ID."""
    if is_dns_label(identity) and "--" not in identity:
        return identity
    escaped = _escaped(identity)
    return escaped if len(escaped) <= MAX_NAME else _hashed(identity)


def _escaped(text: str) -> str:
    parts: list[str] = []
    upper = False
    for index, character in enumerate(text):
        lower = character.lower()
        letter = _PLAIN.fullmatch(lower) is not None and character.isascii()
        if letter and not character.isdigit() and (character != lower) != upper:
            upper = not upper
            parts.append(f"--{_UPPER if upper else _LOWER}")
        if letter:
            parts.append(lower)
        elif character == "-" and index > 0 and _stays(text[index + 1 :], upper=upper):
            parts.append(character)
        elif character in _LETTERS:
            parts.append(f"--{_LETTERS[character]}")
        else:
            parts += [f"--{byte:02x}" for byte in character.encode("utf-8", "surrogatepass")]
    escaped = "".join(parts)
    if escaped.startswith("--"):
        return f"x{escaped}"
    # The string already begins with an x.
    return f"x--{_LOWER}{escaped}" if escaped.startswith("x--") else escaped


def _stays(rest: str, *, upper: bool) -> bool:
    """Return whether a hyphen needs no escape, because it is not the last character and does not
    look like the start of an escape."""
    following = rest[:1]
    if not following or not following.isascii() or not _PLAIN.fullmatch(following.lower()):
        return False
    return following.isdigit() or following.isupper() == upper


def _hashed(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    code = base64.b32encode(digest).decode().lower()[:_HASH_CHARACTERS]
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    slug = slug[: MAX_NAME - len(code) - 3].rstrip("-") or "x"
    return f"{slug}--{_HASH}{code}"


# ------------------------------------------------------------ resource and pool names


def resource_name_problem(name: str) -> str | None:
    """Return the reason why this is not a valid extended resource name, or cannot be an attribute,
    or None."""
    if problem := extended_resource_problem(name):
        return problem
    if len(name) > MAX_STRING_BYTES:
        return (
            f"it must have at most {MAX_STRING_BYTES} characters, including the domain, because it "
            "is published as an attribute of the devices"
        )
    return None


def pool_of(resource: str) -> str:
    """Return the pool of a resource: ``thing.vendor.example`` for ``vendor.example/thing``."""
    domain, _, part = resource.partition("/")
    pool = f"{device_name(part)}.{domain}"
    return pool if len(pool) <= MAX_POOL else _hashed(resource)


# ---------------------------------------------------------------- Allocate responses

MAX_RESPONSE_BYTES = 1024 * 1024
"""Maximum size of an Allocate response. The edits are stored in the checkpoint and in a CDI
file."""

MAX_PARTS = 256
"""Maximum number of each kind of entry in a response: environment variables, mounts, device nodes
(including those in directories) and CDI devices."""

CDI_ANNOTATION = "cdi.k8s.io/"
"""Prefix of annotations whose values name CDI devices: an older way to pass them to a runtime that
some plugins still use."""

NodesOf = Mapping[str, Sequence[tuple[str, str]]]
"""For each host path, its device nodes: the path of each below the host path, and its own path."""


class BadResponseError(Exception):
    """An unusable response. The message is the end of a sentence."""


def edits_in(
    raw: bytes, *, plugin: str, devices: HostDeviceNodes, rights: Rights
) -> tuple[Edits, bool]:
    """Return the edits of an AllocateResponse for one container, and whether it has annotations
    that a container cannot get. Raises :class:`DeviceFailedError`, which names the plugin."""
    try:
        answer = allocate_response(raw)
        nodes = {path: devices.nodes(path) for path in host_paths(answer)}
        edits = edits_of(answer, nodes)
    except (BadResponseError, TooManyNodesError) as error:
        problem = f"responded to Allocate with {error}; this is a bug in the device plugin"
    else:
        problem = rights.edits_problem(edits)
        if problem is None:
            return edits, lost_annotations(answer)
    raise DeviceFailedError(f"{plugin} {problem}", index=0)


def allocate_response(raw: bytes) -> pb.ContainerAllocateResponse:
    """Parse the response for the single container in an AllocateResponse. Raises
    :class:`BadResponseError`."""
    if len(raw) > MAX_RESPONSE_BYTES:
        raise BadResponseError(f"more than {MAX_RESPONSE_BYTES // 1024} KiB")
    try:
        answers = parse(pb.AllocateResponse, raw).container_responses
    except GarbageError as error:
        raise BadResponseError(str(error)) from None
    if len(answers) != 1:
        number = "more than 1 container_response" if answers else "no container_response"
        raise BadResponseError(f"{number} for 1 request")
    return answers[0]


def host_paths(answer: pb.ContainerAllocateResponse) -> list[str]:
    """Return the host paths of the device nodes in a response, without duplicates. Raises
    :class:`BadResponseError`."""
    kinds = (answer.envs, answer.mounts, answer.devices, cdi_names(answer))
    if any(len(kind) > MAX_PARTS for kind in kinds):
        raise BadResponseError(f"more than {MAX_PARTS} entries of one kind")
    return list(dict.fromkeys(_host_path(device) for device in answer.devices))


def edits_of(answer: pb.ContainerAllocateResponse, nodes_of: NodesOf) -> Edits:
    """Return the edits in a response. Raises :class:`BadResponseError` if CDI does not allow
    them."""
    edits = Edits(
        env=dict(answer.envs),
        device_nodes=_device_nodes(answer.devices, nodes_of),
        mounts=_mounts(answer.mounts),
        cdi_devices=tuple(cdi_names(answer)),
    )
    try:
        container_edits(edits)
    except InvalidEditsError as error:
        raise BadResponseError(f"content that a CDI spec cannot contain: {error}") from None
    return edits


def cdi_names(answer: pb.ContainerAllocateResponse) -> list[str]:
    """Return the names of the CDI devices in a response's `cdi_devices` and annotations, without
    duplicates."""
    names = [device.name for device in answer.cdi_devices]
    for key, value in sorted(answer.annotations.items()):
        if key.startswith(CDI_ANNOTATION):
            names += value.split(",")
    return list(dict.fromkeys(names))


def lost_annotations(answer: pb.ContainerAllocateResponse) -> bool:
    """Return whether a response has annotations that a container cannot get through a claim."""
    return not all(key.startswith(CDI_ANNOTATION) for key in answer.annotations)


def _device_nodes(devices: Iterable[pb.DeviceSpec], nodes_of: NodesOf) -> tuple[DeviceNode, ...]:
    nodes: dict[str, DeviceNode] = {}
    for device in devices:
        container, host = _normal(device.container_path), _host_path(device)
        for below, real in nodes_of.get(host, [("", host)]):
            path = f"{container.rstrip('/')}/{below}" if below else container
            node = DeviceNode(path=path, host_path=real, permissions=_permissions(device))
            nodes.setdefault(path, node)
        if len(nodes) > MAX_PARTS:
            text = f"more than {MAX_PARTS} device nodes, including those in directories"
            raise BadResponseError(text)
    return tuple(nodes.values())


def _mounts(mounts: Iterable[pb.Mount]) -> tuple[Mount, ...]:
    made: dict[str, Mount] = {}
    for mount in mounts:
        # Use the same options as container runtimes do for the kubelet. Don't set nosuid or nodev,
        # because plugins also mount directories with device nodes and programs. Make read-only
        # mounts recursive, because an entry that allows only reading would otherwise have no effect
        # on the host's submounts.
        access = "rro" if mount.read_only else "rw"
        path = _normal(mount.container_path)
        options = ("rbind", "rprivate", access)
        host = _normal(mount.host_path)
        made.setdefault(path, Mount(host_path=host, container_path=path, options=options))
    return tuple(made.values())


def _host_path(device: pb.DeviceSpec) -> str:
    return _normal(device.host_path or device.container_path)


def _normal(path: str) -> str:
    """Normalize an absolute path by removing '..' and duplicate slashes. Other paths are left to
    CDI validation."""
    return posixpath.normpath(f"/{path.lstrip('/')}") if path.startswith("/") else path


def _permissions(device: pb.DeviceSpec) -> str | None:
    """Return the permissions with each letter once. If there are no letters, return None, which
    allows everything."""
    return "".join(dict.fromkeys(device.permissions)) or None
