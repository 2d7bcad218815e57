"""
Changes of a node's directories while no plugin runs: reboots, damage, loss, faulty hardware.

It must not know scenarios, or the start of a plugin.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from drakit_nodeplugin.state import rows
from drakit_nodeplugin.state.records import StoredEndpoint
from tests.crash.node import NAME, Node
from tests.fakes.checkpoints import as_successor

LOST_ENDPOINT = "lamps"


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
