"""
The operator's facts of the cluster: one :class:`drakit_explain.world.World`, by watched kind.

It lives in the main loop and is never touched from another thread. :mod:`.affected` decides which
objects a change affects.

It must not know Kopf, sessions, queues, or Events.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from drakit_explain.model import PodFacts
from drakit_explain.world import Fact, Name, World
from drakit_operator.kinds import Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One object as it was and as it is; None where there is none."""

    kind: Kind
    name: Name
    old: Fact | None
    new: Fact | None


class Store:
    """Facts by kind and name. Not for threads."""

    def __init__(self) -> None:
        self.world = World()

    def apply(self, kind: Kind, fact: Fact) -> Change | None:
        """Store an object as it is now. Return the change, or None if nothing has changed."""
        if isinstance(fact, PodFacts) and not _wants_devices(fact):
            # Most pods do not use devices; the store does not keep them.
            return self.remove(kind, Name(fact.namespace, fact.name), uid=None)
        change = self.world.apply(fact)
        if change is None:
            return None
        return Change(kind=kind, name=change.name, old=change.old, new=change.new)

    def remove(self, kind: Kind, name: Name, *, uid: str | None) -> Change | None:
        """Remove an object. A deletion of a UID that another object has replaced has no effect."""
        change = self.world.remove(kind.type, name, uid=uid)
        if change is None:
            return None
        return Change(kind=kind, name=change.name, old=change.old, new=change.new)

    def replace(self, kind: Kind, facts: Iterable[Fact]) -> list[Change]:
        """Take a complete list: objects missing in it are gone."""
        kept = [fact for fact in facts if not isinstance(fact, PodFacts) or _wants_devices(fact)]
        return [
            Change(kind=kind, name=change.name, old=change.old, new=change.new)
            for change in self.world.replace(kind.type, kept)
        ]

    def uids(self, kind: Kind) -> dict[Name, str]:
        """Return the UIDs of the known objects of a kind, by name."""
        return {name: fact.uid for name, fact in self.world.of(kind.type).items()}

    def find(self, kind: Kind, name: Name) -> Fact | None:
        return self.world.of(kind.type).get(name)

    def size(self, kind: Kind) -> int:
        return len(self.world.of(kind.type))


def _wants_devices(pod: PodFacts) -> bool:
    return bool(pod.claims or pod.extended)
