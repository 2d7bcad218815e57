"""
The parts of a ResourceClaim that a node needs: the identity, the allocation, and its nodes.

The node plugin's claims engine decides which results belong to a driver, and whether they may be
prepared.

Does not depend on clients, gRPC, or the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drakit_formats.resource.limits import is_dns_label
from drakit_formats.resource.nodes import NodeSelector, node_selector
from drakit_formats.resource.objects import Object, child, children, text

POD_CLAIM_NAME = "resource.kubernetes.io/pod-claim-name"
"""The annotation on a claim from a template. It contains the name of the pod's entry for the claim,
which is a DNS label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceResult:
    """One allocated device (API: ``status.allocation.devices.results[]``)."""

    driver: str
    pool: str
    device: str
    request: str
    """The full name, with ``/subrequest`` if the request is a prioritized list."""

    share_id: str | None = None
    admin_access: bool = False
    consumed_capacity: Mapping[str, str] = field(default_factory=dict[str, str])
    """The consumed quantities, keyed by capacity name (DRAConsumableCapacity)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpaqueConfig:
    """The parameters for one driver (API: ``status.allocation.devices.config[]``, ``opaque``)."""

    driver: str
    parameters: Any
    """The parameters, which can have any content, because the API server checks only their size (10
    KiB)."""

    requests: tuple[str, ...] = ()
    """The requests that the config applies to, such as ``main`` or ``main/small``. Empty means all
    requests."""

    from_class: bool = False
    """Whether the config comes from the DeviceClass. If so, the claim's own parameters take
    precedence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """The scheduler's allocation of a claim (API: ``status.allocation``)."""

    results: tuple[DeviceResult, ...]
    node_selector: NodeSelector | None = None
    """The nodes on which the claim can be used. None means all nodes."""

    configs: tuple[OpaqueConfig, ...] = ()
    """The configs, in the order of the allocation. Configs of other drivers are included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A ResourceClaim, with its identity, and its allocation if it has one."""

    namespace: str
    name: str
    uid: str
    allocation: Allocation | None = None
    pod_claim_name: str | None = None
    """For a claim from a template, the name of the pod's entry for the claim
    (``spec.resourceClaims[]``)."""

    body: Object = field(default_factory=dict[str, Any], repr=False, compare=False)
    """The whole object, for the few drivers that need other fields."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def base_request(request: str) -> str:
    """Return the name that pods use for a request, such as ``main`` for ``main/small``."""
    return request.partition("/")[0]


def applies(config: OpaqueConfig, result: DeviceResult) -> bool:
    """Return whether a config applies to a result. A config for ``main`` applies to all
    alternatives of the request, and a config for ``main/small`` only to that alternative."""
    if config.driver != result.driver:
        return False
    names = {result.request, base_request(result.request)}
    return not config.requests or not names.isdisjoint(config.requests)


def parse_claim(body: Object) -> Claim:
    """Project a ResourceClaim of ``resource.k8s.io/v1``. Unknown fields are ignored."""
    metadata = body["metadata"]
    allocation = child(body, "status").get("allocation")
    # Check the value, because any user can set the annotation, and it becomes part of a path.
    pod_claim = child(metadata, "annotations").get(POD_CLAIM_NAME)
    is_label = isinstance(pod_claim, str) and is_dns_label(pod_claim)
    return Claim(
        namespace=text(metadata, "namespace"),
        name=metadata["name"],
        uid=metadata["uid"],
        allocation=None if allocation is None else _parse_allocation(allocation),
        pod_claim_name=pod_claim if is_label else None,
        body=body,
    )


def _parse_allocation(body: Object) -> Allocation:
    selector = body.get("nodeSelector")
    return Allocation(
        results=tuple(
            DeviceResult(
                driver=result["driver"],
                pool=result["pool"],
                device=result["device"],
                request=result["request"],
                share_id=result.get("shareID"),
                admin_access=bool(result.get("adminAccess")),
                consumed_capacity=result.get("consumedCapacity") or {},
            )
            for result in children(body, "devices", "results")
        ),
        node_selector=None if selector is None else node_selector(selector),
        configs=tuple(
            OpaqueConfig(
                driver=config["opaque"]["driver"],
                parameters=config["opaque"].get("parameters"),
                requests=tuple(config.get("requests") or ()),
                from_class=config.get("source") == "FromClass",
            )
            for config in children(body, "devices", "config")
            if config.get("opaque") is not None
        ),
    )
