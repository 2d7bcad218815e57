"""
Counts the event loops of the node plugin: `python -m bench.counted`, with the plugin's arguments.

It counts the iterations of each event loop, and how often another thread wakes the main loop: one
thread round trip each. The numbers are in a file that the load generator reads while the plugin
runs. Nothing of the plugin is replaced.

It must not know what is measured.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ("COUNTERS", "Counts", "empty_file", "read")

COUNTERS = "BENCH_COUNTERS"
"""The environment variable with the path of the file."""

_FORMAT = "=3Q"


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """The counts since the start of the plugin."""

    main_iterations: int
    other_iterations: int
    """Counts of the loops of drivers, which run in separate threads."""

    round_trips: int
    """Times that another thread woke the main loop."""

    def __sub__(self, before: Counts) -> Counts:
        return Counts(
            main_iterations=self.main_iterations - before.main_iterations,
            other_iterations=self.other_iterations - before.other_iterations,
            round_trips=self.round_trips - before.round_trips,
        )


def empty_file(path: Path) -> None:
    """Create the file for a plugin's counts."""
    path.write_bytes(bytes(struct.calcsize(_FORMAT)))


def read(path: Path) -> Counts:
    """Return what the plugin has counted so far."""
    main, other, trips = struct.unpack(_FORMAT, path.read_bytes())
    return Counts(main_iterations=main, other_iterations=other, round_trips=trips)


def _count(path: Path) -> None:
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), struct.calcsize(_FORMAT))
    numbers = memoryview(memory).cast("Q")
    main_thread = threading.main_thread().ident
    loop: Any = asyncio.BaseEventLoop
    run_once, call_soon_threadsafe = loop._run_once, loop.call_soon_threadsafe

    def counted_run_once(self: Any) -> None:
        numbers[0 if threading.get_ident() == main_thread else 1] += 1
        run_once(self)

    def counted_call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        # Threads of drivers and of the checkpoint may count at once: one in millions is lost.
        if self._thread_id == main_thread != threading.get_ident():
            numbers[2] += 1
        return call_soon_threadsafe(self, *arguments, **keywords)

    loop._run_once, loop.call_soon_threadsafe = counted_run_once, counted_call


if __name__ == "__main__":
    _count(Path(os.environ[COUNTERS]))

    from drakit_nodeplugin.__main__ import main

    main()
