"""
containerd's store of a node: images that are unpacked before any node starts.

A containerd of our own imports them. It has a mount namespace to itself and dies with the process
that started it, so that an interrupted build leaves no process and no mount.
"""

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

from ..api import ClusterError, run

KEPT = (
    "io.containerd.content.v1.content",
    "io.containerd.metadata.v1.bolt",
    "io.containerd.snapshotter.v1.overlayfs",
)
"""The parts of containerd's root that hold images."""

CONFIG = """\
version = 3
root = "{root}"
state = "{state}"
disabled_plugins = [
  "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime",
  "io.containerd.nri.v1.nri", "io.containerd.internal.v1.opt",
]
[grpc]
  address = "{state}/containerd.sock"
"""

START_SECONDS = 30
STOP_SECONDS = 10


def unpack(archive: Path, root: Path, *, programs: Path) -> None:
    """Import the images of a docker-archive into `root`, as Kubernetes finds them in containerd."""
    with _containerd(root, programs=programs) as ctr:
        # Pinned images survive the kubelet's garbage collection: nothing could pull them again.
        # The layers are not kept beside what was unpacked of them: kind's nodes do the same.
        _call(
            *(*ctr, "images", "import", "--local", "--discard-unpacked-layers"),
            *("--label", "io.cri-containerd.pinned=pinned", "--snapshotter", "overlayfs"),
            str(archive),
        )
        # A lease that ends is when containerd removes what nothing refers to, such as the layers.
        _call(*ctr, "leases", "create", "--id", "collect")
        _call(*ctr, "leases", "delete", "--sync", "collect")


def _call(*argv: str) -> None:
    run(argv, timeout_seconds=300)


@contextlib.contextmanager
def _containerd(root: Path, *, programs: Path) -> Generator[tuple[str, ...]]:
    """Run containerd; gives the beginning of a command line that talks to it."""
    with tempfile.TemporaryDirectory(prefix="drakit-containerd-") as folder:
        state = Path(folder)
        config, log = state / "config.toml", state / "log"
        config.write_text(CONFIG.format(root=root, state=state))
        argv = [
            *("setpriv", "--pdeathsig", "KILL", "--", "unshare", "--mount", "--"),
            *(str(programs / "containerd"), "--config", str(config)),
        ]
        ctr = (str(programs / "ctr"), "-a", str(state / "containerd.sock"), "-n", "k8s.io")
        with (
            log.open("wb") as output,
            subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            ) as process,
        ):
            try:
                _wait(process, ctr, log)
                yield ctr
            finally:
                _stop(process)


def _wait(process: "subprocess.Popen[bytes]", ctr: tuple[str, ...], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while run([*ctr, "version"], timeout_seconds=START_SECONDS, check=False).returncode != 0:
        if process.poll() is not None or time.monotonic() > deadline:
            last = "\n  ".join(log.read_text(errors="replace").splitlines()[-8:])
            raise ClusterError(f"containerd did not start, to unpack the images:\n  {last}")
        time.sleep(0.1)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_SECONDS)
