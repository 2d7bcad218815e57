"""
containerd's image store of a node, filled before any node starts.

A temporary containerd unpacks the images into it. It has a separate mount namespace and ends with
the process that started it, so an interrupted build leaves neither processes nor mounts.
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
"""The folders below containerd's root that contain images."""

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
IMPORT_SECONDS = 300
STOP_SECONDS = 10


def unpack(archive: Path, root: Path, *, programs: Path) -> None:
    """Import the images of a docker-archive for Kubernetes; `root` becomes containerd's root."""
    with _containerd(root, programs=programs) as ctr:
        # The kubelet's garbage collection keeps pinned images, because they could not be pulled
        # again. The layers are not stored in addition to their unpacked content, as in kind's
        # configuration.
        options = ("--local", "--discard-unpacked-layers", "--snapshotter", "overlayfs")
        label = ("--label", "io.cri-containerd.pinned=pinned")
        run(
            [*ctr, "images", "import", *options, *label, str(archive)],
            timeout_seconds=IMPORT_SECONDS,
        )
        # containerd's next garbage collection deletes the layers. Deleting a lease triggers one.
        run([*ctr, "leases", "create", "--id", "collect"])
        run([*ctr, "leases", "delete", "--sync", "collect"])


@contextlib.contextmanager
def _containerd(root: Path, *, programs: Path) -> Generator[list[str]]:
    """Run containerd. Yield the start of a command line that calls it."""
    # Don't use the cache, because the path of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="drakit-containerd-") as folder:
        state = Path(folder)
        config, log = state / "config.toml", state / "log"
        config.write_text(CONFIG.format(root=root, state=state))
        argv = ["setpriv", "--pdeathsig", "KILL", "--", "unshare", "--mount", "--"]
        argv += [str(programs / "containerd"), "--config", str(config)]
        ctr = [str(programs / "ctr"), "-a", str(state / "containerd.sock"), "-n", "k8s.io"]
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


def _wait(process: "subprocess.Popen[bytes]", ctr: list[str], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while run([*ctr, "version"], timeout_seconds=START_SECONDS, check=False).returncode != 0:
        if process.poll() is not None or time.monotonic() > deadline:
            last = "\n  ".join(log.read_text(errors="replace").splitlines()[-8:])
            raise ClusterError(f"the containerd that unpacks the images did not start:\n  {last}")
        time.sleep(0.1)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_SECONDS)
