"""
What a claim's allocation means for one driver on one node: checks and decisions, all pure.

Fetching, storing and calling drivers is :mod:`.preparing`'s.

It must not know the API server, the checkpoint's database, drivers or gRPC.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import cast

import orjson

from drakit.device import AllocatedDevice, ClaimReference
from drakit.resource.claim import Allocation, Claim, DeviceResult, OpaqueConfig, applies
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

__all__ = ("Step", "allocated_devices", "device_keys", "next_step", "wanted_claim")


MAX_CONFIG_DEPTH = 64
"""Levels of nesting of opaque parameters: any JSON within 10 KiB would pass the API server."""


class Step(Enum):
    """What a claim needs when the kubelet asks to prepare it."""

    BEGIN = "begin"
    """It is new."""
    REPLACE = "replace"
    """It was prepared with other devices: undo those first."""
    REPEAT = "repeat"
    """The same work again: it did not end, the node was rebooted, or the entry was rebuilt."""
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
    results = [result for result in claim.allocation.results if result.driver == driver]
    if not results:
        raise NoResultError(claim=name, driver=driver)
    configs = _configs_of(results, claim.allocation)
    texts = tuple([_text_of(config, result, claim=name) for config, result in configs])
    return StoredClaim(
        uid=reference.uid,
        namespace=reference.namespace,
        name=reference.name,
        state="preparing",
        boot_id=boot_id,
        configs=texts,
        devices=tuple(
            StoredDevice(
                pool=result.pool,
                device=result.device,
                request=result.request,
                share_id=result.share_id,
                admin_access=result.admin_access,
                consumed_capacity=result.consumed_capacity,
                configs=tuple(
                    index for index, (config, _) in enumerate(configs) if applies(config, result)
                ),
            )
            for result in results
        ),
        side_effects=side_effects,
    )


def _configs_of(
    results: Sequence[DeviceResult], allocation: Allocation
) -> list[tuple[OpaqueConfig, DeviceResult]]:
    """Return the configs that apply to any of the results, each with the first one; those of the
    class come before those of the claim, else the order is the allocation's."""
    found = [
        (config, result)
        for config in allocation.configs
        if (result := next((r for r in results if applies(config, r)), None)) is not None
    ]
    return sorted(found, key=lambda pair: not pair[0].from_class)


def _text_of(config: OpaqueConfig, result: DeviceResult, *, claim: str) -> str:
    """Return the parameters as the checkpoint keeps them; raise BadConfigError."""
    parameters: object = config.parameters
    if not isinstance(parameters, dict):
        wrong = "are no JSON object"
    elif _deeper_than(MAX_CONFIG_DEPTH, cast("object", parameters)):
        wrong = f"are nested deeper than {MAX_CONFIG_DEPTH} levels"
    else:
        try:
            return orjson.dumps(parameters, option=orjson.OPT_SORT_KEYS).decode()
        except (TypeError, ValueError) as error:
            wrong = f"are no JSON that can be stored ({error})"
    raise BadConfigError(
        claim=claim,
        request=result.request,
        source="its DeviceClass" if config.from_class else "the claim",
        driver=result.driver,
        wrong=wrong,
    )


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


def next_step(old: StoredClaim | None, *, new: StoredClaim) -> Step:
    """Decide what a claim needs: its work, other devices, the same work again, or nothing."""
    if old is None:
        return Step.BEGIN
    if old.state == "unpreparing":
        return Step.UNDO
    # Where the kubelet alone was asked, configs are not known. A device that is in use must not be
    # undone for that; preparing it again is always allowed.
    same = (
        device_keys(old.devices) == device_keys(new.devices)
        if old.rebuilt == "listed"
        else old.devices == new.devices and old.configs == new.configs
    )
    if not same:
        return Step.REPLACE
    current = old.state == "prepared" and old.boot_id == new.boot_id and old.rebuilt is None
    return Step.ANSWER if current else Step.REPEAT


def device_keys(devices: Iterable[StoredDevice]) -> set[tuple[str, str, str | None]]:
    """Name devices, whatever they were asked for with: pool, device and share."""
    return {(device.pool, device.device, device.share_id) for device in devices}


def allocated_devices(claim: StoredClaim) -> list[AllocatedDevice]:
    """Return a claim's devices as drivers get them; each has its parameters for itself."""
    return [
        AllocatedDevice(
            name=device.device,
            pool=device.pool,
            request=device.request,
            share_id=device.share_id,
            admin_access=device.admin_access,
            consumed_capacity=device.consumed_capacity,
            configs=tuple([orjson.loads(claim.configs[index]) for index in device.configs]),
        )
        for device in claim.devices
    ]
