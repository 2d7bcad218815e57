"""
The container's view of a device: its device nodes, environment and mounts.

It must not know which devices are published, or where the host is mounted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from drakit import DeviceNode, DriverError, Edits, Mount
from drakit_drivers.hostdev.naming import hardware_identity
from drakit_drivers.hostdev.policy import Container
from drakit_drivers.hostdev.sysfs import HostDevice

__all__ = ("container_edits", "shared_path")


def container_edits(
    view: Container, hosts: Sequence[HostDevice], *, request: str, device: str
) -> Edits:
    """
    Return the edits for a device.

    The variable ``HOSTDEV_<REQUEST>__<DEVICE>`` has the paths of its nodes in the container,
    separated by colons. ``HOSTDEV_<REQUEST>`` is enough for an application that requests one device
    (of several it names one).
    """
    paths = [_container_path(view, host, index) for index, host in enumerate(hosts)]
    if len(set(paths)) < len(paths):
        raise DriverError(
            f"device {device} has {len(hosts)} device nodes, and container.path gives two of them "
            f"the path {max(paths, key=paths.count)}; write '*' in its last component"
        )
    nodes = [_node(view, host, path) for host, path in zip(hosts, paths, strict=True)]
    if view.by_id_links:
        nodes += [
            _node(view, host, link)
            for host in hosts
            for link in host.links
            if "/by-id/" in link and link not in paths
        ]
    # The request's own name, without the subrequest's: a program works with any alternative.
    variable = f"HOSTDEV_{_variable(request.partition('/')[0])}"
    value = ":".join(paths)
    return Edits(
        env={**view.env, variable: value, f"{variable}__{_variable(device)}": value},
        device_nodes=tuple(nodes),
        mounts=tuple(_mounts(view)),
    )


def shared_path(edits: Iterable[Edits]) -> str | None:
    """Return the problem if the devices of a claim have different nodes at one path: the runtime
    would silently give the container one of them."""
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


def _mounts(view: Container) -> Iterator[Mount]:
    for mount in view.mounts:
        yield Mount(
            host_path=mount.host_path, container_path=mount.container_path or mount.host_path
        )


def _variable(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", name.upper())
