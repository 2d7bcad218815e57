"""Questions to the allocator: what they contain, when they are planned, and for how long a verdict
is kept. No program is asked."""

import zlib
from contextlib import suppress
from dataclasses import replace

import orjson
import pytest

from drakit_explain import queries
from drakit_explain.allocation import AskedClaim, NotEvaluatedError
from drakit_explain.budget import Budget
from drakit_explain.devices import Amount, CapacityFacts, TaintFacts
from drakit_explain.model import ClaimFacts, ClassFacts, DeviceID, Share, TaintRuleFacts
from drakit_explain.projection import project_slice
from drakit_explain.queries import (
    ALL_FREE,
    NO_CHANGES,
    Changes,
    QueriesPendingError,
    Released,
    Verdicts,
)
from drakit_explain.verdicts import Verdict, VerdictOutcome
from drakit_explain.world import Name
from tests.fakes.world import ANY, device, holding, node, request, slice_on, world_of

CLAIMS = (AskedClaim(requests=(request(count=2),)),)
TAINT = TaintFacts(key="k", effect="NoSchedule")
RULE = TaintRuleFacts(name="r", uid="r", taint=TAINT)
FITS = Verdict(outcome=VerdictOutcome.ALLOCATED)
UNDECIDED = Verdict(outcome=VerdictOutcome.UNDECIDED, text="no end")


def cluster(*facts):
    names = ("n1", "n2", "n3")
    slices = [slice_on(name, device("g0"), device("g1")) for name in names]
    return world_of(ANY, *map(node, names), *slices, *facts)


def find(verdicts, name="n1", changes=NO_CHANGES, claims=CLAIMS):
    return verdicts.find(claims, name, Budget(), changes)


def answer(verdicts, verdict=FITS):
    """Answer the planned questions; return their bodies."""
    questions = verdicts.take()
    for each in questions:
        verdicts.keep(each, verdict)
    return [orjson.loads(each.body) for each in questions]


def body_of(world, changes=NO_CHANGES, claims=CLAIMS):
    verdicts = Verdicts(world)
    assert find(verdicts, changes=changes, claims=claims) is None
    (body,) = answer(verdicts)
    return body


def test_a_question_has_what_the_allocator_reads_of_one_node():
    share = Share(device=DeviceID("d", "n1", "s"), consumed=(Amount("m", "1"),))
    shared = device("s", capacity=(CapacityFacts(name="m", value="4"),), shareable=True)
    world = cluster(
        node("n1", declared=("A",)),
        ClassFacts(name="other", uid="o", selectors=("device.driver == 'x'",)),
        slice_on("n1", device("g0", attributes={"model": "x"}), shared),
        replace(holding("h", "g0"), shares=(share,)),
        TaintRuleFacts(name="r", uid="r", taint=TAINT, device="g0"),
    )
    body = body_of(world)
    (of_node,) = body["nodes"]
    assert of_node == {
        "metadata": {"name": "n1", "labels": {}},
        "status": {"declaredFeatures": ["A"]},
    }
    (claim,) = body["claims"]
    (asked,) = claim["spec"]["devices"]["requests"]
    assert asked["exactly"] == {
        "deviceClassName": "any",
        "allocationMode": "ExactCount",
        "count": 2,
        "selectors": [],
    }
    assert [each["metadata"]["name"] for each in body["classes"]] == ["any"]
    (of,) = body["slices"]
    first, second = of["spec"]["devices"]
    assert first["attributes"] == {"model": {"string": "x"}}
    assert first["taints"] == [{"key": "k", "value": "", "effect": "NoSchedule"}]
    assert (second["allowMultipleAllocations"], second["capacity"]) == (True, {"m": {"value": "4"}})
    whole, part = body["inUse"]
    assert (whole["device"], "shareID" in whole) == ("g0", False)
    assert (part["device"], part["consumedCapacity"]) == ("s", {"m": "1"})


@pytest.mark.parametrize(
    ("changes", "in_use"),
    [
        pytest.param(NO_CHANGES, ["g0", "g1"], id="as-it-is"),
        pytest.param(Changes(released=Released("a")), ["g1"], id="one-claim-is-released"),
        pytest.param(Changes(released=Released()), [], id="all-are-released"),
        pytest.param(
            Changes(released=Released(kept=frozenset(["b"]))), ["g1"], id="all-but-one-are-released"
        ),
        pytest.param(ALL_FREE, [], id="all-free"),
    ],
)
def test_facts_are_replaced(changes, in_use):
    world = cluster(holding("a", "g0"), holding("b", "g1"), RULE)
    body = body_of(world, changes)
    assert [each["device"] for each in body["inUse"]] == in_use
    tainted = [bool(each["taints"]) for each in body["slices"][0]["spec"]["devices"]]
    assert tainted == [changes is not ALL_FREE] * 2


def test_a_share_without_capacity_has_none_in_a_question():
    share = Share(device=DeviceID("d", "n1", "s"), consumed=())
    world = cluster(
        slice_on("n1", device("g0"), device("s", shareable=True)),
        replace(holding("h", "g0"), shares=(share,)),
    )
    _, part = body_of(world)["inUse"]
    assert part["device"] == "s"
    assert "consumedCapacity" not in part  # the allocator of 1.36 takes an empty map for some


def test_a_field_that_is_unknown_reaches_the_allocator():
    spec = {
        "driver": "d",
        "nodeName": "n1",
        "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "g0", "new": 1}],
    }
    of = project_slice({"metadata": {"name": "s-n1", "uid": "n1"}, "spec": spec})
    assert orjson.loads(zlib.decompress(of.raw)) == spec
    claims = (AskedClaim(requests=(request(extra=b'{"few": 2}'),)),)
    body = body_of(cluster(of), claims=claims)
    assert body["slices"][0]["spec"]["devices"] == [{"name": "g0", "new": 1, "taints": []}]
    assert body["claims"][0]["spec"]["devices"]["requests"][0]["exactly"]["few"] == 2


def test_one_change_costs_one_question():
    world = cluster()
    verdicts = Verdicts(world)
    assert [find(verdicts, name) for name in ("n1", "n2", "n3")] == [None] * 3
    assert len(answer(verdicts)) == 1, "all nodes are equal"
    assert [find(verdicts, name) for name in ("n1", "n2", "n3")] == [FITS] * 3
    world.apply(holding("h", "g0", pool="n2"))
    assert [find(verdicts, name) for name in ("n1", "n2", "n3")] == [FITS, None, FITS]
    answer(verdicts, UNDECIDED)
    world.remove(ClaimFacts, Name("lab", "h"))
    assert find(verdicts, "n2") is FITS, "the verdict of the profile is known"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda world, _: world.apply(replace(ANY, selectors=("",))), id="a-class"),
        pytest.param(
            lambda world, _: world.apply(TaintRuleFacts(name="r", uid="r", taint=TAINT)),
            id="a-rule",
        ),
        pytest.param(lambda world, _: world.use_release(36), id="the-release"),
        pytest.param(lambda _, verdicts: verdicts.clear(), id="the-gates"),
    ],
)
def test_a_verdict_ends_with_what_it_depends_on(change):
    world = cluster()
    verdicts = Verdicts(world)
    find(verdicts)
    answer(verdicts)
    assert find(verdicts) is FITS
    change(world, verdicts)
    with suppress(NotEvaluatedError):  # of a class that is too large
        assert find(verdicts) is None


def test_after_two_questions_without_an_answer_no_further_one_is_asked_for_these_claims():
    facts = [holding(f"h-{name}", "g0", pool=name) for name in ("n2", "n3")]
    world = cluster(slice_on("n3", device("g0")), *facts)
    verdicts = Verdicts(world)
    for name in ("n1", "n2"):
        find(verdicts, name)
        answer(verdicts, UNDECIDED)
    assert find(verdicts, "n3") is UNDECIDED
    assert verdicts.planned == 0
    verdicts.forget_undecided()
    assert find(verdicts, "n1") is None


def test_an_explanation_ends_when_it_has_planned_enough(monkeypatch):
    monkeypatch.setattr(queries, "MAX_BYTES", 1)
    verdicts = Verdicts(cluster())
    with pytest.raises(QueriesPendingError):
        find(verdicts)
    assert len(verdicts.take()) == 1


def test_the_nodes_whose_profiles_are_kept_are_bounded(monkeypatch):
    monkeypatch.setattr(queries, "MAX_NODES", 2)
    verdicts = Verdicts(cluster())
    for number in range(1, 5):
        claims = (AskedClaim(requests=(request(count=number),)),)
        for name in ("n1", "n2", "n3"):
            find(verdicts, name, claims=claims)
    assert sum(len(each.known) for each in verdicts._profiles.values()) <= 2 + 3
