"""
Determines the devices that a DeviceMaintenance selects, its DeviceTaintRules, and the claims and
pods that still use the devices.

The operator uses the same results that ``kubectl drakit cordon`` and ``drain`` preview. Pods are
found through claims, so they include those that request extended resources. A pod is not evicted if
its claim tolerates the taint. A claim with admin access does not prevent other claims from using
the device, so its pod is not evicted either.

Does not depend on sessions or clocks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from drakit.text import plural
from drakit_explain.allocation import NotEvaluatedError, tolerates
from drakit_explain.broken import published_device
from drakit_explain.devices import TaintFacts, bits
from drakit_explain.model import (
    ClaimFacts,
    Consumer,
    DeviceID,
    DriverFacts,
    MaintenanceFacts,
    Request,
    SliceFacts,
    TaintRuleFacts,
)
from drakit_explain.pools import is_complete, newest
from drakit_explain.reports import (
    GONE,
    MAINTENANCE,
    MANAGED_BY,
    OPERATOR,
    UNAVAILABLE,
    report_of_device,
)
from drakit_explain.wording import cut
from drakit_explain.world import Name, Selection, World

CORDON, DRAIN = "Cordon", "Drain"

MAX_DEVICES = 64
"""Maximum number of devices in one maintenance. Each needs a DeviceTaintRule, which every
scheduling decision reads."""

MAX_NAMED = 3
"""Maximum number of devices to name in a sentence."""

MAX_MESSAGE = 1024
"""Maximum length of a message about a blocker. It is the limit in the CRD."""

NO_RULES = (
    "the cluster does not serve DeviceTaintRules: enable the feature gate DRADeviceTaintRules (in "
    "Kubernetes 1.34, DRADeviceTaints), and before 1.37 also the API version "
    "resource.k8s.io/v1beta2 (before 1.36, v1alpha3)"
)
NOT_LISTED = (
    "the operator has no permission to list and watch DeviceTaintRules: add it to the operator's "
    "ClusterRole"
)

_DIGEST = re.compile("[0-9a-f]{16}")


class RefusedError(Exception):
    """The selection of devices is rejected. The message is a sentence."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


# ---------------------------------------------------------------- devices and rules


def select(maintenance: MaintenanceFacts, world: World) -> tuple[DeviceID, ...]:
    """
    Return the devices that a maintenance currently selects.

    :raises RefusedError: there are no such devices, or too many.
    :raises NotEvaluatedError: a selector of the class has not been evaluated yet, or a pool is
        incomplete, for example during an update. Devices that are missing now would not be added
        later.
    """
    wanted, selection = maintenance.selection, None
    if not any(wanted):
        raise RefusedError("NoSelection", "spec.devices is empty: it would select all devices")
    if name := wanted.device_class:
        if world.device_class(name) is None:
            raise RefusedError("NoDevices", f"DeviceClass {name} does not exist")
        selection = Selection(world, Request(name="", device_class=name))
    found: set[DeviceID] = set()
    for pool in sorted({each.of_pool for each in world.slices() if each.driver}):
        if wanted.driver not in ("", pool.driver) or wanted.pool not in ("", pool.pool):
            continue
        of_pool: set[DeviceID] = set()
        slices = world.slices_of_pool(pool)
        for each in newest(slices):
            matches = -1 if selection is None else selection.of(each).matches
            names = _on_node(each, wanted.node, matches)
            of_pool |= {DeviceID(*pool, name) for name in names if wanted.device in ("", name)}
        if of_pool and not wanted.device and not is_complete(slices):
            raise NotEvaluatedError(
                f"pool {pool.pool} of driver {pool.driver} is incomplete: wait until all of its "
                "ResourceSlices are published, or name its devices one by one"
            )
        found |= of_pool
    if not found:
        raise RefusedError(
            "NoDevices",
            f"no published device has {wanted}: list the devices with 'kubectl drakit devices "
            "-o wide'",
        )
    if len(found) > MAX_DEVICES:
        raise RefusedError(
            "TooManyDevices",
            f"{len(found)} devices have {wanted}, and a DeviceMaintenance can have at most "
            f"{MAX_DEVICES}: also name a pool, a node or a device",
        )
    return tuple(sorted(found))


def _on_node(of: SliceFacts, node: str, matches: int) -> Iterator[str]:
    """Yield the names of a slice's devices in the bitmask. If a node is given, yield only those
    whose ``nodeName`` is this node."""
    for index in bits(matches & (1 << len(of.devices)) - 1):
        place = of.place
        if node and of.by_device:
            place = of.devices[index].place
        if not node or (place is not None and place.node == node):
            yield of.devices.names[index]


def rule_name(owner: MaintenanceFacts | DriverFacts, device: DeviceID) -> str:
    """Return the name of the DeviceTaintRule of a device. It is different for each owner."""
    identity = "/".join((owner.uid, *device))
    return f"{owner.name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def rule_of(
    owner: MaintenanceFacts | DriverFacts, device: DeviceID, *, api_version: str
) -> dict[str, Any]:
    """Return the DeviceTaintRule of a device. The garbage collector deletes it with its owner. The
    rule specifies driver, pool and device, because it would otherwise also taint other devices."""
    key = MAINTENANCE if isinstance(owner, MaintenanceFacts) else UNAVAILABLE
    if not all(device):
        raise ValueError(f"{device} is not one device")
    return {
        "apiVersion": api_version,
        "kind": "DeviceTaintRule",
        "metadata": {
            "name": rule_name(owner, device),
            "labels": {MANAGED_BY: OPERATOR},
            "ownerReferences": [owner.reference.body() | {"controller": True}],
        },
        "spec": {
            "deviceSelector": device._asdict(),
            "taint": {"key": key, "value": owner.name, "effect": "NoSchedule"},
        },
    }


def rule_facts(maintenance: MaintenanceFacts, device: DeviceID) -> TaintRuleFacts:
    """Return the desired DeviceTaintRule of a device, without a UID."""
    return TaintRuleFacts(
        name=rule_name(maintenance, device),
        uid="",
        taint=_taint(maintenance),
        owner=maintenance.uid,
        **device._asdict(),
    )


def _taint(maintenance: MaintenanceFacts) -> TaintFacts:
    return TaintFacts(key=MAINTENANCE, effect="NoSchedule", value=maintenance.name)


def rules_named(maintenance: str, world: World) -> list[TaintRuleFacts]:
    """Return the DeviceTaintRules of all current and former maintenances with the given name."""
    prefix, taint = f"{maintenance}-", (MAINTENANCE, maintenance)
    return [
        each
        for name, each in world.of(TaintRuleFacts).items()
        # Compare names first, because a cluster can have thousands of rules.
        if name.name.startswith(prefix)
        and _DIGEST.fullmatch(name.name, len(prefix))
        and (each.taint.key, each.taint.value) == taint
    ]


def is_tainted(
    maintenance: MaintenanceFacts, device: DeviceID, world: World, *, by_rules: bool
) -> bool:
    """Return whether a device of a maintenance is out of service, so that no new claim can get
    it."""
    if by_rules:
        rule = world.of(TaintRuleFacts).get(Name("", rule_name(maintenance, device)))
        return rule is not None and replace(rule, uid="") == rule_facts(maintenance, device)
    found = published_device(device, world)
    return found is None or any(each.key in (MAINTENANCE, GONE) for each in found.taints)


def unsupported(devices: Collection[DeviceID], world: World) -> list[DeviceID]:
    """Return the devices that only a DeviceTaintRule can taint, because drakit's node plugin does
    not publish them."""
    return [each for each in devices if report_of_device(each, world) is None]


def unsupported_message(devices: Collection[DeviceID]) -> str:
    """Return the reason why unsupported devices stay in service."""
    return f"{plural(len(devices), 'device')} of other drivers, {named(devices)}: {NO_RULES}"


def named(devices: Collection[DeviceID]) -> str:
    """Return the names of the first few devices, and the number of the others."""
    return cut(["/".join(each) for each in devices], MAX_NAMED)


# ---------------------------------------------------------------- claims and pods


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """A claim that holds devices in maintenance, and one of its consumers."""

    claim: ClaimFacts
    devices: tuple[DeviceID, ...]
    consumer: Consumer | None
    """The consumer. None if nothing uses the claim."""

    @property
    def pod(self) -> Consumer | None:
        """The consumer if it is a pod, which can be evicted."""
        found = self.consumer
        return found if found is not None and found.resource == "pods" else None

    @property
    def what(self) -> str:
        return f"{named(self.devices)} (claim {self.claim.namespace}/{self.claim.name})"

    def blocker(self, said: str = "") -> dict[str, str]:
        """
        Return the consumer that must still release the devices, as an entry of the status.

        :param said: the result of the pod's eviction.
        """
        claim = self.claim
        kind, name, message = "ResourceClaim", claim.name, f"it holds {named(self.devices)}"
        if self.pod is not None:
            kind, name, message = "Pod", self.pod.name, said or f"it uses {self.what}"
        elif self.consumer is not None:
            message += (
                f", and is reserved for {self.consumer.resource} {self.consumer.name}: delete that"
            )
        elif claim.held_by:
            message += f", and its deletion waits for finalizer {claim.held_by[0]}"
        else:
            message += ", and no pod uses it: Kubernetes releases it, or delete it"
        message = message[:MAX_MESSAGE]
        return {"kind": kind, "namespace": claim.namespace, "name": name, "message": message}


def uses(maintenance: MaintenanceFacts, devices: Collection[DeviceID], world: World) -> list[Use]:
    """Return the consumers that must release their devices to complete the drain, sorted by
    namespace and name."""
    claims: dict[str, ClaimFacts] = {}
    held: dict[str, list[DeviceID]] = {}
    taint = _taint(maintenance)
    for device in devices:
        holder = world.holder(device)
        for claim in (*([holder] if holder is not None else ()), *world.sharers(device)):
            if not any(
                tolerates(toleration, taint)
                for result in claim.results
                if result.device == device
                for toleration in result.tolerations
            ):
                claims[claim.uid] = claim
                held.setdefault(claim.uid, []).append(device)
    found = [
        Use(claim=claim, devices=tuple(dict.fromkeys(held[uid])), consumer=consumer)
        for uid, claim in claims.items()
        for consumer in claim.consumers or (None,)
    ]
    return sorted(found, key=lambda each: (each.claim.namespace, _name(each), each.claim.name))


def _name(use: Use) -> str:
    return use.consumer.name if use.consumer is not None else ""
