"""
The driver: scans the host after each reported change, periodically, and for each claim.

A claim is prepared from a new scan, never from the last one: in between a stick may have been
replugged under another number, a disk mounted, or another disk plugged in under the same path. A
disk's name contains its identity, so a lookup cannot return another disk under that name.

It must not know the rules that find, name or describe devices.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from inspect import isawaitable
from typing import ClassVar

from drakit import (
    AllocatedClaim,
    AllocatedDevice,
    ClaimReference,
    Device,
    Driver,
    DriverError,
    Edits,
    Inventory,
    Node,
    NoParameters,
    Policy,
    PolicyResource,
)
from drakit_drivers.hostdev.attributes import attributes, capacity
from drakit_drivers.hostdev.config import HostDevicesConfig
from drakit_drivers.hostdev.container import container_edits, shared_path
from drakit_drivers.hostdev.events import HostEvents
from drakit_drivers.hostdev.host import Host, Scan
from drakit_drivers.hostdev.policy import HostDevicePolicySpec
from drakit_drivers.hostdev.reports import Diagnostic, diagnostics, left_out, outcomes
from drakit_drivers.hostdev.selection import (
    HostPolicy,
    Published,
    Selection,
    policies_of_node,
)

__all__ = ("HostDevices",)

logger = logging.getLogger(__name__)

_FIRST_LABELS_SECONDS = 0.1
"""Polling interval for the node's labels at the start. They arrive with the API session."""

_LABELS_SECONDS = 1.0
"""Polling interval for changed labels. A policy with a node selector should not wait for a
rescan."""

_SETTLE_SECONDS = 0.1
"""Time from an event to the scan. A device with several nodes causes several events."""

_BETWEEN_SCANS_SECONDS = 0.5
"""Minimum time from one scan to the next. It bounds the scans during a burst of events."""

_OLDEST = datetime.min.replace(tzinfo=UTC)


class HostDevices(Driver[HostDevicesConfig, NoParameters, HostDevicePolicySpec]):
    """
    Publishes devices of the host according to policies: those of its config and of the cluster.
    """

    name: ClassVar[str] = "hostdev.drakit.dev"
    side_effects: ClassVar[bool] = False
    can_wipe: ClassVar[bool] = False
    """Whether it can wipe disks."""

    policy_resource: ClassVar[PolicyResource | None] = PolicyResource(
        group="drakit.dev", version="v1alpha1", plural="hostdevicepolicies"
    )

    def __init__(self, config: HostDevicesConfig, node: Node) -> None:
        super().__init__(config, node)
        self._host = Host(config, can_wipe=self.can_wipe)
        self._host.check()
        self._own = {
            name: Policy(name=name, created=_OLDEST, generation=0, spec=spec)
            for name, spec in config.policies.items()
        }
        self._policies: dict[str, HostPolicy] = dict(self._own)
        self._names: Mapping[str, str] = {}
        self._reported = frozenset[Diagnostic]()
        self._events: HostEvents | None = None

    def apply_policies(self, policies: Mapping[str, HostPolicy]) -> None:
        self._policies = {**policies, **self._own}
        if self._events:
            self._events.notify()

    async def devices(self) -> AsyncIterator[Inventory]:
        last: Inventory | None = None
        await self._labels_known()
        events = HostEvents(udev_root=self.config.udev_root, subsystems=self._subsystems)
        with closing(events):
            events.open()
            self._events = events
            while True:
                events.acknowledge()
                labels = self.node.labels
                current = await self._inventory(labels)
                if current != last:
                    last = current
                    yield current
                await self._pause(events, labels)
                events.watch_udev()

    async def _inventory(self, labels: Mapping[str, str] | None) -> Inventory:
        policies = policies_of_node(self._policies.values(), labels)
        scan = await asyncio.to_thread(
            self._host.scan, policies, before=self._names, held=self.held_devices()
        )
        selection = scan.selection
        self._names = selection.names
        self._report(scan)
        fallback = None
        if selection.copies:
            whole = [each for each in selection.devices.values() if not _is_shared(each)]
            fallback = [
                *(_described(each) for each in whole),
                *(_described(each, is_copy=True) for each in selection.copies.values()),
            ]
        return Inventory(
            devices=[_described(each) for each in selection.devices.values()],
            fallback=fallback,
            left_out=left_out(scan),
            policies=outcomes(policies, scan),
        )

    async def prepare(self, claim: ClaimReference, device: AllocatedDevice[NoParameters]) -> Edits:
        return await asyncio.to_thread(self._prepare, device)

    def _prepare(self, device: AllocatedDevice[NoParameters]) -> Edits:
        published = self.find(device.name)
        edits = container_edits(
            published.spec.container, published.hosts, request=device.request, device=device.name
        )
        self.lend(published)
        return edits

    async def prepare_claims(
        self, claims: Sequence[AllocatedClaim[NoParameters]]
    ) -> Mapping[str, Sequence[Edits] | Exception]:
        answered = super().prepare_claims(claims)
        results = dict(await answered if isawaitable(answered) else answered)
        for uid, edits in results.items():
            problem = None if isinstance(edits, Exception) else shared_path(edits)
            if problem:
                results[uid] = DriverError(problem)
        return results

    def lend(self, published: Published) -> None:
        """Prepare the host for a claim of a device; the default does nothing. Blocks. Raises
        DriverError."""

    def find(self, name: str) -> Published:
        """Find a device in a new scan of the host. Blocks. Raises DriverError."""
        policies = policies_of_node(self._policies.values(), self.node.labels)
        selection = self._host.scan(
            policies, before=self._names, held=self.held_devices()
        ).selection
        found = selection.devices.get(name) or selection.copies.get(name)
        if found:
            return found
        if name in selection.refused:
            refused = selection.refused[name]
            raise DriverError(
                f"device {name} ({refused.published.host.path}) cannot be allocated to a pod: "
                f"{refused.refusal}; free it on node {self.node.name}, or delete the pod to get "
                "another device"
            )
        disks = _disks_beside(name, selection)
        instead = "".join(f"; {path} is now {other}" for path, other in sorted(disks.items()))
        raise DriverError(
            f"device {name} is no longer on node {self.node.name}{instead}; connect {name} again, "
            "or delete the pod to get another device"
        )

    async def _labels_known(self) -> None:
        """
        Wait for the node's labels if a policy has a node selector.

        Publishing without those policies first would remove their devices for a moment at every
        restart. Waiting costs nothing: without the API server nothing could be published.
        """
        if any(policy.spec.node_selector for policy in self._policies.values()):
            while self.node.labels is None:  # noqa: ASYNC110  (set from another thread)
                await asyncio.sleep(_FIRST_LABELS_SECONDS)

    async def _pause(self, events: HostEvents, labels: object) -> None:
        """Wait for the next scan: an event, other labels of the node, or the rescan interval."""
        left = self.config.rescan_interval.total_seconds()
        await asyncio.sleep(_BETWEEN_SCANS_SECONDS)
        left -= _BETWEEN_SCANS_SECONDS
        while left > 0 and self.node.labels == labels:
            if await events.wait(min(left, _LABELS_SECONDS)):
                await asyncio.sleep(_SETTLE_SECONDS)
                return
            left -= _LABELS_SECONDS

    def _subsystems(self) -> set[str]:
        return {m.subsystem for each in self._policies.values() for m in each.spec.match}

    def _report(self, scan: Scan) -> None:
        now = frozenset(diagnostics(scan))
        for diagnostic in now - self._reported:
            logger.log(diagnostic.level, diagnostic.message, extra=dict(diagnostic.facts))
        self._reported = now


def _is_shared(published: Published) -> bool:
    return published.spec.sharing.mode == "Capacity"


def _described(published: Published, *, is_copy: bool = False) -> Device:
    return Device(
        name=published.name,
        attributes=attributes(published),
        capacity=capacity(published, is_copy=is_copy),
        allow_multiple_allocations=_is_shared(published) and not is_copy,
        evict_if_gone=published.spec.on_vanish == "Evict",
    )


def _disks_beside(name: str, selection: Selection) -> dict[str, str]:
    """Return the disks of a device's policy, path to name: one may now have the device's path."""
    refused = (each.published for each in selection.refused.values())
    return {
        disk.host.path: disk.name
        for disk in (*selection.devices.values(), *refused)
        if disk.host.block and name.startswith(f"{disk.policy_name}-")
    }
