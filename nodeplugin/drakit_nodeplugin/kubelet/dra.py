"""
The DRA service, v1 and v1beta1: translates between the kubelet's messages and the plugin's types.

The service validates each call, returns a result for every claim, and logs one line per call. A
malformed claim fails without affecting the others, and :mod:`drakit_nodeplugin.claims.queue`
handles all valid claims. While another instance of the driver is active, calls wait. The versions
differ only in shares, which v1beta1 does not support.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, cast

import grpc
import grpc.aio

from drakit.device import ClaimReference
from drakit_daemon import logs
from drakit_nodeplugin.claims.queue import NOT_DONE, ClaimQueue
from drakit_nodeplugin.claims.work import ClaimResult, KubeletDevice, Operation
from drakit_proto.kubelet.dra.v1 import dra_pb2 as v1
from drakit_proto.kubelet.dra.v1 import dra_pb2_grpc as v1_grpc
from drakit_proto.kubelet.dra.v1beta1 import dra_pb2 as v1beta1
from drakit_proto.kubelet.dra.v1beta1 import dra_pb2_grpc as v1beta1_grpc

logger = logging.getLogger(__name__)

SUPPORTED_VERSIONS = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
"""The versions that the plugin advertises to the kubelet, which uses the first one that it
supports."""

MAX_CLAIMS = 1024
"""Maximum number of claims in a call: about ten times as many as the largest pods have. gRPC
accepts messages of 4 MiB, which can contain several hundred thousand claims. Processing so many
would block the event loop for seconds."""

MAX_ERROR_CHARACTERS = 4096
"""Maximum length of an error, which can come from a vendor: more than an Event shows, and far less
than a gRPC message can contain."""

_UID = re.compile(r"[A-Za-z0-9-]{1,128}")
"""The format of a UID, which becomes part of file names and CDI device names."""

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
"""A DNS subdomain, as the API server requires for names. It becomes part of a URL."""

_Context = grpc.aio.ServicerContext[Any, Any]


# ---------------------------------------------------------------- calls


def _wrong(claim: ClaimReference, *, times: int) -> str | None:
    if not claim.uid:
        return f"without a UID (name {_shown(claim.name)})"
    if not _UID.fullmatch(claim.uid):
        return f"with an invalid UID: {_shown(claim.uid)}"
    for word, text in (("namespace", claim.namespace), ("name", claim.name)):
        if not text:
            return f"without a {word} (UID {claim.uid})"
        if not _NAME.fullmatch(text):
            return f"with an invalid {word}: {_shown(text)} (UID {claim.uid})"
    if times > 1:
        return f"{times} times in one call: {claim} (UID {claim.uid})"
    return None


def _not_done(claim: ClaimReference, why: str) -> ClaimResult:
    return ClaimResult(error=f"claim {claim}: {why}; the kubelet retries", reason=NOT_DONE)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 64 else text[:64] + "...")


def _sendable(error: str) -> str:
    """Make an error message valid for gRPC, and limit its length. gRPC rejects invalid characters,
    and the whole call would fail."""
    text = error.encode(errors="backslashreplace").decode()
    return text if len(text) <= MAX_ERROR_CHARACTERS else text[:MAX_ERROR_CHARACTERS] + "..."


class ClaimCalls:
    """The kubelet's calls for one driver, in all versions of the service."""

    def __init__(self, driver: str, *, response_seconds: float) -> None:
        """Create the calls of a driver. Calls wait until :meth:`serve` is called."""
        self._driver = driver
        self._queue: ClaimQueue | None = None
        self._response_seconds = response_seconds
        self._refusing = False
        self._changed = asyncio.Event()
        """Set while calls do not have to wait."""
        self.in_flight = 0
        """The number of calls in flight."""
        self._idle = asyncio.Event()
        self._idle.set()

    def began(self, context: _Context) -> None:
        """Count a call as in flight until its response is sent or its caller disconnects."""
        self.in_flight += 1
        self._idle.clear()
        # The cast is needed because the type stubs accept only gRPC's own context class.
        context.add_done_callback(cast("Any", self._ended))

    def serve(self, queue: ClaimQueue | None) -> None:
        """Pass calls to the queue of the active instance. Without a queue, new calls wait."""
        self._queue = queue
        if queue is not None:
            self._changed.set()
        elif not self._refusing:
            self._changed.clear()

    def refuse(self) -> None:
        """Reject all waiting calls, and all new calls for claims, so that the kubelet retries
        them."""
        self._refusing = True
        self._changed.set()

    async def drain(self, *, timeout_seconds: float) -> None:
        """Wait until no call is in flight, or until the timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()

    async def handle(
        self, operation: Operation, claims: Sequence[ClaimReference], *, method: str
    ) -> Mapping[str, ClaimResult]:
        """Handle a call. Return exactly one result for each UID."""
        with logs.request_scope(logs.new_request_id()):
            began = asyncio.get_running_loop().time()
            answers: dict[str, ClaimResult] | None = None
            try:
                times = Counter(claim.uid for claim in claims)
                bad: dict[str, ClaimResult] = {}
                for claim in claims:
                    if wrong := _wrong(claim, times=times[claim.uid]):
                        error = f"the kubelet sent a claim {wrong}"
                        bad.setdefault(claim.uid, ClaimResult(error=error, reason="Malformed"))
                for answer in bad.values():
                    facts = {"driver": self._driver, "error": str(answer.error)}
                    logger.warning("claim refused", extra=facts)
                good = [claim for claim in claims if claim.uid not in bad]
                answered = {**bad, **(await self._ask(operation, good) if good else {})}
                for uid, answer in answered.items():
                    if answer.error is not None:
                        answered[uid] = replace(answer, error=_sendable(answer.error))
                answers = answered
                return answers
            finally:
                seconds = asyncio.get_running_loop().time() - began
                self._log(method, claims, answers, seconds=seconds)

    async def _ask(
        self, operation: Operation, claims: Sequence[ClaimReference]
    ) -> Mapping[str, ClaimResult]:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._response_seconds
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        if self._refusing:
            return {claim.uid: _not_done(claim, "the node plugin is stopping") for claim in claims}
        if self._queue is None:
            why = (
                f"another instance of the node plugin is active for driver {self._driver}, or the "
                "driver is being restarted"
            )
            return {claim.uid: _not_done(claim, why) for claim in claims}
        return await self._queue.ask(operation, claims, timeout_seconds=until - loop.time())

    def _ended(self, _: _Context) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            self._idle.set()

    def _log(
        self,
        method: str,
        claims: Sequence[ClaimReference],
        answers: Mapping[str, ClaimResult] | None,
        *,
        seconds: float,
    ) -> None:
        # Calls without claims come from the plugin's own liveness probe, every few seconds.
        level = logging.INFO if claims else logging.DEBUG
        if not logger.isEnabledFor(level):
            return
        message = "call completed" if answers is not None else "the kubelet canceled the call"
        errors = [answer for answer in (answers or {}).values() if answer.error is not None]
        facts = {
            "driver": self._driver,
            "method": method,
            "claims": len(claims),
            "claim": ", ".join(str(claim)[:128] for claim in claims[:64]),
            "errors": len(errors),
            "seconds": round(seconds, 4),
        }
        logger.log(level, message, extra=facts)


# ---------------------------------------------------------------- messages


class _Claim(Protocol):
    """The fields that the claim messages of both versions share."""

    namespace: str
    uid: str
    name: str


class _Dra:
    """One version of the service. Both versions have the same message names."""

    def __init__(self, calls: ClaimCalls, version: str, messages: Any) -> None:
        self._calls = calls
        self._version = version
        self._messages = messages

    async def NodePrepareResources(self, request: Any, context: _Context) -> Any:
        messages = self._messages
        answers = await self._ask("prepare", "NodePrepareResources", request, context)
        return messages.NodePrepareResourcesResponse(
            claims={
                uid: messages.NodePrepareResourceResponse(error=answer.error)
                if answer.error is not None
                else messages.NodePrepareResourceResponse(devices=map(self._device, answer.devices))
                for uid, answer in answers.items()
            }
        )

    def _device(self, device: KubeletDevice) -> Any:
        shares = {"share_id": device.share_id} if self._version == "v1" else {}
        return self._messages.Device(
            request_names=device.requests,
            pool_name=device.pool,
            device_name=device.device,
            cdi_device_ids=device.cdi_ids,
            **shares,
        )

    async def NodeUnprepareResources(self, request: Any, context: _Context) -> Any:
        messages = self._messages
        answers = await self._ask("unprepare", "NodeUnprepareResources", request, context)
        return messages.NodeUnprepareResourcesResponse(
            claims={
                uid: messages.NodeUnprepareResourceResponse(error=answer.error or "")
                for uid, answer in answers.items()
            }
        )

    async def _ask(
        self, operation: Operation, method: str, request: Any, context: _Context
    ) -> Mapping[str, ClaimResult]:
        self._calls.began(context)
        claims: Sequence[_Claim] = request.claims
        if len(claims) > MAX_CLAIMS:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the call has {len(claims)} claims; a call for one pod can have at most "
                f"{MAX_CLAIMS}",
            )
        references = [
            ClaimReference(namespace=claim.namespace, name=claim.name, uid=claim.uid)
            for claim in claims
        ]
        return await self._calls.handle(operation, references, method=f"{self._version}.{method}")


def add_dra_services(server: grpc.aio.Server, calls: ClaimCalls) -> None:
    """Serve both versions, which share work in flight on a claim."""
    first: Any = _Dra(calls, "v1", v1)
    v1_grpc.add_DRAPluginServicer_to_server(first, server)
    second: Any = _Dra(calls, "v1beta1", v1beta1)
    v1beta1_grpc.add_DRAPluginServicer_to_server(second, server)
