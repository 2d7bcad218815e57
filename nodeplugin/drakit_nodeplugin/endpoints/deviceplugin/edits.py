"""
From a device plugin's answer to Allocate to edits, as a runtime would have done it for the kubelet.

Of several entries for one path in the container the first one counts, as for the kubelet. What CDI
does not allow is refused here, so that the sentence names the plugin.

It must not know connections, claims, or the file system: links on the host are the caller's.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from drakit.cdi import InvalidEditsError, build_spec
from drakit.device import DeviceNode, Edits, Mount

__all__ = (
    "BadAnswerError",
    "ContainerAnswer",
    "NodesOf",
    "edits_of",
    "host_paths",
    "lost_annotations",
)

MAX_PARTS = 256
"""Environment variables, mounts, device nodes and CDI devices of one answer, each; with the device
nodes in directories that it names."""

CDI_ANNOTATION = "cdi.k8s.io/"
"""What the keys of annotations begin with that name CDI devices, in their values: an older way to
give them to a runtime, which some plugins still take."""

_KIND, _NAME = "device-plugin/answer", "it"

NodesOf = Mapping[str, Sequence[tuple[str, str]]]
"""The device nodes of each host path: where they are below it, and their own paths."""


class BadAnswerError(Exception):
    """An answer that no container can be made with. The text is the end of a sentence."""


class _Mount(Protocol):
    @property
    def container_path(self) -> str: ...
    @property
    def host_path(self) -> str: ...
    @property
    def read_only(self) -> bool: ...


class _DeviceSpec(Protocol):
    @property
    def container_path(self) -> str: ...
    @property
    def host_path(self) -> str: ...
    @property
    def permissions(self) -> str: ...


class _CDIDevice(Protocol):
    @property
    def name(self) -> str: ...


class ContainerAnswer(Protocol):
    """What the plugin gives a container (v1beta1 ``ContainerAllocateResponse``)."""

    @property
    def envs(self) -> Mapping[str, str]: ...
    @property
    def mounts(self) -> Sequence[_Mount]: ...
    @property
    def devices(self) -> Sequence[_DeviceSpec]: ...
    @property
    def annotations(self) -> Mapping[str, str]: ...
    @property
    def cdi_devices(self) -> Sequence[_CDIDevice]: ...


def host_paths(answer: ContainerAnswer) -> list[str]:
    """Give the host paths of an answer's device nodes, each once. Raises BadAnswerError."""
    parts = (answer.envs, answer.mounts, answer.devices, cdi_names(answer))
    if any(len(part) > MAX_PARTS for part in parts):
        raise BadAnswerError(f"with more than {MAX_PARTS} entries of one kind")
    return list(dict.fromkeys(_host_path(device) for device in answer.devices))


def edits_of(answer: ContainerAnswer, nodes_of: NodesOf, *, restricted: bool = False) -> Edits:
    """Return the edits; raises :class:`BadAnswerError` if CDI does not allow them. The read-only
    mounts of a restricted plugin are recursively read-only."""
    edits = Edits(
        env=dict(answer.envs),
        device_nodes=_device_nodes(answer.devices, nodes_of),
        mounts=_mounts(answer.mounts, read_only="rro" if restricted else "ro"),
        cdi_devices=tuple(cdi_names(answer)),
    )
    try:
        build_spec(_KIND, [(_NAME, edits)])
    except InvalidEditsError as error:
        text = str(error).removeprefix(f"CDI device {_KIND}={_NAME}: ")
        raise BadAnswerError(f"which no CDI spec can hold: {text}") from None
    return edits


def cdi_names(answer: ContainerAnswer) -> list[str]:
    """Give the CDI devices that an answer names in either way, each once."""
    names = [device.name for device in answer.cdi_devices]
    for key, value in sorted(answer.annotations.items()):
        if key.startswith(CDI_ANNOTATION):
            names += value.split(",")
    return list(dict.fromkeys(names))


def lost_annotations(answer: ContainerAnswer) -> bool:
    """Tell whether an answer has annotations that a container cannot get by a claim."""
    return not all(key.startswith(CDI_ANNOTATION) for key in answer.annotations)


def _device_nodes(devices: Iterable[_DeviceSpec], nodes_of: NodesOf) -> tuple[DeviceNode, ...]:
    nodes: dict[str, DeviceNode] = {}
    for device in devices:
        container, host = _normal(device.container_path), _host_path(device)
        for below, real in nodes_of.get(host, [("", host)]):
            path = f"{container.rstrip('/')}/{below}" if below else container
            node = DeviceNode(path=path, host_path=real, permissions=_permissions(device))
            nodes.setdefault(path, node)
        if len(nodes) > MAX_PARTS:
            text = f"with more than {MAX_PARTS} device nodes, with those in directories"
            raise BadAnswerError(text)
    return tuple(nodes.values())


def _mounts(mounts: Iterable[_Mount], *, read_only: str) -> tuple[Mount, ...]:
    made: dict[str, Mount] = {}
    for mount in mounts:
        # As runtimes mount for the kubelet. Neither nosuid nor nodev: plugins mount directories
        # with device nodes and programs, too.
        access = read_only if mount.read_only else "rw"
        path = _normal(mount.container_path)
        options = ("rbind", "rprivate", access)
        host = _normal(mount.host_path)
        made.setdefault(path, Mount(host_path=host, container_path=path, options=options))
    return tuple(made.values())


def _host_path(device: _DeviceSpec) -> str:
    return _normal(device.host_path or device.container_path)


def _normal(path: str) -> str:
    """Write an absolute path without '..' and doubled slashes; leave others for CDI's rules."""
    return posixpath.normpath(f"/{path.lstrip('/')}") if path.startswith("/") else path


def _permissions(device: _DeviceSpec) -> str | None:
    """Give each letter once; all of them if none is given."""
    return "".join(dict.fromkeys(device.permissions)) or None
