"""The budgets of a namespace: what counts, what is left of an object beyond it, and who gets it."""

import asyncio
import tracemalloc
from dataclasses import replace

import pytest

from drakit_explain.kinds import CLAIMS, PODS, TEMPLATES
from drakit_explain.model import (
    ClaimFacts,
    Constraint,
    ExtendedRequest,
    Placement,
    PodClaim,
    PodFacts,
    Request,
    TemplateFacts,
)
from drakit_operator import budgets as module
from drakit_operator.budgets import ContentBudgets, TimeBudgets, Turns
from drakit_operator.store import Store

SELECTED = Request(name="gpu", device_class="gpu.example", count=2, selectors=("true",))


def claim(number, *, size=400, namespace="lab", **fields):
    requests = (replace(SELECTED, selectors=(f"device.driver == 'd{number}'",)),)
    return ClaimFacts(
        namespace=namespace,
        name=f"c{number}",
        uid=f"{namespace}-c{number}",
        requests=fields.pop("requests", requests),
        constraints=(Constraint(attribute="d/a"),),
        size_bytes=size,
        **fields,
    )


def pod(number, *, size=400, zone="", claims=(PodClaim(name="gpu", claim="c"),)):
    affinity = {"nodeSelectorTerms": [{"matchExpressions": [{"key": zone or str(number)}]}]}
    return PodFacts(
        namespace="lab",
        name=f"p{number}",
        uid=f"p{number}",
        claims=claims,
        extended=(ExtendedRequest("c", "example.com/gpu", 1),),
        requests=(("cpu", 1),),
        placement=Placement(affinity=affinity, size_bytes=size),
    )


def is_whole(fact):
    if isinstance(fact, PodFacts):
        return not fact.placement.unread
    return not any(each.unsupported for each in fact.requests)


@pytest.fixture
def budgets():
    return ContentBudgets(limit_bytes=1000)


def test_different_contents_of_a_namespace_count_together(budgets, caplog):
    facts = [claim(1), pod(2), claim(3), pod(4), claim(5)]
    assert [is_whole(budgets.admit(each)) for each in facts] == [True, True, False, False, False]
    (logged,) = caplog.records
    assert (logged.namespace, logged.limit_bytes) == ("lab", 1000)


def test_another_namespace_has_a_budget_of_its_own(budgets):
    for number in range(3):
        budgets.admit(claim(number))
    assert is_whole(budgets.admit(claim(1, namespace="innocent")))


def test_equal_contents_count_once_and_are_one_object(budgets):
    pods = [budgets.admit(pod(number, zone="a")) for number in range(50)]
    assert all(each.placement is pods[0].placement for each in pods)
    template = TemplateFacts(
        namespace="lab",
        name="t",
        uid="t",
        requests=(SELECTED,),
        constraints=(Constraint(attribute="d/a"),),
        size_bytes=400,
    )
    made = [budgets.admit(claim(number, requests=(replace(SELECTED),))) for number in range(50)]
    assert all(is_whole(each) for each in made)
    assert is_whole(budgets.admit(template))
    assert all(each.requests is made[0].requests for each in made)


def test_equal_contents_are_in_memory_once():
    budgets = ContentBudgets()
    kept = [budgets.admit(pod(0, zone="z" * 50_000))]
    tracemalloc.start()
    try:
        kept += [budgets.admit(pod(number, zone="z" * 50_000)) for number in range(1, 100)]
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all(each.placement is kept[0].placement for each in kept)
    assert size_bytes < 20 * 50_000


def test_a_claim_beyond_the_budget_keeps_its_allocation_names_and_classes(budgets):
    whole = claim(1, size=2000, allocated=True)
    kept = budgets.admit(whole)
    (request,) = kept.requests
    assert (request.name, request.device_class, request.count) == ("gpu", "gpu.example", 2)
    assert (request.selectors, kept.constraints) == ((), ())
    assert "namespace lab have more than 0 KiB" in request.unsupported
    assert replace(kept, requests=whole.requests, constraints=whole.constraints) == whole


def test_a_pod_beyond_the_budget_keeps_its_claims(budgets):
    kept = budgets.admit(pod(1, size=2000))
    assert kept.claims == (PodClaim(name="gpu", claim="c"),)
    assert (kept.extended, kept.requests, kept.placement.affinity) == ((), (), None)
    assert "namespace lab" in kept.placement.unread


def test_an_object_that_is_seen_again_counts_once(budgets):
    for _ in range(9):
        assert is_whole(budgets.admit(claim(1)))
    assert is_whole(budgets.admit(claim(2)))


def test_an_object_that_changes_gives_its_former_content_back(budgets):
    budgets.admit(claim(1, size=900))
    assert is_whole(budgets.admit(replace(claim(9, size=900), uid="lab-c1")))


def test_a_content_counts_until_its_last_user_is_gone(budgets):
    first, second = pod(1, size=900, zone="a"), pod(2, size=900, zone="a")
    budgets.admit(first)
    budgets.admit(second)
    budgets.release(first.uid)
    assert not is_whole(budgets.admit(claim(3)))
    budgets.release(second.uid)
    budgets.release(second.uid)
    assert is_whole(budgets.admit(claim(3)))


def test_refused_contents_have_room_again_when_others_are_gone(budgets):
    for fact in (claim(1), claim(2), claim(3), claim(1, namespace="other")):
        budgets.admit(fact)
    assert not budgets.take_room(ClaimFacts)
    budgets.release(claim(1, namespace="other").uid)
    assert not budgets.take_room(ClaimFacts), "its namespace has refused nothing"
    budgets.release(claim(1).uid)
    assert not budgets.take_room(PodFacts), "no pod was refused"
    assert budgets.take_room(ClaimFacts)
    assert not budgets.take_room(ClaimFacts), "only once"


# ---------------------------------------------------------------- in the store


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(
        "drakit_operator.store.ContentBudgets", lambda: ContentBudgets(limit_bytes=1000)
    )
    return Store()


def apply(store, kind, fact):
    admitted = store.admit(fact)
    store.apply(kind, admitted)
    return is_whole(admitted)


def test_an_object_of_the_same_name_replaces_the_content_of_the_former(store):
    assert apply(store, CLAIMS, claim(1))
    assert apply(store, CLAIMS, replace(claim(9), name="c1", uid="new"))
    assert apply(store, CLAIMS, claim(2))


def test_an_object_that_a_list_lacks_gives_its_content_back(store):
    """Also one that was admitted for a list that was never complete."""
    assert apply(store, PODS, pod(0, size=100))
    store.admit(claim(1, size=800))
    list(store.replace(CLAIMS, []))
    assert apply(store, CLAIMS, claim(2, size=800))
    list(store.replace(PODS, []))
    assert apply(store, TEMPLATES, replace_type(claim(3, size=150)))


def replace_type(fact):
    return TemplateFacts(
        namespace="lab", name="t", uid="t", requests=fact.requests, size_bytes=fact.size_bytes
    )


def test_a_pod_without_devices_has_no_content(store):
    plain = replace(pod(1, size=900, claims=()), extended=())
    assert store.admit(plain).placement == Placement()
    assert apply(store, CLAIMS, claim(1, size=900))


def test_a_pod_whose_content_is_not_known_is_stored_for_it_may_request_devices(store):
    unread = PodFacts(namespace="lab", name="p", uid="p", placement=Placement(unread="large"))
    store.apply(PODS, store.admit(unread))
    assert store.world.pod("lab", "p") is not None


# ---------------------------------------------------------------- time


@pytest.mark.looptime
async def test_time_is_paid_back_before_the_next_work():
    times = TimeBudgets(seconds=10, share=0.5)
    for _ in range(2):
        assert times.wait_seconds("lab") == 0
        times.charge("lab", 5)
    assert times.wait_seconds("lab") == 0, "nothing is left, and nothing is owed"
    times.charge("lab", 3)
    assert times.wait_seconds("lab") == 6
    await asyncio.sleep(6)
    assert times.wait_seconds("lab") == 0
    await asyncio.sleep(1000)
    times.charge("lab", 11)
    assert times.wait_seconds("lab") == 2, "no more than the budget is saved"


@pytest.mark.looptime
async def test_the_time_of_a_namespace_is_its_own_and_admins_have_no_limit():
    times = TimeBudgets(seconds=10, share=0.5)
    for namespace in ("lab", ""):
        times.charge(namespace, 100)
    assert times.wait_seconds("lab") == 180
    assert times.wait_seconds("innocent") == times.wait_seconds("") == 0


@pytest.mark.looptime
async def test_namespaces_with_a_whole_budget_have_no_record(monkeypatch):
    monkeypatch.setattr(module, "MAX_NAMESPACES", 2)
    times = TimeBudgets(seconds=10, share=0.5)
    times.charge("former", 1)
    times.charge("lab", 100)
    await asyncio.sleep(5)
    times.charge("next", 1)
    assert times._full_at.keys() == {"lab", "next"}
    assert times.wait_seconds("lab") == 175


async def take(turns, namespace, log, *, seconds=1.0):
    async with turns.turn(namespace):
        log.append(namespace)
        await asyncio.sleep(seconds)


async def test_the_next_turn_is_for_the_namespace_that_has_used_least():
    budgets = TimeBudgets(seconds=15, share=0.25)
    budgets.charge("hostile", 10)
    budgets.charge("busy", 5)
    turns, log = Turns(budgets), []
    async with asyncio.TaskGroup() as group:
        for namespace in ("hostile", "hostile", "busy", "innocent", ""):
            group.create_task(take(turns, namespace, log))
        await asyncio.sleep(0.5)
        assert turns.is_waiting("hostile")
        assert not turns.is_waiting("other")
    assert log == ["hostile", "innocent", "", "busy", "hostile"]
    assert not turns.is_waiting("hostile")


@pytest.mark.parametrize("at", ["before-its-turn", "with-its-turn"])
async def test_a_turn_that_is_canceled_goes_to_the_next(at):
    turns, log = Turns(TimeBudgets(seconds=15, share=0.25)), []
    async with turns.turn("a"):
        second = asyncio.create_task(take(turns, "b", log))
        third = asyncio.create_task(take(turns, "c", log))
        await asyncio.sleep(1)
        if at == "before-its-turn":
            second.cancel()
            await asyncio.sleep(1)
    second.cancel()
    await asyncio.wait({second, third})
    assert log == ["c"]
    await take(turns, "d", log)
    assert log == ["c", "d"]
