"""The directories of backends: found backends, refused backends, and reports."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drakit_nodeplugin.config import MAX_BACKENDS
from drakit_nodeplugin.endpoints.backend import directory as directory_module
from drakit_nodeplugin.endpoints.backend.directory import BackendSocket, scan, unreachable
from drakit_nodeplugin.endpoints.host_paths import open_socket
from drakit_proto.backend.v1 import backend_pb2 as pb
from tests.fakes.backend import FakeBackend
from tests.unit.endpoints.backend.conftest import DRIVER, Found
from tests.unit.endpoints.camera import until

OTHER = "tpu.example.com"


@pytest.fixture
async def watched(found):
    async with found.watched():
        yield found


def path_of(socket: BackendSocket | None) -> Path | None:
    return None if socket is None else socket.path


async def test_the_directory_of_each_entry_is_created(sockets, quick):
    found = Found(sockets / "a" / "b")
    async with found.watched():
        await until(lambda: all((found.parent / entry).is_dir() for entry in ("gpu", "tpu")))
        assert found.path.stat().st_mode & 0o777 == 0o755
        async with FakeBackend(found.path / "gpu.sock"):
            await until(lambda: found.appeared == [DRIVER])
    assert found.diagnostics == []


@pytest.mark.parametrize("kind", ["file", "link-to-the-directory-of-another-entry"])
async def test_a_path_that_is_no_directory_is_reported_once_and_retried(sockets, quick, kind):
    found = Found(sockets / "x")
    found.parent.mkdir()
    if kind == "file":
        found.path.touch()
    else:
        (found.parent / "tpu").mkdir()
        found.path.symlink_to("tpu")
    async with found.watched():
        await until(lambda: found.diagnostics)
        await asyncio.sleep(0.1)
        found.path.unlink()
        await until(found.path.is_dir)
    ((reason, note),) = [(each.reason, each.note) for each in found.diagnostics]
    assert reason == "BackendDirectory"
    text = note.replace(str(found.path), "DIR")
    assert text.startswith("the directory of backends.allowed.gpu, DIR, cannot be read or created")
    assert text.endswith("finds no new socket until the directory is accessible")


async def test_more_sockets_than_the_limit_are_reported_and_other_directories_are_read(
    watched, monkeypatch
):
    monkeypatch.setattr("drakit_nodeplugin.endpoints.backend.directory.MAX_SOCKETS", 2)
    for name in "abcd":
        (watched.path / f"{name}.sock").touch()
    await until(lambda: len(watched.diagnostics) == 3)
    assert (
        "the directory of backends.allowed.gpu, DIR, has more than 2 sockets; the others are "
        "ignored" in watched.notes
    )
    async with FakeBackend(watched.parent / "tpu" / "tpu.sock", driver=OTHER):
        await until(lambda: watched.appeared == [OTHER])


async def test_a_name_that_is_announced_from_the_directory_of_another_entry_is_refused(watched):
    async with FakeBackend(watched.parent / "tpu" / "gpu.sock") as thief:
        assert await watched.noted() == [
            "the backend at PARENT/tpu/gpu.sock is refused: it reports the name gpu.example.com, "
            "but only tpu.example.com can register in the directory of backends.allowed.tpu; the "
            "directory of gpu.example.com is DIR"
        ]
        assert watched.diagnostics[0].reason == "BackendRefused"
        async with FakeBackend(watched.path / "gpu.sock") as own:
            await until(lambda: watched.appeared == [DRIVER])
            assert path_of(watched.directory.socket(DRIVER)) == own.path
        # The name is free, and the thief still does not get it.
        await until(lambda: watched.directory.socket(DRIVER) is None)
        await asyncio.sleep(0.2)
        assert watched.directory.socket(DRIVER) is None
        assert {name for name, _ in thief.calls} == {"GetInfo"}
    assert len(watched.diagnostics) == 1, "reported once"


async def test_a_backend_without_an_entry_is_reported_until_it_has_one(sockets, quick, monkeypatch):
    monkeypatch.setattr("drakit_nodeplugin.endpoints.backend.directory.UNLISTED_SECONDS", 0.02)
    found = Found(sockets / "x")
    thermo = found.parent / "thermo"
    (found.parent / "empty").mkdir(parents=True)
    thermo.mkdir()
    (found.parent / "link").symlink_to("thermo")
    async with found.watched():
        async with (
            FakeBackend(thermo / "thermo.sock") as backend,
            FakeBackend(found.parent / "gpu.sock") as beside,
        ):
            await until(lambda: found.diagnostics)
            await asyncio.sleep(0.1)
        assert [(each.reason, each.note) for each in found.diagnostics] == [
            (
                "BackendRefused",
                f"a backend listens in {thermo}, but backends.allowed has no entry thermo; add the "
                "entry to the values of drakit's release, or uninstall the backend",
            )
        ]
        assert backend.calls == beside.calls == [], "they get no calls"
        await until(lambda: not found.directory._without_entry)
        async with FakeBackend(thermo / "again.sock"):
            await until(lambda: len(found.diagnostics) == 2)


async def test_a_link_to_the_socket_of_another_backend_is_not_followed(watched):
    async with FakeBackend(watched.path / "gpu.sock") as own:
        await until(lambda: watched.appeared == [DRIVER])
        asked = len(own.called("GetInfo"))
        (watched.parent / "tpu" / "a.sock").symlink_to(own.path)
        assert await watched.noted() == [
            "the backend at PARENT/tpu/a.sock is refused: the file is not a socket; remove or "
            "rename it"
        ]
        assert len(own.called("GetInfo")) == asked


async def test_a_second_backend_of_a_name_is_refused_until_the_first_is_gone(watched):
    first = FakeBackend(watched.path / "a.sock")
    second = FakeBackend(watched.path / "b.sock")
    async with first:
        await until(lambda: watched.appeared)
        async with second:
            assert await watched.noted() == [
                "the backend at DIR/b.sock is refused: it reports the name gpu.example.com, which "
                "is the driver of the backend at DIR/a.sock; stop one of the two"
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

    async with FakeBackend(watched.parent / "tpu" / "bad.sock", driver=OTHER) as bad:
        bad.info = hang
        await asked.wait()
        async with FakeBackend(watched.path / "gpu.sock"), asyncio.timeout(10):
            await until(lambda: watched.appeared == [DRIVER])


def test_all_sockets_that_hang_leave_room_for_others():
    longest_seconds = directory_module.AGAIN_SECONDS[1]
    sockets = MAX_BACKENDS * directory_module.MAX_SOCKETS
    assert sockets * directory_module.INFO_SECONDS / longest_seconds < directory_module.CONCURRENCY


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
        # The listener is gone, but the file is not.
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
        assert await watched.noted() == [
            "the backend at DIR/gpu.sock is refused: it reports the name gpu.example.com, and the "
            "node plugin hosts driver gpu.example.com itself; remove one of the two"
        ]
        watched.taken.clear()
        await until(lambda: watched.appeared == [DRIVER])


@pytest.mark.parametrize(
    "name", ["", "GPU.example.com", "1gpu.example.com", "a" * 64, "g\nu", "x" * 30_000]
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


@pytest.mark.parametrize("name", ["x" * 100, "a b%41?#ü"], ids=["long", "odd"])
async def test_a_socket_may_have_any_name(watched, name):
    # A pod has its directory at a shorter path.
    async with FakeBackend(watched.path / "s.sock") as backend:
        path = watched.path / f"{name}.sock"
        backend.path.rename(path)
        await until(lambda: watched.appeared == [DRIVER])
        await until(lambda: path_of(watched.directory.socket(DRIVER)) == path)
        path.rename(backend.path)


async def test_an_open_socket_is_that_file_whatever_is_at_its_path(sockets):
    async with FakeBackend(sockets / "gpu.sock"), FakeBackend(sockets / "other.sock") as other:
        opened = open_socket(sockets / "gpu.sock")
        (sockets / "gpu.sock").rename(sockets / "aside")
        other.path.rename(sockets / "gpu.sock")
        assert await unreachable(opened.path) is None
        (sockets / "aside").rename(sockets / "other.sock")
    assert await unreachable(opened.path) == (
        "has no listener; start its backend or remove the file"
    )
    opened.close()


async def test_a_socket_without_a_listener_is_reported_when_it_stays_so(watched):
    path = watched.path / "gpu.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert await watched.noted() == [
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
        assert await watched.noted() == ["the backend's socket DIR/gpu.sock is not a stream socket"]


async def test_a_socket_that_may_not_be_written_is_reported_with_the_remedy(sockets):
    sockets.chmod(0o755)
    async with FakeBackend(sockets / "gpu.sock") as backend:
        backend.path.chmod(0o600)
        with unprivileged(backend.path):
            problem = await unreachable(str(backend.path))
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
    assert await watched.noted() == ["the backend's socket DIR/gpu.sock does not implement GetInfo"]
    await server.stop(None)


async def test_a_backend_that_reports_no_name_is_reported(watched, monkeypatch):
    monkeypatch.setattr("drakit_nodeplugin.endpoints.backend.directory.INFO_SECONDS", 0.05)

    async def info(request):
        await asyncio.sleep(1)
        return pb.GetInfoResponse()

    async with FakeBackend(watched.path / "gpu.sock") as backend:
        backend.info = info
        assert await watched.noted() == [
            "the backend's socket DIR/gpu.sock did not respond to GetInfo in time"
        ]


async def test_a_driver_that_was_forgotten_appears_again(watched):
    async with FakeBackend(watched.path / "gpu.sock"):
        await until(lambda: watched.appeared == [DRIVER])
        watched.directory.forget(DRIVER)
        await until(lambda: watched.appeared == [DRIVER, DRIVER])


async def test_before_it_runs_every_socket_is_asked_once(sockets):
    directory = Found(sockets.parent).directory
    async with FakeBackend(sockets / "gpu.sock") as backend:
        found, none = await asyncio.gather(
            directory.at_start(DRIVER), directory.at_start("nic.example.com")
        )
        assert found is not None
        assert none is None
        assert len(backend.called("GetInfo")) == 1
