"""
The verdicts of Kubernetes' own allocator, parsed from the helper's response.

Does not depend on processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from drakit_formats.resource.objects import Object

MAX_BYTES = 4 << 20
"""Maximum size of a query, as in ``operator/cel/verdict.go``."""


class VerdictOutcome(Enum):
    """The possible results for a node. The values are the same as in the helper."""

    ALLOCATED = "allocated"
    UNAVAILABLE = "unavailable"
    """The claims cannot be allocated on this node."""

    FATAL = "fatal"
    """The scheduler gives up on the pod, regardless of other nodes."""

    UNDECIDED = "undecided"
    """The result is uncertain. The message contains the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The allocator's result for one node."""

    outcome: VerdictOutcome
    text: str = ""
    """The allocator's error message, if any. It can contain strings from a tenant."""

    varies: bool = False
    """Whether another search can return a different result."""

    results: tuple[tuple[Object, ...], ...] = ()
    """The results for each claim (API: ``allocation.devices.results``), if the claims are
    allocated."""

    @property
    def drivers(self) -> frozenset[str]:
        return frozenset(str(each["driver"]) for of_claim in self.results for each in of_claim)

    @property
    def fits(self) -> bool:
        return self.outcome is VerdictOutcome.ALLOCATED

    @property
    def fatal(self) -> bool:
        """Whether the scheduler gives up on the pod, even if other nodes fit (see
        :mod:`.pools`)."""
        return self.outcome is VerdictOutcome.FATAL

    @property
    def undecided(self) -> bool:
        return self.outcome is VerdictOutcome.UNDECIDED


def parse_verdicts(answer: Any, *, nodes: int) -> tuple[Verdict, ...]:
    """
    Return a verdict for each node of a query.

    All verdicts are undecided if the query has fields that the helper's Kubernetes release does not
    know, because the allocator has ignored these fields.
    """
    found = [_verdict(each) for each in answer["verdicts"]]
    if len(found) != nodes:
        raise ValueError(f"{len(found)} verdicts for {nodes} nodes")
    unknown = _texts(answer.get("unknown") or ())
    if unknown:
        text = f"the allocator has no {unknown[0]}"
        return (Verdict(outcome=VerdictOutcome.UNDECIDED, text=text),) * nodes
    return tuple(found)


def _verdict(answer: Any) -> Verdict:
    (text,) = _texts([answer.get("text", "")])
    return Verdict(
        outcome=VerdictOutcome(answer["outcome"]),
        text=text,
        varies=bool(answer.get("varies")),
        results=tuple(tuple(each or ()) for each in answer.get("results") or ()),
    )


def _texts(texts: Iterable[Any]) -> list[str]:
    for each in (found := list(texts)):
        if not isinstance(each, str):
            raise TypeError(f"a text is a {type(each).__name__}")
    return found
