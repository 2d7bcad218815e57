"""
Time and memory of ``kubectl drakit`` in a large cluster: one process a command, with its helper.

It must not know what the commands compute.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.machine import memory_mib
from bench.plugin import environment
from bench.rows import Row
from e2e.images.go import cel_program

__all__ = ("measure_kubectl",)


def measure_kubectl(kubeconfig: Path, *, pod: str) -> Iterator[Row]:
    """Return a row for each command."""
    for command in (f"explain pod/{pod}", "devices", "doctor"):
        yield _measure(command, kubeconfig)


def _measure(command: str, kubeconfig: Path) -> Row:
    argv = [sys.executable, "-m", "drakit.cli.kubectl.main", *command.split()]
    began = time.monotonic()
    process = subprocess.Popen(
        [*argv, "--kubeconfig", str(kubeconfig)],
        env=environment() | {"DRAKIT_CEL": str(cel_program())},
        stdout=subprocess.DEVNULL,
    )
    peak_mib = 0.0
    while process.poll() is None:
        peak_mib = max(peak_mib, _peak_mib(process.pid))
        time.sleep(0.02)
    return Row(
        f'kubectl-drakit command="{command}"',
        {
            "seconds": time.monotonic() - began,
            "rss_peak_mib": peak_mib,
            "code": process.returncode,
        },
        at_least={"code": 0},
        at_most={"code": 1},
    )


def _peak_mib(pid: int) -> float:
    """Return VmHWM; 0 if the process has just ended."""
    try:
        return memory_mib(pid, "VmHWM")
    except (OSError, SystemExit):
        return 0.0
