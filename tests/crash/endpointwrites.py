"""
A process that changes the endpoints of a checkpoint, and is killed at one of its steps.

python -m tests.crash.endpointwrites <change> <options as JSON> <checkpoint>

It must not depend on the expected rows.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from drakit_nodeplugin.state.checkpoint import Checkpoint
from drakit_nodeplugin.state.records import StoredEndpoint
from tests.crash import steps

OLD = StoredEndpoint(name="usb", pools={"node-1": ("cam-0", "cam-1")})
OTHER = StoredEndpoint(name="net", pools={"node-1/net": ("eth-0",)})
LARGE = StoredEndpoint(
    name="usb", pools={"node-1": tuple(f"camera-of-the-hub-{n:05}" for n in range(12_800))}
)
STOPPED = StoredEndpoint(name="usb", pools=OLD.pools, stopped_at=1795251182.25)
REMOVING = StoredEndpoint(name="usb", pools=OLD.pools, stopped_at=1795251182.25, removing=True)

Change = Callable[[Checkpoint], Awaitable[None]]


def writing(endpoint: StoredEndpoint) -> Change:
    return lambda checkpoint: checkpoint.write_endpoints([endpoint])


CHANGES: Mapping[str, tuple[list[StoredEndpoint], Change, list[StoredEndpoint]]] = {
    "written": ([OTHER], writing(OLD), [OTHER, OLD]),
    "grown": ([OTHER, OLD], writing(LARGE), [OTHER, LARGE]),
    "stopped": ([OTHER, LARGE], writing(STOPPED), [OTHER, STOPPED]),
    "removing": ([OTHER, STOPPED], writing(REMOVING), [OTHER, REMOVING]),
    "forgotten": ([OTHER, REMOVING], lambda c: c.forget_endpoints(["usb", "none"]), [OTHER]),
}
"""By name: the stored rows before, the change, and the stored rows after."""


async def main() -> None:
    name, options, path = sys.argv[1:]
    facts = json.loads(options)
    paths = {key: Path(facts[key]) for key in ("root", "labels", "armed")}
    observed = steps.Steps(steps.StepOptions(**paths, kill_at=facts["kill_at"]))
    observed.install()
    steps.set_endpoints_apart(observed)
    checkpoint = Checkpoint(Path(path))
    await checkpoint.open()
    _, change, _ = CHANGES[name]
    await change(checkpoint)
    await checkpoint.close()


if __name__ == "__main__":
    asyncio.run(main())
