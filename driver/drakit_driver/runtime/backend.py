"""
Converts the library's values to backend contract messages, and messages to values.

A message has the same name as its class, and its fields have the same names as the attributes. A
generic conversion in each direction (:func:`message_of`, :func:`value_of`) therefore handles all of
them, and a new field needs no code. Two tables contain the exceptions.

Some messages have no equivalent, such as a taint without an effect, or an attribute without a
value. They are converted to values that device validation names and rejects, as for a Python
driver.

Does not depend on gRPC, on message size limits, or on which values are allowed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from sys import intern
from typing import Any, TypeVar, cast

import orjson
from google.protobuf.message import Message

from drakit import device
from drakit.device import AttributeValue, Capacity, Device, Health, Taint, Topology, Version
from drakit_driver.runtime.contract import validated_health
from drakit_driver.runtime.failures import kind_of
from drakit_proto.backend.v1 import backend_pb2 as pb

REQUEST_ID = "drakit-request-id"
"""The metadata key of the request ID, which the node plugin's log lines about the call contain."""

MAX_DEVICE_BYTES = 64 * 1024
"""Maximum size of a device or counter set: four times the maximum size that the API accepts."""

TOO_LARGE = f"larger than {MAX_DEVICE_BYTES // 1024} KiB"
"""The problem reported for a device or counter set that exceeds the maximum size."""

MAX_HEALTH_MESSAGE = 1024
"""Maximum length of a health message."""

_EFFECTS: Mapping[str, pb.TaintEffect.ValueType] = {
    "unspecified": pb.TAINT_EFFECT_UNSPECIFIED,
    "None": pb.TAINT_EFFECT_NONE,
    "NoSchedule": pb.TAINT_EFFECT_NO_SCHEDULE,
    "NoExecute": pb.TAINT_EFFECT_NO_EXECUTE,
}
_EFFECT_NAMES: Mapping[int, str] = {number: name for name, number in _EFFECTS.items()}

_STATUSES: Mapping[str, pb.HealthStatus.ValueType] = {
    "healthy": pb.HEALTH_STATUS_HEALTHY,
    "unhealthy": pb.HEALTH_STATUS_UNHEALTHY,
}
_EMPTY: dict[str, Any] = {}
"""Most mappings of most devices are empty. Sharing one object saves memory."""

ValueT = TypeVar("ValueT")
MessageT = TypeVar("MessageT", bound=Message)
_Convert = Callable[[Any], Any]
_Field = Any
"""A field descriptor. protobuf has several implementations of this type."""

# ------------------------------------------------------------ values to messages


def message_of(value: object, kind: type[MessageT], **given: Any) -> MessageT:
    """Convert a value to a message. The fields in `given` are used as they are. Raises TypeError,
    ValueError or AttributeError if a value has the wrong type."""
    for name, write, empty in _writers(kind, type(value)):
        if name not in given and (field := getattr(value, name)) != empty:
            given[name] = field if write is None else write(field)
    return kind(**given)


@cache
def _writers(kind: type[Message], of: Any) -> Sequence[tuple[str, _Convert | None, object]]:
    """Return the fields that a message and a class have in common, each with its conversion and the
    value for which the field is left unset."""
    names = {each.name for each in fields(of)}
    return [
        (each.name, _writer(each), _empty_of(each))
        for each in kind.DESCRIPTOR.fields
        if each.name in names
    ]


def _empty_of(field: _Field) -> object:
    if not field.is_repeated:
        return None
    return () if field.message_type is None or not field.message_type.GetOptions().map_entry else {}


def _writer(field: _Field) -> _Convert | None:
    """Return the conversion for a field, or None if its values need no conversion."""
    if (special := _WRITE.get(f"{field.containing_type.name}.{field.name}")) is not None:
        return special
    message = field.message_type
    if message is None:
        return _list if field.is_repeated else None
    if message.GetOptions().map_entry:
        inner = message.fields_by_name["value"]
        if inner.message_type is None:
            return dict
        write = _message_writer(inner.message_type.name)
        return lambda given: {name: write(each) for name, each in given.items()}
    write = _message_writer(message.name)
    if field.is_repeated:
        return lambda given: [write(each) for each in _list(given)]
    return write


def _message_writer(name: str) -> _Convert:
    if (special := _WRITE.get(name)) is not None:
        return special
    kind, of = getattr(pb, name), getattr(device, name)

    def write(value: object) -> Message:
        if not isinstance(value, of):
            raise TypeError(f"a {name} is a {kind_of(value)}")
        return message_of(value, kind)

    return write


def _list(given: object) -> Sequence[Any]:
    if not isinstance(given, tuple | list):  # a string would be split into characters
        raise TypeError(f"a list is a {kind_of(given)}")
    return cast("Sequence[Any]", given)


def attribute_message(value: object) -> pb.Attribute:
    """Convert an attribute. Raises TypeError if the value has a wrong type."""
    match value:
        case bool():
            return pb.Attribute(bool=value)
        case int():
            return pb.Attribute(int=value)
        case str():
            return pb.Attribute(string=value)
        case Version(text=text):
            return pb.Attribute(version=text)
        case tuple() | list():
            return _list_attribute(cast("Sequence[Any]", value))
        case _:
            raise TypeError(f"an attribute is a {kind_of(value)}")


def _list_attribute(values: Sequence[Any]) -> pb.Attribute:
    kinds = set(map(type, values))
    if kinds <= {bool}:
        return pb.Attribute(bools=pb.BoolList(values=values))
    if kinds == {int}:
        return pb.Attribute(ints=pb.IntList(values=values))
    if kinds == {Version}:
        return pb.Attribute(versions=pb.StringList(values=[each.text for each in values]))
    return pb.Attribute(strings=pb.StringList(values=values))


def health_message(health: Health) -> pb.Health:
    """Convert a device's health. Malformed health becomes unknown."""
    health = validated_health(health)
    return pb.Health(
        status=_STATUSES.get(health.status, pb.HEALTH_STATUS_UNSPECIFIED),
        message=health.message,
        broken=health.evict_pods,
    )


def json_of(value: object) -> str:
    """Encode a value as ASCII JSON. Strings from users can contain lone surrogates, which are not
    valid in messages."""
    return json.dumps(value, separators=(",", ":"))


_WRITE: Mapping[str, _Convert] = {
    "Attribute": attribute_message,
    "Capacity": lambda given: (
        message_of(given, pb.Capacity) if isinstance(given, Capacity) else pb.Capacity(value=given)
    ),
    "CompatibilityGroups": lambda given: pb.CompatibilityGroups(names=given),
    "CounterAmounts": lambda given: pb.CounterAmounts(counters=dict(given)),
    "Health": health_message,
    "Taint": lambda given: message_of(given, pb.Taint, effect=_EFFECTS.get(given.effect, 0)),
    "Device.extra": lambda given: json_of(given) if given else "",
    "Device.topology": lambda given: (
        None if given == Topology() else message_of(given, pb.Topology)
    ),
    "PreparedDevice.data": json_of,
}
"""The conversions for messages and fields whose form differs from the library's values."""

# ------------------------------------------------------------ messages to values


def value_of(message: Message, kind: type[ValueT], **given: Any) -> ValueT:
    """Convert a message to a value, which may still be invalid. The attributes in `given` are used
    as they are."""
    absent, readers = _readers(kind, type(message))
    values = {**absent, **given}
    for field, value in message.ListFields():
        if (reader := readers.get(field)) is not None and reader[0] not in given:
            name, read = reader
            values[name] = value if read is None else read(value)
    return kind(**values)


@cache
def _readers(
    kind: type[Any], of: type[Message]
) -> tuple[Mapping[str, Any], Mapping[_Field, tuple[str, _Convert | None]]]:
    """Return the values for absent fields, where they differ from the class defaults, and the
    conversions for fields that are set."""
    absent: dict[str, Any] = {}
    for each in fields(kind):
        is_required = each.default is each.default_factory  # the field has no default
        if str(each.type).startswith("Mapping["):
            if is_required or kind is Device:
                absent[each.name] = _EMPTY
        elif is_required:
            absent[each.name] = None if "| None" in str(each.type) else ""
    names = {each.name for each in fields(kind)}
    readers = {
        each: (each.name, _reader(each)) for each in of.DESCRIPTOR.fields if each.name in names
    }
    return absent, readers


def _reader(field: _Field) -> _Convert | None:
    """Return the conversion for a field that is set, or None if its values need no conversion."""
    if (special := _READ.get(f"{field.containing_type.name}.{field.name}")) is not None:
        return special
    message = field.message_type
    if message is None:
        if field.is_repeated:
            return tuple
        return intern if field.name == "pool" else None
    if message.GetOptions().map_entry:
        inner = message.fields_by_name["value"].message_type
        read = str if inner is None else _message_reader(inner.name)
        # Sort the keys, because protobuf maps are unordered, but the same edits must produce the
        # same file.
        return lambda given: {intern(name): read(given[name]) for name in sorted(given)}
    read = _message_reader(message.name)
    return (lambda given: tuple([read(each) for each in given])) if field.is_repeated else read


def _message_reader(name: str) -> _Convert:
    return _READ.get(name) or partial(value_of, kind=getattr(device, name))


def health_of(message: pb.Health) -> Health:
    """Convert a device's health. An unrecognized status becomes unknown health."""
    text = message.message[:MAX_HEALTH_MESSAGE]
    match message.status:
        case pb.HEALTH_STATUS_HEALTHY:
            return Health("healthy", text)
        case pb.HEALTH_STATUS_UNHEALTHY:
            return Health.unhealthy(text, evict_pods=message.broken)
        case _:
            return Health.unknown(text)


def _attribute(message: pb.Attribute) -> AttributeValue:
    match message.WhichOneof("value"):
        case "string":
            return intern(message.string)
        case "version":
            return Version(message.version)
        case "versions":
            return tuple([Version(each) for each in message.versions.values])
        case "int" | "bool" as name:
            return getattr(message, name)
        case "strings" | "ints" | "bools" as name:
            return tuple(getattr(message, name).values)
        case _:
            return cast("AttributeValue", None)


def _capacity(message: pb.Capacity) -> str | Capacity:
    if message.default or message.valid_values or message.HasField("valid_range"):
        return value_of(message, Capacity)
    return message.value


def _extra(given: str) -> Mapping[str, Any]:
    try:
        return orjson.loads(given)
    except orjson.JSONDecodeError:
        # Malformed JSON remains a string, which device validation rejects.
        return cast("Mapping[str, Any]", given)


def _taint(message: pb.Taint) -> Taint:
    # An unknown effect, from a later version, becomes a string, so that validation rejects the
    # taint.
    effect = _EFFECT_NAMES.get(message.effect, str(message.effect))
    return value_of(message, Taint, effect=effect)


_READ: Mapping[str, _Convert] = {
    "Attribute": _attribute,
    "Capacity": _capacity,
    "CompatibilityGroups": lambda message: tuple(message.names),
    "CounterAmounts": lambda message: dict(message.counters) or _EMPTY,
    "Health": health_of,
    "Taint": _taint,
    "Device.extra": _extra,
}
"""The conversions for messages and fields whose form differs from the library's values."""
