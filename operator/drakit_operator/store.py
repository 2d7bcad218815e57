"""
Stores the operator's facts about the cluster in one :class:`drakit_explain.world.World`.

Only the main loop uses the store, never another thread. :mod:`.affected` decides which objects a
change affects.

Does not depend on Kopf, sessions, queues, or Events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from drakit_explain.kinds import Kind
from drakit_explain.model import ClaimFacts, Placement, PodFacts, TemplateFacts
from drakit_explain.world import Change, Fact, Name, World
from drakit_operator.budgets import ContentBudgets, NodeBudgets


class Store:
    """The facts, keyed by kind and name. Not thread-safe."""

    def __init__(self) -> None:
        self.world = World()
        self._budgets = ContentBudgets()
        self._nodes = NodeBudgets()

    def admit(self, fact: Fact) -> Fact:
        """
        Return the object to store, without content that exceeds a limit.

        An object that waits for the end of a list is counted from this call on, because the list
        may be long.
        """
        if isinstance(fact, PodFacts) and not _wants_devices(fact):
            self._budgets.release(fact.uid)
            return replace(fact, placement=Placement(), requests=())
        before = self._budgets.losses
        admitted = self._nodes.admit(self._budgets.admit(fact))
        self._drop_lost(since=before)
        return admitted

    def apply(self, kind: Kind, fact: Fact) -> Change | None:
        """Store an object. Return the change, or None if there is none."""
        if isinstance(fact, PodFacts) and not _wants_devices(fact):
            # The store does not keep most pods, because they do not use devices.
            return self.remove(kind, Name(fact.namespace, fact.name), uid=None)
        change = self.world.apply(self._budgets.without_lost(fact))
        if change is not None and change.old is not None and change.old.uid != fact.uid:
            self._release(change.old.uid)
        return change

    def remove(self, kind: Kind, name: Name, *, uid: str | None) -> Change | None:
        """Remove an object, unless an object with a different UID has taken its name."""
        change = self.world.remove(kind.type, name, uid=uid)
        if uid is not None:
            self._release(uid)
        if change is not None and change.old is not None:
            self._release(change.old.uid)
        return change

    def replace(self, kind: Kind, facts: Iterable[Fact]) -> Iterator[Change | None]:
        """
        Process a complete list: objects that are missing from it are gone.

        Yield after each object, with its change if there is one, so that the caller can yield to
        the loop. Until the iteration ends, the store contains both old and new objects.
        """
        kept = [fact for fact in facts if not isinstance(fact, PodFacts) or _wants_devices(fact)]
        for budgets in (self._budgets, self._nodes):
            budgets.retain(kind.type, {fact.uid for fact in kept})
        before = self._budgets.losses
        kept = [self._budgets.without_lost(fact) for fact in kept]
        yield from self.world.replace(kind.type, kept)
        self._drop_lost(since=before)

    def _release(self, uid: str) -> None:
        self._budgets.release(uid)
        self._nodes.release(uid)

    def _drop_lost(self, *, since: int) -> None:
        """Remove lost content from the stored objects. That is not a change, so it does not cause
        an Event."""
        if self._budgets.losses == since:
            return
        for kind in (PodFacts, ClaimFacts, TemplateFacts):
            for fact in list(self.world.of(kind).values()):
                if (kept := self._budgets.without_lost(fact)) is not fact:
                    self.world.apply(kept)

    def take_room(self, kind: Kind) -> bool:
        """Return whether objects may get their content back from another list. Returns True only
        once."""
        return self._budgets.take_room(kind.type) or self._nodes.take_room(kind.type)

    def find(self, kind: Kind, name: Name) -> Fact | None:
        return self.world.of(kind.type).get(name)

    def size(self, kind: Kind) -> int:
        return len(self.world.of(kind.type))


def _wants_devices(pod: PodFacts) -> bool:
    # If a pod's content is missing, it may request extended resources.
    return bool(pod.claims or pod.extended or pod.placement.unread)
