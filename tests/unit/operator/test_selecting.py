"""Pods whose selectors an evaluator does not answer for a while, on a virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from drakit_explain.cel.helper import HelperError, QuestionError
from drakit_explain.cel.library import Library
from drakit_explain.selectors import FeatureGates
from drakit_explain.world import World
from drakit_operator.kinds import CLAIMS, CLASSES, PODS, SLICES
from drakit_operator.selecting import SelectorEvaluation
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
