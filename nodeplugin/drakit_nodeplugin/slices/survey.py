"""
What the API server holds of a pool, beside what is wanted: which slices are ours, how they differ.

What follows from that is :mod:`.plan`'s.

It must not know writes, or where anything comes from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from drakit.device import CounterSet
from drakit.resource.device import uses_advanced
from drakit_nodeplugin.devices.pools import DesiredDevice
from drakit_nodeplugin.slices.contents import Difference, SliceContent, compare, compare_contents
from drakit_nodeplugin.slices.names import PoolIdentity, slice_index
from drakit_nodeplugin.slices.packing import Standing
from drakit_nodeplugin.slices.stored import StoredSlice

__all__ = ("Held", "KnownSlice", "Survey")


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownSlice:
    """A slice that was in order at a version: neither it nor what it is to hold is read again."""

    version: str
    """Its ``resourceVersion``."""

    content: SliceContent
    owner: str
    """The Node's UID."""

    advanced: frozenset[str]
    """Its devices that are advanced, see :mod:`.packing`."""


class Held:
    """What the API server holds of a pool, sorted into slices that are ours to keep and others."""

    def __init__(
        self,
        stored: Collection[StoredSlice],
        *,
        identity: PoolIdentity,
        left: Mapping[str, SliceContent],
    ) -> None:
        self.identity = identity
        named = {slice_index(identity, each.name): each for each in stored}
        ours = {index: each for index, each in named.items() if index is not None}
        # What somebody else has made of a slice does not say how things are.
        telling = [each for each in ours.values() if each.name not in left] or [*ours.values()]
        self.generation = max((each.generation for each in telling), default=0)
        self.next_generation = 1 + max((each.generation for each in stored), default=0)
        counts = {each.count for each in telling if each.generation == self.generation}
        self.count = counts.pop() if len(counts) == 1 else 0
        """How many slices there are to be; 0 if that is not clear."""

        self.behind = {
            index
            for index, each in ours.items()
            if each.generation != self.generation and each.name not in left
        }
        # One behind that the pool does not count is left over from longer ago.
        old = {i for i in self.behind if self.count and i >= self.count}
        kept = {i: each for i, each in ours.items() if i not in old}
        # Where two hold a device, the newer one has it.
        order = sorted(kept, key=lambda index: (index not in self.behind, index))
        self.slices = {index: kept[index] for index in order}
        self.behind -= old
        names = {each.name for each in kept.values()}
        self.obsolete = [each for each in stored if each.name not in names]
        self.missing = set(range(self.count)) - kept.keys()
        # What is not written for now counts as if it were as it is to be.
        self.names = {
            index: (tuple(as_left.devices), tuple(as_left.counter_sets))
            if (as_left := left.get(each.name)) is not None
            else (each.devices, () if each.devices else each.counter_sets)
            for index, each in self.slices.items()
        }
        self.devices = {name: i for i in self.slices for name in self.names[i][0]}
        self.counter_sets = {name: i for i in self.slices for name in self.names[i][1]}


class Survey:
    """How the slices that are held differ from what is wanted, before anything new is placed."""

    def __init__(
        self,
        held: Held,
        devices: Mapping[str, DesiredDevice],
        counter_sets: Mapping[str, CounterSet | None],
    ) -> None:
        self.held = held
        self.devices = devices
        self.counter_sets = counter_sets
        self.contents: dict[int, SliceContent] = {}
        self.differences: dict[int, Difference] = {}
        self.known: dict[str, KnownSlice] = {}
        self._advanced: dict[int, frozenset[str]] = {}

    def look(
        self, index: int, *, known: Mapping[str, KnownSlice], left: Mapping[str, SliceContent]
    ) -> None:
        """Compare one slice with what is to stay in it."""
        stored = self.held.slices[index]
        devices, counter_sets = self.held.names[index]
        content = SliceContent(
            devices={
                name: self.devices[name]
                for name in devices
                if name in self.devices and self.held.devices[name] == index
            },
            counter_sets={
                name: self.counter_sets[name]
                for name in counter_sets
                if name in self.counter_sets and self.held.counter_sets[name] == index
            },
        )
        self.contents[index] = content
        before = known.get(stored.name)
        if before is not None and before.version != stored.version:
            before = None
        if before is not None and before.content == content:
            self._advanced[index] = before.advanced
            difference = Difference.NONE
        else:
            self._advanced[index] = _advanced(content.devices, stored.advanced)
            difference = compare_contents(before.content, content) if before else None
            if difference is None:
                difference = compare(stored, content)
        uid = self.held.identity.node_uid
        if stored.owners != (uid,) and (before is None or before.owner != uid):
            difference = max(difference, Difference.TAINTS)
        if difference is Difference.NONE and index not in self.held.behind:
            self.known[stored.name] = KnownSlice(
                version=stored.version,
                content=content,
                owner=uid,
                advanced=self._advanced[index],
            )
        elif left.get(stored.name) == content:
            difference = Difference.NONE
        self.differences[index] = difference

    def advanced(self) -> frozenset[str]:
        """Give the devices that are advanced: those of the slices, and new ones."""
        placed = {name for content in self.contents.values() for name in content.devices}
        new = {name: each for name, each in self.devices.items() if name not in placed}
        return _advanced(new, frozenset()).union(*self._advanced.values())

    def standing(self) -> Standing:
        """Say how things stand, for packing."""
        held = self.held
        steady = {i: each for i, each in self.differences.items() if i not in held.behind}
        return Standing(
            devices=held.devices,
            counter_sets=held.counter_sets,
            count=held.count,
            free=held.missing | held.behind,
            touched=[i for i, each in steady.items() if each is Difference.CONTENT],
            rewritten=[i for i, each in steady.items() if each is Difference.TAINTS],
        )


def _advanced(devices: Mapping[str, DesiredDevice], stored: frozenset[str]) -> frozenset[str]:
    return frozenset(
        name
        for name, each in devices.items()
        if each.taints or (name in stored if each.device is None else uses_advanced(each.device))
    )
