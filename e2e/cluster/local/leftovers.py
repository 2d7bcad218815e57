"""
Finds the leftovers of a stopped cluster on this machine.

All parts of a cluster have its ID in a path or a name, so one read of each of the kernel's tables
finds them. Reading is separate from parsing, which uses pure functions.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..api import run
from . import cgroups
from .names import ROOT, cluster_id


def leftovers(cluster: str) -> list[str]:
    """Return the leftovers of a cluster, one sentence each."""
    cluster = cluster_id(cluster)
    folder = ROOT / cluster
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    links = json.loads(run(["ip", "-json", "link", "show"]).stdout or "[]")
    routes = run(["ip", "-4", "route", "show", "table", "all"]).stdout.splitlines()
    rules = run(["iptables-save"], check=False).stdout.splitlines()
    return [
        *(f"process {pid} runs: {text}" for pid, text in _processes(folder, cluster)),
        *(f"{where} is still mounted" for where in mounts_below(mounts, folder)),
        *(f"the link {link['ifname']} exists" for link in links if cluster in link["ifname"]),
        *(f"a route exists: {line}" for line in _naming(routes, f"dk{cluster}")),
        *(f"a firewall rule exists: {line}" for line in _naming(rules, cluster)),
        *(f"the cgroup {group} exists" for group in cgroups.found(f"drakit-{cluster}-")),
        *([f"the folder {folder} exists"] if folder.exists() else []),
    ]


def mounts_below(mountinfo: Iterable[str], folder: Path) -> list[str]:
    """Return the mount points in or below a folder, from the lines of a mountinfo."""
    points = (line.split()[4].replace("\\040", " ") for line in mountinfo)
    return [point for point in points if Path(point).is_relative_to(folder)]


def _naming(lines: Iterable[str], text: str) -> list[str]:
    return [line for line in lines if text in line]


def _processes(folder: Path, cluster: str) -> Iterator[tuple[int, str]]:
    """Yield the processes whose command line or cgroup names the cluster."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            groups = (entry / "cgroup").read_text()
        except OSError:
            continue  # it ended in the meantime
        if str(folder) in command or f"/drakit-{cluster}-" in groups:
            yield int(entry.name), command.strip() or "(zombie)"
