"""
Whether the API server keeps taints: it is asked before a device is written that must not be given
to pods without its taint, not after.

An API server that does not know taints drops them and says nothing, so that the answer to a dry run
is looked at. Nothing is asked where nothing is tainted, or once the server has kept some.

It must not know what is published instead.
"""

from __future__ import annotations

from collections.abc import Iterable

from drakit.resource.raw import children, text
from drakit_nodeplugin.slices.plan import SliceWrite
from drakit_nodeplugin.slices.stored import StoredSlice

__all__ = ("TaintCheck",)


class TaintCheck:
    """What is known of one API server; the pools of a driver share it."""

    def __init__(self) -> None:
        self._kept = False

    def forget(self) -> None:
        """The API server may be another one."""
        self._kept = False

    def kept(self) -> None:
        """A dry run came back with its taints."""
        self._kept = True

    def needed(self, writes: Iterable[SliceWrite]) -> Iterable[SliceWrite]:
        """Give the writes that may lose taints, one after the other, until some were kept."""
        for write in writes:
            if self._kept:
                return
            if _keeps_off(write) and not _has_taints(write.stored):
                yield write


def _keeps_off(write: SliceWrite) -> bool:
    """Tell whether there are taints that keep pods off a device."""
    devices = write.content.devices
    if any(taint.effect != "None" for each in devices.values() for taint in each.taints):
        return True
    # Taints that are published of a device of which only the name is known can stay.
    return any(
        text(taint, "effect") != "None"
        for source in write.sources
        for name, body in source.bodies()[0].items()
        if name in devices and devices[name].device is None
        for taint in children(body, "taints")
    )


def _has_taints(stored: StoredSlice | None) -> bool:
    """Tell whether a slice has taints already: then no API server drops them, and it says nothing
    of what becomes of the taints of other slices."""
    return stored is not None and any(
        children(body, "taints") for body in stored.bodies()[0].values()
    )
