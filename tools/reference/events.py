"""
The page of Events: a text for each reason of the closed sets in the code.

A reason without a text, and a text without a reason, is an error.

It must not know how Events are written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from drakit_explain.codes import Code
from drakit_nodeplugin.reasons import ClaimReason, NodeReason
from tools.reference import markdown


@dataclass(frozen=True, kw_only=True)
class Text:
    """The text of the page about a reason."""

    when: str
    action: str
    regarding: str = ""


POD, CLAIM, TEMPLATE = "Pod", "ResourceClaim", "ResourceClaimTemplate"
CLASS, NODE_KIND, SLICE = "DeviceClass", "Node", "ResourceSlice"

COMMAND = "Only in `kubectl drakit explain`"

PENDING: Mapping[str, Text] = {
    "DeviceClassMissing": Text(
        regarding=f"{POD}, {CLAIM}, {TEMPLATE}",
        when="A request refers to a DeviceClass that does not exist.",
        action="Create the DeviceClass, or correct its name in the claim or template. "
        "For an extended resource, correct the resource name in the pod.",
    ),
    "ResourceClaimMissing": Text(
        regarding=POD,
        when="The pod refers to a ResourceClaim that does not exist.",
        action="Create the claim in the pod's namespace, or correct its name in the pod.",
    ),
    "ResourceClaimTemplateMissing": Text(
        regarding=POD,
        when="The pod refers to a ResourceClaimTemplate that does not exist.",
        action="Create the template in the pod's namespace, or correct its name in the pod.",
    ),
    "NoDevicePublished": Text(
        regarding=f"{POD}, {CLAIM}, {TEMPLATE}, {CLASS}",
        when="No node publishes enough devices that match the selectors of the class and the request.",
        action="Compare the selectors with the attributes of the published devices. Check that the driver is running. For the class of a host device policy, find the policy with `kubectl get hdp`, and check its [Ready condition](host-device-policy.md#the-ready-condition) with `kubectl describe hdp NAME`.",
    ),
    "DevicesAllocated": Text(
        regarding=f"{POD}, {CLAIM}",
        when="Other claims hold the matching devices, or the counters or capacity that these devices need.",
        action="Wait, or delete a pod that uses a claim that the message names.",
    ),
    "DevicesOnOtherNodes": Text(
        regarding=f"{POD}, {CLAIM}",
        when="All matching devices are on nodes that the pod cannot use, or an allocated claim of the pod is in use on such a node.",
        action="Change the pod's node selector, affinity or tolerations, or publish devices on nodes that it can use.",
    ),
    "SelectorFailed": Text(
        regarding=f"{POD}, {CLAIM}, {TEMPLATE}, {CLASS}",
        when="A CEL selector fails for a device, so the scheduler aborts its search on that device's node.",
        action="Check the spelling of the attribute. If only some devices have it, test that it exists before you compare it.",
    ),
    "ConstraintNotMet": Text(
        regarding=f"{POD}, {CLAIM}, {TEMPLATE}",
        when="A node has enough free devices, but no combination satisfies the constraints of the claim.",
        action="Relax the constraint, or add devices.",
    ),
    "PoolInvalid": Text(
        regarding=f"{POD}, {CLAIM}, {NODE_KIND}",
        when="A pool is invalid: for example, two of its devices have the same name. "
        "The scheduler allocates nothing from the pool.",
        action="Fix the driver that publishes the pool.",
    ),
    "RequestsCompete": Text(
        regarding=f"{POD}, {CLAIM}, {TEMPLATE}",
        when="The scheduler could allocate each request separately, but no node has enough devices for all requests. "
        "Or a claim requests more than 32 devices, the maximum per allocation.",
        action="Reduce the number of requested devices, or add devices to one node.",
    ),
    "DevicesTainted": Text(
        regarding=f"{POD}, {CLAIM}",
        when="Too many matching devices have taints that the request does not tolerate.",
        action="Resolve the cause of each taint, or tolerate the taint in the request.",
    ),
    "ResourceClaimNotCreated": Text(
        regarding=POD,
        when="Kubernetes has not created the claim from its ResourceClaimTemplate within 30 s after the pod was created.",
        action="Read the Event `FailedResourceClaimCreation` of the pod. Check that the kube-controller-manager is running.",
    ),
    "QuotaExceeded": Text(
        regarding=POD,
        when=f"A ResourceQuota prevents the creation of a claim from a ResourceClaimTemplate. {COMMAND}.",
        action="Delete claims that are not needed, or raise the quota.",
    ),
    "AdminAccessDenied": Text(
        regarding=POD,
        when="A ResourceClaimTemplate requests admin access, but its namespace does not have the required label. "
        f"{COMMAND}.",
        action='Set the label `resource.kubernetes.io/admin-access: "true"` on the namespace.',
    ),
    "ClaimOfOtherPod": Text(
        regarding=POD,
        when="A claim with the name of the pod's generated claim exists, but was created for another pod.",
        action="Delete the claim, and create the pod again.",
    ),
    "ClaimBeingDeleted": Text(
        regarding=POD,
        when="A claim of the pod is being deleted.",
        action="Wait until Kubernetes has deleted the claim, then create the claim or the pod again.",
    ),
    "ClaimNotAllocated": Text(
        regarding=POD,
        when="The pod is bound to a node, but its claim is not allocated. Setting `nodeName` bypasses the scheduler, which allocates claims.",
        action="Replace `nodeName` with a node selector, and create the pod again.",
    ),
    "ClaimNotReserved": Text(
        regarding=POD,
        when="The claim is allocated, but not reserved for the pod. A claim can be reserved for at most 256 pods.",
        action="Delete another pod that uses the claim, or create this pod again, as the message states.",
    ),
    "BindingConditionsOutstanding": Text(
        regarding=f"{POD}, {CLAIM}",
        when="A binding condition of an allocated device is not yet true.",
        action="Check the driver's controller, which sets the condition in the status of the claim.",
    ),
    "BindingConditionsFailed": Text(
        regarding=f"{POD}, {CLAIM}",
        when="A binding failure condition of an allocated device is true. The scheduler allocates the claim again.",
        action="Check the driver's controller, which sets the condition in the status of the claim.",
    ),
    "NodeGone": Text(
        regarding=f"{POD}, {CLAIM}, {SLICE}",
        when="The node of the pod, the devices or the ResourceSlice does not exist.",
        action="Wait until Kubernetes deletes the pod, or delete it with `--force`. "
        "Delete a ResourceSlice whose node does not return.",
    ),
    "NodeNotReady": Text(
        regarding=POD,
        when="The node of the pod is not ready.",
        action="Check the node's kubelet.",
    ),
    "DriverUnavailable": Text(
        regarding=f"{POD}, {CLAIM}",
        when="The driver of an allocated device has stopped, or publishes no devices on the pod's node.",
        action="Check that the driver is running on the node and is registered with the kubelet.",
    ),
    "PoolGone": Text(
        regarding=f"{POD}, {CLAIM}",
        when="The pool of an allocated device is no longer published, but the driver publishes other pools.",
        action="Check the driver. To get a different device, delete the pod and the claim.",
    ),
    "DeviceGone": Text(
        regarding=f"{POD}, {CLAIM}",
        when="An allocated device is no longer in its pool.",
        action="Connect the device again, or delete the pod and the claim.",
    ),
    "DeviceUnhealthy": Text(
        regarding=f"{POD}, {CLAIM}",
        when="An allocated device has the taint `drakit.dev/unhealthy`.",
        action="Check the device, or delete the pod and the claim.",
    ),
    "EvictionByDeviceTaint": Text(
        regarding=f"{POD}, {CLAIM}",
        when="An allocated device has a taint with the effect NoExecute that the request does not tolerate, so Kubernetes evicts the pod.",
        action="Resolve the cause of the taint.",
    ),
    "ClaimsNotPrepared": Text(
        regarding=POD,
        when="The kubelet has not prepared the claims, although their devices have no known problem. "
        f"{COMMAND}.",
        action="Read the Events of the pod (`kubectl describe pod`) and the log of the driver on the node.",
    ),
}

POOLS: Mapping[str, Text] = {
    "PoolIncomplete": Text(
        regarding=NODE_KIND,
        when="The number of ResourceSlices in the latest generation of a pool differs from `resourceSliceCount`. "
        "The scheduler allocates nothing from the pool.",
        action="Read the log of the driver on the node.",
    ),
    "PoolNameConflict": Text(
        regarding=NODE_KIND,
        when="Several nodes publish pools with the same driver and name. The scheduler treats devices with the same name in these pools as one device.",
        action="Make the pool names unique. For example, include the node name.",
    ),
    "ResourceSlicesOutdated": Text(
        regarding=NODE_KIND,
        when="ResourceSlices of an older generation of a pool remain. The scheduler ignores their devices.",
        action="Read the log of the driver on the node. The driver must delete the old ResourceSlices.",
    ),
}

CLAIMS: Mapping[str, Text] = {
    "PrepareFailed": Text(
        when="The node plugin cannot prepare the claim for a pod on its node. The Event reports a transient cause only after 3 minutes.",
        action="Apply the remedy in the message. The kubelet retries automatically.",
    ),
    "DeviceRenumbered": Text(
        when="The kernel gave a device of a prepared claim a different number, for example after a reset of a USB hub. "
        "The node plugin has rewritten the claim's CDI file.",
        action="Restart the containers, or delete the pods that use the claim: their containers can still open whichever device now has the old number.",
    ),
    "UnprepareFailed": Text(
        when="The node plugin cannot unprepare the claim. Its devices stay reserved on the node.",
        action="Apply the remedy in the message. If the driver will not run again, release the devices with "
        "[`drakit node claim forget`](cli.md#drakit-node-claim-forget).",
    ),
    "Prepared": Text(
        when="The node plugin prepared a claim after a `PrepareFailed` Event. The type of this Event is Normal.",
        action="None.",
    ),
}

NODE: Mapping[str, Text] = {
    "AnnotationsUnsupported": Text(
        when="A device plugin returns annotations that do not specify CDI devices. The containers do not get these annotations.",
        action="If a container needs them, ask the vendor for a version that uses CDI.",
    ),
    "BackendDirectory": Text(
        when="The directory of a backend cannot be read or created, or has too many sockets.",
        action="Fix the directory as the message describes. The value `backends.directory` sets its parent directory.",
    ),
    "BackendRefused": Text(
        when="The driver name of a backend is malformed, already in use, or different from the name in the directory's entry. Or the socket has the wrong owner.",
        action="Fix the backend, or the value `backends.allowed`. The node plugin retries.",
    ),
    "BackendUnreachable": Text(
        when="The socket of a backend does not respond after several attempts.",
        action="Read the log of the backend. If no process listens on the socket, delete the socket file.",
    ),
    "CheckpointDamaged": Text(
        when="The checkpoint of a driver is damaged. The node plugin keeps the damaged file and rebuilds the checkpoint.",
        action="Read [Recover from failures](../admin/disaster-recovery.md), and check the node's disk.",
    ),
    "DeviceLeftOut": Text(
        when="The node plugin does not publish a device, because the API server would reject it or its device plugin ID is invalid.",
        action="Fix the driver as the message describes.",
    ),
    "DevicePluginStopped": Text(
        when="A device plugin sends malformed messages, or exceeds a limit. The node plugin disconnects it.",
        action="Read the log of the device plugin, and report the message to the vendor.",
    ),
    "EndpointStopped": Text(
        when="A driver, backend or device plugin fails, or its connection ends. The node plugin taints its devices immediately. "
        "If the driver has not listed its devices since the node plugin started, the taint and this Event come only after `devices.startGracePeriod`.",
        action="Read the log of the driver. The node plugin restarts a Python driver, and reconnects to any other.",
    ),
    "FieldsDropped": Text(
        when="The API server drops fields of the published devices, because a feature gate is disabled. The message states what is published instead.",
        action="Enable the feature gate that the message names, or accept the result.",
    ),
    "KubeletResourcesUnknown": Text(
        when="The node plugin cannot determine whether the kubelet also serves a device plugin's resource.",
        action="Check that the kubelet's podresources socket exists and responds.",
    ),
    "RegistrationRefused": Text(
        when="A device plugin cannot register, because its resource name, version or socket is invalid, or the directory's entry does not list the resource.",
        action="Fix the device plugin, or the value `devicePlugins.plugins`.",
    ),
    "ResourceServedByKubelet": Text(
        when="The kubelet's own device manager serves the resource of a device plugin, so a device could be allocated twice.",
        action="Complete the [migration](../admin/device-plugins.md), so that no device plugin registers this resource with the kubelet.",
    ),
    "SliceNameTaken": Text(
        when="A ResourceSlice of another driver or node has the name of a slice that the node plugin creates. "
        "The plugin publishes its devices under a different name.",
        action="Identify the client that created that slice, and delete the slice. "
        "See [Names of slices](../admin/security.md#names-of-slices).",
    ),
}

DELETION: Mapping[str, Text] = {
    "ClaimInUse": Text(
        regarding=CLAIM,
        when="A ResourceClaim is being deleted, but is still reserved for pods or allocated.",
        action="Delete the pods that use the claim. If there are none, check the kube-controller-manager.",
    ),
    "FinalizerHolds": Text(
        regarding=f"{POD}, {CLAIM}",
        when="The object is being deleted, but another controller has not removed its finalizer.",
        action="Check the controller that is responsible for the finalizer.",
    ),
    "ClaimsNotUnprepared": Text(
        regarding=POD,
        when="The pod is being deleted, but the kubelet is still stopping its containers, or cannot unprepare its claims.",
        action="Read the Events of the pod and its claims, and the log of the driver on the node.",
    ),
}

SETS: tuple[tuple[str, Collection[str], Mapping[str, Text]], ...] = (
    ("the operator", [str(each) for each in Code], {**PENDING, **POOLS, **DELETION}),
    ("claims", get_args(ClaimReason), CLAIMS),
    ("the Node", get_args(NodeReason), NODE),
)


def page() -> str:
    """Return the page."""
    for where, reasons, texts in SETS:
        if different := set(reasons) ^ set(texts):
            raise SystemExit(f"Events of {where}: a reason or its text is missing: {different}")
    return markdown.document(
        "Events",
        description="Every Event that drakit writes: reason, object, cause and what to do.",
        source="the closed sets of reasons in the code",
        body=[
            "This page lists every Event that drakit writes, and the reasons that only `kubectl drakit explain` reports. Their\n"
            "type is Warning unless the table states otherwise. The message names the objects, the cause and the remedy. To search\n"
            "by symptom, read [My pod does not start](../use/troubleshooting.md).",
            "```bash\nkubectl events --for pod/NAME -n NAMESPACE\nkubectl events --for resourceclaim/NAME -n NAMESPACE\n"
            "kubectl events --for node/NAME -n default\n```",
            "Events about Nodes, DeviceClasses and ResourceSlices are in the namespace `default`.",
            *_section(
                "Events about pods, claims and templates",
                "The operator writes these Events, with `drakit.dev/operator` as reporting controller.",
                PENDING,
            ),
            *_section(
                "Events about pools",
                "If a problem with a pool lasts for [`events.patience`](configuration.md#events), the operator writes one of these\n"
                "Events, or `PoolInvalid`, about the Node that publishes the pool.",
                POOLS,
            ),
            "Only `kubectl drakit explain` reports why an object that is being deleted still exists:",
            _table(DELETION),
            *_section(
                "Events about preparing claims",
                "The node plugin writes these Events, with `drakit.dev/nodeplugin` as reporting controller. If a prepare call\n"
                "fails, the kubelet also writes the Event `FailedPrepareDynamicResources` about the pod.",
                CLAIMS,
            ),
            *_section(
                "Events about the Node",
                "The node plugin writes these Events, with `drakit.dev/nodeplugin` as reporting controller.",
                NODE,
            ),
        ],
    )


def _section(title: str, intro: str, texts: Mapping[str, Text]) -> Iterator[str]:
    yield f"## {title}"
    yield intro
    yield _table(texts)


def _table(texts: Mapping[str, Text]) -> str:
    return markdown.table(
        ("Reason", "Object", "When", "What to do"),
        [
            (markdown.code(reason), text.regarding, text.when, text.action)
            for reason, text in texts.items()
        ],
    )
