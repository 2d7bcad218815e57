"""
Names published devices, and identifies the devices that claims hold under these names.

A name consists of the policy and the device's identity (:mod:`.hardware`). If two devices would get
the same name, or the name would be too long, a hash of the distinguishing properties is added. A
device that is present keeps its name, even if a device with the same identity is plugged in.

A claim holds hardware, not a name. Until the claim is released, the name belongs to that hardware,
and no other hardware gets it. The identity recorded for a held device node shows whether a device
in a scan is held, whichever policy matches it, and whether the kernel has given its number to other
hardware. If a claim's record has no identity, the name that previous scans gave to the hardware is
used instead.

Pure functions.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from drakit import HeldDevice, HeldNode
from drakit.quantity import parse_quantity
from drakit_drivers.hostdev.hardware import HardwareIdentity, Identity

_MAX_NAME = 63
_HASH_DIGITS = 8

Number = tuple[str, int, int]
"""A device number: type (``b`` or ``c``), major and minor."""

Numbers = Mapping[str, Collection[Number]]
"""The device numbers of hardware, keyed by its identity. Equal nodes have the same identity, so one
identity can have several numbers."""


class Holds:
    """The held devices, keyed by name. Immutable."""

    def __init__(
        self,
        held: Mapping[str, HeldDevice] | None = None,
        *,
        remembered: Mapping[str, Set[str]] | None = None,
    ) -> None:
        """Create the holds. `remembered` contains the known device identities, keyed by name, for
        claims that have not recorded any."""
        self._held = held or {}
        self._hardware: dict[str, Set[str]] = {
            name: {node.identity for node in device.nodes} or (remembered or {}).get(name, set())
            for name, device in self._held.items()
        }
        self._names: dict[str, set[str]] = defaultdict(set)
        self._units: dict[str, set[str]] = defaultdict(set)
        for name, hardware in self._hardware.items():
            for identity in hardware:
                self._names[identity].add(name)
                self._units[HardwareIdentity.parse(identity).unit].add(identity)
        self._by_number: dict[Number, list[tuple[str, str]]] = defaultdict(list)
        for name, device in sorted(self._held.items()):
            for node in device.nodes:
                if number := _number(node):
                    self._by_number[number].append((node.identity, name))

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def with_identities(self, changed: Mapping[tuple[str, str], str]) -> Holds:
        """Return a copy of these holds with `changed` identities. These are keyed by name and
        recorded identity."""
        held = {
            name: replace(
                device,
                nodes=tuple(
                    replace(node, identity=changed.get((name, node.identity), node.identity))
                    for node in device.nodes
                ),
            )
            for name, device in self._held.items()
        }
        hardware = {
            name: {changed.get((name, identity), identity) for identity in its}
            for name, its in self._hardware.items()
        }
        return Holds(held, remembered=hardware)

    def names_at(self, unit: str) -> set[str]:
        """Return the names under which claims hold nodes of a unit."""
        return self.names(self._units.get(unit, set()))

    def hardware(self, name: str) -> Set[str]:
        """Return the identities of a held device. Empty if they are unknown, or if the device is
        not held."""
        return self._hardware.get(name, frozenset())

    def is_of(self, name: str, hardware: Set[str]) -> bool:
        """Return whether claims are known to hold this hardware under this name."""
        return not self._hardware.get(name, set()).isdisjoint(hardware)

    def is_of_other(self, name: str, hardware: Set[str]) -> bool:
        """Return whether claims are known to hold other hardware under this name."""
        own = self._hardware.get(name)
        return bool(own) and own.isdisjoint(hardware)

    def names(self, hardware: Set[str]) -> set[str]:
        """Return the names under which claims hold this hardware."""
        return {name for identity in hardware for name in self._names.get(identity, ())}

    def overlapping(self, hardware: Set[str]) -> set[str]:
        """Return the names under which claims hold other nodes of the same functions."""
        found: set[str] = set()
        for one in map(HardwareIdentity.parse, hardware):
            for identity in self._units.get(one.unit, ()):
                if HardwareIdentity.parse(identity).overlaps(one):
                    found |= self._names[identity]
        return found

    @property
    def numbers(self) -> Mapping[Number, str]:
        """The held device numbers, each with the hardware identity for which a claim holds it."""
        return {number: nodes[0][0] for number, nodes in self._by_number.items()}

    def taken(self, numbers: Numbers) -> tuple[Number, str] | None:
        """Return one of these numbers that a claim holds for other hardware, with the name of the
        held device."""
        for identity, its_numbers in sorted(numbers.items()):
            for number in sorted(its_numbers):
                for held_identity, name in self._by_number.get(number, ()):
                    if held_identity != identity:
                        return number, name
        return None

    def outdated(self, name: str, numbers: Numbers) -> list[HeldNode]:
        """Return the held nodes of a device whose numbers its hardware no longer has."""
        device = self._held.get(name)
        return [
            node
            for node in (device.nodes if device else ())
            if node.identity in numbers
            and (number := _number(node))
            and number not in numbers[node.identity]
        ]

    def users(self, name: str) -> int | None:
        """Return the total number of users in the held shares of a device, or None if a claim holds
        the whole device."""
        shares = self._held[name].shares
        # Parse the amounts, because 1000 is written as "1k".
        amounts = (parse_quantity(share.get("users", "1")) for share in shares)
        return int(sum(amounts)) if shares else None

    def holder(self, name: str) -> str:
        """Return the name of a claim that holds a device, for a message."""
        claims = sorted(str(claim) for claim in self._held[name].claims)
        return f"claim {claims[0]}" if claims else "a claim"


def _number(node: HeldNode) -> Number | None:
    if node.major is None or node.minor is None:
        return None  # the hold is from before the last boot
    return node.type, node.major, node.minor


# ------------------------------------------------------------ names


@dataclass(frozen=True, kw_only=True, slots=True)
class NameRequest:
    """The preferred name of a device, and an alternative in case other devices need the same
    name."""

    key: str
    """A unique key for the device: the policy, and everything that distinguishes the device from
    others."""

    plain: str
    """The preferred name, which may be too long."""

    hashed: str
    hardware: Set[str]
    """The hardware identities of the device's nodes, which do not depend on the policy."""


def name_request(
    policy: str, identity: Identity, *, hardware: Set[str], nth: int = 1, copy: int | None = None
) -> NameRequest:
    """
    Return the request for a device's name.

    :param nth: the number of the device among those with the same identity and place, starting at
        1. For example, a camera has several nodes on one interface, which are always created in the
        same order.
    :param copy: the number of the copy, for a device that is published several times.
    """
    suffix = f"-{nth - 1}" if nth > 1 else ""
    suffix += "" if copy is None else f"-{copy}"
    plain = _label(f"{policy}-{identity.text}{suffix}" if identity.text else f"{policy}{suffix}")
    return NameRequest(
        key=f"{policy} {identity.text} {identity.place}{suffix}",
        plain=plain,
        hashed=_with_hash(plain, f"{policy} {identity.place}{suffix}"),
        hardware=hardware,
    )


def assign(
    requests: Sequence[NameRequest], *, before: Mapping[str, str], holds: Holds
) -> dict[str, str | None]:
    """
    Assign a name to each device. Return the names, keyed by request key. A name is None if it may
    belong to a different device that a claim holds.

    :param before: the names from the previous scan, with the same keys.
    """
    wanted = Counter(name_request.plain for name_request in requests)
    owners = {
        name_request.plain: name_request.key
        for name_request in requests
        if before.get(name_request.key) == name_request.plain
    }

    def name_of(each: NameRequest) -> str | None:
        for name in (each.plain, each.hashed):
            if holds.is_of(name, each.hardware):
                return name
        hashed = None if holds.is_of_other(each.hashed, each.hardware) else each.hashed
        if len(each.plain) > _MAX_NAME or holds.is_of_other(each.plain, each.hardware):
            return hashed
        if before.get(each.key) == each.hashed or (each.hashed in holds and hashed):
            return hashed
        if wanted[each.plain] == 1 or owners.get(each.plain) == each.key:
            return each.plain
        return None if each.plain in holds and each.plain not in owners else hashed

    return {each.key: name_of(each) for each in requests}


def _label(text: str) -> str:
    """Convert a string to a DNS label, without limiting its length."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _with_hash(name: str, distinct: str) -> str:
    digest = hashlib.sha256(f"{name} {distinct}".encode()).hexdigest()[:_HASH_DIGITS]
    return f"{name[: _MAX_NAME - _HASH_DIGITS - 1].rstrip('-')}-{digest}"
