"""
The operator under measurement: a process of its own with its CEL helper, as in its container.

The measurements decide what to change in the cluster, and how to interpret the figures.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from bench.machine import folders, memory_mib
from bench.plugin import environment
from e2e.images.go import cel_program

__all__ = ("OperatorProcess", "running_operator")

START_SECONDS = 20.0
STOP_SECONDS = 30.0

_PORT = re.compile(r'"metrics_port": ?(\d+)')


@dataclass(kw_only=True)
class OperatorProcess:
    """A running operator."""

    process: subprocess.Popen[bytes]
    metrics_port: int

    def check_running(self) -> None:
        if self.process.poll() is not None:
            raise SystemExit(f"the operator ended by itself, with {self.process.returncode}")

    def rss_mib(self) -> float:
        """Return VmRSS of the operator and its helper."""
        return self._memory("VmRSS")

    def peak_mib(self) -> float:
        """Return the sum of the peaks (VmHWM) of the operator and its helper."""
        return self._memory("VmHWM")

    def helper_peak_mib(self) -> float:
        return sum(memory_mib(pid, "VmHWM") for pid in self._helpers())

    def cpu_seconds(self) -> float:
        """Return the processor time of the operator and its helper."""
        ticks = 0
        for pid in (self.process.pid, *self._helpers()):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def metric(self, name: str, labels: str = "") -> float:
        """Return the sum of a metric's values, of those whose labels contain a text."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as response:
            text = response.read().decode()
        sample = re.compile(rf"^{name}(?:\{{([^}}]*)\}})? (\S+)$", re.MULTILINE)
        return sum(float(found[2]) for found in sample.finditer(text) if labels in (found[1] or ""))

    def _memory(self, name: str) -> float:
        return sum(memory_mib(pid, name) for pid in (self.process.pid, *self._helpers()))

    def _helpers(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for each in children for pid in each.read_text().split()]


@contextmanager
def running_operator(kubeconfig: Path) -> Generator[OperatorProcess]:
    """Run the operator with its default settings."""
    with folders() as places:
        config, log = places.root / "operator.yaml", places.root / "log"
        listen = {"probes": "127.0.0.1:0", "metrics": "127.0.0.1:0"}
        # A leader ends if it cannot renew its Lease: it must survive the restart of the API server.
        election = {"leaseDuration": "120s", "renewDeadline": "100s"}
        config.write_text(yaml.safe_dump({"listen": listen, "election": election}))
        argv = [sys.executable, "-m", "drakit_operator", "--config", str(config)]
        place = {
            "POD_NAME": "bench",
            "POD_NAMESPACE": "default",
            "DRAKIT_CEL": str(cel_program()),
        }
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*argv, "--kubeconfig", str(kubeconfig)],
                env=environment() | place,
                stdout=output,
                stderr=output,
            )
        try:
            yield OperatorProcess(process=process, metrics_port=_metrics_port(process, log))
        finally:
            process.terminate()
            try:
                process.wait(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _metrics_port(process: subprocess.Popen[bytes], log: Path) -> int:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        if found := _PORT.search(log.read_text(errors="replace")):
            return int(found[1])
        time.sleep(0.01)
    raise SystemExit(f"the operator did not start: {log.read_text(errors='replace')[-2000:]}")
