"""
Converts a driver's reports and results to backend contract messages, and requests to the library's
data types.

:mod:`drakit_nodeplugin.endpoints.backend.convert` is the counterpart;
:mod:`drakit_driver.runtime.backend` converts individual values for both. Malformed devices are
rejected by the node plugin's rules before they are converted.

Does not depend on gRPC or sockets.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from drakit.device import (
    AllocatedClaim,
    AllocatedDevice,
    ClaimConfig,
    ClaimData,
    ClaimReference,
    CounterSet,
    Device,
    Health,
    HeldDevice,
    HeldNode,
    Inventory,
    PreparedDevice,
)
from drakit.driver import DevicePolicy, Policy
from drakit_driver.runtime.backend import health_message, message_of, value_of
from drakit_driver.runtime.contract import CallError, DeviceKey
from drakit_driver.runtime.failures import DeviceFailedError
from drakit_driver.runtime.policies import HeldClaims, InvalidPolicyError, read_policy
from drakit_formats.resource.inventory import place_problems, shown_place
from drakit_proto.backend.v1 import backend_pb2 as pb

# ------------------------------------------------------------ inventories


def add_malformed(
    message: pb.WatchDevicesResponse, thing: Device | CounterSet, problems: Sequence[str]
) -> pb.RejectedDevice:
    """Reject a device or counter set. The device still exists, so it is marked as withdrawn, and
    pods that use it keep running."""
    rejected = pb.RejectedDevice(
        device=_text(shown_place(thing.pool, thing.name)),
        reason="Invalid",
        message=_text("; ".join(problems)),
    )
    message.rejected.append(rejected)
    if isinstance(thing, Device) and isinstance(cast("object", thing.name), str):
        # If the pool is malformed, the device may belong to any pool.
        pool = "" if [*place_problems("a", thing.pool)] else f"{thing.pool}/"
        message.withdrawn.append(_text(f"{pool}{thing.name}"))
    return rejected


def add_reports(message: pb.WatchDevicesResponse, inventory: Inventory) -> None:
    """Add everything except devices and counter sets to a message."""
    message.ordered = inventory.ordered
    message.partition_type_attribute = _text(inventory.partition_type_attribute)
    message.withdrawn.extend(map(_text, inventory.withdrawn))
    for each in inventory.rejected:
        message.rejected.append(
            pb.RejectedDevice(
                device=_text(each.device),
                reason=each.reason,
                message=_text(each.message),
                policy=_text(each.policy),
            )
        )
    for each in inventory.policies:
        message.policies.append(
            pb.PolicyOutcome(
                policy=_text(each.policy),
                matched=_count(each.matched),
                published=_count(each.published),
                in_use=_count(each.in_use),
                in_use_by=_text(each.in_use_by),
                problem=_text(each.problem),
                conflicts=[
                    pb.PolicyConflict(device=_text(conflict.device), policy=_text(conflict.policy))
                    for conflict in each.conflicts
                ],
            )
        )


def _text(given: str) -> str:
    """Return the string in a form that is valid in a message. A string from a file name may not be
    valid UTF-8."""
    return given.encode(errors="backslashreplace").decode()


def _count(given: int) -> int:
    return min(max(given, 0), 2**32 - 1)


def device_health_message(key: DeviceKey, health: Health) -> pb.DeviceHealth:
    """Build the message about the health of one device."""
    return pb.DeviceHealth(name=key.name, pool=key.pool, health=health_message(health))


# ------------------------------------------------------------ policies


def policies_of(
    messages: Iterable[pb.Policy], kind: type[DevicePolicy]
) -> tuple[dict[str, Policy[Any]], list[pb.InvalidPolicy]]:
    """Validate the policies of a call. Return the valid policies, keyed by name, and the problems
    of the others. Runs vendor code, and may block."""
    policies: dict[str, Policy[Any]] = {}
    invalid: list[pb.InvalidPolicy] = []
    for message in messages:
        try:
            policies[message.name] = read_policy(
                kind,
                name=message.name,
                created=datetime.fromtimestamp(message.created, UTC),
                generation=message.generation,
                spec=json.loads(message.spec),
            )
        except InvalidPolicyError as error:
            invalid.append(pb.InvalidPolicy(name=message.name, problem=str(error)))
    return policies, invalid


def held_of(messages: Iterable[pb.HeldClaim]) -> HeldClaims:
    """Convert messages about claims to the claims that hold each device."""
    held: dict[str, dict[ClaimReference, HeldDevice]] = {}
    for message in messages:
        claim = value_of(message, ClaimReference)
        for device in message.devices:
            nodes = [value_of(each, HeldNode, current=not each.former) for each in device.nodes]
            each = HeldDevice(claims=(claim,), nodes=tuple(nodes))
            held.setdefault(device.name, {})[claim] = each
    return held


# ------------------------------------------------------------ claims


def claims_of(messages: Iterable[pb.Claim]) -> list[AllocatedClaim]:
    """Convert the claims of a call."""
    return [
        AllocatedClaim(
            claim=value_of(claim, ClaimReference),
            devices=_devices_of(claim),
        )
        for claim in messages
    ]


def _devices_of(claim: pb.Claim) -> tuple[AllocatedDevice, ...]:
    data = _claim_data(claim.data) if claim.HasField("data") else None
    return tuple(
        [
            value_of(
                device,
                AllocatedDevice,
                configs=tuple(map(json.loads, device.configs)),
                parameters=None,
                claim_data=data,
            )
            for device in claim.devices
        ]
    )


def _claim_data(message: pb.ClaimData) -> ClaimData:
    configs = [
        value_of(
            config,
            ClaimConfig,
            source="FromClass" if config.from_class else "FromClaim",
            parameters=json.loads(config.parameters),
        )
        for config in message.configs
    ]
    return value_of(message, ClaimData, configs=tuple(configs))


def prepared_message(uid: str, answer: Sequence[PreparedDevice] | CallError) -> pb.PreparedClaim:
    """Build the result of preparing a claim."""
    if isinstance(answer, Exception):
        index = answer.index if isinstance(answer, DeviceFailedError) else None
        return pb.PreparedClaim(uid=uid, error=str(answer), failed_device=index)
    try:
        edits = [message_of(device.edits, pb.Edits) for device in answer]
        devices = [message_of(device, pb.PreparedDevice) for device in answer]
    except (TypeError, ValueError, AttributeError) as error:
        text = f"the result cannot be used: it has a value of a wrong type: {error}"
        return pb.PreparedClaim(uid=uid, error=text)
    # Most drivers return only edits, and sending empty messages would cost size and parsing time.
    has_more = any(device.ByteSize() for device in devices)
    return pb.PreparedClaim(uid=uid, edits=edits, devices=devices if has_more else ())


def unprepared_message(uid: str, answer: CallError | None) -> pb.UnpreparedClaim:
    """Build the result of unpreparing a claim."""
    if not isinstance(answer, DeviceFailedError):
        return pb.UnpreparedClaim(uid=uid, error="" if answer is None else str(answer))
    return pb.UnpreparedClaim(
        uid=uid, error=str(answer), failed_device=answer.index, pending=answer.pending
    )
