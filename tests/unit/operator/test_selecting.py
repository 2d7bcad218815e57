"""Pods whose selectors an evaluator does not answer for a while, on a virtual clock."""

from __future__ import annotations

import asyncio
import time

import pytest

from drakit_explain.cel.helper import HelperError, LateError, QueryError
from drakit_explain.cel.library import Library
from drakit_explain.kinds import CLAIMS, CLASSES, PODS, SLICES
from drakit_explain.selectors import FeatureGates, Reads, SelectorIndex, SelectorResult
from drakit_explain.world import World
from drakit_operator.selecting import SelectorEvaluation
from tests.fakes.operator_reconciler import Bench, pod

pytestmark = pytest.mark.looptime

EXPENSIVE = "'poison' == device.driver"


class Flaky(Library):
    """Evaluates, unless told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.broken_until = 0.0
        self.asked: list[str] = []
        self.gates: list[FeatureGates] = []

    def use(self, gates):
        self.gates.append(gates)

    def reads(self, expressions, **_):
        self.asked += expressions
        return super().reads(expressions)

    def select(self, expression, devices, **_):
        if expression == EXPENSIVE:
            raise QueryError("two processes died")
        return super().select(expression, devices)


class Broken(Flaky):
    """Answers nothing until it is mended."""

    mended = False

    def reads(self, expressions, **_):
        self.asked += expressions
        if not self.mended:
            raise HelperError("drakit-cel does not work", retry_seconds=4.0)
        return super().reads(expressions)


def device_class(name, expression):
    selector = {"cel": {"expression": expression}}
    return {"metadata": {"name": name, "uid": name}, "spec": {"selectors": [selector]}}


def claim(name):
    request = {"name": "r", "exactly": {"deviceClassName": name}}
    metadata = {"namespace": "lab", "name": name, "uid": f"claim-{name}"}
    return {"metadata": metadata, "spec": {"devices": {"requests": [request]}}}


def device_slice():
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "other", "nodeName": "n1", "pool": pool, "devices": [{"name": "d"}]}
    return {"metadata": {"name": "s", "uid": "s"}, "spec": spec}


def bench_with(selectors, **classes):
    """A slice, and a waiting pod with a claim for each class; no device is of their drivers."""
    bench = Bench(selectors=selectors)
    bench.see(SLICES, device_slice())
    for name, expression in classes.items():
        bench.see(CLASSES, device_class(name, expression))
        bench.see(CLAIMS, claim(name))
        bench.see(PODS, pod(f"pod-{name}", claim=name))
    return bench


def told(bench):
    return {name: code for _, name, code in bench.told if name.startswith("pod-")}


async def test_a_pod_is_explained_as_soon_as_the_evaluator_works_again():
    selectors = Broken()
    async with bench_with(selectors, plain="device.driver == 'x'").running() as bench:
        await asyncio.sleep(60)
        assert told(bench) == {}
        # For the pod and for its class.
        assert 10 < len(selectors.asked) < 40, "it is asked again after each pause, and no faster"
        selectors.mended = True
        await asyncio.sleep(5)
        assert told(bench) == {"pod-plain": "NoDevicePublished"}


async def test_a_selector_that_gets_no_answer_costs_only_the_pods_that_need_it():
    selectors = Flaky()
    async with bench_with(selectors, bad=EXPENSIVE, plain="device.driver == 'x'").running() as b:
        await asyncio.sleep(250)
        assert told(b) == {"pod-plain": "NoDevicePublished"}


async def test_a_selector_that_gets_no_answer_is_asked_again_after_minutes():
    selectors = Flaky()
    asked = []
    selectors.select = lambda expression, devices, **_: asked.append(expression) or _refuse()
    evaluation = SelectorEvaluation(_world(), selectors)
    await evaluation.use(FeatureGates())
    for seconds in (300.0, 290.0):
        await evaluated(evaluation, [EXPENSIVE])
        assert evaluation.missing([EXPENSIVE])[1] == pytest.approx(seconds, abs=0.1)
        assert asked == [EXPENSIVE]
        await asyncio.sleep(10)
    await asyncio.sleep(281)
    await evaluated(evaluation, [EXPENSIVE])
    assert asked == [EXPENSIVE] * 2


async def test_nothing_is_evaluated_before_the_gates_are_known():
    selectors = Flaky()
    evaluation = SelectorEvaluation(_world(), selectors)
    waiting = asyncio.create_task(evaluated(evaluation, ["true"]))
    await asyncio.sleep(2)
    assert not selectors.asked
    await evaluation.use(FeatureGates(list_attributes=False))
    await waiting
    assert selectors.gates == [FeatureGates(list_attributes=False)]


async def test_unknown_gates_count_as_on_after_five_seconds(looptime):
    selectors = Flaky()
    evaluation = SelectorEvaluation(_world(), selectors)
    await evaluated(evaluation, ["true"])
    assert 5 <= looptime < 6
    assert selectors.gates == [FeatureGates()]


async def test_gates_that_become_unknown_stay_in_force():
    selectors = Flaky()
    evaluation = SelectorEvaluation(_world(), selectors)
    assert not await evaluation.use(FeatureGates(list_attributes=False))
    assert not await evaluation.use(None)
    assert selectors.gates == [FeatureGates(list_attributes=False)]


async def test_a_change_of_gates_evaluates_everything_again():
    selectors = Flaky()
    async with bench_with(selectors, plain="device.driver == 'x'").running() as bench:
        await asyncio.sleep(10)
        before = len(selectors.asked)
        await bench.reconciler.use(FeatureGates(list_attributes=False))
        await asyncio.sleep(10)
        assert len(selectors.asked) == before + 1
        assert selectors.gates[-1] == FeatureGates(list_attributes=False)


def _world() -> World:
    world = World()
    world.apply(SLICES.project(device_slice(), "v1"))
    return world


def _refuse():
    raise QueryError("two processes died")


# ---------------------------------------------------------------- costs


class Slow:
    """Every question takes some milliseconds."""

    def __init__(self, milliseconds=0, outcome=None):
        self.outcome = outcome or SelectorResult(selected=True)
        self.milliseconds = milliseconds
        self.asked = []

    def use(self, gates):
        pass

    def reads(self, expressions, **_):
        return [Reads(attributes=frozenset(["other/a"])) for _ in expressions]

    def select(self, expression, devices, **_):
        self.asked.append(expression)
        time.sleep(self.milliseconds / 1000)
        return [self.outcome] * len(devices)


async def evaluation_with(slow):
    evaluation = SelectorEvaluation(_world(), slow)
    await evaluation.use(FeatureGates())
    return evaluation


async def test_a_question_is_about_one_selector_and_some_devices():
    slow = Slow()
    evaluation = await evaluation_with(slow)
    for number in range(6):
        evaluation._world.apply(SLICES.project(large_slice(number), "v1"))
    await evaluated(evaluation, ["a", "b"])
    assert sorted(slow.asked) == slow.asked
    assert set(slow.asked) == {"a", "b"}
    # Hundreds of devices a question; fewer on a busy machine, whose time the parts measure.
    assert len(slow.asked) < 2 * 12_000 / 100
    assert evaluation.missing(["a", "b"]) == (None, None)


class PerDevice(Slow):
    """Every device takes some milliseconds."""

    def select(self, expression, devices, **_):
        self.asked += [expression] * len(devices)
        time.sleep(self.milliseconds / 1000 * len(devices))
        return [self.outcome] * len(devices)


@pytest.mark.looptime(False)
async def test_a_selector_that_takes_long_is_evaluated_in_parts():
    slow = PerDevice(milliseconds=10)
    evaluation = await evaluation_with(slow)
    evaluation._world.apply(SLICES.project(large_slice(0, devices=20), "v1"))
    await evaluation.ask(evaluation.missing(["a"])[0], namespace="lab")  # what it reads
    for most in (12, 22):
        await evaluation.ask(evaluation.missing(["a"])[0], namespace="lab")
        assert 0 < len(slow.asked) <= most, "another object has a turn in between"
    await evaluated(evaluation, ["a"])
    assert 20 < len(slow.asked) < 25, "no device is evaluated again"


@pytest.mark.looptime(False)
async def test_a_selector_that_takes_long_in_sum_is_too_expensive():
    slow = PerDevice(milliseconds=20)
    evaluation = await evaluation_with(slow)
    evaluation._world.apply(SLICES.project(large_slice(0, devices=200), "v1"))
    await evaluated(evaluation, ["a"])
    assert len(slow.asked) < 60
    found = evaluation._world.selectors.evaluated("a", evaluation._world.of(SLICES.type)["", "s0"])
    assert found.unknown == "the selector takes too much time"


class Late(Slow):
    """Never answers in time."""

    def reads(self, expressions, *, seconds):
        self.asked.append((*expressions, seconds))
        raise LateError("the process did not respond in time")


async def test_who_asks_for_an_answer_that_does_not_come_has_paid_before_others_wait_long():
    late = Late()
    evaluation = await evaluation_with(late)
    for namespace in ("one", "two", "two", "one"):
        await evaluation.ask(evaluation.missing(["a"])[0], namespace=namespace)
    assert late.asked == [("a", each) for each in (0.25, 0.25, 0.25, 2.0)]
    assert evaluation.missing(["a"]) == (None, pytest.approx(300.0, abs=0.1))
    await asyncio.sleep(301)
    await evaluation.ask(evaluation.missing(["a"])[0], namespace="one")
    assert late.asked[-1] == ("a", 0.25)


async def test_an_answer_that_was_late_once_is_an_answer():
    late = Late()
    evaluation = await evaluation_with(late)
    await evaluation.ask(evaluation.missing(["a"])[0], namespace="one")
    evaluation._selectors = slow = Slow()
    await evaluated(evaluation, ["a"])
    assert slow.asked == ["a"]


async def evaluated(evaluation, expressions):
    """Ask until nothing is missing that the evaluator can be asked about."""
    while (missing := evaluation.missing(expressions)[0]) is not None:
        await evaluation.ask(missing, namespace="lab")


@pytest.mark.looptime(False)
async def test_a_pod_does_not_wait_for_the_selectors_of_busy_namespaces():
    slow = Slow(milliseconds=20)
    bench = Bench(selectors=slow)
    bench.see(SLICES, device_slice())
    bench.see(CLASSES, {"metadata": {"name": "any", "uid": "any"}, "spec": {}})
    for namespace in range(50):
        for number in range(20):
            see_pod(bench, f"busy{namespace}", str(number))
    async with bench.running():
        await asyncio.sleep(2)
        see_pod(bench, "innocent", "mine")
        before, began = len(slow.asked), time.monotonic()
        while not any("innocent" in each for each in slow.asked):
            await asyncio.sleep(0.01)
            assert time.monotonic() - began < 10
    others = [each for each in slow.asked[before:] if "innocent" not in each]
    debounced = 1.0 / 0.02
    assert len(others) < debounced + 5


async def test_more_classes_than_outcomes_have_room_are_evaluated_about_once(monkeypatch):
    monkeypatch.setattr("drakit_explain.selectors.MAX_EXPRESSIONS", 8)
    selectors = Flaky()
    classes = {f"c{number}": f"'{number}' == device.driver" for number in range(60)}
    bench = Bench(selectors=selectors)
    bench.see(SLICES, device_slice())
    for name, expression in classes.items():
        bench.see(CLASSES, device_class(name, expression))
    async with bench.running():
        await asyncio.sleep(30)
        assert set(selectors.asked) == set(classes.values())
        assert len(selectors.asked) < 2 * len(classes)


def see_pod(bench, namespace, name):
    """A pod that waits for a claim with a selector of its own."""
    body = claim("any")
    metadata = {"namespace": namespace, "name": name, "uid": f"{namespace}-{name}"}
    selector = {"cel": {"expression": f"'{namespace}-{name}' == device.driver"}}
    body["spec"]["devices"]["requests"][0]["exactly"]["selectors"] = [selector]
    bench.see(CLAIMS, body | {"metadata": metadata})
    bench.see(PODS, pod(claim=name) | {"metadata": metadata | {"uid": f"pod-{namespace}-{name}"}})


def large_slice(number, *, devices=2000):
    pool = {"name": f"n{number}", "generation": 1, "resourceSliceCount": 1}
    found = [
        {"name": f"d{each}", "attributes": {"a": {"int": 5000 * number + each}}}
        for each in range(devices)
    ]
    spec = {"driver": "other", "nodeName": f"n{number}", "pool": pool, "devices": found}
    return {"metadata": {"name": f"s{number}", "uid": f"s{number}"}, "spec": spec}


async def test_a_selector_that_takes_too_long_is_remembered_by_its_text():
    slow = Slow(outcome=SelectorResult(unknown="it takes too much time", expensive=True))
    evaluation = await evaluation_with(slow)
    for number in range(5):
        changed = large_slice(number)
        evaluation._world.apply(SLICES.project(changed, "v1"))
        await evaluated(evaluation, ["a"])
    assert slow.asked == ["a"]
    found = evaluation._world.selectors.evaluated("a", evaluation._world.of(SLICES.type)["", "s4"])
    assert found.unknown == "it takes too much time"
    await asyncio.sleep(301)
    evaluation._world.apply(SLICES.project(large_slice(6), "v1"))
    await evaluated(evaluation, ["a"])
    assert slow.asked == ["a"] * 2


async def test_an_object_with_too_many_selectors_costs_nothing():
    slow = Slow()
    evaluation = await evaluation_with(slow)
    many = [str(number) for number in range(65)]
    assert evaluation.missing(many) == (None, None)
    assert (slow.asked, evaluation.lost(many)) == ([], False)


async def test_selectors_that_lost_their_room_are_lost():
    evaluation = await evaluation_with(Slow())
    await evaluated(evaluation, ["a"])
    assert not evaluation.lost(["a"])
    evaluation._world.selectors.clear()
    assert evaluation.lost(["a"])


class Forgetful(SelectorIndex):
    """Drops the first outcomes, as if other objects needed their room."""

    forgets = True

    def store(self, needed, outcomes):
        super().store(needed, outcomes)
        if self.forgets:
            self.forgets = False
            self.clear()


async def test_a_pod_whose_selectors_lost_their_room_is_explained_soon():
    bench = Bench(selectors=Flaky())
    index = bench.store.world.selectors = Forgetful()
    bench.see(SLICES, device_slice())
    bench.see(CLASSES, {"metadata": {"name": "any", "uid": "any"}, "spec": {}})
    body = claim("any")
    selector = {"cel": {"expression": "'x' == device.driver"}}
    body["spec"]["devices"]["requests"][0]["exactly"]["selectors"] = [selector]
    bench.see(CLAIMS, body)
    bench.see(PODS, pod("pod-any", claim="any"))
    async with bench.running():
        await asyncio.sleep(10)
    assert not index.forgets
    assert told(bench).keys() == {"pod-any"}
