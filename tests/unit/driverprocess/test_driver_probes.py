"""Probes and metrics of drakit-driver: whether somebody uses the driver, and why not."""

from __future__ import annotations

import asyncio
import logging
import urllib.request
from urllib.error import HTTPError

import grpc
import grpc.aio
import pytest

from drakit.device import Inventory
from drakit.settings import SettingsError
from drakit_driver.probes import MAX_STREAMS, DriverProbes, Monitor
from drakit_driver.runtime.contract import CALL_SECONDS
from drakit_proto.backend.v1 import backend_pb2 as pb
from drakit_proto.backend.v1 import backend_pb2_grpc as pb_grpc
from tests.unit.driverprocess.conftest import loaded, serving
from tests.unit.endpoints.camera import until
from tests.unit.homes.homes import Script, Scripted


@pytest.fixture
async def server(monkeypatch, sockets):
    script = Script(listed=Inventory(devices=()))
    monkeypatch.setattr(Scripted, "script", script, raising=False)
    async with serving(*loaded(Scripted), sockets / "driver.sock") as server:
        yield server


@pytest.fixture
async def stub(server, sockets):
    async with grpc.aio.insecure_channel(f"unix:{sockets / 'driver.sock'}") as channel:
        yield pb_grpc.BackendStub(channel)


async def test_a_driver_is_ready_once_a_node_plugin_has_its_devices(server, stub):
    assert "add an entry for its directory, with driver gpu.example.com, to" in server.unready()
    await stub.GetInfo(pb.GetInfoRequest(node_name="n"))
    assert "the Event BackendRefused on the Node has the reason" in server.unready()
    devices = stub.WatchDevices(pb.WatchDevicesRequest())
    await devices.read()
    await until(lambda: server.unready() is None)
    devices.cancel()
    await until(lambda: server.unready() is not None)
    assert "no node plugin has connected" in server.unready()


async def test_a_driver_that_stops_is_not_ready(server, stub):
    devices = stub.WatchDevices(pb.WatchDevicesRequest())
    await devices.read()
    server._reports.stopped("lamps", "its lamp exploded")
    assert server.unready() == "the driver is unavailable: its lamp exploded"
    await server.drain()
    assert server.unready() == "the driver is stopping"


async def test_the_successor_in_an_update_is_ready_while_the_predecessor_serves(
    server, stub, sockets
):
    path = sockets / "driver.sock"
    async with (
        serving(*loaded(Scripted), path) as second,
        grpc.aio.insecure_channel(f"unix:{path}", options=[("test.second", 1)]) as channel,
    ):
        assert "no node plugin has connected" in second.unready()
        await pb_grpc.BackendStub(channel).GetInfo(pb.GetInfoRequest(node_name="n"))
        assert second.unready() is None
        await server.stop()
        assert "BackendRefused" in second.unready()


async def test_the_streams_of_a_method_are_limited(server, stub):
    streams = [stub.WatchDevices(pb.WatchDevicesRequest()) for _ in range(MAX_STREAMS)]
    for each in streams:
        await each.read()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.WatchDevices(pb.WatchDevicesRequest()).read()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    streams[0].cancel()
    await until(lambda: server.monitor.streams["WatchDevices"] < MAX_STREAMS)
    await stub.WatchDevices(pb.WatchDevicesRequest()).read()


async def get(port: int, path: str) -> tuple[int, str]:
    def work() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(work)


async def test_the_port_has_the_probes_and_the_metrics(server, stub, caplog):
    probes = DriverProbes(server)
    await probes.start(0)
    try:
        assert await get(probes.port, "/livez") == (200, "ok\n")
        assert await get(probes.port, "/readyz") == (503, "not ready\n")
        assert caplog.records[-1].reason == server.unready()
        claims = [pb.Claim(uid="u", devices=[pb.AllocatedDevice(name="lamp-0", request="r")])]
        await stub.PrepareClaims(pb.PrepareClaimsRequest(claims=claims))
        claims[0].devices[0].configs.append('{"watts": 0.5}')
        await stub.PrepareClaims(pb.PrepareClaimsRequest(claims=claims))
        await stub.WatchDevices(pb.WatchDevicesRequest()).read()
        status, text = await get(probes.port, "/metrics")
        lines = text.splitlines()
        assert status == 200
        for each in (
            "# TYPE drakit_driver_calls_total counter",
            'drakit_driver_calls_total{method="PrepareClaims",result="error"} 1',
            'drakit_driver_calls_total{method="PrepareClaims",result="success"} 1',
            "# TYPE drakit_driver_call_seconds histogram",
            'drakit_driver_call_seconds_bucket{method="PrepareClaims",le="+Inf"} 2',
            'drakit_driver_call_seconds_count{method="PrepareClaims"} 2',
            "drakit_driver_connected 1",
        ):
            assert each in lines
        with pytest.raises(SettingsError, match=r"--probe-port: .* choose another port"):
            await DriverProbes(server).start(probes.port)
    finally:
        await probes.stop()


class Driver:
    """A server whose driver blocks, or that nobody uses."""

    def __init__(self) -> None:
        self.monitor = Monitor()
        self.blocked: str | None = None
        self.problem: str | None = "no entry"

    def unconnected(self) -> str | None:
        return self.problem

    unready = unconnected


@pytest.mark.looptime
async def test_a_driver_that_blocks_for_longer_than_a_call_may_take_is_not_alive():
    driver = Driver()
    probes = DriverProbes(driver)
    driver.blocked = "its event loop is blocked in open()"
    assert await probes._not_alive() == []
    await asyncio.sleep(CALL_SECONDS - 1)
    assert await probes._not_alive() == []
    await asyncio.sleep(1)
    assert await probes._not_alive() == [driver.blocked]
    driver.blocked = None
    assert await probes._not_alive() == []


@pytest.mark.looptime
async def test_a_missing_connection_is_logged_after_ten_seconds_with_its_remedy(caplog):
    caplog.set_level(logging.INFO)
    driver = Driver()
    logging_task = asyncio.create_task(DriverProbes(driver).log_connection())
    await asyncio.sleep(9.5)
    assert caplog.messages == []
    await asyncio.sleep(30)
    driver.problem = None
    await asyncio.sleep(2)
    assert caplog.messages == ["driver is not connected", "driver is connected"]
    assert caplog.records[0].reason == "no entry"
    logging_task.cancel()
