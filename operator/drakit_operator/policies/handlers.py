"""
Kopf's handlers of HostDevicePolicies, which admins write.

Kopf runs on the leader, in the main loop. Its state is in the status of a policy (``status.kopf``),
so the operator needs no permission for the rest of the object. There are no finalizers, hence no
handlers of deletions: the garbage collector deletes the DeviceClass.

It must not know what is reconciled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from drakit.explain.reports import PolicyFacts
from drakit.kube import ApiError, Session
from drakit_operator.discovery import Absence, find
from drakit_operator.kinds import POLICIES, Served, name_of
from drakit_operator.kopf_import import kopf
from drakit_operator.store import Change, Store

__all__ = ("PolicyHandlers",)

logger = logging.getLogger(__name__)

RETRY_SECONDS = 10.0
"""Pause before a handler is repeated that the API server did not let end."""

STOP_SECONDS = 2.0
"""Longest wait for Kopf's end."""

_SELECTOR = (POLICIES.group, POLICIES.versions[0], POLICIES.plural)


class Reconciler(Protocol):
    """See :class:`drakit_operator.policies.controller.PolicyController`."""

    async def reconcile(self, policy: PolicyFacts, status: Any) -> dict[str, Any]: ...


class PolicyHandlers:
    """Serves policies with Kopf while this replica leads."""

    def __init__(
        self,
        session: Session,
        store: Store,
        controller: Reconciler,
        *,
        take: Callable[[Sequence[Change]], None],
        on_started: Callable[[], None],
        recheck_seconds: float,
    ) -> None:
        """
        :param session: of Kopf alone, because Kopf closes its HTTP client. The caller closes it.
        :param take: receives the changes of the store.
        :param on_started: called when Kopf has started, and has replaced the handlers of signals.
        :param recheck_seconds: the interval at which the custom resource is looked for.
        """
        self._session = session
        self._store = store
        self._controller = controller
        self._take = take
        self._on_started = on_started
        self._recheck_seconds = recheck_seconds

    async def run(self) -> None:
        """Serve policies until canceled; raises what ended Kopf."""
        await self._wait_until_served()
        # Unused without peering. Of itself Kopf asks for the user's name, and images have none.
        identity: Any = "drakit"
        # Not kopf.operator: at its end, that cancels all tasks of the loop, ours included.
        tasks = await kopf.spawn_tasks(
            registry=self._registry(),
            clusterwide=True,
            standalone=True,
            identity=identity,
        )
        self._on_started()
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=STOP_SECONDS)

    async def _wait_until_served(self) -> None:
        """Wait for the custom resource and the permissions: Kopf looks for them only once."""
        reason = ""
        while True:
            try:
                found = await find(self._session, POLICIES)
            except ApiError as error:
                found = Absence(reason=str(error), forbidden=False)
            if isinstance(found, Served):
                return
            if found.reason != reason:
                reason = found.reason
                extra = {"kind": str(POLICIES), "reason": reason}
                logger.info("kind is not watched", extra=extra)
            await asyncio.sleep(self._recheck_seconds)

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.startup(registry=registry)(self._configure)
        kopf.on.login(registry=registry)(self._login)
        kopf.on.event(*_SELECTOR, registry=registry)(self._seen)
        for on in (kopf.on.create, kopf.on.update, kopf.on.resume):
            on(*_SELECTOR, id="reconcile", registry=registry)(self._reconcile)
        return registry

    async def _configure(self, settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.persistence.diffbase_storage = kopf.StatusDiffBaseStorage()
        settings.persistence.progress_storage = kopf.StatusProgressStorage()
        # Nothing of ours has a finalizer. Kopf would remove its own from the objects of another
        # operator made with Kopf.
        settings.persistence.finalizer = "drakit.dev/never-set"
        settings.posting.enabled = False  # our Events are deduplicated
        # The Lease decides the leader, and the kind is known.
        settings.scanning.disabled = True
        settings.networking.request_timeout = 30
        settings.networking.connect_timeout = 5
        settings.watching.connect_timeout = 5
        settings.process.ultimate_exiting_timeout = None

    async def _login(self, **_: Any) -> kopf.AiohttpSession:
        # The session puts the current token into each request.
        return kopf.AiohttpSession(server=self._session.server, aiohttp_session=self._session.http)

    async def _seen(self, *, event: Any, **_: Any) -> None:
        """Keep the facts of a policy; its changes can affect explanations."""
        body: dict[str, Any] = dict(event["object"])
        if event["type"] == "DELETED":
            uid = body["metadata"]["uid"]
            change = self._store.remove(POLICIES, name_of(body), uid=uid)
        else:
            change = self._store.apply(POLICIES, _facts(body))
        if change is not None:
            self._take([change])

    async def _reconcile(self, *, body: kopf.Body, patch: kopf.Patch, **_: Any) -> None:
        policy = _facts(dict(body))
        try:
            change = await self._controller.reconcile(policy, dict(body.get("status") or {}))
        except ApiError as error:
            raise kopf.TemporaryError(str(error), delay=RETRY_SECONDS) from error
        patch.status.update(change)


def _facts(body: dict[str, Any]) -> PolicyFacts:
    try:
        policy = POLICIES.project(body, POLICIES.versions[0])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise kopf.PermanentError(f"its content has an unknown shape: {error!r}") from error
    assert isinstance(policy, PolicyFacts)
    return policy
