"""The budget of the store: what counts, what is left of an object beyond it, and who loses."""

import gc
import tracemalloc
from dataclasses import replace

import orjson
import pytest

from drakit_explain.broken import broken_claim
from drakit_explain.kinds import CLAIMS, PODS, REPORTS, SLICES, TEMPLATES
from drakit_explain.model import (
    ClaimFacts,
    Constraint,
    DeviceID,
    ExtendedRequest,
    Placement,
    PodClaim,
    PodFacts,
    Request,
    Result,
    TemplateFacts,
)
from drakit_explain.pending import Verdict
from drakit_explain.projection import project_claim, project_pod
from drakit_formats.resource.nodes import NodeTerm, Requirement
from drakit_operator.budgets import ContentBudgets, NodeBudgets
from drakit_operator.store import Store
from tests.fakes.world import ANY, POD, explain, holding, node, request, world_of
from tests.fakes.world import claim as claim_of

LIMIT = 100_000
"""Bytes that the budgets of most tests allow."""


def claim(number, *, size=40_000, namespace="lab", uid=None, allocated=False):
    """A claim with a content of its own."""
    selector = f"{number}-{namespace}-".ljust(size, "x")
    return ClaimFacts(
        namespace=namespace,
        name=f"c{number}",
        uid=uid or f"{namespace}-c{number}",
        requests=(Request(name="gpu", device_class="gpu.example", selectors=(selector,)),),
        constraints=(Constraint(attribute="d/a"),),
        allocated=allocated,
    )


def pod(number, *, size=40_000, zone="", claims=(PodClaim(name="gpu", claim="c"),)):
    key = (zone or str(number)).ljust(size, "x")
    return PodFacts(
        namespace="lab",
        name=f"p{number}",
        uid=f"p{number}",
        claims=claims,
        extended=(ExtendedRequest("c", "example.com/gpu", 1),),
        requests=(("cpu", 1),),
        placement=Placement(affinity=(NodeTerm((), (Requirement(key, "Exists"),)),)),
    )


def is_whole(fact):
    if isinstance(fact, PodFacts):
        return not fact.placement.unread
    return not any(each.unsupported for each in fact.requests)


@pytest.fixture
def budgets():
    return ContentBudgets(limit_bytes=LIMIT)


def test_different_contents_count_together(budgets, caplog):
    facts = [claim(1), pod(2), claim(3), pod(4), claim(5)]
    assert [is_whole(budgets.admit(each)) for each in facts] == [True, True, False, False, False]
    (logged,) = caplog.records
    assert (logged.namespace, logged.limit_bytes) == ("lab", LIMIT)


def test_equal_contents_count_once_and_are_one_object(budgets):
    pods = [budgets.admit(pod(number, zone="a")) for number in range(50)]
    assert all(each.placement is pods[0].placement for each in pods)
    made = [budgets.admit(claim(1, uid=str(number))) for number in range(50)]
    assert all(is_whole(each) for each in made)
    assert all(each.requests is made[0].requests for each in made)


def test_equal_contents_are_in_memory_once():
    budgets = ContentBudgets()
    kept = [budgets.admit(pod(0, zone="z"))]
    tracemalloc.start()
    try:
        kept += [budgets.admit(pod(number, zone="z")) for number in range(1, 100)]
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all(each.placement is kept[0].placement for each in kept)
    assert size_bytes < 20 * 40_000


def test_a_claim_beyond_the_budget_keeps_its_allocation(budgets):
    whole = claim(1, size=LIMIT, allocated=True)
    kept = budgets.admit(whole)
    (request,) = kept.requests
    assert (request.selectors, kept.constraints) == ((), ())
    assert "namespace lab has too many of them" in request.unsupported
    assert replace(kept, requests=whole.requests, constraints=whole.constraints) == whole


def test_a_pod_beyond_the_budget_keeps_its_claims(budgets):
    kept = budgets.admit(pod(1, size=LIMIT))
    assert kept.claims == (PodClaim(name="gpu", claim="c"),)
    assert (kept.extended, kept.requests, kept.placement.affinity) == ((), (), None)
    assert "namespace lab" in kept.placement.unread


def test_an_object_that_is_seen_again_counts_once(budgets):
    for _ in range(9):
        assert is_whole(budgets.admit(claim(1)))
    assert is_whole(budgets.admit(claim(2)))


def test_an_object_that_changes_gives_its_former_content_back(budgets):
    budgets.admit(claim(1, size=90_000))
    assert is_whole(budgets.admit(claim(9, size=90_000, uid="lab-c1")))


def test_a_content_counts_until_its_last_user_is_gone(budgets):
    first, second = pod(1, size=90_000, zone="a"), pod(2, size=90_000, zone="a")
    budgets.admit(first)
    budgets.admit(second)
    budgets.release(first.uid)
    assert not is_whole(budgets.admit(claim(3)))
    budgets.release(second.uid)
    budgets.release(second.uid)
    assert is_whole(budgets.admit(claim(3)))


def test_refused_contents_have_room_again_when_others_are_gone(budgets):
    for fact in (claim(1), claim(2, size=55_000), claim(3)):
        budgets.admit(fact)
    assert not budgets.take_room(ClaimFacts)
    budgets.release(claim(1).uid)
    assert not budgets.take_room(PodFacts), "no pod was refused"
    assert budgets.take_room(ClaimFacts)
    assert not budgets.take_room(ClaimFacts), "only once"


# ---------------------------------------------------------------- the sum of namespaces


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(
        "drakit_operator.store.ContentBudgets", lambda: ContentBudgets(limit_bytes=LIMIT)
    )
    return Store()


def apply(store, kind, fact):
    admitted = store.admit(fact)
    store.apply(kind, admitted)
    return is_whole(admitted)


def whole_claims(store, namespace):
    return [
        fact.name
        for fact in store.world.of(ClaimFacts).values()
        if fact.namespace == namespace and is_whole(fact)
    ]


def test_the_namespace_with_most_content_loses_its_newest_first(store):
    for number in range(8):
        assert apply(store, CLAIMS, claim(number, size=11_000, namespace="large"))
    assert apply(store, CLAIMS, claim(1, size=20_000, namespace="small"))
    assert whole_claims(store, "large") == [f"c{number}" for number in range(6)]
    assert whole_claims(store, "small") == ["c1"]
    assert not apply(store, CLAIMS, claim(9, size=30_000, namespace="large"))
    assert whole_claims(store, "small") == ["c1"]


def test_a_namespace_with_little_content_loses_none_to_many_with_more(store):
    assert apply(store, CLAIMS, claim(1, size=500, namespace="innocent"))
    for number in range(20):
        for namespace in range(20):
            apply(store, CLAIMS, claim(number, size=1000, namespace=f"n{namespace}"))
    assert apply(store, CLAIMS, claim(2, size=500, namespace="innocent"))
    assert whole_claims(store, "innocent") == ["c1", "c2"]


def test_an_object_that_waits_for_the_end_of_a_list_can_lose_its_content(store):
    listed = [store.admit(claim(number, size=30_000, namespace="large")) for number in range(3)]
    assert all(map(is_whole, listed))
    replacing = store.replace(CLAIMS, listed)
    next(replacing)
    assert is_whole(store.admit(pod(1, size=20_000)))
    assert [change for change in replacing if change]
    assert len(whole_claims(store, "large")) == 2
    store.apply(CLAIMS, listed[-1])
    assert len(whole_claims(store, "large")) == 2


def test_an_object_that_has_lost_its_content_has_it_again_after_a_list(store):
    large = [claim(number, size=31_000, namespace="large") for number in range(3)]
    for each in large:
        apply(store, CLAIMS, each)
    assert apply(store, PODS, pod(1, size=25_000))
    assert not store.take_room(CLAIMS)
    list(store.replace(PODS, []))
    assert store.take_room(CLAIMS)
    list(store.replace(CLAIMS, [store.admit(each) for each in large]))
    assert len(whole_claims(store, "large")) == 3


def hostile_pod(namespace, number):
    """A pod with 62 KiB of empty terms, and one that selects."""
    term = {"matchExpressions": [{"key": f"k{number}", "operator": "Exists"}]}
    terms = {"nodeSelectorTerms": [{}] * 20_500 + [term]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    return project_pod(
        {
            "metadata": {
                "namespace": namespace,
                "name": f"p{number}",
                "uid": f"{namespace}{number}",
            },
            "spec": {
                "resourceClaims": [{"name": "c", "resourceClaimName": "c"}],
                "affinity": {"nodeAffinity": required},
            },
        }
    )


def hostile_claim(namespace, number):
    """A claim whose 60 KiB of JSON are short tolerations."""
    tolerations = [{"key": f"{number}-{each}"} for each in range(3_700)]
    request = {"name": "r", "exactly": {"deviceClassName": "c", "tolerations": tolerations}}
    metadata = {"namespace": namespace, "name": f"c{number}", "uid": f"{namespace}{number}"}
    body = {"metadata": metadata, "spec": {"devices": {"requests": [request]}}}
    assert len(orjson.dumps(body)) > 60_000
    return project_claim(body)


@pytest.mark.parametrize("fact_of", [hostile_pod, hostile_claim])
def test_large_objects_of_many_namespaces_take_no_more_memory_than_the_limit(fact_of):
    budgets = ContentBudgets(limit_bytes=3 << 20)
    tracemalloc.start()
    try:
        kept = [
            budgets.admit(fact_of(f"n{namespace}", number))
            for namespace in range(4)
            for number in range(4)
        ]
        kept = [budgets.without_lost(each) for each in kept]
        gc.collect()
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept) == 16
    assert size_bytes < 4 << 20


# ---------------------------------------------------------------- in the store


def test_an_object_of_the_same_name_replaces_the_content_of_the_former(store):
    assert apply(store, CLAIMS, claim(1))
    assert apply(store, CLAIMS, replace(claim(9), name="c1"))
    assert apply(store, CLAIMS, claim(2))


def test_an_object_that_a_list_lacks_gives_its_content_back(store):
    """Also one that was admitted for a list that was never complete."""
    assert apply(store, PODS, pod(0, size=15_000))
    store.admit(claim(1, size=80_000))
    list(store.replace(CLAIMS, []))
    assert apply(store, CLAIMS, claim(2, size=80_000))
    list(store.replace(PODS, []))
    requests = claim(3, size=15_000).requests
    assert apply(
        store, TEMPLATES, TemplateFacts(namespace="lab", name="t", uid="t", requests=requests)
    )


def test_a_pod_without_devices_has_no_content(store):
    plain = replace(pod(1, size=90_000, claims=()), extended=())
    assert store.admit(plain).placement == Placement()
    assert apply(store, CLAIMS, claim(1, size=90_000))


def test_a_pod_whose_content_is_not_known_is_stored_for_it_may_request_devices(store):
    unread = PodFacts(namespace="lab", name="p", uid="p", placement=Placement(unread="large"))
    store.apply(PODS, store.admit(unread))
    assert store.world.pod("lab", "p") is not None


# ---------------------------------------------------------------- nodes


def published(number, *, node="n1", devices=20, driver="d"):
    """A slice with devices that have nothing in common."""
    serial = {"string": "s" * 60}
    names = [f"{number}-{each}-".ljust(60, "x") for each in range(devices)]
    spec = {
        "driver": driver,
        "nodeName": node,
        "pool": {"name": node, "generation": 1, "resourceSliceCount": number + 1},
        "devices": [
            {"name": name, "attributes": {f"a{name}": {"string": name}, "b": serial}}
            for name in names
        ],
    }
    name = f"{node}-{number}"
    return SLICES.project({"metadata": {"name": name, "uid": name}, "spec": spec}, "v1")


def reported(number, *, node="n1"):
    policies = [
        {"name": f"{number}-{each}", "uid": "u", "problem": f"{number}-{each}-".ljust(1024, "x")}
        for each in range(20)
    ]
    return REPORTS.project(
        {
            "metadata": {"name": f"{node}.d{number}", "uid": f"{node}.d{number}"},
            "spec": {"nodeName": node, "driver": f"d{number}"},
            "status": {"policies": policies},
        },
        "v1beta1",
    )


@pytest.mark.parametrize("fact_of", [published, reported])
def test_what_a_node_publishes_has_a_limit(fact_of, caplog):
    budgets = NodeBudgets(limit_bytes=LIMIT)
    facts = [budgets.admit(fact_of(number)) for number in range(20)]
    whole = [each == fact_of(number) for number, each in enumerate(facts)]
    assert whole[0]
    assert 0 < sum(whole) < 10
    assert whole == sorted(whole, reverse=True), "the first ones are kept"
    assert [record.node for record in caplog.records] == ["n1"]
    assert budgets.admit(fact_of(0, node="n2")) == fact_of(0, node="n2")
    assert budgets.admit(fact_of(0)) == fact_of(0), "an object that is seen again counts once"
    kind = type(facts[0])
    assert not budgets.take_room(kind)
    budgets.retain(kind, [facts[1].uid])
    assert budgets.take_room(kind)
    assert not budgets.take_room(kind), "only once"
    assert budgets.admit(fact_of(19)) == fact_of(19)


def test_the_devices_of_a_node_take_no_more_memory_than_its_limit():
    budgets = NodeBudgets(limit_bytes=1 << 20)
    tracemalloc.start()
    try:
        kept = [budgets.admit(published(number, devices=64)) for number in range(64)]
        devices = sum(len(each.devices) for each in kept)
        gc.collect()
        size_bytes, _ = tracemalloc.get_traced_memory()
        kept.clear()
        gc.collect()
        size_bytes -= tracemalloc.get_traced_memory()[0]  # the rest is in caches with own limits
    finally:
        tracemalloc.stop()
    assert 0 < devices < 64 * 64
    assert 0 < size_bytes <= 1 << 20


def test_answers_that_could_depend_on_devices_without_room_are_undecided():
    budgets = NodeBudgets(limit_bytes=LIMIT)
    world = world_of(ANY, node("n1"), claim_of(request(count=250)))
    for number in range(12):
        world.apply(budgets.admit(replace(published(number), pool_slices=12)))
    found = explain(POD, world)
    assert found.verdict is Verdict.UNDECIDED
    assert found.unknown == ("pool n1 of driver d has more devices than drakit evaluates",)
    device = DeviceID("d", "n1", published(11).devices[0].name)
    held = replace(holding("held", device.device), results=(Result(request="r", device=device),))
    world.apply(held)
    assert broken_claim(held, world) == ()
    world.apply(replace(published(11), pool_slices=12, devices=()))
    for number in range(11):
        world.apply(replace(published(number), pool_slices=12))
    (gone,) = broken_claim(held, world)
    assert gone.code == "DeviceGone"
