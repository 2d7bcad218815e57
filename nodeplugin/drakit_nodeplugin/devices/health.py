"""
From what is said of a device's health to whether it is tainted: hysteresis, all pure.

What is bad is tainted at once, and stays so until the device has been well for a while: one that
flaps is written once, and gets no new pods. What the taints look like is said in :mod:`.taints`,
when time is looked at in :mod:`.manager`.

It must not know clocks, endpoints, or who reports.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from drakit.device import Health

__all__ = (
    "UNKNOWN",
    "Condition",
    "HealthTiming",
    "adopted",
    "next_look",
    "observed",
    "settled",
    "sound",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthTiming:
    """How long a word must hold before it counts."""

    recovery_seconds: float
    """Of being well, until the taints go."""
    eviction_seconds: float
    """Of being broken, until running pods are evicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """What is known of a device's health. Times are the loop's."""

    word: Health
    """What was said last."""

    tainted: bool = False
    """Whether new pods are kept away."""

    evicting: bool = False
    """Whether running pods are evicted as well; ends with the taint, not before it, so that work
    which fails in two ways by turns is not a write at each turn."""

    message: str = ""
    """Why it is tainted: the last bad word's reason."""

    well_since: float | None = None
    """Since when a tainted device is well; None while it is not."""

    well_seconds: float = 0.0
    """How long it was well before that, since it was bad: while nobody can tell how the device is,
    its recovery waits, but does not begin anew."""

    broken_since: float | None = None
    """Since when running work is broken without another word; None while it is not. Evicting pods
    cannot be undone, so a moment in which nobody could tell begins it anew."""


UNKNOWN = Condition(word=Health.unknown())
"""A device of which nobody has said anything yet."""

_WELL = Condition(word=Health.ok())

_STATUSES = ("healthy", "unhealthy", "unknown")

_NONSENSE = Health.unknown("its driver said something of its health that is no Health")

_ADOPTED_MESSAGE = "it was unhealthy when the node plugin was restarted"


def sound(word: object) -> Health:
    """Give a word as it is, or that nobody knows: vendors make words."""
    if not isinstance(word, Health):
        return _NONSENSE
    # Exact types: what is compared later must not be the vendor's own code.
    if type(word.status) is not str or type(word.message) is not str:
        return _NONSENSE
    return word if word.status in _STATUSES else _NONSENSE


def observed(old: Condition, word: Health, *, now: float) -> Condition:
    """Take in a word on a device's health."""
    if word.status == "unhealthy":
        since = now if old.broken_since is None else old.broken_since
        return Condition(
            word=word,
            tainted=True,
            evicting=old.evicting,
            message=word.message,
            broken_since=since if word.broken else None,
        )
    if not old.tainted:
        return _WELL if word == _WELL.word else Condition(word=word)
    if word.status == "healthy":
        since = now if old.well_since is None else old.well_since
        return replace(old, word=word, well_since=since, broken_since=None)
    well_seconds = old.well_seconds
    if old.well_since is not None:
        well_seconds += now - old.well_since
    return replace(old, word=word, well_since=None, well_seconds=well_seconds, broken_since=None)


def next_look(condition: Condition, timing: HealthTiming) -> float | None:
    """Say when time alone changes something; None if it does not."""
    if condition.well_since is not None:
        return condition.well_since + (timing.recovery_seconds - condition.well_seconds)
    if condition.broken_since is not None and not condition.evicting:
        return condition.broken_since + timing.eviction_seconds
    return None


def settled(condition: Condition, timing: HealthTiming, *, now: float) -> Condition:
    """Give what has become of a device by now, without another word."""
    due = next_look(condition, timing)
    if due is None or now < due:
        return condition
    if condition.well_since is not None:
        return _WELL if condition.word == _WELL.word else Condition(word=condition.word)
    return replace(condition, evicting=True)


def adopted(old: Condition, *, evicting: bool, now: float) -> Condition:
    """Take over that a device was tainted before a restart; it recovers as if there was none."""
    if old.tainted:
        return replace(old, evicting=evicting or old.evicting)
    well = old.word.status == "healthy"
    return replace(
        old,
        tainted=True,
        evicting=evicting,
        message=_ADOPTED_MESSAGE,
        well_since=now if well else None,
    )
