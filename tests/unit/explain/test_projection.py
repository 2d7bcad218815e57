"""Raw objects to facts."""

import pytest

from drakit_explain.model import Consumer, DeviceID, PodClaim, Result, Toleration
from drakit_explain.projection import project_claim, project_pod, project_slice
from drakit_formats.resource.nodes import node_selector


def test_a_pod_with_claims_of_each_sort():
    pod = project_pod(
        {
            "metadata": {"namespace": "lab", "name": "train", "uid": "u1"},
            "spec": {
                "resourceClaims": [
                    {"name": "own", "resourceClaimName": "shared"},
                    {"name": "made", "resourceClaimTemplateName": "gpu"},
                    {"name": "soon", "resourceClaimTemplateName": "gpu"},
                    {"name": "not", "resourceClaimTemplateName": "gpu"},
                ]
            },
            "status": {
                "phase": "Pending",
                "conditions": [{"type": "PodScheduled", "status": "False", "message": "no node"}],
                "resourceClaimStatuses": [
                    {"name": "made", "resourceClaimName": "train-made-x"},
                    {"name": "not"},
                ],
            },
        }
    )
    assert pod.claims == (
        PodClaim(name="own", claim="shared"),
        PodClaim(name="made", template="gpu", generated="train-made-x"),
        PodClaim(name="soon", template="gpu"),
        PodClaim(name="not", template="gpu", needless=True),
    )
    assert (pod.node, pod.gated, pod.deleting) == (None, False, False)
    assert pod.scheduling_message == "no node"
    assert pod.reference.body() == {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": "lab",
        "name": "train",
        "uid": "u1",
    }


def slice_of(*devices, **spec):
    return project_slice(
        {
            "metadata": {"name": "s", "uid": "u"},
            "spec": {"driver": "h.dev", "pool": {"name": "n1"}, "devices": list(devices)} | spec,
        }
    )


TAINT = {"key": "k", "value": "v", "effect": "NoSchedule", "timeAdded": "2026-08-01T10:00:00Z"}


@pytest.mark.parametrize("effect", ["None", "Later"])
def test_a_taint_that_keeps_no_pod_away_is_no_fact(effect):
    (device,) = slice_of({"name": "g0", "taints": [TAINT | {"effect": effect}]}).devices
    assert device.taints == ()


def test_since_when_a_taint_is_there_makes_no_difference():
    later = TAINT | {"timeAdded": "2026-08-02T10:00:00Z"}
    assert slice_of({"name": "g0", "taints": [TAINT]}) == slice_of(
        {"name": "g0", "taints": [later]}
    )


def test_devices_that_are_alike_have_their_facts_once():
    def body(name):
        return {"name": name, "taints": [TAINT], "capacity": {"size": {"value": "1"}}}

    one, other = slice_of(body("g0"), body("g1")).devices
    assert one.taints is other.taints
    assert one.kind is other.kind


def test_a_pod_reports_its_sandbox_its_disruption_and_the_claim_of_extended_resources():
    pod = project_pod(
        {
            "metadata": {"namespace": "lab", "name": "p", "uid": "u", "finalizers": ["x.io/y"]},
            "spec": {"nodeName": "n1"},
            "status": {
                "phase": "Pending",
                "conditions": [
                    {"type": "PodReadyToStartContainers", "status": "False"},
                    {"type": "DisruptionTarget", "status": "True", "reason": "Evicted"},
                ],
                "extendedResourceClaimStatus": {"resourceClaimName": "p-extended"},
            },
        }
    )
    assert (pod.sandbox, pod.disruption, pod.extended_claim) == (False, "Evicted", "p-extended")
    assert pod.finalizers == ("x.io/y",)


def test_an_allocation_keeps_requests_tolerations_and_the_binding_conditions_that_matter():
    result = {"request": "gpu/big", "driver": "d", "pool": "p", "device": "g0"}
    claim = project_claim(
        {
            "metadata": {
                "namespace": "lab",
                "name": "c",
                "uid": "u",
                "deletionTimestamp": "2026-01-01T00:00:00Z",
                "finalizers": ["a/b"],
            },
            "spec": {},
            "status": {
                "allocation": {
                    "devices": {
                        "results": [
                            result
                            | {
                                "bindingConditions": ["attached", "ready"],
                                "bindingFailureConditions": ["failed", "lost"],
                                "tolerations": [{"operator": "Exists", "tolerationSeconds": 5}],
                            },
                            result | {"device": "g1", "adminAccess": True},
                        ]
                    }
                },
                "devices": [
                    {
                        "driver": "d",
                        "pool": "p",
                        "device": "g0",
                        "conditions": [
                            {"type": "attached", "status": "True"},
                            {"type": "ready", "status": "False"},
                            {"type": "failed", "status": "True"},
                        ],
                    }
                ],
                "reservedFor": [{"resource": "podgroups", "name": "g", "uid": "1"}],
            },
        }
    )
    assert claim.results == (
        Result(
            request="gpu/big",
            device=DeviceID("d", "p", "g0"),
            tolerations=(Toleration(operator="Exists", seconds=5),),
            outstanding=("ready",),
            failed=("failed",),
        ),
        Result(request="gpu/big", device=DeviceID("d", "p", "g1")),
    )
    assert claim.consumers == (Consumer("podgroups", "g", "1"),)
    assert (claim.deleting, claim.finalizers, claim.reserved_for) == (True, ("a/b",), ())


@pytest.mark.parametrize(
    ("body", "unsupported"),
    [
        pytest.param({}, "", id="nothing"),
        pytest.param({"allocationMode": "ExactCount"}, "", id="a-known-mode"),
        pytest.param({"allocationMode": "All"}, "", id="the-other-known-mode"),
        pytest.param({"allocationMode": "Most"}, "allocation mode Most", id="another-mode"),
        pytest.param({"derivedAttributes": [{"name": "a"}]}, "derivedAttributes", id="a-field"),
    ],
)
def test_unsupported_parts_of_a_request_are_facts(body, unsupported):
    exactly = {"deviceClassName": "any", **body}
    for request in ({"exactly": exactly}, {"firstAvailable": [{"name": "s", **exactly}]}):
        claim = project_claim(
            {
                "metadata": {"name": "c", "namespace": "lab", "uid": "u"},
                "spec": {"devices": {"requests": [{"name": "r", **request}]}},
            }
        )
        (found,) = claim.requests
        for each in found.alternatives or (found,):
            assert each.unsupported == unsupported


def test_of_an_allocation_on_one_node_only_its_name_is_kept():
    def nodes_of(*terms):
        selector = {"nodeSelectorTerms": list(terms)}
        allocation = {"devices": {"results": []}, "nodeSelector": selector}
        metadata = {"name": "c", "namespace": "lab", "uid": "u"}
        found = project_claim({"metadata": metadata, "status": {"allocation": allocation}}).nodes
        return "terms" if found == node_selector(selector) else found

    def field(*values, operator="In"):
        return {"key": "metadata.name", "operator": operator, "values": list(values)}

    assert nodes_of({"matchFields": [field("n1")]}) == "n1"
    assert nodes_of({"matchFields": [field("n1")], "matchExpressions": []}) == "n1"
    expression = {"key": "zone", "operator": "Exists"}
    for terms in (
        [{"matchFields": [field("n1", "n2")]}],
        [{"matchFields": [field("n1", operator="NotIn")]}],
        [{"matchFields": [field("n1")]}, {"matchFields": [field("n2")]}],
        [{"matchFields": [field("n1")], "matchExpressions": [expression]}],
        [{"matchExpressions": [expression]}],
    ):
        assert nodes_of(*terms) == "terms"
    assert nodes_of() == "terms"


def test_compatibility_groups_of_a_device_are_noticed():
    consumed = {"counterSet": "card", "counters": {"memory": {"value": "1"}}}
    grouped = {**consumed, "compatibilityGroups": ["mig"]}
    (device,) = slice_of({"name": "g0", "consumesCounters": [consumed, grouped]}).devices
    assert [each.grouped for each in device.consumes] == [False, True]


def test_the_messages_about_unhealthy_devices_of_a_pod():
    def status(name, *resources):
        return {"name": name, "resources": list(resources)}

    bad = {"resourceID": "x", "health": "Unhealthy", "message": "it is too hot"}
    good = {"resourceID": "y", "health": "Healthy", "message": "fine"}
    containers = [
        {"allocatedResourcesStatus": [status("claim:c/r", good, bad), status("claim:d", good)]},
        {"allocatedResourcesStatus": [status("claim:c/r", bad)]},
    ]
    pod = {
        "metadata": {"name": "p", "uid": "u", "namespace": "lab"},
        "status": {"containerStatuses": containers},
    }
    assert project_pod(pod).health == (("claim:c/r", "it is too hot"),)
