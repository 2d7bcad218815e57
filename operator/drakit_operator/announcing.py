"""
Announces problems: decides when an object gets an Event, with which note, and how often.

* A sentence is announced once, and again only after half an hour (the API server deletes Events
  after an hour).
* If the sentence changes but not its reason, for example because the holders of devices change, or
  if an object returns to an earlier reason, the next Event follows after a pause that doubles each
  time.
* A cause that many objects share is announced once about the shared object, and once with the whole
  reason in each namespace (:mod:`.shared_causes`).
* A state that is normal for a short time is announced only if it lasts.
* A remedy is searched for only if an announcement is due. A changed remedy does not cause an
  announcement.
* The rate of all announcements is limited only here. An object that is due waits for its turn
  (:class:`drakit_daemon.rate_limiter.FairRateLimiter`).

:func:`decide` is pure, :class:`Announcer` has the state, and :class:`EventWriter` writes. Its
recorder deduplicates Events across replicas and restarts.

Does not depend on the store.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from drakit.text import escaped
from drakit_daemon.kube import ApiError, Session
from drakit_daemon.kube.events import EventRecorder, EventTimings
from drakit_daemon.rate_limiter import FairRateLimiter
from drakit_explain.codes import Code, Reason
from drakit_explain.model import ObjectReference
from drakit_operator.config import Events
from drakit_operator.metrics import Metrics
from drakit_operator.shared_causes import PAUSE_SECONDS, Action, SharedCauses

logger = logging.getLogger(__name__)

CONTROLLER = "drakit.dev/operator"

NOTE_CHARACTERS = 300
"""
Maximum length of an Event's note, which users read in a table. `kubectl drakit explain` shows the
rest.

The API server's limit is 1024 bytes, and a character of a name takes one byte.
"""

BURST = 1_000
"""Burst of Events before their rate is limited. It is enough for the pods that wait for a missing
driver."""

PER_SECOND = 200.0
"""Events per second after the burst. At this rate, Events for 10,000 waiting pods take 45
seconds."""

SAME_SECONDS = 0.1
"""Objects first seen within this time share one number object for the time, to save memory: a list
can have 100,000 objects."""

SETTLE_SECONDS = 30.0
"""The age at which an object is settled. By then, controllers and the kubelet have had time to
act."""

MAX_CHANGES = 16
"""Maximum number of times to double a pause. The result only needs to exceed the longest pause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Announcement:
    """The Event to write about an object: one reason as a sentence, and the number of other
    reasons."""

    code: Code
    note: str
    regarding: ObjectReference


@dataclass(frozen=True, kw_only=True, slots=True)
class Announced:
    """The last Event about an object or its shared cause, and the earlier history."""

    code: Code
    note: str
    """The note without a remedy."""

    at: float
    shared: bool = False
    """Whether the Event is about a shared cause. If so, there was no Event about the object
    itself."""

    earlier: frozenset[Code] = frozenset()
    """The reasons of earlier Events."""

    changes: int = 0
    """The number of successive Events whose sentence changed, or whose reason had occurred
    before."""

    def is_repeated_by(self, wanted: Announcement) -> bool:
        return self.code == wanted.code and (self.shared or self.note == wanted.note)

    def is_known(self, code: Code) -> bool:
        return code == self.code or code in self.earlier

    def pause_seconds(self, wanted: Announcement, timing: Events) -> float:
        """Return the pause before an Event whose reason has already been announced."""
        if self.is_repeated_by(wanted):
            return timing.repeat_pause
        return min(timing.change_pause * 2.0**self.changes, timing.repeat_pause)


def remembered(
    last: Announced | None, wanted: Announcement, *, at: float, shared: bool = False
) -> Announced:
    """Return the state to keep about an object after an Event."""
    now = Announced(code=wanted.code, note=wanted.note, at=at, shared=shared)
    if last is None:
        return now
    # A repeated Event means that the object is stable again. A new reason is announced, but does
    # not mean that the flapping has ended.
    changes = 0 if last.is_repeated_by(wanted) else last.changes + last.is_known(wanted.code)
    earlier = (last.earlier | {last.code}) - {wanted.code}
    return replace(now, earlier=earlier, changes=min(changes, MAX_CHANGES))


def summarize(reasons: Sequence[Reason]) -> Announcement | None:
    """Return the Event for an object's first reason, or None if there are no reasons. The Event's
    note is compared with the note of the last Event."""
    if not reasons:
        return None
    first = reasons[0]
    note = f"{_cut(first.text, _COMPARED)}{_more(reasons)}"
    return Announcement(code=first.code, note=note, regarding=first.regarding)


_COMPARED = 1024
"""How many characters of a reason to compare."""


def _more(reasons: Sequence[Reason]) -> str:
    number = len(reasons) - 1
    return f"; and {number} more reason{'s' if number > 1 else ''}" if number else ""


def _note(reasons: Sequence[Reason], remedy: str = "") -> str:
    """Return the first reason, and the remedy if there is room for it. The other reasons are only
    counted."""
    more = _more(reasons)
    # Escape the text first, because an escape is longer than the character that it replaces.
    text = escaped(reasons[0].sentence if remedy else reasons[0].text)
    remedy = escaped(remedy)
    # One of several remedies is enough. The namespace is redundant, because the Event is in the
    # same one as its object.
    namespace = reasons[0].regarding.namespace
    first_remedy = _without_namespace(remedy.partition("; or ")[0], namespace)
    brief = _without_namespace(_SUBJECT.sub("", text), namespace)
    short = _without_details(brief)
    for of, end in ((text, remedy), (brief, first_remedy), (short, first_remedy)):
        note = "; ".join(filter(None, (f"{of}{more}", end)))
        if len(note) <= NOTE_CHARACTERS:
            return note
    first, *others = short.split("; ")
    # If the first reason does not describe a remedy, adding one takes precedence.
    wanted = [*others, first_remedy] if others else [first_remedy]
    room = NOTE_CHARACTERS - len(more)
    if not others and first_remedy and len(first_remedy) <= NOTE_CHARACTERS // 2:
        room -= len(first_remedy) + 2
    note = f"{_cut(first, room)}{more}"
    for each in filter(None, wanted):
        if len(note) + len(each) + 2 <= NOTE_CHARACTERS:
            note = f"{note}; {each}"
    return note


def _without_namespace(text: str, namespace: str) -> str:
    """Remove the namespace from names. Without a namespace, keep names as they are, because the
    text may contain paths."""
    return text.replace(f" {namespace}/", " ") if namespace else text


_SUBJECT = re.compile(r"^pod \S+ waits: ")
"""Matches the start of a reason that repeats the object of the Event."""

_MIN_DETAIL = 40
"""Minimum length of a parenthetical detail to remove from a long note."""


def _without_details(text: str) -> str:
    """Remove long parenthetical details, including nested ones."""
    parts: list[str] = []
    depth, start = 0, 0
    for index, each in enumerate(text):
        if each == "(" and (depth or text[index - 1 : index] == " "):
            depth += 1
            if depth == 1:
                parts.append(text[start : index - 1])
                start = index - 1
        elif each == ")" and depth:
            depth -= 1
            if not depth:
                if index - start <= _MIN_DETAIL:
                    parts.append(text[start : index + 1])
                start = index + 1
    return "".join((*parts, text[start:]))


def _cut(text: str, size: int) -> str:
    text = escaped(text)
    return text if len(text) <= size else f"{text[: size - 3]}..."


def decide(
    wanted: Announcement,
    last: Announced | None,
    *,
    age_seconds: float,
    now: float,
    timing: Events,
    once: bool = False,
) -> tuple[bool, float | None]:
    """
    Decide whether an object gets an Event now, and return the seconds until the next check. If the
    seconds are None, the next check follows a change.

    :param once: whether one Event for each reason is enough, because the object does not change.
    """
    if age_seconds < timing.debounce:
        return False, timing.debounce - age_seconds
    if last is None or not last.is_known(wanted.code):
        return True, None if once else timing.repeat_pause
    if once:
        return False, None
    rest = last.at + last.pause_seconds(wanted, timing) - now
    if rest > 0:
        return False, rest
    return True, timing.repeat_pause


class NotWrittenError(Exception):
    """An announcement was not written. The message is the reason. The caller must retry."""

    def __init__(self, why: str, *, refused: bool = False) -> None:
        """
        :param refused: whether the API server rejected the Event, for example because of a quota or
            a webhook.
        """
        super().__init__(why)
        self.refused = refused


Recorder = Callable[[Announcement], Awaitable[bool]]
"""Writes an announcement, or raises NotWrittenError. Returns False if nobody would be able to read
the Event."""


class Announcer:
    """Stores the age and the last Event of each object, keyed by UID. Not thread-safe."""

    def __init__(self, recorder: Recorder, *, timing: Events, metrics: Metrics) -> None:
        self._recorder = recorder
        self._timing = timing
        self._metrics = metrics
        self._since: dict[str, float] = {}
        self._seen_at = float("-inf")
        self._announced: dict[str, Announced] = {}
        self._flapping: dict[str, Code] = {}
        """The reason to which each object has returned, while the Event about it is withheld."""

        self._causes = SharedCauses(
            change_seconds=timing.change_pause, repeat_seconds=timing.repeat_pause
        )
        self._transient: dict[str, dict[str, float]] = {}
        """The transient states of each object, and the time at which each was first found."""

        self._turns = FairRateLimiter(burst=BURST, per_second=PER_SECOND)

    def known(self, uid: str) -> None:
        """Record when an object was first seen."""
        now = asyncio.get_running_loop().time()
        if now >= self._seen_at + SAME_SECONDS:
            self._seen_at = now
        self._since.setdefault(uid, self._seen_at)

    def forget(self, uid: str) -> None:
        """Drop the state of an object that is gone or no longer checked."""
        self._causes.leave(uid, now=asyncio.get_running_loop().time())
        self._turns.leave(uid)
        for each in (self._since, self._announced, self._transient, self._flapping):
            each.pop(uid, None)

    def unsettled_seconds(self, uid: str) -> float:
        """Return the seconds until an object is settled. 0 if it is already settled."""
        now = asyncio.get_running_loop().time()
        return max(0.0, self._since.setdefault(uid, now) + SETTLE_SECONDS - now)

    async def announce(
        self,
        uid: str,
        reasons: Sequence[Reason],
        *,
        wake: Callable[[], None],
        once: bool = False,
        as_old_as: str = "",
    ) -> float | None:
        """
        Announce the reasons if they are due. Return the seconds until the next check.

        :param wake: called when it is the object's turn, so that it is checked again.
        :param as_old_as: the UID of an object that has the same age, used if the age of this object
            is unknown.

        Does not suspend before the remedy is found, so the remedy comes from the same facts as the
        reasons. Raises :class:`.QueriesPendingError` if the allocator must be queried for a remedy.
        """
        now = asyncio.get_running_loop().time()
        lasting, wait_seconds = self._lasting(uid, reasons, now)
        wanted = summarize(lasting)
        if wanted is None:
            # Keep the last Event, so that a reason that flaps is announced once.
            self._causes.leave(uid, now=now)
            self._turns.leave(uid)
            return wait_seconds
        last = self._announced.get(uid)
        is_due, next_seconds = decide(
            wanted,
            last,
            age_seconds=now - self._since.setdefault(uid, self._since.get(as_old_as, now)),
            now=now,
            timing=self._timing,
            once=once,
        )
        if last is None and not is_due:  # the object is too young
            return _sooner(next_seconds, wait_seconds)
        cause = None if once else lasting[0].cause
        self._causes.join(uid, wanted.code, cause, wanted.regarding, now=now)
        if last is not None and not is_due:
            if not last.shared:
                self._causes.announced(uid)
            elif not self._causes.naming_note(uid):  # the object that the last Event named is gone
                is_due, next_seconds = True, self._timing.repeat_pause
        if not is_due:
            self._count_flapping(uid, wanted.code, last)
            self._turns.leave(uid)
            return _sooner(next_seconds, wait_seconds)
        named_another = last is not None and last.shared
        action, again = self._causes.judge(uid, now=now, named_another=named_another)
        if action is Action.COVERED:
            self._cover(uid, wanted, now)
        if action in (Action.COVERED, Action.WAIT):
            return _sooner(again, wait_seconds)
        has_waited = self._turns.is_waiting(uid)
        if not self._turns.take(uid, wanted.regarding.namespace, wake):
            if not has_waited:
                self._metrics.delayed_events.inc()
            return None
        if action is Action.SHARED:
            again = await self._announce_shared(uid, wanted, now)
        elif action is Action.NAMING:
            self._turns.use(uid)
            note = _cut(self._causes.naming_note(uid), NOTE_CHARACTERS)
            await self._write(replace(wanted, note=note))
            self._remember(uid, wanted, now, shared=True)
        else:
            await self._announce_own(uid, wanted, lasting, now)
        return again if again is not None else _sooner(next_seconds, wait_seconds)

    async def _announce_own(
        self, uid: str, wanted: Announcement, lasting: Sequence[Reason], now: float
    ) -> None:
        """Write an Event about the object itself."""
        remedy = next((found for each in lasting if (found := each.find_remedy())), "")
        with self._causes.announcing_own(uid):
            self._turns.use(uid)
            await self._write(replace(wanted, note=_note(lasting, remedy)))
            self._remember(uid, wanted, now)
            self._causes.announced(uid)

    async def _announce_shared(self, uid: str, wanted: Announcement, now: float) -> float:
        """Write the Event about a cause. Return the seconds until the next check."""
        self._turns.use(uid)
        try:
            with self._causes.announcing(uid, now=now) as group:
                note = _cut(group.note(), NOTE_CHARACTERS)
                await self._write(replace(wanted, note=note, regarding=group.cause.about))
        except NotWrittenError as error:
            if not error.refused:
                raise
            self._causes.refuse(uid, now=now)
        return PAUSE_SECONDS  # its own Event follows

    def _cover(self, uid: str, wanted: Announcement, now: float) -> None:
        """Mark an object as covered by Events about other objects, so that it does not get its own
        Event."""
        last = self._announced.get(uid)
        if last is None or not last.is_repeated_by(wanted):
            self._metrics.suppressed_events.labels("shared").inc()
        self._turns.leave(uid)
        self._remember(uid, wanted, now, shared=True)

    def _count_flapping(self, uid: str, code: Code, last: Announced | None) -> None:
        """Count the Event that is withheld because an object returned to an earlier reason. Count
        it only once."""
        if last is None or code == last.code:
            self._flapping.pop(uid, None)
        elif self._flapping.get(uid) != code:
            self._flapping[uid] = code
            self._metrics.suppressed_events.labels("flapping").inc()

    def _lasting(
        self, uid: str, reasons: Sequence[Reason], now: float
    ) -> tuple[list[Reason], float | None]:
        """Return the reasons that have lasted long enough, and the seconds until the next one will
        have."""
        before = self._transient.pop(uid, {})
        usual = self._timing.patience
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

    def _remember(
        self, uid: str, wanted: Announcement, now: float, *, shared: bool = False
    ) -> None:
        if uid not in self._since:  # nothing would remove this entry
            return
        self._flapping.pop(uid, None)
        last = self._announced.get(uid)
        self._announced[uid] = remembered(last, wanted, at=now, shared=shared)

    async def _write(self, announcement: Announcement) -> None:
        if not await self._recorder(announcement):
            self._metrics.suppressed_events.labels("namespace_deleted").inc()
            return
        self._metrics.events.labels(str(announcement.code)).inc()
        regarding = announcement.regarding
        logger.info(
            "event written",
            extra={
                "object": f"{regarding.kind} {regarding.namespace}/{regarding.name}",
                "reason": str(announcement.code),
                "note": announcement.note,
            },
        )


class EventWriter:
    """Writes announcements as Events of type Warning."""

    def __init__(self, session: Session, *, instance: str, may_write: Callable[[], bool]) -> None:
        self._recorder = EventRecorder(
            session,
            controller=CONTROLLER,
            instance=instance,
            timings=EventTimings(count_seconds=0),  # the announcer has already waited
        )
        self._may_write = may_write

    async def __call__(self, announcement: Announcement) -> bool:
        """Write an Event, or increase its count. Raises NotWrittenError."""
        if not self._may_write():
            raise NotWrittenError("this replica no longer leads")
        try:
            return await self._recorder.write(
                announcement.regarding.body(),
                reason=str(announcement.code),
                action="Allocating",
                note=announcement.note,
            )
        except ApiError as error:
            raise NotWrittenError(str(error), refused=error.is_refusal) from error


def _sooner(one: float | None, other: float | None) -> float | None:
    return min((each for each in (one, other) if each is not None), default=None)
