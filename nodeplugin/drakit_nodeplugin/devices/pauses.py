"""
What endpoints say while the manager makes a pause: the loop has other things to do than to compare
devices.

An inventory is looked at once; those of the same endpoint that come in the pause after it replace
each other, and the last one counts. What is said of health in between is kept in its order.

It must not know what is done with an inventory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from drakit.device import Health, Inventory
from drakit_nodeplugin.endpoints.endpoint import DeviceKey

__all__ = ("Pauses", "Waiting")

PAUSE_SECONDS = 0.1
"""After each inventory."""

PAUSE_SECONDS_A_DEVICE = 20e-6
"""And this for each of its devices: what it takes to compare one, several times over."""


class Waiting:
    """What an endpoint has said in the pause."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.words: dict[DeviceKey, Health] = {}
        """Said after that inventory."""


class Pauses:
    """The pauses of a driver's endpoints. Times are the loop's."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._waiting: dict[str, Waiting] = {}

    def begin(self, endpoint: str, *, devices: int, now: float) -> None:
        """An inventory was looked at that has so many devices."""
        self._until[endpoint] = now + PAUSE_SECONDS + PAUSE_SECONDS_A_DEVICE * devices

    def put(self, endpoint: str, inventory: Inventory, *, now: float) -> float | None:
        """Keep an inventory and give until when; None if it can be looked at now."""
        until = self._until.get(endpoint, -math.inf)
        if now >= until:
            return None
        self._waiting[endpoint] = Waiting(inventory)
        return until

    def put_words(self, endpoint: str, words: Mapping[DeviceKey, Health]) -> bool:
        """Keep words that were said after an inventory that waits; False if none does."""
        waiting = self._waiting.get(endpoint)
        if waiting is not None:
            waiting.words.update(words)
        return waiting is not None

    def take(self, endpoint: str) -> Waiting | None:
        """Give what waits, if anything does; it waits no more."""
        return self._waiting.pop(endpoint, None)

    def forget(self, endpoint: str) -> None:
        """The endpoint is gone."""
        self._until.pop(endpoint, None)
        self._waiting.pop(endpoint, None)

    def waiting(self) -> list[str]:
        """Say which endpoints have something that waits."""
        return list(self._waiting)

    def over(self, now: float) -> list[str]:
        """Say of which endpoints what waits can be looked at."""
        return [endpoint for endpoint in self._waiting if now >= self._until[endpoint]]

    def ends(self) -> Iterable[float]:
        """Give until when something waits."""
        return [self._until[endpoint] for endpoint in self._waiting]
