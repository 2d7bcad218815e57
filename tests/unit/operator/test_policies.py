"""HostDevicePolicies: their DeviceClasses and their status."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from drakit.testing.apiserver import FakeApiServer
from drakit_daemon.kube import ConflictError, UnavailableError, connect
from drakit_explain.devices import TaintFacts
from drakit_explain.model import DeviceConflict, DeviceID, PolicyFacts, PolicyReport, ReportFacts
from drakit_explain.reports import project_policy
from drakit_explain.world import Fact, name_of_fact
from drakit_formats import crds
from drakit_operator.affected import policies_affected
from drakit_operator.kinds import CLASSES, REPORTS
from drakit_operator.policies import handlers
from drakit_operator.policies.controller import PolicyController
from drakit_operator.policies.status import DRIVER, Status, desired_class, status_of
from drakit_operator.store import Change, Store
from tests.fakes.operator_reconciler import Bench
from tests.fakes.world import device, holding, slice_on

POLICY = PolicyFacts(name="serial", uid="uid-serial", generation=3, class_name="serial.drakit.dev")
CLASS = "/apis/resource.k8s.io/v1/deviceclasses/serial.drakit.dev"
PATH = f"/apis/{crds.API_VERSION}/hostdevicepolicies/serial"
THEN = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)


def report(node: str, *policies: PolicyReport, driver: str = DRIVER) -> ReportFacts:
    return ReportFacts(
        name=f"{node}.{driver}", uid=f"uid-{node}", node=node, driver=driver, policies=policies
    )


def outcome(**changes: Any) -> PolicyReport:
    values = {"name": "serial", "observed_generation": 3, "matched": 2, "published": 1}
    return PolicyReport(**{**values, **changes})


def slice_of(node: str, devices: Mapping[str, str], *, tainted: Iterable[str] = ()) -> Fact:
    """A slice with devices by name, each with the name of its policy."""
    gone = TaintFacts(key="drakit.dev/gone", effect="NoSchedule")
    made = [
        device(name, attributes={"policy": policy}, taints=(gone,) if name in tainted else ())
        for name, policy in devices.items()
    ]
    return replace(slice_on(node, *made), driver=DRIVER)


def claim_of(node: str, device: str) -> Fact:
    return replace(holding("claim"), devices=(DeviceID(DRIVER, node, device),))


def store_of(*facts: Fact) -> Store:
    store = Store()
    for fact in facts:
        store.world.apply(fact)
    return store


def status(*facts: Fact, policy: PolicyFacts = POLICY, class_problem: str = "") -> Status:
    return status_of(policy, store_of(policy, *facts).world, class_problem=class_problem)


# ------------------------------------------------------------ the status


def test_the_status_sums_up_reports_and_slices():
    found = status(
        report("a", outcome(matched=3, published=2)),
        report("b", outcome(), outcome(name="other", problem="not ours")),
        report("c", outcome(problem="of another driver"), driver="gpu.example.com"),
        slice_of("a", {"s0": "serial", "s1": "serial", "k": "kvm"}, tainted=["s1"]),
        slice_of("b", {"s0": "serial"}),
        claim_of("b", "s0"),
    )
    assert (found.ready, found.reason, found.message) == (
        "True",
        "Applied",
        "2 nodes have matching devices",
    )
    assert found.fields == {
        "observedGeneration": 3,
        "nodes": 2,
        "matched": 5,
        "devices": 3,
        "healthy": 2,
        "allocated": 1,
        "conflicts": [],
        "problems": [],
        "deviceClass": "serial.drakit.dev",
    }


@pytest.mark.parametrize(
    ("reports", "ready", "reason", "message"),
    [
        pytest.param([], "Unknown", "NoNodes", "check its nodeSelector", id="no-node"),
        pytest.param(
            [report("a", outcome()), report("b", outcome(observed_generation=2))],
            "Unknown",
            "Pending",
            "waiting for 1 node to report generation 3: b",
            id="a-node-is-behind",
        ),
        pytest.param(
            [report("a", outcome(matched=0, published=0))],
            "False",
            "NoDeviceMatched",
            "check spec.match and spec.nodeSelector",
            id="no-device",
        ),
        pytest.param(
            [report("a", outcome(problem="match[0]: too wide", observed_generation=2))],
            "False",
            "NodeProblems",
            "1 node cannot apply the policy (a): match[0]: too wide",
            id="a-node-refuses-it",
        ),
        pytest.param(
            [report(f"n{i}", outcome(problem="no helper")) for i in range(5)],
            "False",
            "NodeProblems",
            "5 nodes cannot apply the policy (n0, n1, n2 and 2 more): no helper",
            id="many-nodes-refuse-it",
        ),
        pytest.param(
            [report("a", outcome(conflicts=(DeviceConflict(device="/dev/x", policy="old"),)))],
            "True",
            "Applied",
            "1 node has matching devices; another policy also matches 1 device",
            id="another-policy-matches-a-device-too",
        ),
    ],
)
def test_ready_names_nodes_and_reason(reports, ready, reason, message):
    found = status(*reports)
    assert (found.ready, found.reason) == (ready, reason)
    assert message in found.message


def test_a_class_that_cannot_be_maintained_is_the_first_problem():
    found = status(report("a", outcome()), class_problem="DeviceClass x exists")
    assert (found.ready, found.reason) == ("False", "DeviceClassConflict")
    assert "deviceClass" not in found.fields


def test_lists_of_a_thousand_nodes_are_bounded():
    conflict = DeviceConflict(device="/dev/x", policy="old")
    found = status(
        *(report(f"n{i}", outcome(problem="no", conflicts=(conflict,))) for i in range(1000))
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

    def affected(old: Fact | None, new: Fact | None) -> set[str]:
        change = Change(kind=CLASSES, name=name_of_fact(new or old), old=old, new=new)
        return {name.name for name in policies_affected([change], store)}

    assert affected(None, report("a", outcome(), outcome(name="gone"))) == {"serial"}
    assert affected(report("a", outcome()), report("a")) == {"serial"}
    assert affected(None, slice_of("a", {"s0": "serial"})) == {"serial", "kvm"}
    assert affected(claim_of("a", "s0"), None) == {"serial", "kvm"}
    foreign = replace(slice_of("a", {}), driver="gpu.example.com")
    assert affected(foreign, None) == set()


@pytest.mark.looptime
async def test_a_burst_of_changes_is_one_reconciliation_and_a_failure_is_repeated():
    bench = Bench(failures=1)
    bench.store.world.apply(POLICY)
    async with bench.running():
        for node in range(100):
            fact = report(f"n{node}", outcome())
            bench.store.apply(REPORTS, fact)
            change = Change(kind=REPORTS, name=name_of_fact(fact), old=None, new=fact)
            bench.reconciler.changed([change])
        await asyncio.sleep(10)
    assert [name for _, name in bench.refreshed] == ["serial", "serial"]
    assert bench.refreshed[0][0] == pytest.approx(2.0)


# ------------------------------------------------------------ what is written


@pytest.fixture
async def server():
    async with FakeApiServer() as server:
        for _ in range(2):  # a new object begins with generation 1
            metadata = {"uid": POLICY.uid, "generation": POLICY.generation}
            server.store(PATH, {"metadata": metadata, "spec": {}})
        yield server


@pytest.fixture
async def session(server, tmp_path):
    async with await connect(server.write_kubeconfig(tmp_path), user_agent="test") as session:
        yield session


def controller_of(session, *facts: Fact, now: datetime = THEN) -> PolicyController:
    return PolicyController(
        session,
        store_of(*facts).world,
        class_version=lambda: "resource.k8s.io/v1",
        now=lambda: now,
    )


def writes(server) -> list[str]:
    return [f"{method} {path}" for method, path in server.requests if method != "GET"]


async def classes_of(session) -> set[str]:
    listed = await session.list("/apis/resource.k8s.io/v1/deviceclasses")
    return {body["metadata"]["name"] for body in listed.items}


async def test_a_policy_gets_a_class_that_selects_its_devices_and_goes_with_it(server, session):
    policy = replace(POLICY, extended_resource="example.com/serial")
    change = await controller_of(session).reconcile(policy, {})
    assert change["deviceClass"] == "serial.drakit.dev"
    body = await session.get(CLASS)
    (selector,) = body["spec"]["selectors"]
    assert '"hostdev.drakit.dev"].policy == "serial"' in selector["cel"]["expression"]
    assert body["spec"]["extendedResourceName"] == "example.com/serial"
    (owner,) = body["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("HostDevicePolicy", POLICY.uid)


async def test_what_has_no_difference_is_not_written(server, session):
    controller = controller_of(session)
    change = await controller.reconcile(POLICY, {})
    before = writes(server)
    assert await controller.reconcile(POLICY, change | {"kopf": {"progress": {}}}) == {}
    assert writes(server) == before


async def test_a_class_that_was_changed_gets_its_selectors_back_and_keeps_the_config(
    server, session
):
    controller = controller_of(session)
    await controller.reconcile(POLICY, {})
    await session.patch(CLASS, {"spec": {"selectors": [], "config": [{"opaque": {}}]}})
    await controller.reconcile(POLICY, {})
    spec = (await session.get(CLASS))["spec"]
    assert len(spec["selectors"]) == 1
    assert spec["config"] == [{"opaque": {}}]


@pytest.mark.parametrize(
    "owners",
    [
        pytest.param([], id="nobody"),
        pytest.param([{"uid": "other", "controller": True}], id="another-policy"),
        # The admission policy refuses changes of such a class.
        pytest.param([{"uid": POLICY.uid}], id="not-as-controller"),
    ],
)
async def test_a_class_that_the_policy_does_not_control_is_never_touched(server, session, owners):
    server.store(CLASS, {"metadata": {"ownerReferences": owners}, "spec": {"selectors": []}})
    change = await controller_of(session).reconcile(POLICY, {"deviceClass": "serial.drakit.dev"})
    (ready,) = change["conditions"]
    assert "set spec.deviceClass.name to another name" in ready["message"]
    assert change["deviceClass"] is None
    assert writes(server) == []


@pytest.mark.parametrize("method", ["POST", "PATCH"])
async def test_a_class_that_the_api_server_rejects_is_reported_in_the_status(
    server, session, method
):
    if method == "PATCH":
        await controller_of(session).reconcile(replace(POLICY, extended_resource="a.b/c"), {})
    server.fail(method, "/apis/resource.k8s.io", status=422, reason="Invalid")
    change = await controller_of(session).reconcile(POLICY, {})
    (ready,) = change["conditions"]
    assert ready["reason"] == "DeviceClassConflict"
    assert "DeviceClass serial.drakit.dev cannot be written" in ready["message"]


async def test_a_policy_that_renames_its_class_loses_the_old_one_only(server, session):
    controller = controller_of(session)
    await controller.reconcile(POLICY, {})
    foreign = "/apis/resource.k8s.io/v1/deviceclasses/foreign"
    server.store(foreign, {"metadata": {"labels": {"drakit.dev/policy": "serial"}}, "spec": {}})
    await controller.reconcile(replace(POLICY, class_name="tty"), {})
    assert await classes_of(session) == {"tty", "foreign"}


async def test_a_policy_without_a_class_deletes_the_one_that_it_had(server, session):
    controller = controller_of(session)
    await controller.reconcile(POLICY, {})
    change = await controller.reconcile(
        replace(POLICY, create_class=False), {"deviceClass": "serial.drakit.dev"}
    )
    assert change["deviceClass"] is None
    assert await classes_of(session) == set()


async def test_a_class_that_appears_meanwhile_is_left_to_the_next_change(server, session):
    server.fail("POST", "/apis/resource.k8s.io", status=409, reason="AlreadyExists")
    change = await controller_of(session).reconcile(POLICY, {})
    assert change["deviceClass"] == "serial.drakit.dev"


async def test_a_class_that_changes_meanwhile_is_a_conflict_and_tried_again(server, session):
    controller = controller_of(session)
    await controller.reconcile(POLICY, {})
    await session.patch(CLASS, {"spec": {"selectors": []}})
    server.fail("PATCH", CLASS, status=409, reason="Conflict")
    with pytest.raises(ConflictError):
        await controller.reconcile(POLICY, {})


async def test_the_status_is_written_once_and_its_time_is_that_of_the_change(server, session):
    controller = controller_of(session, POLICY, report("a", outcome()))
    await controller.refresh("serial")
    body = await session.get(PATH)
    (ready,) = body["status"]["conditions"]
    assert ready["lastTransitionTime"] == "2026-05-01T12:00:00Z"
    assert (ready["status"], ready["observedGeneration"]) == ("True", 3)
    before = writes(server)
    await controller.refresh("serial")
    assert writes(server) == before
    later = controller_of(session, POLICY, report("a", outcome(matched=7)), now=datetime.now(UTC))
    await later.refresh("serial")
    status = (await session.get(PATH))["status"]
    assert status["matched"] == 7
    (ready,) = status["conditions"]
    assert ready["lastTransitionTime"] == "2026-05-01T12:00:00Z", "Ready has not changed"


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param([replace(POLICY, uid="uid-of-another")], id="replaced"),
        pytest.param([replace(POLICY, generation=2)], id="changed"),
        pytest.param([replace(POLICY, deleting=True)], id="being-deleted"),
        pytest.param([], id="deleted"),
    ],
)
async def test_a_policy_that_was_replaced_or_deleted_gets_no_status(server, session, facts):
    await controller_of(session, *facts).refresh("serial")
    assert writes(server) == []


async def test_a_status_that_changes_meanwhile_is_a_conflict_and_tried_again(server, session):
    server.delay(0.3, "GET", CLASS)
    refreshing = asyncio.create_task(controller_of(session, POLICY).refresh("serial"))
    while ("GET", CLASS) not in server.requests:
        await asyncio.sleep(0.01)
    await session.patch(f"{PATH}/status", {"status": {"observedGeneration": 4}})
    with pytest.raises(ConflictError):
        await refreshing
    assert (await session.get(PATH))["status"] == {"observedGeneration": 4}


async def test_an_api_server_that_does_not_answer_is_an_error_of_the_caller(server, session):
    server.fail("GET", CLASS, status=500)
    with pytest.raises(UnavailableError):
        await controller_of(session, POLICY).refresh("serial")


# ------------------------------------------------------------ Kopf


@pytest.mark.looptime
async def test_policies_are_looked_for_soon_after_an_error(monkeypatch):
    answers = {
        "/api": {},
        "/apis": {"groups": [{"name": "drakit.dev"}]},
        "/apis/drakit.dev": {"versions": [{"version": crds.VERSION}]},
        f"/apis/{crds.API_VERSION}": {"resources": [{"name": "hostdevicepolicies"}]},
    }
    failures = ["/apis/drakit.dev", "/apis"]

    class Discovery:
        async def get(self, path, **_):
            if path in failures:
                failures.remove(path)
                raise UnavailableError.no_answer("GET", path, why="it is away")
            return answers[path]

        async def create(self, path, body, **_):
            return {"status": {"allowed": True}}

    async def spawn_tasks(**_):
        raise InterruptedError

    monkeypatch.setattr(handlers.kopf, "spawn_tasks", spawn_tasks)
    served = handlers.PolicyHandlers(
        Discovery(), Store(), None, on_started=lambda: None, recheck_seconds=300
    )
    with pytest.raises(InterruptedError):
        await served.run()
    assert asyncio.get_running_loop().time() == 20


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
