"""
Whether the scheduler can allocate a pod's claims on one node: the question and the answer.

:mod:`.search` finds the answer. :mod:`.pools` gives the pools of the node, the caller evaluates
selectors and knows what is allocated.

It must not know clients, nodes, CEL, or how an answer is worded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from drakit_explain.capacity import Consumed
from drakit_explain.model import (
    Constraint,
    DeviceFacts,
    DeviceID,
    Request,
    SliceFacts,
    TaintFacts,
    Toleration,
)

__all__ = (
    "MAX_RESULTS",
    "Allocated",
    "Answer",
    "NotEvaluatedError",
    "Outcome",
    "SearchedClaim",
    "Selected",
    "Selections",
    "not_supported",
    "tolerates",
)

MAX_RESULTS = 32
"""Devices in the allocation of a claim (API: ``AllocationResultsMaxSize``)."""


class Outcome(Enum):
    """The possible answers."""

    FITS = "fits"
    NO_FIT = "no fit"
    FAILED = "failed"
    """The allocator ends with an error: no other device or alternative is tried."""

    UNDECIDED = "undecided"
    """The search ended at its bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The result of a search."""

    outcome: Outcome
    failure: str = ""
    """The reason of a failed search, as a clause that names the request."""

    device: DeviceID | None = None
    """The device at which a search failed, if there is one."""

    devices: tuple[tuple[str, str, DeviceID], ...] = ()
    """The result of a successful search: claim, request (``request/subrequest``) and device."""

    steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchedClaim:
    """A claim, or what a template would make, with what the search needs of it."""

    name: str
    requests: tuple[Request, ...]
    constraints: tuple[Constraint, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Selected:
    """The outcomes of all selectors of a request for the devices of one slice."""

    matches: int = 0
    """A bit for each device, by its index, that fulfils all of them."""

    errors: Mapping[int, str] = field(default_factory=dict[int, str])
    """Runtime errors by a device's index."""

    rejected: tuple[int, ...] = ()
    """For each selector that was evaluated, in order: the number of devices that it rejects."""


class NotEvaluatedError(Exception):
    """No result is certain, as of a long selector; the text is a clause that names the cause."""


class Selections(Protocol):
    """Selectors, evaluated."""

    def selected(self, request: Request, of: SliceFacts) -> Selected:
        """
        Return the outcomes of the selectors of a request's class, then of its own.

        Raises :class:`NotEvaluatedError` where one has no result.
        """
        ...

    def broken(self, request: Request) -> str | None:
        """Return why the allocator cannot use a request at all, or None."""
        ...


class Allocated(Protocol):
    """The devices and capacities that allocated claims hold."""

    def is_allocated(self, device: DeviceID) -> bool:
        """Return whether a claim has the device for itself."""
        ...

    def is_shared(self, device: DeviceID) -> bool:
        """Return whether a claim has a share of the device."""
        ...

    def consumed(self, device: DeviceID) -> Consumed | None:
        """Return what shares take of the device's capacity; None if they take nothing."""
        ...

    def taints(self, device: DeviceID, facts: DeviceFacts) -> Sequence[TaintFacts]:
        """Return the taints of a device, those of DeviceTaintRules included."""
        ...


def not_supported(request: Request, name: str) -> str:
    """Return the text of the error about a request that has an unsupported part."""
    return f'drakit does not support {request.unsupported} of request "{name}"'


def tolerates(toleration: Toleration, taint: TaintFacts) -> bool:
    """Return whether a toleration applies to a taint, as the scheduler decides it."""
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    if toleration.operator in ("", "Equal"):
        return toleration.value == taint.value
    return toleration.operator == "Exists"
