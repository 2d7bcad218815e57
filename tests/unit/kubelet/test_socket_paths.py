"""The paths of a driver's sockets, and the removal of those that a killed instance has left."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from drakit import layout
from drakit.layout import MAX_SOCKET_PATH_BYTES
from drakit_nodeplugin.kubelet import sockets
from drakit_nodeplugin.kubelet.sockets import (
    SocketError,
    SocketPaths,
    create_directories,
    remove_sockets,
    socket_paths,
)

UID = "0f7a8f5e-6d0c-4d3c-9a68-3f5b1f1f9a10"
OTHER_UID = "1c2d7c52-3f0e-4c59-8a0e-2f6a7d9b4e01"
DRIVER = "camera.example.com"
KUBELET = Path("/var/lib/kubelet")
HOME = KUBELET / "plugins/drakit.dev"
LONGEST_DRIVER = "a" * 50 + ".example.com" + "x"


def test_names_carry_driver_and_instance():
    paths = socket_paths("camera.co", kubelet_root=KUBELET, instance_uid=UID)
    assert paths.registration == KUBELET / f"plugins_registry/camera.co-{UID}-reg.sock"
    assert paths.dra == HOME / f"drivers/camera.co/dra-{UID}.sock"
    assert paths.data == HOME / "drivers/camera.co"


@pytest.mark.parametrize(
    "driver",
    [
        pytest.param("a", id="shortest"),
        pytest.param("hostdev.drakit.dev", id="usual"),
        pytest.param(LONGEST_DRIVER, id="longest"),
        pytest.param("backends", id="named-like-the-directory-of-backends"),
        pytest.param("device-plugins", id="named-like-the-directory-of-device-plugins"),
    ],
)
def test_everything_but_the_registration_socket_is_in_drakits_own_directory(driver):
    paths = socket_paths(driver, kubelet_root=KUBELET, instance_uid=UID)
    for path in (paths.data, paths.dra):
        assert path.is_relative_to(HOME)
    for shared in (layout.backends_directory(KUBELET), layout.device_plugins_directory(KUBELET)):
        assert shared.is_relative_to(HOME)
        assert not paths.data.is_relative_to(shared)
        assert not shared.is_relative_to(paths.data)


def test_long_names_are_hashed_for_both_sockets():
    assert len(LONGEST_DRIVER) == 63
    one = socket_paths(LONGEST_DRIVER, kubelet_root=KUBELET, instance_uid=UID)
    two = socket_paths(LONGEST_DRIVER, kubelet_root=KUBELET, instance_uid=UID[::-1])
    for path in one.sockets:
        assert len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES
        assert UID not in path.name
    assert not set(one.sockets) & set(two.sockets)


def test_other_drivers_of_an_instance_get_other_hashes():
    root = Path("/") / ("r" * 45)
    one = socket_paths(LONGEST_DRIVER, kubelet_root=root, instance_uid=UID)
    two = socket_paths("b" + LONGEST_DRIVER[1:], kubelet_root=root, instance_uid=UID)
    assert one.registration.name.startswith("dra-")
    assert not set(one.sockets) & set(two.sockets)


@pytest.mark.parametrize("letter", [pytest.param("r", id="ascii"), pytest.param("ä", id="umlaut")])
def test_the_limit_is_in_bytes_and_exact(letter):
    """The longest accepted root leads to the longest path that Linux accepts."""
    width = len(letter.encode())
    fits = [n for n in range(1, 100) if _fits(Path("/tmp") / (letter * n))]
    paths = socket_paths("d", kubelet_root=Path("/tmp") / (letter * fits[-1]), instance_uid=UID)
    longest = max(len(os.fsencode(path)) for path in paths.sockets)
    assert MAX_SOCKET_PATH_BYTES - width < longest <= MAX_SOCKET_PATH_BYTES
    assert fits == list(range(1, fits[-1] + 1))


def _fits(root: Path) -> bool:
    try:
        socket_paths("d", kubelet_root=root, instance_uid=UID)
    except SocketError:
        return False
    return True


def test_a_path_that_is_too_long_is_refused_with_path_and_length():
    root = Path("/") / ("r" * 100)
    with pytest.raises(SocketError, match=r"/r{100}/plugins_registry/dra-\S+ has 154 bytes.* 107"):
        socket_paths("camera.example.com", kubelet_root=root, instance_uid=UID)


def test_an_instance_that_cannot_be_a_file_name_is_hashed():
    paths = socket_paths("camera.example.com", kubelet_root=KUBELET, instance_uid="../../etc")
    assert paths.registration.parent == KUBELET / "plugins_registry"
    assert paths.dra.parent == paths.data
    assert ".." not in str(paths.registration)


def test_a_relative_root_is_refused():
    """The root must be absolute: the kubelet would search the socket below its working
    directory."""
    with pytest.raises(SocketError, match="must be an absolute path, not kubelet"):
        socket_paths("d", kubelet_root=Path("kubelet"), instance_uid=UID)


# ------------------------------------------------------------ directories, stale sockets


@pytest.fixture
def instance(root):
    """Create the directories of an instance, as its start does."""

    def start(uid: str, *, driver: str = DRIVER) -> SocketPaths:
        paths = socket_paths(driver, kubelet_root=root, instance_uid=uid)
        create_directories(paths)
        return paths

    return start


@pytest.fixture
def listen():
    """Listen on a socket, until it is closed or the test ends."""
    opened: list[socket.socket] = []

    def listen(path: Path) -> socket.socket:
        opened.append(socket.socket(socket.AF_UNIX))
        opened[-1].bind(str(path))
        opened[-1].listen()
        return opened[-1]

    yield listen
    for each in opened:
        each.close()


@pytest.fixture
def killed(instance, listen):
    """An instance that was killed while it served: its sockets are left, and nothing listens."""

    def killed(uid: str, *, driver: str = DRIVER) -> SocketPaths:
        paths = instance(uid, driver=driver)
        for path in paths.sockets:
            listen(path).close()
        return paths

    return killed


NAMED = pytest.mark.parametrize(
    ("driver", "uid", "shows_driver", "shows_uid"),
    [
        pytest.param(DRIVER, OTHER_UID, True, True, id="by-driver-and-uid"),
        pytest.param("a" * 36 + ".com", OTHER_UID, True, False, id="by-driver-and-hash"),
        pytest.param(DRIVER, "odd/uid", True, False, id="by-a-uid-that-cannot-be-a-name"),
        pytest.param("a" * 59 + ".com", OTHER_UID, False, False, id="by-hashes"),
    ],
)


@NAMED
def test_sockets_of_a_killed_instance_are_removed(
    instance, killed, driver, uid, shows_driver, shows_uid
):
    old = killed(uid, driver=driver)
    assert [driver in str(path) for path in old.sockets] == [shows_driver] * 2
    assert [uid in path.name for path in old.sockets] == [shows_uid] * 2
    instance(UID, driver=driver)
    assert not any(path.exists() for path in old.sockets)


@NAMED
def test_sockets_of_a_live_instance_stay(instance, listen, driver, uid, shows_driver, shows_uid):
    alive = instance(uid, driver=driver)
    for path in alive.sockets:
        listen(path)
    instance(UID, driver=driver)
    assert all(path.exists() for path in alive.sockets)


def test_a_live_socket_whose_clients_must_wait_stays(instance, listen):
    path = instance(OTHER_UID).dra
    listen(path).listen(0)
    clients = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for client in clients:
        client.setblocking(False)
        client.connect_ex(str(path))
    instance(UID)
    assert path.exists()
    for client in clients:
        client.close()


@pytest.mark.parametrize(
    ("other", "uid"),
    [
        pytest.param("lidar.example.com", OTHER_UID, id="another-name"),
        pytest.param("camera.example.co", OTHER_UID, id="a-shorter-name"),
        pytest.param(f"{DRIVER}-2", OTHER_UID, id="a-name-that-begins-with-ours"),
        pytest.param(f"{DRIVER}-abcde", "pod-1", id="a-rest-as-long-as-a-hash"),
        pytest.param("a" * 59 + ".com", OTHER_UID, id="a-name-that-is-hashed"),
    ],
)
def test_stale_sockets_of_other_drivers_stay(instance, killed, other, uid):
    old = killed(uid, driver=other)
    instance(UID)
    assert all(path.exists() for path in old.sockets)


def test_only_sockets_are_removed(instance, killed, root):
    stale = killed(OTHER_UID)
    elsewhere = root / "elsewhere.sock"
    stale.dra.rename(elsewhere)
    stale.dra.symlink_to(elsewhere)
    stale.registration.unlink()
    stale.registration.write_text("a file")
    instance(UID)
    assert elsewhere.exists()
    assert stale.dra.is_symlink()
    assert stale.registration.read_text() == "a file"


def test_a_restart_in_the_same_pod_takes_its_sockets_over(instance, killed):
    old = killed(UID)
    assert instance(UID) == old
    assert not any(path.exists() for path in old.sockets)


def test_a_second_process_of_a_pod_is_refused(instance, listen, monkeypatch):
    monkeypatch.setattr(sockets, "PREDECESSOR_SECONDS", 0.0)
    first = instance(UID)
    for path in first.sockets:
        listen(path)
    with pytest.raises(
        SocketError, match=r"another process serves \S+; stop the other node plugin"
    ):
        instance(UID)
    assert all(path.exists() for path in first.sockets)


def test_a_container_waits_for_its_predecessor_to_end(instance, listen):
    path = instance(UID).dra
    ending = listen(path)
    with ThreadPoolExecutor() as threads:
        starting = threads.submit(instance, UID)
        ending.settimeout(4)
        for _ in range(2):
            ending.accept()[0].close()
        ending.close()
        starting.result(timeout=5)
    assert not path.exists()


def test_a_stop_leaves_no_socket(instance, listen, root):
    paths = instance(UID)
    for path in paths.sockets:
        listen(path)
    remove_sockets(paths)
    assert [path for path in root.rglob("*") if not path.is_dir()] == []
    remove_sockets(paths)


@pytest.mark.parametrize("umask", [0o000, 0o777], ids=["umask-000", "umask-777"])
def test_the_drivers_directory_is_for_root_alone(instance, umask):
    before = os.umask(umask)
    try:
        paths = instance(UID)
    finally:
        os.umask(before)
    assert paths.data.stat().st_mode & 0o777 == 0o700


def test_a_directory_of_an_earlier_version_is_closed_and_the_kubelets_own_is_left(instance, root):
    paths = socket_paths(DRIVER, kubelet_root=root, instance_uid=UID)
    for directory in (paths.data, paths.registration.parent):
        directory.mkdir(parents=True)
        directory.chmod(0o755)
    instance(UID)
    assert paths.data.stat().st_mode & 0o777 == 0o700
    assert paths.registration.parent.stat().st_mode & 0o777 == 0o755


def test_an_unusable_directory_is_a_sentence(instance, root):
    (root / "plugins").write_text("a file")
    with pytest.raises(SocketError, match="directories of its sockets cannot be used"):
        instance(UID)
