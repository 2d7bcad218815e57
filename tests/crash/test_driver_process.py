"""A driver in a process of its own: whichever process is killed at whichever step of a call, the
kubelet's next calls lead to the same state."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import pytest

from drakit.testing.conformance.facts import RuleFailedError
from drakit.testing.conformance.kit import Kit, open_kit
from drakit.testing.conformance.programs import python_path
from drakit.testing.conformance.targets import BackendTarget
from tests.crash.apart import NAME, Stop
from tests.crash.drivers import Hardware

pytestmark = pytest.mark.timeout(120)

DEVICES = {"a": ("dev-1", "dev-2"), "b": ("dev-3",)}
STEPS = [
    f"{call} {device} {where}"
    for call in ("prepare", "unprepare")
    for device in ("dev-1", "dev-3")
    for where in ("begins", "ends")
]


def set_up(root) -> None:
    Hardware(root / "hardware").make()
    (root / "apart.yaml").write_text(f"directory: {root}/hardware\n")


TARGET = BackendTarget(
    line=f"PYTHONPATH={shlex.quote(python_path())} exec {sys.executable} -m drakit_driver "
    "--driver tests.crash.apart:Apart --directory {directory} --config {root}/apart.yaml "
    "--node-name node-1",
    entry={"driver": NAME, "env": ["DEV_*"]},
    setup=set_up,
)


class World:
    """A node with the driver, and two claims of one pod."""

    def __init__(self, kit: Kit, claims: Mapping[str, tuple[str, ...]]) -> None:
        self.kit = kit
        self.hardware = Hardware(kit.root / "hardware")
        self.stop = Stop(kit.root / "hardware")
        self._devices = claims

    async def begin(self) -> None:
        published = {device.name: device for device in await self.kit.devices()}
        self.claims = [
            self.kit.claim(*(published[name] for name in names)) for names in self._devices.values()
        ]

    async def call(self, operation: str) -> bool:
        """Make one call of the kubelet; return whether all claims succeeded."""
        method: Callable[..., Awaitable[Mapping[str, object]]] = getattr(self.kit, operation)
        try:
            results = await method(*self.claims, timeout_seconds=20)
        except RuleFailedError:  # the node plugin was killed
            return False
        return not any(getattr(each, "error", each) for each in results.values())

    async def succeed(self, operation: str) -> None:
        """Repeat a call as the kubelet does, and check what it leaves."""
        async with asyncio.timeout(40):
            while not await self.call(operation):
                await asyncio.sleep(0.2)
        await self.check(prepared=operation == "prepare")

    async def restart_plugin_in(self, operation: str) -> None:
        """Kill the node plugin in a call, which the driver ends while the next one starts."""
        calling = asyncio.create_task(self.call(operation))
        await self.until_reached()
        await self.kit.kill()
        await calling
        starting = asyncio.create_task(self.kit.start())
        # The next node plugin may call for the same claims, and must wait for the driver.
        await asyncio.sleep(1)
        self.stop.go_on()
        await starting

    async def check(self, *, prepared: bool) -> None:
        """Check marks and CDI files. If the driver is unavailable, an unprepare succeeds, and is
        finished later."""
        expected = {
            device: claim.uid
            for claim, names in zip(self.claims, self._devices.values(), strict=True)
            for device in names
        }
        async with asyncio.timeout(30):
            while self.marks() != (expected if prepared else {}):
                await asyncio.sleep(0.1)
        for claim, names in zip(self.claims, self._devices.values(), strict=True):
            edits = self.kit.edits(claim)
            found = sorted(edits.get("env", ()))
            wanted = [f"{name.upper().replace('-', '_')}={name}" for name in names]
            assert found == (wanted if prepared else [])
        assert not self.hardware.wrong.exists(), self.hardware.wrong.read_text()

    def marks(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.hardware.marks.iterdir()}

    async def until_reached(self) -> None:
        async with asyncio.timeout(30):
            while not self.stop.reached:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def started() -> AsyncIterator[World]:
    async with open_kit(TARGET) as kit:
        await kit.start()
        world = World(kit, DEVICES)
        await world.begin()
        yield world


@pytest.mark.slow
async def test_the_driver_is_killed_at_each_step():
    async with started() as world:
        for step in STEPS:
            world.stop.at(step, kill=True)
            await world.succeed("prepare")
            await world.succeed("unprepare")
            assert world.stop.reached, f"{step} was not reached"


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
async def test_the_node_plugin_is_killed_while_the_driver_works(step):
    async with started() as world:
        if step.startswith("unprepare"):
            await world.succeed("prepare")
        world.stop.at(step, kill=False)
        await world.restart_plugin_in(step.partition(" ")[0])
        await world.succeed("prepare")
        await world.succeed("unprepare")


async def test_the_driver_is_killed_in_one_call_and_the_node_plugin_in_the_next():
    async with started() as world:
        world.stop.at("prepare dev-1 ends", kill=True)
        assert not await world.call("prepare")
        await world.succeed("prepare")
        world.stop.at("unprepare dev-3 begins", kill=False)
        await world.restart_plugin_in("unprepare")
        await world.succeed("unprepare")
