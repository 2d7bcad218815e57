"""Claims with the largest opaque parameters that an API server accepts: only they fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from drakit_nodeplugin.config import OpaqueParameters
from tests.fakes.kubelet import FakeKubelet, reference
from tests.integration.test_node_plugin import CLAIMS, DRIVER, NODE, Rig, rig

__all__ = ("rig",)

MAX_RAW = 10 * 1024
"""Bytes of one opaque config, of which an allocation holds 64 (the API server's limits)."""

MAX_CONFIGS = 64
LIMITS = OpaqueParameters()
LIMIT_MIB = 192
"""The chart's memory limit."""

SHAPES = {
    "lists": {"a": [[]] * ((MAX_RAW - 9) // 3)},
    "keys": {f"{number:x}": {} for number in range(1000)},
    "text": {"a": "x" * (MAX_RAW - 9)},
}


def store(rig: Rig, uid: str, devices: int, parameters: Sequence[Mapping[str, Any]]) -> None:
    """Store a claim whose configs are for all of its devices."""
    for each in parameters:
        assert len(json.dumps(each, separators=(",", ":"))) <= MAX_RAW
    results = [
        {"driver": DRIVER, "pool": NODE, "request": "main", "device": f"{uid}-{number}"}
        for number in range(devices)
    ]
    configs = [
        {"source": "FromClaim", "opaque": {"driver": DRIVER, "parameters": each}}
        for each in parameters
    ]
    allocation = {"devices": {"results": results, "config": configs}}
    body = {"metadata": {"uid": uid}, "status": {"allocation": allocation}}
    rig.api_server.store(f"{CLAIMS}/claim-{uid}", body)


def status_mib(pid: int, field: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) / 1024


@pytest.mark.parametrize("shape", SHAPES)
async def test_claims_with_as_many_parameters_as_the_api_server_takes_fail_alone(rig: Rig, shape):
    (rig.shelf / "atlas").touch()
    rig.allocate("uid-a", "atlas")
    bombs = [f"uid-bomb-{number}" for number in range(20)]
    for uid in bombs:
        store(rig, uid, 32, [SHAPES[shape]] * MAX_CONFIGS)
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        await rig.until(lambda: kubelet.sockets() and rig.published() == ["atlas"])
        dra = await kubelet.register()
        answers = await kubelet.prepare(dra, *map(reference, ["uid-a", *bombs]))
        peak = status_mib(process.pid, "VmHWM")
    assert answers.pop("uid-a").error == ""
    assert {"nodeplugin.opaqueParameters" in answer.error for answer in answers.values()} == {True}
    assert peak < 120


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shape", ["lists", "text"])
async def test_a_claim_just_within_the_limits_for_each_pod_of_a_node_fits(rig: Rig, shape):
    """All at once, and again from the checkpoint after the plugin was killed."""
    devices = 8
    uids = [f"uid-{number}" for number in range(110)]
    if shape == "lists":
        parameters = [{"a": [[]] * (LIMITS.max_values // devices // 4 - 3)}] * 4
    else:
        parameters = [{"a": "x" * (LIMITS.max_bytes // devices // 16 - 8)}] * 16
    for uid in uids:
        store(rig, uid, devices, parameters)
        for number in range(devices):
            (rig.shelf / f"{uid}-{number}").touch()
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        await rig.until(lambda: kubelet.sockets() and len(rig.published()) == devices * len(uids))
        dra = await kubelet.register()
        calls = [kubelet.prepare(dra, reference(uid)) for uid in uids]
        answers = {uid: a for each in await asyncio.gather(*calls) for uid, a in each.items()}
        peak = status_mib(process.pid, "VmHWM")
        process.kill()
        await process.communicate()
        (stale,) = kubelet.sockets()
    assert {answer.error for answer in answers.values()} == {""}
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        # One listing: between two, the stale socket may vanish before the new one appears.
        await rig.until(lambda: kubelet.sockets() not in ([], [stale]))
        again = status_mib(process.pid, "VmHWM")
        dra = await kubelet.register()
        assert set((await kubelet.unprepare(dra, *map(reference, uids))).values()) == {""}
        undone = status_mib(process.pid, "VmHWM")
    assert max(peak, again, undone) < LIMIT_MIB
