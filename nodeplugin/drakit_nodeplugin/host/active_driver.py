"""
One driver while this instance is active: its checkpoint, endpoint, devices, slices and engine, and
the maintenance of its claims between the kubelet's calls.

The object is created after the lock is taken, and closed before the lock is released. An instance
that becomes active again creates a new object, which starts from the checkpoint as after a restart.
The start order is checkpoint, CDI files, driver. No step waits for the API server. A driver with
policies lists its devices only once it is known which devices claims hold, but calls do not wait
for that. The endpoint reports to the device manager, which never calls the endpoint. The manager
notifies the publisher. Problems are reported in the log, in Events of the Node, and in metrics.

:mod:`.driver` decides when a driver is active.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial

from drakit.driver import DriverError
from drakit_driver.runtime.order import Order
from drakit_driver.runtime.policies import PolicyFeed
from drakit_nodeplugin.changes import FileWatch
from drakit_nodeplugin.claims.claim_status import ClaimStatuses
from drakit_nodeplugin.claims.events import ClaimEvents
from drakit_nodeplugin.claims.kubelet_claims import KubeletClaimView
from drakit_nodeplugin.claims.outdated import OutdatedClaims
from drakit_nodeplugin.claims.prepare import Preparing
from drakit_nodeplugin.claims.queue import ClaimQueue
from drakit_nodeplugin.claims.recovery import (
    TICK_SECONDS,
    OrphanRemover,
    Rebuilder,
    Recovery,
    SpecRestorer,
)
from drakit_nodeplugin.claims.source import ApiClaims
from drakit_nodeplugin.claims.stale import StaleCollector
from drakit_nodeplugin.claims.work import ClaimDependencies
from drakit_nodeplugin.config import ConfigError
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.endpoints.sources import Diagnostic, DriverSource, HostContext
from drakit_nodeplugin.host.driver_devices import DriverDevices
from drakit_nodeplugin.host.node import Environment, NodeEvents
from drakit_nodeplugin.host.policies import PolicyWatch
from drakit_nodeplugin.host.report import DriverReport, ReportSources
from drakit_nodeplugin.kubelet.server import Registration
from drakit_nodeplugin.metrics import DriverMetrics
from drakit_nodeplugin.state.cdi_files import ClaimSpecs
from drakit_nodeplugin.state.checkpoint import Checkpoint, CheckpointError
from drakit_nodeplugin.state.inspection import remove_request, requests
from drakit_nodeplugin.state.metadata_files import MetadataFiles
from drakit_nodeplugin.state.podresources import PodResourcesError

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- claim maintenance


class Maintenance:
    """The background work on the claims of one driver."""

    def __init__(
        self,
        parts: ClaimDependencies,
        *,
        engine: Preparing,
        queue: ClaimQueue,
        announcer: ClaimEvents,
        events: NodeEvents,
        environment: Environment,
        metrics: DriverMetrics,
        devices: DeviceManager,
        registered: asyncio.Event,
    ) -> None:
        """Create the background work. `registered` is set once the kubelet has registered the
        driver. Before that, stale claims are not collected, and claims are not prepared again."""
        config = environment.config
        stale = config.stale_claims
        self._parts = parts
        self._announcer = announcer
        self._events = events
        self._environment = environment
        self._engine = engine
        kubelet = KubeletClaimView(
            parts.driver, environment.podresources, state_file=config.kubelet_state_file
        )
        self._restorer = SpecRestorer(
            parts,
            directory=config.cdi_directory,
            queue=queue,
            on_restored=metrics.restored,
        )
        self._outdated = OutdatedClaims(
            devices=devices,
            checkpoint=parts.checkpoint,
            queue=queue,
            registered=registered,
        )
        self._recovery = Recovery(checkpoint=parts.checkpoint, queue=queue)
        self._rebuilder = Rebuilder(parts, kubelet=kubelet)
        orphans = OrphanRemover(parts, queue=queue, kubelet=kubelet, settings=stale)
        self._collector = StaleCollector(
            parts,
            kubelet=kubelet,
            registered=registered,
            remove_orphans=orphans.poll,
            unprepare=queue.collect,
            on_collected=lambda reason: metrics.collected(reason.value),
            settings=stale,
        )

    @property
    def damaged(self) -> bool:
        """Whether checkpoint entries have been lost since startup."""
        return self._rebuilder.damaged

    async def begin(self) -> None:
        """Remove partially written files, and restore lost and outdated files. Called before the
        driver is served."""
        for step in (self._restorer.clean, partial(self._restorer.restore, compare=True)):
            try:
                await step()
            except (OSError, CheckpointError) as error:
                # Continue in spite of the error, because claims can still be unprepared, and the
                # repair is retried.
                logger.error(
                    "CDI files cannot be repaired",
                    extra={"driver": self._parts.driver, "error": str(error)},
                )

    def parts(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """Return the parts that run until the driver is handed over or stopped, keyed by name."""
        environment = self._environment
        return {
            "CDI files": lambda: self._restorer.run(environment.cdi_poller),
            "outdated claims": self._outdated.run,
            "recovery": self._recovery.run,
            "stale claims": self._collector.run,
            "Events": self._send_events,
            "rebuild": lambda: self._rebuilder.run(
                environment.file_poller, rebuilt=self._engine.rebuilt, report=self._report
            ),
        }

    async def until_damaged(self) -> None:
        """Wait until the checkpoint is found to be damaged. The driver must then restart, because a
        damaged checkpoint is quarantined only when it is opened."""
        checkpoint = self._parts.checkpoint
        await self._environment.file_poller.until(lambda: checkpoint.broken is not None)

    async def handle_requests(self) -> None:
        """Forget claims that an administrator has released manually (``drakit node claim
        forget``)."""
        checkpoint = self._parts.checkpoint
        folder = checkpoint.path.parent
        watch = FileWatch(folder, settled_seconds=TICK_SECONDS)
        while True:
            await self._environment.file_poller.until(watch.changed)
            for uid, generation in (await asyncio.to_thread(requests, folder)).items():
                facts = {"driver": self._parts.driver, "claim_uid": uid}
                try:
                    gone = await checkpoint.forget(uid, generation)
                except CheckpointError as error:
                    logger.error("claim not forgotten", extra=facts | {"error": str(error)})
                    continue
                if gone:
                    logger.warning("claim forgotten on request", extra=facts)
                with suppress(OSError):  # the next round retries
                    await asyncio.to_thread(remove_request, folder, uid)

    def _report(self, damage: str, outcome: str) -> None:
        self._events.emit(
            reason="CheckpointDamaged",
            action="Quarantine",
            note=f"the checkpoint of driver {self._parts.driver} is damaged: {damage}; {outcome}",
        )

    async def _send_events(self) -> None:
        await self._announcer.run(await self._events.recorder())


# ---------------------------------------------------------------- the driver


class ActiveDriver:
    """An active driver, with all its parts."""

    def __init__(
        self,
        driver: DriverSource,
        environment: Environment,
        *,
        events: NodeEvents,
        registration: Registration,
    ) -> None:
        """Create the parts of the driver."""
        config = environment.config
        self.name = driver.name
        self._where = driver.where
        self._foreign = driver.foreign
        self._registration = registration
        self._metrics = environment.metrics.for_driver(driver.name)
        self._podresources = environment.podresources if config.metrics.pod_devices else None
        self._events = events
        specs = ClaimSpecs(driver.name, config.cdi_directory)
        folder = config.drivers_directory / driver.name
        metadata = MetadataFiles(driver.name, folder / "metadata")
        self._checkpoint = Checkpoint(
            folder / "checkpoint.db",
            files=specs,
            metadata=metadata,
            numbers=environment.numbers,
        )
        self._checkpoint.on_transaction = self._metrics.transaction
        feed = None if driver.traits.policies is None else PolicyFeed()
        self._devices = DriverDevices(
            driver.name,
            traits=driver.traits,
            checkpoint=self._checkpoint,
            environment=environment,
            events=self._events,
            metrics=self._metrics,
            expected=driver.expected,
            registered=registration.registered,
            policies=feed,
        )
        self._policies = None
        if driver.traits.policies is not None and feed is not None:
            self._policies = PolicyWatch(
                driver.name,
                driver.traits.policies,
                directory=config.drivers_directory / driver.name,
                session=environment.session,
                feed=feed,
            )
        self._report = DriverReport(
            driver.name,
            ReportSources(
                manager=self._devices.manager,
                publisher=self._devices.publisher,
                checkpoint=self._checkpoint,
                counts=self._devices.counts,
                registration=registration,
                policies=self._policies,
                slow_calls=lambda: self._endpoint.slow_calls,
            ),
            node=environment.node,
            session=environment.session,
        )
        self._endpoint = driver.endpoint(
            HostContext(
                listener=self._devices.manager,
                node=environment.node.name,
                report=self._report_diagnostic,
                policies=feed,
            )
        )
        self._endpoint_started = False
        parts = ClaimDependencies(
            driver=driver.name,
            node=environment.node,
            boot_id=environment.boot_id,
            checkpoint=self._checkpoint,
            source=ApiClaims(environment.session, observe=self._metrics.fetched),
            devices=self._endpoint,
            order=Order(),
            inventories=self._devices.manager,
            specs=specs,
            metadata=metadata,
            limits=config.opaque_parameters,
            name_all_holders=config.events.name_holders == "all",
        )
        engine = Preparing(parts)
        claim_events = ClaimEvents(driver.name, node=environment.node.name)
        self._statuses = None
        if config.claim_status.enabled:
            self._statuses = ClaimStatuses(
                driver.name,
                parts.source,
                node=environment.node.name,
                on_write=self._metrics.wrote_status,
            )
        self.queue = ClaimQueue(
            driver.name,
            engine,
            order=parts.order,
            observers=(
                self._metrics,
                claim_events,
                *(() if self._statuses is None else (self._statuses,)),
            ),
            on_steps=self._metrics.prepared,
        )
        self._maintenance = Maintenance(
            parts,
            engine=engine,
            queue=self.queue,
            announcer=claim_events,
            events=self._events,
            environment=environment,
            metrics=self._metrics,
            devices=self._devices.manager,
            registered=registration.registered,
        )

    async def start(self) -> None:
        """Start everything that calls need. Raises :class:`ConfigError` if the driver rejects its
        configuration."""
        try:
            await self._checkpoint.open()
        except CheckpointError as error:
            # Serve the driver anyway, so that users see this error for each claim. Once the cause
            # is resolved, the next call opens the checkpoint.
            logger.error(
                "checkpoint cannot be used", extra={"driver": self.name, "error": str(error)}
            )
        await self._maintenance.begin()
        await self._devices.restore()
        if self._policies is not None:
            await self._policies.restore()
        if self._devices.holds_known.is_set():
            try:
                await self._endpoint.start()
            except DriverError as error:
                raise ConfigError(f"{self._where}: {error}") from error
            self._endpoint_started = True

    def parts(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """Return the parts that run until the driver is closed, keyed by name."""
        policies = {} if self._policies is None else {f"{self.name} policies": self._policies.run}
        return {
            **policies,
            f"{self.name} checkpoint": self._maintenance.until_damaged,
            f"{self.name} report": self._report.run,
            f"{self.name} endpoint": self._endpoint.run
            if self._endpoint_started
            else self._start_and_run_endpoint,
            # Run this until the end, because an administrator may forget a claim whose call is
            # delaying a hand-over.
            f"{self.name} requests": self._maintenance.handle_requests,
            **{f"{self.name} {name}": part for name, part in self._devices.parts().items()},
        }

    def maintenance(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """Return the parts that start work on claims without a call, keyed by name."""
        statuses = {} if self._statuses is None else {"claim status": self._statuses.run}
        parts = {**self._maintenance.parts(), **statuses}
        return {f"{self.name} {name}": part for name, part in parts.items()}

    async def _start_and_run_endpoint(self) -> None:
        await self._devices.holds_known.wait()
        with suppress(DriverError):  # `run` retries, and reports the error
            await self._endpoint.start()
        await self._endpoint.run()

    async def close(self) -> None:
        """Close the driver and the checkpoint. If a step fails, the remaining steps still run."""
        for step in (self._endpoint.close, self._checkpoint.close):
            try:
                await step()
            except Exception:
                logger.exception("a shutdown step failed", extra={"driver": self.name})

    async def ended(self) -> None:
        """After :meth:`close`, wait until no part of the driver is running."""
        await self._endpoint.ended()

    async def restore_checkpoint(self) -> None:
        """Rewrite the checkpoint file if it was removed."""
        with suppress(CheckpointError):  # the next activation logs the error
            await self._checkpoint.states()

    async def idle(self) -> bool:
        """Return whether the driver no longer has any devices or claims."""
        if self._devices.manager.known:
            return False
        try:
            return not any((await self._checkpoint.states()).values())
        except CheckpointError:
            return False

    # ------------------------------------------------------------ probes and metrics

    @property
    def health(self) -> DeviceManager:
        """The health of the driver's devices."""
        return self._devices.manager

    @property
    def broken(self) -> str | None:
        """Damage to the checkpoint that was detected after it was opened, or None."""
        return self._checkpoint.broken

    def readiness_problem(self) -> str | None:
        """Return the problem that prevents pods from getting devices, or None."""
        if self._checkpoint.unusable is not None:
            return self._checkpoint.unusable
        if (waiting := self._devices.manager.waiting) is not None:
            return f"the driver waits: {waiting}"
        reason = None if self._foreign else self._devices.manager.stop_reason
        return None if reason is None else f"the driver is unavailable: {reason}"

    async def measure(self) -> None:
        """Update the gauges."""
        manager = self._devices.manager
        self._metrics.set(
            driver_registered=self._registration.status.readiness_problem() is None,
            driver_running=manager.stop_reason is None and manager.waiting is None,
            driver_blocked=self._endpoint.blocked is not None,
            driver_slow_calls=len(self._endpoint.slow_calls),
            checkpoint_damaged=self._maintenance.damaged,
            checkpoint_unusable=self._checkpoint.unusable is not None,
        )
        await self._devices.measure()
        if self._podresources is not None:
            try:
                listed = (await self._podresources.claims()).devices
            except PodResourcesError:  # the client has logged the error
                listed = ()
            self._metrics.set_pod_devices(each for each in listed if each.driver == self.name)
        try:
            states = await self._checkpoint.states()
            self._metrics.set_claims(states)
            self._metrics.set(claims_stuck=len(await self._report.stuck(states)))
        except CheckpointError:
            return  # the gauge checkpoint_unusable shows the problem

    def _report_diagnostic(self, diagnostic: Diagnostic) -> None:
        logger.warning(
            "endpoint needs attention",
            extra={"driver": self.name, "reason": diagnostic.reason, "note": diagnostic.note},
        )
        self._metrics.diagnosed(diagnostic.reason)
        self._events.emit_diagnostic(diagnostic)
