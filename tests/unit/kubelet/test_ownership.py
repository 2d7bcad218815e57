from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

import pytest

from drakit.layout import MAX_SOCKET_PATH_BYTES, driver_directory
from drakit_nodeplugin.kubelet import ownership
from drakit_nodeplugin.kubelet.ownership import Ownership, SocketError, socket_paths

DRIVER = "camera.example.com"
UIDS = [f"0f7a8f5e-6d0c-4d3c-9a68-{n:012}" for n in range(3)]


@pytest.fixture
def instance(root):
    """Make an instance that owns its lock, and optionally listens on its sockets."""
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
    """Leave the state after SIGKILL: files without a listener, and a free lock."""
    for each in sockets:
        each.close()
    for fd in (owner._fd, owner._primary_fd):
        if fd is not None:
            os.close(fd)
    owner._fd = owner._primary_fd = None


def test_a_driver_is_served_while_an_instance_of_it_lives(instance):
    first, paths = instance(UIDS[0])
    first.acquire()
    assert ownership.is_served(paths.data)
    second, _ = instance(UIDS[1])
    second.acquire()
    kill(first)
    assert ownership.is_served(paths.data)
    second.release()
    assert not ownership.is_served(paths.data)


def test_files_of_a_killed_instance_are_removed(instance, root):
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


def test_a_stale_socket_that_is_named_by_a_hash_needs_no_lock_file(instance, root):
    room = MAX_SOCKET_PATH_BYTES - len(str(driver_directory(root, "")) + "//dra-.sock")
    driver = "a" * (room - 11)  # not enough for a whole UID, but for its hash
    dead, old = instance(UIDS[0], driver=driver)
    assert UIDS[0] not in old.dra.name
    assert old.dra.parent == old.data
    dead.acquire()
    kill(dead, instance.listen(old.dra))
    old.lock.unlink()
    instance(UIDS[1], driver=driver)[0].acquire()
    assert not old.dra.exists()


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


@pytest.mark.parametrize("umask", [0o000, 0o777], ids=["umask-000", "umask-777"])
def test_the_drivers_directory_is_for_root_alone(instance, umask):
    owner, paths = instance(UIDS[0])
    before = os.umask(umask)
    try:
        owner.acquire()
    finally:
        os.umask(before)
    assert paths.data.stat().st_mode & 0o777 == 0o700


def test_a_directory_of_an_earlier_version_is_closed_and_the_kubelets_own_is_left(instance):
    owner, paths = instance(UIDS[0])
    for directory in (paths.data, paths.registration.parent):
        directory.mkdir(parents=True)
        directory.chmod(0o755)
    owner.acquire()
    assert paths.data.stat().st_mode & 0o777 == 0o700
    assert paths.registration.parent.stat().st_mode & 0o777 == 0o755


def test_an_unusable_directory_is_a_sentence(instance, root):
    (root / "plugins").write_text("a file")
    with pytest.raises(SocketError, match="directories of its sockets cannot be used"):
        instance(UIDS[0])[0].acquire()


# ------------------------------------------------------------ other instances, the primary one


def test_another_instance_is_alive_until_it_is_killed_or_released(instance):
    first, _ = instance(UIDS[0])
    second, _ = instance(UIDS[1])
    third, _ = instance(UIDS[2])
    first.acquire()
    assert not first.others_alive()
    second.acquire()
    third.acquire()
    assert first.others_alive()
    second.release()
    assert first.others_alive()
    kill(third)
    assert not first.others_alive()


def test_an_instance_of_another_driver_is_no_other(instance):
    ours, _ = instance(UIDS[0])
    ours.acquire()
    instance(UIDS[1], driver="lidar.example.com")[0].acquire()
    assert not ours.others_alive()


def test_an_instance_is_alive_by_its_uid(instance):
    ours, _ = instance(UIDS[0])
    theirs, _ = instance("odd/uid")
    ours.acquire()
    assert not ours.alive("odd/uid")
    theirs.acquire()
    assert ours.alive("odd/uid")
    assert ours.alive(UIDS[0])
    kill(theirs)
    assert not ours.alive("odd/uid")
    assert not ours.alive("")


def test_the_check_of_an_instance_does_not_make_it_alive(instance):
    dead, old = instance(UIDS[0])
    dead.acquire()
    kill(dead)
    ours, _ = instance(UIDS[1])
    assert not ours.alive(UIDS[0])
    # As another instance does it in the same moment.
    fd = os.open(old.lock, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    assert not ours.alive(UIDS[0])
    assert not ours.others_alive()
    os.close(fd)


def test_one_instance_is_the_primary_one_until_its_release(instance):
    first, _ = instance(UIDS[0])
    second, _ = instance(UIDS[1])
    first.acquire()
    second.acquire()
    assert first.try_primary()
    assert not second.try_primary()
    assert first.try_primary()
    first.release()
    assert second.try_primary()
    assert not first.try_primary()


def test_a_killed_primary_instance_leaves_its_place_to_the_next(instance):
    first, _ = instance(UIDS[0])
    second, _ = instance(UIDS[1])
    first.acquire()
    first.try_primary()
    second.acquire()
    kill(first)
    assert second.try_primary()


def test_an_instance_that_has_not_started_is_not_the_primary_one(instance):
    assert not instance(UIDS[0])[0].try_primary()


def test_a_removed_primary_lock_does_not_allow_two_primary_instances(instance):
    first, paths = instance(UIDS[0])
    second, _ = instance(UIDS[1])
    first.acquire()
    second.acquire()
    first.try_primary()
    (paths.data / "primary.lock").unlink()
    assert second.try_primary()
    assert not first.try_primary()


def test_a_new_instance_keeps_the_lock_of_a_live_primary_one(instance):
    first, paths = instance(UIDS[0])
    first.acquire()
    first.try_primary()
    second, _ = instance(UIDS[1])
    second.acquire()
    assert (paths.data / "primary.lock").exists()
    assert not second.try_primary()


def test_a_release_leaves_no_primary_lock(instance, root):
    owner, _ = instance(UIDS[0])
    owner.acquire()
    owner.try_primary()
    owner.release()
    assert [path for path in root.rglob("*") if not path.is_dir()] == []
