"""
Writes the DeviceClass and the status of a HostDevicePolicy: only differences, and never a
DeviceClass that another owner created.

It must not know the store, queues, or how the desired state is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from drakit.explain.reports import PolicyFacts
from drakit.kube import AlreadyExistsError, NotFoundError, Session, resource_path
from drakit_operator.policies.reconcile import (
    API_VERSION,
    POLICY_LABEL,
    Status,
    desired_class,
    owns,
)

__all__ = ("NotLeadingError", "PolicyWriter")

Object = dict[str, Any]


class NotLeadingError(Exception):
    """This replica no longer leads, so it must not write."""


class PolicyWriter:
    """Writes for one term of leadership."""

    def __init__(
        self,
        session: Session,
        *,
        class_version: Callable[[], str],
        may_write: Callable[[], bool],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """
        :param class_version: returns the served ``apiVersion`` of DeviceClasses.
        """
        self._session = session
        self._class_version = class_version
        self._may_write = may_write
        self._now = now

    async def maintain_class(self, policy: PolicyFacts) -> str:
        """
        Create, update or delete the DeviceClass of a policy.

        Return the problem if a class of that name does not belong to the policy, otherwise nothing.

        :raises ApiError: the API server rejects a request or does not answer.
        """
        version = self._class_version()
        wanted = desired_class(policy, api_version=version)
        await self._delete_others(policy, version, keep=policy.class_name if wanted else None)
        if wanted is None:
            return ""
        try:
            found = await self._session.get(self._class_path(version, policy.class_name))
        except NotFoundError:
            self._check()
            with suppress(AlreadyExistsError):  # another client was faster: the watch reports it
                await self._session.create(self._class_path(version), wanted)
            return ""
        if not owns(policy, found):
            return (
                f"DeviceClass {policy.class_name} already exists, and this policy does not own it; "
                "set spec.deviceClass.name to another name, or delete the DeviceClass"
            )
        if any(found["spec"].get(key) != wanted["spec"].get(key) for key in _OWN_FIELDS):
            self._check()
            spec = {key: wanted["spec"].get(key) for key in _OWN_FIELDS}
            version_seen = found["metadata"]["resourceVersion"]
            await self._session.patch(
                self._class_path(version, policy.class_name),
                {"metadata": {"resourceVersion": version_seen}, "spec": spec},
            )
        return ""

    async def write_status(self, policy: PolicyFacts, status: Status) -> None:
        """
        Write the status of a policy, unless it has it.

        :raises ApiError: the API server rejects a request or does not answer.
        """
        path = resource_path(API_VERSION, "hostdevicepolicies", name=policy.name)
        try:
            found = await self._session.get(path)
        except NotFoundError:
            return
        if found["metadata"]["uid"] != policy.uid:
            return  # another policy of this name: the watch reports it
        old: Object = found.get("status") or {}
        new = {"deviceClass": None, **status.fields, "conditions": [self._ready(status, old)]}
        if {key: value for key, value in new.items() if value is not None} == old:
            return
        self._check()
        with suppress(NotFoundError):
            await self._session.patch(f"{path}/status", {"status": new})

    async def _delete_others(self, policy: PolicyFacts, version: str, *, keep: str | None) -> None:
        """Delete the classes that the policy had under other names."""
        listed = await self._session.list(
            self._class_path(version), params={"labelSelector": f"{POLICY_LABEL}={policy.name}"}
        )
        for body in listed.items:
            metadata = body["metadata"]
            if metadata["name"] != keep and owns(policy, body):
                self._check()
                with suppress(NotFoundError):
                    await self._session.delete(
                        self._class_path(version, metadata["name"]), uid=metadata["uid"]
                    )

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

    def _class_path(self, version: str, name: str | None = None) -> str:
        return resource_path(version, "deviceclasses", name=name)

    def _check(self) -> None:
        if not self._may_write():
            raise NotLeadingError("this replica no longer leads")


_OWN_FIELDS = ("selectors", "extendedResourceName")
"""The fields of a DeviceClass that the operator decides; an admin may add ``config``."""
