"""The one order of calls, in each of its uses, by the table of cases that the Go module reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drakit.device import AllocatedClaim, AllocatedDevice, ClaimReference
from drakit_driver.runtime.contract import DriverTraits
from drakit_driver.runtime.order import CallQueue, Order, Place, claim_key
from drakit_nodeplugin.claims.work import call_driver
from tests.fakes.checkpoints import stored_claim, stored_device

ROOT = Path(__file__).parents[3]
CASES = json.loads((ROOT / "proto/go/testdata/call_order.json").read_text())["cases"]
LIMIT_SECONDS = 300


class Calls:
    """Makes the calls of a case."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.callers: dict[str, asyncio.Task[Any]] = {}
        self._ends: dict[str, asyncio.Future[None]] = {}

    def start(self, name: str, keys: Sequence[str]) -> None:
        self._ends[name] = asyncio.get_running_loop().create_future()
        self.callers[name] = asyncio.create_task(self._make(name, keys))

    async def _make(self, name: str, keys: Sequence[str]) -> Any:
        raise NotImplementedError

    async def _work(self, name: str) -> None:
        self.running.add(name)
        try:
            await self._ends[name]
        finally:
            self.running.discard(name)

    async def play(self, step: str) -> None:
        what, *words = step.split()
        if what == "start":
            self.start(words[0], words[1:])
        elif what == "leave":
            self.callers[words[0]].cancel()
        elif what == "end":
            self._ends[words[0]].set_result(None)
        elif what == "fail":
            self._ends[words[0]].set_exception(RuntimeError("it failed"))
        for _ in range(20):
            await asyncio.sleep(0)
        if what == "running":
            assert self.running == set(words), step


class DriverProcess(Calls):
    """As drakit-driver: in tasks that callers leave."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = CallQueue(limit_seconds=LIMIT_SECONDS)

    async def _make(self, name: str, keys: Sequence[str]) -> Any:
        claims = [key.split("/")[1] for key in keys if key.startswith("claim/")]
        devices, sets = _hardware(keys)
        batch = [
            AllocatedClaim(
                claim=ClaimReference(namespace="lab", name=name, uid=claims[0]),
                devices=tuple(
                    AllocatedDevice(
                        pool=pool, name=device, request="main", consumes=sets.get(pool, {})
                    )
                    for pool, device in devices
                ),
            )
        ]
        return await self.queue.call(batch, lambda: self._work(name))


class NodePlugin(Calls):
    """As the node plugin: after its turn with the claim, in the order of hardware. Its work does
    not depend on a caller."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: Any = SimpleNamespace(
            driver="x", order=Order(), devices=SimpleNamespace(traits=DriverTraits())
        )

    async def _make(self, name: str, keys: Sequence[str]) -> Any:
        claims = [key.split("/")[1] for key in keys if key.startswith("claim/")]
        devices, sets = _hardware(keys)
        stored = [stored_device(d, pool=pool, consumes=sets.get(pool)) for pool, d in devices]
        claim = stored_claim(claims[0], devices=tuple(stored))

        async def call(batch: Sequence[AllocatedClaim]) -> Any:
            await self._work(name)
            return {}

        async def answered(results: Any) -> None:
            pass

        async def run() -> None:
            await call_driver(self.parts, "prepare", call, [claim], answered)

        return await self.parts.order.run([claim_key(claims[0])], run)


def _hardware(
    keys: Collection[str],
) -> tuple[list[tuple[str, str]], dict[str, dict[str, dict[str, str]]]]:
    """Return devices, and counter sets by pool."""
    devices: list[tuple[str, str]] = []
    sets: dict[str, dict[str, dict[str, str]]] = {}
    for key in keys:
        kind, *names = key.split("/")
        if kind == "device":
            devices.append((names[0], names[1]))
        elif kind == "set":
            sets.setdefault(names[0], {})[names[1]] = {"memory": "1Gi"}
    return devices, sets


def leaves(case: Any) -> bool:
    return any(step.startswith("leave") for step in case["steps"])


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, case, id=f"{kind.__name__}: {case['name']}")
        for kind in (DriverProcess, NodePlugin)
        for case in CASES
        if not (kind is NodePlugin and leaves(case))
    ],
)
async def test_the_order_of_calls(kind, case):
    calls = kind()
    for step in case["steps"]:
        await calls.play(step)
    results = await asyncio.gather(*calls.callers.values(), return_exceptions=True)
    failed = [f"fail {name}" in case["steps"] for name in calls.callers]
    left = [f"leave {name}" in case["steps"] for name in calls.callers]
    assert [isinstance(each, RuntimeError) for each in results] == [
        fails and not leaves for fails, leaves in zip(failed, left, strict=True)
    ]


async def test_a_call_that_is_canceled_when_its_turn_has_just_come_lets_the_next_one_run():
    order = Order()
    first, last = Place(keys=["k"]), Place(keys=["k"])
    order.enter(first)
    waiting = asyncio.create_task(order.run(["k"], asyncio.Event().wait))
    await asyncio.sleep(0)
    order.enter(last)
    order.leave(first)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert last.behind == 0


@pytest.mark.looptime
async def test_a_call_ends_with_its_time_and_with_the_process_and_then_the_next_one_runs(looptime):
    calls = DriverProcess()
    for name in "abc":
        calls.start(name, ["claim/1"])
    with pytest.raises(TimeoutError):
        await calls.callers["a"]
    assert (looptime, calls.running) == (LIMIT_SECONDS, {"b"})
    await calls.queue.drain(timeout_seconds=10)
    await asyncio.wait(calls.callers.values())
    assert (looptime, calls.running) == (LIMIT_SECONDS + 10, set())
