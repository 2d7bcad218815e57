"""
The kubelet's end of registering, as the node plugin serves it: which device plugins may register.

What is refused gets the kubelet's words, as far as it has some. When the service is served, and on
which socket, is :mod:`.kubeletsocket`'s business; what becomes of a plugin that has registered, its
endpoint's.

It must not know connections, devices, or the kubelet's own sockets.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from drakit_nodeplugin.endpoints.deviceplugin.connection import Registration
from drakit_nodeplugin.endpoints.deviceplugin.names import resource_name_problem
from drakit_nodeplugin.endpoints.deviceplugin.remarks import Diagnostics
from drakit_nodeplugin.endpoints.host_paths import MAX_PATH_BYTES
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2_grpc as pb_grpc

__all__ = ("REGISTRATION_SOCKET", "RefusedError", "RegistrationService")

logger = logging.getLogger(__name__)

REGISTRATION_SOCKET = "kubelet.sock"
VERSION = "v1beta1"
MAX_SHOWN = 100
"""Characters of what a plugin said, in a sentence."""

MAX_A_SECOND = 50.0
MAX_AT_ONCE = 200.0
"""Registrations, of all plugins: after a restart all of them come at once. What is above waits a
second for its refusal."""


class RefusedError(Exception):
    """A plugin may not register. The text is a sentence that it puts into its log."""

    def __init__(
        self,
        text: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT,
        reason: str = "RegistrationRefused",
    ) -> None:
        super().__init__(text)
        self.code = code
        self.reason = reason


class RegistrationService(pb_grpc.RegistrationServicer):
    """Answers plugins that register."""

    def __init__(
        self,
        directory: Path,
        *,
        accept: Callable[[Registration], Awaitable[None]],
        remarks: Diagnostics,
    ) -> None:
        """`accept` takes a sound registration, or raises :class:`RefusedError`; it answers fast,
        and connects later."""
        self._directory = directory
        self._accept = accept
        self._remarks = remarks
        self._left = MAX_AT_ONCE
        self._looked_at = asyncio.get_running_loop().time()

    async def Register(
        self, request: pb.RegisterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.Empty:
        if not self._may_come():
            await asyncio.sleep(1.0)
            text = "too many device plugins register at once; register again later"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        try:
            registration = self._checked(request)
            await self._accept(registration)
        except RefusedError as error:
            self._remarks.say(error.reason, str(error))
            await context.abort(error.code, str(error))
        logger.info("device plugin registered", extra={"endpoint": request.resource_name})
        return pb.Empty()

    def _may_come(self) -> bool:
        now = asyncio.get_running_loop().time()
        left = min(MAX_AT_ONCE, self._left + (now - self._looked_at) * MAX_A_SECOND)
        self._looked_at = now
        self._left = max(0.0, left - 1)
        return left >= 1

    def _checked(self, request: pb.RegisterRequest) -> Registration:
        resource, endpoint = request.resource_name, request.endpoint
        if problem := resource_name_problem(resource):
            raise RefusedError(
                f"the ResourceName {_shown(resource)} of a device plugin is invalid: {problem}"
            )
        plugin = f"the device plugin of {resource}"
        if request.version != VERSION:
            raise RefusedError(
                f"{plugin} is refused: requested API version {_shown(request.version)} is not "
                f"supported by the node plugin. Supported version is [{VERSION!r}]"
            )
        if problem := self._endpoint_problem(endpoint):
            raise RefusedError(f"{plugin} is refused: its endpoint {_shown(endpoint)} {problem}")
        return Registration(
            resource=resource,
            socket=self._directory / endpoint,
            pre_start_required=request.options.pre_start_required,
        )

    def _endpoint_problem(self, endpoint: str) -> str | None:
        """Say why a plugin's socket cannot have this name; None if it can."""
        if endpoint in ("", ".", "..") or "/" in endpoint or not endpoint.isprintable():
            return "must be the name of a socket in the directory of kubelet.sock, without '/'"
        if endpoint == REGISTRATION_SOCKET:
            return "is the socket at which plugins register, and not its own"
        if len(os.fsencode(self._directory / endpoint)) > MAX_PATH_BYTES:
            return (
                f"is too long: with the path of the directory, a socket's name has at most "
                f"{MAX_PATH_BYTES} bytes"
            )
        return None


def _shown(text: str) -> str:
    return repr(text[:MAX_SHOWN]) + ("..." if len(text) > MAX_SHOWN else "")
