"""
The cost of endpoints in vendors' processes: on a prepare, and of many at rest.

The vendors are :mod:`.vendors`, in one process of their own. A backend, a device plugin behind the
adapter and a driver in the plugin's process take turns call by call, in one plugin, so that
machine, API server and disk are the same for all three.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.apiserver import ApiServer
from bench.claims import WARM_UP, no_collection, report
from bench.drivers import DRIVER
from bench.endpointrows import Endpoints, Overhead
from bench.kubelet import Kubelet
from bench.machine import Folders, folders
from bench.plugin import HOSTDEV, Plugin, running
from bench.rows import Row
from bench.vendors import DEVICES, backend_entry, backend_name, plugin_entry, resource_name
from drakit.device import ClaimReference

__all__ = ("measure_endpoints",)

ADAPTER = "deviceplugin.drakit.dev"
BATCHES = (1, 8)
IN_PROCESS = "in-process"

MANY = ((50, 0), (25, 25), (0, 50))
"""Device plugins and backends on one node."""

PUBLISHED_SECONDS = 90.0
"""Timeout for the devices of all endpoints."""

SETTLE_SECONDS = 45.0
"""Time from then until rest: the grace periods of a start end in it, and pending writes finish."""

POLL_SECONDS = 0.2


def measure_endpoints(
    api: ApiServer,
    kubeconfig: Path,
    *,
    repetitions: Mapping[int, int],
    idle_seconds: float,
) -> Iterator[Row]:
    """Return all rows."""
    yield from _overheads(api, kubeconfig, repetitions=repetitions)
    for device_plugins, backends in MANY:
        report(f"at rest with {device_plugins} device plugins and {backends} backends")
        yield _at_rest(
            api,
            kubeconfig,
            device_plugins=device_plugins,
            backends=backends,
            idle_seconds=idle_seconds,
        )


# ------------------------------------------------------------ on a prepare


def _overheads(
    api: ApiServer, kubeconfig: Path, *, repetitions: Mapping[int, int]
) -> Iterator[Overhead]:
    entry = {"driver": "bench.drivers:Effects"}
    with _plugin([entry], api=api, kubeconfig=kubeconfig, device_plugins=1, backends=1) as (
        plugin,
        _,
    ):
        drivers = {IN_PROCESS: DRIVER, "backend": backend_name(0), "device-plugin": ADAPTER}
        claims = {
            kind: api.create_claims(
                DEVICES,
                driver=driver,
                prefix=kind,
                devices=None if kind == IN_PROCESS else _devices(api, driver),
            )
            for kind, driver in drivers.items()
        }
        with (
            plugin.kubelet(DRIVER) as in_process,
            plugin.kubelet(drivers["backend"]) as backend,
            plugin.kubelet(ADAPTER) as adapter,
            no_collection(),
        ):
            kubelets = dict(zip(drivers, (in_process, backend, adapter), strict=True))
            for batch in BATCHES:
                report(f"endpoints: batches of {batch}")
                yield from _compared(kubelets, claims, batch=batch, repetitions=repetitions[batch])


def _compared(
    kubelets: Mapping[str, Kubelet],
    claims: Mapping[str, Sequence[ClaimReference]],
    *,
    batch: int,
    repetitions: int,
) -> Iterator[Overhead]:
    seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(-WARM_UP, repetitions):
        first = number * batch % DEVICES
        for kind, kubelet in kubelets.items():
            some = claims[kind][first : first + batch]
            took = kubelet.prepare(some)
            kubelet.unprepare(some)
            if number >= 0:
                seconds[kind].append(took)
    for kind in kubelets:
        if kind != IN_PROCESS:
            yield Overhead.of(
                endpoint=kind,
                batch=batch,
                seconds=seconds[kind],
                in_process=seconds[IN_PROCESS],
            )


def _devices(api: ApiServer, driver: str) -> list[tuple[str, str]]:
    """Return pool and name of a driver's devices, as they are published."""
    return [
        (body["spec"]["pool"]["name"], device["name"])
        for body in api.slices(driver)
        for device in body["spec"].get("devices", ())
    ]


# ------------------------------------------------------------ at rest


def _at_rest(
    api: ApiServer, kubeconfig: Path, *, device_plugins: int, backends: int, idle_seconds: float
) -> Endpoints:
    with _plugin(
        [HOSTDEV],
        api=api,
        kubeconfig=kubeconfig,
        device_plugins=device_plugins,
        backends=backends,
    ) as (plugin, published_seconds):
        time.sleep(SETTLE_SECONDS)
        before, began = sum(plugin.cpu_seconds().values()), time.monotonic()
        time.sleep(idle_seconds)
        threads = plugin.cpu_seconds()
        return Endpoints(
            device_plugins=device_plugins,
            backends=backends,
            published_seconds=published_seconds,
            rss_mib=plugin.resident_mib(),
            cpu_share=(sum(threads.values()) - before) / (time.monotonic() - began),
            threads=len(threads),
        )


# ------------------------------------------------------------ plugin and vendors


@contextmanager
def _plugin(
    entries: Sequence[Mapping[str, Any]],
    *,
    api: ApiServer,
    kubeconfig: Path,
    device_plugins: int,
    backends: int,
) -> Generator[tuple[Plugin, float]]:
    """Run a plugin beside vendors; yield it when the devices of all are published, and the seconds
    that it took."""
    names = [backend_name(number) for number in range(backends)]
    adapters = [ADAPTER] if device_plugins else []
    rights = {
        "owner": {"uid": os.getuid()},
        "devices": ["/dev/null"],
        "env": ["BENCH_DEVICE"],
    }
    settings = {
        "backends": {
            "enabled": backends > 0,
            "allowed": {
                backend_entry(number): {"driver": backend_name(number), **rights}
                for number in range(backends)
            },
        },
        "devicePlugins": {
            "enabled": device_plugins > 0,
            "plugins": {
                plugin_entry(number): {
                    "resources": [resource_name(number)],
                    **rights,
                }
                for number in range(device_plugins)
            },
        },
    }
    with folders() as places, _vendors(places, device_plugins=device_plugins, backends=backends):
        began = time.monotonic()
        with running(
            entries,
            kubeconfig=kubeconfig,
            folders=places,
            settings=settings,
            appearing=len(names) + len(adapters),
        ) as plugin:
            wanted = dict.fromkeys(names, DEVICES)
            wanted |= dict.fromkeys(adapters, DEVICES * device_plugins)
            _wait_published(api, wanted)
            yield plugin, time.monotonic() - began
    for name in (*names, *adapters, DRIVER):
        api.delete_slices(name)


def _wait_published(api: ApiServer, wanted: Mapping[str, int]) -> None:
    until = time.monotonic() + PUBLISHED_SECONDS
    missing = dict(wanted)
    while missing:
        missing = {name: n for name, n in missing.items() if len(_devices(api, name)) != n}
        if time.monotonic() > until:
            raise SystemExit(
                f"after {PUBLISHED_SECONDS:.0f} s the devices of {', '.join(missing)} are not "
                f"published"
            )
        time.sleep(POLL_SECONDS)


@contextmanager
def _vendors(places: Folders, *, device_plugins: int, backends: int) -> Generator[None]:
    home = places.root / "plugins" / "drakit.dev"
    pods = places.root / "pod-resources" / "kubelet.sock"
    argv = [sys.executable, "-m", "bench.vendors", "--pods", str(pods)]
    if backends:
        argv += ["--backends", str(home / "backends"), str(backends)]
    if device_plugins:
        argv += ["--device-plugins", str(home / "device-plugins"), str(device_plugins)]
    process = subprocess.Popen(argv)
    try:
        yield
        if process.poll() is not None:
            raise SystemExit(f"the vendors' process ended, with {process.returncode}")
    finally:
        process.kill()
        process.wait()
