"""
What is played: what the node holds before, what happens while steps count, what must come of it.

Each scenario ends with one pod's claims. After a kill the plugin is started again, and then the
kubelet asks for the pod, or for its end, or nobody asks at all (:mod:`.aftermath`).

It must not know how processes are started and killed.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from drakit_nodeplugin.claims.checkpoint.records import DamagedRowError
from tests.crash.drivers import WHOLE, Marking, Plain
from tests.crash.mishaps import (
    LOST_ENDPOINT,
    add_endpoint,
    add_orphan,
    bring_back,
    damage_file,
    damage_row,
    reboot,
    remove_checkpoint,
    remove_files,
    send_away,
    slow_down,
    upgrade,
)
from tests.crash.node import Claims, DriverClass, Node, differences
from tests.crash.stage import Operation, Stage

Variant = Literal["prepare", "unprepare", "nobody"]
"""What comes after the restart: the kubelet's call, or none."""

POD: Claims = {"uid-a": ("dev-1", "dev-2"), "uid-b": ("dev-3",)}
RIVAL: Claims = {"uid-rival": ("dev-1", "dev-2", "dev-3"), "uid-whole": (WHOLE,)}
"""Claims of another pod: for held devices, and for the whole device that contains them."""

ALL: tuple[Variant, ...] = ("prepare", "unprepare", "nobody")

STALE = ("period", "gracePeriod", "unconfirmedGracePeriod")
"""Settings that say when stale claims are collected, in seconds."""

GRACES = ("startGracePeriod", "endpointStopGracePeriod")
"""Settings that say how long an endpoint that is away is waited for, in seconds."""

Act = Callable[[Stage, "Scenario"], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One story that is cut at each of its steps."""

    name: str
    act: Act
    """What happens while steps count."""

    driver: DriverClass = Marking
    pod: Claims = field(default_factory=lambda: POD)
    """The claims as they are allocated while steps count, and after."""

    before: Claims | None = None
    """What was prepared before; None if nothing was."""

    cut: tuple[Operation, str] | None = None
    """A first kill: in this call, at this step. What it left is what the node begins with."""

    change: Callable[[Node], None] | None = None
    """What happens to the node's directories while no plugin runs."""

    at_start: bool = False
    """Whether the steps of the start itself count."""

    front_door: bool = False
    """Whether steps of sockets and locks count: they are the same in every start."""

    endpoints: bool = False
    """Whether transactions of endpoints count: they come when the driver has something to tell, and
    not when the kubelet calls."""

    broken: Collection[str] = ()
    """Devices whose prepare fails until they are mended."""

    untouched: Collection[str] = ()
    """Claims of containers that run on: they must stay prepared at every moment."""

    orderly: bool = True
    """Whether marks and files have a row at every moment. Not while the checkpoint is damaged."""

    after: Callable[[Node], None] | None = None
    """What happens to the node's directories after the kill."""

    gone: Collection[str] = ()
    """Endpoints whose removal is due, and finished in the end: they are not stored any more."""

    left: Claims | None = None
    """What a node that nobody asks ends with; None if that depends on the step."""

    exists: bool = True
    """Whether the API server has the pod's claims."""

    listed: Claims | None = None
    """What the kubelet's podresources names; None if they cannot be read."""

    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of the plugin, beside those of the directories."""

    spare: bool = False
    """Whether a second instance runs from the beginning, as in a rolling update. It takes over."""

    settle_seconds: float = 12.0
    """Within which a node that nobody asks is in order: the plugin looks for unfinished work every
    5 s."""

    variants: tuple[Variant, ...] = ALL
    """What comes after, in turn."""

    plays: int = 3
    """How many of the variants are played at each point, unless all are asked for."""

    def chosen(self, number: int) -> list[Variant]:
        """Which variants are played at the point of this number."""
        count = min(self.plays, len(self.variants))
        first = number * count
        return [self.variants[(first + i) % len(self.variants)] for i in range(count)]


# -------------------------------------------------------------------- what happens


def calling(operation: Operation) -> Act:
    """The kubelet calls, once."""

    async def act(stage: Stage, scenario: Scenario) -> None:
        await stage.connect()
        stage.arm()
        await stage.call(operation, scenario.pod)

    return act


async def ask_too_much(stage: Stage, scenario: Scenario) -> None:
    """Another pod's claims want held hardware, and some of the hardware of this call."""
    stage.allocate(RIVAL)
    await stage.connect()
    stage.arm()
    new = scenario.pod.keys() - (scenario.before or {}).keys()
    await stage.call("prepare", [*new, *RIVAL])


async def start_alone(stage: Stage, scenario: Scenario) -> None:
    """The plugin starts, and nobody calls until all is in order."""
    await stage.connect()
    await settled(stage, scenario)


async def wait_alone(stage: Stage, scenario: Scenario) -> None:
    """The plugin runs, and nobody calls until all is in order."""
    await stage.connect()
    stage.arm()
    await settled(stage, scenario)


async def lose_a_file(stage: Stage, scenario: Scenario) -> None:
    """A CDI file is removed while the plugin runs."""
    await stage.connect()
    stage.arm()
    remove_files(stage.node)
    await settled(stage, scenario)


async def lose_checkpoint(stage: Stage, scenario: Scenario) -> None:
    """The checkpoint is removed while the plugin runs; then the kubelet calls."""
    await stage.connect()
    stage.arm()
    remove_checkpoint(stage.node)
    await stage.call_until_done("prepare", scenario.pod)
    await settled(stage, scenario)


async def settled(stage: Stage, scenario: Scenario) -> None:
    """Wait until what is held is consistent; raise TimeoutError with what is not."""
    until = asyncio.get_running_loop().time() + scenario.settle_seconds
    while unsettled := await asyncio.to_thread(disorder, stage.node, scenario):
        stage.died()
        if asyncio.get_running_loop().time() > until:
            raise TimeoutError("; ".join(unsettled))
        await asyncio.sleep(0.02)


def disorder(node: Node, scenario: Scenario) -> list[str]:
    """Say what a node that nobody asks may not hold on to."""
    try:
        held = node.look()
    except (sqlite3.Error, DamagedRowError) as error:
        return [f"the checkpoint cannot be read: {error}"]
    lost = [uid for uid in scenario.untouched if uid not in held.prepared]
    left = held.prepared if scenario.left is None else scenario.left
    return [
        *(f"claim {uid} is in use, and not prepared" for uid in lost),
        *(f"endpoint {name} is still stored" for name in scenario.gone if name in held.endpoints),
        *differences(held, left, driver=scenario.driver),
    ]


# -------------------------------------------------------------------- all of them


def damaged(name: str, damage: Callable[[Node], None]) -> Scenario:
    """The checkpoint is damaged, while containers use the claims, which the kubelet tells."""
    return Scenario(
        name=f"damaged-{name}",
        before=POD,
        untouched=POD.keys(),
        left=POD,
        listed=POD,
        change=damage,
        at_start=True,
        orderly=False,
        act=start_alone,
        plays=2,
    )


def _of_both(driver: DriverClass) -> list[Scenario]:
    """What a driver with side effects and one without have in common."""
    former: Claims = {"uid-a": ("dev-2", "dev-4"), "uid-b": ("dev-3",)}
    whole: Claims = {"uid-a": (WHOLE,)}
    prepare, unprepare = calling("prepare"), calling("unprepare")
    common = [
        Scenario(name="prepare", act=prepare),
        Scenario(name="repeat", before=POD, untouched=POD.keys(), left=POD, act=prepare),
        Scenario(name="unprepare", before=POD, act=unprepare),
        Scenario(name="rollback", broken=("dev-2",), act=prepare, plays=2),
        Scenario(name="reallocation", before=former, act=prepare, plays=2),
        # The other claim may be refused once: the first one still has the whole device.
        Scenario(name="parts-of-whole", before=whole, act=prepare, plays=2),
        Scenario(
            name="reboot",
            before=POD,
            change=reboot,
            at_start=True,
            act=prepare,
            variants=("prepare", "unprepare"),
        ),
        # Of its file the plugin takes notice within a second, so that each run takes longer.
        Scenario(
            name="lost-file",
            before=POD,
            untouched=POD.keys(),
            left=POD,
            act=lose_a_file,
            plays=1,
        ),
        damaged("file", damage_file),
    ]
    if driver is Marking:
        return common
    return [
        replace(scenario, name=f"plain-{scenario.name}", driver=driver, plays=1)
        for scenario in common
    ]


def _recoveries() -> list[Scenario]:
    """A second kill, in the start after a first one."""
    cuts: Mapping[str, tuple[Operation, str]] = {
        "preparing-begun": ("prepare", "sql after COMMIT"),
        "preparing-half": ("prepare", "driver prepare uid-a dev-2: before"),
        "preparing-done": ("prepare", "driver prepare uid-b dev-3: after"),
        "prepared-no-file": ("prepare", "sql after COMMIT #2"),
        "unpreparing-begun": ("unprepare", "sql after COMMIT"),
        "unpreparing-half": ("unprepare", "driver unprepare uid-a dev-2: before"),
        "unpreparing-done": ("unprepare", "sql BEGIN IMMEDIATE #2"),
    }
    return [
        Scenario(
            name=f"recovery-{name}",
            before=POD if cut[0] == "unprepare" else None,
            left=POD if name == "prepared-no-file" else {},
            cut=cut,
            at_start=True,
            act=start_alone,
            variants=("nobody", "prepare", "nobody", "unprepare"),
            plays=2,
        )
        for name, cut in cuts.items()
    ]


def _others() -> list[Scenario]:
    return [
        Scenario(
            name="first-start",
            left={},
            at_start=True,
            front_door=True,
            endpoints=True,
            act=start_alone,
            plays=2,
        ),
        Scenario(
            name="restart-without-files",
            before=POD,
            untouched=POD.keys(),
            left=POD,
            change=remove_files,
            at_start=True,
            front_door=True,
            act=start_alone,
            plays=2,
        ),
        Scenario(name="prepare-apart", change=slow_down, act=calling("prepare"), plays=2),
        Scenario(
            name="unprepare-apart",
            before=POD,
            change=slow_down,
            act=calling("unprepare"),
            plays=2,
        ),
        Scenario(
            name="unprepare-away",
            before=POD,
            change=send_away,
            act=calling("unprepare"),
            after=bring_back,
        ),
        Scenario(
            name="refused",
            before={"uid-a": POD["uid-a"]},
            untouched={"uid-a"},
            act=ask_too_much,
        ),
        *(
            Scenario(
                name=f"handover-{operation}",
                before=POD if operation == "unprepare" else None,
                act=calling(operation),
                spare=True,
                variants=("prepare", "unprepare"),
            )
            for operation in ("prepare", "unprepare")
        ),
        Scenario(
            name="endpoint-removed",
            before=POD,
            untouched=POD.keys(),
            left=POD,
            gone={LOST_ENDPOINT},
            change=add_endpoint,
            settings={"devices": dict.fromkeys(GRACES, 0.2)},
            at_start=True,
            endpoints=True,
            act=start_alone,
            variants=("nobody", "prepare"),
            plays=2,
        ),
        Scenario(
            name="later-version",
            before=POD,
            untouched=POD.keys(),
            left=POD,
            change=upgrade,
            at_start=True,
            act=start_alone,
            plays=2,
        ),
        damaged("row", damage_row),
        damaged("removed", remove_checkpoint),
        replace(
            damaged("removed-in-use", remove_checkpoint),
            change=None,
            at_start=False,
            act=lose_checkpoint,
        ),
        Scenario(
            name="orphan",
            before=POD,
            untouched=POD.keys(),
            left=POD,
            listed={},
            change=add_orphan,
            settings={"staleClaims": dict.fromkeys(STALE, 0.1)},
            at_start=True,
            orderly=False,
            act=start_alone,
            variants=("nobody",),
            plays=1,
        ),
        Scenario(
            name="stale",
            before=POD,
            left={},
            listed={},
            exists=False,
            settings={"staleClaims": dict.fromkeys(STALE, 0.1)},
            act=wait_alone,
            variants=("nobody", "unprepare"),
            plays=1,
        ),
    ]


def all_scenarios() -> list[Scenario]:
    return [*_of_both(Marking), *_of_both(Plain), *_recoveries(), *_others()]
