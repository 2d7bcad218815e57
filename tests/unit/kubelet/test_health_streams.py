"""Health on real sockets, from the test's source to the kubelet's view."""

from __future__ import annotations

import asyncio
import logging

import grpc
import grpc.aio
import pytest

from drakit_daemon import logs
from tests.fakes.health import FakeHealth, health
from tests.fakes.kubelet import reference
from tests.fakes.tasks import until

WELL, ILL = health("cam-0"), health("cam-0", "unhealthy", "the lens is dirty")
OTHER = health("cam-1", pool="node-1/front")


def streams():
    return [t for t in asyncio.all_tasks() if "NodeWatchResources" in t.get_name()]


async def test_a_driver_with_health_advertises_it_and_the_kubelet_takes_v1(serve, kubelet):
    async with serve(health=FakeHealth(WELL)):
        (path,) = kubelet.sockets()
        info = await kubelet.get_info(path)
        assert list(info.supported_versions) == [
            "v1.DRAPlugin",
            "v1beta1.DRAPlugin",
            "v1.DRAResourceHealth",
            "v1alpha1.DRAResourceHealth",
        ]
        async with await kubelet.follow_health(path) as stream:
            assert stream.version == "v1"
            await stream.until(lambda: stream.status("cam-0") == "Healthy")


@pytest.mark.parametrize("version", ["v1", "v1alpha1"])
async def test_the_kubelet_receives_the_state_and_then_changes(serve, kubelet, version):
    source = FakeHealth(WELL, OTHER)
    async with serve(health=source):
        (path,) = kubelet.sockets()
        async with await kubelet.follow_health(path, version=version) as stream:
            await stream.until(lambda: len(stream.messages) == 1)
            for state in (ILL, health("cam-0", "unknown"), WELL):
                seen = len(stream.messages)
                source.replace(state)
                await stream.until(lambda seen=seen: len(stream.messages) > seen)
    device = ("node-1", "cam-0")
    assert stream.messages[0].keys() == {device, ("node-1/front", "cam-1")}
    assert stream.messages[1:] == [
        {device: ("Unhealthy", "the lens is dirty")},
        {device: ("Unknown", "")},
        {device: ("Healthy", "")},
    ]


async def test_the_fields_of_a_device_in_a_message(serve, kubelet):
    async with serve(health=FakeHealth(ILL), health_timeout_seconds=45):
        call = kubelet.watch_health(await kubelet.register())
        (device,) = (await call.read()).devices
        call.cancel()
    assert (device.device.pool_name, device.device.device_name) == ("node-1", "cam-0")
    assert device.last_updated_time == 1_700_000_000
    assert device.health_check_timeout_seconds == 45


async def test_a_stream_that_ends_leaves_the_others(serve, kubelet):
    source = FakeHealth(WELL)
    async with serve(health=source):
        (path,) = kubelet.sockets()
        async with await kubelet.follow_health(path) as stream:
            async with await kubelet.follow_health(path, version="v1alpha1") as other:
                await other.until(lambda: len(other.messages) == 1)
            await until(lambda: len(streams()) == 1)
            source.replace(ILL)
            await stream.until(lambda: stream.status("cam-0") == "Unhealthy")
        await until(lambda: not streams())


async def test_a_stop_ends_the_streams_in_good_order(serve, kubelet):
    loop = asyncio.get_running_loop()
    async with serve(health=FakeHealth(WELL)) as server:
        (path,) = kubelet.sockets()
        async with await kubelet.follow_health(path) as stream:
            await stream.until(lambda: stream.status("cam-0") == "Healthy")
            began = loop.time()
            stopping = asyncio.create_task(server.stop())
            await stream.until(lambda: stream.ended)
            assert kubelet.sockets() == [], "it is deregistered first"
            await stopping
            assert loop.time() - began < 5
            assert await stream.call.code() is grpc.StatusCode.OK
            assert stream.status("cam-0") == "Unknown"


async def test_a_kubelet_that_reads_nothing_holds_up_neither_claims_nor_the_stop(serve, kubelet):
    source = FakeHealth(*(health(f"cam-{n}", message="m" * 1024) for n in range(5_000)))
    async with serve(health=source) as server:
        dra = await kubelet.register()
        call = kubelet.watch_health(dra)
        await call.wait_for_connection()
        await until(streams)
        assert (await kubelet.prepare(dra, reference("a")))["a"].error == ""
        async with asyncio.timeout(5):
            await server.stop()
        call.cancel()


async def test_many_devices_with_long_texts_fit_into_the_kubelets_messages(serve, kubelet):
    source = FakeHealth(
        *(health(f"cam-{n}", "unhealthy", "ж" * 2000, pool=f"{'n' * 200}") for n in range(1_200))
    )
    async with serve(health=source):
        (path,) = kubelet.sockets()
        async with await kubelet.follow_health(path) as stream:
            await stream.until(lambda: sum(map(len, stream.messages)) == 1_200)
    assert stream.messages[0]["n" * 200, "cam-0"] == ("Unhealthy", "ж" * 510 + "...")


async def test_a_hand_over_ends_the_streams_and_later_ones_wait_for_the_next_source(
    serve, kubelet, queue
):
    async with serve(health=FakeHealth(WELL)) as server:
        (path,) = kubelet.sockets()
        async with await kubelet.follow_health(path) as stream:
            await stream.until(lambda: stream.status("cam-0") == "Healthy")
            server.serve(None)
            await stream.until(lambda: stream.ended)
            assert await stream.call.code() is grpc.StatusCode.OK
        async with await kubelet.follow_health(path) as stream:
            await until(streams)
            assert stream.messages == []
            server.serve(queue, FakeHealth(ILL))
            await stream.until(lambda: stream.status("cam-0") == "Unhealthy")


async def test_a_driver_without_health_advertises_none_and_serves_no_v1(serve, kubelet):
    async with serve():
        (path,) = kubelet.sockets()
        info = await kubelet.get_info(path)
        assert not [version for version in info.supported_versions if "Health" in version]
        async with await kubelet.follow_health(path, version="v1") as stream:
            await stream.until(lambda: stream.ended)
            assert await stream.call.code() is grpc.StatusCode.UNIMPLEMENTED


class Records(logging.Handler):
    """The lines about health streams, with their request ids as the daemon logs them."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.addFilter(logs.RequestIdFilter())

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def lines():
    logger, records = logging.getLogger("drakit_nodeplugin.kubelet.health"), Records()
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(records)
    yield records
    logger.removeHandler(records)
    logger.setLevel(before)


@pytest.mark.parametrize("version", ["v1", "v1alpha1"])
async def test_a_stream_logs_its_start_its_changes_and_its_end_under_one_id(
    serve, kubelet, lines, version
):
    source = FakeHealth(WELL, OTHER)
    async with serve(health=source, health_timeout_seconds=1):
        (path,) = kubelet.sockets()
        async with await kubelet.follow_health(path, version=version) as stream:
            await stream.until(lambda: len(stream.messages) == 1)
            source.replace(ILL)
            # Twice more at least, as the kubelet believes a health for a second only.
            await stream.until(lambda: len(stream.messages) > 3)
        await until(lambda: not streams())
    assert lines.messages() == [
        "health stream started",
        "device health sent",
        "device health sent",
        "health stream ended",
    ]
    start, first, change, end = lines.records
    assert start.method == f"{version}.NodeWatchResources"
    assert (first.devices, first.unhealthy) == (2, 0)
    assert change.changes == "node-1/cam-0 unhealthy (the lens is dirty)"
    assert end.reason == "the kubelet closed the stream"
    (identifier,) = {record.request_id for record in lines.records}
    assert identifier != "-"


async def test_streams_have_ids_of_their_own_and_log_that_the_plugin_ends_them(
    serve, kubelet, lines
):
    async with serve(health=FakeHealth(WELL)) as server:
        (path,) = kubelet.sockets()
        async with (
            await kubelet.follow_health(path),
            await kubelet.follow_health(path, version="v1alpha1"),
        ):
            await until(lambda: lines.messages().count("device health sent") == 2)
            await server.stop()
            await until(lambda: lines.messages().count("health stream ended") == 2)
    assert {record.reason for record in lines.records[4:]} == {"the plugin ended it"}
    assert len({record.request_id for record in lines.records}) == 2


async def test_a_change_of_many_devices_is_one_line_of_bounded_length(serve, kubelet, lines):
    source = FakeHealth(*(health(f"cam-{n}", "unhealthy", "m" * 1024) for n in range(2_000)))
    async with serve(health=source):
        (path,) = kubelet.sockets()
        async with await kubelet.follow_health(path) as stream:
            await stream.until(lambda: sum(map(len, stream.messages)) == 2_000)
    (line,) = [r for r in lines.records if r.getMessage() == "device health sent"]
    assert (line.devices, line.unhealthy) == (2_000, 2_000)
    assert line.changes.endswith("; and 1990 more")
    assert len(line.changes) < 3_000
