"""The devices in maintenance that the node plugin taints."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from drakit.testing.apiserver import FakeApiServer
from drakit_daemon.kube import connect
from drakit_formats import crds
from drakit_nodeplugin.host import absence, maintenance
from drakit_nodeplugin.host.maintenance import MaintenanceWatch
from tests.fakes.tasks import until

COLLECTION = f"/apis/{crds.API_VERSION}/devicemaintenances"
CAM = {"driver": "d", "pool": "n1", "device": "cam"}
MIC = {"driver": "e", "pool": "n1", "device": "mic"}


@pytest.fixture
async def server():
    async with FakeApiServer() as server:
        yield server


@pytest.fixture
def watch(server, tmp_path):
    @asynccontextmanager
    async def start():
        session = asyncio.get_running_loop().create_future()
        found = MaintenanceWatch(session, enabled=True)
        async with await connect(server.write_kubeconfig(tmp_path), user_agent="test") as connected:
            running = asyncio.create_task(found.run())
            assert found.devices("d") is None, "it is unknown without the API server"
            session.set_result(connected)
            try:
                yield found
            finally:
                running.cancel()
                await asyncio.wait({running})

    return start


def store(server, name="fix", **changes):
    status = {"phase": "Active", "taintedBy": "NodePlugin", "devices": [CAM, MIC]} | changes
    server.store(f"{COLLECTION}/{name}", {"spec": {}, "status": status})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, {("n1", "cam")}, id="active"),
        pytest.param({"taintedBy": "DeviceTaintRule"}, set(), id="by-rules"),
        pytest.param({"phase": "Scheduled"}, set(), id="before-its-window"),
        pytest.param({"phase": "Ended"}, set(), id="after-its-window"),
        pytest.param({"devices": None}, set(), id="half-filled"),
    ],
)
async def test_which_devices_the_node_plugin_taints(server, watch, changes, expected):
    store(server, **changes)
    async with watch() as found:
        await until(lambda: found.devices("d") is not None)
        assert found.devices("d") == expected


async def test_taints_end_with_the_last_maintenance_of_a_device(server, watch):
    store(server)
    store(server, "again", devices=[CAM])
    async with watch() as found:
        await until(lambda: found.devices("d") == {("n1", "cam")})
        assert found.devices("e") == {("n1", "mic")}
        server.remove(f"{COLLECTION}/fix")
        await until(lambda: found.devices("e") == frozenset())
        assert found.devices("d") == {("n1", "cam")}
        body = server.object(f"{COLLECTION}/again")
        metadata = body["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}
        server.store(f"{COLLECTION}/again", {**body, "metadata": metadata})
        await until(lambda: found.devices("d") == frozenset())


@pytest.fixture
async def missing(server, watch, monkeypatch):
    """A watch that knows a maintenance, and whose resource has been missing for 0.2 s of 0.5 s."""
    monkeypatch.setattr(absence, "MISSING_SECONDS", 0.5)
    monkeypatch.setattr(maintenance, "RETRY_SECONDS", (0.05, 0.1))
    store(server)
    async with watch() as found:
        await until(lambda: found.devices("d") == {("n1", "cam")})
        server.served["drakit.dev"] = []
        server.drop_watches()
        await asyncio.sleep(0.2)
        yield found


async def test_a_missing_definition_ends_all_taints_but_not_at_once(missing):
    assert missing.devices("d") == {("n1", "cam")}
    await until(lambda: missing.devices("d") == frozenset())


async def test_a_definition_that_is_missing_for_a_moment_twice_ends_no_taints(server, missing):
    server.fail("*", COLLECTION, status=503, reason="No", message="no", times=100)
    await asyncio.sleep(0.6)
    server._faults.clear()
    await asyncio.sleep(0.2)
    assert missing.devices("d") == {("n1", "cam")}


async def test_without_the_permission_nothing_is_known(server, watch):
    server.forbidden.add(("list", "devicemaintenances"))
    server.forbidden.add(("watch", "devicemaintenances"))
    async with watch() as found:
        await until(lambda: len(server.requests) > 1)
        assert found.devices("d") is None
