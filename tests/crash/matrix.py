"""
The crash matrix: each scenario runs once to find its steps, and once more for each step, at which
it is killed.

After the kill the plugin starts again, the kubelet calls or not, and the state is compared with a
small model: exactly the claims that must be prepared at that moment. At the end nothing is
prepared, and another pod gets all devices. A run fails if it does not reach its step, if a call
does not succeed in the end, or if the node holds other devices than expected.

It must not depend on the content of scenarios, or on the formats of drivers and files.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import traceback
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from tests.crash.drivers import DEVICES
from tests.crash.forkserver import ForkServer
from tests.crash.node import Claims, Node, differences, irreparable
from tests.crash.scenarios import RIVAL, Scenario, Variant, settled
from tests.crash.stage import (
    PODS,
    Operation,
    PluginDiedError,
    Stage,
    new_folder,
    new_stage,
)
from tests.crash.steps import ENDPOINTS, FRONT_DOOR, NODE_LABELS

OVER = "over: the reply was received"
"""The last point of each scenario, where the test kills the process: the kubelet has its reply."""

NEXT: Claims = {"uid-next": DEVICES}
"""Another pod's claim, which gets all devices at the end."""

RUN_SECONDS = 60.0
ATTEMPTS = 10
"""Runs for a point that is not reached. Only a point that depends on timing needs more than one."""

UNREACHED_SECONDS = 1.0
"""The time that a process has to reach its step after the scenario has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A step of a scenario at which the process is killed."""

    scenario: str
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The failure of one run."""

    point: Point
    variant: Variant
    kind: str
    """``leak``, ``unreached`` or ``error``."""

    text: str
    log: str


class LeakError(Exception):
    """The state of the node differs from the model."""


class NotReachedError(Exception):
    """The process did not reach the step of its kill."""


class Matrix:
    """Runs scenarios on one fork server, a few at a time."""

    def __init__(self, server: ForkServer, *, jobs: int) -> None:
        self._server = server
        self._slots = asyncio.Semaphore(jobs)
        self.runs = 0

    # ------------------------------------------------------------ start of a scenario

    @contextlib.asynccontextmanager
    async def prepared_node(self, scenario: Scenario) -> AsyncIterator[Node]:
        """Make the initial node of all runs of a scenario."""
        folder = new_folder()
        try:
            empty = Node(folder / "n", scenario.driver, settings=scenario.settings)
            empty.root.mkdir()
            empty.make()
            async with self._slots, new_stage(self._server, empty) as stage:
                await self._run_before(stage, scenario)
                node = stage.node.copy_to(folder / "m")
            yield node
        finally:
            shutil.rmtree(folder)

    async def _run_before(self, stage: Stage, scenario: Scenario) -> None:
        if scenario.before is not None:
            stage.allocate(scenario.before)
            await stage.start(pod=PODS[0])
            await stage.call_until_done("prepare", scenario.before)
            await stage.kill()
        if scenario.cut is not None:
            operation, label = scenario.cut
            stage.allocate(scenario.pod)
            await stage.start(pod=PODS[0], kill_at=label)
            await stage.connect()
            await stage.settle()
            stage.arm()
            with contextlib.suppress(PluginDiedError):
                await stage.call(operation, scenario.pod)
            if not await stage.killed(timeout_seconds=UNREACHED_SECONDS):
                raise NotReachedError(f"the first kill, at {label!r}, was not reached")
            await stage.kill()
        for device in scenario.broken:
            (stage.node.hardware.broken / device).touch()
        if scenario.change is not None:
            scenario.change(stage.node)

    # ------------------------------------------------------------ one run

    async def find_points(self, scenario: Scenario, node: Node) -> list[Point]:
        """
        Run a scenario to its end, and return its steps.

        The scenario runs twice, and only steps of both runs count. The number of transactions that
        the claims of a batch share depends on timing, and is higher on a busy machine.
        """
        first, second = [await self._labels(scenario, node) for _ in range(2)]
        labels = [label for label in first if label in second]
        kinds = (
            (scenario.front_door, FRONT_DOOR),
            (scenario.endpoints, ENDPOINTS),
            (scenario.at_start, NODE_LABELS),
        )
        for wanted, pattern in kinds:
            if not wanted:
                labels = [label for label in labels if not pattern.fullmatch(label)]
        return [Point(scenario=scenario.name, label=label) for label in (*labels, OVER)]

    async def _labels(self, scenario: Scenario, node: Node) -> list[str]:
        async with self._slots, new_stage(self._server, node) as stage:
            await self._begin(stage, scenario, kill_at=None)
            await scenario.act(stage, scenario)
            stage.arm(on=False)
            return list(stage.step_labels())

    async def run(
        self, scenario: Scenario, node: Node, point: Point, variant: Variant, *, pod: str
    ) -> Failure | None:
        """
        Kill at a point, and run the steps after it.

        A point that is not reached is tried again. Timing decides which claims of a batch share a
        transaction, so the last of several may be missing from a run.
        """
        for _ in range(ATTEMPTS):
            failure = await self._run(scenario, node, point, variant, pod=pod)
            if failure is None or failure.kind != "unreached":
                break
        return failure

    async def _run(
        self, scenario: Scenario, node: Node, point: Point, variant: Variant, *, pod: str
    ) -> Failure | None:
        async with self._slots, new_stage(self._server, node) as stage:
            self.runs += 1
            kind = "error"
            try:
                async with asyncio.timeout(RUN_SECONDS):
                    await self._die(stage, scenario, point)
                    await run_aftermath(stage, scenario, variant, pod=pod)
                return None
            except LeakError as error:
                kind, text = "leak", str(error)
            except NotReachedError as error:
                kind, text = "unreached", str(error)
            except Exception as error:
                text = "".join(traceback.format_exception_only(error)).strip()
            log = stage.log.read_text() if stage.log.exists() else ""
            return Failure(point=point, variant=variant, kind=kind, text=text, log=log)

    async def _begin(self, stage: Stage, scenario: Scenario, *, kill_at: str | None) -> None:
        if scenario.exists:
            stage.allocate(scenario.pod)
        if scenario.listed is not None:
            await stage.list_claims(scenario.listed)
        await stage.start(
            pod=PODS[0],
            armed=scenario.at_start,
            kill_at=kill_at,
            keeps=scenario.spare == "waits",
        )
        if scenario.spare == "waits":
            await stage.connect()
            await stage.start_spare(pod=PODS[1])

    async def _die(self, stage: Stage, scenario: Scenario, point: Point) -> None:
        kill_at = None if point.label == OVER else point.label
        await self._begin(stage, scenario, kill_at=kill_at)
        try:
            await scenario.act(stage, scenario)
            if kill_at and not await stage.killed(timeout_seconds=UNREACHED_SECONDS):
                raise NotReachedError(f"it was never reached; the steps were {stage.step_labels()}")
        except PluginDiedError as error:
            if not await stage.killed(timeout_seconds=0):
                raise RuntimeError(f"before its step: {error}") from error
        await stage.kill()
        if scenario.orderly:
            held = await asyncio.to_thread(stage.node.look)
            if found := irreparable(held, untouched=scenario.untouched):
                raise LeakError(f"at the kill: {'; '.join(found)}")
        if scenario.after is not None:
            scenario.after(stage.node)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a scenario."""

    scenario: str
    points: Sequence[Point]
    failures: Sequence[Failure]
    seconds: float


async def run_scenario(
    matrix: Matrix, scenario: Scenario, *, wanted: str | None, variant: Variant | None
) -> Result:
    """Run a scenario at all of its points, or at those whose label contains the wanted text."""
    began = asyncio.get_running_loop().time()
    points: list[Point] = []
    try:
        async with matrix.prepared_node(scenario) as node:
            points = [
                point
                for point in await matrix.find_points(scenario, node)
                if wanted is None or wanted in point.label
            ]
            outcomes = await asyncio.gather(
                *(
                    matrix.run(scenario, node, point, chosen, pod=PODS[(number + place) % 2])
                    for number, point in enumerate(points)
                    for place, chosen in enumerate(
                        [variant] if variant else scenario.chosen(number)
                    )
                )
            )
        failures = [failure for failure in outcomes if failure is not None]
    except Exception as error:
        nowhere = Point(scenario=scenario.name, label="before the first kill")
        points = [*points, nowhere]
        text = "".join(traceback.format_exception_only(error)).strip()
        failures = [Failure(point=nowhere, variant="nobody", kind="error", text=text, log="")]
    seconds = asyncio.get_running_loop().time() - began
    return Result(scenario=scenario.name, points=points, failures=failures, seconds=seconds)


# -------------------------------------------------------------------- after the kill


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
