"""
Announcements: when an object gets an Event, with which note, and how often.

A sentence is announced once, and again only after half an hour (the API server deletes Events after
an hour). If only the sentence changes and not its reason, because holders of devices come and go,
the next follows after a pause. :func:`decide` is pure; :class:`Announcer` remembers and writes.

It must not know the store, Kopf, or how a reason is found.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from drakit.explain.codes import Code, Reason
from drakit.explain.model import ObjectReference

__all__ = (
    "Announced",
    "Announcement",
    "Announcer",
    "Decision",
    "NotWrittenError",
    "Recorder",
    "Timing",
    "decide",
)

logger = logging.getLogger(__name__)

NOTE_BYTES = 1024
"""The API server's limit for the note of an Event."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """When announcements are made; seconds on the loop's clock."""

    debounce_seconds: float = 1.0
    """An object younger than this gets no Event: a pod that is just being scheduled is pending,
    too."""

    settle_seconds: float = 30.0
    """An object known for this long is settled: controllers and kubelet have had time to act."""

    change_seconds: float = 60.0
    """Pause before the same reason is announced with another sentence: one Event a minute and
    object."""

    repeat_seconds: float = 1800.0
    """Pause before the same is announced again: Events are kept for an hour by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Announcement:
    """The Event that an object must get: one reason, and all its sentences in one note."""

    code: Code
    note: str
    regarding: ObjectReference


@dataclass(frozen=True, kw_only=True, slots=True)
class Announced:
    """The last Event of an object."""

    code: Code
    note: str
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Whether to announce now, and in how many seconds to check again (None: after a change)."""

    announce: bool = False
    again_seconds: float | None = None


def summarize(reasons: Sequence[Reason]) -> Announcement | None:
    """Join an object's reasons under the first one's code, as far as a note has room."""
    if not reasons:
        return None
    note = reasons[0].sentence
    for index, reason in enumerate(reasons[1:], start=1):
        longer = f"{note}; also: {reason.sentence}"
        if len(longer.encode()) > NOTE_BYTES - len("; and 999 more"):
            note = f"{note}; and {len(reasons) - index} more"
            break
        note = longer
    note = note.encode()[:NOTE_BYTES].decode(errors="ignore")
    return Announcement(code=reasons[0].code, note=note, regarding=reasons[0].regarding)


def decide(
    wanted: Announcement, last: Announced | None, *, age_seconds: float, now: float, timing: Timing
) -> Decision:
    """Decide whether an object gets an Event now."""
    if age_seconds < timing.debounce_seconds:
        return Decision(again_seconds=timing.debounce_seconds - age_seconds)
    if last is None or last.code != wanted.code:
        return Decision(announce=True, again_seconds=timing.repeat_seconds)
    pause = timing.repeat_seconds if last.note == wanted.note else timing.change_seconds
    rest = last.at + pause - now
    if rest > 0:
        return Decision(again_seconds=rest)
    return Decision(announce=True, again_seconds=timing.repeat_seconds)


class NotWrittenError(Exception):
    """An announcement was not written; the text is the reason. The caller must retry."""


class Recorder(Protocol):
    """Writes an announcement, or raises NotWrittenError."""

    async def __call__(self, announcement: Announcement) -> None: ...


class Announcer:
    """Remembers, by UID, the age and the last Event of each object. Not for threads."""

    def __init__(
        self, recorder: Recorder, *, timing: Timing, on_announced: Callable[[Code], None]
    ) -> None:
        self._recorder = recorder
        self._timing = timing
        self._on_announced = on_announced
        self._since: dict[str, float] = {}
        self._announced: dict[str, Announced] = {}

    def known(self, uid: str) -> None:
        """Record when an object was first seen."""
        self._since.setdefault(uid, asyncio.get_running_loop().time())

    def forget(self, uid: str) -> None:
        """The object is gone, or is no longer of interest."""
        self._since.pop(uid, None)
        self._announced.pop(uid, None)

    def unsettled_seconds(self, uid: str) -> float:
        """Return in how many seconds an object is settled; 0 if it is."""
        now = asyncio.get_running_loop().time()
        return max(0.0, self._since.setdefault(uid, now) + self._timing.settle_seconds - now)

    async def announce(self, uid: str, reasons: Sequence[Reason]) -> float | None:
        """Announce the reasons if they are due; return in how many seconds to check again."""
        wanted = summarize(reasons)
        if wanted is None:
            return None  # the last Event is remembered: a reason that flaps is announced once
        now = asyncio.get_running_loop().time()
        decision = decide(
            wanted,
            self._announced.get(uid),
            age_seconds=now - self._since.setdefault(uid, now),
            now=now,
            timing=self._timing,
        )
        if decision.announce:
            await self._recorder(wanted)
            if uid in self._since:  # otherwise it was deleted meanwhile, and this entry would stay
                self._announced[uid] = Announced(code=wanted.code, note=wanted.note, at=now)
            self._on_announced(wanted.code)
            logger.info(
                "event written",
                extra={
                    "object": f"{wanted.regarding.kind} "
                    f"{wanted.regarding.namespace}/{wanted.regarding.name}",
                    "reason": str(wanted.code),
                    "note": wanted.note,
                },
            )
        return decision.again_seconds
