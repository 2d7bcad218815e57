"""
What a claim's allocation means for one driver on one node: checks and decisions, all pure.

Fetching, storing and calling drivers is :mod:`.engine`'s.

It must not know the API server, the checkpoint's database, drivers or gRPC.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import Enum

from drakit.device import AllocatedDevice, ClaimReference
from drakit.resource.claim import Claim
from drakit.resource.nodeselector import NodeLabelsUnknownError, selects_node
from drakit_nodeplugin.claims.errors import (
    ClaimFetchError,
    ClaimNotAllocatedError,
    ClaimReplacedError,
    NoResultError,
    WrongNodeError,
)
from drakit_nodeplugin.claims.stored import StoredClaim, StoredDevice

__all__ = ("Step", "allocated_device", "next_step", "wanted_claim")


class Step(Enum):
    """What a claim needs when the kubelet asks to prepare it."""

    BEGIN = "begin"
    """It is new."""
    REPLACE = "replace"
    """It was prepared with other devices: undo those first."""
    REPEAT = "repeat"
    """The same work again: it did not end, or the node was rebooted since."""
    ANSWER = "answer"
    """Nothing but to see that its CDI file is there."""


def wanted_claim(
    claim: Claim,
    *,
    reference: ClaimReference,
    driver: str,
    node: str,
    labels: Mapping[str, str] | None,
    boot_id: str,
) -> StoredClaim:
    """
    Check a claim and give what is to be prepared of it.

    Raises a :class:`ClaimError` that says why the claim cannot be prepared here.
    """
    name = str(reference)
    if claim.uid != reference.uid:
        raise ClaimReplacedError(claim=name, uid=reference.uid, found=claim.uid)
    if claim.allocation is None:
        raise ClaimNotAllocatedError(claim=name)
    try:
        here = selects_node(claim.allocation.node_selector, name=node, labels=labels)
    except NodeLabelsUnknownError:
        raise ClaimFetchError(
            claim=name, cause=f"the labels of node {node} are not known"
        ) from None
    if not here:
        raise WrongNodeError(claim=name, node=node)
    devices = tuple(
        StoredDevice(
            pool=result.pool,
            device=result.device,
            request=result.request,
            share_id=result.share_id,
            admin_access=result.admin_access,
        )
        for result in claim.allocation.results
        if result.driver == driver
    )
    if not devices:
        raise NoResultError(claim=name, driver=driver)
    return StoredClaim(
        uid=reference.uid,
        namespace=reference.namespace,
        name=reference.name,
        state="preparing",
        boot_id=boot_id,
        allocation=_digest(devices),
        devices=devices,
    )


def _digest(devices: tuple[StoredDevice, ...]) -> str:
    facts = [[d.pool, d.device, d.request, d.share_id, d.admin_access] for d in devices]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def next_step(old: StoredClaim | None, *, new: StoredClaim) -> Step:
    """Decide what a claim needs: its work, other devices, the same work again, or nothing."""
    if old is None:
        return Step.BEGIN
    if old.allocation != new.allocation:
        return Step.REPLACE
    current = old.state == "prepared" and old.boot_id == new.boot_id
    return Step.ANSWER if current else Step.REPEAT


def allocated_device(device: StoredDevice) -> AllocatedDevice:
    """Tell a driver of a device in its own words."""
    return AllocatedDevice(
        name=device.device,
        pool=device.pool,
        request=device.request,
        share_id=device.share_id,
        admin_access=device.admin_access,
    )
