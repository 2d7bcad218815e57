"""
Who holds devices: the rows of the checkpoint, and the earlier claims of the batch to be written.

A device is held by one claim exclusively, or by any number of shares, never both; admin access
looks on beside either and keeps nothing from anybody. What is decided here is decided within the
transaction that writes it, so that it holds among processes, too. When rows are written is
:mod:`.rows`' business.

Functions block. It must not know generations, bodies, or what the states of a claim lead to.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from drakit_nodeplugin.claims.stored import StoredClaim, StoredDevice

__all__ = ("HeldAs", "Holders", "devices_of", "held_devices", "unpreparing_devices")

HeldAs = tuple[str, str, str]
"""Pool, device, and how it is held: as a row of the table of devices says it."""

_Key = tuple[str, str]
"""Pool and device."""

_CHUNK = 500
"""Devices per statement: SQLite binds at most 32,766 variables."""

# Partial indexes serve these where the condition stands there word for word. CROSS JOIN keeps the
# order: the planner would look through all devices instead.
_HOLDERS = (
    "WITH wanted (pool, device) AS (VALUES {}) "
    "SELECT pool, device, uid FROM wanted CROSS JOIN devices USING (pool, device) "
    "CROSS JOIN claims ON claims.id = devices.claim WHERE hold = '{}'"
)


class Holders:
    """Who holds the devices that the claims of a batch want, while they get theirs in turn."""

    def __init__(self, connection: sqlite3.Connection, claims: Iterable[StoredClaim]) -> None:
        wanted: dict[str, set[_Key]] = defaultdict(set)
        for claim in claims:
            for device in _holding(claim):
                wanted[device.hold].add(_key(device))
        # Shares go beside each other: those of others, which may be thousands, are not looked at.
        exclusive = _held(connection, wanted["exclusive"] | wanted["share"], "exclusive")
        self._exclusive = dict(exclusive)
        self._sharers: dict[_Key, set[str]] = defaultdict(set)
        for key, uid in _held(connection, wanted["exclusive"], "share"):
            self._sharers[key].add(uid)

    def refusal(self, claim: StoredClaim) -> tuple[StoredDevice, str] | None:
        """Give a device that it cannot have, and the UID of who has it; None if it can have all."""
        for device in _holding(claim):
            key = _key(device)
            others = {self._exclusive.get(key, claim.uid)}
            if device.hold == "exclusive":
                others |= self._sharers.get(key, set())
            if others := others - {claim.uid}:
                return device, min(others)
        return None

    def give(self, claim: StoredClaim, *, former: Collection[HeldAs]) -> None:
        """Let a claim have its devices, in place of those that it had."""
        for pool, device, _ in former:
            if self._exclusive.get((pool, device)) == claim.uid:
                del self._exclusive[pool, device]
            self._sharers[pool, device].discard(claim.uid)
        for device in _holding(claim):
            if device.hold == "exclusive":
                self._exclusive[_key(device)] = claim.uid
            else:
                self._sharers[_key(device)].add(claim.uid)


def devices_of(claim: StoredClaim) -> frozenset[HeldAs]:
    """Give a claim's devices as they are indexed."""
    return frozenset((device.pool, device.device, device.hold) for device in claim.devices)


def held_devices(connection: sqlite3.Connection) -> Mapping[str, frozenset[str]]:
    """Give the names of all devices that rows have, by pool: shares and admin access included."""
    found: dict[str, set[str]] = defaultdict(set)
    for pool, device in connection.execute("SELECT DISTINCT pool, device FROM devices"):
        found[pool].add(device)
    return {pool: frozenset(names) for pool, names in found.items()}


def unpreparing_devices(connection: sqlite3.Connection) -> frozenset[tuple[str, str]]:
    """
    Give pool and name of the devices that claims which are being unprepared keep from all others.

    Not shares, beside which others may still be had, nor what is looked at with admin access.
    """
    return frozenset(
        connection.execute(
            "SELECT pool, device FROM claims CROSS JOIN devices ON devices.claim = claims.id "
            "WHERE state = 'unpreparing' AND hold = 'exclusive'"
        )
    )


def _holding(claim: StoredClaim) -> list[StoredDevice]:
    return [device for device in claim.devices if device.hold != "admin"]


def _key(device: StoredDevice) -> _Key:
    return device.pool, device.device


def _held(
    connection: sqlite3.Connection, wanted: Collection[_Key], hold: str
) -> Iterable[tuple[_Key, str]]:
    keys = list(wanted)
    for start in range(0, len(keys), _CHUNK):
        chunk = keys[start : start + _CHUNK]
        # Only question marks and a word of ours are put into the text.
        query = _HOLDERS.format(",".join(["(?, ?)"] * len(chunk)), hold)
        for pool, device, uid in connection.execute(query, [part for key in chunk for part in key]):
            yield (pool, device), uid
