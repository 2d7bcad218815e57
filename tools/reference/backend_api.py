"""
The page of the backend contract: the methods of its service, and a list of its messages.

protoc compiles the contract. The comments come from the descriptor's source info. The page links to
the contract for the fields, because the site shows that file.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    FileDescriptorProto,
    FileDescriptorSet,
)

from tools.reference import markdown

SOURCES = Path(__file__).resolve().parents[2] / "proto"
CONTRACT = "drakit_proto/backend/v1/backend.proto"

MESSAGES, SERVICES = 4, 6
"""Field numbers of FileDescriptorProto, with which the paths of source info begin."""

METHODS = 2


def page() -> str:
    """Return the page."""
    contract = _Contract(_compile())
    return markdown.document(
        "Backend API",
        description="The gRPC contract drakit.backend.v1: its methods, their time limits, and its messages.",
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
        contract = f"[backend.proto](../../proto/{CONTRACT})"
        yield markdown.paragraph(
            f"{contract} declares the gRPC service that a backend implements. [Write a "
            "backend](../vendors/backend.md) shows how to build one. A message can have 4 MiB, and "
            "other [limits](limits.md) apply to its parts."
        )
        for index, service in enumerate(self._file.service):
            yield f"## Service {service.name}"
            yield from _paragraphs(self._comment(SERVICES, index))
            for number, method in enumerate(service.method):
                yield f"### {method.name}"
                stream = "a stream of " if method.server_streaming else ""
                yield (
                    f"Takes {_name(method.input_type)}, and returns {stream}"
                    f"{_name(method.output_type)}."
                )
                yield from _paragraphs(self._comment(SERVICES, index, METHODS, number))
        yield "## Messages"
        yield f"{contract} documents the fields of these messages, with their defaults and limits:"
        rows = [
            (f"`{message.name}`", _first_sentence(self._comment(MESSAGES, index)))
            for index, message in enumerate(self._file.message_type)
            if not message.name.endswith(("Request", "Response"))
        ]
        yield markdown.table(("Message", "Meaning"), rows)

    def _comment(self, *path: int) -> str:
        location = self._comments.get(path)
        return location.leading_comments if location else ""


def _name(name: str) -> str:
    return f"`{name.rpartition('.')[2]}`"


def _first_sentence(comment: str) -> str:
    return re.split(r"(?<=\.)\s", _prose(comment), maxsplit=1)[0]


def _paragraphs(comment: str) -> Iterator[str]:
    for block in re.split(r"\n\s*\n", comment):
        if block.strip():
            yield markdown.paragraph(_prose(block))


def _prose(comment: str) -> str:
    return " ".join(comment.split()).replace("<", "&lt;")
