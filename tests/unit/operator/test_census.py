"""Lists that make up for what a watch cannot tell."""

import pytest

from drakit.explain.model import ClaimFacts, PodClaim, PodFacts, Request
from drakit.explain.pending import Verdict
from drakit.kube import ForbiddenError, Listing, connect
from drakit.metrics import text_of
from drakit_operator.kinds import CLAIMS, CLASSES, KINDS, PODS, SLICES, Name
from drakit_operator.metrics import Metrics
from drakit_operator.store import Store
from drakit_operator.watching.census import Census
from drakit_operator.watching.observer import Observer
from tests.fakes.world import explain

CLAIM_PATH = "/apis/resource.k8s.io/v1/namespaces/lab/resourceclaims"


@pytest.fixture
async def reader(cluster, tmp_path):
    async with await connect(cluster.write_kubeconfig(tmp_path), user_agent="test") as session:
        yield session


def census(reader, store, kinds=KINDS, *, observer=None):
    return Census(reader, store, kinds, observer=observer or Observer(Metrics()))


async def relist(reader, store, kinds):
    return (await census(reader, store, kinds).relist()).changes


async def sweep(reader, store, kinds):
    return await census(reader, store, kinds).sweep()


async def test_everything_is_listed(cluster, reader):
    for number in range(5):
        cluster.add_claim(f"c{number}", "gpu.example")
    store = Store()
    relisted = await census(reader, store).relist()
    assert store.size(CLAIMS) == len(relisted.changes) == 5
    assert relisted.versions == dict.fromkeys(KINDS, str(cluster.cluster.version))


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


async def test_a_kind_that_cannot_be_listed_is_reported_until_it_can(cluster, reader):
    cluster.fail("GET", "/apis/resource.k8s.io/v1/resourceslices", status=403, reason="Forbidden")
    metrics = Metrics()
    observer = Observer(metrics)
    listing = census(reader, Store(), observer=observer)
    with pytest.raises(ForbiddenError):
        await listing.relist()
    assert "resourceslices.resource.k8s.io cannot be listed" in observer.problem()
    assert 'listed{kind="resourceslices.resource.k8s.io"} 0.0' in text_of(metrics.registry).decode()
    assert 'listed{kind="pods"} 1.0' in text_of(metrics.registry).decode()
    await listing.relist()
    assert observer.problem() is None
    assert 'listed{kind="resourceslices.resource.k8s.io"} 1.0' in text_of(metrics.registry).decode()


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
    class Slow:
        async def read_list(self, path, keep, **options):
            answer = await reader.read_list(path, keep, **options)
            if path.endswith("/resourceclaims"):  # a user makes both after we have looked
                cluster.add_claim("new", "gpu.example")
                cluster.add_pod("new", "new")
            return answer

    store = Store()
    await relist(Slow(), store, KINDS)
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


async def test_a_sweep_asks_nothing_about_kinds_of_which_nothing_is_known(cluster, reader):
    assert await sweep(reader, Store(), KINDS) == []
    assert cluster.requests == []


async def test_what_comes_in_during_a_sweep_is_not_judged_by_its_list():
    store = Store()
    first, second = (
        {"metadata": {"name": name, "uid": name}, "spec": {}} for name in ("first", "second")
    )
    store.apply(CLASSES, CLASSES.project(first))

    class Slow:
        async def read_list(self, path, keep, **options):
            store.apply(CLASSES, CLASSES.project(second))  # a watch reports it meanwhile
            return Listing(items=[keep(first)], resource_version="1")

    assert await sweep(Slow(), store, [CLASSES]) == []
    assert set(store.uids(CLASSES)) == {Name("", "first"), Name("", "second")}
