"""One run of Kopf: it ends soon when told to, and says so when it ends by itself."""

import asyncio

from drakit.kube import connect
from drakit_operator.intake import Intake
from drakit_operator.kinds import KINDS
from drakit_operator.watching.thread import KopfThread


async def test_it_stops_when_told_to(cluster, tmp_path):
    kubeconfig = cluster.write_kubeconfig(tmp_path)
    seen = []
    cluster.add_class("gpu.example", "d")
    thread = KopfThread(
        connect=lambda: connect(kubeconfig, user_agent="test"),
        kinds=KINDS,
        intake=Intake(asyncio.get_running_loop(), seen.extend),
    )
    thread.start()
    async with asyncio.timeout(5):
        while not seen:
            assert not thread.ended.done(), repr(thread.ended.result())
            await asyncio.sleep(0.02)
    assert [(each.kind.plural, each.name.name, each.listed) for each in seen] == [
        ("deviceclasses", "gpu.example", True)
    ]
    assert thread.silent_seconds < 2
    assert await thread.stop(timeout_seconds=2)
    assert await thread.ended is None
    cluster.add_class("late.example", "d")
    await asyncio.sleep(0.1)
    assert len(seen) == 1


async def test_it_can_be_stopped_while_it_waits_for_its_session():
    async def hang():
        await asyncio.sleep(3600)
        raise AssertionError("nobody has stopped it")

    thread = KopfThread(connect=hang, kinds=KINDS, intake=Intake(asyncio.get_running_loop(), print))
    thread.start()
    assert await thread.stop(timeout_seconds=5)
    assert await thread.ended is None


async def test_without_a_session_it_ends_at_once():
    async def refuse():
        raise OSError("no way to an API server")

    thread = KopfThread(
        connect=refuse, kinds=KINDS, intake=Intake(asyncio.get_running_loop(), print)
    )
    thread.start()
    error = await asyncio.wait_for(asyncio.shield(thread.ended), 5)
    assert error is not None
    assert await thread.stop(timeout_seconds=1), "what has ended can still be stopped"
