"""
What an unmodified device plugin takes for the kubelet's directory, as a pod's volume would do it.

The path is fixed in most of them. Where this process may make mounts, in a namespace that the
plugin has for itself, it sees another directory there.

It must not know what the directory is for.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from functools import cache

__all__ = ("DEVICE_PLUGINS", "remapped")

DEVICE_PLUGINS = "/var/lib/kubelet/device-plugins"

PROBE_SECONDS = 5.0

# A directory that is not there cannot be mounted on, and the host is not ours to change: what is
# above it is covered, for the plugin alone.
_SCRIPT = f"""set -e
if [ ! -d {DEVICE_PLUGINS} ]; then
  if [ -d /var/lib/kubelet ]; then cover=/var/lib/kubelet; else cover=/var/lib; fi
  mount -t tmpfs drakit "$cover"
  mkdir -p {DEVICE_PLUGINS}
fi
mount --bind "$1" {DEVICE_PLUGINS}
exec sh -c "$2"
"""


def remapped(line: str, *, directory: str) -> str:
    """Give a line for the shell that runs another one with the directory in the place of
    ``/var/lib/kubelet/device-plugins``; the line itself where that cannot be done."""
    unshare = _unshare()
    if unshare is None:
        return line
    return shlex.join(["exec", *unshare, "sh", "-c", _SCRIPT, "sh", directory, line])


@cache
def _unshare() -> tuple[str, ...] | None:
    """How a mount namespace of one's own is had here; None if it is not."""
    flags = ["--mount"] if os.geteuid() == 0 else ["--mount", "--map-root-user"]
    command = ("unshare", *flags)
    try:
        probe = subprocess.run(
            [*command, "true"], capture_output=True, timeout=PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return command if probe.returncode == 0 else None
