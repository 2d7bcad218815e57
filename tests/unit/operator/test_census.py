"""Lists that make up for what a watch cannot tell."""

import pytest

from drakit.kube import connect
from drakit_operator.kinds import CLAIMS, CLASSES, KINDS, PODS, Name
from drakit_operator.store import Store
from drakit_operator.watching import census
from drakit_operator.watching.census import relist, sweep

CLAIM_PATH = "/apis/resource.k8s.io/v1/namespaces/lab/resourceclaims"


@pytest.fixture
async def reader(cluster, tmp_path):
    async with await connect(cluster.write_kubeconfig(tmp_path), user_agent="test") as session:
        yield session


@pytest.fixture
def small_pages(monkeypatch):
    monkeypatch.setattr(census, "PAGE_SIZE", 2)


@pytest.mark.usefixtures("small_pages")
async def test_everything_is_listed_page_by_page(cluster, reader):
    for number in range(5):
        cluster.add_claim(f"c{number}", "gpu.example")
    store = Store()
    changes = await relist(reader, store, KINDS)
    assert store.size(CLAIMS) == len(changes) == 5
    assert sum(path.endswith("/resourceclaims") for _, path in cluster.requests) == 3


@pytest.mark.usefixtures("small_pages")
async def test_pages_that_expire_are_read_again_as_a_whole(cluster, reader):
    for number in range(5):
        cluster.add_claim(f"c{number}", "gpu.example")
    cluster.fail("GET", "/apis/resource.k8s.io/v1/resourceclaims", status=410, reason="Expired")
    store = Store()
    await relist(reader, store, [CLAIMS])
    assert store.size(CLAIMS) == 5


async def test_only_pending_pods_are_listed(cluster, reader):
    cluster.add_pod("waits", "c")
    cluster.add_pod("runs", "c", phase="Running")
    store = Store()
    await relist(reader, store, [PODS])
    assert set(store.uids(PODS)) == {Name("lab", "waits")}


async def test_what_is_made_while_all_is_listed_is_not_taken_for_missing(cluster, reader):
    class Slow:
        async def get(self, path, *, params=None, timeout_seconds=10.0):
            answer = await reader.get(path, params=params, timeout_seconds=timeout_seconds)
            if path.endswith("/resourceclaims"):  # a user makes both after we have looked
                cluster.add_claim("new", "gpu.example")
                cluster.add_pod("new", "new")
            return answer

    store = Store()
    await relist(Slow(), store, KINDS)
    for pod in store.uids(PODS):
        assert store.claim("lab", pod.name) is not None


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
        async def get(self, path, *, params=None, timeout_seconds=10.0):
            store.apply(CLASSES, CLASSES.project(second))  # a watch reports it meanwhile
            return {"metadata": {}, "items": [first]}

    assert await sweep(Slow(), store, [CLASSES]) == []
    assert set(store.uids(CLASSES)) == {Name("", "first"), Name("", "second")}
