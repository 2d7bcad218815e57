"""
Unprepares stale claims: checkpoint entries that the kubelet will never ask to unprepare.

The kubelet unprepares the claims that it tracks. It forgets a claim if its own checkpoint was lost,
if the node was disconnected while its pods were deleted, or if the claim was deallocated in the
meantime. Such a claim would hold its devices forever. The plugin unprepares it as if the kubelet
had called, but only after two checks that are a grace period apart. In both checks, the API server
must report that the claim no longer matches the entry. The plugin never unprepares a claim while
the kubelet lists it, or while the kubelet's list is incomplete.

The claim queue performs the unprepare. The module does not depend on drivers, gRPC or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from drakit.driver import Node
from drakit_daemon.rate_limiter import RateLimiter
from drakit_formats.resource.claim import Claim
from drakit_nodeplugin.claims.allocation import allocated_results, device_keys
from drakit_nodeplugin.claims.errors import (
    ClaimError,
    ClaimFetchError,
    ClaimGoneError,
    ClaimNotAllocatedError,
    ClaimReplacedError,
    NoResponseError,
    NoResultError,
    WrongNodeError,
)
from drakit_nodeplugin.claims.kubelet_claims import (
    KubeletClaims,
    KubeletClaimView,
    Unclaimed,
)
from drakit_nodeplugin.claims.work import ClaimDependencies, workers
from drakit_nodeplugin.config import StaleClaims
from drakit_nodeplugin.state.checkpoint import CheckpointError
from drakit_nodeplugin.state.podresources import PodView
from drakit_nodeplugin.state.records import StoredClaim

logger = logging.getLogger(__name__)

FETCH_SECONDS = 5.0
"""Time limit for reading a claim from the API server. No call waits for it."""

COLLECT_SECONDS = 40.0
"""Time limit for one unprepare, as for a kubelet call. Unfinished work continues in the claim
queue."""


class StaleReason(StrEnum):
    """The reason why the kubelet will not unprepare a claim. Used as a metric label and in the
    log."""

    GONE = "gone"
    REPLACED = "replaced"
    """Another claim now has the same name."""
    DEALLOCATED = "deallocated"
    ELSEWHERE = "elsewhere"
    """The claim is allocated for another node."""
    REALLOCATED = "reallocated"
    """The claim is now allocated different devices of the driver, or none."""


_REASONS: Mapping[type[ClaimError], StaleReason] = {
    ClaimReplacedError: StaleReason.REPLACED,
    ClaimNotAllocatedError: StaleReason.DEALLOCATED,
    WrongNodeError: StaleReason.ELSEWHERE,
    NoResultError: StaleReason.REALLOCATED,
}


def stale_reason(
    entry: StoredClaim, found: Claim | None, *, driver: str, node: Node
) -> StaleReason | None:
    """
    Return the reason why an entry, in any state, is stale. None if the entry is not stale, or if
    that is unknown.

    `found` is the claim that has the entry's name in the API server, or None. Only devices are
    compared: if only the configs have changed, the kubelet retries by itself.
    """
    if found is None:
        return StaleReason.GONE
    try:
        results = allocated_results(
            found,
            reference=entry.reference,
            driver=driver,
            node=node.name,
            labels=node.labels,
        )
    except ClaimError as error:
        return _REASONS.get(type(error))
    same = device_keys(results) == device_keys(entry.devices)
    return None if same else StaleReason.REALLOCATED


FETCHES_PER_SECOND = 20.0
"""Rate limit for reading claims from the API server. Every node in the cluster reads claims."""

PARALLEL = 8
"""Number of claims to read or unprepare concurrently."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Suspect:
    """An entry that was stale in one check, and in every later check that got a response."""

    generation: int
    reason: StaleReason
    unclaimed: Unclaimed
    logged: bool = False
    """Whether a failure to unprepare the claim has been logged. Failures are logged only once."""


class StaleCollector:
    """
    Finds stale claims of one driver, and has them unprepared.

    An entry that is not stale has no cost between checks. The collector does not query the API
    server about claims that the kubelet lists.
    """

    def __init__(
        self,
        parts: ClaimDependencies,
        *,
        kubelet: KubeletClaimView,
        registered: asyncio.Event,
        remove_orphans: Callable[[], Awaitable[object]],
        unprepare: Callable[[StoredClaim], Awaitable[bool]],
        on_collected: Callable[[StaleReason], None],
        settings: StaleClaims,
    ) -> None:
        """
        Create a collector. `registered` is set once the kubelet has registered the driver. Each
        check calls `remove_orphans` first. `unprepare` is called with an entry as it was read, and
        returns whether it removed the entry. If the entry has since changed, `unprepare` must leave
        it unchanged.
        """
        self._driver = parts.driver
        self._node = parts.node
        self._checkpoint = parts.checkpoint
        self._source = parts.source
        self._kubelet = kubelet
        self._registered = registered
        self._remove_orphans = remove_orphans
        self._unprepare = unprepare
        self._on_collected = on_collected
        self._settings = settings
        self._limiter: RateLimiter | None = None
        self._suspects: dict[str, _Suspect] = {}

    async def run(self) -> None:
        """Check periodically. Log failed checks, and continue."""
        loop, period = asyncio.get_running_loop(), self._settings.period
        while True:
            # Check at multiples of the period, so that the collectors of all drivers check at the
            # same time and share one response from the kubelet.
            pause = period - loop.time() % period
            await asyncio.sleep(pause if pause > period / 2 else pause + period)
            try:
                await self.poll()
            except (CheckpointError, OSError) as error:
                logger.error(
                    "check for stale claims failed",
                    extra={"driver": self._driver, "error": str(error)},
                )

    async def poll(self) -> int:
        """Check once. Return the number of claims that were unprepared. Raises CheckpointError,
        OSError."""
        if not self._registered.is_set():
            return 0
        await self._remove_orphans()
        if not await self._checkpoint.uids():
            self._suspects.clear()
            return 0
        claims = await self._listed()
        if claims.pods is PodView.PARTIAL:
            return 0
        collected = 0
        seen: set[str] = set()
        async for page in self._checkpoint.pages():
            seen.update(entry.uid for entry in page)
            free = [entry for entry in page if not self._used(entry, claims)]
            reasons, silent = await self._reasons_of(free)
            due = [e for e in free if e.uid in reasons and self._is_due(e, reasons[e.uid], claims)]
            collected += await self._collect(due)
            if silent:  # keep the suspects, because the next check asks again
                return collected
        self._suspects = {uid: s for uid, s in self._suspects.items() if uid in seen}
        return collected

    def _used(self, entry: StoredClaim, claims: KubeletClaims) -> bool:
        """Return whether the kubelet lists an entry. If so, restart the entry's grace period."""
        if not claims.holds(entry):
            return False
        self._suspects.pop(entry.uid, None)
        return True

    async def _reasons_of(
        self, entries: Sequence[StoredClaim]
    ) -> tuple[Mapping[str, StaleReason | None], bool]:
        """Check claims against the API server. Return the result for each claim, keyed by UID, and
        whether the server did not respond. In that case, it is unavailable or overloaded, so send
        no further requests."""
        limiter = self._limiter or RateLimiter(burst=1, per_second=FETCHES_PER_SECOND)
        self._limiter = limiter
        reasons: dict[str, StaleReason | None] = {}
        line = iter(entries)
        silent = False

        async def ask() -> None:
            nonlocal silent
            for entry in line:
                await limiter.wait()
                if silent:
                    return
                try:
                    reasons[entry.uid] = await self._reason_of(entry)
                except NoResponseError:
                    silent = True
                    return
                except ClaimFetchError:
                    continue
                except Exception:  # a bug must not affect the other entries
                    facts = {"driver": self._driver, "claim": str(entry)}
                    logger.exception("claim cannot be checked", extra=facts)

        await workers(ask, parallel=PARALLEL, items=len(entries))
        return reasons, silent

    async def _reason_of(self, entry: StoredClaim) -> StaleReason | None:
        """Read the claim of an entry, and return the reason why the entry is stale, if it is. Keep
        no reference to the claim object, which can take 20 MiB."""
        try:
            found = await self._source.fetch(entry.reference, timeout_seconds=FETCH_SECONDS)
        except ClaimGoneError:
            found = None
        return stale_reason(entry, found, driver=self._driver, node=self._node)

    def _is_due(
        self, entry: StoredClaim, reason: StaleReason | None, claims: KubeletClaims
    ) -> bool:
        """Record the result of a check for an entry. Return whether its grace period has ended."""
        if reason is None:
            self._suspects.pop(entry.uid, None)
            return False
        known = self._suspects.get(entry.uid)
        if known is None or (known.generation, known.reason) != (entry.generation, reason):
            self._suspects[entry.uid] = _Suspect(
                generation=entry.generation, reason=reason, unclaimed=Unclaimed.first(claims)
            )
            return False
        unclaimed = known.unclaimed.again(claims)
        self._suspects[entry.uid] = replace(known, unclaimed=unclaimed)
        return unclaimed.due(claims, self._settings)

    async def _listed(self) -> KubeletClaims:
        """Query the kubelet. An incomplete list resets all grace periods, including those of
        entries that this poll has not reached yet."""
        claims = await self._kubelet.listed()
        if claims.pods is PodView.PARTIAL:
            # The kubelet has just started, so earlier checks are no longer valid.
            self._suspects.clear()
        elif claims.pods is PodView.UNKNOWN:
            self._suspects = {
                uid: replace(each, unclaimed=each.unclaimed.again(claims))
                for uid, each in self._suspects.items()
            }
        return claims

    async def _collect(self, due: Sequence[StoredClaim]) -> int:
        """Unprepare entries, unless the kubelet now lists them, or its list is incomplete. Return
        how many are gone."""
        if not due:
            return 0
        # Query the kubelet again, because reading the claims of a page may have taken half a
        # minute.
        claims = await self._listed()
        if claims.pods is PodView.PARTIAL:
            return 0
        ready = [
            entry
            for entry in due
            if not self._used(entry, claims)
            and self._suspects[entry.uid].unclaimed.due(claims, self._settings)
        ]
        collected = 0
        line = iter(ready)

        async def collect() -> None:
            nonlocal collected
            for entry in line:
                collected += await self._collect_one(entry)

        await workers(collect, parallel=PARALLEL, items=len(ready))
        return collected

    async def _collect_one(self, entry: StoredClaim) -> bool:
        suspect = self._suspects[entry.uid]
        facts = {
            "driver": self._driver,
            "claim": str(entry),
            "claim_uid": entry.uid,
            "device": ", ".join(device.device for device in entry.devices),
            "reason": suspect.reason.value,
        }
        try:
            async with asyncio.timeout(COLLECT_SECONDS):
                gone = await self._unprepare(entry)
        except (TimeoutError, CheckpointError) as error:
            gone, facts["error"] = False, str(error) or f"not finished within {COLLECT_SECONDS:g} s"
        if gone:
            del self._suspects[entry.uid]
            logger.warning("stale claim unprepared", extra=facts)
            self._on_collected(suspect.reason)
        elif not suspect.logged:
            self._suspects[entry.uid] = replace(suspect, logged=True)
            logger.warning("stale claim not unprepared yet", extra=facts)
        return gone
