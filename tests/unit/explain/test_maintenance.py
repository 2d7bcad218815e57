"""A DeviceMaintenance in a world: its devices, rules, and what still uses the devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drakit_explain.allocation import NotEvaluatedError
from drakit_explain.cel.library import Library
from drakit_explain.devices import DeviceFacts, TaintFacts
from drakit_explain.maintenance import (
    MAX_DEVICES,
    MAX_MESSAGE,
    RefusedError,
    is_tainted,
    rule_facts,
    rule_of,
    rules_named,
    select,
    unsupported,
    uses,
)
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    Consumer,
    DeviceID,
    DeviceSelection,
    MaintenanceFacts,
    ReportFacts,
    Result,
    Share,
    SliceFacts,
    TaintRuleFacts,
    Toleration,
)
from drakit_explain.projection import project_taint_rule
from drakit_explain.reports import MAINTENANCE, project_maintenance
from drakit_explain.selectors import bring_up_to_date
from drakit_explain.world import Name, World
from tests.fakes.world import device, holding, on, slice_on, world_of

SMALL = ClassFacts(name="small", uid="small", selectors=('device.attributes["d"].size == "s"',))


def maintenance(*, devices: tuple[DeviceID, ...] = (), **selection: str) -> MaintenanceFacts:
    return MaintenanceFacts(
        name="fix",
        uid="uid-fix",
        generation=1,
        selection=DeviceSelection(**selection),
        mode="Drain",
        devices=devices,
    )


def two_nodes() -> World:
    """Two nodes with two devices each, and one device that both can use."""
    sizes = [device(f"cam-{size}", attributes={"size": size}) for size in "sl"]
    shared = SliceFacts(name="all", uid="all", driver="e", pool="net", devices=(device("vlan"),))
    return world_of(slice_on("n1", *sizes), slice_on("n2", *sizes), shared, SMALL)


CAM_S, CAM_L = DeviceID("d", "n1", "cam-s"), DeviceID("d", "n1", "cam-l")
CAM_S2, VLAN = DeviceID("d", "n2", "cam-s"), DeviceID("e", "net", "vlan")


# ------------------------------------------------------------ what is selected


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        pytest.param({"driver": "d"}, {"n1", "n2"}, id="driver"),
        pytest.param({"driver": "e"}, {"net"}, id="driver-without-a-node"),
        pytest.param({"pool": "n1"}, {"n1"}, id="pool"),
        pytest.param({"node": "n2"}, {"n2"}, id="node"),
        pytest.param({"device": "cam-s"}, {"n1", "n2"}, id="device-of-two-pools"),
        pytest.param({"device": "cam-s", "node": "n2"}, {"n2"}, id="device-on-a-node"),
        pytest.param({"device_class": "small"}, {"n1", "n2"}, id="class"),
        pytest.param({"device_class": "small", "pool": "n1"}, {"n1"}, id="class-in-a-pool"),
    ],
)
def test_all_names_of_a_selection_must_fit(selection, expected):
    world = two_nodes()
    bring_up_to_date(world.selectors, Library(), SMALL.selectors, list(world.slices()))
    found = select(maintenance(**selection), world)
    assert {each.pool for each in found} == expected
    assert list(found) == sorted(set(found))
    if "device_class" in selection:
        assert {each.device for each in found} == {"cam-s"}


@pytest.mark.parametrize(
    ("selection", "reason", "words"),
    [
        pytest.param({}, "NoSelection", "would select all devices", id="empty"),
        pytest.param({"device": "gone"}, "NoDevices", "device gone", id="no-device"),
        pytest.param({"device_class": "gone"}, "NoDevices", "gone does not exist", id="no-class"),
        pytest.param({"driver": "d", "node": "n3"}, "NoDevices", "driver d, node n3", id="no-node"),
    ],
)
def test_a_selection_without_devices_is_refused(selection, reason, words):
    with pytest.raises(RefusedError, match=words) as refused:
        select(maintenance(**selection), two_nodes())
    assert refused.value.reason == reason


@pytest.mark.parametrize("number", [MAX_DEVICES, MAX_DEVICES + 1])
def test_64_devices_are_accepted_and_65_are_refused_with_their_number(number):
    halves = [slice_on("n1", *(device(f"a{index}") for index in range(60)))]
    halves.append(slice_on("n2", *(device(f"b{index}") for index in range(number - 60))))
    if number == MAX_DEVICES:
        assert len(select(maintenance(driver="d"), world_of(*halves))) == number
        return
    with pytest.raises(RefusedError, match=r"65 devices .* can have at most 64") as refused:
        select(maintenance(driver="d"), world_of(*halves))
    assert refused.value.reason == "TooManyDevices"


def test_slices_of_an_older_generation_have_no_devices():
    old = slice_on("n1", device("old"))
    new = replace(old, name="new", generation=2, devices=(device("new"),))
    assert select(maintenance(pool="n1"), world_of(old, new)) == (DeviceID("d", "n1", "new"),)


def test_an_incomplete_pool_is_waited_for_unless_a_device_is_named():
    half = replace(slice_on("n1", device("a")), pool_slices=2)
    world = world_of(half, slice_on("n2", device("b")))
    for selection in ({"node": "n1"}, {"pool": "n1"}, {"driver": "d"}):
        with pytest.raises(NotEvaluatedError, match="pool n1 of driver d is incomplete"):
            select(maintenance(**selection), world)
    assert select(maintenance(node="n2"), world) == (DeviceID("d", "n2", "b"),)
    assert select(maintenance(device="a"), world) == (DeviceID("d", "n1", "a"),)


def test_devices_of_one_slice_can_be_on_several_nodes():
    devices = [replace(device(name), place=on(node)) for name, node in (("a", "n1"), ("b", "n2"))]
    of = SliceFacts(name="s", uid="s", driver="d", pool="p", by_device=True, devices=tuple(devices))
    assert select(maintenance(node="n2"), world_of(of)) == (DeviceID("d", "p", "b"),)


def test_a_class_whose_selectors_have_no_outcome_selects_nothing_yet():
    with pytest.raises(NotEvaluatedError):
        select(maintenance(device_class="small"), two_nodes())


# ------------------------------------------------------------ rules and taints


@pytest.mark.parametrize("missing", range(3))
def test_no_rule_lacks_driver_pool_or_device(missing):
    names = ["d", "n1", "cam-s"]
    names[missing] = ""
    with pytest.raises(ValueError, match="not one device"):
        rule_of(maintenance(), DeviceID(*names), api_version="resource.k8s.io/v1")


def test_a_rule_selects_one_device_and_is_owned_by_its_maintenance():
    world, of = two_nodes(), maintenance(devices=(CAM_S,))
    body = rule_of(of, CAM_S, api_version="resource.k8s.io/v1")
    rule = project_taint_rule({**body, "metadata": {**body["metadata"], "uid": ""}})
    assert rule == rule_facts(of, CAM_S)
    assert not is_tainted(of, CAM_S, world, by_rules=True)
    world.apply(rule)
    assert is_tainted(of, CAM_S, world, by_rules=True)
    every = (CAM_S, CAM_L, CAM_S2, VLAN)
    assert [each for each in every if rule.selects(each)] == [CAM_S]
    assert rules_named("fix", world) == [rule]
    assert rules_named("fi", world) == []
    again = replace(of, uid="another")
    assert not is_tainted(again, CAM_S, world, by_rules=True), "a new object has rules of its own"


@pytest.mark.parametrize(
    ("selector", "pools"),
    [
        pytest.param({"driver": "d", "pool": "n1", "device": "cam-s"}, {"n1"}, id="one-device"),
        pytest.param({"driver": "d", "pool": "n1"}, {"n1"}, id="pool"),
        pytest.param({"driver": "d"}, {"n1", "n2"}, id="driver"),
        pytest.param({"pool": "n2"}, {"n2"}, id="pool-of-any-driver"),
        pytest.param({"device": "cam-s"}, {"n1", "n2", "net"}, id="device-of-any-pool"),
        pytest.param({}, {"n1", "n2", "net"}, id="everything"),
    ],
)
def test_only_pools_that_a_rule_can_taint_have_it(selector, pools):
    world = two_nodes()
    taint = TaintFacts(key="a/b", effect="NoSchedule")
    world.apply(TaintRuleFacts(name="r", uid="r", taint=taint, **selector))
    known = {each.of_pool for each in world.slices()}
    assert {each.pool for each in known if world.rules_of_pool(each)} == pools
    tainted = [each for each in (CAM_S, CAM_L, CAM_S2) if world.taints(each, device(each.device))]
    assert all(each.pool in pools for each in tainted)
    assert (CAM_L in tainted) is ("device" not in selector and "n1" in pools)
    world.remove(TaintRuleFacts, Name("", "r"))
    assert not any(world.rules_of_pool(each) for each in known)


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        pytest.param(device("cam-s"), False, id="not-tainted"),
        pytest.param(
            device("cam-s", taints=(TaintFacts(key=MAINTENANCE, effect="NoSchedule"),)),
            True,
            id="tainted",
        ),
        pytest.param(
            device("cam-s", taints=(TaintFacts(key="example.com/hot", effect="NoSchedule"),)),
            False,
            id="tainted-for-another-reason",
        ),
        pytest.param(device("other"), True, id="not-published"),
    ],
)
def test_the_node_plugin_taints_in_the_slice(published: DeviceFacts, expected):
    of = maintenance(devices=(CAM_S,))
    assert is_tainted(of, CAM_S, world_of(slice_on("n1", published)), by_rules=False) is expected


def test_only_drivers_with_reports_can_be_tainted_without_rules():
    world = two_nodes()
    world.apply(ReportFacts(name="n1.d", uid="r", node="n1", driver="d"))
    assert unsupported((CAM_S, CAM_S2, VLAN), world) == [CAM_S2, VLAN]


# ------------------------------------------------------------ what uses the devices


def users(world: World, *devices: DeviceID) -> list[tuple[str, str]]:
    found = uses(maintenance(devices=devices), devices, world)
    return [(each.claim.name, each.pod.name if each.pod else "") for each in found]


ADMIN = ClaimFacts(
    namespace="lab",
    name="monitor",
    uid="monitor",
    allocated=True,
    results=(Result(request="r", device=CAM_S),),
    consumers=(Consumer("pods", "pod-monitor", "m"),),
)
SHARED = ClaimFacts(
    namespace="lab",
    name="part",
    uid="part",
    allocated=True,
    shares=(Share(device=CAM_S), Share(device=CAM_S)),
    consumers=(Consumer("pods", "a", "a"), Consumer("pods", "b", "b")),
)
EXTENDED = replace(holding("extended", "cam-s"), for_extended=True, owner_pod="pod-extended")


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([holding("c", "cam-s")], [("c", "pod-c")], id="claim"),
        pytest.param([holding("c", "cam-l")], [], id="neighbour-device"),
        pytest.param([EXTENDED], [("extended", "pod-extended")], id="extended-resource"),
        pytest.param([ADMIN], [], id="admin-access"),
        pytest.param([SHARED], [("part", "a"), ("part", "b")], id="shares-of-two-pods"),
        pytest.param([replace(holding("c", "cam-s"), consumers=())], [("c", "")], id="no-pod"),
    ],
)
def test_who_must_release_a_device(claims, expected):
    world = two_nodes()
    for each in claims:
        world.apply(each)
    assert users(world, CAM_S) == expected


@pytest.mark.parametrize(
    ("toleration", "stays"),
    [
        (Toleration(key=MAINTENANCE, operator="Exists"), True),
        (Toleration(key=MAINTENANCE, value="fix"), True),
        (Toleration(key=MAINTENANCE, value="other"), False),
        (Toleration(key=MAINTENANCE, operator="Exists", effect="NoExecute"), False),
    ],
)
def test_a_pod_that_tolerates_the_taint_may_test_the_device(toleration, stays):
    world = two_nodes()
    result = Result(request="r", device=CAM_S, tolerations=(toleration,))
    world.apply(replace(holding("c", "cam-s"), results=(result,)))
    assert (users(world, CAM_S) == []) is stays


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({}, "Pod", "it uses d/n1/cam-s (claim lab/c)"),
        ({"consumers": (Consumer("podgroups", "g", "g"),)}, "ResourceClaim", "podgroups g"),
        ({"consumers": ()}, "ResourceClaim", "no pod uses it"),
        (
            {"consumers": (), "deleting": True, "finalizers": ("example.com/keep",)},
            "ResourceClaim",
            "waits for finalizer example.com/keep",
        ),
    ],
)
def test_a_blocker_says_what_to_do(changes, kind, words):
    world = world_of(slice_on("n1", device("cam-s")), replace(holding("c", "cam-s"), **changes))
    (found,) = uses(maintenance(devices=(CAM_S,)), (CAM_S,), world)
    blocker = found.blocker()
    assert len(found.blocker("x" * 5000)["message"]) <= MAX_MESSAGE
    assert blocker["kind"] == kind
    assert words in blocker["message"]


# ------------------------------------------------------------ reading


def test_a_maintenance_is_read_from_json():
    body: dict[str, Any] = {
        "metadata": {"name": "fix", "uid": "u", "generation": 2, "resourceVersion": "7"},
        "spec": {
            "devices": {"class": "small", "node": "n1"},
            "mode": "Drain",
            "reason": "new\nlens",
            "window": {"start": "2026-01-01T00:00:00Z", "end": "2026-01-01T01:00:00Z"},
            "timeLimitSeconds": 600,
        },
        "status": {"devices": [CAM_S._asdict()]},
    }
    found = project_maintenance(body)
    assert found.selection == DeviceSelection(node="n1", device_class="small")
    assert str(found.selection) == "node n1, class small"
    assert (found.end - found.start, found.limit_seconds) == (3600, 600)
    assert found.devices == (CAM_S,)
    assert "\n" not in found.reason
    body["spec"]["window"] = {"start": "2026-01-01t00:00:00z", "end": "1970-01-01T00:00:00Z"}
    odd = project_maintenance(body)
    assert (odd.start, odd.end) == (found.start, 0.0)
    bare = project_maintenance({"metadata": {"name": "m"}, "spec": {"mode": "Cordon"}})
    assert (bare.start, bare.end, bare.limit_seconds) == (0.0, float("inf"), float("inf"))
