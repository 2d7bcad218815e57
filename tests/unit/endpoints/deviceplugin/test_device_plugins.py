"""Device plugins over real sockets: they register, list, allocate, and end in different ways."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import socket
from contextlib import AsyncExitStack

import grpc
import grpc.aio
import pytest

from drakit.device import Edits
from drakit_driver.runtime import endpoint as lifecycle
from drakit_driver.runtime.failures import DeviceFailedError, EndpointStoppedError
from drakit_nodeplugin.endpoints.deviceplugin import plugin_connection, plugin_registration
from drakit_nodeplugin.endpoints.deviceplugin.messages import pool_of
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb
from tests.fakes.deviceplugin import FakeDevicePlugin, listed, register
from tests.unit.endpoints.camera import until
from tests.unit.endpoints.deviceplugin.conftest import THING, World, device

pytestmark = pytest.mark.usefixtures("short_delays")


@pytest.fixture
async def plugin(world, directory):
    async with FakeDevicePlugin(directory) as plugin:
        await world.until_listed("thing-0", "thing-1")
        yield plugin


# ------------------------------------------------------------ listing


async def test_a_plugin_that_registers_is_listed(world, plugin):
    (inventory,) = world.reports[THING]
    assert [(d.name, d.pool) for d in inventory.devices] == [
        ("thing-0", "thing.vendor.example"),
        ("thing-1", "thing.vendor.example"),
    ]
    assert inventory.devices[0].attributes == {"resource": THING, "id": "thing-0"}
    assert world.diagnostics == []
    assert world.plugins.unavailable() is None


async def test_health_comes_and_goes_with_the_list(world, plugin):
    await plugin.list("thing-0", ("thing-1", "Unhealthy"))
    await until(lambda: world.health() == {"thing-0": "healthy", "thing-1": "unhealthy"})
    await plugin.list("thing-0", "thing-1")
    await until(lambda: world.health() == {"thing-0": "healthy", "thing-1": "healthy"})
    assert world.stops() == []


async def test_a_plugin_without_devices_is_there(world, directory):
    async with FakeDevicePlugin(directory, devices=()):
        await until(lambda: world.reports.get(THING))
        assert world.plugins.unavailable() is None


async def test_an_old_plugin_without_options_is_taken(world, directory):
    options = {"has_options": False, "pre_start_required": True}
    async with FakeDevicePlugin(directory, **options) as plugin:
        await world.until_listed("thing-0", "thing-1")
        await world.prepare("thing-0")
        assert plugin.pre_started == [["thing-0"]]


async def test_a_plugin_may_listen_only_after_it_has_registered(world, directory):
    plugin = FakeDevicePlugin(directory)
    await plugin.register()
    await plugin.start()
    await world.until_listed("thing-0", "thing-1")
    await plugin.stop()


async def test_bad_devices_are_rejected_alone(world, directory):
    async with FakeDevicePlugin(directory, devices=("good", "", "x" * 257, "good")):
        await world.until_listed("good")
        assert world.reasons() == ["DeviceRejected"] * 3


# ------------------------------------------------------------ ends and returns


async def test_a_plugin_that_dies_is_stopped_and_returns_by_registering(world, plugin):
    await plugin.stop()
    assert await world.until_stopped()
    with pytest.raises(
        EndpointStoppedError, match=r"vendor\.example/thing is unavailable: .*registered"
    ):
        await world.prepare("thing-0")
    assert world.plugins.unavailable() is not None
    await plugin.start("thing-2.sock")
    await plugin.register()
    await world.until_listed("thing-0", "thing-1")
    assert await world.prepare("thing-0") == [Edits(env={"THINGS": "thing-0"})]


async def test_a_plugin_that_registers_again_is_not_stopped(world, plugin, directory):
    await plugin.register()
    await until(lambda: len(world.reports[THING]) == 2)
    await until(lambda: plugin.streams == 1)
    assert world.stops() == []
    assert await world.prepare("thing-0")


async def test_one_that_registers_again_and_cannot_be_reached_keeps_its_connection(
    world, plugin, monkeypatch
):
    monkeypatch.setattr(plugin_connection, "CONNECT_SECONDS", 0.1)
    await plugin.register(endpoint="nothing.sock")
    await asyncio.sleep(0.3)
    assert world.stops() == []
    assert await world.prepare("thing-0")


async def test_a_plugin_that_registers_without_end_is_connected_now_and_then(
    world, plugin, monkeypatch
):
    monkeypatch.setattr(plugin_connection, "REPLACE_SECONDS", 0.3)
    for _ in range(20):
        await plugin.register()
    assert len(world.reports[THING]) <= 3
    await until(lambda: len(world.reports[THING]) == 3)
    assert world.stops() == []


async def test_a_predecessor_that_removes_its_successors_socket_does_no_harm(
    world, plugin, directory
):
    plugin.socket.unlink()
    async with FakeDevicePlugin(directory, devices=["thing-9"]) as new:
        await world.until_listed("thing-9")
        await until(lambda: plugin.streams == 0)
        await plugin.stop()
        new.socket.unlink(missing_ok=True)
        await asyncio.sleep(0.1)
        assert world.stops() == []
        await new.list("thing-9", "thing-10")
        await world.until_listed("thing-9", "thing-10")
        await world.prepare("thing-9")
        assert (plugin.allocated, new.allocated) == ([], [["thing-9"]])


async def test_a_plugin_that_listens_late_is_found_without_registering_again(
    world, directory, monkeypatch
):
    monkeypatch.setattr(plugin_connection, "CONNECT_SECONDS", 0.1)
    plugin = FakeDevicePlugin(directory)
    await plugin.register()
    assert "thing.sock, but does not respond on it" in await world.until_stopped()
    await plugin.start()
    await world.until_listed("thing-0", "thing-1")
    await plugin.stop()


async def test_a_stream_that_ends_is_a_stop_and_is_not_tried_again(world, plugin):
    await plugin.end_streams()
    assert await world.until_stopped() == "its stream ended"
    await plugin.start_streams()
    await asyncio.sleep(0.2)
    assert plugin.streams == 0
    await plugin.register()
    await world.until_listed("thing-0", "thing-1")


@pytest.mark.parametrize("when", ["while-it-is-waited-for", "afterwards"])
async def test_a_slow_successor_is_taken_once_its_predecessor_has_ended(
    world, plugin, directory, monkeypatch, when
):
    during = when == "while-it-is-waited-for"
    seconds = 0.3 if during else 0.05
    monkeypatch.setattr(plugin_connection, "CONNECT_SECONDS", seconds)
    async with FakeDevicePlugin(directory, endpoint="other.sock", devices=None) as new:
        await until(lambda: new.streams == 1)
        if not during:
            await until(lambda: new.streams == 0)
        await plugin.stop()
        await world.until_stopped()
        await asyncio.sleep(0.4)
        await new.list("thing-9")
        await world.until_listed("thing-9")


@pytest.mark.parametrize("replaces", [False, True], ids=["first", "replacement"])
async def test_a_good_registration_does_not_wait_for_a_bad_one(world, directory, replaces):
    async with AsyncExitStack() as stack:
        if replaces:
            first = FakeDevicePlugin(directory, endpoint="first.sock")
            await stack.enter_async_context(first)
            await world.until_listed("thing-0", "thing-1")
        await FakeDevicePlugin(directory).register(endpoint="nothing.sock")
        await asyncio.sleep(0.05)
        good = FakeDevicePlugin(directory, devices=["thing-9"])
        await stack.enter_async_context(good)
        await world.until_listed("thing-9")  # and not after CONNECT_SECONDS
        assert world.stops() == []


async def test_a_registration_ends_the_pause_before_the_next_attempt(
    directory, short_delays, monkeypatch
):
    monkeypatch.setattr(lifecycle, "RECONNECT_SECONDS", (0.01, 600.0))
    monkeypatch.setattr("drakit_daemon.backoff.Backoff.next_seconds", lambda self: 600.0)
    async with World(directory).running() as world:
        plugin = FakeDevicePlugin(directory)
        await plugin.start()
        await plugin.register()
        await world.until_listed("thing-0", "thing-1")
        await plugin.stop()
        await world.until_stopped()
        await plugin.start()
        await plugin.register()
        await world.until_listed("thing-0", "thing-1")
        await plugin.stop()


async def test_one_that_registers_while_its_first_list_is_awaited_is_replaced_after_it(
    world, directory
):
    async with FakeDevicePlugin(directory, devices=None) as plugin:
        await until(lambda: plugin.streams == 1)
        await plugin.register()
        await plugin.list("thing-0")
        await until(lambda: len(world.reports.get(THING, [])) == 2)
        assert world.stops() == []


@pytest.mark.parametrize("replaces", [False, True], ids=["first", "replacement"])
async def test_a_plugin_that_is_barred_while_its_list_is_awaited_is_not_used_afterwards(
    world, directory, replaces
):
    if replaces:
        first = FakeDevicePlugin(directory, endpoint="first.sock", devices=["old"])
        await first.start()
        await first.register()
        await world.until_listed("old")
    async with FakeDevicePlugin(directory, devices=None) as plugin:
        await until(lambda: plugin.streams == 1)
        world.kubelet = {THING: True}
        world.plugins._poll_kubelet.set()
        await until(lambda: plugin.streams == 0)
        await plugin.list("thing-0")
        assert "own device manager serves" in await world.until_stopped()
        await asyncio.sleep(0.1)
        assert plugin.streams == 0
        assert world.health() == {}
    if replaces:
        await until(lambda: first.streams == 0)
        await first.stop()


# ------------------------------------------------------------ registration sockets


async def test_plugins_can_register_from_the_run_until_the_close(directory, short_delays):
    plugin = FakeDevicePlugin(directory)
    with pytest.raises(grpc.aio.AioRpcError):
        await plugin.register()
    async with World(directory).running():
        await plugin.register()
    assert list(directory.iterdir()) == []
    with pytest.raises(grpc.aio.AioRpcError):
        await plugin.register()


async def test_plugins_register_again_with_the_next_endpoint(directory, short_delays):
    """As after a hand-over, and when this instance is active again."""
    plugin = FakeDevicePlugin(directory)
    for _ in range(3):
        world = World(directory)
        async with world.running():
            assert not plugin.socket.exists(), "so that the plugin notices and registers again"
            await plugin.stop()
            await plugin.start()
            await plugin.register()
            await world.until_listed("thing-0", "thing-1")
        await until(lambda: plugin.streams == 0)
        assert plugin.socket.exists(), "only the registration socket is removed"
    await plugin.stop()


async def test_the_close_does_not_remove_the_socket_of_another_process(
    directory, short_delays, monkeypatch
):
    # The first one does not notice that its socket was replaced.
    monkeypatch.setattr(plugin_registration, "POLL_SECONDS", 600)
    first, second = World(directory), World(directory)
    async with AsyncExitStack() as later:
        async with first.running():
            await later.enter_async_context(second.running())
            await until(lambda: second.plugins._sockets.served)
        async with FakeDevicePlugin(directory):
            await second.until_listed("thing-0", "thing-1")
    assert first.reports == {}


async def test_only_sockets_are_removed_at_the_beginning(directory, short_delays):
    (directory / "kubelet_internal_checkpoint").write_text("{}")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(directory / "left.sock"))
    async with World(directory).running():
        assert {path.name for path in directory.iterdir()} == {
            "kubelet_internal_checkpoint",
            "kubelet.sock",
        }


async def test_the_registration_socket_is_seen_by_programs_that_watch_for_created_files(
    directory, short_delays
):
    seen = created_in(directory)
    async with World(directory).running():
        assert "kubelet.sock" in seen()
        assert {path.name for path in directory.iterdir()} == {"kubelet.sock"}


def created_in(directory):
    """Watch for created files only."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(watch, os.fsencode(directory), 0x100) > 0

    def names():
        raw = os.read(watch, 65536)
        os.close(watch)
        return re.findall(r"[\w.-]+\.sock", raw.decode("latin-1"))

    return names


async def test_a_registration_socket_that_was_removed_is_created_again(world, plugin, directory):
    (directory / "kubelet.sock").unlink()
    await until((directory / "kubelet.sock").exists)
    await plugin.register()
    assert world.stops() == []


# ------------------------------------------------------------ who may register


BAD_REGISTRATIONS = {
    "version": ({"version": "v1"}, "Supported version is \\['v1beta1'\\]"),
    "no-domain": ({"resource_name": "thing"}, "must begin with a domain"),
    "other-directory": ({"endpoint": "../x.sock"}, "without '/'"),
    "our-own": ({"endpoint": "kubelet.sock"}, "is the registration socket"),
    "long": ({"endpoint": "x" * 256}, "exceeds 255 bytes, the maximum length"),
}


@pytest.mark.parametrize(("changes", "text"), BAD_REGISTRATIONS.values(), ids=BAD_REGISTRATIONS)
async def test_a_wrong_registration_is_refused(world, directory, changes, text):
    with pytest.raises(grpc.aio.AioRpcError, match=text) as raised:
        await FakeDevicePlugin(directory).register(**changes)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert world.reasons() == ["RegistrationRefused"]
    assert world.reports == {}


async def test_the_devices_of_all_resources_are_bounded(world, plugin, directory):
    names = [f"other-{number}" for number in range(16_383)]
    other = FakeDevicePlugin(
        directory, resource="a.example/o", endpoint="o.sock", devices=names[:-1]
    )
    async with other:
        await world.until_listed(*names[:-1], resource="a.example/o")
        await other.list(*names)
        reason = await world.until_stopped("a.example/o")
        assert "the 2 devices of other device plugins" in reason
        assert world.health() == {"thing-0": "healthy", "thing-1": "healthy"}
        assert world.reasons() == ["DevicePluginStopped"]


async def test_a_large_registration_is_refused(world, directory):
    with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as raised:
        await FakeDevicePlugin(directory).register(endpoint="x" * 20_000)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert world.reports == {}


async def test_a_flood_of_registrations_is_slowed_down(directory, monkeypatch):
    monkeypatch.setattr(plugin_registration, "MAX_BURST", 20.0)
    monkeypatch.setattr(plugin_registration, "MAX_PER_SECOND", 1.0)
    request = pb.RegisterRequest(version="v1beta1", resource_name=THING, endpoint="thing.sock")
    async with World(directory).running() as world, FakeDevicePlugin(directory):
        results = await asyncio.gather(
            *(register(directory, request) for _ in range(60)), return_exceptions=True
        )
        assert sum(isinstance(result, grpc.aio.AioRpcError) for result in results) >= 20
        await world.until_listed("thing-0", "thing-1")


# ------------------------------------------------------------ allocating


async def test_a_request_is_one_call_with_all_its_devices(world, plugin):
    first, second = await world.prepare("thing-0", "thing-1")
    assert plugin.allocated == [["thing-0", "thing-1"]]
    assert first == Edits(env={"THINGS": "thing-0,thing-1"})
    assert second == Edits()
    assert plugin.preferred == 0


async def test_each_request_and_each_resource_is_a_call_of_its_own(world, plugin, directory):
    other = FakeDevicePlugin(
        directory, resource="other.example/Big_One", endpoint="o.sock", devices=["GPU-A:0"]
    )
    async with other:
        await until(lambda: world.health("other.example/Big_One"))
        (name,) = world.health("other.example/Big_One")
        edits = await world.prepare_devices(
            [
                device("thing-0", request="a"),
                device(name, request="b", pool=pool_of("other.example/Big_One")),
                device("thing-1", request="c"),
            ]
        )
    assert sorted(plugin.allocated) == [["thing-0"], ["thing-1"]]
    assert other.allocated == [["GPU-A:0"]]
    assert [each.env["THINGS"] for each in edits] == ["thing-0", "GPU-A:0", "thing-1"]


async def test_pre_start_is_called_where_it_is_wanted_and_its_failure_is_a_sentence(
    world, directory
):
    async with FakeDevicePlugin(directory, pre_start_required=True) as plugin:
        await world.until_listed("thing-0", "thing-1")
        await world.prepare("thing-1", "thing-0")
        assert plugin.pre_started == [["thing-1", "thing-0"]]
        plugin.pre_start_failure = (grpc.StatusCode.FAILED_PRECONDITION, "too hot")
        with pytest.raises(DeviceFailedError, match=r"failed in PreStartContainer: .*too hot"):
            await world.prepare("thing-0")


async def test_annotations_are_reported_once(world, plugin):
    plugin.answer = lambda ids: pb.ContainerAllocateResponse(annotations={"a": "b"})
    assert await world.prepare("thing-0") == [Edits()]
    await world.prepare("thing-1")
    assert world.reasons() == ["AnnotationsUnsupported"]


BAD_ANSWERS = {
    "failure": (
        {"failure": (grpc.StatusCode.INTERNAL, "no\npower")},
        r"thing failed in Allocate: no power \(internal\)",
    ),
    "garbage": ({"raw_answer": b"\xff\xff"}, "malformed protobuf message"),
    "no-answer": ({"raw_answer": b""}, "with no container_response for 1"),
    "two-answers": (
        {"raw_answer": pb.AllocateResponse(container_responses=[{}, {}]).SerializeToString()},
        "with more than 1 container_response for 1",
    ),
    "huge": ({"raw_answer": b"\x0a" * 2_000_000}, "more than 1024 KiB"),
}


@pytest.mark.parametrize(("behaviour", "text"), BAD_ANSWERS.values(), ids=BAD_ANSWERS)
async def test_an_answer_that_cannot_be_used_is_a_sentence(world, plugin, behaviour, text):
    for name, value in behaviour.items():
        setattr(plugin, name, value)
    with pytest.raises(DeviceFailedError, match=text) as raised:
        await world.prepare("thing-0")
    assert "vendor.example/thing" in str(raised.value)
    assert raised.value.index == 0
    assert world.stops() == []


async def test_a_call_that_is_not_answered_is_a_sentence(world, plugin, monkeypatch):
    monkeypatch.setattr(plugin_connection, "ALLOCATE_SECONDS", 0.1)
    plugin.allow.clear()
    with pytest.raises(DeviceFailedError, match="did not respond to Allocate in time"):
        await world.prepare("thing-0")
    plugin.allow.set()
    assert await world.prepare("thing-0")


async def test_a_large_answer_that_finds_no_thread_fails_alone(world, plugin, monkeypatch):
    async def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    plugin.answer = lambda ids: pb.ContainerAllocateResponse(envs={"A": "b" * 10_000})
    with monkeypatch.context() as patched:
        patched.setattr(plugin_connection.asyncio, "to_thread", refuse)
        with pytest.raises(DeviceFailedError, match="can't start new thread"):
            await world.prepare("thing-0")
    (edits,) = await world.prepare("thing-0")
    assert edits.env == {"A": "b" * 10_000}


async def test_one_request_of_two_that_fails_fails_the_claim(world, plugin):
    def answer(ids):
        if ids == ["thing-1"]:
            return pb.ContainerAllocateResponse(envs={"A=": ""})
        return pb.ContainerAllocateResponse()

    plugin.answer = answer
    devices = [device("thing-0", request="a"), device("thing-1", request="b")]
    with pytest.raises(DeviceFailedError) as raised:
        await world.prepare_devices(devices)
    assert raised.value.index == 1


async def test_a_device_that_is_not_listed_is_a_sentence(world, plugin):
    with pytest.raises(DeviceFailedError, match="no longer lists it") as raised:
        await world.prepare("thing-0", "thing-7")
    assert raised.value.index == 1
    assert plugin.allocated == []


async def test_a_resource_that_never_registered_is_a_sentence(world, plugin):
    with pytest.raises(
        EndpointStoppedError, match=r"of pool thing\.a\.b is unavailable: it has not registered"
    ):
        await world.prepare_devices([device("c", pool="thing.a.b")])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        pytest.param({"admin_access": True}, "adminAccess", id="admin-access"),
        pytest.param({"configs": ({"speed": 3},)}, "accepts no opaque parameters", id="parameters"),
    ],
)
async def test_what_no_plugin_supports_is_refused(world, plugin, fields, text):
    with pytest.raises(DeviceFailedError, match=text):
        await world.prepare_devices([device("thing-0", **fields)])
    assert plugin.allocated == []


async def test_a_plugin_that_dies_in_a_call_fails_it_alone(world, plugin):
    plugin.allow.clear()
    call = asyncio.create_task(world.prepare("thing-0"))
    await until(lambda: plugin.allocated)
    await plugin.stop()
    with pytest.raises(DeviceFailedError, match="ended during Allocate"):
        await call
    await world.until_stopped()


async def test_a_call_outlives_another_registration(world, plugin):
    plugin.allow.clear()
    call = asyncio.create_task(world.prepare("thing-0"))
    await until(lambda: plugin.allocated)
    await plugin.register()
    await until(lambda: len(world.reports[THING]) == 2)
    plugin.allow.set()
    assert await call == [Edits(env={"THINGS": "thing-0"})]


async def test_an_unprepare_needs_no_plugin(world, plugin):
    await plugin.stop()
    await world.until_stopped()
    await world.unprepare_devices([device("thing-0"), device("c", pool="c.a.b")])


# ------------------------------------------------------------ bad plugins


BAD_LISTS = {
    "garbage": ([b"\xff\xff\xff"], "malformed protobuf message"),
    "too-many-devices": (
        [listed(*(str(n) for n in range(20_000))).SerializeToString()],
        "more than 16,384 devices",
    ),
    "flood": ([listed("thing-0").SerializeToString()] * 2000, "more than 100"),
    "empty-devices": ([b"\x0a\x00" * 1_000_000 + b"\xff"], "more than 16,384 devices"),
    "huge": ([b"\x0a" * (5 << 20)], "larger than 4 MiB"),
}


@pytest.mark.parametrize(("messages", "text"), BAD_LISTS.values(), ids=BAD_LISTS)
async def test_a_bad_plugin_is_stopped_and_others_are_not(world, plugin, directory, messages, text):
    good = FakeDevicePlugin(directory, resource="good.example/g", endpoint="g.sock", devices=["g"])
    async with good:
        await world.until_listed("g", resource="good.example/g")
        await plugin.send(*messages)
        assert text in await world.until_stopped()
        assert world.reasons() == ["DevicePluginStopped"]
        assert world.health("good.example/g") == {"g": "healthy"}
        await world.prepare_devices([device("g", pool="g.good.example")])


async def test_diagnostics_are_limited(world, directory):
    for number in range(120):
        with pytest.raises(grpc.aio.AioRpcError):
            await FakeDevicePlugin(directory).register(resource_name=f"thing-{number}")
        with pytest.raises(grpc.aio.AioRpcError):
            await FakeDevicePlugin(directory).register(resource_name="thing")
    assert 40 <= len(world.diagnostics) <= 60
    assert [diagnostic.note for diagnostic in world.diagnostics].count(
        world.diagnostics[1].note
    ) == 1


@pytest.mark.parametrize("moment", ["listening-nowhere", "listing-nothing", "in-a-call"])
async def test_it_ends_in_the_middle_of_anything(directory, short_delays, moment):
    world = World(directory)
    plugin = FakeDevicePlugin(directory, devices=None if moment == "listing-nothing" else ["a"])
    call = None
    async with world.running():
        if moment != "listening-nowhere":
            await plugin.start()
        await plugin.register()
        if moment != "in-a-call":
            await asyncio.sleep(0.05)
        else:
            await world.until_listed("a")
            plugin.allow.clear()
            call = asyncio.create_task(world.prepare("a"))
            await until(lambda: plugin.allocated)
    assert not (directory / "kubelet.sock").exists()
    if call is not None:
        with pytest.raises((DeviceFailedError, EndpointStoppedError)):
            await call
    assert world.stops() == []
    await plugin.stop()


async def test_a_canceled_call_ends_when_the_plugin_has_ended_it(world, plugin):
    """The handler continues, and the next call for the device must not start before it has
    ended."""
    plugin.allow.clear()
    call = asyncio.create_task(world.prepare("thing-0"))
    await until(lambda: plugin.allocated)
    call.cancel()
    await asyncio.sleep(0.05)
    assert not call.done()
    plugin.allow.set()
    await asyncio.wait({call})
    assert call.cancelled()
