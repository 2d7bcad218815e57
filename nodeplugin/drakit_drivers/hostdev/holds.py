"""
The devices that claims hold: which hardware they are, and the device numbers that containers use.

A claim holds hardware, not a name. The identity of the hardware (:func:`.naming.hardware_identity`)
in the held device nodes shows whether a device in a scan is a held one, whatever policy matches it,
and whether the kernel has given its number to other hardware. The identity is unknown for a claim
whose record has none; then the name that the last scans gave to the hardware has to do.

Pure: it must not depend on files, sysfs, policies, or the rules for names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Set

from drakit import HeldDevice, HeldNode

__all__ = ("Holds", "Number", "Numbers")

Number = tuple[str, int, int]
"""Type (``b`` or ``c``), major and minor."""

Numbers = Mapping[str, Collection[Number]]
"""The numbers of hardware by its identity: a unit has several, and so have equal nodes of it."""


class Holds:
    """The held devices by name. Immutable."""

    def __init__(
        self,
        held: Mapping[str, HeldDevice] | None = None,
        *,
        remembered: Mapping[str, Set[str]] | None = None,
    ) -> None:
        """`remembered`: the identities of devices by name, for claims without any."""
        self._held = held or {}
        self._hardware: dict[str, Set[str]] = {
            name: {node.identity for node in device.nodes} or (remembered or {}).get(name, set())
            for name, device in self._held.items()
        }
        self._names: dict[str, set[str]] = defaultdict(set)
        for name, hardware in self._hardware.items():
            for identity in hardware:
                self._names[identity].add(name)
        self._by_number: dict[Number, list[tuple[str, str]]] = defaultdict(list)
        for name, device in sorted(self._held.items()):
            for node in device.nodes:
                if number := _number(node):
                    self._by_number[number].append((node.identity, name))

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def hardware(self, name: str) -> Set[str]:
        """Return the identities of a held device; empty if they are unknown."""
        return self._hardware[name]

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

    def taken(self, numbers: Numbers) -> tuple[Number, str] | None:
        """Return a number that a claim holds for other hardware, and the device that has it."""
        for identity, its_numbers in sorted(numbers.items()):
            for number in sorted(its_numbers):
                for held_identity, name in self._by_number.get(number, ()):
                    if held_identity != identity:
                        return number, name
        return None

    def outdated(self, name: str, numbers: Numbers) -> list[HeldNode]:
        """Return the held nodes whose numbers the hardware no longer has."""
        device = self._held.get(name)
        return [
            node
            for node in (device.nodes if device else ())
            if node.identity in numbers
            and (number := _number(node))
            and number not in numbers[node.identity]
        ]

    def holder(self, name: str) -> str:
        """Name a claim that holds a device, for a message."""
        claims = sorted(str(claim) for claim in self._held[name].claims)
        return f"claim {claims[0]}" if claims else "a claim"


def _number(node: HeldNode) -> Number | None:
    if node.major is None or node.minor is None:
        return None  # of an earlier boot
    return node.type, node.major, node.minor
