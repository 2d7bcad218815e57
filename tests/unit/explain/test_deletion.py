"""Claims and pods that are being deleted, and the objects that hold them."""

from dataclasses import replace

import pytest

from drakit_explain.deletion import claim_stays, pod_stays
from drakit_explain.devices import TaintFacts
from drakit_explain.model import (
    ClaimFacts,
    Consumer,
    DeviceID,
    PodClaim,
    PodFacts,
    Result,
    SliceFacts,
)
from drakit_explain.pending import Explainer, Verdict
from tests.fakes.world import device, node, on, world_of

PROTECTION = "resource.kubernetes.io/delete-protection"
CLAIM = ClaimFacts(
    namespace="lab",
    name="mine",
    uid="m",
    allocated=True,
    results=(Result(request="gpu", device=DeviceID("d", "pool", "g0")),),
    consumers=(Consumer("pods", "train", "p"),),
    deleting=True,
    finalizers=(PROTECTION,),
)
POD = PodFacts(
    namespace="lab",
    name="train",
    uid="p",
    claims=(PodClaim(name="c", claim="mine"),),
    node="n1",
    phase="Running",
)
START = "ResourceClaim lab/mine is being deleted, but "
CONTROLLER = "the ResourceClaim controller (kube-controller-manager)"
GONE = (
    "node n1 no longer exists, so no kubelet confirms that the pod has stopped; "
    "delete the pod with kubectl delete --force"
)


@pytest.mark.parametrize(
    ("claim", "facts", "code", "what"),
    [
        pytest.param(
            CLAIM,
            [replace(POD, deleting=True), node("n2")],
            "NodeGone",
            f"pod train still uses the claim and has not finished terminating: {GONE}",
            id="the-pod-is-on-a-node-that-is-gone",
        ),
        pytest.param(
            CLAIM,
            [replace(POD, uid="younger")],
            "ClaimInUse",
            f"it is reserved for pod train, which no longer exists; {CONTROLLER} removes "
            f"this entry of status.reservedFor, so check that this controller is running",
            id="the-pod-is-gone",
        ),
        pytest.param(
            replace(CLAIM, consumers=tuple(Consumer("podgroups", f"g{n}", "") for n in range(5))),
            [],
            "ClaimInUse",
            "it is reserved for podgroup g0, podgroup g1, podgroup g2 and 2 more; delete "
            "them, and Kubernetes deletes the claim",
            id="groups-use-it",
        ),
        pytest.param(
            replace(CLAIM, consumers=()),
            [],
            "ClaimInUse",
            f"it is still allocated, though no pod uses it; {CONTROLLER} corrects this, so check "
            f"that this controller is running",
            id="allocated-without-a-pod",
        ),
        pytest.param(
            replace(CLAIM, consumers=(), allocated=False),
            [],
            "ClaimInUse",
            f"it still has its finalizer, though no pod uses it; {CONTROLLER} corrects this, so "
            f"check that this controller is running",
            id="only-the-finalizer-is-left",
        ),
    ],
)
def test_what_holds_a_claim(claim, facts, code, what):
    (reason,) = claim_stays(claim, world_of(*facts), all_pods=True)
    assert (str(reason.code), reason.sentence) == (code, START + what)
    assert reason.regarding == claim.reference


def test_pods_that_may_not_be_listed_are_named_as_they_are():
    (reason,) = claim_stays(CLAIM, world_of())
    assert "it is reserved for pod train; delete them" in reason.sentence


def test_what_is_not_deleted_is_not_held():
    assert claim_stays(replace(CLAIM, deleting=False), world_of(POD)) == ()
    assert pod_stays(POD, world_of(), settled=True) == ()


def unpreparing(*keys):
    taints = tuple(TaintFacts(key=key, effect="NoSchedule") for key in keys)
    return SliceFacts(
        name="s",
        uid="s",
        driver="d",
        pool="pool",
        place=on("n1"),
        devices=(device("g0", taints=taints),),
    )


def test_within_its_grace_period_nothing_holds_a_pod():
    pod = replace(POD, deleting=True)
    explanation = Explainer(world_of(node("n1"), CLAIM, unpreparing())).explain(pod)
    assert (explanation.verdict, explanation.reasons) == (Verdict.NOT_PENDING, ())
