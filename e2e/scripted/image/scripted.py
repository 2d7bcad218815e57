"""
Drivers that follow a test's script: they wait, fail, hang, and record their calls.

A driver reads `script.json` in its folder at each call, adds a line to `calls.jsonl` at the start
and end of the call, and keeps a file in `held/` for each device that a claim has. This file is its
side effect, which remains after a crash and which an unprepare must remove.
`e2e/scripted/control.py` writes the script, reads the lines, and describes both.

Does not depend on Kubernetes.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from drakit import (
    AllocatedDevice,
    Capacity,
    CapacityRange,
    ClaimReference,
    Condition,
    CounterSet,
    Device,
    Driver,
    DriverConfig,
    DriverError,
    Edits,
    Health,
    Inventory,
    NetworkData,
    PreparedDevice,
)

LOOK_SECONDS = 0.02
"""Polling interval of a call that hangs."""

STOCK_SECONDS = 0.1
"""Polling interval of the devices."""

SHARED = "shared-0"
"""The device that claims share."""


class ScriptedConfig(DriverConfig):
    folder: Path
    """The driver's data directory, with the script and the log of calls."""

    devices: int = 4
    """The number of devices."""


class Scripted(Driver[ScriptedConfig]):
    """Lamps."""

    name: ClassVar[str] = "scripted.test.drakit.dev"
    config_type = ScriptedConfig
    kind: ClassVar[str] = "lamp"
    reports_health: ClassVar[bool] = True

    def __init__(self, config: ScriptedConfig, node: Any) -> None:
        super().__init__(config, node)
        self._held = config.folder / "held"
        self._held.mkdir(parents=True, exist_ok=True)

    async def devices(self) -> AsyncIterator[Collection[Device] | Inventory]:
        reported: dict[str, Any] | None = None
        while True:
            stock = self._json("inventory.json", {})
            reason = stock.get("stop")
            if reason and reported is not None:
                raise DriverError(reason)
            if not reason and stock != reported:
                reported = stock
                yield self._listed(stock)
            await asyncio.sleep(STOCK_SECONDS)

    async def prepare(self, claim: ClaimReference, device: AllocatedDevice) -> PreparedDevice:
        with self._told("prepare", claim, device) as rule:
            # Create the effect first, so that a call that is interrupted or fails leaves something
            # to undo.
            self._mark(claim, device)
            await self._follow(rule)
        # Two shares of a device may be in one container.
        name = "_".join(["SCRIPTED", device.name, *([device.share_id] if device.share_id else [])])
        edits = Edits(env={name.upper().replace("-", "_"): json.dumps(_facts(device))})
        return PreparedDevice(
            edits=edits,
            conditions=(Condition(type="Ready", status="True", reason="Lit"),),
            data={"kind": self.kind},
            network_data=NetworkData(interface_name=device.name),
        )

    async def unprepare(self, claim: ClaimReference, device: AllocatedDevice) -> None:
        with self._told("unprepare", claim, device) as rule:
            await self._follow(rule)
            self._mark_of(claim, device).unlink(missing_ok=True)

    async def check(self, claim: ClaimReference, device: AllocatedDevice) -> bool:
        with self._told("check", claim, device):
            return self._mark_of(claim, device).exists()

    # ------------------------------------------------------------ the devices

    def _listed(self, stock: dict[str, Any]) -> Collection[Device] | Inventory:
        names = [f"{self.kind}-{index}" for index in range(self.config.devices)]
        listed = [
            Device(
                name=name,
                attributes={"kind": self.kind, "index": index},
                capacity={"light": "8"},
                health=self._health(stock, name),
            )
            for index, name in enumerate(names)
        ]
        if stock.get("shared"):
            steps = CapacityRange(min="1", step=stock.get("step", "1"))
            light = Capacity(value="8", default="1", valid_range=steps)
            listed.append(
                Device(
                    name=SHARED,
                    # An index that no test selects. Without the attribute, every selector on it
                    # would fail.
                    attributes={"kind": SHARED, "index": -1},
                    capacity={"light": light},
                    health=self._health(stock, SHARED),
                    allow_multiple_allocations=True,
                )
            )
        listed += [Device(**fields) for fields in stock.get("extra", ())]
        if not (sets := stock.get("counter_sets")):
            return listed
        return Inventory(devices=listed, counter_sets=[CounterSet(**fields) for fields in sets])

    def _health(self, stock: dict[str, Any], name: str) -> Health | None:
        if not self.reports_health:
            return None
        return Health(**stock.get("health", {}).get(name, {"status": "healthy"}))

    # ------------------------------------------------------------ effects

    def _mark(self, claim: ClaimReference, device: AllocatedDevice) -> None:
        """Create the effect, and record any other claim that has an exclusive device now."""
        mark = self._mark_of(claim, device)
        if mark.parent.name == "exclusive":
            others = [
                path.name for path in mark.parent.glob(f"{device.name}@*") if path.name != mark.name
            ]
            if others:
                self._tell("overlap", {"device": device.name, "claim": str(claim), "held": others})
        mark.parent.mkdir(exist_ok=True)
        mark.touch()

    def _mark_of(self, claim: ClaimReference, device: AllocatedDevice) -> Path:
        kind = "beside" if device.admin_access or device.share_id else "exclusive"
        share = f"@{device.share_id}" if device.share_id else ""
        return self._held / kind / f"{device.name}@{claim.uid}{share}"

    # ------------------------------------------------------------ the script

    async def _follow(self, rule: dict[str, Any]) -> None:
        await asyncio.sleep(rule.get("delay_seconds", 0))
        while rule.get("hang") and any(r["id"] == rule["id"] for r in self._rules()):
            if rule["hang"] == "blocking":
                time.sleep(LOOK_SECONDS)
            else:
                await asyncio.sleep(LOOK_SECONDS)
        if text := rule.get("fail"):
            raise DriverError(text)

    def _rules(self) -> list[dict[str, Any]]:
        return self._json("script.json", [])

    def _json(self, name: str, default: Any) -> Any:
        try:
            return json.loads((self.config.folder / name).read_text())
        except FileNotFoundError:
            return default

    def _rule(self, operation: str, device: str) -> dict[str, Any]:
        """Return the first rule that matches and is not used up."""
        for rule in self._rules():
            fits = rule["operation"] == operation and rule["device"] in (None, device)
            # Count the uses in the file, so that a plugin that was killed continues where it was.
            if fits and (rule["times"] is None or self._uses(rule["id"]) < rule["times"]):
                return rule
        return {}

    # ------------------------------------------------------------ records

    @contextmanager
    def _told(
        self, operation: str, claim: ClaimReference, device: AllocatedDevice
    ) -> Generator[dict[str, Any]]:
        rule = self._rule(operation, device.name)
        facts = {
            "operation": operation,
            "claim": str(claim),
            "claim_uid": claim.uid,
            "rule": rule.get("id"),
            **_facts(device),
        }
        self._tell("began", facts)
        try:
            yield rule
        except asyncio.CancelledError:
            self._tell("canceled", facts)
            raise
        except DriverError:
            self._tell("failed", facts)
            raise
        self._tell("ended", facts)

    def _tell(self, moment: str, facts: dict[str, Any]) -> None:
        line = json.dumps({"moment": moment, "at": time.time(), **facts})
        with (self.config.folder / "calls.jsonl").open("a") as calls:
            calls.write(f"{line}\n")

    def _uses(self, rule_id: str) -> int:
        try:
            lines = (self.config.folder / "calls.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return 0
        calls = [json.loads(line) for line in lines]
        return sum(call["moment"] == "began" and call["rule"] == rule_id for call in calls)


class ScriptedTwo(Scripted):
    """Horns: another driver in the same daemon, whose devices do not report health."""

    name: ClassVar[str] = "scripted-two.test.drakit.dev"
    kind: ClassVar[str] = "horn"
    reports_health: ClassVar[bool] = False


def _facts(device: AllocatedDevice) -> dict[str, Any]:
    """Return an allocation as JSON."""
    return {
        "device": device.name,
        "pool": device.pool,
        "request": device.request,
        "share": device.share_id,
        "admin": device.admin_access,
        "capacity": dict(device.consumed_capacity),
        "configs": [dict(config) for config in device.configs],
    }
