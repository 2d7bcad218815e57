"""
Calls a connection for claims, and returns a result for each of them.

Pools get the driver's names. What a connection raises becomes the result of all claims of the call,
as an error with a sentence; what it answers is checked. The claims engine decides the order of
calls, limits their time and abandons them (:mod:`drakit_nodeplugin.claims.work`).

It must not know how a connection works, its life cycle, slices, gRPC or the kubelet.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from drakit.device import AllocatedClaim, Edits
from drakit_daemon.tasks import cancelled_by_owner
from drakit_formats.resource.nodes import short_pool
from drakit_nodeplugin.endpoints.contract import (
    CallError,
    CallOperation,
    Calls,
    ConnectionEndedError,
    DriverTraits,
    overdue,
)
from drakit_nodeplugin.endpoints.failures import (
    CallCancelledError,
    CallOverdueError,
    DeviceFailedError,
    EndpointStoppedError,
    failure_of,
    unusable_answer,
)

__all__ = ("Caller",)

logger = logging.getLogger(__name__)


class Caller(ABC):
    """The calls of one driver, for a :class:`.CallableEndpoint`."""

    def __init__(self, driver: str, *, traits: DriverTraits, node: str) -> None:
        """`node` is the node's name, after which pools are named in the API."""
        self.traits = traits
        self._driver = driver
        self._node = node

    @abstractmethod
    def _connection(self) -> Calls | EndpointStoppedError:
        """Return the connection to call, or the reason why there is none."""

    async def prepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, Sequence[Edits] | CallError]:
        """See :meth:`.CallableEndpoint.prepare`."""
        return await self._call("prepare", batch)

    async def unprepare(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, CallError | None]:
        """See :meth:`.CallableEndpoint.unprepare`."""
        return await self._call("unprepare", batch)

    async def check(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, bool | CallError]:
        """See :meth:`.CallableEndpoint.check`."""
        return await self._call("check", batch)

    async def _call(
        self, operation: CallOperation, batch: Sequence[AllocatedClaim]
    ) -> dict[str, Any]:
        what = self.traits.method(operation)
        try:
            connection = self._connection()
            if isinstance(connection, EndpointStoppedError):
                raise connection
            call = getattr(connection, operation)
            answers: dict[str, Any] = dict(await call([*map(self._in_driver_pools, batch)]))
        except asyncio.CancelledError:
            if cancelled_by_owner():
                raise
            failure = failure_of(CallCancelledError(), driver=self._driver, what=what)
        except Exception as error:
            failure = self._failure(error, operation, batch)
            if cancelled_by_owner() and isinstance(failure, DeviceFailedError):
                logger.error(
                    "call failed after its timeout or cancellation",
                    extra={"driver": self._driver, "call": what, "error": str(failure)},
                )
            if cancelled_by_owner():
                raise asyncio.CancelledError from None
        else:
            return self._results(operation, batch, answers)
        return dict.fromkeys([item.claim.uid for item in batch], failure)

    def _in_driver_pools(self, given: AllocatedClaim) -> AllocatedClaim:
        devices = [
            replace(device, pool=short_pool(self._node, device.pool)) for device in given.devices
        ]
        return replace(given, devices=tuple(devices))

    # ------------------------------------------------------------ results

    def _results(
        self, operation: CallOperation, batch: Sequence[AllocatedClaim], answers: dict[str, Any]
    ) -> dict[str, Any]:
        results = {item.claim.uid: self._result(operation, item, answers) for item in batch}
        if answers:
            what = self.traits.method(operation)
            text = f"it answered {what} for claims that were not requested"
            logger.error(
                "driver answers for unrequested claims",
                extra={"driver": self._driver, "error": text},
            )
        return results

    def _result(
        self, operation: CallOperation, item: AllocatedClaim, answers: dict[str, Any]
    ) -> Any:
        """Return the answer for a claim, or a DeviceFailedError."""
        uid, what = item.claim.uid, self.traits.method(operation)
        if operation == "check":
            return answers.pop(uid, False) is True
        if uid not in answers:
            return unusable_answer("nothing for this claim", driver=self._driver, what=what)
        answer = answers.pop(uid)
        if operation == "prepare" and not isinstance(answer, Exception):
            edits = cast("Sequence[Edits]", answer)
            if len(edits) != len(item.devices):
                count = f"{len(edits)} Edits for {len(item.devices)} devices of a claim"
                return unusable_answer(count, driver=self._driver, what=what)
        return answer

    def _failure(
        self, error: Exception, operation: CallOperation, batch: Sequence[AllocatedClaim]
    ) -> CallError:
        if isinstance(error, EndpointStoppedError):
            return error
        if isinstance(error, ConnectionEndedError):
            return EndpointStoppedError(driver=self._driver, reason=error.reason)
        if isinstance(error, CallOverdueError):
            return overdue(self._driver, self.traits, operation, batch)
        return failure_of(error, driver=self._driver, what=self.traits.method(operation))
