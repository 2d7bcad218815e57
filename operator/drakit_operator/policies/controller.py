"""
Reconciles a HostDevicePolicy: maintains its DeviceClass, and writes its status.

Everything is read from the store. Only differences are written, and a DeviceClass that another
owner created stays as it is. Every node plugin watches the policies, so each write of a status
wakes up all of them: a status is written when its generation is new, once more when all nodes have
answered that generation, and otherwise at most once in a minute.

It must not know Kopf, queues, or how the desired state is found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from drakit_daemon.kube import (
    AlreadyExistsError,
    InvalidError,
    NotFoundError,
    Session,
    resource_path,
)
from drakit_explain.model import ClassFacts, PolicyFacts
from drakit_explain.reports import project_policy
from drakit_explain.world import Name, World
from drakit_formats import crds
from drakit_operator.policies.status import Status, desired_class, status_of

Object = dict[str, Any]

WRITE_SECONDS = 60.0
"""Least time between two writes of a status for the same generation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    """The last write of a status."""

    of: tuple[str, int]
    """The UID and the generation of the policy."""

    at: float
    settled: bool
    """All nodes had answered this generation, in this write or in an earlier one."""


class PolicyController:
    """Reconciles policies with the facts of a world."""

    def __init__(
        self,
        session: Session,
        world: World,
        *,
        class_version: Callable[[], str],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        :param class_version: returns the served ``apiVersion`` of DeviceClasses.
        """
        self._session = session
        self._world = world
        self._class_version = class_version
        self._now = now
        self._clock = clock
        self._written: dict[str, _Written] = {}
        """The last writes of statuses, by the name of the policy."""

    async def refresh(self, name: str) -> float | None:
        """
        Reconcile a policy of the world; return in how many seconds its status may be written.

        :raises ApiError: the API server rejects a request or does not answer.
        """
        policy = self._world.of(PolicyFacts).get(Name("", name))
        if policy is None or policy.deleting:
            self._written.pop(name, None)
            return None  # the garbage collector deletes its DeviceClass
        problem = await self._maintain_class(policy)
        last, wait = self._written.get(name), 0.0
        if last is not None and last.of == (policy.uid, policy.generation):
            wait = last.at + WRITE_SECONDS - self._clock()
        settled = last is not None and last.settled and last.of == (policy.uid, policy.generation)
        if wait > 0 and settled:
            return wait
        wanted = status_of(policy, self._world, class_problem=problem)
        if not (change := self._change(wanted, policy.status)):
            return None
        if wait > 0 and not wanted.settled:
            return wait
        await self._write(policy, change)
        self._written[name] = _Written(
            of=(policy.uid, policy.generation),
            at=self._clock(),
            settled=settled or wanted.settled,
        )
        return None

    async def _write(self, policy: PolicyFacts, change: Object) -> None:
        path = resource_path(crds.API_VERSION, crds.POLICIES, name=policy.name)
        # A newer spec, or a new policy of this name, is reconciled by itself.
        seen = {"uid": policy.uid, "resourceVersion": policy.version}
        with suppress(NotFoundError):
            body = await self._session.patch(f"{path}/status", {"metadata": seen, "status": change})
            self._world.apply(project_policy(body))

    def _change(self, wanted: Status, status: Mapping[str, Any]) -> Object:
        """Return how the status must change, as a merge patch."""
        before: dict[str, Object] = {each["type"]: each for each in status.get("conditions") or ()}
        since = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        conditions: list[Object] = []
        for each in wanted.conditions:
            old = before.get(each.type, {})
            same = old.get("status") == each.status
            conditions.append(
                {
                    "type": each.type,
                    "status": each.status,
                    "observedGeneration": wanted.fields["observedGeneration"],
                    "lastTransitionTime": old.get("lastTransitionTime") if same else since,
                    "reason": each.reason,
                    "message": each.message,
                }
            )
        new: Object = {"deviceClass": None, **wanted.fields, "conditions": conditions}
        return {key: value for key, value in new.items() if status.get(key) != value}

    # ------------------------------------------------------------ the DeviceClass

    async def _maintain_class(self, policy: PolicyFacts) -> str:
        """Create, update or delete the DeviceClass of a policy; return the problem, if any."""
        version = self._class_version()
        wanted = desired_class(policy, api_version=version)
        for each in self._world.of(ClassFacts).values():
            if each.owner == policy.uid and (wanted is None or each.name != policy.class_name):
                path = resource_path(version, "deviceclasses", name=each.name)
                with suppress(NotFoundError):
                    await self._session.delete(path, uid=each.uid)
        if wanted is None:
            return ""
        found = self._world.device_class(policy.class_name)
        try:
            if found is None:
                await self._create_class(policy, wanted, version)
            elif found.owner != policy.uid:
                return (
                    f"DeviceClass {policy.class_name} already exists, and this policy does not own "
                    "it; set spec.deviceClass.name to another name, or delete the DeviceClass"
                )
            else:
                await self._update_class(found, wanted["spec"], version)
        except (AlreadyExistsError, NotFoundError):
            return ""  # the store is behind: the watch reports it
        except InvalidError as error:
            return f"DeviceClass {policy.class_name} cannot be written: {error.message}"
        return ""

    async def _create_class(self, policy: PolicyFacts, wanted: Object, version: str) -> None:
        # The garbage collector would delete the class of a policy that is gone, and so on.
        path = resource_path(crds.API_VERSION, crds.POLICIES, name=policy.name)
        body = await self._session.get(path)
        if body["metadata"]["uid"] == policy.uid:
            await self._session.create(resource_path(version, "deviceclasses"), wanted)

    async def _update_class(self, found: ClassFacts, spec: Object, version: str) -> None:
        """Write the fields that the operator decides; an admin may add ``config``."""
        selectors = tuple(each["cel"]["expression"] for each in spec["selectors"])
        resource = spec.get("extendedResourceName")
        if (found.selectors, found.extended_resource) != (selectors, resource or ""):
            change = {"selectors": spec["selectors"], "extendedResourceName": resource}
            path = resource_path(version, "deviceclasses", name=found.name)
            await self._session.patch(path, {"metadata": {"uid": found.uid}, "spec": change})
