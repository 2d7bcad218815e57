"""Pods whose selectors an evaluator does not answer for a while, on a virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from drakit_explain.cel.helper import HelperError, QuestionError
from drakit_explain.cel.library import Library
from drakit_explain.kinds import CLAIMS, CLASSES, PODS, SLICES
from drakit_explain.selectors import FeatureGates, Outcome, Reads, SelectorIndex
from drakit_explain.world import World
from drakit_operator.selecting import BUSY_SECONDS, BusyError, SelectorEvaluation
from tests.fakes.operator_reconciler import Bench, pod

pytestmark = pytest.mark.looptime

EXPENSIVE = "device.driver == 'poison'"


class Flaky(Library):
    """Evaluates, unless told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.broken_until = 0.0
        self.asked: list[str] = []
        self.gates: list[FeatureGates] = []

    def use(self, gates):
        self.gates.append(gates)

    def reads(self, expressions):
        self.asked += expressions
        return super().reads(expressions)

    def select(self, expression, devices):
        if expression == EXPENSIVE:
            raise QuestionError("two processes died")
        return super().select(expression, devices)


class Broken(Flaky):
    """Answers nothing until it is mended."""

    mended = False

    def reads(self, expressions):
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
    selectors.select = lambda expression, devices: asked.append(expression) or _refuse()
    evaluation = SelectorEvaluation(_world(), selectors)
    await evaluation.use(FeatureGates())
    for seconds in (300.0, 290.0):
        assert await evaluation.prepare([EXPENSIVE]) == pytest.approx(seconds, abs=0.1)
        assert asked == [EXPENSIVE]
        await asyncio.sleep(10)
    await asyncio.sleep(281)
    await evaluation.prepare([EXPENSIVE])
    assert asked == [EXPENSIVE] * 2


async def test_nothing_is_evaluated_before_the_gates_are_known():
    selectors = Flaky()
    evaluation = SelectorEvaluation(_world(), selectors)
    waiting = asyncio.create_task(evaluation.prepare(["true"]))
    await asyncio.sleep(2)
    assert not selectors.asked
    await evaluation.use(FeatureGates(list_attributes=False))
    assert await waiting is None
    assert selectors.gates == [FeatureGates(list_attributes=False)]


async def test_unknown_gates_count_as_on_after_five_seconds(looptime):
    selectors = Flaky()
    evaluation = SelectorEvaluation(_world(), selectors)
    assert await evaluation.prepare(["true"]) is None
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
    raise QuestionError("two processes died")


# ---------------------------------------------------------------- budgets


class Slow:
    """Every question takes some seconds by its own clock, and no time."""

    def __init__(self, seconds=6.0, outcome=None):
        self.outcome = outcome or Outcome(selected=True)
        self.seconds = seconds
        self.passed = 0.0
        self.asked = []

    def clock(self):
        return self.passed

    def use(self, gates):
        pass

    def reads(self, expressions):
        return [Reads(attributes=frozenset(["other/a"])) for _ in expressions]

    def select(self, expression, devices):
        self.asked.append(expression)
        self.passed += self.seconds
        return [self.outcome] * len(devices)


async def evaluation_with(slow):
    evaluation = SelectorEvaluation(_world(), slow, clock=slow.clock)
    await evaluation.use(FeatureGates())
    return evaluation


async def test_a_namespace_that_spent_its_time_waits_and_others_do_not():
    slow = Slow()
    evaluation = await evaluation_with(slow)
    assert await evaluation.prepare(["a", "b", "c", "d"], namespace="lab") == 12
    assert slow.asked == ["a", "b", "c"], "15 s are spent after the third"
    assert await evaluation.prepare(["d"], namespace="lab") == 12
    assert await evaluation.prepare(["a", "b"], namespace="lab") is None, "they are known"
    assert await evaluation.prepare(["e"], namespace="innocent") is None
    assert await evaluation.prepare(["of-a-class"]) is None
    await asyncio.sleep(12)
    assert await evaluation.prepare(["d"], namespace="lab") is None
    assert slow.asked == ["a", "b", "c", "e", "of-a-class", "d"]


async def test_a_selector_for_many_devices_does_not_spend_more_at_once():
    slow = Slow()
    evaluation = await evaluation_with(slow)
    for number in range(6):
        evaluation._world.apply(SLICES.project(large_slice(number), "v1"))
    assert await evaluation.prepare(["a"], namespace="lab") == 12
    assert slow.asked == ["a"] * 3
    await asyncio.sleep(100)
    assert await evaluation.prepare(["a"], namespace="lab") is None


def large_slice(number):
    pool = {"name": f"n{number}", "generation": 1, "resourceSliceCount": 1}
    devices = [
        {"name": f"d{each}", "attributes": {"a": {"int": 5000 * number + each}}}
        for each in range(2000)
    ]
    spec = {"driver": "other", "nodeName": f"n{number}", "pool": pool, "devices": devices}
    return {"metadata": {"name": f"s{number}", "uid": f"s{number}"}, "spec": spec}


async def test_an_evaluator_that_hangs_delays_one_namespace():
    slow = Slow(seconds=20)
    slow.select = lambda expression, devices: _hang(slow, expression)
    evaluation = await evaluation_with(slow)
    await evaluation.prepare(["a", "b", "c"], namespace="lab")
    assert slow.asked == ["a"]
    await evaluation.prepare(["e"], namespace="innocent")
    assert slow.asked == ["a", "e"]


async def test_one_object_of_a_namespace_waits_and_what_is_known_waits_for_nobody():
    slow = Slow(seconds=0)
    evaluation = await evaluation_with(slow)
    await evaluation.prepare(["known"], namespace="lab")
    async with asyncio.TaskGroup() as group, evaluation._turns.turn("hostile"):
        waits = group.create_task(evaluation.prepare(["a"], namespace="lab"))
        await asyncio.sleep(1)
        pauses = [await busy_seconds(evaluation, ["b"], namespace="lab") for _ in range(500)]
        assert pauses == sorted(set(pauses)), "each comes after the others"
        assert BUSY_SECONDS < pauses[0] < pauses[19] < 1 < 5 < pauses[-1] < 6
        assert await evaluation.prepare(["known"], namespace="lab") is None
    assert waits.result() is None
    assert slow.asked == ["known", "a"]


async def busy_seconds(evaluation, expressions, *, namespace):
    with pytest.raises(BusyError) as error:
        await evaluation.prepare(expressions, namespace=namespace)
    return error.value.retry_seconds


def _hang(slow, expression):
    slow.asked.append(expression)
    slow.passed += slow.seconds
    raise QuestionError("no answer in time")


async def test_a_selector_that_takes_too_long_is_remembered_by_its_text():
    slow = Slow(seconds=1, outcome=Outcome(unknown="it takes too much time", expensive=True))
    evaluation = await evaluation_with(slow)
    for number in range(5):
        changed = large_slice(number)
        evaluation._world.apply(SLICES.project(changed, "v1"))
        assert await evaluation.prepare(["a"], namespace=f"ns{number}") is None
    assert slow.asked == ["a"]
    found = evaluation._world.selectors.evaluated("a", evaluation._world.of(SLICES.type)["", "s4"])
    assert found.unknown == "it takes too much time"
    await asyncio.sleep(301)
    evaluation._world.apply(SLICES.project(large_slice(6), "v1"))
    await evaluation.prepare(["a"], namespace="lab")
    assert slow.asked == ["a"] * 2


async def test_an_object_with_too_many_selectors_costs_nothing():
    slow = Slow()
    evaluation = await evaluation_with(slow)
    many = [str(number) for number in range(65)]
    assert await evaluation.prepare(many, namespace="lab") is None
    assert (slow.asked, evaluation.lost(many)) == ([], False)


async def test_selectors_that_lost_their_room_are_lost():
    evaluation = await evaluation_with(Slow(seconds=0))
    await evaluation.prepare(["a"], namespace="lab")
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
    selector = {"cel": {"expression": "device.driver == 'x'"}}
    body["spec"]["devices"]["requests"][0]["exactly"]["selectors"] = [selector]
    bench.see(CLAIMS, body)
    bench.see(PODS, pod("pod-any", claim="any"))
    async with bench.running():
        await asyncio.sleep(10)
    assert not index.forgets
    assert told(bench).keys() == {"pod-any"}
