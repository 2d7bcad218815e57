"""Lists that make up for what a watch cannot tell."""

import pytest

from drakit.explain.model import ClaimFacts, PodClaim, PodFacts, Request
from drakit.explain.pending import Verdict
from drakit.kube import Listing, UnavailableError, connect
from drakit.metrics import text_of
from drakit_operator.kinds import (
    CLAIMS,
    CLASSES,
    KINDS,
    NODES,
    PODS,
    POLICIES,
    REPORTS,
    RULES,
    SLICES,
    Name,
)
from drakit_operator.metrics import Metrics
from drakit_operator.store import Store
from drakit_operator.watching.census import Census
from drakit_operator.watching.discovery import KindsMissingError
from drakit_operator.watching.observer import Observer
from tests.fakes.world import explain

CLAIM_PATH = "/apis/resource.k8s.io/v1/namespaces/lab/resourceclaims"


@pytest.fixture
async def reader(cluster, tmp_path):
    async with await connect(cluster.write_kubeconfig(tmp_path), user_agent="test") as session:
        yield session


class Delegate:
    """A session with another list."""

    def __init__(self, session):
        self.get, self.create = session.get, session.create


def census(reader, store, kinds=KINDS, *, observer=None):
    return Census(reader, store, kinds, observer=observer or Observer(Metrics()))


async def relist(reader, store, kinds):
    return (await census(reader, store, kinds).relist()).changes


async def sweep(reader, store, kinds):
    return (await census(reader, store, kinds).sweep()).changes


async def test_everything_is_listed(cluster, reader):
    for number in range(5):
        cluster.add_claim(f"c{number}", "gpu.example")
    store = Store()
    relisted = await census(reader, store).relist()
    assert store.size(CLAIMS) == len(relisted.changes) == 5
    assert {served.kind: served.version for served in relisted.versions} == {
        kind: {RULES: "v1beta2", POLICIES: "v1alpha1", REPORTS: "v1alpha1"}.get(kind, "v1")
        for kind in KINDS
    }
    assert set(relisted.versions.values()) == {str(cluster.cluster.version)}


async def test_a_claim_that_is_nested_too_deep_is_skipped_and_not_taken_for_missing(
    cluster, reader, caplog
):
    cluster.verbatim["@deep"] = "[" * 1200 + "]" * 1200
    config = [{"opaque": {"driver": "d", "parameters": {"x": "@deep"}}}]
    for number in range(5):
        cluster.add_claim(f"c{number}", "gpu.example")
    cluster.store(f"{CLAIM_PATH}/deep", {"spec": {"devices": {"config": config}}})
    store, metrics = Store(), Metrics()
    listing = census(reader, store, observer=Observer(metrics))
    await listing.relist()
    await listing.relist()
    assert store.size(CLAIMS) == 6
    assert store.world.claim("lab", "deep").requests == ()
    assert store.world.claim("lab", "c4").requests != ()
    kind = 'kind="resourceclaims.resource.k8s.io"'
    assert (
        f"drakit_operator_skipped_objects_total{{{kind}}} 2.0" in text_of(metrics.registry).decode()
    )
    (logged,) = [record for record in caplog.records if record.msg == "object skipped"]
    assert (logged.object, logged.kind) == ("lab/deep", "resourceclaims.resource.k8s.io")


@pytest.mark.parametrize("kind", [CLASSES, SLICES], ids=str)
async def test_an_unreadable_class_or_slice_allows_no_conclusion(cluster, reader, kind):
    cluster.verbatim["@deep"] = "[" * 1200 + "]" * 1200
    cluster.add_class("gpu.example", "d")
    cluster.add_slice("s1", "d", "g0")
    name = {"deviceclasses": "gpu.example", "resourceslices": "s1"}[kind.plural]
    path = f"/apis/resource.k8s.io/v1/{kind.plural}/{name}"
    cluster.store(path, {**cluster.object(path), "extra": "@deep"})
    store = Store()
    await relist(reader, store, KINDS)
    requests = (Request(name="gpu", device_class="gpu.example"),)
    store.world.apply(ClaimFacts(namespace="lab", name="c", uid="c", requests=requests))
    pod = PodFacts(namespace="lab", name="p", uid="p", claims=(PodClaim(name="g", claim="c"),))
    assert explain(pod, store.world).verdict is Verdict.UNDECIDED


async def test_a_required_kind_that_cannot_be_listed_is_reported_until_it_can(cluster, reader):
    cluster.fail("GET", "/apis/resource.k8s.io/v1/resourceslices", status=500)
    metrics = Metrics()
    observer = Observer(metrics)
    listing = census(reader, Store(), observer=observer)
    with pytest.raises(UnavailableError):
        await listing.relist()
    assert "resourceslices.resource.k8s.io cannot be listed" in observer.problem()
    assert 'listed{kind="resourceslices.resource.k8s.io"} 0.0' in text_of(metrics.registry).decode()
    assert 'listed{kind="pods"} 1.0' in text_of(metrics.registry).decode()
    await listing.relist()
    assert observer.problem() is None
    assert 'listed{kind="resourceslices.resource.k8s.io"} 1.0' in text_of(metrics.registry).decode()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.required], ids=str)
async def test_without_a_required_kind_nothing_is_listed_and_the_reason_is_reported(
    cluster, reader, kind
):
    cluster.forbidden.add(("watch", kind.plural))
    observer = Observer(Metrics())
    with pytest.raises(KindsMissingError, match=f"{kind.plural}.*may not watch"):
        await census(reader, Store(), observer=observer).relist()
    assert f"{kind} cannot be listed: the operator may not watch it" in observer.problem()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.required], ids=str)
async def test_other_kinds_are_left_out_and_named_until_they_are_allowed(
    cluster, reader, kind, caplog
):
    cluster.add_template("tpl", "gpu.example")
    cluster.add_node("n1")
    cluster.add_rule("rule", driver="d")
    cluster.add_policy("serial")
    cluster.add_report("n1", "serial")
    metrics = Metrics()
    observer, store = Observer(metrics), Store()
    listing = census(reader, store, observer=observer)
    await listing.relist()
    assert store.size(kind) == 1
    cluster.forbidden.add(("list", kind.plural))
    assert (await listing.sweep()).outdated
    relisted = await listing.relist()
    assert [change.kind for change in relisted.changes] == [kind], "it is not kept up to date"
    assert kind not in {served.kind for served in relisted.versions}
    assert store.world.hidden == {kind.type}
    assert observer.problem() is None
    assert f'listed{{kind="{kind}"}} 0.0' in text_of(metrics.registry).decode()
    await listing.relist()
    (logged,) = [record for record in caplog.records if record.msg == "kind is not watched"]
    assert (logged.kind, logged.levelname) == (str(kind), "WARNING")
    assert not (await listing.sweep()).outdated
    cluster.forbidden.clear()
    assert (await listing.sweep()).outdated
    await listing.relist()
    assert store.size(kind) == 1
    assert store.world.hidden == frozenset()


async def test_a_list_that_is_refused_in_spite_of_the_review_leaves_its_kind_out(cluster, reader):
    cluster.fail("GET", "/api/v1/nodes", status=403, reason="Forbidden")
    store = Store()
    listing = census(reader, store)
    relisted = await listing.relist()
    assert len(relisted.versions) == len(KINDS) - 1
    assert store.world.hidden == {NODES.type}
    assert (await listing.sweep()).outdated, "the next run asks again"


async def test_an_object_of_an_unknown_shape_affects_only_itself(cluster, reader, caplog):
    cluster.add_claim("good", "gpu.example")
    for name, status in {"half": {"results": [{"driver": "d"}]}, "newer": {"results": 7}}.items():
        body = {"spec": {}, "status": {"allocation": {"devices": status}}}
        cluster.store(f"{CLAIM_PATH}/{name}", body)
    store, metrics = Store(), Metrics()
    await census(reader, store, observer=Observer(metrics)).relist()
    assert store.size(CLAIMS) == 3
    assert store.world.claim("lab", "good").requests != ()
    logged = {record.object for record in caplog.records if record.msg == "object skipped"}
    assert logged == {"lab/half", "lab/newer"}


async def test_a_sweep_goes_on_after_a_kind_that_cannot_be_listed(cluster, reader):
    cluster.add_claim("goes", "gpu.example")
    cluster.add_class("gpu.example", "d")
    store = Store()
    listing = census(reader, store)
    await listing.relist()
    cluster.remove(f"{CLAIM_PATH}/goes")
    cluster.remove("/apis/resource.k8s.io/v1/deviceclasses/gpu.example")
    cluster.fail("GET", "/apis/resource.k8s.io/v1/resourceclaims", status=500)
    swept = await listing.sweep()
    assert [change.name.name for change in swept.changes] == ["gpu.example"]
    assert [type(error) for error in swept.errors] == [UnavailableError]
    assert not swept.outdated


async def test_what_has_not_changed_is_not_kept_twice(cluster, reader):
    cluster.add_slice("s1", "d", "g0")
    store = Store()
    await relist(reader, store, KINDS)
    before = store.find(SLICES, Name("", "s1"))
    assert await relist(reader, store, KINDS) == []
    assert store.find(SLICES, Name("", "s1")) is before


async def test_only_pending_pods_are_listed(cluster, reader):
    cluster.add_pod("waits", "c")
    cluster.add_pod("runs", "c", phase="Running")
    store = Store()
    await relist(reader, store, [PODS])
    assert set(store.uids(PODS)) == {Name("lab", "waits")}


async def test_what_is_made_while_all_is_listed_is_not_taken_for_missing(cluster, reader):
    class Slow(Delegate):
        async def read_list(self, path, keep, **options):
            answer = await reader.read_list(path, keep, **options)
            if path.endswith("/resourceclaims"):  # a user makes both after we have looked
                cluster.add_claim("new", "gpu.example")
                cluster.add_pod("new", "new")
            return answer

    store = Store()
    await relist(Slow(reader), store, KINDS)
    for pod in store.uids(PODS):
        assert store.world.claim("lab", pod.name) is not None


async def test_a_sweep_removes_what_is_gone_and_adds_nothing(cluster, reader):
    cluster.add_claim("stays", "gpu.example")
    cluster.add_claim("goes", "gpu.example")
    cluster.add_claim("is-replaced", "gpu.example")
    store = Store()
    await relist(reader, store, KINDS)
    cluster.remove(f"{CLAIM_PATH}/goes")
    cluster.remove(f"{CLAIM_PATH}/is-replaced")
    cluster.add_claim("is-replaced", "gpu.example")
    cluster.add_claim("is-new", "gpu.example")
    changes = await sweep(reader, store, KINDS)
    assert {change.name.name for change in changes} == {"goes", "is-replaced"}
    assert set(store.uids(CLAIMS)) == {Name("lab", "stays")}


async def test_a_sweep_reads_no_more_than_metadata(cluster, reader):
    cluster.add_claim("stays", "gpu.example")
    store = Store()
    await relist(reader, store, [CLAIMS])
    assert await sweep(reader, store, [CLAIMS]) == []
    assert "as=PartialObjectMetadataList" in cluster.headers[-1]["Accept"]


async def test_a_sweep_lists_no_kind_of_which_nothing_is_known(cluster, reader):
    assert await sweep(reader, Store(), KINDS) == []
    asked = {path for method, path in cluster.requests if method == "GET"}
    assert asked == {"/apis/resource.k8s.io", "/apis/drakit.dev"}


async def test_what_comes_in_during_a_sweep_is_not_judged_by_its_list(cluster, reader):
    store = Store()
    first, second = (
        {"metadata": {"name": name, "uid": name}, "spec": {}} for name in ("first", "second")
    )
    store.apply(CLASSES, CLASSES.project(first, "v1"))

    class Slow(Delegate):
        async def read_list(self, path, keep, **options):
            store.apply(CLASSES, CLASSES.project(second, "v1"))  # a watch reports it meanwhile
            return Listing(items=[keep(first)], resource_version="1")

    assert await sweep(Slow(reader), store, [CLASSES]) == []
    assert set(store.uids(CLASSES)) == {Name("", "first"), Name("", "second")}
