"""
Leader election with a Lease: at most one of several processes does the work.

The holder renews its Lease. A candidate acquires the Lease if it has seen no renewal for the
Lease's duration. Holder and candidates measure these times with their own clocks. The times in the
Lease are only informative, because the clocks of two nodes differ. A holder that cannot renew the
Lease exits well before a candidate may start: it has ``lease - renew_deadline`` seconds to exit.

There is no fencing: a process that is frozen for longer than the Lease's duration notices this only
when it resumes. Check ``is_leader`` immediately before a write that must not happen twice.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from drakit_daemon.kube.request import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    NotFoundError,
    resource_path,
)
from drakit_daemon.kube.session import Session
from drakit_daemon.logs import ProblemLog

logger: logging.Logger = logging.getLogger(__name__)

_API_VERSION = "coordination.k8s.io/v1"
_RELEASE_TIMEOUT_SECONDS = 2.0
"""The time limit for a release. A release shortens the wait of the other candidates, but must not
delay the holder's own exit too much."""


class _LostError(Exception):
    """Another candidate holds the Lease."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseTimings:
    """Times in seconds. Each must be longer than the next. A candidate becomes the leader at most
    ``lease + 2 * retry`` after the holder's last renewal."""

    lease_seconds: int = 15
    """The duration of a Lease after its last renewal."""

    renew_deadline_seconds: float = 10.0
    """The holder stops after this time without a renewal. It then has the rest of the Lease's
    duration to exit."""

    retry_seconds: float = 2.0
    """The time between two renewals by the holder, and between two checks by a candidate."""

    @property
    def request_seconds(self) -> float:
        """The time limit for a request, as in Kubernetes components. If a connection hangs, for
        example because the API server behind it is gone, there must be time for another attempt."""
        return self.renew_deadline_seconds / 2


class LeaseElection:
    """One candidate in an election. It acquires the Lease once, holds it, and releases it."""

    def __init__(
        self,
        session: Session,
        *,
        namespace: str,
        name: str,
        identity: str,
        timings: LeaseTimings | None = None,
    ) -> None:
        """
        :param identity: a readable name, such as the pod's name. Each candidate appends a random
            suffix, because a restarted container of the pod is a different candidate.
        """
        self._session = session
        self._collection = resource_path(_API_VERSION, "leases", namespace=namespace)
        self._path = resource_path(_API_VERSION, "leases", namespace=namespace, name=name)
        self._metadata = {"name": name, "namespace": namespace}
        self._timings = timings or LeaseTimings()
        self.identity: str = f"{identity}_{secrets.token_hex(4)}"
        self.holder: str | None = None
        """The last known holder of the Lease. Empty if nobody holds it, None before the first
        read."""
        self._lease: dict[str, Any] | None = None
        self._seen: tuple[Any, ...] = ()
        self._seen_at = 0.0
        # Log changes only: a problem that prevents leading, such as a missing permission, may last
        # for a long time.
        self._log = ProblemLog(logger, "cannot take the lease")
        self._renewals = ProblemLog(
            logger, "cannot renew the lease", recovered="the lease is renewed again"
        )
        self.responded_at = float("-inf")
        """The time at which the API server last responded about the Lease (loop clock)."""
        self._renewed_at: float | None = None
        """The time at which the last successful renewal was sent. None if this candidate does not
        hold the Lease."""

    @property
    def is_leader(self) -> bool:
        """Whether this candidate holds the Lease and its renewal is not overdue."""
        return self._renewed_at is not None and _now() < self._deadline()

    async def acquire(self) -> None:
        """Wait until this candidate holds the Lease."""
        while True:
            try:
                async with asyncio.timeout(self._timings.renew_deadline_seconds):
                    await self._read()
                    if self._free():
                        await self._write()
                        if self.is_leader:
                            logger.info(
                                "leading", extra={"lease": self._path, "identity": self.identity}
                            )
                            return
            except (ConflictError, AlreadyExistsError):
                pass  # another candidate was faster
            except (ApiError, TimeoutError) as error:
                self._log.report(str(error))
            await asyncio.sleep(self._timings.retry_seconds)

    async def hold(self) -> str:
        """
        Renew the Lease until it may be lost. Return the reason for the loss.

        The process must then exit immediately, because another candidate may lead after ``lease -
        renew_deadline`` seconds.
        """
        while True:
            try:
                async with asyncio.timeout_at(self._deadline()):
                    await asyncio.sleep(self._timings.retry_seconds)
                    await self._renew_persistently()
            except TimeoutError:
                return "the Lease was not renewed in time"
            except _LostError:
                return f"the Lease was taken by {self.holder}"

    async def _renew_persistently(self) -> None:
        """Renew the Lease once, with as many attempts as the caller's time limit allows."""
        while True:
            began = _now()
            try:
                await self._write()
                self._renewals.report(None)
                return
            except (ConflictError, NotFoundError, AlreadyExistsError):
                # There is another holder, the Lease was edited manually, or the response to an
                # earlier renewal was lost.
                pass
            except ApiError as error:
                self._renewals.report(str(error))
                await asyncio.sleep(began + self._timings.retry_seconds - _now())
            began = _now()
            try:
                await self._read()
            except ApiError:
                await asyncio.sleep(began + self._timings.retry_seconds - _now())
            if self.holder not in (self.identity, ""):
                raise _LostError

    async def _read(self) -> None:
        """Read the Lease, and record the time if the Lease has changed."""
        timeout = self._timings.request_seconds
        try:
            self._lease = await self._session.get(self._path, timeout_seconds=timeout)
            self.responded_at = _now()
        except NotFoundError:
            self.responded_at = _now()
            # If the Lease was deleted, its holder continues until its next renewal, so it is still
            # treated as the holder.
            self._lease, self.holder = None, self.holder or ""
            return
        spec = self._spec()
        self.holder = spec.get("holderIdentity") or ""
        seen = (self.holder, spec.get("renewTime"), spec.get("leaseTransitions"))
        if seen != self._seen:
            self._seen, self._seen_at = seen, _now()

    def _free(self) -> bool:
        if not self.holder or self.holder == self.identity:
            return True
        # Use the holder's duration, because the holder may run a different version.
        lease_seconds = self._spec().get("leaseDurationSeconds") or self._timings.lease_seconds
        return _now() >= self._seen_at + lease_seconds

    async def _write(self) -> None:
        """Acquire or renew the Lease. Overwrite only the version that we last read."""
        # Measured before the request: other candidates see the renewal later, so this view expires
        # first.
        sent_at = _now()
        old, now = self._spec(), _timestamp()
        ours = old.get("holderIdentity") == self.identity
        transitions = int(old.get("leaseTransitions") or 0)
        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": self._timings.lease_seconds,
            "acquireTime": old.get("acquireTime") if ours else now,
            "renewTime": now,
            "leaseTransitions": transitions if ours or self._lease is None else transitions + 1,
        }
        self._lease = await self._put(spec, timeout_seconds=self._timings.request_seconds)
        self.holder = self.identity
        self._renewed_at, self.responded_at = sent_at, _now()

    async def release(self) -> None:
        """Release the Lease if this candidate holds it, so that the others do not have to wait
        until it expires."""
        held, self._renewed_at = self._renewed_at, None
        if held is None:
            return
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT_SECONDS):
                try:
                    await self._put_released()
                except ConflictError:
                    # Another candidate holds the Lease, or this one stopped before the response to
                    # a renewal arrived.
                    await self._read()
                    await self._put_released()
        except (ApiError, TimeoutError) as error:
            # The Lease will expire by itself.
            logger.info("the lease was not released", extra={"error": str(error)})

    async def _put_released(self) -> None:
        if self._spec().get("holderIdentity") != self.identity:
            return  # another candidate held the Lease at the last read
        spec = self._spec() | {
            "holderIdentity": "",
            "leaseDurationSeconds": 1,
            "renewTime": _timestamp(),
        }
        await self._put(spec, timeout_seconds=_RELEASE_TIMEOUT_SECONDS)
        self.holder = ""

    async def _put(self, spec: Mapping[str, Any], *, timeout_seconds: float) -> dict[str, Any]:
        if self._lease is None:
            body = {
                "apiVersion": _API_VERSION,
                "kind": "Lease",
                "metadata": self._metadata,
                "spec": spec,
            }
            return await self._session.create(
                self._collection, body, timeout_seconds=timeout_seconds
            )
        body = {**self._lease, "spec": spec}
        return await self._session.replace(self._path, body, timeout_seconds=timeout_seconds)

    def _spec(self) -> dict[str, Any]:
        return (self._lease or {}).get("spec") or {}

    def _deadline(self) -> float:
        return (self._renewed_at or 0.0) + self._timings.renew_deadline_seconds


def _now() -> float:
    return asyncio.get_running_loop().time()


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
