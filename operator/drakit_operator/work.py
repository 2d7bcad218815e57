"""
The work: from changes to keys in the queue, from keys to findings, from findings to Events.

The concerns decide which objects a change affects, and find their problems; the announcer decides
when to announce them. Everything here runs in the main loop.

It must not know Kopf, leases, or sessions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from drakit.explain.codes import Reason
from drakit.explain.pending import Explainer, waits
from drakit.explain.poolchecks import pool_conditions
from drakit.explain.selectors import FeatureGates, Selectors
from drakit.kube.queue import QueueFullError, WorkQueue
from drakit.logs import new_request_id, request_scope
from drakit_operator.announcing import Announcer, NotWrittenError
from drakit_operator.claims.handlers import claims_touched, pods_touched
from drakit_operator.claims.reconcile import judge_claim, judge_pod
from drakit_operator.intake import Seen
from drakit_operator.kinds import CLAIMS, CLASSES, NODES, PODS, SLICES, TEMPLATES, Kind, Name
from drakit_operator.metrics import Metrics
from drakit_operator.selecting import SelectorEvaluation
from drakit_operator.slices.handlers import nodes_touched, slices_touched
from drakit_operator.slices.reconcile import judge_node, judge_slice
from drakit_operator.store import Change, Store
from drakit_operator.templates.handlers import classes_touched, templates_touched
from drakit_operator.templates.reconcile import (
    expressions_of_class,
    expressions_of_template,
    judge_class,
    judge_template,
)

__all__ = ("URGENT", "Concern", "Key", "Work", "concerns_of")

logger = logging.getLogger(__name__)


URGENT = frozenset(["claim"])
"""Concerns whose checks are cheap: they are made at once, and before all others."""


class Key(NamedTuple):
    """An entry of the queue: an object of a concern."""

    concern: str
    name: Name


@dataclass(frozen=True, kw_only=True, slots=True)
class Concern:
    """One kind of objects that the operator evaluates."""

    kind: Kind
    touched: Callable[[Sequence[Change], Store], Iterable[Name]]
    judge: Callable[[Name, bool], Judged]
    """From a name, and whether the object is settled, to the reasons of objects by UID."""

    settles: bool = False
    """An object is judged once more when it is settled: some reasons are normal for a moment."""

    once: bool = False
    """One Event for each reason is enough."""

    expressions: Callable[[Name], Sequence[str]] = lambda name: ()
    """The selectors that must be evaluated first."""


Judged = Mapping[str, Sequence[Reason]]
"""Reasons by the UID of their object; empty if the object does not exist."""


def concerns_of(store: Store, *, name_all_holders: bool) -> dict[str, Concern]:
    """Return the concerns over a store, by their names in the queue and in metrics."""
    world = store.world
    explainer = Explainer(world, name_all_holders=name_all_holders)

    def expressions(name: Name) -> Sequence[str]:
        pod = world.pod(name.namespace, name.name)
        return explainer.expressions(pod) if pod is not None and waits(pod) else ()

    return {
        "pod": Concern(
            kind=PODS,
            touched=pods_touched,
            judge=lambda name, settled: judge_pod(name, world, explainer, settled=settled),
            settles=True,
            expressions=expressions,
        ),
        "claim": Concern(
            kind=CLAIMS,
            touched=claims_touched,
            judge=lambda name, _: judge_claim(name, world),
        ),
        "template": Concern(
            kind=TEMPLATES,
            touched=templates_touched,
            judge=lambda name, _: judge_template(name, world),
            expressions=lambda name: expressions_of_template(name, world),
            once=True,
        ),
        "class": Concern(
            kind=CLASSES,
            touched=classes_touched,
            judge=lambda name, _: judge_class(name, world),
            expressions=lambda name: expressions_of_class(name, world),
            once=True,
        ),
        "node": Concern(
            kind=NODES, touched=nodes_touched, judge=lambda name, _: judge_node(name, world)
        ),
        "slice": Concern(
            kind=SLICES, touched=slices_touched, judge=lambda name, _: judge_slice(name, world)
        ),
    }


class Work:
    """Store, queue and announcer of one term of leadership; they outlive the runs of Kopf."""

    def __init__(
        self,
        *,
        store: Store,
        queue: WorkQueue[Key],
        announcer: Announcer,
        metrics: Metrics,
        debounce_seconds: float,
        selectors: Selectors,
        name_all_holders: bool = False,
        on_changes: Callable[[Sequence[Change]], None] = lambda _: None,
    ) -> None:
        """`on_changes` gets all changes, for concerns with queues of their own."""
        self._on_changes = on_changes
        self._concerns = concerns_of(store, name_all_holders=name_all_holders)
        self._evaluation = SelectorEvaluation(store.world, selectors)
        self._turn = asyncio.Lock()
        self._store = store
        self._queue = queue
        self._announcer = announcer
        self._metrics = metrics
        self._debounce_seconds = debounce_seconds
        self._dropped = False

    def take(self, batch: Sequence[Seen]) -> None:
        """Take the objects that a watch reported."""
        changes: list[Change] = []
        for seen in batch:
            if seen.fact is None:
                change = self._store.remove(seen.kind, seen.name, uid=seen.uid)
            else:
                change = self._store.apply(seen.kind, seen.fact)
            if change is not None:
                changes.append(change)
        self.changed(changes)

    def changed(self, changes: Sequence[Change]) -> None:
        """Queue the objects that these changes affect; a batch costs one check per object."""
        self._on_changes(changes)
        for change in changes:
            self._follow_ages(change)
        for word, concern in self._concerns.items():
            # Not at once: changes come in bursts, and the scheduler may be about to act.
            seconds = 0.0 if word in URGENT else self._debounce_seconds
            for name in concern.touched(changes, self._store):
                self._add(Key(word, name), seconds)

    async def use(self, gates: FeatureGates | None) -> None:
        """Evaluate selectors with these feature gates; after a change, evaluate everything."""
        if await self._evaluation.use(gates):
            self._add_all()

    def add_dropped(self) -> None:
        """If the queue was full, queue everything again: the dropped objects are unknown."""
        if self._dropped:
            self._dropped = False
            self._add_all()

    def _add_all(self) -> None:
        for word, concern in self._concerns.items():
            for name in self._store.uids(concern.kind):
                self._add(Key(word, name), self._debounce_seconds)

    def add_waiting(self) -> None:
        """Queue the pods that wait: what pods request of nodes changes too often to queue them."""
        for name in self._store.world.waiting_pods():
            self._add(Key("pod", name), self._debounce_seconds)

    def _add(self, key: Key, seconds: float) -> None:
        try:
            self._queue.add_after(key, seconds)
        except QueueFullError as error:
            if not self._dropped:
                logger.warning(
                    "queue is full; all objects are checked again later",
                    extra={"error": str(error)},
                )
            self._dropped = True

    def _follow_ages(self, change: Change) -> None:
        if all(concern.kind is not change.kind for concern in self._concerns.values()):
            return
        if change.old is not None and (change.new is None or change.new.uid != change.old.uid):
            self._announcer.forget(change.old.uid)
        if change.new is not None:
            self._announcer.known(change.new.uid)

    def measure(self) -> None:
        """Count the pools."""
        for condition, number in pool_conditions(self._store.world).items():
            self._metrics.pools.labels(str(condition)).set(number)

    async def work(self) -> None:
        """Evaluate one object after the other, until canceled."""
        while True:
            key = await self._queue.get()
            with request_scope(new_request_id()):
                await self._judge(key)
            await asyncio.sleep(0)  # a long queue must not keep probes and the Lease waiting

    async def _judge(self, key: Key) -> None:
        began = asyncio.get_running_loop().time()
        outcome = "ok"
        try:
            concern = self._concerns[key.concern]
            retry = await self._evaluation.prepare(concern.expressions(key.name))
            async with self._turn:
                # One at a time: checking all devices of a large cluster takes a tenth of a
                # second, and the renewal of the Lease needs several turns of the loop.
                await asyncio.sleep(0)
                unsettled = self._unsettled_seconds(concern, key.name)
                judged = concern.judge(key.name, unsettled <= 0)
            # At once: the announcer may ask for a remedy in the world that was judged.
            pauses = [
                await self._announcer.announce(uid, reasons, once=concern.once)
                for uid, reasons in judged.items()
            ]
            if judged:
                pauses += [retry, unsettled if unsettled > 0 else None]
            again = min((each for each in pauses if each is not None), default=None)
        except Exception as error:
            outcome = "error"
            if isinstance(error, NotWrittenError):
                logger.warning(
                    "event cannot be written", extra={**_facts(key), "error": str(error)}
                )
            else:  # a defect of ours in one object must not stop the others
                logger.exception("object cannot be evaluated", extra=_facts(key))
            self._queue.retry(key)
        else:
            self._queue.forget(key)
            if again is not None:
                self._add(key, again)
        finally:
            self._queue.done(key)
        seconds = asyncio.get_running_loop().time() - began
        self._metrics.reconcile_seconds.labels(key.concern, outcome).observe(seconds)

    def _unsettled_seconds(self, concern: Concern, name: Name) -> float:
        """Return in how many seconds an object is settled; 0 if it is."""
        fact = self._store.find(concern.kind, name) if concern.settles else None
        return self._announcer.unsettled_seconds(fact.uid) if fact is not None else 0.0


def _facts(key: Key) -> dict[str, str]:
    return {"concern": key.concern, "object": f"{key.name.namespace}/{key.name.name}"}
