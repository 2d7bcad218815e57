"""Whatever the content of its files, the checkpoint opens or reports the reason, and loses no
row."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drakit.text import plural
from drakit_nodeplugin.state import quarantine, rows, schema
from drakit_nodeplugin.state.checkpoint import (
    Checkpoint,
    CheckpointError,
)
from drakit_nodeplugin.state.inspection import InspectionError, inspect
from tests.fakes.checkpoints import (
    PARTS,
    Files,
    copy,
    delete,
    fill,
    readable,
    reopen,
    stored_claim,
    stored_device,
)
from tests.unit.claims.conftest import opened, sql

PAGE = 4096
PAGES = 19
CLAIMS = 40


def names(path):
    return sorted(file.name for file in path.parent.iterdir())


def digest(path):
    """Return the content of a folder that a refusal must not change. SQLite's ``-shm`` is
    scratch."""
    return {
        file.name: file.read_bytes()
        for file in path.parent.iterdir()
        if not file.name.endswith("-shm")
    }


# ---------------------------------------------------------------- one row is damaged


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE bodies SET body = CAST(replace(body, 'cam-007', 'cam-x') AS BLOB) WHERE id = 8",
        "UPDATE bodies SET body = CAST(body AS TEXT) WHERE id = 8",
        "DELETE FROM bodies WHERE id = 8",
    ],
)
async def test_only_a_damaged_row_is_lost_and_it_is_named(path, statement, caplog):
    stored = await fill(path, count=CLAIMS)
    sql(path, statement)
    async with opened(path) as checkpoint:
        assert checkpoint.damage.startswith(
            "the row of claim uid-007: its checksum does not match; it was quarantined as "
            "checkpoint.db.damaged-"
        )
        (record,) = [r for r in caplog.records if "quarantined" in r.message]
        assert (record.kept, record.lost_claims) == (CLAIMS - 1, "uid-007")
        assert {c.uid: c for c in stored if c.uid != "uid-007"} == {
            c.uid: c async for page in checkpoint.pages() for c in page
        }
        free = stored_claim("new", devices=(stored_device("cam-007"),))
        assert set((await checkpoint.write([free])).written) == {"uid-new"}


BESIDE_THE_BODIES = {
    "the row of claim uid-007: its columns do not match its body": [
        "UPDATE claims SET state = 'unpreparing' WHERE id = 8",
        "UPDATE claims SET generation = 5 WHERE id = 8",
    ],
    "its device rows do not match its claims": [
        "DELETE FROM devices WHERE claim = 8",
        "INSERT INTO devices VALUES (999, 'node-1', 'cam-x', 'exclusive', '')",
        "DELETE FROM claims WHERE id = 8",
    ],
    "its counter rows do not match its claims": [
        "DELETE FROM counters WHERE claim = 8",
        "INSERT INTO counters VALUES ('node-1', 'card', 'cam-x', 999, '[]')",
    ],
    "its counter of generation is ": [
        "UPDATE meta SET value = 5 WHERE name = 'generation'",
        "DELETE FROM meta WHERE name <> 'version'",
    ],
    "its tables are not those of a checkpoint": [
        "DROP INDEX exclusive_device",
        "DROP TABLE meta",
        "CREATE TABLE more (x)",
        "PRAGMA user_version = 0",
        "PRAGMA user_version = -7",
        "UPDATE meta SET value = 'two' WHERE name = 'version'",
    ],
    "it is a database of another program": ["PRAGMA application_id = 7"],
}


@pytest.mark.parametrize(
    ("statement", "reason"),
    [(each, reason) for reason, statements in BESIDE_THE_BODIES.items() for each in statements],
)
async def test_damage_beside_the_bodies_costs_no_row(path, statement, reason):
    stored = {claim.uid: claim for claim in await fill(path, count=CLAIMS)}
    sql(path, statement)
    claims, damage = await reopen(path)
    assert damage.startswith(reason)
    assert claims == stored


# ---------------------------------------------------------------- the file is damaged


def flip(offset, bit=0):
    def change(data):
        data[offset] ^= 1 << bit

    return change


def cut(length):
    def change(data):
        del data[length:]

    return change


def zero(page):
    def change(data):
        data[page * PAGE : (page + 1) * PAGE] = bytes(PAGE)

    return change


async def damaged(path, tmp_path, change, *, part="", source=None):
    """Change a copy of a database; return the rows that a plain reader finds, and those after
    opening."""
    sound, crash = (tmp_path / name / "checkpoint.db" for name in ("sound", "crash"))
    if not sound.exists():
        await fill(sound, count=CLAIMS, crash=crash)
    shutil.rmtree(path.parent, ignore_errors=True)
    path.parent.mkdir()
    copy(crash if part or source == "crash" else sound, path)
    file = path.with_name(path.name + part)
    if file.exists():
        data = bytearray(file.read_bytes())
        change(data)
        file.write_bytes(data)
    good = readable(path, scratch=tmp_path / "scratch")
    before = digest(path)
    with suppress(InspectionError):
        looked = await asyncio.to_thread(inspect, path)
        assert good.keys() <= {claim.uid for claim in looked.claims}
    assert digest(path) == before
    return good, *await reopen(path)


async def check(path, tmp_path, change, *, part="", source=None):
    good, claims, damage = await damaged(path, tmp_path, change, part=part, source=source)
    assert good.items() <= claims.items()
    if len(claims) < CLAIMS and part != "-wal":  # SQLite reads a log up to damage
        assert damage is not None
    assert await reopen(path) == (claims, damage)  # until somebody has rebuilt the rest
    return claims, damage


async def test_a_bit_flip_of_the_header_costs_at_most_what_cannot_be_read(path, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    for offset in range(0, 100, 7):
        try:
            await check(path, tmp_path, flip(offset, offset % 8))
        except CheckpointError:  # the version in the header is that of a later drakit
            assert offset in range(60, 64)


@pytest.mark.parametrize("page", range(PAGES))
async def test_a_page_of_zeros_costs_at_most_what_was_on_it(path, tmp_path, page):
    _, damage = await check(path, tmp_path, zero(page))
    assert damage is not None
    assert (tmp_path / "sound" / "checkpoint.db").stat().st_size == PAGES * PAGE


@pytest.mark.parametrize("length", [2, 16, 60, 100, 101, 2000, PAGE, PAGE + 1, 9 * PAGE + 17])
async def test_a_file_that_was_cut(path, tmp_path, length):
    _, damage = await check(path, tmp_path, cut(length))
    assert damage is not None


@pytest.mark.parametrize("remains", [b"", b"S"], ids=["emptied", "one-byte"])
async def test_a_file_that_was_emptied_is_new(path, remains):
    await fill(path)
    path.write_bytes(remains)
    assert await reopen(path) == ({}, None)


def remove(path):
    path.unlink()


def empty(path):
    path.write_bytes(b"")


def damage_the_log(path):
    """Leave the rows before the damage: SQLite reads the log up to there, and reports nothing."""
    sql(path, *(f"DELETE FROM {table}" for table in ("claims", "bodies", "devices", "counters")))


@pytest.mark.parametrize("harm", [remove, empty, damage_the_log])
async def test_missing_rows_are_damage_if_there_are_cdi_files(path, harm):
    await fill(path)
    harm(path)
    damage = "it has no entry for 2 CDI files"
    async with opened(path, files=Files("uid-000", "uid-001")) as checkpoint:
        assert checkpoint.damage == damage
    assert (await reopen(path))[1] == damage
    async with opened(path) as checkpoint:
        await checkpoint.rebuilt()
    assert (await reopen(path))[1] is None


async def test_cdi_files_that_have_entries_or_cannot_be_listed_are_no_damage(path):
    await fill(path, count=3)
    for files in (Files("uid-000", "uid-002"), Files(error=PermissionError("no"))):
        async with opened(path, files=files) as checkpoint:
            assert checkpoint.damage is None


async def test_text_instead_of_a_database_is_quarantined(path):
    await fill(path)
    text = b"no database at all, but a long text instead\n" * 200
    path.write_bytes(text)
    claims, damage = await reopen(path)
    assert claims == {}
    assert damage.startswith("file is not a database; it was quarantined as ")
    assert path.with_name(damage.rpartition(" ")[2]).read_bytes() == text


# ---------------------------------------------------------------- the log is damaged


@pytest.mark.parametrize("offset", [0, 8, 9, 16, 30, None], ids=lambda o: f"offset-{o}")
async def test_readable_rows_of_a_damaged_log_are_kept_and_cdi_files_show_the_rest(
    path, tmp_path, offset
):
    good, claims, damage = await damaged(
        path,
        tmp_path,
        lambda data: flip(len(data) // 2 if offset is None else offset)(data),
        part="-wal",
    )
    assert claims == good
    assert len(claims) < CLAIMS
    assert damage is None, "SQLite says nothing"
    everything = {f"uid-{n:03}" for n in range(CLAIMS)}
    async with opened(path, files=Files(*everything)) as checkpoint:
        lost = CLAIMS - len(claims)
        assert checkpoint.damage == f"it has no entry for {plural(lost, 'CDI file')}"


async def test_a_transaction_that_a_crash_cut_is_no_damage(path, tmp_path):
    claims, damage = await check(path, tmp_path, cut(-100), part="-wal")
    assert len(claims) == CLAIMS
    assert damage is None
    # The last one wrote "prepared": what it had begun is there.
    assert sorted({claim.state for claim in claims.values()}) == ["prepared", "preparing"]


async def test_a_log_that_was_begun_again_is_no_damage(path, tmp_path):
    async with opened(path) as checkpoint:
        for number in range(300):  # more pages than the log takes before it begins again
            written = (await checkpoint.write([stored_claim("a")])).written
            await delete(checkpoint, list(written.values()))
            if number % 100 == 99:
                crash = tmp_path / f"crash-{number}" / "checkpoint.db"
                crash.parent.mkdir()
                copy(path, crash)
                assert await reopen(crash) == ({}, None)


@pytest.mark.parametrize("remains", [None, b"", b"S"], ids=["gone", "empty", "one-byte"])
async def test_a_file_that_is_gone_while_its_log_is_there_is_damage(path, tmp_path, remains):
    crash = tmp_path / "crash" / "checkpoint.db"
    await fill(path, crash=crash)
    log = crash.with_name("checkpoint.db-wal").read_bytes()
    crash.unlink()
    if remains is not None:
        crash.write_bytes(remains)
        looked = await asyncio.to_thread(inspect, crash)
        assert looked.problems == ("it is empty, but its log is not",)
    claims, damage = await reopen(crash)
    assert claims == {}
    assert damage.startswith("it is empty, but its log is not; it was quarantined as ")
    # SQLite would have removed it.
    assert crash.with_name(f"{damage.rpartition(' ')[2]}-wal").read_bytes() == log


async def test_a_missing_shm_is_made_again(path, tmp_path):
    crash = tmp_path / "crash" / "checkpoint.db"
    stored = await fill(path, count=3, crash=crash)
    crash.with_name("checkpoint.db-shm").unlink()
    assert await reopen(crash) == ({claim.uid: claim for claim in stored}, None)


# ---------------------------------------------------------------- newer, foreign


@pytest.mark.parametrize("crashed", [False, True], ids=["after-a-stop", "after-a-crash"])
async def test_a_later_version_that_cannot_be_used_is_refused_and_stays_as_it_is(
    path, tmp_path, crashed
):
    await fill(path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA user_version = 99")
    connection.execute("CREATE TABLE later (x)")
    if crashed:
        later = tmp_path / "later" / "checkpoint.db"
        later.parent.mkdir()
        copy(path, later)
        path = later
    connection.close()
    before = digest(path)
    assert ("checkpoint.db-wal" in before) == crashed

    checkpoint = Checkpoint(path)
    for call in (checkpoint.open, checkpoint.uids):
        with pytest.raises(
            CheckpointError,
            match=f"needs schema version 99 or later, and this drakit has version {schema.VERSION}",
        ):
            await call()
    await checkpoint.close()

    assert digest(path) == before


@pytest.mark.parametrize("log", ["DELETE", "WAL"])
async def test_a_database_of_another_program_is_quarantined_as_it_is(path, log):
    path.parent.mkdir()
    sql(
        path,
        f"PRAGMA journal_mode = {log}",
        "CREATE TABLE songs (name)",
        "INSERT INTO songs VALUES (1)",
    )
    before = path.read_bytes()

    claims, damage = await reopen(path)

    assert claims == {}
    assert damage.startswith("it is a database of another program; it was quarantined as ")
    (kept,) = path.parent.glob("checkpoint.db.foreign-*")
    assert kept.read_bytes() == before


@pytest.mark.parametrize("pipe", [False, True], ids=["folder", "pipe"])
async def test_something_else_than_a_file_is_quarantined_as_it_is(path, pipe):
    path.parent.mkdir()
    if pipe:
        os.mkfifo(path)
    else:
        path.mkdir()
        (path / "file").write_text("kept")
    claims, damage = await reopen(path)
    assert claims == {}
    assert damage.startswith("it is not a regular file; it was quarantined as ")
    (kept,) = path.parent.glob("checkpoint.db.foreign-*")
    assert kept.is_fifo() if pipe else (kept / "file").read_text() == "kept"


# ---------------------------------------------------------------- what is quarantined


async def test_damage_is_reported_until_it_is_repaired(path):
    await fill(path, count=3)
    sql(path, "UPDATE bodies SET checksum = 1 WHERE id = 2")
    _, damage = await reopen(path)
    async with opened(path) as checkpoint:
        assert checkpoint.damage == damage

        await checkpoint.rebuilt()

        assert checkpoint.damage is None
    assert (await reopen(path))[1] is None


def test_one_of_two_claims_with_the_same_device_is_kept(path, caplog):
    path.parent.mkdir()
    with closing(schema.connect(path)) as connection, rows.transaction(connection):
        schema.create(connection)
        connection.execute("DROP INDEX exclusive_device")
        for name in ("a", "b"):
            rows.write(connection, [stored_claim(name, devices=(stored_device("cam-0"),))])
            connection.execute("UPDATE devices SET hold = 'admin'")
    assert asyncio.run(reopen(path))[0].keys() == {"uid-a"}
    (record,) = [r for r in caplog.records if "quarantined" in r.message]
    assert (record.kept, record.lost_claims) == (1, "uid-b")


async def test_new_generations_are_above_all_that_were_copied(path):
    await fill(path)
    sql(path, "UPDATE meta SET value = 1 << 60 WHERE name = 'generation'")
    async with opened(path) as checkpoint:
        await checkpoint.write([stored_claim("a")])
    sql(path, "DROP INDEX exclusive_device")
    async with opened(path) as checkpoint:
        assert checkpoint.damage is not None
        written = (await checkpoint.write([stored_claim("b")])).written
        assert written["uid-b"].generation > 2**60


async def test_five_damaged_files_are_kept_and_the_newest_of_them(path, monkeypatch):
    path.parent.mkdir()
    path.with_name("checkpoint.db.foreign-20200101T000000Z").write_text("never removed")
    path.with_name("checkpoint.db.damaged-by-hand").write_text("never removed")
    for number in range(8):
        stamp = f"20260101T00000{number}Z"
        monkeypatch.setattr(quarantine.time, "strftime", lambda *_, stamp=stamp: stamp)
        path.write_text(f"damaged {number}" * 99)
        path.with_name("checkpoint.db-wal").write_text("its log")
        await reopen(path)
    kept = [name for name in names(path) if name.startswith("checkpoint.db.damaged-2026")]
    assert kept == [
        f"checkpoint.db.damaged-20260101T00000{number}Z{part}"
        for number in range(3, 8)
        for part in ("", "-wal")
    ]
    assert "checkpoint.db.damaged-by-hand" in names(path)
    assert "checkpoint.db.foreign-20200101T000000Z" in names(path)


async def test_two_within_a_second_do_not_overwrite_each_other(path, monkeypatch):
    monkeypatch.setattr(quarantine.time, "strftime", lambda *_: "20260101T000000Z")
    path.parent.mkdir()
    for text in ("first", "second"):
        path.write_text(text)
        await reopen(path)
    assert path.with_name("checkpoint.db.damaged-20260101T000000Z").read_text() == "first"
    assert path.with_name("checkpoint.db.damaged-20260101T000000Z-1").read_text() == "second"


POWER_CUT = """
import asyncio, os, sys
from pathlib import Path
from drakit_nodeplugin.state import quarantine
from drakit_nodeplugin.state.checkpoint import Checkpoint

steps = iter(range(int(sys.argv[2])))

def cut_before(step):
    def run(*args):
        if next(steps, None) is None:
            os._exit(9)
        return step(*args)
    return run

Path.rename, quarantine._sync = cut_before(Path.rename), cut_before(quarantine._sync)
asyncio.run(Checkpoint(Path(sys.argv[1])).open())
"""


def open_and_cut_power(path, step):
    command = [sys.executable, "-c", POWER_CUT, str(path), str(step)]
    return subprocess.run(command, check=False, timeout=30).returncode == 9


@pytest.mark.parametrize("step", range(8))
async def test_a_power_cut_at_any_step_of_a_quarantine_loses_nothing(path, tmp_path, step):
    crash = tmp_path / "crash" / "checkpoint.db"
    stored = await fill(path, count=CLAIMS, crash=crash)
    change_log = sqlite3.connect(crash)
    change_log.execute("UPDATE bodies SET checksum = 1 WHERE id = 8")
    change_log.commit()
    shutil.rmtree(path.parent)
    path.parent.mkdir()
    copy(crash, path)
    change_log.close()

    assert open_and_cut_power(path, step) == (step < 7)
    claims, damage = await reopen(path)

    assert claims == {c.uid: c for c in stored if c.uid != "uid-007"}
    assert damage.startswith("the row of claim uid-007")
    assert not [name for name in names(path) if "salvag" in name]
    (kept,) = (
        p for p in path.parent.glob("checkpoint.db.damaged-*") if not p.name.endswith("-wal")
    )
    assert len(readable(kept, scratch=tmp_path / "scratch")) == CLAIMS - 1


# ---------------------------------------------------------------- while it is open


async def test_a_damaged_row_is_met_while_it_is_open_and_reported_until_a_restart(path):
    await fill(path, count=3)
    async with opened(path) as checkpoint:
        assert checkpoint.broken is None
        sql(path, "UPDATE bodies SET body = CAST(replace(body, 'cam', 'car') AS BLOB) WHERE id = 2")

        with pytest.raises(
            CheckpointError, match="uid-001: its checksum does not match; the node plug"
        ):
            await checkpoint.find(["uid-001"])

        assert "is damaged: the row of claim uid-001" in checkpoint.broken
        assert set(await checkpoint.find(["uid-000"])) == {"uid-000"}
        with pytest.raises(CheckpointError, match="is damaged"):
            await checkpoint.write([stored_claim("new")])
    claims, damage = await reopen(path)
    assert set(claims) == {"uid-000", "uid-002"}
    assert "uid-001" in damage


async def test_damaged_pages_are_met_while_it_is_open(path):
    await fill(path, count=CLAIMS)
    async with opened(path) as checkpoint:
        sql(path, "INSERT INTO meta VALUES ('another', 1)")  # what was read is read again
        with path.open("r+b") as file:
            file.seek(PAGE)
            file.write(b"\xff" * PAGE * 13)
        with pytest.raises(CheckpointError, match="is damaged"):
            [page async for page in checkpoint.pages()]
        assert checkpoint.broken is not None


async def test_a_file_that_is_removed_while_it_is_open_is_written_again(path):
    stored = await fill(path, count=3)
    async with opened(path) as checkpoint:
        await checkpoint.write([stored_claim("new")])
        shutil.rmtree(path.parent)

        assert set(await checkpoint.find(["uid-000", "uid-new"])) == {"uid-000", "uid-new"}

        outcome = await checkpoint.write(stored)
        assert len(outcome.written) == 3
    claims, damage = await reopen(path)
    assert len(claims) == 4
    assert damage is None


async def test_a_file_that_is_replaced_by_hand_is_used_from_then_on(path, tmp_path):
    stored = await fill(path, count=3)
    backup = tmp_path / "backup.db"
    copy(path, backup)
    async with opened(path) as checkpoint:
        known = await checkpoint.find(["uid-000"])
        (later,) = (await checkpoint.write([stored_claim("later")])).written.values()
        seen = checkpoint.revision.number
        for file in path.parent.iterdir():
            file.unlink()
        backup.replace(path)

        assert await checkpoint.uids() == {claim.uid for claim in stored}
        assert checkpoint.revision.number > seen, "its rows have changed"
        outcome = await checkpoint.write([*known.values(), later])

        assert (set(outcome.written), outcome.changed) == ({"uid-000"}, {"uid-later"})
    assert names(path) == ["checkpoint.db"]
    claims, damage = await reopen(path)
    assert (len(claims), damage) == (3, None)


# ---------------------------------------------------------------- any bytes


@st.composite
def changes(draw):
    """Changes to bytes: position (as a share of the file), value, and length."""
    kind = draw(st.sampled_from(["flip", "overwrite", "zero", "cut", "insert"]))
    where = draw(st.floats(0, 1, exclude_max=True))
    data = draw(st.binary(min_size=1, max_size=300))
    return kind, where, data


def apply(data, kind, where, text):
    offset = int(len(data) * where)
    if kind == "flip" and data:
        data[offset] ^= 1 << (text[0] % 8)
    elif kind == "overwrite":
        data[offset : offset + len(text)] = text
    elif kind == "zero":
        data[offset // PAGE * PAGE : (offset // PAGE + 1) * PAGE] = bytes(PAGE)
    elif kind == "cut":
        del data[offset:]
    elif kind == "insert":
        data[offset:offset] = text


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    part=st.sampled_from(PARTS),
    source=st.sampled_from(["sound", "crash"]),
    edits=st.lists(changes(), min_size=1, max_size=6),
)
async def test_any_content_of_the_file_loses_no_sound_row(
    path, tmp_path, caplog, part, source, edits
):
    caplog.set_level(logging.CRITICAL)

    def change(data):
        for edit in edits:
            apply(data, *edit)

    with suppress(CheckpointError):
        good, claims, _ = await damaged(path, tmp_path, change, part=part, source=source)
        assert good.items() <= claims.items()
