"""Events about claims, templates, classes and pools, from what a watch saw; on a virtual clock."""

import asyncio

import pytest

from drakit_explain.kinds import (
    CLAIMS,
    CLASSES,
    NODES,
    PODS,
    QUOTAS,
    REPORTS,
    RULES,
    SLICES,
    TEMPLATES,
)
from drakit_explain.model import ReportFacts, TaintRuleFacts
from drakit_explain.projection import project_template
from tests.fakes.operator_reconciler import GPU, Bench, pod, template

pytestmark = pytest.mark.looptime


NODE = {"metadata": {"name": "n1", "uid": "n1"}}
READY = {**NODE, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}


def claim(name, *, devices=(), pod="train"):
    """A claim, allocated if it has devices."""
    results = [{"request": "gpu", "driver": "d", "pool": "n1", "device": each} for each in devices]
    status = {
        "allocation": {"devices": {"results": results}},
        "reservedFor": [{"resource": "pods", "name": pod, "uid": pod}],
    }
    request = {"name": "gpu", "exactly": {"deviceClassName": "gpu.example"}}
    return {
        "metadata": {"namespace": "lab", "name": name, "uid": name},
        "spec": {"devices": {"requests": [request]}},
        "status": status if devices else {},
    }


def pool(name, *devices, slices=1, on="n1", **facts):
    return {
        "metadata": {"name": name, "uid": name},
        "spec": {
            "driver": "d",
            "nodeName": on,
            "pool": {"name": "n1", "generation": 1, "resourceSliceCount": slices},
            "devices": [{"name": each} | facts for each in devices],
        },
    }


def see_taken_device(bench, *free, holder="taken", namespace="lab"):
    """A class, and a node with the device `g0`, which a claim has, and free devices."""
    taken = claim(holder, devices=["g0"], pod=f"pod-{holder}")
    taken["metadata"]["namespace"] = namespace
    seen = ((CLASSES, GPU), (NODES, NODE), (SLICES, pool("s", "g0", *free)), (CLAIMS, taken))
    for kind, body in seen:
        bench.see(kind, body)


def by_object(told):
    """The Events, without their times."""
    return {(name, code) for _, name, code in told}


async def test_a_claim_is_reported_for_the_first_pod_that_waits_for_it():
    async with Bench().running() as bench:
        see_taken_device(bench)
        bench.see(CLAIMS, claim("shared"))
        for name in ("second", "first"):
            bench.see(PODS, pod(name, "shared"))
        await asyncio.sleep(10)
        assert by_object(bench.told) == {
            (name, "DevicesAllocated") for name in ("first", "second", "shared")
        }
        assert bench.notes["shared"].startswith(
            "ResourceClaim lab/shared is not allocated for pod first: "
        )
        remedy = (
            "; the pod would fit on node n1 if claim lab/taken (pod pod-taken) released its devices"
        )
        assert bench.notes["shared"].endswith(remedy)
        assert bench.notes["first"].endswith(remedy)
        bench.told.clear()
        bench.see(PODS, pod("first", "shared"), gone=True)
        await asyncio.sleep(70)
    assert [told[1:] for told in bench.told] == [("shared", "DevicesAllocated")]
    assert "for pod second: " in bench.notes["shared"]


@pytest.mark.parametrize(("hidden", "named"), [(ReportFacts, True), (TaintRuleFacts, False)])
async def test_a_remedy_is_named_unless_a_hidden_fact_may_prevent_it(hidden, named):
    async with Bench().running() as bench:
        bench.store.world.hidden = frozenset([hidden])
        see_taken_device(bench)
        bench.see(CLAIMS, claim("mine"))
        bench.see(PODS, pod("train", "mine"))
        await asyncio.sleep(10)
    assert ("the pod would fit on node n1" in bench.notes["train"]) is named


async def test_the_claim_without_devices_is_reported_and_not_the_others_of_the_pod():
    async with Bench().running() as bench:
        see_taken_device(bench, "g1", "g2")
        bench.see(CLAIMS, claim("taken-too", devices=["g1"], pod="pod-too"))
        big = claim("big")
        big["spec"]["devices"]["requests"][0]["exactly"]["count"] = 2
        bench.see(CLAIMS, big)
        bench.see(CLAIMS, claim("small"))
        both = pod("train", "big")
        both["spec"]["resourceClaims"].append({"name": "more", "resourceClaimName": "small"})
        bench.see(PODS, both)
        await asyncio.sleep(10)
    assert by_object(bench.told) == {("train", "DevicesAllocated"), ("big", "DevicesAllocated")}


async def test_the_event_of_a_claim_does_not_name_holders_of_other_namespaces():
    async with Bench().running() as bench:
        see_taken_device(bench, holder="secret", namespace="other")
        bench.see(CLAIMS, claim("mine"))
        bench.see(PODS, pod("train", "mine"))
        await asyncio.sleep(10)
    assert "a claim in another namespace" in bench.notes["mine"]
    assert not any("secret" in note for note in bench.notes.values())


@pytest.mark.parametrize(
    ("current", "name", "warned"),
    [
        pytest.param(True, "missing", True, id="no-class"),
        pytest.param(True, "gpu.example", False, id="a-node-has-a-device"),
        pytest.param(False, "missing", False, id="the-class-may-not-be-listed-yet"),
    ],
)
async def test_a_template_gets_a_warning_only_if_that_is_certain(current, name, warned):
    bench = Bench()
    see_taken_device(bench, "g1")
    bench.current = current
    found = await bench.reconciler.never_allocated(project_template(template(name), "v1"))
    assert bool(found) is warned
    for each in found:
        assert 'DeviceClass "missing"' in each


async def test_a_claim_of_a_template_gets_the_event_about_a_missing_class():
    async with Bench().running() as bench:
        made = claim("train-gpu")
        owner = {"kind": "Pod", "name": "train", "uid": "train", "controller": True}
        made["metadata"]["ownerReferences"] = [owner]
        bench.see(CLAIMS, made)
        await asyncio.sleep(10)
    assert by_object(bench.told) == {("train-gpu", "DeviceClassMissing")}


def made_for(name="train", **facts):
    """A pod with a claim that was made for it from a template."""
    owner = {"kind": "Pod", "name": name, "uid": name, "controller": True}
    made = claim(f"{name}-gpu", pod=name, **facts)
    made["metadata"]["ownerReferences"] = [owner]
    of = pod(name)
    of["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "tpl"}]
    statuses = [{"name": "gpu", "resourceClaimName": f"{name}-gpu"}]
    of["status"]["resourceClaimStatuses"] = statuses
    return of, made


def see_placed(bench):
    """A pod on n1 with the device `g0`, by a claim that was made for it."""
    placed, made = made_for(devices=["g0"])
    placed["spec"]["nodeName"] = "n1"
    bench.see(CLAIMS, made)
    bench.see(PODS, placed)
    return placed


async def test_a_quota_that_prevents_a_claim_is_reported_and_the_pod_explained_again_after_it():
    amounts = {"count/resourceclaims.resource.k8s.io": "1", "pods": "9"}
    quota = {
        "metadata": {"namespace": "lab", "name": "q", "uid": "q"},
        "status": {"hard": amounts, "used": amounts},
    }
    waits = pod()
    waits["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "tpl"}]
    async with Bench().running() as bench:
        for kind, body in ((CLASSES, GPU), (NODES, NODE), (TEMPLATES, template("gpu.example"))):
            bench.see(kind, body)
        bench.see(QUOTAS, quota)
        bench.see(PODS, waits)
        await asyncio.sleep(10)
        assert ("train", "QuotaExceeded") in by_object(bench.told)
        bench.told.clear()
        bench.see(QUOTAS, {**quota, "status": {"hard": amounts, "used": {"pods": "3"}}})
        await asyncio.sleep(10)
        assert ("train", "NoDevicePublished") in by_object(bench.told)


@pytest.mark.parametrize("has_class", [True, False])
async def test_a_pod_and_the_claim_that_was_made_for_it_do_not_get_one_sentence_twice(has_class):
    async with Bench().running() as bench:
        see_taken_device(bench)
        if not has_class:
            bench.see(CLASSES, GPU, gone=True)
        waiting, made = made_for()
        bench.see(CLAIMS, made)
        bench.see(PODS, waiting)
        await asyncio.sleep(400)
    assert by_object(bench.told) == {
        ("train", "DevicesAllocated" if has_class else "DeviceClassMissing")
    }


async def test_a_pod_that_waits_for_the_binding_of_its_claim_gets_the_only_event():
    async with Bench().running() as bench:
        bench.see(NODES, READY)
        bench.see(SLICES, pool("s", "g0"))
        waiting, made = made_for(devices=["g0"])
        (result,) = made["status"]["allocation"]["devices"]["results"]
        result["bindingConditions"] = ["attached"]
        bench.see(CLAIMS, made)
        bench.see(PODS, waiting)
        await asyncio.sleep(100)
        assert bench.told == [], "devices are attached in this time"
        await asyncio.sleep(300)
    assert by_object(bench.told) == {("train", "BindingConditionsOutstanding")}


async def test_a_claim_whose_pod_starts_is_reported_after_the_pod():
    async with Bench().running() as bench:
        bench.see(NODES, READY)
        unhealthy = {"key": "drakit.dev/unhealthy", "effect": "NoSchedule"}
        bench.see(SLICES, pool("s", "g0", taints=[unhealthy]))
        placed = see_placed(bench)
        await asyncio.sleep(400)
        assert by_object(bench.told) == {("train", "DeviceUnhealthy")}
        bench.see(PODS, placed, gone=True)  # it runs: the watch has pending pods only
        await asyncio.sleep(2)
    assert by_object(bench.told[1:]) == {("train-gpu", "DeviceUnhealthy")}


UNRESOLVABLE = "CDI device injection failed: unresolvable CDI devices a.io/claim=1-0"


@pytest.mark.parametrize(
    ("message", "codes"),
    [(UNRESOLVABLE, {("train", "PodNotStarted")}), ("no such image", set())],
    ids=["its-cause-is-known", "the-kubelet-reports-it"],
)
async def test_a_container_that_is_not_created_gets_the_remedy_if_it_lasts(message, codes):
    async with Bench().running() as bench:
        see_taken_device(bench, "g0")
        bench.see(NODES, READY)
        placed = see_placed(bench)
        waiting = {"reason": "CreateContainerError", "message": message}
        state = [{"name": "main", "state": {"waiting": waiting}}]
        bench.see(PODS, {**placed, "status": {**placed["status"], "containerStatuses": state}})
        await asyncio.sleep(25)
        assert bench.told == []
        await asyncio.sleep(25)
    assert by_object(bench.told) == codes
    assert not codes or "cdi_spec_dirs" in bench.notes["train"]


async def test_a_pod_is_not_to_be_recreated_while_the_watch_of_claims_lags():
    async with Bench().running() as bench:
        see_taken_device(bench, "g1")
        bench.see(NODES, READY)
        bench.see(CLAIMS, claim("mine"))
        bench.see(PODS, pod("train", "mine"))
        await asyncio.sleep(100)
        bench.told.clear()
        placed = pod("train", "mine")
        placed["spec"]["nodeName"] = "n1"
        bench.see(PODS, placed)
        await asyncio.sleep(20)
        bench.see(CLAIMS, claim("mine", devices=["g1"]))
        await asyncio.sleep(400)
    assert bench.told == []


def report(state="Registered", driver="d", **said):
    """The report of a driver on n1; `said` has its words about unhealthy devices."""
    unhealthy = [{"pool": "n1", "device": name, "message": text} for name, text in said.items()]
    registered = "True" if state == "Registered" else "False"
    condition = {"type": "Registered", "status": registered, "reason": state}
    return {
        "metadata": {"name": f"n1.{driver}", "uid": driver},
        "spec": {"nodeName": "n1", "driver": driver},
        "status": {"conditions": [condition], "unhealthyDevices": unhealthy},
    }


def unhealthy(*names, of=("g0", "g1")):
    """A pool of which some devices are unhealthy."""
    found = pool("s", *of)
    taint = {"key": "drakit.dev/unhealthy", "effect": "NoSchedule"}
    for each in found["spec"]["devices"]:
        each["taints"] = [taint] * (each["name"] in names)
    return found


async def test_a_claim_of_a_running_pod_is_reported_when_its_device_is_unhealthy():
    async with Bench().running() as bench:
        bench.see(NODES, NODE)
        bench.see(SLICES, pool("s", "g0", "g1"))
        bench.see(CLAIMS, claim("used", devices=["g0"]))
        bench.see(CLAIMS, claim("healthy", devices=["g1"]))
        await asyncio.sleep(10)
        assert bench.told == []
        bench.see(SLICES, unhealthy("g0"))
        await asyncio.sleep(2)
    assert by_object(bench.told) == {("used", "DeviceUnhealthy")}


GONE = [{"key": "drakit.dev/gone", "effect": "NoSchedule"}]


@pytest.mark.parametrize(
    ("slices", "seconds"),
    [
        pytest.param(pool("s", "g0", "g1", taints=GONE), 0.1, id="tainted"),
        pytest.param(pool("s", "g1"), 16, id="no-longer-published"),
        pytest.param(pool("s", "g1", slices=2), None, id="perhaps-in-a-slice-that-is-to-come"),
    ],
)
async def test_a_device_that_is_gone_is_reported_on_its_claim_and_on_the_pods_that_run(
    slices, seconds
):
    async with Bench().running() as bench:
        bench.see(NODES, NODE)
        bench.see(SLICES, pool("s", "g0", "g1"))
        bench.see(CLAIMS, claim("used", devices=["g0"]))
        await asyncio.sleep(10)
        bench.see(SLICES, slices)
        if seconds is None:
            await asyncio.sleep(200)
            assert by_object(bench.told) == set()
            return
        if seconds > 1:
            await asyncio.sleep(14)
            assert bench.told == []
        await asyncio.sleep(seconds)
        both = {("used", "DeviceGone"), ("train", "DeviceGone")}
        assert by_object(bench.told) == both
        assert "train is running, but device g0 (driver d," in bench.notes["train"]
        # The pod fails, and its claim goes.
        bench.see(CLAIMS, claim("used", devices=["g0"], pod="other"))
        await asyncio.sleep(100)
        assert by_object(bench.told) == both | {("other", "DeviceGone")}
        bench.see(CLAIMS, claim("used"), gone=True)
        await asyncio.sleep(100)
    assert not bench.reconciler._announcer._since.keys() & {"used", "train", "other"}


async def test_the_event_of_an_unhealthy_device_waits_for_the_words_of_its_driver():
    async with Bench().running() as bench:
        bench.see(NODES, NODE)
        bench.see(SLICES, unhealthy())
        for driver in ("d", "other"):
            bench.see(REPORTS, report(driver=driver))
        for name, its in (("one", "g0"), ("two", "g1")):
            bench.see(CLAIMS, claim(name, devices=[its]))
        await asyncio.sleep(10)
        bench.see(SLICES, unhealthy("g0", "g1"))
        bench.see(REPORTS, report(driver="other", g0="not mine"))
        await asyncio.sleep(10)
        assert bench.told == []
        bench.see(REPORTS, report(g0="the fan\nis loose"))
        await asyncio.sleep(1)
        assert by_object(bench.told) == {("one", "DeviceUnhealthy")}
        assert "is unhealthy (the fan is loose); check the device" in bench.notes["one"]
        await asyncio.sleep(10)  # a report that says nothing is not waited for
        assert by_object(bench.told) == {("one", "DeviceUnhealthy"), ("two", "DeviceUnhealthy")}
        assert "is unhealthy; check the device" in bench.notes["two"]
        bench.told.clear()
        bench.see(REPORTS, report(g0="it burns", g1="too hot"))
        await asyncio.sleep(70)
    assert [name for _, name, _ in sorted(bench.told)] == ["one", "two"]
    assert "is unhealthy (it burns)" in bench.notes["one"]
    assert "is unhealthy (too hot)" in bench.notes["two"]


async def test_a_pod_that_waits_for_an_unhealthy_device_gets_the_words_of_its_driver():
    async with Bench().running() as bench:
        bench.see(CLASSES, GPU)
        bench.see(NODES, READY)
        bench.see(SLICES, unhealthy("g0", "g1"))
        bench.see(REPORTS, report())
        bench.see(CLAIMS, claim("mine"))
        bench.see(PODS, pod("train", "mine"))
        await asyncio.sleep(10)
        assert "check the device; tolerate" not in bench.notes["train"]
        assert "of good health: check the device" in bench.notes["train"]
        bench.see(REPORTS, report(g0="no fan", g1="no link"))
        await asyncio.sleep(70)
        assert ": check the device (g0: no fan; g1: no link)" in bench.notes["train"]
        bench.told.clear()
        for number in range(20):  # other words about the same devices do not concern pods
            bench.see(REPORTS, report(g0=f"{number} degrees", g1="no link"))
            await asyncio.sleep(10)
    assert bench.told == []


async def test_a_pod_that_fits_where_its_driver_is_not_registered_is_reported_if_that_lasts():
    async with Bench().running() as bench:
        bench.see(CLASSES, GPU)
        bench.see(NODES, READY)
        bench.see(SLICES, pool("s", "g0", "g1"))
        bench.see(REPORTS, report("Rejected"))
        for name in ("one", "two"):
            bench.see(CLAIMS, claim(name))
            bench.see(PODS, pod(f"pod-{name}", name))
        await asyncio.sleep(250)
        assert bench.told == []
        await asyncio.sleep(100)
        assert by_object(bench.told) == {
            ("pod-one", "DriverUnavailable"),
            ("pod-two", "DriverUnavailable"),
        }
        assert bench.notes["pod-one"] == (
            "pod lab/pod-one fits on node n1, but cannot start there: driver d is not registered "
            "with the kubelet (Rejected); check the log of the node plugin on that node"
        )
        bench.told.clear()
        bench.see(REPORTS, report("Registered"))
        await asyncio.sleep(4000)
    assert bench.told == []


def rule(name, effect, device="g0"):
    return {
        "metadata": {"name": name, "uid": name},
        "spec": {
            "deviceSelector": {"driver": "d", "pool": "n1", "device": device},
            "taint": {"key": "service", "effect": effect},
        },
    }


async def test_claims_and_pods_are_explained_again_when_a_rule_changes_its_effect():
    async with Bench().running() as bench:
        bench.see(CLASSES, GPU)
        bench.see(NODES, READY)
        bench.see(SLICES, pool("s", "g0", "g1"))
        bench.see(RULES, rule("r0", "NoSchedule"))
        bench.see(RULES, rule("r1", "NoSchedule", device="g1"))
        bench.see(CLAIMS, claim("used", devices=["g0"]))
        bench.see(CLAIMS, claim("mine"))
        bench.see(PODS, pod("train", "mine"))
        await asyncio.sleep(10)
        assert by_object(bench.told) == {("train", "DevicesTainted"), ("mine", "DevicesTainted")}
        assert "DeviceTaintRules r0, r1 set a taint, which is " in bench.notes["train"]
        bench.told.clear()
        bench.see(RULES, rule("r0", "NoExecute"))
        await asyncio.sleep(2)
        assert by_object(bench.told) == {("used", "EvictionByDeviceTaint")}
        bench.see(RULES, rule("r1", "NoExecute", device="g1"))
        await asyncio.sleep(60)
    assert by_object(bench.told[1:]) == {("train", "DevicesTainted"), ("mine", "DevicesTainted")}
    assert "DeviceTaintRules r0, r1 set a taint, which is " in bench.notes["train"]


async def test_a_template_and_a_class_without_devices_are_reported_once_after_a_while():
    async with Bench().running() as bench:
        bench.see(CLASSES, GPU)
        bench.see(TEMPLATES, template("gpu.example"))
        await asyncio.sleep(7200)
    assert sorted(bench.told) == [
        (301.0, "gpu.example", "NoDevicePublished"),
        (301.0, "tpl", "NoDevicePublished"),
    ]


async def test_a_template_and_a_class_whose_driver_is_being_installed_get_no_event():
    async with Bench().running() as bench:
        bench.see(CLASSES, GPU)
        bench.see(TEMPLATES, template("gpu.example"))
        await asyncio.sleep(200)
        bench.see(NODES, NODE)
        bench.see(SLICES, pool("s", "g0"))
        await asyncio.sleep(7200)
    assert bench.told == []


async def test_a_node_is_reported_when_its_pool_stays_incomplete():
    async with Bench().running() as bench:
        bench.see(NODES, NODE)
        bench.see(SLICES, pool("a", "g0", slices=2))
        await asyncio.sleep(200)
        bench.see(SLICES, pool("b", "g1", slices=2))
        await asyncio.sleep(200)
        assert bench.told == []
        bench.see(SLICES, pool("b", "g1", slices=2), gone=True)
        await asyncio.sleep(310)
        assert by_object(bench.told) == {("n1", "PoolIncomplete")}


async def test_both_nodes_are_reported_when_they_publish_pools_of_one_name():
    async with Bench().running() as bench:
        for name in ("n1", "n2"):
            bench.see(NODES, {"metadata": {"name": name, "uid": name}})
            bench.see(SLICES, pool(f"of-{name}", "g0", on=name))
        await asyncio.sleep(310)
        assert by_object(bench.told) == {
            ("n1", "PoolNameConflict"),
            ("n2", "PoolNameConflict"),
        }


async def test_a_slice_is_reported_when_its_node_is_gone():
    async with Bench().running() as bench:
        for name in ("n1", "n2"):
            bench.see(NODES, {"metadata": {"name": name, "uid": name}})
        bench.see(SLICES, pool("s", "g0"))
        await asyncio.sleep(400)
        bench.see(NODES, NODE, gone=True)
        await asyncio.sleep(310)
        assert by_object(bench.told) == {("s", "NodeGone")}


async def test_the_pools_are_counted_for_the_metrics():
    bench = Bench()
    bench.see(NODES, NODE)
    bench.see(SLICES, pool("a", "g0", slices=2))
    bench.reconciler.measure()
    states = {
        sample.labels["state"]: sample.value
        for metric in bench.metrics.pools.collect()
        for sample in metric.samples
    }
    assert {state for state, number in states.items() if number} == {"incomplete"}
    assert states["ready"] == 0
    (objects,) = bench.metrics.objects.collect()
    sizes = {sample.labels["kind"]: sample.value for sample in objects.samples}
    assert {kind for kind, size in sizes.items() if size == 1} == {str(NODES), str(SLICES)}
    assert sizes["hostdevicepolicies.drakit.dev"] == 0
    bench.queue.close()


async def test_the_devices_are_counted_for_the_metrics():
    bench = Bench()
    for node in ("n1", "n2"):
        bench.see(NODES, {"metadata": {"name": node, "uid": node}})
    bench.see(SLICES, pool("a", "g0"))
    counting = asyncio.create_task(bench.reconciler.count_devices())
    await asyncio.sleep(1)
    assert values(bench.metrics.devices) == {
        ("d", "free"): 1,
        **{("d", state): 0 for state in ("allocated", "tainted", "unhealthy", "gone")},
    }
    bench.see(SLICES, pool("a", "g0"), gone=True)
    await asyncio.sleep(31)
    assert values(bench.metrics.devices) == {}
    counting.cancel()
    bench.queue.close()


def values(gauge):
    return {
        tuple(sample.labels.values()): sample.value
        for metric in gauge.collect()
        for sample in metric.samples
    }
