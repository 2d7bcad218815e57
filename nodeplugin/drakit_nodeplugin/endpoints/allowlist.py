"""
The allow lists of backends and device plugins: the names that may register, and their rights.

It turns configuration into rules. The rules for edits are those of :mod:`.edits_policy`, the rule
for a socket's owner is that of :mod:`.socketfile`; the endpoints apply both.

It must not know connections, claims or edits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drakit_nodeplugin.endpoints.edits_policy import AllowedEdits, EditsPolicy
from drakit_nodeplugin.endpoints.host_paths import HostDevices
from drakit_nodeplugin.endpoints.socketfile import SocketFile, SocketOwner

if TYPE_CHECKING:
    from drakit_nodeplugin.allowed import AllowedEndpoint

__all__ = ("AllowList", "Rights", "allow_list")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rights:
    """What one driver or resource may do."""

    where: str
    """The place of its entry in the configuration."""

    owner: SocketOwner
    edits: EditsPolicy

    def owner_problem(self, file: SocketFile) -> str | None:
        """Return why its socket must not have this owner, and the remedy, as the end of a sentence;
        None if the owner is right."""
        problem = self.owner.problem(file)
        if problem is None:
            return None
        return f"{problem}; change the socket's owner, or correct owner in {self.where}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AllowList:
    """All names that may register, with their rights."""

    setting: str
    entries: Mapping[str, Rights]

    def missing(self, name: str) -> str:
        """Return the reason to refuse a name that is not listed, as the end of a sentence."""
        return f"{self.setting} has no entry for {name}; add one, or remove the program"


def allow_list(
    setting: str, given: Mapping[str, AllowedEndpoint] | None, *, devices: HostDevices
) -> AllowList | None:
    """Return the allow list of a setting; None if it has none. `devices` is the host's
    ``/dev``."""
    if given is None:
        return None
    entries = {
        name: _rights(f"{setting}[{json.dumps(name)}]", each, devices=devices)
        for name, each in given.items()
    }
    return AllowList(setting=setting, entries=entries)


def _rights(where: str, given: AllowedEndpoint, *, devices: HostDevices) -> Rights:
    allowed = AllowedEdits(
        devices=given.devices,
        mounts=given.mounts,
        hooks=frozenset(given.hooks),
        net_devices=given.net_devices,
        additional_gids=frozenset(given.additional_gids),
        intel_rdt=given.intel_rdt,
        cdi_devices=given.cdi_devices,
    )
    return Rights(
        where=where,
        owner=SocketOwner(uid=given.owner.uid, gid=given.owner.gid),
        edits=EditsPolicy(where, allowed, find_node=devices.node),
    )
