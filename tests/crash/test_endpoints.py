"""Endpoints in the checkpoint: after a kill at any step, either the old row or the new one
exists."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from drakit_nodeplugin.state.checkpoint import Checkpoint
from tests.crash.endpointwrites import CHANGES
from tests.fakes.checkpoints import fill

KILLED = -9
AFTER = "sql of endpoints after COMMIT"


async def change_endpoints(change, folder, *, kill_at=None):
    """Change the endpoints in a process; return its status, and the labels of its steps."""
    before, _, _ = CHANGES[change]
    path = folder / "checkpoint.db"
    await fill(path, count=2)
    checkpoint = Checkpoint(path)
    await checkpoint.open()
    for endpoint in before:
        await checkpoint.write_endpoints([endpoint])
    await checkpoint.close()
    (folder / "armed").write_bytes(b"\1")
    options = {name: str(folder / name) for name in ("labels", "armed")}
    options |= {"root": str(folder), "kill_at": kill_at}
    command = ["-m", "tests.crash.endpointwrites", change, json.dumps(options), str(path)]
    process = await asyncio.create_subprocess_exec(sys.executable, *command)
    async with asyncio.timeout(15):
        status = await process.wait()
    return status, (folder / "labels").read_text().splitlines()


async def stored(folder):
    """Open the checkpoint as the next process does; return its endpoints."""
    checkpoint = Checkpoint(folder / "checkpoint.db")
    await checkpoint.open()
    try:
        assert checkpoint.damage is None
        assert await checkpoint.uids(state="prepared") == {"uid-000", "uid-001"}
        return await checkpoint.endpoints()
    finally:
        await checkpoint.close()


@pytest.mark.parametrize("change", CHANGES)
async def test_a_kill_at_any_step_leaves_the_old_row_or_the_new(change, tmp_path, caplog):
    before, _, after = CHANGES[change]
    folder = tmp_path / "whole"
    folder.mkdir()
    status, labels = await change_endpoints(change, folder)
    assert status == 0
    assert await stored(folder) == after
    # The steps that open the checkpoint are the same in every start.
    first = labels.index("sql of endpoints BEGIN IMMEDIATE")
    assert AFTER in labels[first:]

    for number, label in enumerate(labels[first:]):
        folder = tmp_path / str(number)
        folder.mkdir()
        status, reached = await change_endpoints(change, folder, kill_at=label)
        assert (status, reached[-1]) == (KILLED, label)
        done = AFTER in reached
        assert await stored(folder) == (after if done else before), f"killed at {label!r}"
    assert caplog.records == []
