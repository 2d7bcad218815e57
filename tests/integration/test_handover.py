"""Two instances of the node plugin on one node, as in a rolling update: real processes."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from drakit.layout import driver_directory
from drakit_nodeplugin.kubelet.sockets import socket_paths
from drakit_nodeplugin.state.lock import is_locked
from tests.fakes.kubelet import FakeKubelet, reference
from tests.integration.test_node_plugin import DRIVER, SLICES, Rig, rig  # noqa: F401

OLD, NEW = (f"00000000-0000-4000-8000-00000000000{n}" for n in (1, 2))
A, B = reference("uid-a"), reference("uid-b")


class Instance:
    """One process, and the kubelet's connection to it."""

    def __init__(self, node: Rig, process, uid: str, port: int) -> None:
        self.process, self._port = process, port
        self._node = node
        self.paths = socket_paths(DRIVER, kubelet_root=node.root, instance_uid=uid)
        self.registration = self.paths.registration

    async def register(self, kubelet: FakeKubelet) -> Path:
        await self._node.until(self.registration.is_socket)
        dra = Path((await kubelet.get_info(self.registration)).endpoint)
        await kubelet.notify(self.registration)
        return dra

    async def ready(self) -> bool:
        """Whether the readiness probe succeeds."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except ConnectionRefusedError:
            return False
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer.startswith(b"HTTP/1.1 200")

    async def until_ready(self) -> None:
        async with asyncio.timeout(10):
            while not await self.ready():
                await asyncio.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.asynccontextmanager
async def instance(node: Rig, uid: str, **settings) -> AsyncIterator[Instance]:
    port = _free_port()
    listen = {"probes": f"127.0.0.1:{port}", "metrics": "127.0.0.1:0"}
    async with node.plugin(uid, listen=listen, **settings) as process:
        yield Instance(node, process, uid, port)


@pytest.fixture
async def site(rig):  # noqa: F811
    """A node with two devices, allocated to two claims, and an instance that has prepared one."""
    for name, uid in (("atlas", "uid-a"), ("held-b", "uid-b")):
        (rig.shelf / name).touch()
        rig.allocate(uid, name)
    async with FakeKubelet(rig.root) as kubelet, instance(rig, OLD) as old:
        dra = await old.register(kubelet)
        await old.until_ready()
        assert (await kubelet.prepare(dra, A))["uid-a"].error == ""
        await rig.until(lambda: len(rig.published()) == 2)
        yield rig, kubelet, old, dra


async def test_the_new_instance_takes_over_what_the_old_one_has_prepared(site):
    node, kubelet, old, _ = site
    slices, files = node.api_server.objects(SLICES), node.files()
    async with instance(node, NEW) as new:
        dra = await new.register(kubelet)
        await new.until_ready()
        assert (await kubelet.prepare(dra, A))["uid-a"].error == ""
        assert node.files() == files
        assert await old.ready(), "until it is stopped"

        old.process.send_signal(signal.SIGTERM)
        await old.process.wait()
        assert await kubelet.unprepare(dra, A) == {"uid-a": ""}
        assert node.files() == set()
        assert node.api_server.objects(SLICES) == slices


async def test_calls_go_to_the_old_instance_until_the_kubelet_has_registered_the_new_one(site):
    node, kubelet, old, old_dra = site
    async with instance(node, NEW) as new:
        await node.until(new.registration.is_socket)
        await asyncio.sleep(2.5)  # more than a poll of the one that would be asked
        assert await kubelet.unprepare(old_dra, A) == {"uid-a": ""}
        assert await old.ready()
        dra = await new.register(kubelet)
        await new.until_ready()
        assert (await kubelet.prepare(dra, A))["uid-a"].error == ""


async def test_a_call_in_flight_delays_the_hand_over_and_new_calls_wait(site):
    node, kubelet, _, old_dra = site
    in_flight = asyncio.create_task(kubelet.prepare(old_dra, B, timeout_seconds=30))
    await node.until(lambda: any("uid-b" in path for _, path in node.api_server.requests))
    async with instance(node, NEW) as new:
        dra = await new.register(kubelet)
        waiting = asyncio.create_task(kubelet.unprepare(dra, A, timeout_seconds=30))
        await asyncio.sleep(2.5)  # more than a poll of the one that is asked
        assert not waiting.done()
        assert not await new.ready()
        # The kubelet may still call the old one: its calls wait as well, for whoever is active.
        late = asyncio.create_task(kubelet.prepare(old_dra, A, timeout_seconds=30))

        (node.shelf / "held-b").write_text("go")
        assert (await in_flight)["uid-b"].error == ""
        assert await waiting == {"uid-a": ""}
        await new.until_ready()
        assert not late.done()
        new.process.kill()
        await new.process.wait()
        assert (await late)["uid-a"].error == ""


async def test_the_waiting_instance_is_active_when_the_other_one_is_killed(site):
    node, kubelet, old, old_dra = site
    in_flight = asyncio.create_task(kubelet.prepare(old_dra, B, timeout_seconds=30))
    await node.until(lambda: any("uid-b" in path for _, path in node.api_server.requests))
    async with instance(node, NEW) as new:
        dra = await new.register(kubelet)
        old.process.kill()
        await old.process.wait()
        in_flight.cancel()
        await new.until_ready()
        (node.shelf / "held-b").write_text("go")
        answers = await kubelet.prepare(dra, A, B)
        assert {uid: answer.error for uid, answer in answers.items()} == {"uid-a": "", "uid-b": ""}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_the_old_instance_is_active_again_when_the_new_one_ends(site, number):
    node, kubelet, old, old_dra = site
    async with instance(node, NEW) as new:
        dra = await new.register(kubelet)
        await new.until_ready()
        assert await kubelet.unprepare(dra, A) == {"uid-a": ""}
        new.process.send_signal(number)
        await new.process.wait()
    (node.shelf / "held-b").write_text("go")
    answers = await kubelet.prepare(old_dra, A, B)
    assert {uid: answer.error for uid, answer in answers.items()} == {"uid-a": "", "uid-b": ""}
    assert len(node.files()) == 2
    # The kubelet would call the instance that registered last.
    await node.until(lambda: not any(path.exists() for path in new.paths.sockets))
    assert kubelet.sockets() == [old.registration]


async def test_a_data_directory_that_was_removed_is_restored_with_its_claims(site):
    node, kubelet, old, _ = site
    data = driver_directory(node.root, DRIVER)
    files, inode = node.files(), data.stat().st_ino
    await asyncio.to_thread(shutil.rmtree, data)
    await node.until(lambda: is_locked(data) and (data / "checkpoint.db").exists())
    assert data.stat().st_ino != inode
    await node.until(old.paths.dra.is_socket)
    dra = await old.register(kubelet)
    await old.until_ready()
    assert node.files() == files
    assert await kubelet.unprepare(dra, A) == {"uid-a": ""}
    assert node.files() == set(), "the claim was known"


async def test_a_new_version_whose_driver_refuses_to_start_leaves_the_old_one_serving(site):
    node, kubelet, old, old_dra = site
    broken = [{"driver": "tests.fakes.shelf:Shelf", "config": {"directory": "/nowhere"}}]
    async with instance(node, NEW, drivers=broken) as new:
        await new.register(kubelet)
        _, errors = await new.process.communicate()
    assert new.process.returncode == 2
    assert b"/nowhere is not a directory" in errors
    assert (await kubelet.prepare(old_dra, A))["uid-a"].error == ""
    assert await old.ready()


async def test_a_stopped_holder_keeps_its_driver_until_it_is_killed(site):
    node, kubelet, old, _ = site
    old.process.send_signal(signal.SIGSTOP)
    async with instance(node, NEW) as new:
        dra = await new.register(kubelet)
        waiting = asyncio.create_task(kubelet.prepare(dra, A, timeout_seconds=30))
        await asyncio.sleep(2.0)
        assert not waiting.done()
        old.process.kill()
        assert (await waiting)["uid-a"].error == ""


async def test_a_restarted_kubelet_may_register_both_in_any_order(site):
    node, kubelet, old, _ = site
    async with instance(node, NEW) as new:
        await new.register(kubelet)
        await new.until_ready()
        await kubelet.close()
        new_dra = await new.register(kubelet)
        old_dra = await old.register(kubelet)
        waiting = asyncio.create_task(kubelet.prepare(old_dra, A, timeout_seconds=30))
        assert (await kubelet.prepare(new_dra, A))["uid-a"].error == ""
        assert not waiting.done()
        old.process.send_signal(signal.SIGTERM)
        assert "stopping" in (await waiting)["uid-a"].error
