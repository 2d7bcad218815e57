"""Raw objects to facts."""

from drakit.explain import DeviceFacts, DeviceID, PodClaim, Request
from drakit.explain.projection import (
    project_claim,
    project_class,
    project_pod,
    project_slice,
    project_template,
)


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


def test_an_allocated_claim_names_what_it_takes_and_who_uses_it():
    claim = project_claim(
        {
            "metadata": {
                "namespace": "lab",
                "name": "train-gpu-x",
                "uid": "u2",
                "ownerReferences": [{"kind": "Pod", "name": "train", "controller": True}],
            },
            "spec": {
                "devices": {
                    "requests": [
                        {
                            "name": "gpu",
                            "exactly": {
                                "deviceClassName": "gpu.example",
                                "count": 2,
                                "selectors": [{"cel": {"expression": "true"}}],
                            },
                        },
                        {
                            "name": "watch",
                            "exactly": {"deviceClassName": "gpu.example", "adminAccess": True},
                        },
                        {
                            "name": "any",
                            "firstAvailable": [
                                {"name": "big", "deviceClassName": "big.example"},
                                {
                                    "name": "all",
                                    "deviceClassName": "small.example",
                                    "allocationMode": "All",
                                },
                            ],
                        },
                    ]
                }
            },
            "status": {
                "allocation": {
                    "devices": {
                        "results": [
                            {"request": "gpu", "driver": "d", "pool": "n1", "device": "g0"},
                            {
                                "request": "watch",
                                "driver": "d",
                                "pool": "n1",
                                "device": "g1",
                                "adminAccess": True,
                            },
                        ]
                    }
                },
                "reservedFor": [
                    {"resource": "pods", "name": "train", "uid": "p"},
                    {"apiGroup": "x", "resource": "jobs", "name": "j", "uid": "q"},
                ],
            },
        }
    )
    assert claim.requests == (
        Request(name="gpu", device_class="gpu.example", count=2, selectors=("true",)),
        Request(name="watch", device_class="gpu.example", admin_access=True),
        Request(
            name="any",
            device_class="",
            alternatives=(
                Request(name="big", device_class="big.example"),
                Request(name="all", device_class="small.example", count=0),
            ),
        ),
    )
    assert claim.allocated
    assert claim.devices == (DeviceID("d", "n1", "g0"),)
    assert claim.reserved_for == ("train",)
    assert claim.owner_pod == "train"


def test_a_claim_without_status_is_not_allocated():
    claim = project_claim({"metadata": {"namespace": "lab", "name": "c", "uid": "u"}, "spec": {}})
    assert (claim.allocated, claim.devices, claim.requests) == (False, (), ())


def test_a_template_reads_the_spec_within_its_spec():
    request = {"name": "gpu", "exactly": {"deviceClassName": "gpu.example"}}
    template = project_template(
        {
            "metadata": {"namespace": "lab", "name": "t", "uid": "u"},
            "spec": {"spec": {"devices": {"requests": [request]}}},
        }
    )
    assert template.requests == (Request(name="gpu", device_class="gpu.example"),)


def test_a_class_without_selectors_selects_by_nothing():
    assert project_class({"metadata": {"name": "c", "uid": "u"}, "spec": {}}).selectors == ()


def test_a_slice_gives_its_devices_attributes_their_full_names():
    published = project_slice(
        {
            "metadata": {"name": "s", "uid": "u"},
            "spec": {
                "driver": "h.dev",
                "nodeName": "n1",
                "pool": {"name": "n1", "generation": 3, "resourceSliceCount": 2},
                "devices": [
                    {
                        "name": "kvm-0",
                        "attributes": {
                            "policy": {"string": "kvm"},
                            "std.dev/minor": {"int": 232},
                            "ok": {"bool": True},
                            "v": {"version": "1.2.3"},
                        },
                    },
                    {"name": "part", "allowMultipleAllocations": True},
                ],
            },
        }
    )
    assert (published.driver, published.pool, published.generation) == ("h.dev", "n1", 3)
    assert published.pool_slices == 2
    assert published.devices == (
        DeviceFacts(
            name="kvm-0",
            attributes={
                "h.dev/policy": "kvm",
                "std.dev/minor": 232,
                "h.dev/ok": True,
                "h.dev/v": None,
            },
        ),
        DeviceFacts(name="part", attributes={}, shareable=True),
    )
