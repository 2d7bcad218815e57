"""
The driver: scans the host after each reported change, periodically, and for each batch of claims.

Preparing a claim uses a new scan, never the last one, because a USB stick may have been replugged
with a different number, or a zram device mounted, in the meantime. That scan reads only the files
that are needed for the devices of the batch.

Besides the devices, the driver reports rejected devices and policy outcomes, and writes log lines.
It does not repeat log lines that the last scan already caused.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import ClassVar

from drakit import (
    AllocatedClaim,
    AllocatedDevice,
    ClaimReference,
    Device,
    Driver,
    DriverError,
    Edits,
    Health,
    HeldDevice,
    HeldNode,
    Inventory,
    Node,
    NoParameters,
    PolicyConflict,
    PolicyOutcome,
    PolicyResource,
    RejectedDevice,
    Taint,
)
from drakit_drivers.hostdev.container import container_edits, shared_path
from drakit_drivers.hostdev.events import HostEvents
from drakit_drivers.hostdev.hardware import hardware_identity
from drakit_drivers.hostdev.host import Host, Scan
from drakit_drivers.hostdev.policy import (
    HostDevicePolicySpec,
    HostDevicesConfig,
    HostPolicy,
    policies_of_node,
    policy_of_file,
)
from drakit_drivers.hostdev.policy_devices import Published, attributes, capacity, left_out

logger = logging.getLogger(__name__)

_FIRST_LABELS_SECONDS = 0.1
"""Polling interval for the node's labels at startup, until the API session provides them."""

_POLL_SECONDS = 1.0
"""Polling interval for changed labels and released devices, so that they do not wait for a
rescan."""

_SETTLE_SECONDS = 0.1
"""Delay from an event to the scan, because a device with several nodes causes several events."""

_BETWEEN_SCANS_SECONDS = 0.5
"""Minimum time between two scans, which limits the number of scans during a burst of events."""

_REPORTED_SECONDS = 5.0
"""How long to treat a prepared device as held before the node plugin reports it as held."""

_Line = tuple[int, str, tuple[tuple[str, str], ...]]
"""A log line: its level, message and fields."""


class HostDevices(Driver[HostDevicesConfig, NoParameters, HostDevicePolicySpec]):
    """
    Publishes host devices according to policies from its configuration and from the cluster.
    """

    name: ClassVar[str] = "hostdev.drakit.dev"
    side_effects: ClassVar[bool] = False
    reports_health: ClassVar[bool] = True
    policy_resource: ClassVar[PolicyResource | None] = PolicyResource(
        group="drakit.dev", version="v1beta1", plural="hostdevicepolicies"
    )

    def __init__(self, config: HostDevicesConfig, node: Node) -> None:
        super().__init__(config, node)
        self._host = Host(config)
        self._own = {name: policy_of_file(name, spec) for name, spec in config.policies.items()}
        self._policies: dict[str, HostPolicy] = dict(self._own)
        self._scan: Scan | None = None
        self._in_use: Mapping[str, Sequence[str]] = {}
        """For each policy, a list with a clause for each device that claims hold in a form that the
        policy no longer offers."""
        self._held: Mapping[str, HeldDevice] = {}
        self._prepared: dict[str, tuple[float, HeldDevice]] = {}
        """Recently prepared devices, keyed by name, with the time until which they are treated as
        held (loop clock)."""
        self._preparing = asyncio.Lock()
        self._logged = frozenset[_Line]()
        self._events: HostEvents | None = None

    def apply_policies(self, policies: Mapping[str, HostPolicy]) -> None:
        self._policies = {**policies, **self._own}
        if self._events:
            self._events.notify()

    async def devices(self) -> AsyncIterator[Inventory]:
        last: Inventory | None = None
        events = HostEvents(udev_root=self.config.udev_root, subsystems=self._subsystems)
        with closing(events):
            self._events = events
            while True:
                await self._labels_known()
                events.acknowledge()
                labels = self.node.labels
                current = await self._inventory(labels)
                if current != last:
                    last = current
                    yield current
                await self._pause(events, labels)
                events.watch_udev()

    async def _inventory(self, labels: Mapping[str, str] | None) -> Inventory:
        policies = policies_of_node(self._policies.values(), labels)
        self._held = self.held_devices()
        scan = await asyncio.to_thread(
            self._host.scan, policies, before=self._scan, held=self._held
        )
        selection = scan.selection
        self._scan = scan
        self._in_use = _in_use(scan, self._held)
        self._log(scan)
        fallback = None
        if selection.copies:
            whole = [each for each in selection.devices.values() if not _is_shared(each)]
            fallback = [
                *(_described(each) for each in whole),
                *(_described(each, is_copy=True) for each in selection.copies.values()),
            ]
        return Inventory(
            devices=[_described(each) for each in selection.devices.values()],
            fallback=fallback,
            rejected=_rejected(scan),
            policies=_outcomes(policies, scan, self._in_use),
            withdrawn=scan.withdrawn,
        )

    async def prepare_claims(
        self, claims: Sequence[AllocatedClaim[NoParameters]]
    ) -> Mapping[str, Sequence[Edits] | Exception]:
        # Prepare one batch at a time. Otherwise, two pods could get two nodes of one function.
        async with self._preparing:
            now = asyncio.get_running_loop().time()
            self._prepared = {name: its for name, its in self._prepared.items() if its[0] > now}
            recent = {name: device for name, (_, device) in self._prepared.items()}
            scan = await asyncio.to_thread(
                self._host.scan,
                policies_of_node(self._policies.values(), self.node.labels),
                before=self._scan,
                held={**recent, **self.held_devices()},
                only={device.name for claim in claims for device in claim.devices},
            )
            results = {claim.claim.uid: self._edits(claim.devices, scan) for claim in claims}
            for claim in claims:
                result = results[claim.claim.uid]
                if isinstance(result, DriverError):
                    continue
                for device, edits in zip(claim.devices, result, strict=True):
                    if not device.admin_access:
                        held = _held_device(claim.claim, device, edits)
                        self._prepared[device.name] = now + _REPORTED_SECONDS, held
        return results

    def _edits(
        self, devices: Sequence[AllocatedDevice[NoParameters]], scan: Scan
    ) -> Sequence[Edits] | DriverError:
        """Return the edits for the devices of a claim."""
        edits: list[Edits] = []
        try:
            for device in devices:
                found = self._find(device.name, scan)
                view, name = found.spec.container, device.name
                edits.append(
                    container_edits(view, found.hosts, request=device.request, device=name)
                )
        except DriverError as error:
            return error
        problem = shared_path(edits)
        return DriverError(problem) if problem else edits

    def _find(self, name: str, scan: Scan) -> Published:
        """Return a device in the scan. Raises DriverError if it cannot be prepared now."""
        found = scan.selection.find(name)
        if found and not (found.doubt and found.doubt.kind == "unreadable"):
            return found
        refused = scan.selection.refused.get(name)
        if found and found.doubt:
            path, reason = found.host.path, found.doubt.message
        elif refused:
            path, reason = refused.published.host.path, refused.refusal.message
        elif self._lacks_labels():
            raise DriverError(
                f"device {name} cannot be found, because the labels of node {self.node.name} are "
                "unknown; the pod starts when the node plugin has read them"
            )
        elif scan.unknown:
            raise DriverError(
                f"device {name} cannot be found on node {self.node.name}: "
                f"{'; '.join(scan.unknown.values())}; the pod starts when the driver can read it, "
                "or delete the pod to get another device"
            )
        else:
            raise DriverError(
                f"device {name} is no longer on node {self.node.name}; connect {name} again, or "
                "delete the pod to get another device"
            )
        raise DriverError(
            f"device {name} ({path}) cannot be allocated to a pod: {reason}; free it on node "
            f"{self.node.name}, or delete the pod to get another device"
        )

    async def _labels_known(self) -> None:
        """
        Wait for the node's labels if a policy has a node selector.

        Without the labels, it is unknown whether the policy still applies, so do not list devices
        yet: published devices remain. Waiting at startup costs nothing, because nothing can be
        published without the API server.
        """
        while self._lacks_labels():  # noqa: ASYNC110  (set from another thread)
            await asyncio.sleep(_FIRST_LABELS_SECONDS)

    def _lacks_labels(self) -> bool:
        selective = any(policy.spec.node_selector is not None for policy in self._policies.values())
        return selective and self.node.labels is None

    async def _pause(self, events: HostEvents, labels: object) -> None:
        """Wait until the next scan is due. Any of these triggers it: an event, changed node labels,
        a claim that releases or renews a device that the last scan is waiting for, or the end of
        the rescan interval."""
        left = self.config.rescan_interval.total_seconds()
        await asyncio.sleep(_BETWEEN_SCANS_SECONDS)
        left -= _BETWEEN_SCANS_SECONDS
        while left > 0 and self.node.labels == labels and not self._is_released():
            if await events.wait(min(left, _POLL_SECONDS)):
                await asyncio.sleep(_SETTLE_SECONDS)
                return
            left -= _POLL_SECONDS

    def _is_released(self) -> bool:
        scan = self._scan
        waits = scan is not None and (scan.selection.waits_for_release or bool(self._in_use))
        return waits and self.held_devices() != self._held

    def _subsystems(self) -> set[str]:
        return {name for each in self._policies.values() for name in each.spec.subsystems}

    def _log(self, scan: Scan) -> None:
        now = frozenset(
            (level, message, tuple(facts.items())) for level, message, facts in _diagnostics(scan)
        )
        for level, message, facts in now - self._logged:
            logger.log(level, message, extra=dict(facts))
        self._logged = now


def _held_device(
    claim: ClaimReference, device: AllocatedDevice[NoParameters], edits: Edits
) -> HeldDevice:
    nodes = tuple(
        HeldNode(type=n.type or "c", major=n.major, minor=n.minor, identity=n.identity or "")
        for n in edits.device_nodes
    )
    shares = () if device.share_id is None else (device.consumed_capacity,)
    return HeldDevice(claims=(claim,), nodes=nodes, shares=shares)


def _is_shared(published: Published) -> bool:
    return published.spec.sharing.mode == "Capacity"


def _described(published: Published, *, is_copy: bool = False) -> Device:
    doubt, evicts = published.doubt, published.spec.on_vanish == "Evict"
    health = Health.healthy()
    taints: tuple[Taint, ...] = ()
    if doubt:
        # Evict without a grace period, because the old number may now belong to another device.
        effect = "NoExecute" if doubt.kind == "renumbered" and evicts else "NoSchedule"
        taints = (Taint(key=f"{HostDevices.name}/{doubt.kind}", effect=effect),)
        if doubt.kind == "renumbered":
            health = Health.unhealthy(doubt.message)
        elif doubt.kind == "unreadable":
            health = Health.unknown(doubt.message)
    return Device(
        name=published.name,
        attributes=attributes(published),
        capacity=capacity(published, is_copy=is_copy),
        allow_multiple_allocations=_is_shared(published) and not is_copy,
        taints=taints,
        health=health,
        evict_if_gone=evicts,
        prepare_again=doubt is not None and doubt.prepare_again,
    )


# ------------------------------------------------------------ reports


def _rejected(scan: Scan) -> list[RejectedDevice]:
    """Return the devices that a policy matches, but that are not published."""
    found: dict[tuple[str, str], RejectedDevice] = {}
    for refused in scan.selection.refused.values():
        published, refusal = refused.published, refused.refusal
        # Copies of a device are reported once.
        found[published.policy.name, published.host.path] = RejectedDevice(
            device=published.host.path,
            reason=refusal.reason,
            message=refusal.message,
            policy=published.policy.name,
        )
    for place in scan.misplaced:
        found[place.policy, place.path] = RejectedDevice(
            device=place.path,
            reason="WrongKind",
            message=f"its subsystem is {place.subsystem}; correct match.subsystem of the policy",
            policy=place.policy,
        )
    for twin in scan.twins:
        found[twin.policy, twin.path] = RejectedDevice(
            device=twin.path,
            reason="NoIdentity",
            message=f"another device claims its link {twin.link}, which leads to that device, "
            "usually because both have the same serial number; match each device by usb.path",
            policy=twin.policy,
        )
    return list(found.values())


def _in_use(scan: Scan, held: Mapping[str, HeldDevice]) -> Mapping[str, Sequence[str]]:
    """Return the conflicts between changed policies and the claims that still hold their devices,
    as clauses keyed by policy. An example is a claim that holds a whole device, which the policy
    now shares."""
    selection = scan.selection
    refused = (each.published for each in selection.refused.values())
    policies: dict[str, set[str]] = defaultdict(set)
    for each in (*selection.devices.values(), *selection.copies.values(), *refused):
        for host in each.hosts:
            policies[hardware_identity(host)].add(each.policy.name)
    found: dict[str, set[str]] = defaultdict(set)
    for name in scan.withdrawn:
        claims = sorted(map(str, held[name].claims)) or ["unknown"]
        for identity in selection.hardware.get(name, frozenset()):
            for policy in policies[identity]:
                found[policy].add(f"claim {claims[0]} holds device {name} in its former form")
    for each in selection.devices.values():
        if each.doubt and each.doubt.by_change:
            found[each.policy.name].add(each.doubt.message)
    return {policy: sorted(clauses) for policy, clauses in found.items()}


def _outcomes(
    policies: Sequence[HostPolicy], scan: Scan, in_use: Mapping[str, Sequence[str]]
) -> list[PolicyOutcome]:
    """Return the outcome of each policy on the node."""
    published = Counter(each.policy.name for each in scan.selection.devices.values())
    conflicts: dict[str, list[PolicyConflict]] = defaultdict(list)
    for overlap in scan.selection.overlaps:
        for one, other in ((overlap.owner, overlap.other), (overlap.other, overlap.owner)):
            conflicts[one].append(PolicyConflict(device=overlap.path, policy=other))
    return [
        PolicyOutcome(
            policy=policy.name,
            matched=scan.selection.matched.get(policy.name, 0),
            published=published[policy.name],
            in_use=len(in_use.get(policy.name, ())),
            in_use_by=next(iter(in_use.get(policy.name, ())), ""),
            problem="; ".join(scan.problems.get(policy.name, ())),
            conflicts=tuple(conflicts[policy.name]),
        )
        for policy in policies
    ]


def _diagnostics(scan: Scan) -> Iterator[tuple[int, str, Mapping[str, str]]]:
    """Yield log lines about devices or attributes that are not published, or whose state is
    uncertain."""
    warning, info = logging.WARNING, logging.INFO
    for subsystem, reason in scan.unknown.items():
        yield warning, "devices cannot be checked", {"subsystem": subsystem, "reason": reason}
    for name in scan.withdrawn:
        yield info, "held device is withdrawn", {"device": name}
    for policy, problems in scan.problems.items():
        for problem in problems:
            yield warning, "policy has a problem", {"policy": policy, "reason": problem}
    for place in scan.misplaced:
        facts = {"policy": place.policy, "path": place.path, "subsystem": place.subsystem}
        yield warning, "path is not in the subsystem of its matcher", facts
    for twin in scan.twins:
        facts = {"policy": twin.policy, "path": twin.path, "link": twin.link}
        yield warning, "link of a device leads to another device", facts
    for overlap in scan.selection.overlaps:
        facts = {"path": overlap.path, "policy": overlap.owner, "other": overlap.other}
        yield warning, "two policies match a device", facts
    for name, refused in scan.selection.refused.items():
        path, reason = refused.published.host.path, refused.refusal.message
        yield info, "device is not published", {"device": name, "path": path, "reason": reason}
    for name, published in scan.selection.devices.items():
        if published.doubt:
            path, reason = published.host.path, published.doubt.message
            facts = {"device": name, "path": path, "reason": reason}
            yield warning, "device is published with a taint", facts
        missing = left_out(published)
        if missing:
            # Warn only about a missing path, which selectors need. An overlong product name is less
            # important.
            level = warning if "path" in missing else logging.DEBUG
            facts = {"device": name, "attributes": ", ".join(missing)}
            yield level, "attributes are not published", facts
