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
    "listed",
    "lost",
    "next_look",
    "observed",
    "settled",
    "sound",
)

SILENCE_SECONDS = 60.0
"""At least, until a taint from before a restart goes of which nobody says anything: a driver that
is asked for its devices' health has 30 s for an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthTiming:
    """How long a word must hold before it counts."""

    recovery_seconds: float
    """Of being well, until the taints go."""
    eviction_seconds: float
    """Of being broken, until running pods are evicted."""

    @property
    def silence_seconds(self) -> float:
        """Of silence after a return, until taints from before the restart go: of a device that was
        repaired in between, a driver that is told of health by events has nothing to say."""
        return max(self.recovery_seconds, SILENCE_SECONDS)


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

    said: bool = False
    """Whether there was a word on it since the plugin's start; that nobody knows is one."""

    silent_since: float | None = None
    """Since when a device that was tainted before is listed, without a word so far."""


UNKNOWN = Condition(word=Health.unknown())
"""A device of which nobody has said anything yet."""

_WELL = Condition(word=Health.healthy(), said=True)

_UNSURE = replace(UNKNOWN, said=True)

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
            broken_since=since if word.evict_pods else None,
            said=True,
        )
    if not old.tainted:
        return _untainted(word)
    old = replace(old, word=word, broken_since=None, said=True, silent_since=None)
    if word.status == "healthy":
        return replace(old, well_since=now if old.well_since is None else old.well_since)
    well_seconds = old.well_seconds
    if old.well_since is not None:
        well_seconds += now - old.well_since
    return replace(old, well_since=None, well_seconds=well_seconds)


def _untainted(word: Health) -> Condition:
    # Nearly all devices are one of these two, which need the memory but once.
    for common in (_WELL, _UNSURE):
        if word == common.word:
            return common
    return Condition(word=word, said=True)


def lost(old: Condition, *, now: float) -> Condition:
    """The endpoint is away: nobody can say any more how a device is."""
    if not old.tainted:
        return UNKNOWN
    return replace(observed(old, UNKNOWN.word, now=now), said=old.said)


def listed(old: Condition, *, now: float) -> Condition:
    """The endpoint is there again, and has said of a device what it has to say at once."""
    if not old.tainted or old.said or old.silent_since is not None:
        return old
    return replace(old, silent_since=now)


def next_look(condition: Condition, timing: HealthTiming) -> float | None:
    """Say when time alone changes something; None if it does not."""
    if condition.silent_since is not None:
        return condition.silent_since + timing.silence_seconds
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
    if condition.silent_since is not None:
        return UNKNOWN
    if condition.well_since is not None:
        return _untainted(condition.word)
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
