"""Requirements of a local cluster on this machine, with a sentence for each that is missing."""

import os
import platform
import shutil

from ..api import ClusterError

PROGRAMS = {
    "runc": "runc",
    "iptables": "iptables",
    "ip": "iproute2",
    "conntrack": "conntrack",
    "ethtool": "ethtool",
    "socat": "socat",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
}
"""Program -> the Debian package that contains it."""

SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"


def check() -> None:
    """Raise :class:`ClusterError` if a requirement is missing, with the packages to install."""
    if platform.system() != "Linux":
        raise ClusterError("a local cluster needs Linux: install Docker and use CLUSTER=kind")
    if os.geteuid() != 0:
        raise ClusterError("a local cluster needs root: use sudo, or Docker with CLUSTER=kind")
    missing = sorted({package for program, package in PROGRAMS.items() if not _has(program)})
    if missing:
        raise ClusterError(
            f"these Debian packages are missing: {', '.join(missing)}; `make deps` installs them"
        )


def _has(program: str) -> bool:
    return shutil.which(program, path=SYSTEM_PATH) is not None
