"""
The state of this machine that a container engine may change: read, compared and restored.

:func:`snapshot` reads it before the engine starts and after it ended, :func:`differences` compares
the two, :func:`restore` undoes what it can. The state of other clones' local clusters is excluded,
because they may start and stop in the meantime.
"""

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..api import run
from ..local import cgroups

SYSCTLS = Path("/proc/sys")
DEVICES = Path("/dev")

VOLATILE_SYSCTLS = re.compile(
    r"fs/(aio-nr|dentry-state|file-nr|inode-nr|inode-state|quota/.*|binfmt_misc/.*)"
    r"|kernel/(random/(uuid|boot_id|entropy_avail)|ns_last_pid|pty/nr|hostname|domainname"
    r"|perf_cpu_time_max_percent|perf_event_max_sample_rate|spl/.*|keys/.*gc.*)"
    r"|net/netfilter/nf_conntrack_(count|buckets)|net/.*/(dk[0-9a-f]{8}\w*)/.*"
    r"|vm/(drop_caches|compact_memory|stat_refresh)"
)
"""Sysctls that the kernel changes automatically, and those of other clusters' links."""

UNVISITED_DEVICES = frozenset({"pts", "shm", "mqueue", "hugepages", "fd"})
"""Folders of /dev whose content is not compared, because terminals and shared memory come and
go."""

OTHER_CLUSTERS = re.compile(r"\bdk[0-9a-f]{8}|/?drakit-[0-9a-f]{8}-|/var/lib/drakit-rig")
"""Matches names of local clusters' links, cgroups and folders (:mod:`e2e.cluster.local.names`)."""

PROGRAMS = ("dockerd", "docker-proxy", "containerd", "containerd-shim", "runc", "kubelet")
"""Prefixes of the names of an engine's processes."""

PARTS = ("devices", "network", "firewall", "cgroups", "mounts", "folders", "processes")
"""The parts of :class:`Host` whose entries may appear and disappear. Sysctls only change."""

_COUNTERS = re.compile(r" \[\d+:\d+\]")
_EXPIRY = re.compile(r" expires \S+")

FOLDERS = ("/lib/modules", "/opt/containerd", "/etc/docker", "/run/docker", "/var/lib/docker")
"""Folders that an engine or kind creates if they are missing."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """The compared state of the host. Each part maps names to states."""

    sysctls: Mapping[str, str]
    devices: Mapping[str, str]
    """Type and permissions of the entries in /dev. Device nodes that appeared or disappeared are
    ignored."""
    network: Mapping[str, str]
    """Links and routes."""
    firewall: Mapping[str, str]
    """Policies and rules."""
    cgroups: Mapping[str, str]
    mounts: Mapping[str, str]
    folders: Mapping[str, str]
    processes: Mapping[str, str]
    """The programs of running container engines, keyed by name."""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> "Host":
        return cls(**raw)


def snapshot() -> Host:
    """Read this machine's state."""
    return Host(
        sysctls=dict(_sysctls(SYSCTLS)),
        devices=dict(_devices(DEVICES)),
        network=_lines([*_links(), *_routes()]),
        firewall=_lines(_firewall()),
        cgroups=_lines(_cgroups()),
        mounts=_lines(mount_points(Path("/proc/self/mountinfo").read_text())),
        processes=_lines(_processes()),
        folders=_lines(folder for folder in FOLDERS if Path(folder).exists()),
    )


def differences(before: Host, after: Host) -> list[str]:
    """Return a sentence for each difference."""
    found = [
        f"sysctl {name} is {after.sysctls[name]!r}, was {value!r}"
        for name, value in before.sysctls.items()
        # A sysctl that appears belongs to a kernel module; one that disappears belonged to a link.
        if after.sysctls.get(name, value) != value
    ]
    for part in PARTS:
        old: Mapping[str, str] = getattr(before, part)
        new: Mapping[str, str] = getattr(after, part)
        found += [
            f"{part}: {_named(name, new)} is new"
            for name in new
            if name not in old and not _is_device_node(new[name])
        ]
        found += [
            f"{part}: {_named(name, old)} is missing"
            for name in old
            if name not in new and not _is_device_node(old[name])
        ]
        found += [
            f"{part}: {name} is {new[name]}, was {old[name]}"
            for name in old
            if name in new and new[name] != old[name]
        ]
    return found


def restore(before: Host) -> None:
    """Undo changes to sysctls, to entries in /dev, and to folders. The rest ends with the
    engine."""
    after = snapshot()
    for name, value in before.sysctls.items():
        if after.sysctls.get(name, value) != value:
            with contextlib.suppress(OSError):
                (SYSCTLS / name).write_text(value)
    for name, state in after.devices.items():
        old = before.devices.get(name)
        if old is None and not _is_device_node(state):
            _remove(DEVICES / name)
        elif old is not None and old != state and old.split()[0] == state.split()[0]:
            _, mode, user, group = old.split()
            os.chown(DEVICES / name, int(user), int(group), follow_symlinks=False)
            if old.split()[0] != "link":
                (DEVICES / name).chmod(int(mode, 8))
    for folder in after.folders:
        if folder not in before.folders:
            with contextlib.suppress(OSError):  # not empty: the comparison reports it
                Path(folder).rmdir()


def mount_points(mountinfo: str) -> list[str]:
    """Return the mount points in the text of a mountinfo, except those of other clusters."""
    points = (line.split()[4].replace("\\040", " ") for line in mountinfo.splitlines())
    return [point for point in points if not OTHER_CLUSTERS.search(point)]


def rules(saved: str) -> list[str]:
    """Return policies and rules in the output of iptables-save, without their counters."""
    table, found = "", list[str]()
    for line in saved.splitlines():
        if line.startswith("*"):
            table = line[1:]
        elif line.startswith((":", "-")) and not OTHER_CLUSTERS.search(line):
            found.append(f"{table} {_COUNTERS.sub('', line)}")
    return found


def _lines(lines: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(lines, "")


def _named(name: str, states: Mapping[str, str]) -> str:
    return f"{name} ({states[name]})" if states[name] else name


def _is_device_node(state: str) -> bool:
    return state.startswith(("block ", "character "))


def _sysctls(root: Path) -> Iterator[tuple[str, str]]:
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            key = str(path.relative_to(root))
            if VOLATILE_SYSCTLS.fullmatch(key):
                continue
            with contextlib.suppress(OSError, UnicodeDecodeError):
                yield key, path.read_text().strip()


def _devices(root: Path) -> Iterator[tuple[str, str]]:
    for folder, folders, names in os.walk(root):
        inside = Path(folder).relative_to(root)
        for name in [*folders, *names]:
            with contextlib.suppress(OSError):
                yield str(inside / name), device_state((root / inside / name).lstat())
        folders[:] = [name for name in folders if str(inside / name) not in UNVISITED_DEVICES]


def device_state(found: os.stat_result) -> str:
    """Return type, mode, user and group of an entry of /dev."""
    kinds = {
        stat.S_IFBLK: "block",
        stat.S_IFCHR: "character",
        stat.S_IFDIR: "folder",
        stat.S_IFLNK: "link",
        stat.S_IFREG: "file",
    }
    kind = kinds.get(stat.S_IFMT(found.st_mode), "other")
    return f"{kind} {stat.S_IMODE(found.st_mode):o} {found.st_uid} {found.st_gid}"


def _links() -> Iterator[str]:
    for link in json.loads(run(["ip", "-json", "link", "show"]).stdout or "[]"):
        if not OTHER_CLUSTERS.search(link["ifname"]):
            yield f"link {link['ifname']}"


def _routes() -> Iterator[str]:
    for family in ("-4", "-6"):
        shown = run(["ip", family, "route", "show", "table", "all"], check=False).stdout
        for line in shown.splitlines():
            if not OTHER_CLUSTERS.search(line):
                yield f"route {_EXPIRY.sub('', line).strip()}"


def _firewall() -> Iterator[str]:
    for program in ("iptables-save", "ip6tables-save"):
        for rule in rules(run([program], check=False).stdout):
            yield f"{program.removesuffix('-save')} {rule}"


def _cgroups() -> Iterator[str]:
    """Yield the cgroups directly below each root, which include those of an engine."""
    for root in cgroups.hierarchies():
        for path in root.iterdir():
            if path.is_dir() and not OTHER_CLUSTERS.search(path.name):
                yield str(path)


def _processes() -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended in the meantime
            name = (entry / "comm").read_text().strip()
            groups = (entry / "cgroup").read_text()
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
            if name.startswith(PROGRAMS) and not OTHER_CLUSTERS.search(f"{groups} {command}"):
                yield name


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
