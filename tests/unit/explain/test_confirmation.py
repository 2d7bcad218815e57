"""What Kubernetes' allocator is asked before an answer is certain, and what its words mean."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drakit_explain.cel.library import Library
from drakit_explain.codes import Code
from drakit_explain.confirmation import unknown_fields
from drakit_explain.devices import Amount, CapacityFacts, TaintFacts
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    DeviceID,
    ExtendedRequest,
    PodClaim,
    Share,
    TaintRuleFacts,
    TemplateFacts,
)
from drakit_explain.pending import Verdict
from drakit_explain.selectors import bring_up_to_date
from drakit_explain.templates import class_problems, template_problems
from drakit_explain.verdicts import Verdict as Answer
from drakit_explain.verdicts import VerdictOutcome, VerdictQuestion
from tests.fakes.world import (
    ANY,
    POD,
    claim,
    device,
    explain,
    holding,
    node,
    request,
    slice_on,
    world_of,
)

API = "/apis/resource.k8s.io/v1"
MODEL = 'device.attributes["d"].model == "x"'
GOOD = device("g0", attributes={"model": "x"})
OTHER = device("g1", attributes={"model": "y"})
BAD = device("g2")
FITS, NONE, FATAL = VerdictOutcome.ALLOCATED, VerdictOutcome.UNAVAILABLE, VerdictOutcome.FATAL


def asked(*facts, pod=POD, minor=36):
    world = world_of(ANY, *facts)
    world.minor = minor
    explanation = explain(pod, world)
    return explanation, explanation.find_confirmation()


def nodes_of(confirmation):
    names = [each["metadata"]["name"] for each in confirmation.nodes]
    return dict(zip(names, confirmation.expected, strict=True))


def test_one_node_of_each_profile_is_asked_about_whether_it_was_searched_or_not():
    nodes = [node(f"n{each}") for each in range(6)]
    slices = [
        slice_on("n0", OTHER),
        slice_on("n1", OTHER),
        slice_on("n2", OTHER, OTHER),
        slice_on("n3", GOOD),
    ]
    explanation, found = asked(
        *nodes, *slices, holding("other", "g0", pool="n3"), claim(request(selectors=(MODEL,)))
    )
    assert explanation.verdict is Verdict.BLOCKED
    assert nodes_of(found) == {"n0": NONE, "n2": NONE, "n3": NONE, "n4": NONE}
    assert found.paths() == [
        f"{API}/namespaces/lab/resourceclaims/mine",
        f"{API}/deviceclasses/any",
        *(f"{API}/resourceslices/s-{each}" for each in ("n0", "n2", "n3")),
    ]
    assert [each["pool"] for each in found.in_use] == ["n3"]
    assert found.minor == 36


def test_what_fits_and_what_fails_are_both_asked_about():
    explanation, found = asked(
        node("n1"),
        node("n2"),
        slice_on("n1", BAD),
        slice_on("n2", GOOD),
        claim(request(selectors=(MODEL,))),
    )
    assert [each.code for each in explanation.reasons] == [Code.SELECTOR_FAILED]
    assert nodes_of(found) == {"n1": FATAL, "n2": FITS}
    explanation, found = asked(node("n2"), slice_on("n2", GOOD), claim(request()))
    assert explanation.verdict is Verdict.FITS
    assert nodes_of(found) == {"n2": FITS}


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param([], id="the-claim-is-missing"),
        pytest.param([holding("mine", "g0", pool="n2")], id="the-claim-is-allocated"),
        pytest.param([claim(request(device_class="none"))], id="the-class-is-missing"),
    ],
)
def test_the_allocator_is_not_asked_about_what_it_never_sees(facts):
    _, found = asked(node("n2"), slice_on("n2", GOOD), *facts)
    assert found is None


def test_a_claim_that_is_not_created_is_that_of_its_template():
    pod = replace(POD, claims=(PodClaim(name="c", template="made"),))
    template = TemplateFacts(namespace="lab", name="made", uid="t", requests=(request(count=3),))
    _, found = asked(node("n2"), slice_on("n2", GOOD), template, pod=pod)
    path = f"{API}/namespaces/lab/resourceclaimtemplates/made"
    assert found.claims == (path,)
    spec = {"devices": {"requests": [{"name": "r", "exactly": {"count": 3}}]}}
    body = {"metadata": {"name": "made"}, "spec": {"metadata": {}, "spec": spec}}
    read = {each: {"metadata": {}, "spec": {}} for each in found.paths()} | {path: body}
    (sent,) = found.question(read, {}).claims
    assert sent["spec"] == spec


def test_extended_resources_are_asked_about_as_the_claim_that_the_scheduler_makes():
    any_class = replace(ANY, extended_resource="example.com/gpu")
    pod = replace(
        POD,
        claims=(),
        extended=(
            ExtendedRequest("one", "example.com/gpu", 1),
            ExtendedRequest("two", "example.com/gpu", 2),
        ),
    )
    _, found = asked(any_class, node("n2"), slice_on("n2", GOOD), pod=pod)
    (body,) = found.claims
    assert [
        (each["name"], each["exactly"]["deviceClassName"], each["exactly"]["count"])
        for each in body["spec"]["devices"]["requests"]
    ] == [("one", "any", 1), ("two", "any", 2)]


def test_shares_and_the_taints_of_rules_are_part_of_the_question():
    capacity = [CapacityFacts(name="memory", value="8Gi")]
    shared = device("g0", capacity=capacity, shareable=True)
    holder = ClaimFacts(
        namespace="lab",
        name="other",
        uid="o",
        allocated=True,
        shares=(
            Share(
                device=DeviceID("d", "n1", "g0"), consumed=(Amount(name="memory", quantity="2Gi"),)
            ),
            Share(
                device=DeviceID("d", "n1", "g0"), consumed=(Amount(name="memory", quantity="3Gi"),)
            ),
            Share(device=DeviceID("d", "elsewhere", "g0")),
        ),
    )
    rules = [
        TaintRuleFacts(
            name="one",
            uid="1",
            taint=TaintFacts(key="k", effect="NoSchedule", value="v"),
            device="g0",
        ),
        TaintRuleFacts(
            name="two", uid="2", taint=TaintFacts(key="l", effect="NoExecute"), pool="n9"
        ),
    ]
    _, found = asked(node("n1"), slice_on("n1", shared, OTHER), holder, *rules, claim(request()))
    assert [each["consumedCapacity"] for each in found.in_use] == [
        {"memory": "2Gi"},
        {"memory": "3Gi"},
    ]
    assert len({each["shareID"] for each in found.in_use}) == 2
    devices = [{"name": "g0", "taints": [{"key": "own"}]}, {"name": "g1"}]
    body = {
        "metadata": {"name": "s-n1"},
        "spec": {"driver": "d", "pool": {"name": "n1"}, "devices": devices},
    }
    read = {each: {"metadata": {}, "spec": {}} for each in found.paths()}
    (sent,) = found.question(read | {f"{API}/resourceslices/s-n1": body}, {}).slices
    assert [each["taints"] for each in sent["spec"]["devices"]] == [
        [{"key": "own"}, {"key": "k", "value": "v", "effect": "NoSchedule"}],
        [],
    ]


def test_a_template_is_asked_about_as_if_all_devices_were_free():
    taint = TaintFacts(key="k", effect="NoSchedule")
    rule = TaintRuleFacts(name="one", uid="1", taint=taint, pool="n1")
    template = TemplateFacts(
        namespace="lab", name="made", uid="t", requests=(request(count=3, selectors=(MODEL,)),)
    )
    world = world_of(
        ANY,
        *(node(f"n{each}") for each in range(4)),
        slice_on("n1", GOOD),
        slice_on("n2", GOOD, OTHER),
        slice_on("n3", GOOD),
        holding("other", "g0", pool="n1"),
        rule,
        template,
    )
    evaluate(world, [MODEL])
    (reason,) = template_problems(template, world)
    found = reason.find_confirmation()
    assert nodes_of(found) == {"n0": None, "n1": None}
    assert (found.in_use, found.taints) == ((), {})
    assert f"{API}/namespaces/lab/resourceclaimtemplates/made" in found.claims
    body = {
        "metadata": {"name": "s-n1"},
        "spec": {"devices": [{"name": "g0", "taints": [{"key": "own"}]}]},
    }
    read = {each: {"metadata": {}, "spec": {}} for each in found.paths()}
    sent = found.question(read | {f"{API}/resourceslices/s-n1": body}, {}).slices
    assert [each["spec"]["devices"] for each in sent] == [[{"name": "g0", "taints": []}]]
    nothing = Answer(outcome=NONE)
    assert found.refuted([nothing, Answer(outcome=FATAL, text="x")]) == ""
    assert "finds devices there" in found.refuted([nothing, Answer(outcome=FITS)])


def test_a_class_without_devices_is_asked_about_and_its_failing_selector_is_not():
    other = ClassFacts(name="other", uid="o", selectors=('device.driver == "none"',))
    failing = ClassFacts(name="failing", uid="f", selectors=(MODEL,))
    world = world_of(other, failing, node("n1"), node("n2"), slice_on("n1", BAD))
    evaluate(world, [*other.selectors, *failing.selectors])
    (reason,) = class_problems(other, world)
    found = reason.find_confirmation()
    assert nodes_of(found) == {"n1": None, "n2": None}
    assert found.classes == (f"{API}/deviceclasses/other",)
    (reason,) = class_problems(failing, world)
    assert reason.find_confirmation() is None


def evaluate(world, expressions):
    slices = [each.slice for each in world.reachable()]
    bring_up_to_date(world.selectors, Library(), expressions, slices)


def test_a_question_has_few_nodes_and_devices():
    devices = [device(f"d{each}") for each in range(900)]
    nodes = [node(f"n{each}") for each in range(40)]
    slices = [slice_on(f"n{each}", *devices, *([GOOD] * each)) for each in range(4)]
    _, found = asked(*nodes, *slices, claim(request(count=2000)))
    assert list(nodes_of(found)) == ["n0", "n1"]
    slices = [slice_on(f"n{each}", *devices[: each + 1]) for each in range(40)]
    _, found = asked(*nodes, *slices, claim(request(count=2000)))
    assert len(found.nodes) == 16


@pytest.mark.parametrize(
    ("answers", "refuted"),
    [
        pytest.param([Answer(outcome=FATAL, text="no such key"), Answer(outcome=FITS)], "", id="="),
        pytest.param(
            [Answer(outcome=NONE), Answer(outcome=FITS)],
            "drakit finds that the claims make the scheduler give up the pod on node n1, and "
            "Kubernetes' allocator finds none there",
            id="not-fatal",
        ),
        pytest.param(
            [Answer(outcome=FATAL), Answer(outcome=FATAL, text="feature X is off")],
            "drakit finds that the claims can be allocated on node n2, and Kubernetes' allocator "
            "fails: feature X is off",
            id="fatal",
        ),
    ],
)
def test_a_difference_is_named_with_its_node_and_the_allocators_words(answers, refuted):
    _, found = asked(
        node("n1"),
        node("n2"),
        slice_on("n1", BAD),
        slice_on("n2", GOOD),
        claim(request(selectors=(MODEL,))),
    )
    assert found.refuted(answers) == refuted


SLICE = {
    "metadata": {"name": "s"},
    "spec": {
        "driver": "d",
        "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1},
        "nodeName": "n",
        "devices": [
            {
                "name": "a",
                "attributes": {"model": {"string": "x"}},
                "capacity": {"memory": {"value": "1Gi", "requestPolicy": {"default": "1Gi"}}},
            },
            {"name": "b", "taints": [{"key": "k", "effect": "NoSchedule"}], "bindsToNode": True},
        ],
    },
}
CLAIM = {
    "metadata": {},
    "spec": {
        "devices": {
            "requests": [
                {"name": "r", "exactly": {"deviceClassName": "c", "count": 2}},
                {"name": "s", "firstAvailable": [{"name": "t", "deviceClassName": "c"}]},
            ],
            "constraints": [{"matchAttribute": "d/model"}],
        }
    },
}


def changed(body, path, **values):
    """A body with fields added at a path."""
    if not path:
        return {**body, **values}
    key, *rest = path
    if isinstance(body, list):
        return [changed(each, rest, **values) if n == key else each for n, each in enumerate(body)]
    return {**body, key: changed(body[key], rest, **values)}


OF_SLICE = ["spec", "devices", 1]
OF_CLAIM = ["spec", "devices"]


@pytest.mark.parametrize(
    ("slice_", "claim_", "named"),
    [
        (SLICE, CLAIM, ""),
        (changed(SLICE, ["spec"], new=1), CLAIM, "field new of ResourceSlice s"),
        (changed(SLICE, ["spec"], partitionTypeAttribute="x.y/profile"), CLAIM, ""),
        (
            changed(SLICE, OF_SLICE, nodeAllocatableResourceMappings={}),
            CLAIM,
            "field nodeAllocatableResourceMappings of device b of ResourceSlice s",
        ),
        (
            changed(SLICE, [*OF_SLICE[:2], 0, "attributes", "model"], derived="x"),
            CLAIM,
            "field derived of attribute model of ResourceSlice s",
        ),
        (
            changed(SLICE, [*OF_SLICE[:2], 0, "capacity", "memory", "requestPolicy"], new=1),
            CLAIM,
            "field new of capacity memory of ResourceSlice s",
        ),
        (SLICE, changed(CLAIM, [*OF_CLAIM, "requests", 0], new=1), "field new of request r"),
        (
            SLICE,
            changed(CLAIM, [*OF_CLAIM, "requests", 0, "exactly"], new=1),
            "field new of request r",
        ),
        (
            SLICE,
            changed(CLAIM, [*OF_CLAIM, "requests", 1, "firstAvailable", 0], new=1),
            "field new of request s",
        ),
        (
            SLICE,
            changed(CLAIM, [*OF_CLAIM, "constraints", 0], new=1),
            "field new of a constraint",
        ),
    ],
)
def test_a_field_that_drakit_does_not_know_is_named(slice_, claim_, named):
    question = VerdictQuestion(
        nodes=(), claims=[CLAIM, claim_], classes=(), slices=[SLICE, slice_], in_use=(), gates={}
    )
    assert unknown_fields(question) == named
