"""``kubectl drakit drivers``."""

from __future__ import annotations

import pytest


def table(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()]


@pytest.fixture
def fleet(site):
    """A driver that must run on two nodes, and runs on one; and one with nothing but a claim."""
    for node in ("n1", "n2"):
        site.node(node, labels={"gpu": "yes"})
    site.slice("s1", devices=[{"name": "a"}, {"name": "b"}])
    site.claim("mine", device="a", pod="user")
    since = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-11-29T10:00:00Z"}
    site.store(
        f"/apis/drakit.dev/v1beta1/devicedrivers/{site.driver}",
        {
            "spec": {"version": "1.2.3", "nodeSelector": {"matchLabels": {"gpu": "yes"}}},
            "status": {"conditions": [since]},
        },
    )
    return site


async def test_drivers_have_their_nodes_devices_and_problems(fleet, run):
    code, out, error = await run("drivers")
    assert (code, error) == (0, "")
    head, row, *rest = table(out)
    assert head[:4] == ["DRIVER", "VERSION", "NODES", "REGISTERED"]
    assert row == [
        *("gpu.example.com", "1.2.3", "2", "1", "1", "1", "0", "1", "1", "0"),
        *("PluginMissing", "2026-11-29T10:00:00Z"),
    ]
    assert rest[1] == ["Problems", "of", "gpu.example.com:"]
    assert "spec.nodeName=n2" in out
    assert (await run("drivers", "--fail-on=problem"))[0] == 1
    fleet.slice("s2", node="n2", pool={"name": "n2", "generation": 1, "resourceSliceCount": 1})
    code, out, _ = await run("drivers", "--fail-on=problem")
    assert (code, table(out)[1][-2:], len(table(out))) == (0, ["ready", "-"], 2)


async def test_programs_read_drivers(fleet, run):
    code, body = await run.json("drivers", "gpu.example.com")
    assert (code, body["kind"]) == (0, "DriverList")
    (driver,) = body["drivers"]
    assert driver["nodes"] == {"desired": 2, "registered": 1, "publishing": 1}
    assert driver["devices"]["allocated"] == 1
    (problem,) = driver["problems"]
    assert (problem["condition"], problem["subject"]) == ("Registered", "n2")


async def test_many_problems_of_a_driver_are_shown_on_request(fleet, run):
    for number in range(5):
        fleet.node(f"x{number}", labels={"gpu": "yes"})
    _, out, _ = await run("drivers")
    assert "and 3 more: run 'kubectl drakit drivers gpu.example.com'" in out
    _, out, _ = await run("drivers", "gpu.example.com")
    assert out.count("has no ResourceSlice of the driver") == 6


@pytest.mark.parametrize(
    ("path", "words"),
    [
        pytest.param("devicedrivers", "the nodes on which drivers must run", id="devicedrivers"),
        pytest.param("pods", "pods that wait for a driver are not counted", id="pods"),
    ],
)
async def test_a_permission_that_is_missing_is_named(fleet, run, path, words):
    fleet.forbid("/api/v1/pods" if path == "pods" else f"/apis/drakit.dev/v1beta1/{path}")
    code, out, _ = await run("drivers")
    assert (code, words in out) == (0, True)


@pytest.mark.parametrize(
    "path",
    ["/apis/resource.k8s.io/v1/resourceslices", "/apis/drakit.dev/v1beta1/nodedevicereports"],
)
async def test_no_driver_is_gone_whose_objects_may_not_be_listed(fleet, run, path):
    fleet.forbid(path)
    name = "none.example.com"
    fleet.store(f"/apis/drakit.dev/v1beta1/devicedrivers/{name}", {"spec": {"version": "1"}})
    _, out, _ = await run("drivers")
    assert "NotFound" not in out
    assert "delete" not in out
    assert "no permission to list" in out


async def test_an_unknown_driver_is_not_found(fleet, run):
    code, _, error = await run("drivers", "none")
    assert (code, error) == (5, 'error: no driver has the name "none"\n')


async def test_without_drivers_there_is_no_table(site, run):
    assert (await run("drivers"))[:2] == (0, "The cluster has no driver.\n")
