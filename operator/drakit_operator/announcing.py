"""
Announcements: when an object gets an Event, with which note, and how often.

A sentence is announced once, and again only after half an hour (the API server deletes Events after
an hour). If only the sentence changes and not its reason, because holders of devices come and go,
the next follows after a pause. A state that is normal for a while is announced only if it lasts.
A remedy is searched only for an announcement that is due: another remedy alone is no news.
The rate of all announcements is limited; an object that is due gets its turn, and waits for it.

:func:`decide` is pure; :class:`Announcer` remembers; :class:`EventWriter` writes. Its recorder
deduplicates across replicas and restarts.

It must not know the store, or how a reason is found.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from drakit_daemon.kube import ApiError, Session
from drakit_daemon.kube.events import EventRecorder, EventTimings
from drakit_daemon.rate_limiter import RateLimiter
from drakit_explain.codes import Code, Reason
from drakit_explain.confirmation import Confirmation
from drakit_explain.model import ObjectReference

logger = logging.getLogger(__name__)

CONTROLLER = "drakit.dev/operator"

NOTE_BYTES = 1024
"""The API server's limit for the note of an Event."""

BURST = 1_000
"""Events before their rate is limited: enough for the pods that wait for a missing driver."""

PER_SECOND = 200.0
"""Events per second after that. For 10,000 waiting pods, the operator needs 45 seconds."""


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

    patience_seconds: float = 300.0
    """The time after which a state that is normal during installations and updates is announced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Announcement:
    """The Event that an object must get: one reason in one sentence, and the number of others."""

    code: Code
    note: str
    regarding: ObjectReference


@dataclass(frozen=True, kw_only=True, slots=True)
class Announced:
    """The last Event of an object."""

    code: Code
    note: str
    """Without a remedy."""

    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Whether to announce now, and in how many seconds to check again (None: after a change)."""

    announce: bool = False
    again_seconds: float | None = None


def summarize(reasons: Sequence[Reason]) -> Announcement | None:
    """Return the Event of an object's first reason; None without a reason."""
    if not reasons:
        return None
    first = reasons[0]
    return Announcement(code=first.code, note=_note(reasons), regarding=first.regarding)


def _note(reasons: Sequence[Reason], remedy: str = "") -> str:
    """Return the first reason and the remedy if there is room; further reasons are counted."""
    number = len(reasons) - 1
    more = f"; and {number} more reason{'s' if number > 1 else ''}" if number else ""
    end = f"{more}; {remedy}" if remedy else more
    note = reasons[0].sentence if remedy else reasons[0].text
    if len(f"{note}{end}".encode()) > NOTE_BYTES:
        note, end = reasons[0].text, more
    return f"{_cut(note, NOTE_BYTES - len(end.encode()))}{end}"


def _cut(text: str, size: int) -> str:
    if len(text.encode()) <= size:
        return text
    return text.encode()[: size - 3].decode(errors="ignore") + "..."


def decide(
    wanted: Announcement,
    last: Announced | None,
    *,
    age_seconds: float,
    now: float,
    timing: Timing,
    once: bool = False,
) -> Decision:
    """
    Decide whether an object gets an Event now.

    :param once: one Event for each reason is enough, because the object does not change.
    """
    if age_seconds < timing.debounce_seconds:
        return Decision(again_seconds=timing.debounce_seconds - age_seconds)
    if last is None or last.code != wanted.code:
        return Decision(announce=True, again_seconds=None if once else timing.repeat_seconds)
    if once:
        return Decision()
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


class Confirm(Protocol):
    """Asks whether a reason in a namespace is certain: returns None, or when to ask again."""

    async def __call__(self, asked: Confirmation, namespace: str, /) -> float | None: ...


class Announcer:
    """Remembers, by UID, the age and the last Event of each object. Not for threads."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        confirm: Confirm,
        timing: Timing,
        on_announced: Callable[[Code], None],
    ) -> None:
        self._confirm = confirm
        self._recorder = recorder
        self._timing = timing
        self._on_announced = on_announced
        self._since: dict[str, float] = {}
        self._announced: dict[str, Announced] = {}
        self._transient: dict[str, dict[str, float]] = {}
        """The transient states of an object, and since when each has been found."""

        self._limiter = RateLimiter(burst=BURST, per_second=PER_SECOND)
        self._turns: dict[str, float] = {}
        """When an object that is due may be announced."""

    def known(self, uid: str) -> None:
        """Record when an object was first seen."""
        self._since.setdefault(uid, asyncio.get_running_loop().time())

    def forget(self, uid: str) -> None:
        """The object is gone, or is no longer of interest."""
        for remembered in (self._since, self._announced, self._transient, self._turns):
            remembered.pop(uid, None)

    def unsettled_seconds(self, uid: str) -> float:
        """Return in how many seconds an object is settled; 0 if it is."""
        now = asyncio.get_running_loop().time()
        return max(0.0, self._since.setdefault(uid, now) + self._timing.settle_seconds - now)

    async def announce(
        self, uid: str, reasons: Sequence[Reason], *, once: bool = False
    ) -> float | None:
        """
        Announce the reasons if they are due; return in how many seconds to check again.

        It does not suspend before it knows the remedy and what must be confirmed, so that both
        come from the facts that gave the reasons.
        """
        now = asyncio.get_running_loop().time()
        lasting, wait_seconds = self._lasting(uid, reasons, now)
        wanted = summarize(lasting)
        if wanted is None:
            # The last Event is remembered: a reason that flaps is announced once.
            return wait_seconds
        decision = decide(
            wanted,
            self._announced.get(uid),
            age_seconds=now - self._since.setdefault(uid, now),
            now=now,
            timing=self._timing,
            once=once,
        )
        if decision.announce:
            turn_seconds = self._turn_seconds(uid, now)
            if turn_seconds > 0:
                return turn_seconds
            remedy = next((found for each in lasting if (found := each.find_remedy())), "")
            if asked := lasting[0].find_confirmation():
                uncertain_seconds = await self._confirm(asked, wanted.regarding.namespace)
                if uncertain_seconds is not None:
                    return uncertain_seconds
            self._turns.pop(uid, None)
            await self._write(uid, wanted, _note(lasting, remedy), now)
        return _sooner(decision.again_seconds, wait_seconds)

    def _lasting(
        self, uid: str, reasons: Sequence[Reason], now: float
    ) -> tuple[list[Reason], float | None]:
        """Return the reasons that lasted, and in how many seconds the next one has lasted."""
        before = self._transient.pop(uid, {})
        usual = self._timing.patience_seconds
        patience = {
            each.transient: usual if each.patience_seconds is None else each.patience_seconds
            for each in reasons
            if each.transient
        }
        since = {state: before.get(state, now) for state in patience}
        if since:
            self._transient[uid] = since
        waits = {
            state: rest for state, at in since.items() if (rest := at + patience[state] - now) > 0
        }
        lasting = [each for each in reasons if each.transient not in waits]
        return lasting, min(waits.values(), default=None)

    def _turn_seconds(self, uid: str, now: float) -> float:
        """Return in how many seconds it is an object's turn; it keeps its turn until it is used."""
        if uid not in self._turns:
            self._turns[uid] = now + self._limiter.reserve()
        return self._turns[uid] - now

    async def _write(self, uid: str, wanted: Announcement, note: str, now: float) -> None:
        await self._recorder(replace(wanted, note=note))
        if uid in self._since:  # otherwise it was deleted meanwhile, and this entry would stay
            self._announced[uid] = Announced(code=wanted.code, note=wanted.note, at=now)
        self._on_announced(wanted.code)
        logger.info(
            "event written",
            extra={
                "object": f"{wanted.regarding.kind} "
                f"{wanted.regarding.namespace}/{wanted.regarding.name}",
                "reason": str(wanted.code),
                "note": note,
            },
        )


class EventWriter:
    """Writes announcements as Events of type Warning."""

    def __init__(self, session: Session, *, instance: str, may_write: Callable[[], bool]) -> None:
        self._recorder = EventRecorder(
            session,
            controller=CONTROLLER,
            instance=instance,
            timings=EventTimings(count_seconds=0),  # the announcer has paused already
        )
        self._may_write = may_write

    async def __call__(self, announcement: Announcement) -> None:
        """Write it, or increase the count of its Event. Raises NotWrittenError."""
        if not self._may_write():
            raise NotWrittenError("this replica no longer leads")
        try:
            await self._recorder.write(
                announcement.regarding.body(),
                reason=str(announcement.code),
                action="Allocating",
                note=announcement.note,
            )
        except ApiError as error:
            raise NotWrittenError(str(error)) from error


def _sooner(one: float | None, other: float | None) -> float | None:
    return min((each for each in (one, other) if each is not None), default=None)
