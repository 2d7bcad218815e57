from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from drakit_nodeplugin.kubelet import ownership
from drakit_nodeplugin.kubelet.ownership import Ownership
from drakit_nodeplugin.kubelet.sockets import SocketError, socket_paths

DRIVER = "camera.example.com"
UIDS = [f"0f7a8f5e-6d0c-4d3c-9a68-{n:012}" for n in range(3)]


@pytest.fixture
def instance(root):
    """Make an instance that owns its lock, and maybe listens on its sockets."""
    opened: list[socket.socket] = []
    made: list[Ownership] = []

    def make(uid: str, *, driver: str = DRIVER):
        paths = socket_paths(driver, kubelet_root=root, instance_uid=uid)
        made.append(Ownership(driver, paths))
        return made[-1], paths

    def listen(path: Path) -> socket.socket:
        opened.append(socket.socket(socket.AF_UNIX))
        opened[-1].bind(str(path))
        opened[-1].listen()
        return opened[-1]

    make.listen = listen
    yield make
    for each in made:
        each.release()
    for each in opened:
        each.close()


def kill(owner: Ownership, *sockets: socket.socket) -> None:
    """What SIGKILL leaves: files stay, nobody listens, and the lock is free."""
    for each in sockets:
        each.close()
    os.close(owner._fd)
    owner._fd = None


def test_what_a_killed_instance_left_is_removed(instance, root):
    dead, old = instance(UIDS[0])
    dead.acquire()
    kill(dead, *[instance.listen(path) for path in old.sockets])
    new, paths = instance(UIDS[1])
    new.acquire()
    assert not any(path.exists() for path in (*old.sockets, old.lock))
    assert paths.lock.exists()


def test_hashed_names_of_a_killed_instance_are_found_by_its_lock_file(instance):
    driver = "a" * 60 + ".de"
    dead, old = instance("odd/uid", driver=driver)
    dead.acquire()
    kill(dead, *[instance.listen(path) for path in old.sockets])
    instance(UIDS[1], driver=driver)[0].acquire()
    assert not any(path.exists() for path in (*old.sockets, old.lock))


def test_a_live_instance_keeps_its_sockets(instance):
    alive, old = instance(UIDS[0])
    alive.acquire()
    for path in old.sockets:
        instance.listen(path)
    instance(UIDS[1])[0].acquire()
    assert all(path.exists() for path in (*old.sockets, old.lock))


def test_a_live_instance_keeps_a_socket_that_does_not_listen_yet(instance):
    alive, old = instance(UIDS[0])
    alive.acquire()
    instance.listen(old.dra).close()
    instance(UIDS[1])[0].acquire()
    assert old.dra.exists()


def test_a_socket_that_answers_is_kept_though_its_lock_is_free(instance):
    dead, old = instance(UIDS[0])
    dead.acquire()
    instance.listen(old.registration)
    kill(dead)
    instance(UIDS[1])[0].acquire()
    assert old.registration.exists()


def test_a_stale_socket_without_a_lock_file_is_removed(instance):
    dead, old = instance(UIDS[0])
    dead.acquire()
    kill(dead, *[instance.listen(path) for path in old.sockets])
    old.lock.unlink()
    instance(UIDS[1])[0].acquire()
    assert not any(path.exists() for path in old.sockets)


@pytest.mark.parametrize("other", ["lidar.example.com", f"{DRIVER}-2", "camera.example.co"])
def test_stale_sockets_of_other_drivers_are_not_touched(instance, other):
    dead, old = instance(UIDS[0], driver=other)
    dead.acquire()
    kill(dead, *[instance.listen(path) for path in old.sockets])
    instance(UIDS[1])[0].acquire()
    assert all(path.exists() for path in (*old.sockets, old.lock))


def test_a_lock_file_cannot_make_us_remove_things_elsewhere(instance, root):
    dead, old = instance(UIDS[0])
    dead.acquire()
    elsewhere = root / "elsewhere.sock"
    instance.listen(elsewhere).close()
    plain = old.data / "checkpoint.db"
    plain.write_text("precious")
    old.lock.write_text(f"{elsewhere}\n{plain}\n{old.data}\n")
    kill(dead)
    instance(UIDS[1])[0].acquire()
    assert elsewhere.exists()
    assert plain.read_text() == "precious"


def test_a_restart_in_the_same_pod_takes_its_files_over(instance):
    dead, old = instance(UIDS[0])
    dead.acquire()
    kill(dead, *[instance.listen(path) for path in old.sockets])
    again, paths = instance(UIDS[0])
    again.acquire()
    assert paths == old
    assert not any(path.exists() for path in old.sockets)


def test_two_processes_of_one_pod_are_refused(instance, monkeypatch):
    monkeypatch.setattr(ownership, "LOCK_SECONDS", 0.0)
    instance(UIDS[0])[0].acquire()
    with pytest.raises(SocketError, match="another process holds"):
        instance(UIDS[0])[0].acquire()


def test_a_release_leaves_nothing(instance, root):
    owner, paths = instance(UIDS[0])
    owner.acquire()
    for path in paths.sockets:
        instance.listen(path)
    owner.release()
    assert [path for path in root.rglob("*") if not path.is_dir()] == []
    owner.release()


def test_directories_are_for_root_alone(instance):
    owner, paths = instance(UIDS[0])
    owner.acquire()
    assert paths.data.stat().st_mode & 0o007 == 0
    assert paths.registration.parent.stat().st_mode & 0o007 == 0


def test_an_unusable_directory_is_a_sentence(instance, root):
    (root / "plugins").write_text("a file")
    with pytest.raises(SocketError, match="directories of its sockets cannot be used"):
        instance(UIDS[0])[0].acquire()
