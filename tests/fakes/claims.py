"""Stand-ins for what the claims engine is made of: a claim source, a driver, bodies of claims."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from drakit import (
    AllocatedClaim,
    AllocatedDevice,
    ClaimReference,
    CounterSet,
    Device,
    DeviceNode,
    DriverError,
    Edits,
    PreparedDevice,
)
from drakit_driver.runtime.contract import CallError, DriverTraits
from drakit_driver.runtime.failures import DeviceFailedError, EndpointStoppedError, text_of
from drakit_formats.resource.claim import Claim, parse_claim
from drakit_nodeplugin.changes import Revision
from drakit_nodeplugin.claims.errors import ClaimGoneError, NoResponseError
from drakit_nodeplugin.claims.queue import ClaimQueue
from drakit_nodeplugin.claims.work import ClaimResult
from drakit_nodeplugin.state.holds import Hardware, PoolContent

DRIVER = "camera.example.com"
NODE = "node-1"


def reference(uid: str, *, name: str | None = None) -> ClaimReference:
    return ClaimReference(namespace="lab", name=name or f"claim-{uid}", uid=uid)


def claim_body(
    uid: str,
    *devices: str | dict[str, Any],
    node: str | None = NODE,
    name: str | None = None,
    allocated: bool = True,
    config: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """A ResourceClaim; a device is a name or the fields of a result."""
    body: dict[str, Any] = {
        "metadata": {"namespace": "lab", "name": name or f"claim-{uid}", "uid": uid}
    }
    if allocated:
        results = [
            {"driver": DRIVER, "pool": NODE, "request": "main"}
            | ({"device": device} if isinstance(device, str) else device)
            for device in devices
        ]
        devices_of_claim: dict[str, Any] = {"results": results}
        if config:
            devices_of_claim["config"] = [*config]
        body["status"] = {"allocation": {"devices": devices_of_claim}}
        if node is not None:
            term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
            body["status"]["allocation"]["nodeSelector"] = {"nodeSelectorTerms": [term]}
    return body


def opaque(
    parameters: Any, *requests: str, source: str = "FromClaim", driver: str = DRIVER
) -> dict[str, Any]:
    """A config of an allocation, for the driver and for these requests (for all if none)."""
    config = {"driver": driver, "parameters": parameters}
    return {"source": source, "requests": [*requests], "opaque": config}


class FakeClaims:
    """The claims of a cluster; `answers` can be taken away, and a claim removed or replaced."""

    def __init__(self) -> None:
        self.bodies: dict[str, dict[str, Any]] = {}
        self.answers = True

    def store(self, *bodies: dict[str, Any]) -> None:
        for body in bodies:
            self.bodies[body["metadata"]["name"]] = body

    async def fetch(self, reference: ClaimReference, *, timeout_seconds: float) -> Claim:
        await asyncio.sleep(0)
        if not self.answers:
            raise NoResponseError(claim=str(reference), cause="the API server does not respond")
        if reference.name not in self.bodies:
            raise ClaimGoneError(claim=str(reference))
        return parse_claim(self.bodies[reference.name])


class FakeDevices:
    """A driver: what is prepared at the moment, and how often it was asked."""

    def __init__(self, *, side_effects: bool = True, checks: bool = False) -> None:
        self.traits = DriverTraits(side_effects=side_effects, checks=checks)
        self.prepared: dict[str, str] = {}
        self.seen: list[AllocatedDevice] = []
        """The device of each prepare, as the driver receives it."""
        self.prepares = 0
        self.unprepares = 0
        self.others: dict[str, tuple[str, ...]] = {}
        """Names of CDI devices of others, by the device that gets them."""
        self.nodes: dict[str, tuple[DeviceNode, ...]] = {}
        """The device nodes of devices; one of the device's name for others."""
        self.results: dict[str, PreparedDevice] = {}
        """The results of devices other than edits."""
        self.failing: set[str] = set()
        self.out_of_order: set[str] = set()
        self.held: dict[str, asyncio.Event] = {}
        """Devices whose calls wait for an event."""
        self.reason_away: Callable[[], EndpointStoppedError] | None = None

    def unavailable(self) -> EndpointStoppedError | None:
        return self.reason_away() if self.reason_away is not None else None

    async def prepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, Sequence[PreparedDevice] | CallError]:
        return await results_of(self.prepare_claim, batch)

    async def unprepare(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, CallError | None]:
        return await results_of(self.unprepare_claim, batch)

    async def check(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, bool | CallError]:
        return await results_of(self.check_claim, batch)

    async def prepare_claim(
        self, claim: ClaimReference, devices: Sequence[AllocatedDevice]
    ) -> Sequence[PreparedDevice]:
        return await self._each(self.prepare_device, claim, devices)

    async def unprepare_claim(
        self, claim: ClaimReference, devices: Sequence[AllocatedDevice]
    ) -> None:
        await self._each(self.unprepare_device, claim, devices)

    async def check_claim(self, claim: ClaimReference, devices: Sequence[AllocatedDevice]) -> bool:
        return all(await self._each(self.check_device, claim, devices))

    async def prepare_device(
        self, claim: ClaimReference, device: AllocatedDevice
    ) -> PreparedDevice:
        self.prepares += 1
        self.seen.append(device)
        await self._call(device)
        self.prepared[device.name] = claim.uid
        edits = Edits(
            device_nodes=self.nodes.get(device.name, (DeviceNode(path=f"/dev/{device.name}"),)),
            cdi_devices=self.others.get(device.name, ()),
        )
        return replace(self.results.get(device.name, PreparedDevice()), edits=edits)

    async def unprepare_device(self, claim: ClaimReference, device: AllocatedDevice) -> None:
        self.unprepares += 1
        await self._call(device)
        if self.prepared.get(device.name) == claim.uid:
            del self.prepared[device.name]

    async def check_device(self, claim: ClaimReference, device: AllocatedDevice) -> bool:
        await self._call(device)
        return device.name not in self.out_of_order

    async def _call(self, device: AllocatedDevice) -> None:
        await asyncio.sleep(0)
        if device.name in self.held:
            await self.held[device.name].wait()
        if self.reason_away is not None:
            raise self.reason_away()
        if device.name in self.failing:
            raise DriverError(f"{device.name} is broken; unplug it and plug it in again")

    async def _each(
        self,
        call: Callable[[ClaimReference, AllocatedDevice], Awaitable[Any]],
        claim: ClaimReference,
        devices: Sequence[AllocatedDevice],
    ) -> list[Any]:
        """Call for all devices side by side; the first failure is raised once all have ended."""
        results = await asyncio.gather(*(call(claim, d) for d in devices), return_exceptions=True)
        for index, result in enumerate(results):
            if isinstance(result, DriverError):
                raise DeviceFailedError(text_of(result), index=index) from result
            if isinstance(result, BaseException):
                raise result
        return results


class FakeInventories:
    """A driver's inventory: only names, as with device plugins, until a test sets pools."""

    def __init__(self) -> None:
        self.revision = Revision()
        self.pools: Mapping[str, PoolContent] | None = None
        self.gone: set[str] = set()
        """Devices in the node's pool that are gone."""

    def hardware(self) -> Hardware | None:
        return None if self.pools is None else Hardware(pools=self.pools)

    def device(self, pool: str, name: str) -> Device | None:
        content = None if self.pools is None else self.pools.get(pool)
        return None if content is None else content.device(name)

    def is_gone(self, pool: str, device: str) -> bool:
        return pool == NODE and device in self.gone

    def list(self, *devices: Device, counter_sets: Sequence[CounterSet] = ()) -> None:
        """List devices in the node's pool."""
        content = PoolContent(
            devices={device.name: device for device in devices}, counter_sets=tuple(counter_sets)
        )
        self.pools = {NODE: content}
        self.revision.advance()


async def results_of(
    call: Callable[[ClaimReference, Sequence[AllocatedDevice]], Coroutine[Any, Any, Any]],
    batch: Sequence[AllocatedClaim],
) -> dict[str, Any]:
    """Call for each claim of a batch; give the results as an endpoint does."""

    async def result(item: AllocatedClaim) -> Any:
        try:
            return await call(item.claim, item.devices)
        except (DeviceFailedError, EndpointStoppedError) as error:
            return error

    results = await asyncio.gather(*map(result, batch))
    return {item.claim.uid: each for item, each in zip(batch, results, strict=True)}


async def prepare(queue: ClaimQueue, *claims: ClaimReference) -> dict[str, ClaimResult]:
    """Ask for claims as the kubelet does, with all the time of the world."""
    return dict(await queue.ask("prepare", claims, timeout_seconds=3600))


async def unprepare(queue: ClaimQueue, *claims: ClaimReference) -> dict[str, str | None]:
    """The same; give the errors."""
    answers = await queue.ask("unprepare", claims, timeout_seconds=3600)
    return {uid: answer.error for uid, answer in answers.items()}
