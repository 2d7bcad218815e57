"""
The page of the backend contract: services, messages and enums with their comments.

protoc compiles the contract. The comments come from the descriptor's source info.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from tools.reference import markdown

SOURCES = Path(__file__).resolve().parents[2] / "proto"
CONTRACT = "drakit_proto/backend/v1/backend.proto"

MESSAGES, ENUMS, SERVICES = 4, 5, 6
"""Field numbers of FileDescriptorProto, with which the paths of source info begin."""

FIELDS, METHODS, VALUES = 2, 2, 2

_KINDS = {
    value: name.removeprefix("TYPE_").lower() for name, value in FieldDescriptorProto.Type.items()
}


def page() -> str:
    """Return the page."""
    contract = _Contract(_compile())
    return markdown.document(
        "Backend API",
        description="The gRPC contract drakit.backend.v1: methods, messages, fields and enums.",
        source=f"proto/{CONTRACT}",
        body=contract.blocks(),
    )


def _compile() -> FileDescriptorProto:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "contract.binpb")
        options = (f"-I{SOURCES}", f"--descriptor_set_out={output}", "--include_source_info")
        subprocess.run(
            [sys.executable, "-m", "grpc_tools.protoc", *options, CONTRACT], check=True, timeout=60
        )
        (file,) = FileDescriptorSet.FromString(output.read_bytes()).file
        return file


class _Contract:
    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments = {tuple(each.path): each for each in file.source_code_info.location}

    def blocks(self) -> Iterator[str]:
        yield (
            "The gRPC service that a backend implements, from\n"
            f"[backend.proto](../../proto/{CONTRACT}). [Write a backend](../vendors/backend.md) shows how to\n"
            "build one. A message can have 4 MiB, and other [limits](limits.md) apply to its parts."
        )
        for index, service in enumerate(self._file.service):
            yield f"## Service {service.name}"
            yield from _paragraphs(self._comment(SERVICES, index))
            for number, method in enumerate(service.method):
                yield f"### {method.name}"
                stream = "stream " if method.server_streaming else ""
                yield (
                    f"Takes {_link(method.input_type)}, and returns {stream and 'a stream of '}"
                    f"{_link(method.output_type)}."
                )
                yield from _paragraphs(self._comment(SERVICES, index, METHODS, number))
        yield "## Messages"
        for index, message in enumerate(self._file.message_type):
            yield f"### {message.name}"
            yield from _paragraphs(self._comment(MESSAGES, index))
            yield self._fields(message, (MESSAGES, index))
        yield "## Enums"
        for index, enum in enumerate(self._file.enum_type):
            yield f"### {enum.name}"
            yield from _paragraphs(self._comment(ENUMS, index))
            declared = [
                (f"{value.name} = {value.number};", self._comment(ENUMS, index, VALUES, number))
                for number, value in enumerate(enum.value)
            ]
            yield _block("enum", enum.name, declared)

    def _comment(self, *path: int) -> str:
        location = self._comments.get(path)
        return location.leading_comments if location else ""

    def _fields(self, message: Any, path: Sequence[int]) -> str:
        declared = [
            (
                f"{_type(field, message)} {field.name} = {field.number};",
                self._comment(*path, FIELDS, number),
            )
            for number, field in enumerate(message.field)
        ]
        # A message of the contract has at most one oneof, and no other fields.
        oneof = any(_in_oneof(field) for field in message.field)
        return _block(
            "message", message.name, declared, oneof=message.oneof_decl[0].name if oneof else ""
        )


def _block(kind: str, name: str, declared: Sequence[tuple[str, str]], *, oneof: str = "") -> str:
    """Return a message or an enum in the form of the contract: each member with its comment."""
    if not declared:
        return markdown.code_block("proto", [f"{kind} {name} {{}}"])
    lines = markdown.members(declared, "//", "    " if oneof else "  ")
    if oneof:
        lines = [f"  oneof {oneof} {{", *lines, "  }"]
    return markdown.code_block("proto", [f"{kind} {name} {{", *lines, "}"])


def _in_oneof(field: Any) -> bool:
    return field.HasField("oneof_index") and not field.proto3_optional


def _type(field: Any, message: Any) -> str:
    entry = next(
        (each for each in message.nested_type if field.type_name.endswith(f".{each.name}")), None
    )
    if entry is not None:
        return f"map<{_plain(entry.field[0])}, {_plain(entry.field[1])}>"
    text = _plain(field)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {text}"
    if field.proto3_optional:
        return f"optional {text}"
    return text


def _plain(field: Any) -> str:
    return field.type_name.rpartition(".")[2] or _KINDS[field.type]


def _link(name: str) -> str:
    own = name.rpartition(".")[2]
    return f"[{own}](#{own.lower()})"


def _paragraphs(comment: str) -> Iterator[str]:
    for block in re.split(r"\n\s*\n", comment):
        if block.strip():
            yield markdown.paragraph(_prose(block))


def _prose(comment: str) -> str:
    return " ".join(comment.split()).replace("<", "&lt;")
