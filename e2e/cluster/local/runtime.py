"""
The container runtime of a local cluster's nodes: containerd, and the OCI runtime that it calls.

By default, these are containerd from the module `tools`, and runc from Debian. The environment
variable RUNTIME selects others, separated by commas: ``RUNTIME=containerd-1.7,crun``.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..api import ClusterError
from . import binaries

CONTAINERD_MODULES = ("containerd-1.7",)
OCI_MODULES = ("runc-1.4",)
OCI_PACKAGES = ("runc", "crun")
"""OCI runtimes that Debian's packages of the same name contain."""

PATH = "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The programs that run containers."""

    containerd: Path | None
    """The folder of containerd, its shim and ctr, if it differs from that of all programs."""

    oci: str
    """The path of the OCI runtime."""


def names(text: str) -> Sequence[str]:
    """Return the names in the value of RUNTIME. Raises ClusterError if one is unknown, or two
    exclude each other."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    oci = (*OCI_MODULES, *OCI_PACKAGES)
    known = (*CONTAINERD_MODULES, *oci)
    if unknown := [name for name in found if name not in known]:
        raise ClusterError(
            f"no node runs {', '.join(unknown)}; RUNTIME can have: {', '.join(known)}"
        )
    if len([name for name in found if name in oci]) > 1:
        raise ClusterError(f"RUNTIME={text} names more than one OCI runtime")
    return found


def runtime(text: str) -> Runtime:
    """Return the programs that RUNTIME names. Builds missing modules first."""
    found = names(text)
    folders = {
        name: binaries.programs((name,))
        for name in found
        if name in (*CONTAINERD_MODULES, *OCI_MODULES)
    }
    containerd = next((folders[name] for name in found if name in CONTAINERD_MODULES), None)
    for name in found:
        if name in OCI_MODULES:
            return Runtime(containerd=containerd, oci=str(folders[name] / "runc"))
    package = next((name for name in found if name in OCI_PACKAGES), "runc")
    program = shutil.which(package, path=PATH)
    if program is None:
        raise ClusterError(f"{package} is missing: `apt-get install {package}`")
    return Runtime(containerd=containerd, oci=program)
