"""
Telling users what was found: when an object is told what, and how often.

A sentence is told once, and again only after a long while (the API server forgets Events after an
hour). If only the sentence changes and not its word, because holders of devices come and go, the
next is told after a pause. :func:`decide` is pure; :class:`Announcer` remembers and writes.

It must not know the store, Kopf, or how a reason is found.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from drakit.explain import Code, ObjectReference, Reason

__all__ = (
    "Announcement",
    "Announcer",
    "Decision",
    "NotToldError",
    "Recorder",
    "Timing",
    "Told",
    "decide",
)

logger = logging.getLogger(__name__)

NOTE_BYTES = 1024
"""The API server's limit for the note of an Event."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """When something is told; seconds on the loop's clock."""

    debounce_seconds: float = 1.0
    """An object younger than this is left alone: a pod that is just being scheduled waits, too."""

    change_seconds: float = 60.0
    """Pause before the same word is told with another sentence: one Event a minute and object."""

    repeat_seconds: float = 1800.0
    """Pause before the same is told again: half of the hour that Events are kept by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Announcement:
    """What an object shall be told: one word, and all its sentences in one note."""

    code: Code
    note: str
    regarding: ObjectReference


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    code: Code
    note: str
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Whether to tell now, and in how many seconds to look again (None: when something changes)."""

    tell: bool = False
    again_seconds: float | None = None


def summarize(reasons: Sequence[Reason]) -> Announcement | None:
    """Join an object's reasons under the first one's word, as far as a note has room."""
    if not reasons:
        return None
    note = reasons[0].sentence
    for index, reason in enumerate(reasons[1:], start=1):
        longer = f"{note}; besides: {reason.sentence}"
        if len(longer.encode()) > NOTE_BYTES - len("; and 999 more"):
            note = f"{note}; and {len(reasons) - index} more"
            break
        note = longer
    note = note.encode()[:NOTE_BYTES].decode(errors="ignore")
    return Announcement(code=reasons[0].code, note=note, regarding=reasons[0].regarding)


def decide(
    wanted: Announcement, told: Told | None, *, age_seconds: float, now: float, timing: Timing
) -> Decision:
    """Decide whether an object is told something now."""
    if age_seconds < timing.debounce_seconds:
        return Decision(again_seconds=timing.debounce_seconds - age_seconds)
    if told is None or told.code != wanted.code:
        return Decision(tell=True, again_seconds=timing.repeat_seconds)
    pause = timing.repeat_seconds if told.note == wanted.note else timing.change_seconds
    rest = told.at + pause - now
    if rest > 0:
        return Decision(again_seconds=rest)
    return Decision(tell=True, again_seconds=timing.repeat_seconds)


class NotToldError(Exception):
    """Something was not written; the text says why. It is to be tried again."""


class Recorder(Protocol):
    """What writes an announcement, or raises NotToldError."""

    async def __call__(self, announcement: Announcement) -> None: ...


class Announcer:
    """Remembers, by UID, since when an object is known and what it was told. Not for threads."""

    def __init__(
        self, recorder: Recorder, *, timing: Timing, on_told: Callable[[Code], None]
    ) -> None:
        self._recorder = recorder
        self._timing = timing
        self._on_told = on_told
        self._since: dict[str, float] = {}
        self._told: dict[str, Told] = {}

    def known(self, uid: str) -> None:
        """Begin an object's age, if it has none."""
        self._since.setdefault(uid, asyncio.get_running_loop().time())

    def forget(self, uid: str) -> None:
        """The object is gone, or is no longer of interest."""
        self._since.pop(uid, None)
        self._told.pop(uid, None)

    async def announce(self, uid: str, reasons: Sequence[Reason]) -> float | None:
        """Tell an object what was found, if it is time; say in how many seconds to look again."""
        wanted = summarize(reasons)
        if wanted is None:
            return None  # what was told is remembered: a reason that comes and goes is told once
        now = asyncio.get_running_loop().time()
        decision = decide(
            wanted,
            self._told.get(uid),
            age_seconds=now - self._since.setdefault(uid, now),
            now=now,
            timing=self._timing,
        )
        if decision.tell:
            await self._recorder(wanted)
            if uid in self._since:  # else it went while it was told, and nobody forgets it again
                self._told[uid] = Told(code=wanted.code, note=wanted.note, at=now)
            self._on_told(wanted.code)
            logger.info(
                "told",
                extra={
                    "object": f"{wanted.regarding.kind} "
                    f"{wanted.regarding.namespace}/{wanted.regarding.name}",
                    "reason": str(wanted.code),
                    "note": wanted.note,
                },
            )
        return decision.again_seconds
