"""
Errors that can occur when a claim is prepared or unprepared. Their messages appear in an Event on
the pod.

Each message names the claim, the cause and the remedy. The same cause results in the same message,
so that Events can be deduplicated.

Does not depend on gRPC or HTTP.
"""

from __future__ import annotations

from typing import ClassVar

from drakit_nodeplugin.state.records import StoredDevice


class ClaimError(Exception):
    """A claim cannot be prepared or unprepared. The rest of its batch continues."""

    reason: ClassVar[str] = "ClaimError"
    """The metric label: one of a fixed set of words, without variable data."""


class ClaimFetchError(ClaimError):
    """The API server rejected the read, or returned an unusable response. The caller decides from
    the checkpoint instead."""

    reason = "ClaimNotRead"

    def __init__(self, *, claim: str, cause: str) -> None:
        super().__init__(
            f"claim {claim}: the node plugin cannot read the claim from the API server: {cause}"
        )


class NoResponseError(ClaimFetchError):
    """The API server did not respond, so further requests are useless for now."""


class ClaimGoneError(ClaimFetchError):
    """According to the API server, there is no claim with this name."""

    reason = "ClaimGone"

    def __init__(self, *, claim: str) -> None:
        super().__init__(claim=claim, cause="the claim does not exist; delete the pod")


class ClaimBusyError(ClaimError):
    """The checkpoint is being rebuilt, or the claim's entry has changed since it was read."""

    reason = "ClaimBusy"

    def __init__(self, *, claim: str, cause: str) -> None:
        super().__init__(f"claim {claim}: {cause}; the kubelet retries")


class AbandonedError(ClaimError):
    reason = "Abandoned"

    def __init__(self, *, claim: str) -> None:
        super().__init__(
            f"claim {claim}: the node plugin stopped preparing the claim, because the kubelet "
            f"requested to unprepare it; the kubelet retries if a pod still needs the claim"
        )


class ClaimReplacedError(ClaimError):
    reason = "ClaimReplaced"

    def __init__(self, *, claim: str, uid: str, found: str) -> None:
        super().__init__(
            f"claim {claim}: the kubelet requested the claim with UID {uid}, but the claim with "
            f"this name has UID {found}; recreate the pod to use the new claim"
        )


class ClaimNotAllocatedError(ClaimError):
    reason = "ClaimNotAllocated"

    def __init__(self, *, claim: str) -> None:
        super().__init__(
            f"claim {claim}: the claim is not allocated, so the scheduler did not place this pod, "
            "or the allocation was removed since; delete the pod, and create it again without "
            "spec.nodeName"
        )


class WrongNodeError(ClaimError):
    reason = "WrongNode"

    def __init__(self, *, claim: str, node: str) -> None:
        super().__init__(
            f"claim {claim}: the claim is allocated on another node, not on {node}; delete the "
            "pod, and create it again, so that the scheduler places it on that node"
        )


class NoResultError(ClaimError):
    reason = "NoResult"

    def __init__(self, *, claim: str, driver: str) -> None:
        super().__init__(
            f"claim {claim}: the allocation has no device of driver {driver}, so the claim was "
            "probably allocated again after the kubelet had read it; delete the pod, and create "
            "it again"
        )


class BadConfigError(ClaimError):
    reason = "BadConfig"

    def __init__(self, *, claim: str, request: str, source: str, driver: str, wrong: str) -> None:
        super().__init__(
            f"claim {claim}, request {request}: the opaque parameters for driver {driver} in "
            f"{source} {wrong}; correct them and recreate the pod"
        )


class TooManyParametersError(ClaimError):
    reason = "BadConfig"

    def __init__(self, *, claim: str, driver: str, limit: str) -> None:
        super().__init__(
            f"claim {claim}: the opaque parameters for driver {driver} exceed the limit of "
            f"{limit}, counted once for each device that they apply to; shorten the parameters, "
            f"request fewer devices per claim, or increase the limit in the chart's value "
            f"nodeplugin.opaqueParameters"
        )


class ClaimTooLargeError(ClaimError):
    """The claim data that the driver needs, in addition to the identity and the devices, is too
    large."""

    reason = "ClaimTooLarge"

    def __init__(self, *, claim: str, driver: str, limit: str) -> None:
        super().__init__(
            f"claim {claim}: driver {driver} reads the claim's metadata, which exceeds the limit "
            f"of {limit}; remove labels or annotations of the claim or its template, and recreate "
            "the pod"
        )


class DeviceTakenError(ClaimError):
    reason = "DeviceTaken"

    def __init__(
        self,
        *,
        claim: str,
        request: str,
        device: str,
        holder: str,
        beside: tuple[str, str] | None = None,
    ) -> None:
        """If the holder has another device, or another share of this one, pass `beside`: the name
        of the holder's device, and the reason why the two conflict."""
        problem = f"is still prepared for claim {holder}"
        if beside is not None:
            held, shortage = beside
            problem = f"cannot be used together with device {held} of claim {holder}: {shortage}"
        super().__init__(
            f"claim {claim}, request {request}: device {device} {problem}; this pod starts "
            f"automatically once the pod that uses {holder} is gone"
        )
        self.device, self.holder = device, holder


class NumberTakenError(ClaimError):
    """The kernel gave the device a number that a claim still holds for other hardware."""

    reason = "NumberTaken"

    def __init__(
        self, *, claim: str, request: str, device: str, number: str, held: str, holder: str | None
    ) -> None:
        """Create the error. `held` is the holder's device. `holder` is None if the claim conflicts
        with itself."""
        where = f"claim {claim}, request {request}:"
        if holder is None:
            both = f"devices {device} and {held}" if device != held else f"device {device} twice,"
            super().__init__(
                f"{where} the driver returned device node {number} for {both} with different "
                "hardware identities; the kubelet retries; if the error persists, report a bug in "
                "the driver"
            )
        else:
            super().__init__(
                f"{where} device {device} has device node {number}, which is still held for other "
                f"hardware, device {held} of claim {holder}; this pod starts automatically once "
                f"the pod that uses {holder} is gone"
            )
        self.device, self.holder = device, holder


class OverAllocatedError(ClaimError):
    """The claim by itself consumes more than the driver lists, because it was allocated from
    outdated slices."""

    reason = "OverAllocated"

    def __init__(self, *, claim: str, request: str, device: str, shortage: str) -> None:
        super().__init__(
            f"claim {claim}, request {request}: device {device} has less capacity than when it was "
            f"allocated: {shortage}; delete the pod to get another allocation"
        )


class DeviceNotListedError(ClaimError):
    """The driver does not list the device. Only the inventory shows which hardware it consumes."""

    reason = "DeviceNotListed"

    def __init__(self, *, claim: str, request: str, device: str, driver: str) -> None:
        super().__init__(
            f"claim {claim}, request {request}: driver {driver} does not list device {device} on "
            "this node; the kubelet retries, and the pod starts once the driver lists the device; "
            "if the device is gone, delete the pod; if the driver refuses the device, the node "
            "plugin's log has the reason"
        )


class DeviceGoneError(ClaimError):
    """The device is published only because an earlier claim still holds it."""

    reason = "DeviceGone"

    def __init__(self, *, claim: str, request: str, device: str, driver: str) -> None:
        super().__init__(
            f"claim {claim}, request {request}: device {device} is gone: driver {driver} no "
            "longer lists it on this node; the kubelet retries, and the pod starts if the device "
            "returns; otherwise delete the pod, and also the claim if no template created it"
        )


class DriverFailedError(ClaimError):
    """The claim's driver could not prepare or unprepare some or all of its devices."""

    reason = "DriverFailed"

    def __init__(self, *, claim: str, cause: str, device: StoredDevice | None = None) -> None:
        """Create the error. If `device` is None, the message `cause` must name its subject."""
        where = f"claim {claim}"
        if device is not None:
            # In a rebuilt entry, the request is unknown.
            where += f", request {device.request}" if device.request else ""
            where += f", device {device.device}"
        super().__init__(f"{where}: {cause}")


class BadParametersFailedError(DriverFailedError):
    reason = "BadConfig"


class SpecFailedError(ClaimError):
    reason = "CDISpecFailed"

    def __init__(self, *, claim: str, cause: str) -> None:
        super().__init__(
            f"claim {claim}: the node plugin cannot write the CDI file of the claim: {cause}; the "
            "kubelet retries"
        )


class SpecNotRemovedError(ClaimError):
    reason = "CDISpecFailed"

    def __init__(self, *, claim: str, cause: str) -> None:
        super().__init__(
            f"claim {claim}: the node plugin cannot remove the CDI file of the claim: {cause}; the "
            "kubelet retries"
        )


class CheckpointFailedError(ClaimError):
    reason = "CheckpointFailed"

    def __init__(self, *, claim: str, cause: str) -> None:
        super().__init__(f"claim {claim}: {cause}; the kubelet or the node plugin retries")


class FaultError(ClaimError):
    """An unexpected exception. Its message may contain anything, so it is logged but not shown to
    users."""

    reason = "Fault"

    def __init__(self, *, claim: str) -> None:
        super().__init__(
            f"claim {claim}: an internal error of the node plugin; see its log on this node"
        )
