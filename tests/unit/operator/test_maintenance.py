"""DeviceMaintenances: what the operator writes for them, evicts and reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web

from drakit.testing.apiserver import FakeApiServer
from drakit_daemon.kube import Session, UnavailableError, connect
from drakit_daemon.kube.events import EventRecorder
from drakit_explain.devices import TaintFacts
from drakit_explain.maintenance import rule_name
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    DeviceID,
    MaintenanceFacts,
    ReportFacts,
    Share,
    SliceFacts,
    TaintRuleFacts,
)
from drakit_explain.projection import project_taint_rule
from drakit_explain.reports import MAINTENANCE, project_maintenance
from drakit_explain.world import Change, Name, World, name_of_fact
from drakit_formats import crds
from drakit_operator.affected import affected
from drakit_operator.announcing import CONTROLLER
from drakit_operator.maintenance import (
    CLOCK_SECONDS,
    EVICT_SECONDS,
    EVICTIONS,
    LISTED,
    POLL_SECONDS,
    WRITE_SECONDS,
    MaintenanceController,
)
from drakit_operator.statuses import OUTDATED_SECONDS, REFUSED_SECONDS
from tests.fakes.world import device, holding, slice_on, world_of

PATH = f"/apis/{crds.API_VERSION}/devicemaintenances/fix"
RULES = "/apis/resource.k8s.io/v1beta2/devicetaintrules"
THEN = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)
CAM = DeviceID("d", "n1", "cam")


def at(seconds: float) -> str:
    return (THEN + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


class Server(FakeApiServer):
    """An API server with evictions, which a budget may refuse."""

    budgets: tuple[str, ...] = ()
    on_eviction: Callable[[], object] = staticmethod(lambda: None)
    evicted: list[str]
    refused: dict[str, tuple[int, dict[str, str]]]
    """The status and the body of the response, by pod."""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if not request.path.endswith("/eviction") or request.method != "POST":
            return await super()._handle(request)
        self.requests.append((request.method, request.path))
        pod = request.path.split("/")[-2]
        body = await request.json()
        assert body["deleteOptions"]["preconditions"]["uid"] == pod
        if pod in self.refused:
            status, answer = self.refused[pod]
            return web.json_response(answer, status=status)
        if not self.budgets:
            self.evicted.append(pod)
            self.on_eviction()
            return web.json_response({"status": "Success"}, status=201)
        causes = [{"reason": "DisruptionBudget", "message": each} for each in self.budgets]
        status = {
            "kind": "Status",
            "reason": "TooManyRequests",
            "message": "Cannot evict pod as it would violate the pod's disruption budget.",
            "details": {"causes": causes},
        }
        return web.json_response(status, status=429)


class Cluster:
    """A controller, the API server that it writes to, and its world."""

    def __init__(self, server: Server, session: Session) -> None:
        self.server = server
        self.session = session
        slices = slice_on("n1", device("cam"), device("mic"), device("plug"))
        self.world: World = world_of(slices)
        self.at = 0.0
        self.wall = 0.0
        self.rules_version = "resource.k8s.io/v1beta2"
        self.rules_work = True
        self.is_followed = True
        self.restart()

    def restart(self) -> None:
        """Another replica leads."""
        self.controller = MaintenanceController(
            self.session,
            self.world,
            rules_version=lambda: self.rules_version,
            working_rules_version=lambda: self.rules_version if self.rules_work else "",
            recorder=EventRecorder(self.session, controller=CONTROLLER, instance="one"),
            is_followed=lambda: self.is_followed,
            now=lambda: THEN + timedelta(seconds=self.at + self.wall),
            clock=lambda: self.at,
        )

    async def create(self, *, mode: str = "Cordon", **spec: Any) -> None:
        spec = {"devices": {"device": "cam"}, "mode": mode} | spec
        self.server.store(PATH, {"metadata": {"uid": "uid-fix"}, "spec": spec})
        await self.see()

    async def change(self, **spec: Any) -> None:
        await self.session.patch(PATH, {"spec": spec})
        await self.see()

    async def see(self) -> None:
        """Store what the API server has of maintenances and rules."""
        maintenances = await self.session.list(PATH.rpartition("/")[0])
        rules = await self.session.list(RULES)
        self._replace(MaintenanceFacts, map(project_maintenance, maintenances.items))
        self._replace(TaintRuleFacts, map(project_taint_rule, rules.items))

    def _replace(self, kind: Any, facts: Iterable[Any]) -> None:
        for _ in self.world.replace(kind, list(facts)):
            pass

    async def refresh(self, *, seconds: float = WRITE_SECONDS) -> float | None:
        """Let time pass, see what there is, and reconcile."""
        self.at += seconds
        await self.see()
        return await self.controller.refresh("fix")

    async def settle(self) -> float | None:
        """Reconcile until nothing is written."""
        for _ in range(6):
            self.server.requests.clear()
            again = await self.refresh()
            if not self.writes():
                return again
        raise AssertionError("it writes again and again")

    def writes(self) -> list[str]:
        return [f"{method} {path}" for method, path in self.server.requests if method != "GET"]

    def rules(self) -> list[dict[str, Any]]:
        return self.server.objects(RULES)

    @property
    def status(self) -> dict[str, Any]:
        return (self.server.object(PATH) or {}).get("status") or {}

    def conditions(self) -> dict[str, tuple[str, str]]:
        found = self.status.get("conditions") or ()
        return {each["type"]: (each["status"], each["reason"]) for each in found}

    def message(self, kind: str) -> str:
        return next(each["message"] for each in self.status["conditions"] if each["type"] == kind)

    def events(self) -> set[tuple[str, str, str]]:
        """The type, reason and object of each Event."""
        listed = self.server.objects("/apis/events.k8s.io/v1/events")
        return {(each["type"], each["reason"], each["regarding"]["name"]) for each in listed}


@pytest.fixture
async def cluster(tmp_path):
    async with Server() as server:
        server.evicted, server.refused = [], {}
        async with await connect(server.write_kubeconfig(tmp_path), user_agent="test") as session:
            yield Cluster(server, session)


# ------------------------------------------------------------ cordon, and the end


async def test_cordon_taints_the_devices_and_evicts_nobody(cluster):
    cluster.world.apply(holding("c", "cam"))
    await cluster.create(reason="new lens")
    assert await cluster.settle() is None
    (rule,) = cluster.rules()
    assert rule["spec"] == {
        "deviceSelector": {"driver": "d", "pool": "n1", "device": "cam"},
        "taint": {"key": MAINTENANCE, "value": "fix", "effect": "NoSchedule"},
    }
    assert [each["uid"] for each in rule["metadata"]["ownerReferences"]] == ["uid-fix"]
    assert cluster.conditions() == {
        "Accepted": ("True", "Accepted"),
        "Tainted": ("True", "Tainted"),
        "Drained": ("False", "InUse"),
        "Ended": ("False", "Active"),
    }
    assert cluster.status["devices"] == [CAM._asdict()]
    assert (cluster.status["deviceCount"], cluster.status["pods"]) == (1, 1)
    assert cluster.status["taintedBy"] == "DeviceTaintRule"
    assert cluster.server.evicted == []
    assert ("Normal", "Tainted", "fix") in cluster.events()


async def test_the_devices_are_stored_before_anything_is_tainted(cluster):
    await cluster.create()
    await cluster.refresh()
    assert cluster.writes() == [f"PATCH {PATH}/status"]
    assert (cluster.status["devices"], cluster.rules()) == ([CAM._asdict()], [])


async def test_a_device_that_appears_later_does_not_join(cluster):
    await cluster.create(devices={"driver": "d"})
    await cluster.settle()
    cluster.world.apply(
        replace(slice_on("n1", device("late")), name="s-2", uid="s-2")  # in the same pool
    )
    await cluster.settle()
    assert len(cluster.rules()) == 3


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        pytest.param({"device": "gone"}, "NoDevices", id="nothing-matches"),
        pytest.param({}, "NoSelection", id="empty"),
        pytest.param({"class": "gone"}, "NoDevices", id="no-class"),
    ],
)
async def test_a_refused_selection_stays_refused_and_taints_nothing(cluster, devices, reason):
    await cluster.create(devices=devices)
    await cluster.settle()
    assert cluster.conditions() == {"Accepted": ("False", reason)}
    cluster.world.apply(slice_on("n2", device("gone")))
    assert await cluster.settle() is None
    assert cluster.rules() == []
    assert cluster.events() == {("Warning", "NotAccepted", "fix")}


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "created-again"])
async def test_a_deleted_maintenance_leaves_no_rule_even_if_it_was_orphaned(cluster, again):
    await cluster.create()
    await cluster.settle()
    (rule,) = cluster.rules()
    orphan = rule["metadata"]["name"]
    del rule["metadata"]["ownerReferences"]
    cluster.server.store(f"{RULES}/{orphan}", rule)
    taint = {"key": MAINTENANCE, "value": "fix", "effect": "NoSchedule"}
    for name in ("other", "fix-by-hand"):
        body = {"metadata": {"uid": name}, "spec": {"deviceSelector": {}, "taint": taint}}
        cluster.server.store(f"{RULES}/{name}", body)
    cluster.server.remove(PATH)
    if again:
        spec = {"devices": {"device": "gone"}, "mode": "Cordon"}
        cluster.server.store(PATH, {"metadata": {"uid": "uid-again"}, "spec": spec})
    await cluster.settle()
    assert {each["metadata"]["name"] for each in cluster.rules()} == {"other", "fix-by-hand"}


async def test_a_finalizer_of_others_does_not_keep_devices_tainted(cluster):
    await cluster.create()
    await cluster.settle()
    body = cluster.server.object(PATH)
    metadata = body["metadata"] | {"deletionTimestamp": at(0), "finalizers": ["example.com/keep"]}
    cluster.server.store(PATH, {**body, "metadata": metadata})
    await cluster.refresh()
    assert cluster.rules() == []


async def test_rules_stay_while_maintenances_are_not_followed(cluster):
    await cluster.create()
    await cluster.settle()
    cluster.server.requests.clear()
    cluster.is_followed = False
    cluster.world.remove(MaintenanceFacts, Name("", "fix"))
    assert await cluster.controller.refresh("fix") is None
    assert cluster.writes() == []


async def test_a_window_begins_and_ends(cluster):
    await cluster.create(window={"start": at(100), "end": at(200)})
    again = await cluster.settle()
    assert again is not None
    assert again <= CLOCK_SECONDS
    assert cluster.conditions()["Tainted"] == ("False", "Scheduled")
    assert cluster.status["phase"] == "Scheduled"
    assert cluster.rules() == []
    cluster.wall = 100
    await cluster.settle()
    assert cluster.conditions()["Tainted"] == ("True", "Tainted")
    cluster.wall = 200
    assert await cluster.settle() is None
    assert cluster.rules() == []
    assert cluster.conditions()["Ended"] == ("True", "WindowOver")
    events = cluster.server.objects("/apis/events.k8s.io/v1/events")
    assert sorted(each["reason"] for each in events) == ["Drained", "Ended", "Tainted"]
    cluster.wall = 0  # the clock steps back
    await cluster.settle()
    assert cluster.rules() == []
    assert cluster.conditions()["Ended"] == ("True", "WindowOver")


async def test_two_maintenances_of_one_device_have_rules_of_their_own(cluster):
    await cluster.create()
    await cluster.settle()
    one = project_maintenance(cluster.server.object(PATH))
    assert rule_name(one, CAM) != rule_name(replace(one, name="other", uid="other"), CAM)
    cluster.server.remove(PATH)
    cluster.server.store(f"{RULES}/other-0", {"metadata": {"uid": "o"}, "spec": RULE_OF_OTHER})
    await cluster.refresh()
    assert [each["metadata"]["name"] for each in cluster.rules()] == ["other-0"]


RULE_OF_OTHER = {
    "deviceSelector": CAM._asdict(),
    "taint": {"key": MAINTENANCE, "value": "other", "effect": "NoSchedule"},
}


async def test_a_new_leader_finishes_what_the_last_one_began(cluster):
    """The leader is killed after each of its requests in turn."""
    cluster.world.apply(holding("c", "cam"))
    await cluster.create(mode="Drain", devices={"driver": "d"})
    for _ in range(12):
        cluster.restart()
        cluster.at += WRITE_SECONDS
        await cluster.see()
        cluster.server.fail("*", "/", status=503, times=1)
        with suppress(UnavailableError):
            await cluster.controller.refresh("fix")
        cluster.server.heal()
        cluster.restart()
        await cluster.refresh()
    assert len(cluster.rules()) == 3
    assert cluster.server.evicted


# ------------------------------------------------------------ drain


async def test_drain_waits_for_the_taint_evicts_and_ends_without_users(cluster):
    claim = holding("c", "cam")
    neighbour = holding("n", "mic")
    cluster.world.apply(claim)
    cluster.world.apply(neighbour)
    await cluster.create(mode="Drain", reason="new lens")
    await cluster.refresh()
    await cluster.refresh()
    assert (len(cluster.rules()), cluster.server.evicted) == (1, []), "no rule is seen yet"
    assert await cluster.refresh() == POLL_SECONDS
    assert cluster.server.evicted == ["pod-c"]
    await cluster.refresh()
    assert cluster.server.evicted == ["pod-c"], "its grace period passes"
    assert cluster.conditions()["Drained"] == ("False", "Evicting")
    (blocker,) = cluster.status["blockers"]
    assert blocker["kind"] == "Pod"
    assert "is being evicted" in blocker["message"]
    cluster.world.remove(ClaimFacts, Name("lab", "c"))
    assert await cluster.settle() is None
    assert cluster.conditions()["Drained"] == ("True", "Drained")
    assert cluster.status["blockers"] == []
    assert {("Normal", "EvictedForMaintenance", "pod-c"), ("Normal", "Drained", "fix")} <= (
        cluster.events()
    )
    notes = [each["note"] for each in cluster.server.objects("/apis/events.k8s.io/v1/events")]
    assert all("new lens" in each for each in notes)


async def test_a_budget_that_never_yields_is_named_and_asked_ever_more_rarely(cluster):
    cluster.server.budgets = ("The disruption budget web needs 2 healthy pods and has 2 currently",)
    cluster.world.apply(holding("c", "cam"))
    await cluster.create(mode="Drain")
    for _ in range(5):
        await cluster.refresh()
    assert cluster.conditions()["Drained"] == ("False", "Blocked")
    (blocker,) = cluster.status["blockers"]
    assert "budget web needs 2 healthy pods" in blocker["message"]
    assert ("Warning", "NotDrained", "fix") in cluster.events()
    cluster.server.requests.clear()
    for _ in range(60):
        await cluster.refresh(seconds=10)
    asked = [each for each in cluster.writes() if each.endswith("/eviction")]
    assert len(asked) <= 600 / EVICT_SECONDS[1] + 2
    assert [each for each in cluster.writes() if "status" in each] == [], "nothing has changed"
    cluster.server.budgets = ()
    await cluster.refresh(seconds=EVICT_SECONDS[1])
    assert cluster.server.evicted == ["pod-c"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param((403, "Forbidden", "no"), "refuses its eviction", id="forbidden"),
        pytest.param((429, "TooManyRequests", "busy"), "delays its eviction", id="busy"),
        pytest.param((500, "InternalError", "two budgets"), "two budgets", id="two-budgets"),
        pytest.param((404, "NotFound", "gone"), "it is gone", id="gone"),
        pytest.param((409, "Conflict", "uid"), "it is gone", id="another-pod"),
    ],
)
async def test_a_refused_eviction_keeps_the_others_going(cluster, fault, words):
    status, reason, message = fault
    for name, of in (("a", "cam"), ("b", "mic")):
        cluster.world.apply(holding(name, of))
    await cluster.create(mode="Drain", devices={"driver": "d"})
    for _ in range(2):
        await cluster.refresh()
    body = {"kind": "Status", "reason": reason, "message": message}
    cluster.server.refused["pod-a"] = (status, body)
    await cluster.refresh()
    assert cluster.server.evicted == ["pod-b"]
    await cluster.refresh()
    blockers = {each["name"]: each["message"] for each in cluster.status["blockers"]}
    assert words in blockers["pod-a"]


async def test_evictions_stop_when_the_maintenance_is_deleted_meanwhile(cluster):
    for name, of in (("a", "cam"), ("b", "mic")):
        cluster.world.apply(holding(name, of))
    await cluster.create(mode="Drain", devices={"driver": "d"})
    for _ in range(2):
        await cluster.refresh()
    cluster.server.on_eviction = lambda: cluster.world.remove(MaintenanceFacts, Name("", "fix"))
    await cluster.refresh()
    assert cluster.server.evicted == ["pod-a"]


async def test_the_time_limit_ends_evictions_and_keeps_the_taint(cluster):
    cluster.server.budgets = ("budget",)
    cluster.world.apply(holding("c", "cam"))
    await cluster.create(mode="Drain", timeLimitSeconds=60)
    for _ in range(5):
        await cluster.refresh()
    cluster.at += 60
    assert await cluster.settle() is None
    assert cluster.conditions()["Drained"] == ("False", "TimeLimit")
    assert len(cluster.rules()) == 1
    cluster.server.budgets = ()
    await cluster.change(timeLimitSeconds=3600)
    await cluster.refresh()
    assert cluster.server.evicted == ["pod-c"]


async def test_a_cordon_can_become_a_drain_and_back(cluster):
    cluster.world.apply(holding("c", "cam"))
    await cluster.create()
    await cluster.settle()
    await cluster.change(mode="Drain")
    await cluster.refresh()
    assert cluster.server.evicted == ["pod-c"]
    await cluster.change(mode="Cordon")
    await cluster.settle()
    assert cluster.conditions()["Drained"] == ("False", "InUse")
    assert "drainStartTime" not in cluster.status


async def test_many_pods_are_evicted_in_rounds_and_few_are_listed(cluster):
    for index in range(EVICTIONS + 5):
        claim = holding(f"c{index:02}", "cam")
        cluster.world.apply(replace(claim, devices=(), shares=(Share(device=CAM),)))
    await cluster.create(mode="Drain")
    for _ in range(3):
        await cluster.refresh()
    assert len(cluster.server.evicted) == EVICTIONS
    await cluster.refresh()
    assert len(set(cluster.server.evicted)) == EVICTIONS + 5
    assert cluster.status["pods"] == EVICTIONS + 5
    assert len(cluster.status["blockers"]) == LISTED


# ------------------------------------------------------------ without DeviceTaintRules


@pytest.mark.parametrize("are_served", [False, True], ids=["absent", "served-but-ignored"])
async def test_without_rules_the_node_plugin_taints_and_foreign_drivers_are_unsupported(
    cluster, are_served
):
    cluster.rules_work = False
    if not are_served:
        cluster.rules_version = ""
    cluster.world.apply(holding("c", "cam"))
    await cluster.create(mode="Drain")
    await cluster.settle()
    assert cluster.conditions()["Tainted"] == ("False", "Unsupported")
    assert "DRADeviceTaintRules" in cluster.message("Tainted")
    assert cluster.server.evicted == [], "another pod would get the device"
    cluster.world.apply(ReportFacts(name="n1.d", uid="r", node="n1", driver="d"))
    await cluster.settle()
    assert cluster.conditions()["Tainted"] == ("False", "Progressing")
    assert (cluster.status["taintedBy"], cluster.status["phase"]) == ("NodePlugin", "Active")
    taint = TaintFacts(key=MAINTENANCE, effect="NoSchedule")
    cluster.world.apply(slice_on("n1", device("cam", taints=(taint,)), device("mic")))
    await cluster.refresh()
    assert cluster.server.evicted == ["pod-c"]
    assert cluster.rules() == []


async def test_without_permission_to_list_rules_the_conditions_name_it(cluster):
    cluster.world.apply(holding("c", "cam"))
    await cluster.create(mode="Drain", window={"end": at(1000)})
    cluster.rules_version = ""
    cluster.world.hidden = frozenset({TaintRuleFacts})
    await cluster.settle()
    assert cluster.conditions()["Tainted"] == ("False", "Refused")
    assert "no permission to list and watch DeviceTaintRules" in cluster.message("Tainted")
    assert cluster.status["taintedBy"] == "DeviceTaintRule", "the node plugin does not taint, too"
    assert cluster.server.evicted == []
    cluster.wall = 1000
    await cluster.settle()
    assert cluster.conditions()["Ended"] == ("False", "Ended"), "there may be rules"


async def test_rules_replace_the_taints_of_the_node_plugin_when_the_cluster_serves_them(cluster):
    cluster.rules_version = ""
    cluster.world.apply(ReportFacts(name="n1.d", uid="r", node="n1", driver="d"))
    await cluster.create()
    await cluster.settle()
    cluster.rules_version = "resource.k8s.io/v1beta2"
    await cluster.settle()
    assert cluster.status["taintedBy"] == "DeviceTaintRule"
    assert cluster.conditions()["Tainted"] == ("True", "Tainted")


# ------------------------------------------------------------ refusals, and pace


@pytest.mark.parametrize("status", [403, 409, 422, 429])
async def test_a_refused_rule_is_a_condition_and_is_tried_again_later(cluster, status):
    await cluster.create(mode="Drain")
    await cluster.refresh()
    cluster.server.fail("POST", RULES, status=status, message="a webhook says no", times=1000)
    for _ in range(5):  # whatever else changes
        assert await cluster.refresh() == REFUSED_SECONDS
        assert cluster.conditions()["Tainted"] == ("False", "Refused")
    assert "a webhook says no" in cluster.message("Tainted")
    assert cluster.writes().count(f"POST {RULES}") == 1
    cluster.server.heal()
    cluster.at += REFUSED_SECONDS
    await cluster.settle()
    assert cluster.conditions()["Tainted"] == ("True", "Tainted")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"deviceSelector": {"device": None}}, id="selector"),
        pytest.param({"taint": {"effect": "None"}}, id="effect"),
    ],
)
async def test_a_rule_that_another_client_changes_is_reported_and_not_fought_over(cluster, change):
    await cluster.create(mode="Drain", devices={"driver": "d"})
    await cluster.settle()
    rules = {each["spec"]["deviceSelector"]["device"]: each for each in cluster.rules()}
    path, other = (f"{RULES}/{rules[name]['metadata']['name']}" for name in ("cam", "mic"))
    await cluster.session.patch(path, {"spec": change})
    await cluster.session.delete(other)
    cluster.world.apply(holding("c", "cam"))
    await cluster.settle()
    assert cluster.server.object(other) is not None, "the others are maintained"
    assert cluster.server.evicted == [], "a pod that replaces it could get the device"
    assert cluster.conditions()["Tainted"] == ("False", "Refused")
    assert "changed by another client" in cluster.message("Tainted")
    await cluster.session.delete(path)
    await cluster.settle()
    assert cluster.conditions()["Tainted"] == ("True", "Tainted")


async def test_rules_that_another_client_deletes_are_created_again_but_not_in_a_hot_loop(cluster):
    await cluster.create()
    await cluster.settle()
    cluster.server.requests.clear()
    for _ in range(60):
        for rule in cluster.rules():
            cluster.server.remove(f"{RULES}/{rule['metadata']['name']}")
        await cluster.refresh(seconds=0.5)
    created = [each for each in cluster.writes() if each == f"POST {RULES}"]
    assert 2 <= len(created) <= 60 * 0.5 / WRITE_SECONDS + 1


async def test_no_status_is_written_twice_within_five_seconds_or_at_rest(cluster):
    await cluster.create(mode="Drain")
    for index in range(40):
        cluster.world.apply(holding(f"c{index}", "cam"))
        await cluster.refresh(seconds=0.5)
    writes = [each for each in cluster.writes() if each == f"PATCH {PATH}/status"]
    assert len(writes) <= 40 * 0.5 / WRITE_SECONDS + 1
    for name in list(cluster.world.of(ClaimFacts)):
        cluster.world.remove(ClaimFacts, name)
    await cluster.settle()
    cluster.server.requests.clear()
    for _ in range(5):
        await cluster.refresh()
    assert cluster.writes() == []


@pytest.mark.parametrize(
    ("status", "pause", "is_problem"),
    [(403, REFUSED_SECONDS, True), (422, REFUSED_SECONDS, True), (409, OUTDATED_SECONDS, False)],
)
async def test_a_status_that_is_not_written_is_written_later(cluster, status, pause, is_problem):
    await cluster.create()
    cluster.server.fail("PATCH", PATH, status=status, times=1)
    assert await cluster.refresh() == pause
    assert bool(cluster.controller.problem()) is is_problem
    assert cluster.events() == set()
    await cluster.settle()
    assert cluster.conditions()["Tainted"] == ("True", "Tainted")
    assert cluster.controller.problem() is None


async def test_a_mode_of_a_later_version_taints_nothing(cluster):
    await cluster.create(mode="Repair")
    await cluster.settle()
    assert cluster.conditions() == {"Accepted": ("Unknown", "UnknownMode")}
    assert cluster.rules() == []


async def test_selectors_of_a_class_are_evaluated_first(cluster):
    cluster.world.apply(ClassFacts(name="cams", uid="k", selectors=("device.driver == 'd'",)))
    await cluster.create(devices={"class": "cams"})
    assert cluster.controller.expressions("fix") == ["device.driver == 'd'"]
    wrote: list[Any] = []
    assert await cluster.controller.refresh("fix", write=wrote.append) == 0.0
    assert wrote == []
    await cluster.refresh()
    assert cluster.conditions() == {"Accepted": ("Unknown", "NotEvaluated")}


# ------------------------------------------------------------ what concerns a maintenance

FIX = MaintenanceFacts(
    name="fix", uid="u", generation=1, selection=project_maintenance({}).selection, devices=(CAM,)
)
RULE = TaintRuleFacts(
    name="fix-1", uid="r", taint=TaintFacts(key=MAINTENANCE, effect="NoSchedule", value="fix")
)


@pytest.mark.parametrize(
    ("old", "new", "concerned"),
    [
        pytest.param(None, holding("c", "cam"), True, id="claim-gets-the-device"),
        pytest.param(holding("c", "cam"), None, True, id="claim-releases-it"),
        pytest.param(None, holding("c", "mic"), False, id="claim-of-another-device"),
        pytest.param(None, slice_on("n1", device("cam")), True, id="device-is-published"),
        pytest.param(None, slice_on("n1", device("mic")), False, id="other-device-is-published"),
        pytest.param(None, RULE, True, id="rule"),
        pytest.param(RULE, None, True, id="rule-is-gone"),
        pytest.param(FIX, None, True, id="maintenance-is-gone"),
        pytest.param(FIX, replace(FIX, version="2"), False, id="own-status"),
        pytest.param(FIX, replace(FIX, deleting=True), True, id="maintenance-is-being-deleted"),
    ],
)
def test_what_concerns_a_maintenance(old, new, concerned):
    world = world_of(FIX, *([new] if new is not None and not isinstance(new, SliceFacts) else []))
    change = Change(name=name_of_fact(new or old), old=old, new=new)
    keys = {(each.concern, each.name.name) for each in affected([change], world)}
    assert (("maintenance", "fix") in keys) is concerned
