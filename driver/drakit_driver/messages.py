"""
Converts the library's plain values to the backend contract's messages, and claims back.

It is the counterpart of :mod:`drakit_nodeplugin.endpoints.backend.convert`. Malformed devices are
rejected, by the rules of the node plugin, before they become messages.

It must not depend on gRPC, sockets, or how a driver runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from drakit.device import (
    AllocatedClaim,
    AllocatedDevice,
    Capacity,
    ClaimConfig,
    ClaimConsumer,
    ClaimData,
    ClaimOwner,
    ClaimReference,
    CounterSet,
    Device,
    Edits,
    Health,
    HeldNode,
    Inventory,
    OtherDevice,
    PreparedDevice,
    Taint,
)
from drakit.driver import DevicePolicy, Policy
from drakit_driver.runtime.backend import attribute_message
from drakit_driver.runtime.contract import CallError, DeviceKey, validated_health
from drakit_driver.runtime.failures import DeviceFailedError, kind_of
from drakit_driver.runtime.policies import HeldClaims, InvalidPolicyError, read_policy
from drakit_formats.resource.inventory import place_problems, shown_place
from drakit_proto.backend.v1 import backend_pb2 as pb

_EFFECTS: Mapping[str, pb.TaintEffect.ValueType] = {
    "None": pb.TAINT_EFFECT_NONE,
    "NoSchedule": pb.TAINT_EFFECT_NO_SCHEDULE,
    "NoExecute": pb.TAINT_EFFECT_NO_EXECUTE,
}
_STATUSES: Mapping[str, pb.HealthStatus.ValueType] = {
    "healthy": pb.HEALTH_STATUS_HEALTHY,
    "unhealthy": pb.HEALTH_STATUS_UNHEALTHY,
}


MessageT = TypeVar("MessageT", bound=Message)
ValueT = TypeVar("ValueT")


class UnsendableError(Exception):
    """Edits have a value that no message can have."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"it has a value of a wrong type: {error}")


# ------------------------------------------------------------ devices


def device_message(device: Device) -> pb.Device:
    """Make the message of a device that is well-formed."""
    message = pb.Device(
        name=device.name,
        pool=device.pool,
        attributes={name: attribute_message(value) for name, value in device.attributes.items()},
        capacity={name: _capacity(amount) for name, amount in device.capacity.items()},
        consumes=_amounts(device.consumes),
        compatibility_groups={
            name: pb.CompatibilityGroups(names=groups)
            for name, groups in device.compatibility_groups.items()
        },
        allow_multiple_allocations=device.allow_multiple_allocations,
        binding_conditions=device.binding_conditions,
        binding_failure_conditions=device.binding_failure_conditions,
        binds_to_node=device.binds_to_node,
        node_allocatable_resources={
            name: _message(pb.NodeAllocatableResource, each)
            for name, each in device.node_allocatable_resources.items()
        },
        extra=json.dumps(device.extra, allow_nan=False) if device.extra else "",
        taints=[_taint(taint) for taint in device.taints],
        health=None if device.health is None else health_message(device.health),
        evict_if_gone=device.evict_if_gone,
        prepare_again=device.prepare_again,
    )
    topology = device.topology
    if (topology.numa_node, topology.pcie_root, topology.pci_bus_id) != (None, None, None):
        message.topology.CopyFrom(_message(pb.Topology, topology))
    return message


def counter_set_message(counter_set: CounterSet) -> pb.CounterSet:
    """Make the message of a counter set that is well-formed."""
    return pb.CounterSet(
        name=counter_set.name, pool=counter_set.pool, counters=dict(counter_set.counters)
    )


def add_malformed(
    message: pb.WatchDevicesResponse, thing: Device | CounterSet, problems: Sequence[str]
) -> pb.RejectedDevice:
    """Reject a device or counter set. It is still there, so pods that use the device stay."""
    rejected = pb.RejectedDevice(
        device=_text(shown_place(thing.pool, thing.name)),
        reason="Invalid",
        message=_text("; ".join(problems)),
    )
    message.rejected.append(rejected)
    if isinstance(thing, Device) and isinstance(cast("object", thing.name), str):
        # Of a malformed pool, the device can be that of any pool.
        pool = "" if [*place_problems("a", thing.pool)] else f"{thing.pool}/"
        message.withdrawn.append(_text(f"{pool}{thing.name}"))
    return rejected


def add_reports(message: pb.WatchDevicesResponse, inventory: Inventory) -> None:
    """Add all but devices and counter sets to a message."""
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
                problem=_text(each.problem),
                conflicts=[
                    pb.PolicyConflict(device=_text(conflict.device), policy=_text(conflict.policy))
                    for conflict in each.conflicts
                ],
            )
        )


def _text(given: str) -> str:
    """Return a text that a message can have: the name of a file need not be UTF-8."""
    return given.encode(errors="backslashreplace").decode()


def _count(given: int) -> int:
    return min(max(given, 0), 2**32 - 1)


def health_message(health: Health) -> pb.Health:
    """Make the message of a health; one that is malformed is unknown."""
    health = validated_health(health)
    return pb.Health(
        status=_STATUSES.get(health.status, pb.HEALTH_STATUS_UNSPECIFIED),
        message=health.message,
        broken=health.evict_pods,
    )


def device_health_message(key: DeviceKey, health: Health) -> pb.DeviceHealth:
    """Make the message of the health of one device."""
    return pb.DeviceHealth(name=key.name, pool=key.pool, health=health_message(health))


def _capacity(amount: str | Capacity) -> pb.Capacity:
    if not isinstance(amount, Capacity):
        return pb.Capacity(value=amount)
    span = amount.valid_range
    return pb.Capacity(
        value=amount.value,
        default=amount.default or "",
        valid_values=amount.valid_values,
        valid_range=None if span is None else _message(pb.CapacityRange, span),
    )


def _amounts(consumes: Mapping[str, Mapping[str, str]]) -> Mapping[str, pb.CounterAmounts]:
    return {name: pb.CounterAmounts(counters=dict(counters)) for name, counters in consumes.items()}


def _message(kind: type[MessageT], value: object, **others: Any) -> MessageT:
    """Make a message with the fields of a value, which have the same names; None is not set."""
    names = [name for name in kind.DESCRIPTOR.fields_by_name if name not in others]
    return kind(**{name: getattr(value, name) for name in names}, **others)


def _value(kind: Callable[..., ValueT], message: Message, **others: Any) -> ValueT:
    """Make a value with the fields of a message: the counterpart of :func:`_message`."""
    names = [name for name in message.DESCRIPTOR.fields_by_name if name not in others]
    return kind(**{name: getattr(message, name) for name in names}, **others)


def _tuple(values: object) -> tuple[Any, ...]:
    if not isinstance(values, tuple | list):  # the letters of a text would be values
        raise TypeError(f"a list is a {kind_of(values)}")
    return tuple(cast("Sequence[Any]", values))


def _taint(taint: Taint) -> pb.Taint:
    effect = _EFFECTS.get(taint.effect, pb.TAINT_EFFECT_UNSPECIFIED)
    return pb.Taint(key=taint.key, value=taint.value, effect=effect)


# ------------------------------------------------------------ policies


def policies_of(
    messages: Iterable[pb.Policy], kind: type[DevicePolicy]
) -> tuple[dict[str, Policy[Any]], list[pb.InvalidPolicy]]:
    """Check the policies of a call: return the valid ones by name, and the others with their
    problems. Runs the vendor's code, and may block."""
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
    """Make the claims that hold each device."""
    held: dict[str, dict[ClaimReference, tuple[HeldNode, ...]]] = {}
    for message in messages:
        claim = ClaimReference(namespace=message.namespace, name=message.name, uid=message.uid)
        for device in message.devices:
            held.setdefault(device.name, {})[claim] = tuple(map(_held_node, device.nodes))
    return held


def _held_node(message: pb.HeldNode) -> HeldNode:
    return HeldNode(
        type=message.type,
        major=message.major if message.HasField("major") else None,
        minor=message.minor if message.HasField("minor") else None,
        identity=message.identity,
        current=not message.former,
    )


# ------------------------------------------------------------ claims


def claims_of(messages: Iterable[pb.Claim]) -> list[AllocatedClaim]:
    """Make the claims of a call."""
    return [
        AllocatedClaim(
            claim=ClaimReference(namespace=claim.namespace, name=claim.name, uid=claim.uid),
            devices=_devices_of(claim),
        )
        for claim in messages
    ]


def _devices_of(claim: pb.Claim) -> tuple[AllocatedDevice, ...]:
    data = _claim_data(claim.data) if claim.HasField("data") else None
    return tuple([_allocated(device, data) for device in claim.devices])


def _allocated(message: pb.AllocatedDevice, data: ClaimData | None) -> AllocatedDevice:
    return AllocatedDevice(
        name=message.name,
        pool=message.pool,
        request=message.request,
        share_id=message.share_id if message.HasField("share_id") else None,
        admin_access=message.admin_access,
        consumed_capacity=dict(message.consumed_capacity),
        consumes={name: dict(each.counters) for name, each in message.consumes.items()},
        configs=tuple([json.loads(config) for config in message.configs]),
        claim_data=data,
    )


def _claim_data(message: pb.ClaimData) -> ClaimData:
    return ClaimData(
        labels=dict(message.labels),
        annotations=dict(message.annotations),
        owners=tuple([_value(ClaimOwner, each) for each in message.owners]),
        reserved_for=tuple([_value(ClaimConsumer, each) for each in message.reserved_for]),
        configs=tuple(
            [
                ClaimConfig(
                    source="FromClass" if config.from_class else "FromClaim",
                    requests=tuple(config.requests),
                    parameters=json.loads(config.parameters),
                )
                for config in message.configs
            ]
        ),
        other_devices=tuple(
            [
                _value(
                    OtherDevice,
                    other,
                    share_id=other.share_id if other.HasField("share_id") else None,
                    consumed_capacity=dict(other.consumed_capacity),
                )
                for other in message.other_devices
            ]
        ),
    )


def prepared_message(uid: str, answer: Sequence[PreparedDevice] | CallError) -> pb.PreparedClaim:
    """Make the result of preparing a claim."""
    if isinstance(answer, Exception):
        index = answer.index if isinstance(answer, DeviceFailedError) else None
        return pb.PreparedClaim(uid=uid, error=str(answer), failed_device=index)
    try:
        edits = [edits_message(device.edits) for device in answer]
        devices = [_prepared_device(device) for device in answer]
    except UnsendableError as error:
        return pb.PreparedClaim(uid=uid, error=f"the result cannot be used: {error}")
    # Most drivers return edits alone: empty messages would only be counted and parsed.
    has_more = any(device.ByteSize() for device in devices)
    return pb.PreparedClaim(uid=uid, edits=edits, devices=devices if has_more else ())


def _prepared_device(device: PreparedDevice) -> pb.PreparedDevice:
    """Make the message of what others can read about a device; raises :class:`UnsendableError`."""
    network = device.network_data
    try:
        return pb.PreparedDevice(
            conditions=[_message(pb.Condition, each) for each in device.conditions],
            data="" if device.data is None else json.dumps(device.data, separators=(",", ":")),
            network_data=None
            if network is None
            else _message(pb.NetworkData, network, ips=_tuple(network.ips)),
            attributes={
                name: attribute_message(value) for name, value in device.attributes.items()
            },
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise UnsendableError(error) from None


def unprepared_message(uid: str, answer: CallError | None) -> pb.UnpreparedClaim:
    """Make the result of unpreparing a claim."""
    if not isinstance(answer, DeviceFailedError):
        return pb.UnpreparedClaim(uid=uid, error="" if answer is None else str(answer))
    return pb.UnpreparedClaim(
        uid=uid, error=str(answer), failed_device=answer.index, pending=answer.pending
    )


def edits_message(edits: Edits) -> pb.Edits:
    """Make the message of a device's edits; raises :class:`UnsendableError`."""
    rdt = edits.intel_rdt
    try:
        return pb.Edits(
            env=dict(edits.env),
            device_nodes=[_message(pb.DeviceNode, node) for node in edits.device_nodes],
            mounts=[
                _message(pb.Mount, mount, options=_tuple(mount.options)) for mount in edits.mounts
            ],
            hooks=[
                _message(pb.Hook, hook, args=_tuple(hook.args), env=dict(hook.env))
                for hook in edits.hooks
            ],
            net_devices=[_message(pb.NetDevice, each) for each in edits.net_devices],
            additional_gids=_tuple(edits.additional_gids),
            intel_rdt=None
            if rdt is None
            else _message(pb.IntelRdt, rdt, schemata=_tuple(rdt.schemata)),
            cdi_devices=_tuple(edits.cdi_devices),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise UnsendableError(error) from None
