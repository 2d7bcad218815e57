"""Problems of allocated claims: of pods that have a node, and of claims without a pod."""

from dataclasses import replace

import pytest

from drakit_explain.broken import broken_claim, node_of_claim
from drakit_explain.devices import TaintFacts
from drakit_explain.evidence import Event, Events
from drakit_explain.model import (
    ClaimFacts,
    Consumer,
    ContainerProblem,
    DeviceID,
    PodClaim,
    PodFacts,
    ReportFacts,
    Result,
    SliceFacts,
    Toleration,
)
from drakit_explain.pending import Explainer, Verdict
from drakit_explain.world import Name
from tests.fakes.world import device, explain, node, on, world_of

DEVICE = DeviceID("d", "pool", "g0")
RESULT = Result(request="gpu", device=DEVICE)
ON_N1 = "n1"
CLAIM = ClaimFacts(
    namespace="lab",
    name="mine",
    uid="m",
    allocated=True,
    devices=(DEVICE,),
    results=(RESULT,),
    consumers=(Consumer("pods", "train", "p"),),
    nodes=ON_N1,
)
POD = PodFacts(
    namespace="lab", name="train", uid="p", claims=(PodClaim(name="c", claim="mine"),), node="n1"
)
SLICE = SliceFacts(
    name="s", uid="s", driver="d", pool="pool", place=on("n1"), devices=(device("g0"),)
)
EVICTING = TaintFacts(key="lab/leak", effect="NoExecute")
THE_DEVICE = 'device g0 (driver d, pool pool), which is allocated to claim mine, request "gpu",'
EVICTED = (
    f"{THE_DEVICE} has the taint lab/leak with effect NoExecute, so Kubernetes evicts the pods "
    f"that use it{{}}; resolve the cause of the taint, or tolerate the taint's key and effect "
    f"NoExecute in the request"
)


def tainted(*taints):
    return replace(SLICE, devices=(device("g0", taints=taints),))


def result(**changes):
    """The claim, with another result of its allocation."""
    return replace(CLAIM, results=(replace(RESULT, **changes),))


def taint(key):
    return tainted(TaintFacts(key=key, effect="NoSchedule"))


def world(*changes):
    """The world of a pod that can start, with other facts in place of some."""
    facts = {type(fact): fact for fact in (node("n1"), SLICE, CLAIM)}
    facts |= {type(fact): fact for fact in changes}
    return world_of(*facts.values())


def explained(pod, facts, *, settled=True):
    return Explainer(facts).explain(pod, settled=settled)


def test_a_pod_that_can_start_has_no_reason():
    assert explained(replace(POD, sandbox=True), world()).reasons == ()


@pytest.mark.parametrize(
    ("changes", "code", "what"),
    [
        pytest.param(
            [replace(CLAIM, consumers=(Consumer("pods", "other", "o"),))],
            "ClaimNotReserved",
            "its claim mine is not reserved for this pod (status.reservedFor), so the kubelet "
            "does not prepare the claim; delete the pod and create it again",
            id="reserved-for-another-pod",
        ),
        pytest.param(
            [replace(CLAIM, consumers=(Consumer("pods", "train", "old"),))],
            "ClaimNotReserved",
            "its claim mine is reserved for an earlier pod of the same name; when that pod has "
            "stopped, its entry in status.reservedFor is removed",
            id="reserved-for-its-predecessor",
        ),
        pytest.param(
            [tainted(EVICTING)], "EvictionByDeviceTaint", EVICTED.format(""), id="taint-evicts"
        ),
        pytest.param(
            [result(failed=("lost",))],
            "BindingConditionsFailed",
            f"{THE_DEVICE} failed its binding condition lost; the scheduler deallocates "
            f"the claim and retries; check the controller of driver d that sets the condition",
            id="binding-failed",
        ),
        pytest.param(
            [result(outstanding=("attached",))],
            "BindingConditionsOutstanding",
            f"{THE_DEVICE} waits for its binding condition attached; check the controller of "
            f"driver d, which sets it in status.devices of the claim",
            id="binding-outstanding",
        ),
        pytest.param(
            [],
            "ClaimsNotPrepared",
            "its devices have no known problem, but the kubelet has not started it and reports no "
            "failure; it waits for d to prepare the claims, or for volumes or the network; read "
            "the log of d on node n1",
            id="not-prepared",
        ),
    ],
)
def test_why_a_pod_does_not_start_on_its_node(changes, code, what):
    explanation = explained(POD, world(*changes))
    assert explanation.verdict is Verdict.BROKEN
    (reason,) = explanation.reasons
    assert str(reason.code) == code
    assert reason.sentence == f"pod lab/train cannot start on node n1: {what}"
    assert reason.regarding == POD.reference


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([], id="it-starts-right-now"),
        pytest.param([taint("x")], id="taint-for-new-pods"),
        pytest.param(
            [
                tainted(EVICTING),
                result(tolerations=(Toleration(operator="Exists", effect="NoExecute"),)),
            ],
            id="taint-is-tolerated",
        ),
        pytest.param(
            [replace(SLICE, generation=2, pool_slices=2, devices=())], id="pool-is-being-updated"
        ),
        pytest.param([replace(SLICE, driver="", pool="")], id="a-slice-could-not-be-read"),
        pytest.param(
            [replace(CLAIM, consumers=(Consumer("podgroups", "g", "g"),))],
            id="claim-is-reserved-for-a-group",
        ),
    ],
)
def test_what_is_no_problem_yet_or_not_certain(changes):
    explanation = explained(POD, world(*changes), settled=False)
    assert (explanation.verdict, explanation.reasons) == (Verdict.STARTING, ())
    assert [claim.allocated for claim in explanation.claims] == [True]


def test_without_facts_of_nodes_none_is_missing():
    facts = world()
    facts.replace(type(node("n1")), [])
    assert explained(replace(POD, sandbox=True), facts).reasons == ()


def test_a_driver_that_hangs_is_named_before_an_old_failure_of_another_step():
    mount = Event(time="2026-01-01", reason="FailedMount", message="timed out", uid="p")
    report = ReportFacts(name="n1.d", uid="r", node="n1", driver="d", progress="1 slow call")
    for facts, found in ((world(report), "driver d: 1 slow call"), (world(), "timed out")):
        explanation = Explainer(facts).explain(POD, events=Events([mount]))
        (reason,) = explanation.reasons
        assert found in reason.sentence


def test_a_pod_whose_claim_was_deleted():
    facts = world()
    facts.remove(ClaimFacts, Name("lab", "mine"))
    (reason,) = explained(POD, facts).reasons
    assert str(reason.code) == "ResourceClaimMissing"


def test_a_pod_with_a_node_of_its_own_waits_for_the_claim_of_its_template():
    pod = replace(POD, claims=(PodClaim(name="c", template="tpl"),))
    assert explained(pod, world(), settled=False).reasons == ()
    (reason,) = explained(pod, world()).reasons
    assert str(reason.code) == "ClaimNotAllocated"
    assert 'no ResourceClaim has been created from template "tpl" for pod claim "c"' in (
        reason.sentence
    )


def test_the_claim_of_extended_resources_counts_too():
    pod = replace(POD, claims=(), extended_claim="mine")
    (reason,) = explained(pod, world(replace(SLICE, devices=()))).reasons
    assert str(reason.code) == "DeviceGone"


def test_a_pod_that_is_done_needs_nothing_any_more():
    done = replace(POD, phase="Succeeded")
    assert explained(done, world(replace(SLICE, devices=()))).reasons == ()


def test_nothing_is_said_about_failures_that_may_not_be_read():
    explainer = Explainer(world())
    (reason,) = explainer.explain(POD, settled=True, events=Events(hidden=True)).reasons
    assert reason.text == (
        "pod lab/train cannot start on node n1: the kubelet has not started it; its Events have "
        "the cause: ask an administrator, because you are not allowed to list them"
    )


def test_after_a_reboot_the_statuses_of_the_old_containers_say_nothing():
    pod = replace(POD, phase="Running", containers=(ContainerProblem("c", "Unknown", "code 255"),))
    (reason,) = explained(replace(pod, sandbox=False), world()).reasons
    assert str(reason.code) == "ClaimsNotPrepared"
    (reason,) = explained(replace(pod, sandbox=True), world()).reasons
    assert str(reason.code) == "PodNotStarted"


def test_a_failed_pod_that_a_device_taint_has_evicted():
    failed = replace(POD, phase="Failed", disruption="DeletionByDeviceTaintManager")
    (reason,) = explained(failed, world()).reasons
    assert reason.text == (
        "pod lab/train on node n1 has failed: DeletionByDeviceTaintManager; Kubernetes evicted it "
        "because of a taint with effect NoExecute of one of its devices; a controller creates an "
        "evicted pod again, and a pod without one must be created again"
    )


def test_a_pod_that_waits_for_the_end_of_a_deletion_is_told_who_uses_the_claim():
    used = replace(CLAIM, deleting=True, consumers=(Consumer("pods", "other", "o"),))
    (reason,) = explained(replace(POD, node=None, phase="Pending"), world(used)).reasons
    assert "is being deleted, and it is reserved for pod other; when the deletion" in reason.text


def test_a_pod_that_a_device_taint_evicts():
    evicted = replace(POD, phase="Running", disruption="DeletionByDeviceTaintManager")
    (reason,) = explained(evicted, world()).reasons
    assert str(reason.code) == "EvictionByDeviceTaint"


def test_a_claim_by_itself():
    facts = world(replace(SLICE, devices=()))
    (reason,) = broken_claim(CLAIM, facts)
    assert reason.regarding == CLAIM.reference
    assert reason.sentence.startswith(
        f"ResourceClaim lab/mine is allocated, but {THE_DEVICE} is no longer published"
    )
    assert broken_claim(replace(CLAIM, allocated=False), facts) == ()
    (reason,) = broken_claim(CLAIM, world(node("n2")))
    assert str(reason.code) == "NodeGone"


@pytest.mark.parametrize(
    ("nodes", "name"),
    [
        pytest.param("n2", "n2", id="by-name"),
        pytest.param(None, None, id="all-nodes"),
        pytest.param((), None, id="by-labels"),
    ],
)
def test_the_only_node_of_an_allocation(nodes, name):
    assert node_of_claim(replace(CLAIM, nodes=nodes)) == name


@pytest.mark.parametrize(
    ("change", "cordoned", "verdict"),
    [
        pytest.param({}, True, Verdict.BLOCKED, id="used-on-a-cordoned-node"),
        pytest.param({}, False, Verdict.FITS, id="used-on-a-node-for-the-pod"),
        pytest.param(
            {"consumers": ()}, True, Verdict.UNDECIDED, id="unused-so-it-may-be-allocated-again"
        ),
    ],
)
def test_a_pod_whose_claim_is_in_use_on_a_node(change, cordoned, verdict):
    facts = world(replace(CLAIM, **change))
    facts.apply(node("n1", unschedulable=cordoned))
    facts.apply(node("n2"))
    explanation = explain(replace(POD, node=None, name="second", uid="s"), facts)
    assert explanation.verdict is verdict
    assert [reason.sentence for reason in explanation.reasons] == [
        "pod lab/second waits: its claim mine is allocated on node n1 where the pod cannot "
        "run (it is cordoned), and other pods use the claim; allow the pod to run there, or use "
        "another claim"
    ] * (verdict is Verdict.BLOCKED)
