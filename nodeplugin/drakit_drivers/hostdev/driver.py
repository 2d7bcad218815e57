"""
The driver: scans the host every few seconds, and again for each claim.

A claim is prepared from a new scan, never from the last one: in between a stick may have been
replugged under another number, a disk mounted, or another disk plugged in under the same path. A
disk's name contains its identity, so a lookup cannot return another disk under that name.

It must not know how devices are found, named or described.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass
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
from drakit_drivers.hostdev.attributes import attributes, capacity, left_out
from drakit_drivers.hostdev.config import HostDevicesConfig
from drakit_drivers.hostdev.host import Host, Scan
from drakit_drivers.hostdev.selection import Published, Selection, policies_of_node

__all__ = ("HostDevices",)

logger = logging.getLogger(__name__)

_FIRST_LABELS_SECONDS = 0.1
"""How often to poll for the node's labels at the start: they come with the API session."""

_LABELS_SECONDS = 1.0
"""How often to compare them later: a policy with a node selector should not wait for a rescan."""


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """A log line. Equal diagnostics are one: a rescan without a change logs nothing."""

    level: int
    message: str
    facts: tuple[tuple[str, str], ...]


class HostDevices(Driver[HostDevicesConfig, NoParameters]):
    """
    Publishes device nodes of the host according to its config's policies.

    A container gets the node at its path on the host, and environment variables with that path:
    ``HOSTDEV_<REQUEST>__<DEVICE>`` for each device, and ``HOSTDEV_<REQUEST>``, which is enough for
    an application that requests one device (of several it names one).
    """

    name: ClassVar[str] = "hostdev.drakit.dev"
    side_effects: ClassVar[bool] = False

    def __init__(self, config: HostDevicesConfig, node: Node) -> None:
        super().__init__(config, node)
        self._host = Host(config)
        self._host.check()
        self._reported = frozenset[Diagnostic]()

    async def devices(self) -> AsyncIterator[Collection[Device]]:
        last: list[Device] | None = None
        await self._labels_known()
        while True:
            labels = self.node.labels
            policies = policies_of_node(self.config.enabled_policies, labels)
            scan = await asyncio.to_thread(self._host.scan, policies)
            self._report(scan)
            current = [_described(published) for published in scan.selection.devices.values()]
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
        """Find a device in a new scan of the host."""
        policies = policies_of_node(self.config.enabled_policies, self.node.labels)
        selection = self._host.scan(policies).selection
        if name in selection.devices:
            return selection.devices[name]
        if name in selection.refused:
            refused = selection.refused[name]
            raise DriverError(
                f"device {name} ({refused.published.host.path}) cannot be allocated to a pod: "
                f"{refused.reason}; free it on node {self.node.name}, or delete the pod to get "
                "another device"
            )
        disks = _disks_beside(name, selection)
        instead = "".join(f"; {path} is {other}" for path, other in sorted(disks.items()))
        raise DriverError(
            f"device {name} is not on node {self.node.name} any more{instead}: plug it in again, "
            "or delete the pod to get another device"
        )

    async def _labels_known(self) -> None:
        """
        Wait for the node's labels if a policy has a node selector.

        Publishing without those policies first would remove their devices for a moment at every
        restart. Waiting costs nothing: without the API server nothing could be published.
        """
        if any(policy.node_selector for policy in self.config.enabled_policies.values()):
            while self.node.labels is None:  # noqa: ASYNC110  (set from another thread)
                await asyncio.sleep(_FIRST_LABELS_SECONDS)

    async def _pause(self, labels: object) -> None:
        left = self.config.rescan_interval.total_seconds()
        while left > 0 and self.node.labels == labels:
            await asyncio.sleep(min(left, _LABELS_SECONDS))
            left -= _LABELS_SECONDS

    def _report(self, scan: Scan) -> None:
        now = frozenset(_diagnostics(scan))
        for diagnostic in now - self._reported:
            logger.log(diagnostic.level, diagnostic.message, extra=dict(diagnostic.facts))
        self._reported = now


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
    # The request's own name, without the subrequest's: a program works with any alternative.
    request = _variable(device.request.partition("/")[0])
    return {
        f"HOSTDEV_{request}": path,
        f"HOSTDEV_{request}__{_variable(device.name)}": path,
    }


def _variable(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", name.upper())


# ------------------------------------------------------------ diagnostics


def _diagnostics(scan: Scan) -> Iterator[Diagnostic]:
    """Report devices, or attributes, that are not published."""
    if scan.usage_unknown:
        yield _diagnostic(
            logging.WARNING, "no block device is published", reason=scan.usage_unknown
        )
    for place in scan.misplaced:
        yield _diagnostic(
            logging.WARNING,
            "path belongs to another subsystem than its policy",
            policy=place.policy,
            path=place.path,
            subsystem=place.subsystem,
        )
    for overlap in scan.selection.overlaps:
        yield _diagnostic(
            logging.WARNING,
            "two policies match a device, the first one applies",
            path=overlap.path,
            first=overlap.first,
            second=overlap.second,
        )
    for name, refused in scan.selection.refused.items():
        path, reason = refused.published.host.path, refused.reason
        yield _diagnostic(
            logging.INFO, "device is not published", device=name, path=path, reason=reason
        )
    for name, published in scan.selection.devices.items():
        too_long = left_out(published.host, policy=published.policy_name)
        if too_long:
            yield _diagnostic(
                # A path that no selector can match is worth more than a long product name.
                logging.WARNING if "path" in too_long else logging.DEBUG,
                "attributes are too long to publish",
                device=name,
                attributes=", ".join(too_long),
            )


def _diagnostic(level: int, message: str, **facts: str) -> Diagnostic:
    return Diagnostic(level, message, tuple(facts.items()))
