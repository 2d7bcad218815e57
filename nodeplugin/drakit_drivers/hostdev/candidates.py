"""
Lists every device node that a policy could publish: the outcome of the present policies, and a
policy that publishes only this device.

The answers come from the driver's own scan. Each device without a policy is scanned with a
suggested policy, so that users see in advance whether the driver would refuse it.

It must not know claims: a device that a claim holds can have a different name in the running
driver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from drakit import AttributeValue, DriverError, Policy
from drakit_drivers.hostdev.attributes import attributes
from drakit_drivers.hostdev.config import HostDevicesConfig
from drakit_drivers.hostdev.dangerous import danger_of_path
from drakit_drivers.hostdev.host import Host
from drakit_drivers.hostdev.matchers import RAW_DISK_SUBSYSTEMS
from drakit_drivers.hostdev.matching import is_matched
from drakit_drivers.hostdev.policy import HostDevicePolicySpec
from drakit_drivers.hostdev.selection import HostPolicy, Selection
from drakit_drivers.hostdev.sysfs import HostDevice, Sysfs
from drakit_drivers.hostdev.udev import UdevDatabase

__all__ = ("Candidate", "find_candidates")

_NEVER = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A device node."""

    host: HostDevice
    attributes: Mapping[str, AttributeValue]
    """The attributes that the published device has, or would have."""

    names: tuple[str, ...] = ()
    """The names under which it is published: several if it has copies."""

    policy: str | None = None
    """The policy that matches it; None if none does."""

    reason: str | None = None
    """The reason why it is not published although a policy matches it."""

    refusal: str | None = None
    """The reason why the suggested policy would not publish it."""

    others: tuple[str, ...] = ()
    """Further policies that match it, and do not get it."""

    suggestion: Mapping[str, Any] | None = None
    """The spec of a policy that publishes only this device; None if there is none."""


def find_candidates(
    config: HostDevicesConfig,
    policies: Sequence[HostPolicy],
    *,
    subsystem: str | None = None,
) -> list[Candidate]:
    """
    Find the device nodes of this host. Blocks for some seconds on a host with many devices. Raises
    DriverError if a file of a device cannot be read.

    :param policies: the policies of the node, the first in conflicts first.
    :param subsystem: only devices of this subsystem.
    """
    host = Host(config)
    hosts = list(_hosts(config, subsystem))
    selection = host.scan(policies).selection
    outcomes = _outcomes(selection)
    specs = {each.path: spec for each in hosts if (spec := _suggestion(each, hosts))}
    tried = _try_out(host, specs)
    others: dict[str, set[str]] = defaultdict(set)
    for overlap in selection.overlaps:
        others[overlap.path].add(overlap.other)
    return [
        _candidate(
            each,
            outcomes.get(each.path),
            tried.get(each.path, _Outcome()),
            others=tuple(sorted(others[each.path])),
            suggestion=specs.get(each.path),
        )
        for each in hosts
    ]


def _hosts(config: HostDevicesConfig, subsystem: str | None) -> Iterator[HostDevice]:
    sysfs = Sysfs(config.sys_root, UdevDatabase(config.udev_root))
    names = {subsystem} if subsystem else set(_subsystems(config))
    seen: set[tuple[str, str]] = set()
    for name in sorted(names - set(RAW_DISK_SUBSYSTEMS)):
        found = sysfs.devices(name, wanted=lambda path: True)
        if found.unreadable:
            raise DriverError(found.unreadable)
        for device in found.devices:
            # /sys/class and /sys/bus can list one device twice.
            if (device.type, device.number) not in seen:
                seen.add((device.type, device.number))
                yield device


def _subsystems(config: HostDevicesConfig) -> Iterator[str]:
    if (config.sys_root / "block").is_dir():
        yield "block"
    for directory in ("class", "bus"):
        try:
            yield from (entry.name for entry in (config.sys_root / directory).iterdir())
        except OSError:
            continue


def _candidate(
    host: HostDevice,
    outcome: _Outcome | None,
    tried: _Outcome,
    *,
    others: tuple[str, ...],
    suggestion: HostDevicePolicySpec | None,
) -> Candidate:
    refusal = tried.reason
    if tried.is_unsupported:
        suggestion = None
    elif suggestion is None:
        refusal = "no matcher describes only this device"
        danger = danger_of_path(host.path)
        if danger:
            refusal = f"it is dangerous: it {danger}"
    used = outcome or tried
    return Candidate(
        host=host,
        attributes={key: value for key, value in used.attributes.items() if key != "policy"},
        names=outcome.names if outcome else (),
        policy=outcome.policy if outcome else None,
        reason=outcome.reason if outcome else None,
        others=others,
        refusal=refusal,
        suggestion=suggestion
        and suggestion.model_dump(mode="json", by_alias=True, exclude_defaults=True),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """The outcome of a selection for a device node."""

    policy: str | None = None
    names: tuple[str, ...] = ()
    reason: str | None = None
    is_unsupported: bool = False
    """Whether no policy can publish it."""

    attributes: Mapping[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])


def _outcomes(selection: Selection) -> dict[str, _Outcome]:
    """Return the outcome of a selection for each device node, by its path."""
    found: dict[str, _Outcome] = {}
    for refused in selection.refused.values():
        for host in refused.published.hosts:
            found[host.path] = _Outcome(
                policy=refused.published.policy_name,
                reason=refused.refusal.message,
                is_unsupported=refused.refusal.reason == "NotSupported",
                attributes=attributes(refused.published),
            )
    for name, published in selection.devices.items():
        for host in published.hosts:
            known = found.get(host.path)
            found[host.path] = _Outcome(
                policy=published.policy_name,
                names=(*(known.names if known else ()), name),
                attributes=attributes(published),
            )
    return found


# ------------------------------------------------------------ policies for one device


def _try_out(host: Host, specs: Mapping[str, HostDevicePolicySpec]) -> dict[str, _Outcome]:
    """Scan with the suggested policies; return their outcomes by path."""
    policies = [
        Policy(name=f"p{number}", created=_NEVER, generation=0, spec=spec)
        for number, spec in enumerate(specs.values())
    ]
    return _outcomes(host.scan(policies).selection)


def _suggestion(host: HostDevice, hosts: Sequence[HostDevice]) -> HostDevicePolicySpec | None:
    """Return the first spec that matches this device and no other."""
    beside = [each for each in hosts if each.subsystem == host.subsystem]
    for body in _suggestions(host):
        try:
            spec = HostDevicePolicySpec.model_validate(body)
        except ValidationError:  # a dangerous path, or a serial number that is too long
            continue
        matching = [each for each in beside if is_matched(spec, each)]
        if [each.path for each in matching] == [host.path]:
            return spec
        if host in matching and _is_one_unit(matching):
            return spec.model_copy(update={"group": "Unit"})
    return None


def _is_one_unit(hosts: Sequence[HostDevice]) -> bool:
    return hosts[0].unit is not None and all(each.unit == hosts[0].unit for each in hosts)


def _suggestions(host: HostDevice) -> Iterator[dict[str, Any]]:
    """Return specs, the most stable description of the device first."""
    by_id = sorted(link for link in host.links if "/by-id/" in link)
    by_path = sorted(link for link in host.links if "/by-path/" in link)
    for matcher in (
        *_of_usb(host),
        # World wide names sort last, and are the most stable ones.
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
