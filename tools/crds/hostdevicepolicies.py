"""
The CustomResourceDefinition of HostDevicePolicy: the schema of ``spec`` is that of the model, with
additional rules. The rest of the definition is written by hand.

The rules repeat checks of :mod:`drakit_drivers.hostdev.policy`, so that the API server rejects a
mistake at once. Checks that need lists of dangerous paths stay in the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from drakit_drivers.hostdev.matching import RAW_DISK_SUBSYSTEMS
from drakit_drivers.hostdev.policy import HostDevicePolicySpec
from tools.crds.schema import Rules, structural

FILE = Path(__file__).resolve().parents[2] / "charts/drakit/crds/hostdevicepolicies.yaml"


def _of_selector(path: str, objects: str) -> Rules:
    return {
        path: (
            (
                "has(self.matchLabels) || has(self.matchExpressions)",
                f"write labels of {objects} below matchLabels, or requirements below "
                f"matchExpressions; to select all {objects}, omit {path.partition('.')[0]}",
            ),
        ),
        f"{path}.matchExpressions[]": (
            (
                "(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
                "operators In and NotIn need values, and the others have none",
            ),
        ),
    }


RULES: Rules = {
    "": (
        (
            "!self.match.exists(m, m.subsystem == 'block') || self.sharing.mode == 'Exclusive'",
            "block devices cannot be shared, because two pods could write to the same blocks; "
            "use sharing.mode: Exclusive",
        ),
        (
            "!self.match.exists(m, m.subsystem == 'block') || self.group == 'Node'",
            "group: Unit and group: Set are not supported for block devices; use Node",
        ),
        (
            "self.group == 'Node' || !has(self.container.path) || "
            "self.container.path.endsWith('/') || self.container.path.contains('*')",
            "with group: Unit or group: Set, container.path must end in '/', or contain '*' in its "
            "last component",
        ),
    ),
    **_of_selector("nodeSelector", "nodes"),
    **_of_selector("allowedNamespaces.selector", "namespaces"),
    "allowedNamespaces": (
        (
            "has(self.names) && size(self.names) > 0 || has(self.selector)",
            "must have names or a selector; to allow all namespaces, omit allowedNamespaces",
        ),
    ),
    "match[].subsystem": (
        (
            f"!(self in [{', '.join(repr(each) for each in RAW_DISK_SUBSYSTEMS)}])",
            "devices of this subsystem can write to mounted disks; use a CSI driver for disks",
        ),
    ),
    "match[].paths[]": (
        ("self.startsWith('/dev/')", "each path must be below /dev/"),
        (
            "!self.contains('/../') && !self.contains('//')",
            "a path must not contain '..' or empty components",
        ),
    ),
    "sharing": (
        (
            "!has(self.users) || self.mode != 'Exclusive'",
            "users needs mode: Users or mode: Capacity",
        ),
        (
            "has(self.users) || self.mode == 'Exclusive'",
            "mode: Users and mode: Capacity need users, the number of claims that can share a "
            "device",
        ),
    ),
    "container.path": (
        ("self.startsWith('/dev/') && self != '/dev/'", "the path must be below /dev/"),
    ),
    "container.env": (
        (
            "!self.exists(key, key.startsWith('HOSTDEV_'))",
            "names that begin with HOSTDEV_ are reserved for the driver",
        ),
    ),
    "deviceClass.extendedResourceName": (
        (
            "!self.matches('^([^/]+[.])?kubernetes[.]io/') && !self.startsWith('requests.')",
            "use a domain of your own: the domain kubernetes.io and the prefix requests. are "
            "reserved",
        ),
    ),
}


def _without_rules(schema: dict[str, Any]) -> None:
    schema.pop("x-kubernetes-validations", None)
    for each in schema.get("properties", {}).values():
        _without_rules(each)
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            _without_rules(schema[name])


def _close_selector(selector: dict[str, Any]) -> None:
    """Keep unknown fields, and reject them with a rule: if they were dropped, a selector would
    select more."""
    selector |= {"x-kubernetes-preserve-unknown-fields": True, "x-kubernetes-map-type": "atomic"}
    known = ["matchLabels", "matchExpressions"]
    selector["anyOf"] = [
        {"maxProperties": 1},
        {"required": known, "maxProperties": 2},
        # The rule rejects these fields, with a message.
        {"not": {"anyOf": [{"required": [name]} for name in known]}},
    ]
    selector["properties"]["matchLabels"]["minProperties"] = 1
    selector["properties"]["matchExpressions"]["minItems"] = 1


def definition() -> dict[str, Any]:
    """Return the committed CustomResourceDefinition with the model's schema of ``spec``."""
    spec = structural(HostDevicePolicySpec, RULES)
    matcher = spec["properties"]["match"]["items"]["properties"]
    excluded = matcher["exclude"]["items"]
    excluded["minProperties"] = 1
    for name in ("usb", "pci", "parent"):
        matcher[name]["minProperties"] = excluded["properties"][name]["minProperties"] = 1
    # In a list of lists, the API server's cost estimate of rules could exceed its limit.
    _without_rules(excluded)
    _close_selector(spec["properties"]["nodeSelector"])
    _close_selector(spec["properties"]["allowedNamespaces"]["properties"]["selector"])
    mounts = spec["properties"]["container"]["properties"]["mounts"]
    mounts |= {
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["containerPath"],
    }
    attribute = spec["properties"]["attributes"]["additionalProperties"]
    attribute |= {"minProperties": 1, "maxProperties": 1}
    committed = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    (version,) = committed["spec"]["versions"]
    version["schema"]["openAPIV3Schema"]["properties"]["spec"] = spec
    return committed
