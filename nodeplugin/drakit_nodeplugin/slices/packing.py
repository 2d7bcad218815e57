"""
Which device and which counter set stands in which ResourceSlice: stable, with room left.

What is placed keeps its slice for as long as it exists and the API's limits allow it. What is new
goes where it costs the fewest writes: into a slice that is written anyway, else into one alone;
only if that cannot be is it spread over the first slices with room. What a slice looks like on the
wire, and what is written, is :mod:`.plan`'s.

It must not know the API server, attributes, or where devices come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from drakit.resource.limits import (
    MAX_COUNTER_SETS_PER_SLICE,
    MAX_DEVICES_PER_SLICE,
    MAX_DEVICES_PER_SLICE_ADVANCED,
)

__all__ = ("Packing", "PackingLimits", "Standing", "pack")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingLimits:
    """How full a slice gets. A device is advanced if it has taints, counters or list attributes."""

    max_devices: int = MAX_DEVICES_PER_SLICE
    """Devices a slice: the API server's limit, as long as none of them is advanced."""

    max_advanced: int = MAX_DEVICES_PER_SLICE_ADVANCED
    """The same as soon as one of them is."""

    fill_plain: int = 112
    """Devices a slice that we place in a plain pool. The rest is room: a device that is added when
    all slices are as full as this is still one write, and not a write of every slice."""

    fill_devices: int = 56
    """The same in any other pool, where each device must be able to get a taint without a move."""

    max_counter_sets: int = MAX_COUNTER_SETS_PER_SLICE
    """Counter sets a slice, which then holds no devices: the API server's limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How things stand before."""

    devices: Mapping[str, int] = field(default_factory=dict[str, int])
    """The index of a device's slice, by its name."""

    counter_sets: Mapping[str, int] = field(default_factory=dict[str, int])
    count: int = 0
    """How many slices there are."""

    free: Collection[int] = ()
    """Slices that are written in any case, whatever is in them: some that are gone, and some that
    an interrupted round has left behind."""

    touched: Collection[int] = ()
    """Other slices whose content changes. If more than one does, all of the pool are written."""

    rewritten: Collection[int] = ()
    """Slices that are written in any case, but not for their content: for taints alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Where everything stands."""

    devices: Mapping[str, int]
    counter_sets: Mapping[str, int]
    moved: frozenset[str]
    """Devices that had to leave their slices."""

    @property
    def count(self) -> int:
        """How many slices there are: those at the end that are empty are given up, but for one."""
        return 1 + max(chain(self.devices.values(), self.counter_sets.values()), default=0)


def pack(
    devices: Mapping[str, bool],
    *,
    counter_sets: Collection[str] = (),
    standing: Standing,
    plain: bool = False,
    limits: PackingLimits | None = None,
) -> Packing:
    """
    Give each device and each counter set its slice, counted from 0.

    `devices` says of each whether it is advanced, in the order in which new ones are placed.
    """
    slices = _Slices(plain=plain, limits=limits or PackingLimits())
    kept, moved = _keep(devices, standing.devices, slices)
    kept_sets = {
        name: at for name in counter_sets if (at := standing.counter_sets.get(name, -1)) >= 0
    }
    slices.sets.update(kept_sets.values())
    new = [name for name in devices if name not in kept]
    # Advanced ones first: a slice that is full of others cannot take them any more.
    news = {name: devices[name] for name in sorted(new, key=lambda name: not devices[name])}
    new_sets = [name for name in counter_sets if name not in kept_sets]
    touched = {*standing.touched, *(standing.devices[name] for name in moved)}
    added = _added_in_place(news, new_sets, slices, standing, touched)
    if added is not None:
        packing = _packing(kept, kept_sets, added, moved)
        if packing.count == standing.count:
            return packing
    # With another number of slices all of them are written anyway.
    return _packing(kept, kept_sets, _spread_over_all(news, new_sets, slices), moved)


_Homes = tuple[dict[str, int], dict[str, int]]
"""The slices of new devices, and of new counter sets."""


def _packing(
    kept: dict[str, int], kept_sets: dict[str, int], added: _Homes, moved: Iterable[str]
) -> Packing:
    return Packing(
        devices=kept | added[0], counter_sets=kept_sets | added[1], moved=frozenset(moved)
    )


class _Slices:
    """What the slices hold while they are being packed."""

    def __init__(self, *, plain: bool, limits: PackingLimits) -> None:
        self.plain = plain
        self.limits = limits
        self.load: Counter[int] = Counter()
        self.advanced: set[int] = set()
        self.sets: Counter[int] = Counter()

    def copy(self) -> _Slices:
        other = _Slices(plain=self.plain, limits=self.limits)
        other.load, other.sets = self.load.copy(), self.sets.copy()
        other.advanced = set(self.advanced)
        return other

    def add(self, index: int, *, advanced: bool) -> None:
        self.load[index] += 1
        if advanced:
            self.advanced.add(index)

    def room(self, index: int, *, advanced: bool, reserve: bool) -> int:
        """Say how many more devices a slice takes, if one of them is advanced or none."""
        if self.sets[index]:
            return 0
        limits, tight = self.limits, advanced or index in self.advanced
        if self.plain and not tight:
            most = limits.max_devices if reserve else limits.fill_plain
        else:
            most = limits.max_advanced if reserve else limits.fill_devices
        return most - self.load[index]

    def room_for_sets(self, index: int) -> int:
        return 0 if self.load[index] else self.limits.max_counter_sets - self.sets[index]

    @property
    def end(self) -> int:
        """The index behind the last slice that holds anything."""
        used = [index for held in (self.load, self.sets) for index, n in held.items() if n]
        return max(used, default=-1) + 1


def _keep(
    devices: Mapping[str, bool], placed: Mapping[str, int], slices: _Slices
) -> tuple[dict[str, int], list[str]]:
    """Leave devices where they stand, but for those that the API server would refuse there."""
    names: dict[int, list[str]] = {}
    for name in devices:
        if (index := placed.get(name, -1)) >= 0:
            names.setdefault(index, []).append(name)
    kept: dict[str, int] = {}
    moved: list[str] = []
    for index, here in names.items():
        tight = any(devices[name] for name in here)
        most = slices.limits.max_advanced if tight else slices.limits.max_devices
        # Those that are not advanced go first: more slices can take them.
        here.sort(key=lambda name: not devices[name])
        moved += here[most:]
        for name in here[:most]:
            kept[name] = index
            slices.add(index, advanced=devices[name])
    return kept, moved


def _added_in_place(
    new: Mapping[str, bool],
    new_sets: Sequence[str],
    slices: _Slices,
    standing: Standing,
    touched: Collection[int],
) -> _Homes | None:
    """Place new ones so that the content of one slice changes at most, besides the free ones."""
    if len(touched) > 1:
        return None
    free = sorted(standing.free)
    others = sorted({*range(standing.count)} - {*free})
    # What costs nothing first: free ones, then a slice that is written anyway.
    candidates = [(), tuple(touched)] if touched else [(), sorted(standing.rewritten), others]
    for targets in candidates:
        for reserve in (False, True):
            trial = slices.copy()
            homes, rest = _spread(new, free, trial, reserve=reserve)
            set_homes, set_rest = _spread_sets(new_sets, free, trial)
            if rest and set_rest:
                continue
            if not rest and not set_rest:
                return homes, set_homes
            for index in targets:
                advanced = any(rest.values())
                if rest and trial.room(index, advanced=advanced, reserve=reserve) >= len(rest):
                    return homes | dict.fromkeys(rest, index), set_homes
                if set_rest and trial.room_for_sets(index) >= len(set_rest):
                    return homes, set_homes | dict.fromkeys(set_rest, index)
    return None


def _spread_over_all(new: Mapping[str, bool], new_sets: Sequence[str], slices: _Slices) -> _Homes:
    """Fill the first slices with room, and begin new ones: all of the pool is written anyway."""
    end = slices.end
    empty = [i for i in range(end) if not slices.load[i] and not slices.sets[i]]
    empty += range(end, end + len(new) + len(new_sets) + 1)
    tight = {name: True for name, advanced in new.items() if advanced}
    basic = {name: False for name, advanced in new.items() if not advanced}
    takers = _takers(slices, tight=len(tight), basic=len(basic))
    homes: dict[str, int] = {}
    for rest, begun in ((tight, takers), (basic, range(end))):
        held = [index for index in begun if slices.load[index]]
        for indexes in (held, empty):
            more, rest = _spread(rest, indexes, slices, reserve=False)
            homes |= more
    set_homes: dict[str, int] = {}
    for indexes in (range(end), empty):
        more, new_sets = _spread_sets(new_sets, indexes, slices)
        set_homes |= more
    return homes, set_homes


def _takers(slices: _Slices, *, tight: int, basic: int) -> Sequence[int]:
    """
    Choose the slices that advanced devices are added to, so that the fewest new ones are needed.

    In a plain pool the first one that comes to a slice takes half of its room away.
    """
    held = [index for index in range(slices.end) if slices.load[index]]
    if not slices.plain or not tight:
        return held
    taking = [index for index in held if index in slices.advanced]
    others = sorted({*held} - {*taking}, key=lambda index: (slices.load[index], index))

    def new_slices(number: int) -> int:
        free = sum(_room(slices, i, advanced=True) for i in (*taking, *others[:number]))
        more = sum(_room(slices, i, advanced=False) for i in others[number:])
        for_tight = max(0, _pages(tight - free, slices.limits.fill_devices))
        spare = free + for_tight * slices.limits.fill_devices - tight
        return for_tight + max(0, _pages(basic - spare - more, slices.limits.fill_plain))

    return sorted(taking + others[: min(range(len(others) + 1), key=new_slices)])


def _room(slices: _Slices, index: int, *, advanced: bool) -> int:
    return max(0, slices.room(index, advanced=advanced, reserve=False))


def _pages(items: int, size: int) -> int:
    return -(-items // size)


def _spread(
    new: Mapping[str, bool], indexes: Sequence[int], slices: _Slices, *, reserve: bool
) -> tuple[dict[str, int], dict[str, bool]]:
    """Give devices the first of these slices with room; give those for which there is none."""
    homes: dict[str, int] = {}
    for kind in (True, False):
        names = iter([name for name, advanced in new.items() if advanced is kind])
        homes.update(_fitting(names, indexes, slices, advanced=kind, reserve=reserve))
    return homes, {name: advanced for name, advanced in new.items() if name not in homes}


def _fitting(
    names: Iterator[str], indexes: Iterable[int], slices: _Slices, *, advanced: bool, reserve: bool
) -> Iterator[tuple[str, int]]:
    for index in indexes:
        while slices.room(index, advanced=advanced, reserve=reserve) > 0:
            name = next(names, None)
            if name is None:
                return
            slices.add(index, advanced=advanced)
            yield name, index


def _spread_sets(
    names: Sequence[str], indexes: Iterable[int], slices: _Slices
) -> tuple[dict[str, int], list[str]]:
    homes: dict[str, int] = {}
    left = iter(names)
    for index in indexes:
        while slices.room_for_sets(index) > 0 and (name := next(left, None)) is not None:
            homes[name] = index
            slices.sets[index] += 1
    return homes, [name for name in names if name not in homes]
