"""
Combines the Events about a cause that many objects share into one Event about a class, node or
template, and one in each namespace.

The objects of a cause are counted while they have it. Below :data:`MANY` in a namespace, each has
its own Event. Otherwise, the class, node or template gets one Event with the number of all
objects. The owners of the objects often cannot read this Event. Therefore, one object of each
namespace represents the others: it keeps its own Event, and the Events of the others only name it.
A cause is judged when it has stopped growing for a short time, because objects come in bursts: a
Job creates 50 pods in seconds.

Does not depend on Events or sessions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from drakit_explain.codes import Cause, Code
from drakit_explain.model import ObjectReference

MANY = 10
"""Minimum number of objects of one kind in a namespace to share an Event. Below it, each has its
own Event."""

PAUSE_SECONDS = 0.5
"""How long a cause must go without new objects before it is judged."""

LIMIT_SECONDS = 5.0
"""Maximum time that a cause can grow before it is judged."""

NAMING = 100
"""Maximum number of objects of one kind in a namespace for them to get Events that name the
representative. While there are more, none of them gets such an Event."""


class Action(Enum):
    """The action to take for an object with a shared cause."""

    OWN = "own"
    """Write the object's own Event, if one is due."""

    SHARED = "shared"
    """Write the Event about the shared cause, which is due now."""

    WAIT = "wait"
    """Write no Event yet, because other objects with the cause may follow."""

    NAMING = "naming"
    """Write an Event that names the object whose Event contains the whole reason."""

    COVERED = "covered"
    """Write no Event, because the Events of other objects cover this one."""


class Judgment(NamedTuple):
    action: Action
    again_seconds: float | None = None


class _Key(NamedTuple):
    code: Code
    cause: Cause


@dataclass(slots=True)
class _Space:
    """The objects of one namespace that share a cause."""

    kinds: Counter[str] = field(default_factory=Counter[str])
    representative: ObjectReference | None = None
    """The first object that got its own Event."""

    candidate: ObjectReference | None = None
    """The object whose own Event is being written, while there is no representative yet."""

    @property
    def size(self) -> int:
        return max(self.kinds.values())


@dataclass(slots=True)
class Group:
    """The objects that share a cause."""

    cause: Cause
    began: float
    """The time at which the last burst of added objects began."""

    grew: float
    members: dict[str, ObjectReference] = field(default_factory=dict[str, ObjectReference])
    """The objects, keyed by UID."""

    kinds: Counter[str] = field(default_factory=Counter[str])
    spaces: dict[str, _Space] = field(default_factory=dict[str, _Space])
    """The objects, grouped by namespace."""

    judges: set[str] = field(default_factory=set[str])
    """The first members. Checking them is enough to judge the cause in time, so the other members
    are checked afterwards."""

    announced_at: float | None = None
    announced_size: int = 0
    being_announced: bool = False
    refused_until: float = float("-inf")
    """The time until which each object gets its own Event, because the Event about the cause was
    refused."""

    @property
    def size(self) -> int:
        """The number of objects of the most frequent kind. The kinds are not added up, because a
        pod and its claim have the same problem."""
        return max(self.kinds.values(), default=0)

    def add(self, uid: str, member: ObjectReference) -> None:
        self.members[uid] = member
        self.kinds[member.kind] += 1
        self.spaces.setdefault(member.namespace, _Space()).kinds[member.kind] += 1

    def remove(self, uid: str) -> None:
        member = self.members.pop(uid)
        self.kinds[member.kind] -= 1
        space = self.spaces[member.namespace]
        space.kinds[member.kind] -= 1
        if space.representative == member:
            space.representative = None
        if not any(space.kinds.values()):
            del self.spaces[member.namespace]

    def note(self) -> str:
        """Return the note of the Event. It does not name any object, because names in a namespace
        are private."""
        numbers = [
            f"{number} {kind}{'s' if number > 1 else ''}"
            for kind, number in sorted(self.kinds.items())
            if number
        ]
        spaces = len(self.spaces)
        where = f"{spaces} namespaces" if spaces > 1 else "one namespace"
        command = "explain -A" if self.kinds["Pod"] else "claims -A"
        return (
            f"{self.cause.what}; this affects {' and '.join(numbers)} in {where} "
            f"(kubectl drakit {command})"
        )


class SharedCauses:
    """Counts objects by cause. All times are in seconds on the same clock."""

    def __init__(self, *, change_seconds: float, repeat_seconds: float) -> None:
        """
        :param change_seconds: how long to wait before an Event whose number of objects has doubled.
        :param repeat_seconds: how long to wait before any other Event about the same cause.
        """
        self._change_seconds = change_seconds
        self._repeat_seconds = repeat_seconds
        self._groups: dict[_Key, Group] = {}
        self._key_of: dict[str, _Key] = {}

    def join(
        self, uid: str, code: Code, cause: Cause | None, regarding: ObjectReference, *, now: float
    ) -> None:
        """Add an object to its cause, and remove it from its earlier cause."""
        key = _Key(code, cause) if cause is not None else None
        if self._key_of.get(uid) == key:
            return
        self.leave(uid, now=now)
        if key is None:
            return
        group = self._groups.setdefault(key, Group(cause=key.cause, began=now, grew=now))
        if now > group.grew + PAUSE_SECONDS:
            group.began = now
        group.grew = now
        group.add(uid, regarding)
        if len(group.judges) < MANY:
            group.judges.add(uid)
        self._key_of[uid] = key

    def leave(self, uid: str, *, now: float) -> None:
        """Remove an object that no longer has a shared cause."""
        key = self._key_of.pop(uid, None)
        if key is None:
            return
        group = self._groups[key]
        group.remove(uid)
        group.judges.discard(uid)
        # Keep an announced group for a while, so that a cause that flaps is announced only once.
        if not group.members and not group.being_announced and self._is_forgotten(group, now):
            del self._groups[key]

    def judge(self, uid: str, *, now: float, named_another: bool = False) -> Judgment:
        """
        Return the action to take for an object whose own Event is due.

        :param named_another: whether the object's last Event named another object, which may soon
            be replaced.
        """
        if (found := self._find(uid)) is None:
            return Judgment(Action.OWN)
        group, space, member = found
        forming = min(group.grew + PAUSE_SECONDS, group.began + LIMIT_SECONDS)
        if forming > now:
            if space.size >= MANY and uid not in group.judges:
                forming = group.began + LIMIT_SECONDS
            return Judgment(Action.WAIT, forming - now)
        is_first = (space.representative or space.candidate) in (None, member)
        has_own = space.size < MANY and not (named_another and space.candidate)
        if has_own or is_first or now < group.refused_until:
            return Judgment(Action.OWN)
        if group.being_announced or space.representative is None:
            return Judgment(Action.WAIT, PAUSE_SECONDS)
        due = self._next(group)
        if due <= now:
            return Judgment(Action.SHARED)
        return Judgment(Action.NAMING if space.size <= NAMING else Action.COVERED, due - now)

    def naming_note(self, uid: str) -> str:
        """Return a note that names the object whose Event contains the whole reason. Empty if there
        is no such object."""
        found = self._find(uid)
        if found is None or (first := found[1].representative) is None:
            return ""
        return f"{found[0].cause.what}; the Event of {first.kind} {first.name} has the details"

    @contextmanager
    def announcing_own(self, uid: str) -> Generator[None]:
        """A context in which the caller writes the object's own Event. Meanwhile, the other objects
        of its namespace wait."""
        if (found := self._find(uid)) is None:
            yield
            return
        _, space, member = found
        space.candidate = space.candidate or member
        try:
            yield
        finally:
            if space.candidate == member:
                space.candidate = None

    def announced(self, uid: str) -> None:
        """Record that an object has its own Event, to which the Events of other objects can
        refer."""
        if (found := self._find(uid)) is not None:
            _, space, member = found
            space.representative = space.representative or member

    def _find(self, uid: str) -> tuple[Group, _Space, ObjectReference] | None:
        if (key := self._key_of.get(uid)) is None:
            return None
        group = self._groups[key]
        member = group.members[uid]
        return group, group.spaces[member.namespace], member

    @contextmanager
    def announcing(self, uid: str, *, now: float) -> Generator[Group]:
        """A context in which the caller announces the cause of an object. After an error, the
        announcement is due again."""
        group = self._groups[self._key_of[uid]]
        group.being_announced = True
        try:
            yield group
            group.announced_at, group.announced_size = now, group.size
        finally:
            group.being_announced = False
        self._forget_old(now)

    def refuse(self, uid: str, *, now: float) -> None:
        """Record that the Event about an object's cause was refused, so that the objects get their
        own Events."""
        if key := self._key_of.get(uid):
            self._groups[key].refused_until = now + self._change_seconds

    def _forget_old(self, now: float) -> None:
        old = [
            key
            for key, each in self._groups.items()
            if not each.members and self._is_forgotten(each, now)
        ]
        for key in old:
            del self._groups[key]

    def _next(self, group: Group) -> float:
        """Return the earliest time for another Event about a cause."""
        if group.announced_at is None:
            return group.began
        doubled = group.size >= 2 * group.announced_size
        return group.announced_at + (self._change_seconds if doubled else self._repeat_seconds)

    def _is_forgotten(self, group: Group, now: float) -> bool:
        return group.announced_at is None or now >= group.announced_at + self._repeat_seconds
