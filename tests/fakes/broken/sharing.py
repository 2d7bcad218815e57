"""Drivers for which one claim of a device is as good as the other."""

from __future__ import annotations

from drakit import DriverError
from tests.fakes.broken.tidy import Tidy


class AllShares(Tidy):
    """With one share it takes all of them away."""

    def unprepare(self, claim, device):
        for place in self.run.glob(f"*-{device.name}-*"):
            if device.share_id is not None or place == self.place(claim, device):
                place.rmdir()
        super().unprepare(claim, device)


class AdminResets(Tidy):
    """Who only looks at a lamp takes it from its holder."""

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
