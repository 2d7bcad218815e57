"""Selectors are evaluated once for devices that are alike, and outcomes follow the slices."""

from dataclasses import replace

import pytest

from drakit_explain import selectors as module
from drakit_explain.devices import CapacityFacts, DeviceFacts, DeviceKind, ListValue, Version
from drakit_explain.model import SliceFacts
from drakit_explain.selectors import (
    BATCH,
    Reads,
    SelectorIndex,
    SelectorResult,
    bring_up_to_date,
    evaluate,
    only_driver,
)
from tests.fakes.world import device, on

MODEL = 'device.attributes["d"].model == "x"'


class Counting:
    """Selects devices whose model is x, and records its calls."""

    def __init__(self, reads=None):
        self.asked = []
        self.sizes = []
        self._reads = reads or Reads(attributes=frozenset(["d/model"]))

    def reads(self, expressions, **_):
        return [self._reads for _ in expressions]

    def select(self, expression, devices, **_):
        self.asked += devices
        self.sizes.append(len(devices))
        return [self._outcome(each["attributes"].get("model")) for each in devices]

    def close(self):
        pass

    def _outcome(self, model):
        if model is None:
            return SelectorResult(error="no such key: model")
        return SelectorResult(selected=model == {"string": "x"})


def published(*devices, name="s"):
    return SliceFacts(name=name, uid=name, driver="d", pool="n1", place=on("n1"), devices=devices)


def card(name, model="x", **others):
    return device(name, attributes={"model": model, "serial": name, **others})


def evaluated(index, selectors, *slices):
    bring_up_to_date(index, selectors, [MODEL], slices)
    return [index.evaluated(MODEL, each) for each in slices]


def test_devices_that_differ_in_what_is_not_read_are_evaluated_once():
    selectors = Counting()
    of = published(card("a"), card("b"), card("c", "y"), device("none"))
    (found,) = evaluated(SelectorIndex(), selectors, of)
    assert (found.matches, dict(found.errors)) == (0b0011, {3: "no such key: model"})
    assert len(selectors.asked) == 3


def test_only_changed_slices_are_evaluated_again():
    index, selectors = SelectorIndex(), Counting()
    one, two = published(card("a"), name="one"), published(card("b"), name="two")
    evaluated(index, selectors, one, two)
    assert not index.needed(MODEL, [one, two])
    changed = published(card("a", "z"), card("b"), name="one")
    assert [f.matches for f in evaluated(index, selectors, changed, two)] == [0b10, 0b1]
    assert len(selectors.asked) == 2


def test_an_expression_that_does_not_compile_is_not_evaluated():
    index, selectors = SelectorIndex(), Counting(Reads(error="undefined field"))
    index.learn({MODEL: Reads(error="undefined field")})
    assert not index.needed(MODEL, [published(card("a"))])
    assert index.problem(MODEL) == "undefined field"
    assert selectors.asked == []


def test_the_oldest_expressions_are_forgotten(monkeypatch):
    monkeypatch.setattr(module, "MAX_EXPRESSIONS", 2)
    index = SelectorIndex()
    for expression in ("a", "b", "c"):
        index.learn({expression: Reads()})
    assert index.unread(["a", "b", "c"]) == ["a"]


def test_the_least_recently_used_of_the_owner_with_the_most_is_forgotten(monkeypatch):
    monkeypatch.setattr(module, "MAX_EXPRESSIONS", 4)
    index = SelectorIndex()
    index.learn({"innocent": Reads()}, owner="lab")
    for expression in ("a", "b", "c"):
        index.learn({expression: Reads()}, owner="tenant")
    index.needed("a", [published(card("a"))])
    for expression in ("d", "e"):
        index.learn({expression: Reads()}, owner="tenant")
    assert index.unread(["innocent", "a", "b", "c", "d", "e"]) == ["b", "c"]


def test_a_namespace_has_fewer_expressions_than_the_cluster(monkeypatch):
    monkeypatch.setattr(module, "MAX_OF_OWNER", 2)
    index = SelectorIndex()
    for expression in ("a", "b", "c"):
        index.learn({expression: Reads()}, owner="lab")
        index.learn({f"of-a-class-{expression}": Reads()})
    assert index.unread(["a", "b", "c", *(f"of-a-class-{each}" for each in "abc")]) == ["a"]


def test_an_expression_without_room_has_no_outcome(monkeypatch):
    monkeypatch.setattr(module, "MAX_EXPRESSIONS", 1)
    index = SelectorIndex()
    of = published(card("a"))
    bring_up_to_date(index, Counting(), ["true", MODEL], [of])
    with pytest.raises(KeyError):
        index.evaluated("true", of)
    assert index.evaluated(MODEL, of)


@pytest.mark.parametrize(
    ("reads", "attributes", "capacity"),
    [
        pytest.param(
            Reads(everything=True),
            {
                "model": {"string": "x"},
                "i": {"int": 1},
                "b": {"bool": True},
                "v": {"version": "1.0.0"},
            },
            {"memory": {"value": "8Gi"}},
            id="everything",
        ),
        pytest.param(
            Reads(attributes=frozenset(["d/i"])), {"i": {"int": 1}}, {}, id="an-attribute"
        ),
        pytest.param(
            Reads(capacity=frozenset(["d/memory"])),
            {},
            {"memory": {"value": "8Gi"}},
            id="a-capacity",
        ),
    ],
)
def test_the_evaluator_gets_what_the_expression_reads_as_the_api_writes_it(
    reads, attributes, capacity
):
    values = {"model": "x", "i": 1, "b": True, "v": Version("1.0.0")}
    memory = CapacityFacts(name="memory", value="8Gi")
    selectors = Counting(reads)
    of = published(device("a", attributes=values, capacity=[memory], shareable=True))
    evaluated(SelectorIndex(), selectors, of)
    assert selectors.asked == [
        {
            "driver": "d",
            "allowMultipleAllocations": True,
            "attributes": attributes,
            "capacity": capacity,
        }
    ]


def test_a_device_with_a_list_is_written_whole_because_a_selector_may_fail_on_it():
    selectors = Counting()
    values = {"model": "x", "l": ListValue("ints", (1,))}
    kind = DeviceKind(attributes=tuple(values), unusual=True)
    of = published(DeviceFacts(name="a", kind=kind, values=tuple(values.values())))
    evaluated(SelectorIndex(), selectors, of)
    assert selectors.asked[0]["attributes"] == {"model": {"string": "x"}, "l": {"ints": [1]}}


def test_an_attribute_that_is_unique_is_evaluated_in_several_steps():
    selectors = Counting(Reads(attributes=frozenset(["d/model", "d/serial"])))
    slices = [
        published(*(card(f"{number}-{each}") for each in range(100)), name=str(number))
        for number in range(BATCH // 100 + 5)
    ]
    index = SelectorIndex()
    bring_up_to_date(index, selectors, [MODEL], slices)
    assert all(index.evaluated(MODEL, of).matches == (1 << 100) - 1 for of in slices)
    assert len(selectors.asked) == 100 * len(slices)
    assert max(selectors.sizes) <= BATCH + 100


@pytest.mark.parametrize(
    ("expression", "driver"),
    [
        pytest.param('device.driver == "d"', "d", id="the-driver-alone"),
        pytest.param(" device.driver=='d'\n  && device.x", "d", id="a-conjunction"),
        pytest.param('device.driver == "d" || device.x', None, id="a-disjunction"),
        pytest.param('device.driver == "d" && device.x || true', None, id="disjunction-at-the-end"),
        pytest.param('device.driver == "d" && device.x ? true : true', None, id="a-condition"),
        pytest.param("true", None, id="no-driver"),
    ],
)
def test_the_only_driver_that_an_expression_can_select(expression, driver):
    assert only_driver(expression) == driver


@pytest.mark.parametrize(
    ("tolerable", "batches"),
    [
        pytest.param(3 * BATCH, 3, id="cheap"),
        pytest.param(BATCH + 5, 2, id="the-second-batch-is-too-much"),
        pytest.param(0, 1, id="the-first-device-is-too-much"),
    ],
)
def test_an_expression_that_is_too_expensive_for_a_batch_is_not_evaluated_further(
    tolerable, batches
):
    expensive = SelectorResult(unknown="too much", expensive=True)
    asked = []

    class Limited(Counting):
        def select(self, expression, devices, **_):
            begin = sum(asked)
            asked.append(len(devices))
            return [
                SelectorResult() if begin + i < tolerable else expensive
                for i in range(len(devices))
            ]

    outcomes = evaluate(Limited(), MODEL, [{}] * (3 * BATCH))
    assert len(asked) == batches
    assert len(outcomes) == 3 * BATCH
    assert sum(1 for each in outcomes if each is expensive) == 3 * BATCH - tolerable


def test_a_selector_of_one_driver_needs_nothing_of_the_slices_of_others():
    index = SelectorIndex()
    slices = [replace(published(card("d0"), name=each), driver=each) for each in ("d", "e")]
    index.learn({'device.driver == "e"': Reads()})
    needed = index.needed('device.driver == "e"', slices)
    assert [each["driver"] for each in needed.devices] == ["e"]
    index.store(needed, [SelectorResult(selected=True)])
    found = [index.evaluated('device.driver == "e"', each).matches for each in slices]
    assert found == [0, 1]
