"""
Reconciles a HostDevicePolicy: maintains its DeviceClass, and returns or writes its status.

Kopf's handlers reconcile a policy when it changes, the work queue when a report, a slice or a claim
does. Both use the same function. Only differences are written, and a DeviceClass that another owner
created stays as it is.

It must not know Kopf, queues, or how the desired state is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from drakit_daemon.kube import (
    AlreadyExistsError,
    InvalidError,
    NotFoundError,
    Session,
    resource_path,
)
from drakit_explain.model import PolicyFacts
from drakit_explain.world import Name, World
from drakit_formats import crds
from drakit_formats.crds import API_VERSION
from drakit_operator.policies.status import (
    POLICY_LABEL,
    Status,
    desired_class,
    owns,
    status_of,
)

Object = dict[str, Any]

_OWN_FIELDS = ("selectors", "extendedResourceName")
"""The fields of a DeviceClass that the operator decides; an admin may add ``config``."""


class PolicyController:
    """Reconciles policies with the facts of a world."""

    def __init__(
        self,
        session: Session,
        world: World,
        *,
        class_version: Callable[[], str],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """
        :param class_version: returns the served ``apiVersion`` of DeviceClasses.
        """
        self._session = session
        self._world = world
        self._class_version = class_version
        self._now = now

    async def reconcile(self, policy: PolicyFacts, status: Mapping[str, Any]) -> Object:
        """
        Maintain the DeviceClass of a policy; return how its status must change, as a merge patch.

        :param status: the present status.
        :raises ApiError: the API server rejects a request or does not answer.
        """
        problem = await self._maintain_class(policy)
        wanted = status_of(policy, self._world, class_problem=problem)
        ready = self._ready(wanted, status)
        new: Object = {"deviceClass": None, **wanted.fields, "conditions": [ready]}
        return {key: value for key, value in new.items() if status.get(key) != value}

    async def refresh(self, name: str) -> None:
        """
        Reconcile a policy of the world, and write its status.

        :raises ApiError: the API server rejects a request or does not answer.
        """
        policy = self._world.of(PolicyFacts).get(Name("", name))
        if policy is None or policy.deleting:
            return  # the garbage collector deletes its DeviceClass
        path = resource_path(API_VERSION, crds.POLICIES, name=name)
        with suppress(NotFoundError):
            found = await self._session.get(path)
            metadata = found["metadata"]
            if (metadata["uid"], metadata["generation"]) != (policy.uid, policy.generation):
                return  # another policy of this name, or a newer spec: Kopf reports it
            if change := await self.reconcile(policy, found.get("status") or {}):
                # Kopf's handler may have written meanwhile, for a newer spec.
                seen = {"resourceVersion": metadata["resourceVersion"]}
                await self._session.patch(f"{path}/status", {"metadata": seen, "status": change})

    async def _maintain_class(self, policy: PolicyFacts) -> str:
        """Create, update or delete the DeviceClass of a policy; return the problem, if any."""
        version = self._class_version()
        wanted = desired_class(policy, api_version=version)
        await self._delete_others(policy, version, keep=policy.class_name if wanted else None)
        if wanted is None:
            return ""
        try:
            return await self._write_class(policy, wanted, version)
        except AlreadyExistsError:
            return ""  # another client was faster: the watch reports it
        except InvalidError as error:
            return f"DeviceClass {policy.class_name} cannot be written: {error.message}"

    async def _write_class(self, policy: PolicyFacts, wanted: Object, version: str) -> str:
        """Create or update the DeviceClass of a policy; return why it cannot be the policy's."""
        path = resource_path(version, "deviceclasses", name=policy.class_name)
        try:
            found = await self._session.get(path)
        except NotFoundError:
            await self._session.create(resource_path(version, "deviceclasses"), wanted)
            return ""
        if not owns(policy, found):
            return (
                f"DeviceClass {policy.class_name} already exists, and this policy does not own it; "
                "set spec.deviceClass.name to another name, or delete the DeviceClass"
            )
        if any(found["spec"].get(key) != wanted["spec"].get(key) for key in _OWN_FIELDS):
            spec = {key: wanted["spec"].get(key) for key in _OWN_FIELDS}
            seen = {"resourceVersion": found["metadata"]["resourceVersion"]}
            await self._session.patch(path, {"metadata": seen, "spec": spec})
        return ""

    async def _delete_others(self, policy: PolicyFacts, version: str, *, keep: str | None) -> None:
        """Delete the classes that the policy had under other names."""
        listed = await self._session.list(
            resource_path(version, "deviceclasses"),
            params={"labelSelector": f"{POLICY_LABEL}={policy.name}"},
        )
        for body in listed.items:
            metadata = body["metadata"]
            if metadata["name"] != keep and owns(policy, body):
                path = resource_path(version, "deviceclasses", name=metadata["name"])
                with suppress(NotFoundError):
                    await self._session.delete(path, uid=metadata["uid"])

    def _ready(self, status: Status, old: Mapping[str, Any]) -> Object:
        conditions: list[Object] = old.get("conditions") or []
        before = next((each for each in conditions if each.get("type") == "Ready"), None)
        since = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        if before is not None and before.get("status") == status.ready:
            since = str(before.get("lastTransitionTime") or since)
        return {
            "type": "Ready",
            "status": status.ready,
            "observedGeneration": status.fields["observedGeneration"],
            "lastTransitionTime": since,
            "reason": status.reason,
            "message": status.message,
        }
