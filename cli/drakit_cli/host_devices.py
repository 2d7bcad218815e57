"""
Reads hostdev's configuration on this node and the policies that the daemon stores here. ``drakit
node devices`` lists the device nodes, each with hostdev's result.

Does not depend on how devices are found: hostdev scans them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from drakit_cli.answers import CommandError, UsageError, table, visible
from drakit_cli.place import find_place
from drakit_formats import crds

if TYPE_CHECKING:
    from drakit_drivers.hostdev.candidates import Candidate
    from drakit_drivers.hostdev.policy import HostDevicesConfig, HostPolicy
    from drakit_nodeplugin.config import NodePluginConfig

# ---------------------------------------------------------------- configuration and policies

_DRIVER = "hostdev.drakit.dev"
_ENTRY_POINT = "hostdev"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostdevOnNode:
    """The configuration of hostdev, and its policies."""

    config: HostDevicesConfig
    policies: Sequence[HostPolicy]
    """All valid policies. Policies in the configuration file replace the cluster's policies of the
    same name."""

    problems: Sequence[str]
    """The reasons why the policies are incomplete."""


def read_hostdev(place: NodePluginConfig) -> HostdevOnNode:
    """Read the configuration and the policies. Raises UsageError."""
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
    return HostdevOnNode(config=config, policies=list(found.values()), problems=problems)


def parse_labels(text: str | None) -> Mapping[str, str] | None:
    """Read labels of the form ``key=value,key=value``. Raises UsageError."""
    if text is None:
        return None
    labels: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise UsageError(f"--labels: {part!r} must have the form KEY=VALUE")
        labels[key] = value
    return labels


# ---------------------------------------------------------------- manifests


class _Dumper(yaml.SafeDumper):
    """Quotes all strings that begin with a digit, because parsers disagree on which of them are
    numbers."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    node = dumper.represent_str(text)
    if text[:1].isdigit():
        node.style = '"'
    return node


_Dumper.add_representer(str, _text)


def policies_text(policies: Mapping[str, Mapping[str, Any]]) -> str:
    """Return YAML with the specs of policies, keyed by name."""
    manifests = [
        {
            "apiVersion": crds.API_VERSION,
            "kind": "HostDevicePolicy",
            "metadata": {"name": name},
            "spec": dict(spec),
        }
        for name, spec in policies.items()
    ]
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False)


# ---------------------------------------------------------------- devices

_HEAD = ("PATH", "SUBSYSTEM", "DEVICE", "POLICY", "DESCRIPTION", "STATE")


def devices(options: argparse.Namespace) -> int:
    """Print the devices. Return 1 if a requested device does not exist, or if the policies are
    incomplete."""
    hostdev = read_hostdev(find_place(options))
    labels = parse_labels(options.labels)
    found = candidates(hostdev, labels=labels, subsystem=options.subsystem)
    problems = [*hostdev.problems, *_missing(options.paths, found)]
    if options.paths:
        found = [each for each in found if not set(options.paths).isdisjoint(each.host.paths)]
    if options.json:
        print(json.dumps({"devices": [as_json(each) for each in found]}, indent=2))
    elif options.policy:
        print(_policies(found), end="")
    elif found:
        print(table(_HEAD, [_row(each) for each in found]))
    else:
        print("no devices found")
    for problem in problems:
        print(visible(problem), file=sys.stderr)
    selective = [each.name for each in hostdev.policies if each.spec.node_selector is not None]
    if selective and labels is None:
        names = ", ".join(sorted(selective))
        print(
            f"policies with a node selector are not considered: {names}; pass the labels of this "
            "node with --labels",
            file=sys.stderr,
        )
    return 1 if problems else 0


def candidates(
    hostdev: HostdevOnNode, *, labels: Mapping[str, str] | None = None, subsystem: str | None = None
) -> list[Candidate]:
    """Find the devices of this node. Raises CommandError."""
    from drakit import DriverError
    from drakit_drivers.hostdev.candidates import find_candidates
    from drakit_drivers.hostdev.policy import policies_of_node

    if subsystem and not re.fullmatch(r"[A-Za-z0-9_-]+", subsystem):
        raise UsageError(f"--subsystem: {subsystem!r} is not a subsystem, such as tty or block")
    try:
        return find_candidates(
            hostdev.config, policies_of_node(hostdev.policies, labels), subsystem=subsystem
        )
    except DriverError as error:
        raise CommandError(str(error)) from error


def as_json(candidate: Candidate) -> dict[str, Any]:
    """Return a device as JSON."""
    host = candidate.host
    return {
        "path": host.path,
        "links": list(host.links),
        "subsystem": host.subsystem,
        "devices": list(candidate.names),
        "policy": candidate.policy,
        "otherPolicies": list(candidate.others),
        "state": _state(candidate),
        "attributes": {
            key: value if isinstance(value, str | int | bool) else str(value)
            for key, value in candidate.attributes.items()
        },
        "suggestedPolicy": candidate.suggestion,
        "suggestedPolicyRefusal": candidate.refusal,
    }


def _missing(paths: Collection[str], found: Sequence[Candidate]) -> list[str]:
    known = {path for each in found for path in each.host.paths}
    return [
        f"{path} is not a device that hostdev can publish; check the path, and --subsystem"
        for path in paths
        if path not in known
    ]


def _row(candidate: Candidate) -> tuple[str, ...]:
    host, names = candidate.host, candidate.names
    device = names[0] + (f" (+{len(names) - 1})" if len(names) > 1 else "") if names else ""
    place = (host.path, host.subsystem, device, candidate.policy or "")
    return (*place, _description(candidate), _state(candidate))


def _state(candidate: Candidate) -> str:
    others = f"; also matched by {', '.join(candidate.others)}" if candidate.others else ""
    if candidate.names:
        return f"published{others}"
    if candidate.policy:
        return f"not published: {candidate.reason}{others}"
    refusal = f"; hostdev would refuse it: {candidate.refusal}" if candidate.refusal else ""
    return f"no policy matches it{refusal}"


def _description(candidate: Candidate) -> str:
    usb, pci = candidate.host.usb, candidate.host.pci
    if usb:
        words = (f"{usb.vendor_id}:{usb.product_id}", usb.manufacturer, usb.product, usb.serial)
        return " ".join(word for word in words if word)
    if pci:
        return f"PCI {pci.bus_id}"
    return candidate.host.driver or ""


def _policies(found: Sequence[Candidate]) -> str:
    """Return YAML with a policy for each device. Device nodes with the same suggestion share a
    policy."""
    parts: dict[str, str] = {}
    for each in found:
        if each.suggestion is None:
            parts[each.host.path] = f"# {each.host.path}: {each.refusal}\n"
            continue
        name = re.sub(r"[^a-z0-9]+", "-", each.host.path.removeprefix("/dev/").lower()).strip("-")
        text = policies_text({(name or "device")[:40].strip("-"): each.suggestion})
        spec = json.dumps(each.suggestion, sort_keys=True)
        comment = f"# {each.host.path}"
        if each.policy:
            comment += f": policy {each.policy} matches it already"
        if each.refusal:
            comment += f": hostdev would refuse it: {each.refusal}"
        parts.setdefault(spec, f"{visible(comment)}\n{text}")
    return "---\n".join(parts.values())
