"""
Computes and writes the status of an object that the operator reconciles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple

from drakit_daemon.kube import ApiError, ConflictError, NotFoundError, Session, resource_path
from drakit_explain.kinds import Kind
from drakit_explain.model import MaintenanceFacts, PolicyFacts
from drakit_explain.world import World
from drakit_formats import crds

logger = logging.getLogger(__name__)

Object = dict[str, Any]

REFUSED_SECONDS = 30.0
"""How long to wait after a refused write. A webhook, quota or role may allow it later."""

OUTDATED_SECONDS = 2.0
"""How long to wait after a conflict, because the object has changed. By then, the store has the new
version."""


class Condition(NamedTuple):
    """A condition without its timestamps."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The status of an object, without timestamps."""

    conditions: tuple[Condition, ...]
    fields: Mapping[str, Any]
    """The other status fields, as in the API, with ``observedGeneration``. A field whose value is
    None is removed."""


def changes(wanted: Status, status: Mapping[str, Any], *, now: datetime) -> Object:
    """Return the changes to a status as a merge patch. The patch is empty if nothing changes."""
    before: dict[str, Object] = {each["type"]: each for each in status.get("conditions") or ()}
    since = now.strftime("%Y-%m-%dT%H:%M:%SZ")
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
    new: Object = {**wanted.fields, "conditions": conditions}
    return {key: value for key, value in new.items() if status.get(key) != value}


def turned(wanted: Status, status: Mapping[str, Any]) -> list[Condition]:
    """Return the conditions whose status or reason changes."""
    before = {
        each["type"]: (each.get("status"), each.get("reason"))
        for each in status.get("conditions") or ()
    }
    return [
        each for each in wanted.conditions if before.get(each.type) != (each.status, each.reason)
    ]


class StatusWriter:
    """Writes the statuses of the objects of one kind."""

    def __init__(self, session: Session, world: World, kind: Kind) -> None:
        self._session = session
        self._world = world
        self._kind = kind
        self.refused: dict[str, str] = {}
        """The reasons why statuses cannot be written, keyed by object name: a role forbids the
        write, or the API server rejects it. A status cannot report such a problem."""

    async def write(
        self,
        facts: PolicyFacts | MaintenanceFacts,
        change: Object,
        *,
        via: Callable[[Object], None] | None,
    ) -> float | None:
        """
        Write the changes to a status. Return the seconds until the next attempt, or None if it is
        not needed.

        :param via: receives the changes, if the caller writes them.
        :raises ApiError: the API server does not respond.
        """
        if via is not None:
            via(change)
            return None
        path = resource_path(
            crds.API_VERSION, self._kind.plural, name=facts.name, subresource="status"
        )
        # Send both as preconditions: the store may be outdated, and the name may belong to another
        # object now.
        seen = {"uid": facts.uid, "resourceVersion": facts.version}
        try:
            body = await self._session.patch(path, {"metadata": seen, "status": change})
        except NotFoundError:
            return None
        except ConflictError:
            return OUTDATED_SECONDS
        except ApiError as error:
            if not error.is_refusal:
                raise
            self.refused[facts.name] = str(error)
            extra = {"object": f"{facts.kind} {facts.name}", "error": str(error)}
            logger.warning("a status is refused", extra=extra)
            return REFUSED_SECONDS
        self._world.confirm(facts, self._kind.project(body, crds.VERSION))
        return None
