"""
The driver: looks at the host every few seconds, and again for each claim.

A claim is prepared from a fresh look, never from the last scan: in between a stick may have been
replugged under another number, a disk mounted, or another disk plugged in under the same path. A
disk's name contains its identity, so a lookup cannot return another disk under that name.

It must not know how devices are found, named or described.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Collection
from typing import ClassVar

from drakit import (
    AllocatedDevice,
    ClaimReference,
    Device,
    DeviceNode,
    Driver,
    DriverError,
    Edits,
    Node,
    NoParameters,
)
from drakit_drivers.hostdev.attributes import attributes, capacity
from drakit_drivers.hostdev.config import HostDevicesConfig
from drakit_drivers.hostdev.host import Host, Look
from drakit_drivers.hostdev.remarks import Diagnostic, remarks
from drakit_drivers.hostdev.selection import Published, Selection, policies_of_node

__all__ = ("HostDevices",)

logger = logging.getLogger(__name__)

_FIRST_LABELS_SECONDS = 0.1
"""How often the node's labels are looked for at the start: they come with the API session."""

_LABELS_SECONDS = 1.0
"""How often they are compared later: a policy that asks for them should not wait out a rescan."""


class HostDevices(Driver[HostDevicesConfig, NoParameters]):
    """
    Publishes device nodes of the host as its config's policies say.

    A container gets the node at its path on the host, and environment variables with that path:
    ``HOSTDEV_<REQUEST>__<DEVICE>`` for each device, and ``HOSTDEV_<REQUEST>``, which is all that
    an application needs whose request asks for one device (of several it names one).
    """

    name: ClassVar[str] = "hostdev.drakit.dev"
    side_effects: ClassVar[bool] = False

    def __init__(self, config: HostDevicesConfig, node: Node) -> None:
        super().__init__(config, node)
        self._host = Host(config)
        self._host.check()
        self._told = frozenset[Diagnostic]()

    async def devices(self) -> AsyncIterator[Collection[Device]]:
        last: list[Device] | None = None
        await self._labels_known()
        while True:
            labels = self.node.labels
            policies = policies_of_node(self.config.enabled_policies, labels)
            look = await asyncio.to_thread(self._host.look, policies)
            self._tell(look)
            current = [_described(published) for published in look.selection.devices.values()]
            if current != last:
                last = current
                yield current
            await self._pause(labels)

    async def prepare(self, claim: ClaimReference, device: AllocatedDevice[NoParameters]) -> Edits:
        published = await asyncio.to_thread(self._find, device.name)
        host, policy = published.host, published.policy
        node = DeviceNode(
            path=host.path,
            type=host.type,
            major=host.major,
            minor=host.minor,
            permissions=policy.permissions,
            file_mode=policy.mode,
            uid=policy.uid,
            gid=policy.gid,
        )
        return Edits(env=_environment(device, path=host.path), device_nodes=(node,))

    def _find(self, name: str) -> Published:
        """Find a device as a new scan of the host has it."""
        policies = policies_of_node(self.config.enabled_policies, self.node.labels)
        selection = self._host.look(policies).selection
        if name in selection.devices:
            return selection.devices[name]
        if name in selection.refused:
            refused = selection.refused[name]
            raise DriverError(
                f"device {name} ({refused.published.host.path}) cannot be given to a pod: "
                f"{refused.reason}; release it on node {self.node.name}, or delete the pod so "
                "that another device is found for it"
            )
        disks = _disks_beside(name, selection)
        instead = "".join(f"; {path} is {other}" for path, other in sorted(disks.items()))
        raise DriverError(
            f"device {name} is not on node {self.node.name} any more{instead}: plug it in again, "
            "or delete the pod so that another device is found for it"
        )

    async def _labels_known(self) -> None:
        """
        Wait for the node's labels if a policy asks for them.

        Publishing without those policies first would take their devices away for a moment at every
        restart. Nothing is lost: without the API server nothing could be published.
        """
        if any(policy.node_selector for policy in self.config.enabled_policies.values()):
            while self.node.labels is None:  # noqa: ASYNC110  (set from another thread)
                await asyncio.sleep(_FIRST_LABELS_SECONDS)

    async def _pause(self, labels: object) -> None:
        left = self.config.rescan_interval.total_seconds()
        while left > 0 and self.node.labels == labels:
            await asyncio.sleep(min(left, _LABELS_SECONDS))
            left -= _LABELS_SECONDS

    def _tell(self, look: Look) -> None:
        now = frozenset(remarks(look))
        for remark in now - self._told:
            logger.log(remark.level, remark.message, extra=dict(remark.facts))
        self._told = now


def _described(published: Published) -> Device:
    return Device(
        name=published.name,
        attributes=attributes(published.host, policy=published.policy_name),
        capacity=capacity(published.host),
    )


def _disks_beside(name: str, selection: Selection) -> dict[str, str]:
    """Return the disks of a device's policy, path to name: one may now have the device's path."""
    refused = (each.published for each in selection.refused.values())
    return {
        disk.host.path: disk.name
        for disk in (*selection.devices.values(), *refused)
        if disk.host.block and name.startswith(f"{disk.policy_name}-")
    }


def _environment(device: AllocatedDevice[NoParameters], *, path: str) -> dict[str, str]:
    # Of a subrequest the request's own name: which alternative it got is nothing to a program.
    request = _variable(device.request.partition("/")[0])
    return {
        f"HOSTDEV_{request}": path,
        f"HOSTDEV_{request}__{_variable(device.name)}": path,
    }


def _variable(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", name.upper())
