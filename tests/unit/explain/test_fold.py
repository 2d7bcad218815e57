"""One answer for a pod from many nodes: errors that stop it on all of them, and equal nodes."""

from dataclasses import replace

import pytest

from drakit_explain.availability import analyze, budget_of
from drakit_explain.cel.library import Library
from drakit_explain.devices import Amount, CapacityFacts, CounterSetFacts, TaintFacts
from drakit_explain.loads import Load, Loads
from drakit_explain.model import Constraint, DeviceID, PodClaim, Share, TaintRuleFacts
from drakit_explain.nodes import NodeProblem, Unusable
from drakit_explain.pending import Explainer, Verdict
from drakit_explain.pending_claims import Wanted
from drakit_explain.queries import Query, Verdicts, answered
from drakit_explain.trial import Trial, judge
from drakit_explain.verdicts import VerdictOutcome
from drakit_formats.resource.nodes import node_selector
from tests.fakes.world import (
    ANY,
    POD,
    ask_allocator,
    claim,
    device,
    evaluate_for,
    explain,
    holding,
    node,
    on,
    request,
    slice_on,
    world_of,
)

MODEL = 'device.attributes["d"].model == "x"'
"""A selector that fails at devices without the attribute `model`."""

GOOD = device("g0", attributes={"model": "x"})
BAD = device("g0")


def other_pool(node_name, *devices, **changes):
    """A pool of driver `z` on a node, which is searched after that of driver `d`."""
    return replace(
        slice_on(node_name, *devices), name=f"z-{node_name}", driver="z", pool="extra", **changes
    )


def cluster(*facts, minor=None):
    """Two nodes; n2 has a device that fits whatever the tests ask for."""
    world = world_of(ANY, node("n1"), node("n2"), slice_on("n2", GOOD), *facts)
    world.minor = minor
    return world


def reason_of(world, pod=POD):
    explanation = explain(pod, world)
    assert explanation.verdict is Verdict.BLOCKED
    (reason,) = explanation.reasons
    return explanation, reason, reason.text.removeprefix("pod lab/train waits: ")


ALL = request(count=0)
NUMA = [
    device("a", attributes={"model": "x", "numa": 0}),
    device("b", attributes={"model": "x", "numa": 1}),
]
SAME = Constraint(attribute="d/numa")


@pytest.mark.parametrize(
    ("facts", "minors", "code", "error"),
    [
        pytest.param(
            [slice_on("n1", BAD), claim(request(selectors=(MODEL,)))],
            (None, 34, 35, 36, 37),
            "SelectorFailed",
            'request "r" of claim "mine": its selector fails: no such key: model, on device g0 of '
            "pool n1, driver d",
            id="a-selector-fails",
        ),
        pytest.param(
            [slice_on("n1", GOOD), other_pool("n1", pool_slices=2), claim(ALL)],
            (None, 34, 35, 36, 37),
            "PoolIncomplete",
            'request "r" of claim "mine" asks for all devices, but pool extra of driver z is '
            "incomplete",
            id="all-beside-an-incomplete-pool",
        ),
        pytest.param(
            [slice_on("n1", GOOD), other_pool("n1", BAD, BAD), claim(ALL)],
            (None, 34, 35, 36, 37),
            "PoolInvalid",
            'request "r" of claim "mine" asks for all devices, but pool extra of driver z is '
            "invalid",
            id="all-beside-an-invalid-pool",
        ),
        pytest.param(
            [
                slice_on("n1", *NUMA),
                slice_on("n2", NUMA[0]),
                claim(ALL, constraints=[SAME]),
            ],
            (None, 34, 35, 36, 37),
            "ConstraintNotMet",
            'request "r" of claim "mine" asks for all devices, and a constraint of the claim '
            "excludes one of them",
            id="all-and-a-constraint",
        ),
        pytest.param(
            [slice_on("n1", *(device(f"g{number}") for number in range(33))), claim(ALL)],
            (None, 34, 35, 36, 37),
            "RequestsCompete",
            'claim "mine" asks for 33 devices, but an allocation can list only 32',
            id="more-than-32-devices",
        ),
        pytest.param(
            [slice_on("n1", BAD, BAD), claim(request())],
            (34,),
            "PoolInvalid",
            "pool n1 of driver d is invalid: two of its devices have the name g0",
            id="an-invalid-pool-on-1.34",
        ),
    ],
)
def test_an_error_on_one_node_stops_the_pod_that_fits_on_another(facts, minors, code, error):
    for minor in minors:
        explanation, reason, text = reason_of(cluster(*facts, minor=minor))
        assert reason.code == code
        assert text.startswith(
            f"{error}; the pod would fit on node n2, but the scheduler gives up on all nodes "
            "because of this error on node n1; "
        )
        assert explanation.fits_on == "n2"
        assert [each.regarding.name for each in explanation.claim_reasons] == ["mine"]
        assert explanation.remedy == ""


GAVE_UP = 'running "DynamicResources" filter plugin: CEL runtime error'


@pytest.mark.parametrize(
    ("message", "verdict"),
    [("0/2 nodes are available", Verdict.UNDECIDED), (GAVE_UP, Verdict.BLOCKED)],
)
def test_an_error_on_a_node_that_other_rules_may_exclude_needs_the_schedulers_word(
    message, verdict
):
    world = cluster(slice_on("n1", BAD), claim(request(selectors=(MODEL,))))
    pod = replace(POD, unchecked=("host ports",), scheduling_message=message)
    explanation = explain(pod, world)
    assert explanation.verdict is verdict
    if verdict is Verdict.UNDECIDED:
        (unknown,) = explanation.unknown
        assert (
            unknown == "the allocator fails on node n1, but host ports may exclude that node first"
        )


def test_only_an_incomplete_pool_is_normal_for_a_moment():
    incomplete = [slice_on("n1", GOOD), other_pool("n1", pool_slices=2), claim(ALL)]
    assert reason_of(cluster(*incomplete))[1].transient
    invalid = [slice_on("n1", GOOD), other_pool("n1", BAD, BAD), claim(ALL)]
    assert not reason_of(cluster(*invalid))[1].transient


SMALLER = request(
    "r",
    device_class="",
    alternatives=(request("all", count=0), request("one")),
)
TAINT = TaintFacts(key="no", effect="NoSchedule")


@pytest.mark.parametrize(
    ("facts", "minor"),
    [
        pytest.param(
            [slice_on("n1", *(device(f"g{n}") for n in range(33))), claim(SMALLER)],
            None,
            id="the-smallest-alternative-counts",
        ),
        pytest.param(
            [slice_on("n1", BAD, BAD), claim(request())], 35, id="an-invalid-pool-since-1.35"
        ),
        pytest.param(
            [replace(slice_on("n1", BAD), pool_slices=2), claim(request())],
            None,
            id="an-incomplete-pool-of-a-request-for-a-number",
        ),
    ],
)
def test_what_the_search_does_not_reach_stops_nothing(facts, minor):
    explanation = explain(POD, cluster(*facts, minor=minor))
    assert explanation.verdict is Verdict.FITS


def test_where_a_further_search_finds_something_else_the_pod_may_start():
    def varying(question):
        found = ask_allocator(question)
        return replace(found, varies=found.outcome is VerdictOutcome.FATAL)

    world = cluster(slice_on("n1", BAD), claim(request(selectors=(MODEL,))), minor=35)
    explainer = Explainer(world)
    evaluate_for(explainer, world, POD, Library())
    (reason,) = explainer.explain_now(POD, varying).reasons
    assert (
        "on node n1, unless it tries another node first, so the pod might still start; "
    ) in reason.text


def full(world, priority):
    """Let n1 have a pod of a priority that takes its last CPU."""
    world.loads = Loads()
    world.loads.apply(Load("u", "n1", priority, (("cpu", 1),)))
    cpu = (Amount("cpu", "1n"),)
    for name in ("n1", "n2"):
        world.apply(node(name, allocatable=cpu))
    return world


@pytest.mark.parametrize(
    "priority",
    [
        pytest.param(10, id="that-the-pod-cannot-preempt"),
        pytest.param(-10, id="that-the-pod-can-preempt"),
    ],
)
def test_a_node_without_room_is_not_searched_by_the_scheduler(priority):
    world = full(cluster(slice_on("n1", BAD), claim(request(selectors=(MODEL,)))), priority)
    pod = replace(POD, requests=(("cpu", 1),))
    assert explain(pod, world).verdict is Verdict.FITS
    world.loads.remove("u")
    assert explain(pod, world).verdict is Verdict.BLOCKED


@pytest.mark.parametrize("fits", [True, False], ids=["fits-elsewhere", "fits-nowhere"])
def test_the_search_reaches_a_node_that_an_allocated_claim_excludes(fits):
    pod = replace(POD, claims=(*POD.claims, PodClaim(name="c2", claim="disk")))
    only = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}]
    disk = replace(
        holding("disk", "d0", pool="disks"),
        nodes=node_selector({"nodeSelectorTerms": only}),
        requests=(request(),),
    )
    world = cluster(slice_on("n1", BAD), disk, claim(request(selectors=(MODEL,))))
    if not fits:
        world.apply(slice_on("n2"))
    explanation = explain(pod, world)
    assert explanation.nodes["n1"] == Unusable(NodeProblem.CLAIM, "disk")
    assert explanation.fits_on == ("n2" if fits else "")
    assert explanation.verdict is Verdict.BLOCKED
    assert "no such key: model, on device g0 of pool n1" in explanation.reasons[0].text


def test_a_request_for_all_devices_counts_those_of_the_node():
    place = on("n1"), on("n2")
    devices = [
        replace(device(name, attributes={"model": "x"}), place=each)
        for name, each in zip(("g1", "g2"), place, strict=True)
    ]
    shared = replace(slice_on("n1", *devices), name="s", pool="s", place=None, by_device=True)
    held = holding("other", "g1", pool="s")
    explanation = explain(POD, world_of(ANY, node("n1"), node("n2"), shared, held, claim(ALL)))
    assert (explanation.verdict, explanation.fits_on) == (Verdict.FITS, "n2")


# ---- what only the scheduler knows


TIMEOUT = 'running "DynamicResources" filter plugin: node n1: timed out trying to allocate devices'
DISABLED = (
    "claim lab/mine, request r: admin access is requested, but the feature is disabled",
    "claim lab/mine, request r: has subrequests, but the DRAPrioritizedList feature is disabled",
    "claim lab/mine, subrequest s: has capacity requests, but the DRAConsumableCapacity feature "
    "is disabled",
    "claim lab/mine, request r: cannot handle request with derived attributes, the feature is "
    "disabled",
)


@pytest.mark.parametrize(
    ("minor", "verdict"),
    [(None, Verdict.BLOCKED), (37, Verdict.BLOCKED), (36, Verdict.BLOCKED), (35, Verdict.FITS)],
)
def test_a_timeout_stops_the_pod_since_1_36(minor, verdict):
    pod = replace(POD, scheduling_message=TIMEOUT)
    explanation = explain(pod, cluster(claim(request()), minor=minor))
    assert explanation.verdict is verdict
    assert explanation.fits_on == "n2"
    assert [each.code for each in explanation.reasons] == ["SearchFailed"] * bool(
        verdict is Verdict.BLOCKED
    )


@pytest.mark.parametrize("message", DISABLED)
def test_a_feature_that_is_off_in_the_scheduler_stops_the_pod(message):
    pod = replace(POD, scheduling_message=f'running "DynamicResources" filter plugin: {message}')
    _, reason, text = reason_of(cluster(claim(request())), pod)
    assert reason.code == "SearchFailed"
    assert f"a feature gate of the scheduler is off: {message}; " in text


def test_another_message_of_the_scheduler_stops_nothing():
    pod = replace(POD, scheduling_message="0/2 nodes are available: 2 Insufficient cpu.")
    assert explain(pod, cluster(claim(request()))).verdict is Verdict.FITS


# ---- many nodes


def many(number, *facts, devices=(GOOD,), start=0):
    names = [f"m{index:04}" for index in range(start, start + number)]
    return world_of(
        ANY,
        *(node(name) for name in names),
        *(slice_on(name, *devices) for name in names),
        *facts,
    )


@pytest.mark.parametrize(
    ("number", "chance"), [(1, False), (99, False), (100, False), (101, True), (1000, True)]
)
def test_the_scheduler_may_stop_when_it_has_found_100_nodes(number, chance):
    world = many(number, node("n1"), slice_on("n1", BAD), claim(request(selectors=(MODEL,))))
    _, reason, text = reason_of(world)
    assert reason.code == "SelectorFailed"
    assert "the pod would fit on node m0000, " in text
    assert ("might still start" in text) is chance


@pytest.mark.parametrize("number", [64, 65, 1000])
def test_a_misspelt_attribute_on_many_nodes_is_one_reason(number):
    selector = 'device.attributes["d"].modle == "x"'
    _, reason, text = reason_of(many(number, claim(request(selectors=(selector,)))))
    assert reason.code == "SelectorFailed"
    assert f"aborts its search on node m0000 (and {number - 1} more nodes) at this device" in text
    assert "device g0 has model, so check the spelling of modle" in text


@pytest.mark.parametrize("number", [65, 1000])
def test_requests_compete_on_many_nodes(number):
    _, reason, _ = reason_of(many(number, claim(request("a"), request("b"))))
    assert reason.code == "RequestsCompete"


def asked_about(world, *requests, constraints=()):
    """Judge a claim on all nodes, and return how many questions were asked."""
    explainer = Explainer(world)
    world.apply(claim(*requests, constraints=constraints))
    evaluate_for(explainer, world, POD, Library())
    trial = trial_of(world, *requests, constraints=constraints)
    asked: list[Query] = []

    def counted(question):
        asked.append(question)
        return ask_allocator(question)

    judged = answered(trial.verdicts, lambda: judge(trial, reached=lambda name: True), counted)
    assert len(judged.answers) == len(world.views())
    return len(asked)


def trial_of(world, *requests, constraints=()):
    return Trial(
        world=world,
        verdicts=Verdicts(world),
        wanted=[Wanted(origin="c", requests=requests, constraints=tuple(constraints))],
        nodes=dict.fromkeys(world.views()),
        budget=budget_of(world),
        analyze=lambda each, budget: analyze(each, world, budget),
    )


PAIR = [device("a", attributes={"numa": 0}), device("b", attributes={"numa": 1})]
TWO = request(count=2)


@pytest.mark.parametrize("number", [65, 1000])
def test_nodes_with_equal_profiles_are_asked_about_once(number):
    assert asked_about(many(number, devices=PAIR), TWO, constraints=[SAME]) == 1


CARD = CounterSetFacts(name="card", counters=(Amount("m", "1"),))
SHARED = device("s", capacity=[CapacityFacts(name="m", value="2")], shareable=True)


def profiles(world, *requests, constraints=()):
    """Return the profile of each node."""
    trial = trial_of(world, *requests, constraints=constraints)
    return [trial.verdicts.profile(trial.wanted, name, trial.budget) for name in world.views()]


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        pytest.param(
            PAIR,
            [device("x", attributes={"numa": 7}), device("y", attributes={"numa": 9})],
            True,
            id="names-and-values-of-their-own",
        ),
        pytest.param(
            PAIR,
            [device("a", attributes={"numa": 7}), device("b", attributes={"numa": 7})],
            False,
            id="values-in-common",
        ),
        pytest.param(
            PAIR,
            [device("a", attributes={"numa": 0}), device("b", attributes={"numa": "1"})],
            False,
            id="types-of-values",
        ),
        pytest.param(PAIR, [*PAIR, device("c")], False, id="number-of-devices"),
        pytest.param(PAIR, [replace(PAIR[0], taints=(TAINT,)), PAIR[1]], False, id="taints"),
        pytest.param(
            [replace(PAIR[0], taints=(TAINT,)), PAIR[1]],
            [PAIR[0], replace(PAIR[1], taints=(TAINT,))],
            False,
            id="taints-of-another-device",
        ),
        pytest.param([device("s")], [SHARED], False, id="capacity"),
    ],
)
def test_what_of_devices_makes_nodes_different(first, second, equal):
    world = world_of(ANY, node("n1"), node("n2"), slice_on("n1", *first), slice_on("n2", *second))
    one, other = profiles(world, TWO, constraints=[SAME])
    assert (one == other) is equal


def test_values_count_only_for_constraints():
    devices = [device("a", attributes={"numa": 7}), device("b", attributes={"numa": 7})]
    world = world_of(ANY, node("n1"), node("n2"), slice_on("n1", *PAIR), slice_on("n2", *devices))
    one, other = profiles(world, TWO)
    assert one == other


def test_what_claims_have_makes_nodes_different():
    world = many(3, devices=PAIR)
    world.apply(holding("held", "a", pool="m0001"))
    first, second, third = profiles(world, TWO)
    assert first == third != second


def test_what_claims_share_makes_nodes_different():
    world = many(3, devices=[SHARED])
    share = Share(device=DeviceID("d", "m0001", "s"), consumed=(Amount("m", "1"),))
    world.apply(replace(holding("held", pool="m0001"), devices=(), shares=(share,)))
    first, second, third = profiles(world, request())
    assert first == third != second


def test_what_is_held_of_a_pool_makes_nodes_different():
    others = replace(ANY, name="p", selectors=('device.attributes["d"].p',))
    world = world_of(others, node("m0"), node("m1"), node("m2"))
    chosen = device("p", attributes={"p": True}, consumes=(CARD,))
    other = device("q", attributes={"p": False}, consumes=(CARD,))
    for name in ("m0", "m1", "m2"):
        world.apply(replace(slice_on(name, chosen, other), pool_slices=2))
        counters = replace(slice_on(name), name=f"c-{name}", pool_slices=2, counter_sets=(CARD,))
        world.apply(counters)
    world.apply(holding("held", "q", pool="m1"))
    wanted = request(device_class="p")
    world.apply(claim(wanted))
    evaluate_for(Explainer(world), world, POD, Library())
    first, second, third = profiles(world, wanted)
    assert first == third != second


def test_a_taint_rule_makes_nodes_different():
    rule = TaintRuleFacts(name="r", uid="r", taint=TAINT, pool="m0001")
    first, second, third = profiles(many(3, rule), request())
    assert first == third != second


# ---- pools that are not complete

HALF = replace(slice_on("n1", GOOD), pool_slices=2)


def half(*facts, minor=None):
    world = world_of(ANY, node("n1"), HALF, claim(request()), *facts)
    world.minor = minor
    return world


@pytest.mark.parametrize("minor", [None, 35, 36, 37])
def test_an_incomplete_pool_counts_as_empty_and_is_named(minor):
    _, reason, text = reason_of(half(minor=minor))
    assert reason.code == "NoDevicePublished"
    assert "(not counted: pool n1 on node n1, 1 of 2 slices)" in text
    assert reason.transient == "NoDevicePublished in addition to an incomplete pool"


def test_on_1_34_an_incomplete_pool_is_used():
    assert explain(POD, half(minor=34)).verdict is Verdict.FITS


def test_a_pool_that_spans_nodes_is_named_once():
    spread = replace(
        HALF,
        place=None,
        by_device=True,
        devices=tuple(replace(GOOD, name=name, place=on(name)) for name in ("n1", "n2")),
    )
    world = world_of(ANY, node("n1"), node("n2"), spread, claim(request()))
    assert "(not counted: pool n1 on 2 nodes, 1 of 2 slices)" in reason_of(world)[2]


def test_incomplete_pools_beyond_three_are_counted():
    names = [f"n{number}" for number in range(1, 6)]
    facts = [replace(slice_on(name, GOOD), pool_slices=2) for name in names]
    world = world_of(ANY, *(node(name) for name in names), *facts, claim(request()))
    text = reason_of(world)[2]
    assert "pool n3 on node n3, 1 of 2 slices and 2 more)" in text


def test_a_remedy_must_also_end_the_errors_of_other_nodes():
    selector = request(selectors=(MODEL,))
    world = cluster(slice_on("n1", BAD), holding("held", "g0", pool="n2"), claim(selector))
    explanation = explain(POD, world)
    assert [each.code for each in explanation.reasons] == ["SelectorFailed", "DevicesAllocated"]
    assert explanation.remedy == ('the pod would fit on node n1 if request "r" had no selector'), (
        "on n2, a release is not enough"
    )
    world.apply(holding("other", "g0", pool="n1"))
    assert "if claim lab/held (pod pod-held) released its devices" in explain(POD, world).remedy


@pytest.mark.parametrize(
    ("loads", "verdict"),
    [
        pytest.param(None, Verdict.BLOCKED, id="never-known"),
        pytest.param(Loads(), Verdict.BLOCKED, id="known"),
        pytest.param(Loads(lambda: False), Verdict.FITS, id="unknown-for-a-moment"),
    ],
)
def test_no_error_counts_while_it_is_unknown_whether_its_node_has_room(loads, verdict):
    world = cluster(slice_on("n1", BAD), claim(request(selectors=(MODEL,))))
    world.loads = loads
    assert explain(POD, world).verdict is verdict
