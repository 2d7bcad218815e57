"""``kubectl drakit cordon``, ``drain`` and ``uncordon``."""

from __future__ import annotations

import asyncio
import json

import pytest

from drakit_formats import crds
from tests.programs import needs_go

MAINTENANCES = f"/apis/{crds.API_VERSION}/devicemaintenances"
PODS = "/api/v1/namespaces/lab/pods"

RULES = {"name": "devicetaintrules", "kind": "DeviceTaintRule", "namespaced": False}


@pytest.fixture
def lab(site):
    """Two nodes with two devices each; three of them have claims."""
    site.runs("v1.37.1")
    site.texts["/apis/resource.k8s.io/v1"] = json.dumps({"resources": [RULES]})
    site.device_class("gpu")
    for node in ("n1", "n2"):
        site.node(node)
        site.slice(f"s-{node}", f"{node}-a", f"{node}-b", node=node)
    site.claim("one", device="n1-a", pod="train")
    site.claim("two", device="n1-b", pod="serve")
    site.claim("three", device="n2-a", pod="other", pool="n2")
    for name, claim in (("train", "one"), ("serve", "two"), ("other", "three")):
        running(site, name, claim)
    return site


def running(site, name, claim, *, controlled=True):
    owner = {"kind": "ReplicaSet", "name": "r", "uid": "r", "controller": True}
    site.store(
        f"{PODS}/{name}",
        {
            "metadata": {
                "uid": name,
                "labels": {"app": name},
                "ownerReferences": [owner] if controlled else [],
            },
            "spec": {
                "nodeName": "n1",
                "resourceClaims": [{"name": "gpu", "resourceClaimName": claim}],
            },
            "status": {"phase": "Running"},
        },
    )


def budget(site, app, allowed, name="web"):
    site.store(
        f"/apis/policy/v1/namespaces/lab/poddisruptionbudgets/{name}",
        {
            "spec": {"selector": {"matchLabels": {"app": app}}},
            "status": {"disruptionsAllowed": allowed},
        },
    )


def spec_of(site, name):
    return site.object(f"{MAINTENANCES}/{name}")["spec"]


def said(site, name, *conditions, **status):
    """The status that the operator writes."""
    body = site.object(f"{MAINTENANCES}/{name}")
    found = [
        {"type": kind, "status": state, "message": message, "observedGeneration": 1}
        for kind, state, message in conditions
    ]
    site.store(f"{MAINTENANCES}/{name}", {**body, "status": {"conditions": found, **status}})


# ------------------------------------------------------------ what is created


@pytest.mark.parametrize(
    ("words", "name", "spec"),
    [
        pytest.param(
            ["cordon", "n1-a"],
            *("cordon-n1-a", {"devices": {"device": "n1-a"}, "mode": "Cordon"}),
            id="device",
        ),
        pytest.param(
            ["drain", "gpu.example.com/n1/n1-a", "--reason=lens", "--time-limit=5m"],
            "drain-gpu-example-com-n1-n1-a",
            {
                "devices": {"driver": "gpu.example.com", "pool": "n1", "device": "n1-a"},
                "mode": "Drain",
                "reason": "lens",
                "timeLimitSeconds": 300,
            },
            id="all-names",
        ),
        pytest.param(
            ["cordon", "n1/n1-a", "--name=mine"],
            *("mine", {"devices": {"pool": "n1", "device": "n1-a"}, "mode": "Cordon"}),
            id="pool-and-name",
        ),
        pytest.param(
            ["drain", "--node=n2", "--class=gpu"],
            *("drain-n2-gpu", {"devices": {"node": "n2", "class": "gpu"}, "mode": "Drain"}),
            id="node-and-class",
        ),
    ],
)
async def test_a_maintenance_is_created(lab, run, words, name, spec):
    code, out, error = await run(*words)
    assert (code, error) == (0, "")
    assert f"devicemaintenance/{name} created" in out
    assert spec_of(lab, name) == spec


async def test_programs_get_the_name_of_a_maintenance(lab, run):
    name = "devicemaintenance.drakit.dev/cordon-n1\n"
    assert await run("cordon", "n1-a", "--name=cordon-n1", "-o", "name") == (0, name, "")
    assert await run("uncordon", "cordon-n1", "-o", "name") == (0, name, "")
    devices = "gpu.example.com/n1/n1-a\ngpu.example.com/n1/n1-b\n"
    code, out, _ = await run("cordon", "--node=n1", "--dry-run", "-o", "name")
    assert (code, out) == (0, devices)


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        pytest.param(["cordon"], 2, "name a device", id="no-selection"),
        pytest.param(["cordon", "n1-a", "--timeout=1s"], 2, "needs --wait", id="timeout"),
        pytest.param(["drain", "gone"], 5, "no published device has device gone", id="no-device"),
        pytest.param(["cordon", "--class=gone"], 5, "gone does not exist", id="no-class"),
    ],
)
async def test_what_is_refused_before_anything_is_created(lab, run, words, code, sentence):
    found, _, error = await run(*words)
    assert found == code
    assert sentence in error
    assert lab.objects(MAINTENANCES) == []


async def test_more_than_64_devices_are_refused_with_their_number(lab, run):
    lab.slice("many", *(f"d{number}" for number in range(65)), node="n3")
    code, _, error = await run("drain", "--pool=n3")
    assert code == 1
    assert "65 devices have pool n3" in error


async def test_a_name_that_is_taken_and_a_cluster_without_the_kind(lab, run):
    await run("cordon", "n1-a")
    code, _, error = await run("cordon", "n1-a")
    assert code == 1
    assert "kubectl drakit uncordon cordon-n1-a" in error
    lab.fail("POST", MAINTENANCES, status=404, reason="NotFound")
    code, _, error = await run("cordon", "n1-b")
    assert code == 1
    assert "set maintenance.enabled" in error


async def test_a_user_who_may_not_create_one_gets_the_api_servers_words(lab, run):
    lab.forbid(MAINTENANCES)
    code, _, error = await run("cordon", "n1-a")
    assert (code, "no" in error) == (3, True)


async def test_a_cordon_needs_no_more_than_slices_and_classes(lab, run):
    for path in ("/api/v1/nodes", PODS, "/apis/resource.k8s.io/v1/resourceclaims"):
        lab.forbid(path)
    assert (await run("cordon", "n1-a"))[0] == 0
    lab.forbid("/apis/resource.k8s.io/v1/deviceclasses")
    code, _, error = await run("cordon", "--class=gpu")
    assert code == 3
    assert "no permission to list DeviceClasses" in error


async def test_a_cordon_whose_devices_cannot_be_listed_has_the_reason(lab, run):
    path = "/apis/resource.k8s.io/v1/resourceslices"
    lab.fail("*", path, status=500, reason="No", message="the disk is full", times=100)
    code, _, error = await run("cordon", "n1-a")
    assert code == 3
    assert "the disk is full" in error
    assert "no permission" not in error


# ------------------------------------------------------------ the preview


@needs_go
async def test_a_preview_names_pods_budgets_and_where_they_fit(lab, run):
    budget(lab, "serve", 0)
    code, body = await run.json("drain", "--node=n1", "--dry-run")
    assert code == 1
    assert lab.objects(MAINTENANCES) == []
    assert body["devices"] == ["gpu.example.com/n1/n1-a", "gpu.example.com/n1/n1-b"]
    serve, train = body["blockers"]
    assert (serve["name"], serve["budgets"]) == ("serve", ["web allows no eviction now"])
    assert (train["name"], train["budgets"]) == ("train", [])
    # One device is free, and both pods need one: the first one gets it.
    assert serve["afterwards"] == "a new one fits on node n2"
    assert train["afterwards"].startswith("a new one waits: ")
    code, out, _ = await run("drain", "--node=n1", "--dry-run")
    assert code == 1
    assert "These pods use them, and would be evicted:" in out
    assert "it uses gpu.example.com/n1/n1-b (claim lab/two)" in out


@needs_go
async def test_a_preview_of_a_pod_without_a_controller(lab, run):
    running(lab, "train", "one", controlled=False)
    budget(lab, "train", 3)
    code, body = await run.json("drain", "n1-a", "--dry-run")
    assert code == 0
    (train,) = body["blockers"]
    assert train["budgets"] == ["web allows 3 evictions now"]
    assert train["afterwards"] == "no controller creates it again"


async def test_two_budgets_of_a_pod_block_it(lab, run):
    running(lab, "train", "one", controlled=False)
    for name in ("web", "all"):
        budget(lab, "train", 3, name)
    assert (await run.json("drain", "n1-a", "--dry-run"))[0] == 1


async def test_a_preview_of_a_cordon_and_of_a_free_device(lab, run):
    code, out, _ = await run("cordon", "n1-a", "--dry-run")
    assert code == 0
    assert "keep them until they end" in out
    code, out, _ = await run("drain", "n2-b", "--dry-run")
    assert code == 0
    assert "No claim holds them." in out


async def test_without_rules_devices_of_foreign_drivers_cannot_be_tainted(lab, run):
    lab.texts["/apis/resource.k8s.io/v1"] = "{}"
    code, body = await run.json("cordon", "n1-a", "--dry-run")
    assert (code, body["unsupported"]) == (1, ["gpu.example.com/n1/n1-a"])
    _, out, _ = await run("cordon", "n1-a", "--dry-run")
    assert "Not possible for 1 device of other drivers, gpu.example.com/n1/n1-a: the cluster" in out
    lab.report("n1")
    code, body = await run.json("cordon", "n1-a", "--dry-run")
    assert (code, body["unsupported"]) == (0, [])


async def test_pods_that_may_not_be_read_are_a_gap(lab, run):
    lab.forbid(PODS)
    _, body = await run.json("drain", "n1-a", "--dry-run")
    (gap,) = (each for each in body["notEvaluated"] if "no permission to read pods" in each)
    _, out, _ = await run("drain", "n1-a", "--dry-run")
    assert gap in out


async def test_claims_that_may_not_be_listed_are_a_gap(lab, run):
    lab.forbid("/apis/resource.k8s.io/v1/resourceclaims")
    _, out, _ = await run("cordon", "n1-a", "--dry-run")
    assert "no permission to list ResourceClaims" in out


# ------------------------------------------------------------ following, and the end


@pytest.mark.parametrize(
    ("words", "conditions", "code", "sentence"),
    [
        pytest.param(
            ["cordon", "n1-a"], [("Tainted", "True", "1 of 1")], 0, "1 of 1", id="tainted"
        ),
        pytest.param(
            ["drain", "n1-a"],
            [("Tainted", "True", "1 of 1"), ("Drained", "True", "no claim")],
            *(0, "no claim"),
            id="drained",
        ),
        pytest.param(["drain", "n1-a"], [("Accepted", "False", "no")], 1, "no", id="refused"),
        pytest.param(["drain", "n1-a"], [("Ended", "True", "over")], 1, "", id="ended"),
    ],
)
async def test_a_command_follows_its_maintenance(lab, run, words, conditions, code, sentence):
    waiting = asyncio.create_task(run(*words, "--wait", "--timeout=20s"))
    name = "-".join(words)
    while lab.object(f"{MAINTENANCES}/{name}") is None:
        await asyncio.sleep(0.05)
    said(lab, name, *conditions)
    found, out, _ = await waiting
    assert found == code
    assert sentence in out


async def test_at_the_end_of_its_time_a_command_names_what_blocks(lab, run):
    waiting = asyncio.create_task(run("drain", "n1-a", "--wait", "--timeout=1s"))
    while lab.object(f"{MAINTENANCES}/drain-n1-a") is None:
        await asyncio.sleep(0.05)
    blocker = {"namespace": "lab", "name": "train", "message": "budget web"}
    said(lab, "drain-n1-a", ("Drained", "False", "1 claim"), blockers=[blocker])
    code, out, _ = await waiting
    assert code == 1
    assert "lab/train: budget web" in out
    code, out, _ = await run("drain", "n1-b", "--wait", "--timeout=0s")
    assert code == 1
    assert "set maintenance.enabled" in out


async def test_uncordon_takes_a_maintenance_or_its_only_device(lab, run):
    device = {"driver": "gpu.example.com", "pool": "n1", "device": "n1-a"}
    both = [device, device | {"device": "n1-b"}]
    for name, devices in (("a-single", [device]), ("all", both)):
        lab.store(f"{MAINTENANCES}/{name}", {"spec": {}, "status": {"devices": devices}})
    code, _, error = await run("uncordon", "n1-a")
    assert code == 1
    assert "kubectl drakit uncordon all" in error
    assert len(lab.objects(MAINTENANCES)) == 2
    code, out, _ = await run("uncordon", "all")
    assert code == 0
    assert "devicemaintenance/all deleted" in out
    assert (await run("uncordon", "n1/n1-a"))[0] == 0
    assert lab.objects(MAINTENANCES) == []
    assert (await run("uncordon", "n1-a"))[0] == 5
