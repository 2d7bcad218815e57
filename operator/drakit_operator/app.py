"""
The composition root: starts and stops the parts, in order.

Start: session, probes, election; while we lead, a :class:`~drakit_operator.term.Term`.
Stop (SIGTERM): 1. the term: workers at once, Kopf by its flag; 2. the Lease is released, so that
the next replica need not wait for its end; 3. probes; 4. session.

It must not know the findings about pods and claims.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drakit import tasks
from drakit.explain.selectors import Selectors
from drakit.kube import ApiError, NotFoundError, Session, connect, resource_path
from drakit.kube.lease import LeaseElection, LeaseTimings
from drakit.logs import ProblemLog
from drakit.probes import StatusServers
from drakit_operator.config import Config
from drakit_operator.metrics import Metrics
from drakit_operator.recording import EventWriter
from drakit_operator.term import Term

__all__ = ("App", "Identity")

logger = logging.getLogger(__name__)

USER_AGENT = "drakit-operator"

CHECK_SECONDS = 10.0
"""Pause between two checks whether the API server answers, for readiness."""

CHECK_LIMIT_SECONDS = 35.0
"""Without an answer for this long the replica is not ready: three checks failed."""

STOP_SECONDS = 5.0
"""Longest stop: Kopf's end (2 s), the release of the Lease (2 s), and a margin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Our identity among the replicas, and the place of our Lease."""

    name: str
    namespace: str

    @staticmethod
    def from_environment(environ: Mapping[str, str]) -> Identity:
        """Read what the chart sets; outside a cluster, the host's name and ``default``."""
        return Identity(
            name=environ.get("POD_NAME") or os.uname().nodename,
            namespace=environ.get("POD_NAMESPACE") or "default",
        )


class App:
    """One replica. Run it once; set ``stop`` to end it."""

    def __init__(
        self,
        *,
        config: Config,
        kubeconfig: Path | None,
        identity: Identity,
        selectors: Selectors,
    ) -> None:
        self._config = config
        self._kubeconfig = kubeconfig
        self._identity = identity
        self._selectors = selectors
        self._metrics = Metrics()
        self._term: Term | None = None
        self._answered_at: float | None = None
        self.stop = asyncio.Event()
        self.servers = StatusServers(
            listen=config.listen, probed=self, registry=self._metrics.registry
        )

    async def run(self) -> None:
        """Run until stopped; raises what ended the replica otherwise."""
        async with await self._connect() as session:
            await self.servers.start()
            try:
                logger.info("started", extra={"server": session.server})
                await self._run_parts(session)
            finally:
                await self.servers.stop()
        logger.info("stopped")

    async def _run_parts(self, session: Session) -> None:
        election = self._election(session)

        async def campaign() -> None:
            await election.run(lambda: self._lead(session, election))

        parts = asyncio.create_task(
            tasks.run({"election": campaign, "check": lambda: self._check_for_ever(session)}),
            name="parts",
        )
        stopping = asyncio.create_task(self.stop.wait(), name="stop")
        try:
            await asyncio.wait({parts, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            parts.cancel()
            await asyncio.wait({parts}, timeout=STOP_SECONDS)
        if not parts.done():
            logger.error("components did not stop in time and are abandoned")
        elif not parts.cancelled():
            parts.result()

    async def _lead(self, session: Session, election: LeaseElection) -> None:
        def may_write() -> bool:
            return election.is_leader

        self._term = Term(
            config=self._config,
            session=session,
            connect=self._connect,
            recorder=EventWriter(session, instance=self._identity.name, may_write=may_write),
            metrics=self._metrics,
            selectors=self._selectors,
            may_write=may_write,
        )
        try:
            await self._term.run()
        finally:
            self._term = None

    def _election(self, session: Session) -> LeaseElection:
        settings = self._config.election
        return LeaseElection(
            session,
            namespace=self._identity.namespace,
            name=settings.lease_name,
            identity=self._identity.name,
            timings=LeaseTimings(
                lease_seconds=int(settings.lease_duration),
                renew_deadline_seconds=settings.renew_deadline,
                retry_seconds=settings.retry_period,
            ),
        )

    async def _connect(self) -> Session:
        """Open a session in the running loop: the main one, or Kopf's."""
        return await connect(self._kubeconfig, user_agent=USER_AGENT)

    async def _check_for_ever(self, session: Session) -> None:
        """Read our Lease periodically: even if it does not exist, that is an answer."""
        path = resource_path(
            "coordination.k8s.io/v1",
            "leases",
            namespace=self._identity.namespace,
            name=self._config.election.lease_name,
        )
        log = ProblemLog(
            logger,
            "the API server does not answer",
            recovered="the API server answers again",
        )
        while True:
            try:
                with contextlib.suppress(NotFoundError):
                    await session.get(path)
            except ApiError as error:
                log.report(str(error))
            else:
                log.report(None)
                self._answered_at = asyncio.get_running_loop().time()
            await asyncio.sleep(CHECK_SECONDS)

    # ------------------------------------------------------------ probes and metrics

    async def liveness_problems(self) -> Sequence[str]:
        """Return the reasons to restart the process. A replica that does not lead is healthy."""
        problem = self._term.liveness_problem() if self._term is not None else None
        return [problem] if problem is not None else []

    async def readiness_problems(self) -> Sequence[str]:
        """Return the reasons why this replica could not lead."""
        now = asyncio.get_running_loop().time()
        if self._answered_at is None or now - self._answered_at > CHECK_LIMIT_SECONDS:
            return ["the API server does not answer"]
        problem = self._term.readiness_problem() if self._term is not None else None
        return [problem] if problem is not None else []

    async def measure(self) -> None:
        """Update the leader's gauges; all others are always up to date."""
        if self._term is not None:
            self._term.measure()
