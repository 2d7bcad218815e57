"""
The status of an object that the operator reconciles: conditions, and how a status must change.

Does not depend on kinds, sessions, or when a status is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple

Object = dict[str, Any]


class Condition(NamedTuple):
    """A condition without times."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The status of an object, without times."""

    conditions: tuple[Condition, ...]
    fields: Mapping[str, Any]
    """The other fields of the status, as the API has them, with ``observedGeneration``. A field is
    removed if its value is None."""


def changes(wanted: Status, status: Mapping[str, Any], *, now: datetime) -> Object:
    """Return how a status must change, as a merge patch; empty if it must not."""
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
    """Return the conditions that get another status or reason."""
    before = {
        each["type"]: (each.get("status"), each.get("reason"))
        for each in status.get("conditions") or ()
    }
    return [
        each for each in wanted.conditions if before.get(each.type) != (each.status, each.reason)
    ]
