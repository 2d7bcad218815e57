"""An endpoint without a thread: its driver is called in the test's own loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from drakit import Driver, PreparedDevice
from drakit.device import AllocatedClaim, AllocatedDevice, ClaimReference
from drakit_driver.runtime.calls import DriverCalls
from drakit_driver.runtime.contract import DriverTraits, traits_of
from drakit_driver.runtime.endpoint import Caller
from drakit_driver.runtime.failures import DeviceFailedError, EndpointStoppedError


class DirectEndpoint(Caller):
    """Calls a driver like an endpoint, and records its :class:`.Calls`."""

    def __init__(self, driver: Driver[Any, Any], *, node: str, traits: DriverTraits | None = None):
        super().__init__(driver.name, traits=traits or traits_of(type(driver)), node=node)
        self.driver = driver
        self.calls: list[tuple[str, list[str]]] = []
        """Each call, with the UIDs of its claims."""
        self.stopped: EndpointStoppedError | None = None
        self.failure: Exception | None = None
        """Raised instead of calling, as a connection may."""
        self._driver_calls = DriverCalls(driver.name, driver, self.traits)

    def unavailable(self) -> EndpointStoppedError | None:
        return self.stopped

    async def _connection(self, ended: Any = None) -> _Calls | EndpointStoppedError:
        return self.unavailable() or ended or _Calls(self)


Work = Callable[[Sequence[AllocatedClaim]], Awaitable[Mapping[str, Any]]]
"""A method of an endpoint."""


async def call_batch(
    work: Work, *items: tuple[ClaimReference, Sequence[AllocatedDevice[Any]]]
) -> list[Any]:
    """Call for a batch of claims; return the results in its order, errors as well."""
    batch = [AllocatedClaim(claim=claim, devices=tuple(devices)) for claim, devices in items]
    results = await work(batch)
    return [results[item.claim.uid] for item in batch]


async def call(work: Work, claim: ClaimReference, devices: Sequence[AllocatedDevice[Any]]) -> Any:
    """Call for one claim, and raise its error."""
    return result_of(await work([AllocatedClaim(claim=claim, devices=tuple(devices))]))


def result_of(results: Mapping[str, Any]) -> Any:
    """Return the result of a call for one claim; raise it if it is an error."""
    (result,) = results.values()
    if isinstance(result, Exception):
        raise result
    return result


class _Calls:
    def __init__(self, endpoint: DirectEndpoint) -> None:
        self._endpoint = endpoint

    async def prepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, Sequence[PreparedDevice] | DeviceFailedError]:
        self._keep("prepare", batch)
        return await self._endpoint._driver_calls.prepare(batch)

    async def unprepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, DeviceFailedError | None]:
        self._keep("unprepare", batch)
        return await self._endpoint._driver_calls.unprepare(batch)

    async def check(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, bool]:
        self._keep("check", batch)
        return await self._endpoint._driver_calls.check(batch)

    def _keep(self, what: str, batch: Sequence[AllocatedClaim]) -> None:
        self._endpoint.calls.append((what, [item.claim.uid for item in batch]))
        if self._endpoint.failure is not None:
            raise self._endpoint.failure
