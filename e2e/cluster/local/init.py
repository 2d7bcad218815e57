"""
The init of a box: process 1 of its PID namespace. It runs as a program; other modules import it
only for its path.

It records its process, sets up the file system if the box is a node, prints `ready`, and keeps
running. When it ends, the kernel ends every process of the box, and thereby the box's mounts and
links. It uses only the standard library, and nothing of this project, so it starts within
milliseconds.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

MARK = "drakit-rig-init"
"""Part of the command line that identifies the process in the machine's process list."""


DISKS = "disks.json"
"""The file in a node's folder with its disks: path on the node -> image of a file system."""


def main() -> None:
    _, _, folder, box = sys.argv
    state = Path(folder)
    # /proc is still that of the starting process, and so is this number. A process in the namespace
    # cannot find it otherwise.
    pid = os.readlink("/proc/self")
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    record = state / "boxes" / f"{box}.json"
    partial = record.with_suffix(".part")
    partial.write_text(json.dumps({"pid": int(pid), "started": started}))
    partial.replace(record)
    node = state / box
    if (node / "is-node").exists():
        make_node(state, node, box)
    # Orphans in the box become children of this process. Let the kernel reap them, because this
    # process does not wait for them. Set this only now, because the programs above were waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.write(1, b"ready\n")
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    while True:
        signal.pause()


def make_node(state: Path, node: Path, name: str) -> None:
    """
    Mount the node's own files at the standard paths, over those that it shares with this machine.

    Creates nothing outside of the state folder: if a mount point is removed in one mount namespace,
    it vanishes in all others, together with its mount.
    """
    socket.sethostname(name)
    mount("-t", "proc", "proc", "/proc")
    etc = f"lowerdir=/etc,upperdir={node}/etc-upper,workdir={node}/etc-work"
    mount("-t", "overlay", "-o", etc, "overlay", "/etc")
    mount("--bind", f"{node}/log", "/var/log")
    make_var_lib(state, node)
    make_run(node)
    for path, image in disks(node).items():
        os.makedirs(path, exist_ok=True)
        mount("-o", "loop", image, path)
    # Kubernetes' mount propagation between pods needs a shared root.
    mount("--make-rshared", "/")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    # If pods of one node communicate through a service, their responses must pass the address
    # translation.
    bridged = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if bridged.exists():
        bridged.write_text("1")


def disks(node: Path) -> dict[str, str]:
    file = node / DISKS
    return json.loads(file.read_text()) if file.exists() else {}


def make_var_lib(state: Path, node: Path) -> None:
    lib = node / "lib"
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(lib))
    for name in ("kubelet", "cni"):
        (lib / name).mkdir()
        mount("--bind", str(node / name), str(lib / name))
    own = lib / state.relative_to("/var/lib")
    own.mkdir(parents=True)
    mount("--bind", str(state), str(own))
    mount("--move", str(lib), "/var/lib")


def make_run(node: Path) -> None:
    run = node / "run"
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(run))
    for name in ("cdi", "lock"):
        (run / name).mkdir()
    (run / "boot_id").write_text(f"{uuid.uuid4()}\n")
    if os.path.isdir("/run/udev"):
        # The devices are this machine's devices, so udev's data about them is valid here.
        (run / "udev").mkdir()
        mount("--bind", "/run/udev", str(run / "udev"))
    mount("--move", str(run), "/run")
    if not os.path.islink("/var/run"):
        mount("--rbind", "/run", "/var/run")


def mount(*arguments: str) -> None:
    # -n: don't change this machine's mount table, which is below /run.
    subprocess.run(["mount", "-n", *arguments], check=True, timeout=10)


if __name__ == "__main__":
    main()
