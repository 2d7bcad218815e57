"""
The taints of a device: the driver's own, and what the manager knows of it. All pure.

Whether a device is unhealthy is decided in :mod:`.health`. A driver may give 12 taints, the API
takes 16: what stands here is at most four.

It must not know the API's JSON, clocks, or why a device is what it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from drakit.device import Taint
from drakit_nodeplugin.devices.health import Condition
from drakit_nodeplugin.devices.pools import PublishedTaints, StampedTaint

__all__ = ("DOMAIN", "NOT_PUBLISHED", "STOPPED", "UNHEALTHY", "UNPREPARING", "stamped", "taints")

DOMAIN = "drakit.dev/"
"""Before the keys of all taints that are not the driver's own."""

UNHEALTHY = DOMAIN + "unhealthy"
"""The driver says so, or has not said otherwise for long enough. With NoExecute beside NoSchedule
where running work is broken."""

STOPPED = DOMAIN + "stopped"
"""Its driver is away."""

UNPREPARING = DOMAIN + "unpreparing"
"""What an earlier claim left has not been undone yet."""

NOT_PUBLISHED: PublishedTaints = MappingProxyType({})
"""Of a device without taints, or of which they do not matter any more."""


def taints(
    own: Iterable[Taint], condition: Condition, *, stopped: bool, unpreparing: bool
) -> tuple[Taint, ...]:
    """Give all taints that a device must have, always in the same order."""
    reasons: list[Taint] = list(own)
    if stopped:
        reasons.append(Taint(key=STOPPED, effect="NoSchedule"))
    if condition.tainted:
        reasons.append(Taint(key=UNHEALTHY, effect="NoSchedule"))
    if condition.tainted and condition.evicting:
        reasons.append(Taint(key=UNHEALTHY, effect="NoExecute"))
    if unpreparing:
        reasons.append(Taint(key=UNPREPARING, effect="NoSchedule"))
    return tuple(reasons)


def stamped(
    wanted: Iterable[Taint],
    old: tuple[StampedTaint, ...],
    *,
    now: int,
    published: PublishedTaints = NOT_PUBLISHED,
) -> tuple[StampedTaint, ...]:
    """
    Say since when each taint is there: its time stays for as long as key and effect do.

    How long a claim tolerates a taint counts from that time, and a new value is no new start, nor
    is a restart: what was `published` before it counts. Gives the old tuple itself if nothing has
    changed.
    """
    since: dict[tuple[str, str], int] = {(t.key, t.effect): t.added_at for t in old}
    since |= {key: added_at for key, added_at in published.items() if added_at is not None}
    new = tuple(
        StampedTaint(
            key=taint.key,
            value=taint.value,
            effect=taint.effect,
            added_at=since.get((taint.key, taint.effect), now),
        )
        for taint in wanted
    )
    return old if new == old else new
