"""
A ResourceClaim, as far as a node needs it: identity, allocation, and for which node that is.

Which of the results belong to a driver, and whether they may be prepared, is decided by the node
plugin's claims engine.

It must not know clients, gRPC, or the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from drakit.resource.raw import Object, child, children, text

__all__ = ("Allocation", "Claim", "DeviceResult", "base_request", "parse_claim")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceResult:
    """One allocated device (API: ``status.allocation.devices.results[]``)."""

    driver: str
    pool: str
    device: str
    request: str
    """In full, with ``/subrequest`` where the request is a prioritized list."""

    share_id: str | None = None
    admin_access: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """What the scheduler allocated (API: ``status.allocation``)."""

    results: tuple[DeviceResult, ...]
    node_selector: Object | None = None
    """Where the claim can be used; None means on any node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A ResourceClaim by its identity, with its allocation if it has one."""

    namespace: str
    name: str
    uid: str
    allocation: Allocation | None = None

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def base_request(request: str) -> str:
    """Give the name by which pods refer to a request: ``main`` for ``main/small``."""
    return request.partition("/")[0]


def parse_claim(body: Object) -> Claim:
    """Project a ResourceClaim of ``resource.k8s.io/v1``; fields that it does not know are left."""
    metadata = body["metadata"]
    allocation = child(body, "status").get("allocation")
    return Claim(
        namespace=text(metadata, "namespace"),
        name=metadata["name"],
        uid=metadata["uid"],
        allocation=None if allocation is None else _parse_allocation(allocation),
    )


def _parse_allocation(body: Object) -> Allocation:
    return Allocation(
        results=tuple(
            DeviceResult(
                driver=result["driver"],
                pool=result["pool"],
                device=result["device"],
                request=result["request"],
                share_id=result.get("shareID"),
                admin_access=bool(result.get("adminAccess")),
            )
            for result in children(body, "devices", "results")
        ),
        node_selector=body.get("nodeSelector"),
    )
