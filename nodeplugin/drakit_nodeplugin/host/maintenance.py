"""
Maintenance of one driver's claims: the background work beside the kubelet's calls.

At the start, half-written files are removed, and lost and outdated CDI files restored, before
claims are answered. Then, until the driver is handed over or stopped: lost files are restored,
claims with outdated edits are prepared again, unfinished work of a crash is finished, lost entries
are rebuilt, stale claims and orphaned files are removed, Events are sent, and claims that an admin
releases by hand are forgotten.

It must not know the internals of the parts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from drakit_nodeplugin.claims.events import ClaimEvents
from drakit_nodeplugin.claims.kubelet_claims import Grace, KubeletClaimView
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
from drakit_nodeplugin.claims.stale import StaleCollector, StaleTiming
from drakit_nodeplugin.claims.work import ClaimDependencies
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.file_poller import FileWatch
from drakit_nodeplugin.host.node import Environment, NodeEvents
from drakit_nodeplugin.metrics import DriverMetrics
from drakit_nodeplugin.state.checkpoint import CheckpointError
from drakit_nodeplugin.state.inspection import answer, requests

__all__ = ("Maintenance",)

logger = logging.getLogger(__name__)


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
        """`registered` is set once the kubelet has registered the driver: stale claims are not
        collected before, and no claim is prepared again."""
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
        grace = Grace(
            confirmed_seconds=stale.grace_period,
            unconfirmed_seconds=stale.unconfirmed_grace_period,
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
        orphans = OrphanRemover(parts, queue=queue, kubelet=kubelet, grace=grace)
        self._collector = StaleCollector(
            parts,
            kubelet=kubelet,
            registered=registered,
            remove_orphans=orphans.poll,
            unprepare=queue.collect,
            on_collected=lambda reason: metrics.collected(reason.value),
            timing=StaleTiming(period_seconds=stale.period, grace=grace),
        )

    @property
    def damaged(self) -> bool:
        """Whether entries were lost since the start."""
        return self._rebuilder.damaged

    async def begin(self) -> None:
        """Remove half-written CDI files, and restore lost and outdated ones, before the driver is
        served."""
        try:
            await asyncio.to_thread(self._parts.specs.clean)
            await self._restorer.restore(compare=True)
        except (OSError, CheckpointError) as error:
            # Claims can still be unprepared, and the repair is retried.
            logger.error(
                "CDI files cannot be repaired",
                extra={"driver": self._parts.driver, "error": str(error)},
            )

    def parts(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """Return the parts that run until the driver is handed over or stopped, by name."""
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

    async def answer_requests(self) -> None:
        """Forget claims that an admin has released by hand (``drakit node claim forget``)."""
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
                with suppress(OSError):  # the next round tries again
                    await asyncio.to_thread(answer, folder, uid)

    def _report(self, damage: str, outcome: str) -> None:
        self._events.emit(
            reason="CheckpointDamaged",
            action="Quarantine",
            note=f"the checkpoint of driver {self._parts.driver} is damaged: {damage}; {outcome}",
        )

    async def _send_events(self) -> None:
        await self._announcer.run(await self._events.recorder())
