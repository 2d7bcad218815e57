"""
Reads the evidence about a pod from the kubelet, the container runtime and drivers: the states of
its containers, its own message, and Events. For messages with a known cause, the module also has
the remedy.

A pod goes through the steps of its start in a fixed order, and each step can fail again. Therefore,
the latest Event contains the reason.

Does not depend on clients, or on the devices of a pod.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from drakit_explain.codes import Code, Finding
from drakit_explain.model import ClaimFacts, PodFacts

# ---------------------------------------------------------------- Events


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Event:
    """An Event about an object."""

    time: str
    """The time at which the Event last occurred, without a time zone. For some Events, it has
    fractions of a second."""

    reason: str
    message: str
    uid: str
    """The object's UID."""

    def __str__(self) -> str:
        return f"Event {self.reason}: {self.message}"


class Events:
    """Events about pods and claims."""

    def __init__(self, found: Iterable[Event] = (), *, hidden: bool = False) -> None:
        """
        :param hidden: whether there may be Events that the reader has no permission to list.
        """
        self.hidden = hidden
        self._by_object: dict[str, list[Event]] = {}
        for each in found:
            self._by_object.setdefault(each.uid, []).append(each)

    def latest(self, uids: Iterable[str], reasons: Collection[str]) -> Event | None:
        """Return the latest Event that is about any of these objects and has any of these
        reasons."""
        return max(
            (
                each
                for uid in uids
                for each in self._by_object.get(uid, ())
                if each.reason in reasons
            ),
            default=None,
        )

    def instead_of(self, advice: str, event: Event | None) -> str:
        """Return the Event if it is known. Otherwise, return the advice to read it, or, if the
        reader is not allowed to list Events, the advice to ask an administrator."""
        if event is not None:
            return str(event)
        if self.hidden:
            return (
                "its Events have the cause: ask an administrator, because you are not allowed to "
                "list them"
            )
        return advice


NO_EVENTS = Events()

PREPARE_FAILED, PREPARED = "PrepareFailed", "Prepared"
UNPREPARE_FAILED = "UnprepareFailed"
RENUMBERED = "DeviceRenumbered"
NOT_CREATED = "FailedResourceClaimCreation"
_PREPARE_OF_KUBELET = "FailedPrepareDynamicResources"

_STEPS = {
    _PREPARE_OF_KUBELET: "its claims are not prepared",
    "FailedMount": "its volumes are not mounted",
    "FailedAttachVolume": "its volumes are not attached",
    "FailedMapVolume": "its volumes are not mapped",
    "FailedCreatePodSandBox": "its sandbox is not created",
    "FailedCreatePodContainer": "its control group is not created",
    "NetworkNotReady": "the network of the node is not ready",
}
"""The step of a pod's start that failed, keyed by the reason of the kubelet's Event."""

AUTOSCALER = ("TriggeredScaleUp", "NotTriggerScaleUp", "FailedScaleUp", "Nominated")
"""The reasons of the Events that Cluster Autoscaler and Karpenter write about a waiting pod."""

QUOTED = (
    *(*_STEPS, PREPARE_FAILED, PREPARED, UNPREPARE_FAILED, RENUMBERED, NOT_CREATED),
    *AUTOSCALER,
)
"""The reasons of Events that explanations quote."""


# ---------------------------------------------------------------- known messages


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """A message from the kubelet or a container runtime, with its known cause."""

    pattern: re.Pattern[str]
    cause: str
    """The cause as a clause. It can contain `node` and the pattern's groups as placeholders."""

    remedy: str


_DEV = r"(?P<path>/dev/[^\s\":,]++)\S*+"
"""The quantifiers are possessive to prevent backtracking, because tenants write the commands that
messages quote."""

_KNOWN = (
    _Known(
        pattern=re.compile(r"unresolvable CDI devices? (?P<devices>[^\s,:]+=[^\s:;]+)"),
        cause="the container runtime on node {node} does not find a CDI file for {devices}: it "
        "reads another directory than the one to which the driver writes, or the file is missing",
        remedy="check on that node that CDI is enabled, and that cdi_spec_dirs of the runtime has "
        "the directory of the driver (value nodeplugin.cdiDirectory of drakit); if it has, delete "
        "the pod and create it again, so that the driver writes the file again",
    ),
    _Known(
        pattern=re.compile(r"endpoint not found in cache for a registered resource: (?P<of>\S+)"),
        cause="the kubelet on node {node} still expects resource {of} from a device plugin that is "
        "gone, because an older pod there has a device of that plugin",
        remedy="delete the pods on node {node} that got {of} from the device plugin; a restart of "
        "the kubelet does not help",
    ),
    _Known(
        pattern=re.compile(
            r"unable to get (?:claim info|information) for (?:ResourceClaim|claim) (?P<of>[\w.-]+)"
        ),
        cause="the kubelet on node {node} has no record of claim {of}: the end of another pod "
        "unprepared it, or an old kubelet skipped it because another claim of the pod was already "
        "prepared",
        remedy="delete the pod and create it again; if the message returns, give the pod claims "
        "that no running pod uses, or upgrade the kubelet",
    ),
    _Known(
        pattern=re.compile(r"old ResourceClaim with same name (?P<of>\S+) and different UID"),
        cause="the kubelet on node {node} has not unprepared an earlier claim {of}, whose pod was "
        "deleted by force",
        remedy="wait until the driver on that node has unprepared it, and check the driver's log",
    ),
    _Known(
        pattern=re.compile(r"DRA driver (?P<driver>\S+) is not registered"),
        cause="driver {driver} is not registered with the kubelet on node {node}",
        remedy="check that the driver's pod runs on that node, and read its log",
    ),
    _Known(
        pattern=re.compile(r"CDI device \(\"(?P<path>/dev/[^\s\":,]++)\".*type mismatch"),
        cause="device node {path} on node {node} is not the one for which the claim was prepared",
        remedy="delete the pod and create it again",
    ),
    _Known(
        pattern=re.compile(
            rf"(?:{_DEV} (?:.*: )?no such (?:file or directory|device)"
            rf"|CDI host device \"(?P<host>[^\"]+)\")"
        ),
        cause="device node {path} does not exist on node {node}: the device was disconnected, or "
        "has a different name now",
        remedy="connect the device again, or delete the pod and the claim, so that another device "
        "is allocated",
    ),
    _Known(
        pattern=re.compile(rf"{_DEV} (?:.*: )?(?:permission denied|operation not permitted)"),
        cause="the container is not allowed to open device node {path} on node {node}",
        remedy="if the pod has hostUsers: false, its users do not own the device node; with "
        "SELinux, allow containers to use devices (setsebool -P container_use_devices on) or set "
        "seLinuxOptions; otherwise check the security context of the container",
    ),
    _Known(
        pattern=re.compile(r"does not support user namespaces|user namespaces? (?:is|are) not su"),
        cause="the container runtime or kernel of node {node} does not support user namespaces",
        remedy="remove hostUsers: false from the pod, or use a node that supports it",
    ),
    _Known(
        pattern=re.compile(r"^DeletionByDeviceTaintManager\b"),
        cause="Kubernetes evicted it because of a taint with effect NoExecute of one of its "
        "devices",
        remedy="a controller creates an evicted pod again, and a pod without one must be created "
        "again",
    ),
    _Known(
        pattern=re.compile(r"requested number of devices unavailable for (?P<of>[^\s.]++\S*?)\. "),
        cause="the device plugin on node {node} has fewer healthy devices of {of} than the "
        "scheduler assumed",
        remedy="check the device plugin on that node; a controller creates a failed pod again, and "
        "a pod without one must be created again",
    ),
)


def known_cause(message: str, node: str) -> tuple[str, str]:
    """Return the cause of a message as a clause, and the remedy. Both are empty if unknown."""
    for each in _KNOWN:
        if match := each.pattern.search(message):
            groups = {key: value for key, value in match.groupdict().items() if value}
            groups["path"] = groups.get("path", groups.get("host", ""))
            return each.cause.format(node=node, **groups), each.remedy.format(node=node, **groups)
    return "", ""


RETRY_SECONDS = 30.0
"""The time in which kubelets and runtimes retry, and drivers restore lost files."""


def _failure(code: Code, what: str, message: str, node: str) -> Finding:
    cause, remedy = known_cause(message, node)
    return Finding(
        code=code,
        what=f"{what}; {cause}" if cause else what,
        advice=remedy,
        transient=code,
        patience_seconds=RETRY_SECONDS,
    )


# ---------------------------------------------------------------- a pod


def not_running(pod: PodFacts, node: str) -> Iterator[Finding]:
    """Return the reasons why containers of a pod are not running."""
    for name, reason, message in pod.containers:
        said = f"{reason}: {message}" if message else reason
        yield _failure(Code.POD_NOT_STARTED, f"container {name} does not run: {said}", said, node)


def failed(pod: PodFacts) -> Finding:
    """Return the reason why a pod has failed."""
    of_containers = [
        f"container {name}: {reason}{f': {message}' if message else ''}"
        for name, reason, message in pod.containers
    ]
    said = "; ".join(filter(None, (pod.failure or pod.disruption, *of_containers)))
    what = "has failed" + (f": {said}" if said else "")
    return _failure(Code.POD_FAILED, what, said, pod.node or "")


def failed_step(
    pod: PodFacts, claims: Sequence[ClaimFacts], events: Events, node: str
) -> Finding | None:
    """Return a finding about the step of a pod's start that failed last, with the driver's message
    if there is one."""
    step = events.latest([pod.uid], _STEPS)
    ends = [events.latest([each.uid], (PREPARE_FAILED, PREPARED)) for each in claims]
    failures = [end for end in ends if end is not None and end.reason == PREPARE_FAILED]
    if step is not None and step.reason == _PREPARE_OF_KUBELET:
        prepared = [end.time for end in ends if end is not None and end.reason == PREPARED]
        if failures:
            step = None
        elif len(prepared) == len(claims) and step.time <= max(prepared, default=""):
            return None
    driver = max(failures, default=None)
    if driver is not None and (step is None or driver.time > step.time):
        step = driver
    if step is None:
        return None
    is_prepare = step.reason in (PREPARE_FAILED, _PREPARE_OF_KUBELET)
    what = _STEPS[_PREPARE_OF_KUBELET if is_prepare else step.reason]
    code = Code.NOT_PREPARED if is_prepare else Code.POD_NOT_STARTED
    return _failure(code, f"{what}; {step}", step.message, node)


def renumbered(pod: PodFacts, claims: Sequence[ClaimFacts], events: Events) -> Iterator[Finding]:
    """Return findings about the devices whose numbers have changed since a pod's containers
    started."""
    for each in claims:
        event = events.latest([each.uid], (RENUMBERED,))
        if event is not None and pod.running_since and event.time > pod.running_since:
            yield Finding(code=Code.DEVICE_RENUMBERED, what=str(event))
