"""
The order of all work on one driver's claims: by claim, and by the hardware that a claim touches.

Work on a claim is a turn. It owns its claim as soon as no earlier turn has it. Once the devices of
the claim are known, it asks for its hardware: devices and counter sets. A turn enters the lines of
all its hardware at once, and asks for no more before it has left them, so the earliest of all turns
is never behind another one, and none waits forever.

It must not know drivers, the checkpoint, or what the work is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

HardwareKey = tuple[Literal["device", "counter set"], str, str]
"""Hardware behind a claim: its kind, and the names of its pool and of itself."""


@dataclass(eq=False, kw_only=True, slots=True)
class Turn:
    """Work on one claim: waiting, or in progress."""

    uid: str
    """The UID of the claim."""

    begin: Callable[[], None]
    """Called when the turn owns its claim, if it had to wait; returns at once."""

    hardware: frozenset[HardwareKey] = frozenset()
    behind: int = 0
    """The number of lines of hardware in which others are before it."""

    ready: asyncio.Future[None] | None = None
    """Resolved when it has its hardware, if it had to wait."""


class Scheduler:
    """The turns of one driver. Used only in the daemon's loop."""

    def __init__(self) -> None:
        self._claims: dict[str, deque[Turn]] = {}
        """Turns by claim, the owner first. No line is ever empty."""
        self._hardware: dict[HardwareKey, deque[set[Turn]]] = {}
        """Turns by device or counter set. Those of one set have it together."""
        self.idle = asyncio.Event()
        """Set while there is no turn."""
        self.idle.set()

    def turns(self, uid: str | None = None) -> Sequence[Turn]:
        """Return the turns of a claim in their order, or of all claims."""
        if uid is not None:
            return tuple(self._claims.get(uid, ()))
        return [turn for line in self._claims.values() for turn in line]

    def add(self, turn: Turn) -> bool:
        """Add a turn; return whether it owns its claim."""
        self.idle.clear()
        line = self._claims.setdefault(turn.uid, deque())
        line.append(turn)
        return line[0] is turn

    def leave(self, turn: Turn) -> None:
        """End a turn, whether it owns its claim or not, with all its hardware."""
        self._free_hardware(turn)
        line = self._claims[turn.uid]
        was_owner = line[0] is turn
        line.remove(turn)
        if not line:
            del self._claims[turn.uid]
            if not self._claims:
                self.idle.set()
        elif was_owner:
            line[0].begin()

    # ------------------------------------------------------------ hardware

    def take_hardware(
        self, wanted: Mapping[str, frozenset[HardwareKey]]
    ) -> Mapping[str, asyncio.Future[None]]:
        """
        Take the hardware of claims of one batch, by UID, for the turns that own them.

        Returns a future for each claim that has to wait. Those that need not wait may have hardware
        in common. A turn that has its hardware keeps it, and takes no more.
        """
        owners = {uid: self._claims[uid][0] for uid in wanted}
        due = {owner: wanted[uid] for uid, owner in owners.items() if not owner.hardware}
        held = self._hardware.keys()
        free = {turn: keys for turn, keys in due.items() if held.isdisjoint(keys)}
        # First: one that has to wait may need hardware of these, and would block them.
        for turn, keys in (free | due).items():
            turn.hardware = keys
            for key in keys:
                line = self._hardware.setdefault(key, deque())
                if line and turn in free and not line[0].isdisjoint(free):
                    line[0].add(turn)
                    continue
                turn.behind += bool(line)
                line.append({turn})
            if turn.behind:
                turn.ready = asyncio.get_running_loop().create_future()
        return {uid: turn.ready for uid, turn in owners.items() if turn.ready is not None}

    def free_hardware(self, uid: str) -> None:
        """Free the hardware of the turn that owns a claim; it may then take other hardware."""
        self._free_hardware(self._claims[uid][0])

    def _free_hardware(self, turn: Turn) -> None:
        keys, turn.hardware = turn.hardware, frozenset()
        turn.behind, turn.ready = 0, None
        for key in keys:
            line = self._hardware[key]
            (index,) = [i for i, group in enumerate(line) if turn in group]
            line[index].remove(turn)
            if line[index]:
                continue
            del line[index]
            if not line:
                del self._hardware[key]
            elif index == 0:
                for following in line[0]:
                    following.behind -= 1
                    if following.behind == 0 and following.ready is not None:
                        if not following.ready.done():  # the work may not wait any more
                            following.ready.set_result(None)
                        following.ready = None
