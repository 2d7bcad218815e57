"""Problems of a pod's claims, before devices are searched."""

import random
import time
from dataclasses import replace

import pytest

from drakit_explain.cel.library import Library
from drakit_explain.devices import Amount
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    ExtendedRequest,
    NamespaceFacts,
    PodClaim,
    PodFacts,
    QuotaFacts,
    Request,
    SliceFacts,
    TemplateFacts,
)
from drakit_explain.pending import Explainer, Verdict
from drakit_explain.pending_claims import missing_classes
from drakit_explain.projection import (
    project_claim,
    project_class,
    project_namespace,
    project_pod,
    project_quota,
)
from tests.fakes.world import ask_allocator, device, evaluate_for, explain, node, on, world_of

ANY = ClassFacts(name="any", uid="c")
REQUEST = Request(name="r", device_class="any", count=2)
TEMPLATE = TemplateFacts(namespace="lab", name="tpl", uid="t", requests=(REQUEST,))
POD = PodFacts(namespace="lab", name="train", uid="p", claims=(PodClaim(name="c", template="tpl"),))
WITH_CLAIM = replace(POD, claims=(PodClaim(name="c", template="tpl", generated="train-c-x"),))
CLAIM = ClaimFacts(
    namespace="lab",
    name="train-c-x",
    uid="m",
    requests=(REQUEST,),
    owner_pod="train",
    owner_uid="p",
)
SLICE = SliceFacts(
    name="s",
    uid="s",
    driver="d",
    pool="n1",
    place=on("n1"),
    devices=(device("g0"), device("g1")),
)
ADMIN = replace(TEMPLATE, requests=(replace(REQUEST, admin_access=True),))
PER_CLASS = "any.deviceclass.resource.k8s.io/devices"


def quota(name, hard, used):
    return QuotaFacts(
        namespace="lab",
        name="q",
        uid="q",
        hard=(Amount(name, hard),),
        used=(Amount(name, used),),
    )


def explained(pod, *facts, settled=True):
    world = world_of(ANY, SLICE, node("n1"), *facts)
    explainer = Explainer(world)
    evaluate_for(explainer, world, pod, Library())
    return explainer.explain_now(pod, ask_allocator, settled=settled)


@pytest.mark.parametrize(
    ("pod", "facts", "code", "what"),
    [
        pytest.param(
            POD,
            [ADMIN],
            "ResourceClaimNotCreated",
            'no ResourceClaim has been created from claim template "tpl" for pod claim "c"; the '
            "Event FailedResourceClaimCreation of the pod has the cause, such as an exceeded "
            "ResourceQuota, or a namespace without the label "
            'resource.kubernetes.io/admin-access: "true" for admin access; if there is no '
            "such Event, check that the kube-controller-manager is running",
            id="not-created-with-admin-access-where-namespaces-are-unknown",
        ),
        pytest.param(
            POD,
            [ADMIN, NamespaceFacts(name="lab", uid="n", admin_access=True)],
            "ResourceClaimNotCreated",
            'no ResourceClaim has been created from claim template "tpl" for pod claim "c"; the '
            "Event FailedResourceClaimCreation of the pod has the cause, such as an exceeded "
            "ResourceQuota; if there is no such Event, check that the kube-controller-manager is "
            "running",
            id="not-created-though-admin-access-is-allowed",
        ),
        pytest.param(
            POD,
            [TEMPLATE, quota(PER_CLASS, "4", "3")],
            "QuotaExceeded",
            'no ResourceClaim can be created from claim template "tpl" for pod claim "c", because '
            f'ResourceQuota "q" allows 4 of {PER_CLASS}, the namespace uses 3, and the claim needs '
            "2; delete claims that are not needed, or ask an admin for more",
            id="quota-of-devices",
        ),
    ],
)
def test_what_keeps_a_claim_from_its_pod(pod, facts, code, what):
    explanation = explained(pod, *facts)
    assert explanation.verdict is Verdict.BLOCKED
    (reason,) = explanation.reasons
    assert (str(reason.code), reason.text) == (code, f"pod lab/train waits: {what}")


@pytest.mark.parametrize(
    ("pod", "facts", "settled"),
    [
        pytest.param(POD, [TEMPLATE], False, id="pod-is-young"),
        pytest.param(
            POD, [TEMPLATE, CLAIM, quota(PER_CLASS, "4", "3")], False, id="quota-counts-its-claim"
        ),
        pytest.param(WITH_CLAIM, [CLAIM], True, id="claim-of-the-pod"),
        pytest.param(
            WITH_CLAIM, [replace(CLAIM, owner_uid="", owner_pod=None)], True, id="owner-is-no-pod"
        ),
        pytest.param(
            POD,
            [ADMIN, NamespaceFacts(name="lab", uid="n", admin_access=True)],
            False,
            id="namespace-allows-admin-access",
        ),
        pytest.param(POD, [ADMIN], False, id="namespace-is-unknown"),
    ],
)
def test_what_is_no_problem(pod, facts, settled):
    assert explained(pod, *facts, settled=settled).verdict is Verdict.FITS


@pytest.mark.parametrize(
    ("request_", "hard", "fits"),
    [
        pytest.param(REQUEST, "2", True, id="just-enough"),
        pytest.param(replace(REQUEST, count=0), "31", False, id="all-counts-32"),
        pytest.param(
            Request(
                name="r",
                device_class="",
                alternatives=(
                    Request(name="a", device_class="any", count=3),
                    Request(name="b", device_class="any", count=2),
                ),
            ),
            "3",
            True,
            id="the-largest-alternative-counts",
        ),
    ],
)
def test_what_a_claim_counts_in_a_quota(request_, hard, fits):
    template = replace(TEMPLATE, requests=(request_,))
    (reason,) = explained(POD, template, quota(PER_CLASS, hard, "0")).reasons
    assert (str(reason.code) == "ResourceClaimNotCreated") is fits


# ---- extended resources

GPUS = ClassFacts(name="gpus", uid="g", extended_resource="lab.io/gpu", created="2026-01-02")
EXTENDED = replace(POD, claims=(), extended=(ExtendedRequest("main", "lab.io/gpu", 3),))


@pytest.mark.parametrize(
    ("pod", "facts", "verdict"),
    [
        pytest.param(EXTENDED, [GPUS], Verdict.BLOCKED, id="too-few-devices"),
        pytest.param(
            replace(EXTENDED, extended=(ExtendedRequest("main", "lab.io/gpu", 2),)),
            [GPUS],
            Verdict.FITS,
            id="enough-devices",
        ),
        pytest.param(EXTENDED, [], Verdict.FITS, id="no-class-provides-it"),
        pytest.param(
            replace(
                EXTENDED,
                extended=(ExtendedRequest("main", "deviceclass.resource.kubernetes.io/any", 3),),
            ),
            [],
            Verdict.BLOCKED,
            id="by-the-name-of-the-class",
        ),
        pytest.param(
            replace(EXTENDED, extended=(ExtendedRequest("first", "lab.io/gpu", 3, init=True),)),
            [GPUS],
            Verdict.UNDECIDED,
            id="init-container",
        ),
        pytest.param(
            EXTENDED,
            [GPUS, node("n1", allocatable=(Amount("lab.io/gpu", "8"),))],
            Verdict.UNDECIDED,
            id="a-device-plugin-provides-it-too",
        ),
        pytest.param(
            replace(EXTENDED, extended_claim="train-extended"),
            [GPUS],
            Verdict.FITS,
            id="its-claim-exists",
        ),
    ],
)
def test_extended_resources(pod, facts, verdict):
    assert explained(pod, *facts).verdict is verdict


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        pytest.param([node("n1")], Verdict.FITS, id="nothing-has-its-name"),
        pytest.param(
            [GPUS, node("n1", allocatable=(Amount("lab.io/gpus", "0"),))],
            Verdict.FITS,
            id="a-device-plugin-had-it",
        ),
    ],
)
def test_a_misspelt_extended_resource(facts, verdict):
    pod = replace(EXTENDED, extended=(ExtendedRequest("main", "lab.io/gpus", 1),))
    explanation = explained(pod, *facts)
    assert explanation.verdict is verdict
    assert [each.text for each in explanation.reasons] == [
        'pod lab/train waits: no node and no DeviceClass provides extended resource "lab.io/gpus"; '
        'a DeviceClass provides "lab.io/gpu", so check the spelling in the limits of the pod'
    ] * (verdict is Verdict.BLOCKED)


@pytest.mark.parametrize(
    ("pod", "facts", "likely"),
    [
        (
            replace(POD, claims=(PodClaim(name="c", claim="train-c"),)),
            [CLAIM],
            'resourceClaimName ("train-c-x" exists)',
        ),
    ],
)
def test_the_likely_name_of_what_does_not_exist_is_named(pod, facts, likely):
    (reason,) = explained(pod, *facts).reasons
    assert reason.text.endswith(likely)


@pytest.mark.parametrize("name_all", [True, False])
def test_a_claim_of_another_namespace_is_only_named_to_readers_who_may_know_it(name_all):
    pod = replace(POD, claims=(PodClaim(name="c", claim="shared"),))
    world = world_of(replace(CLAIM, name="shared", namespace="other"))
    (reason,) = explain(pod, world, name_all_holders=name_all).reasons
    assert ('(namespace "other" has one, but' in reason.text) is name_all


def test_the_class_of_an_extended_resource_is_named():
    (reason,) = explained(EXTENDED, GPUS).reasons
    assert reason.text == (
        'pod lab/train waits: request "main" of extended resource "lab.io/gpu" asks for 3 devices '
        'of DeviceClass "gpus", but only 2 matching devices are published; lower count or add '
        "devices"
    )


@pytest.mark.parametrize(
    ("created", "named"),
    [
        pytest.param("2026-01-03", "zeta", id="the-youngest"),
        pytest.param("2026-01-02", "gpus", id="by-name-if-equally-old"),
    ],
)
def test_of_several_classes_one_provides_the_resource(created, named):
    (reason,) = explained(EXTENDED, GPUS, replace(GPUS, name="zeta", created=created)).reasons
    assert f'DeviceClass "{named}"' in reason.text


@pytest.mark.parametrize(
    ("resource", "others", "advice"),
    [
        pytest.param(
            "lab.io/gpu",
            [replace(GPUS, name="others", extended_resource="lab.io/other")],
            'for extended resource "lab.io/gpu" of pod "train"; create the class with this '
            "extendedResourceName, or ",
            id="by-the-name-in-the-class",
        ),
        pytest.param(
            "deviceclass.resource.kubernetes.io/gpus",
            [],
            'for extended resource "deviceclass.resource.kubernetes.io/gpus" of pod "train"; '
            "create the class, or ",
            id="by-the-name-of-the-class",
        ),
        pytest.param(
            None,
            [],
            'for an extended resource of pod "train"; create the class with this '
            "extendedResourceName, or ",
            id="its-pod-is-unknown",
        ),
    ],
)
def test_the_class_of_a_claim_for_extended_resources_is_missing(resource, others, advice):
    claim = project_claim(
        {
            "metadata": {
                **META,
                "annotations": {"resource.kubernetes.io/extended-resource-claim": "true"},
                "ownerReferences": [
                    {"kind": "Pod", "name": "train", "uid": "p", "controller": True}
                ],
            },
            "spec": {
                "devices": {
                    "requests": [
                        {"name": "container-0-request-0", "exactly": {"deviceClassName": "gpus"}}
                    ]
                }
            },
        }
    )
    requests = [ExtendedRequest("main", each, 1) for each in (resource, "lab.io/other") if each]
    pods = [replace(EXTENDED, extended=tuple(requests))] if resource else []
    world = world_of(claim, *pods, *others)
    (reason,) = missing_classes(claim, world)
    assert reason.text == (
        'DeviceClass "gpus" of ResourceClaim lab/x, request "container-0-request-0", does not '
        f"exist; the scheduler created the claim {advice}correct the resource name in the limits "
        f"of the pod"
    )
    alone = replace(POD, name="x", claims=(PodClaim(name="x", claim="x"),))
    (of_claim,) = explain(alone, world).reasons  # as `kubectl drakit explain claim/x` asks
    assert of_claim.advice == reason.advice


# ---- facts

META = {"namespace": "lab", "name": "x", "uid": "u"}


@pytest.mark.parametrize(
    ("labels", "allowed"),
    [
        pytest.param({"resource.kubernetes.io/admin-access": "true"}, True, id="true"),
        pytest.param({"resource.kubernetes.io/admin-access": "yes"}, False, id="another-value"),
        pytest.param({}, False, id="no-label"),
    ],
)
def test_namespaces_that_allow_admin_access(labels, allowed):
    assert project_namespace({"metadata": {**META, "labels": labels}}).admin_access is allowed


def test_quotas_with_scopes_limit_no_claims():
    body = {"metadata": META, "status": {"hard": {PER_CLASS: "4"}, "used": {PER_CLASS: "3"}}}
    assert project_quota(body) == replace(quota(PER_CLASS, "4", "3"), name="x", uid="u")
    assert project_quota({**body, "spec": {"scopes": ["BestEffort"]}}).hard == ()


def test_extended_resources_of_containers():
    def container(name, limits, **more):
        return {"name": name, "resources": {"limits": limits}, **more}

    pod = project_pod(
        {
            "metadata": META,
            "spec": {
                "initContainers": [
                    container("first", {"lab.io/gpu": "1"}),
                    container("beside", {"lab.io/gpu": "1"}, restartPolicy="Always"),
                ],
                "containers": [container("main", {"cpu": "1", "lab.io/gpu": 2, "lab.io/no": "0"})],
            },
        }
    )
    assert pod.extended == (
        ExtendedRequest("first", "lab.io/gpu", 1, init=True),
        ExtendedRequest("beside", "lab.io/gpu", 1),
        ExtendedRequest("main", "lab.io/gpu", 2),
    )


def test_a_class_knows_its_extended_resource_and_its_age():
    body = {"metadata": {**META, "creationTimestamp": "t"}, "spec": {"extendedResourceName": "e/r"}}
    found = project_class(body)
    assert (found.extended_resource, found.created) == ("e/r", "t")


def test_the_names_of_a_tenant_cost_little_to_compare():
    letters = [list("ab" * 49) for _ in range(2_001)]
    for number, each in enumerate(letters):
        random.Random(number).shuffle(each)
    wrong, *names = (f"{'x' * 100}{''.join(each)}" for each in letters)
    world = world_of(ANY, node("n1"), *(replace(CLAIM, name=each, uid=each) for each in names))
    pod = replace(POD, claims=(PodClaim(name="c", claim=wrong),))
    before = time.process_time()
    (reason,) = explain(pod, world).reasons
    assert time.process_time() - before < 1
    assert str(reason.code) == "ResourceClaimMissing"
