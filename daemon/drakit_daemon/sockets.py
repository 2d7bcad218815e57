"""
Checks whether a process still serves a Unix socket in a directory that several processes use.
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
    except OSError:  # the file does not exist, or its name is invalid
        return False


def refuses_connections(path: Path) -> bool:
    """Return whether a socket has no listener. A slow listener is treated as alive. Blocks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # for example, the path is too long
            return False
    return False
