"""
What device plugins send, as bytes: counted and measured before it is read.

A message of 4 MiB can hold two million devices, and reading it as a whole would take a hundred
times its size of memory. So devices are read one by one, for as long as they are taken, and the
parts of an answer are counted first.

It must not know connections, or what is made of a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from drakit_nodeplugin.endpoints.wire import GarbageError, parse, parts
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb

__all__ = ("MAX_ANSWER_BYTES", "BadMessageError", "allocate_answer", "devices_in")

MAX_DEVICE_BYTES = 4 * 1024
"""Of a device in a list: ten times what a long ID and many NUMA nodes take."""

MAX_ANSWER_BYTES = 1024 * 1024
"""Of an answer to Allocate: it is kept in the checkpoint and in a CDI file."""

MAX_PART_BYTES = 128 * 1024
"""Of one part of an answer: what Linux takes of an environment variable, the largest there is."""

MAX_PARTS = 2000
"""Environment variables, mounts, device nodes, annotations and CDI devices of an answer, together:
more than can be used, and few enough to be read."""

_FIRST = frozenset({1})
_ALL_PARTS = frozenset(range(1, 6))


class BadMessageError(Exception):
    """An answer that cannot be used. The text says what it is, behind "answered ... with"."""


def devices_in(raw: bytes) -> Iterator[pb.Device]:
    """Give the devices of a ListAndWatchResponse; raises :class:`GarbageError`."""
    for _, part in parts(raw, _FIRST, limit=MAX_DEVICE_BYTES):
        yield parse(pb.Device, part)


def allocate_answer(raw: bytes) -> pb.ContainerAllocateResponse:
    """Give the answer for the one container in an AllocateResponse; raises
    :class:`BadMessageError`."""
    try:
        answers = list(islice(parts(raw, _FIRST, limit=MAX_ANSWER_BYTES), 2))
        if len(answers) != 1:
            number = "more than 1 container_response" if answers else "no container_response"
            raise BadMessageError(f"{number} for 1 request")
        ((_, answer),) = answers
        found = sum(
            1 for _ in islice(parts(answer, _ALL_PARTS, limit=MAX_PART_BYTES), MAX_PARTS + 1)
        )
        if found > MAX_PARTS:
            raise BadMessageError(f"more than {MAX_PARTS} entries")
        return parse(pb.ContainerAllocateResponse, answer)
    except GarbageError as error:
        raise BadMessageError(str(error)) from None
