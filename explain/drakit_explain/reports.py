"""
drakit's own resources as facts: HostDevicePolicies, and the reports of the nodes.

It must not know clients, or what is done with the facts.
"""

from __future__ import annotations

from dataclasses import dataclass

from drakit_formats.resource.raw import Object, child, children, text


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyFacts:
    """A HostDevicePolicy, as far as its DeviceClass and its status need it."""

    name: str
    uid: str
    generation: int
    deleting: bool = False
    create_class: bool = True
    class_name: str = ""
    """The name of its DeviceClass."""

    extended_resource: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceConflict:
    """A device that another policy matches, too."""

    device: str
    policy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyReport:
    """The outcome of a policy on one node."""

    name: str
    observed_generation: int
    matched: int
    published: int
    problem: str = ""
    conflicts: tuple[DeviceConflict, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportFacts:
    """A NodeDeviceReport."""

    name: str
    uid: str
    node: str
    driver: str
    policies: tuple[PolicyReport, ...] = ()
    refused: str = ""
    """Why the driver refused its policies."""


def project_policy(body: Object) -> PolicyFacts:
    """Read a HostDevicePolicy."""
    metadata, device_class = child(body, "metadata"), child(body, "spec", "deviceClass")
    name = text(metadata, "name")
    return PolicyFacts(
        name=name,
        uid=text(metadata, "uid"),
        generation=int(metadata.get("generation") or 0),
        deleting=bool(text(metadata, "deletionTimestamp")),
        create_class=device_class.get("create") is not False,
        class_name=text(device_class, "name") or f"{name}.drakit.dev",
        extended_resource=text(device_class, "extendedResourceName"),
    )


def project_report(body: Object) -> ReportFacts:
    """Read a NodeDeviceReport."""
    return ReportFacts(
        name=text(body, "metadata", "name"),
        uid=text(body, "metadata", "uid"),
        node=text(body, "spec", "nodeName"),
        driver=text(body, "spec", "driver"),
        policies=tuple(_outcome(each) for each in children(body, "status", "policies")),
        refused=text(body, "status", "policiesRefused"),
    )


def _outcome(body: Object) -> PolicyReport:
    return PolicyReport(
        name=text(body, "name"),
        observed_generation=int(body.get("observedGeneration") or 0),
        matched=int(body.get("matched") or 0),
        published=int(body.get("published") or 0),
        problem=text(body, "problem"),
        conflicts=tuple(
            DeviceConflict(device=text(each, "device"), policy=text(each, "policy"))
            for each in children(body, "conflicts")
        ),
    )
