"""A node plugin whose checkpoint is lost or damaged: devices in use are not given away."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from drakit.layout import driver_directory
from tests.fakes.kubelet import FakeKubelet, reference
from tests.fakes.podresources import FakePodResources
from tests.integration.test_node_plugin import DRIVER, rig, stop  # noqa: F401

EVENTS = "/apis/events.k8s.io/v1/namespaces/default/events"


def remove(path) -> None:
    path.unlink()


def empty(path) -> None:
    path.write_bytes(b"")


def overwrite(path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def cut(path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def forget(path) -> None:
    """Damage the log: SQLite reads an earlier state, and reports no error."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for table in ("claims", "bodies", "devices", "counters"):
            connection.execute(f"DELETE FROM {table}")


def reasons(rig) -> set[str]:  # noqa: F811
    return {event["reason"] for event in rig.api_server.objects(EVENTS)}


@pytest.mark.parametrize("harm", [remove, empty, overwrite, cut, forget])
async def test_devices_of_a_lost_checkpoint_are_not_given_to_others(rig, harm):  # noqa: F811
    for book in ("atlas", "bible"):
        (rig.shelf / book).touch()
    rig.allocate("uid-a", "atlas")
    rig.allocate("uid-b", "atlas")
    checkpoint = driver_directory(rig.root, DRIVER) / "checkpoint.db"
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        await rig.until(lambda: kubelet.sockets() and rig.published())
        answer = (await kubelet.prepare(await kubelet.register(), reference("uid-a")))["uid-a"]
        assert answer.error == ""
        await stop(process)
    files = rig.files()
    harm(checkpoint)

    async with (
        FakePodResources(rig.root / "pod-resources" / "kubelet.sock") as podresources,
        FakeKubelet(rig.root) as kubelet,
        rig.plugin() as process,
    ):
        podresources.add("claim-uid-a", "atlas", uid="uid-a", driver=DRIVER)
        await rig.until(kubelet.sockets)
        dra = await kubelet.register()
        refused = (await kubelet.prepare(dra, reference("uid-b")))["uid-b"]
        assert "device atlas is still prepared for claim lab/claim-uid-a" in refused.error
        assert rig.files() == files, "the pod of the lost claim may be running"
        assert (await kubelet.prepare(dra, reference("uid-a")))["uid-a"] == answer
        await rig.until(
            lambda: [
                e for e in rig.api_server.objects(EVENTS) if e["reason"] == "CheckpointDamaged"
            ]
        )

        assert await kubelet.unprepare(dra, reference("uid-a")) == {"uid-a": ""}
        assert (await kubelet.prepare(dra, reference("uid-b")))["uid-b"].error == ""
        await stop(process)


async def test_a_container_that_was_killed_and_restarted_is_an_event_of_the_node(rig):  # noqa: F811
    async with FakeKubelet(rig.root) as kubelet:
        async with rig.plugin("pod-1"):
            await rig.until(kubelet.sockets)
        assert not restarts(rig)
        async with rig.plugin("pod-1") as process:
            await rig.until(lambda: restarts(rig))
            await stop(process)
    (note,) = restarts(rig)
    assert note.startswith("the node plugin on this node was restarted: it was killed")


def restarts(rig) -> list[str]:  # noqa: F811
    events = rig.api_server.objects(EVENTS)
    return [each["note"] for each in events if each["reason"] == "NodePluginRestarted"]
