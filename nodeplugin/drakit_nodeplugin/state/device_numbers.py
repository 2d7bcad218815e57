"""
The device numbers held by claims of all drivers in the process, and the claims of one driver with
their devices.

When hardware is unplugged, the kernel may give its number to other hardware. If a claim needed a
number that another claim still holds for other hardware, the two would share a device. A driver
identifies the hardware behind a device node (:attr:`drakit.DeviceNode.identity`). Nodes with equal
identities can share a number. Nodes for which the driver returns no identity are not stored, and
therefore not compared. The nodes of a rebuilt claim come from its CDI file, without identities:
only the same device of the same driver can share their numbers.

Device numbers belong to the node rather than to a driver, so all drivers in a process share one
in-memory :class:`HeldNumbers`. Their checkpoints fill it when they open, and change it together
with their rows. Identities of different drivers differ even if their strings are equal, so two
drivers cannot give the same identified hardware to two claims. Numbers from an earlier boot are
ignored. While another instance of the plugin is active for a driver, the driver's numbers are those
that were read when this instance began to wait for the hand-over.

Does not depend on SQLite, the API server or drivers.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from drakit.device import ClaimReference
from drakit_nodeplugin.state.records import StoredClaim, StoredDevice, StoredNode

MAX_FORMER_NODES = 64
"""Maximum number of previous device numbers to keep per device of a claim. The oldest are removed
first. A loose plug can renumber a device at every contact, and the row size must be bounded."""

READ_SECONDS = 5.0
"""Maximum time for which a claim waits, after the start, until the rows of all drivers have been
read. Usually, they are read earlier."""

_Number = tuple[str, int, int]
_Key = tuple[str, str]
"""A driver name and a claim UID."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenNumber:
    """A number that a claim cannot get, because another claim holds it for other hardware."""

    number: str
    """The number, for example ``c 188:0``."""

    device: StoredDevice
    """The claim's device."""

    driver: str
    """The name of the holder's driver."""

    holder: ClaimReference
    """The claim that holds the number. It is the claim itself if its own devices conflict."""

    held: str
    """The name of the holder's device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hold:
    """A number that a claim holds."""

    claim: ClaimReference
    boot_id: str
    device: StoredDevice
    node: StoredNode


class HeldNumbers:
    """The device numbers held by unreleased claims of all drivers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read = threading.Condition(self._lock)
        self._unread: set[str] = set()
        """The drivers whose rows have not been read since the start."""

        self._wait_until = 0.0
        """The end of the wait, on the monotonic clock."""

        self._holds: dict[_Key, tuple[_Hold, ...]] = {}
        self._wanted: dict[_Key, tuple[_Hold, ...]] = {}
        """The numbers of claims that a transaction is writing."""

        self._claims: dict[_Number, set[_Key]] = defaultdict(set)
        """The claims that hold or want each number."""

    def expect(self, drivers: Iterable[str]) -> None:
        """Make claims wait until the rows of these drivers have been read."""
        with self._lock:
            self._unread.update(drivers)
            self._wait_until = time.monotonic() + READ_SECONDS

    def give_up(self, driver: str) -> None:
        """Stop waiting for the rows of a driver that cannot be hosted."""
        with self._read:
            self._unread.discard(driver)
            self._read.notify_all()

    def unread(self) -> frozenset[str]:
        """Return the drivers whose rows have not been read. Blocks for at most :data:`READ_SECONDS`
        after the start."""
        with self._read:
            timeout = max(0.0, self._wait_until - time.monotonic())
            self._read.wait_for(lambda: not self._unread, timeout=timeout)
            return frozenset(self._unread)

    def load(self, driver: str, claims: Iterable[StoredClaim]) -> None:
        """Replace all numbers of a driver."""
        holds = {(driver, claim.uid): _holds(claim) for claim in claims}
        with self._lock:
            for key in [key for key in self._holds | self._wanted if key[0] == driver]:
                self._set(key, ())
            for key, found in holds.items():
                self._set(key, found)
            self._unread.discard(driver)
            self._read.notify_all()

    def admit(self, driver: str, claim: StoredClaim, *, held: bool) -> TakenNumber | None:
        """
        Return the reason why a claim cannot get its numbers, or None if it holds them from now on.

        `held` means that containers already use the claim's devices. In that case, the claim is
        never refused, because a refusal would only keep outdated numbers in its CDI file.
        :meth:`settle` must be called afterwards.
        """
        key = (driver, claim.uid)
        wanted = _holds(claim)
        with self._lock:
            if not held and (taken := self._conflict(key, wanted)) is not None:
                return taken
            self._wanted[key] = wanted
            for hold in wanted:
                self._claims[hold.node.number].add(key)
        return None

    def settle(self, driver: str, uid: str, stored: StoredClaim | None) -> None:
        """Record the stored version of a claim, or None if it does not have a row."""
        key = (driver, uid)
        holds: tuple[_Hold, ...] = ()
        if stored is not None and any(device.nodes for device in stored.devices):
            holds = _holds(stored)
        with self._lock:
            if holds or key in self._holds or key in self._wanted:
                self._set(key, holds)

    def withdraw(self, driver: str, uid: str) -> None:
        """Revoke an :meth:`admit`, because the claim was not written. The claim keeps its previous
        numbers."""
        key = (driver, uid)
        with self._lock:
            if key in self._wanted:
                self._set(key, self._holds.get(key, ()))

    def _conflict(self, key: _Key, wanted: Sequence[_Hold]) -> TakenNumber | None:
        own: dict[_Number, _Hold] = {}
        for hold in wanted:
            other = own.setdefault(hold.node.number, hold)
            if other.node.identity != hold.node.identity:
                return _taken(hold, other, driver=key[0])
        for hold in wanted:
            for holder in sorted(self._claims.get(hold.node.number, ())):
                if holder == key:
                    continue
                same_driver = holder[0] == key[0]
                for other in (*self._holds.get(holder, ()), *self._wanted.get(holder, ())):
                    if _excludes(other, hold, same_driver=same_driver):
                        return _taken(hold, other, driver=holder[0])
        return None

    def _set(self, key: _Key, holds: tuple[_Hold, ...]) -> None:
        for old in (*self._holds.pop(key, ()), *self._wanted.pop(key, ())):
            claims = self._claims[old.node.number]
            claims.discard(key)
            if not claims:
                del self._claims[old.node.number]
        if holds:
            self._holds[key] = holds
            for hold in holds:
                self._claims[hold.node.number].add(key)


def _excludes(held: _Hold, wanted: _Hold, *, same_driver: bool) -> bool:
    if held.node.number != wanted.node.number or held.boot_id != wanted.boot_id:
        return False
    if not same_driver:
        return True
    if held.node.identity and wanted.node.identity:
        return held.node.identity != wanted.node.identity
    own, other = held.device, wanted.device
    return (own.pool, own.device) != (other.pool, other.device)


def _taken(wanted: _Hold, held: _Hold, *, driver: str) -> TakenNumber:
    kind, major, minor = wanted.node.number
    return TakenNumber(
        number=f"{kind} {major}:{minor}",
        device=wanted.device,
        driver=driver,
        holder=held.claim,
        held=held.device.device,
    )


def _holds(claim: StoredClaim) -> tuple[_Hold, ...]:
    """Return the numbers that a claim holds. Admin access holds nothing."""
    reference = claim.reference
    return tuple(
        _Hold(claim=reference, boot_id=claim.boot_id, device=device, node=node)
        for device in claim.devices
        if device.hold != "admin"
        for node in device.nodes
    )


def with_former_nodes(
    nodes: tuple[StoredNode, ...], former: Iterable[StoredNode]
) -> tuple[StoredNode, ...]:
    """Return the nodes of a device that is prepared a second time. The previous numbers are
    included, because running containers can still use them."""
    known = {(node.number, identity) for node in nodes for identity in (node.identity, "")}
    kept = {
        (node.number, node.identity): replace(node, current=False)
        for node in former
        if (node.number, node.identity) not in known
    }
    # The latest numbers come first: those that were current until now.
    return (*nodes, *list(kept.values())[:MAX_FORMER_NODES])


# ---------------------------------------------------------------- claims of one driver


class ClaimDevices:
    """The claims of one driver and their devices. Only rows that changed since the last read are
    read."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, ClaimReference, tuple[StoredDevice, ...]]] = {}

    def read(
        self,
        generations: Mapping[str, int],
        load: Callable[[Sequence[str]], Iterable[StoredClaim]],
    ) -> Mapping[tuple[str, str], Mapping[ClaimReference, Sequence[StoredDevice]]]:
        """Return the claims of each device, keyed by pool and device, with their results for the
        device. `generations` are the generations of all rows."""
        known = {
            uid: found for uid, found in self._known.items() if generations.get(uid) == found[0]
        }
        for claim in load([uid for uid in generations if uid not in known]):
            known[claim.uid] = claim.generation, claim.reference, claim.devices
        self._known = known
        found: dict[tuple[str, str], dict[ClaimReference, list[StoredDevice]]] = {}
        for _, reference, devices in known.values():
            for device in devices:
                claims = found.setdefault((device.pool, device.device), {})
                claims.setdefault(reference, []).append(device)
        return found
