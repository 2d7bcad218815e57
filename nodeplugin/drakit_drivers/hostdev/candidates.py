"""
Lists every device node that a policy could publish, with the outcome of the current policies, and
with a suggested policy that publishes only this device.

The results come from the driver's own scan code. Each device that has a suggested policy is also
scanned with that policy, so that users see in advance whether the driver would refuse to publish
it.

Does not depend on claims: a device that a claim holds can have a different name in the running
driver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from drakit import AttributeValue, DriverError
from drakit_drivers.hostdev.dangerous import danger_of_path
from drakit_drivers.hostdev.hardware import HostDevice
from drakit_drivers.hostdev.host import Host
from drakit_drivers.hostdev.matching import RAW_DISK_SUBSYSTEMS, is_matched
from drakit_drivers.hostdev.policy import (
    HostDevicePolicySpec,
    HostDevicesConfig,
    HostPolicy,
    Sharing,
    policy_of_file,
)
from drakit_drivers.hostdev.policy_devices import Published, Selection, attributes
from drakit_drivers.hostdev.sysfs import Sysfs


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A device node that a policy could publish."""

    host: HostDevice
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])
    """The attributes that the published device has, or would have."""

    names: tuple[str, ...] = ()
    """The names under which the device is published. More than one if it has copies."""

    policy: str | None = None
    """The policy that decides about the device, or None."""

    reason: str | None = None
    """The reason why the device is not published although a policy matches it."""

    refusal: str | None = None
    """The reason why the suggested policy would not publish the device."""

    others: tuple[str, ...] = ()
    """Other policies that match the device but do not get it."""

    suggestion: Mapping[str, Any] | None = None
    """The spec of a policy that publishes only this device, or None."""


def find_candidates(
    config: HostDevicesConfig, policies: Sequence[HostPolicy], *, subsystem: str | None = None
) -> list[Candidate]:
    """
    Find the candidates on this host. Blocks, for a few seconds on a host with many devices. Raises
    DriverError if a device's file cannot be read.

    :param policies: the policies of the node, in order of precedence.
    :param subsystem: only devices of this subsystem.
    """
    host = Host(config)
    hosts = list(_hosts(config, subsystem))
    selection = host.scan(policies).selection
    specs = {each.path: spec for each in hosts if (spec := _suggestion(each, hosts))}
    # Let every suggested policy share its device: two nodes of one function would otherwise
    # conflict.
    shared = {"sharing": Sharing(mode="Users", users=1)}
    trials = (each.model_copy(update=shared) for each in specs.values())
    trial = host.scan([policy_of_file(f"p{n}", each) for n, each in enumerate(trials)]).selection
    unsupported = {
        node.path
        for each in trial.refused.values()
        if each.refusal.reason == "NotSupported"
        for node in each.published.hosts
    }
    outcomes, tried = _outcomes(selection), _outcomes(trial)
    others: dict[str, set[str]] = defaultdict(set)
    for overlap in selection.overlaps:
        others[overlap.path].add(overlap.other)

    def candidate(node: HostDevice) -> Candidate:
        at_trial = tried.get(node.path, Candidate(host=node))
        outcome = outcomes.get(node.path)
        outcome = outcome or Candidate(host=node, attributes=at_trial.attributes)
        spec = specs.get(node.path)
        refusal = at_trial.reason
        if spec is None:
            danger = danger_of_path(node.path)
            refusal = (
                f"it is dangerous: it {danger}"
                if danger
                else "no matcher describes only this device"
            )
        elif node.path in unsupported:
            spec = None
        return replace(
            outcome,
            refusal=refusal,
            others=tuple(sorted(others[node.path])),
            suggestion=spec and spec.model_dump(mode="json", by_alias=True, exclude_defaults=True),
        )

    return [candidate(node) for node in hosts]


def _hosts(config: HostDevicesConfig, subsystem: str | None) -> Iterator[HostDevice]:
    sysfs = Sysfs(config.sys_root, udev_root=config.udev_root, dev_root=config.dev_root)
    names = {subsystem} if subsystem else set(_subsystems(config))
    seen: set[tuple[str, str]] = set()
    for name in sorted(names - set(RAW_DISK_SUBSYSTEMS)):
        found = sysfs.devices(name, wanted=lambda path: True)
        if found.unreadable:
            raise DriverError(found.unreadable)
        for device in found.devices:
            # /sys/class and /sys/bus can list the same device twice.
            if (device.type, device.number) not in seen:
                seen.add((device.type, device.number))
                yield device


def _subsystems(config: HostDevicesConfig) -> Iterator[str]:
    for directory in ("class", "bus"):
        try:
            yield from (entry.name for entry in (config.sys_root / directory).iterdir())
        except OSError:
            continue


def _outcomes(selection: Selection) -> dict[str, Candidate]:
    """Return the outcome of a selection for each device node, keyed by its path."""
    found: dict[str, Candidate] = {}
    for refused in selection.refused.values():
        found |= _outcome(refused.published, reason=refused.refusal.message)
    names: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for name, published in selection.devices.items():
        path = published.host.path
        names[path] += (name,)
        found |= _outcome(published, names=names[path])
    return found


def _outcome(
    published: Published, *, names: tuple[str, ...] = (), reason: str | None = None
) -> dict[str, Candidate]:
    facts = {key: value for key, value in attributes(published).items() if key != "policy"}
    return {
        host.path: Candidate(
            host=host, attributes=facts, names=names, policy=published.policy.name, reason=reason
        )
        for host in published.hosts
    }


# ------------------------------------------------------------ policies for one device


def _suggestion(host: HostDevice, hosts: Sequence[HostDevice]) -> HostDevicePolicySpec | None:
    """Return the first spec that matches only this device."""
    beside = [each for each in hosts if each.subsystem == host.subsystem]
    for body in _suggestions(host):
        try:
            spec = HostDevicePolicySpec.model_validate(body)
        except ValidationError:  # a dangerous path, or a serial number that is too long
            continue
        matching = [each for each in beside if is_matched(spec.match, each)]
        if [each.path for each in matching] == [host.path]:
            return spec
        if host in matching and _is_one_unit(matching):
            return spec.model_copy(update={"group": "Unit"})
    return None


def _is_one_unit(hosts: Sequence[HostDevice]) -> bool:
    return hosts[0].unit is not None and all(each.unit == hosts[0].unit for each in hosts)


def _suggestions(host: HostDevice) -> Iterator[dict[str, Any]]:
    """Yield possible specs, starting with the most stable description of the device."""
    by_id = sorted(link for link in host.links if "/by-id/" in link)
    by_path = sorted(link for link in host.links if "/by-path/" in link)
    for matcher in (
        *_of_usb(host),
        # Reverse the links: World Wide Names are the most stable, and sort last.
        *({"paths": [_as_glob(link)]} for link in reversed(by_id)),
        *_of_pci(host),
        *({"paths": [_as_glob(link)]} for link in by_path),
        {"paths": [_as_glob(host.path)]},
    ):
        yield {"match": [{"subsystem": host.subsystem, **matcher}]}


def _of_usb(host: HostDevice) -> Iterator[dict[str, Any]]:
    usb = host.usb
    if usb is None:
        return
    ids = {"vendorID": usb.vendor_id, "productID": usb.product_id}
    if usb.serial:
        ids["serial"] = usb.serial
        yield {"usb": ids}
    yield {"usb": {**ids, **({"path": usb.path} if usb.path else {"port": usb.port})}}


def _of_pci(host: HostDevice) -> Iterator[dict[str, Any]]:
    if host.pci is not None and host.usb is None:
        yield {"parent": {"subsystem": "pci", "name": host.pci.bus_id}}


def _as_glob(path: str) -> str:
    return "".join(f"[{sign}]" if sign in "*?[" else sign for sign in path)
