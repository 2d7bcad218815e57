"""HostDevicePolicies: their DeviceClasses and their status."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from drakit.testing.apiserver import FakeApiServer
from drakit_daemon.kube import ApiError, Session, connect
from drakit_explain.kinds import REPORTS
from drakit_explain.model import (
    ClassFacts,
    DeviceConflict,
    NodeFacts,
    PolicyFacts,
    PolicyReport,
    ReportFacts,
)
from drakit_explain.projection import project_class
from drakit_explain.reports import project_policy, project_report
from drakit_explain.world import Change, Fact, Name, name_of_fact
from drakit_formats import crds
from drakit_operator.affected import affected
from drakit_operator.policies import controller
from drakit_operator.policies.controller import (
    REFUSED_SECONDS,
    TURNS,
    PolicyController,
)
from drakit_operator.policies.status import DRIVER, desired_class, status_of
from drakit_operator.statuses import OUTDATED_SECONDS, Status
from drakit_operator.store import Store
from tests.fakes.operator_reconciler import Bench

SELECTOR = {"matchLabels": {"lab": "yes"}}
POLICY = PolicyFacts(
    name="serial",
    uid="uid-serial",
    generation=3,
    class_name="serial.drakit.dev",
    node_selector=SELECTOR,
    version="2",
)
CLASS = "/apis/resource.k8s.io/v1/deviceclasses/serial.drakit.dev"
PATH = f"/apis/{crds.API_VERSION}/hostdevicepolicies/serial"
THEN = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)


def report(node: str, *policies: PolicyReport, driver: str = DRIVER, **fields: Any) -> ReportFacts:
    name, uid = f"{node}.{driver}", f"uid-{node}"
    return ReportFacts(name=name, uid=uid, node=node, driver=driver, policies=policies, **fields)


def outcome(**changes: Any) -> PolicyReport:
    values = {
        "name": "serial",
        "uid": POLICY.uid,
        "observed_generation": 3,
        "generation": 3,
        "matched": 2,
        "published": 1,
    }
    return PolicyReport(**{**values, **changes})


def node(name: str, *, ready: bool = True, **labels: str) -> NodeFacts:
    labels = labels or {"lab": "yes"}
    return NodeFacts(name=name, uid=f"uid-{name}", labels=labels, ready=ready)


def store_of(*facts: Fact) -> Store:
    store = Store()
    for fact in facts:
        store.world.apply(fact)
    return store


def status(*facts: Fact, policy: PolicyFacts = POLICY, class_problem: str = "") -> Status:
    """The status in a cluster with the nodes of the reports."""
    nodes = [node(each.node) for each in facts if isinstance(each, ReportFacts)]
    world = store_of(*nodes, policy, *facts).world
    return status_of(policy, world, class_problem=class_problem)


def conditions(found: Status) -> dict[str, tuple[str, str]]:
    return {each.type: (each.status, each.reason) for each in found.conditions}


def message(found: Status, condition: str) -> str:
    return next(each.message for each in found.conditions if each.type == condition)


# ------------------------------------------------------------ the status


def test_the_status_sums_up_the_reports():
    found = status(
        report("a", outcome(matched=3, published=2)),
        report("b", outcome(), outcome(name="other", problem="not ours")),
        report("c", outcome(problem="of another driver"), driver="gpu.example.com"),
    )
    assert conditions(found) == {
        "Accepted": ("True", "Accepted"),
        "Applied": ("True", "Applied"),
        "Conflicting": ("False", "NoConflict"),
    }
    assert message(found, "Applied") == "2 of 2 nodes apply generation 3"
    assert found.fields == {
        "observedGeneration": 3,
        "desiredNodes": 2,
        "appliedNodes": 2,
        "nodes": 2,
        "devices": 3,
        "conflicts": [],
        "problems": [],
        "deviceClass": "serial.drakit.dev",
    }


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([node("b", ready=False)], id="a-node-that-is-not-ready"),
        pytest.param([node("b", lab="no")], id="a-node-that-is-not-selected"),
        pytest.param([], id="a-node-that-is-gone"),
        pytest.param([node("b")], id="a-node-whose-plugin-is-gone"),
    ],
)
def test_nodes_to_which_a_policy_does_not_apply_do_not_count(other):
    outdated = other == [node("b")]
    problem = report("b", outcome(problem="its bus is down"), outdated=outdated)
    world = store_of(node("a"), *other, report("a", outcome()), problem).world
    found = status_of(POLICY, world, class_problem="")
    assert conditions(found)["Applied"] == ("True", "Applied")
    assert (found.fields["desiredNodes"], found.fields["problems"]) == (1, [])


def test_without_permission_for_nodes_each_report_counts():
    world = store_of(report("a", outcome()), report("b", outcome(observed_generation=2))).world
    found = status_of(POLICY, world, class_problem="")
    assert message(found, "Applied").startswith("1 of 2 nodes apply generation 3")


REFUSED = outcome(problem="match[0]: too wide (generation 2 stays in effect)", generation=2)
CONFLICT = DeviceConflict(device="/dev/x", policy="old")
NO_NODES = ("Unknown", "NoNodes")


@pytest.mark.parametrize(
    ("reports", "accepted", "applied", "words"),
    [
        pytest.param([], NO_NODES, NO_NODES, "check nodeSelector", id="no-node"),
        pytest.param(
            [report("a", outcome()), report("b", outcome(observed_generation=2))],
            ("True", "Accepted"),
            ("False", "Progressing"),
            "1 of 2 nodes apply generation 3; waiting for b",
            id="a-node-is-behind",
        ),
        pytest.param(
            [report("a", outcome(uid="uid-before", problem="of the policy before", in_use=1))],
            ("Unknown", "Pending"),
            ("False", "Progressing"),
            "0 of 1 node apply generation 3; waiting for a",
            id="a-node-knows-a-policy-that-had-the-name-before",
        ),
        pytest.param(
            [report("a", outcome(observed_generation=7, generation=7))],
            ("Unknown", "Pending"),
            ("False", "Progressing"),
            "waiting for a",
            id="a-node-knows-another-generation",
        ),
        pytest.param(
            [report("a", outcome(generation=0, matched=0, published=0)), report("b")],
            ("Unknown", "Pending"),
            ("False", "Progressing"),
            "0 of 2 nodes apply generation 3; waiting for a, b",
            id="nodes-have-seen-it-only",
        ),
        pytest.param(
            [report("a", outcome(matched=0, published=0))],
            ("True", "Accepted"),
            ("True", "NoDeviceMatched"),
            "check spec.match",
            id="no-device",
        ),
        pytest.param(
            [report("a", policies_omitted=True)],
            ("True", "Accepted"),
            ("True", "Applied"),
            "apply generation 3; its devices on a are not counted: too many policies",
            id="a-report-that-is-too-long",
        ),
        pytest.param(
            [report("a", outcome()), report("b", REFUSED)],
            ("False", "Refused"),
            ("False", "Refused"),
            "1 of 2 nodes apply generation 3; b: match[0]: too wide",
            id="a-node-refuses-it",
        ),
        pytest.param(
            [report(f"n{i}", outcome(problem="no helper")) for i in range(5)],
            ("True", "Accepted"),
            ("False", "NodeProblems"),
            "0 of 5 nodes apply generation 3; n0, n1, n2 and 2 more: no helper",
            id="many-nodes-have-a-problem",
        ),
        pytest.param(
            [report("a", outcome(), refused="the driver fails"), report("b", outcome())],
            ("True", "Accepted"),
            ("False", "NodeProblems"),
            "1 of 2 nodes apply generation 3; a: the driver fails",
            id="a-driver-refuses-all-policies",
        ),
        pytest.param(
            [
                report("a", outcome(generation=0, matched=0, published=0), refused="it fails"),
                report("b", outcome()),
            ],
            ("True", "Accepted"),
            ("False", "NodeProblems"),
            "1 of 2 nodes apply generation 3; a: it fails",
            id="a-driver-refuses-the-new-generation",
        ),
        pytest.param(
            [report("a", outcome()), report("b", outcome(in_use=2, in_use_by="x waits for y"))],
            ("True", "Accepted"),
            ("False", "DevicesInUse"),
            "b: claims hold 2 devices in a form that the policy no longer offers, such as: x waits "
            "for y; delete the pods",
            id="claims-hold-shares-that-are-no-longer-offered",
        ),
    ],
)
def test_conditions_name_nodes_and_reason(reports, accepted, applied, words):
    found = conditions(made := status(*reports))
    assert (found["Accepted"], found["Applied"]) == (accepted, applied)
    assert words in message(made, "Applied")


def test_a_device_that_another_policy_matches_too_is_a_conflict_only():
    found = status(report("a", outcome(conflicts=(CONFLICT, CONFLICT))), report("b", outcome()))
    assert conditions(found) == {
        "Accepted": ("True", "Accepted"),
        "Applied": ("True", "Applied"),
        "Conflicting": ("True", "DevicesMatchedTwice"),
    }
    assert message(found, "Conflicting") == (
        "other policies also match 1 device: policy old matches /dev/x on a"
    )
    # The keys of the list.
    assert found.fields["conflicts"] == [{"node": "a", "device": "/dev/x", "policy": "old"}]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        pytest.param(
            replace(POLICY, name="other", uid="uid-other", class_name="other.drakit.dev"),
            "HostDevicePolicy other",
            id="policy",
        ),
        pytest.param(
            ClassFacts(name="theirs", uid="uid-theirs"),
            "DeviceClass theirs",
            id="class-of-somebody-else",
        ),
    ],
)
def test_two_that_provide_one_extended_resource_are_a_conflict(other, named):
    """kubevirt#7012, kubernetes#141110: the devices of one of them never serve the resource."""
    one, other = (replace(each, extended_resource="a.b/zigbee") for each in (POLICY, other))
    ours = ClassFacts(name="k", uid="k", owner=one.uid, extended_resource=one.extended_resource)
    for reports in ([report("a", outcome(conflicts=(CONFLICT,)))], []):
        found = status(other, ours, *reports, policy=one)
        assert conditions(found)["Conflicting"] == ("True", "ExtendedResourceUsedTwice")
        assert message(found, "Conflicting").startswith(
            f"the extended resource a.b/zigbee is also that of {named}, and pods that request it"
        )
    for without in (replace(one, extended_resource="a.b/c"), replace(one, create_class=False)):
        found = status(other, report("a", outcome()), policy=without)
        assert conditions(found)["Conflicting"] == ("False", "NoConflict")


def test_devices_that_are_rejected_are_in_the_conditions():
    def rejected(device, policy="serial"):
        return {
            "device": device,
            "policy": policy,
            "reason": "Dangerous",
            "message": "it is a disk",
        }

    listed = [rejected("/dev/sda"), rejected("/dev/sdb"), rejected("/dev/sdc", "other")]
    body = {
        "metadata": {"name": f"a.{DRIVER}", "uid": "r"},
        "spec": {"nodeName": "a", "driver": DRIVER},
        "status": {
            "policies": [
                {
                    "name": "serial",
                    "uid": POLICY.uid,
                    "observedGeneration": 3,
                    "generation": 3,
                    "matched": 2,
                    "published": 0,
                }
            ],
            "rejectedDevices": listed,
        },
    }
    found = status(project_report(body), report("b", outcome()))
    assert conditions(found)["Applied"] == ("True", "DevicesRejected")
    assert message(found, "Applied") == (
        "2 of 2 nodes apply generation 3; not published on a: 2 devices, such as /dev/sda: it is a "
        "disk"
    )


def test_a_class_that_cannot_be_maintained_is_not_accepted_but_applied():
    found = status(report("a", outcome()), class_problem="DeviceClass x exists")
    assert conditions(found)["Accepted"] == ("False", "DeviceClassConflict")
    assert conditions(found)["Applied"] == ("True", "Applied")
    assert found.fields["deviceClass"] is None


def test_lists_of_a_thousand_nodes_are_bounded():
    found = status(
        *(report(f"n{i}", outcome(problem="no", conflicts=(CONFLICT,))) for i in range(1000))
    )
    assert found.fields["nodes"] == 1000
    assert (len(found.fields["problems"]), len(found.fields["conflicts"])) == (20, 20)


# ------------------------------------------------------------ facts


def test_a_policy_without_a_class_name_gets_its_own():
    body = {"metadata": {"name": "kvm", "uid": "u", "generation": 1}, "spec": {"match": []}}
    assert project_policy(body).class_name == "kvm.drakit.dev"
    spec = {"deviceClass": {"name": "vm", "extendedResourceName": "example.com/kvm"}}
    facts = project_policy({**body, "spec": spec})
    assert (facts.class_name, facts.extended_resource) == ("vm", "example.com/kvm")
    off = project_policy({**body, "spec": {"deviceClass": {"create": "Never"}}})
    assert desired_class(off, api_version="resource.k8s.io/v1") is None


# ------------------------------------------------------------ what a change affects


def test_a_change_affects_the_policies_that_it_can_concern():
    other = replace(POLICY, name="kvm", uid="uid-kvm", class_name="kvm.drakit.dev")
    store = store_of(POLICY, other)
    both = {"serial", "kvm"}

    def policies(old: Fact | None, new: Fact | None) -> set[str]:
        change = Change(name=name_of_fact(new or old), old=old, new=new)
        found = affected([change], store.world)
        return {key.name.name for key in found if key.concern == "policy"}

    kvm, gone = outcome(name="kvm"), outcome(name="gone")
    assert policies(None, report("a", outcome(), gone)) == {"serial"}
    assert policies(report("a", outcome(), kvm), report("a", kvm)) == {"serial"}
    assert policies(report("a", outcome(), kvm), report("a", outcome(in_use=1), kvm)) == {"serial"}
    assert policies(report("a", kvm), replace(report("a", kvm), registration="Rejected")) == set()
    assert policies(report("a", outcome(), kvm), None) == both
    assert policies(report("a", kvm), report("a", kvm, refused="fails")) == {"kvm"}
    assert policies(report("a", kvm), report("a", kvm, outdated=True)) == {"kvm"}
    assert policies(node("a"), node("a", ready=False)) == both
    assert policies(node("a"), replace(node("a"), unschedulable=True)) == set()
    assert policies(POLICY, replace(POLICY, generation=4)) == set()  # Kopf calls handlers
    assert policies(None, ClassFacts(name="kvm.drakit.dev", uid="k")) == {"kvm"}
    resource = replace(POLICY, extended_resource="a.b/c")
    for each in (resource, replace(other, extended_resource="a.b/c")):
        store.world.apply(each)
    assert policies(resource, replace(POLICY, generation=4)) == {"kvm"}
    theirs = ClassFacts(name="theirs", uid="t", extended_resource="a.b/c")
    assert policies(theirs, None) == both


@pytest.mark.looptime
async def test_a_burst_of_changes_is_one_reconciliation_and_a_failure_is_repeated():
    bench = Bench(failures=1)
    bench.store.world.apply(POLICY)
    async with bench.running():
        for node in range(100):
            fact = report(f"n{node}", outcome())
            bench.store.apply(REPORTS, fact)
            change = Change(name=name_of_fact(fact), old=None, new=fact)
            bench.reconciler.changed([change])
        await asyncio.sleep(10)
    assert [name for _, name in bench.refreshed] == ["serial", "serial"]
    assert bench.refreshed[0][0] == pytest.approx(1.0)


# ------------------------------------------------------------ what is written


class Cluster:
    """A controller, the API server that it writes to, and its store."""

    def __init__(
        self, server: FakeApiServer, session: Session, *, restricts_namespaces: bool = True
    ) -> None:
        self.server = server
        self.session = session
        self.world = store_of(node("a"), node("b")).world
        self.at = 0.0
        self.controller = PolicyController(
            session,
            self.world,
            class_version=lambda: "resource.k8s.io/v1",
            restricts_namespaces=restricts_namespaces,
            now=lambda: THEN + timedelta(seconds=self.at),
            clock=lambda: self.at,
        )

    async def see(self, *facts: Fact) -> None:
        """Store facts, and what the API server has of policies and classes."""
        for fact in facts:
            self.world.apply(fact)
        listed = await self.session.list("/apis/resource.k8s.io/v1/deviceclasses")
        for _ in self.world.replace(ClassFacts, [project_class(each) for each in listed.items]):
            pass

    async def refresh(self, *facts: Fact) -> float | None:
        await self.see(*facts)
        return await self.controller.refresh("serial")

    async def change_spec(self, **spec: Any) -> None:
        self.world.apply(project_policy(await self.session.patch(PATH, {"spec": spec})))
        self.server.requests.clear()

    @property
    def status(self) -> dict[str, Any]:
        return (self.server.object(PATH) or {}).get("status") or {}

    def condition(self, wanted: str) -> dict[str, Any]:
        return next(each for each in self.status["conditions"] if each["type"] == wanted)

    def writes(self) -> list[str]:
        """The writes since the last call."""
        found = [f"{method} {path}" for method, path in self.server.requests if method != "GET"]
        self.server.requests.clear()
        return found

    async def classes(self) -> set[str]:
        listed = await self.session.list("/apis/resource.k8s.io/v1/deviceclasses")
        return {body["metadata"]["name"] for body in listed.items}


STATUS = f"PATCH {PATH}/status"


@pytest.fixture
async def server():
    async with FakeApiServer() as server:
        server.store(PATH, {"metadata": {"uid": POLICY.uid}, "spec": {"match": []}})
        yield server


@pytest.fixture
async def cluster(server, tmp_path):
    async with await connect(server.write_kubeconfig(tmp_path), user_agent="test") as session:
        cluster = Cluster(server, session)
        await cluster.see(project_policy(await session.get(PATH)))
        server.requests.clear()
        yield cluster


def reported(node: str, generation: int, **fields: Any) -> ReportFacts:
    fields = {"observed_generation": generation, "generation": generation, **fields}
    return report(node, outcome(**fields))


async def test_a_policy_gets_a_class_that_selects_its_devices_and_goes_with_it(cluster):
    await cluster.change_spec(deviceClass={"extendedResourceName": "example.com/serial"})
    await cluster.refresh()
    assert cluster.status["deviceClass"] == "serial.drakit.dev"
    body = await cluster.session.get(CLASS)
    (selector,) = body["spec"]["selectors"]
    assert '"hostdev.drakit.dev"].policy == "serial"' in selector["cel"]["expression"]
    assert body["spec"]["extendedResourceName"] == "example.com/serial"
    (owner,) = body["metadata"]["ownerReferences"]
    uid = cluster.server.object(PATH)["metadata"]["uid"]
    assert (owner["kind"], owner["uid"]) == ("HostDevicePolicy", uid)


@pytest.mark.parametrize("create", ["Always", "Never"])
async def test_a_restriction_that_nothing_enforces_is_not_accepted(cluster, server, create):
    unenforced = Cluster(server, cluster.session, restricts_namespaces=False)
    spec = {"allowedNamespaces": {"names": ["lab"]}, "deviceClass": {"create": create}}
    policy = await cluster.session.patch(PATH, {"spec": spec})
    await unenforced.refresh(project_policy(policy))
    assert await unenforced.classes() == set()
    accepted = unenforced.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "DeviceClassConflict")
    assert "set the chart's value hostdev.restrictNamespaces" in accepted["message"]
    await cluster.refresh(project_policy(await cluster.session.get(PATH)))
    assert cluster.condition("Accepted")["reason"] != "DeviceClassConflict"
    assert await cluster.classes() == ({"serial.drakit.dev"} if create == "Always" else set())
    # The chart's value is removed: without the class, nobody gets around the restriction.
    await unenforced.refresh()
    assert await unenforced.classes() == set()


async def test_what_has_no_difference_needs_no_request(cluster):
    await cluster.refresh(reported("a", 1))
    assert len(cluster.writes()) == 2
    cluster.at = 1000
    await cluster.see()
    cluster.server.requests.clear()
    assert await cluster.controller.refresh("serial") is None
    assert list(cluster.server.requests) == []


async def test_a_class_that_was_changed_gets_its_selectors_back_and_keeps_the_config(cluster):
    await cluster.refresh()
    change = {"spec": {"selectors": [], "config": [{"opaque": {}}]}}
    await cluster.session.patch(CLASS, change)
    await cluster.refresh()
    spec = (await cluster.session.get(CLASS))["spec"]
    assert len(spec["selectors"]) == 1
    assert spec["config"] == [{"opaque": {}}]


@pytest.mark.parametrize(
    "owners",
    [
        pytest.param([], id="nobody"),
        pytest.param([{"uid": "other", "controller": True}], id="another-policy"),
        # The admission policy refuses changes to such a class.
        pytest.param([{"uid": "the-policy's"}], id="not-as-controller"),
    ],
)
async def test_a_class_that_the_policy_does_not_control_is_never_touched(cluster, owners):
    uid = cluster.server.object(PATH)["metadata"]["uid"]
    owners = [each | ({} if each.get("controller") else {"uid": uid}) for each in owners]
    cluster.server.store(CLASS, {"metadata": {"ownerReferences": owners}, "spec": {}})
    await cluster.refresh()
    accepted = cluster.condition("Accepted")
    assert accepted["reason"] == "DeviceClassConflict"
    assert "set spec.deviceClass.name to another name" in accepted["message"]
    assert "deviceClass" not in cluster.status
    assert cluster.writes() == [STATUS]


REFUSALS = {
    "invalid": (422, "Invalid", "spec.extendedResourceName: Invalid value"),
    "admission-policy": (403, "Forbidden", "admission webhook denied the request: not today"),
    "quota": (403, "Forbidden", "exceeded quota: few, requested: count/deviceclasses=1"),
    "bad-request": (400, "BadRequest", "it does not decode"),
    "failed-webhook": (500, "InternalError", "failed calling webhook: connection refused"),
}


@pytest.mark.parametrize("method", ["POST", "PATCH", "DELETE"])
@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
async def test_whatever_refuses_a_class_is_in_the_status_until_it_is_written(
    cluster, method, refusal
):
    code, reason, words = refusal
    spec = {"extendedResourceName": "a.b/c"}
    if method != "POST":
        await cluster.refresh()
        spec |= {"name": "tty"} if method == "DELETE" else {}
    await cluster.change_spec(deviceClass=spec)
    cluster.server.fail(
        method, "/apis/resource.k8s.io", status=code, reason=reason, message=words, times=1
    )
    assert await cluster.refresh() == REFUSED_SECONDS, "it may be allowed later"
    accepted = cluster.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "DeviceClassConflict")
    assert f"cannot be written: {words}" in accepted["message"]
    assert cluster.controller.problem() is None, "about one policy"
    assert await cluster.refresh() is None
    assert cluster.condition("Accepted")["reason"] == "NoNodes"


WRITES = {"class": ("POST", "/apis/resource.k8s.io"), "status": ("PATCH", f"{PATH}/status")}


@pytest.mark.parametrize(("method", "path"), WRITES.values(), ids=WRITES)
async def test_a_missing_right_is_a_problem_of_the_operator(cluster, method, path):
    words = 'User "o" cannot patch resource "x" in API group "y" at the cluster scope'
    cluster.server.fail(method, path, status=403, reason="Forbidden", message=words, times=1)
    assert await cluster.refresh() == REFUSED_SECONDS
    assert 'lacks the verb "patch" on "x"' in cluster.controller.problem()
    assert ("Accepted" in str(cluster.status)) is (path != f"{PATH}/status")
    await cluster.refresh()
    assert cluster.controller.problem() is None


@pytest.mark.parametrize("changed", [{"name": "tty"}, {"create": "Never"}])
async def test_a_policy_that_renames_or_drops_its_class_loses_the_old_one_only(cluster, changed):
    await cluster.refresh()
    foreign = "/apis/resource.k8s.io/v1/deviceclasses/foreign"
    labels = {"drakit.dev/policy": "serial"}
    cluster.server.store(foreign, {"metadata": {"labels": labels}, "spec": {}})
    await cluster.change_spec(deviceClass=changed)
    await cluster.refresh()
    assert cluster.status.get("deviceClass") == changed.get("name")
    assert await cluster.classes() == {"foreign", *(["tty"] if "name" in changed else [])}


async def test_classes_that_come_and_go_while_the_old_one_is_deleted_change_nothing(
    cluster, monkeypatch
):
    await cluster.refresh()
    delete = cluster.session.delete

    async def meanwhile(*arguments: Any, **named: Any) -> None:
        for name in ("one", "other"):
            body = {"metadata": {"name": name, "uid": name}, "spec": {}}
            cluster.world.apply(project_class(body))
        await delete(*arguments, **named)
        cluster.world.remove(ClassFacts, Name("", "serial.drakit.dev"))

    monkeypatch.setattr(cluster.session, "delete", meanwhile)
    await cluster.change_spec(deviceClass={"name": "tty"})
    await cluster.refresh()
    assert await cluster.classes() == {"tty"}


async def test_a_class_that_appears_meanwhile_is_left_to_the_next_change(cluster):
    cluster.server.fail("POST", "/apis/resource.k8s.io", status=409, reason="AlreadyExists")
    await cluster.refresh()
    assert cluster.status["deviceClass"] == "serial.drakit.dev"


async def test_a_policy_that_is_gone_gets_no_class(cluster):
    await cluster.session.delete(PATH)
    cluster.server.requests.clear()
    await cluster.refresh()
    cluster.at = 100
    cluster.server.store(PATH, {"spec": {}})  # another one of this name
    assert await cluster.refresh() == OUTDATED_SECONDS
    assert await cluster.classes() == set()


async def test_a_condition_has_the_time_of_its_change(cluster):
    await cluster.refresh(reported("a", 1), reported("b", 1))
    applied = cluster.condition("Applied")
    assert applied["lastTransitionTime"] == "2026-05-01T12:00:00Z"
    assert (applied["status"], applied["observedGeneration"]) == ("True", 1)
    cluster.at = 100
    await cluster.refresh(reported("b", 1, problem="its bus is down"))
    assert cluster.condition("Applied")["lastTransitionTime"] == "2026-05-01T12:01:40Z"
    assert cluster.condition("Accepted")["lastTransitionTime"] == "2026-05-01T12:00:00Z"


async def test_conditions_that_turn_are_written_at_once_and_numbers_once_in_a_minute(cluster):
    await cluster.refresh(reported("a", 1), reported("b", 1))
    assert STATUS in cluster.writes()
    await cluster.change_spec(group="Unit")
    expected = [
        ((), "Progressing", "a new generation"),
        ((reported("a", 2),), "Progressing", "Accepted turns"),
        ((reported("b", 2),), "Applied", "Applied turns"),
        ((reported("b", 2, problem="its bus is down"),), "NodeProblems", "false again"),
        ((reported("b", 2),), "Applied", "true again"),
    ]
    for second, (facts, reason, why) in enumerate(expected, 1):
        cluster.at = second
        assert await cluster.refresh(*facts) is None
        assert cluster.writes() == [STATUS], why
        assert cluster.condition("Applied")["reason"] == reason
    for second in range(6, 65):
        cluster.at = second
        assert await cluster.refresh(reported("b", 2, published=second)) == 65 - second
    assert cluster.writes() == []
    cluster.at = 65
    assert await cluster.refresh() is None
    assert cluster.writes() == [STATUS]
    assert cluster.status["devices"] == 65


async def test_a_node_whose_problem_comes_and_goes_does_not_cause_a_write_each_second(cluster):
    written = 0
    for second in range(600):
        cluster.at = second
        await cluster.refresh(reported("a", 1, problem="its bus is down" * (second % 2)))
        written += cluster.writes().count(STATUS)
    assert written <= TURNS + 600 / 60 + 1


async def test_the_statuses_of_a_large_cluster_take_a_part_of_the_time_only(cluster, monkeypatch):
    """Finding a status takes a second here."""
    found = []

    def slow(*args, **options):
        found.append(cluster.at)
        cluster.at += 1
        return status_of(*args, **options)

    monkeypatch.setattr(controller, "status_of", slow)
    await cluster.refresh(reported("a", 1))
    again = await cluster.refresh(reported("a", 1, problem="its bus is down"))
    assert (found, again) == ([0], 19)
    cluster.at += again
    await cluster.refresh()
    assert cluster.condition("Applied")["reason"] == "NodeProblems"


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({"uid": "uid-of-another"}, id="replaced"),
        pytest.param({"version": "1000000"}, id="changed"),
    ],
)
async def test_a_policy_that_was_replaced_or_changed_gets_no_status(cluster, facts):
    known = cluster.world.of(PolicyFacts)[Name("", "serial")]
    assert await cluster.refresh(replace(known, **facts)) == OUTDATED_SECONDS
    assert cluster.status == {}


async def test_a_policy_that_is_being_deleted_is_left_alone(cluster):
    known = cluster.world.of(PolicyFacts)[Name("", "serial")]
    assert await cluster.refresh(replace(known, deleting=True)) is None
    assert cluster.writes() == []


@pytest.mark.parametrize(("method", "path"), WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("code", [401, 429, 503, 504])
async def test_an_api_server_that_does_not_answer_is_an_error_of_the_caller(
    cluster, code, method, path
):
    cluster.server.fail(method, path, status=code)
    with pytest.raises(ApiError):
        await cluster.refresh()
    assert cluster.status == {}


# ------------------------------------------------------------ Kopf


def test_importing_kopf_leaves_client_libraries_out_and_importable():
    program = (
        "import sys; from drakit_operator.kopf_import import kopf;"
        "roots = {name.split('.')[0] for name in sys.modules};"
        "assert not roots & {'kubernetes_asyncio', 'pykube'};"
        "import pykube, kubernetes_asyncio.client.configuration; print(kopf.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("kopf", 0), done.stderr
