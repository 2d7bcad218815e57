"""Advice that an explanation never gives, and facts that it must name: each case was wrong once."""

from dataclasses import replace

import pytest

from drakit_explain.broken import broken_claim
from drakit_explain.devices import Amount, CapacityFacts, TaintFacts
from drakit_explain.model import (
    ClaimFacts,
    Constraint,
    Consumer,
    DeviceID,
    Placement,
    PodClaim,
    Result,
    TemplateFacts,
    Toleration,
)
from drakit_explain.pending import Explainer, Verdict
from drakit_formats.resource.nodes import node_selector
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

N1 = node("n1")
BROKEN = TaintFacts(key="example.com/broken", effect="NoSchedule")


def answer(*facts, pod=POD):
    """The code, the whole text, and the remedy of the only reason."""
    found = explain(pod, world_of(ANY, *facts))
    assert found.verdict is Verdict.BLOCKED, found
    (reason,) = found.reasons
    return str(reason.code), reason.text.removeprefix("pod lab/train waits: "), found.remedy


# ---- nodes


@pytest.mark.parametrize(
    "key",
    [
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
        "node.kubernetes.io/disk-pressure",
        "node.cloudprovider.kubernetes.io/uninitialized",
    ],
)
def test_nobody_is_advised_to_tolerate_the_condition_of_a_node(key):
    taint = TaintFacts(key=key, effect="NoSchedule")
    code, text, remedy = answer(
        node("n1", taints=(taint,)), node("n2"), slice_on("n1", device("g0")), claim(request())
    )
    assert code == "DevicesOnOtherNodes"
    assert f"are on nodes that the pod cannot use (they have the taint {key})" in text.replace(
        "is on", "are on"
    )
    assert text.endswith(
        "; check those nodes (kubectl describe node), or publish devices on the "
        "nodes that the pod can use"
    )
    assert remedy == f"the pod would fit on node n1 if that node lost the taint {key}"
    assert "tolerate" not in text + remedy


def test_the_values_of_a_nodes_taint_and_of_a_toleration_are_compared():
    taint = TaintFacts(key="gpus", effect="NoSchedule", value="only")
    pod = replace(POD, placement=Placement(tolerations=(Toleration(key="gpus", value="yes"),)))
    code, text, remedy = answer(
        node("n1", taints=(taint,)), slice_on("n1", device("g0")), claim(request()), pod=pod
    )
    assert code == "DevicesOnOtherNodes"
    assert "(it does not tolerate their taint gpus=only)" in text
    assert remedy == "the pod would fit on node n1 if the pod tolerated the node's taint gpus=only"


def on_node(name):
    field = {"key": "metadata.name", "operator": "In", "values": [name]}
    return node_selector({"nodeSelectorTerms": [{"matchFields": [field]}]})


def held_on(name, *consumers):
    return replace(holding("mine", "g0"), nodes=on_node(name), consumers=consumers)


OWN = Consumer("pods", "train", "p")
OTHER = Consumer("pods", "other", "o")


def test_a_claim_that_only_the_pod_itself_has_reserved_is_not_used_by_others():
    # The scheduler deallocates such a claim if it finds no node for the pod.
    facts = [node("n1", unschedulable=True), node("n2"), held_on("n1", OWN)]
    found = explain(POD, world_of(ANY, *facts))
    assert found.verdict is Verdict.UNDECIDED
    assert "other pods use" not in " ".join(each.sentence for each in found.reasons)


def test_a_claim_of_another_pod_is_used_by_others():
    code, text, _ = answer(node("n1", unschedulable=True), node("n2"), held_on("n1", OWN, OTHER))
    assert code == "DevicesOnOtherNodes"
    assert "and other pods use the claim" in text


def test_a_node_that_is_gone_comes_before_the_nodes_of_other_claims():
    pod = replace(POD, claims=(*POD.claims, PodClaim(name="o", claim="other")))
    facts = [node("n2"), slice_on("n2", device("g0")), claim(request(), name="other")]
    code, _, _ = answer(*facts, held_on("n1", OTHER), pod=pod)
    assert code == "NodeGone"


@pytest.mark.parametrize(
    ("other", "code"),
    [
        pytest.param(
            [node("n2", unschedulable=True), slice_on("n2", device("g0"))],
            "DevicesAllocated",
            id="beside-a-node-that-is-cordoned",
        ),
        pytest.param(
            [node("n2"), slice_on("n2", device("g0", taints=(BROKEN,)))],
            "DevicesAllocated",
            id="beside-a-node-with-a-tainted-device",
        ),
        pytest.param(
            [slice_on("n1", device("g0"), device("g1", taints=(BROKEN,)))],
            "DevicesTainted",
            id="beside-a-tainted-device",
        ),
    ],
)
def test_a_request_for_all_devices_of_a_node_waits_for_those_that_claims_hold(other, code):
    both = slice_on("n1", device("g0"), device("g1"))
    found = answer(N1, both, *other, claim(request(count=0)), holding("a", "g0"))
    assert found[0] == code
    waits = "the claim can be allocated when enough of them are released"
    assert (waits in found[1]) is (code == "DevicesAllocated")


TWO = [device("g0"), device("g1")]
TAINTED = [device("g0"), device("g1", taints=(BROKEN,))]


@pytest.mark.parametrize(
    ("devices", "code", "text"),
    [
        pytest.param(
            {"n1": TWO[:1], "n2": TWO[:1]},
            "NoDevicePublished",
            "on one node, but no node publishes more than 1 that match; lower count or add devices "
            "to one node",
            id="no-node-has-enough",
        ),
        pytest.param(
            {"n1": TWO, "n2": TWO[:1]},
            "DevicesAllocated",
            "the claim can be allocated when enough of them are released",
            id="a-node-has-enough",
        ),
        pytest.param(
            {"n1": TAINTED, "n2": TWO[:1]},
            "DevicesTainted",
            "1 is tainted with example.com/broken",
            id="a-node-has-enough-without-taints",
        ),
        pytest.param(
            {"n1": TWO[:1], "cordoned": TWO},
            "DevicesOnOtherNodes",
            "2 are on nodes that the pod cannot use (they are cordoned)",
            id="a-node-that-the-pod-cannot-use-has-enough",
        ),
    ],
)
def test_the_devices_of_several_nodes_are_not_added_up(devices, code, text):
    nodes = [N1, node("n2"), node("cordoned", unschedulable=True)]
    slices = [slice_on(name, *each) for name, each in devices.items()]
    holders = [holding("a", "g0"), holding("b", "g0", pool="n2")]
    found = answer(*nodes, *slices, claim(request(count=2)), *holders)
    assert found[0] == code
    assert text in found[1]
    released = "the claim can be allocated when"
    assert (released in found[1]) is (code == "DevicesAllocated")


# ---- selectors, capacities, constraints


def test_a_capacity_like_no_other_is_to_be_corrected():
    memory = CapacityFacts(name="memory", value="1Gi")
    facts = [N1, slice_on("n1", device("g0", capacity=[memory]))]
    _, text, _ = answer(*facts, claim(request(capacity=(Amount("bandwidth", "1"),))))
    assert text.endswith(
        "has capacity bandwidth; correct capacity.requests (the devices have memory)"
    )


def test_a_qualified_key_is_corrected_without_the_drivers_name_twice():
    selector = 'device.attributes["d"]["d/model"] == "x"'
    facts = [N1, slice_on("n1", device("g0", attributes={"d/model": "x"}))]
    code, text, _ = answer(*facts, claim(request(selectors=(selector,))))
    assert code == "SelectorFailed"
    assert text.endswith(
        '; device g0 has model in device.attributes["d"], so write the key without the domain d'
    )


def test_a_constraint_on_an_attribute_like_no_other_is_to_be_corrected():
    devices = [device(f"g{n}", attributes={"d/numa": 0}) for n in range(2)]
    root = claim(request(count=2), constraints=[Constraint(attribute="d/root")])
    code, text, _ = answer(N1, slice_on("n1", *devices), root)
    assert code == "ConstraintNotMet"
    assert text.endswith(
        "has attribute d/root, which matchAttribute requires; correct the constraint"
    )


def test_a_holder_without_a_pod_is_named():
    held = replace(holding("a", "g0"), consumers=())
    _, text, _ = answer(N1, slice_on("n1", device("g0")), held, claim(request()))
    assert "is allocated to claim lab/a (no pod)" in text


# ---- taints of devices


def test_a_toleration_of_another_effect_is_compared_with_the_taint():
    taint = TaintFacts(key="lab/heat", effect="NoSchedule", value="high")
    toleration = Toleration(key="lab/heat", operator="Exists", effect="NoExecute")
    facts = [N1, slice_on("n1", device("g0", taints=(taint,)))]
    _, text, _ = answer(*facts, claim(request(tolerations=(toleration,))))
    assert "(its toleration of lab/heat has effect NoExecute, not NoSchedule)" in text


# ---- names


def test_the_pods_name_for_a_claim_is_not_the_name_of_the_claim():
    devices = [device(f"g{number}") for number in range(40)]
    _, text, _ = answer(N1, slice_on("n1", *devices), claim(request(count=33)))
    assert text.startswith('claim "mine" asks for 33 devices')
    template = TemplateFacts(namespace="lab", name="tpl", uid="t", requests=(request(count=33),))
    pod = replace(POD, claims=(PodClaim(name="c", template="tpl"),))
    _, text, _ = answer(N1, slice_on("n1", *devices), template, pod=pod)
    assert text.startswith('claim template "tpl" asks for 33 devices')


# ---- allocated claims

DEVICE = DeviceID("d", "n1", "g0")
PLACED = replace(POD, node="n1")
USED = ClaimFacts(
    namespace="lab",
    name="mine",
    uid="m",
    allocated=True,
    devices=(DEVICE,),
    results=(Result(request="r", device=DEVICE),),
    consumers=(OWN,),
    nodes=on_node("n1"),
)


def broken(*facts, pod=PLACED, settled=True):
    explainer = Explainer(world_of(ANY, N1, *facts))
    return explainer.explain(pod, settled=settled).reasons


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        pytest.param([], "ResourceClaimMissing", id="no-claim"),
        pytest.param([replace(USED, allocated=False)], "ClaimNotAllocated", id="not-allocated"),
        pytest.param([replace(USED, consumers=(OTHER,))], "ClaimNotReserved", id="not-reserved"),
        pytest.param([replace(USED, consumers=())], "ClaimNotReserved", id="no-consumer"),
    ],
)
def test_what_a_watch_that_lags_would_show_must_last(facts, code):
    assert broken(slice_on("n1", device("g0")), *facts, settled=False) == ()
    (reason,) = broken(slice_on("n1", device("g0")), *facts)
    assert (str(reason.code), reason.transient) == (code, code)


def test_the_value_of_a_taint_that_evicts_is_named():
    taint = TaintFacts(key="gpu.example.com/xid", effect="NoExecute", value="79")
    (reason,) = broken(slice_on("n1", device("g0", taints=(taint,))), USED)
    assert "has the taint gpu.example.com/xid=79 with effect NoExecute" in reason.sentence


@pytest.mark.parametrize(
    ("driver", "remedy"),
    [
        pytest.param(
            "hostdev.drakit.dev",
            "check that a HostDevicePolicy still offers it, and that it is connected",
            id="of-a-policy-that-may-offer-fewer-shares",
        ),
        pytest.param("d", "connect the device again", id="of-another-driver"),
    ],
)
def test_what_brings_a_device_back_depends_on_what_offers_it(driver, remedy):
    share = DeviceID(driver, "n1", "cam-3")
    used = replace(USED, devices=(share,), results=(Result(request="r", device=share),))
    gone = TaintFacts(key="drakit.dev/gone", effect="NoSchedule")
    for devices in ([device("cam-0")], [device("cam-0"), device("cam-3", taints=(gone,))]):
        published = replace(slice_on("n1", *devices), driver=driver)
        (reason,) = broken_claim(used, world_of(N1, published))
        assert str(reason.code) == "DeviceGone"
        assert f"; {remedy}, or delete the pod and the claim" in reason.sentence


@pytest.mark.parametrize(
    ("extended", "who"), [(False, "Kubernetes"), (True, "Kubernetes 1.37.2 or later")]
)
def test_only_late_releases_evict_pods_with_extended_resources(extended, who):
    taint = TaintFacts(key="lab/leak", effect="NoExecute")
    held = replace(USED, for_extended=extended)
    world = world_of(ANY, node("n1"), slice_on("n1", device("g0", taints=(taint,))), held)
    (found,) = broken_claim(held, world)
    assert f"so {who} evicts the pods that use it; " in found.text
