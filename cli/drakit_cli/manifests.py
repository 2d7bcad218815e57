"""
HostDevicePolicies as YAML manifests.

It must not know where policies come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

__all__ = ("policies_text",)


class _Dumper(yaml.SafeDumper):
    """Quotes all texts that begin with a digit: parsers disagree on which of them are numbers."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    node = dumper.represent_str(text)
    if text[:1].isdigit():
        node.style = '"'
    return node


_Dumper.add_representer(str, _text)


def policies_text(policies: Mapping[str, Mapping[str, Any]]) -> str:
    """Write specs of policies, by their names."""
    manifests = [
        {
            "apiVersion": "drakit.dev/v1alpha1",
            "kind": "HostDevicePolicy",
            "metadata": {"name": name},
            "spec": dict(spec),
        }
        for name, spec in policies.items()
    ]
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False)
