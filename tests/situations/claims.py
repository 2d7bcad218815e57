"""Situations: claims that are not created, not bound, or allocated for another node."""

from __future__ import annotations

from collections.abc import Iterator

from drakit_explain.codes import Code
from tests.situations.scene import HOSTNAME, Scene, device, devices
from tests.situations.table import situation

# ------------------------------------------------------------ claims that are not created


@situation(
    Code.ADMIN_ACCESS_DENIED,
    words=(
        'claim template "admin" for pod claim "claim-0" asks for admin access, which namespace',
        'does not allow; ask an admin to set the label resource.kubernetes.io/admin-access: "true"',
    ),
    unseen=True,
)
def namespace_does_not_allow_admin_access(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.template("admin", s.request(adminAccess=True))
    s.allow_admin_access(allowed=False)
    s.pod(templates=["admin"])
    yield
    s.allow_admin_access(allowed=True)


@situation(
    Code.QUOTA_EXCEEDED,
    words=(
        'no ResourceClaim can be created from claim template "waits" for pod claim "claim-0",',
        'ResourceQuota "quota" allows 0 of count/resourceclaims.resource.k8s.io, the namespace',
        "the claim needs 1; delete claims that are not needed, or ask an admin for more",
    ),
    unseen=True,
    settled=True,
)
def quota_allows_no_claim(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.quota(**{"count_resourceclaims.resource.k8s.io": "0"})
    s.pod(s.request())
    yield
    s.delete("resourcequotas", "quota")


# ------------------------------------------------------------ allocated claims


@situation(Code.BINDING_OUTSTANDING, words=("device a", "example.com/attached"), unseen=True)
def binding_condition_outstanding(s: Scene) -> Iterator[None]:
    binding = {
        "bindingConditions": ["example.com/attached"],
        "bindingFailureConditions": ["example.com/failed"],
    }
    s.publish(device("a", **binding))
    s.pod(s.request())
    claim = s.allocated_claim()
    yield
    (result,) = claim["status"]["allocation"]["devices"]["results"]
    condition = {
        "type": "example.com/attached",
        "status": "True",
        "reason": "Attached",
        "message": "",
        "lastTransitionTime": claim["metadata"]["creationTimestamp"],
    }
    attached = {key: result[key] for key in ("driver", "pool", "device")}
    claim["status"]["devices"] = [{**attached, "conditions": [condition]}]
    s.api.write_status("resourceclaims", claim)


@situation(
    Code.DEVICES_ON_OTHER_NODES,
    words=(
        "claim disk is allocated on node",
        "where the pod cannot run (",
        "and other pods use the claim; allow the pod to run there, or use",
    ),
)
def only_claim_is_used_on_another_node(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.claim("disk", s.request())
    s.holder(claims=["disk"])
    s.pod(claims=["disk"], nodeSelector={HOSTNAME: s.other})
    yield
    s.pod(claims=["disk"], nodeSelector={HOSTNAME: s.node})


@situation(
    Code.DEVICES_ON_OTHER_NODES,
    words=(
        "claim disk is allocated on node",
        "run (it has too little cpu left), and other pods use the claim; free resources on",
    ),
)
def node_of_a_shared_claim_is_full(s: Scene) -> Iterator[None]:
    s.publish(device("a"), nodeName=s.make_node("a"))
    s.claim("disk", s.request())
    s.holder(claims=["disk"], cpu="3")
    s.pod(claims=["disk"], cpu="2")
    yield
    s.pod(claims=["disk"], cpu="1")


# ------------------------------------------------------------ holders


@situation(
    Code.DEVICES_ALLOCATED,
    words=(
        "claim explain-",
        "/disk (podgroup gang",
    ),
    unreal="PodGroups need a feature gate",
)
def holder_is_a_pod_group(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.claim("disk", s.request())
    s.holder(claims=["disk"])
    group = {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "gang", "uid": "g"}
    s.write_claim("disk", **{**s.status_of("disk"), "reservedFor": [group]})
    s.delete("pods", "holder")
    s.pod(s.request())
    yield
    s.write_claim("disk")


@situation(
    Code.DEVICES_ALLOCATED,
    words=("pod holder; its deletion waits for finalizer example.com/hold",),
)
def finalizer_keeps_the_claim_of_a_holder(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.claim("disk", s.request())
    s.holder(claims=["disk"])
    finalizers = s.api.get("resourceclaims", "disk", namespace=s.namespace)["metadata"]
    s.hold("resourceclaims", "disk", *finalizers["finalizers"], "example.com/hold")
    s.start_deletion("resourceclaims", "disk")
    s.pod(s.request())
    yield
    s.delete("pods", "holder")
    s.hold("resourceclaims", "disk")


# ------------------------------------------------------------ extended resources


@situation(Code.DEVICES_ALLOCATED, words=('extended resource "lab.test/gpu"', "pod holder"))
def extended_resource_allocated(s: Scene) -> Iterator[None]:
    s.device_class(extendedResourceName="lab.test/gpu")
    s.publish(devices("a"))
    s.holder(s.request())
    s.pod(extended="lab.test/gpu")
    yield
    s.delete("pods", "holder")


@situation(
    Code.DEVICE_CLASS_MISSING,
    words=(
        'no node and no DeviceClass provides extended resource "lab.test/cards"',
        "check the sp",
    ),
    unreal="the code depends on the names of all classes of the cluster",
)
def extended_resource_is_misspelled(s: Scene) -> Iterator[None]:
    s.device_class(extendedResourceName="lab.test/card")
    s.publish(devices("a"))
    s.pod(extended="lab.test/cards")
    yield
    s.pod(extended="lab.test/card")
