"""
One hosted driver: its checkpoint, endpoint, engine, front door and slices, put together.

Start order: checkpoint, CDI files, driver, sockets; the API server is not waited for. Stop order is
the reverse, and the sockets drain first. Which drivers there are is :mod:`drakit_nodeplugin.app`'s
business, what looks after claims beside the kubelet's calls :mod:`.maintenance`'s.

It must not know how any of the parts does its work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from drakit.driver import DriverError
from drakit_nodeplugin.claims.allocation import ParameterLimits
from drakit_nodeplugin.claims.cdi_files import ClaimSpecs
from drakit_nodeplugin.claims.checkpoint.records import STATES
from drakit_nodeplugin.claims.checkpoint.store import Checkpoint, CheckpointError
from drakit_nodeplugin.claims.engine import ClaimEngine
from drakit_nodeplugin.claims.events import AnnouncedClaims, ClaimAnnouncer
from drakit_nodeplugin.claims.parts import EngineParts
from drakit_nodeplugin.claims.source import ApiClaims
from drakit_nodeplugin.config import ConfigError
from drakit_nodeplugin.endpoints.endpoint import Diagnostic, EndpointListener, Surroundings
from drakit_nodeplugin.endpoints.source import DriverSource
from drakit_nodeplugin.host.driver_devices import HostedDevices
from drakit_nodeplugin.host.environment import Environment
from drakit_nodeplugin.host.instances import RunningInstances, new_owner
from drakit_nodeplugin.host.maintenance import Upkeep
from drakit_nodeplugin.host.node_events import NodeEvents
from drakit_nodeplugin.kubelet.ownership import Ownership
from drakit_nodeplugin.kubelet.server import DriverServer
from drakit_nodeplugin.kubelet.sockets import SocketError, socket_paths
from drakit_nodeplugin.metrics import MeteredClaims, MeteredSource

__all__ = ("HostedDriver",)

logger = logging.getLogger(__name__)


class HostedDriver:
    """A driver and all that serves it."""

    def __init__(self, driver: DriverSource, environment: Environment) -> None:
        """Raises :class:`SocketError` if no path of a socket fits."""
        config = environment.config
        self.name = driver.name
        self._where = driver.where
        self._foreign = driver.foreign
        self._looks = environment.looks
        self._metrics = environment.metrics.for_driver(driver.name)
        self._ownership = Ownership(
            driver.name,
            socket_paths(
                driver.name,
                kubelet_root=config.kubelet_root,
                instance_uid=environment.instance_uid,
            ),
        )
        self._instances = RunningInstances(
            driver.name, self._ownership, instance_uid=environment.instance_uid
        )
        specs = ClaimSpecs(driver.name, config.cdi_directory)
        self._checkpoint = Checkpoint(
            config.drivers_directory / driver.name / "checkpoint.db",
            owner=new_owner(environment.instance_uid),
            traces=specs.traces,
        )
        self._checkpoint.on_transaction = self._metrics.transaction
        self._events = NodeEvents(environment.node.name, environment.session)
        self._devices = HostedDevices(
            driver.name,
            traits=driver.traits,
            checkpoint=self._checkpoint,
            environment=environment,
            events=self._events,
            metrics=self._metrics,
            expected=driver.expected,
            primary=self._instances.primary,
            registered=self._registered,
        )
        self._instances.on_change = self._devices.manager.wake
        self._endpoint = driver.endpoint(
            Surroundings(
                listener=_Announcing(self._devices.manager, self._stopped),
                node=environment.node.name,
                primary=self._instances.primary,
                remark=self._remark,
            )
        )
        parts = EngineParts(
            driver=driver.name,
            node=environment.node,
            boot_id=environment.boot_id,
            checkpoint=self._checkpoint,
            source=MeteredSource(ApiClaims(environment.session), self._metrics),
            devices=self._endpoint,
            inventories=self._devices.manager,
            specs=specs,
            instances=self._instances,
            limits=ParameterLimits(
                max_bytes=config.opaque_parameters.max_bytes,
                max_nodes=config.opaque_parameters.max_nodes,
            ),
            name_all_holders=config.events.name_holders == "all",
        )
        engine = ClaimEngine(parts)
        announcer = ClaimAnnouncer(driver.name)
        self._server = DriverServer(
            self._ownership,
            MeteredClaims(AnnouncedClaims(engine, announcer), self._metrics),
            drain_seconds=config.drain_timeout.total_seconds(),
            health=self._devices.manager if driver.traits.health else None,
            health_timeout_seconds=config.devices.health.timeout,
        )
        self._upkeep = Upkeep(
            parts,
            engine=engine,
            announcer=announcer,
            events=self._events,
            environment=environment,
            metrics=self._metrics,
            primary=self._instances.primary.is_set,
            registered=self._registered,
        )

    async def start(self) -> None:
        """Start all that the kubelet needs; raise :class:`ConfigError` if the driver refuses."""
        try:
            await self._checkpoint.open()
        except CheckpointError as error:
            # It is served all the same: each claim gets this as its answer, which its user sees,
            # and once the cause is gone the checkpoint opens by itself.
            logger.error(
                "checkpoint cannot be used", extra={"driver": self.name, "error": str(error)}
            )
        await self._upkeep.begin()
        await self._devices.restore()
        try:
            await self._endpoint.start()
        except DriverError as error:
            raise ConfigError(f"{self._where}: {error}") from error
        try:
            await self._server.start()
            await self._instances.look()
        except (OSError, SocketError) as error:
            raise ConfigError(f"driver {self.name}: {error}") from error

    def parts(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """Give what runs until the daemon stops, by name."""
        looks = self._looks
        return {
            f"{self.name} endpoint": self._endpoint.run,
            f"{self.name} server": lambda: self._server.run(looks),
            f"{self.name} instances": lambda: self._instances.run(looks),
            f"{self.name} Events of the node": self._events.run,
            **{f"{self.name} {name}": part for name, part in self._devices.parts().items()},
            **{f"{self.name} {name}": part for name, part in self._upkeep.parts().items()},
        }

    async def stop(self) -> None:
        """Stop in reverse; each step is made whatever became of the ones before."""
        steps = (
            lambda: asyncio.to_thread(self._ownership.leave_primary),
            self._server.stop,
            self._endpoint.close,
            self._checkpoint.close,
            # Not before the driver has ended: what it still does is our work, and another instance
            # must see that somebody is at it.
            lambda: asyncio.to_thread(self._ownership.release),
        )
        for step in steps:
            try:
                await step()
            except Exception:
                logger.exception("a step of the stop failed", extra={"driver": self.name})

    async def stop_serving(self) -> None:
        """End what the kubelet calls; :meth:`stop` ends the rest."""
        await self._server.stop()

    async def idle(self) -> bool:
        """Tell whether nothing is known of the driver any more, neither devices nor claims, and
        no other instance serves it."""
        alone = self._instances.primary.is_set() and self._instances.alone()
        if not alone or self._devices.manager.known:
            return False
        try:
            return not any((await self._checkpoint.states()).values())
        except CheckpointError:
            return False

    # ------------------------------------------------------------ what probes and metrics ask

    async def dead(self) -> str | None:
        """Say why the process must be restarted: our own sockets do not answer, or the checkpoint
        was damaged since the start, which only a start can set aside."""
        return self._checkpoint.broken or await self._server.probe()

    def unready(self) -> str | None:
        """Say what keeps pods from getting devices."""
        if self._checkpoint.unusable is not None:
            return self._checkpoint.unusable
        reason = None if self._foreign else self._devices.manager.stop_reason
        if reason is not None:
            return f"the driver is stopped: {reason}"
        return self._server.status.unready()

    async def measure(self) -> None:
        """Bring the gauges up to date."""
        metrics = self._metrics
        metrics.registered.set(self._server.status.unready() is None)
        metrics.running.set(self._devices.manager.stop_reason is None)
        metrics.blocked.set(self._endpoint.blocked is not None)
        metrics.checkpoint_damaged.set(self._upkeep.damaged)
        metrics.checkpoint_unusable.set(self._checkpoint.unusable is not None)
        await self._devices.measure()
        try:
            counts = await self._checkpoint.states()
        except CheckpointError:
            return  # another gauge says so
        for state in STATES:
            metrics.entries(state, counts.get(state, 0))

    def _remark(self, remark: Diagnostic) -> None:
        logger.warning(
            "endpoint needs attention",
            extra={"driver": self.name, "reason": remark.reason, "note": remark.note},
        )
        self._announce(remark)

    def _stopped(self, endpoint: str, reason: str) -> None:
        """An endpoint is away; the log says so already."""
        which = "" if endpoint == self.name else f", {endpoint}"
        note = f"driver {self.name}{which} is stopped: {reason}; its devices get no new pods"
        self._announce(Diagnostic(reason="EndpointStopped", note=note))

    def _announce(self, remark: Diagnostic) -> None:
        self._metrics.remarked(remark.reason)
        self._events.tell(reason=remark.reason, action="Connect", note=remark.note)

    def _registered(self) -> bool:
        return self._server.status.registered_at is not None


class _Announcing:
    """An :class:`.EndpointListener` that tells people of stops, and passes all on to another."""

    def __init__(self, listener: EndpointListener, on_stopped: Callable[[str, str], None]) -> None:
        self._listener = listener
        self._on_stopped = on_stopped
        self.replaced = listener.replaced
        self.reported = listener.reported

    def stopped(self, endpoint: str, reason: str) -> None:
        self._listener.stopped(endpoint, reason)
        self._on_stopped(endpoint, reason)
