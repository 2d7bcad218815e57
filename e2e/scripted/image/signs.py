"""
A driver with policies: each policy puts up a number of signs on the nodes that it selects.

It must not know who runs it, or Kubernetes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from drakit import (
    Device,
    DevicePolicy,
    Driver,
    DriverConfig,
    DriverError,
    Edits,
    Inventory,
    LeftOut,
    NoParameters,
    Policy,
    PolicyOutcome,
    PolicyResource,
)

MAX_SIGNS = 3
"""Signs of one policy."""


class SignPolicy(DevicePolicy):
    signs: Annotated[int, Field(ge=0)]
    """The number of signs."""

    text: str = ""
    """The text of the signs. The driver refuses all policies if one of them shows ``forbidden``."""

    node_selector: Mapping[str, str] = Field(default_factory=dict[str, str])


class Signs(Driver[DriverConfig, NoParameters, SignPolicy]):
    """Signs."""

    name: ClassVar[str] = "signs.test.drakit.dev"
    policy_resource: ClassVar[PolicyResource | None] = PolicyResource(
        group="signs.test.drakit.dev", version="v1", plural="signpolicies"
    )
    side_effects: ClassVar[bool] = False
    policies: Mapping[str, Policy[SignPolicy]] = {}

    def apply_policies(self, policies: Mapping[str, Policy[SignPolicy]]) -> None:
        for policy in policies.values():
            if policy.spec.text == "forbidden":
                raise DriverError(f"policy {policy.name}: spec.text: choose another text")
        self.policies = policies

    async def devices(self) -> AsyncIterator[Inventory]:
        last: tuple[object, object] | None = None
        while True:
            now = self.policies, self.node.labels
            if now != last:
                last = now
                yield self._inventory()
            await asyncio.sleep(0.1)

    def _inventory(self) -> Inventory:
        devices: list[Device] = []
        left_out: list[LeftOut] = []
        outcomes: list[PolicyOutcome] = []
        labels = self.node.labels or {}
        for name, policy in sorted(self.policies.items()):
            spec = policy.spec
            if not spec.node_selector.items() <= labels.items():
                continue
            published = min(spec.signs, MAX_SIGNS)
            devices += [
                Device(name=f"{name}-{index}", edits=Edits(env={"SIGN": spec.text}))
                for index in range(published)
            ]
            left_out += [
                LeftOut(
                    device=f"/signs/{name}/{index}",
                    policy=name,
                    reason="TooMany",
                    message=f"a policy has at most {MAX_SIGNS} signs",
                )
                for index in range(published, spec.signs)
            ]
            outcomes.append(PolicyOutcome(policy=name, matched=spec.signs, published=published))
        return Inventory(devices=devices, left_out=left_out, policies=outcomes)
