"""
The scenarios: the state of the node before, the operation while steps count, and the expected
result.

Each scenario ends with one pod's claims. After a kill the plugin starts again. Then the kubelet
prepares or unprepares the claims, or does not call (:mod:`.matrix`). Before, the directories of the
node may change while no plugin runs: reboots, damage, loss, faulty hardware.

It must not depend on the start and the kill of processes.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from drakit_nodeplugin.state import rows
from drakit_nodeplugin.state.records import DamagedRowError, StoredEndpoint
from tests.crash.drivers import WHOLE, Marking, Plain
from tests.crash.node import NAME, Claims, DriverClass, Node, differences
from tests.crash.stage import PODS, Operation, Stage
from tests.fakes.checkpoints import as_successor

Variant = Literal["prepare", "unprepare", "nobody"]
"""The kubelet's call after the restart, if any."""

POD: Claims = {"uid-a": ("dev-1", "dev-2"), "uid-b": ("dev-3",)}
RIVAL: Claims = {"uid-rival": ("dev-1", "dev-2", "dev-3"), "uid-whole": (WHOLE,)}
"""Claims of another pod: for held devices, and for the whole device that contains them."""

ALL: tuple[Variant, ...] = ("prepare", "unprepare", "nobody")

LOST_ENDPOINT = "lamps"

STALE = ("period", "gracePeriod", "unconfirmedGracePeriod")
"""Settings of the collection of stale claims, in seconds."""

GRACES = ("startGracePeriod", "endpointStopGracePeriod")
"""Settings of the grace periods of endpoints, in seconds."""

SETTLED_SECONDS = 0.3

Act = Callable[[Stage, "Scenario"], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A sequence of operations that is interrupted at each of its steps."""

    name: str
    act: Act
    """The operations while steps count."""

    driver: DriverClass = Marking
    pod: Claims = field(default_factory=lambda: POD)
    """The claims as allocated while steps count, and afterwards."""

    before: Claims | None = None
    """The claims that were prepared before; None if there are none."""

    cut: tuple[Operation, str] | None = None
    """A first kill, in this call at this step. The node begins with the state that it leaves."""

    change: Callable[[Node], None] | None = None
    """The change to the node's directories while no plugin runs."""

    at_start: bool = False
    """Whether the steps of the start itself count."""

    front_door: bool = False
    """Whether steps of sockets and locks count. They are the same in every start."""

    renumbers: bool = False
    """Whether devices get other numbers, which must be in the CDI files at the end."""

    endpoints: bool = False
    """Whether transactions of endpoints count. They follow a report of the driver, not a call of
    the kubelet."""

    broken: Collection[str] = ()
    """Devices whose prepare fails until they are repaired."""

    untouched: Collection[str] = ()
    """Claims of containers that keep running. They must stay prepared at every moment."""

    orderly: bool = True
    """Whether marks and files have a row at every moment. They do not while the checkpoint is
    damaged."""

    after: Callable[[Node], None] | None = None
    """The change to the node's directories after the kill."""

    gone: Collection[str] = ()
    """Endpoints whose removal is due. At the end, they are no longer stored."""

    left: Claims | None = None
    """The final state of a node without calls; None if that depends on the step."""

    exists: bool = True
    """Whether the API server has the pod's claims."""

    listed: Claims | None = None
    """The claims in the kubelet's podresources API; None if it cannot be read."""

    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of the plugin, in addition to its directories."""

    spare: Literal["waits", "asks"] | None = None
    """Whether there is a second instance, as in a rolling update, which takes over. It waits from
    the start, and the first one is killed before it notices; or it asks while steps count."""

    settle_seconds: float = 12.0
    """The time in which a node without calls must be consistent. The plugin checks for unfinished
    work every 5 s."""

    variants: tuple[Variant, ...] = ALL
    """The variants after the restart, used in turn."""

    variants_per_point: int = 3
    """The number of variants that run at each point, unless the command names another one."""

    def chosen(self, number: int) -> list[Variant]:
        """Return the variants for the point with this number."""
        count = min(self.variants_per_point, len(self.variants))
        first = number * count
        return [self.variants[(first + i) % len(self.variants)] for i in range(count)]


# -------------------------------------------------------------------- changes to a node


def remove_files(node: Node) -> None:
    for path in node.cdi.glob("*.json"):
        path.unlink()


def reboot(node: Node) -> None:
    """Reboot the node: everything in memory is lost."""
    node.boot_id.write_text("boot-2\n")
    shutil.rmtree(node.cdi)
    for mark in node.hardware.marks.iterdir():
        mark.unlink()


def damage_row(node: Node) -> None:
    with closing(sqlite3.connect(node.checkpoint)) as database:
        (number,) = database.execute("SELECT id FROM claims WHERE uid = 'uid-a'").fetchone()
        database.execute("UPDATE bodies SET body = x'00' WHERE id = ?", (number,))
        database.commit()


def damage_file(node: Node) -> None:
    with closing(sqlite3.connect(node.checkpoint)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    node.checkpoint.write_text("not a database, but long enough to be taken for one" * 400)


def upgrade(node: Node) -> None:
    """Let a later, compatible version write the checkpoint, as before a rollback."""
    with closing(sqlite3.connect(node.checkpoint)) as database, database:
        as_successor(database)


def add_orphan(node: Node) -> None:
    """Add a CDI file of drakit for an unknown claim."""
    (path,) = node.cdi.glob("*uid-a.json")
    text = path.read_text().replace("uid-a", "uid-gone")
    path.with_name(path.name.replace("uid-a", "uid-gone")).write_text(text)


def add_endpoint(node: Node) -> None:
    """Add a stored endpoint that has been unavailable for a long time."""
    pools = {f"{NAME}/{LOST_ENDPOINT}": ("lamp-1",)}
    lost = StoredEndpoint(name=LOST_ENDPOINT, pools=pools, stopped_at=1.0)
    with closing(sqlite3.connect(node.checkpoint)) as database:
        rows.write_endpoints(database, [lost])
        database.commit()


SWAPPED = {"dev-1": 2, "dev-3": 0}
"""Devices of two claims of a pod, and the numbers that they get from each other."""


def swap_numbers(node: Node) -> None:
    """Let two devices of two claims return with each other's numbers."""
    node.hardware.renumber(SWAPPED)


def outdated_files(node: Node, files: Mapping[str, Any]) -> list[str]:
    """Return the renumbered devices whose CDI file has the old number."""
    found: list[str] = []
    for uid, spec in files.items():
        if not isinstance(spec, dict):
            continue  # reported as a difference
        nodes = [n for d in spec["devices"] for n in d["containerEdits"].get("deviceNodes", ())]
        for each in nodes:
            device = each["path"].removeprefix("/dev/")
            if each["minor"] != node.hardware.number(device):
                found.append(f"the CDI file of claim {uid} has number {each['minor']} of {device}")
    return found


def slow_down(node: Node) -> None:
    (node.hardware.slow / "dev-2").touch()


def remove_checkpoint(node: Node) -> None:
    for path in node.checkpoint.parent.glob(f"{node.checkpoint.name}*"):
        path.unlink()


def stop_hardware(node: Node) -> None:
    node.hardware.away.touch()


def start_hardware(node: Node) -> None:
    node.hardware.away.unlink()


# -------------------------------------------------------------------- operations


def calling(operation: Operation) -> Act:
    """Return an operation in which the kubelet calls once."""

    async def act(stage: Stage, scenario: Scenario) -> None:
        await stage.connect()
        await stage.active()
        stage.arm()
        await stage.call(operation, scenario.pod)

    return act


async def ask_too_much(stage: Stage, scenario: Scenario) -> None:
    """Prepare the claims together with another pod's claims for the same hardware."""
    stage.allocate(RIVAL)
    await stage.connect()
    await stage.active()
    stage.arm()
    new = scenario.pod.keys() - (scenario.before or {}).keys()
    await stage.call("prepare", [*new, *RIVAL])


async def start_alone(stage: Stage, scenario: Scenario) -> None:
    """Start the plugin, and make no call until the state is consistent."""
    await stage.connect()
    await stage.active()
    await settled(stage, scenario)


async def wait_alone(stage: Stage, scenario: Scenario) -> None:
    """Let the plugin run, and make no call until the state is consistent."""
    await stage.connect()
    await stage.active()
    stage.arm()
    await settled(stage, scenario)


async def hand_over(stage: Stage, scenario: Scenario) -> None:
    """Start a second instance, to which the first hands over its driver."""
    await stage.connect()
    await stage.active()
    stage.arm()
    await stage.start_spare(pod=PODS[1])
    await stage.handed_over()


async def lose_a_file(stage: Stage, scenario: Scenario) -> None:
    """Remove a CDI file while the plugin runs."""
    await stage.connect()
    await stage.active()
    stage.arm()
    remove_files(stage.node)
    await settled(stage, scenario)


async def swap(stage: Stage, scenario: Scenario) -> None:
    """Let devices of running containers return with each other's numbers."""
    await stage.connect()
    await stage.active()
    await asyncio.sleep(SETTLED_SECONDS)  # the driver has listed its devices
    stage.arm()
    swap_numbers(stage.node)
    await settled(stage, scenario)


async def lose_checkpoint(stage: Stage, scenario: Scenario) -> None:
    """Remove the checkpoint while the plugin runs; then the kubelet calls."""
    await stage.connect()
    await stage.active()
    stage.arm()
    remove_checkpoint(stage.node)
    await stage.call_until_done("prepare", scenario.pod)
    await settled(stage, scenario)


async def settled(stage: Stage, scenario: Scenario) -> None:
    """Wait until the state is consistent; raise TimeoutError with the problems."""
    until = asyncio.get_running_loop().time() + scenario.settle_seconds
    while unsettled := await asyncio.to_thread(disorder, stage.node, scenario):
        stage.died()
        if asyncio.get_running_loop().time() > until:
            raise TimeoutError("; ".join(unsettled))
        await asyncio.sleep(0.02)


def disorder(node: Node, scenario: Scenario) -> list[str]:
    """Return the problems of a node without calls."""
    try:
        held = node.look()
    except (sqlite3.Error, DamagedRowError) as error:
        return [f"the checkpoint cannot be read: {error}"]
    if scenario.renumbers and (outdated := outdated_files(node, held.files)):
        return outdated
    lost = [uid for uid in scenario.untouched if uid not in held.prepared]
    left = held.prepared if scenario.left is None else scenario.left
    return [
        *(f"claim {uid} is in use, but not prepared" for uid in lost),
        *(f"endpoint {name} is still stored" for name in scenario.gone if name in held.endpoints),
        *differences(held, left, driver=scenario.driver),
    ]


# -------------------------------------------------------------------- scenarios


def running(name: str, **fields: Any) -> Scenario:
    """Return a scenario in which containers use the claims."""
    return Scenario(name=name, before=POD, untouched=POD.keys(), left=POD, **fields)


def damaged(name: str, damage: Callable[[Node], None]) -> Scenario:
    """Return a scenario with a damaged checkpoint. The kubelet lists the claims, which containers
    use."""
    return running(
        f"damaged-{name}",
        listed=POD,
        change=damage,
        at_start=True,
        orderly=False,
        act=start_alone,
        variants_per_point=2,
    )


def _of_both(driver: DriverClass) -> list[Scenario]:
    """Return the scenarios for drivers with and without side effects."""
    former: Claims = {"uid-a": ("dev-2", "dev-4"), "uid-b": ("dev-3",)}
    whole: Claims = {"uid-a": (WHOLE,)}
    prepare, unprepare = calling("prepare"), calling("unprepare")
    common = [
        Scenario(name="prepare", act=prepare),
        running("repeat", act=prepare),
        Scenario(name="unprepare", before=POD, act=unprepare),
        Scenario(name="rollback", broken=("dev-2",), act=prepare, variants_per_point=2),
        Scenario(name="reallocation", before=former, act=prepare, variants_per_point=2),
        # The other claim may be refused once, because the first one still has the whole device.
        Scenario(name="parts-of-whole", before=whole, act=prepare, variants_per_point=2),
        Scenario(
            name="reboot",
            before=POD,
            change=reboot,
            at_start=True,
            act=prepare,
            variants=("prepare", "unprepare"),
        ),
        # The plugin notices the file within a second, so each run takes longer.
        running(
            "lost-file",
            act=lose_a_file,
            variants_per_point=1,
        ),
        damaged("file", damage_file),
    ]
    if driver is Marking:
        return common
    return [
        replace(scenario, name=f"plain-{scenario.name}", driver=driver, variants_per_point=1)
        for scenario in common
    ]


def _recoveries() -> list[Scenario]:
    """Return scenarios with a second kill, in the start after a first one."""
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
            variants_per_point=2,
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
            variants_per_point=2,
        ),
        running(
            "restart-without-files",
            change=remove_files,
            at_start=True,
            front_door=True,
            act=start_alone,
            variants_per_point=2,
        ),
        running(
            "numbers-swapped",
            renumbers=True,
            act=swap,
            variants=("nobody", "unprepare"),
            variants_per_point=2,
        ),
        Scenario(
            name="prepare-apart", change=slow_down, act=calling("prepare"), variants_per_point=2
        ),
        Scenario(
            name="unprepare-apart",
            before=POD,
            change=slow_down,
            act=calling("unprepare"),
            variants_per_point=2,
        ),
        Scenario(
            name="unprepare-away",
            before=POD,
            change=stop_hardware,
            act=calling("unprepare"),
            after=start_hardware,
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
                spare="waits",
                variants=("prepare", "unprepare"),
            )
            for operation in ("prepare", "unprepare")
        ),
        running(
            "handover",
            front_door=True,
            act=hand_over,
            spare="asks",
        ),
        running(
            "endpoint-removed",
            gone={LOST_ENDPOINT},
            change=add_endpoint,
            settings={"devices": dict.fromkeys(GRACES, 0.2)},
            at_start=True,
            endpoints=True,
            act=start_alone,
            variants=("nobody", "prepare"),
            variants_per_point=2,
        ),
        running(
            "later-version",
            change=upgrade,
            at_start=True,
            act=start_alone,
            variants_per_point=2,
        ),
        damaged("row", damage_row),
        damaged("removed", remove_checkpoint),
        replace(
            damaged("removed-in-use", remove_checkpoint),
            change=None,
            at_start=False,
            act=lose_checkpoint,
        ),
        running(
            "orphan",
            listed={},
            change=add_orphan,
            settings={"staleClaims": dict.fromkeys(STALE, 0.1)},
            at_start=True,
            orderly=False,
            act=start_alone,
            variants=("nobody",),
            variants_per_point=1,
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
            variants_per_point=1,
        ),
    ]


def all_scenarios() -> list[Scenario]:
    return [*_of_both(Marking), *_of_both(Plain), *_recoveries(), *_others()]
