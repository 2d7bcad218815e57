"""
One hosted driver: its checkpoint, endpoint, engine, front door and slices, put together.

Start order: checkpoint, CDI files, driver, sockets; the API server is not waited for. Stop order is
the reverse, and the sockets drain first. Which drivers there are is :mod:`.app`'s business.

It must not know how any of the parts does its work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from drakit.driver import DriverError
from drakit.kube import Session
from drakit.kube.events import EventRecorder
from drakit_nodeplugin.claims.checkpoint import Checkpoint, CheckpointError
from drakit_nodeplugin.claims.engine import ClaimEngine
from drakit_nodeplugin.claims.parts import EngineParts
from drakit_nodeplugin.claims.recovery import Recovery
from drakit_nodeplugin.claims.restore import SpecRestorer
from drakit_nodeplugin.claims.source import ApiClaims
from drakit_nodeplugin.claims.specs import ClaimSpecs
from drakit_nodeplugin.config import ConfigError, NodePluginConfig
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.endpoints.loading import LoadedDriver
from drakit_nodeplugin.endpoints.python import PythonEndpoint
from drakit_nodeplugin.instances import RunningInstances, new_owner
from drakit_nodeplugin.kubelet.ownership import Ownership
from drakit_nodeplugin.kubelet.server import DriverServer
from drakit_nodeplugin.kubelet.sockets import SocketError, socket_paths
from drakit_nodeplugin.metrics import Metrics
from drakit_nodeplugin.node import PluginNode
from drakit_nodeplugin.slices.publisher import SlicePublisher

__all__ = ("Environment", "HostedDriver")

logger = logging.getLogger(__name__)

@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What all drivers of a process share."""

    config: NodePluginConfig
    node: PluginNode
    boot_id: str
    instance_uid: str
    session: asyncio.Future[Session]
    metrics: Metrics


class HostedDriver:
    """A driver and all that serves it."""

    def __init__(self, driver: LoadedDriver, environment: Environment) -> None:
        config = environment.config
        self.name = driver.name
        self._where = driver.where
        self._environment = environment
        self._checkpoint = Checkpoint(
            config.kubelet_root / "plugins" / driver.name / "checkpoint.db",
            owner=new_owner(environment.instance_uid),
        )
        self._specs = ClaimSpecs(driver.name, config.cdi_directory)
        self._manager = DeviceManager(driver.name)
        self._endpoint = PythonEndpoint(
            driver.name, driver.make, traits=driver.traits, listener=self._manager
        )
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
        self._engine = ClaimEngine(
            EngineParts(
                driver=driver.name,
                node=environment.node,
                boot_id=environment.boot_id,
                checkpoint=self._checkpoint,
                source=ApiClaims(environment.session),
                devices=self._endpoint,
                specs=self._specs,
                instances=self._instances,
            )
        )
        self._recovery = Recovery(checkpoint=self._checkpoint, engine=self._engine)
        self._restorer = SpecRestorer(
            checkpoint=self._checkpoint,
            specs=self._specs,
            boot_id=environment.boot_id,
            locks=self._engine.locks,
        )
        self._publisher = SlicePublisher(
            manager=self._manager,
            session=environment.session,
            node=environment.node.name,
            primary=self._instances.primary,
        )
        self._server = DriverServer(
            self._ownership,
            self._engine,
            drain_seconds=config.drain_timeout.total_seconds(),
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
        try:
            await self._specs.clean()
            await self._restorer.restore()
        except (OSError, CheckpointError) as error:
            # Claims can be unprepared all the same, and the restorer tries again.
            logger.error(
                "CDI files cannot be restored", extra={"driver": self.name, "error": str(error)}
            )
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
        return {
            f"{self.name} endpoint": self._endpoint.run,
            f"{self.name} server": self._server.run,
            f"{self.name} CDI files": self._restorer.run,
            f"{self.name} slices": self._publisher.run,
            f"{self.name} recovery": self._recovery.run,
            f"{self.name} instances": self._instances.run,
            f"{self.name} report": self._report,
        }

    async def stop(self) -> None:
        """Stop in reverse; each step is made whatever became of the ones before."""
        await asyncio.to_thread(self._ownership.leave_primary)
        for step in (self._server.stop, self._endpoint.close, self._checkpoint.close):
            try:
                await step()
            except Exception:
                logger.exception("a step of the stop failed", extra={"driver": self.name})

    # ------------------------------------------------------------ what probes and metrics ask

    async def dead(self) -> str | None:
        """Say why the process must be restarted: our own sockets do not answer, or the checkpoint
        was damaged since the start, which only a start can set aside."""
        return self._checkpoint.broken or await self._server.probe()

    def unready(self) -> str | None:
        """Say what keeps pods from getting devices."""
        if self._manager.stop_reason is not None:
            return f"the driver is stopped: {self._manager.stop_reason}"
        return self._server.status.unready()

    def measure(self) -> None:
        """Bring the gauges up to date."""
        metrics = self._environment.metrics
        metrics.devices.labels(self.name).set(len(self._manager.devices or ()))
        metrics.registered.labels(self.name).set(self._server.status.unready() is None)
        metrics.running.labels(self.name).set(self._manager.stop_reason is None)
        metrics.checkpoint_damaged.labels(self.name).set(self._checkpoint.damage is not None)
        metrics.slices_failing.labels(self.name).set(self._publisher.last_error is not None)

    # ------------------------------------------------------------ small background work

    async def _report(self) -> None:
        """Tell the cluster once that a damaged checkpoint was set aside."""
        if self._checkpoint.damage is not None:
            session = await asyncio.shield(self._environment.session)
            recorder = EventRecorder(
                session, controller="drakit.dev/nodeplugin", instance=self._environment.node.name
            )
            await recorder.record(
                regarding={"apiVersion": "v1", "kind": "Node", "name": self._environment.node.name},
                type="Warning",
                reason="CheckpointDamaged",
                action="SetAside",
                note=f"the checkpoint of driver {self.name} is damaged: {self._checkpoint.damage}; "
                f"pods that were prepared before should be deleted",
            )
        await asyncio.Event().wait()
