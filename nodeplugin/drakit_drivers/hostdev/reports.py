"""
The driver's reports about a scan, besides the devices: log lines, left-out devices, outcomes of
policies.

It must not know the rules that find or name devices.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drakit import LeftOut, PolicyConflict, PolicyOutcome
from drakit_drivers.hostdev import attributes
from drakit_drivers.hostdev.host import Scan
from drakit_drivers.hostdev.selection import HostPolicy

__all__ = ("Diagnostic", "diagnostics", "left_out", "outcomes")


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """A log line. Equal diagnostics are one: a rescan without a change logs nothing."""

    level: int
    message: str
    facts: tuple[tuple[str, str], ...]


def left_out(scan: Scan) -> list[LeftOut]:
    """Return the devices that a policy matches, and that are not published."""
    found: dict[tuple[str, str], LeftOut] = {}
    for refused in scan.selection.refused.values():
        published, refusal = refused.published, refused.refusal
        # Copies of one device count as one.
        found[published.policy_name, published.host.path] = LeftOut(
            device=published.host.path,
            reason=refusal.reason,
            message=refusal.message,
            policy=published.policy_name,
        )
    for place in scan.misplaced:
        found[place.policy, place.path] = LeftOut(
            device=place.path,
            reason="WrongKind",
            message=f"its subsystem is {place.subsystem}; correct match.subsystem of the policy",
            policy=place.policy,
        )
    return list(found.values())


def outcomes(policies: Sequence[HostPolicy], scan: Scan) -> list[PolicyOutcome]:
    """Return the outcome of each policy of the node."""
    published = Counter(each.policy_name for each in scan.selection.devices.values())
    conflicts: dict[str, list[PolicyConflict]] = defaultdict(list)
    for overlap in scan.selection.overlaps:
        for one, other in ((overlap.owner, overlap.other), (overlap.other, overlap.owner)):
            conflicts[one].append(PolicyConflict(device=overlap.path, policy=other))
    return [
        PolicyOutcome(
            policy=policy.name,
            matched=scan.selection.matched.get(policy.name, 0),
            published=published[policy.name],
            problem="; ".join(scan.problems.get(policy.name, ())),
            conflicts=tuple(conflicts[policy.name]),
        )
        for policy in policies
    ]


def diagnostics(scan: Scan) -> Iterator[Diagnostic]:
    """Report devices, or attributes, that are not published or not certain."""
    for subsystem, reason in scan.unknown.items():
        yield _diagnostic(
            logging.WARNING, "devices cannot be checked", subsystem=subsystem, reason=reason
        )
    for name in scan.withdrawn:
        yield _diagnostic(logging.INFO, "held device is withdrawn", device=name)
    for policy, problems in scan.problems.items():
        for problem in problems:
            yield _diagnostic(
                logging.WARNING, "policy has a problem", policy=policy, reason=problem
            )
    for place in scan.misplaced:
        yield _diagnostic(
            logging.WARNING,
            "path is not in the subsystem of its matcher",
            policy=place.policy,
            path=place.path,
            subsystem=place.subsystem,
        )
    for overlap in scan.selection.overlaps:
        yield _diagnostic(
            logging.WARNING,
            "two policies match a device",
            path=overlap.path,
            policy=overlap.owner,
            other=overlap.other,
        )
    for name, refused in scan.selection.refused.items():
        yield _diagnostic(
            logging.INFO,
            "device is not published",
            device=name,
            path=refused.published.host.path,
            reason=refused.refusal.message,
        )
    for name, published in scan.selection.devices.items():
        if published.doubt:
            yield _diagnostic(
                logging.WARNING,
                "device is published with a taint",
                device=name,
                path=published.host.path,
                reason=published.doubt.message,
            )
        missing = attributes.left_out(published)
        if missing:
            yield _diagnostic(
                # Selectors need the path; a product name that is too long is less important.
                logging.WARNING if "path" in missing else logging.DEBUG,
                "attributes are not published",
                device=name,
                attributes=", ".join(missing),
            )


def _diagnostic(level: int, message: str, **facts: str) -> Diagnostic:
    return Diagnostic(level, message, tuple(facts.items()))
