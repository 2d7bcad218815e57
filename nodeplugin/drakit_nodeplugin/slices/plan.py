"""
From a pool and what the API server holds to the writes that are needed: all pure.

The rules of a pool: only slices of its highest generation count for the scheduler, and while there
are fewer of them than ``resourceSliceCount`` it allocates nothing from the pool. So what is seen
between two writes is either true or not used:

* one slice's content may change, and taints of any number, under the same generation;
* slices that are gone, or that an interrupted round has left behind, are written under the same
  generation too: before the last of them is there, the pool is not used;
* everything else writes all slices of the pool under the next generation.

Semantics: ``resource.k8s.io/v1`` ResourceSlice, KEP-4381.

It must not know the API server's client, clocks, or where devices come from.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drakit.device import CounterSet
from drakit.resource.features import Feature
from drakit_nodeplugin.devices.pools import DesiredDevice, DesiredPool
from drakit_nodeplugin.slices.contents import Difference, SliceContent, slice_spec
from drakit_nodeplugin.slices.dropping import choose
from drakit_nodeplugin.slices.names import PoolIdentity, slice_name
from drakit_nodeplugin.slices.packing import Packing, PackingLimits, pack
from drakit_nodeplugin.slices.stored import StoredSlice
from drakit_nodeplugin.slices.survey import Held, KnownSlice, Survey

__all__ = ("Plan", "SliceWrite", "plan", "planning")

API_VERSION = "resource.k8s.io/v1"


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceWrite:
    """A slice to write. Its body is made when it is needed: all of them are large together."""

    pool: PoolIdentity
    index: int
    count: int
    generation: int
    content: SliceContent
    advanced: frozenset[str]
    stored: StoredSlice | None
    """What it replaces; None if it is created."""

    sources: Sequence[StoredSlice]
    """Where its devices stand so far."""

    @property
    def name(self) -> str:
        """Its name."""
        return slice_name(self.pool, self.index)

    def body(self) -> dict[str, Any]:
        """Give the whole object (v1), with the resourceVersion on which it builds."""
        pool = self.pool
        # What others put into the metadata stays.
        metadata = {} if self.stored is None else dict(self.stored.metadata)
        owner = {"apiVersion": "v1", "kind": "Node", "name": pool.node, "uid": pool.node_uid}
        metadata |= {"name": self.name, "ownerReferences": [owner | {"controller": True}]}
        of_pool = {
            "name": pool.pool,
            "generation": self.generation,
            "resourceSliceCount": self.count,
        }
        spec = {"driver": pool.driver, "nodeName": pool.node, "pool": of_pool}
        return {
            "apiVersion": API_VERSION,
            "kind": "ResourceSlice",
            "metadata": metadata,
            "spec": spec | slice_spec(self.content, stored=self.sources),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Writes, in the order in which they are to be made."""

    delete: Sequence[StoredSlice] = ()
    replace: Sequence[SliceWrite] = ()
    create: Sequence[SliceWrite] = ()
    known: Mapping[str, KnownSlice] = field(default_factory=dict[str, KnownSlice])
    """The slices that are in order, by name."""

    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why devices are not published, by their names."""

    @property
    def empty(self) -> bool:
        """Whether the API server holds all that is wanted already."""
        return not (self.delete or self.replace or self.create)


def plan(
    pool: DesiredPool,
    *,
    identity: PoolIdentity,
    stored: Collection[StoredSlice],
    known: Mapping[str, KnownSlice] | None = None,
    left: Mapping[str, SliceContent] | None = None,
    dropped: Collection[Feature] = (),
    limits: PackingLimits | None = None,
) -> Plan:
    """
    Say what to write so that the pool is as desired.

    `stored` are all slices of this pool, whoever made them; `known` those that were in order;
    `left` those that are not written for now, as long as they are to hold just this. Features in
    `dropped` are done without. A pool without devices keeps one empty slice, by which observers
    tell a driver without devices from no driver.
    """
    steps = planning(
        pool,
        identity=identity,
        stored=stored,
        known=known,
        left=left,
        dropped=dropped,
        limits=limits,
    )
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def planning(
    pool: DesiredPool,
    *,
    identity: PoolIdentity,
    stored: Collection[StoredSlice],
    known: Mapping[str, KnownSlice] | None = None,
    left: Mapping[str, SliceContent] | None = None,
    dropped: Collection[Feature] = (),
    limits: PackingLimits | None = None,
) -> Generator[None, None, Plan]:
    """Plan in steps of a few milliseconds each, between which others can work; see `plan`."""
    left = left or {}
    chosen = choose(pool, dropped)
    held = Held(stored, identity=identity, left=left)
    sets: Mapping[str, CounterSet | None] = (
        dict.fromkeys(held.counter_sets) if chosen.counter_sets is None else chosen.counter_sets
    )
    yield
    survey = Survey(held, chosen.devices, sets)
    for index in held.slices:
        survey.look(index, known=known or {}, left=left)
        yield
    advanced = survey.advanced()
    packing = pack(
        {name: name in advanced for name in chosen.devices},
        counter_sets=tuple(sets),
        standing=survey.standing(),
        plain=pool.plain,
        limits=limits,
    )
    yield
    return _writes(survey, packing, advanced=advanced, left=left, left_out=chosen.left_out)


def _writes(
    survey: Survey,
    packing: Packing,
    *,
    advanced: frozenset[str],
    left: Mapping[str, SliceContent],
    left_out: Mapping[str, str],
) -> Plan:
    held, count = survey.held, packing.count
    contents = {index: _Filling.of(survey.contents.get(index)) for index in range(count)}
    changed = {i for i, each in survey.differences.items() if each is Difference.CONTENT}
    for name in packing.moved:
        contents[held.devices[name]].devices.pop(name, None)
        changed.add(held.devices[name])
    for name, index in packing.devices.items():
        if held.devices.get(name) != index:
            contents[index].devices[name] = survey.devices[name]
            changed.add(index)
    for name, index in packing.counter_sets.items():
        if held.counter_sets.get(name) != index:
            contents[index].counter_sets[name] = survey.counter_sets[name]
            changed.add(index)

    kept = [index for index in sorted(held.slices) if index < count]
    same_generation = count == held.count and len(changed & {*kept} - held.behind) <= 1
    if same_generation:
        tainted = {i for i, each in survey.differences.items() if each is Difference.TAINTS}
        # Those behind last: with them the pool is whole again.
        kept = [i for i in kept if i in (changed | tainted) - held.behind] + [
            i for i in kept if i in held.behind
        ]
    generation = held.generation if same_generation else held.next_generation

    def write(index: int) -> SliceWrite:
        filling = contents[index]
        content = SliceContent(devices=filling.devices, counter_sets=filling.counter_sets)
        return SliceWrite(
            pool=held.identity,
            index=index,
            count=count,
            generation=generation,
            content=content,
            advanced=advanced.intersection(content.devices),
            stored=held.slices.get(index),
            sources=_sources(content, held, index),
        )

    creates = [write(index) for index in range(count) if index not in held.slices]
    if same_generation:
        creates = [each for each in creates if left.get(each.name) != each.content]
    return Plan(
        delete=[*held.obsolete, *(each for i, each in held.slices.items() if i >= count)],
        replace=[write(index) for index in kept],
        create=creates,
        known=survey.known,
        left_out=left_out,
    )


@dataclass(slots=True)
class _Filling:
    """A content that is being made."""

    devices: dict[str, DesiredDevice]
    counter_sets: dict[str, CounterSet | None]

    @classmethod
    def of(cls, content: SliceContent | None) -> _Filling:
        if content is None:
            return cls({}, {})
        return cls(dict(content.devices), dict(content.counter_sets))


def _sources(content: SliceContent, held: Held, index: int) -> list[StoredSlice]:
    """Give the slices that hold what is needed to write a content, the newest last."""
    needed = {
        held.devices[name]
        for name, each in content.devices.items()
        if (each.taints or each.device is None) and name in held.devices
    }
    needed |= {
        held.counter_sets[name]
        for name, each in content.counter_sets.items()
        if each is None and name in held.counter_sets
    }
    return [each for i, each in held.slices.items() if i in needed]
