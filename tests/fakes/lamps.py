"""A driver with policies, for tests: each policy makes a number of lamps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Annotated

from pydantic import Field

from drakit import (
    Device,
    DevicePolicy,
    Driver,
    DriverConfig,
    DriverError,
    Edits,
    Inventory,
    NoParameters,
    Policy,
    PolicyConflict,
    PolicyOutcome,
    PolicyResource,
    RejectedDevice,
)

LAMPS = "lamps.example.com"
POLICIES = "/apis/lamps.example.com/v1/lamppolicies"
LIMIT = 4


class LampPolicy(DevicePolicy):
    lamps: Annotated[int, Field(ge=0)]
    """At most four of them are published."""

    room: str = ""
    """The older of two policies for one room applies. ``cellar`` is refused."""

    node_selector: Mapping[str, str] = Field(default_factory=dict[str, str])


class Lamps(Driver[DriverConfig, NoParameters, LampPolicy]):
    name = LAMPS
    policy_resource = PolicyResource(group="lamps.example.com", version="v1", plural="lamppolicies")
    side_effects = False

    def __init__(self, config, node) -> None:
        super().__init__(config, node)
        self.policies: Mapping[str, Policy[LampPolicy]] = {}
        self.changed = asyncio.Event()

    def apply_policies(self, policies: Mapping[str, Policy[LampPolicy]]) -> None:
        if any(policy.spec.room == "cellar" for policy in policies.values()):
            raise DriverError("spec.room: the cellar has no lamps; choose another room")
        self.policies = policies
        self.changed.set()

    async def devices(self) -> AsyncIterator[Inventory]:
        while True:
            self.changed.clear()
            yield self.inventory()
            await self.changed.wait()

    async def prepare(self, claim, device) -> Edits:
        if device.edits is None:
            raise DriverError(f"lamp {device.name} is gone")
        return device.edits

    def inventory(self) -> Inventory:
        devices: list[Device] = []
        rejected: list[RejectedDevice] = []
        outcomes: list[PolicyOutcome] = []
        rooms: dict[str, str] = {}
        labels = self.node.labels or {}
        ordered = sorted(self.policies.values(), key=lambda each: (each.created, each.name))
        for policy in ordered:
            spec = policy.spec
            if not spec.node_selector.items() <= labels.items():
                continue
            owner = rooms.setdefault(spec.room or policy.name, policy.name)
            if owner != policy.name:
                conflict = PolicyConflict(device=spec.room, policy=owner)
                outcomes.append(
                    PolicyOutcome(policy=policy.name, matched=spec.lamps, conflicts=(conflict,))
                )
                continue
            published = min(spec.lamps, LIMIT)
            devices += [
                Device(name=f"{policy.name}-{n}", edits=Edits(env={"LAMP": f"{policy.name}-{n}"}))
                for n in range(published)
            ]
            rejected += [
                RejectedDevice(
                    device=f"/lamps/{policy.name}/{n}",
                    policy=policy.name,
                    reason="TooMany",
                    message=f"a policy has at most {LIMIT} lamps",
                )
                for n in range(published, spec.lamps)
            ]
            outcomes.append(
                PolicyOutcome(policy=policy.name, matched=spec.lamps, published=published)
            )
        return Inventory(devices=devices, rejected=rejected, policies=outcomes)
