from __future__ import annotations

import sqlite3
from dataclasses import replace

import pytest

from drakit_nodeplugin.claims.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointTooNewError,
)
from drakit_nodeplugin.claims.stored import (
    DamagedRowError,
    StoredClaim,
    StoredDevice,
    checksum,
    dump,
    load,
)

CLAIM = StoredClaim(
    uid="uid-a",
    namespace="lab",
    name="cam",
    state="preparing",
    boot_id="boot-1",
    allocation="digest",
    devices=(StoredDevice(pool="node-1", device="cam-0", request="main"),),
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "camera.example.com" / "checkpoint.db"


async def fill(path) -> None:
    checkpoint = Checkpoint(path)
    await checkpoint.open()
    await checkpoint.begin([CLAIM])
    await checkpoint.write([replace(CLAIM, state="prepared", cdi_spec="{}")])
    await checkpoint.close()


async def reopen(path) -> tuple[list[StoredClaim], str | None]:
    checkpoint = Checkpoint(path)
    await checkpoint.open()
    try:
        return await checkpoint.all(), checkpoint.damage
    finally:
        await checkpoint.close()


async def test_what_was_written_is_there_after_a_restart_and_nothing_temporary_is_left(path):
    await fill(path)
    assert await reopen(path) == ([replace(CLAIM, state="prepared", cdi_spec="{}")], None)
    assert [file.name for file in path.parent.iterdir()] == ["checkpoint.db"]


async def test_a_device_is_held_by_one_claim_until_that_is_deleted(path):
    checkpoint = Checkpoint(path)
    await checkpoint.open()
    other = replace(CLAIM, uid="uid-b", name="second")
    await checkpoint.begin([CLAIM])

    held = await checkpoint.begin([other])

    assert held["uid-b"].holder.name == "cam"
    assert [claim.uid for claim in await checkpoint.all()] == ["uid-a"]
    await checkpoint.delete(["uid-a"])
    assert await checkpoint.begin([other]) == {}
    await checkpoint.close()


def truncate(path):
    path.write_bytes(path.read_bytes()[:5000])


def overwrite(path):
    path.write_bytes(b"no database at all, but a long text instead\n" * 200)


def flip_a_row(path):
    connection = sqlite3.connect(path)
    connection.execute("UPDATE claims SET body = CAST(replace(body, 'cam-0', 'cam-1') AS BLOB)")
    connection.commit()
    connection.close()


def retype_a_row(path):
    connection = sqlite3.connect(path)
    connection.execute("UPDATE claims SET body = CAST(body AS TEXT)")
    connection.commit()
    connection.close()


@pytest.mark.parametrize("damage", [truncate, overwrite, flip_a_row, retype_a_row])
async def test_a_damaged_database_is_set_aside_and_named(path, damage):
    await fill(path)
    damage(path)

    claims, told = await reopen(path)

    assert claims == []
    assert "set aside as checkpoint.db.damaged-" in told
    assert any("damaged" in file.name for file in path.parent.iterdir())
    assert await reopen(path) == ([], None)


async def test_a_database_of_a_later_version_is_refused_and_kept(path):
    await fill(path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()

    with pytest.raises(CheckpointTooNewError, match="schema version 99, this drakit knows up to 1"):
        await reopen(path)
    assert path.exists()


async def test_a_folder_that_cannot_be_made_is_no_damage(tmp_path):
    (tmp_path / "file").write_text("")
    checkpoint = Checkpoint(tmp_path / "file" / "checkpoint.db")
    with pytest.raises(CheckpointError):
        await checkpoint.open()
    await checkpoint.close()


def test_a_row_that_changed_is_not_read():
    body = dump(CLAIM)
    assert load(body, expected=checksum(body)) == CLAIM
    with pytest.raises(DamagedRowError):
        load(body.replace(b"cam-0", b"cam-1"), expected=checksum(body))


async def test_damage_while_it_is_open_is_told_until_a_restart_sets_it_aside(path):
    await fill(path)
    checkpoint = Checkpoint(path)
    await checkpoint.open()
    assert checkpoint.broken is None
    flip_a_row(path)
    with pytest.raises(CheckpointError, match="is damaged at claim uid-a"):
        await checkpoint.all()
    assert "its checksum does not match" in checkpoint.broken
    await checkpoint.close()
    assert (await reopen(path))[0] == []
