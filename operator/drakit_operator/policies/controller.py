"""
Reconciles HostDevicePolicies: a queue of their names, and a worker for one after the other.

Changes come in bursts (a node reports, a slice changes, a pod starts), so a policy waits for a
moment before it is reconciled. A failure is retried with a backoff.

It must not know Kopf, or what is written.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from drakit.explain.reports import PolicyFacts
from drakit.explain.world import Name
from drakit.kube import ApiError
from drakit.kube.queue import QueueFullError, WorkQueue
from drakit.logs import new_request_id, request_scope
from drakit_operator.policies.apply import NotLeadingError
from drakit_operator.policies.handlers import policies_touched
from drakit_operator.policies.reconcile import Status, status_of
from drakit_operator.store import Change, Store

__all__ = ("PolicyController", "Writer")

logger = logging.getLogger(__name__)

DEBOUNCE_SECONDS = 2.0
"""Pause between a change and the write that follows from it."""

RETRY_LIMIT_SECONDS = 60.0

CAPACITY = 10_000
"""Policies in the queue; the chart allows 256 in a release."""


class Writer(Protocol):
    """See :class:`drakit_operator.policies.apply.PolicyWriter`."""

    async def maintain_class(self, policy: PolicyFacts) -> str: ...

    async def write_status(self, policy: PolicyFacts, status: Status) -> None: ...


class PolicyController:
    """The reconciler of one term of leadership."""

    def __init__(
        self, store: Store, writer: Writer, *, debounce_seconds: float = DEBOUNCE_SECONDS
    ) -> None:
        self._store = store
        self._writer = writer
        self._debounce_seconds = debounce_seconds
        self._queue: WorkQueue[str] = WorkQueue(
            capacity=CAPACITY, retry_limit_seconds=RETRY_LIMIT_SECONDS
        )

    def changed(self, changes: Sequence[Change]) -> None:
        """Queue the policies that these changes affect."""
        for name in policies_touched(changes, self._store.world):
            try:
                self._queue.add_after(name, self._debounce_seconds)
            except QueueFullError as error:
                logger.error(
                    "HostDevicePolicy is not reconciled",
                    extra={"policy": name, "error": str(error)},
                )

    async def run(self) -> None:
        """Reconcile one policy after the other, until canceled."""
        while True:
            name = await self._queue.get()
            with request_scope(new_request_id()):
                await self._work(name)

    def close(self) -> None:
        """Drop the queue's timers."""
        self._queue.close()

    async def _work(self, name: str) -> None:
        try:
            await self._reconcile(name)
        except NotLeadingError:
            self._queue.forget(name)
        except ApiError as error:
            logger.warning(
                "HostDevicePolicy cannot be reconciled", extra={"policy": name, "error": str(error)}
            )
            self._queue.retry(name)
        except Exception:  # a defect of ours in one policy must not stop the others
            logger.exception("HostDevicePolicy cannot be reconciled", extra={"policy": name})
            self._queue.retry(name)
        else:
            self._queue.forget(name)
        finally:
            self._queue.done(name)

    async def _reconcile(self, name: str) -> None:
        policy = self._store.world.of(PolicyFacts).get(Name("", name))
        if policy is None or policy.deleting:
            return  # the garbage collector deletes its DeviceClass
        problem = await self._writer.maintain_class(policy)
        status = status_of(policy, self._store.world, class_problem=problem)
        await self._writer.write_status(policy, status)
