"""
The parts of the backend contract that both sides use: the messages of attributes, the metadata of
calls, and the size of a device.

Does not depend on gRPC, or on limits of messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from drakit.device import Version
from drakit_driver.runtime.failures import kind_of
from drakit_proto.backend.v1 import backend_pb2 as pb

REQUEST_ID = "drakit-request-id"
"""Metadata of each call: the id on the node plugin's log lines about it."""

MAX_DEVICE_BYTES = 64 * 1024
"""Bytes of a device or counter set: four times the largest that the API accepts."""

TOO_LARGE = f"larger than {MAX_DEVICE_BYTES // 1024} KiB"
"""The problem of one that has more."""


def attribute_message(value: object) -> pb.Attribute:
    """Make the message of an attribute; raises TypeError for a value of a wrong type."""
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
