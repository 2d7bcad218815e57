"""The Node's labels, which drivers know at a start without the API server."""

from __future__ import annotations

import asyncio

from drakit_nodeplugin.host.node import PluginNode
from tests.fakes.tasks import until

PATH = "/api/v1/nodes/node-1"


async def read_once(node: PluginNode, session) -> None:
    future = asyncio.get_running_loop().create_future()
    future.set_result(session)
    task = asyncio.create_task(node.run(future))
    await until(lambda: node.labels is not None)
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.wait({task})


async def test_drivers_know_the_labels_of_an_earlier_process_and_claims_do_not(
    api_server, session, tmp_path
):
    api_server.store(PATH, {"metadata": {"uid": "uid-1", "labels": {"floor": "1"}}})
    file = tmp_path / "node.json"
    first = PluginNode("node-1", file=file)
    await first.restore()
    assert first.for_drivers.labels is None
    await read_once(first, session)
    assert (first.labels, first.for_drivers.labels, first.uid) == (
        {"floor": "1"},
        {"floor": "1"},
        "uid-1",
    )

    later = PluginNode("node-1", file=file)
    await later.restore()
    assert (later.labels, later.for_drivers.labels) == (None, {"floor": "1"})
    api_server.store(PATH, {"metadata": {"labels": {"floor": "2"}}})
    await read_once(later, session)
    assert later.for_drivers.labels == {"floor": "2"}


async def test_labels_that_cannot_be_stored_are_stored_later(api_server, session, tmp_path):
    api_server.store(PATH, {"metadata": {"uid": "uid-1", "labels": {"floor": "1"}}})
    file = tmp_path / "node.json"
    file.mkdir()
    node = PluginNode("node-1", file=file)
    await read_once(node, session)
    file.rmdir()
    await read_once(node, session)
    later = PluginNode("node-1", file=file)
    await later.restore()
    assert later.for_drivers.labels == {"floor": "1"}


async def test_the_labels_of_another_node_and_a_damaged_copy_are_not_used(tmp_path):
    file = tmp_path / "node.json"
    for content in ('{"version": 1, "name": "node-2", "labels": {}}', "{", "[]", '{"version": 9}'):
        file.write_text(content)
        node = PluginNode("node-1", file=file)
        await node.restore()
        assert node.for_drivers.labels is None
