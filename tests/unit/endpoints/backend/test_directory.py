"""The registration directory: found backends, refused backends, and reports."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drakit_nodeplugin.endpoints.backend import directory as directory_module
from drakit_nodeplugin.endpoints.backend.directory import (
    BackendDirectory,
    BackendSocket,
    scan,
    unreachable,
)
from drakit_proto.backend.v1 import backend_pb2 as pb
from tests.fakes.backend import FakeBackend
from tests.unit.endpoints.backend.conftest import DRIVER, Found
from tests.unit.endpoints.camera import NODE, until


@pytest.fixture
async def watched(found):
    async with found.watched():
        yield found


def path_of(socket: BackendSocket | None) -> Path | None:
    return None if socket is None else socket.path


async def test_the_directory_is_made(sockets, quick):
    found = Found(sockets / "a" / "b")
    async with found.watched():
        await until(found.path.is_dir)
        assert found.path.stat().st_mode & 0o777 == 0o755
        async with FakeBackend(found.path / "gpu.sock"):
            await until(lambda: found.appeared == [DRIVER])
    assert found.diagnostics == []


async def test_a_directory_that_cannot_be_made_is_reported_once_and_retried(sockets, quick):
    (sockets / "file").touch()
    found = Found(sockets / "file")
    async with found.watched():
        await until(lambda: found.diagnostics)
        await asyncio.sleep(0.1)
        (sockets / "file").unlink()
        await until(found.path.is_dir)
    assert [(each.reason, each.note.replace(str(sockets), "")) for each in found.diagnostics] == [
        (
            "BackendDirectory",
            "the registration directory of backends, /file, cannot be read or created: Not a "
            "directory; the node plugin discovers no new backends until the directory is "
            "accessible",
        )
    ]


async def test_more_sockets_than_the_limit_are_reported(watched, monkeypatch):
    monkeypatch.setattr("drakit_nodeplugin.endpoints.backend.directory.MAX_SOCKETS", 2)
    for name in "abcd":
        (watched.path / f"{name}.sock").touch()
    await until(lambda: len(watched.diagnostics) == 3)
    assert (
        "the registration directory of backends, DIR, has more than 2 sockets; the others are "
        "ignored" in watched.notes
    )


async def test_a_second_backend_of_a_name_is_refused_until_the_first_is_gone(watched):
    first = FakeBackend(watched.path / "a.sock")
    second = FakeBackend(watched.path / "b.sock")
    async with first:
        await until(lambda: watched.appeared)
        async with second:
            await until(lambda: watched.diagnostics)
            assert watched.notes == [
                "the backend at DIR/b.sock is refused: it reports the name gpu.example.com, which "
                "is "
                "the driver of the backend at DIR/a.sock; stop one of the two"
            ]
            assert watched.diagnostics[0].reason == "BackendRefused"
            await asyncio.sleep(0.2)
            assert path_of(watched.directory.socket(DRIVER)) == first.path
            await first.stop()
            await until(lambda: second.path == path_of(watched.directory.socket(DRIVER)))
    assert len(watched.diagnostics) == 1
    assert watched.appeared == [DRIVER], "the driver is the same"


async def test_a_second_backend_that_gets_the_name_in_time_is_an_update(watched, monkeypatch):
    monkeypatch.setattr(directory_module, "HANDOVER_SECONDS", 30.0)
    first = FakeBackend(watched.path / "a.sock")
    async with first:
        await until(lambda: watched.appeared)
        async with FakeBackend(watched.path / "b.sock") as second:
            await until(lambda: len(second.called("GetInfo")) > 5)
            await first.stop()
            await until(lambda: second.path == path_of(watched.directory.socket(DRIVER)))
    assert watched.diagnostics == []


async def test_one_that_hangs_again_and_again_does_not_keep_others_waiting(watched, monkeypatch):
    monkeypatch.setattr(directory_module, "INFO_SECONDS", 1.0)
    asked = asyncio.Event()

    async def hang(request):
        asked.set()
        await asyncio.sleep(60)

    async with FakeBackend(watched.path / "bad.sock", driver="bad.example.com") as bad:
        bad.info = hang
        await asked.wait()
        async with FakeBackend(watched.path / "gpu.sock"), asyncio.timeout(10):
            await until(lambda: watched.appeared == [DRIVER])


def test_all_sockets_that_hang_leave_room_for_others():
    longest_seconds = directory_module.AGAIN_SECONDS[1]
    hanging = directory_module.MAX_SOCKETS * directory_module.INFO_SECONDS / longest_seconds
    assert hanging < directory_module.CONCURRENCY


@pytest.mark.parametrize("limit", ["MAX_SOCKETS", "MAX_ENTRIES"])
def test_known_sockets_keep_their_place(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(directory_module, limit, 3)
    names = [f"{count}.sock" for count in range(20)]
    for name in names:
        (tmp_path / name).touch()
    for known in names:
        found = scan(tmp_path, known={known, "gone.sock"})
        assert next(iter(found)) == known
        assert len(found) in (3, 4)


async def test_a_backend_that_died_and_left_its_socket_makes_way(watched, sockets):
    path = sockets / "a.sock"
    async with FakeBackend(path), FakeBackend(sockets / "b.sock") as second:
        await until(lambda: watched.diagnostics)
        held = watched.directory.socket(DRIVER)
        assert held is not None
        stays = path if held.path == path else second.path
        other = second.path if held.path == path else path
        # What listened there is gone, but not the file.
        stays.rename(sockets / "elsewhere")
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(stays))
        async with asyncio.timeout(5):
            while (await watched.directory.wait(DRIVER)).path != other:
                await asyncio.sleep(0.01)
        assert stays.exists(), "the file is the backend's"
        (sockets / "elsewhere").unlink()


async def test_a_name_of_the_plugins_own_is_refused(watched):
    watched.taken[DRIVER] = "the node plugin hosts driver gpu.example.com itself"
    async with FakeBackend(watched.path / "gpu.sock"):
        await until(lambda: watched.diagnostics)
        assert watched.notes == [
            "the backend at DIR/gpu.sock is refused: it reports the name gpu.example.com, and the "
            "node "
            "plugin hosts driver gpu.example.com itself; remove one of the two"
        ]
        watched.taken.clear()
        await until(lambda: watched.appeared == [DRIVER])


@pytest.mark.parametrize(
    "name", ["", "GPU.example.com", "1gpu.example.com", "gpu_a", "a" * 64, "g\nu", "x" * 30_000]
)
async def test_a_name_that_cannot_be_published_is_refused(watched, name):
    async with FakeBackend(watched.path / "gpu.sock", driver=name):
        await until(lambda: watched.diagnostics)
        await asyncio.sleep(0.1)
    (note,) = watched.notes
    assert "which is not a DNS subdomain of at most 63 characters" in note
    assert note.isprintable()
    assert len(note) < 400
    assert watched.appeared == []


async def test_a_file_that_is_no_socket_is_reported_and_other_files_are_ignored(watched):
    (watched.path / "file.sock").touch()
    (watched.path / ".hidden.sock").touch()
    (watched.path / "notes.txt").touch()
    (watched.path / "link.sock").symlink_to("/dev/null")
    await until(lambda: len(watched.diagnostics) == 2)
    assert sorted(watched.notes) == [
        f"the backend at DIR/{name} is refused: the file is not a socket; remove or rename it"
        for name in ("file.sock", "link.sock")
    ]


async def test_a_path_that_is_too_long_is_reported(watched):
    short = watched.path / "s.sock"
    async with FakeBackend(short):
        short.rename(watched.path / f"{'x' * 100}.sock")
        await until(lambda: any("107 bytes" in note for note in watched.notes))
        for path in watched.path.iterdir():
            path.unlink()


async def test_names_of_files_may_hold_anything(watched):
    path = watched.path / "a b%41?#ü.sock"
    async with FakeBackend(watched.path / "s.sock") as backend:
        backend.path.rename(path)
        await until(lambda: watched.appeared == [DRIVER])
        await until(lambda: path_of(watched.directory.socket(DRIVER)) == path)
        path.rename(backend.path)


async def test_a_socket_without_a_listener_is_reported_when_it_stays_so(watched):
    path = watched.path / "gpu.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        await until(lambda: watched.diagnostics)
        assert watched.notes == [
            "the backend's socket DIR/gpu.sock has no listener; start its backend or remove the "
            "file"
        ]
        assert watched.diagnostics[0].reason == "BackendUnreachable"
        await asyncio.sleep(0.2)
    assert len(watched.diagnostics) == 1
    async with FakeBackend(path):
        await until(lambda: watched.appeared == [DRIVER])


async def test_a_socket_of_another_kind_is_reported(watched):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(watched.path / "gpu.sock"))
        await until(lambda: watched.diagnostics)
    assert watched.notes == ["the backend's socket DIR/gpu.sock is not a stream socket"]


async def test_a_socket_that_may_not_be_written_is_reported_with_the_remedy(sockets):
    sockets.chmod(0o755)
    async with FakeBackend(sockets / "gpu.sock") as backend:
        backend.path.chmod(0o600)
        with unprivileged(backend.path):
            problem = await unreachable(backend.path)
    assert problem == (
        "cannot be connected to (permission denied); make root its owner, or allow others to write "
        "to it (mode 0666) and to traverse its directories: the node plugin cannot override file "
        "permissions"
    )


@contextmanager
def unprivileged(path: Path) -> Iterator[None]:
    """Drop root's capabilities and the ownership of the file."""
    if os.geteuid() != 0:
        path.chmod(0)
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


async def test_repaired_permissions_are_noticed_at_once(watched):
    async with FakeBackend(watched.path / "gpu.sock") as backend:
        await until(lambda: watched.appeared == [DRIVER])
        before = watched.directory.socket(DRIVER)
        backend.path.chmod(0o666)
        await until(lambda: watched.directory.socket(DRIVER) not in (None, before))


async def test_a_server_that_is_no_backend_is_reported(watched):
    import grpc.aio

    server = grpc.aio.server()
    server.add_insecure_port(f"unix:{watched.path}/gpu.sock")
    await server.start()
    await until(lambda: watched.diagnostics)
    assert watched.notes == ["the backend's socket DIR/gpu.sock does not implement GetInfo"]
    await server.stop(None)


async def test_a_backend_that_reports_no_name_is_reported(watched, monkeypatch):
    monkeypatch.setattr("drakit_nodeplugin.endpoints.backend.directory.INFO_SECONDS", 0.05)

    async def info(request):
        await asyncio.sleep(1)
        return pb.GetInfoResponse()

    async with FakeBackend(watched.path / "gpu.sock") as backend:
        backend.info = info
        await until(lambda: watched.diagnostics)
        assert watched.notes == ["the backend's socket DIR/gpu.sock did not answer GetInfo in time"]


async def test_a_driver_that_was_forgotten_appears_again(watched):
    async with FakeBackend(watched.path / "gpu.sock"):
        await until(lambda: watched.appeared == [DRIVER])
        watched.directory.forget(DRIVER)
        await until(lambda: watched.appeared == [DRIVER, DRIVER])


async def test_before_it_runs_every_socket_is_asked_once(sockets):
    directory = BackendDirectory(
        sockets, node=NODE, taken=lambda name: None, report=lambda diagnostic: None
    )
    async with FakeBackend(sockets / "gpu.sock") as backend:
        found, none = await asyncio.gather(
            directory.at_start(DRIVER), directory.at_start("nic.example.com")
        )
        assert found is not None
        assert none is None
        assert len(backend.called("GetInfo")) == 1
