"""
How a device appears in containers: the fields of a policy, and the resulting edits.

The model is validated without access to a host. Errors name the field and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from drakit import DeviceNode, DevicePolicy, DriverError, Edits, Mount
from drakit_drivers.hostdev.hardware import HostDevice, hardware_identity
from drakit_drivers.hostdev.matching import check_text

HARMLESS_MOUNTS = ("/lib/firmware", "/run/udev/data", "/usr/lib/firmware", "/usr/share")
"""Host directories that contain neither secrets nor sockets."""

_PRIVATE_PLACES = ("/dev", "/proc", "/sys")
"""Directories in a container that the runtime populates."""


def is_below(path: str, directories: tuple[str, ...]) -> bool:
    """Return whether a path is one of the directories or below one."""
    return any(path == directory or path.startswith(f"{directory}/") for directory in directories)


def _parse_mode(value: Any) -> int:
    # Reject numbers, because YAML reads 0660 as 432, and 660 as an unintended mode.
    if not isinstance(value, str) or not re.fullmatch(r"0?[0-7]{3}", value):
        raise ValueError('must be octal digits in quotes, like "0660"')
    return int(value, 8)


def _check_absolute(path: str) -> str:
    parts = path.split("/")
    if parts[0] or len(parts) < 2 or any(part in ("", ".", "..") for part in parts[1:]):
        raise ValueError(f"{path!r} must be an absolute path without '.', '..' and empty parts")
    return check_text(path)


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
    PlainSerializer(lambda mode: f"{mode:04o}", when_used="json"),
    WithJsonSchema({"type": "string", "pattern": "^0?[0-7]{3}$"}),
]
PathText = Annotated[str, Field(max_length=256), AfterValidator(_check_absolute)]
Id = Annotated[int, Field(ge=0, lt=2**32 - 1)]
Choice = Literal["Always", "Never"]
"""An enumeration instead of a boolean, so that a later version can add a choice."""

Variable = Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)]


class PathMount(DevicePolicy):
    """A host file or directory that the runtime mounts into containers, read-only."""

    host_path: PathText
    """The path on the host. Paths outside ``/lib/firmware``, ``/usr/lib/firmware``,
    ``/usr/share`` and ``/run/udev/data`` need ``allow.dangerous``."""

    container_path: PathText
    """The path in the container. Each mount must have a different path."""

    @model_validator(mode="after")
    def _does_not_hide_the_runtime_s_own(self) -> Self:
        if is_below(self.container_path, _PRIVATE_PLACES):
            raise ValueError(
                f"containerPath: {self.container_path} is under {', '.join(_PRIVATE_PLACES)}, "
                "which the runtime fills; choose another path"
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

    by_id_links: Choice = "Never"
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

    @field_validator("mounts")
    @classmethod
    def _each_path_once(cls, mounts: tuple[PathMount, ...]) -> tuple[PathMount, ...]:
        paths = [mount.container_path for mount in mounts]
        if twice := [path for path in paths if paths.count(path) > 1]:
            raise ValueError(f"two mounts have the containerPath {twice[0]}")
        return mounts

    @property
    def path_fits_several_nodes(self) -> bool:
        """Whether each node of a multi-node device gets a different path."""
        return self.path is None or self.path.endswith("/") or "*" in self.path


# ------------------------------------------------------------ edits


def container_edits(
    view: Container, hosts: Sequence[HostDevice], *, request: str, device: str
) -> Edits:
    """
    Return the edits for a device.

    The variable ``HOSTDEV_<REQUEST>__<DEVICE>`` contains the container paths of the device's nodes,
    separated by colons. ``HOSTDEV_<REQUEST>`` is sufficient for an application that requests a
    single device. If the request has several devices, this variable describes one of them.
    """
    paths = [_container_path(view, host, index) for index, host in enumerate(hosts)]
    if len(set(paths)) < len(paths):
        raise DriverError(
            f"device {device} has {len(hosts)} device nodes, and container.path gives two of them "
            f"the path {max(paths, key=paths.count)}; write '*' in its last component"
        )
    nodes = [_node(view, host, path) for host, path in zip(hosts, paths, strict=True)]
    if view.by_id_links == "Always":
        nodes += [
            _node(view, host, link)
            for host in hosts
            for link in host.links
            if "/by-id/" in link and link not in paths
        ]
    # Use the request name without the subrequest name, so that a program works with any
    # alternative.
    variable = f"HOSTDEV_{_variable(request.partition('/')[0])}"
    value = ":".join(paths)
    return Edits(
        env={**view.env, variable: value, f"{variable}__{_variable(device)}": value},
        device_nodes=tuple(nodes),
        mounts=tuple(
            Mount(host_path=each.host_path, container_path=each.container_path)
            for each in view.mounts
        ),
    )


def shared_path(edits: Iterable[Edits]) -> str | None:
    """Return the problem if devices of a claim have different nodes at the same container path, or
    None. The runtime would silently give the container only one of them."""
    numbers: dict[str, tuple[int | None, int | None]] = {}
    for node in (node for each in edits for node in each.device_nodes):
        number = (node.major, node.minor)
        if numbers.setdefault(node.path, number) != number:
            return (
                f"two devices of the claim have the path {node.path} in the container: request one "
                "device for each container, or end container.path of the policy in '/'"
            )
    return None


def _container_path(view: Container, host: HostDevice, index: int) -> str:
    if view.path is None:
        return host.path
    if view.path.endswith("/"):
        return view.path + host.kernel_name
    return view.path.replace("*", str(index))


def _node(view: Container, host: HostDevice, path: str) -> DeviceNode:
    return DeviceNode(
        path=path,
        host_path=None if path == host.path else host.path,
        type=host.type,
        major=host.major,
        minor=host.minor,
        permissions=view.permissions,
        file_mode=view.mode,
        uid=view.uid,
        gid=view.gid,
        identity=hardware_identity(host),
    )


def _variable(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", name.upper())
