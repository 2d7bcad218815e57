"""
How long something has been unused: the time during which the kubelet's answers agree.

If the kubelet returns complete lists, a short grace period is enough. It starts at the first such
list, and only complete lists count: a kubelet that has just started may list our own pod before the
pod in question. Without any answer, the grace period is long. An incomplete list ends both: the
caller must then discard its observations, and start again.

:mod:`.stale` and :mod:`.orphans` decide when to apply it, and what to do at its end. It must not
know how the kubelet is called.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from drakit_nodeplugin.claims.kubeletview import KubeletClaims, PodView

__all__ = ("Grace", "Unclaimed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Grace:
    """How long the observations must agree."""

    confirmed_seconds: float = 120.0
    """Between two complete lists of the kubelet: twice the time in which a running kubelet
    unprepares the claims that it knows."""

    unconfirmed_seconds: float = 3600.0
    """If the kubelet does not answer: the claim or file may be in use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unclaimed:
    """Something that no check has found in use."""

    since: float
    """The time of the first check; loop clock."""

    confirmed_since: float | None
    """The first of an unbroken series of complete lists; None if the last check got no complete
    list."""

    @classmethod
    def first(cls, claims: KubeletClaims) -> Unclaimed:
        """Return the state after the first check."""
        since = claims.asked_at
        complete = claims.pods is PodView.COMPLETE
        return cls(since=since, confirmed_since=since if complete else None)

    def again(self, claims: KubeletClaims) -> Unclaimed:
        """Return the state after another check that does not find it in use."""
        if claims.pods is not PodView.COMPLETE:
            return replace(self, confirmed_since=None)
        return (
            self
            if self.confirmed_since is not None
            else replace(self, confirmed_since=claims.asked_at)
        )

    def due(self, claims: KubeletClaims, grace: Grace) -> bool:
        """Return, given one more check, whether the grace period is over."""
        if claims.pods is PodView.PARTIAL:
            return False
        if claims.pods is PodView.UNKNOWN:
            return claims.asked_at - self.since >= grace.unconfirmed_seconds
        begin = self.confirmed_since
        return begin is not None and claims.asked_at - begin >= grace.confirmed_seconds
