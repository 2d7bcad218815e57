"""
Checks a claim's allocation for one driver on one node, and decides the next step. Pure functions.

:mod:`.prepare` fetches and stores claims, and calls drivers.

Does not depend on the API server, the checkpoint database, drivers or gRPC.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, cast

import orjson

from drakit.device import (
    AllocatedClaim,
    AllocatedDevice,
    ClaimConfig,
    ClaimConsumer,
    ClaimData,
    ClaimOwner,
    ClaimReference,
    OtherDevice,
)
from drakit_formats.resource.claim import Claim, DeviceResult, OpaqueConfig, applies
from drakit_formats.resource.nodes import NodeLabelsUnknownError, is_pool_of, selects_node
from drakit_formats.resource.objects import child, children, text
from drakit_nodeplugin.claims.errors import (
    BadConfigError,
    ClaimNotAllocatedError,
    ClaimReplacedError,
    ClaimTooLargeError,
    NoResponseError,
    NoResultError,
    TooManyParametersError,
    WrongNodeError,
)
from drakit_nodeplugin.config import OpaqueParameters
from drakit_nodeplugin.state.holds import Hardware
from drakit_nodeplugin.state.records import StoredClaim, StoredDevice

MAX_CONFIG_DEPTH = 64
"""Maximum nesting depth of opaque parameters, which drivers and backends parse recursively. The API
server limits only their size (10 KiB)."""


MAX_DATA_BYTES = 64 * 1024
"""Maximum size, as JSON, of the claim data for a driver that needs more than the devices. The data
is stored in the checkpoint row, which is written three times. Annotations by themselves could have
256 KiB."""

MAX_DATA_ENTRIES = 1024
"""Maximum total number of labels, annotations, owners, consumers, configs with their requests, and
devices of other drivers. The API server limits only consumers (256), configs and devices."""

APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
"""The annotation with kubectl's copy of the object. It is omitted, because users do not write it,
and it would double the size."""


class Step(Enum):
    """The next step for a claim that the kubelet requests."""

    BEGIN = "begin"
    """The claim is new."""
    REPLACE = "replace"
    """The claim was prepared with other devices or configs. Undo that prepare first."""
    REPEAT = "repeat"
    """Prepare again: the work did not finish, the node rebooted, or the entry was rebuilt."""
    CONFIRM = "confirm"
    """The claim is prepared. Only verify the claim and its CDI file."""
    UNDO = "undo"
    """An unprepare has begun. Finish it first. After that, the claim is new."""


def wanted_claim(
    claim: Claim,
    *,
    reference: ClaimReference,
    driver: str,
    node: str,
    labels: Mapping[str, str] | None,
    boot_id: str,
    limits: OpaqueParameters,
    side_effects: bool = True,
    data: bool = False,
) -> StoredClaim:
    """
    Check a claim, and return the entry to prepare. Set `data` if the driver needs claim data in
    addition to the devices.

    Raises a :class:`ClaimError` that states why the claim cannot be prepared on this node.
    """
    results = allocated_results(claim, reference=reference, driver=driver, node=node, labels=labels)
    assert claim.allocation is not None
    applied = [
        (config, {number: r for number, r in enumerate(results) if applies(config, r)})
        for config in claim.allocation.configs
    ]
    # Sort the configs that apply: keep the order of the allocation, but put class configs before
    # claim configs.
    configs = sorted((each for each in applied if each[1]), key=lambda each: not each[0].from_class)
    return StoredClaim(
        uid=reference.uid,
        namespace=reference.namespace,
        name=reference.name,
        state="preparing",
        boot_id=boot_id,
        configs=_texts(configs, claim=str(reference), driver=driver, limits=limits),
        devices=tuple(
            StoredDevice(
                pool=result.pool,
                device=result.device,
                request=result.request,
                share_id=result.share_id,
                admin_access=result.admin_access,
                consumed_capacity=result.consumed_capacity,
                configs=tuple(
                    index for index, (_, applied) in enumerate(configs) if number in applied
                ),
            )
            for number, result in enumerate(results)
        ),
        pod_claim_name=claim.pod_claim_name,
        side_effects=side_effects,
        data=_data_of(claim, [config for config, _ in configs], driver=driver) if data else None,
    )


def allocated_results(
    claim: Claim,
    *,
    reference: ClaimReference,
    driver: str,
    node: str,
    labels: Mapping[str, str] | None,
) -> list[DeviceResult]:
    """
    Check the claim's identity and node, and return its allocation results for the driver.

    Raises a :class:`ClaimError`.
    """
    name = str(reference)
    if claim.uid != reference.uid:
        raise ClaimReplacedError(claim=name, uid=reference.uid, found=claim.uid)
    if claim.allocation is None:
        raise ClaimNotAllocatedError(claim=name)
    try:
        here = selects_node(claim.allocation.node_selector, name=node, labels=labels)
    except NodeLabelsUnknownError:
        # The labels come from the API server. Until it has responded, the checkpoint may decide.
        raise NoResponseError(claim=name, cause=f"the labels of node {node} are unknown") from None
    if not here:
        raise WrongNodeError(claim=name, node=node)
    results = [result for result in claim.allocation.results if result.driver == driver]
    if not results:
        raise NoResultError(claim=name, driver=driver)
    return results


def with_consumption(
    claim: StoredClaim,
    hardware: Hardware | None,
    *,
    node: str | None = None,
    former: StoredClaim | None = None,
) -> tuple[StoredClaim, StoredDevice | None]:
    """
    Return a claim with the consumption of its devices, and the first device that no endpoint lists,
    if any.

    The consumption of an unlisted device is taken from the claim's previous entry. If `hardware` is
    None, devices do not consume counters. The same applies to devices with admin access and, if
    `node` is set, to devices in pools that do not belong to this node, which a controller
    publishes.
    """
    known = {(d.pool, d.device): d.consumes for d in former.devices} if former else {}
    devices: list[StoredDevice] = []
    missing: StoredDevice | None = None
    for device in claim.devices:
        consumes: Mapping[str, Mapping[str, str]] | None = {}
        unlisted = node is not None and not is_pool_of(node, device.pool)
        if hardware is not None and not unlisted and not device.admin_access:
            listed = hardware.device(device.pool, device.device)
            if listed is None:
                missing = missing or device
                consumes = known.get((device.pool, device.device))
            else:
                consumes = listed.consumes
        devices.append(replace(device, consumes=consumes))
    return replace(claim, devices=tuple(devices)), missing


_Applied = tuple[OpaqueConfig, Mapping[int, DeviceResult]]
"""A config, and the results that it applies to, keyed by index."""


def _texts(
    configs: Sequence[_Applied], *, claim: str, driver: str, limits: OpaqueParameters
) -> tuple[str, ...]:
    """Return the parameters as the checkpoint stores them. Raises a :class:`ClaimError`."""
    texts: list[str] = []
    bytes_left, values_left = limits.max_bytes, limits.max_values
    for config, results in configs:
        # Count the values before serialization, which would already create a copy.
        values = _values_of(config, next(iter(results.values())), claim=claim)
        values_left -= values * len(results)
        if values_left < 0:
            raise TooManyParametersError(
                claim=claim, driver=driver, limit=f"{limits.max_values} keys and values"
            )
        text = orjson.dumps(config.parameters, option=orjson.OPT_SORT_KEYS)
        bytes_left -= len(text) * len(results)
        if bytes_left < 0:
            raise TooManyParametersError(
                claim=claim, driver=driver, limit=f"{limits.max_bytes} bytes"
            )
        texts.append(text.decode())
    return tuple(texts)


def _values_of(config: OpaqueConfig, result: DeviceResult, *, claim: str) -> int:
    """Return the number of keys and values in a config. Raises BadConfigError if the config is
    invalid."""
    wrong = "are not a JSON object"
    parameters: object = config.parameters
    if isinstance(parameters, dict):
        values = 0
        level = [cast("object", parameters)]
        # Iterate level by level instead of recursively, because users control the depth.
        for _ in range(MAX_CONFIG_DEPTH):
            values += len(level)
            below: list[object] = []
            for item in level:
                if isinstance(item, dict):
                    below.extend(cast("dict[str, object]", item).values())
                    values += len(cast("dict[str, object]", item))
                elif isinstance(item, list):
                    below.extend(cast("list[object]", item))
            if not below:
                return values
            level = below
        wrong = f"are nested deeper than {MAX_CONFIG_DEPTH} levels"
    raise BadConfigError(
        claim=claim,
        request=result.request,
        source="its DeviceClass" if config.from_class else "the claim or its template",
        driver=result.driver,
        wrong=wrong,
    )


def next_step(old: StoredClaim | None, *, new: StoredClaim) -> Step:
    """Decide the next step for a claim."""
    if old is None:
        return Step.BEGIN
    if old.state == "unpreparing":
        return Step.UNDO
    # If the entry comes only from the kubelet's list, its configs are unknown. Don't undo a device
    # in use for that reason: preparing it again is always allowed.
    same = (
        device_keys(old.devices) == device_keys(new.devices)
        if old.rebuilt == "listed"
        else old.devices == new.devices and old.configs == new.configs
    )
    if not same:
        return Step.REPLACE
    current = old.state == "prepared" and old.boot_id == new.boot_id and old.rebuilt is None
    return Step.CONFIRM if current else Step.REPEAT


def device_keys(devices: Iterable[StoredDevice | DeviceResult]) -> set[tuple[str, str, str | None]]:
    """Return the keys of devices, regardless of their requests: pool, device and share."""
    return {(device.pool, device.device, device.share_id) for device in devices}


def allocated_claim(claim: StoredClaim) -> AllocatedClaim:
    """Return a claim in the form that drivers receive. Each device has its own copy of the
    parameters."""
    data = None if claim.data is None else _claim_data(claim.data, claim.configs)
    devices = [
        AllocatedDevice(
            name=device.device,
            pool=device.pool,
            request=device.request,
            share_id=device.share_id,
            admin_access=device.admin_access,
            consumed_capacity=device.consumed_capacity,
            consumes=device.consumes or {},
            configs=tuple([orjson.loads(claim.configs[index]) for index in device.configs]),
            claim_data=data,
        )
        for device in claim.devices
    ]
    return AllocatedClaim(claim=claim.reference, devices=tuple(devices))


# ---------------------------------------------------------------- the rest of a claim


def _data_of(claim: Claim, configs: Sequence[OpaqueConfig], *, driver: str) -> str:
    """Return the claim data that the driver receives in addition to the devices, in the form that
    the checkpoint stores. The parameters are omitted from the configs, because the entry contains
    them, in the same order. Raises ClaimTooLargeError."""
    assert claim.allocation is not None
    metadata = child(claim.body, "metadata")
    data = {
        "labels": child(metadata, "labels"),
        "annotations": {k: v for k, v in child(metadata, "annotations").items() if k != APPLIED},
        "owners": [
            {
                "api_version": text(owner, "apiVersion"),
                "kind": text(owner, "kind"),
                "name": text(owner, "name"),
                "uid": text(owner, "uid"),
                "controller": bool(owner.get("controller")),
            }
            for owner in children(metadata, "ownerReferences")
        ],
        "reserved_for": [
            {
                "resource": text(consumer, "resource"),
                "name": text(consumer, "name"),
                "uid": text(consumer, "uid"),
                "api_group": text(consumer, "apiGroup"),
            }
            for consumer in children(claim.body, "status", "reservedFor")
        ],
        "configs": [
            {"source": "FromClass" if each.from_class else "FromClaim", "requests": each.requests}
            for each in configs
        ],
        "other_devices": [
            {
                "driver": result.driver,
                "pool": result.pool,
                "name": result.device,
                "request": result.request,
                "share_id": result.share_id,
                "admin_access": result.admin_access,
                "consumed_capacity": result.consumed_capacity,
            }
            for result in claim.allocation.results
            if result.driver != driver
        ],
    }
    entries = sum(map(len, data.values())) + sum(len(each.requests) for each in configs)
    if entries > MAX_DATA_ENTRIES:
        raise ClaimTooLargeError(
            claim=str(claim), driver=driver, limit=f"{MAX_DATA_ENTRIES:,} entries"
        )
    stored = orjson.dumps(data)
    if len(stored) > MAX_DATA_BYTES:
        raise ClaimTooLargeError(
            claim=str(claim), driver=driver, limit=f"{MAX_DATA_BYTES // 1024} KiB"
        )
    return stored.decode()


def _claim_data(stored: str, configs: Sequence[str]) -> ClaimData:
    data: dict[str, Any] = orjson.loads(stored)
    return ClaimData(
        labels=data["labels"],
        annotations=data["annotations"],
        owners=tuple([ClaimOwner(**each) for each in data["owners"]]),
        reserved_for=tuple([ClaimConsumer(**each) for each in data["reserved_for"]]),
        configs=tuple(
            [
                ClaimConfig(
                    source=each["source"],
                    requests=tuple(each["requests"]),
                    parameters=orjson.loads(parameters),
                )
                for each, parameters in zip(data["configs"], configs, strict=True)
            ]
        ),
        other_devices=tuple([OtherDevice(**each) for each in data["other_devices"]]),
    )
