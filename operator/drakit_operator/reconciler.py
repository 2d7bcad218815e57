"""
Turns changes to the store into keys in the fair queue, keys into problems, and problems into
Events.

The concerns decide which objects a change affects, and find their problems. The announcer decides
when to announce them. HostDevicePolicies, DeviceMaintenances and DeviceDrivers are in the same
queue, but have a status instead of problems.

Each namespace is charged for the work on its objects. Each kind of cluster-scoped object is charged
separately. The queue (:mod:`drakit_daemon.kube.queue`) has three lanes: claims, which are checked
immediately; queries of the selector evaluator; and all other checks, one at a time. If a check
lacks results of the allocator, they are requested, and the check is repeated.

Does not depend on Kopf, Leases, or sessions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from drakit_daemon.kube import ApiError
from drakit_daemon.kube.queue import WorkQueue
from drakit_daemon.logs import new_request_id, request_scope
from drakit_explain.codes import Reason
from drakit_explain.counts import Numbers, count
from drakit_explain.kinds import CLAIMS, CLASSES, KINDS, NODES, PODS, SLICES, TEMPLATES, Kind
from drakit_explain.model import ClaimFacts, TemplateFacts
from drakit_explain.pending import Explainer, count_waiting, waits
from drakit_explain.poolchecks import node_problems, pool_conditions, slice_problems
from drakit_explain.queries import QueriesPendingError, Verdicts
from drakit_explain.selectors import FeatureGates, Selectors
from drakit_explain.templates import class_problems, template_problems
from drakit_explain.world import Change, Name
from drakit_operator.affected import (
    ALL_DRIVERS,
    CLAIM,
    CLASS,
    DRIVER,
    MAINTENANCE,
    NODE,
    POD,
    POLICY,
    SLICE,
    TEMPLATE,
    Key,
    affected,
)
from drakit_operator.allocating import AllocatorQueries
from drakit_operator.announcing import Announcer, NotWrittenError
from drakit_operator.metrics import Metrics
from drakit_operator.problems import problems_of_claim, problems_of_pod, running_pods
from drakit_operator.selecting import SelectorEvaluation
from drakit_operator.store import Store

logger = logging.getLogger(__name__)

URGENT = CLAIM
"""The concern whose checks are cheap. They run immediately, and before all others."""

BUSY_SECONDS = 0.5
"""How long to wait before checking an object again that did not get its turn in the allocator."""

OUTDATED_SECONDS = 2.0
"""How long to wait before checking an object again while the store does not have all objects."""

YIELD_SECONDS = 0.002
"""How often other checks test whether the urgent checks are done."""

COUNT_SECONDS = 30.0
"""How long to wait between two counts of all devices. In a large cluster, a count takes almost a
second."""

POLICY_SECONDS = 1.0
"""How long to wait after a change before reconciling the policy or driver. Changes come in bursts:
a node reports, a slice changes, a pod starts."""


CHECKS, URGENT_CHECKS, SELECTORS = "checks", "urgent", "selectors"
"""The lanes of the queue."""


def new_queue(*, retry_limit_seconds: float) -> WorkQueue[Key]:
    """Return a queue for a reconciler."""
    return WorkQueue(
        retry_limit_seconds=retry_limit_seconds,
        owner_of=lambda key: key.name.namespace or f"/{key.concern}",
        lanes=(CHECKS, URGENT_CHECKS, SELECTORS),
        lane_of=lambda key: URGENT_CHECKS if key.concern == URGENT else CHECKS,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Concern:
    """A kind of object that the operator evaluates."""

    kind: Kind
    problems: Callable[[Any, bool], Problems]
    """Returns the reasons, keyed by the UID of their object. Called with an object, and whether it
    is settled."""

    settles: bool = False
    """Whether an object is checked again when it is settled, because some reasons are normal for a
    short time."""

    once: bool = False
    """Whether one Event for each reason is enough."""

    expressions: Callable[[Any], Sequence[str]] | None = None
    """Returns the selectors that must be evaluated before the check."""

    prepare: Callable[[Any], Iterator[None]] | None = None
    """Does the long part of the check. It yields at intervals."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refresh:
    """Reconciles objects of one kind that have a status instead of problems."""

    call: Callable[[str], Awaitable[float | None]]
    """Reconciles the object with the given name. Returns the seconds until the next call. May raise
    ApiError."""

    expressions: Callable[[str], Sequence[str]] = lambda _: ()
    """Returns the selectors that must be evaluated before the call."""


Problems = Mapping[str, Sequence[Reason]]
"""Reasons, keyed by the UID of their object."""


def concerns_of(store: Store, explainer: Explainer) -> dict[str, Concern]:
    """Return the concerns for a store, keyed by their names in the queue and in metrics."""
    world, verdicts = store.world, explainer.verdicts
    return {
        POD: Concern(
            kind=PODS,
            problems=lambda pod, settled: problems_of_pod(pod, world, explainer, settled=settled),
            settles=True,
            expressions=explainer.expressions,
            prepare=lambda pod: explainer.prepare(pod) if waits(pod) else iter(()),
        ),
        CLAIM: Concern(kind=CLAIMS, problems=lambda claim, _: problems_of_claim(claim, world)),
        # Templates and classes are checked when they appear, but not whenever devices change,
        # because a waiting pod then gets its own Events.
        TEMPLATE: Concern(
            kind=TEMPLATES,
            problems=lambda of, _: {of.uid: template_problems(of, world, verdicts)},
            expressions=lambda of: world.texts(of.requests),
            once=True,
        ),
        CLASS: Concern(
            kind=CLASSES,
            problems=lambda of, _: {of.uid: class_problems(of, world)},
            expressions=lambda of: list(filter(None, of.selectors)),
            once=True,
        ),
        # Problems of pools are reported on their Node, because each update replaces slices.
        NODE: Concern(kind=NODES, problems=lambda of, _: {of.uid: node_problems(of, world)}),
        SLICE: Concern(kind=SLICES, problems=lambda of, _: {of.uid: slice_problems(of, world)}),
    }


class Reconciler:
    """Reconciles the objects of a store."""

    def __init__(
        self,
        *,
        store: Store,
        queue: WorkQueue[Key],
        announcer: Announcer,
        metrics: Metrics,
        debounce_seconds: float,
        selectors: Selectors,
        allocator: AllocatorQueries,
        name_all_holders: bool = False,
        refresh: Mapping[str, Refresh],
        is_current: Callable[[], bool],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """
        :param refresh: reconciles objects that have a status instead of problems, by concern.
        :param is_current: returns whether the store has all objects. While it does not, problems
            are uncertain.
        :param clock: returns the time in seconds, to measure checks.
        """
        self._clock = clock
        self._refresh = refresh
        self._is_current = is_current
        explainer = Explainer(store.world, name_all_holders=name_all_holders)
        self.verdicts: Verdicts = explainer.verdicts
        self._allocator = allocator
        self._concerns = concerns_of(store, explainer)
        self._evaluation = SelectorEvaluation(store.world, selectors)
        self._checking = asyncio.Lock()
        """Allows one check at a time. In a large cluster, checking all devices takes a tenth of a
        second."""

        self._check_seconds = 0.0
        """How long the last part of a non-urgent check took."""

        self.driver_devices: Mapping[str, Counter[str]] | None = None
        """The number of devices in each state, keyed by driver. None before the first count."""

        self._store = store
        self._queue = queue
        self._announcer = announcer
        self._metrics = metrics
        self._debounce_seconds = debounce_seconds

    def changed(self, changes: Sequence[Change]) -> None:
        """Queue the objects that these changes affect. A batch costs one check per object."""
        for change in changes:
            self._follow_ages(change)
        # Other objects wait, because changes come in bursts, and the scheduler may be about to act.
        pauses = {URGENT: 0.0, MAINTENANCE: 0.0}
        pauses |= {POLICY: POLICY_SECONDS, DRIVER: POLICY_SECONDS}
        for key in affected(changes, self._store.world):
            self._queue.add_after(key, pauses.get(key.concern, self._debounce_seconds))

    def check(self, concern: str, name: str, seconds: float) -> None:
        """Queue an object that has a status."""
        self._queue.add_after(Key(concern, Name("", name)), seconds)

    async def use(self, gates: FeatureGates | None) -> None:
        """Evaluate selectors with these feature gates. After a change, check the objects with
        selectors."""
        if await self._evaluation.use(gates):
            for word, concern in self._concerns.items():
                for name in self._store.world.of(concern.kind.type) if concern.expressions else ():
                    self._queue.add_after(Key(word, name), self._debounce_seconds)

    def add_waiting(self) -> None:
        """Queue the waiting pods. The requests of the pods on nodes change too often to queue the
        waiting pods after each change. Queries that the allocator could not answer are repeated."""
        self.verdicts.forget_undecided()
        for name in self._store.world.waiting_pods():
            self._queue.add_after(Key(POD, name), self._debounce_seconds)

    def _follow_ages(self, change: Change) -> None:
        of = type(change.new or change.old)
        if all(concern.kind.type is not of for concern in self._concerns.values()):
            return
        if change.old is not None and (change.new is None or change.new.uid != change.old.uid):
            self._announcer.forget(change.old.uid)
        if change.new is not None:
            self._announcer.known(change.new.uid)
        if isinstance(change.old, ClaimFacts):
            users = change.new.consumers if isinstance(change.new, ClaimFacts) else ()
            for each in running_pods(change.old, self._store.world):
                if each not in users:  # the Events of a running pod depend only on its claims
                    self._announcer.forget(each.uid)

    def measure(self) -> None:
        """Count the known objects and the pools."""
        for kind in KINDS:
            self._metrics.objects.labels(str(kind)).set(self._store.size(kind))
        for condition, number in pool_conditions(self._store.world).items():
            self._metrics.pools.labels(str(condition)).set(number)

    async def count_devices(self) -> None:
        """Periodically count the devices, and the pods that are waiting for them, until
        canceled."""
        waiting_since: dict[str, float] = {}
        while True:
            numbers = Numbers()
            waiting: dict[str, set[str]] = {}
            for _ in chain(
                count(self._store.world, numbers), count_waiting(self._store.world, waiting)
            ):
                await asyncio.sleep(0)
            for gauge, found in (
                (self._metrics.devices, numbers.drivers),
                (self._metrics.class_devices, numbers.classes),
                (self._metrics.policy_devices, numbers.policies),
            ):
                gauge.clear()
                for name, states in found.items():
                    for state, number in states.items():
                        gauge.labels(name, state).set(number)
            now = asyncio.get_running_loop().time()
            uids = set[str]().union(*waiting.values())
            waiting_since = {uid: waiting_since.get(uid, now) for uid in uids}
            pods, longest = self._metrics.waiting_pods, self._metrics.longest_wait_seconds
            pods.clear()
            longest.clear()
            for name, found in waiting.items():
                pods.labels(name).set(len(found))
                since = min((waiting_since[uid] for uid in found), default=now)
                longest.labels(name).set(now - since)
            if self.driver_devices != numbers.drivers:
                self.driver_devices = numbers.drivers
                self._queue.add(ALL_DRIVERS)
            await asyncio.sleep(COUNT_SECONDS)

    async def never_allocated(self, template: TemplateFacts) -> list[str]:
        """Return the reasons why claims of a template that does not exist yet can never be
        allocated, if that is certain. The call takes as long as the allocator does, so the caller
        must limit the time."""
        namespace = template.namespace
        while self._is_current():
            try:
                found = template_problems(template, self._store.world, self.verdicts)
                return [each.text for each in found]
            except QueriesPendingError:
                queries = self.verdicts.take()
            if await self._allocator.ask(queries, self.verdicts, namespace) is None:
                break
        return []

    async def work(self, *, urgent: bool = False) -> None:
        """
        Reconcile one object at a time, until canceled.

        :param urgent: whether to process only the urgent checks. Otherwise, only the other ones are
            processed.
        """
        while True:
            async with AsyncExitStack() as turn:
                if not urgent:  # wait before `get`, which decides whose turn it is
                    await turn.enter_async_context(self._checking)
                key = await self._queue.get(URGENT_CHECKS if urgent else CHECKS)
                with request_scope(new_request_id()):
                    await self._reconcile(key, turn)
            await asyncio.sleep(0)  # a long queue must not block the main loop

    async def evaluate(self) -> None:
        """Evaluate the selectors of objects until canceled, one query at a time."""
        while True:
            key = await self._queue.get(SELECTORS)
            began = time.monotonic()
            try:
                missing, _ = self._evaluation.missing(self._expressions(key))
                if missing is not None:
                    await self._evaluation.ask(missing, namespace=key.name.namespace)
                    self._queue.move(key, SELECTORS)  # another query may follow
                else:
                    self._queue.add(key)
            except Exception:  # a bug that affects one object must not stop the others
                logger.exception("selectors cannot be evaluated", extra=_facts(key))
                self._queue.retry(key)
            finally:
                self._queue.charge(key, time.monotonic() - began)
                self._queue.done(key)
            await asyncio.sleep(0)

    async def _reconcile(self, key: Key, turn: AsyncExitStack) -> None:
        began = asyncio.get_running_loop().time()
        result, again, is_checked = "success", None, True
        try:
            if not self._is_current():
                again = OUTDATED_SECONDS
            elif (refresh := self._refresh.get(key.concern)) is not None:
                if self._evaluation.missing(self._expressions(key))[0] is not None:
                    self._queue.move(key, SELECTORS)
                else:
                    await turn.aclose()
                    again = await refresh.call(key.name.name)
            else:
                again, is_checked = await self._check(key, turn)
        except Exception as error:
            result = "error"
            if isinstance(error, NotWrittenError | ApiError):
                logger.warning(
                    "object cannot be reconciled", extra={**_facts(key), "error": str(error)}
                )
            else:  # a bug that affects one object must not stop the others
                logger.exception("object cannot be reconciled", extra=_facts(key))
            self._queue.retry(key)
        else:
            self._queue.forget(key)
            if again is not None:
                self._queue.add_after(key, again)
        finally:
            goes_on_in = self._queue.done(key)
        if goes_on_in == SELECTORS or not is_checked:
            return
        seconds = asyncio.get_running_loop().time() - began
        self._metrics.reconcile_seconds.labels(key.concern, result).observe(seconds)

    async def _check(self, key: Key, turn: AsyncExitStack) -> tuple[float | None, bool]:
        """Announce the problems of an object, or first request the missing results. Return the
        seconds until the next check, and whether the object was checked."""
        try:
            return await self._announce_problems(key, turn), True
        except QueriesPendingError:
            queries = self.verdicts.take()
        await turn.aclose()
        seconds = await self._allocator.ask(queries, self.verdicts, key.name.namespace)
        if seconds is None:
            return BUSY_SECONDS, False
        self._queue.charge(key, seconds)
        return 0.0, False

    async def _announce_problems(self, key: Key, turn: AsyncExitStack) -> float | None:
        """Announce the problems of an object. Return the seconds until the next check."""
        concern = self._concerns[key.concern]
        with self._charged(key):
            expressions = self._expressions(key)
            missing, retry = self._evaluation.missing(expressions)
            if missing is not None:
                self._queue.move(key, SELECTORS)
                return None
        if key.concern != URGENT:
            await self._yield_to_urgent()
        for _ in self._parts(key) if retry is None else ():
            await self._yield_to_urgent()
        lost = self._evaluation.lost(expressions) and retry is None
        if lost or not self._is_current():
            return OUTDATED_SECONDS
        if (fact := self._store.find(concern.kind, key.name)) is None:
            return None
        unsettled = self._announcer.unsettled_seconds(fact.uid) if concern.settles else 0.0
        with self._charged(key):
            found = concern.problems(fact, unsettled <= 0)
        await turn.aclose()
        # Don't suspend before this point: the announcer may search for a remedy in the world, which
        # must still have these problems.
        pauses = [
            await self._announcer.announce(
                uid,
                [self._with_charge(each, key) for each in reasons],
                wake=partial(self._queue.add, key),
                once=concern.once,
                as_old_as=fact.uid,
            )
            for uid, reasons in found.items()
        ]
        pauses += [retry, unsettled if unsettled > 0 else None]
        return min((each for each in pauses if each is not None), default=None)

    def _expressions(self, key: Key) -> Sequence[str]:
        """Return the selectors that must be evaluated before an object is checked."""
        if (refresh := self._refresh.get(key.concern)) is not None:
            return refresh.expressions(key.name.name)
        concern = self._concerns[key.concern]
        fact = self._store.find(concern.kind, key.name)
        return concern.expressions(fact) if concern.expressions and fact is not None else ()

    def _parts(self, key: Key) -> Iterator[None]:
        """Do the long part of a check. Yield at intervals."""
        concern = self._concerns[key.concern]
        fact = self._store.find(concern.kind, key.name)
        if concern.prepare is None or fact is None:
            return
        parts = concern.prepare(fact)
        while True:
            with self._charged(key):
                is_last = next(parts, parts) is parts
            if is_last:
                return
            yield

    async def _yield_to_urgent(self) -> None:
        """Wait for urgent checks and their Events, but at most as long as the last non-urgent check
        took."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._check_seconds
        await asyncio.sleep(0)
        while self._queue.is_busy(URGENT_CHECKS) and loop.time() < until:  # noqa: ASYNC110 - it is short
            await asyncio.sleep(YIELD_SECONDS)

    @contextmanager
    def _charged(self, key: Key) -> Generator[None]:
        """Charge the owner of a key for the time that the block takes."""
        began = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - began
            self._queue.charge(key, seconds)
            if key.concern != URGENT:
                self._check_seconds = seconds

    def _with_charge(self, reason: Reason, key: Key) -> Reason:
        """Return the reason, with a search for its remedy that also charges the owner of the key.
        The search takes the longest."""

        def find_remedy() -> str:
            with self._charged(key):
                return reason.find_remedy()

        return replace(reason, find_remedy=find_remedy)


def _facts(key: Key) -> dict[str, str]:
    return {"concern": key.concern, "object": f"{key.name.namespace}/{key.name.name}"}
