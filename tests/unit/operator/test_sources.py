"""The sources: which kinds are followed, what is known of unreadable objects, and of gaps."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from drakit_daemon.kube import connect
from drakit_daemon.metrics import text_of
from drakit_explain.kinds import (
    CLAIMS,
    CLASSES,
    KINDS,
    MAINTENANCES,
    NODES,
    PODS,
    POLICIES,
    RULES,
    SLICES,
)
from drakit_explain.model import ClaimFacts, PodClaim, PodFacts, Request
from drakit_explain.pending import Verdict
from drakit_explain.world import Name
from drakit_formats import crds
from drakit_operator import sources
from drakit_operator.budgets import ContentBudgets
from drakit_operator.kinds import Served
from drakit_operator.metrics import Metrics
from drakit_operator.sources import Sources
from drakit_operator.store import Store
from tests.fakes.world import explain
from tests.unit.operator.replicas import until

V1 = "/apis/resource.k8s.io/v1"
CLAIM_PATH = f"{V1}/namespaces/lab/resourceclaims"
DEEP = "[" * 1200 + "]" * 1200

pytestmark = pytest.mark.timeout(300)


class Followed:
    """Sources that run, with their store and the changes that they handed over."""

    def __init__(self, session, *, recheck_seconds):
        self.store = Store()
        self.metrics = Metrics()
        self.batches = []
        self.sources = Sources(
            session,
            self.store,
            KINDS,
            metrics=self.metrics,
            take=self.batches.append,
            recheck_seconds=recheck_seconds,
        )

    async def run(self):
        """Follow the kinds; what Kopf and the handlers do with events is tested with them."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.sources.run())
            for kind in KINDS:
                group.create_task(self.handle(kind))

    async def handle(self, kind):
        while True:
            self.sources.handle(kind, await self.sources.next_event(kind))

    @property
    def numbers(self):
        return text_of(self.metrics.registry).decode()

    def names(self, kind):
        return {name.name for name in self.store.world.of(kind.type)}

    async def listed(self, kind, size):
        await until(lambda: self.store.size(kind) == size)

    def changed(self):
        return [change.name.name for batch in self.batches for change in batch]


@pytest.fixture
def follow(cluster, tmp_path):
    @asynccontextmanager
    async def start(*, complete=True, recheck_seconds=0.2):
        config = cluster.write_kubeconfig(tmp_path)
        async with await connect(config, user_agent="test") as session:
            followed = Followed(session, recheck_seconds=recheck_seconds)
            running = asyncio.create_task(followed.run())
            try:
                if complete:
                    async with asyncio.timeout(20):
                        await followed.sources.complete.wait()
                yield followed
            finally:
                running.cancel()
                await asyncio.wait({running})

    return start


@pytest.mark.parametrize("streams", [True, False])
async def test_everything_is_known_then_every_change(cluster, follow, streams):
    cluster.watch_lists = streams
    for number in range(5):
        cluster.claim(f"c{number}")
    async with follow() as followed:
        assert followed.sources.is_current
        assert len(followed.changed()) == followed.store.size(CLAIMS) == 5
        versions = {kind: followed.sources.version_of(kind).rpartition("/")[2] for kind in KINDS}
        assert versions == {
            kind: crds.VERSION if kind.is_ours else {RULES: "v1beta2"}.get(kind, "v1")
            for kind in KINDS
        }
        cluster.claim("new")
        cluster.remove(f"{CLAIM_PATH}/c0")
        await until(lambda: followed.names(CLAIMS) == {"c1", "c2", "c3", "c4", "new"})
        await until(lambda: followed.changed()[5:] == ["new", "c0"])
    assert ("POST", f"{V1}/resourceclaims") not in cluster.requests


async def test_a_long_list_gives_the_loop_back_and_nothing_is_current_until_its_end(
    cluster, follow, monkeypatch
):
    monkeypatch.setattr("drakit_operator.sources.AT_ONCE", 3)
    for number in range(10):
        cluster.claim(f"c{number}")
    async with follow() as followed:
        seen = []

        def take(changes):
            seen.append((len(changes), followed.store.size(CLAIMS), followed.sources.is_current))

        followed.sources._take = take
        for number in range(8):
            cluster.forget(f"{CLAIM_PATH}/c{number}")
        cluster.expire_history()
        cluster.drop_watches()
        await followed.listed(CLAIMS, 2)
        await until(lambda: followed.sources.is_current)
    # Two listed names come first, and two objects that have not changed last.
    assert seen == [(1, 9, False), (3, 6, False), (3, 3, False), (1, 2, False)]


async def test_changes_of_a_moment_are_handed_over_together(cluster, follow):
    async with follow() as followed:
        for number in range(30):
            cluster.slice(f"s{number}", "g0")
        await followed.listed(SLICES, 30)
        await until(lambda: len(followed.changed()) == 30)
        assert len(followed.batches) < 15


async def test_only_pending_pods_are_followed(cluster, follow):
    cluster.pod("waits", "c")
    cluster.pod("runs", "c", phase="Running")
    async with follow() as followed:
        assert followed.names(PODS) == {"waits"}
        cluster.pod("waits", "c", phase="Running")
        await followed.listed(PODS, 0)


async def test_a_deletion_in_a_gap_is_found_and_what_has_not_changed_is_not_kept_twice(
    cluster, follow
):
    cluster.slice("s1", "g0")
    cluster.device_class("gpu")
    async with follow() as followed:
        before = followed.store.find(SLICES, Name("", "s1"))
        followed.batches.clear()
        cluster.forget(f"{V1}/deviceclasses/gpu")
        cluster.expire_history()
        cluster.drop_watches()
        await followed.listed(CLASSES, 0)
        assert followed.changed() == ["gpu"]
        await until(lambda: followed.sources.is_current)
        assert followed.store.find(SLICES, Name("", "s1")) is before


async def test_a_claim_that_is_nested_too_deep_is_known_by_name(cluster, follow, caplog):
    cluster.verbatim["@deep"] = DEEP
    config = [{"opaque": {"driver": "d", "parameters": {"x": "@deep"}}}]
    deep = {"spec": {"devices": {"config": config}}}
    for number in range(5):
        cluster.claim(f"c{number}")
    cluster.store(f"{CLAIM_PATH}/listed", deep)
    async with follow() as followed:
        assert followed.store.size(CLAIMS) == 6
        cluster.store(f"{CLAIM_PATH}/watched", deep)
        await followed.listed(CLAIMS, 7)
        for name in ("listed", "watched"):
            (unread,) = followed.store.world.claim("lab", name).requests
            assert unread.unsupported == "allocation mode that cannot be read"
        (read,) = followed.store.world.claim("lab", "c4").requests
        assert not read.unsupported
        skipped = 'skipped_objects_total{kind="resourceclaims.resource.k8s.io"} 2.0'
        assert skipped in followed.numbers
    logged = {record.object for record in caplog.records if record.msg == "object skipped"}
    assert logged == {"lab/listed", "lab/watched"}


@pytest.mark.parametrize("kind", [CLASSES, SLICES], ids=str)
async def test_an_unreadable_class_or_slice_allows_no_conclusion(cluster, follow, kind):
    cluster.verbatim["@deep"] = DEEP
    cluster.device_class("gpu")
    cluster.slice("s1", "g0")
    name = {"deviceclasses": "gpu", "resourceslices": "s1"}[kind.plural]
    path = f"{V1}/{kind.plural}/{name}"
    cluster.store(path, {**cluster.object(path), "extra": "@deep"})
    async with follow() as followed:
        world = followed.store.world
        requests = (Request(name="gpu", device_class="gpu"),)
        world.apply(ClaimFacts(namespace="lab", name="c", uid="c", requests=requests))
        pod = PodFacts(namespace="lab", name="p", uid="p", claims=(PodClaim(name="g", claim="c"),))
        assert explain(pod, world).verdict is Verdict.UNDECIDED


@pytest.mark.parametrize("streams", [True, False], ids=["by-watch", "by-pages"])
async def test_managed_fields_that_are_nested_too_deep_cost_nothing_in_any_kind(
    cluster, follow, streams
):
    cluster.watch_lists = streams
    cluster.verbatim["@deep"] = DEEP
    cluster.device_class("gpu")
    cluster.slice("s1", "g0")
    cluster.node("n1")
    cluster.claim("c1")
    cluster.template("t1")
    cluster.pod("p1", "c1")
    cluster.add_rule("r1", driver="d")
    cluster.add_report("n1", "serial")
    cluster.add_policy("serial")
    cluster.add_maintenance("m", driver="none")
    cluster.add_driver("d")
    cluster.store("/api/v1/namespaces/lab", {"spec": {"finalizers": ["kubernetes"]}})
    cluster.store("/api/v1/namespaces/lab/resourcequotas/q", {"spec": {"hard": {"pods": "9"}}})

    def nest():
        for path in (
            "/api/v1/nodes/n1",
            "/api/v1/namespaces/lab",
            "/api/v1/namespaces/lab/resourcequotas/q",
            "/api/v1/namespaces/lab/pods/p1",
            f"{CLAIM_PATH}/c1",
            f"{V1}/namespaces/lab/resourceclaimtemplates/t1",
            f"{V1}/deviceclasses/gpu",
            f"{V1}/resourceslices/s1",
            "/apis/resource.k8s.io/v1beta2/devicetaintrules/r1",
            f"/apis/{crds.API_VERSION}/nodedevicereports/n1.hostdev.drakit.dev",
            f"/apis/{crds.API_VERSION}/hostdevicepolicies/serial",
            f"/apis/{crds.API_VERSION}/devicemaintenances/m",
            f"/apis/{crds.API_VERSION}/devicedrivers/d",
        ):
            body = cluster.object(path)
            managers = [{"manager": "m", "fieldsV1": {"name": "other", "x": "@deep"}}]
            metadata = body.pop("metadata") | {"managedFields": managers}
            cluster.store(path, {"metadata": metadata, **body})  # in the order of Kubernetes

    async with follow() as followed:
        before = {kind: dict(followed.store.world.of(kind.type)) for kind in KINDS}
        assert all(before.values())
        nest()
        cluster.claim("last")
        await followed.listed(CLAIMS, 2)
    async with follow() as followed:
        after = {kind: dict(followed.store.world.of(kind.type)) for kind in KINDS}
        del after[CLAIMS]["lab", "last"]
        for kind in (MAINTENANCES, POLICIES):
            after[kind] = {
                name: replace(fact, version=before[kind][name].version)
                for name, fact in after[kind].items()
            }
        assert after == before
        assert "skipped_objects_total{" not in followed.numbers


async def test_an_object_of_an_unknown_shape_affects_only_itself(cluster, follow, caplog):
    cluster.claim("good")
    for name, status in {"half": {"results": [{"driver": "d"}]}, "newer": {"results": 7}}.items():
        body = {"spec": {}, "status": {"allocation": {"devices": status}}}
        cluster.store(f"{CLAIM_PATH}/{name}", body)
    async with follow() as followed:
        assert followed.store.size(CLAIMS) == 3
        assert followed.store.world.claim("lab", "good").requests != ()
    logged = {record.object for record in caplog.records if record.msg == "object skipped"}
    assert logged == {"lab/half", "lab/newer"}


@pytest.mark.parametrize("kind", [PODS, CLAIMS], ids=str)
async def test_without_a_required_kind_nothing_is_complete_and_the_reason_is_reported(
    cluster, follow, kind
):
    cluster.forbidden.add(("watch", kind.plural))
    async with follow(complete=False) as followed:
        await until(followed.sources.problem)
        reason = f"{kind} cannot be listed: the operator is not allowed to watch {kind.plural}"
        assert reason in followed.sources.problem()
        await until(lambda: followed.numbers.count("kind_listed{") == len(KINDS))
        assert f'kind_listed{{kind="{kind}"}} 0.0' in followed.numbers
        await asyncio.sleep(0.5)
        assert not followed.sources.complete.is_set()
        cluster.forbidden.clear()
        await asyncio.wait_for(followed.sources.complete.wait(), 20)
        assert followed.sources.problem() is None


@pytest.mark.parametrize("kind", [NODES, RULES], ids=str)
async def test_other_kinds_are_left_out_and_named_until_they_are_allowed(
    cluster, follow, kind, caplog
):
    cluster.node("n1")
    cluster.add_rule("rule", driver="d")
    async with follow() as followed:
        assert followed.store.size(kind) == 1
        followed.batches.clear()
        cluster.forbidden.add(("list", kind.plural))
        await followed.listed(kind, 0)
        changed = (change.new or change.old for batch in followed.batches for change in batch)
        assert {type(each) for each in changed} == {kind.type}
        assert followed.store.world.hidden == {kind.type}
        assert followed.sources.problem() is None
        assert followed.sources.is_current
        assert f'listed{{kind="{kind}"}} 0.0' in followed.numbers
        await asyncio.sleep(0.5)
        cluster.forbidden.clear()
        await followed.listed(kind, 1)
        assert followed.store.world.hidden == frozenset()
    (logged,) = [record for record in caplog.records if record.msg == "kind is not watched"]
    assert (logged.kind, logged.levelname) == (str(kind), "WARNING")


async def test_a_kind_that_the_cluster_does_not_have_is_not_hidden(cluster, follow):
    cluster.served["resource.k8s.io"] = ["v1"]
    async with follow() as followed:
        assert followed.store.world.hidden == frozenset()
        assert "devicetaintrules" not in followed.numbers


async def test_a_list_that_is_refused_in_spite_of_the_review_leaves_its_kind_out(cluster, follow):
    for method in ("GET", "WATCH"):
        cluster.fail(method, "/api/v1/nodes", status=403, reason="Forbidden", times=1000)
    async with follow() as followed:
        assert followed.store.world.hidden == {NODES.type}
        assert followed.sources.is_current, "it is not known, and all else is"
        cluster.node("n1")
        cluster.heal()
        await followed.listed(NODES, 1)
        assert followed.store.world.hidden == frozenset()


@pytest.mark.parametrize(("kind", "status"), [(NODES, 403), (SLICES, 404)], ids=str)
async def test_a_watch_that_is_refused_for_a_moment_loses_nothing(cluster, follow, kind, status):
    cluster.node("n1")
    cluster.slice("s1", "g0")
    async with follow(recheck_seconds=300) as followed:
        path = Served(kind=kind, version=kind.versions[0]).path
        cluster.fail("WATCH", path, status=status, reason="Odd", times=1)
        cluster.drop_watches()
        await until(lambda: cluster.requests.count(("WATCH", path)) == 3)
        await followed.listed(kind, 1)
        await until(lambda: followed.sources.is_current)
        assert followed.sources.problem() is None
        assert followed.store.world.hidden == frozenset()
        assert f'listed{{kind="{kind}"}} 1.0' in followed.numbers


async def test_content_that_was_refused_comes_back_when_there_is_room(cluster, follow, monkeypatch):
    monkeypatch.setattr(
        "drakit_operator.store.ContentBudgets", lambda: ContentBudgets(limit_bytes=3000)
    )

    def create(name):
        selector = {"cel": {"expression": f"device.driver == '{name * 1000}'"}}
        exactly = {"deviceClassName": "gpu", "selectors": [selector]}
        body = {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}}
        cluster.resource("resourceclaims", name, body, namespace="lab")

    async with follow() as followed:

        def selectors(name):
            claim = followed.store.find(CLAIMS, Name("lab", name))
            return claim.requests[0].selectors

        create("c1")
        await followed.listed(CLAIMS, 1)
        create("c2")
        await followed.listed(CLAIMS, 2)
        assert selectors("c1")
        assert not selectors("c2")
        cluster.remove(f"{CLAIM_PATH}/c1")
        await until(lambda: selectors("c2"))
        await until(lambda: followed.changed() == ["c1", "c2", "c1", "c2"])
        assert followed.sources.is_current


async def test_while_a_kind_cannot_be_watched_the_store_is_not_current(
    cluster, follow, monkeypatch
):
    async with follow() as followed:
        cluster.fail("WATCH", f"{V1}/resourceclaims", status=500, times=1000)
        cluster.drop_watches()
        await until(lambda: not followed.sources.is_current)
        monkeypatch.setattr(sources, "LASTING_SECONDS", float("inf"))
        assert followed.sources.problem() is None, "a moment is no problem"
        monkeypatch.setattr(sources, "LASTING_SECONDS", 0)
        why = f"{CLAIMS} cannot be watched: WATCH"
        await until(lambda: why in (followed.sources.problem() or ""))
        cluster.heal()
        cluster.claim("new")
        await followed.listed(CLAIMS, 1)
        await until(lambda: followed.sources.is_current and followed.sources.problem() is None)
