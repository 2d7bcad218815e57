"""
Follows all kinds, with a reflector for each. A reflector's lists fill the store, and its changes
are events for the Kopf handlers.

A list is stored as a whole, because objects that are missing from it are gone. It produces events
only for the kinds in :data:`WHOLE`. The store is complete when each kind has been listed once, or
is left out because the cluster does not serve it or denies access to it. Without the required
kinds, no cause is certain.

Most pods of a cluster neither use devices nor wait. They are not in the store: :class:`LoadWatch`
keeps only the sums of their requests for each node.

Does not depend on Kopf, queues, or Events.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from drakit_daemon.kube import ApiError, ForbiddenError, NotFoundError, Session
from drakit_daemon.kube.listing import SkippedLog
from drakit_daemon.kube.reflector import Applied, Deleted, Reflector, Replaced
from drakit_explain.kinds import MAINTENANCES, POLICIES, UNREADABLE, Kind
from drakit_explain.loads import Load, Loads, load_of_pod
from drakit_explain.world import Change, Fact, Name, name_of_fact
from drakit_formats.resource.objects import Object
from drakit_operator.kinds import SELECTED, Absence, Served, find, name_of
from drakit_operator.metrics import Metrics
from drakit_operator.store import Store

logger = logging.getLogger(__name__)

BATCH_SECONDS = 0.05
"""How long to collect changes before passing them on together, because checking the affected
objects is expensive. A rolling update of a driver changes hundreds of slices within seconds."""

RETRY_SECONDS = 5.0
"""Maximum pause before a request is repeated. It can be short, because only the leader makes these
requests, and nothing is certain while a kind is not followed."""

LASTING_SECONDS = 60.0
"""How long the errors of a watch can last before they are reported as a problem. Until they end,
nothing is certain."""

AT_ONCE = 500
"""How many listed objects to store in one iteration of the event loop, which takes about 20 ms."""

IN_FLIGHT = 100
"""Maximum number of events of a kind to buffer for the handlers. Further events wait in the
connection."""

WHOLE = frozenset({POLICIES, MAINTENANCES})
"""The kinds whose handlers get the whole object, because they reconcile it."""

ABSENT_SECONDS = 5.0
"""How often to check again for a kind that the cluster does not have, or that the operator may not
list and watch."""

COLLECTED = 5000
"""How many objects to keep before garbage is collected, which takes about 20 ms."""

POD_PATH = "/api/v1/pods"
ON_NODES = {"fieldSelector": "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"}

OUTDATED_SECONDS = 180.0
"""How long the watch can be silent before the loads are considered unknown. Bookmarks arrive every
minute."""


Event = dict[str, Any]
"""A watch event in the form that Kopf expects, with the fact of its object (``fact``). The object
has no content unless its kind is in WHOLE."""


class Sources:
    """Keeps the store up to date."""

    def __init__(
        self,
        session: Session,
        store: Store,
        kinds: Sequence[Kind],
        *,
        metrics: Metrics,
        take: Callable[[Sequence[Change]], None],
        recheck_seconds: float,
    ) -> None:
        """
        :param take: receives the changes to the store.
        :param recheck_seconds: how often to read the served versions and the permissions.
        """
        self._session = session
        self._store = store
        self.kinds = tuple(kinds)
        self._metrics = metrics
        self._take = take
        self._recheck_seconds = recheck_seconds
        self._known: dict[Kind, Served | Absence] = {}
        self._reflectors: dict[Kind, Reflector[Fact]] = {}
        self._errors: dict[Kind, tuple[float, str]] = {}
        """Kinds that cannot be listed, with the time of the first failure (loop clock) and the
        reason."""
        self._changes: list[Change] = []
        self._skipped = SkippedLog()
        self._garbage = _Garbage()
        self._channels = {kind: _Channel() for kind in self.kinds}
        self._partial: set[Kind] = set()
        """Kinds whose last list has not been stored completely."""

        self.complete = asyncio.Event()
        """Set when every kind has been listed once, or is left out."""

    async def run(self) -> None:
        """Follow the kinds until canceled. Retry indefinitely after errors."""
        async with asyncio.TaskGroup() as group:
            for kind in self.kinds:
                group.create_task(self._follow(kind), name=str(kind))

    def problem(self) -> str | None:
        """Return a message, with the reason, about a required kind or a kind of drakit that cannot
        be listed, or about a kind that cannot be watched. Return None if there is no such kind."""
        now = asyncio.get_running_loop().time()
        for kind, (since, why) in self._errors.items():
            if kind.required or now - since > LASTING_SECONDS:
                return f"{kind} cannot be listed: {why}"
        for kind, reflector in self._followed():
            if reflector.failing_seconds() > LASTING_SECONDS:
                return f"{kind} cannot be watched: {reflector.last_error}"
        return None

    @property
    def is_current(self) -> bool:
        """Whether the store is complete, and currently follows every kind. If not, an object that
        another object refers to can exist without being in the store."""
        return (
            self.complete.is_set()
            and not self._partial
            and all(reflector.last_error is None for _, reflector in self._followed())
        )

    def _followed(self) -> Iterator[tuple[Kind, Reflector[Fact]]]:
        """Return the reflectors of all kinds that are not left out."""
        for kind, reflector in self._reflectors.items():
            if not self.is_absent(kind):
                yield kind, reflector

    def is_absent(self, kind: Kind) -> bool:
        """Return whether the cluster does not have a kind, or the operator may not list it."""
        return isinstance(self._known.get(kind), Absence)

    def version_of(self, kind: Kind) -> str:
        """Return the ``apiVersion`` in which the cluster serves a kind. If that is unknown, return
        the preferred one."""
        known = self._known.get(kind)
        version = known.version if isinstance(known, Served) else kind.versions[0]
        return f"{kind.group}/{version}" if kind.group else version

    # ---- called by the handlers

    async def next_event(self, kind: Kind) -> Event:
        """Wait for the next event of a kind. Each event must be passed to :meth:`handle`."""
        return await self._channels[kind].get()

    def handle(self, kind: Kind, event: Event) -> None:
        """Put the fact of an event into the store, or remove it."""
        self._channels[kind].handled()
        fact: Fact = event["fact"]
        if event["type"] == "DELETED":
            self._changed(self._store.remove(kind, name_of_fact(fact), uid=fact.uid))
        else:
            self._changed(self._store.apply(kind, fact))

    # ---- one kind

    async def _follow(self, kind: Kind) -> None:
        while True:
            found = await self._find(kind)
            if isinstance(found, Absence):
                self._leave_out(kind, found)
                await asyncio.sleep(min(ABSENT_SECONDS, self._recheck_seconds))
                continue
            reading = asyncio.create_task(self._read(found), name=f"reflector of {kind}")
            try:
                why = await self._until_outdated(reading, found)
            finally:
                reading.cancel()
                await asyncio.wait({reading})
                self._reflectors.pop(kind, None)
            logger.info("a kind is listed again", extra={"kind": str(kind), "reason": why})

    async def _until_outdated(self, reading: asyncio.Task[None], served: Served) -> str:
        """Wait until a kind must be listed again, and return the reason. If the reflector fails,
        raise its error."""
        while True:
            await asyncio.wait({reading}, timeout=self._recheck_seconds)
            if reading.done():
                reading.result()
                return "its reflector ended"
            if self._store.take_room(served.kind):
                return "there is room again for content that was refused"
            if served != await self._find(served.kind):
                return "the API server serves it differently"

    async def _find(self, kind: Kind) -> Served | Absence:
        while True:
            try:
                return await find(self._session, kind)
            except ApiError as error:
                if kind not in self._known:
                    self._failed(kind, error)
                await asyncio.sleep(min(RETRY_SECONDS, self._recheck_seconds))

    async def _read(self, served: Served) -> None:
        kind, channel = served.kind, self._channels[served.kind]
        bodies: dict[Name, Object] = {}

        def keep(body: dict[str, Any]) -> Fact:
            self._garbage.kept()
            if kind in WHOLE:
                bodies[name_of(body)] = body
            fact = self._store.admit(served.read(body, on_skipped=self._on_skipped))
            # To save memory, use the object in the store if it is equal.
            known = self._store.find(kind, name_of(body))
            return known if known is not None and known == fact else fact

        def keep_unreadable(metadata: Mapping[str, Any], reason: str) -> Fact:
            self._on_skipped(kind, metadata, reason)
            return self._store.admit(served.project_unreadable(metadata))

        def event(word: str | None, fact: Fact) -> Event:
            """Return an event for Kopf. Unless the kind is in :data:`WHOLE`, it has no UID, so
            Kopf identifies objects by name, and handles an object and its replacement in order."""
            name = name_of_fact(fact)
            metadata = {"name": name.name, "namespace": name.namespace}
            body = bodies.pop(name, {"metadata": metadata})
            return {"type": word, "object": body, "fact": fact}

        reflector = self._reflectors[kind] = Reflector(
            self._session,
            served.path,
            keep=keep,
            keep_unreadable=keep_unreadable,
            params=SELECTED.get(kind),
            streams=True,
            retry_limit_seconds=RETRY_SECONDS,
            on_error=lambda error: self._failed(kind, error),
        )
        async for change in reflector.changes():
            match change:
                case Replaced(items=facts):
                    # Handle earlier events first, so that they do not undo the list.
                    await channel.settled()
                    await self._replace(served, facts)
                    for fact in facts if kind in WHOLE else ():
                        await channel.send(event(None, fact))
                case Applied(object=fact):
                    await channel.send(event("MODIFIED", fact))
                case Deleted(object=fact):
                    await channel.send(event("DELETED", fact))

    async def _replace(self, served: Served, facts: Sequence[Fact]) -> None:
        """Process a complete list. Yield to the loop at intervals."""
        # After a cancellation, the kind stays partial until its next list.
        self._partial.add(served.kind)
        for number, change in enumerate(self._store.replace(served.kind, facts)):
            if change is not None:
                self._changes.append(change)
            if number % AT_ONCE == AT_ONCE - 1:
                self._hand_over()
                await asyncio.sleep(0)
        self._partial.discard(served.kind)
        self._listed(served)
        self._hand_over()

    # ---- results

    def _listed(self, served: Served) -> None:
        kind = served.kind
        self._metrics.kind_listed.labels(str(kind)).set(1)
        self._errors.pop(kind, None)
        if self.is_absent(kind):
            logger.info("kind is watched again", extra={"kind": str(kind)})
        self._settle(kind, served)

    def _failed(self, kind: Kind, error: ApiError) -> None:
        """Record that a kind cannot be listed or watched at the moment."""
        denied = isinstance(error, ForbiddenError | NotFoundError)
        if denied and not kind.required:
            forbidden = isinstance(error, ForbiddenError)
            self._leave_out(kind, Absence(reason=error.message, forbidden=forbidden))
        elif denied or kind not in self._known:
            self._metrics.kind_listed.labels(str(kind)).set(0)
            if kind.required:
                self._record(kind, str(error))

    def _record(self, kind: Kind, why: str) -> None:
        since, _ = self._errors.get(kind, (asyncio.get_running_loop().time(), ""))
        self._errors[kind] = since, why

    def _leave_out(self, kind: Kind, absence: Absence) -> None:
        """Record that a kind is not watched, because the operator lacks permissions or the cluster
        does not serve the kind."""
        missing = absence.forbidden or kind.required or kind.is_ours
        if missing:
            self._metrics.kind_listed.labels(str(kind)).set(0)
        else:  # the cluster does not have the kind, which is not a problem
            with suppress(KeyError):
                self._metrics.kind_listed.remove(str(kind))
        if self._known.get(kind) != absence:
            level = logging.WARNING if missing else logging.INFO
            extra = {"kind": str(kind), "reason": absence.reason}
            logger.log(level, "kind is not watched", extra=extra)
        if kind.required or kind.is_ours:
            self._record(kind, absence.reason)
        # Remove the facts of the kind, because they are no longer kept up to date.
        self._partial.discard(kind)
        self._changes += filter(None, self._store.replace(kind, ()))
        self._settle(kind, absence)
        self._hand_over()

    def _settle(self, kind: Kind, found: Served | Absence) -> None:
        self._known[kind] = found
        absent = {kind: each for kind, each in self._known.items() if isinstance(each, Absence)}
        self._store.world.hidden = frozenset(
            kind.type for kind, each in absent.items() if each.forbidden
        )
        if len(self._known) == len(self.kinds) and not any(kind.required for kind in absent):
            self.complete.set()

    def _changed(self, change: Change | None) -> None:
        if change is not None:
            if not self._changes:
                asyncio.get_running_loop().call_later(BATCH_SECONDS, self._hand_over)
            self._changes.append(change)

    def _hand_over(self) -> None:
        changes, self._changes = self._changes, []
        if changes:
            self._take(changes)

    def _on_skipped(self, kind: Kind, metadata: Mapping[str, Any], reason: str) -> None:
        self._metrics.skipped_objects.labels(str(kind)).inc()
        self._skipped.log(metadata, reason, kind=str(kind))


class _Channel:
    """A bounded queue of a kind's events for the handlers."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._room = asyncio.Semaphore(IN_FLIGHT)

    async def send(self, event: Event) -> None:
        """Send an event. Wait until there is room for it."""
        await self._room.acquire()
        self._events.put_nowait(event)

    async def get(self) -> Event:
        return await self._events.get()

    def handled(self) -> None:
        """Make room, because a handler has received an event."""
        self._events.task_done()
        self._room.release()

    async def settled(self) -> None:
        """Wait until handlers have received all events."""
        await self._events.join()


class _Garbage:
    """
    Excludes kept objects from full garbage collections, which would otherwise block everything for
    0.5 s.

    Objects without reference cycles are still freed.
    """

    def __init__(self) -> None:
        self._kept = 0

    def kept(self) -> None:
        """Count an object that is kept."""
        self._kept += 1
        if self._kept >= COLLECTED:
            self._kept = 0
            gc.collect()  # collect first, because a frozen cycle is never freed
            gc.freeze()


# ---------------------------------------------------------------- loads


class LoadWatch:
    """Keeps the node loads up to date. A node's load is the sum of the requests of its pods."""

    def __init__(self, session: Session) -> None:
        self._garbage = _Garbage()
        self._reflector = Reflector(
            session, POD_PATH, keep=self._keep, params=ON_NODES, streams=True
        )
        self.loads = Loads(self._is_current)
        self.listed = asyncio.Event()
        """Set when the pods have been listed once."""

    def _is_current(self) -> bool:
        return self._reflector.synced and self._reflector.silent_seconds() < OUTDATED_SECONDS

    async def run(self) -> None:
        """Follow the pods until canceled. Retry indefinitely after errors."""
        async for change in self._reflector.changes():
            match change:
                case Replaced(items=loads):
                    replacing = self.loads.replace(filter(None, loads))
                    for number, _ in enumerate(replacing):
                        if number % AT_ONCE == AT_ONCE - 1:
                            await asyncio.sleep(0)
                    self.listed.set()
                case Applied(object=Load() as load):
                    self.loads.apply(load)
                case Deleted(object=Load() as load):
                    self.loads.remove(load.uid)
                case _:
                    pass

    def _keep(self, body: Object) -> Load | None:
        self._garbage.kept()
        return _load(body)


def _load(body: Object) -> Load | None:
    """Return the load of a pod. A pod that cannot be read is treated as one without requests."""
    try:
        return load_of_pod(body)
    except UNREADABLE as error:
        logger.debug("requests of a pod cannot be read", extra={"error": repr(error)})
        return None
