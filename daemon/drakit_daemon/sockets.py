"""
Unix sockets in a directory that several processes use: whether a socket is still served.

It must not know whose sockets they are.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path


def is_socket(path: Path) -> bool:
    """Return whether there is a socket at a path. Blocks."""
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:  # absent, or a name that no file can have
        return False


def refuses_connections(path: Path) -> bool:
    """Return whether a socket has no listener. One that is only slow to accept is alive. Blocks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # also a path that is too long
            return False
    return False
