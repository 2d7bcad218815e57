"""No space, no permission, a busy or newer database: clear errors, and no restart to recover."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import pytest

from drakit_nodeplugin.state.checkpoint import Checkpoint, CheckpointError, schema
from tests.fakes.checkpoints import fill, reopen, stored_claim
from tests.unit.claims.conftest import opened

A, B = stored_claim("a"), stored_claim("b")
LARGE = stored_claim("large", cdi_spec="x" * 300_000)


def limit(checkpoint, pages):
    """Make SQLite report a full disk; return the previous limit."""
    (before,) = checkpoint._connection.execute("PRAGMA max_page_count").fetchone()
    checkpoint._connection.execute(f"PRAGMA max_page_count = {pages}")
    return before


# ---------------------------------------------------------------- no space


async def test_a_full_disk_stores_nothing_of_a_batch_and_loses_nothing(checkpoint):
    (stored,) = (await checkpoint.write([A])).written.values()
    before = limit(checkpoint, 1)

    with pytest.raises(CheckpointError, match="is full; check space and permissions"):
        await checkpoint.write([B, LARGE, replace(stored, state="prepared")])

    assert "is full" in checkpoint.unusable
    assert checkpoint.broken is None
    assert await checkpoint.find([A.uid, B.uid, LARGE.uid]) == {A.uid: stored}
    limit(checkpoint, before)
    assert set((await checkpoint.write([B, LARGE])).written) == {B.uid, LARGE.uid}
    assert checkpoint.unusable is None


@pytest.mark.looptime
async def test_that_there_is_space_again_is_noticed_by_the_next_call(checkpoint):
    before = limit(checkpoint, 1)
    with pytest.raises(CheckpointError):
        await checkpoint.write([LARGE])
    limit(checkpoint, before)
    await checkpoint.uids()
    assert checkpoint.unusable is not None  # not looked at more than once a second
    await asyncio.sleep(1)
    await checkpoint.uids()
    assert checkpoint.unusable is None


SMALL_DISK = """
import asyncio, os, subprocess, sys
from pathlib import Path
from drakit_nodeplugin.state import checkpoint as module
from drakit_nodeplugin.state.checkpoint import Checkpoint, CheckpointError
from tests.fakes.checkpoints import reopen, stored_claim

module.REOPEN_SECONDS = 0
disk = Path(sys.argv[1])

def mount(*options):
    subprocess.run(["mount", "-t", "tmpfs", *options, "none", str(disk)], check=True)

async def refused(call, text):
    try:
        await call
    except CheckpointError as error:
        assert text in str(error), error
        return
    raise AssertionError("it was not refused")

async def full():
    mount("-o", "size=400k")
    path = disk / "camera.example.com" / "checkpoint.db"
    checkpoint = Checkpoint(path)
    await checkpoint.open()
    stored = set()
    try:
        for number in range(10_000):
            claim = stored_claim(str(number), cdi_spec="x" * 3000)
            stored |= (await checkpoint.write([claim])).written.keys()
    except CheckpointError as error:
        assert "space" in str(error), error
    assert 5 < len(stored) < 10_000
    assert checkpoint.unusable and not checkpoint.broken
    await refused(checkpoint.write([stored_claim("one", cdi_spec="x" * 9000)]), "space")
    subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
    assert await checkpoint.uids() == stored
    assert checkpoint.unusable is None, checkpoint.unusable
    assert len((await checkpoint.write([stored_claim("two")])).written) == 1
    await checkpoint.close()
    claims, damage = await reopen(path)
    assert claims.keys() == {*stored, "uid-two"} and damage is None

async def full_from_the_start(ballast):
    mount("-o", "size=64k")
    (disk / "ballast").write_bytes(bytes(ballast))
    path = disk / "camera.example.com" / "checkpoint.db"
    checkpoint = Checkpoint(path)
    await refused(checkpoint.open(), "check space and permissions of its directory")
    await refused(checkpoint.write([stored_claim("a")]), "check space and permissions")
    (disk / "ballast").unlink()
    subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
    assert len((await checkpoint.write([stored_claim("a")])).written) == 1
    assert checkpoint.unusable is None and checkpoint.damage is None
    await checkpoint.close()

async def damaged_and_full():
    mount("-o", "size=10m")
    path = disk / "camera.example.com" / "checkpoint.db"
    checkpoint = Checkpoint(path)
    await checkpoint.open()
    await checkpoint.write([stored_claim(str(n), cdi_spec="x" * 3000) for n in range(20)])
    checkpoint._connection.execute("UPDATE bodies SET checksum = 1 WHERE id = 5")
    await checkpoint.close()
    subprocess.run(["mount", "-o", "remount,size=160k", str(disk)], check=True)
    again = Checkpoint(path)
    await refused(again.open(), "check space and permissions of its directory")
    assert [file.name for file in path.parent.iterdir() if "damaged-" in file.name
            and not file.name.endswith((".salvaging", ".salvaging-journal"))] == []
    subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
    assert len(await again.uids()) == 19
    assert "uid-4" in again.damage
    await again.close()
    assert not list(path.parent.glob("*.salvaging*"))

async def read_only():
    mount("-o", "size=10m")
    path = disk / "camera.example.com" / "checkpoint.db"
    checkpoint = Checkpoint(path)
    await checkpoint.open()
    stored = (await checkpoint.write([stored_claim("a")])).written
    await checkpoint.close()
    before = path.read_bytes()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    again = Checkpoint(path)
    await refused(again.open(), "check space and permissions of its directory")
    await refused(again.find(["uid-a"]), "check space and permissions of its directory")
    assert again.unusable
    assert path.read_bytes() == before
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert await again.find(["uid-a"]) == stored
    assert again.unusable is None and again.damage is None
    await again.close()

asyncio.run(eval(sys.argv[2]))
print("done")
"""


def mounting() -> str | None:
    """Return the reason why this process cannot mount file systems."""
    if os.geteuid():
        return "only root can mount a small disk"
    probe = "mount -t tmpfs none /mnt"
    done = subprocess.run(["unshare", "-m", "sh", "-c", probe], capture_output=True, check=False)
    return f"nothing can be mounted: {done.stderr.decode()}" if done.returncode else None


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param("full()", id="full-while-it-is-used"),
        pytest.param("full_from_the_start(65536)", id="full-before-its-folder-is-made"),
        pytest.param("full_from_the_start(49152)", id="full-while-its-tables-are-made"),
        pytest.param("damaged_and_full()", id="damaged-on-a-full-disk-sets-nothing-aside"),
        pytest.param("read_only()", id="read-only"),
    ],
)
def test_a_real_disk(tmp_path, scenario):
    if reason := mounting():
        pytest.skip(reason)
    command = ["unshare", "-m", sys.executable, "-c", SMALL_DISK, str(tmp_path), scenario]
    done = subprocess.run(command, capture_output=True, text=True, timeout=25, check=False)
    assert done.stdout == "done\n", done.stderr


FILE_SIZE = """
import asyncio, resource, signal, sys
from pathlib import Path
from drakit_nodeplugin.state import checkpoint as module
from drakit_nodeplugin.state.checkpoint import Checkpoint, CheckpointError
from tests.fakes.checkpoints import stored_claim

module.REOPEN_SECONDS = 0

async def main():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    checkpoint = Checkpoint(Path(sys.argv[1]))
    await checkpoint.open()
    stored = (await checkpoint.write([stored_claim("a")])).written
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    try:
        await checkpoint.write([stored_claim("large", cdi_spec="x" * 300_000)])
    except CheckpointError as error:
        assert "check space" in str(error), error
    else:
        raise AssertionError("it was written")
    assert checkpoint.unusable and not checkpoint.broken
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert await checkpoint.find(["uid-a", "uid-large"]) == stored
    assert checkpoint.unusable is None
    await checkpoint.close()

asyncio.run(main())
print("done")
"""


def test_an_error_of_the_disk_is_no_damage_and_it_is_opened_again(path):
    command = [sys.executable, "-c", FILE_SIZE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=25, check=False)
    assert done.stdout == "done\n", done.stderr


# ---------------------------------------------------------------- no folder


@pytest.mark.looptime
@pytest.mark.parametrize("by_hand", [False, True], ids=["once-a-second", "at-once-by-hand"])
async def test_a_folder_that_cannot_be_made_is_tried_again(tmp_path, by_hand):
    obstacle = tmp_path / "camera.example.com"
    obstacle.write_text("no folder")
    checkpoint = Checkpoint(obstacle / "checkpoint.db")
    with pytest.raises(CheckpointError, match="check space and permissions of its directory"):
        await checkpoint.open()
    first = checkpoint.unusable
    obstacle.unlink()

    if by_hand:
        await checkpoint.open()
    else:
        with pytest.raises(CheckpointError) as raised:
            await checkpoint.uids()
        assert str(raised.value) == first
        await asyncio.sleep(1)
    assert await checkpoint.uids() == set()
    assert checkpoint.unusable is None
    await checkpoint.close()


# ---------------------------------------------------------------- other programs


async def test_a_database_that_another_program_holds_is_reported_as_such(path, monkeypatch):
    monkeypatch.setattr(schema, "BUSY_SECONDS", 0.05)
    async with opened(path) as checkpoint:
        with closing(sqlite3.connect(path)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(CheckpointError, match="another program has held it for 5 s"):
                await checkpoint.write([A])
        assert checkpoint.unusable is None
        assert set((await checkpoint.write([A])).written) == {A.uid}


@pytest.mark.looptime
async def test_a_database_of_a_later_version_is_used_once_its_schema_is_an_older_one_again(path):
    stored = await fill(path, count=2)
    later = schema.VERSION + 1
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {later}")
    checkpoint = Checkpoint(path)
    with pytest.raises(CheckpointError, match=f"needs schema version {later} or later"):
        await checkpoint.open()
    assert checkpoint.broken is None

    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {schema.READABLE_FROM}")
    await asyncio.sleep(1)
    assert await checkpoint.uids() == {claim.uid for claim in stored}
    assert checkpoint.unusable is None
    await checkpoint.close()


async def test_devices_without_a_claim_are_damage(path):
    async with opened(path) as checkpoint:
        await checkpoint.write([A, B])
        with closing(sqlite3.connect(path)) as other, other:  # as nothing of ours does
            other.execute("DELETE FROM claims WHERE uid = 'uid-a'")
        with pytest.raises(CheckpointError, match="devices without a claim"):
            await checkpoint.write([replace(A, uid="uid-other")])
        assert checkpoint.unusable is None
        assert checkpoint.broken is not None
    assert (await reopen(path))[1] is not None
