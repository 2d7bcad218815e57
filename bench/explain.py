"""
The operator's costs in a large cluster, and with claims that are designed to be expensive.

The operator runs in a separate process against the real API server. The first row is a cluster with
many devices and pods that select them in different ways; each pod gets an Event. The second adds
claims whose opaque parameters hold as many small values as the API server accepts, and claims whose
parameters are nested too deeply to be parsed: a waiting pod must still get its Event.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.apiserver import ApiServer, Body
from bench.claims import report
from bench.machine import folders, memory_mib
from bench.plugin import environment
from bench.rows import Row

__all__ = ("measure_explain",)

DRIVER = "explain.bench.drakit.dev"
SLICES = 2_000
DEVICES = 64
"""Devices per slice: the API server's limit for devices that may be tainted."""

SELECTORS = 30
"""Sets of selectors, and pods that wait; each set matches all devices."""

BOMBS = 40
"""Claims whose opaque parameters have the largest size that the API server accepts."""

DEEP = 3
LEVELS = 1_200

BUDGET_MIB = 320.0
"""The memory limit that the chart sets."""

EVENT_SECONDS = 180.0
SETTLE_SECONDS = 10.0
_FLAGS = ("a", "b", "c", "d", "e")


@dataclass(frozen=True, kw_only=True, slots=True)
class Explain:
    """One run of the operator."""

    name: str
    facts: str
    seconds: float | None
    """From the start of the process until each pod has its Event; None if one has none."""

    rss_mib: float
    most_mib: float
    ended: int | None
    """The exit code, if the operator ended by itself."""

    def line(self) -> str:
        seconds = "-" if self.seconds is None else f"{self.seconds:.1f}"
        memory = f"rss_mib={self.rss_mib:.1f} rss_most_mib={self.most_mib:.1f}"
        return f"explain-{self.name} {self.facts} seconds={seconds} {memory}"

    def missed(self) -> Iterator[str]:
        if self.ended is not None:
            yield f"explain-{self.name}: the operator ended by itself, with {self.ended}"
        elif self.seconds is None:
            yield f"explain-{self.name}: not every pod had its Event after {EVENT_SECONDS:.0f} s"
        if self.most_mib > BUDGET_MIB:
            yield (
                f"explain-{self.name}: VmRSS is {self.most_mib:.1f} MiB, at most {BUDGET_MIB:.0f}"
            )


def measure_explain(api: ApiServer, kubeconfig: Path) -> Iterator[Row]:
    """Return both rows."""
    report(f"explain: {SLICES} slices of {DEVICES} devices")
    api.create_all("resourceslices", map(_slice, range(SLICES)))
    api.create_all("deviceclasses", [_class()])
    api.create_all("resourceclaims", map(_claim, range(SELECTORS)))
    api.create_all("pods", map(_pod, range(SELECTORS)))
    yield _measure(
        api,
        kubeconfig,
        name="many",
        facts=f"slices={SLICES} devices={SLICES * DEVICES} selectors={SELECTORS}",
        pods=SELECTORS,
    )
    api.delete_slices(DRIVER)
    report(f"explain: {BOMBS} claims with large parameters, {DEEP} with deep ones")
    api.create_all("resourceclaims", map(_bomb, range(BOMBS)))
    for number in range(DEEP):
        api.create_claim(_deep(number))
    api.delete_events()
    yield _measure(
        api, kubeconfig, name="hostile", facts=f"bombs={BOMBS} deep={DEEP}", pods=SELECTORS
    )


def _measure(api: ApiServer, kubeconfig: Path, *, name: str, facts: str, pods: int) -> Explain:
    with _running(kubeconfig) as process:
        began = time.monotonic()
        seconds: float | None = None
        rss_mib = most_mib = 0.0
        while process.poll() is None:
            now = time.monotonic() - began
            rss_mib, most_mib = memory_mib(process.pid, "VmRSS"), memory_mib(process.pid, "VmHWM")
            if seconds is None and api.pods_with_events() >= pods:
                seconds = now
            if now > EVENT_SECONDS or (seconds is not None and now > seconds + SETTLE_SECONDS):
                break
            time.sleep(0.5)
        return Explain(
            name=name,
            facts=facts,
            seconds=seconds,
            rss_mib=rss_mib,
            most_mib=most_mib,
            ended=process.returncode,
        )


@contextmanager
def _running(kubeconfig: Path) -> Generator[subprocess.Popen[bytes]]:
    with folders() as places:
        config, log = places.root / "operator.yaml", places.root / "log"
        config.write_text(yaml.safe_dump({"listen": "127.0.0.1:0"}))
        argv = [sys.executable, "-m", "drakit_operator", "--config", str(config)]
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*argv, "--kubeconfig", str(kubeconfig)],
                env=environment() | {"POD_NAME": "bench", "POD_NAMESPACE": "default"},
                stdout=output,
                stderr=output,
            )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if os.environ.get("BENCH_LOGS"):
                sys.stderr.write(log.read_text(errors="replace")[-20_000:])


# ---------------------------------------------------------------- objects


def _slice(number: int) -> Body:
    node = f"node-{number:04}"
    return {
        "metadata": {"name": f"explain-{number:04}"},
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [_device(number, device) for device in range(DEVICES)],
        },
    }


def _device(number: int, device: int) -> Body:
    attributes: dict[str, Any] = {flag: {"bool": True} for flag in _FLAGS}
    attributes |= {
        "index": {"int": device},
        "model": {"string": "bench-9000"},
        "uuid": {"string": f"gpu-{number:08x}-{device:04x}-4000-8000-0123456789ab"},
    }
    return {
        "name": f"gpu-{device}",
        "attributes": attributes,
        "capacity": {"memory": {"value": "80Gi"}},
    }


def _class() -> Body:
    selector = {"cel": {"expression": f'device.driver == "{DRIVER}"'}}
    return {"metadata": {"name": DRIVER}, "spec": {"selectors": [selector]}}


def _claim(number: int) -> Body:
    """Ask for more than any device has, so that the operator evaluates all of them."""
    chosen = [flag for bit, flag in enumerate(_FLAGS) if (number + 1) >> bit & 1]
    expression = " && ".join(f'device.attributes["{DRIVER}"].{flag} == true' for flag in chosen)
    exactly = {
        "deviceClassName": DRIVER,
        "selectors": [{"cel": {"expression": expression}}],
        "capacity": {"requests": {"memory": "1Ti"}},
    }
    return {
        "metadata": {"name": f"select-{number}", "namespace": "default"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
    }


def _pod(number: int) -> Body:
    claim = {"name": "gpu", "resourceClaimName": f"select-{number}"}
    return {
        "metadata": {"name": f"waits-{number}", "namespace": "default"},
        "spec": {
            "containers": [{"name": "main", "image": "none.invalid/none"}],
            "resourceClaims": [claim],
            "automountServiceAccountToken": False,
        },
    }


def _bomb(number: int) -> Body:
    small = {"x": [[]] * 3_400}  # 10 KiB of JSON, 200 KiB of Python objects
    return _opaque(f"bomb-{number}", [small] * 32)


def _deep(number: int) -> str:
    """Return a body as text: no encoder writes values that are nested so deeply."""
    text = json.dumps(_opaque(f"deep-{number}", [{"x": "nested"}]))
    return text.replace('"nested"', "[" * LEVELS + "1" + "]" * LEVELS)


def _opaque(name: str, parameters: list[Any]) -> Body:
    return {
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "devices": {
                "requests": [{"name": "gpu", "exactly": {"deviceClassName": DRIVER}}],
                "config": [
                    {"opaque": {"driver": DRIVER, "parameters": each}} for each in parameters
                ],
            }
        },
    }
