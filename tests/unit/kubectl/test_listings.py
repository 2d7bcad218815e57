"""``kubectl drakit devices``, ``claims`` and ``quota``."""

from __future__ import annotations

import copy
import re

import pytest
import yaml

API = "/apis/resource.k8s.io/v1"


def table(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()]


async def test_devices_are_counted_by_pool(site, run):
    site.node("n1")
    taint = {"key": "drakit.dev/unhealthy", "effect": "NoSchedule"}
    site.slice("s1", devices=[{"name": "a"}, {"name": "b"}, {"name": "c", "taints": [taint]}])
    site.claim("mine", device="a", pod="user")
    code, out, error = await run("devices")
    assert (code, error) == (0, "")
    head, row = out.splitlines()
    assert head.split()[:10] == [
        *("DRIVER", "POOL", "NODE", "DEVICES", "FREE"),
        *("ALLOCATED", "TAINTED", "UNHEALTHY", "GONE", "STATE"),
    ]
    wanted = ["gpu.example.com", "n1", "n1", "3", "1", "1", "0", "1", "0", "ready", "lab/mine"]
    assert row.split() == wanted


async def test_names_are_lines(site, run):
    for node in ("n1", "n2"):
        site.node(node)
        site.slice(f"s-{node}", "a", "b", node=node)
    site.claim("mine", device="a", pod="user")
    site.claim("other")
    devices = [f"gpu.example.com/{node}/{name}\n" for node in ("n1", "n2") for name in "ab"]
    assert await run("devices", "-o", "name") == (0, "".join(devices), "")
    assert await run("devices", "n1/a", "-o", "name") == (0, devices[0], "")
    claims = [f"resourceclaim.resource.k8s.io/{name}\n" for name in ("mine", "other")]
    assert await run("claims", "-o", "name") == (0, "".join(claims), "")
    assert await run("claims", "--device", "a", "-o", "name") == (0, claims[0], "")
    assert await run("drivers", "-o", "name") == (0, "gpu.example.com\n", "")


def taint(key: str) -> dict:
    return {"key": key, "effect": "NoSchedule"}


@pytest.fixture
def mixed(site):
    """Two pools with a device in each state, of which some are in two."""
    for node in ("n1", "n2"):
        site.node(node)
    site.slice(
        "s1",
        devices=[
            {"name": "free", "attributes": {"model": {"string": "x1"}, "ecc": {"bool": True}}},
            {"name": "held", "taints": [taint("example.com/hot")]},
            {"name": "sick", "taints": [taint("drakit.dev/unhealthy")]},
            {"name": "late", "taints": [taint("drakit.dev/stopped")]},
            {"name": "hot", "taints": [taint("example.com/hot")]},
            {"name": "ruled", "capacity": {"memory": {"value": "8Gi"}}},
        ],
    )
    site.slice(
        "s2",
        devices=[{"name": "free"}, {"name": "b", "taints": [taint("drakit.dev/gone")]}],
        node="n2",
    )
    site.claim("mine", device="held", pod="user")
    site.claim("ill", device="sick", pod="patient", namespace="elsewhere")
    site.claim("lost", device="away", pod="waiter")
    site.claim("orphan", device="a", pool="n3")
    site.served["resource.k8s.io"] = ["v1", "v1beta2"]
    rule = {"deviceSelector": {"device": "ruled"}, "taint": taint("example.com/repair")}
    site.store("/apis/resource.k8s.io/v1beta2/devicetaintrules/repair", {"spec": rule})
    return site


async def test_each_device_is_counted_once(mixed, run):
    _, body = await run.json("devices")
    names = ("count", "free", "allocated", "tainted", "unhealthy", "gone")
    assert {each["pool"]: [each[name] for name in names] for each in body["pools"]} == {
        "n1": [7, 1, 1, 2, 2, 1],
        "n2": [2, 1, 0, 0, 0, 1],
        "n3": [1, 0, 0, 0, 0, 1],
    }
    states = {each["name"]: each["state"] for each in body["pools"][0]["devices"]}
    assert states == {
        "free": "free",
        "held": "allocated",
        "sick": "unhealthy",
        "late": "unhealthy",
        "hot": "tainted",
        "ruled": "tainted",
        "away": "gone",
    }
    assert body["pools"][2]["state"] == "not published"
    for state, code in (("gone", 1), ("tainted", 1), ("unhealthy", 1)):
        assert (await run("devices", f"--fail-on={state}"))[0] == code
    assert (await run("devices", "n2", "--fail-on=tainted", "--fail-on=problem"))[0] == 0


@pytest.mark.parametrize(
    ("name", "pools"),
    [
        ("gpu.example.com", ["n1", "n2", "n3"]),
        ("n2", ["n2"]),
        ("gpu.example.com/n1", ["n1"]),
        ("free", ["n1", "n2"]),
    ],
)
async def test_a_name_selects_pools_or_devices(mixed, run, name, pools):
    code, body = await run.json("devices", name)
    assert (code, body["kind"]) == (0, "DeviceList")
    assert [each["pool"] for each in body["pools"]] == pools
    if name == "free":
        assert [[one["name"] for one in each["devices"]] for each in body["pools"]] == [
            ["free"]
        ] * 2


@pytest.mark.parametrize("name", ["n1/sick", "sick", "gpu.example.com/n1/sick"])
async def test_one_device_shows_who_uses_it(mixed, run, name):
    mixed.report("n1", sick="fan broken")
    code, out, _ = await run("devices", name)
    assert code == 0
    assert out.splitlines() == [
        "Device gpu.example.com/n1/sick",
        "  node: n1",
        "  state: unhealthy",
        "  message: fan broken",
        "  slice: s1",
        "",
        "Taints:",
        "  drakit.dev/unhealthy:NoSchedule, added by driver gpu.example.com",
        "",
        "USED BY CLAIM  PODS     ACCESS",
        "elsewhere/ill  patient  exclusive",
    ]


async def test_one_device_has_its_attributes_capacity_and_rules(mixed, run):
    _, body = await run.json("devices", "n1/free")
    assert (body["kind"], body["attributes"]) == ("Device", {"ecc": "true", "model": "x1"})
    assert (body["usedBy"], body["taints"]) == ([], [])
    _, body = await run.json("devices", "ruled")
    assert body["capacity"] == {"memory": "8Gi"}
    assert [(each["key"], each["addedBy"]) for each in body["taints"]] == [
        ("example.com/repair", "DeviceTaintRule repair")
    ]
    _, body = await run.json("devices", "away")
    assert (body["state"], body["resourceSlice"]) == ("gone", "")
    assert [each["pods"] for each in body["usedBy"]] == [["waiter"]]


async def test_an_unknown_device_is_not_found(mixed, run):
    code, out, error = await run("devices", "n9/free")
    assert (code, out) == (5, "")
    assert error == 'error: no driver, pool or device is named "n9/free"\n'


async def test_claims_of_one_device(mixed, run):
    mixed.claim("other", device="sick", pool="n2", namespace="elsewhere")
    code, out, _ = await run("claims", "--device", "n1/sick")
    assert (code, [row[:2] for row in table(out)[1:]]) == (0, [["elsewhere", "ill"]])
    _, body = await run.json("claims", "--device", "sick")
    assert [each["name"] for each in body["claims"]] == ["ill", "other"]
    _, out, _ = await run("claims", "--device", "gpu.example.com/n1/free")
    assert out == "No claims use gpu.example.com/n1/free.\n"


async def test_wide_shows_each_device(site, run):
    site.node("n1")
    site.slice("s1", "a", "b")
    site.claim("mine", device="a", pod="user")
    _, out, _ = await run("devices", "-o", "wide")
    assert table(out)[1:] == [
        ["gpu.example.com", "n1", "n1", "a", "allocated", "-", "lab/mine"],
        ["gpu.example.com", "n1", "n1", "b", "free", "-", "-"],
    ]


async def test_a_partition_whose_hardware_is_in_use_is_not_free(site, run):
    site.node("n1")
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 2}
    sets = [{"name": "card", "counters": {"slices": {"value": "2"}}}]
    site.slice("s1", pool=pool, sharedCounters=sets)

    def part(name: str, slices: str) -> dict:
        consumed = {"counterSet": "card", "counters": {"slices": {"value": slices}}}
        return {"name": name, "consumesCounters": [consumed]}

    devices = [part("whole", "2"), part("half-0", "1"), part("half-1", "1")]
    site.slice("s2", pool=pool, devices=devices)
    site.claim("mine", device="half-0", pod="user")
    _, body = await run.json("devices")
    (found,) = body["pools"]
    states = {each["name"]: each["state"] for each in found["devices"]}
    assert states == {"whole": "allocated", "half-0": "allocated", "half-1": "free"}
    assert [each["detail"] for each in found["devices"]] == ["hardware in use", "", ""]
    assert (found["free"], found["allocated"]) == (1, 2)


@pytest.fixture
def fridge(site):
    """A device with four slots, of which a pod has one and a group two."""
    site.node("n1")
    device = {
        "name": "fridge",
        "allowMultipleAllocations": True,
        "capacity": {"slots": {"value": "4"}},
    }
    site.slice("s1", devices=[device])
    for name, slots, (plural, user) in (
        ("a", "1", ("pods", "chef")),
        ("b", "2", ("podgroups", "band")),
    ):
        site.claim(name, device="fridge")
        share = {"shareID": name, "consumedCapacity": {"slots": slots}}
        path = f"/apis/resource.k8s.io/v1/namespaces/lab/resourceclaims/{name}"
        results = site.object(path)["status"]["allocation"]["devices"]["results"]
        allocation = {"devices": {"results": [{**results[0], **share}]}}
        reserved = [{"resource": plural, "name": user, "uid": user}]
        site.change(path, {"status": {"allocation": allocation, "reservedFor": reserved}})
    return site


async def test_the_shares_of_a_device_are_shown_with_what_is_left(fridge, run):
    _, out, _ = await run("devices")
    assert re.split(" {2,}", out.splitlines()[1])[-2:] == [
        "ready, 1 with shares left",
        "lab/a, lab/b",
    ]
    _, body = await run.json("devices")
    assert body["pools"][0]["devices"][0]["left"] == {"slots": "1"}
    _, out, _ = await run("devices", "-o", "wide")
    assert "allocated (shared; slots: 1 of 4 left)  -       lab/a, lab/b" in out
    _, out, _ = await run("devices", "fridge")
    assert "  state: allocated (shared; slots: 1 of 4 left)" in out.splitlines()
    assert [re.split(" {2,}", line) for line in out.splitlines()[-2:]] == [
        ["lab/a", "chef", "share (slots 1)"],
        ["lab/b", "podgroup band", "share (slots 2)"],
    ]
    _, out, _ = await run("claims")
    device = "gpu.example.com/n1/fridge"
    assert [re.split(" {2,}", line) for line in out.splitlines()[1:]] == [
        ["lab", "a", "in use", "n1", f"{device} (slots 1)", "chef"],
        ["lab", "b", "in use", "n1", f"{device} (slots 2)", "podgroup band"],
    ]
    _, body = await run.json("claims")
    assert body["claims"][0]["consumed"] == {device: {"slots": "1"}}
    _, out, _ = await run("explain", "claim/b")
    assert "It is reserved for podgroup band." in out


async def test_a_share_that_is_older_than_its_policy_is_a_holder(fridge, run):
    fridge.slice("s1", "fridge")
    fridge.claim("new", device="fridge", pod="cook")
    _, body = await run.json("devices")
    (device,) = body["pools"][0]["devices"]
    assert device["claims"] == ["lab/new", "lab/a", "lab/b"]
    _, out, _ = await run("devices", "fridge")
    assert [re.split(" {2,}", line)[2] for line in out.splitlines()[-3:]] == [
        "share (slots 1)",
        "share (slots 2)",
        "exclusive",
    ]


@pytest.mark.parametrize(
    ("spec", "state"),
    [
        pytest.param(
            {"pool": {"name": "n1", "generation": 1, "resourceSliceCount": 3}},
            "incomplete: 1 of 3 slices",
            id="slices-are-missing",
        ),
        pytest.param(
            {"devices": [{"name": "a"}, {"name": "a"}]},
            "invalid: two of its devices have the name a",
            id="a-pool-contradicts-itself",
        ),
        pytest.param({"nodeName": "gone"}, "node does not exist", id="the-node-is-gone"),
    ],
)
async def test_nothing_is_free_in_a_broken_pool(site, run, spec, state):
    site.node("n1")
    site.slice("s1", "a", **spec)
    code, body = await run.json("devices")
    (pool,) = body["pools"]
    assert (code, pool["state"], pool["free"]) == (0, state, 0)
    assert (await run("devices", "--fail-on", "problem"))[0] == 1
    assert (await run("devices", "--fail-on", "tainted", "--fail-on", "gone"))[0] == 0
    assert pool["unhealthy"] == pool["count"]


ZONE = {"key": "zone", "operator": "DoesNotExist"}


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        pytest.param({"nodeName": "", "allNodes": True}, "all", id="all-nodes"),
        pytest.param(
            {"nodeName": "", "nodeSelector": {"nodeSelectorTerms": [{"matchExpressions": [ZONE]}]}},
            "selected",
            id="selector",
        ),
        pytest.param({"nodeName": "", "perDeviceNodeSelection": True}, "by device", id="by-device"),
    ],
)
async def test_a_pool_of_several_nodes_is_one_row(site, run, spec, place):
    for name in ("n1", "n2"):
        site.node(name)
    site.slice("s1", "a", **spec)
    code, body = await run.json("devices")
    (pool,) = body["pools"]
    assert (code, pool["node"], pool["state"]) == (0, place, "ready")


async def test_without_nodes_no_node_is_gone(site, run):
    site.forbid("/api/v1/nodes")
    site.slice("s1", "a")
    code, body = await run.json("devices")
    assert (code, body["pools"][0]["state"]) == (0, "ready")
    assert body["notEvaluated"] == [
        "no permission to list nodes: node selectors, affinity, taints and resources of nodes "
        "are not checked"
    ]


async def test_without_slices_there_is_no_answer(site, run):
    site.forbid(f"{API}/resourceslices")
    code, out, error = await run("devices")
    assert (code, out, error) == (3, "", "error: no permission to list ResourceSlices\n")


async def test_no_devices_at_all(site, run):
    code, out, _ = await run("devices")
    assert (code, out) == (0, "No ResourceSlice publishes a device.\n")


async def test_claims_of_the_namespace(site, run):
    site.claim("free", device="a")
    site.claim("mine", device="b", pod="user")
    site.claim("waiting")
    site.claim("foreign", namespace="elsewhere")
    code, out, error = await run("claims")
    assert (code, error) == (0, "")
    assert table(out) == [
        ["NAMESPACE", "NAME", "STATE", "NODE", "DEVICES", "PODS"],
        ["lab", "free", "allocated", "n1", "gpu.example.com/n1/a", "-"],
        ["lab", "mine", "in", "use", "n1", "gpu.example.com/n1/b", "user"],
        ["lab", "waiting", "pending", "-", "-", "-"],
    ]
    assert ("GET", f"{API}/resourceclaims") not in site.requests


async def test_claims_of_all_namespaces(site, run):
    site.claim("mine")
    site.claim("foreign", namespace="elsewhere")
    _, body = await run.json("claims", "-A")
    names = [(each["namespace"], each["name"]) for each in body["claims"]]
    assert names == [("elsewhere", "foreign"), ("lab", "mine")]


async def test_all_namespaces_without_the_permission_shows_the_own_one(site, run):
    site.claim("mine")
    site.forbid(f"{API}/resourceclaims")
    code, out, _ = await run("claims", "-A", "-o", "wide")
    assert code == 0
    assert table(out)[1] == ["lab", "mine", "pending", "-", "-", "-", "gpu"]
    assert "no permission to list ResourceClaims of other namespaces" in out


@pytest.mark.parametrize(
    ("states", "code"), [(["pending"], 1), (["deleting"], 0), (["deleting", "pending"], 1)]
)
async def test_claims_in_a_state_can_be_a_failure(site, run, states, code):
    site.claim("free", device="a")
    site.claim("waiting")
    assert (await run("claims", *(f"--fail-on={each}" for each in states)))[0] == code


async def test_no_claims(site, run):
    assert (await run("claims"))[:2] == (0, "No claims in namespace lab.\n")


QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "gpu", "namespace": "lab"},
    "spec": {
        "hard": {
            "gpu.deviceclass.resource.k8s.io/devices": "2",
            "requests.deviceclass.resource.kubernetes.io/gpu": "2",
        }
    },
}


@pytest.mark.parametrize("extended", ["", "example.com/gpu"])
async def test_a_quota_counts_claims_and_extended_resources(site, run, extended):
    site.device_class("gpu")
    expected = copy.deepcopy(QUOTA)
    if extended:
        path = "/apis/resource.k8s.io/v1/deviceclasses/gpu"
        site.change(path, {"spec": {"extendedResourceName": extended}})
        expected["spec"]["hard"][f"requests.{extended}"] = "2"
    code, out, error = await run("quota", "gpu", "--devices=2")
    assert (code, yaml.safe_load(out), error) == (0, expected, "")
    assert await run.json("quota", "gpu", "--devices=2") == (0, expected)
    assert site.writes() == []


async def test_a_quota_needs_an_existing_class_and_a_number(site, run):
    site.device_class("gpu")
    code, out, error = await run("quota", "gpus", "--devices=1")
    assert (code, out, error) == (5, "", 'error: no DeviceClass has the name "gpus"\n')
    for devices in ("-1", "two"):
        with pytest.raises(SystemExit, match="2"):
            await run("quota", "gpu", f"--devices={devices}")
