"""
Counts drakit's functions that are entered to prepare a claim, and to publish a device change:
`python -m bench.hops`.

The real node plugin runs in this process and this thread, with a profile hook in all its threads.
Its calls arrive over the Unix socket, and its API server is a fake. Other threads run both, without
the hook. Only functions that each of several rounds enters are counted, which excludes timers.

The numbers show how much code a reader of one call must understand.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
import time
from asyncio.base_events import BaseEventLoop
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

from bench import REPOSITORY
from bench.drivers import DRIVER, Changing
from bench.kubelet import Kubelet, register
from bench.machine import folders
from bench.plugin import NODE
from bench.rows import Row
from drakit.device import ClaimReference
from drakit.testing import FakeApiServer
from drakit_nodeplugin.app import Launch, serve
from drakit_nodeplugin.config import load_config

WARM_UP = 3
"""The number of rounds before the first measured one, in which modules are imported and connections
opened."""

ROUNDS = 5
REST_SECONDS = 0.3
"""How long to wait until all work of a call is done."""

PUBLISHED_SECONDS = 30.0

CROSSINGS = 6
"""The budget for preparing a claim: twice to the checkpoint's thread and back, and once to the
driver's thread and back."""

PACKAGES = tuple(
    str(REPOSITORY / folder) + os.sep
    for folder in (
        "drakit",
        "formats/drakit_formats",
        "daemon/drakit_daemon",
        "driver/drakit_driver",
        "nodeplugin/drakit_nodeplugin",
        "nodeplugin/drakit_drivers",
    )
)
TESTING = str(REPOSITORY / "drakit" / "testing") + os.sep

# ---------------------------------------------------------------- the profile hook


@dataclass(kw_only=True)
class Round:
    """The plugin's work in one round."""

    functions: dict[tuple[str, str], None] = field(default_factory=dict[tuple[str, str], None])
    """The file and name of drakit's functions, in the order of their first calls. Resuming a
    coroutine is also a call."""

    tasks: int = 0
    """The number of tasks that were created for drakit's coroutines."""

    crossings: int = 0
    """The number of times that a thread passed work or a result to another one."""


_CREATE_TASK, _WAKE, _SUBMIT = (
    function.__code__
    for function in (
        BaseEventLoop.create_task,
        BaseEventLoop.call_soon_threadsafe,
        ThreadPoolExecutor.submit,
    )
)


class Recorder:
    """The profile hook, which counts during a round."""

    def __init__(self) -> None:
        self.round: Round | None = None

    @contextmanager
    def recording(self) -> Generator[Round]:
        """Record from one idle state to the next."""
        time.sleep(REST_SECONDS)
        self.round = recorded = Round()
        yield recorded
        time.sleep(REST_SECONDS)
        self.round = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or (now := self.round) is None:
            return
        code = frame.f_code
        if is_ours(code):
            now.functions[code.co_filename, code.co_qualname] = None
        elif code is _CREATE_TASK:
            work = getattr(frame.f_locals["coro"], "cr_code", None)
            now.tasks += work is not None and is_ours(work)
        elif code is _WAKE:
            now.crossings += frame.f_locals["self"]._thread_id != threading.get_ident()
        elif code is _SUBMIT:
            now.crossings += 1


@cache
def is_ours(code: CodeType) -> bool:
    """Return whether the code is a named function of the product, without its fakes."""
    file = code.co_filename
    return (
        file.startswith(PACKAGES)
        and not file.startswith(TESTING)
        and not code.co_name.startswith("<")
    )


# ---------------------------------------------------------------- the rounds


def measure(
    api: FakeApiServer, kubelet: Kubelet, claims: Sequence[ClaimReference], recorder: Recorder
) -> Mapping[str, list[Round]]:
    """Return the rounds of each operation, without the warm-up."""
    rounds: dict[str, list[Round]] = {"prepare": [], "device-change": []}
    _wait_level(api, 0)
    for number, claim in enumerate(claims, start=1):
        with recorder.recording() as prepare:
            kubelet.prepare([claim])
        kubelet.unprepare([claim])
        with recorder.recording() as change:
            Changing.change(number)
            _wait_level(api, number)
        if number > WARM_UP:
            rounds["prepare"].append(prepare)
            rounds["device-change"].append(change)
    return rounds


def _wait_level(api: FakeApiServer, level: int) -> None:
    """Wait until the API server has the changed device."""
    until = time.monotonic() + PUBLISHED_SECONDS
    while time.monotonic() < until:
        for body in api.objects("/apis/resource.k8s.io/v1/resourceslices"):
            for device in body["spec"].get("devices", ()):
                if device.get("attributes", {}).get("level") == {"int": level}:
                    return
        time.sleep(0.005)
    raise SystemExit("the changed device was not published")


def _store_claim(api: FakeApiServer, name: str) -> ClaimReference:
    result = {"request": "main", "driver": DRIVER, "pool": NODE, "device": "device-0"}
    body = {
        "spec": {"devices": {"requests": [{"name": "main"}]}},
        "status": {"allocation": {"devices": {"results": [result]}}},
    }
    path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
    stored = api.store(f"{path}/{name}", body)
    return ClaimReference(namespace="default", name=name, uid=stored["metadata"]["uid"])


def run() -> Mapping[str, list[Round]]:
    """Run the plugin in this thread, and its peers in others. Return the rounds."""
    recorder, results = Recorder(), list[Mapping[str, list[Round]]]()
    api = FakeApiServer()
    api.store(f"/api/v1/nodes/{NODE}", {})
    claims = [_store_claim(api, f"claim-{number}") for number in range(WARM_UP + ROUNDS)]
    with folders() as places:
        ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(_serve(api, ready)), daemon=True).start()
        ready.wait()

        def drive() -> None:
            registry = places.root / "plugins_registry"
            try:
                while not (sockets := list(registry.glob("*.sock"))):
                    time.sleep(0.01)
                with closing(Kubelet(register(sockets[0])[1])) as kubelet:
                    results.append(measure(api, kubelet, claims, recorder))
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        config = places.root / "config.yaml"
        listen = {"probes": "127.0.0.1:0", "metrics": "127.0.0.1:0"}
        entry = {"driver": "bench.drivers:Changing"}
        config.write_text(json.dumps({"listen": listen, "drivers": [entry]}))
        launch = Launch(
            config_file=config,
            node_name=NODE,
            instance_uid="hops",
            kubeconfig=api.write_kubeconfig(places.root),
        )
        settings = load_config(config, kubeletRoot=places.root, cdiDirectory=places.cdi)
        threading.Thread(target=drive, daemon=True).start()
        threading.setprofile(recorder)
        sys.setprofile(recorder)
        try:
            asyncio.run(serve(settings, launch))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    if not results:
        raise SystemExit("the plugin was stopped before the end")
    return results[0]


async def _serve(api: FakeApiServer, ready: threading.Event) -> None:
    async with api:
        ready.set()
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.hops", description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the functions by module")
    arguments = parser.parse_args()
    for row, modules in measure_hops():
        print(row.line())
        for file, names in modules.items() if arguments.list else ():
            print(*(f"  {Path(file).relative_to(REPOSITORY)}", *names), sep="\n    ")


def measure_hops() -> Iterator[tuple[Row, Mapping[str, Sequence[str]]]]:
    """Return a row for each operation, and its functions by module."""
    for operation, rounds in run().items():
        modules = _by_module(rounds)
        # Timers can only increase these figures.
        figures = {
            "functions": sum(map(len, modules.values())),
            "modules": len(modules),
            "tasks": min(each.tasks for each in rounds),
            "thread_crossings": min(each.crossings for each in rounds),
        }
        limits = {"thread_crossings": CROSSINGS} if operation == "prepare" else {}
        yield Row(f"hops {operation}", figures, at_most=limits), modules


def _by_module(rounds: Sequence[Round]) -> Mapping[str, list[str]]:
    """Return the functions that each round entered, in the order of the first round."""
    names: dict[str, list[str]] = {}
    for file, name in rounds[0].functions:
        if all((file, name) in each.functions for each in rounds):
            names.setdefault(file, []).append(name)
    return names


if __name__ == "__main__":
    main()
