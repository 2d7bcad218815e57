"""
The socket of a backend: a gRPC channel to it, its methods in bytes, and its failures in sentences.

Answers stay bytes, because they are counted before they are parsed (:mod:`..wire`). Sentences
follow words for the backend. They contain no numbers, so that the same cause gives the same text.

It must not know the purpose of a method.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote

import grpc
import grpc.aio

from drakit.tasks import cancelled_by_owner
from drakit_nodeplugin.endpoints.wire import GarbageError, parse, printable
from drakit_proto.backend.v1 import backend_pb2 as pb

__all__ = (
    "INFO_SECONDS",
    "MAX_MESSAGE_BYTES",
    "BackendChannel",
    "BackendFailedError",
    "identify",
    "shown",
    "unreachable",
)

INFO_SECONDS = 5.0
"""The time limit of GetInfo."""

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""gRPC's own default, also that of servers in any language."""

MAX_INFO_BYTES = 64 * 1024
PROBE_SECONDS = 1.0

_SERVICE = "/drakit.backend.v1.Backend/"
_OPTIONS: Sequence[tuple[str, str | int]] = (
    ("grpc.default_authority", "localhost"),  # some servers refuse the default, an escaped path
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Channels to one path would share their connection and its backoff, although the socket may be
    # another one by now.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
_PERMISSIONS = (
    "make root its owner, or let others write to it (mode 0666), and let others pass through its "
    "directories: the node plugin has no right to pass over permissions"
)

_Calling: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"
_Streaming: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[bytes, bytes]"


class BackendFailedError(Exception):
    """A call of a backend failed. The text is the end of a sentence, after "its backend"."""

    def __init__(self, text: str, *, code: grpc.StatusCode | None = None) -> None:
        super().__init__(text)
        self.code = code

    @property
    def may_be_lost(self) -> bool:
        """Whether the end of the connection may be the cause."""
        return self.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class BackendChannel:
    """A channel to one backend."""

    def __init__(self, path: Path) -> None:
        """Connects with the first call."""
        self.path = path
        target = f"unix:{quote(os.fsencode(path))}"
        self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)

    async def call(
        self,
        method: str,
        request: bytes,
        *,
        timeout_seconds: float,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> bytes:
        """Call a method; raises :class:`BackendFailedError`."""
        calling: _Calling = self._channel.unary_unary(_SERVICE + method)
        try:
            return await calling(request, timeout=timeout_seconds, metadata=tuple(metadata))
        except grpc.aio.AioRpcError as error:
            raise _failed(error, method) from None
        except asyncio.CancelledError:
            if cancelled_by_owner():
                raise
            raise _cancelled(method) from None

    async def stream(self, method: str) -> AsyncGenerator[bytes]:
        """Call a method without parameters, and yield its messages until it ends; raises
        :class:`BackendFailedError`."""
        calling: _Streaming = self._channel.unary_stream(_SERVICE + method)
        stream = calling(b"")
        try:
            while isinstance(raw := await stream.read(), bytes):
                yield raw
        except grpc.aio.AioRpcError as error:
            raise _failed(error, method) from None
        except asyncio.CancelledError:
            if cancelled_by_owner():
                raise
            raise _cancelled(method) from None
        finally:
            stream.cancel()

    async def identify(self, *, node: str, version: str) -> str:
        """Return the driver's name, unchecked; raises :class:`BackendFailedError`."""
        request = pb.GetInfoRequest(node_name=node, plugin_version=version)
        answer = await self.call(
            "GetInfo", request.SerializeToString(), timeout_seconds=INFO_SECONDS
        )
        if len(answer) > MAX_INFO_BYTES:
            raise BackendFailedError("answered GetInfo with more than 64 KiB")
        try:
            return parse(pb.GetInfoResponse, answer).driver_name
        except GarbageError as error:
            raise BackendFailedError(f"answered GetInfo with {error}") from None

    async def close(self) -> None:
        """End the channel and all of its calls."""
        await self._channel.close()


async def identify(path: Path, *, node: str, version: str) -> str:
    """Connect, only to return the driver's name; raises :class:`BackendFailedError`."""
    channel = BackendChannel(path)
    try:
        return await channel.identify(node=node, version=version)
    finally:
        await channel.close()


def _cancelled(method: str) -> BackendFailedError:
    """gRPC reports a call that the other side cancelled, or that had its channel closed, with
    CancelledError."""
    return BackendFailedError(f"cancelled {method}", code=grpc.StatusCode.CANCELLED)


def _failed(error: grpc.aio.AioRpcError, method: str) -> BackendFailedError:
    code, details = error.code(), error.details() or ""
    match code:
        case grpc.StatusCode.UNIMPLEMENTED:
            text = f"does not implement {method}"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            text = f"gave no answer to {method} in time"
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in details:
            text = f"sent more than 4 MiB as an answer to {method}, or takes less than it was sent"
        case _:
            word = code.name.lower().replace("_", " ")
            text = f"failed in {method}: {printable(details)} ({word})"
    return BackendFailedError(text, code=code)


async def unreachable(path: Path) -> str | None:
    """Return why a connection to a socket fails, as the end of a sentence; None if it works. The
    errors of gRPC do not suffice to name a remedy."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    probe.setblocking(False)
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            await asyncio.get_running_loop().sock_connect(probe, str(path))
    except TimeoutError:
        return "takes no connections"
    except PermissionError:
        return f"may not be connected to (permission denied); {_PERMISSIONS}"
    except ConnectionRefusedError:
        return "has nobody listening on it; start its backend, or remove the file"
    except OSError as error:
        if error.errno == errno.EPROTOTYPE:
            return "is no stream socket"
        return f"cannot be connected to: {os.strerror(error.errno or 0)}"
    finally:
        probe.close()
    return None


def shown(path: Path) -> str:
    """Return a path that a vendor chose, in printable characters."""
    text = str(path)
    return text if text.isprintable() else ascii(text)
