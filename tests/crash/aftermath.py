"""
The steps after a kill: the plugin starts again, the kubelet calls or not, and the state is
compared.

The comparison uses a small model: exactly the claims that must be prepared at that moment. At the
end nothing is prepared, and another pod gets all devices.

It must not know steps, or the selection of runs.
"""

from __future__ import annotations

import asyncio

from tests.crash.drivers import DEVICES
from tests.crash.node import Claims, differences
from tests.crash.scenarios import RIVAL, Scenario, Variant, settled
from tests.crash.stage import Operation, Stage

NEXT: Claims = {"uid-next": DEVICES}


class LeakError(Exception):
    """The state of the node differs from the model."""


async def run_aftermath(stage: Stage, scenario: Scenario, variant: Variant, *, pod: str) -> None:
    """Start the plugin again, and continue to the end. Raises :class:`LeakError`, or the
    failure."""
    stage.allocate(RIVAL | NEXT)
    if not scenario.spare:
        await stage.start(pod=pod)
    match variant:
        case "prepare":
            await _prepare_again(stage, scenario)
        case "nobody":
            await _without_calls(stage, scenario)
    await stage.call_until_done("unprepare", scenario.pod)
    await compare(stage, scenario, {}, when="after the unprepare")
    _repair(stage, scenario)
    await stage.call_until_done("prepare", NEXT)
    await compare(stage, scenario, NEXT, when="with the devices given to another pod")
    await stage.call_until_done("unprepare", NEXT)
    await compare(stage, scenario, {}, when="after the other pod's unprepare")


async def _prepare_again(stage: Stage, scenario: Scenario) -> None:
    if scenario.broken:
        await stage.call("prepare", scenario.pod)
        whole = {
            uid: devices
            for uid, devices in scenario.pod.items()
            if not set(scenario.broken) & set(devices)
        }
        await compare(stage, scenario, whole, when="with a broken device")
        _repair(stage, scenario)
    await stage.call_until_done("prepare", scenario.pod)
    await compare(stage, scenario, scenario.pod, when="after the prepare")
    for uid, devices in scenario.pod.items():
        kind = f"{scenario.driver.name}/claim"
        expected = [(device, [f"{kind}={uid}-{i}"]) for i, device in enumerate(devices)]
        if stage.answers[uid] != expected:
            raise LeakError(f"the kubelet got {stage.answers[uid]} for {uid}, not {expected}")
    await _refused(stage, "prepare", RIVAL)
    await compare(stage, scenario, scenario.pod, when="after another claim asked for its devices")


def _repair(stage: Stage, scenario: Scenario) -> None:
    for device in scenario.broken:
        (stage.node.hardware.broken / device).unlink(missing_ok=True)


async def _without_calls(stage: Stage, scenario: Scenario) -> None:
    await stage.connect()
    if not scenario.spare:
        await stage.active()  # a database in quarantine is in place again
    try:
        await settled(stage, scenario)
    except TimeoutError as error:
        raise LeakError(f"the plugin did not repair the state without a call: {error}") from None


async def _refused(stage: Stage, operation: Operation, claims: Claims) -> None:
    for uid, error in (await stage.call(operation, claims)).items():
        if not error:
            raise LeakError(f"claim {uid} got devices that another claim holds")


async def compare(stage: Stage, scenario: Scenario, expected: Claims, *, when: str) -> None:
    """Raise :class:`LeakError` unless exactly these claims are prepared."""
    held = await asyncio.to_thread(stage.node.look)
    if found := differences(held, expected, driver=scenario.driver):
        raise LeakError(f"{when}: {'; '.join(found)}")
