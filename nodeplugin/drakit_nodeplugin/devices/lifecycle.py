"""
The life of an endpoint, and when its devices change by it: all pure.

As the kubelet's own device manager does it: devices of an endpoint that is away stay for a grace
period, tainted; then they are removed, and a removal that was begun is finished after a restart.
What an endpoint has is kept in :mod:`.endpoint_state`.

It must not know devices, clocks, or the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ("Graces", "Life", "Phase", "accounted", "phase", "phase_ends", "removal_due")


class Phase(Enum):
    """What an endpoint's devices are."""

    AWAITED = "awaited"
    """It has not spoken since the plugin's start: what is published stays as it is."""
    PRESENT = "present"
    """It is there."""
    STOPPED = "stopped"
    """It is away: its devices are published, and tainted."""
    REMOVING = "removing"
    """It was away for too long: its pools are deleted, once the store knows of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """What has become of an endpoint. Times are the loop's."""

    stopped_since: float | None
    """Since when it is away; a time before the plugin's start if the store says so."""
    spoken: bool = False
    """Whether it has listed its devices since the plugin's start."""
    known: bool = False
    """Whether the store named it: its pools are known, whether it returns or not."""
    removing: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Graces:
    """How long an endpoint is waited for."""

    start_until: float
    """After the plugin's start; loop time."""
    stop_seconds: float
    """After it has stopped."""


def phase(life: Life, graces: Graces, *, now: float) -> Phase:
    """Say what the devices of an endpoint are now."""
    if life.stopped_since is None:
        return Phase.PRESENT
    if life.removing:
        return Phase.REMOVING
    if not life.spoken and now < graces.start_until:
        return Phase.AWAITED
    return Phase.STOPPED


def phase_ends(life: Life, graces: Graces) -> float | None:
    """Say until when an endpoint that is away is waited for; None if nobody waits for it."""
    if life.stopped_since is None or life.removing:
        return None
    end = life.stopped_since + graces.stop_seconds
    # It must have had the chance to return: the plugin itself was away as well.
    return end if life.spoken else max(end, graces.start_until)


def removal_due(life: Life, graces: Graces, *, now: float) -> bool:
    """Say whether an endpoint's grace period has ended."""
    end = phase_ends(life, graces)
    return end is not None and now >= end


def accounted(life: Life, graces: Graces, *, now: float) -> bool:
    """
    Say whether it is known which pools an endpoint has; others can be deleted only then.

    Where neither it nor the store has said that (the checkpoint was lost), what is published may be
    its own for as long as it may return.
    """
    if life.spoken:
        return True
    if life.known:
        return now >= graces.start_until
    end = phase_ends(life, graces)
    return end is None or now >= end
