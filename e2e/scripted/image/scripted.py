"""
Drivers that do what a test tells them: wait, fail, hang, and tell what they were asked.

A driver looks into `script.json` in its folder at each call, adds a line to `calls.jsonl` at the
call's beginning and end, and keeps a file in `held/` for each device that a claim has: its side
effect, which a crash leaves behind and an unprepare must remove. Script and lines are described in
`e2e/scripted/control.py`, which writes the one and reads the other.

It must not know who runs it, or Kubernetes.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from drakit import AllocatedDevice, ClaimReference, Device, Driver, DriverConfig, DriverError, Edits

LOOK_SECONDS = 0.02
"""How often a call that hangs looks whether the script lets it go on."""


class ScriptedConfig(DriverConfig):
    folder: Path
    """Where the script is read and the calls are written: the driver's data directory."""

    devices: int = 4
    """How many devices there are."""


class Scripted(Driver[ScriptedConfig]):
    """Lamps."""

    name: ClassVar[str] = "scripted.test.drakit.dev"
    config_type = ScriptedConfig
    kind: ClassVar[str] = "lamp"

    def __init__(self, config: ScriptedConfig, node: Any) -> None:
        super().__init__(config, node)
        self._held = config.folder / "held"
        self._held.mkdir(parents=True, exist_ok=True)

    async def devices(self) -> AsyncIterator[Collection[Device]]:
        yield [
            Device(
                name=f"{self.kind}-{index}",
                attributes={"kind": self.kind, "index": index},
                capacity={"light": "8"},
            )
            for index in range(self.config.devices)
        ]
        await asyncio.Event().wait()

    async def prepare(self, claim: ClaimReference, device: AllocatedDevice) -> Edits:
        with self._told("prepare", claim, device) as rule:
            # The effect comes first, so that a call which is cut or fails leaves something to undo.
            self._mark(claim, device)
            await self._follow(rule)
        # Two shares of a device may be in one container.
        name = "_".join(["SCRIPTED", device.name, *([device.share_id] if device.share_id else [])])
        return Edits(env={name.upper().replace("-", "_"): json.dumps(_facts(device))})

    async def unprepare(self, claim: ClaimReference, device: AllocatedDevice) -> None:
        with self._told("unprepare", claim, device) as rule:
            await self._follow(rule)
            self._mark_of(claim, device).unlink(missing_ok=True)

    async def check(self, claim: ClaimReference, device: AllocatedDevice) -> bool:
        with self._told("check", claim, device):
            return self._mark_of(claim, device).exists()

    # ------------------------------------------------------------ effects

    def _mark(self, claim: ClaimReference, device: AllocatedDevice) -> None:
        """Leave the effect, and tell of any other claim that has an exclusive device now."""
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
        try:
            return json.loads((self.config.folder / "script.json").read_text())
        except FileNotFoundError:
            return []

    def _rule(self, operation: str, device: str) -> dict[str, Any]:
        """The first rule that fits and is not used up."""
        for rule in self._rules():
            fits = rule["operation"] == operation and rule["device"] in (None, device)
            # Counted in the file: a plugin that was killed goes on where it was.
            if fits and (rule["times"] is None or self._uses(rule["id"]) < rule["times"]):
                return rule
        return {}

    # ------------------------------------------------------------ what is told

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
            self._tell("cancelled", facts)
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
    """Horns: another driver of the same daemon."""

    name: ClassVar[str] = "scripted-two.test.drakit.dev"
    kind: ClassVar[str] = "horn"


def _facts(device: AllocatedDevice) -> dict[str, Any]:
    """What an allocation says, as JSON."""
    return {
        "device": device.name,
        "pool": device.pool,
        "request": device.request,
        "share": device.share_id,
        "admin": device.admin_access,
        "capacity": dict(device.consumed_capacity),
        "configs": [dict(config) for config in device.configs],
    }
