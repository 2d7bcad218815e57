"""
A private Docker engine for machines without one: `make kind-up` and `make kind-down`.

dockerd and all its containers run in separate process, mount and network namespaces. So one signal
ends them, and bridges, firewall rules and forwarding never affect this machine. A veth pair
connects the namespaces: kind publishes API servers at :data:`ADDRESS`. :mod:`.host` compares and
restores the shared state (sysctls, /dev, cgroups).

An engine and a local cluster never run at the same time. The module does not depend on clusters or
kind.
"""

import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ..api import ClusterError, run, wait_until
from ..local import cgroups, network, records
from ..local.boxes import Box
from ..local.records import Process, write_json
from . import host

ROOT = Path("/var/lib/drakit-kind")
"""The engine's folder, one per machine. The path must be short because of its sockets, and on a
disk."""

SOCKET = ROOT / "docker.sock"
CGROUP = "drakit-kind"

LINK = "dkkind"
"""This machine's end of the veth pair."""
SUBNET = ipaddress.IPv4Network("10.127.0.0/30")
"""Below the subnets of local clusters."""
GATEWAY, ADDRESS = SUBNET[1], SUBNET[2]

CAP_SYS_RESOURCE = 24

PACKAGE = "docker.io"
UNITS = ("docker.service", "docker.socket", "containerd.service")

START_SECONDS = 60
END_SECONDS = 30

# Process 1 of the engine's PID namespace. When it ends, all other processes in the namespace end.
# Files that dockerd and containerd write outside of their roots go to mounts that only they can
# see.
INIT = """\
set -e
mount -t proc proc /proc
mkdir -p "$ROOT/etc-upper" "$ROOT/etc-work"
mount -n -t overlay -o "lowerdir=/etc,upperdir=$ROOT/etc-upper,workdir=$ROOT/etc-work" overlay /etc
mount -n -t tmpfs -o mode=755 tmpfs /run
mount -n -t tmpfs -o mode=755 tmpfs /opt
ip link set lo up
until ip -4 addr show dev eth0 2>/dev/null | grep -q inet; do sleep 0.05; done
"$@" &
wait $!
"""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A running engine, as recorded in its folder."""

    init: Process
    docker_host: str

    @property
    def alive(self) -> bool:
        return self.init.alive


def find() -> Engine | None:
    """Return the engine that runs on this machine, or None."""
    try:
        raw = json.loads((ROOT / "engine.json").read_text())
    except (OSError, ValueError):
        return None
    engine = Engine(init=Process(**raw["init"]), docker_host=raw["docker_host"])
    return engine if engine.alive else None


def exists() -> bool:
    """Return whether an engine was started and not stopped, even if it no longer runs."""
    return (ROOT / "before.json").exists()


def use() -> Engine | None:
    """Configure `docker` and `kind` to use the engine, unless DOCKER_HOST names another one. Return
    the engine."""
    engine = find()
    if engine is None or os.environ.get("DOCKER_HOST", engine.docker_host) != engine.docker_host:
        return None
    os.environ["DOCKER_HOST"] = engine.docker_host
    return engine


def start() -> Engine:
    """Start the engine, after installing Docker if it is missing. Returns a running engine
    unchanged."""
    _check()
    with records.lock("kind-engine", timeout_seconds=120):
        if (engine := find()) is not None:
            return engine
        refuse_local_clusters()
        if exists():
            print("removing the remains of an engine", flush=True)
            _end()
        install()
        ROOT.mkdir(parents=True, exist_ok=True)
        ROOT.chmod(0o711)
        write_json(ROOT / "before.json", asdict(host.snapshot()))
        try:
            return _start()
        except BaseException:
            log = _log_tail()
            _end()
            print(log, file=sys.stderr)
            raise


def stop() -> list[str]:
    """
    Stop the engine and all its containers, and restore this machine. Does nothing if there is none.

    :return: a sentence for each remaining difference from the state before the start.
    """
    _check()
    with records.lock("kind-engine", timeout_seconds=120):
        if not exists():
            return []
        return _end()


def refuse_local_clusters() -> None:
    """Raise an error if a local cluster runs, because both share sysctls, /dev and cgroups."""
    for record in records.all_records():
        boxes = (record.names.folder / "boxes").glob("*.json")
        if any(Box(record.names.folder, path.stem, is_node=False).running for path in boxes):
            raise ClusterError(
                f"the local cluster {record.names.cluster} runs (its owner is process "
                f"{record.owner.pid}): a Docker engine never runs beside it; stop it first"
            )


def install() -> None:
    """Install Docker if it is missing, without starting its services."""
    if shutil.which("dockerd", path=system_path()) is not None:
        return
    print(f"installing {PACKAGE}", flush=True)
    masks = [Path("/etc/systemd/system", unit) for unit in UNITS]
    new = [mask for mask in masks if not mask.is_symlink() and mask.parent.is_dir()]
    for mask in new:
        mask.symlink_to("/dev/null")
    env = {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", PACKAGE]):
        run(["apt-get", "-q", *arguments], timeout_seconds=600, env=env)


def system_path() -> str:
    """Return the PATH for root's programs."""
    return "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"


def lacks_sys_resource(status: str) -> bool:
    """Return whether a process may not raise limits, according to its /proc/PID/status."""
    (line,) = [line for line in status.splitlines() if line.startswith("CapEff:")]
    return not int(line.split()[1], 16) >> CAP_SYS_RESOURCE & 1


def dockerd(root: Path, *, capped: bool) -> list[str]:
    """
    Return dockerd's command line.

    :param capped: whether containers run without CAP_SYS_RESOURCE, because root lacks it here.
    """
    argv = [
        "dockerd",
        f"--host=unix://{root}/docker.sock",
        f"--data-root={root}/data",
        f"--exec-root={root}/exec",
        f"--pidfile={root}/docker.pid",
        f"--cgroup-parent=/{CGROUP}",
        "--exec-opt=native.cgroupdriver=cgroupfs",
        # A lower score needs CAP_SYS_RESOURCE.
        "--oom-score-adjust=0",
    ]
    if capped:
        argv += [f"--add-runtime=capped={root}/runc-capped", "--default-runtime=capped"]
    return argv


def obstacle() -> str | None:
    """Return the reason why this machine cannot run a private engine, or None if no reason is
    known."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a private Docker engine needs Linux and root: install Docker instead"
    if not any(shutil.which(name, path=system_path()) for name in ("dockerd", "apt-get")):
        return f"dockerd is missing, and there is no apt-get to install {PACKAGE}"
    return None


def _check() -> None:
    if (reason := obstacle()) is not None:
        raise ClusterError(reason)


def _start() -> Engine:
    used = [subnet for subnet in network.used_subnets() if subnet.overlaps(SUBNET)]
    if used:
        raise ClusterError(f"this machine has a route to {used[0]}, which the engine needs")
    shutil.copy(Path(__file__).with_name("runc-capped"), ROOT / "runc-capped")
    cgroups.make(CGROUP)
    init = _spawn_init()
    docker_host = f"unix://{SOCKET}"
    write_json(ROOT / "engine.json", {"init": asdict(init), "docker_host": docker_host})
    _join(init)
    env = {"DOCKER_HOST": docker_host}

    def answers() -> bool:
        if not init.alive:
            raise ClusterError("dockerd ended at its start")
        done = run(["docker", "version"], env=env, check=False, timeout_seconds=20)
        return done.returncode == 0

    wait_until("the Docker engine answers", answers, timeout_seconds=START_SECONDS)
    return Engine(init=init, docker_host=docker_host)


def _spawn_init() -> Process:
    capped = lacks_sys_resource(Path("/proc/self/status").read_text())
    argv = ["unshare", "--mount", "--net", "--pid", "--propagation", "slave", "--", "sh", "-c"]
    # The shell forks into the PID namespace, prints the child's ID in this machine's namespace, and
    # ends.
    argv += ['setsid "$@" >&2 & echo $!', "sh", "sh", "-c", INIT, "sh"]
    argv += dockerd(ROOT, capped=capped)
    # Don't use the caller's environment, especially its proxies. No registry is needed.
    env = {"PATH": system_path(), "HOME": "/root", "ROOT": str(ROOT)}
    with (ROOT / "dockerd.log").open("ab") as log:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=env,
            timeout=20,
            check=True,
        )
    return Process.of(int(done.stdout))


def _join(init: Process) -> None:
    """Connect the engine's network namespace to this machine."""
    pid = str(init.pid)
    inside = ["nsenter", "--target", pid, "--net", "--", "ip"]
    run(["ip", "link", "add", LINK, "type", "veth", "peer", "name", "eth0", "netns", pid])
    run(["ip", "addr", "add", f"{GATEWAY}/{SUBNET.prefixlen}", "dev", LINK])
    run(["ip", "link", "set", LINK, "up"])
    run([*inside, "link", "set", "eth0", "up"])
    # dockerd needs a default route to choose its own networks.
    run([*inside, "addr", "add", f"{ADDRESS}/{SUBNET.prefixlen}", "dev", "eth0"])
    run([*inside, "route", "add", "default", "via", str(GATEWAY)])


def _end() -> list[str]:
    """Stop everything and restore. If nothing differs, remove the record of the previous state."""
    if (engine := find()) is not None:
        engine.init.signal(signal.SIGKILL)
        if not engine.init.wait(END_SECONDS):
            raise ClusterError(
                f"the engine (process {engine.init.pid}) did not end within {END_SECONDS} s of "
                "SIGKILL: one of its processes hangs in the kernel"
            )
    run(["ip", "link", "del", LINK], check=False)
    cgroups.remove(CGROUP, timeout_seconds=20)
    before = host.Host.parse(json.loads((ROOT / "before.json").read_text()))
    for sentence in host.differences(before, host.snapshot()):
        print(f"restoring: {sentence}", flush=True)
    host.restore(before)
    found: list[str] = []
    deadline = time.monotonic() + 10
    # Links and cgroups disappear a moment after their last process.
    while (found := host.differences(before, host.snapshot())) and time.monotonic() < deadline:
        time.sleep(0.5)
    keep = {"before.json", "dockerd.log"} if found else set[str]()
    wait_until(f"{ROOT} is emptied", lambda: _emptied(keep), timeout_seconds=30)
    if not found:
        ROOT.rmdir()
    return found


def _emptied(keep: set[str]) -> bool:
    """Remove all except some files of the engine's folder. Its mounts disappear a moment later."""
    for path in ROOT.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name not in keep:
            path.unlink(missing_ok=True)
    return {path.name for path in ROOT.iterdir()} <= keep


def _log_tail(lines: int = 20) -> str:
    try:
        return "\n".join((ROOT / "dockerd.log").read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""
