"""
What happens to a node's directories while no plugin runs: reboots, damage, loss, faulty hardware.

It must not know scenarios, or how a plugin is started.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from drakit_nodeplugin.claims import endpointrows, rows
from drakit_nodeplugin.devices.stored import StoredEndpoint
from tests.crash.node import NAME, Node

LOST_ENDPOINT = "lamps"
SAMPLES = Path(__file__).parents[1] / "data" / "checkpoints"


def remove_files(node: Node) -> None:
    for path in node.cdi.glob("*.json"):
        path.unlink()


def reboot(node: Node) -> None:
    """Another boot: what was in memory is gone."""
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
    node.checkpoint.write_text("no database, but long enough to be taken for one" * 400)


def downgrade(node: Node) -> None:
    """The checkpoint is one of schema version 2: without endpoints, and with another index."""
    with closing(sqlite3.connect(SAMPLES / "version-2.db")) as sample:
        query = "SELECT sql FROM sqlite_master WHERE tbl_name = 'devices' AND sql IS NOT NULL"
        tables = [sql for (sql,) in sample.execute(query)]
    with closing(sqlite3.connect(node.checkpoint)) as database:
        claims = rows.page(database, after="", size=1000)
        for statement in ("DROP TABLE endpoints", "DROP TABLE devices", *tables):
            database.execute(statement)
        for claim in claims:
            query = "INSERT INTO devices SELECT id, ?, ?, 1 FROM claims WHERE uid = ?"
            held = [(device.pool, device.device, claim.uid) for device in claim.devices]
            database.executemany(query, held)
        database.execute("PRAGMA user_version = 2")
        database.commit()


def add_orphan(node: Node) -> None:
    """A file that drakit wrote, for a claim of which nothing else is known."""
    (path,) = node.cdi.glob("*uid-a.json")
    text = path.read_text().replace("uid-a", "uid-gone")
    path.with_name(path.name.replace("uid-a", "uid-gone")).write_text(text)


def add_endpoint(node: Node) -> None:
    """An endpoint that was there, and has been away for long."""
    pools = {f"{NAME}/{LOST_ENDPOINT}": ("lamp-1",)}
    lost = StoredEndpoint(name=LOST_ENDPOINT, pools=pools, stopped_at=1.0)
    with closing(sqlite3.connect(node.checkpoint)) as database:
        endpointrows.write(database, [lost])
        database.commit()


def slow_down(node: Node) -> None:
    (node.hardware.slow / "dev-2").touch()


def remove_checkpoint(node: Node) -> None:
    for path in node.checkpoint.parent.glob(f"{node.checkpoint.name}*"):
        path.unlink()


def send_away(node: Node) -> None:
    node.hardware.away.touch()


def bring_back(node: Node) -> None:
    node.hardware.away.unlink()
