"""
Stale claims: entries of the checkpoint that nobody will ask to unprepare any more.

The kubelet unprepares what it knows. What it has forgotten (its own checkpoint was lost, the node
was cut off while its pods were deleted, the claim was deallocated behind its back) holds its
devices for ever. Such a claim is unprepared as if the kubelet had asked for it, but only after two
looks, a grace period apart, in which the API server has said that the claim is not this entry's any
more; and never while the kubelet lists it, or does not list all its pods.

How a claim is unprepared is the engine's business. It must not know drivers, gRPC or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from drakit.driver import Node
from drakit.resource.claim import Claim
from drakit_nodeplugin.claims.allocation import allocated_results, device_keys
from drakit_nodeplugin.claims.checkpoint.records import StoredClaim
from drakit_nodeplugin.claims.checkpoint.store import CheckpointError
from drakit_nodeplugin.claims.errors import (
    ClaimError,
    ClaimFetchError,
    ClaimGoneError,
    ClaimNotAllocatedError,
    ClaimReplacedError,
    NoAnswerError,
    NoResultError,
    WrongNodeError,
)
from drakit_nodeplugin.claims.grace import Grace, Unclaimed
from drakit_nodeplugin.claims.kubeletview import KubeletClaims, KubeletView, PodView
from drakit_nodeplugin.claims.source import ClaimSource
from drakit_nodeplugin.claims.work import reference_of, workers

__all__ = ("StaleCollector", "StaleReason", "StaleTiming", "judge")

logger = logging.getLogger(__name__)

FETCH_SECONDS = 5.0
"""How long the API server is asked about one claim: nobody waits for the answer."""

COLLECT_SECONDS = 40.0
"""How long one unprepare is waited for; what it began is in the checkpoint and is finished later.
As long as a call of the kubelet gets."""


class StaleReason(StrEnum):
    """Why nobody will ask to unprepare a claim: label of a metric, and word in the log."""

    GONE = "gone"
    """It was deleted."""
    REPLACED = "replaced"
    """There is another one of its name."""
    DEALLOCATED = "deallocated"
    """It has no devices any more."""
    ELSEWHERE = "elsewhere"
    """It is allocated, for another node."""
    REALLOCATED = "reallocated"
    """It is allocated anew, with other devices of the driver, or none."""


_REASONS: Mapping[type[ClaimError], StaleReason] = {
    ClaimReplacedError: StaleReason.REPLACED,
    ClaimNotAllocatedError: StaleReason.DEALLOCATED,
    WrongNodeError: StaleReason.ELSEWHERE,
    NoResultError: StaleReason.REALLOCATED,
}


def judge(
    entry: StoredClaim, found: Claim | None, *, driver: str, node: Node
) -> StaleReason | None:
    """
    Say why an entry is stale, in whatever state; None if it is not, or cannot be told.

    `found` is the claim of its name as the API server has it; None if it said that there is none.
    Only devices count: if configs change for the same devices, the kubelet asks again.
    """
    if found is None:
        return StaleReason.GONE
    try:
        results = allocated_results(
            found,
            reference=reference_of(entry),
            driver=driver,
            node=node.name,
            labels=node.labels,
        )
    except ClaimError as error:
        return _REASONS.get(type(error))
    same = device_keys(results) == device_keys(entry.devices)
    return None if same else StaleReason.REALLOCATED


@dataclass(frozen=True, kw_only=True, slots=True)
class StaleTiming:
    """When is looked, and how long a claim must have been stale."""

    period_seconds: float = 60.0
    """From one look to the next; the kubelet itself looks as often for pods that are gone."""

    grace: Grace = field(default_factory=Grace)
    """How long a claim must have been stale."""

    fetches_per_second: float = 20.0
    """Claims that are read from the API server: every node of a cluster does this."""

    parallel: int = 8
    """Claims that are read, or unprepared, at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Suspicion:
    """An entry that was stale in a look, and in all that had an answer since."""

    generation: int
    reason: StaleReason
    unclaimed: Unclaimed
    told: bool = False
    """It was said that it cannot be unprepared: once is enough."""


class Entries(Protocol):
    """What is needed of the checkpoint."""

    async def count(self) -> int: ...

    def pages(self) -> AsyncIterator[list[StoredClaim]]:
        """Give every entry, some at a time."""
        ...


class StaleCollector:
    """
    Looks for stale claims of one driver, and has them unprepared.

    An entry that is in order costs nothing between two looks, and where the kubelet lists it, the
    API server is not asked for it either.
    """

    def __init__(
        self,
        *,
        driver: str,
        node: Node,
        entries: Entries,
        source: ClaimSource,
        kubelet: KubeletView,
        look_for_files: Callable[[], Awaitable[object]],
        primary: Callable[[], bool],
        registered: Callable[[], bool],
        unprepare: Callable[[StoredClaim], Awaitable[bool]],
        on_collected: Callable[[StaleReason], None],
        timing: StaleTiming,
    ) -> None:
        """
        `look_for_files` is the part of each look that is not about entries: orphaned CDI files.
        `primary` tells whether this is the one process that collects, `registered` whether the
        kubelet has registered the driver since this process started. `unprepare` is given an entry
        as it was read, and gives whether it is gone; if it has changed since, it must leave it.
        """
        self._driver = driver
        self._node = node
        self._entries = entries
        self._source = source
        self._kubelet = kubelet
        self._look_for_files = look_for_files
        self._primary = primary
        self._registered = registered
        self._unprepare = unprepare
        self._on_collected = on_collected
        self._timing = timing
        self._pace = _Pace(timing.fetches_per_second)
        self._suspicions: dict[str, _Suspicion] = {}

    async def run(self) -> None:
        """Look again and again; a look that fails is logged and the next one made."""
        loop, period = asyncio.get_running_loop(), self._timing.period_seconds
        while True:
            # At multiples of the period, so that the collectors of all drivers check at the same
            # time and share one answer of the kubelet.
            pause = period - loop.time() % period
            await asyncio.sleep(pause if pause > period / 2 else pause + period)
            try:
                await self.look()
            except (CheckpointError, OSError) as error:
                logger.error(
                    "stale claims cannot be looked for",
                    extra={"driver": self._driver, "error": str(error)},
                )

    async def look(self) -> int:
        """Look once; give how many claims were collected. Raises CheckpointError, OSError."""
        if not (self._primary() and self._registered()):
            self._suspicions.clear()
            return 0
        await self._look_for_files()
        if not await self._entries.count():
            self._suspicions.clear()
            return 0
        claims = await self._listed()
        if claims.pods is PodView.PARTIAL:
            return 0
        collected = 0
        seen: set[str] = set()
        async for page in self._entries.pages():
            seen.update(entry.uid for entry in page)
            free = [entry for entry in page if not self._used(entry, claims)]
            judged, silent = await self._judge(free)
            due = [e for e in free if e.uid in judged and self._is_due(e, judged[e.uid], claims)]
            collected += await self._collect(due)
            if silent:  # the next look asks again; what is suspected stays so
                return collected
        self._suspicions = {uid: s for uid, s in self._suspicions.items() if uid in seen}
        return collected

    def _used(self, entry: StoredClaim, claims: KubeletClaims) -> bool:
        """Return whether the kubelet lists an entry, which restarts its grace period."""
        if not claims.holds(entry):
            return False
        self._suspicions.pop(entry.uid, None)
        return True

    async def _judge(
        self, entries: Sequence[StoredClaim]
    ) -> tuple[Mapping[str, StaleReason | None], bool]:
        """Ask for claims. One without an answer is missing, and the first that gets none at all
        ends it: an API server that is away or overloaded needs no more questions."""
        judged: dict[str, StaleReason | None] = {}
        line = iter(entries)
        silent = False

        async def ask() -> None:
            nonlocal silent
            for entry in line:
                await self._pace.turn()
                if silent:
                    return
                try:
                    judged[entry.uid] = await self._judge_one(entry)
                except NoAnswerError:
                    silent = True
                    return
                except ClaimFetchError:
                    continue

        await workers(ask, parallel=self._timing.parallel, items=len(entries))
        return judged, silent

    async def _judge_one(self, entry: StoredClaim) -> StaleReason | None:
        """Read and judge the claim of an entry; no reference to it remains: it can take 20 MiB."""
        try:
            found = await self._source.fetch(reference_of(entry), timeout_seconds=FETCH_SECONDS)
        except ClaimGoneError:
            found = None
        return judge(entry, found, driver=self._driver, node=self._node)

    def _is_due(
        self, entry: StoredClaim, reason: StaleReason | None, claims: KubeletClaims
    ) -> bool:
        """Note what a look says of an entry; give whether it has said so for long enough."""
        if reason is None:
            self._suspicions.pop(entry.uid, None)
            return False
        known = self._suspicions.get(entry.uid)
        if known is None or (known.generation, known.reason) != (entry.generation, reason):
            self._suspicions[entry.uid] = _Suspicion(
                generation=entry.generation, reason=reason, unclaimed=Unclaimed.first(claims)
            )
            return False
        unclaimed = known.unclaimed.again(claims)
        self._suspicions[entry.uid] = replace(known, unclaimed=unclaimed)
        return unclaimed.due(claims, self._timing.grace)

    async def _listed(self) -> KubeletClaims:
        """Ask the kubelet; an incomplete list ends all grace periods, also of entries that this
        poll does not judge."""
        claims = await self._kubelet.listed()
        match claims.pods:
            case PodView.PARTIAL:
                # A kubelet that has just started: earlier checks no longer count.
                self._suspicions.clear()
            case PodView.UNKNOWN:
                self._suspicions = {
                    uid: replace(each, unclaimed=each.unclaimed.again(claims))
                    for uid, each in self._suspicions.items()
                }
            case PodView.COMPLETE:
                pass
        return claims

    async def _collect(self, due: Sequence[StoredClaim]) -> int:
        """Unprepare entries, unless the kubelet lists them now, or does not list all its pods."""
        if not due:
            return 0
        # Asked again: reading the claims of a page may have taken half a minute.
        claims = await self._listed()
        if claims.pods is PodView.PARTIAL:
            return 0
        grace = self._timing.grace
        ready = [
            entry
            for entry in due
            if not self._used(entry, claims)
            and self._suspicions[entry.uid].unclaimed.due(claims, grace)
        ]
        collected = 0
        line = iter(ready)

        async def collect() -> None:
            nonlocal collected
            for entry in line:
                collected += await self._collect_one(entry)

        await workers(collect, parallel=self._timing.parallel, items=len(ready))
        return collected

    async def _collect_one(self, entry: StoredClaim) -> bool:
        suspicion = self._suspicions[entry.uid]
        facts = {
            "driver": self._driver,
            "claim": str(entry),
            "claim_uid": entry.uid,
            "device": ", ".join(device.device for device in entry.devices),
            "reason": suspicion.reason.value,
        }
        try:
            async with asyncio.timeout(COLLECT_SECONDS):
                gone = await self._unprepare(entry)
        except (TimeoutError, CheckpointError) as error:
            gone, facts["error"] = False, str(error) or f"no end within {COLLECT_SECONDS:g} s"
        if gone:
            del self._suspicions[entry.uid]
            logger.warning("stale claim is unprepared", extra=facts)
            self._on_collected(suspicion.reason)
        elif not suspicion.told:
            self._suspicions[entry.uid] = replace(suspicion, told=True)
            logger.warning("stale claim is not unprepared yet", extra=facts)
        return gone


class _Pace:
    """Spreads work evenly over time, whoever does it."""

    def __init__(self, per_second: float) -> None:
        self._pause_seconds = 1 / per_second
        self._next = 0.0

    async def turn(self) -> None:
        now = asyncio.get_running_loop().time()
        at = max(now, self._next)
        self._next = at + self._pause_seconds
        await asyncio.sleep(at - now)
