"""Remedies: each kind of single change, and none without proof."""

from dataclasses import replace

import pytest

from drakit_explain import pending
from drakit_explain.budget import Budget
from drakit_explain.cel.library import Library
from drakit_explain.devices import Amount, CapacityFacts, CounterSetFacts, Place, TaintFacts
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    Constraint,
    Consumer,
    DeviceID,
    Placement,
    PodClaim,
    PolicyFacts,
    Request,
    Result,
    Share,
    TemplateFacts,
)
from drakit_explain.pending import Explainer, Verdict
from drakit_explain.world import Name
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
    request,
    slice_on,
    world_of,
)

BROKEN = TaintFacts(key="lab/broken", effect="NoSchedule")
LEAK = TaintFacts(key="lab/leak", effect="NoExecute")
UNHEALTHY = TaintFacts(key="drakit.dev/unhealthy", effect="NoSchedule")


def models(*values):
    return [device(f"g{n}", attributes={"model": value}) for n, value in enumerate(values)]


def model(value):
    return f'device.attributes["d"].model == "{value}"'


def numa(*values):
    return [device(f"g{n}", attributes={"numa": value}) for n, value in enumerate(values)]


SAME = Constraint(attribute="d/numa")
N1 = node("n1")


def remedy(*facts, pod=POD):
    """The remedy in a world with node n1, unless the facts have another one."""
    found = explain(pod, world_of(ANY, N1, *facts))
    assert found.verdict is Verdict.BLOCKED
    return found.remedy


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        pytest.param(
            [slice_on("n1", device("g0")), holding("a", "g0", namespace="x"), claim(request())],
            "the pod would fit on node n1 if a claim in another namespace released its devices",
            id="a-holder-of-another-namespace-stays-unnamed",
        ),
        pytest.param(
            [
                slice_on("n1", device("g0"), device("g1")),
                holding("a", "g0"),
                holding("b", "g1"),
                claim(request(count=2)),
            ],
            "the pod would fit on node n1 if other claims released their devices",
            id="two-holders-together",
        ),
        pytest.param(
            [
                slice_on("n1", device("g0"), device("g1")),
                holding("a", "g0"),
                claim(request(count=2)),
            ],
            "the pod would fit on node n1 if claim lab/a (pod pod-a) released its devices, or if "
            'request "r" asked for 1 instead of 2',
            id="a-holder-or-a-smaller-count",
        ),
        pytest.param(
            [slice_on("n1", device("g0"), device("g1", taints=(BROKEN,))), claim(request(count=0))],
            'the pod would fit on node n1 if request "r" tolerated the taint '
            'lab/broken:NoSchedule, or if request "r" asked for 1 instead of all devices',
            id="one-instead-of-all",
        ),
        pytest.param(
            [slice_on("n1", device("g0", taints=(BROKEN, LEAK))), claim(request())],
            'the pod would fit on node n1 if request "r" tolerated the taints '
            "lab/broken:NoSchedule, lab/leak:NoExecute",
            id="two-taints-of-one-device",
        ),
        pytest.param(
            [slice_on("n1", device("g0", taints=(UNHEALTHY,))), claim(request())],
            "the pod would fit on node n1 if the taint drakit.dev/unhealthy:NoSchedule of the "
            "devices were removed",
            id="a-taint-of-ours-is-not-to-be-tolerated",
        ),
        pytest.param(
            [slice_on("n1", device("g0")), claim(request("one"), request("two"))],
            'the pod would fit on node n1 if the pod did not have request "one"',
            id="requests-that-compete",
        ),
    ],
)
def test_a_change_that_lets_the_pod_fit_is_named(facts, expected):
    assert remedy(*facts) == expected


def test_the_claim_is_named_if_the_pod_has_several():
    pod = replace(POD, claims=(*POD.claims, PodClaim(name="o", claim="other")))
    facts = [slice_on("n1", device("g0")), claim(request()), claim(request(), name="other")]
    expected = 'the pod would fit on node n1 if the pod did not have request "r" of claim "mine"'
    assert remedy(*facts, pod=pod) == expected


def test_an_alternative_is_named_by_its_full_name():
    list_of_two = Request(
        name="r",
        device_class="",
        alternatives=(request("best", selectors=(model("z"),)), request("good", count=3)),
    )
    facts = [slice_on("n1", *models("x", "y")), claim(list_of_two)]
    expected = (
        'the pod would fit on node n1 if request "r/good" asked for 2 instead of 3, or if request '
        '"r/best" had no selector'
    )
    assert remedy(*facts) == expected


def card(amount):
    return (CounterSetFacts(name="card", counters=(Amount("m", amount),)),)


def shared(name, amount):
    taken = Share(device=DeviceID("d", "n1", "g0"), consumed=(Amount("m", amount),))
    return replace(holding(name), shares=(taken,))


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        pytest.param(
            [
                replace(
                    slice_on(
                        "n1",
                        *(device(f"small-{n}", consumes=card("3")) for n in range(2)),
                        device("large", consumes=card("4"), taints=(BROKEN,)),
                    ),
                    pool_slices=2,
                ),
                replace(
                    slice_on("n1"), name="c", pool_slices=2, counter_sets=card("7"), devices=()
                ),
                holding("h", "large"),
            ],
            claim(request(count=2)),
            id="partitions",
        ),
        pytest.param(
            [
                slice_on(
                    "n1",
                    device("g0", shareable=True, capacity=[CapacityFacts(name="m", value="4")]),
                ),
                shared("h", "2"),
            ],
            claim(*(request(name, capacity=(Amount("m", "2"),)) for name in ("a", "b"))),
            id="shares",
        ),
    ],
)
def test_a_claim_is_named_that_leaves_enough_for_one_device_but_not_for_two(facts, wanted):
    assert remedy(*facts, wanted).startswith(
        "the pod would fit on node n1 if claim lab/h (pod pod-h) released its devices"
    )


def test_the_pod_itself_needs_the_devices_of_its_claims():
    own = replace(holding("own", "g0"), consumers=(Consumer("pods", POD.name, POD.uid),))
    pod = replace(POD, claims=(PodClaim(name="o", claim="own"), *POD.claims))
    devices = slice_on("n1", device("g0"), device("g1"))
    assert remedy(devices, own, claim(request(count=2)), pod=pod) == (
        'the pod would fit on node n1 if request "r" asked for 1 instead of 2'
    )


def test_only_holders_on_the_node_are_tried():
    nodes = [f"n{number:02}" for number in range(12)]
    devices = [replace(device(f"g-{name}"), place=Place(node=name)) for name in nodes]
    pool = replace(slice_on("all", *devices), place=None, by_device=True)
    found = explain(
        replace(POD, placement=Placement(node_selector=(("k", "v"),))),
        world_of(
            ANY,
            *(node(name, labels={"k": "v"} if name == "n11" else {}) for name in nodes),
            pool,
            *(holding(f"h-{name}", f"g-{name}", pool="all") for name in nodes),
            claim(request()),
        ),
    )
    assert found.remedy == (
        "the pod would fit on node n11 if claim lab/h-n11 (pod pod-h-n11) released its devices"
    )


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param([claim(request())], id="nothing-is-published"),
        pytest.param(
            [slice_on("n1", *models("x")), claim(request(selectors=(model("y"), model("z"))))],
            id="two-selectors-reject-the-device",
        ),
        pytest.param(
            [
                slice_on("n1", *models("x")),
                claim(
                    request(
                        selectors=(
                            model("y"),
                            'device.attributes["d"].v.isGreaterThan(semver("1.0.0"))',
                        )
                    )
                ),
            ],
            id="behind-the-selector-is-one-that-cannot-be-evaluated",
        ),
        pytest.param(
            [slice_on("n1", device("g0", taints=(BROKEN,))), holding("a", "g0"), claim(request())],
            id="a-device-is-tainted-and-allocated",
        ),
    ],
)
def test_no_remedy_is_named_without_proof(facts):
    assert remedy(*facts) == ""


def test_the_search_for_remedies_has_a_budget_of_its_own(monkeypatch):
    facts = [slice_on("n1", device("g0"), device("g1")), holding("a", "g0", "g1")]
    found = explain(POD, world_of(ANY, N1, *facts, claim(request())))
    assert found.verdict is Verdict.BLOCKED
    monkeypatch.setattr("drakit_explain.pending.budget_of", lambda world: Budget(10))
    assert found.remedy == ""


@pytest.mark.parametrize(
    "each_claim",
    [
        pytest.param(lambda n: PodClaim(name="c", template="t"), id="of-one-template"),
        pytest.param(lambda n: PodClaim(name="c", claim=f"mine-{n}"), id="with-own-claims"),
    ],
)
def test_for_pods_with_equal_requests_each_question_is_asked_once(each_claim):
    pods = [replace(POD, name=f"train-{n}", uid=str(n), claims=(each_claim(n),)) for n in range(3)]
    template = TemplateFacts(namespace="lab", name="t", uid="t", requests=(request(),))
    claims = [claim(request(), name=f"mine-{n}") for n in range(3)]
    world = world_of(
        ANY, N1, slice_on("n1", device("g0")), holding("a", "g0"), template, *claims, *pods
    )
    explainer = Explainer(world)
    asked: list[int] = []

    def counted(question):
        asked.append(question.key)
        return ask_allocator(question)

    for pod in pods:
        evaluate_for(explainer, world, pod, Library())
        assert "claim lab/a" in explainer.explain_now(pod, counted).remedy
    assert len(asked) == len(set(asked)) == 3  # as it is, without the holder, without all holders


def test_pods_with_equal_claims_share_a_remedy_that_names_the_claims_of_each():
    names = [(f"a-{n}", f"b-{n}") for n in range(2)]
    pods = [
        replace(POD, name=f"p{n}", uid=str(n), claims=tuple(PodClaim(name=c, claim=c) for c in of))
        for n, of in enumerate(names)
    ]
    claims = [
        claim(request(count=2), name=name, constraints=[SAME] if name.startswith("b") else [])
        for of in names
        for name in of
    ]
    world = world_of(ANY, N1, slice_on("n1", *numa(0, 1, 2, 3)), *claims, *pods)
    explainer = Explainer(world)
    remedies: list[str] = []
    for pod in pods:
        evaluate_for(explainer, world, pod, Library())
        remedies.append(explainer.explain_now(pod, ask_allocator).remedy)
    assert len(explainer._results) == 1
    assert 'claim "b-0" did not have the constraint' in remedies[0]
    assert remedies[1] == remedies[0].replace("a-0", "a-1").replace("b-0", "b-1")


def test_nothing_is_asked_about_a_node_that_has_too_few_devices():
    many = [f"g{n}" for n in range(16)]
    world = world_of(
        ANY, N1, slice_on("n1", *map(device, many)), holding("a", *many), claim(request(count=17))
    )
    explainer = Explainer(world)
    asked: list[int] = []

    def counted(question):
        asked.append(question.key)
        return ask_allocator(question)

    evaluate_for(explainer, world, POD, Library())
    assert explainer.explain_now(POD, counted).remedy == ""
    assert len(asked) == 1  # as it is


def test_remedies_of_pods_with_rules_of_their_own_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(pending, "MAX_KEPT", 2)
    pods = [replace(POD, name=f"p{n}", uid=str(n), requests=(("cpu", n),)) for n in range(5)]
    world = world_of(ANY, N1, slice_on("n1", device("g0")), holding("a", "g0"), claim(request()))
    explainer = Explainer(world)
    for pod in pods:
        evaluate_for(explainer, world, pod, Library())
        assert "claim lab/a" in explainer.explain_now(pod, ask_allocator).remedy
    assert len(explainer._results) == 2


def test_a_remedy_is_found_once_in_the_facts_that_were_judged():
    facts = [N1, slice_on("n1", device("g0")), holding("a", "g0"), claim(request())]
    world = world_of(ANY, *facts)
    found = explain(POD, world)
    first = found.remedy
    assert "claim lab/a" in first
    world.remove(ClaimFacts, Name("lab", "a"))
    assert found.remedy == first


@pytest.mark.parametrize(
    ("requests", "constraints", "claims"),
    [
        pytest.param(
            {"a": request(count=2), "b": request(count=2)}, [], ["a", "b"], id="that-compete"
        ),
        pytest.param(
            {"a": request(count=4), "b": request()}, [], ["a"], id="of-which-one-is-short"
        ),
        pytest.param(
            {"a": request(count=2), "b": request()}, [SAME], ["a"], id="of-which-one-is-constrained"
        ),
    ],
)
def test_a_reason_is_about_the_claims_that_it_keeps_from_being_allocated(
    requests, constraints, claims
):
    pod = replace(POD, claims=tuple(PodClaim(name=each, claim=each) for each in requests))
    facts = [claim(of, name=name) for name, of in requests.items()]
    facts[0] = replace(facts[0], constraints=tuple(constraints))
    found = explain(pod, world_of(ANY, N1, slice_on("n1", *numa(0, 1, 2)), *facts))
    assert [each.regarding.name for each in found.claim_reasons] == claims


# ---- a device that is gone

HOSTDEV = "hostdev.drakit.dev"
GONE = TaintFacts(key="drakit.dev/gone", effect="NoSchedule")
ZIGBEE = ClassFacts(
    name="zigbee",
    uid="z",
    selectors=('device.attributes["hostdev.drakit.dev"].policy == "zigbee"',),
)
TEMPLATE = TemplateFacts(
    namespace="lab", name="zigbee", uid="t", requests=(request(device_class="zigbee"),)
)
RUNNING = replace(
    POD,
    node="n1",
    phase="Running",
    claims=(PodClaim(name="c", template="zigbee", generated="mine"),),
    scheduling_message="",
)


def stick(name, *taints, policy="zigbee"):
    return device(name, attributes={"policy": policy}, taints=taints)


def sticks(on_node, *devices):
    return replace(slice_on(on_node, *devices), driver=HOSTDEV)


def moved(*facts, vanish="Taint", pod=RUNNING):
    """The remedy for a pod on node n1 whose stick is gone."""
    old = DeviceID(HOSTDEV, "n1", "zigbee-1")
    mine = replace(
        holding("mine"),
        devices=(old,),
        results=(Result(request="r", device=old),),
        consumers=(Consumer("pods", "train", "p"),),
        owner_uid="p",
        nodes="n1",
    )
    of_policy = PolicyFacts(name="zigbee", uid="y", generation=1, evicts=vanish == "Evict")
    here = sticks("n1", stick("zigbee-1", GONE))
    world = world_of(N1, node("n2"), ZIGBEE, TEMPLATE, of_policy, here, mine, *facts)
    found = explain(pod, world)
    assert [str(each.code) for each in found.reasons] == ["DeviceGone"]
    assert "or delete the pod, so that another device is allocated" in found.reasons[0].sentence
    return found.remedy


FREE = (
    "device zigbee-2 on node n2 matches and is free: delete the pod, and a pod that replaces it "
    "gets that device"
)
SETTING = "; with onVanish: Evict in HostDevicePolicy zigbee, Kubernetes deletes such a pod"


@pytest.mark.parametrize(
    ("devices", "options", "expected"),
    [
        pytest.param([stick("zigbee-2")], {}, FREE + SETTING, id="free-on-another-node"),
        pytest.param([stick("zigbee-2")], {"vanish": "Evict"}, FREE, id="the-policy-evicts"),
        pytest.param(
            [stick("zwave-1", policy="zwave"), stick("zigbee-0", GONE), stick("zigbee-2")],
            {},
            FREE + SETTING,
            id="not-the-first-device-of-the-node",
        ),
        pytest.param([stick("zwave-1", policy="zwave")], {}, "", id="of-another-policy"),
        pytest.param([stick("zigbee-2", LEAK)], {}, "", id="tainted"),
        pytest.param(
            [stick("zigbee-2")],
            {"pod": replace(RUNNING, claims=(PodClaim(name="c", claim="mine"),))},
            "",
            id="its-claim-outlives-the-pod",
        ),
    ],
)
def test_a_pod_whose_device_is_gone_is_told_where_another_one_is_free(devices, options, expected):
    assert moved(sticks("n2", *devices), **options) == expected


def test_a_device_of_another_claim_does_not_replace_one_that_is_gone():
    other = DeviceID(HOSTDEV, "n2", "zigbee-2")
    taken = replace(holding("other"), devices=(other,))
    assert moved(sticks("n2", stick("zigbee-2")), taken) == ""


def test_a_partition_of_used_hardware_does_not_replace_a_device_that_is_gone():
    card = (CounterSetFacts(name="card", counters=(Amount("slots", "1"),)),)
    parts = [replace(stick(name), consumes=card) for name in ("zigbee-2", "zigbee-3")]
    of_node = replace(sticks("n2", *parts, stick("zigbee-4")), pool_slices=2)
    counters = replace(of_node, name="c", uid="c", devices=(), counter_sets=card)
    taken = replace(holding("other"), devices=(DeviceID(HOSTDEV, "n2", "zigbee-3"),))
    assert moved(of_node, counters, taken) == FREE.replace("zigbee-2", "zigbee-4") + SETTING


def test_a_node_that_the_pod_cannot_use_has_no_device_for_it():
    pod = replace(RUNNING, placement=Placement(node_selector=(("room", "lab"),)))
    assert moved(sticks("n2", stick("zigbee-2")), pod=pod) == ""
