"""
Calls the methods of a Python driver for a batch of claims, in the driver's loop.

Only this module runs vendor code for claims, including when it reads results and formats
exceptions. It returns either a snapshot of a result, or an error message. The claims engine orders
the calls and limits their duration.

Does not depend on threads, slices, gRPC or the kubelet.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar, cast

from drakit.device import (
    AllocatedClaim,
    AllocatedDevice,
    Device,
    Edits,
    Inventory,
    PreparedDevice,
)
from drakit.driver import Driver
from drakit_driver.runtime.contract import DriverTraits
from drakit_driver.runtime.failures import (
    DeviceFailedError,
    failure_of,
    kind_of,
    unusable_result,
)
from drakit_driver.runtime.order import Order, hardware_keys
from drakit_driver.runtime.parameters import with_parameters
from drakit_driver.runtime.policies import AnyPolicies
from drakit_driver.runtime.snapshot import by_key, snapshot_of

logger = logging.getLogger(__name__)

POLICIES_SECONDS = 30.0
"""Time limit for `apply_policies`."""

AnyDriver = Driver[Any, Any]
ValueT = TypeVar("ValueT")


class DriverCalls:
    """Calls the methods of one driver. Raises only DeviceFailedError."""

    def __init__(self, name: str, driver: AnyDriver, traits: DriverTraits) -> None:
        self._name = name
        self._driver = driver
        self._traits = traits
        self._inventory = Inventory(devices=())
        self._by_key: dict[tuple[str, str] | None, Device] | None = None

    def published(self, inventory: Inventory) -> None:
        """Store the inventory with the driver's own device objects, because later calls pass their
        edits back to the driver."""
        self._inventory, self._by_key = inventory, None

    async def apply_policies(self, policies: AnyPolicies) -> None:
        """Pass the policies to the driver. If this raises DeviceFailedError, the previous policies
        stay in effect."""
        try:
            async with asyncio.timeout(POLICIES_SECONDS):
                await self._call("apply_policies", dict(policies))
        except TimeoutError:
            text = f"driver {self._name} did not apply its policies in {POLICIES_SECONDS:.0f} s"
            raise DeviceFailedError(text) from None

    # ------------------------------------------------------------ preparing

    async def prepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, Sequence[PreparedDevice] | DeviceFailedError]:
        """Implement :meth:`.Calls.prepare`."""
        if "prepare" in self._traits.batches:
            return await self._prepare_claims(batch)
        return await self._by_device(batch, self._prepare_device)

    async def _prepare_device(
        self, item: AllocatedClaim, device: AllocatedDevice, index: int
    ) -> PreparedDevice:
        known = self._checked(device, index)
        answer = await self._call("prepare", item.claim, known, index=index)
        return self._prepared(answer, what="prepare", index=index)

    async def _prepare_claims(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, Sequence[PreparedDevice] | DeviceFailedError]:
        results: dict[str, Sequence[PreparedDevice] | DeviceFailedError] = {}
        due: list[AllocatedClaim] = []
        for item in batch:
            try:
                due.append(self._all_checked(item))
            except DeviceFailedError as error:
                results[item.claim.uid] = error.alone()
        if due:
            for uid, each in (await self._call_for_claims("prepare_claims", due)).items():
                results[uid] = self._all_prepared(each, what="prepare_claims")
        return results

    def _all_prepared(
        self, answer: object, *, what: str
    ) -> Sequence[PreparedDevice] | DeviceFailedError:
        """Convert the driver's result for a claim to a list with the result for each device, or to
        an error."""
        if isinstance(answer, Exception):
            return self._failure(answer, what=what)
        if not isinstance(answer, Sequence):
            return self._unusable(f"{kind_of(answer)}, which is not a sequence of Edits", what=what)
        try:
            results = tuple(cast("Sequence[object]", answer))
            return tuple(
                [self._prepared(each, what=what, index=i) for i, each in enumerate(results)]
            )
        except Exception as error:  # the vendor's own sequence type may raise anything
            return self._failure(error, what=what)

    def _prepared(self, answer: object, *, what: str, index: int) -> PreparedDevice:
        if not isinstance(answer, Edits | PreparedDevice):
            text = f"{kind_of(answer)}, which is neither an Edits nor a PreparedDevice"
            raise self._unusable(text, what=what, index=index)
        try:
            if isinstance(answer, Edits):
                return PreparedDevice(edits=snapshot_of(answer))
            copy = _copied(answer)
        except Exception as error:
            failure = self._failure(error, what=what, index=index)
        else:
            if not isinstance(copy, str):
                return copy
            failure = self._unusable(f"a PreparedDevice whose {copy}", what=what, index=index)
        raise failure

    # ------------------------------------------------------------ unpreparing

    async def unprepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, DeviceFailedError | None]:
        """Implement :meth:`.Calls.unprepare`."""
        if "unprepare" in self._traits.batches:
            return await self._unprepare_claims(batch)
        return _errors(await self._by_device(batch, self._unprepare_device))

    async def _unprepare_device(
        self, item: AllocatedClaim, device: AllocatedDevice, index: int
    ) -> None:
        known = self._checked(device, index, lenient=True)
        await self._call("unprepare", item.claim, known, index=index)
        await self._reset(item, known, index)

    async def _unprepare_claims(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, DeviceFailedError | None]:
        what = "unprepare_claims"
        due = {item.claim.uid: self._all_checked(item, lenient=True) for item in batch}
        results: dict[str, DeviceFailedError | None] = {}
        undone: list[AllocatedClaim] = []
        for uid, each in (await self._call_for_claims(what, list(due.values()))).items():
            if each is None and uid in due and self._traits.resets:
                undone.append(due[uid])
            elif isinstance(each, Exception):
                results[uid] = self._failure(each, what=what)
            elif each is not None:
                text = f"{kind_of(each)} for a claim, which is neither None nor an exception"
                results[uid] = self._unusable(text, what=what)
            else:
                results[uid] = None
        return {**results, **_errors(await self._by_device(undone, self._reset))}

    async def _reset(self, item: AllocatedClaim, device: AllocatedDevice, index: int) -> None:
        """Reset a device if the driver supports that, unless other claims may be using the
        device."""
        if self._traits.resets and device.share_id is None and not device.admin_access:
            await self._call("reset", device, index=index)

    # ------------------------------------------------------------ checking

    async def check(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, bool]:
        """Implement :meth:`.Calls.check`."""
        results: dict[str, bool] = {}
        for uid, each in (await self._by_device(batch, self._check_device)).items():
            if isinstance(each, DeviceFailedError):
                # If the check fails, the state of the device is unknown.
                facts = {"driver": self._name, "claim_uid": uid, "error": str(each)}
                logger.warning("driver cannot check a claim", extra=facts)
                results[uid] = False
            else:
                results[uid] = all(each)
        return results

    async def _check_device(
        self, item: AllocatedClaim, device: AllocatedDevice, index: int
    ) -> bool:
        known = self._checked(device, index)
        answer = await self._call("check", item.claim, known, index=index)
        if isinstance(answer, bool):
            return answer
        raise self._unusable(f"{kind_of(answer)}, which is not a bool", what="check")

    # ------------------------------------------------------------ driver arguments

    def _checked(
        self, device: AllocatedDevice, index: int, *, lenient: bool = False
    ) -> AllocatedDevice:
        """Return a device with its validated parameters and, if the driver lists it, its edits."""
        if self._by_key is None:
            self._by_key = by_key(self._inventory)
        published = self._by_key.get((device.pool, device.name))
        edits = None if published is None else published.edits
        known = replace(device, edits=edits, published=published)
        if (kind := self._traits.parameters_type) is None:
            return known
        versions = self._traits.parameter_versions
        return with_parameters(
            known, kind, versions=versions, driver=self._name, index=index, lenient=lenient
        )

    def _all_checked(self, item: AllocatedClaim, *, lenient: bool = False) -> AllocatedClaim:
        devices = [self._checked(each, i, lenient=lenient) for i, each in enumerate(item.devices)]
        return replace(item, devices=tuple(devices))

    # ------------------------------------------------------------ driver results

    async def _call(self, what: str, *arguments: object, index: int | None = None) -> object:
        """Call a driver method, which may be synchronous or asynchronous."""
        try:
            answer = getattr(self._driver, what)(*arguments)
            return await answer if inspect.isawaitable(answer) else answer
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a PyO3 panic is not an Exception
            failure = self._failure(error, what=what, index=index)
        raise failure

    async def _call_for_claims(
        self, what: str, claims: Sequence[AllocatedClaim]
    ) -> Mapping[str, object]:
        answer = await self._call(what, claims)
        try:
            if isinstance(answer, Mapping):
                return dict(cast("Mapping[str, object]", answer))
            text = f"{kind_of(answer)}, which is not a mapping of claims"
            failure = self._unusable(text, what=what)
        except Exception as error:  # the vendor's own mapping type may raise anything
            failure = self._failure(error, what=what)
        raise failure

    def _failure(
        self, error: BaseException, *, what: str, index: int | None = None
    ) -> DeviceFailedError:
        return failure_of(error, driver=self._name, what=what, index=index).alone()

    def _unusable(self, answer: str, *, what: str, index: int | None = None) -> DeviceFailedError:
        return unusable_result(answer, driver=self._name, what=what, index=index)

    async def _by_device(
        self,
        batch: Sequence[AllocatedClaim],
        call: Callable[[AllocatedClaim, AllocatedDevice, int], Coroutine[Any, Any, ValueT]],
    ) -> Mapping[str, Sequence[ValueT] | DeviceFailedError]:
        """Call a function for each device of each claim. A failure affects only its claim. Calls
        run concurrently, except that calls with common hardware run one at a time."""
        begun = [
            (device, partial(call, item, device, i))
            for item in batch
            for i, device in enumerate(item.devices)
        ]
        if len(begun) == 1:  # no separate task needed
            outcomes = iter([await _settle(begun[0][1])])
        else:
            order = Order()
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(order.run(hardware_keys([device]), partial(_settle, each)))
                    for device, each in begun
                ]
            outcomes = iter([task.result() for task in tasks])
        results: dict[str, Sequence[ValueT] | DeviceFailedError] = {}
        for item in batch:
            values: list[ValueT] = []
            failures: list[DeviceFailedError] = []
            for outcome in islice(outcomes, len(item.devices)):
                if isinstance(outcome, DeviceFailedError):
                    failures.append(outcome)
                else:
                    values.append(outcome)
            results[item.claim.uid] = failures[0] if failures else values
        return results


def _copied(answer: PreparedDevice) -> PreparedDevice | str:
    """Return a copy of a driver's result, or the problem if the result is invalid."""
    data = cast("object", answer.data)
    prepared: PreparedDevice = snapshot_of(replace(answer, data=None))
    if not isinstance(cast("object", prepared.edits), Edits):
        return f"edits are {kind_of(answer.edits)}, which is not an Edits"
    # Import lazily: most drivers return only edits, so a driver's own process usually does not need
    # this module.
    from drakit_formats.resource.status import checked, data_copy

    try:
        return checked(prepared if data is None else replace(prepared, data=data_copy(data)))
    except ValueError as error:
        return str(error)


async def _settle(
    call: Callable[[], Coroutine[Any, Any, ValueT]],
) -> ValueT | DeviceFailedError:
    try:
        return await call()
    except DeviceFailedError as error:
        return error.alone()


def _errors(
    answers: Mapping[str, Sequence[None] | DeviceFailedError],
) -> Mapping[str, DeviceFailedError | None]:
    return {
        uid: each if isinstance(each, DeviceFailedError) else None for uid, each in answers.items()
    }
