"""
The devices in maintenance that the node plugin must taint, because the cluster does not serve
DeviceTaintRules.

The operator resolves the device selection of a DeviceMaintenance, and records which component
taints the devices. Until the API server has listed the maintenances, they are unknown, and taints
from before a restart remain. Does not depend on drivers, slices, or the rules for taints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from drakit_daemon.kube import ApiError, Session, resource_path
from drakit_daemon.kube.reflector import Applied, Deleted, Reflector, Replaced
from drakit_formats import crds
from drakit_formats.resource.objects import child, children, text
from drakit_nodeplugin.changes import Revision
from drakit_nodeplugin.host.absence import Absence

RETRY_SECONDS = (1.0, 60.0)
"""Initial and maximum delay before the maintenances are listed again."""


class _Devices(NamedTuple):
    """The devices of one DeviceMaintenance that the node plugin must taint: driver, pool and name
    of each."""

    name: str
    devices: frozenset[tuple[str, str, str]]


class MaintenanceWatch:
    """Follows the DeviceMaintenances of the cluster, for all drivers in the process."""

    def __init__(self, session: asyncio.Future[Session], *, enabled: bool) -> None:
        """
        :param enabled: whether to read maintenances. If False, no devices are in maintenance.
        """
        self.revision = Revision()
        """Advances when the set of devices in maintenance changes."""
        self._session = session
        self._enabled = enabled
        self._known: dict[str, _Devices] | None = None if enabled else {}
        self._absence = Absence()

    def devices(self, driver: str) -> frozenset[tuple[str, str]] | None:
        """Return the devices of a driver, as pairs of pool and name, or None if they are
        unknown."""
        if self._known is None:
            return None
        return frozenset(
            (pool, name)
            for each in self._known.values()
            for of, pool, name in each.devices
            if of == driver
        )

    async def run(self) -> None:
        """Follow the maintenances until canceled."""
        first, limit = RETRY_SECONDS
        if not self._enabled:
            await asyncio.Event().wait()
        reflector = Reflector(
            await asyncio.shield(self._session),
            resource_path(crds.API_VERSION, crds.MAINTENANCES),
            retry_seconds=first,
            retry_limit_seconds=limit,
            keep=_tainted_by_plugin,
            keep_unreadable=lambda metadata, _: _Devices(text(metadata, "name"), frozenset()),
            on_error=self._cannot_be_read,
        )
        async for change in reflector.changes():
            self._absence.end()
            known = dict(self._known or {})
            match change:
                case Replaced(items=items):
                    known = {each.name: each for each in items}
                case Applied(object=item):
                    known[item.name] = item
                case Deleted(object=item):
                    known.pop(item.name, None)
            self._set({name: each for name, each in known.items() if each.devices})

    def _set(self, known: dict[str, _Devices]) -> None:
        if known != self._known:
            self._known = known
            self.revision.advance()

    def _cannot_be_read(self, error: ApiError) -> None:
        """Handle an error. Without the resource, there are no maintenances."""
        if self._absence.has_lasted(error):
            self._set({})


def _tainted_by_plugin(body: Mapping[str, Any]) -> _Devices:
    """Return the devices of a maintenance that the node plugin must taint, because the operator
    does not use DeviceTaintRules for them."""
    metadata, status = child(body, "metadata"), child(body, "status")
    due = text(status, "phase") == "Active" and text(status, "taintedBy") == "NodePlugin"
    found = children(status, "devices") if due and not metadata.get("deletionTimestamp") else ()
    devices = ((text(each, "driver"), text(each, "pool"), text(each, "device")) for each in found)
    return _Devices(text(metadata, "name"), frozenset(devices))
