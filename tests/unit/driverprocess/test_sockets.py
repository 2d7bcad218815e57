"""The socket of a driver's own process: the users whose processes can connect."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys

import pytest

from drakit.settings import SettingsError
from drakit_driver.sockets import ServerSocket

DRIVER, MONITOR, STRANGER = 64_001, 64_002, 64_003

CONNECT = """
import ctypes, os, socket, struct, sys
os.setgroups([]); os.setgid(65534); os.setuid(int(sys.argv[1]))
# The node plugin is root without capabilities.
assert ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), bytes(24)) == 0
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[2])
except OSError as error:
    sys.exit(error.errno)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="processes of several users need root: run as root")
@pytest.mark.parametrize("owner", [0, DRIVER], ids=["driver-is-root", "driver-is-not-root"])
@pytest.mark.parametrize(
    ("client", "peers", "connects"),
    [
        pytest.param(0, (), True, id="root"),
        pytest.param(STRANGER, (), False, id="another-user"),
        pytest.param(MONITOR, (MONITOR,), True, id="named-user"),
        pytest.param(STRANGER, (MONITOR,), False, id="other-than-the-named-user"),
    ],
)
def test_only_root_and_named_users_connect(sockets, owner, client, peers, connects):
    sockets.parent.chmod(0o755)
    os.chown(sockets, owner, owner)
    with socket.socket(socket.AF_UNIX) as listener:
        os.seteuid(owner)
        try:
            made = ServerSocket(sockets / "driver.sock", peers=peers)
            listener.bind(str(made.hidden))
            listener.listen()
            made.publish()
        finally:
            os.seteuid(0)
        arguments = [sys.executable, "-S", "-c", CONNECT, str(client), str(made.path)]
        done = subprocess.run(arguments, check=False, timeout=20)
    assert done.returncode == (0 if connects else errno.EACCES)


def test_a_file_system_without_access_lists_is_named(sockets, monkeypatch):
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr("os.setxattr", unsupported)
    made = ServerSocket(sockets / "driver.sock", peers=(MONITOR,))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(made.hidden))
        with pytest.raises(SettingsError, match=r"no access control lists.*run the driver as root"):
            made.publish()
