"""
Situations: from a node to running. A pod waits for its driver, its sandbox or its containers, has
failed, or has lost its device.

Their nodes are made up, and what a kubelet or a driver reports is written by the scene.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from drakit_explain.codes import Code
from drakit_explain.pending import Verdict
from tests.situations.broken import healthy, placed, tainted
from tests.situations.scene import WAITS, Scene, device
from tests.situations.table import situation

KUBELET = "a kubelet would overwrite the status of the pod"
EVENTS = "the operator does not read Events of kubelets and drivers"
PENDING = "the operator watches pending pods only"

# ------------------------------------------------------------ messages with a known cause

RUNC = "OCI runtime create failed: runc create failed: "
MESSAGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "cdi_devices_are_unresolvable": (
        "CDI device injection failed: unresolvable CDI devices a.io/claim=1-0, a.io/claim=1-1",
        ("does not find a CDI file for a.io/claim=1-0", "cdi_spec_dirs of the runtime"),
    ),
    "device_plugin_is_gone": (
        "endpoint not found in cache for a registered resource: squat.ai/pair",
        ("still expects resource squat.ai/pair", "that got squat.ai/pair from the device plugin"),
    ),
    "kubelet_has_no_claim_info": (
        "internal error: unable to get claim info for ResourceClaim mine in namespace lab",
        ("has no record of claim mine", "delete the pod and create it again"),
    ),
    "earlier_claim_is_not_unprepared": (
        "old ResourceClaim with same name mine and different UID 7 still exists",
        ("has not unprepared an earlier claim mine", "wait until the driver"),
    ),
    "driver_is_not_registered_with_the_kubelet": (
        "DRA driver a.io is not registered",
        ("driver a.io is not registered", "check that the driver's pod runs"),
    ),
    "device_node_is_gone": (
        'failed to inject devices: failed to stat CDI host device "/dev/ttyUSB0": no such file '
        "or directory",
        ("device node /dev/ttyUSB0 does not exist on node", "connect the device again"),
    ),
    "device_node_may_not_be_opened": (
        f"{RUNC}unable to start container process: open /dev/fuse: permission denied",
        (
            "is not allowed to open device node /dev/fuse",
            "hostUsers: false",
            "container_use_devices on",
        ),
    ),
    "device_node_may_not_be_made": (
        f'{RUNC}creating device nodes: mknod "/dev/x": operation not permitted',
        ("is not allowed to open device node /dev/x", "SELinux"),
    ),
    "device_node_is_another": (
        'CDI device ("/dev/a", "/dev/b"), host type mismatch (c, b)',
        ("device node /dev/a on node", "is not the one for which the claim was prepared"),
    ),
    "user_namespaces_are_not_supported": (
        "runtime does not support user namespaces",
        ("does not support user namespaces", "remove hostUsers: false"),
    ),
}
"""The messages of kubelets and container runtimes about a container, and the words for the
cause."""


def not_created(s: Scene, message: str) -> Iterator[None]:
    placed(s)
    s.container(waiting={"reason": "CreateContainerError", "message": message})
    yield
    s.start()


for _name, (_message, _words) in MESSAGES.items():
    _steps = partial(not_created, message=_message)
    _steps.__name__ = _name  # pyright: ignore[reportAttributeAccessIssue]
    situation(
        Code.POD_NOT_STARTED,
        words=("container main does not run: CreateContainerError", *_words),
        verdict=Verdict.BROKEN,
        unreal=KUBELET,
    )(_steps)  # pyright: ignore[reportArgumentType]


@situation(
    Code.POD_NOT_STARTED,
    words=("container main does not run: CrashLoopBackOff, StartError: open /dev/x",),
    never=("back-off",),
    verdict=Verdict.BROKEN,
    unreal=KUBELET,
    silent="a container that ends is not a problem of devices",
)
def container_cannot_start_again(s: Scene) -> Iterator[None]:
    placed(s)
    s.container(waiting={"reason": "CrashLoopBackOff", "message": "back-off 5m"})
    ended = {"terminated": {"reason": "StartError", "exitCode": 128, "message": "open /dev/x"}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m"}}
    s.change_pod(containerStatuses=[{"name": "main", "state": waiting, "lastState": ended}])
    yield
    s.start()


@situation(
    Code.POD_FAILED,
    words=(
        "has failed: UnexpectedAdmissionError: Allocate failed due to requested number",
        "the device plugin on node",
        "has fewer healthy devices of a.io/b than the scheduler assumed",
    ),
    verdict=Verdict.BROKEN,
    unreal=KUBELET,
    silent=PENDING,
)
def kubelet_does_not_admit_the_pod(s: Scene) -> Iterator[None]:
    placed(s)
    said = "Allocate failed due to requested number of devices unavailable for a.io/b. Requested: 1"
    s.change_pod(phase="Failed", reason="UnexpectedAdmissionError", message=said)
    yield
    s.delete("pods", WAITS)


# ------------------------------------------------------------ Events


def claim_of_pod(s: Scene) -> str:
    (claim,) = s.claims_of(WAITS)
    return claim


@situation(
    Code.NOT_PREPARED,
    words=("its claims are not prepared; Event PrepareFailed: its cable is loose",),
    never=("kubectl describe", "no known problem", "the kubelet's words"),
    verdict=Verdict.BROKEN,
    unreal=KUBELET,
    silent=EVENTS,
)
def driver_cannot_prepare_the_claim(s: Scene) -> Iterator[None]:
    placed(s)
    claim = claim_of_pod(s)
    s.event("PrepareFailed", "its cable is loose", plural="resourceclaims", name=claim, second=1)
    s.event("FailedPrepareDynamicResources", "the kubelet's words", second=2)
    yield
    s.start()


@situation(
    Code.POD_NOT_STARTED,
    words=("its sandbox is not created; Event FailedCreatePodSandBox: no address",),
    never=("its claims are not prepared",),
    verdict=Verdict.BROKEN,
    unreal=KUBELET,
    silent=EVENTS,
)
def sandbox_fails_after_the_claims_are_prepared(s: Scene) -> Iterator[None]:
    placed(s)
    s.event("FailedPrepareDynamicResources", "the kubelet's words", second=1)
    s.event("FailedCreatePodSandBox", "no address", second=30)
    yield
    s.start()


@situation(
    Code.NOT_PREPARED,
    words=("its claims are not prepared", "1 slow call"),
    never=("no known problem",),
    verdict=Verdict.BROKEN,
    unreal=KUBELET,
    silent="the operator does not repeat what the kubelet reports",
)
def driver_hangs_while_it_prepares(s: Scene) -> Iterator[None]:
    node = placed(s)
    s.report(node, progress="1 slow call")
    yield
    s.start()


@situation(
    Code.DEVICE_RENUMBERED,
    words=("Event DeviceRenumbered: restart the containers",),
    verdict=Verdict.BROKEN,
    unreal=KUBELET,
    silent=PENDING,
)
def device_is_renumbered_while_the_pod_runs(s: Scene) -> Iterator[None]:
    placed(s)
    s.container(running={"startedAt": "2026-01-01T00:00:05Z"})
    claim = claim_of_pod(s)
    s.event(
        "DeviceRenumbered", "restart the containers", plural="resourceclaims", name=claim, second=9
    )
    yield
    s.start()


@situation(
    Code.NOT_UNPREPARED,
    words=("Event UnprepareFailed: the lamp is stuck",),
    never=("kubectl describe", "long ago"),
    verdict=Verdict.DELETING,
    settled=True,
    unreal=KUBELET,
)
def driver_cannot_unprepare_the_claim(s: Scene) -> Iterator[None]:
    placed(s)
    claim = claim_of_pod(s)
    s.start_deletion("pods", WAITS)
    s.event("PrepareFailed", "long ago", plural="resourceclaims", name=claim, second=0)
    s.event("UnprepareFailed", "the lamp is stuck", plural="resourceclaims", name=claim, second=1)
    yield
    s.delete("pods", WAITS)


@situation(
    Code.DRIVER_UNAVAILABLE,
    words=("does not run on node", "cannot unprepare", "start or install the driver there again"),
    verdict=Verdict.DELETING,
    settled=True,
    unreal="on the real cluster, a row of its own waits for the taints of drakit",
)
def deleted_pod_whose_driver_is_gone(s: Scene) -> Iterator[None]:
    node = placed(s)
    s.start_deletion("pods", WAITS)
    s.withdraw(node)
    yield
    s.delete("pods", WAITS)


# ------------------------------------------------------------ its devices and drivers


@situation(
    Code.DEVICE_GONE,
    words=("runs on node", "but device a", "is gone: its driver no longer lists it"),
    verdict=Verdict.BROKEN,
    unreal=KUBELET,
)
def device_of_a_running_pod_is_gone(s: Scene) -> Iterator[None]:
    node = placed(s)
    s.start()
    tainted(s, node, "drakit.dev/gone")
    yield
    healthy(s, node)


@situation(
    Code.DEVICE_UNHEALTHY,
    words=("is unhealthy (the fan is loose); check the device",),
    verdict=Verdict.BROKEN,
    unreal="the report of a driver belongs to its node plugin",
)
def driver_says_why_a_device_is_unhealthy(s: Scene) -> Iterator[None]:
    node = placed(s)
    s.report(node, unhealthyDevices=[{"pool": node, "device": "a", "message": "the fan is loose"}])
    tainted(s, node, "drakit.dev/unhealthy")
    yield
    healthy(s, node)


@situation(
    Code.DRIVER_UNAVAILABLE,
    words=("is not registered with the kubelet", "check the log of the node plugin"),
    verdict=Verdict.BROKEN,
    unreal="the report of a driver belongs to its node plugin",
)
def kubelet_no_longer_knows_the_driver(s: Scene) -> Iterator[None]:
    node = placed(s)
    s.report(node, state="Rejected")
    yield
    s.report(node)
    s.start()


# ------------------------------------------------------------ what the scheduler says

FREE = "the control plane in memory schedules by devices, and the message is given"


def free(s: Scene, message: str) -> None:
    """A device is free; the scheduler refuses the pod, which asks for it and for a volume."""
    s.refuse(message)
    s.publish(device("a"))
    s.pod(s.request(), volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}])


@situation(
    verdict=Verdict.FITS,
    words=("the scheduler reports 2 cannot allocate all claims: its last attempt may have",),
    never=("not the cause",),
    unreal=FREE,
)
def scheduler_found_no_devices_a_moment_ago(s: Scene) -> Iterator[None]:
    free(s, "0/2 nodes are available: 2 cannot allocate all claims. preemption: no.")
    yield
    s.refuse("")


@situation(
    verdict=Verdict.FITS,
    words=(
        "no node has both the devices and the other resources that the pod needs "
        "(not checked: its volumes)",
    ),
    never=("not the cause",),
    unreal=FREE,
)
def no_node_has_the_devices_and_the_volume(s: Scene) -> Iterator[None]:
    counts = "1 cannot allocate all claims, 1 node(s) had volume node affinity conflict"
    free(s, f"0/2 nodes are available: {counts}. preemption: no.")
    yield
    s.refuse("")


@situation(
    verdict=Verdict.FITS,
    words=("not the cause", "the scheduler reports 1 Insufficient rdma/hca, 1 node(s) were uns"),
    unreal=FREE,
)
def scheduler_reports_counts(s: Scene) -> Iterator[None]:
    counts = "1 Insufficient rdma/hca, 1 node(s) were unschedulable"
    free(
        s,
        f"0/2 nodes are available: {counts}. still not schedulable, preemption: 0/2 nodes are "
        "available: 2 Preemption is not helpful for scheduling.",
    )
    yield
    s.refuse("")


@situation(
    Code.SEARCH_FAILED,
    words=("a feature gate of the scheduler is off: claim lab/mine, request r: has subrequests",),
    unreal="the gates of the scheduler are on",
)
def feature_is_off_in_the_scheduler(s: Scene) -> Iterator[None]:
    free(
        s,
        'running "DynamicResources" filter plugin: claim lab/mine, request r: has subrequests, but '
        "the DRAPrioritizedList feature is disabled",
    )
    yield
    s.refuse("")


@situation(
    verdict=Verdict.FITS,
    words=("check that the feature gate DRAExtendedResource is on in the scheduler",),
    never=("not the cause",),
    unreal="the gates of the scheduler are on",
)
def extended_resources_are_off_in_the_scheduler(s: Scene) -> Iterator[None]:
    s.device_class(extendedResourceName="lab.test/gpu")
    s.publish(device("a"))
    s.refuse("0/2 nodes are available: 2 Insufficient lab.test/gpu. preemption: no.")
    s.pod(extended="lab.test/gpu")
    yield
    s.refuse("")
