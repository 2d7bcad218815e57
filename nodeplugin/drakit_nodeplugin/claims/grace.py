"""
How long something has been unused: since when looks at the kubelet agree.

Where the kubelet gives a complete list, a short grace period is enough. It starts at the first such
list, and only complete lists count: a kubelet that has just started may list our own pod before the
pod in question. Without any answer the grace period is long. A list that is not complete ends both:
the caller must then forget what it has seen, and start again.

:mod:`.stale` and :mod:`.orphans` decide what is judged by it, and what happens in the end. It must
not know how the kubelet is asked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from drakit_nodeplugin.claims.kubeletview import KubeletClaims, PodView

__all__ = ("Grace", "Unclaimed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Grace:
    """How long looks must agree."""

    confirmed_seconds: float = 120.0
    """From one complete list of the kubelet to another: twice the time in which a living kubelet
    unprepares what it knows."""

    unconfirmed_seconds: float = 3600.0
    """Where the kubelet gives no answer: what is in question may be in use all the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unclaimed:
    """Something that no look has seen in use."""

    since: float
    """The first look; loop clock."""

    confirmed_since: float | None
    """The first complete list, with nothing but complete lists since; None if the last look had
    none."""

    @classmethod
    def first(cls, claims: KubeletClaims) -> Unclaimed:
        """Begin at a look."""
        since = claims.asked_at
        complete = claims.pods is PodView.COMPLETE
        return cls(since=since, confirmed_since=since if complete else None)

    def again(self, claims: KubeletClaims) -> Unclaimed:
        """Go on with another look that does not see it in use either."""
        if claims.pods is not PodView.COMPLETE:
            return replace(self, confirmed_since=None)
        return (
            self
            if self.confirmed_since is not None
            else replace(self, confirmed_since=claims.asked_at)
        )

    def due(self, claims: KubeletClaims, grace: Grace) -> bool:
        """Decide by one more look whether the grace period is over."""
        if claims.pods is PodView.PARTIAL:
            return False
        if claims.pods is PodView.UNKNOWN:
            return claims.asked_at - self.since >= grace.unconfirmed_seconds
        begin = self.confirmed_since
        return begin is not None and claims.asked_at - begin >= grace.confirmed_seconds
