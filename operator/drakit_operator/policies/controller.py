"""
Reconciles a HostDevicePolicy: maintains its DeviceClass, and writes its status.

Everything is read from the store. Only differences are written, and a DeviceClass that belongs to
another owner is left unchanged. The status is written immediately if the policy has a new
generation, or if the status of a condition changes. Changed numbers and messages are written at
most once a minute, because the API server sends each write to all node plugins, although they
ignore it.

If the API server refuses a request, its message becomes a condition. The caller gets an error only
if the server does not respond. Does not depend on Kopf or queues.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from drakit_daemon.kube import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    Session,
    resource_path,
)
from drakit_explain.kinds import POLICIES
from drakit_explain.model import ClassFacts, PolicyFacts
from drakit_explain.world import Name, World
from drakit_formats import crds
from drakit_operator.policies.status import desired_class, status_of
from drakit_operator.statuses import REFUSED_SECONDS, Object, StatusWriter, changes, turned

WRITE_SECONDS = 60.0
"""Minimum time between two writes of a status if only numbers and messages differ."""

TURNS = 10
"""The burst of writes that do not wait for `WRITE_SECONDS`, because the status of a condition has
changed. Another such write is allowed each minute, so that a node whose problem flaps does not
cause a write each second."""

SHARE = 20
"""The pause before a policy's status is computed again is this many times the time that the
statuses of all policies take, but at most `WRITE_SECONDS`. Therefore, they usually take at most a
twentieth of the main loop's time. With 5,000 reports, one status takes about 20 ms."""


@dataclass(slots=True)
class _Pace:
    """Limits how often the status of a policy is computed and written."""

    written_at: float = float("-inf")
    writes: float = 0.0
    """The number of recent writes. It decreases by one each minute."""

    find_at: float = float("-inf")
    """The time at which the status can be computed again."""


class PolicyController:
    """Reconciles policies with the facts of a world."""

    def __init__(
        self,
        session: Session,
        world: World,
        *,
        class_version: Callable[[], str],
        restricts_namespaces: bool,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        :param class_version: returns the served ``apiVersion`` of DeviceClasses.
        :param restricts_namespaces: whether the cluster enforces the namespaces of policies.
        """
        self._session = session
        self._world = world
        self._class_version = class_version
        self._restricts_namespaces = restricts_namespaces
        self._now = now
        self._clock = clock
        self._paces: dict[str, _Pace] = {}
        self._statuses = StatusWriter(session, world, POLICIES)

    def problem(self) -> str | None:
        """Return the reason why statuses or classes cannot be written, if it does not depend on a
        policy's content."""
        return next(iter(self._statuses.refused.values()), None)

    async def refresh(
        self, name: str, *, write: Callable[[Object], None] | None = None
    ) -> float | None:
        """
        Reconcile a policy of the world. Return the seconds until the next call.

        :param write: receives the changes to the status, if the caller writes it.
        :raises ApiError: the API server does not respond.
        """
        policy = self._world.of(PolicyFacts).get(Name("", name))
        self._statuses.refused.pop(name, None)
        if policy is None or policy.deleting:
            self._paces.pop(name, None)
            return None  # the garbage collector deletes its DeviceClass
        problem = await self._maintain_class(policy)
        again = REFUSED_SECONDS if problem else None
        pace, now = self._paces.setdefault(name, _Pace()), self._clock()
        is_new = policy.status.get("observedGeneration") != policy.generation
        if not is_new and now < pace.find_at:
            return min(again or WRITE_SECONDS, pace.find_at - now)
        wanted = status_of(policy, self._world, class_problem=problem)
        seconds = (self._clock() - now) * SHARE * len(self._world.of(PolicyFacts))
        pace.find_at = now + min(seconds, WRITE_SECONDS)
        if not (change := changes(wanted, policy.status, now=self._now())):
            return again
        passed = now - pace.written_at
        writes = max(0.0, pace.writes - passed / WRITE_SECONDS)
        if (
            passed < WRITE_SECONDS
            and not is_new
            and (writes >= TURNS or not turned(wanted, policy.status))
        ):
            return min(again or WRITE_SECONDS, WRITE_SECONDS - passed)
        later = await self._statuses.write(policy, change, via=write)
        if later is None:
            pace.writes, pace.written_at = writes + 1, now
        return later or again

    # ------------------------------------------------------------ the DeviceClass

    async def _maintain_class(self, policy: PolicyFacts) -> str:
        """Create, update or delete the DeviceClass of a policy. Return the problem, if any."""
        unenforced = ""
        if policy.restricted and not self._restricts_namespaces:
            unenforced = (
                "nothing enforces allowedNamespaces, so the operator maintains no DeviceClass; set "
                "the chart's value hostdev.restrictNamespaces"
            )
        version = self._class_version()
        wanted = None if unenforced else desired_class(policy, api_version=version)
        found = self._world.device_class(policy.class_name)
        try:
            # Copy the classes to a list, because the world can change during a request.
            owned = [one for one in self._world.of(ClassFacts).values() if one.owner == policy.uid]
            for each in owned:
                if wanted is None or each.name != policy.class_name:
                    path = resource_path(version, "deviceclasses", name=each.name)
                    with suppress(NotFoundError):
                        await self._session.delete(path, uid=each.uid)
            if wanted is None:
                return unenforced
            if found is None:
                await self._create_class(policy, wanted, version)
            elif found.owner != policy.uid:
                return (
                    f"DeviceClass {policy.class_name} already exists, and this policy does not own "
                    "it; set spec.deviceClass.name to another name, or delete the DeviceClass"
                )
            else:
                await self._update_class(found, wanted["spec"], version)
        except (AlreadyExistsError, ConflictError, NotFoundError):
            return ""  # the store is outdated, and the watch will report the change
        except ApiError as error:
            if not error.is_refusal:
                raise
            if isinstance(error, ForbiddenError) and error.verb:
                self._statuses.refused[policy.name] = str(error)
            return f"DeviceClass {policy.class_name} cannot be written: {error.message}"
        return ""

    async def _create_class(self, policy: PolicyFacts, wanted: Object, version: str) -> None:
        # Check that the policy still exists. If it is gone, the garbage collector would delete a
        # new class, and the operator would create it again.
        path = resource_path(crds.API_VERSION, crds.POLICIES, name=policy.name)
        body = await self._session.get(path)
        if body["metadata"]["uid"] == policy.uid:
            await self._session.create(resource_path(version, "deviceclasses"), wanted)

    async def _update_class(self, found: ClassFacts, spec: Object, version: str) -> None:
        """Write the fields that the operator manages. An admin may add ``config``."""
        selectors = tuple(each["cel"]["expression"] for each in spec["selectors"])
        resource = spec.get("extendedResourceName")
        if (found.selectors, found.extended_resource) != (selectors, resource or ""):
            change = {"selectors": spec["selectors"], "extendedResourceName": resource}
            path = resource_path(version, "deviceclasses", name=found.name)
            await self._session.patch(path, {"metadata": {"uid": found.uid}, "spec": change})
