"""Pods that cannot be explained in a reasonable time: bounded work, and what is certain by then."""

import sys
from dataclasses import replace

import pytest

from drakit_explain import queries
from drakit_explain.availability import budget_of
from drakit_explain.cel.library import Library
from drakit_explain.codes import Code
from drakit_explain.devices import Amount, CounterSetFacts, TaintFacts
from drakit_explain.model import Constraint, PodClaim, TemplateFacts, Toleration
from drakit_explain.pending import Explainer, Verdict
from drakit_explain.projection import project_pod
from drakit_explain.queries import QueriesPendingError
from drakit_explain.templates import template_problems
from drakit_explain.verdicts import Verdict as AllocatorVerdict
from drakit_explain.verdicts import VerdictOutcome
from tests.fakes.world import (
    ANY,
    POD,
    ask_allocator,
    claim,
    device,
    evaluate_for,
    node,
    request,
    slice_on,
    world_of,
)

CALLS_PER_STEP = 12
"""Function calls for a step of the budget, at most."""

NUMBER = 4
"""Nodes, each with another number of devices, so that each is asked about."""

MAX_PASSES = 200
"""How often an explanation begins again with more answers, at most."""

DISTINCT = Constraint(attribute="d/numa", distinct=True)
TAINTS = [TaintFacts(key=f"t{number}", effect="NoSchedule") for number in range(8)]


def alternatives(number, *, name="", tolerations=()):
    """The most that the API server accepts: 32 requests of a claim with 8 alternatives each."""
    return [
        request(
            f"r{each}",
            device_class="",
            alternatives=tuple(
                request(f"{name}{each}-{other}", count=1 + other % 2, tolerations=tolerations)
                for other in range(8)
            ),
        )
        for each in range(number)
    ]


def distinct(number):
    return [request(f"r{each}") for each in range(number)]


def devices(number, *, values=5, **facts):
    return [
        device(f"g{each}", attributes={"numa": each % values}, **facts) for each in range(number)
    ]


def cluster(claims, *, number=128, partitions=False, tainted=False):
    """Nodes with devices, and a pod with claims; selectors are evaluated."""
    facts = []
    for each in range(NUMBER):
        name = f"n{each}"
        found = devices(number + each)
        if tainted:
            found = [replace(one, taints=(TAINTS[i % 8],)) for i, one in enumerate(found)]
        if partitions:
            card = (CounterSetFacts(name="card", counters=(Amount("m", "1"),)),)
            found = [replace(one, consumes=card) for one in found]
            counters = (CounterSetFacts(name="card", counters=(Amount("m", "6"),)),)
            of_pool = replace(
                slice_on(name), name=f"c-{name}", pool_slices=2, counter_sets=counters
            )
            facts.append(of_pool)
        facts += [node(name), replace(slice_on(name, *found), pool_slices=1 + partitions)]
    world = world_of(ANY, *facts, *claims)
    pod = replace(POD, claims=tuple(PodClaim(name=c.name, claim=c.name) for c in claims))
    explainer = Explainer(world)
    evaluate_for(explainer, world, pod, Library())
    return world, explainer, pod


def claims(number, requests, constraints=()):
    return [
        claim(*requests(each), name=f"c{each}", constraints=constraints) for each in range(number)
    ]


def calls(function):
    """Call a function; return its result, and how many functions that has called."""
    number = 0

    def count(frame, event, argument):
        nonlocal number
        number += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        found = function()
    finally:
        sys.setprofile(before)
    return found, number


MANY_TOLERATIONS = tuple(Toleration(key=f"k{each}") for each in range(16))

HOSTILE = [
    pytest.param(claims(16, lambda n: alternatives(32)), {"number": 16}, id="4096-alternatives"),
    pytest.param(
        claims(16, lambda n: alternatives(32, name=f"c{n}-")),
        {"number": 16},
        id="4096-different-alternatives",
    ),
    pytest.param(claims(16, lambda n: alternatives(12)), {}, id="alternatives-for-many-devices"),
    pytest.param(claims(1, lambda n: distinct(6), [DISTINCT]), {}, id="6-of-5-distinct-values"),
    pytest.param(
        claims(1, lambda n: alternatives(8), [DISTINCT, *[Constraint(attribute="d/numa")] * 31]),
        {},
        id="32-constraints",
    ),
    pytest.param(claims(16, lambda n: distinct(9)), {"partitions": True}, id="counters"),
    pytest.param(claims(16, lambda n: distinct(16)), {"tainted": True}, id="taints"),
    pytest.param(
        claims(16, lambda n: alternatives(32, tolerations=MANY_TOLERATIONS)),
        {"tainted": True},
        id="tolerations",
    ),
]


def nothing(question):
    return AllocatorVerdict(outcome=VerdictOutcome.UNAVAILABLE)


def passes_of(verdicts, find, most):
    """Repeat what is bounded until all questions are answered: no node has the devices."""
    for _ in range(MAX_PASSES):
        try:
            found, number = calls(find)
        except QueriesPendingError:
            questions = verdicts.take()
            assert sum(len(each.body) for each in questions) < 2 * queries.MAX_BYTES
            for each in questions:
                verdicts.keep(each, nothing(each))
        else:
            assert number < most
            return found
    raise AssertionError("it does not end")


@pytest.mark.parametrize(("wanted", "changes"), HOSTILE)
def test_the_work_for_a_hostile_pod_is_bounded(monkeypatch, wanted, changes):
    monkeypatch.setattr("drakit_explain.availability.MAX_STEPS", 20_000)
    world, explainer, pod = cluster(wanted, **changes)
    most = CALLS_PER_STEP * budget_of(world).left
    found = passes_of(explainer.verdicts, lambda: explainer.explain(pod), most)
    passes_of(explainer.verdicts, lambda: found.remedy, most)
    template = TemplateFacts(
        namespace="lab",
        name="t",
        uid="t",
        requests=wanted[0].requests,
        constraints=wanted[0].constraints,
    )
    verdicts = explainer.verdicts
    passes_of(verdicts, lambda: template_problems(template, world, verdicts), most)


def test_rules_for_nodes_have_the_same_budget():
    exists = [{"key": f"k{each}", "operator": "Exists"} for each in range(500)]
    terms = [{"matchExpressions": [each]} for each in exists]
    affinity = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    body = {
        "metadata": {"name": "train", "namespace": "lab", "uid": "p"},
        "spec": {
            "affinity": {"nodeAffinity": affinity},
            "resourceClaims": [{"name": "c", "resourceClaimName": "mine"}],
        },
        "status": {"phase": "Pending"},
    }
    nodes = [node(f"n{each}") for each in range(500)]
    world = world_of(ANY, *nodes, claim(request()))
    pod = project_pod(body)
    found, number = calls(lambda: Explainer(world).explain(pod))
    assert (found.verdict, found.unknown) == (
        Verdict.UNDECIDED,
        ("the pod has too many rules for nodes",),
    )
    assert number < len(nodes) * len(terms) / 10


# ---- what is certain if the allocator finds no end on some nodes

MODEL = 'device.attributes["d"].model == "x"'
"""A selector that fails at devices without the attribute `model`."""


def with_model(*found):
    return [
        device(each.name, attributes={"numa": each.attribute("numa", "d"), "model": "x"})
        for each in found
    ]


def verdict_of(*facts):
    """Explain a pod that wants six different values from nodes n1 and n2."""
    wanted = [request(f"r{each}", selectors=() if each else (MODEL,)) for each in range(6)]
    world = world_of(ANY, node("n1"), node("n2"), *facts, claim(*wanted, constraints=[DISTINCT]))
    explainer = Explainer(world)
    evaluate_for(explainer, world, POD, Library())
    return explainer.explain_now(POD, slow)


def slow(question):
    """The allocator, which has no result about many devices."""
    if question.body.count(b'"numa"') > 64:
        return AllocatorVerdict(
            outcome=VerdictOutcome.UNDECIDED, text="the search did not end in time"
        )
    return ask_allocator(question)


EASY = with_model(*devices(6, values=6))
LONG = with_model(*devices(128))
BAD = device("z")


def test_an_error_is_certain_whatever_else_is_undecided():
    found = verdict_of(slice_on("n1", BAD), slice_on("n2", *LONG))
    assert found.verdict is Verdict.BLOCKED
    (reason,) = found.reasons
    assert reason.code == Code.SELECTOR_FAILED
    assert "; the scheduler gives up on all nodes because of this error on node n1; " in reason.text
    assert found.fits_on == ""


def test_a_fit_is_certain_beside_a_node_that_is_undecided():
    found = verdict_of(slice_on("n1", *LONG), slice_on("n2", *EASY))
    assert (found.verdict, found.fits_on) == (Verdict.FITS, "n2")


def test_no_fit_is_certain_beside_a_node_that_may_have_an_error():
    found = verdict_of(slice_on("n1", *LONG, BAD), slice_on("n2", *EASY))
    assert found.verdict is Verdict.UNDECIDED
    assert found.unknown == ("the search did not end in time",)


def test_a_pod_is_blocked_if_all_nodes_have_an_answer():
    found = verdict_of(slice_on("n1", *EASY[:5]), slice_on("n2", *EASY[1:]))
    assert found.verdict is Verdict.BLOCKED
