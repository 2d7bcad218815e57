"""
The page of Events: a text for each reason of the closed sets in the code.

A reason without a text, and a text without a reason, is an error.

It must not know how Events are written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from drakit.explain import Code
from drakit_nodeplugin.reasons import ClaimReason, NodeReason
from tools.reference import markdown


@dataclass(frozen=True, kw_only=True)
class Text:
    """What the page says about a reason."""

    when: str
    action: str
    regarding: str = ""


POD, CLAIM, TEMPLATE = "Pod", "ResourceClaim", "ResourceClaimTemplate"

PENDING: Mapping[str, Text] = {
    "DeviceClassMissing": Text(
        regarding=f"{POD}, {CLAIM}, {TEMPLATE}",
        when="A request names a DeviceClass that does not exist.",
        action="Create the DeviceClass, or correct its name in the claim or template.",
    ),
    "ResourceClaimMissing": Text(
        regarding=POD,
        when="The pod names a ResourceClaim that does not exist.",
        action="Create the claim in the pod's namespace, or correct its name in the pod.",
    ),
    "ResourceClaimTemplateMissing": Text(
        regarding=POD,
        when="The pod names a ResourceClaimTemplate that does not exist.",
        action="Create the template in the pod's namespace, or correct its name in the pod.",
    ),
    "NoDevicePublished": Text(
        regarding=POD,
        when="No node publishes a device that matches the selectors of the class and of the request.",
        action="Compare the selectors with the attributes of the published devices. Check that the driver runs.",
    ),
    "DevicesAllocated": Text(
        regarding=POD,
        when="Other claims hold the devices that match, or the shared counters or capacity that those devices need.",
        action="Wait, or delete a pod that uses one of the claims that the Event names.",
    ),
    "DevicesTainted": Text(
        regarding=POD,
        when="Too many of the devices that match have taints that the request does not tolerate.",
        action="Resolve the cause that the Event names for each taint, or tolerate the taint in the request.",
    ),
}

CLAIMS: Mapping[str, Text] = {
    "PrepareFailed": Text(
        when="The node plugin cannot prepare the claim for a pod of its node. It reports a transient cause after 3 minutes.",
        action="Follow the remedy in the message. The kubelet retries without further action.",
    ),
    "UnprepareFailed": Text(
        when="The node plugin cannot unprepare the claim. Its devices stay reserved on the node.",
        action="Follow the remedy in the message. If the driver never returns, release the devices with "
        "[`drakit node claim forget`](cli.md#drakit-node-claim-forget).",
    ),
    "Prepared": Text(
        when="The claim is prepared, after a `PrepareFailed` Event. The type of this Event is Normal.",
        action="None.",
    ),
}

NODE: Mapping[str, Text] = {
    "AnnotationsUnsupported": Text(
        when="A device plugin answers Allocate with annotations that name no CDI device. The containers do not get them.",
        action="None, if the container works without the annotations. Otherwise, ask the vendor for a version that uses CDI.",
    ),
    "BackendDirectory": Text(
        when="The registration directory of backends is missing, cannot be read, or has too many entries.",
        action="Correct the directory as the message describes. The value `backends.directory` names it.",
    ),
    "BackendRefused": Text(
        when="A backend registers a name that is malformed, already in use or not allowed, or its socket has the wrong owner.",
        action="Correct the backend, or the value `backends.allowed`. The node plugin retries.",
    ),
    "BackendUnreachable": Text(
        when="The socket of a backend does not respond after several attempts.",
        action="Read the log of the backend. If no process listens on the socket any longer, delete its file.",
    ),
    "CheckpointDamaged": Text(
        when="The checkpoint of a driver is damaged. The node plugin keeps the damaged file and rebuilds the checkpoint.",
        action="Read [Disaster recovery](../admin/disaster-recovery.md), and check the disk of the node.",
    ),
    "DeviceLeftOut": Text(
        when="The API would reject a device, or a device plugin lists a device without a valid ID. All other devices are published.",
        action="Correct the driver as the message describes.",
    ),
    "DevicePluginStopped": Text(
        when="A device plugin sends malformed messages, or exceeds a limit. The node plugin disconnects it.",
        action="Read the log of the device plugin and report the message to its vendor.",
    ),
    "EndpointStopped": Text(
        when="A driver, backend or device plugin stops: it fails, or its connection ends. The node plugin taints its devices immediately.",
        action="Read the log of the driver. The node plugin restarts a Python driver, and reconnects to any other.",
    ),
    "FieldsDropped": Text(
        when="The API server drops fields of the published devices, because a feature gate is disabled.",
        action="Enable the feature gate that the message names. Until then, the node plugin publishes the driver's fallback.",
    ),
    "KubeletResourcesUnknown": Text(
        when="The node plugin cannot determine whether the kubelet itself allocates devices of a device plugin's resource.",
        action="Check that the kubelet's podresources socket exists and responds.",
    ),
    "RegistrationRefused": Text(
        when="A device plugin cannot register, because its resource name, version or socket is invalid or not allowed.",
        action="Correct the device plugin, or the value `devicePlugins.allowed`.",
    ),
    "ResourceServedByKubelet": Text(
        when="The kubelet's own device manager serves the resource of a device plugin, so a device could be allocated twice.",
        action="Finish the [migration](../admin/device-plugins.md): no plugin for this resource can remain registered with the kubelet.",
    ),
    "TooManyResources": Text(
        when="More resources are registered on the node than the node plugin accepts.",
        action="Remove device plugins from the node. The node plugin removes a resource one hour after its device plugin has disconnected.",
    ),
}

SETS: tuple[tuple[str, Collection[str], Mapping[str, Text]], ...] = (
    ("pending pods", [str(each) for each in Code], PENDING),
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
            "This page lists every Event that drakit writes, by the object that it is about. All Events are of type Warning\n"
            "unless the table says otherwise. The message names the objects, the cause and the remedy, and the same cause\n"
            "always has the same message: Kubernetes counts repetitions.",
            "To read the Events of one object, run:",
            "```bash\nkubectl events --for pod/NAME -n NAMESPACE\nkubectl events --for resourceclaim/NAME -n NAMESPACE\n"
            "kubectl events --for node/NAME -n default\n```",
            *_section(
                "Events about pods and templates",
                "The operator writes these Events, with `drakit.dev/operator` as reporting controller. They explain why a pod\n"
                "is Pending. [My pod does not start](../use/troubleshooting.md) begins with the symptom.",
                PENDING,
            ),
            *_section(
                "Events about claims",
                "The node plugin writes these Events, with `drakit.dev/nodeplugin` as reporting controller. The kubelet reports\n"
                "the same failure to prepare as `FailedPrepareDynamicResources` about the pod.",
                CLAIMS,
            ),
            *_section(
                "Events about the Node",
                "The node plugin writes these Events, with `drakit.dev/nodeplugin` as reporting controller. They are for admins\n"
                "and driver vendors. Events about Nodes are in the namespace `default`.",
                NODE,
            ),
        ],
    )


def _section(title: str, intro: str, texts: Mapping[str, Text]) -> Iterator[str]:
    yield f"## {title}"
    yield intro
    yield markdown.table(
        ("Reason", "Object", "When", "What to do"),
        [
            (markdown.code(reason), text.regarding, text.when, text.action)
            for reason, text in texts.items()
        ],
    )
