"""Probes and metrics over real connections, with hostile neighbors on the pod network."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from drakit.settings import Listen
from drakit.testing.conformance.node import unready
from drakit_daemon import httpserver, probes
from drakit_daemon.httpserver import HttpServer, Response
from drakit_daemon.logs import TextFormatter
from drakit_daemon.metrics import CollectorRegistry, Gauge, text_of
from drakit_daemon.probes import StatusServers

_INTERFACES = Path("/proc/net/if_inet6")
HAS_IPV6 = _INTERFACES.exists() and _INTERFACES.read_text() != ""

LOCAL = Listen(probes="127.0.0.1:0", metrics="127.0.0.1:0")


class Daemon:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.why_unhealthy: list[str] = []
        self.why_unready: list[str] | None = []
        self.hangs = False
        self.checks = 0
        self._gauge = Gauge("drakit_devices", "Devices", ["name"], registry=self.registry)

    async def liveness_problems(self) -> list[str]:
        self.checks += 1
        if self.hangs:
            await asyncio.Event().wait()
        return self.why_unhealthy

    async def readiness_problems(self) -> list[str]:
        if self.why_unready is None:
            raise KeyError("lamps")
        return self.why_unready

    async def measure(self) -> None:
        self._gauge.labels("lamp").set(7)


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def no_log_pause(monkeypatch) -> None:
    monkeypatch.setattr(probes, "REPORT_SECONDS", 0.0)


@pytest.fixture
async def servers(daemon, monkeypatch) -> AsyncIterator[StatusServers]:
    monkeypatch.setattr(httpserver, "SHARED_SECONDS", 0.0)
    servers = StatusServers(listen=LOCAL, probed=daemon, metrics=partial(text_of, daemon.registry))
    await servers.start()
    yield servers
    await servers.stop()


async def send(server: HttpServer, request: bytes) -> tuple[int, str]:
    """Send a request as it stands; return status and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(request)
        async with asyncio.timeout(5):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    return int(head.split(b" ")[1]), body.decode()


async def get(server: HttpServer, path: str) -> tuple[int, str]:
    return await send(server, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


@contextlib.asynccontextmanager
async def slow_clients(server: HttpServer, count: int) -> AsyncIterator[None]:
    """Clients that send a request byte by byte; one that is dropped connects again at once."""

    async def drip() -> None:
        loop = asyncio.get_running_loop()
        while True:
            with socket.socket() as client, contextlib.suppress(OSError):
                client.setblocking(False)
                await loop.sock_connect(client, ("127.0.0.1", server.port))
                for byte in b"GET /healthz HTTP/1.1\r\n" * 10:
                    await loop.sock_sendall(client, bytes([byte]))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.3):
                            await loop.sock_recv(client, 1)
                            break  # the server dropped it

    clients = [asyncio.create_task(drip()) for _ in range(count)]
    await asyncio.sleep(0.2)
    try:
        yield
    finally:
        for client in clients:
            client.cancel()
        await asyncio.wait(clients)


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/readyz?verbose"])
async def test_a_daemon_without_a_problem_answers_ok(servers, path):
    assert await get(servers.probes, path) == (200, "ok\n")


async def test_reasons_are_in_the_log_and_not_in_the_answer(servers, daemon, caplog):
    daemon.why_unhealthy, daemon.why_unready = ["lamps: its socket is gone"], ["lamps: stopped"]
    assert await get(servers.probes, "/healthz") == (503, "unhealthy\n")
    assert await get(servers.probes, "/readyz") == (503, "not ready\n")
    reported = {record.probe: record.reason for record in caplog.records}
    assert reported == {"/healthz": "lamps: its socket is gone", "/readyz": "lamps: stopped"}


async def test_the_conformance_kit_finds_the_last_reason_in_the_log(
    no_log_pause, servers, daemon, caplog
):
    for daemon.why_unready in (["lamps: stopped"], ["lamps: its error has\ntwo lines"]):
        await get(servers.probes, "/readyz")
    log = "\n".join(map(TextFormatter().format, caplog.records))
    assert unready(log) == "the node plugin is not ready: lamps: its error has\\ntwo lines"
    assert unready("") is None


async def test_a_result_is_logged_once_per_change(no_log_pause, servers, daemon, caplog):
    caplog.set_level(logging.INFO)
    for daemon.why_unready in (["lamps: stopped"], []):
        for _ in range(3):
            await get(servers.probes, "/readyz")
    assert [record.message for record in caplog.records] == ["probe fails", "probe succeeds again"]


async def test_a_flapping_result_is_not_logged_each_time(servers, daemon, caplog):
    caplog.set_level(logging.INFO)
    for daemon.why_unready in (["lamps: stopped"], [], ["lamps: stopped"]):
        await get(servers.probes, "/readyz")
    assert [record.message for record in caplog.records] == ["probe fails"]


async def test_metrics_are_measured_on_request_and_have_a_port_of_their_own(servers):
    status, text = await get(servers.metrics, "/metrics")
    assert status == 200
    assert 'drakit_devices{name="lamp"} 7.0' in text
    assert (await get(servers.probes, "/metrics"))[0] == 404
    assert (await get(servers.metrics, "/healthz"))[0] == 404


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", 404, id="another-path"),
        pytest.param(b"POST /healthz HTTP/1.1\r\n\r\n", 405, id="another-method"),
        pytest.param(b"GET /healthz\r\n\r\n", 400, id="no-version"),
        pytest.param(b"\x16\x03\x01\x02\x00\r\n\r\n", 400, id="tls"),
        pytest.param(b"GET /" + b"x" * 8187, 431, id="endless-line"),
        pytest.param(b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 1362 + b"A: b", 431, id="many-headers"),
    ],
)
async def test_other_requests_are_refused(servers, request_, status):
    assert (await send(servers.probes, request_))[0] == status


async def test_a_request_in_pieces_is_answered(servers):
    reader, writer = await asyncio.open_connection("127.0.0.1", servers.probes.port)
    for piece in (b"GET /hea", b"lthz HTTP/1.1\r", b"\nHost: x\r\n\r", b"\n"):
        writer.write(piece)
        await asyncio.sleep(0.02)
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()


@pytest.mark.parametrize("flooded", ["probes", "metrics"])
async def test_slow_clients_do_not_make_a_probe_fail(servers, flooded):
    async with slow_clients(getattr(servers, flooded), 2 * httpserver.MAX_CONNECTIONS):
        for _ in range(20):
            async with asyncio.timeout(1):
                assert await get(servers.probes, "/healthz") == (200, "ok\n")
            await asyncio.sleep(0.02)


async def test_clients_that_do_not_read_their_answer_do_not_keep_others_from_theirs():
    async def large() -> Response:
        return Response(body=b"x" * 8_000_000)  # more than the buffers of both sockets hold

    server = HttpServer(listen="127.0.0.1:0", routes={"/large": large})
    await server.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.stop)
        for _ in range(httpserver.MAX_CONNECTIONS + 1):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.1)
        status, text = await get(server, "/large")
        assert (status, len(text)) == (200, 8_000_000)


async def test_a_silent_client_is_dropped_at_the_deadline(servers, monkeypatch):
    monkeypatch.setattr(httpserver, "REQUEST_SECONDS", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", servers.probes.port)
    async with asyncio.timeout(2):
        assert await reader.read() == b""
    writer.close()


async def test_a_check_that_hangs_fails_its_probe_before_the_deadline(
    servers, daemon, monkeypatch, caplog
):
    assert probes.CHECK_SECONDS < httpserver.REQUEST_SECONDS
    monkeypatch.setattr(probes, "CHECK_SECONDS", 0.05)
    daemon.hangs = True
    assert await get(servers.probes, "/healthz") == (503, "unhealthy\n")
    assert [record.reason for record in caplog.records] == ["the check takes longer than 0.05 s"]
    daemon.hangs = False
    assert await get(servers.probes, "/healthz") == (200, "ok\n")


async def test_a_check_that_raises_fails_its_probe(servers, daemon):
    daemon.why_unready = None
    assert (await get(servers.probes, "/readyz"))[0] == 500


async def test_requests_at_the_same_time_share_one_check(servers, daemon, monkeypatch):
    monkeypatch.setattr(httpserver, "SHARED_SECONDS", 10.0)
    answers = await asyncio.gather(*(get(servers.probes, "/healthz") for _ in range(100)))
    assert answers == [(200, "ok\n")] * 100
    assert daemon.checks == 1


@pytest.mark.parametrize(
    ("seconds", "measured"), [(0.02, 1), (0.0, 3)], ids=["slow-for-a-second", "fast-not-at-all"]
)
async def test_a_scrape_that_takes_long_is_used_again(servers, daemon, seconds, measured):
    scrapes = []

    async def measure():
        scrapes.append(None)
        await asyncio.sleep(seconds)

    daemon.measure = measure
    for _ in range(3):
        assert (await get(servers.metrics, "/metrics"))[0] == 200
        await asyncio.sleep(0.2)  # fifty times as long as a fast scrape
    assert len(scrapes) == measured


async def test_an_address_in_use_is_named(servers, daemon):
    taken = f"127.0.0.1:{servers.metrics.port}"
    second = StatusServers(
        listen=Listen(probes="127.0.0.1:0", metrics=taken),
        probed=daemon,
        metrics=bytes,
    )
    with pytest.raises(OSError, match=rf"listen\.metrics: {taken} cannot be used"):
        await second.start()


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        pytest.param(
            "::1",
            marks=pytest.mark.skipif(
                not HAS_IPV6, reason="the loopback interface has no IPv6: enable it by sysctl"
            ),
        ),
    ],
)
async def test_without_a_host_both_families_are_served(daemon, address):
    servers = StatusServers(
        listen=Listen(probes="[::]:0", metrics=":0"),
        probed=daemon,
        metrics=partial(text_of, daemon.registry),
    )
    await servers.start()
    try:
        reader, writer = await asyncio.open_connection(address, servers.probes.port)
        writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
    finally:
        await servers.stop()
