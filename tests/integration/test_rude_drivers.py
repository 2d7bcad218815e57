"""
A driver that misbehaves and one that behaves, in one process: only the calls of the first one fail.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from tests.fakes.kubelet import FakeKubelet, reference
from tests.integration.test_node_plugin import DRIVER, NODE, Rig, rig, stop  # noqa: F401

RUDE = "rude.example.com"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"

REASONS = {
    "end": "SystemExit",
    "raise": "ValueError: no manners",
    "flood": "within a second",
    "nonsense": "not a Device",
    "leak": "its stream ended",
}
"""The reported reason of the taints, by the driver's fault."""


class Neighbours:
    """The rig with two drivers: books that behave, and one that does what `word` says."""

    def __init__(self, rig: Rig) -> None:  # noqa: F811
        self.rig = rig
        self.manners = rig.root / "manners"
        self.manners.mkdir()
        rig.config["drivers"].append(
            {"driver": "tests.fakes.rude:Rude", "config": {"directory": str(self.manners)}}
        )

    def say(self, word: str) -> None:
        new = self.manners / "new"
        new.write_text(word)
        new.replace(self.manners / "word")

    def taints(self) -> set[str]:
        return {
            taint["key"]
            for body in self.rig.api_server.objects(SLICES)
            if body["spec"]["driver"] == RUDE
            for device in body["spec"]["devices"]
            for taint in device.get("taints", [])
        }

    async def sockets(self, kubelet: FakeKubelet) -> dict[str, tuple[Path, Path]]:
        """Registration and DRA sockets by driver, once both are registered."""
        await self.rig.until(lambda: len(kubelet.sockets()) == 2)
        found: dict[str, tuple[Path, Path]] = {}
        for path in kubelet.sockets():
            info = await kubelet.get_info(path)
            await kubelet.notify(path)
            found[info.name] = path, Path(info.endpoint)
        return found


@pytest.fixture
def neighbours(rig):  # noqa: F811
    return Neighbours(rig)


@pytest.mark.parametrize("word", ["block", "pools", *REASONS])
async def test_the_neighbour_of_a_driver_that_misbehaves_is_served(neighbours, word):
    rig = neighbours.rig  # noqa: F811
    (rig.shelf / "atlas").touch()
    rig.allocate("uid-a", "atlas")
    claim = reference("uid-a")
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        sockets = await neighbours.sockets(kubelet)
        await rig.until(lambda: set(rig.published()) == {"atlas", "boor"})

        neighbours.say(word)
        if word == "block":
            await asyncio.sleep(1)
        elif word == "pools":
            await rig.until(lambda: len(rig.published()) > 2)
        else:
            await rig.until(lambda: neighbours.taints() == {"drakit.dev/stopped"})
        for _ in range(5):
            answers = await kubelet.prepare(sockets[DRIVER][1], claim)
            assert answers["uid-a"].error == ""
            assert await kubelet.unprepare(sockets[DRIVER][1], claim) == {"uid-a": ""}
            for registration, _ in sockets.values():
                await kubelet.get_info(registration)  # within 1 s, or it raises

        if word in REASONS:
            rig.api_server.store(
                f"/apis/resource.k8s.io/v1/namespaces/lab/resourceclaims/claim-{word}",
                {"metadata": {"uid": word}, "status": {"allocation": boor()}},
            )
            refused = await kubelet.prepare(sockets[RUDE][1], reference(word))
            assert REASONS[word] in refused[word].error

        neighbours.say("behave")
        await rig.until(lambda: neighbours.taints() == set())
        process.terminate()
        _, errors = await process.communicate()
    lines = [json.loads(line) for line in errors.decode().splitlines() if line.startswith("{")]
    if word == "pools":
        assert 1 < len(rig.api_server.objects(SLICES)) <= 2 + 2 * 64, "those of before may be left"
        assert "beyond the limit of 64 pools" in errors.decode()
    if word == "leak":
        assert any("sleep" in str(line) for line in lines if "task" in line["msg"]), errors


async def test_the_watchdog_names_the_call_that_blocks(neighbours):
    rig = neighbours.rig  # noqa: F811
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        await neighbours.sockets(kubelet)
        await rig.until(lambda: rig.published() == ["boor"])
        neighbours.say("block")
        told = ""
        async with asyncio.timeout(10):
            while not re.search(r"Rude\.devices .*rude\.py", told):
                told = (await process.stderr.readline()).decode()
        assert RUDE in told
        neighbours.say("behave")
        process.terminate()
        await process.communicate()


async def test_the_process_ends_though_a_driver_has_left_a_thread(neighbours):
    rig = neighbours.rig  # noqa: F811
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        await neighbours.sockets(kubelet)
        neighbours.say("linger")
        await rig.until(lambda: (neighbours.manners / "lingers").exists())
        code, errors = await stop(process)
    assert code == 0, errors


def boor() -> dict:
    result = {"driver": RUDE, "pool": NODE, "request": "main", "device": "boor"}
    return {"devices": {"results": [result]}}
