"""A driver for tests: its class attribute `behaviour` has what a test controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from pydantic import Field

from drakit import (
    AllocatedDevice,
    ClaimReference,
    Device,
    DeviceParameters,
    Driver,
    DriverConfig,
    DriverError,
    Edits,
    Health,
    Inventory,
)
from drakit.driver import ReleasePendingError

LAMPS = (Device(name="lamp-0"), Device(name="lamp-1", pool="roof"))


class LampConfig(DriverConfig):
    watts: Annotated[int, Field(ge=1)] = 5


class LampParameters(DeviceParameters):
    color: str = "white"


class Behaviour:
    """What the driver does, and what it was asked."""

    def __init__(self) -> None:
        self.listed: Inventory = Inventory(devices=LAMPS)
        self.changed = asyncio.Event()
        self.failure: Exception | None = None
        """The end of the stream of devices."""
        self.refuses: Exception | None = None
        self.calls: list[tuple[str, str, str]] = []
        self.during: Callable[[str], Any] | None = None
        """Awaited in each call, with its name."""
        self.made = 0
        self.closed = 0


class Lamps(Driver[LampConfig, LampParameters]):
    name = "gpu.example.com"
    health_period_seconds = 0.02
    behaviour: Behaviour

    def __init__(self, config: LampConfig, node: Any) -> None:
        super().__init__(config, node)
        self.behaviour.made += 1
        if self.behaviour.refuses is not None:
            raise self.behaviour.refuses

    async def devices(self) -> AsyncIterator[Inventory]:
        while True:
            yield self.behaviour.listed
            listed = self.behaviour.listed
            while self.behaviour.listed is listed:
                if (failure := self.behaviour.failure) is not None:
                    self.behaviour.failure = None
                    raise failure
                await asyncio.sleep(0.01)

    async def prepare(
        self, claim: ClaimReference, device: AllocatedDevice[LampParameters]
    ) -> Edits:
        await self._called("prepare", claim, device)
        if device.parameters.color == "black":
            raise DriverError(f"lamp {device.name} cannot be black; choose another color")
        if device.parameters.color == "bug":
            raise KeyError(device.name)
        return Edits(
            env={"GPU_LAMP": f"{device.name} {device.parameters.color} {self.config.watts}"}
        )

    async def unprepare(
        self, claim: ClaimReference, device: AllocatedDevice[LampParameters | None]
    ) -> None:
        await self._called("unprepare", claim, device)
        if claim.name == "hot":
            raise ReleasePendingError(f"lamp {device.name} cools down")

    async def reset(self, device: AllocatedDevice[LampParameters | None]) -> None:
        await self._called("reset", None, device)

    async def check(self, claim: ClaimReference, device: AllocatedDevice[LampParameters]) -> bool:
        await self._called("check", claim, device)
        return device.name != "lamp-1"

    def health(self, device: Device) -> Health:
        return Health.unhealthy("no light") if device.pool else Health.healthy()

    async def _called(
        self, what: str, claim: ClaimReference | None, device: AllocatedDevice[Any]
    ) -> None:
        self.behaviour.calls.append((what, "" if claim is None else claim.name, device.name))
        if self.behaviour.during is not None:
            await self.behaviour.during(what)

    def close(self) -> None:
        self.behaviour.closed += 1
