"""The profile hook counts what is ours, once, and what crosses threads."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

from bench.hops import Recorder, Round
from drakit.testing.cluster import merge
from drakit_daemon import tasks
from drakit_daemon.kube import resource_path


async def ended() -> None:
    """A part that ends is an error of :mod:`drakit_daemon.tasks`."""


async def work() -> None:
    resource_path("v1", "pods")
    resource_path("v1", "nodes")
    merge({}, {})
    with suppress(tasks.TaskEndedError):
        await asyncio.create_task(tasks.until_stopped("part", ended))
    await asyncio.create_task(ended())
    await asyncio.to_thread(id, 0)


async def test_a_round_has_functions_of_the_product_their_tasks_and_crossings():
    recorder = Recorder()
    before = sys.getprofile()
    sys.setprofile(recorder)
    await work()
    recorder.round = found = Round()
    await work()
    sys.setprofile(before)
    names = [name for _, name in found.functions]
    assert names == ["resource_path", "until_stopped", "TaskEndedError.__init__"]
    assert found.tasks == 1
    assert found.crossings == 1, "the thread of the executor, which wakes the loop, has no hook"
