"""
Reads facts about devices from drakit's own resources: NodeDeviceReports, HostDevicePolicies,
DeviceDrivers and DeviceMaintenances. The module projects raw objects to facts, and finds the facts
that explanations quote.

Only the node plugin of a node knows the messages of a driver, and whether the kubelet has
registered the driver. Without a report, both are uncertain.

Does not depend on clients.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from sys import intern

from drakit_explain.model import (
    DeviceConflict,
    DeviceID,
    DeviceSelection,
    DeviceWords,
    DriverFacts,
    DroppedField,
    MaintenanceFacts,
    PolicyFacts,
    PolicyReport,
    ReportFacts,
)
from drakit_explain.world import Name, World
from drakit_formats.resource.objects import Object, child, children, text, words

HOSTDEV = "hostdev.drakit.dev"
"""The driver to which HostDevicePolicies apply."""

UNHEALTHY = "drakit.dev/unhealthy"
"""The taint on devices that the node plugin reports as unhealthy."""

STOPPED = "drakit.dev/stopped"
"""The taint on the devices of a driver that has stopped."""

GONE = "drakit.dev/gone"
"""The taint on a device that its driver no longer lists but a claim still holds."""

MAX_UNHEALTHY = 20
"""Maximum number of unhealthy devices in a report. It is the limit in the CRD."""

MANAGED_BY, OPERATOR = "app.kubernetes.io/managed-by", "drakit-operator"
"""The label on objects that the operator creates, and the label's value."""

MAINTENANCE = "drakit.dev/maintenance"
"""The taint on devices in maintenance, set by a DeviceTaintRule or the node plugin."""

UNAVAILABLE = "drakit.dev/plugin-unavailable"
"""The taint on devices whose plugin is unavailable, set by a DeviceTaintRule that a DeviceDriver
owns."""

OUTDATED = "Outdated"
"""The condition reason in the report of a node plugin that is gone. The operator sets it."""

MAX_DROPPED = 10
MAX_POLICIES = 20
MAX_CONFLICTS = 3

# ---------------------------------------------------------------- from raw objects


def project_policy(body: Object) -> PolicyFacts:
    """Read a HostDevicePolicy."""
    metadata, device_class = child(body, "metadata"), child(body, "spec", "deviceClass")
    name, sharing = text(metadata, "name"), child(body, "spec", "sharing")
    return PolicyFacts(
        name=name,
        uid=text(metadata, "uid"),
        generation=int(metadata.get("generation") or 0),
        deleting=bool(text(metadata, "deletionTimestamp")),
        create_class=device_class.get("create") != "Never",
        class_name=text(device_class, "name") or f"{name}.drakit.dev",
        extended_resource=text(device_class, "extendedResourceName"),
        shares=int(sharing.get("users") or 0) if sharing.get("mode") == "Users" else 0,
        restricted=bool(child(body, "spec").get("allowedNamespaces")),
        evicts=child(body, "spec").get("onVanish") == "Evict",
        node_selector=child(body, "spec").get("nodeSelector"),
        status=child(body, "status"),
        version=text(metadata, "resourceVersion"),
    )


def project_driver(body: Object) -> DriverFacts:
    """Read a DeviceDriver."""
    metadata, spec = child(body, "metadata"), child(body, "spec")
    seconds = spec.get("taintAfterSeconds")
    return DriverFacts(
        name=text(metadata, "name"),
        uid=text(metadata, "uid"),
        generation=int(metadata.get("generation") or 0),
        version=text(spec, "version"),
        node_selector=spec.get("nodeSelector"),
        taint_after_seconds=None if seconds is None else int(seconds),
        is_generated=not spec and text(metadata, "labels", MANAGED_BY) == OPERATOR,
        status=child(body, "status"),
    )


def project_maintenance(body: Object) -> MaintenanceFacts:
    """Read a DeviceMaintenance."""
    metadata, spec, status = child(body, "metadata"), child(body, "spec"), child(body, "status")
    wanted, window = child(spec, "devices"), child(spec, "window")
    limit = spec.get("timeLimitSeconds")
    return MaintenanceFacts(
        name=text(metadata, "name"),
        uid=text(metadata, "uid"),
        generation=int(metadata.get("generation") or 0),
        deleting=bool(text(metadata, "deletionTimestamp")),
        selection=DeviceSelection(
            *(text(wanted, key) for key in ("driver", "pool", "device", "node", "class"))
        ),
        mode=text(spec, "mode"),
        reason=words(spec, "reason"),
        start=_seconds(text(window, "start")),
        end=_seconds(text(window, "end")) if window.get("end") else float("inf"),
        limit_seconds=float("inf") if limit is None else float(limit),
        devices=tuple(
            DeviceID(*(intern(text(each, key)) for key in ("driver", "pool", "device")))
            for each in children(status, "devices")
        ),
        drain_start=_seconds(text(status, "drainStartTime")),
        status=status,
        version=text(metadata, "resourceVersion"),
    )


def project_report(body: Object) -> ReportFacts:
    """Read a NodeDeviceReport."""
    status = child(body, "status")
    conditions = {text(each, "type"): each for each in children(status, "conditions")}
    progress, rejected = (
        conditions.get("ClaimsProgressing", {}),
        children(status, "rejectedDevices"),
    )
    stopped = (
        words(each, "message")
        for each in children(status, "endpoints")
        if text(each, "state") != "Running"
    )
    faulty = (each for each in rejected if text(each, "reason") in _FAULTS)
    return ReportFacts(
        name=text(body, "metadata", "name"),
        uid=text(body, "metadata", "uid"),
        node=text(body, "spec", "nodeName"),
        driver=text(body, "spec", "driver"),
        policies=tuple(
            _outcome(each, rejected) for each in children(status, "policies")[:MAX_POLICIES]
        ),
        policies_omitted=bool(status.get("policiesOmitted")),
        refused=text(status, "policiesRefused"),
        published=int(child(status, "devices").get("published") or 0),
        updated=_seconds(text(status, "lastUpdateTime")),
        outdated=any(text(each, "reason") == OUTDATED for each in conditions.values()),
        registration=_registration(conditions.get("Registered")),
        stopped=next(stopped, ""),
        progress=words(progress, "message") if text(progress, "status") == "False" else "",
        stuck=int(child(status, "claims").get("stuck") or 0),
        unhealthy=tuple(
            DeviceWords(
                intern(text(each, "pool")),
                intern(text(each, "device")),
                # Store equal messages once, because many devices can fail together.
                intern(words(each, "message")),
            )
            for each in children(status, "unhealthyDevices")[:MAX_UNHEALTHY]
        ),
        dropped=tuple(
            DroppedField(intern(text(each, "feature")), intern(words(each, "message")))
            for each in children(status, "droppedFields")[:MAX_DROPPED]
        ),
        rejected=int(child(status, "devices").get("rejected") or 0),
        rejected_example=next(map(_rejected, rejected), ""),
        faulty_example=next(map(_rejected, faulty), ""),
    )


_FAULTS = ("Invalid", "Refused")
"""The rejection reasons that indicate a fault, instead of an intended rejection."""


def _rejected(body: Object) -> str:
    return f"{words(body, 'device')}: {words(body, 'message') or text(body, 'reason')}"


def _seconds(time: str) -> float:
    # The API server also accepts lowercase letters in a time.
    return datetime.fromisoformat(time.upper()).timestamp() if time else 0.0


def _registration(condition: Object | None) -> str:
    if condition is None or text(condition, "status") == "True":
        return ""
    return ": ".join(filter(None, (text(condition, "reason"), words(condition, "message"))))


def _outcome(body: Object, devices: Sequence[Object]) -> PolicyReport:
    name = text(body, "name")
    rejected = [each for each in devices if text(each, "policy") == name]
    return PolicyReport(
        name=intern(name),
        uid=intern(text(body, "uid")),
        observed_generation=int(body.get("observedGeneration") or 0),
        matched=int(body.get("matched") or 0),
        published=int(body.get("published") or 0),
        generation=int(body.get("generation") or 0),
        in_use=int(body.get("inUse") or 0),
        in_use_by=text(body, "inUseBy"),
        problem=text(body, "problem"),
        conflicts=tuple(
            DeviceConflict(device=text(each, "device"), policy=text(each, "policy"))
            for each in children(body, "conflicts")[:MAX_CONFLICTS]
        ),
        rejected=len(rejected),
        rejected_example=intern(next(map(_rejected, rejected), "")),
    )


# ---------------------------------------------------------------- the content of reports


def report_of(driver: str, node: str, world: World) -> ReportFacts | None:
    """Return the report of a driver on a node."""
    return world.of(ReportFacts).get(Name("", f"{node}.{driver}"))


def not_registered(driver: str, node: str, world: World) -> str:
    """Return the state of a driver that the kubelet has not registered. Empty if the driver is
    registered, or if that is unknown."""
    report = report_of(driver, node, world)
    return report.registration if report is not None else ""


def words_of(device: DeviceID, world: World) -> str | None:
    """
    Return the message with which a driver reports a device as unhealthy. The message may be empty.

    Return None if the node's report does not contain the device, or does not contain it yet. Return
    an empty string if there is no report to wait for, or if the report is full.
    """
    report = report_of_device(device, world)
    if report is None:
        return ""
    return next(
        (
            each.message
            for each in report.unhealthy
            if (each.pool, each.device) == (device.pool, device.device)
        ),
        "" if len(report.unhealthy) >= MAX_UNHEALTHY else None,
    )


def quoted(devices: Iterable[DeviceID], world: World) -> list[str]:
    """Return the messages about unhealthy devices, each with the names of the devices."""
    names: dict[str, list[str]] = {}
    for each in devices:
        if said := words_of(each, world):
            names.setdefault(said, []).append(each.device)
    return [f"{', '.join(those)}: {said}" for said, those in names.items()]


def report_of_device(device: DeviceID, world: World) -> ReportFacts | None:
    """Return the report of the node that publishes a device, if the device's driver is built with
    drakit."""
    for each in world.slices_of_pool(device.of_pool):
        if each.place is not None and each.place.node:
            return report_of(device.driver, each.place.node, world)
    return None


def dropped_fields(drivers: Collection[str], features: Collection[str], world: World) -> str:
    """If the API server drops one of these features, return the effect on these drivers' devices,
    as a clause. Empty if it is not known to drop any."""
    for report in sorted(world.of(ReportFacts).values(), key=lambda each: each.name):
        for each in report.dropped:
            if report.driver in drivers and each.feature in features:
                return f"driver {report.driver} on node {report.node}: {each.message}"
    return ""


def policy_selector(policy: str) -> str:
    """Return the expression that selects the devices of a HostDevicePolicy."""
    return (
        f'device.driver == "{HOSTDEV}" && "policy" in device.attributes["{HOSTDEV}"] && '
        f'device.attributes["{HOSTDEV}"].policy == "{policy}"'
    )


# ---------------------------------------------------------------- shares of a policy

_SHARE = re.compile(r"-(\d{1,4})$")
"""Matches a share's number at the end of its name. More digits could be a hash."""


def share_not_offered(device: DeviceID, policy: object, world: World) -> str:
    """
    Return a clause if a HostDevicePolicy does not offer a share of a device.

    The clause is empty if that is uncertain. Without a known number of shares, the number at the
    end of a name can be part of the device's identity. The node may also not have applied the
    policy yet.

    :param policy: the device's attribute ``policy``.
    """
    if device.driver != HOSTDEV or not isinstance(policy, str):
        return ""
    found, report = world.of(PolicyFacts).get(Name("", policy)), report_of_device(device, world)
    number = _SHARE.search(device.device)
    if found is None or report is None or number is None or not found.shares:
        return ""
    applied = any(
        (each.uid, each.generation) == (found.uid, found.generation) and not each.problem
        for each in report.policies
    )
    if not applied or int(number[1]) < found.shares:
        return ""
    plural = "s" if found.shares > 1 else ""
    return (
        f"HostDevicePolicy {policy} offers only {found.shares} share{plural} of each device "
        f"(sharing.users), and this is share {int(number[1]) + 1}"
    )


def policy_of_class(name: str, world: World) -> str:
    """Return the HostDevicePolicy that controls a DeviceClass. Empty if no policy controls it."""
    found = world.device_class(name)
    policies = world.of(PolicyFacts).values() if found is not None and found.owner else ()
    return next((each.name for each in policies if found and each.uid == found.owner), "")
