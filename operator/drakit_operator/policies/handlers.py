"""
Kopf's handler of HostDevicePolicies, which admins write.

Kopf runs on the leader, in the main loop, and only watches: its handlers of changes would write
their state into the status of a policy, and each write wakes up all node plugins. There are no
finalizers: the garbage collector deletes the DeviceClass.

It must not know what is reconciled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from drakit_daemon.kube import ApiError, Session
from drakit_explain.kinds import POLICIES
from drakit_explain.model import PolicyFacts
from drakit_operator.kinds import Absence, Served, find, name_of
from drakit_operator.kopf_import import Insights, kopf
from drakit_operator.store import Change, Store

logger = logging.getLogger(__name__)

RETRY_SECONDS = 10.0
"""Pause before the search for the resource is repeated that an error ended."""

STOP_SECONDS = 2.0
"""Longest wait for Kopf's end."""

WORKERS_STOP_SECONDS = 1.0
"""The part of it in which Kopf's workers may end what they do."""

_SELECTOR = (POLICIES.group, POLICIES.versions[0], POLICIES.plural)


class PoliciesNotFoundError(Exception):
    """Kopf did not find HostDevicePolicies, and would never look for them again."""


class PolicyHandlers:
    """Serves policies with Kopf while this replica leads."""

    def __init__(
        self,
        session: Session,
        store: Store,
        *,
        on_changes: Callable[[Sequence[Change]], None],
        on_started: Callable[[], None],
        recheck_seconds: float,
    ) -> None:
        """
        :param session: of Kopf alone, because Kopf closes its HTTP client. The caller closes it.
        :param on_changes: takes changes of the store.
        :param on_started: called when Kopf has started, and has replaced the handlers of signals.
        :param recheck_seconds: the interval at which the custom resource is looked for.
        """
        self._session = session
        self._store = store
        self._on_changes = on_changes
        self._on_started = on_started
        self._recheck_seconds = recheck_seconds

    async def run(self) -> None:
        """Serve policies until canceled; raises what ended Kopf."""
        await self._wait_until_served()
        # Unused without peering. Of itself Kopf asks for the user's name, and images have none.
        identity: Any = "drakit"
        insights = Insights()
        # Not kopf.operator: at its end, that cancels all tasks of the loop, ours included.
        tasks = await kopf.spawn_tasks(
            registry=self._registry(),
            clusterwide=True,
            standalone=True,
            identity=identity,
            insights=insights,
        )
        self._on_started()
        looking = asyncio.create_task(insights.ready_resources.wait(), name="discovery of Kopf")
        try:
            await asyncio.wait({looking, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            if looking.done() and not insights.watched_resources:
                # Another API server than before may have answered.
                raise PoliciesNotFoundError(f"Kopf did not find {POLICIES}")
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (looking, *tasks):
                task.cancel()
            await asyncio.wait({looking, *tasks}, timeout=STOP_SECONDS)

    async def _wait_until_served(self) -> None:
        """Wait for the custom resource and the permissions: Kopf looks for them only once."""
        reason = ""
        while True:
            pause = self._recheck_seconds
            try:
                found = await self._find()
            except ApiError as error:
                found = Absence(reason=str(error), forbidden=False)
                pause = min(RETRY_SECONDS, pause)
            if isinstance(found, Served):
                return
            if found.reason != reason:
                reason = found.reason
                extra = {"kind": str(POLICIES), "reason": reason}
                logger.info("kind is not watched", extra=extra)
            await asyncio.sleep(pause)

    async def _find(self) -> Served | Absence:
        found = await find(self._session, POLICIES)
        if isinstance(found, Served):
            # Kopf reads these lists, which may be forbidden, or not yet contain a new group.
            await self._session.get("/api")
            groups: list[dict[str, Any]] = (await self._session.get("/apis")).get("groups") or []
            if all(each.get("name") != POLICIES.group for each in groups):
                return Absence(reason="the API server does not list its group", forbidden=False)
        return found

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.startup(registry=registry)(self._configure)
        kopf.on.login(registry=registry)(self._login)
        kopf.on.event(*_SELECTOR, registry=registry)(self._seen)
        return registry

    async def _configure(self, settings: kopf.OperatorSettings, **_: Any) -> None:
        # Nothing of ours has a finalizer. Kopf would remove its own from the objects of another
        # operator made with Kopf.
        settings.persistence.finalizer = "drakit.dev/never-set"
        settings.posting.enabled = False  # our Events are deduplicated
        # The Lease decides the leader, and the kind is known.
        settings.scanning.disabled = True
        settings.networking.request_timeout = 30
        settings.networking.connect_timeout = 5
        settings.watching.connect_timeout = 5
        settings.queueing.exit_timeout = WORKERS_STOP_SECONDS
        settings.process.ultimate_exiting_timeout = None

    async def _login(self, **_: Any) -> kopf.AiohttpSession:
        # The session puts the current token into each request.
        return kopf.AiohttpSession(server=self._session.server, aiohttp_session=self._session.http)

    async def _seen(self, *, event: Any, **_: Any) -> None:
        """Keep the facts of a policy."""
        body: dict[str, Any] = dict(event["object"])
        if event["type"] == "DELETED":
            change = self._store.remove(POLICIES, name_of(body), uid=body["metadata"]["uid"])
        else:
            change = self._store.apply(POLICIES, _facts(body))
        if change is not None:
            self._on_changes([change])


def _facts(body: dict[str, Any]) -> PolicyFacts:
    try:
        policy = POLICIES.project(body, POLICIES.versions[0])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise kopf.PermanentError(f"its content has an unknown shape: {error!r}") from error
    assert isinstance(policy, PolicyFacts)
    return policy
