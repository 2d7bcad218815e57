"""Only root may read the opaque parameters of tenants, regardless of the umask."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing

import pytest

from tests.fakes.checkpoints import fill, reopen, stored_claim
from tests.unit.claims.conftest import opened


@pytest.fixture(params=[0o000, 0o777], ids=["umask-000", "umask-777"], autouse=True)
def umask(request, tmp_path):
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(path) -> dict[str, str]:
    """Return the modes of a directory and its content."""
    found = {"": path.parent, **{file.name: file for file in path.parent.iterdir()}}
    return {name: f"{file.stat().st_mode & 0o777:o}" for name, file in found.items()}


def open_to_all(path) -> None:
    path.parent.chmod(0o755)
    for file in path.parent.iterdir():
        file.chmod(0o644)


PRIVATE = {
    "": "700",
    "checkpoint.db": "600",
    "checkpoint.db-shm": "600",
    "checkpoint.db-wal": "600",
}


async def test_a_new_database_and_the_files_beside_it(path, checkpoint):
    await checkpoint.write([stored_claim("a")])
    assert modes(path) == PRIVATE


async def test_one_that_an_earlier_version_left_open_to_all_after_a_crash(path, tmp_path):
    crash = tmp_path / "crash" / "checkpoint.db"
    crash.parent.mkdir(mode=0o777)
    crash.parent.chmod(0o777)
    await fill(path, crash=crash)
    open_to_all(crash)
    async with opened(crash):
        assert modes(crash) == PRIVATE


async def test_a_damaged_one_and_the_one_that_takes_its_place(path):
    await fill(path, count=3)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE bodies SET checksum = 1 WHERE id = 2")
    open_to_all(path)
    await reopen(path)
    found = modes(path)
    assert found.pop("") == "700"
    assert len(found) == 2
    assert set(found.values()) == {"600"}
    open_to_all(path)
    await reopen(path)
    assert set(modes(path).values()) == {"700", "600"}


async def test_one_that_was_removed_while_it_was_open_and_is_written_again(path):
    async with opened(path) as checkpoint:
        await checkpoint.write([stored_claim("a")])
        shutil.rmtree(path.parent)
        await checkpoint.write([stored_claim("b")])
        assert modes(path) == PRIVATE
