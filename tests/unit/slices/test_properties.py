"""Any sequence of inventories: limits hold, nothing moves without need, writes are the fewest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from drakit_nodeplugin.devices.model import DesiredPool
from drakit_nodeplugin.slices.plan import KnownSlice
from tests.unit.slices.world import SMALL, PoolServer, counter_set, device, pool, taint


@dataclass(frozen=True)
class Fleet:
    """The desired state at one time."""

    attributes: dict[int, int]  # by device
    tainted: frozenset[int] = frozenset()
    consumers: frozenset[int] = frozenset()  # devices that consume counters
    sets: dict[int, int] | None = None

    def desired(self) -> DesiredPool:
        devices = [
            device(
                f"d{i}",
                *([taint()] if i in self.tainted else []),
                attributes={"n": value},
                consumes={"set": {"memory": "1"}} if i in self.consumers else {},
            )
            for i, value in self.attributes.items()
        ]
        sets = tuple(counter_set(f"s{i}", str(n)) for i, n in (self.sets or {}).items())
        return pool(*devices, counter_sets=sets)


NUMBERS = st.integers(0, 15)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sets(NUMBERS, min_size=1, max_size=6)),
        st.tuples(st.just("add"), st.just(set(range(10)))),
        st.tuples(st.just("remove"), st.sets(NUMBERS, min_size=1, max_size=4)),
        st.tuples(st.just("change"), st.sets(NUMBERS, min_size=1, max_size=3)),
        st.tuples(st.just("taint"), st.sets(NUMBERS, max_size=16)),
        st.tuples(st.just("consume"), st.sets(NUMBERS, max_size=3)),
        st.tuples(st.just("sets"), st.dictionaries(st.integers(0, 4), st.integers(1, 2))),
    ),
    min_size=1,
    max_size=3,
)
HISTORIES = st.lists(STEPS, max_size=8)


def then(fleet: Fleet, steps: list[tuple[str, Any]]) -> Fleet:
    attributes, tainted = dict(fleet.attributes), fleet.tainted
    consumers, sets = fleet.consumers, fleet.sets
    for kind, what in steps:
        match kind:
            case "add":
                attributes |= {i: 0 for i in what if i not in attributes}
            case "remove":
                attributes = {i: n for i, n in attributes.items() if i not in what}
            case "change":
                attributes |= {i: attributes[i] + 1 for i in what if i in attributes}
            case "taint":
                tainted = frozenset(what)
            case "consume":
                consumers = frozenset(what)
            case _:
                sets = what
    return Fleet(attributes, tainted, consumers, sets)


# ------------------------------------------------------------ the lower bound


@dataclass
class Slot:
    """A slice before the change, with the parts that stay."""

    kept: int  # devices that may stay
    sets: int
    content: bool  # whether its content changes whatever is placed
    taints: bool

    def room(self, *, fill: bool) -> int:
        if self.sets:
            return 0
        return max(0, (SMALL.fill_devices if fill else SMALL.max_devices) - self.kept)


def lower_bound(server: PoolServer, wanted: DesiredPool) -> int:
    """
    Return the minimum number of writes that the rules require.

    The pool is complete before the change: all of its slices have one generation.
    """
    devices = {each.name: each for each in wanted.devices}
    sets = {each.name: each for each in wanted.counter_sets or ()}
    slots, seen, seen_sets = [], set(), set()
    for body in server.current():
        here = body["spec"]["devices"]
        here_sets = body["spec"].get("sharedCounters", [])
        stay = [each["name"] for each in here if each["name"] in devices]
        stay_sets = [each["name"] for each in here_sets if each["name"] in sets]
        seen |= {*stay}
        seen_sets |= {*stay_sets}
        content = len(stay) < len(here) or len(stay_sets) < len(here_sets)
        content |= any(
            each["attributes"]["n"]["int"] != devices[each["name"]].device.attributes["n"]
            or bool(each.get("consumesCounters")) != bool(devices[each["name"]].device.consumes)
            for each in here
            if each["name"] in devices
        )
        content |= any(
            each["counters"]["memory"]["value"] != sets[each["name"]].counters["memory"]
            for each in here_sets
            if each["name"] in sets
        )
        taints = any(
            bool(each.get("taints")) != bool(devices[each["name"]].taints)
            for each in here
            if each["name"] in devices
        )
        slots.append(Slot(len(stay), len(stay_sets), content, taints))
    new = len(devices.keys() - seen)
    new_sets = len(sets.keys() - seen_sets)
    if not slots:
        return fewest_slices([], new, new_sets)
    single = one_content(slots, new, new_sets)
    if single is not None:
        return single
    return max(fewest_slices(slots, new, new_sets), len(slots))


def one_content(slots: list[Slot], new: int, sets: int) -> int | None:
    """Return the writes if the content of at most one slice changes; None if that is impossible."""
    changed = [i for i, slot in enumerate(slots) if slot.content]
    tainted = {i for i, slot in enumerate(slots) if slot.taints}
    if len(changed) > 1 or (new and sets):
        return None
    best = None
    for target in changed or [None, *range(len(slots))]:
        if target is None:
            if new or sets:
                continue
        else:
            slot = slots[target]
            if new and slot.room(fill=False) < new:
                continue
            if sets and (slot.kept or slot.sets + sets > SMALL.max_counter_sets):
                continue
        placed = {target} if new or sets else set()
        last = max(
            (i for i, slot in enumerate(slots) if slot.kept or slot.sets or i in placed),
            default=0,
        )
        if last + 1 != len(slots):
            continue
        writes = len(tainted | placed | {*changed})
        best = writes if best is None else min(best, writes)
    return best


def fewest_slices(slots: list[Slot], new: int, sets: int) -> int:
    """Return the number of slices if none is filled beyond the placement limit."""
    last = max((i for i, slot in enumerate(slots) if slot.kept or slot.sets), default=0)
    count = last + 1
    while not fits([*slots, *[Slot(0, 0, False, False)] * count][:count], new, sets):
        count += 1
    return count


def fits(slots: list[Slot], new: int, sets: int) -> bool:
    empty = [i for i, slot in enumerate(slots) if not slot.kept and not slot.sets]
    room = sum(SMALL.max_counter_sets - slot.sets for slot in slots if slot.sets)
    for_sets = max(0, -(-(sets - room) // SMALL.max_counter_sets))
    if for_sets > len(empty):
        return False
    rest = [slot for i, slot in enumerate(slots) if i not in empty[:for_sets]]
    return sum(slot.room(fill=True) for slot in rest) >= new


# ------------------------------------------------------------ the properties


@settings(derandomize=True, max_examples=150, deadline=None)
@given(HISTORIES)
def test_packing_holds_for_any_sequence(history):
    server = PoolServer(limits=SMALL)
    fleet = Fleet({})
    server.publish(fleet.desired())
    known: dict[str, KnownSlice] = {}
    for steps in history:
        fleet = then(fleet, steps)
        wanted = fleet.desired()
        before = server.published() | server.sets()
        writes = lower_bound(server, wanted)
        generation = server.generation

        remembered = server.plan(wanted, known=known)
        fresh = server.plan(wanted)
        assert [w.body() for w in remembered.replace] == [w.body() for w in fresh.replace]
        done = server.publish(wanted)

        kept = "kept" if generation == server.generation else "bumped"
        event(f"{min(writes, 4)} writes, generation {kept}")
        after = server.published()
        assert after.keys() == {each.name for each in wanted.devices}
        assert server.sets().keys() == {each.name for each in wanted.counter_sets or ()}
        stayed = (after | server.sets()).items() & before.items()
        assert len(before.keys() & (after | server.sets()).keys()) == len(stayed), "nothing moves"
        assert sum(done) == writes
        again = server.plan(wanted)
        assert again.empty, "a restart writes nothing"
        known = dict(again.known)


@settings(derandomize=True, max_examples=80, deadline=None)
@given(HISTORIES, st.data())
def test_interruptions_and_deletions_are_repaired(history, data):
    """After each write the scheduler sees a consistent pool, or none; see `PoolServer`."""
    server = PoolServer(limits=SMALL)
    fleet = Fleet({})
    for steps in history:
        fleet = then(fleet, steps)
        server.publish(fleet.desired(), writes=data.draw(st.integers(0, 4), label="writes made"))
        for name in data.draw(
            st.sets(st.sampled_from([*server.slices]), max_size=2)
            if server.slices
            else st.just(()),
            label="deleted",
        ):
            del server.slices[name]
    wanted = fleet.desired()
    before = sum(server.publish(wanted))
    assert set(server.published()) == {each.name for each in wanted.devices}
    assert before <= 2 * len(server.slices) + 8
    assert server.plan(wanted).empty


@settings(derandomize=True, max_examples=60, deadline=None)
@given(HISTORIES, st.data())
def test_only_deleted_slices_are_written(history, data):
    server = PoolServer(limits=SMALL)
    fleet = Fleet({})
    server.publish(fleet.desired())
    for steps in history:
        fleet = then(fleet, steps)
        server.publish(fleet.desired())
    names = sorted(server.slices)
    gone = data.draw(st.sets(st.sampled_from(names)), label="deleted")
    before = server.published()
    for name in gone:
        del server.slices[name]
    assert sum(server.publish(fleet.desired())) <= max(len(gone), len(server.slices))
    after = server.published()
    assert all(after[name] == at for name, at in before.items() if at not in gone)


ORDERS = st.lists(st.lists(NUMBERS, unique=True, max_size=14), min_size=1, max_size=8)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(ORDERS, st.integers(0, 4))
def test_devices_are_tried_in_the_order_of_their_driver_and_each_slice_is_written_once(orders, n):
    server = PoolServer(limits=SMALL)
    sets = tuple(counter_set(f"s{i}") for i in range(n))
    for numbers in orders:
        wanted = pool(*(f"d{number}" for number in numbers), counter_sets=sets, ordered=True)
        before = len(server.slices)
        writes = sum(server.publish(wanted))
        assert [*server.bodies()] == [f"d{number}" for number in numbers]
        assert writes <= max(before, len(server.slices))
        assert server.plan(wanted).empty
