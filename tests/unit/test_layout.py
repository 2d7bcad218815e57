"""Modes of files: a symbolic link that takes the place of a new file leads them to no other."""

from __future__ import annotations

import os
import socket

import pytest

from drakit.layout import private_directory, private_file
from drakit.settings import SettingsError
from drakit_driver.sockets import ServerSocket
from drakit_nodeplugin.endpoints.deviceplugin.plugin_registration import _link
from drakit_nodeplugin.kubelet.server import SocketGuard


def published_by_a_driver(folder):
    made = ServerSocket(folder / "driver.sock")
    return made.hidden, made.publish


def registered_by_a_device_plugin(folder):
    directory = os.open(folder, os.O_PATH | os.O_DIRECTORY)

    def link():
        try:
            _link(directory, ".kubelet-1")
        finally:
            os.close(directory)

    return folder / ".kubelet-1", link


def served_to_the_kubelet(folder):
    return folder / "dra.sock", SocketGuard(folder / "dra.sock").remember


@pytest.mark.parametrize(
    "serve", [published_by_a_driver, registered_by_a_device_plugin, served_to_the_kubelet]
)
@pytest.mark.parametrize("replaced", [False, True], ids=["own", "replaced-by-a-link"])
def test_the_mode_of_a_socket_follows_no_link(serve, replaced, tmp_path):
    (victim := tmp_path / "victim").write_text("secret")
    victim.chmod(0o640)
    (folder := tmp_path / "s").mkdir()
    place, work = serve(folder)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        if replaced:
            place.unlink()
            place.symlink_to(victim)
            with pytest.raises((OSError, SettingsError), match="replaced while it was created"):
                work()
        else:
            work()
    assert victim.stat().st_mode & 0o777 == 0o640
    modes = {each.name: oct(each.lstat().st_mode & 0o777) for each in folder.iterdir()}
    assert replaced or list(modes.values()) == ["0o600"]


def test_files_and_directories_are_restricted_and_links_left_alone(tmp_path):
    (victim := tmp_path / "victim").write_text("secret")
    victim.chmod(0o640)
    (link := tmp_path / "link").symlink_to(victim)
    (folder := tmp_path / "private").mkdir(mode=0o755)
    private_file(link)
    assert victim.stat().st_mode & 0o777 == 0o640
    private_file(victim)
    private_file(tmp_path / "absent")
    private_directory(folder)
    assert [oct(each.stat().st_mode & 0o777) for each in (victim, folder)] == ["0o600", "0o700"]
