"""
The devices of one hosted driver: the device manager, the publisher, and the data that both need.

The module emits Events about the Node for stopped endpoints, rejected devices, conflicting slice
names, and fields that the API server drops. If an unprepare does not end, the hardware that its
claim holds gets a taint. :mod:`.active_driver` assembles the other parts of a driver.

A driver with policies must know which devices claims hold before it lists any. Otherwise, a held
device could be published as free, under a different name. Until the checkpoint is readable and
complete, the driver's endpoint waits, and the driver's slices remain unchanged.

Does not depend on endpoints.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace

from drakit.device import ClaimReference, HeldNode
from drakit.device import HeldDevice as DriverHeldDevice
from drakit_daemon.logs import ProblemLog
from drakit_driver.runtime.contract import DriverTraits
from drakit_driver.runtime.policies import PolicyFeed
from drakit_formats.resource.nodes import device_place, short_pool
from drakit_nodeplugin.devices.counts import DeviceCounts, count_devices
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.devices.model import EndpointStop
from drakit_nodeplugin.host.node import Environment, NodeEvents
from drakit_nodeplugin.metrics import DriverMetrics
from drakit_nodeplugin.slices.publisher import SlicePublisher
from drakit_nodeplugin.state.checkpoint import Checkpoint, CheckpointError
from drakit_nodeplugin.state.holds import HeldDevice
from drakit_nodeplugin.state.records import StoredDevice, StoredNode

logger = logging.getLogger(__name__)

UNPREPARING_SECONDS = 5.0
"""Time between two checks for devices that are still being unprepared. A device found by two
consecutive checks gets a taint. A normal unprepare takes milliseconds and does not require a
taint."""

UNKNOWN_SECONDS = 1.0
"""Time between two attempts to read the claim holds while these are unknown."""


class DriverDevices:
    """The devices of a hosted driver: the manager, the publisher, and the watch for pending
    unprepares."""

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
        registered: asyncio.Event,
        policies: PolicyFeed | None = None,
    ) -> None:
        """Create the parts. `registered` is set once the kubelet has registered the driver.
        `policies` is the feed that gets the devices that claims hold, or None if the driver does
        not need them."""
        self._driver = driver
        self._node = environment.node.name
        self._checkpoint = checkpoint
        self._boot_id = environment.boot_id
        self._events = events
        self._metrics = metrics
        self._registered = registered
        self._policies = policies
        self._maintenance = environment.maintenance
        self.holds_known = asyncio.Event()
        """Set once the claim holds have been read since the start, so that the driver can list its
        devices."""
        if policies is None:
            self.holds_known.set()
        self._waiting = ProblemLog(
            logger,
            "driver waits: the devices that claims hold are unknown",
            recovered="the devices that claims hold are known",
            facts={"driver": driver},
        )
        self._seen = checkpoint.revision.number
        """The revision of the claim rows at the last read."""
        self._is_outdated = False
        """Whether the last read of the claims failed."""
        self._unpreparing: frozenset[tuple[str, str]] | None = None
        """Devices that were being unprepared at the last check. None before the first check."""
        self.manager = DeviceManager(
            driver,
            node=self._node,
            endpoints=expected,
            settings=environment.config.devices,
            store=checkpoint,
            reports_health=traits.health,
            on_rejected=self._rejected,
        )
        self.manager.set_maintenance(self._maintenance.devices(driver))
        self.publisher = SlicePublisher(
            manager=self.manager,
            session=environment.session,
            node=self._node,
            on_rejected=self._rejected,
            on_name_taken=self._name_taken,
            on_dropped=self._dropped,
            on_write=metrics.wrote_slice,
        )

    async def restore(self) -> None:
        """Restore the state of an earlier process, before anything is published."""
        await self.manager.restore()
        await self._follow_claims()

    def parts(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """Return the parts that run until the driver is closed, keyed by name."""
        return {
            "devices": self.manager.run,
            "slices": self._publish,
            "unpreparing": self._watch_unpreparing,
            "stops": self._report_stops,
            "devices in maintenance": self._follow_maintenance,
        }

    async def measure(self) -> None:
        """Update the gauges."""
        self._metrics.set(
            slices_failing=self.publisher.last_error is not None,
            slice_fields_dropped=bool(self.publisher.dropped),
            rejected_devices=self.manager.rejected_count + len(self.publisher.rejected),
        )
        try:
            counts = await self.counts()
        except CheckpointError:
            return  # the gauge checkpoint_unusable shows the problem
        self._metrics.set_devices(counts)
        self._metrics.set(pools_inactive=len(self.manager.capacity().inactive))

    async def counts(self) -> Mapping[str, DeviceCounts]:
        """Count the devices by pool. Raises CheckpointError."""
        held = await self._checkpoint.devices_in_use()
        return count_devices(self.manager.capacity(), held, self.manager.hardware())

    async def _publish(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.publisher.run())
            group.create_task(self._await_sources())

    async def _await_sources(self) -> None:
        """Notify the manager once endpoints that are still missing can be treated as gone. Until
        then, nothing is removed."""
        await self.publisher.listed.wait()
        await self._registered.wait()
        self.manager.set_sources_ready()

    async def _follow_maintenance(self) -> None:
        while True:
            seen = self._maintenance.revision.number
            self.manager.set_maintenance(self._maintenance.devices(self._driver))
            await self._maintenance.revision.after(seen)

    async def _report_stops(self) -> None:
        """Report stopped endpoints in Events. The log already contains them."""
        reported: dict[str, EndpointStop] = {}
        while True:
            seen = self.manager.stop_changes.number
            for stop in self.manager.stops:
                if reported.get(stop.endpoint) is not stop:
                    reported[stop.endpoint] = stop
                    self._report_stop(stop)
            await self.manager.stop_changes.after(seen)

    def _report_stop(self, stop: EndpointStop) -> None:
        which = "" if stop.endpoint == self._driver else f", {stop.endpoint}"
        self._metrics.diagnosed("EndpointStopped")
        self._events.emit(
            reason="EndpointStopped",
            action="Connect",
            note=f"driver {self._driver}{which} is unavailable: {stop.reason}; new pods do not get "
            f"its devices",
        )

    def _rejected(self, devices: Mapping[str, str]) -> None:
        for name, problem in devices.items():
            self._events.emit(
                reason="DeviceRejected",
                action="Publish",
                note=f"driver {self._driver}: device {name} is not published: {problem}",
            )

    def _name_taken(self, note: str) -> None:
        self._events.emit(reason="SliceNameTaken", action="Publish", note=note)

    def _dropped(self, note: str) -> None:
        self._events.emit(
            reason="FieldsDropped", action="Publish", note=f"driver {self._driver}: {note}"
        )

    async def _watch_unpreparing(self) -> None:
        while True:
            if not self._is_outdated and not self._unpreparing:
                await self._checkpoint.revision.after(self._seen)
            known = self.holds_known.is_set()
            await asyncio.sleep(UNPREPARING_SECONDS if known else UNKNOWN_SECONDS)
            await self._follow_claims()

    async def _follow_claims(self) -> None:
        """Pass the devices that claims hold to the manager and the policies. If these are currently
        unknown, the previous ones remain in effect."""
        self._seen = self._checkpoint.revision.number
        try:
            held = await self._checkpoint.held_beside_unpreparing()
            if self._checkpoint.damage is None:
                self.manager.set_in_use(await self._checkpoint.devices_in_use())
            if self._policies is not None:
                await self._pass_held(self._policies)
        except CheckpointError as error:
            self._is_outdated = True
            if self._policies is not None:
                self._policies.unreadable()
            if not self.holds_known.is_set():
                self._waiting.report(str(error))
                self.manager.wait(f"the devices that claims hold are unknown: {error}")
            return
        self._is_outdated = False
        before, self._unpreparing = self._unpreparing, _unpreparing(held)
        # At the first check, an unprepare began in an earlier process, so it has already been
        # pending for long enough.
        lasting = self._unpreparing if before is None else before & self._unpreparing
        self.manager.set_unpreparing(
            [replace(d, unpreparing=(d.pool, d.device) in lasting) for d in held]
        )

    async def _pass_held(self, policies: PolicyFeed) -> None:
        claims_of_devices = await self._checkpoint.claims_of_devices()
        if (damage := self._checkpoint.damage) is not None:
            path = self._checkpoint.path
            raise CheckpointError(f"the checkpoint {path} is being rebuilt: {damage}")
        of_this_boot = await self._checkpoint.uids(boot_id=self._boot_id)
        policies.stored(
            {
                device_place(short_pool(self._node, pool), device): {
                    claim: _held_device(claim, results, has_numbers=claim.uid in of_this_boot)
                    for claim, results in claims.items()
                }
                for (pool, device), claims in claims_of_devices.items()
            }
        )
        if self.holds_known.is_set():
            return
        # The store must be read first, because it contains the names of devices that vanished since
        # the last start.
        if not await self.manager.restore():
            raise CheckpointError("the names of the driver's former devices cannot be read")
        self.holds_known.set()
        self._waiting.report(None)
        self.manager.wait(None)


def _held_device(
    claim: ClaimReference, results: Iterable[StoredDevice], *, has_numbers: bool
) -> DriverHeldDevice:
    held = [each for each in results if each.hold != "admin"]
    return DriverHeldDevice(
        claims=(claim,),
        nodes=tuple(
            _held_node(node, has_number=has_numbers)
            for each in held
            for node in each.nodes
            if node.identity
        ),
        shares=tuple(each.consumed_capacity for each in held if each.hold == "share"),
    )


def _held_node(node: StoredNode, *, has_number: bool) -> HeldNode:
    """Return a device node in the form that the driver receives. Numbers from an earlier boot are
    omitted, because they are meaningless."""
    return HeldNode(
        type=node.type,
        major=node.major if has_number else None,
        minor=node.minor if has_number else None,
        identity=node.identity,
        current=node.current,
    )


def _unpreparing(held: Collection[HeldDevice]) -> frozenset[tuple[str, str]]:
    return frozenset((each.pool, each.device) for each in held if each.unpreparing)
