"""Raw objects to facts."""

from dataclasses import replace

import pytest

from drakit_explain.devices import (
    Amount,
    CapacityFacts,
    CapacityPolicy,
    CounterSetFacts,
    DeviceFacts,
    DeviceKind,
    Place,
    TaintFacts,
    Version,
)
from drakit_explain.model import Consumer, DeviceID, PodClaim, Request, Result, Share, Toleration
from drakit_explain.projection import (
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


def test_a_slice_has_devices_with_attributes_of_all_types():
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
            kind=DeviceKind(attributes=("policy", "std.dev/minor", "ok", "v")),
            values=("kvm", 232, True, Version("1.2.3")),
        ),
        DeviceFacts(name="part", kind=DeviceKind(shareable=True)),
    )
    assert published.place == Place(node="n1")
    assert published.devices[0].attribute("h.dev/policy", "h.dev") == "kvm"
    assert published.devices[0].attribute("std.dev/minor", "h.dev") == 232
    assert published.devices[0].attribute("other.dev/policy", "h.dev") is None


def slice_of(*devices, **spec):
    return project_slice(
        {
            "metadata": {"name": "s", "uid": "u"},
            "spec": {"driver": "h.dev", "pool": {"name": "n1"}, "devices": list(devices)} | spec,
        }
    )


def tainted(*taints):
    (device,) = slice_of({"name": "g0", "taints": list(taints)}).devices
    return device.taints


TAINT = {"key": "k", "value": "v", "effect": "NoSchedule", "timeAdded": "2026-08-01T10:00:00Z"}


@pytest.mark.parametrize(
    ("taints", "facts"),
    [
        pytest.param([TAINT], (TaintFacts(key="k", value="v", effect="NoSchedule"),), id="known"),
        pytest.param(
            [{"key": "k", "effect": "NoExecute"}],
            (TaintFacts(key="k", effect="NoExecute"),),
            id="without-a-value",
        ),
        pytest.param([{"key": "k", "effect": "None"}], (), id="only-tells"),
        pytest.param([{"key": "k", "effect": "Later"}], (), id="effect-that-nobody-knows"),
    ],
)
def test_taints_that_keep_pods_away_are_facts(taints, facts):
    assert tainted(*taints) == facts


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


def test_a_device_with_capacity_that_is_shared():
    (device,) = slice_of(
        {
            "name": "n0",
            "allowMultipleAllocations": True,
            "capacity": {
                "bandwidth": {
                    "value": "10G",
                    "requestPolicy": {
                        "default": "1G",
                        "validRange": {"min": "1G", "max": "8G", "step": "1G"},
                    },
                },
                "x.dev/queues": {
                    "value": "8",
                    "requestPolicy": {"default": "1", "validValues": ["1", "2"]},
                },
                "plain": {"value": "3"},
            },
        }
    ).devices
    assert device.kind.shareable
    assert device.kind.capacity == (
        CapacityFacts(
            name="bandwidth",
            value="10G",
            policy=CapacityPolicy(default="1G", min="1G", max="8G", step="1G"),
        ),
        CapacityFacts(
            name="x.dev/queues",
            value="8",
            policy=CapacityPolicy(default="1", valid_values=("1", "2")),
        ),
        CapacityFacts(name="plain", value="3"),
    )


def test_partitions_and_the_counters_that_they_share():
    counters = {"memory": {"value": "80Gi"}, "slots": {"value": "7"}}
    published = slice_of(
        {"name": "p0", "consumesCounters": [{"counterSet": "card", "counters": counters}]},
        sharedCounters=[{"name": "card", "counters": counters}],
    )
    card = CounterSetFacts(name="card", counters=(Amount("memory", "80Gi"), Amount("slots", "7")))
    assert published.counter_sets == (card,)
    assert published.devices == (DeviceFacts(name="p0", consumes=(card,)),)


def test_tolerations_and_capacity_of_requests_and_alternatives():
    asks = {
        "deviceClassName": "c",
        "capacity": {"requests": {"bandwidth": "5G"}},
        "tolerations": [
            {"key": "k", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
            {"key": "k", "value": "v"},
        ],
    }
    claim = project_claim(
        {
            "metadata": {"namespace": "lab", "name": "c", "uid": "u"},
            "spec": {
                "devices": {
                    "requests": [
                        {"name": "one", "exactly": asks},
                        {"name": "any", "firstAvailable": [{"name": "a", **asks}]},
                    ]
                }
            },
        }
    )
    facts = Request(
        name="one",
        device_class="c",
        capacity=(Amount("bandwidth", "5G"),),
        tolerations=(
            Toleration(key="k", operator="Exists", effect="NoExecute", seconds=300),
            Toleration(key="k", operator="Equal", value="v"),
        ),
    )
    assert claim.requests == (
        facts,
        Request(name="any", device_class="", alternatives=(replace(facts, name="a"),)),
    )


def test_shares_are_no_devices_that_are_taken_from_others():
    device = {"request": "r", "driver": "h.dev", "pool": "n1", "device": "n0"}
    share = device | {"shareID": "1", "consumedCapacity": {"bandwidth": "5G", "x.dev/queues": "1"}}
    claim = project_claim(
        {
            "metadata": {"namespace": "lab", "name": "c", "uid": "u"},
            "spec": {},
            "status": {
                "allocation": {
                    "devices": {
                        "results": [
                            share,
                            device | {"device": "n1"},
                            share | {"device": "n2", "adminAccess": True},
                        ]
                    }
                }
            },
        }
    )
    assert claim.devices == (DeviceID("h.dev", "n1", "n1"),)
    assert claim.shares == (
        Share(
            device=DeviceID("h.dev", "n1", "n0"),
            consumed=(Amount("bandwidth", "5G"), Amount("x.dev/queues", "1")),
        ),
    )


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


def test_compatibility_groups_of_a_device_are_noticed():
    consumed = {"counterSet": "card", "counters": {"memory": {"value": "1"}}}
    grouped = {**consumed, "compatibilityGroups": ["mig"]}
    (device,) = slice_of({"name": "g0", "consumesCounters": [consumed, grouped]}).devices
    assert [each.grouped for each in device.consumes] == [False, True]
