"""Drivers that confuse the claims that share a device."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from drakit import CounterSet, Device, DeviceNode, DriverError, Health, Inventory
from tests.fakes.broken.tidy import Tidy


class AllShares(Tidy):
    """With one share it takes all of them away."""

    def unprepare(self, claim, device):
        for place in self.run.glob(f"*-{device.name}-*"):
            if device.share_id is not None or place == self.place(claim, device):
                place.rmdir()
        super().unprepare(claim, device)


class AdminResets(Tidy):
    """Unprepare of a claim with admin access takes the lamp from its holder."""

    def unprepare(self, claim, device):
        if device.admin_access:
            for place in self.run.glob(f"*-{device.name}-*"):
                place.rmdir()
        super().unprepare(claim, device)


class RefusesAdmin(Tidy):
    """A lamp has one claim, even if the other only looks."""

    def make(self, claim, device, mode):
        mine = self.place(claim, device)
        if any(place != mine for place in self.run.glob(f"*-{device.name}-whole")):
            raise DriverError("the lamp is another claim's")
        return super().make(claim, device, mode)


class OneController(Tidy):
    """Without a fault: all lamps have a common device node."""

    def make(self, claim, device, mode):
        node = DeviceNode(
            path="/dev/null", type="c", major=1, minor=3, identity=self.identity(device)
        )
        return replace(super().make(claim, device, mode), device_nodes=(node,))

    def identity(self, device) -> str:
        return "controller"


class ManyControllers(OneController):
    """The common device node has the identity of each lamp."""

    def identity(self, device) -> str:
        return device.name


class Panels(Tidy):
    """Has no fault: in addition to its lamps, it has a panel, as a whole or in two halves."""

    async def devices(self):
        light = CounterSet(name="panel", counters={"light": "4"})
        yield Inventory(devices=self.listed(), counter_sets=[light])
        await asyncio.Event().wait()

    def listed(self):
        amounts = {"panel": "4", "panel-left": "2", "panel-right": "2"}
        panels = [
            Device(name=name, consumes={"panel": {"light": amount}}, health=Health.healthy())
            for name, amount in amounts.items()
        ]
        return [*super().listed(), *panels]


class AllParts(Panels):
    """Unpreparing one half of the panel removes the other one as well."""

    def unprepare(self, claim, device):
        if device.name.startswith("panel-"):
            for place in self.run.glob("*-panel-*"):
                place.rmdir()
        super().unprepare(claim, device)


class NeverWhole(Panels):
    """After it was split, the panel is never whole again."""

    def make(self, claim, device, mode):
        halved = self.notes / "halved"
        if device.name == "panel" and halved.exists():
            raise DriverError("the panel is in halves")
        edits = super().make(claim, device, mode)
        if device.name.startswith("panel-"):
            halved.touch()
        return edits
