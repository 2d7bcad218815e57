"""
What a claim's allocation means for one driver on one node: checks and decisions, all pure.

Fetching, storing and calling drivers is :mod:`.preparing`'s.

It must not know the API server, the checkpoint's database, drivers or gRPC.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, cast

import orjson

from drakit.device import AllocatedDevice, ClaimReference
from drakit.resource.claim import Allocation, Claim, DeviceResult, configs_for
from drakit.resource.nodeselector import NodeLabelsUnknownError, selects_node
from drakit_nodeplugin.claims.errors import (
    BadConfigError,
    ClaimNotAllocatedError,
    ClaimReplacedError,
    NoAnswerError,
    NoResultError,
    WrongNodeError,
)
from drakit_nodeplugin.claims.stored import StoredClaim, StoredDevice

__all__ = ("Step", "allocated_device", "device_keys", "next_step", "wanted_claim")


MAX_CONFIG_DEPTH = 64
"""Levels of nesting of opaque parameters: any JSON within 10 KiB would pass the API server."""


_ASKED = (
    "pool",
    "device",
    "request",
    "share_id",
    "admin_access",
    "consumed_capacity",
    "configs",
)
"""What a claim asks for of a device, in the order in which it has always been digested."""


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
    UNDO = "undo"
    """Its undoing was begun: that is finished first, then it is new."""


def wanted_claim(
    claim: Claim,
    *,
    reference: ClaimReference,
    driver: str,
    node: str,
    labels: Mapping[str, str] | None,
    boot_id: str,
    side_effects: bool = True,
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
        # They come from the API server: until it has answered, the checkpoint's word may do.
        raise NoAnswerError(claim=name, cause=f"the labels of node {node} are not known") from None
    if not here:
        raise WrongNodeError(claim=name, node=node)
    devices = tuple(
        StoredDevice(
            pool=result.pool,
            device=result.device,
            request=result.request,
            share_id=result.share_id,
            admin_access=result.admin_access,
            consumed_capacity=result.consumed_capacity,
            configs=_parameters(claim.allocation, result, claim=name),
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
        side_effects=side_effects,
    )


def _parameters(
    allocation: Allocation, result: DeviceResult, *, claim: str
) -> tuple[Mapping[str, Any], ...]:
    found: list[Mapping[str, Any]] = []
    for config in configs_for(allocation, result):
        parameters: object = config.parameters
        wrong = None
        if not isinstance(parameters, dict):
            wrong = "are no JSON object"
        elif _deeper_than(MAX_CONFIG_DEPTH, cast("object", parameters)):
            wrong = f"are nested deeper than {MAX_CONFIG_DEPTH} levels"
        if wrong is not None:
            raise BadConfigError(
                claim=claim,
                request=result.request,
                source="its DeviceClass" if config.from_class else "the claim",
                driver=result.driver,
                wrong=wrong,
            )
        found.append(cast("Mapping[str, Any]", parameters))
    return tuple(found)


def _deeper_than(levels: int, value: object) -> bool:
    """Look level by level: what users nest must not end in a recursion of ours."""
    level = [value]
    for _ in range(levels):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(cast("dict[str, object]", item).values())
            elif isinstance(item, list):
                below.extend(cast("list[object]", item))
        if not below:
            return False
        level = below
    return True


def _digest(devices: tuple[StoredDevice, ...]) -> str:
    # By name: a field of what a driver answers must not change what was allocated.
    asked = [{name: getattr(device, name) for name in _ASKED} for device in devices]
    return f"{zlib.crc32(orjson.dumps(asked, default=dict)):08x}"


def next_step(old: StoredClaim | None, *, new: StoredClaim) -> Step:
    """Decide what a claim needs: its work, other devices, the same work again, or nothing."""
    if old is None:
        return Step.BEGIN
    if old.state == "unpreparing":
        return Step.UNDO
    # Configs of a rebuilt entry are not known. A device that is in use must not be undone for
    # that; preparing it again is always allowed.
    same = (
        old.devices == new.devices
        if old.allocation
        else device_keys(old.devices) == device_keys(new.devices)
    )
    if not same:
        return Step.REPLACE
    current = old.state == "prepared" and old.boot_id == new.boot_id and bool(old.allocation)
    return Step.ANSWER if current else Step.REPEAT


def device_keys(devices: Iterable[StoredDevice]) -> set[tuple[str, str, str | None]]:
    """Name devices, whatever they were asked for with: pool, device and share."""
    return {(device.pool, device.device, device.share_id) for device in devices}


def allocated_device(device: StoredDevice) -> AllocatedDevice:
    """Tell a driver of a device in its own words."""
    return AllocatedDevice(
        name=device.device,
        pool=device.pool,
        request=device.request,
        share_id=device.share_id,
        admin_access=device.admin_access,
        consumed_capacity=device.consumed_capacity,
        configs=device.configs,
    )
