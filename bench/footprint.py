"""
What the node plugin costs a node at rest, and how soon it serves: `python -m bench.footprint`.

Against a real API server (the control plane alone), with the drivers and policies that the chart
installs. The plugin runs as its own process, as in its container. Prints one line, and exits with
1 when a budget is missed:

    nodeplugin idle: served_ms=… rss_mib=…
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
import yaml

from drakit_proto.kubelet.pluginregistration.v1 import registration_pb2, registration_pb2_grpc
from e2e.cluster.api import Options
from e2e.cluster.choice import cluster as find_cluster

NODE = "bench-node"
SERVED_BUDGET_SECONDS = 1.0
RSS_BUDGET_MIB = 72.0
IDLE_SECONDS = 60.0
STARTS = 5

CONFIG = {
    "listen": "127.0.0.1:0",
    "logging": {"level": "WARNING"},
    "drivers": [
        {
            "driver": "hostdev",
            "config": {
                "policies": [
                    {"name": "kvm", "subsystem": "misc", "paths": ["/dev/kvm"], "count": 32},
                    {"name": "tun", "subsystem": "misc", "paths": ["/dev/net/tun"], "count": 32},
                    {"name": "fuse", "subsystem": "misc", "paths": ["/dev/fuse"], "count": 32},
                ]
            },
        }
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--idle-seconds", type=float, default=IDLE_SECONDS)
    arguments = parser.parse_args()
    cluster = find_cluster("bench")
    cluster.start(Options(nodes=0))
    try:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
        cluster.kubectl("create", "-f", "-", input=json.dumps(node))
        # Sockets have short paths: at most 107 bytes.
        folder = Path(tempfile.mkdtemp(prefix="drakit-bench-", dir="/tmp"))
        try:
            served, rss = measure(cluster.kubeconfig, folder, idle_seconds=arguments.idle_seconds)
        finally:
            shutil.rmtree(folder)
    finally:
        cluster.stop()
    print(f"nodeplugin idle: served_ms={served * 1000:.0f} rss_mib={rss:.1f}")
    if served > SERVED_BUDGET_SECONDS or rss > RSS_BUDGET_MIB:
        print(
            f"budget missed: served within {SERVED_BUDGET_SECONDS * 1000:.0f} ms, "
            f"at most {RSS_BUDGET_MIB:.0f} MiB",
            file=sys.stderr,
        )
        sys.exit(1)


def measure(kubeconfig: Path, folder: Path, *, idle_seconds: float) -> tuple[float, float]:
    """Give the median time to a served registration socket in seconds, and VmRSS in MiB."""
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    (folder / "plugins_registry").mkdir()
    times: list[float] = []
    for number in range(STARTS):
        process, seconds = start(config, kubeconfig, folder)
        times.append(seconds)
        try:
            if number == STARTS - 1:
                time.sleep(idle_seconds)
                rss = resident_mib(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)
    return sorted(times)[len(times) // 2], rss


def start(config: Path, kubeconfig: Path, folder: Path) -> tuple[subprocess.Popen[bytes], float]:
    """Start the plugin, and give the seconds until a kubelet's GetInfo is answered."""
    began = time.monotonic()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "drakit_nodeplugin", "--config", str(config)),
            *("--kubeconfig", str(kubeconfig), "--node-name", NODE),
            *("--kubelet-root", str(folder), "--cdi-dir", str(folder / "cdi")),
        ],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    while time.monotonic() - began < 30:
        for path in (folder / "plugins_registry").glob("*.sock"):
            options = [("grpc.default_authority", "localhost")]
            with grpc.insecure_channel(f"unix:{path}", options=options) as channel:
                stub = registration_pb2_grpc.RegistrationStub(channel)
                stub.GetInfo(registration_pb2.InfoRequest(), timeout=5, wait_for_ready=True)
            return process, time.monotonic() - began
        if process.poll() is not None:
            raise SystemExit(f"the plugin ended with {process.returncode}")
        time.sleep(0.002)
    process.kill()
    raise SystemExit("the plugin did not serve within 30 s")


def resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"process {pid} has no VmRSS")


if __name__ == "__main__":
    main()
