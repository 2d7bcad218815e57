from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from drakit import Device
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.slices import publisher as publishing
from drakit_nodeplugin.slices.publisher import SlicePublisher

DRIVER = "camera.example.com"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"


@pytest.fixture
def manager() -> DeviceManager:
    return DeviceManager(DRIVER)


@pytest.fixture
def primary() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@pytest.fixture
async def published(api_server, session, manager, primary, monkeypatch):
    """A running publisher; gives a wait for what the API server then holds."""
    monkeypatch.setattr(publishing, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(publishing, "PACE_SECONDS", 0.02)
    monkeypatch.setattr(publishing, "RETRY_SECONDS", (0.02, 0.05))
    api_server.store("/api/v1/nodes/node-1", {"metadata": {"uid": "node-uid"}})
    future = asyncio.get_running_loop().create_future()
    future.set_result(session)
    publisher = SlicePublisher(manager=manager, session=future, node="node-1", primary=primary)
    task = asyncio.create_task(publisher.run())

    async def wait(condition: Callable[[set[str]], bool]) -> set[str]:
        async with asyncio.timeout(10):
            while True:
                names = {
                    device["name"]
                    for body in api_server.objects(SLICES)
                    for device in body["spec"]["devices"]
                }
                if condition(names):
                    return names
                await asyncio.sleep(0.01)

    yield wait
    task.cancel()
    await asyncio.wait({task})


def cameras(*names: str) -> list[Device]:
    return [Device(name=name) for name in names]


async def test_devices_are_published_and_changes_follow(api_server, manager, published):
    manager.replaced(cameras("a", "b"))
    await published(lambda names: names == {"a", "b"})
    manager.replaced(cameras("a"))
    await published(lambda names: names == {"a"})
    assert [method for method, _ in api_server.writes()] == ["POST", "PUT"]
    (body,) = api_server.objects(SLICES)
    assert body["spec"]["nodeName"] == "node-1"
    assert body["metadata"]["ownerReferences"][0]["uid"] == "node-uid"


async def test_nothing_is_written_before_the_driver_has_spoken_or_without_a_change(
    api_server, manager, published
):
    await asyncio.sleep(0.1)
    assert api_server.writes() == []
    manager.replaced(cameras("a"))
    await published(lambda names: names == {"a"})
    manager.replaced(cameras("a"))
    await asyncio.sleep(0.1)
    assert len(api_server.writes()) == 1


async def test_an_instance_that_is_not_primary_writes_nothing_until_it_is(
    api_server, manager, primary, published
):
    primary.clear()
    manager.replaced(cameras("a"))
    await asyncio.sleep(0.1)
    assert api_server.writes() == []
    primary.set()
    await published(lambda names: names == {"a"})


async def test_slices_that_somebody_deletes_are_back(api_server, manager, published):
    manager.replaced(cameras("a"))
    await published(lambda names: names == {"a"})
    (body,) = api_server.objects(SLICES)
    api_server.remove(f"{SLICES}/{body['metadata']['name']}")
    await published(lambda names: names == {"a"})


async def test_a_refused_write_is_tried_again_until_it_succeeds(api_server, manager, published):
    api_server.fail("POST", SLICES, times=2)
    manager.replaced(cameras("a"))
    await published(lambda names: names == {"a"})


async def test_a_change_by_somebody_else_is_undone(api_server, manager, published):
    manager.replaced(cameras("a"))
    await published(lambda names: names == {"a"})
    (body,) = api_server.objects(SLICES)
    body["spec"]["devices"] = [{"name": "intruder"}]
    api_server.store(f"{SLICES}/{body['metadata']['name']}", body)
    await published(lambda names: names == {"a"})


async def test_a_bad_device_is_left_out_and_the_rest_published(api_server, manager, published):
    manager.replaced([*cameras("a", "Not_A_Label"), Device(name="a", attributes={"twice": True})])
    await published(lambda names: names == {"a"})
