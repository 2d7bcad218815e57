"""Devices whose health a test changes."""

from __future__ import annotations

from typing import Any

from drakit_nodeplugin.changes import Revision
from drakit_nodeplugin.devices.model import DeviceHealth


class FakeHealth:
    """A source of health that a test changes."""

    def __init__(self, *states: DeviceHealth) -> None:
        self.revision = Revision()
        self._states = {(state.pool, state.device): state for state in states}
        self._given = tuple(self._states.values())

    def health_states(self) -> tuple[DeviceHealth, ...]:
        return self._given

    def replace(self, *states: DeviceHealth) -> None:
        """Change some devices."""
        self._states |= {(state.pool, state.device): state for state in states}
        self._change()

    def remove(self, device: str, *, pool: str = "node-1") -> None:
        del self._states[pool, device]
        self._change()

    def _change(self) -> None:
        self._given = tuple(self._states.values())
        self.revision.advance()


def health(
    device: str, status: Any = "healthy", message: str = "", *, pool: str = "node-1"
) -> DeviceHealth:
    return DeviceHealth(
        pool=pool, device=device, status=status, message=message, changed_at=1_700_000_000
    )
