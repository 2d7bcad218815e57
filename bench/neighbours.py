"""
Whether a driver that misbehaves affects another one in the same process.

The measured driver prepares claims all the time; the other one is quiet, blocks its event loop,
ends its thread, or floods, in turns. :mod:`.kubelet` measures the calls.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.apiserver import ApiServer
from bench.claims import WARM_UP, no_collection, report
from bench.drivers import DRIVER
from bench.kubelet import get_info
from bench.machine import folders
from bench.plugin import running
from bench.rows import Neighbour, Samples, percentile
from drakit.device import ClaimReference

__all__ = ("measure_neighbours",)

WORDS = ("behave", "block", "end", "flood")
"""What the neighbour does, the first of them for comparison."""

TURNS = 3
SETTLE_SECONDS = 1.5
"""After a word, until calls are measured: a driver that was stopped is first started again."""


def measure_neighbours(
    api: ApiServer, kubeconfig: Path, claims: Sequence[ClaimReference], *, repetitions: int
) -> Iterator[Neighbour]:
    """Measure batches of these claims beside each kind of neighbour."""
    samples: dict[str, Samples] = defaultdict(Samples)
    infos: dict[str, list[float]] = defaultdict(list)
    with folders() as places:
        word, registry = places.root / "word", places.root / "plugins_registry"
        drivers = [
            {"driver": "bench.drivers:Effects"},
            {"driver": "tests.fakes.rude:Rude", "config": {"directory": str(places.root)}},
        ]
        with (
            running(drivers, kubeconfig=kubeconfig, folders=places) as plugin,
            plugin.kubelet(DRIVER) as kubelet,
            no_collection(),
        ):
            for _ in range(TURNS):
                for what in WORDS:
                    report(f"a neighbour: {what}")
                    _say(word, what)
                    for number in range(-WARM_UP, repetitions):
                        floor = api.floor(claims)
                        seconds = kubelet.prepare(claims)
                        kubelet.unprepare(claims)
                        if number >= 0:
                            samples[what].floors.append(floor)
                            samples[what].seconds.append(seconds)
                            infos[what] += [get_info(path) for path in registry.glob("*.sock")]
    quiet: Neighbour | None = None
    for what in WORDS:
        row = Neighbour(
            behaviour=what,
            batch=len(claims),
            p50_ms=percentile(samples[what].seconds, 0.5) * 1000,
            p99_ms=percentile(samples[what].seconds, 0.99) * 1000,
            floor_ms=percentile(samples[what].floors, 0.5) * 1000,
            get_info_ms=max(infos[what]) * 1000,
            quiet=quiet,
        )
        quiet = quiet or row
        yield row


def _say(word: Path, what: str) -> None:
    new = word.with_suffix(".new")
    new.write_text(what)
    new.replace(word)
    time.sleep(SETTLE_SECONDS)
