"""Kopf with our source of events: all kinds, deletions in a gap, and errors that do not end it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
from kopf._cogs.clients import scanning, watching
from kopf._core.reactor import observation, queueing

from drakit_daemon.kube import connect
from drakit_daemon.kube.events import EventRecorder
from drakit_explain.kinds import CLAIMS, KINDS, MAINTENANCES, PODS, POLICIES, RULES
from drakit_formats import crds
from drakit_operator import kopf_import, sources
from drakit_operator.handlers import Handlers
from drakit_operator.maintenance import MaintenanceController
from drakit_operator.metrics import Metrics
from drakit_operator.policies.controller import PolicyController
from drakit_operator.sources import Sources
from drakit_operator.store import Store
from tests.unit.operator.replicas import until

LAB = "/apis/resource.k8s.io/v1/namespaces/lab"
PATHS = {
    "pods": "/api/v1/namespaces/lab/pods/p",
    "nodes": "/api/v1/nodes/n",
    "namespaces": "/api/v1/namespaces/lab",
    "resourcequotas": "/api/v1/namespaces/lab/resourcequotas/q",
    "resourceclaims": f"{LAB}/resourceclaims/c",
    "resourceclaimtemplates": f"{LAB}/resourceclaimtemplates/t",
    "resourceslices": "/apis/resource.k8s.io/v1/resourceslices/s",
    "deviceclasses": "/apis/resource.k8s.io/v1/deviceclasses/gpu",
    "devicetaintrules": "/apis/resource.k8s.io/v1beta2/devicetaintrules/r",
    "nodedevicereports": f"/apis/{crds.API_VERSION}/nodedevicereports/n.hostdev.drakit.dev",
    "devicemaintenances": f"/apis/{crds.API_VERSION}/devicemaintenances/m",
    "hostdevicepolicies": f"/apis/{crds.API_VERSION}/hostdevicepolicies/serial",
    "devicedrivers": f"/apis/{crds.API_VERSION}/devicedrivers/d",
}
"""One object of each kind, by the plural of the kind."""

CLASS_OF_POLICY = "/apis/resource.k8s.io/v1/deviceclasses/serial.drakit.dev"

pytestmark = pytest.mark.timeout(300)


class Served:
    """Handlers that run with a real Kopf, and their store."""

    def __init__(self, session, of_kopf, kinds):
        self.store = Store()
        self.changes = []
        self.sources = Sources(
            session,
            self.store,
            kinds,
            metrics=Metrics(),
            take=self.changes.extend,
            recheck_seconds=0.3,
        )
        self.checks = []
        policies = PolicyController(
            session,
            self.store.world,
            class_version=lambda: "resource.k8s.io/v1",
            restricts_namespaces=False,
            now=lambda: datetime(2026, 1, 1, tzinfo=UTC),
        )
        maintenances = MaintenanceController(
            session,
            self.store.world,
            rules_version=lambda: "resource.k8s.io/v1beta2",
            working_rules_version=lambda: "resource.k8s.io/v1beta2",
            is_followed=lambda: True,
            recorder=EventRecorder(session, controller="drakit.dev/operator", instance="test"),
        )
        self.handlers = Handlers(
            of_kopf,
            self.sources,
            {POLICIES: policies, MAINTENANCES: maintenances},
            check=lambda kind, name, seconds: self.checks.append(name),
            on_started=lambda: None,
        )

    async def run(self):
        async with asyncio.TaskGroup() as group:
            group.create_task(self.sources.run())
            group.create_task(self.handlers.run())

    def sizes(self):
        return {kind.plural: self.store.size(kind) for kind in KINDS}


@pytest.fixture
def serve(cluster, tmp_path):
    @asynccontextmanager
    async def start(*, until_complete=True, kinds=KINDS):
        config = cluster.write_kubeconfig(tmp_path)
        async with (
            await connect(config, user_agent="test") as session,
            await connect(config, user_agent="test") as of_kopf,
        ):
            served = Served(session, of_kopf, kinds)
            running = asyncio.create_task(served.run())
            try:
                if until_complete:
                    await until(served.sources.complete.is_set)
                yield served
                assert not running.done(), "something ended Kopf"
            finally:
                running.cancel()
                await asyncio.wait({running})

    return start


def add_all(cluster):
    cluster.pod("p", "c")
    cluster.node("n")
    cluster.store(PATHS["namespaces"], {})
    cluster.store(PATHS["resourcequotas"], {})
    cluster.claim("c")
    cluster.template("t")
    cluster.slice("s", "g0")
    cluster.device_class("gpu")
    cluster.add_rule("r", driver="d")
    cluster.add_report("n", "serial")
    cluster.add_policy("serial")
    cluster.add_maintenance("m", driver="none")
    cluster.add_driver("d")


def all_of(number):
    return dict.fromkeys(PATHS, number)


def test_kopf_calls_the_functions_that_our_source_replaces():
    assert queueing.watching is watching
    assert observation.scanning is scanning
    assert watching.infinite_watch is kopf_import._infinite_watch
    assert scanning.scan_resources is kopf_import._scan_resources
    for module, name in ((queueing, "infinite_watch"), (observation, "scan_resources")):
        functions = (each for each in vars(module).values() if hasattr(each, "__code__"))
        assert any(name in each.__code__.co_names for each in functions), f"Kopf moved {name}"


async def test_each_kind_has_a_handler(cluster, serve):
    async with serve() as served:
        registry = served.handlers.registry()
        selectors = registry._watching.get_all_selectors()
        assert {(each.group, each.plural or each.any_name) for each in selectors} == {
            (kind.group, kind.plural) for kind in KINDS
        }
        assert not any(handler.requires_finalizer for handler in registry._changing._handlers)


async def test_a_kind_that_is_disabled_has_no_handler_that_kopf_would_miss(cluster, serve, caplog):
    kinds = [kind for kind in KINDS if kind not in (MAINTENANCES, POLICIES)]
    async with serve(kinds=kinds) as served:
        await asyncio.sleep(1.5)  # Kopf looks for what it must watch each second
        selectors = served.handlers.registry()._watching.get_all_selectors()
        assert {each.plural or each.any_name for each in selectors} == {k.plural for k in kinds}
    assert [each.message for each in caplog.records if each.levelname == "WARNING"] == []


@pytest.mark.parametrize("word", ["watched", "in a gap"])
async def test_objects_of_every_kind_come_and_go(cluster, serve, word):
    async with serve() as served:
        assert served.sizes() == all_of(0)
        add_all(cluster)
        await until(lambda: served.sizes() == all_of(1) | {"deviceclasses": 2})
        for path in (*PATHS.values(), CLASS_OF_POLICY):
            (cluster.remove if word == "watched" else cluster.forget)(path)
        if word == "in a gap":
            cluster.expire_history()
            cluster.drop_watches()
        await until(lambda: served.sizes() == all_of(0))


async def test_an_object_and_the_one_that_replaces_it_are_handled_in_their_order(cluster, serve):
    async with serve() as served:
        cluster.claim("c")
        body = cluster.object(PATHS["resourceclaims"])
        for number in range(30):
            cluster.remove(PATHS["resourceclaims"])
            metadata = {**body["metadata"], "uid": f"uid-{number}"}
            cluster.store(PATHS["resourceclaims"], {**body, "metadata": metadata})
        cluster.pod("last", "c")
        await until(lambda: served.store.size(PODS) == 1)
        await until(lambda: getattr(served.store.world.claim("lab", "c"), "uid", "") == "uid-29")


async def test_what_handlers_do_not_take_waits_in_the_connection(cluster, serve, monkeypatch):
    monkeypatch.setattr(sources, "IN_FLIGHT", 10)
    held = asyncio.Event()
    async with serve() as served:
        channel = served.sources._channels[CLAIMS]
        get = channel.get

        async def hold():
            await held.wait()
            return await get()

        monkeypatch.setattr(channel, "get", hold)
        for number in range(200):
            cluster.claim(f"c{number}")
        await until(lambda: channel._events.qsize() >= 9)
        await asyncio.sleep(0.2)
        assert channel._events.qsize() <= 10
        held.set()
        await until(lambda: served.store.size(CLAIMS) == 200)


@pytest.mark.parametrize("status", [401, 403, 404, 500])
async def test_no_answer_of_the_api_server_ends_kopf(cluster, serve, status):
    async with serve() as served:
        add_all(cluster)
        await until(lambda: served.sizes() == all_of(1) | {"deviceclasses": 2})
        for plural in PATHS:
            for method in ("GET", "WATCH"):
                collection = PATHS[plural].rpartition("/")[0].replace("/namespaces/lab", "")
                cluster.fail(method, collection, status=status, times=1000)
        cluster.drop_watches()
        await until(lambda: not served.sources.is_current or served.store.size(POLICIES) == 0)
        cluster.heal()
        cluster.pod("late", "c")
        await until(lambda: served.store.size(PODS) == 2)
        await until(lambda: served.store.size(RULES) == served.store.size(POLICIES) == 1)


async def test_a_policy_is_left_to_the_queue_while_not_everything_is_listed(cluster, serve):
    path = PATHS["hostdevicepolicies"]
    cluster.add_policy("serial")
    for method in ("GET", "WATCH"):
        cluster.fail(method, "/api/v1/pods", status=500, times=1000)
    async with serve(until_complete=False) as served:
        await until(lambda: served.checks == ["serial"])
        await asyncio.sleep(0.2)
        assert "conditions" not in (written := cluster.object(path).get("status", {}))
        assert "progress" not in written.get("kopf", {}), "Kopf does not try again by itself"
        cluster.heal()


async def test_a_crd_that_is_away_for_a_while_is_found_within_seconds(cluster, serve):
    async with serve() as served:
        cluster.add_policy("serial")
        await until(lambda: served.store.size(POLICIES) == 1)
        cluster.served["drakit.dev"] = []
        cluster.remove(PATHS["hostdevicepolicies"])
        cluster.drop_watches()
        await until(lambda: isinstance(served.sources._known[POLICIES], sources.Absence))
        await until(
            lambda: all(reflector.last_error is None for _, reflector in served.sources._followed())
        )
        cluster.served["drakit.dev"] = [crds.VERSION]
        cluster.add_policy("kvm")
        path = f"/apis/{crds.API_VERSION}/hostdevicepolicies/kvm"
        await until(lambda: (cluster.object(path) or {}).get("status", {}).get("conditions"))
