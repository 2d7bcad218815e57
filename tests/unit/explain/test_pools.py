"""What the slices of a pool say together of its counters."""

from drakit.explain import (
    Amount,
    CounterSetFacts,
    DeviceFacts,
    DeviceID,
    PoolID,
    SliceFacts,
    current_counters,
)


def card(memory):
    return CounterSetFacts(name="card", counters=(Amount("memory", memory),))


def part(name, generation=1, pool="n1", **facts):
    return SliceFacts(name=name, uid=name, driver="d", pool=pool, generation=generation, **facts)


PARTITION = DeviceFacts(name="p0", attributes={}, consumes=(card("40Gi"),))
PLAIN = DeviceFacts(name="g0", attributes={})


def test_counters_and_their_consumers_come_from_several_slices():
    counters = current_counters(
        [part("c", counter_sets=(card("80Gi"),)), part("d", devices=(PARTITION, PLAIN))]
    )
    assert counters[PoolID("d", "n1")].totals == {("card", "memory"): "80Gi"}
    assert counters[PoolID("d", "n1")].consumers == ((DeviceID("d", "n1", "p0"), PARTITION),)


def test_only_the_highest_generation_counts():
    counters = current_counters(
        [
            part("old", counter_sets=(card("80Gi"),), devices=(PARTITION,)),
            part("new", generation=2, counter_sets=(card("40Gi"),)),
        ]
    )
    assert counters[PoolID("d", "n1")].totals == {("card", "memory"): "40Gi"}
    assert counters[PoolID("d", "n1")].consumers == ()


def test_a_pool_without_counters_is_not_kept():
    assert current_counters([part("s", devices=(PLAIN,))]) == {}
