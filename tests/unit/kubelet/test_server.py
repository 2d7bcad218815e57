"""The kubelet-facing servers on real sockets, with a test kubelet and a held engine."""

from __future__ import annotations

import asyncio
import math
import socket
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from drakit_nodeplugin.claims.queue import ClaimQueue
from drakit_nodeplugin.kubelet import server as servers
from drakit_nodeplugin.kubelet.health import HealthService, HealthServicer
from drakit_nodeplugin.kubelet.server import DriverServer
from drakit_nodeplugin.kubelet.sockets import SocketError, socket_paths
from drakit_proto.kubelet.drahealth.v1alpha1 import health_pb2 as v1alpha1
from tests.fakes.file_poller import with_poller
from tests.fakes.kubelet import FakeKubelet, HeldClaims, device, reference
from tests.fakes.tasks import until

A, B = reference("a"), reference("b")


def files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if not p.is_dir())


def instance(driver: str, root: Path) -> DriverServer:
    return DriverServer(socket_paths(driver, kubelet_root=root, instance_uid="pod-1"))


async def begin(kubelet: FakeKubelet, claims: HeldClaims, dra: Path) -> asyncio.Task:
    """Begin a prepare call for claim A, whose work does not end."""
    claims.hold("a")
    call = asyncio.create_task(kubelet.prepare(dra, A))
    await claims.until_begun("prepare a")
    return call


async def stop(server: DriverServer, queue: ClaimQueue, *, drain_seconds: float = 5.0) -> None:
    """Stop the active instance."""
    if not await queue.drain(timeout_seconds=drain_seconds):
        server.refuse()
        await queue.cancel()
    await server.stop()


async def test_a_kubelet_registers_the_driver_and_prepares(serve, kubelet):
    async with serve() as server:
        assert (
            server.registration.status.readiness_problem()
            == "the kubelet has not registered the driver yet"
        )
        (path,) = kubelet.sockets()
        info = await kubelet.get_info(path)
        assert (info.type, info.name) == ("DRAPlugin", "camera.example.com")
        assert list(info.supported_versions) == ["v1.DRAPlugin", "v1beta1.DRAPlugin"]
        assert Path(info.endpoint).is_absolute()
        await kubelet.notify(path)
        assert server.registration.status.state == "registered"
        assert server.registration.status.readiness_problem() is None
        answers = await kubelet.prepare(Path(info.endpoint), A)
        (got,) = answers["a"].devices
        assert list(got.request_names) == ["main"]
        assert (got.pool_name, got.device_name) == ("node-1", "cam-a")
        assert list(got.cdi_device_ids) == ["camera.example.com/claim=a-0"]
        assert got.share_id == "share-1"
        assert await kubelet.unprepare(Path(info.endpoint), A) == {"a": ""}


async def test_v1beta1_is_the_same_without_shares(serve, kubelet, claims):
    claims.errors = {"b": "it is broken"}
    async with serve():
        dra = await kubelet.register()
        answers = await kubelet.prepare(dra, A, B, version="v1beta1")
        (got,) = answers["a"].devices
        assert got.device_name == "cam-a"
        assert not got.DESCRIPTOR.fields_by_name.get("share_id")
        assert (answers["b"].error, list(answers["b"].devices)) == ("it is broken", [])
        errors = await kubelet.unprepare(dra, A, B, version="v1beta1")
        assert errors == {"a": "", "b": "it is broken"}


async def test_a_device_without_share_has_no_share_id(serve, kubelet, claims):
    claims.device = lambda uid: replace(device(uid), share_id=None)
    async with serve():
        answers = await kubelet.prepare(await kubelet.register(), A)
        assert not answers["a"].devices[0].HasField("share_id")


async def test_calls_are_accepted_as_soon_as_the_registration_socket_is_there(root, queue, kubelet):
    server = instance("camera.example.com", root)
    starting = asyncio.create_task(server.start())
    while not kubelet.sockets():
        await asyncio.sleep(0)
    call = asyncio.create_task(kubelet.prepare(server.paths.dra, A))
    await starting
    server.serve(queue)
    assert (await call)["a"].error == ""
    await server.stop()


@pytest.mark.parametrize("name", ["dra", "registration"])
async def test_without_one_of_its_sockets_a_driver_is_not_registered(root, kubelet, name):
    server = instance("camera.example.com", root)
    path = getattr(server.paths, name)
    path.mkdir(parents=True)
    with pytest.raises(SocketError, match=f"{path.name} cannot be created"):
        await server.start()
    assert not any(found.is_socket() for found in kubelet.sockets())
    await server.stop()
    assert files(root) == []


async def test_a_stop_answers_calls_in_flight_before_the_registration_socket_goes(
    serve, kubelet, claims, queue, root
):
    claims.hold("a", "b")
    async with serve() as server:
        dra = await kubelet.register()
        registered = kubelet.sockets()
        calls = [asyncio.create_task(kubelet.prepare(dra, claim)) for claim in (A, B)]
        await claims.until_begun("prepare a")
        await claims.until_begun("prepare b")
        stopping = asyncio.create_task(stop(server, queue))
        claims.let_go("a")
        assert (await calls[0])["a"].error == ""
        # Longer than the kubelet needs to notice that a socket is gone.
        await asyncio.sleep(0.5)
        assert (kubelet.sockets(), stopping.done()) == (registered, False)
        claims.let_go("b")
        assert (await calls[1])["b"].error == ""
        await stopping
    assert files(root) == []


async def test_a_stop_answers_new_calls_while_calls_are_in_flight(serve, kubelet, claims, queue):
    async with serve() as server:
        dra = await kubelet.register()
        call = await begin(kubelet, claims, dra)
        stopping = asyncio.create_task(stop(server, queue))
        answers = await kubelet.prepare(dra, B)
        assert answers["b"].error == ""
        assert await server.probe() is None, "it is alive until its work has ended"
        claims.let_go("a")
        assert (await call)["a"].error == ""
        await stopping


async def test_a_server_that_refuses_asks_for_a_retry_and_lets_work_in_flight_end(
    serve, kubelet, claims
):
    async with serve() as server:
        dra = await kubelet.register()
        call = await begin(kubelet, claims, dra)
        server.refuse()
        # This includes a call that could join the work in flight, because its response must not
        # extend the stop.
        answers = await kubelet.prepare(dra, A, B)
        assert {uid: answer.error for uid, answer in answers.items()} == {
            uid: f"claim lab/claim-{uid}: the node plugin is stopping; the kubelet retries"
            for uid in "ab"
        }
        assert "is stopping" in (await kubelet.unprepare(dra, B))["b"]
        assert await server.probe() is None
        claims.let_go("a")
        assert (await call)["a"].error == ""
    assert claims.done == ["prepare a"]


async def test_a_large_answer_is_sent_completely_before_the_registration_socket_goes(
    serve, kubelet, claims, queue
):
    several = [reference(f"c{number}") for number in range(400)]
    claims.errors = {claim.uid: "x" * 4000 for claim in several}
    claims.hold("c0")
    async with serve() as server:
        dra = await kubelet.register()
        call = asyncio.create_task(kubelet.prepare(dra, *several))
        await claims.until_begun("prepare c0")
        stopping = asyncio.create_task(stop(server, queue))
        claims.let_go("c0")
        answers = await call
        await stopping
    assert {len(answer.error) for answer in answers.values()} == {4000}


async def test_the_kubelet_cuts_off_calls_when_the_registration_socket_goes_first(
    serve, kubelet, claims
):
    """The fake kubelet is as strict as the real one: otherwise, tests of stops prove nothing."""
    async with serve() as server:
        call = await begin(kubelet, claims, await kubelet.register())
        await asyncio.to_thread(server.paths.registration.unlink)
        async with asyncio.timeout(1):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        claims.let_go("a")


async def test_a_stop_has_a_time_limit_and_answers_what_it_interrupts(
    serve, kubelet, claims, queue, root
):
    async with serve() as server:
        call = await begin(kubelet, claims, await kubelet.register())
        await stop(server, queue, drain_seconds=0.2)
        assert "the node plugin stopped while " in (await call)["a"].error
    assert claims.done == []
    assert files(root) == []


async def test_the_kubelets_deadline_leaves_the_work_going_and_its_retry_joins(
    serve, kubelet, claims
):
    claims.hold("a")
    async with serve():
        dra = await kubelet.register()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await kubelet.prepare(dra, A, timeout_seconds=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        # v1 and v1beta1 share the work.
        retry = asyncio.create_task(kubelet.prepare(dra, A, B, version="v1beta1"))
        await claims.until_done("prepare b")
        claims.let_go("a")
        answers = await retry
        assert answers["a"].devices[0].device_name == "cam-a"
        assert answers["b"].error == ""
    assert claims.begun == ["prepare a", "prepare b"]


@pytest.mark.parametrize(
    ("size", "code"),
    [
        pytest.param(4 * 2**20 - 1024, None, id="below-4-MiB-is-answered"),
        pytest.param(4 * 2**20, grpc.StatusCode.RESOURCE_EXHAUSTED, id="above-is-refused"),
    ],
)
async def test_a_huge_request(serve, kubelet, size, code):
    huge = reference("huge", name="x" * size)
    async with serve():
        dra = await kubelet.register()
        if code is None:
            answers = await kubelet.prepare(dra, huge, A)
            assert answers["a"].error == ""
            assert len(answers["huge"].error) < 300
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await kubelet.prepare(dra, huge, A)
            assert caught.value.code() is code
        assert (await kubelet.prepare(dra, B))["b"].error == ""


async def test_a_cancelled_health_stream_passes_the_cancellation_on():
    """A handler that swallows a cancellation leaks the call in grpc.aio."""

    class Context:
        async def send_initial_metadata(self, _):
            pass

    service = HealthService(driver="camera.example.com", reports_health=False, timeout_seconds=30)
    stream = HealthServicer(service, v1alpha1, "v1alpha1").NodeWatchResources(None, Context())
    reading = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_rejection_is_logged_and_the_socket_recreated(serve, kubelet, caplog, monkeypatch):
    monkeypatch.setattr(servers, "RETRY_SECONDS", (0.05, 60))
    async with serve() as server:
        running = asyncio.create_task(with_poller(server.run))
        (path,) = kubelet.sockets()
        first = path.stat().st_ino, path.stat().st_ctime_ns
        await kubelet.notify(path, error="the driver is already registered")
        assert server.registration.status.state == "rejected"
        assert "the driver is already registered" in server.registration.status.readiness_problem()
        assert "the driver is already registered" in caplog.records[-1].error
        await until(
            lambda: path.exists() and (path.stat().st_ino, path.stat().st_ctime_ns) != first
        )
        # The reason stands until the kubelet has responded again.
        assert server.registration.status.state == "rejected"
        await kubelet.register()
        assert server.registration.status.readiness_problem() is None
        running.cancel()


async def test_retries_of_a_rejection_back_off(serve, kubelet):
    async with serve() as server:
        (path,) = kubelet.sockets()
        waits = []
        for _ in range(8):
            await kubelet.notify(path, error="no")
            waits.append(server.registration._retry_at - asyncio.get_running_loop().time())
        assert [round(wait) for wait in waits] == [1, 2, 4, 8, 16, 32, 60, 60]
        await kubelet.notify(path)
        assert not server.registration.retry_due(math.inf)


async def test_a_driver_that_was_registered_once_stays_known_to_the_kubelet(serve, kubelet):
    """The driver may have claims, which are maintained, whatever the kubelet responds later."""
    async with serve() as server:
        (path,) = kubelet.sockets()
        await kubelet.notify(path, error="not yet")
        assert server.registration.status.state == "rejected"
        assert not server.registration.registered.is_set()
        await kubelet.register()
        assert server.registration.status.state == "registered"
        await kubelet.notify(path, error="not any more")
        assert server.registration.registered.is_set()


@pytest.mark.parametrize("which", ["registration", "dra"])
async def test_a_removed_socket_is_recreated(serve, kubelet, which):
    async with serve() as server:
        running = asyncio.create_task(with_poller(server.run))
        await kubelet.register()
        path = getattr(server.paths, which)
        await asyncio.to_thread(path.unlink)
        await until(path.exists)
        assert (await kubelet.prepare(await kubelet.register(), A))["a"].error == ""
        assert await server.probe() is None
        running.cancel()


async def test_a_replaced_socket_is_taken_back(serve, kubelet):
    async with serve() as server:
        await kubelet.register()
        path = server.paths.registration
        path.unlink()
        with socket.socket(socket.AF_UNIX) as thief:
            thief.bind(str(path))
            running = asyncio.create_task(with_poller(server.run))
            await until(lambda: server.registration.status.state == "never asked")
            await kubelet.register()
        assert server.registration.status.state == "registered"
        running.cancel()


async def test_a_socket_that_cannot_be_recreated_is_tried_again(
    serve, kubelet, caplog, monkeypatch
):
    monkeypatch.setattr(servers, "RETRY_SECONDS", (0.01, 60))
    async with serve() as server:
        await kubelet.register()
        path = server.paths.registration
        path.unlink()
        path.mkdir()
        running = asyncio.create_task(with_poller(server.run))
        await until(lambda: "socket cannot be recreated" in caplog.messages)
        path.rmdir()
        await until(lambda: kubelet.sockets() == [path])
        await kubelet.register()
        running.cancel()


async def test_calls_in_flight_survive_the_loss_of_the_socket(serve, kubelet, claims):
    async with serve() as server:
        dra = await kubelet.register()
        call = await begin(kubelet, claims, dra)
        running = asyncio.create_task(with_poller(server.run))
        await asyncio.to_thread(dra.unlink)
        await until(dra.exists)
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        retry = asyncio.create_task(kubelet.prepare(dra, A, B))
        await claims.until_done("prepare b")
        claims.let_go("a")
        assert (await retry)["a"].error == ""
        running.cancel()
    assert claims.begun == ["prepare a", "prepare b"]


def identity(path: Path) -> tuple[int, int] | None:
    try:
        return path.stat().st_ino, path.stat().st_ctime_ns
    except FileNotFoundError:
        return None


async def test_a_superseded_instance_registers_again(serve, kubelet):
    async with serve() as server:
        running = asyncio.create_task(with_poller(server.run))
        await kubelet.register()
        path = server.paths.registration
        before = identity(path)
        server.register_again()
        await until(lambda: identity(path) not in (None, before))
        assert server.registration.status.state == "registered"
        assert (await kubelet.prepare(await kubelet.register(), A))["a"].error == ""
        again = identity(path)
        await asyncio.sleep(0.1)
        assert identity(path) == again, "once"
        running.cancel()


async def test_an_instance_that_hands_over_does_not_register_again(serve, kubelet, queue):
    async with serve() as server:
        await kubelet.register()
        before = identity(server.paths.registration)
        server.register_again()
        server.serve(None)
        running = asyncio.create_task(with_poller(server.run))
        await asyncio.sleep(0.1)
        assert identity(server.paths.registration) == before
        running.cancel()


async def test_an_instance_that_waits_registers_is_alive_and_stops_like_another(
    serve, kubelet, root
):
    async with serve(active=False) as server:
        call = asyncio.create_task(kubelet.prepare(await kubelet.register(), A))
        assert server.registration.status.readiness_problem() is None
        assert await server.probe() is None, "a call without claims must not wait"
        assert not call.done()
        await server.stop()
        assert "is stopping" in (await call)["a"].error
    assert files(root) == []


async def test_the_probe_returns_the_problem(serve, caplog):
    async with serve() as server:
        assert await server.probe() is None
        server.paths.dra.rename(server.paths.dra.with_name("away"))
        assert "the DRA socket" in await server.probe()
        server.paths.registration.rename(server.paths.registration.with_name("away"))
        assert "the registration socket" in await server.probe()
        assert server.registration.status.state == "never asked"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_only_root_can_use_the_sockets(serve):
    async with serve() as server:
        for path in server.paths.sockets:
            assert path.stat().st_mode & 0o077 == 0
