"""
Allocate: from the devices of a request to the edits of its containers.

A device plugin knows containers and no claims. Each request of a claim is one call of Allocate with
all devices of the request, as a container was for the kubelet. A container that uses a request gets
all of its devices, so the edits of the answer belong to the first device.

The edits are what a runtime would have made of the answer for the kubelet. Of several entries for
one path in the container the first one counts. What CDI does not allow is refused here, so that the
sentence names the device plugin. How a call reaches the plugin is :mod:`.connection`'s business.

It must not know how a call waits for its devices, the checkpoint, or the kubelet.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Iterable, Mapping, Sequence

from drakit.cdi import InvalidEditsError, build_spec
from drakit.device import AllocatedDevice, DeviceNode, Edits, Mount
from drakit_nodeplugin.endpoints.allowlist import Rights
from drakit_nodeplugin.endpoints.deviceplugin.plugin_client import PluginClient
from drakit_nodeplugin.endpoints.failures import DeviceFailedError, Diagnostics
from drakit_nodeplugin.endpoints.host_paths import HostDevices, TooManyNodesError
from drakit_nodeplugin.endpoints.wire import GarbageError, parse
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb

__all__ = (
    "Allocator",
    "BadAnswerError",
    "allocate_answer",
    "edits_of",
    "host_paths",
    "lost_annotations",
)

MAX_ANSWER_BYTES = 1024 * 1024
"""Of an answer to Allocate: it is kept in the checkpoint and in a CDI file."""

IN_LOOP_BYTES = 4 * 1024
"""Of an answer that is converted in the daemon's loop: that takes less than a tenth of a
millisecond, and a thread costs twice as much. Larger answers are converted in a thread."""

MAX_PARTS = 256
"""Environment variables, mounts, device nodes and CDI devices of one answer, each; with the device
nodes in directories that it names."""

CDI_ANNOTATION = "cdi.k8s.io/"
"""Prefix of annotations whose values name CDI devices: an older way to hand them to a runtime that
some plugins still use."""

_KIND, _NAME = "device-plugin/answer", "it"

NodesOf = Mapping[str, Sequence[tuple[str, str]]]
"""The device nodes of each host path: their paths below it, and their own paths."""


class BadAnswerError(Exception):
    """An answer that cannot be used. The text is the end of a sentence, behind "answered ..."."""


class Allocator:
    """Allocates the devices of one resource."""

    def __init__(
        self,
        resource: str,
        *,
        rights: Rights | None,
        devices: HostDevices,
        diagnostics: Diagnostics,
    ) -> None:
        self._plugin = f"the device plugin of {resource}"
        self._rights = rights
        self._devices = devices
        self._diagnostics = diagnostics

    async def allocate(self, client: PluginClient, devices: Sequence[AllocatedDevice]) -> Edits:
        """Allocate the devices of one request. Raises :class:`DeviceFailedError`."""
        ids = [self._identity(client, device, index) for index, device in enumerate(devices)]
        answer = await client.allocate(ids)
        if client.pre_start_required:
            # The kubelet calls it before each start of a container. Nobody notifies us of one.
            await client.pre_start(ids)
        if len(answer) <= IN_LOOP_BYTES:
            edits, annotations_lost = self._edits(answer)
        else:
            edits, annotations_lost = await asyncio.to_thread(self._edits, answer)
        if annotations_lost:
            note = (
                f"{self._plugin} answers Allocate with annotations that name no CDI devices; a "
                f"container cannot get them by a claim; they are left out, and all else works"
            )
            self._diagnostics.report("AnnotationsUnsupported", note, once=True)
        return edits

    def _identity(self, client: PluginClient, device: AllocatedDevice, index: int) -> str:
        if device.admin_access:
            # The kubelet never allocates a device that is in use, and plugins may rely on it.
            text = (
                f"{self._plugin} can only allocate a device, which may be in use; a claim with "
                f"adminAccess cannot have it"
            )
            raise DeviceFailedError(text, index=index)
        identity = client.identity_in_plugin(device.name)
        if identity is None:
            text = (
                f"{self._plugin} does not list it any more; delete the pod so that another device "
                f"is found for it"
            )
            raise DeviceFailedError(text, index=index)
        return identity

    def _edits(self, raw: bytes) -> tuple[Edits, bool]:
        """Return the edits of an answer, and whether it has annotations that a container cannot
        get. Raises :class:`DeviceFailedError`."""
        try:
            answer = allocate_answer(raw)
            nodes = {path: self._devices.nodes(path) for path in host_paths(answer)}
            edits = edits_of(answer, nodes, restricted=self._rights is not None)
        except (BadAnswerError, TooManyNodesError) as error:
            problem = f"answered Allocate {error}; this is a fault of the device plugin"
        else:
            problem = None if self._rights is None else self._rights.edits_problem(edits)
            if problem is None:
                return edits, lost_annotations(answer)
        raise DeviceFailedError(f"{self._plugin} {problem}", index=0)


# ------------------------------------------------------------ an answer


def allocate_answer(raw: bytes) -> pb.ContainerAllocateResponse:
    """Parse the answer for the one container in an AllocateResponse; raises
    :class:`BadAnswerError`."""
    if len(raw) > MAX_ANSWER_BYTES:
        raise BadAnswerError(f"with more than {MAX_ANSWER_BYTES // 1024} KiB")
    try:
        answers = parse(pb.AllocateResponse, raw).container_responses
    except GarbageError as error:
        raise BadAnswerError(f"with {error}") from None
    if len(answers) != 1:
        number = "more than 1 container_response" if answers else "no container_response"
        raise BadAnswerError(f"with {number} for 1 request")
    return answers[0]


def host_paths(answer: pb.ContainerAllocateResponse) -> list[str]:
    """Return the host paths of an answer's device nodes, each once. Raises
    :class:`BadAnswerError`."""
    kinds = (answer.envs, answer.mounts, answer.devices, cdi_names(answer))
    if any(len(kind) > MAX_PARTS for kind in kinds):
        raise BadAnswerError(f"with more than {MAX_PARTS} entries of one kind")
    return list(dict.fromkeys(_host_path(device) for device in answer.devices))


def edits_of(
    answer: pb.ContainerAllocateResponse, nodes_of: NodesOf, *, restricted: bool = False
) -> Edits:
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
            text = f"with more than {MAX_PARTS} device nodes, with those in directories"
            raise BadAnswerError(text)
    return tuple(nodes.values())


def _mounts(mounts: Iterable[pb.Mount], *, read_only: str) -> tuple[Mount, ...]:
    made: dict[str, Mount] = {}
    for mount in mounts:
        # As runtimes mount for the kubelet. Neither nosuid nor nodev: plugins also mount
        # directories with device nodes and programs.
        access = read_only if mount.read_only else "rw"
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
    """Return each letter once; None stands for all of them."""
    return "".join(dict.fromkeys(device.permissions)) or None
