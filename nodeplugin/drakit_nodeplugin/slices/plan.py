"""
Plans the writes for a pool, from its devices and the slices in the API server. Pure functions.

The scheduler uses only slices of the highest generation in a pool, and while there are fewer of
them than ``resourceSliceCount``, it allocates nothing from the pool. Therefore, every state between
two writes is either correct or not used:

* the content of one slice may change, and any number of taints, under the same generation;
* missing slices, and slices that an interrupted round has left behind, are also written under the
  same generation, because the pool is not used before the last of them exists;
* everything else writes all slices of the pool under the next generation.

Semantics: ``resource.k8s.io/v1`` ResourceSlice, KEP-4381. :mod:`.packing` decides which slice
contains a device, and :mod:`.contents` how two contents differ.

Does not depend on the API client or on clocks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drakit.device import CounterSet
from drakit_formats.resource.device import Feature, extra_fields, needed_features, used_features
from drakit_formats.resource.objects import children, text
from drakit_nodeplugin.devices.model import DesiredDevice, DesiredPool
from drakit_nodeplugin.slices.contents import (
    Difference,
    SliceContent,
    StoredSlice,
    choose,
    compare,
    compare_contents,
    natural_order,
    partition_type_of,
    published_order,
    same_content,
    same_desired,
    slice_spec,
)
from drakit_nodeplugin.slices.packing import CurrentLayout, Packing, PackingLimits, pack

API_VERSION = "resource.k8s.io/v1"

MAX_OBJECT_NAME = 253

MAX_MIDDLE = MAX_OBJECT_NAME - len("00000-0123456789abcdef--01234567")
"""Maximum length of the driver and pool in a slice name. The chart's admission policy uses the same
value."""

_INDEX = re.compile(r"(?P<index>[0-9a-f]{5})-")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolIdentity:
    """A pool of one driver on one node."""

    driver: str
    node: str
    node_uid: str
    pool: str
    """The API name of the pool: the node name, or a name that begins with it."""

    secret: bytes = b""
    """Makes the names of new slices unguessable. Set after another object has taken a name."""


def slice_name(pool: PoolIdentity, index: int) -> str:
    """
    Return the name of a new slice. Without a secret, the name is the same after a restart and in
    every instance.

    The name begins with the index in hexadecimal, because the allocator reads slices in name order.
    It ends in a digest, because different drivers and pools can have the same concatenation.
    """
    start = f"{index:05x}-"
    if pool.secret:
        # One name must not reveal other names.
        start += hashlib.blake2s(start.encode(), key=pool.secret, digest_size=8).hexdigest() + "-"
    middle = f"{pool.driver}-{pool.pool.replace('/', '-')}"[:MAX_MIDDLE].rstrip(".")
    return start + middle + _name_end(pool)


def _name_end(pool: PoolIdentity) -> str:
    return f"-{hashlib.sha256(f'{pool.driver}/{pool.pool}'.encode()).hexdigest()[:8]}"


def slices_by_index(
    pool: PoolIdentity, stored: Collection[StoredSlice], *, known: Collection[str] = ()
) -> dict[int, StoredSlice]:
    """
    Return the slices to keep, keyed by index.

    Names may contain a random part, so two slices can have the same index. This happens, for
    example, if the response to a create was lost, and the plugin restarted. The slice in `known` is
    kept, or otherwise the newer one.
    """
    kept: dict[int, StoredSlice] = {}
    end = _name_end(pool)
    for each in sorted(stored, key=lambda s: (s.name in known, s.generation, s.name)):
        form = _INDEX.match(each.name)
        if form is not None and each.name.endswith(end):
            kept[int(form["index"], 16)] = each
    return kept


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownSlice:
    """A slice that was correct at a version, for an owner. It is not compared again while both
    remain the same."""

    version: str
    """The ``resourceVersion`` of the slice."""

    content: SliceContent
    owner: str
    """The UID of the Node that owns the slice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceWrite:
    """A slice to write. Its body is built on demand, because all bodies together are large."""

    pool: PoolIdentity
    name: str
    count: int
    generation: int
    content: SliceContent
    stored: StoredSlice | None
    """The slice that is replaced. None if the slice is created."""

    sources: Sequence[StoredSlice]
    """The published slices that currently contain the devices."""

    changed: bool = True
    """Whether the devices, counter sets or taints differ from the published ones."""

    @property
    def needed_features(self) -> frozenset[Feature]:
        """
        The features without which the API server would publish a device that must not be allocated.

        If the published slice already has a feature, the API server keeps it in the next version.
        Therefore, the response proves nothing about other slices. Extra fields are an exception:
        they are always needed, because an API server that keeps one of them can drop others.
        """
        devices = self.content.devices
        needed = {Feature.TAINTS} if self._repels_pods else set[Feature]()
        for each in devices.values():
            if each.device is not None:
                needed |= needed_features(each.device)
        if not needed or self.stored is None:
            return frozenset(needed)
        used = used_features(self.stored.bodies()[0].values())
        return frozenset(needed - used | needed & {Feature.EXTRA})

    @property
    def needs(self) -> frozenset[Feature | str]:
        """The needed features, and the path of each extra field. Each path is listed, because an
        API server that keeps one extra field can drop others."""
        needed = self.needed_features
        if Feature.EXTRA not in needed:
            return needed
        devices = (each.device for each in self.content.devices.values() if each.device is not None)
        return needed.union(path for device in devices for path in extra_fields(device))

    @property
    def _repels_pods(self) -> bool:
        devices = self.content.devices
        return any(
            taint.effect != "None" for each in devices.values() for taint in each.taints
        ) or any(
            # A device that is known only by name keeps its driver's published taints.
            text(taint, "effect") != "None"
            for source in self.sources
            for name, body in source.bodies()[0].items()
            if name in devices and devices[name].device is None
            for taint in children(body, "taints")
        )

    def body(self) -> dict[str, Any]:
        """Return the whole object (v1), with the resourceVersion of the version that it
        replaces."""
        pool = self.pool
        # Keep the metadata of other clients.
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
    """The writes for a pool, in the required order."""

    delete: Sequence[StoredSlice] = ()
    replace: Sequence[SliceWrite] = ()
    create: Sequence[SliceWrite] = ()
    known: Mapping[str, KnownSlice] = field(default_factory=dict[str, KnownSlice])
    """The slices that are correct, keyed by name."""

    rejected: Mapping[str, str] = field(default_factory=dict[str, str])
    """The reasons why devices are not published, keyed by device name."""

    changes_layout: bool = False
    """Whether the pool is incomplete between the first write and the last, because it gets a new
    generation with more than one write. Deletes count here too, because a pool that shrinks to one
    slice is incomplete in between. A single write either replaces the whole pool, or fails and
    changes nothing."""

    @property
    def empty(self) -> bool:
        """Whether the API server already has the desired state."""
        return not (self.delete or self.replace or self.create)


def planning(
    pool: DesiredPool,
    *,
    identity: PoolIdentity,
    stored: Collection[StoredSlice],
    known: Mapping[str, KnownSlice] | None = None,
    left: Mapping[str, SliceContent] | None = None,
    dropped: Collection[Feature] = (),
    refused: Mapping[str, tuple[DesiredDevice, str]] | None = None,
    limits: PackingLimits | None = None,
) -> Generator[None, None, Plan]:
    """
    Plan the writes that bring the pool to the desired state.

    Yields every few milliseconds, so that the caller can let other work run.

    `stored` are all slices of this pool, from any writer. `known` are the slices that were correct.
    `left` are the slices that are not written for now, with the content that they would get. The
    plan avoids the features in `dropped`, and the devices in `refused`, with reasons, as long as
    these would be published in the same way. A pool without devices keeps one empty slice, which
    distinguishes a driver without devices from a missing driver.
    """
    left = left or {}
    chosen = choose(pool, dropped)
    rejected = {**chosen.rejected}
    for name, (device, why) in (refused or {}).items():
        if name in chosen.devices and same_desired(device, chosen.devices[name]):
            rejected[name] = why
    held = _HeldSlices(stored, identity=identity, known=known or {}, left=left)
    devices = {
        name: each
        for name, each in chosen.devices.items()
        if name not in rejected and (each.device is not None or name in held.published)
    }
    ranks: dict[str, int] | None = None
    # If an endpoint has been missing since a restart, the published order applies.
    if pool.ordered or pool.partition_type_attribute is None:
        published = (name for index in sorted(held.slices) for name in held.names[index][0])
        devices = published_order(devices, published)
        ranks = {name: rank for rank, name in enumerate(devices)}
    sets: dict[str, CounterSet | None] = {}
    if chosen.keeps_counter_sets:
        sets |= dict.fromkeys(held.counter_sets)
    sets |= chosen.counter_sets
    yield
    planner = _Planner(
        held=held,
        devices=devices,
        ranks=ranks,
        counter_sets=sets,
        partition_type=chosen.partition_type,
        known_before=known or {},
        left=left,
    )
    for index in held.slices:
        planner.compare(index)
        yield
    steady = {i: each for i, each in planner.differences.items() if i not in held.behind}
    current = CurrentLayout(
        devices=held.devices,
        counter_sets=held.counter_sets,
        count=held.count,
        free=held.missing | held.behind,
        touched=[i for i, each in steady.items() if each is Difference.CONTENT],
        rewritten=[i for i, each in steady.items() if each is Difference.TAINTS],
    )
    packing = pack(devices, counter_sets=sets, current=current, ordered=pool.ordered, limits=limits)
    yield
    return planner.plan(packing, rejected=rejected)


class _HeldSlices:
    """The slices of a pool in the API server: the slices to keep, and all others."""

    def __init__(
        self,
        stored: Collection[StoredSlice],
        *,
        identity: PoolIdentity,
        known: Collection[str],
        left: Mapping[str, SliceContent],
    ) -> None:
        self.identity = identity
        ours = slices_by_index(identity, stored, known=known)
        # Ignore slices in `left` if possible, because a slice that another client has changed does
        # not describe the pool.
        reliable = [each for each in ours.values() if each.name not in left] or [*ours.values()]
        self.generation = max((each.generation for each in reliable), default=0)
        self.next_generation = 1 + max((each.generation for each in stored), default=0)
        counts = {each.count for each in reliable if each.generation == self.generation}
        self.count = counts.pop() if len(counts) == 1 else 0
        """The number of slices that the pool should have, or 0 if unknown."""

        self.behind = {
            index
            for index, each in ours.items()
            if each.generation != self.generation and each.name not in left
        }
        # A slice whose index is not below the pool's count is left over from an earlier round.
        old = {i for i in self.behind if self.count and i >= self.count}
        kept = {i: each for i, each in ours.items() if i not in old}
        # If two slices contain a device, the newer slice applies.
        order = sorted(kept, key=lambda index: (index not in self.behind, index))
        self.slices = {index: kept[index] for index in order}
        self.behind -= old
        names = {each.name for each in kept.values()}
        self.obsolete = [each for each in stored if each.name not in names]
        self.missing = set(range(self.count)) - kept.keys()
        # Treat a slice that is not written for now as if it had been written.
        self.names = {
            index: (tuple(as_left.devices), tuple(as_left.counter_sets))
            if (as_left := left.get(each.name)) is not None
            else (each.devices, () if each.devices else each.counter_sets)
            for index, each in self.slices.items()
        }
        self.devices = {name: i for i in self.slices for name in self.names[i][0]}
        self.counter_sets = {name: i for i in self.slices for name in self.names[i][1]}
        self.published = {name for each in self.slices.values() for name in each.devices}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Planner:
    """Compares the current slices with the desired state, and derives the writes."""

    held: _HeldSlices
    devices: Mapping[str, DesiredDevice]
    ranks: Mapping[str, int] | None
    """The positions of the devices in the driver's order. None if they are sorted by name."""

    counter_sets: Mapping[str, CounterSet | None]
    partition_type: str | None
    known_before: Mapping[str, KnownSlice]
    left: Mapping[str, SliceContent]
    differences: dict[int, Difference] = field(default_factory=dict[int, Difference])
    known: dict[str, KnownSlice] = field(default_factory=dict[str, KnownSlice])

    def compare(self, index: int) -> None:
        """Compare one slice with the devices that remain in it."""
        stored = self.held.slices[index]
        names, counter_sets = self.held.names[index]
        kept = [n for n in names if n in self.devices and self.held.devices[n] == index]
        content = self._content(
            {name: self.devices[name] for name in kept},
            {
                name: self.counter_sets[name]
                for name in counter_sets
                if name in self.counter_sets and self.held.counter_sets[name] == index
            },
        )
        before = self.known_before.get(stored.name)
        if before is not None and before.version != stored.version:
            before = None
        difference = None if before is None else compare_contents(before.content, content)
        if difference is None:
            difference = compare(stored, content)
        uid = self.held.identity.node_uid
        if stored.owners != (uid,) and (before is None or before.owner != uid):
            difference = max(difference, Difference.TAINTS)
        if difference is Difference.NONE and index not in self.held.behind:
            self.known[stored.name] = KnownSlice(version=stored.version, content=content, owner=uid)
        elif (left := self.left.get(stored.name)) is not None and same_content(left, content):
            difference = Difference.NONE
        self.differences[index] = difference

    def _content(
        self,
        devices: Mapping[str, DesiredDevice],
        counter_sets: Mapping[str, CounterSet | None],
    ) -> SliceContent:
        key = natural_order if self.ranks is None else self.ranks.__getitem__
        return SliceContent(
            devices={name: devices[name] for name in sorted(devices, key=key)},
            counter_sets=counter_sets,
            partition_type=partition_type_of(devices.values(), self.partition_type),
        )

    def plan(self, packing: Packing, *, rejected: Mapping[str, str]) -> Plan:
        """Return the plan that moves devices and counter sets to their slices."""
        held, count = self.held, packing.count
        devices: list[dict[str, DesiredDevice]] = [{} for _ in range(count)]
        counter_sets: list[dict[str, CounterSet | None]] = [{} for _ in range(count)]
        changed = {i for i, each in self.differences.items() if each is Difference.CONTENT}
        for name, index in packing.devices.items():
            devices[index][name] = self.devices[name]
            if (before := held.devices.get(name)) != index:
                changed |= {index} if before is None else {index, before}
        for name, index in packing.counter_sets.items():
            counter_sets[index][name] = self.counter_sets[name]
            if held.counter_sets.get(name) != index:
                changed.add(index)

        kept = [index for index in sorted(held.slices) if index < count]
        same_generation = count == held.count and len(changed & {*kept} - held.behind) <= 1
        if same_generation:
            tainted = {i for i, each in self.differences.items() if each is Difference.TAINTS}
            # Write the outdated slices last, because they make the pool complete again.
            kept = [i for i in kept if i in (changed | tainted) - held.behind] + [
                i for i in kept if i in held.behind
            ]
        generation = held.generation if same_generation else held.next_generation

        def write(index: int) -> SliceWrite:
            content = self._content(devices[index], counter_sets[index])
            stored = held.slices.get(index)
            return SliceWrite(
                pool=held.identity,
                name=slice_name(held.identity, index) if stored is None else stored.name,
                count=count,
                generation=generation,
                content=content,
                stored=stored,
                sources=_sources(content, held),
                changed=index in changed
                or self.differences.get(index) is not Difference.NONE
                # Mark a slice in `left` as changed, because the API server has not accepted its
                # content.
                or (stored is not None and stored.name in self.left),
            )

        creates = [write(index) for index in range(count) if index not in held.slices]
        if same_generation:
            left = self.left
            creates = [
                each
                for each in creates
                if each.name not in left or not same_content(left[each.name], each.content)
            ]
        deletes = [*held.obsolete, *(each for i, each in held.slices.items() if i >= count)]
        return Plan(
            delete=deletes,
            replace=[write(index) for index in kept],
            create=creates,
            known=self.known,
            rejected=rejected,
            changes_layout=not same_generation and len(deletes) + len(kept) + len(creates) > 1,
        )


def _sources(content: SliceContent, held: _HeldSlices) -> list[StoredSlice]:
    """
    Return the published slices from which the body of `content` copies devices and counter sets.

    It copies those that are known only by name, and devices with taints, because a taint keeps the
    time at which it was added. Newer slices come last, because they take precedence.
    """
    devices = {n for n, each in content.devices.items() if each.taints or each.device is None}
    sets = {name for name, each in content.counter_sets.items() if each is None}
    return [
        each
        for each in held.slices.values()
        if not (devices.isdisjoint(each.devices) and sets.isdisjoint(each.counter_sets))
    ]
