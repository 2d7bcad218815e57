"""
What looks after one driver's claims beside the kubelet's calls, put together.

At the start: half-written files go, lost CDI files come back, orphaned ones go; a checkpoint that
was damaged is rebuilt before claims are answered from it. Later, again and again: lost files, what
crashes left, stale claims. And what people should know is told as Events.

It must not know how any of the parts does its work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping

from drakit.kube.events import EventRecorder
from drakit_nodeplugin.claims.checkpoint.rebuild import Rebuilder
from drakit_nodeplugin.claims.checkpoint.store import CheckpointError
from drakit_nodeplugin.claims.engine import ClaimEngine
from drakit_nodeplugin.claims.events import ClaimAnnouncer
from drakit_nodeplugin.claims.grace import Grace
from drakit_nodeplugin.claims.orphans import OrphanedSpecs
from drakit_nodeplugin.claims.parts import EngineParts
from drakit_nodeplugin.claims.recovery import Recovery
from drakit_nodeplugin.claims.restore import SpecRestorer
from drakit_nodeplugin.claims.spectexts import SpecTexts
from drakit_nodeplugin.claims.stale import StaleCollector, StaleTiming
from drakit_nodeplugin.host.node import Environment, NodeEvents
from drakit_nodeplugin.kubelet.claimview import KubeletClaimView
from drakit_nodeplugin.metrics import DriverMetrics

__all__ = ("Upkeep",)

logger = logging.getLogger(__name__)

REBUILD_AGAIN_SECONDS = 60.0
"""Pause after a rebuild during which the kubelet did not list all its pods."""

REBUILD_ATTEMPTS = 10
"""After this many attempts, a rebuild ends without an answer of the kubelet, because a site may
deny access to it."""

LABELS_SECONDS = 4.0
"""How long a rebuild waits for the node's labels, by which claims may select it."""


class Upkeep:
    """Keeps the claims of one driver in order."""

    def __init__(
        self,
        parts: EngineParts,
        *,
        engine: ClaimEngine,
        announcer: ClaimAnnouncer,
        events: NodeEvents,
        environment: Environment,
        metrics: DriverMetrics,
        primary: Callable[[], bool],
        registered: Callable[[], bool],
    ) -> None:
        config = environment.config
        stale = config.stale_claims
        self._parts = parts
        self._engine = engine
        self._announcer = announcer
        self._events = events
        self._environment = environment
        self.damaged = False
        """Whether a damaged checkpoint was set aside since the start."""
        texts = SpecTexts(parts.driver, config.cdi_directory)
        kubelet = KubeletClaimView(
            parts.driver, environment.podresources, state_file=config.kubelet_state_file
        )
        grace = Grace(
            confirmed_seconds=stale.grace_period,
            unconfirmed_seconds=stale.unconfirmed_grace_period,
        )
        self._restorer = SpecRestorer(
            checkpoint=parts.checkpoint,
            specs=parts.specs,
            boot_id=parts.boot_id,
            locks=engine.locks,
            on_restored=metrics.restored,
        )
        self._recovery = Recovery(checkpoint=parts.checkpoint, engine=engine)
        self._orphans = OrphanedSpecs(
            driver=parts.driver,
            checkpoint=parts.checkpoint,
            specs=parts.specs,
            texts=texts,
            locks=engine.locks,
            kubelet=kubelet,
            grace=grace,
        )
        self._rebuilder = Rebuilder(
            driver=parts.driver,
            node=parts.node,
            boot_id=parts.boot_id,
            checkpoint=parts.checkpoint,
            source=parts.source,
            specs=parts.specs,
            texts=texts,
            kubelet=kubelet,
            limits=parts.limits,
        )
        self._collector = StaleCollector(
            driver=parts.driver,
            node=parts.node,
            entries=parts.checkpoint,
            source=parts.source,
            kubelet=kubelet,
            look_for_files=self._orphans.look,
            primary=primary,
            registered=registered,
            unprepare=engine.collect,
            on_collected=lambda reason: metrics.collected(reason.value),
            timing=StaleTiming(period_seconds=stale.period, grace=grace),
        )

    async def begin(self) -> None:
        """Put files in order, before anything is served."""
        try:
            await self._parts.specs.clean()
            await self._restorer.restore()
            await self._orphans.clean()
        except (OSError, CheckpointError) as error:
            # Claims can be unprepared all the same, and all of it is tried again.
            logger.error(
                "CDI files cannot be put in order",
                extra={"driver": self._parts.driver, "error": str(error)},
            )

    def parts(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """Give what runs until the daemon stops, by name."""
        environment = self._environment
        return {
            "CDI files": lambda: self._restorer.run(environment.cdi_poller),
            "recovery": lambda: self._recovery.run(environment.file_poller),
            "stale claims": self._collector.run,
            "Events": self._tell,
            "rebuild": self._rebuild,
        }

    async def _rebuild(self) -> None:
        """Find again what a damaged checkpoint has lost, whenever one was set aside."""
        checkpoint = self._parts.checkpoint
        told: str | None = None
        attempts = 0
        while True:
            damage = checkpoint.damage
            if damage is None:
                self._engine.rebuilt.clear()
                # At any time: it opens late where a disk was full.
                await self._environment.file_poller.until(lambda: checkpoint.damage is not None)
                continue
            self.damaged = True
            attempts = attempts + 1 if told == damage else 1
            note, found = await self._rebuild_once(last=attempts >= REBUILD_ATTEMPTS)
            # What could not be found is not found by waiting either, so claims are answered now.
            self._engine.rebuilt.set()
            if told != damage:
                told = damage
                self._events.emit(
                    reason="CheckpointDamaged",
                    action="SetAside",
                    note=f"the checkpoint of driver {self._parts.driver} is damaged: {damage}; "
                    f"{note}",
                )
            if not found:
                await asyncio.sleep(REBUILD_AGAIN_SECONDS)

    async def _rebuild_once(self, *, last: bool) -> tuple[str, bool]:
        """Give what came of it, and whether there is no more to be found."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LABELS_SECONDS):
                while self._parts.node.labels is None:  # noqa: ASYNC110  (nobody tells of them)
                    await asyncio.sleep(0.1)
        try:
            rebuilt = await self._rebuilder.rebuild()
            found = rebuilt.final or (last and not rebuilt.partial)
            if found:
                await self._parts.checkpoint.rebuilt()
            return str(rebuilt), found
        except CheckpointError as error:
            return f"it could not be rebuilt: {error}", False
        except Exception as error:
            logger.exception("a rebuild failed", extra={"driver": self._parts.driver})
            return f"it could not be rebuilt: {type(error).__name__}", False

    async def _tell(self) -> None:
        session = await asyncio.shield(self._environment.session)
        recorder = EventRecorder(
            session,
            controller="drakit.dev/nodeplugin",
            instance=self._environment.node.name,
            # The admission policy allows a plugin to write only Events of its own node.
            shared=False,
        )
        await self._announcer.run(recorder)
