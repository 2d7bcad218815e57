"""
The init of a box: process 1 of its PID namespace. Run as a program; imported for its path alone.

It records its process, sets up a node's file system if it is a node's, prints `ready`, and stays.
When it ends, the kernel ends every process of the box, and with them go the box's mounts and links.
It uses only the standard library, and nothing of this project, so it starts within milliseconds.
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
"""Stands in the command line: it identifies the process in the machine's process list."""


DISKS = "disks.json"
"""The file in a node's folder with its disks: path on the node -> image of a file system."""


def main() -> None:
    _, _, folder, box = sys.argv
    state = Path(folder)
    # The /proc that we still see is the starter's, and so is the number: nobody else learns it.
    pid = os.readlink("/proc/self")
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    record = state / "boxes" / f"{box}.json"
    partial = record.with_suffix(".part")
    partial.write_text(json.dumps({"pid": int(pid), "started": started}))
    partial.replace(record)
    node = state / box
    if (node / "is-node").exists():
        make_node(state, node, box)
    # Orphans of the box become our children: nobody waits for them, so the kernel shall not keep
    # them. Only now, for the programs above were waited for.
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

    Nothing is created outside of the state folder: a mount point that is removed in one mount
    namespace vanishes, with the mount on it, in all others.
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
    # Pods of one node that talk through a service: their answers must pass the address translation.
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
        # The devices are this machine's, and so is what udev knows about them.
        (run / "udev").mkdir()
        mount("--bind", "/run/udev", str(run / "udev"))
    mount("--move", str(run), "/run")
    if not os.path.islink("/var/run"):
        mount("--rbind", "/run", "/var/run")


def mount(*arguments: str) -> None:
    # -n: this machine's table of mounts, below /run, is not the node's to write.
    subprocess.run(["mount", "-n", *arguments], check=True, timeout=10)


if __name__ == "__main__":
    main()
