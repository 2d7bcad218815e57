"""
From a claim to calls of its Python driver: one for each device, or for all claims that come
together, as the driver wants it.

What a driver does wrong becomes a sentence in :mod:`drakit_nodeplugin.endpoints.python.faults`. How
a call reaches the driver's thread, waits for its devices and is cut off is the caller's; what an
error leads to is the engine's. The functions that are handed to the caller run in the driver's
thread: vendor code, and that is also the values that it answers with and the texts of what it
raises, runs nowhere else. What comes back is plain.

It must not know how drivers are started, slices, gRPC or the kubelet.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

from drakit.device import AllocatedClaim, AllocatedDevice, ClaimReference, Edits
from drakit.driver import Driver
from drakit.resource.pools import short_pool
from drakit_nodeplugin.endpoints.endpoint import WorkKey, work_keys
from drakit_nodeplugin.endpoints.errors import (
    BadParametersError,
    DeviceFailedError,
    EndpointStoppedError,
)
from drakit_nodeplugin.endpoints.python.bridge import BridgeClosedError
from drakit_nodeplugin.endpoints.python.faults import DriverFaults, kind_of
from drakit_nodeplugin.endpoints.python.parameters import with_parameters
from drakit_nodeplugin.endpoints.together import Together
from drakit_nodeplugin.endpoints.traits import DriverTraits, Granularity

__all__ = ("CALL_SECONDS", "Caller", "DriverCalls")

logger = logging.getLogger(__name__)

CALL_SECONDS = 300.0
"""After which a call of a driver is cancelled, from its begin in the driver. It may wait as long
for an earlier call for its devices. The kubelet is told long before that it goes on."""

AnyDriver = Driver[Any, Any]
ValueT = TypeVar("ValueT")


class Caller(Protocol):
    """How a driver is reached."""

    def away(self) -> EndpointStoppedError | None:
        """Say why the driver cannot be called now; None if it can."""
        ...

    def busy(self, keys: Collection[WorkKey]) -> bool:
        """Return whether a call with one of these keys runs or waits."""
        ...

    async def call(
        self,
        function: Callable[[AnyDriver], Any],
        *,
        what: str,
        keys: Collection[WorkKey],
        timeout_seconds: float,
    ) -> Any:
        """
        Call a plain or async function in the driver's thread, once no call with one of the keys
        runs.

        Raises what the function raises, and what :meth:`.Bridge.call` does of its own.
        """
        ...


class DriverCalls:
    """The calls of one driver; it raises DeviceFailedError, EndpointStoppedError, and no other."""

    def __init__(
        self,
        driver: str,
        *,
        traits: DriverTraits,
        node: str,
        caller: Caller,
        edits: Callable[[str, str], Edits | None] = lambda pool, name: None,
    ) -> None:
        """`node` is the node's name, after which pools are named in the API. `edits` returns the
        edits that a published device carries, by pool and name."""
        self._driver = driver
        self._traits = traits
        self._node = node
        self._caller = caller
        self._edits = edits
        self._faults = DriverFaults(driver, call_seconds=CALL_SECONDS)
        self._prepares = Together[AllocatedClaim, Sequence[Edits]](
            self._prepare_claims, apart=self._busy
        )
        self._unprepares = Together[AllocatedClaim, None](self._unprepare_claims, apart=self._busy)

    # ------------------------------------------------------------ preparing

    async def prepare(
        self, claim: ClaimReference, devices: Sequence[AllocatedDevice]
    ) -> Sequence[Edits]:
        """Make the devices of a claim ready; gives the edits of each, in their order."""
        match self._traits.prepare_granularity:
            case Granularity.DEVICE:
                return await self._each(
                    [self._prepare_device(claim, d, index) for index, d in enumerate(devices)]
                )
            case Granularity.BATCH:
                item = AllocatedClaim(claim=claim, devices=tuple(devices))
                return await self._prepares.call(item)

    async def _prepare_device(
        self, claim: ClaimReference, device: AllocatedDevice, index: int
    ) -> Edits:
        async def run(driver: AnyDriver) -> Edits:
            answer = await _finished(driver.prepare(claim, self._checked(device, index)))
            return self._faults.one_edits(answer, what="prepare", index=index)

        return await self._call(run, what="prepare", devices=[device], index=index)

    async def _prepare_claims(
        self, claims: Sequence[AllocatedClaim]
    ) -> Sequence[Sequence[Edits] | Exception]:
        what = "prepare_claims"

        async def run(driver: AnyDriver) -> Sequence[Sequence[Edits] | Exception]:
            results: dict[str, Sequence[Edits] | Exception] = {}
            due: list[AllocatedClaim] = []
            for item in claims:
                try:
                    due.append(replace(item, devices=self._all_checked(item.devices)))
                except BadParametersError as error:
                    results[item.claim.uid] = error
            if due:
                answers = self._faults.answers(
                    await _finished(driver.prepare_claims(due)), due, what
                )
                for item, answer in zip(due, answers, strict=True):
                    results[item.claim.uid] = (
                        answer
                        if isinstance(answer, Exception)
                        else self._faults.edits_or_error(answer, what=what, count=len(item.devices))
                    )
            return [_alone(results[item.claim.uid]) for item in claims]

        devices = [device for item in claims for device in item.devices]
        return await self._call(run, what=what, devices=devices)

    # ------------------------------------------------------------ unpreparing

    async def unprepare(self, claim: ClaimReference, devices: Sequence[AllocatedDevice]) -> None:
        """Undo it, and reset the devices if the driver wants that."""
        match self._traits.unprepare_granularity:
            case Granularity.DEVICE:
                await self._each(
                    [self._unprepare_device(claim, d, index) for index, d in enumerate(devices)]
                )
            case Granularity.BATCH:
                item = AllocatedClaim(claim=claim, devices=tuple(devices))
                await self._unprepares.call(item)

    async def _unprepare_device(
        self, claim: ClaimReference, device: AllocatedDevice, index: int
    ) -> None:
        async def run(driver: AnyDriver) -> None:
            known = self._checked(device, index, lenient=True)
            await _finished(driver.unprepare(claim, known))
            if self._resets(device):
                await self._reset(driver, known, index)

        await self._call(run, what="unprepare", devices=[device], index=index)

    async def _unprepare_claims(
        self, claims: Sequence[AllocatedClaim]
    ) -> Sequence[Exception | None]:
        what = "unprepare_claims"

        async def run(driver: AnyDriver) -> Sequence[Exception | None]:
            due = [
                replace(item, devices=self._all_checked(item.devices, lenient=True))
                for item in claims
            ]
            answers = self._faults.answers(await _finished(driver.unprepare_claims(due)), due, what)
            resets = [
                self._reset_or_error(driver, item.devices, answer, what=what)
                for item, answer in zip(due, answers, strict=True)
            ]
            return [_alone(answer) for answer in await asyncio.gather(*resets)]

        devices = [device for item in claims for device in item.devices]
        return await self._call(run, what=what, devices=devices)

    def _resets(self, device: AllocatedDevice) -> bool:
        """Tell whether a device is reset: not if others may be using it."""
        return self._traits.resets and device.share_id is None and not device.admin_access

    async def _reset(self, driver: AnyDriver, device: AllocatedDevice, index: int) -> None:
        try:
            await _finished(driver.reset(device))
        except Exception as error:
            raise self._faults.failed(error, what="reset", index=index) from None

    async def _reset_all(self, driver: AnyDriver, devices: Sequence[AllocatedDevice]) -> None:
        if self._traits.resets:
            await self._each(
                [self._reset(driver, d, i) for i, d in enumerate(devices) if self._resets(d)]
            )

    async def _reset_or_error(
        self,
        driver: AnyDriver,
        devices: Sequence[AllocatedDevice],
        answer: object,
        *,
        what: str,
    ) -> Exception | None:
        """Reset the devices of a claim that the driver has answered with None."""
        if isinstance(answer, Exception):
            return answer
        if answer is not None:
            return self._faults.answered(
                what, f"{kind_of(answer)} for a claim, which is neither None nor why"
            )
        try:
            await self._reset_all(driver, devices)
        except DeviceFailedError as error:
            return error
        return None

    # ------------------------------------------------------------ checking

    async def check(self, claim: ClaimReference, devices: Sequence[AllocatedDevice]) -> bool:
        """
        Say whether all devices are still in order; raises EndpointStoppedError, and nothing else.

        A driver that fails to check does not know that all is well: that is False, too.
        """
        answers = await self._each(
            [self._check_device(claim, d, index) for index, d in enumerate(devices)]
        )
        return all(answers)

    async def _check_device(
        self, claim: ClaimReference, device: AllocatedDevice, index: int
    ) -> bool:
        async def run(driver: AnyDriver) -> bool:
            answer = cast(
                "object", await _finished(driver.check(claim, self._checked(device, index)))
            )
            if type(answer) is bool:
                return answer
            raise self._faults.answered("check", f"{kind_of(answer)}, which is no bool")

        facts = {"driver": self._driver, "claim_uid": claim.uid, "device": device.name}
        try:
            return await self._call(run, what="check", devices=[device], index=index)
        except DeviceFailedError as error:
            logger.warning("driver cannot check a device", extra=facts | {"error": str(error)})
            return False

    # ------------------------------------------------------------ what a driver gets

    def _checked(
        self, device: AllocatedDevice, index: int, *, lenient: bool = False
    ) -> AllocatedDevice:
        """Give a device in the driver's words; see :func:`.with_parameters`."""
        pool = short_pool(self._node, device.pool)
        return with_parameters(
            replace(device, pool=pool, edits=self._edits(pool, device.name)),
            self._traits.parameters_type,
            driver=self._driver,
            index=index,
            lenient=lenient,
        )

    def _all_checked(
        self, devices: Sequence[AllocatedDevice], *, lenient: bool = False
    ) -> tuple[AllocatedDevice, ...]:
        return tuple(
            [self._checked(device, index, lenient=lenient) for index, device in enumerate(devices)]
        )

    # ------------------------------------------------------------ one call

    async def _call(
        self,
        function: Callable[[AnyDriver], Any],
        *,
        what: str,
        devices: Collection[AllocatedDevice],
        index: int | None = None,
    ) -> Any:
        if (away := self._caller.away()) is not None:
            raise away

        async def run(driver: AnyDriver) -> Any:
            try:
                return await _finished(function(driver))
            except Exception as error:
                failed = self._faults.failed(error, what=what, index=index)
            raise failed.alone()

        try:
            return await self._caller.call(
                run, what=what, keys=self._keys(devices), timeout_seconds=CALL_SECONDS
            )
        except BridgeClosedError as error:
            raise EndpointStoppedError(driver=self._driver, reason=error.reason) from None
        except DeviceFailedError:
            raise
        except Exception as error:  # of the bridge's own
            raise self._faults.failed(error, what=what, index=index) from None

    def _keys(self, devices: Collection[AllocatedDevice]) -> Collection[WorkKey]:
        return work_keys(devices, node=self._node)

    def _busy(self, item: AllocatedClaim) -> bool:
        """Tell whether a claim would have to wait: others of a batch must not wait with it."""
        return self._caller.busy(self._keys(item.devices))

    async def _each(self, works: Sequence[Coroutine[Any, Any, ValueT]]) -> Sequence[ValueT]:
        """Run works side by side; what one raises is raised once all have ended."""
        if len(works) == 1:
            return [await works[0]]
        results = await asyncio.gather(*works, return_exceptions=True)
        values: list[ValueT] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            values.append(result)
        return values


async def _finished(value: Awaitable[ValueT] | ValueT) -> ValueT:
    """Wait for what an async method has given; a plain one has given its answer."""
    if inspect.isawaitable(value):
        return await cast("Awaitable[ValueT]", value)
    return value


def _alone(answer: ValueT) -> ValueT:
    """Give an answer without what caused it, if it is a failure."""
    if isinstance(answer, DeviceFailedError):
        answer.alone()
    return answer
