"""
Runs the operator with a task in its main loop that sleeps 10 ms at a time, and records each time
that it slept 50 ms longer: `python -m bench.watched FILE ...`, with the operator's own arguments.

A line of the file contains the end of the pause (``time.monotonic``), and its seconds.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from drakit_operator import __main__ as operator
from drakit_operator.app import App

SLEEP_SECONDS = 0.01
RECORDED_SECONDS = 0.05


class _Watched(App):
    file = Path(os.devnull)

    async def run(self) -> None:
        watching = asyncio.create_task(_watch(self.file))
        try:
            await super().run()
        finally:
            watching.cancel()


async def _watch(file: Path) -> None:
    with file.open("a", buffering=1) as out:
        while True:
            began = time.monotonic()
            await asyncio.sleep(SLEEP_SECONDS)
            now = time.monotonic()
            if (pause := now - began - SLEEP_SECONDS) > RECORDED_SECONDS:
                out.write(f"{now:.3f} {pause:.3f}\n")


def longest_pause(file: Path, *, since: float) -> float:
    """Return the seconds of the longest pause that ended after a time."""
    pauses = [tuple(map(float, line.split())) for line in file.read_text().splitlines()]
    return max((pause for at, pause in pauses if at > since), default=0.0)


if __name__ == "__main__":
    _Watched.file = Path(sys.argv.pop(1))
    operator.App = _Watched
    operator.main()
