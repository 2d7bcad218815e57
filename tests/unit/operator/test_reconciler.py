"""From the events of a watch to the reported Events, on a virtual clock."""

import asyncio

import pytest

from drakit_explain.codes import Code, Reason
from drakit_explain.kinds import CLAIMS, CLASSES, NODES, PODS, SLICES, TEMPLATES
from drakit_explain.model import NodeFacts
from drakit_explain.world import Change, Name, World
from drakit_operator.reconciler import COUNT_SECONDS
from drakit_operator.store import Store
from tests.fakes.operator_reconciler import GPU, Bench, pod, template
from tests.fakes.tasks import counted_turns

pytestmark = pytest.mark.looptime


async def test_a_pod_is_reported_after_a_second_however_often_it_is_seen():
    async with Bench().running() as bench:
        for _ in range(5):
            bench.see(PODS, pod())
            await asyncio.sleep(0.1)
        await asyncio.sleep(100)
    assert bench.told == [(1.0, "train", "ResourceClaimMissing")]


async def test_a_pod_that_is_gone_within_a_second_gets_no_event():
    async with Bench().running() as bench:
        bench.see(PODS, pod())
        await asyncio.sleep(0.9)
        bench.see(PODS, pod(), gone=True)
        await asyncio.sleep(100)
    assert bench.told == []


async def test_a_template_that_comes_before_its_class_gets_no_event():
    async with Bench().running() as bench:
        bench.see(TEMPLATES, template("gpu.example"))
        await asyncio.sleep(0.5)
        bench.see(CLASSES, GPU)
        await asyncio.sleep(10)
        assert bench.told == []
        bench.see(CLASSES, GPU, gone=True)
        await asyncio.sleep(10)
    assert bench.told == [(11.5, "tpl", "DeviceClassMissing")]


async def test_many_changes_at_once_cost_one_look_at_all_pods():
    class CountingWorld(World):
        looks = 0

        def waiting_pods(self):
            self.looks += 1
            return super().waiting_pods()

    store = Store()
    store.world = CountingWorld()
    bench = Bench(store=store)
    bench.see(PODS, pod())
    node = NodeFacts(name="n", uid="n", labels={})
    bench.reconciler.changed(
        [Change(name=Name("", str(number)), old=node, new=node) for number in range(1000)]
    )
    assert store.world.looks == 1
    assert len(bench.queue) == 1
    bench.queue.close()


async def test_one_object_is_judged_in_a_turn_of_the_loop_however_many_workers_there_are(
    monkeypatch,
):
    judged = []

    def judge(found, world, explainer, *, settled):
        judged.append(turns[0])
        return {}

    monkeypatch.setattr("drakit_operator.reconciler.problems_of_pod", judge)
    bench = Bench()
    for number in range(8):
        bench.see(PODS, pod(f"train-{number}"))
    await asyncio.sleep(1.5)  # all are due
    with counted_turns() as turns:
        tasks = [asyncio.create_task(bench.reconciler.work()) for _ in range(4)]
        while len(judged) < 8:
            await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    bench.queue.close()
    assert len(set(judged)) == 8, "the Lease is renewed in between"


async def test_a_remedy_is_searched_before_the_facts_of_the_judgment_can_change(monkeypatch):
    judged, searched = [], []

    def find_remedy():
        searched.append(turns[0])
        return ""

    def judge(found, world, explainer, *, settled):
        judged.append(turns[0])
        return {
            found.uid: [
                Reason(
                    code=Code.DEVICES_ALLOCATED,
                    sentence="it waits",
                    regarding=found.reference,
                    find_remedy=find_remedy,
                )
            ]
        }

    monkeypatch.setattr("drakit_operator.reconciler.problems_of_pod", judge)
    bench = Bench()
    bench.see(PODS, pod())
    await asyncio.sleep(1.5)
    with counted_turns() as turns:
        task = asyncio.create_task(bench.reconciler.work())
        while not bench.told:
            await asyncio.sleep(0)
    task.cancel()
    bench.queue.close()
    assert searched == judged != []


@pytest.mark.parametrize("busy", ["selectors", "problems", "remedy"])
async def test_a_namespace_that_keeps_the_loop_busy_is_behind_the_others(monkeypatch, busy):
    passed, checked = [0.0], []

    def work(namespace, part):
        passed[0] += 10 if (namespace, part) == ("tenant", busy) else 0
        return ""

    def expressions(explainer, pod):
        work(pod.namespace, "selectors")
        return []

    def check(found, world, explainer, *, settled):
        checked.append((found.namespace, found.name))
        work(found.namespace, "problems")
        waits = Reason(
            code=Code.DEVICES_ALLOCATED,
            sentence="it waits",
            regarding=found.reference,
            find_remedy=lambda: work(found.namespace, "remedy"),
        )
        return {found.uid: [waits]}

    monkeypatch.setattr("drakit_operator.reconciler.Explainer.expressions", expressions)
    monkeypatch.setattr("drakit_operator.reconciler.problems_of_pod", check)
    bench = Bench(clock=lambda: passed[0])
    for namespace in ("tenant", "lab"):
        for number in range(3):
            uid = f"{namespace}-{number}"
            metadata = {"namespace": namespace, "name": str(number), "uid": uid}
            bench.see(PODS, pod() | {"metadata": metadata})
    async with bench.running():
        await asyncio.sleep(5)
    assert checked == [
        ("tenant", "0"),
        *[("lab", str(number)) for number in range(3)],
        ("tenant", "1"),
        ("tenant", "2"),
    ]


async def test_a_claim_does_not_wait_for_the_pods_of_its_namespace(monkeypatch):
    passed, checked = [0.0], []

    def check(found, world, explainer, *, settled):
        passed[0] += 100
        return {}

    def check_claim(claim, world):
        checked.append(asyncio.get_running_loop().time())
        return {}

    monkeypatch.setattr("drakit_operator.reconciler.problems_of_pod", check)
    monkeypatch.setattr("drakit_operator.reconciler.problems_of_claim", check_claim)
    bench = Bench(clock=lambda: passed[0])
    bench.see(PODS, pod())
    async with bench.running():
        await asyncio.sleep(5)
        now = asyncio.get_running_loop().time()
        bench.see(CLAIMS, {"metadata": {"namespace": "lab", "name": "c", "uid": "c"}})
        await asyncio.sleep(1)
    assert checked == [now]


async def test_the_devices_of_a_class_or_policy_that_disappears_have_no_series():
    def series(bench):
        return {
            (next(iter(sample.labels.values())), sample.labels["state"]): sample.value
            for gauge in (bench.metrics.class_devices, bench.metrics.policy_devices)
            for metric in gauge.collect()
            for sample in metric.samples
            if sample.value
        }

    def devices(*policies):
        return host_slice({f"d{number}": each for number, each in enumerate(policies)})

    async with Bench().running() as bench:
        counting = asyncio.create_task(bench.reconciler.count_devices())
        for name in ("gpu.example", "nic.example"):
            bench.see(CLASSES, {"metadata": {"name": name, "uid": name}, "spec": {}})
        bench.see(NODES, {"metadata": {"name": "n1", "uid": "n1"}})
        bench.see(SLICES, devices("serial", "cameras", "serial"))
        await asyncio.sleep(COUNT_SECONDS + 1)
        both = {("gpu.example", "free"): 3, ("nic.example", "free"): 3}
        assert series(bench) == both | {("serial", "free"): 2, ("cameras", "free"): 1}
        nic = {"metadata": {"name": "nic.example", "uid": "nic.example"}}
        bench.see(CLASSES, nic, gone=True)
        bench.see(SLICES, devices("cameras"))
        await asyncio.sleep(COUNT_SECONDS + 1)
        assert series(bench) == {("gpu.example", "free"): 1, ("cameras", "free"): 1}
        counting.cancel()


async def test_the_wait_of_a_class_is_that_of_the_pod_that_has_waited_longest():
    def waits(bench, device_class):
        labels = {"device_class": device_class}
        names = ("drakit_operator_waiting_pods", "drakit_operator_longest_wait_seconds")
        return [bench.metrics.registry.get_sample_value(name, labels) for name in names]

    def wanting(name):
        spec = {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu"}}]}}
        return {"metadata": {"namespace": "lab", "name": name, "uid": f"c-{name}"}, "spec": spec}

    async with Bench().running() as bench:
        for name in ("gpu", "nic"):
            bench.see(CLASSES, {"metadata": {"name": name, "uid": name}, "spec": {}})
        for name in ("first", "second"):
            bench.see(CLAIMS, wanting(name))
        bench.see(PODS, pod("first", "first"))
        counting = asyncio.create_task(bench.reconciler.count_devices())
        await asyncio.sleep(1)
        assert waits(bench, "gpu") == [1, 0]
        bench.see(PODS, pod("second", "second"))
        await asyncio.sleep(2 * COUNT_SECONDS)
        assert waits(bench, "gpu") == [2, 2 * COUNT_SECONDS]
        assert waits(bench, "nic") == [0, 0]
        bench.see(PODS, pod("first", "first"), gone=True)
        await asyncio.sleep(COUNT_SECONDS)
        assert waits(bench, "gpu") == [1, 2 * COUNT_SECONDS]
        bench.see(PODS, pod("second", "second"), gone=True)
        bench.see(CLASSES, {"metadata": {"name": "nic", "uid": "nic"}}, gone=True)
        await asyncio.sleep(COUNT_SECONDS)
        assert waits(bench, "gpu") == [0, 0]
        assert waits(bench, "nic") == [None, None]
        counting.cancel()


def host_slice(policies):
    """A slice of node `n1` with host devices by name, each of a policy."""
    return {
        "metadata": {"name": "s", "uid": "s"},
        "spec": {
            "driver": "hostdev.drakit.dev",
            "nodeName": "n1",
            "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
            "devices": [
                {"name": name, "attributes": {"policy": {"string": policy}}}
                for name, policy in policies.items()
            ],
        },
    }
