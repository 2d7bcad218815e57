"""
The Kopf handlers: one for the events of each kind, and those that reconcile the kinds that drakit
defines.

Kopf runs on the leader, in the main loop. An event handler updates one fact in the store, and the
queue finds the effects on other objects, which Kopf does not do. The handlers of drakit's own kinds
reconcile one object, and Kopf stores its progress in ``status.kopf``. No object gets a finalizer:
the garbage collector deletes the objects that a policy or maintenance owns.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Protocol

from drakit_daemon.kube import ApiError, Session
from drakit_explain.kinds import KINDS, UNREADABLE, Kind, problem_of
from drakit_formats import crds
from drakit_operator.kopf_import import Resource, kopf, run
from drakit_operator.sources import Event, Sources

WORKERS_STOP_SECONDS = 1.0
"""How long Kopf's workers can take to finish when Kopf stops."""

IDLE_SECONDS = 0.2
"""How long an object's worker can be idle before Kopf ends it. Kopf starts another worker for the
next event. By default, Kopf waits 5 s, and keeps a task and a queue for each object that has
changed."""

RETRY_SECONDS = 5.0
"""How long to wait before calling a failed handler again."""

RESOURCES = {
    Resource(
        group=kind.group,
        version=kind.versions[0],
        plural=kind.plural,
        namespaced=kind.namespaced,
        subresources=frozenset({"status"}),
        preferred=True,
        verbs=frozenset({"list", "watch", "patch"}),
    ): kind
    for kind in KINDS
}
"""The kinds as Kopf resources. The version is the one that the handlers use, which can differ from
the version in the cluster."""


class Controller(Protocol):
    """Reconciles the objects of one kind that drakit defines."""

    async def refresh(
        self, name: str, *, write: Callable[[dict[str, Any]], None] | None = None
    ) -> float | None:
        """
        Reconcile an object. Return the seconds until the next call.

        :param write: receives the changes to the status.
        :raises ApiError: the API server does not respond.
        """
        ...


class Handlers:
    """Serves all kinds with Kopf while this replica is the leader."""

    def __init__(
        self,
        session: Session,
        sources: Sources,
        controllers: Mapping[Kind, Controller],
        *,
        check: Callable[[Kind, str, float], None],
        on_started: Callable[[], None],
    ) -> None:
        """
        :param session: a session for Kopf only, because Kopf closes its HTTP client. The caller
            closes the session.
        :param controllers: the controllers of the kinds that are reconciled.
        :param check: reconciles an object again after some seconds.
        :param on_started: called when Kopf has started and has replaced the signal handlers.
        """
        self._session = session
        self._sources = sources
        self._controllers = controllers
        self._check = check
        self._on_started = on_started
        self.resources = [of for of, kind in RESOURCES.items() if kind in sources.kinds]

    async def run(self) -> None:
        """Serve all kinds until canceled. If Kopf fails, raise its error."""
        await run(self, self.registry(), on_started=self._on_started)

    async def events(self, resource: Resource) -> AsyncGenerator[Event]:
        """Yield the events of a kind endlessly."""
        while True:
            yield await self._sources.next_event(RESOURCES[resource])

    def registry(self) -> kopf.OperatorRegistry:
        """Return the handlers of all kinds that are followed."""
        registry = kopf.OperatorRegistry()
        kopf.on.startup(registry=registry)(self._configure)
        kopf.on.login(registry=registry)(self._login)

        for kind in map(RESOURCES.__getitem__, self.resources):
            selector = (kind.group, kind.versions[0], kind.plural)
            kopf.on.event(*selector, registry=registry)(self._seen)
            if kind in self._controllers:
                for on in (kopf.on.create, kopf.on.update, kopf.on.resume):
                    on(kind.group, kind.plural, registry=registry)(self._reconcile)
        return registry

    async def _configure(self, settings: kopf.OperatorSettings, **_: Any) -> None:
        # The operator's objects do not have finalizers. Kopf would remove its own finalizer from
        # the objects of another Kopf operator.
        settings.persistence.finalizer = "drakit.dev/never-set"
        settings.persistence.progress_storage = kopf.StatusProgressStorage()
        settings.persistence.diffbase_storage = kopf.StatusDiffBaseStorage()
        settings.posting.enabled = False  # the operator deduplicates its own Events
        # The Lease determines the leader, so peering is not needed. The kinds are known, so
        # scanning is not needed either.
        settings.scanning.disabled = True
        settings.networking.request_timeout = 30
        settings.networking.connect_timeout = 5
        settings.queueing.idle_timeout = IDLE_SECONDS
        settings.queueing.exit_timeout = WORKERS_STOP_SECONDS
        settings.process.ultimate_exiting_timeout = None

    async def _login(self, **_: Any) -> kopf.AiohttpSession:
        # The session adds the current token to each request.
        return kopf.AiohttpSession(server=self._session.server, aiohttp_session=self._session.http)

    async def _seen(self, *, event: Any, resource: Any, **_: Any) -> None:
        """Put the fact of an object into the store, or remove it."""
        self._sources.handle(RESOURCES[resource], event)

    async def _reconcile(
        self, *, name: str, body: kopf.Body, patch: kopf.Patch, resource: Resource, **_: Any
    ) -> None:
        """Reconcile an object whose spec has changed."""
        kind = RESOURCES[resource]
        try:
            kind.project(body, crds.VERSION)
        except UNREADABLE as error:
            why = f"this version of drakit does not know its format: {problem_of(error)}"
            raise kopf.PermanentError(f"{why}; upgrade drakit") from error
        again = None
        if self._sources.is_current:
            try:
                again = await self._controllers[kind].refresh(name, write=patch.status.update)
            except ApiError as error:
                raise kopf.TemporaryError(str(error), delay=RETRY_SECONDS) from error
        # If not everything has been listed yet, the queue waits for that. Don't raise a temporary
        # error: Kopf would write the status of each object twice at each start, and the API server
        # may reject its write.
        self._check(kind, name, RETRY_SECONDS if again is None else again)
