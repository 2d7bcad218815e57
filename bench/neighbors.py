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
from bench.rows import Neighbor, Samples, percentile
from drakit.device import ClaimReference

__all__ = ("measure_neighbors",)

ACTIONS = ("none", "block", "end", "flood")
"""The neighbor's misbehavior; a neighbor without any comes first, for comparison."""

TURNS = 3
SETTLE_SECONDS = 1.5
"""Wait after a command before measuring: the plugin first restarts a stopped driver."""


def measure_neighbors(
    api: ApiServer, kubeconfig: Path, claims: Sequence[ClaimReference], *, repetitions: int
) -> Iterator[Neighbor]:
    """Measure batches of these claims beside each kind of neighbor."""
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
                for action in ACTIONS:
                    report(f"a neighbor: {action}")
                    _command(word, action)
                    for number in range(-WARM_UP, repetitions):
                        floor = api.floor(claims)
                        seconds = kubelet.prepare(claims)
                        kubelet.unprepare(claims)
                        if number >= 0:
                            samples[action].floors.append(floor)
                            samples[action].seconds.append(seconds)
                            infos[action] += [get_info(path) for path in registry.glob("*.sock")]
    quiet: Neighbor | None = None
    for action in ACTIONS:
        row = Neighbor(
            action=action,
            batch=len(claims),
            p50_ms=percentile(samples[action].seconds, 0.5) * 1000,
            p99_ms=percentile(samples[action].seconds, 0.99) * 1000,
            floor_ms=percentile(samples[action].floors, 0.5) * 1000,
            get_info_ms=max(infos[action]) * 1000,
            quiet=quiet,
        )
        quiet = quiet or row
        yield row


def _command(word: Path, action: str) -> None:
    new = word.with_suffix(".new")
    new.write_text(action)
    new.replace(word)
    time.sleep(SETTLE_SECONDS)
