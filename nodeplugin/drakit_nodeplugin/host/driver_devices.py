"""
The devices of one hosted driver, put together: manager, publisher, and who is told of what.

The manager hears from the endpoint and never calls it; the publisher hears from the manager. What
the two have to say to people becomes log lines, Events of the Node, and metrics.

It must not know how any of the parts does its work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace

from drakit_nodeplugin.claims.checkpoint.store import Checkpoint, CheckpointError
from drakit_nodeplugin.devices.hardware import HeldDevice
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.devices.taints import UNHEALTHY
from drakit_nodeplugin.endpoints.traits import DriverTraits
from drakit_nodeplugin.host.environment import Environment
from drakit_nodeplugin.host.node_events import NodeEvents
from drakit_nodeplugin.metrics import DriverMetrics
from drakit_nodeplugin.slices.publisher import SlicePublisher
from drakit_nodeplugin.slices.stored_slices import StoredSlice, published_taints

__all__ = ("HostedDevices",)

logger = logging.getLogger(__name__)

UNPREPARING_ROUNDS = 5
"""A second each, between two looks for devices that are still being unprepared; what is at both is
tainted. An unprepare that goes well takes milliseconds, and is not worth a write."""


class HostedDevices:
    """What a driver has, as its manager and publisher see it."""

    def __init__(
        self,
        driver: str,
        *,
        traits: DriverTraits,
        checkpoint: Checkpoint,
        environment: Environment,
        events: NodeEvents,
        metrics: DriverMetrics,
        expected: Collection[str],
        primary: asyncio.Event,
        registered: Callable[[], bool],
    ) -> None:
        self.driver = driver
        self._checkpoint = checkpoint
        self._events = events
        self._metrics = metrics
        self._registered = registered
        self._has_health = traits.health
        self._unpreparing: frozenset[tuple[str, str]] = frozenset()
        self._looks = environment.looks
        self._watch = checkpoint.watch()
        self.manager = DeviceManager(
            driver,
            node=environment.node.name,
            endpoints=expected,
            settings=environment.config.devices,
            store=checkpoint,
            primary=primary,
            sources_ready=self._sources_ready,
            on_left_out=self._left_out,
        )
        self._publisher = SlicePublisher(
            source=self.manager,
            session=environment.session,
            node=environment.node.name,
            primary=primary,
            on_first_list=self.adopt,
            on_pools=self.manager.observe_published,
            on_left_out=self._left_out,
            on_dropped=self._dropped,
            on_write=metrics.wrote_slice,
        )

    async def restore(self) -> None:
        """Take over what an earlier process has left, before anything is published."""
        await self.manager.restore()
        try:
            held = await self._checkpoint.held_beside_unpreparing()
        except CheckpointError:
            return  # readiness says so
        # An unprepare that the former process began has been pending for at least a restart.
        self._unpreparing = _unpreparing(held)
        self.manager.set_unpreparing(held)

    def adopt(self, slices: Collection[StoredSlice]) -> None:
        """Take over how devices were tainted before a restart; but without a source of health
        nobody would ever say of those that were unhealthy that they are well again."""
        self.manager.adopt(
            {
                device: {
                    (key, effect): added_at
                    for (key, effect), added_at in taints.items()
                    if self._has_health or key != UNHEALTHY
                }
                for device, taints in published_taints(slices).items()
            }
        )

    def parts(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """Give what runs until the daemon stops, by name."""
        return {
            "devices": self.manager.run,
            "slices": self._publisher.run,
            "unpreparing": self._watch_unpreparing,
        }

    async def measure(self) -> None:
        """Bring the gauges up to date."""
        metrics = self._metrics
        metrics.slices_failing.set(self._publisher.last_error is not None)
        metrics.slice_fields_dropped.set(bool(self._publisher.dropped))
        metrics.devices_left_out.set(self.manager.left_out_count + len(self._publisher.left_out))
        try:
            allocated = await self._checkpoint.held_devices()
        except CheckpointError:
            return  # another gauge says so
        capacity = self.manager.capacity(allocated)
        pools = capacity.pools.values()
        metrics.devices(
            healthy=sum(len(pool.healthy) for pool in pools),
            unhealthy=sum(len(pool.unhealthy) for pool in pools),
            allocated=sum(len(pool.allocated) for pool in pools),
        )
        metrics.pools_inactive.set(len(capacity.inactive))

    def _sources_ready(self) -> bool:
        """Tell whether a device that is missing is really gone: nothing is removed before."""
        return self._publisher.listed and self._registered()

    def _left_out(self, devices: Mapping[str, str]) -> None:
        for name, problem in devices.items():
            self._events.tell(
                reason="DeviceLeftOut",
                action="Publish",
                note=f"driver {self.driver}: device {name} is not published: {problem}",
            )

    def _dropped(self, note: str) -> None:
        self._events.tell(
            reason="FieldsDropped", action="Publish", note=f"driver {self.driver}: {note}"
        )

    async def _watch_unpreparing(self) -> None:
        while True:
            await self._looks.until(
                lambda: self._watch.changed() or bool(self._unpreparing), rounds=UNPREPARING_ROUNDS
            )
            try:
                held = await self._checkpoint.held_beside_unpreparing()
            except CheckpointError:
                continue
            before, self._unpreparing = self._unpreparing, _unpreparing(held)
            lasting = before & self._unpreparing
            self.manager.set_unpreparing(
                [replace(d, unpreparing=(d.pool, d.device) in lasting) for d in held]
            )


def _unpreparing(held: Collection[HeldDevice]) -> frozenset[tuple[str, str]]:
    return frozenset((each.pool, each.device) for each in held if each.unpreparing)
