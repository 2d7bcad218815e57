from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from drakit import layout
from drakit.layout import MAX_SOCKET_PATH_BYTES
from drakit_nodeplugin.kubelet.ownership import (
    SocketError,
    socket_paths,
)
from drakit_nodeplugin.kubelet.server import SocketGuard

UID = "0f7a8f5e-6d0c-4d3c-9a68-3f5b1f1f9a10"
KUBELET = Path("/var/lib/kubelet")
HOME = KUBELET / "plugins/drakit.dev"
LONGEST_DRIVER = "a" * 50 + ".example.com" + "x"


def test_names_carry_driver_and_instance():
    paths = socket_paths("camera.co", kubelet_root=KUBELET, instance_uid=UID)
    assert paths.registration == KUBELET / f"plugins_registry/camera.co-{UID}-reg.sock"
    assert paths.dra == HOME / f"drivers/camera.co/dra-{UID}.sock"
    assert paths.lock.parent == paths.data == HOME / "drivers/camera.co"


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
    for path in (paths.data, paths.dra, paths.lock):
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


def bind(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    return made


def test_a_guard_notices_removal_and_replacement(root):
    path = root / "s"
    with bind(path):
        guard = SocketGuard(path)
        guard.remember()
        assert guard.lost() is None
        assert path.stat().st_mode & 0o777 == 0o600
        path.rename(root / "elsewhere")
        assert guard.lost() == "it was removed"
        with bind(path):
            assert guard.lost() == "another file is in its place"
