"""
Leader election with a Lease: at most one of several processes does the work.

The holder renews its Lease; a candidate takes it over once it has seen no renewal for the Lease's
duration. Both measure what they did and saw themselves with the loop's clock: times in the Lease
are for people, because the clocks of two nodes differ. A holder that cannot renew ends well before
any candidate may start: it has ``lease - renew_deadline`` seconds for that.

There is no fencing: a process that is frozen for longer than the lease notices when it wakes.
Check ``is_leader`` immediately before a write that must not happen twice.

It must not know what the work is.
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
"""A release saves the others the wait, but must not delay our own end for long."""


class _LostError(Exception):
    """Another candidate holds the Lease."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseTimings:
    """Seconds, each longer than the one below; a candidate leads at most ``lease + 2 * retry``
    after the holder's last renewal."""

    lease_seconds: int = 15
    """The duration of a Lease after its last renewal."""

    renew_deadline_seconds: float = 10.0
    """After this time without a renewal the holder ends; the rest is for its end."""

    retry_seconds: float = 2.0
    """Between two renewals, and between two checks of a candidate."""

    @property
    def request_seconds(self) -> float:
        """The time limit of a request. A connection can hang, for example if the API server behind
        it is gone; there must be time for another one. Kubernetes' own components do the same."""
        return self.renew_deadline_seconds / 2


class LeaseElection:
    """One candidate of an election: it acquires the Lease once, holds it, and releases it."""

    def __init__(
        self,
        session: Session,
        *,
        namespace: str,
        name: str,
        identity: str,
        timings: LeaseTimings | None = None,
    ) -> None:
        """``identity`` is for people (the pod's name); each candidate adds a random part, because a
        restarted container of the pod is another candidate."""
        self._session = session
        self._collection = resource_path(_API_VERSION, "leases", namespace=namespace)
        self._path = resource_path(_API_VERSION, "leases", namespace=namespace, name=name)
        self._metadata = {"name": name, "namespace": namespace}
        self._timings = timings or LeaseTimings()
        self.identity: str = f"{identity}_{secrets.token_hex(4)}"
        self.holder: str | None = None
        """The last known holder of the Lease; "" if it has none, None before the first read."""
        self._lease: dict[str, Any] | None = None
        self._seen: tuple[Any, ...] = ()
        self._seen_at = 0.0
        # What prevents us from leading may last, such as a missing permission.
        self._log = ProblemLog(logger, "cannot take the lease")
        self._renewals = ProblemLog(
            logger, "cannot renew the lease", recovered="the lease is renewed again"
        )
        self.answered_at = float("-inf")
        """When the API server last answered about the Lease (loop clock)."""
        self._renewed_at: float | None = None
        """When the last successful renewal was sent; None if we do not hold the Lease."""

    @property
    def is_leader(self) -> bool:
        """Whether we hold the Lease and its renewal is not overdue."""
        return self._renewed_at is not None and _now() < self._deadline()

    async def acquire(self) -> None:
        """Wait until the Lease is ours."""
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
        Renew the Lease until it may be lost; return the reason.

        The process must then end at once: another candidate may lead after ``lease -
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
        """Renew once, with as many attempts as the caller has time for."""
        while True:
            began = _now()
            try:
                await self._write()
                self._renewals.report(None)
                return
            except (ConflictError, NotFoundError, AlreadyExistsError):
                # A renewal of ours whose answer was lost, an edit by hand, or another holder.
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
        """Read the Lease, and note the time if it has changed."""
        timeout = self._timings.request_seconds
        try:
            self._lease = await self._session.get(self._path, timeout_seconds=timeout)
            self.answered_at = _now()
        except NotFoundError:
            self.answered_at = _now()
            # If it was deleted, its holder continues until its next renewal. So it counts as
            # the holder as if the Lease still existed.
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
        # The holder's own duration counts: its version may differ from ours.
        lease_seconds = self._spec().get("leaseDurationSeconds") or self._timings.lease_seconds
        return _now() >= self._seen_at + lease_seconds

    async def _write(self) -> None:
        """Take or renew the Lease; overwrite only the version that we last read."""
        sent_at = _now()  # others see it later, so for us it expires first
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
        self._renewed_at, self.answered_at = sent_at, _now()

    async def release(self) -> None:
        """Release the Lease if it is ours, so that the next holder need not wait for its end."""
        held, self._renewed_at = self._renewed_at, None
        if held is None:
            return
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT_SECONDS):
                try:
                    await self._put_released()
                except ConflictError:
                    # Another candidate has it, or the stop cut off the answer to a renewal.
                    await self._read()
                    await self._put_released()
        except (ApiError, TimeoutError) as error:
            # It expires by itself.
            logger.info("the lease was not released", extra={"error": str(error)})

    async def _put_released(self) -> None:
        if self._spec().get("holderIdentity") != self.identity:
            return  # another candidate had it at the last read
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
