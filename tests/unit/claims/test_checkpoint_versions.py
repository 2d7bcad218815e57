"""Databases of earlier and later versions."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from drakit_nodeplugin.state.checkpoint import schema
from drakit_nodeplugin.state.inspection import forget, inspect
from drakit_nodeplugin.state.records import (
    StoredClaim,
    StoredDevice,
    StoredEndpoint,
    StoredNode,
    checksum,
    dump,
    load,
)
from tests.fakes.checkpoints import (
    as_successor,
    copy,
    delete,
    fill,
    reopen,
    stored_claim,
    stored_device,
)
from tests.unit.claims.conftest import opened, sql

ENDPOINT = StoredEndpoint(name="usb", pools={"node-1": ("cam-0",)}, stopped_at=1e9)

CLAIM = StoredClaim(
    uid="uid-a",
    namespace="lab",
    name="a",
    state="prepared",
    boot_id="boot-1",
    devices=(
        StoredDevice(
            pool="node-1",
            device="cam-0",
            request="main/small",
            share_id="share-1",
            consumed_capacity={"memory": "1Gi"},
            configs=(0,),
            consumes={"card-0": {"memory": "20Gi"}},
            cdi_devices=("vendor.example/gpu=0",),
            nodes=(StoredNode(type="c", major=188, minor=0, identity="usb:a", current=False),),
        ),
    ),
    configs=('{"mode":"fast"}',),
    data="{}",
    cdi_spec="{}\n",
    pod_claim_name="cam",
    metadata={"main/small": "{}"},
    metadata_generation=2,
    rebuilt="confirmed",
    generation=7,
)

BODY = (
    b'{"uid":"uid-a","namespace":"lab","name":"a","state":"prepared","boot_id":"boot-1",'
    b'"devices":[{"pool":"node-1","device":"cam-0","request":"main/small","share_id":"share-1",'
    b'"admin_access":false,"consumed_capacity":{"memory":"1Gi"},"configs":[0],'
    b'"consumes":{"card-0":{"memory":"20Gi"}},'
    b'"cdi_devices":["vendor.example/gpu=0"],"nodes":[{"type":"c","major":188,"minor":0,'
    b'"identity":"usb:a","current":false}]}],"configs":["{\\"mode\\":\\"fast\\"}"],'
    b'"data":"{}","cdi_spec":"{}\\n","pod_claim_name":"cam","metadata":{"main/small":"{}"},'
    b'"metadata_generation":2,"side_effects":true,"rebuilt":"confirmed","generation":7}'
)
"""A stored row. Its format may change only as :data:`.schema.VERSION` permits."""


async def successor(path, *, count=3) -> list[StoredClaim]:
    """Store claims and an endpoint as the next version would."""
    stored = await fill(path, count=count)
    async with opened(path) as checkpoint:
        await checkpoint.write_endpoints([ENDPOINT])
    with closing(sqlite3.connect(path)) as connection, connection:
        as_successor(connection)
    return stored


def test_a_row_is_what_it_was():
    assert dump(CLAIM) == BODY
    assert load(BODY, expected=checksum(BODY)) == CLAIM


def test_a_device_node_of_a_successor_is_read():
    body = BODY.replace(b'"minor":0', b'"minor":0,"later":{"x":1}')
    claim = load(body, expected=checksum(body))
    assert claim.devices[0].nodes == CLAIM.devices[0].nodes


def test_a_row_without_the_fields_that_have_defaults_is_read():
    fields = {name: json.loads(BODY)[name] for name in ("uid", "namespace", "name", "state")}
    device = {"pool": "node-1", "device": "cam-0", "request": "main", "later": 1}
    body = json.dumps(fields | {"boot_id": "b", "devices": [device], "later": {}}).encode()
    claim = load(body, expected=checksum(body))
    assert claim.devices == (stored_device("cam-0"),)
    assert claim.devices[0].consumes is None, "its consumption is unknown"
    assert claim.devices[0].nodes == (), "nothing is known of its numbers"
    assert claim == stored_claim("a", state="prepared", boot_id="b", devices=claim.devices)


async def test_rows_of_a_successor_are_read_and_written_and_its_additions_are_kept(path):
    stored = {claim.uid: claim for claim in await successor(path)}
    assert await reopen(path) == (stored, None)

    async with opened(path) as checkpoint:
        assert await checkpoint.endpoints() == [ENDPOINT]
        first = replace(stored["uid-000"], state="unpreparing")
        outcome = await checkpoint.write([first, stored_claim("new")])
        assert set(outcome.written) == {"uid-000", "uid-new"}
        assert await delete(checkpoint, [stored["uid-001"]]) == frozenset()

    assert sql(path, "SELECT more FROM later") == [("kept",)] * 3
    assert sql(path, "SELECT value FROM meta WHERE name = 'later'") == [("kept",)]
    assert sql(path, "SELECT value FROM meta WHERE name = 'version'") == [(schema.VERSION + 1,)]
    bodies = [json.loads(body) for (body,) in sql(path, "SELECT body FROM bodies")]
    # A changed row loses the fields that this version does not know.
    assert {body["uid"] for body in bodies if "later" in body} == {"uid-002"}


def as_version_1(path) -> None:
    """Shape a database as version 1 did, which noted the writer of each row."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE meta SET value = 1 WHERE name = 'version'")
        connection.execute("INSERT INTO meta VALUES ('opens', 3)")
        connection.execute("PRAGMA user_version = 1")
        for id_, body in connection.execute("SELECT id, body FROM bodies").fetchall():
            owned = body.removesuffix(b"}") + b',"owner":"pod-1/nonce"}'
            connection.execute(
                "UPDATE bodies SET body = ?, checksum = ? WHERE id = ?",
                (owned, checksum(owned), id_),
            )


@pytest.mark.parametrize("crashed", [False, True], ids=["after-a-stop", "after-a-crash"])
async def test_a_database_of_version_1_is_upgraded_when_it_is_opened(path, tmp_path, crashed):
    stored = {claim.uid: claim for claim in await fill(path, count=3)}
    as_version_1(path)
    if crashed:
        crash = tmp_path / "crash" / "checkpoint.db"
        crash.parent.mkdir()
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("UPDATE meta SET value = 4 WHERE name = 'opens'")
            connection.commit()
            copy(path, crash)
        path = crash
        assert path.with_name("checkpoint.db-wal").stat().st_size > 0
    looked = await asyncio.to_thread(inspect, path)
    assert (looked.version, looked.problems) == (1, ())
    assert {claim.uid: claim for claim in looked.claims} == stored

    async with opened(path) as checkpoint:
        assert checkpoint.damage is None
        assert await checkpoint.find(list(stored)) == stored
        first = replace(stored["uid-000"], state="unpreparing")
        assert set((await checkpoint.write([first, stored_claim("new")])).written) == {
            "uid-000",
            "uid-new",
        }
        assert await delete(checkpoint, [stored["uid-001"]]) == frozenset()

    claims, damage = await reopen(path)
    assert (claims.keys(), damage) == ({"uid-000", "uid-002", "uid-new"}, None)
    # Version 1 refuses it from now on.
    assert sql(path, "PRAGMA user_version") == [(schema.READABLE_FROM,)] == [(2,)]
    assert sql(path, "SELECT value FROM meta WHERE name = 'version'") == [(schema.VERSION,)]
    bodies = [json.loads(body) for (body,) in sql(path, "SELECT body FROM bodies")]
    assert {body["uid"] for body in bodies if "owner" in body} == {"uid-002"}


@pytest.mark.parametrize("version", [1, schema.VERSION + 1])
async def test_a_damaged_database_of_another_version_is_quarantined(path, version):
    rows = await (fill if version == 1 else successor)(path, count=3)
    stored = {claim.uid: claim for claim in rows}
    if version == 1:
        as_version_1(path)
    sql(path, "UPDATE bodies SET checksum = 1 WHERE id = 2")
    (before,) = sql(path, "PRAGMA user_version")
    claims, damage = await reopen(path)
    assert damage.startswith("the row of claim uid-001: its checksum does not match")
    assert claims == {uid: claim for uid, claim in stored.items() if uid != "uid-001"}
    assert sql(path, "SELECT value FROM meta WHERE name = 'version'") == [(schema.VERSION,)]
    (kept,) = path.parent.glob("checkpoint.db.damaged-*")
    assert sql(kept, "PRAGMA user_version") == [before], "for analysis, as it was"


async def test_a_claim_of_version_1_is_forgotten_before_the_upgrade(path):
    first, second = await fill(path, count=2)
    as_version_1(path)
    await asyncio.to_thread(forget, path, first)
    assert await reopen(path) == ({second.uid: second}, None)


async def test_a_successor_without_a_table_of_ours_is_damaged(path):
    await successor(path)
    sql(path, "DROP INDEX shared_device")
    _, damage = await reopen(path)
    assert damage.startswith("its tables are not those of a checkpoint")


async def test_a_successor_is_inspected_and_a_claim_of_it_forgotten(path):
    stored = await successor(path)
    found = await asyncio.to_thread(inspect, path)
    assert (found.version, found.problems) == (schema.VERSION + 1, ())
    assert (list(found.claims), found.endpoints) == (stored, (ENDPOINT,))
    await asyncio.to_thread(forget, path, stored[0])
    assert set((await reopen(path))[0]) == {"uid-001", "uid-002"}
