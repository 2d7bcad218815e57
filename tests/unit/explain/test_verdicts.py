"""Verdicts that depend on nodes, constraints and on requests that compete."""

from dataclasses import replace

import pytest

from drakit_explain.devices import Amount, CapacityFacts, CapacityPolicy, ListValue, TaintFacts
from drakit_explain.model import (
    ClaimFacts,
    Constraint,
    Placement,
    PodClaim,
    Toleration,
)
from drakit_explain.pending import Explainer, Verdict
from drakit_explain.projection import UNREAD_CLAIM, project_claim
from drakit_explain.world import Name
from drakit_formats.resource.nodes import node_selector
from tests.fakes.world import (
    ANY,
    POD,
    ask_allocator,
    claim,
    device,
    explain,
    holding,
    node,
    on,
    request,
    slice_on,
    world_of,
)

GPU_TAINT = TaintFacts(key="gpus-only", effect="NoSchedule")


def cluster(*facts):
    return world_of(ANY, node("n1"), *facts)


def only_reason(world, pod=POD):
    explanation = explain(pod, world)
    assert explanation.verdict is Verdict.BLOCKED
    (reason,) = explanation.reasons
    return str(reason.code), reason.text.removeprefix("pod lab/train waits: ")


@pytest.mark.parametrize(
    ("facts", "placement", "why"),
    [
        pytest.param(
            {"taints": (GPU_TAINT,)},
            Placement(),
            "it does not tolerate their taint gpus-only",
            id="a-taint",
        ),
        pytest.param(
            {"labels": {"zone": "a"}},
            Placement(node_selector=(("zone", "b"),)),
            "its node selector or affinity excludes them",
            id="a-node-selector",
        ),
        pytest.param({"unschedulable": True}, Placement(), "they are cordoned", id="a-cordon"),
    ],
)
def test_devices_on_nodes_that_the_pod_cannot_use(facts, placement, why):
    world = world_of(
        ANY,
        node("n1", **facts),
        node("n2"),
        slice_on("n1", device("g0"), device("g1")),
        claim(request()),
    )
    code, sentence = only_reason(world, replace(POD, placement=placement))
    assert code == "DevicesOnOtherNodes"
    assert sentence == (
        f'all 2 devices of DeviceClass "any" that match request "r" of claim "mine" are on '
        f"nodes that the pod cannot use ({why}); allow the pod to run on those nodes, or publish "
        f"devices on the nodes that it can use"
    )


def test_a_pod_that_tolerates_the_taint_fits():
    tolerating = Placement(tolerations=(Toleration(key="gpus-only", operator="Exists"),))
    world = cluster(node("n1", taints=(GPU_TAINT,)), slice_on("n1", device("g0")), claim(request()))
    explanation = explain(replace(POD, placement=tolerating), world)
    assert (explanation.verdict, explanation.fits_on) == (Verdict.FITS, "n1")


FIELD = {"key": "metadata.name", "operator": "In", "values": ["n2"]}
ONLY_N2 = node_selector({"nodeSelectorTerms": [{"matchFields": [FIELD]}]})


@pytest.mark.parametrize("nodes", [ONLY_N2, "n2"], ids=["terms", "name"])
def test_an_allocated_claim_excludes_other_nodes(nodes):
    other = replace(holding("other"), nodes=nodes)
    world = cluster(node("n2"), slice_on("n1", device("g0")), claim(request()), other)
    pod = replace(POD, claims=(*POD.claims, PodClaim(name="o", claim="other")))
    code, sentence = only_reason(world, pod)
    assert code == "DevicesOnOtherNodes"
    assert "its allocated claim other is not available there" in sentence


def test_an_allocated_claim_that_no_pod_uses_excludes_no_node_for_certain():
    other = replace(holding("other"), nodes=ONLY_N2, consumers=())
    world = cluster(node("n2"), slice_on("n1", device("g0")), claim(request()), other)
    pod = replace(POD, claims=(*POD.claims, PodClaim(name="o", claim="other")))
    explanation = explain(pod, world)
    assert explanation.verdict is Verdict.UNDECIDED
    assert "claim other is allocated for other nodes, but no pod uses it" in explanation.unknown[0]


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_a_claim_that_could_not_be_read_makes_a_verdict_undecided(version):
    metadata = {"namespace": "lab", "name": "other", "uid": "o"}
    other = project_claim({"metadata": metadata, "spec": UNREAD_CLAIM}, version)
    pod = replace(POD, claims=(*POD.claims, PodClaim(name="o", claim="other")))
    explanation = explain(pod, cluster(slice_on("n1", device("g0")), claim(request()), other))
    assert explanation.verdict is Verdict.UNDECIDED
    assert "allocation mode that cannot be read" in explanation.unknown[0]


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        pytest.param(
            "memroy",
            "device g0 has memory, so check the spelling of memroy; if only some devices have it, "
            'test for it first (has(device.capacity["d"].memroy))',
            id="a-near-miss-of-a-capacity",
        ),
        pytest.param("speed", "check the spelling of speed; if only", id="nothing-is-close"),
    ],
)
def test_a_missing_key_is_compared_with_the_names_of_the_device(key, advice):
    selector = f'device.attributes["d"].{key} == "x"'
    memory = CapacityFacts(name="memory", value="1Gi")
    devices = device("g0", attributes={"model": "x", "numa": 0}, capacity=[memory])
    world = cluster(slice_on("n1", devices), claim(request(selectors=(selector,))))
    code, sentence = only_reason(world)
    assert code == "SelectorFailed"
    assert f"; {advice}" in sentence


@pytest.mark.parametrize(
    ("domain", "advice"),
    [
        pytest.param(
            "d",
            'device eth0 is not of driver d, so test the driver first (device.driver == "d" && ...',
            id="of-another-driver",
        ),
        pytest.param(
            "vendors.example.com",
            "check the spelling of model; if only some devices have it, test for it first "
            '(has(device.attributes["vendors.example.com"].model))',
            id="of-no-driver",
        ),
    ],
)
def test_a_missing_key_is_tested_in_the_domain_of_the_selector(domain, advice):
    foreign = replace(slice_on("n2", device("eth0")), driver="dra.net")
    facts = [slice_on("n1", device("g0", attributes={f"{domain}/model": "x"})), node("n2"), foreign]
    selector = f'device.attributes["{domain}"].model == "x"'
    code, sentence = only_reason(cluster(*facts, claim(request(selectors=(selector,)))))
    assert code == "SelectorFailed"
    assert f"; {advice}" in sentence


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        pytest.param(None, "10", id="all-of-the-device"),
        pytest.param(CapacityPolicy(default="1", min="1", max="8"), "8", id="a-range"),
        pytest.param(CapacityPolicy(default="1", valid_values=("1", "4")), "4", id="values"),
    ],
)
def test_the_most_that_a_claim_can_have_of_a_capacity_is_named(policy, most):
    memory = CapacityFacts(name="memory", value="10", policy=policy)
    devices = (device("g0", capacity=[replace(memory, value="2")]), device("g1", capacity=[memory]))
    asks = request(capacity=(Amount("memory", "11"),))
    code, sentence = only_reason(cluster(slice_on("n1", *devices), claim(asks)))
    assert code == "NoDevicePublished"
    assert f"has the requested capacity (a claim can have at most {most} of memory)" in sentence


ROOT = Constraint(attribute="d/root")


@pytest.mark.parametrize(
    ("claims", "lasting"),
    [
        pytest.param(
            [claim(request(count=2), constraints=[ROOT])],
            'claim "mine": no node publishes devices that satisfy its constraints on d/root',
            id="a-constraint",
        ),
        pytest.param(
            [claim(*(request(name=name) for name in "abc"))],
            'claim "mine": even if all devices are free, no node has enough for all of its req',
            id="requests-that-need-one-device",
        ),
        pytest.param(
            [claim(request(count=2)), claim(request(), name="other")],
            "even if all devices are free, no node has enough for all of its claims together",
            id="claims-that-need-one-device",
        ),
        pytest.param([claim(request(count=2))], "", id="nothing"),
    ],
)
def test_what_does_not_end_when_devices_are_free_is_named_while_they_are_held(claims, lasting):
    devices = (device(f"g{root}", attributes={"root": root}) for root in (0, 1))
    world = cluster(slice_on("n1", *devices), holding("used", "g0", "g1"), *claims)
    pod = replace(POD, claims=tuple(PodClaim(name=each.name, claim=each.name) for each in claims))
    reasons = [
        each.text.removeprefix("pod lab/train waits: ") for each in explain(pod, world).reasons
    ]
    assert reasons[0].startswith(lasting)
    assert any("allocated to claim" in each for each in reasons)
    assert any("when" in each and "released" in each for each in reasons) is not bool(lasting)


def test_equal_pods_share_what_does_not_end_but_not_their_claims():
    devices = (device(f"g{root}", attributes={"root": root}) for root in (0, 1))
    claims = [claim(request(count=2), name=name, constraints=[ROOT]) for name in ("a", "b")]
    world = cluster(slice_on("n1", *devices), holding("used", "g0"), *claims)
    explainer = Explainer(world)
    for each in claims:
        generated = PodClaim(name="c", template="t", generated=each.name)
        pod = replace(POD, name=f"of-{each.name}", claims=(generated,))
        (lasting, _) = explainer.explain_now(pod, ask_allocator).claim_reasons
        assert str(lasting.code) == "ConstraintNotMet"
        assert lasting.regarding == each.reference


@pytest.mark.parametrize("count", [pytest.param(2, id="two"), pytest.param(0, id="all-devices")])
def test_a_constraint_without_which_it_fits_is_named(count):
    world = cluster(
        slice_on("n1", device("a", attributes={"numa": 0}), device("b", attributes={"numa": 1})),
        claim(request(count=count), constraints=[Constraint(attribute="d/numa")]),
    )
    assert only_reason(world) == (
        "ConstraintNotMet",
        "no node has enough free devices with the same value of d/numa, as matchAttribute of claim "
        '"mine" requires; relax the constraint or add devices',
    )


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([request(count=33)], id="of-one-request"),
        pytest.param([request("one", count=17), request("two", count=16)], id="of-two-requests"),
    ],
)
def test_more_devices_than_an_allocation_can_list(requests):
    devices = [device(f"g{number}") for number in range(40)]
    world = cluster(slice_on("n1", *devices), claim(*requests))
    assert only_reason(world) == (
        "RequestsCompete",
        'claim "mine" asks for 33 devices, but an allocation can list only 32; reduce the requests',
    )


def test_requests_that_need_the_same_device():
    world = cluster(slice_on("n1", device("a")), claim(request("one"), request("two")))
    assert only_reason(world) == (
        "RequestsCompete",
        "node n1 does not have enough devices for all requests of the pod's claims together, "
        "although each request could be allocated by itself; reduce the requests, or add "
        "devices to one node",
    )


def test_requests_that_need_the_same_device_beside_an_allocated_one():
    world = cluster(
        slice_on("n1", device("a"), device("b")),
        holding("other", "a"),
        claim(request("one"), request("two")),
    )
    code, sentence = only_reason(world)
    assert code == "DevicesAllocated"
    assert sentence == (
        "the pod's requests compete for the same free devices on node n1, and the other devices "
        "there are allocated; the claims can be allocated when enough devices are released"
    )


def test_one_request_does_not_compete_with_itself():
    devices = (device("a", place=on("n1")), device("b", place=on("n2")))
    world = cluster(
        node("n2", unschedulable=True),
        replace(slice_on("all", *devices), place=None, by_device=True),
        holding("other", "a", pool="all"),
        claim(request()),
    )
    assert only_reason(world) == (
        "DevicesAllocated",
        'too few of the devices for node n1 that match request "r" of claim "mine" are free: the '
        "others are allocated; the claims can be allocated when enough devices are released",
    )


def twins(driver, **changes):
    """A pool with two devices of one name."""
    broken = slice_on("n1", device("g0"), device("g0"))
    return replace(broken, name=f"twins-{driver}", driver=driver, pool="twins", **changes)


@pytest.mark.parametrize("slices", [1, 2], ids=["invalid", "incomplete"])
def test_a_pool_of_another_driver_that_is_not_ready_does_not_matter(slices):
    only = replace(ANY, selectors=('device.driver == "d"',))
    world = world_of(only, node("n1"), twins("e", pool_slices=slices), claim(request()))
    code, sentence = only_reason(world)
    assert code == "NoDevicePublished"
    assert "not counted" not in sentence


def test_an_invalid_pool_of_another_driver_is_not_why_requests_compete():
    only = replace(ANY, selectors=('device.driver == "d"',))
    both = (request(name="one"), request(name="two"))
    world = world_of(
        only, node("n1"), node("n2"), slice_on("n1", device("a")), twins("e"), claim(*both)
    )
    explanation = explain(POD, world)
    (reason,) = explanation.reasons
    assert str(reason.code) == "RequestsCompete"
    assert "invalid" not in reason.text
    assert "each request could be allocated by itself" in reason.text


def test_a_change_of_the_world_changes_the_verdict():
    world = cluster(slice_on("n1", device("a")), holding("other", "a"), claim(request()))
    assert only_reason(world)[0] == "DevicesAllocated"
    world.remove(ClaimFacts, Name("lab", "other"))
    assert explain(POD, world).verdict is Verdict.FITS
    world.apply(slice_on("n1"))
    assert only_reason(world)[0] == "NoDevicePublished"


LISTS = [
    device(name, attributes={"roots": ListValue("strings", (name, "common"))})
    for name in ("g0", "g1")
]


@pytest.mark.parametrize(
    ("facts", "unknown"),
    [
        pytest.param(
            [slice_on("n1", device("g0")), claim(request(unsupported="allocation mode Most"))],
            'drakit does not support allocation mode Most of request "r"',
            id="an-allocation-mode",
        ),
        pytest.param(
            [
                slice_on("n1", device("g0")),
                claim(request(), constraints=[Constraint(attribute="", extra=b'{"few": 1}')]),
            ],
            'the allocator has no unknown field "claims[0].spec.devices.constraints[0].few"',
            id="a-kind-of-constraint",
        ),
    ],
)
def test_what_is_unknown_makes_a_verdict_undecided(facts, unknown):
    explanation = explain(POD, cluster(*facts))
    assert explanation.verdict is Verdict.UNDECIDED
    assert explanation.unknown == (unknown,)


def test_a_constraint_on_one_device_with_a_list_is_met():
    world = cluster(
        slice_on("n1", *LISTS), claim(request(), constraints=[Constraint(attribute="d/roots")])
    )
    assert explain(POD, world).verdict is Verdict.FITS
