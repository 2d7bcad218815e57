"""
The answer of Allocate: the edits that a container gets by a claim.

They equal the edits that a runtime would make from the answer for the kubelet. If several entries
have the same path in the container, the first one counts. This module refuses answers that CDI does
not allow, so that the sentence names the device plugin. :mod:`.plugin_client` makes the call.

It must not know how a device plugin is called, the checkpoint, or the kubelet.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence

from drakit.device import DeviceNode, Edits, Mount
from drakit_formats.cdi import InvalidEditsError, container_edits
from drakit_nodeplugin.endpoints.allowlist import Rights
from drakit_nodeplugin.endpoints.failures import DeviceFailedError
from drakit_nodeplugin.endpoints.host_paths import HostDeviceNodes, TooManyNodesError
from drakit_nodeplugin.endpoints.wire import GarbageError, parse
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb

__all__ = (
    "BadAnswerError",
    "allocate_answer",
    "edits_in",
    "edits_of",
    "host_paths",
    "lost_annotations",
)

MAX_ANSWER_BYTES = 1024 * 1024
"""Bytes of an answer to Allocate, which is kept in the checkpoint and in a CDI file."""

MAX_PARTS = 256
"""Environment variables, mounts, device nodes and CDI devices of one answer, each; with the device
nodes in directories that it names."""

CDI_ANNOTATION = "cdi.k8s.io/"
"""Prefix of annotations whose values name CDI devices: an older way to hand them to a runtime that
some plugins still use."""

NodesOf = Mapping[str, Sequence[tuple[str, str]]]
"""The device nodes of each host path: their paths below it, and their own paths."""


class BadAnswerError(Exception):
    """An answer that cannot be used. The text is the end of a sentence, after "answered with"."""


def edits_in(
    raw: bytes, *, plugin: str, devices: HostDeviceNodes, rights: Rights
) -> tuple[Edits, bool]:
    """Return the edits of an AllocateResponse for one container, and whether it has annotations
    that a container cannot get. Raises :class:`DeviceFailedError`, which names the plugin."""
    try:
        answer = allocate_answer(raw)
        nodes = {path: devices.nodes(path) for path in host_paths(answer)}
        edits = edits_of(answer, nodes)
    except (BadAnswerError, TooManyNodesError) as error:
        problem = f"answered Allocate with {error}; this is a bug in the device plugin"
    else:
        problem = rights.edits_problem(edits)
        if problem is None:
            return edits, lost_annotations(answer)
    raise DeviceFailedError(f"{plugin} {problem}", index=0)


def allocate_answer(raw: bytes) -> pb.ContainerAllocateResponse:
    """Parse the answer for the one container in an AllocateResponse; raises
    :class:`BadAnswerError`."""
    if len(raw) > MAX_ANSWER_BYTES:
        raise BadAnswerError(f"more than {MAX_ANSWER_BYTES // 1024} KiB")
    try:
        answers = parse(pb.AllocateResponse, raw).container_responses
    except GarbageError as error:
        raise BadAnswerError(str(error)) from None
    if len(answers) != 1:
        number = "more than 1 container_response" if answers else "no container_response"
        raise BadAnswerError(f"{number} for 1 request")
    return answers[0]


def host_paths(answer: pb.ContainerAllocateResponse) -> list[str]:
    """Return the host paths of an answer's device nodes, each once. Raises
    :class:`BadAnswerError`."""
    kinds = (answer.envs, answer.mounts, answer.devices, cdi_names(answer))
    if any(len(kind) > MAX_PARTS for kind in kinds):
        raise BadAnswerError(f"more than {MAX_PARTS} entries of one kind")
    return list(dict.fromkeys(_host_path(device) for device in answer.devices))


def edits_of(answer: pb.ContainerAllocateResponse, nodes_of: NodesOf) -> Edits:
    """Return the edits; raises :class:`BadAnswerError` if CDI does not allow them."""
    edits = Edits(
        env=dict(answer.envs),
        device_nodes=_device_nodes(answer.devices, nodes_of),
        mounts=_mounts(answer.mounts),
        cdi_devices=tuple(cdi_names(answer)),
    )
    try:
        container_edits(edits)
    except InvalidEditsError as error:
        raise BadAnswerError(f"content that a CDI spec cannot contain: {error}") from None
    return edits


def cdi_names(answer: pb.ContainerAllocateResponse) -> list[str]:
    """Return the CDI devices of an answer's `cdi_devices` and annotations, each once."""
    names = [device.name for device in answer.cdi_devices]
    for key, value in sorted(answer.annotations.items()):
        if key.startswith(CDI_ANNOTATION):
            names += value.split(",")
    return list(dict.fromkeys(names))


def lost_annotations(answer: pb.ContainerAllocateResponse) -> bool:
    """Return whether an answer has annotations that a container cannot get by a claim."""
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
            raise BadAnswerError(text)
    return tuple(nodes.values())


def _mounts(mounts: Iterable[pb.Mount]) -> tuple[Mount, ...]:
    made: dict[str, Mount] = {}
    for mount in mounts:
        # As runtimes mount for the kubelet. Neither nosuid nor nodev: plugins also mount
        # directories with device nodes and programs.
        # Read-only including the host's mounts below it: an entry that allows less would not hold.
        access = "rro" if mount.read_only else "rw"
        path = _normal(mount.container_path)
        options = ("rbind", "rprivate", access)
        host = _normal(mount.host_path)
        made.setdefault(path, Mount(host_path=host, container_path=path, options=options))
    return tuple(made.values())


def _host_path(device: pb.DeviceSpec) -> str:
    return _normal(device.host_path or device.container_path)


def _normal(path: str) -> str:
    """Write an absolute path without '..' and doubled slashes; leave others for CDI's rules."""
    return posixpath.normpath(f"/{path.lstrip('/')}") if path.startswith("/") else path


def _permissions(device: pb.DeviceSpec) -> str | None:
    """Return each letter once; None, which permits everything, if there is no letter."""
    return "".join(dict.fromkeys(device.permissions)) or None
