"""
The kinds that the operator watches: where they are served, and how they are read.

One table for all lists and watches; other modules decide what follows from the facts.

It must not know Kopf, sessions, or the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from drakit.explain.projection import (
    project_claim,
    project_class,
    project_node,
    project_pod,
    project_slice,
    project_template,
)
from drakit.explain.world import Fact, Name
from drakit.resource.raw import Object

__all__ = (
    "CLAIMS",
    "CLASSES",
    "KINDS",
    "NODES",
    "PODS",
    "SLICES",
    "TEMPLATES",
    "Fact",
    "Kind",
    "Name",
    "name_of",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A watched kind, by the word that the API uses in paths."""

    group: str
    version: str
    plural: str
    project: Callable[[Object], Fact]
    field_selector: str = ""
    unused: tuple[tuple[str, ...], ...] = ()
    """Paths that users can fill and that no fact needs: dropped before anything is copied. The
    step ``*`` means each item of a list."""

    unknown: Object = field(default_factory=dict[str, Any], hash=False)
    """The placeholder for the rest of an unreadable object: it allows no conclusion."""

    @property
    def group_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def params(self) -> dict[str, str]:
        """Query parameters that a list must have to see the same objects as the watch."""
        return {"fieldSelector": self.field_selector} if self.field_selector else {}

    def project_unreadable(self, metadata: Mapping[str, Any]) -> Fact:
        """Return only the fact that the object exists."""
        return self.project({**self.unknown, "metadata": metadata})

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


_LABELS = ("metadata", "labels")
"""Unused by all kinds but nodes."""

_OF_CONTAINERS = (
    "args",
    "command",
    "env",
    "envFrom",
    "lifecycle",
    "livenessProbe",
    "ports",
    "readinessProbe",
    "securityContext",
    "startupProbe",
    "volumeDevices",
    "volumeMounts",
)
"""Fields of containers: of these, facts need only names and resources."""

PODS = Kind(
    group="",
    version="v1",
    plural="pods",
    project=project_pod,
    # A pod that stops pending leaves the watch as a deletion: the API server sends it as one.
    field_selector="status.phase=Pending",
    unused=(
        _LABELS,
        *(
            ("spec", containers, "*", key)
            for containers in ("containers", "initContainers")
            for key in _OF_CONTAINERS
        ),
        ("spec", "ephemeralContainers"),
        ("spec", "volumes"),
        ("spec", "affinity", "podAffinity"),
        ("spec", "affinity", "podAntiAffinity"),
        ("status", "containerStatuses"),
        ("status", "initContainerStatuses"),
    ),
)
CLAIMS = Kind(
    group="resource.k8s.io",
    version="v1",
    plural="resourceclaims",
    project=project_claim,
    unused=(
        _LABELS,
        ("spec", "devices", "config"),
        ("status", "allocation", "devices", "config"),
        ("status", "devices", "*", "data"),
        ("status", "devices", "*", "networkData"),
    ),
)
TEMPLATES = Kind(
    group="resource.k8s.io",
    version="v1",
    plural="resourceclaimtemplates",
    project=project_template,
    unused=(_LABELS, ("spec", "metadata"), ("spec", "spec", "devices", "config")),
)
CLASSES = Kind(
    group="resource.k8s.io",
    version="v1",
    plural="deviceclasses",
    project=project_class,
    unused=(_LABELS, ("spec", "config")),
    unknown={"spec": {"selectors": [{}]}},  # a selector without CEL: it may match any device
)
SLICES = Kind(
    group="resource.k8s.io",
    version="v1",
    plural="resourceslices",
    project=project_slice,
    unused=(_LABELS,),
    # A device of an unknown driver, in a pool that is never complete.
    unknown={"spec": {"pool": {"resourceSliceCount": 2**31}, "devices": [{"name": ""}]}},
)

NODES = Kind(
    group="",
    version="v1",
    plural="nodes",
    project=project_node,
    unused=(
        ("status", "images"),
        ("status", "volumesAttached"),
        ("status", "volumesInUse"),
    ),
)

# Referrers first: a list of the kinds in this order never has a pod without the claim that was
# created with it, so the claim does not count as missing.
KINDS = (PODS, CLAIMS, TEMPLATES, CLASSES, SLICES, NODES)


def name_of(body: Object) -> Name:
    """Return an object's name within its kind."""
    metadata = body["metadata"]
    return Name(metadata.get("namespace") or "", metadata["name"])
