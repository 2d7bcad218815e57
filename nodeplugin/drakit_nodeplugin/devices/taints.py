"""
Decides the taints of a device from its reported health, with hysteresis. Pure functions.

* An unhealthy device gets a taint immediately, and keeps it until the device has been healthy for a
  while. A flapping device causes only one write, and no new pods get it.
* Running pods are evicted only if the device remains broken for some time.
* A taint keeps the time at which it was added, even across restarts.

A driver can set 12 taints, and the API allows 16. The node plugin adds at most four. The last of
these has one of three reasons. :mod:`.pool_state` holds the state of a pool's devices.

Does not depend on the API's JSON, on clocks or on endpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import MappingProxyType

from drakit.device import Health, Taint, TaintEffect
from drakit_nodeplugin.config import DeviceHealthSettings
from drakit_nodeplugin.devices.model import PublishedTaints, StampedTaint

DOMAIN = "drakit.dev/"
"""The prefix of the node plugin's taint keys."""

UNHEALTHY = DOMAIN + "unhealthy"
"""The device is reported as unhealthy, or was until recently. If the taint also has the effect
NoExecute, the pods that use the device can no longer work."""

STOPPED = DOMAIN + "stopped"
"""The endpoint is unavailable."""

UNPREPARING = DOMAIN + "unpreparing"
"""An earlier claim is still being unprepared."""

GONE = DOMAIN + "gone"
"""The endpoint no longer lists the device, but a claim holds it."""

MAINTENANCE = DOMAIN + "maintenance"
"""An administrator has taken the device out of service, and the cluster does not serve
DeviceTaintRules."""

NOT_PUBLISHED: PublishedTaints = MappingProxyType({})
"""No taints from before a restart."""

SILENCE_SECONDS = 60.0
"""Minimum time before a taint from before a restart is removed from a device without a report. A
driver whose health is polled has 30 s to respond."""

_ADOPTED_MESSAGE = "it was unhealthy when the node plugin was restarted"


# ---------------------------------------------------------------- health


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """The known health of a device. All times are in loop time."""

    health: Health
    """The health in the last report."""

    tainted: bool = False
    """Whether the device has a taint that new pods do not tolerate."""

    evicting: bool = False
    """Whether running pods are also evicted. The eviction ends only when the taint is removed, so
    that a device that alternates between two failures does not cause repeated writes."""

    message: str = ""
    """The reason for the taint: the message of the last unhealthy report."""

    well_since: float | None = None
    """The time at which a tainted device became healthy. None while it is not healthy."""

    well_seconds: float = 0.0
    """How long the device was healthy before `well_since`, in seconds, since the last unhealthy
    report. Unknown health pauses the recovery, but does not restart it."""

    broken_since: float | None = None
    """The time since which every report has said that running pods are broken. None if the last
    report does not say so. Unknown health also resets this time, because an eviction cannot be
    undone."""

    has_report: bool = False
    """Whether there has been a report since the plugin's start, even one of unknown health."""

    silent_since: float | None = None
    """For a device that had a taint before a restart: the time since which the device has been
    listed without a report."""


UNKNOWN = Condition(health=Health.unknown())
"""The condition of a device without a report."""

_WELL = Condition(health=Health.healthy(), has_report=True)

_UNSURE = replace(UNKNOWN, has_report=True)


def observed(old: Condition, health: Health, *, now: float) -> Condition:
    """Return the condition after a report."""
    if health.status == "unhealthy":
        since = now if old.broken_since is None else old.broken_since
        return Condition(
            health=health,
            tainted=True,
            evicting=old.evicting,
            message=health.message,
            broken_since=since if health.evict_pods else None,
            has_report=True,
        )
    if not old.tainted:
        return _untainted(health)
    old = replace(old, health=health, broken_since=None, has_report=True, silent_since=None)
    if health.status == "healthy":
        return replace(old, well_since=now if old.well_since is None else old.well_since)
    well_seconds = old.well_seconds
    if old.well_since is not None:
        well_seconds += now - old.well_since
    return replace(old, well_since=None, well_seconds=well_seconds)


def _untainted(health: Health) -> Condition:
    # Nearly all devices are in one of these two conditions. Sharing the objects saves memory.
    for common in (_WELL, _UNSURE):
        if health == common.health:
            return common
    return Condition(health=health, has_report=True)


def lost(old: Condition, *, now: float) -> Condition:
    """Return the condition after the endpoint has stopped, and no longer reports health."""
    if not old.tainted:
        return UNKNOWN
    return replace(observed(old, UNKNOWN.health, now=now), has_report=old.has_report)


def listed(old: Condition, *, now: float) -> Condition:
    """Return the condition after the endpoint has returned and listed the device again."""
    if not old.tainted or old.has_report or old.silent_since is not None:
        return old
    return replace(old, silent_since=now)


def next_change(condition: Condition, timing: DeviceHealthSettings) -> float | None:
    """Return the time at which a condition changes without an event, or None."""
    if condition.silent_since is not None:
        # Don't wait for a report longer than this: a driver that reports only changes in health
        # does not report a device that was repaired before the restart.
        return condition.silent_since + max(timing.recovery_period, SILENCE_SECONDS)
    if condition.well_since is not None:
        return condition.well_since + (timing.recovery_period - condition.well_seconds)
    if condition.broken_since is not None and not condition.evicting:
        return condition.broken_since + timing.eviction_delay
    return None


def settled(condition: Condition, timing: DeviceHealthSettings, *, now: float) -> Condition:
    """Apply the transitions whose deadlines have expired since the last report."""
    due = next_change(condition, timing)
    if due is None or now < due:
        return condition
    if condition.silent_since is not None:
        return UNKNOWN
    if condition.well_since is not None:
        return _untainted(condition.health)
    return replace(condition, evicting=True)


def adopted(old: Condition, *, evicting: bool, now: float) -> Condition:
    """Return the condition of a device that had a taint before a restart. The device recovers as if
    there had been no restart."""
    if old.tainted:
        return replace(old, evicting=evicting or old.evicting)
    return replace(
        old,
        tainted=True,
        evicting=evicting,
        message=_ADOPTED_MESSAGE,
        well_since=now if old.health.status == "healthy" else None,
    )


# ---------------------------------------------------------------- taints


def taints(
    own: Iterable[Taint],
    condition: Condition,
    *,
    stopped: bool,
    unpreparing: bool,
    maintenance: bool = False,
    gone: TaintEffect | None = None,
) -> tuple[Taint, ...]:
    """Return all taints that a device must have, always in the same order. `own` are the driver's
    own taints. `gone` is the effect of the taint for a device that its endpoint no longer lists."""
    reasons: list[Taint] = list(own)
    if stopped:
        reasons.append(Taint(key=STOPPED, effect="NoSchedule"))
    if condition.tainted:
        reasons.append(Taint(key=UNHEALTHY, effect="NoSchedule"))
    if condition.tainted and condition.evicting:
        reasons.append(Taint(key=UNHEALTHY, effect="NoExecute"))
    if gone is not None:
        reasons.append(Taint(key=GONE, effect=gone))
    elif maintenance:  # add only one of these, so that the taints do not exceed the API limit
        reasons.append(Taint(key=MAINTENANCE, effect="NoSchedule"))
    elif unpreparing:
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
    Add the time to each taint. The time does not change while the key and effect remain the same.

    A toleration's duration starts at that time, so neither a new value nor a restart may reset it.
    The times in `published`, from before a restart, are kept. Returns `old` itself if nothing has
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
