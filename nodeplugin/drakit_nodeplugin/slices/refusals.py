"""
What the API server refuses of one pool: it is not written again at once, and the rest is.

A slice that is refused is tried again later, as it may be a policy of the cluster that refuses it;
a device that the answer names is left out for as long as it stays the same.

It must not know how slices are written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from drakit.backoff import Backoff
from drakit_nodeplugin.devices.pools import DesiredDevice, DesiredPool
from drakit_nodeplugin.slices.contents import SliceContent

__all__ = ("Refusals",)


class Refusals:
    """The refusals of one pool; times are the loop's."""

    def __init__(self, backoff: Backoff) -> None:
        self.slices: dict[str, SliceContent] = {}
        """The contents that were refused, by the slice's name."""

        self.error: str | None = None
        """Why slices are refused; None if none is."""

        self.until = 0.0
        """When they are tried again."""

        self._backoff = backoff
        self._devices: dict[str, tuple[DesiredDevice, str]] = {}

    def forget(self) -> None:
        """The API server may take other things than before."""
        self.slices.clear()
        self._devices.clear()

    def retry(self, now: float) -> None:
        """Let slices be tried again if it is time."""
        if now >= self.until:
            self.slices.clear()

    def refused(self, name: str, content: SliceContent, devices: Mapping[str, str]) -> bool:
        """A slice was refused, with what was said of single devices; tell whether there is
        something to write without them."""
        self.slices[name] = content
        known = {each: why for each, why in devices.items() if each in content.devices}
        for each, why in known.items():
            self._devices[each] = (content.devices[each], f"the API server refuses it: {why}")
        return bool(known)

    def written(self, name: str) -> None:
        """A slice was taken."""
        self.slices.pop(name, None)

    def round_ended(self, errors: Collection[Exception], now: float) -> None:
        """Take in why slices were refused in a round of writes."""
        if errors:
            self.error = "; ".join(map(str, errors))
            self.until = now + self._backoff.next_seconds()
        if not self.slices:
            self.error = None
            self._backoff.succeeded()

    def left_out(self, pool: DesiredPool) -> tuple[DesiredPool, dict[str, str]]:
        """Give the pool without devices that were refused, as long as they are the same, and why
        they are left out, by name."""
        if not self._devices:
            return pool, {}
        wanted = {each.name: each for each in pool.devices}
        self._devices = {
            name: (device, why)
            for name, (device, why) in self._devices.items()
            if wanted.get(name) == device
        }
        why_not = {name: why for name, (_, why) in self._devices.items()}
        kept = tuple(each for each in pool.devices if each.name not in why_not)
        return replace(pool, devices=kept), why_not
