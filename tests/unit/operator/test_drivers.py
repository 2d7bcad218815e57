"""DeviceDrivers: created for each driver, with a status that follows the cluster, and Events."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import yaml

from drakit_daemon.kube import ApiError, connect
from drakit_daemon.kube.events import EventRecorder
from drakit_explain import kinds
from drakit_explain.drivers import CONDITIONS
from drakit_explain.kinds import DRIVERS
from drakit_explain.model import DriverFacts, ReportFacts, TaintRuleFacts
from drakit_explain.projection import project_taint_rule
from drakit_explain.reports import project_driver
from drakit_explain.world import Name
from drakit_formats import crds
from drakit_operator.drivers import (
    LASTING_SECONDS,
    LISTED,
    MAX_TAINTED,
    PASS_SECONDS,
    REFUSED_SECONDS,
    UNSEEN_SECONDS,
    DriverController,
)
from drakit_operator.metrics import Metrics
from drakit_operator.store import Store
from tests.fakes.world import device, node, slice_on
from tests.unit.crds.test_versions import ROOT
from tests.unit.explain.test_drivers import held, report

PATH = f"/apis/{crds.API_VERSION}/devicedrivers/d"
THEN = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)
RULES = "/apis/resource.k8s.io/v1beta2/devicetaintrules"
N1, S1 = node("n1"), slice_on("n1", device("a"))
BROKEN = replace(S1, pool_slices=2)


class Site:
    """A cluster whose facts a test sets, and the controller on a clock of its own."""

    def __init__(self, server, session):
        self.server, self.session = server, session
        self.at = 0.0
        self.served = True
        self.rules = "resource.k8s.io/v1beta2"
        self.devices = {}
        self.metrics = Metrics()
        self.store = Store()
        self.start()

    def start(self):
        """Start the controller of a new leader."""
        self.controller = DriverController(
            self.session,
            self.store.world,
            recorder=EventRecorder(
                self.session, controller="drakit.dev/operator", instance="operator-0"
            ),
            metrics=self.metrics,
            devices=lambda: self.devices,
            is_current=lambda: self.served,
            rules_version=None if self.rules is None else lambda: self.rules,
            now=lambda: THEN + timedelta(seconds=self.at),
            clock=lambda: self.at,
        )

    def see(self, *facts):
        for each in facts:
            self.store.world.apply(each)

    def lose(self, *facts):
        for each in facts:
            self.store.world.remove(type(each), Name(each.in_namespace, each.name))

    def specify(self, **spec):
        """Write the DeviceDriver as a chart does."""
        self.server.store(PATH, {"spec": spec, "metadata": {"uid": "d", "generation": 1}})
        self.watch()

    def watch(self):
        """Read the DeviceDriver into the store, or see that it is gone."""
        body = self.server.object(PATH)
        facts = [project_driver(body)] if body else []
        for _ in self.store.replace(DRIVERS, facts):
            pass

    def watch_rules(self):
        """Read the DeviceTaintRules into the store."""
        found = [project_taint_rule(each) for each in self.server.objects(RULES)]
        for _ in self.store.replace(kinds.RULES, found):
            pass
        return sorted(each.device for each in found)

    async def refresh(self, *, seconds=PASS_SECONDS):
        self.at += seconds
        return await self.controller.refresh("")

    async def settle(self):
        """Pass until nothing is due, as the queue does."""
        while (again := await self.refresh()) is not None and again < UNSEEN_SECONDS / 2:
            self.at += again - PASS_SECONDS

    @property
    def status(self):
        return self.server.object(PATH)["status"]

    def conditions(self):
        return {
            each["type"]: (each["status"], each["reason"]) for each in self.status["conditions"]
        }

    def writes(self):
        return [each for each in self.server.writes() if "/events" not in each[1]]

    def events(self):
        events = self.server.objects("/apis/events.k8s.io/v1/events")
        return [(each["type"], each["reason"]) for each in events]


@pytest.fixture
async def site(cluster, tmp_path):
    cluster.watch_lists = True
    async with await connect(cluster.write_kubeconfig(tmp_path), user_agent="t") as session:
        yield Site(cluster, session)


GOOD = {
    "Ready": ("True", "Ready"),
    "Installed": ("True", "Installed"),
    "Registered": ("True", "Registered"),
    "Publishing": ("True", "Published"),
    "ClaimsProgressing": ("True", "Progressing"),
    "ClaimsReleased": ("True", "Released"),
}


async def test_a_driver_gets_an_object_and_a_status_and_no_write_at_rest(site):
    site.see(N1, S1)
    site.devices = {"d": Counter(free=1, allocated=0)}
    assert await site.refresh() == PASS_SECONDS
    assert await site.refresh() is None
    body = site.server.object(PATH)
    assert body["metadata"]["labels"] == {"app.kubernetes.io/managed-by": "drakit-operator"}
    assert site.conditions() == GOOD
    assert site.status["nodes"] == {"desired": 1, "registered": 1, "publishing": 1}
    assert site.status["pools"] == {"total": 1, "incomplete": 0, "empty": 0}
    assert site.status["devices"] == {"free": 1, "allocated": 0}
    assert len(site.writes()) == 2
    for _ in range(3):
        await site.refresh()
    assert (len(site.writes()), site.events()) == (2, [])


async def test_the_status_has_the_fields_of_the_definition(site):
    site.see(N1, BROKEN, held("mine", consumers=0))
    site.devices = {"d": Counter(dict.fromkeys(("free", "allocated", "tainted"), 1), gone=0)}
    await site.settle()
    text = (ROOT / "charts/drakit/crds/devicedrivers.yaml").read_text(encoding="utf-8")
    (version,) = yaml.safe_load(text)["spec"]["versions"]
    fields = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    assert site.status.keys() == fields.keys()
    for name, of in site.status.items():
        inner = fields[name].get("properties") or fields[name].get("items", {}).get("properties")
        for each in of if isinstance(of, list) else [of]:
            if inner is not None:
                assert each.keys() <= inner.keys(), name
    assert {each["type"] for each in site.status["conditions"]} == {"Ready", *CONDITIONS}


async def test_a_problem_must_last_and_an_event_reports_each_turn(site):
    site.see(N1, S1)
    await site.settle()
    site.see(BROKEN)
    assert await site.refresh() == LASTING_SECONDS
    assert site.conditions() == GOOD
    assert site.status["pools"]["incomplete"] == 1, "numbers are those of the moment"
    assert site.events() == []
    assert await site.refresh(seconds=LASTING_SECONDS) is None
    bad = ("False", "PoolIncomplete")
    assert site.conditions() == GOOD | {"Publishing": bad, "Ready": bad}
    assert site.events() == [("Warning", "PoolIncomplete")]
    (message,) = {
        each["message"] for each in site.status["conditions"] if each["status"] == "False"
    }
    assert message == "pool n1 is incomplete; run 'kubectl drakit explain node/n1'"
    assert site.status["problems"] == [{"node": "n1", "message": message}]
    turned = {each["type"]: each["lastTransitionTime"] for each in site.status["conditions"]}
    assert turned["Ready"] == turned["Publishing"] > turned["Registered"]
    site.see(S1)
    await site.refresh()
    assert site.conditions() == GOOD
    assert sorted(site.events()) == [("Normal", "Published"), ("Warning", "PoolIncomplete")]


async def test_a_problem_that_comes_and_goes_is_not_reported(site):
    site.see(N1, S1)
    await site.settle()
    writes = len(site.writes())
    for _ in range(10):
        site.see(replace(S1, generation=2), replace(S1, name="old", uid="old"))
        await site.refresh(seconds=LASTING_SECONDS - 1)
        site.lose(replace(S1, name="old"))
        await site.refresh()
    assert (len(site.writes()), site.events()) == (writes, [])


async def test_a_new_leader_goes_on_where_the_last_one_ended(site):
    site.see(N1, BROKEN)
    await site.settle()
    before = site.status
    assert site.conditions()["Ready"] == ("False", "PoolIncomplete")
    site.start()
    assert await site.refresh() is None
    assert site.status == before
    site.start()
    site.see(S1)
    await site.refresh()
    assert site.conditions() == GOOD


async def test_a_condition_turns_when_no_problem_has_lasted(site):
    site.see(N1, BROKEN)
    await site.settle()
    assert site.conditions()["Publishing"] == ("False", "PoolIncomplete")
    site.see(S1, node("n2"), replace(slice_on("n2", device("a")), pool_slices=2))
    await site.refresh()
    assert site.conditions() == GOOD, "the problem of the other node is new"
    await site.refresh(seconds=LASTING_SECONDS)
    assert site.conditions()["Publishing"] == ("False", "PoolIncomplete")


async def test_a_problem_that_gets_another_reason_does_not_wait_again(site):
    site.see(N1, S1, report(published=1, registration="NotRegistered: no socket"))
    await site.settle()
    events = len(site.events())
    site.see(replace(N1, ready=False))
    await site.refresh()
    assert site.conditions()["Registered"] == ("False", "NodeNotReady")
    assert len(site.events()) == events + 1


async def test_numbers_of_devices_are_removed_when_the_driver_has_none(site):
    site.see(N1, S1)
    site.devices = {"d": Counter(free=1)}
    await site.settle()
    site.devices = None  # a new leader has not counted yet
    site.start()
    await site.refresh()
    assert site.status["devices"] == {"free": 1}
    site.devices = {"e": Counter(free=1)}
    await site.refresh()
    assert "devices" not in site.status


async def test_a_specification_that_is_written_during_a_write_is_not_lost(site, monkeypatch):
    site.see(N1, S1)
    await site.settle()
    patch = site.session.patch

    async def patch_and_specify(path, body):
        answer = await patch(path, body)
        site.server.store(PATH, site.server.object(PATH) | {"spec": {"version": "2.0"}})
        site.watch()
        return answer

    monkeypatch.setattr(site.session, "patch", patch_and_specify)
    site.see(replace(S1, name="s2", uid="s2", pool="p2"))
    await site.refresh()
    assert site.store.world.of(DriverFacts)[Name("", "d")].version == "2.0"


async def test_nothing_is_written_when_objects_are_missing_after_the_pass(site):
    site.specify(taintAfterSeconds=60)
    site.see(AWAY, S1)
    await site.refresh()
    await site.refresh(seconds=61)
    assert site.watch_rules() == ["a"]
    writes = len(site.writes())
    answers = iter([True])
    site.controller._is_current = lambda: next(answers, False)
    site.lose(S1)
    assert await site.refresh() == PASS_SECONDS
    assert len(site.writes()) == writes


async def test_a_driver_that_starts_with_a_problem_is_not_ready_before_it_has_lasted(site):
    site.see(N1, BROKEN)
    await site.refresh()
    await site.refresh()
    assert site.conditions()["Publishing"] == ("Unknown", "Settling")
    assert site.conditions()["Ready"] == ("Unknown", "Settling")


async def test_without_evidence_of_registrations_a_driver_can_be_ready(site):
    shared = replace(S1.place, node="", every=True)
    site.specify(version="1.0", nodeSelector={"matchLabels": {}})
    site.see(N1, replace(S1, place=shared))
    await site.settle()
    assert site.conditions() == GOOD | {"Registered": ("Unknown", "NoEvidence")}


async def test_numbers_change_without_events_and_at_most_once_in_five_seconds(site):
    site.see(N1, S1)
    await site.settle()
    writes = len(site.writes())
    for number in range(20):
        site.see(replace(S1, name=f"s{number}", pool=f"p{number}", uid=f"{number}"))
        await site.refresh(seconds=1.0)
    assert len(site.writes()) - writes == 4
    assert site.events() == []


async def test_the_next_pass_waits_after_writes_that_take_long(site, monkeypatch):
    site.see(N1, S1)
    await site.settle()
    patch = site.session.patch

    async def patch_slowly(path, body):
        site.at += 3.0
        return await patch(path, body)

    monkeypatch.setattr(site.session, "patch", patch_slowly)
    site.see(replace(S1, name="s2", uid="s2", pool="p2"))
    await site.refresh()
    writes = len(site.writes())
    site.see(replace(S1, name="s3", uid="s3", pool="p3"))
    assert await site.refresh(seconds=PASS_SECONDS - 1) == 1
    assert len(site.writes()) == writes


async def test_many_problems_are_bounded(site):
    for number in range(LISTED + 5):
        site.see(node(f"x{number}"), replace(slice_on(f"x{number}", device("a")), pool_slices=2))
    await site.settle()
    assert len(site.status["problems"]) == LISTED
    publishing = next(each for each in site.status["conditions"] if each["type"] == "Publishing")
    assert publishing["message"].endswith(f"; and {LISTED + 4} more")


@pytest.mark.parametrize(
    ("spec", "is_kept"),
    [
        pytest.param(None, False, id="created-by-the-operator"),
        pytest.param({"version": "1.0"}, True, id="created-by-a-chart"),
    ],
)
async def test_the_object_of_a_driver_that_is_gone(site, spec, is_kept):
    if spec is not None:
        site.specify(**spec)
    site.see(N1, S1)
    await site.settle()
    site.lose(S1)
    await site.refresh()
    site.watch()
    await site.refresh(seconds=UNSEEN_SECONDS - 2 * PASS_SECONDS)
    assert site.server.object(PATH)
    assert site.conditions()["Installed"] == ("False", "NotFound")
    assert (("Warning", "NotFound") in site.events()) == is_kept, "only if somebody wants it"
    await site.refresh(seconds=2 * PASS_SECONDS)
    assert bool(site.server.object(PATH)) == is_kept
    site.watch()
    writes = len(site.writes())
    assert await site.refresh() is None
    assert len(site.writes()) == writes


async def test_a_driver_whose_reports_may_not_be_listed_keeps_its_object(site):
    site.see(N1, report())
    await site.settle()
    assert site.conditions() == GOOD
    site.lose(report())
    site.store.world.hidden = frozenset({ReportFacts})
    site.watch()
    for _ in range(3):
        await site.refresh(seconds=UNSEEN_SECONDS)
        site.watch()
    assert site.server.object(PATH)
    assert site.conditions()["Installed"] == ("True", "Installed")


async def test_a_driver_that_returns_in_time_keeps_its_object(site):
    site.see(N1, S1)
    await site.settle()
    for _ in range(3):
        site.lose(S1)
        await site.refresh()
        await site.refresh(seconds=UNSEEN_SECONDS - PASS_SECONDS)
        site.see(S1)
        await site.refresh()
    assert site.server.object(PATH)


@pytest.mark.parametrize(
    ("method", "status", "reason", "again"),
    [
        pytest.param("POST", 403, "Forbidden", REFUSED_SECONDS, id="create-is-forbidden"),
        pytest.param("POST", 422, "Invalid", REFUSED_SECONDS, id="create-is-invalid"),
        pytest.param("POST", 409, "AlreadyExists", PASS_SECONDS, id="another-one-created-it"),
        pytest.param("POST", 503, "", None, id="create-gets-no-answer"),
        pytest.param("PATCH", 403, "Forbidden", REFUSED_SECONDS, id="a-status-is-forbidden"),
        pytest.param("PATCH", 422, "Invalid", REFUSED_SECONDS, id="a-status-is-invalid"),
        pytest.param("PATCH", 409, "Conflict", PASS_SECONDS, id="a-conflict"),
        pytest.param("PATCH", 404, "NotFound", PASS_SECONDS, id="it-was-deleted-meanwhile"),
        pytest.param("PATCH", 429, "", None, id="too-many-requests"),
    ],
)
async def test_a_refused_write_waits_and_ends_nothing(site, method, status, reason, again):
    site.see(N1, S1)
    if method == "PATCH":
        site.specify(version="1.0")
    path = PATH.rpartition("/")[0] if method == "POST" else f"{PATH}/status"
    site.server.fail(method, path, status=status, reason=reason, times=99)
    for _ in range(3):
        if again is None:
            with pytest.raises(ApiError):
                await site.refresh()
        else:
            assert await site.refresh(seconds=again) == again
            assert (site.controller.problem() is None) == (again == PASS_SECONDS)
    site.server.heal()
    await site.refresh(seconds=REFUSED_SECONDS)
    await site.refresh()
    assert site.conditions() == GOOD
    assert site.controller.problem() is None


async def test_a_driver_whose_writes_are_refused_does_not_stop_the_others(site):
    site.see(N1, S1, replace(S1, driver="e", name="e"))
    site.specify(version="1.0")
    site.server.fail("PATCH", f"{PATH}/status", status=403, reason="Forbidden", times=99)
    for _ in range(3):
        await site.refresh()
    other = PATH.removesuffix("/d") + "/e"
    assert {each["type"] for each in site.server.object(other)["status"]["conditions"]}
    tried = [each for each in site.server.requests if each == ("PATCH", f"{PATH}/status")]
    assert len(tried) == 1, "a refusal pauses the writes of its driver"


async def test_without_the_definition_nothing_is_written(site):
    site.served = False
    site.see(N1, S1)
    assert await site.refresh() is not None
    assert site.writes() == []


AWAY = replace(N1, ready=False)


async def test_devices_are_tainted_while_the_plugin_is_away_for_long(site):
    site.specify(taintAfterSeconds=60)
    site.see(N1, node("n2"), slice_on("n1", device("a"), device("b")), slice_on("n2", device("c")))
    await site.settle()
    assert site.conditions()["Tainted"] == ("False", "NotTainted")
    site.see(AWAY)
    await site.refresh()
    assert await site.refresh(seconds=55) == PASS_SECONDS
    assert site.watch_rules() == []
    await site.refresh()
    assert site.watch_rules() == ["a", "b"]
    rule = min(site.server.objects(RULES), key=lambda of: of["spec"]["deviceSelector"]["device"])
    assert rule["spec"]["deviceSelector"] == {"driver": "d", "pool": "n1", "device": "a"}
    assert rule["spec"]["taint"]["effect"] == "NoSchedule"
    (owner,) = rule["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("DeviceDriver", "d", True)
    assert site.conditions()["Tainted"] == ("True", "PluginUnavailable")
    writes = len(site.writes())
    await site.refresh()
    assert len(site.writes()) == writes

    # The next leader does not wait again.
    site.start()
    await site.refresh()
    assert (site.watch_rules(), len(site.writes())) == (["a", "b"], writes)

    site.see(N1)
    await site.refresh()
    assert site.watch_rules() == []
    assert site.conditions()["Tainted"] == ("False", "NotTainted")
    reasons = [reason for _, reason in site.events()]
    assert {"PluginUnavailable", "NotTainted"} <= set(reasons)


async def test_a_plugin_that_returns_in_time_causes_no_taint(site):
    site.specify(taintAfterSeconds=60)
    site.see(N1, S1)
    for _ in range(5):
        site.see(AWAY)
        await site.refresh()
        await site.refresh(seconds=50)
        site.see(N1)
        await site.refresh()
    assert site.watch_rules() == []


async def test_without_the_option_its_rules_are_deleted(site):
    site.specify(taintAfterSeconds=60)
    site.see(AWAY, S1)
    await site.refresh()
    await site.refresh(seconds=61)
    assert site.watch_rules() == ["a"]
    site.specify(version="1.0")
    await site.refresh()
    assert site.watch_rules() == []
    await site.refresh()
    assert "Tainted" not in site.conditions()


async def test_the_number_of_tainted_devices_is_bounded(site):
    site.specify(taintAfterSeconds=60)
    site.see(AWAY, slice_on("n1", *(device(f"g{n:03}") for n in range(MAX_TAINTED + 3))))
    await site.refresh()
    await site.refresh(seconds=61)
    assert len(site.watch_rules()) == MAX_TAINTED
    tainted = next(each for each in site.status["conditions"] if each["type"] == "Tainted")
    assert "3 more are not tainted, because the limit is 64 per driver" in tainted["message"]
    await site.refresh()
    assert len(site.watch_rules()) == MAX_TAINTED


async def test_a_device_that_is_tainted_stays_tainted_when_there_are_too_many(site):
    site.specify(taintAfterSeconds=60)
    many = (device(f"g{n:03}") for n in range(MAX_TAINTED))
    site.see(N1, replace(node("n2"), ready=False), slice_on("n1", device("first")))
    site.see(slice_on("n2", *many))
    await site.refresh()
    await site.refresh(seconds=61)
    tainted = site.watch_rules()
    site.see(AWAY)
    await site.refresh()
    await site.refresh(seconds=61)
    assert site.watch_rules() == tainted


async def test_a_refused_creation_does_not_keep_the_taints_of_other_nodes(site):
    site.specify(taintAfterSeconds=60)
    site.see(AWAY, S1, node("n2"), slice_on("n2", device("b")))
    await site.refresh()
    await site.refresh(seconds=61)
    assert site.watch_rules() == ["a"]
    site.see(replace(node("n2"), ready=False))
    await site.refresh()
    site.server.fail("POST", RULES, status=403, reason="Forbidden", times=99)
    site.see(N1)
    await site.refresh(seconds=61)
    assert site.watch_rules() == []


async def test_a_rule_that_another_client_deletes_is_created_again_after_a_pause(site):
    site.specify(taintAfterSeconds=60)
    site.see(AWAY, S1)
    await site.refresh()
    await site.refresh(seconds=61)
    (rule,) = site.server.objects(RULES)
    site.server.remove(f"{RULES}/{rule['metadata']['name']}")
    site.watch_rules()
    assert await site.refresh() == REFUSED_SECONDS - PASS_SECONDS
    assert site.watch_rules() == []
    await site.refresh(seconds=REFUSED_SECONDS)
    assert site.watch_rules() == ["a"]


async def test_taints_that_may_no_longer_be_removed_are_reported(site):
    site.specify(taintAfterSeconds=60)
    site.see(AWAY, S1)
    await site.refresh()
    await site.refresh(seconds=61)
    site.watch_rules()
    site.rules = None
    site.start()
    site.see(N1)
    await site.refresh()
    assert site.conditions()["Tainted"] == ("True", "Disabled")
    tainted = next(each for each in site.status["conditions"] if each["type"] == "Tainted")
    assert "to remove 1 DeviceTaintRule, delete this object" in tainted["message"]


@pytest.mark.parametrize(
    ("rules", "status", "reason"),
    [
        pytest.param(None, 0, "Disabled", id="the-chart-does-not-allow-it"),
        pytest.param("", 0, "Unsupported", id="the-cluster-has-no-rules"),
        pytest.param("", 403, "Refused", id="the-operator-may-not-list-them"),
        pytest.param("resource.k8s.io/v1beta2", 403, "Refused", id="the-api-server-refuses"),
    ],
)
async def test_taints_that_cannot_be_written_are_a_condition(site, rules, status, reason):
    site.rules = rules
    site.start()
    site.specify(taintAfterSeconds=60)
    site.see(AWAY, S1)
    site.store.world.hidden = frozenset({TaintRuleFacts} if status and not rules else ())
    if status:
        site.server.fail("POST", RULES, status=status, reason="Forbidden", times=99)
    await site.refresh()
    await site.refresh(seconds=61)
    assert site.conditions()["Tainted"] == ("False", reason)
    assert site.conditions()["Registered"] == ("False", "NodeNotReady"), "the rest goes on"


async def test_metrics_have_nodes_and_problems(site):
    site.see(N1, replace(node("n2"), ready=False), S1, report(published=1), BROKEN)
    site.see(slice_on("n2", device("a")))
    await site.refresh()
    value = site.metrics.registry.get_sample_value
    nodes = {
        state: value("drakit_operator_driver_nodes", {"driver": "d", "state": state})
        for state in ("desired", "registered", "publishing")
    }
    assert nodes == {"desired": 2, "registered": 1, "publishing": 2}
    labels = {"driver": "d", "condition": "Registered"}
    assert value("drakit_operator_driver_problems", labels) == 1
    site.lose(S1, slice_on("n2"), report())
    site.lose(node("n1"), node("n2"))
    await site.refresh()
    assert value("drakit_operator_driver_problems", labels) in (0, None)
