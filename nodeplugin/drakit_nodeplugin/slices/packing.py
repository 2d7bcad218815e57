"""
Splits a pool into ResourceSlices: decides which slice contains which device and counter set. Pure
functions.

A device keeps its slice while it exists and the API's limits allow it. A new device is placed where
it causes the fewest writes: in a slice that is written anyway, otherwise in a single other slice,
otherwise in the first slices with room. :mod:`.plan` decides which slices are written.

If the driver orders its devices, the sequence of slices has exactly that order. A new device is
then placed in the slice of a neighbor. If that is not possible, or if devices have moved across
slices, the devices are distributed again. In the latter case, several slices change, so all of them
are written anyway.

Does not depend on the API server or on attributes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

from drakit_formats.resource.limits import MAX_COUNTER_SETS_PER_SLICE, MAX_TAINTED_DEVICES_PER_SLICE


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingLimits:
    """The limits for filling a slice."""

    max_devices: int = MAX_TAINTED_DEVICES_PER_SLICE
    """Maximum number of devices in a slice. With this limit, any device can get a taint at any time
    without moving."""

    fill_devices: int = 56
    """Number of devices that the plugin places in a slice. The remaining room is a reserve: when
    all slices are this full, one more device costs a single write, instead of a write of every
    slice."""

    max_counter_sets: int = MAX_COUNTER_SETS_PER_SLICE
    """Maximum number of counter sets in a slice, which then contains no devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CurrentLayout:
    """The slices before the change."""

    devices: Mapping[str, int] = field(default_factory=dict[str, int])
    """The index of each device's slice, keyed by device name."""

    counter_sets: Mapping[str, int] = field(default_factory=dict[str, int])
    count: int = 0
    """The number of slices."""

    free: Collection[int] = ()
    """Slices that are written anyway, regardless of their content: missing slices, and slices that
    an interrupted round has left behind."""

    touched: Collection[int] = ()
    """Other slices whose content changes. If there is more than one, all slices must be written."""

    rewritten: Collection[int] = ()
    """Slices that are written anyway, but only because of their taints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """The slices after the change."""

    devices: Mapping[str, int]
    counter_sets: Mapping[str, int]

    @property
    def count(self) -> int:
        """The number of slices. Empty slices at the end are deleted, except for the first slice."""
        return 1 + max(chain(self.devices.values(), self.counter_sets.values()), default=0)


def pack(
    devices: Collection[str],
    *,
    counter_sets: Collection[str] = (),
    current: CurrentLayout,
    ordered: bool = False,
    limits: PackingLimits | None = None,
) -> Packing:
    """Return the slice index of each device and of each counter set. New devices are placed in the
    order of `devices`. If `ordered`, all devices are in that order."""
    slices = _Slices(limits=limits or PackingLimits())
    kept: dict[str, int] = {}
    touched = {*current.touched}
    for name in devices:
        if (index := current.devices.get(name, -1)) < 0:
            continue
        if slices.load[index] == slices.limits.max_devices:
            touched.add(index)  # another release placed more devices in the slice
        else:
            kept[name] = index
            slices.load[index] += 1
    kept_sets = {
        name: at for name in counter_sets if (at := current.counter_sets.get(name, -1)) >= 0
    }
    new = [name for name in devices if name not in kept]
    new_sets = [name for name in counter_sets if name not in kept_sets]
    slices.sets.update(kept_sets.values())
    if ordered and not _is_ordered(devices, kept):
        return _distributed(devices, new_sets, kept_sets, slices)
    if not new and not new_sets:
        return Packing(devices=kept, counter_sets=kept_sets)
    if ordered and new:
        homes = _beside_neighbors(devices, kept, slices, current, touched)
        if homes is None:
            return _distributed(devices, new_sets, kept_sets, slices)
        kept, new = kept | homes, []
        if not new_sets:
            return Packing(devices=kept, counter_sets=kept_sets)
    added = _added_in_place(new, new_sets, slices, current, touched)
    if added is not None:
        packing = Packing(devices=kept | added[0], counter_sets=kept_sets | added[1])
        if packing.count == current.count:
            return packing
    # If the number of slices changes, all of them are written anyway.
    added = _spread_over_all(new, new_sets, slices)
    return Packing(devices=kept | added[0], counter_sets=kept_sets | added[1])


def _is_ordered(devices: Collection[str], homes: Mapping[str, int]) -> bool:
    indexes = [homes[name] for name in devices if name in homes]
    return all(one <= next_ for one, next_ in pairwise(indexes))


def _beside_neighbors(
    devices: Collection[str],
    kept: Mapping[str, int],
    slices: _Slices,
    current: CurrentLayout,
    touched: Collection[int],
) -> dict[str, int] | None:
    """Place new devices between their neighbors, without a new slice. Return None if there is no
    room."""
    written = {*touched, *current.free}
    homes: dict[str, int] = {}
    run: list[str] = []
    low = 0
    for name in (*devices, None):
        if name is not None and name not in kept:
            run.append(name)
            continue
        high = current.count - 1 if name is None else kept[name]
        if run:
            # Try slices that are written anyway first, and then those nearest to the previous
            # device.
            candidates = sorted(range(low, high + 1), key=lambda index: index not in written)
            fitting = (i for i in candidates if slices.room(i, reserve=True) >= len(run))
            if (index := next(fitting, None)) is None:
                return None
            homes |= dict.fromkeys(run, index)
            slices.load[index] += len(run)
            written.add(index)
            run = []
        low = high
    return homes


def _distributed(
    devices: Collection[str],
    new_sets: Sequence[str],
    kept_sets: Mapping[str, int],
    slices: _Slices,
) -> Packing:
    """Fill the slices from the first one, in the order of the devices."""
    slices.load.clear()
    homes, _ = slices.spread([*devices], range(len(devices) + len(slices.sets)), reserve=False)
    sets, _ = slices.spread_sets(new_sets, range(slices.end + len(new_sets)))
    return Packing(devices=homes, counter_sets={**kept_sets, **sets})


_Homes = tuple[dict[str, int], dict[str, int]]
"""The slice indexes of new devices, and of new counter sets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slices:
    """The content of the slices during packing."""

    limits: PackingLimits
    load: Counter[int] = field(default_factory=Counter[int])
    sets: Counter[int] = field(default_factory=Counter[int])

    def room(self, index: int, *, reserve: bool) -> int:
        """Return how many more devices fit into a slice, with or without the reserve."""
        if self.sets[index]:
            return 0
        most = self.limits.max_devices if reserve else self.limits.fill_devices
        return max(0, most - self.load[index])

    def room_for_sets(self, index: int) -> int:
        return 0 if self.load[index] else self.limits.max_counter_sets - self.sets[index]

    def spread(
        self, names: Sequence[str], indexes: Iterable[int], *, reserve: bool
    ) -> tuple[dict[str, int], Sequence[str]]:
        return _spread(names, indexes, self.load, lambda i: self.room(i, reserve=reserve))

    def spread_sets(
        self, names: Sequence[str], indexes: Iterable[int]
    ) -> tuple[dict[str, int], Sequence[str]]:
        return _spread(names, indexes, self.sets, self.room_for_sets)

    @property
    def end(self) -> int:
        """The index after the last slice that contains anything."""
        used = [index for held in (self.load, self.sets) for index, n in held.items() if n]
        return max(used, default=-1) + 1


def _added_in_place(
    new: Sequence[str],
    new_sets: Sequence[str],
    slices: _Slices,
    current: CurrentLayout,
    touched: Collection[int],
) -> _Homes | None:
    """Place new devices so that the content of at most one slice changes, other than free
    slices."""
    if len(touched) > 1:
        return None
    free = sorted(current.free)
    others = sorted({*range(current.count)} - {*free})
    # The cheapest slices come first: free ones, then a slice that is written anyway.
    candidates = [(), tuple(touched)] if touched else [(), sorted(current.rewritten), others]
    for targets in candidates:
        for reserve in (False, True):
            trial = replace(slices, load=slices.load.copy(), sets=slices.sets.copy())
            homes, rest = trial.spread(new, free, reserve=reserve)
            set_homes, set_rest = trial.spread_sets(new_sets, free)
            if rest and set_rest:
                continue
            if not rest and not set_rest:
                return homes, set_homes
            for index in targets:
                if rest and trial.room(index, reserve=reserve) >= len(rest):
                    return homes | dict.fromkeys(rest, index), set_homes
                if set_rest and trial.room_for_sets(index) >= len(set_rest):
                    return homes, set_homes | dict.fromkeys(set_rest, index)
    return None


def _spread_over_all(new: Sequence[str], new_sets: Sequence[str], slices: _Slices) -> _Homes:
    """Fill the first slices with room, and add new ones, because the whole pool is written
    anyway."""
    end = slices.end
    held = [index for index in range(end) if slices.load[index]]
    empty = [i for i in range(end) if not slices.load[i] and not slices.sets[i]]
    empty += range(end, end + len(new) + len(new_sets) + 1)
    homes, _ = slices.spread(new, held + empty, reserve=False)
    set_homes, _ = slices.spread_sets(new_sets, [*range(end), *empty])
    return homes, set_homes


def _spread(
    names: Sequence[str], indexes: Iterable[int], load: Counter[int], room: Callable[[int], int]
) -> tuple[dict[str, int], Sequence[str]]:
    """Place names in the first of these slices that have room. Return the names that do not fit."""
    homes: dict[str, int] = {}
    for index in indexes:
        if not names:
            break
        fitting = names[: room(index)]
        homes |= dict.fromkeys(fitting, index)
        load[index] += len(fitting)
        names = names[len(fitting) :]
    return homes, names
