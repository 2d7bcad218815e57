"""Packed devices are the devices that were packed, and equal columns are one object."""

import pytest

from drakit_explain.devices import CounterSetFacts, Devices, Place, TaintFacts, Version
from tests.fakes.world import device

TAINT = TaintFacts(key="k", effect="NoSchedule")
MIXED = (
    device("a", attributes={"model": "x", "index": 0}, taints=(TAINT,)),
    device("b", shareable=True, consumes=(CounterSetFacts(name="c", counters=()),)),
    device("c", attributes={"model": "y", "index": 1}, place=Place(node="n1")),
)


def serials(number, count=20, **attributes):
    return [
        device(f"g{each}", attributes={"serial": f"{number}-{each}", "model": "x", **attributes})
        for each in range(count)
    ]


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param((), id="none"),
        pytest.param(MIXED, id="of-several-kinds"),
        pytest.param(tuple(serials(1)), id="with-unique-strings"),
        pytest.param(tuple(serials(1, other="a\nb")), id="with-a-line-break"),
        pytest.param(
            tuple(device(f"g{i}", attributes={"s": f"{i}\n{i}"}) for i in range(20)),
            id="with-line-breaks-in-unique-strings",
        ),
        pytest.param(
            tuple(
                device(f"g{i}", attributes={"v": Version(f"1.0.{i}") if i else f"1.0.{i}"})
                for i in range(20)
            ),
            id="with-versions-and-a-string",
        ),
    ],
)
def test_devices_are_unpacked_as_they_were_packed(facts):
    devices = Devices.of(facts)
    assert tuple(devices) == facts
    assert devices == facts
    assert [type(value) for each in devices for value in each.values] == [
        type(value) for each in facts for value in each.values
    ]
    assert len(devices) == len(facts)
    assert devices.names == tuple(each.name for each in facts)


def test_slices_that_differ_in_one_attribute_share_the_others():
    one, other = Devices.of(serials(1)), Devices.of(serials(2))
    assert one.names is other.names
    (mine,), (theirs,) = one.groups, other.groups
    assert mine.columns[1] is theirs.columns[1]
    assert mine.columns[0] != theirs.columns[0]
    assert one != other


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(1, True, id="one-and-true"),
        pytest.param("1.0.0", Version("1.0.0"), id="string-and-version"),
    ],
)
def test_values_that_are_equal_to_python_alone_are_different_columns(one, other):
    first = Devices.of([device("a", attributes={"x": one})])
    second = Devices.of([device("a", attributes={"x": other})])
    assert type(first[0].values[0]) is type(one)
    assert type(second[0].values[0]) is type(other)
    assert first != second
    assert first == Devices.of([device("a", attributes={"x": one})])
