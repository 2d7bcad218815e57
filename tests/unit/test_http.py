"""Probes and metrics over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Gauge

from drakit_nodeplugin import http
from drakit_nodeplugin.http import HttpServer


class Driver:
    name = "camera.example.com"

    def __init__(self, registry: CollectorRegistry) -> None:
        self.why_dead: str | None = None
        self.why_unready: str | None = None
        self.hangs = False
        self.gauge = Gauge("drakit_devices", "Devices", registry=registry)

    async def dead(self) -> str | None:
        if self.hangs:
            await asyncio.Event().wait()
        return self.why_dead

    def unready(self) -> str | None:
        return self.why_unready

    async def measure(self) -> None:
        self.gauge.set(7)


@pytest.fixture
def driver_and_registry():
    registry = CollectorRegistry()
    return Driver(registry), registry


@pytest.fixture
async def server(driver_and_registry):
    driver, registry = driver_and_registry
    server = HttpServer(listen="127.0.0.1:0", probed=[driver], registry=registry)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def driver(driver_and_registry) -> Driver:
    return driver_and_registry[0]


async def get(server: HttpServer, path: str) -> tuple[int, str]:
    def ask() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}") as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(ask)


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/readyz?verbose"])
async def test_a_daemon_that_is_well_says_ok(server, path):
    assert await get(server, path) == (200, "ok\n")


async def test_what_is_wrong_is_said_with_the_drivers_name(server, driver):
    driver.why_dead, driver.why_unready = "its socket is gone", "not registered"
    assert await get(server, "/healthz") == (503, "camera.example.com: its socket is gone\n")
    assert await get(server, "/readyz") == (503, "camera.example.com: not registered\n")


async def test_metrics_are_brought_up_to_date_when_they_are_asked_for(server):
    status, text = await get(server, "/metrics")
    assert status == 200
    assert "drakit_devices 7.0" in text


async def test_anything_else_is_not_found(server):
    assert (await get(server, "/"))[0] == 404


async def test_a_loop_that_gives_no_answer_fails_its_probe(server, driver, monkeypatch):
    monkeypatch.setattr(http, "ANSWER_SECONDS", 0.05)
    driver.hangs = True
    assert (await get(server, "/healthz"))[0] == 503


async def test_clients_that_never_speak_do_not_use_up_threads_for_ever(server, monkeypatch):
    monkeypatch.setattr(http._Handler, "timeout", 0.1)
    with contextlib.ExitStack() as clients:
        for _ in range(http.MAX_REQUESTS):
            clients.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(OSError):
                    assert await get(server, "/healthz") == (200, "ok\n")
                    return
                await asyncio.sleep(0.05)


async def test_an_address_that_is_taken_is_an_os_error(server, driver):
    second = HttpServer(
        listen=f"127.0.0.1:{server.port}", probed=[driver], registry=CollectorRegistry()
    )
    with pytest.raises(OSError, match="in use"):
        await second.start()
    await second.stop()
