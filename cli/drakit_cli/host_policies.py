"""
hostdev on this node, for commands: its configuration, and the policies that the daemon keeps here.

It must not know devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drakit_cli.errors import UsageError

if TYPE_CHECKING:
    from drakit_drivers.hostdev.policy import HostDevicesConfig, HostPolicy
    from drakit_nodeplugin.config import NodePluginConfig

__all__ = ("HostdevOnNode", "parse_labels", "read_hostdev")

_DRIVER = "hostdev.drakit.dev"
_ENTRY_POINT = "hostdev"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostdevOnNode:
    """The configuration of hostdev, and its policies."""

    config: HostDevicesConfig
    policies: Sequence[HostPolicy]
    """All valid policies; policies of the configuration file replace those of the cluster."""

    problems: Sequence[str]
    """Why the policies are incomplete."""


def read_hostdev(place: NodePluginConfig) -> HostdevOnNode:
    """Read the configuration and the policies; raise UsageError."""
    from pydantic import ValidationError

    from drakit.settings import describe
    from drakit_drivers.hostdev.policy import (
        HostDevicePolicySpec,
        HostDevicesConfig,
        policy_of_file,
    )
    from drakit_nodeplugin.host.policies import FILE, check, read_policies

    problems: list[str] = []
    entry = next((each for each in place.drivers if each.driver == _ENTRY_POINT), None)
    if entry is None:
        problems.append("the node plugin does not host hostdev; nothing is published")
    try:
        config = HostDevicesConfig.model_validate(entry.config if entry else {})
    except ValidationError as error:
        raise UsageError(describe(error, file="the configuration of hostdev")) from error
    file = place.drivers_directory / _DRIVER / FILE
    stored = read_policies(file, quarantine=False)
    if stored is None and file.exists():
        problems.append(f"{file} cannot be read: the policies of the cluster are not known")
    found: dict[str, HostPolicy] = {}
    for each in stored or ():
        checked = check(each, HostDevicePolicySpec)
        if checked.policy is None:
            problems.append(f"policy {each.name} is invalid: {checked.problem}")
        else:
            found[each.name] = checked.policy
    for name, spec in config.policies.items():
        found[name] = policy_of_file(name, spec)
    return HostdevOnNode(
        config=config,
        policies=list(found.values()),
        problems=problems,
    )


def parse_labels(text: str | None) -> Mapping[str, str] | None:
    """Read labels of the form ``key=value,key=value``; raise UsageError."""
    if text is None:
        return None
    labels: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise UsageError(f"--labels: {part!r} must have the form KEY=VALUE")
        labels[key] = value
    return labels
