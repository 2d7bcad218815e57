"""Writes to a checkpoint are detected by its files alone."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from drakit_nodeplugin.file_poller import UNCHANGED_POLLS
from drakit_nodeplugin.state.checkpoint import Checkpoint


@pytest.fixture
def database(tmp_path):
    """A database that another process has open, and that was written long ago."""
    path = tmp_path / "checkpoint.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE claims (uid TEXT)")
        age(path)
        yield path, connection


def age(path: Path) -> None:
    for file in (path, Path(f"{path}-wal")):
        os.utime(file, (1, 1))


def test_an_old_write_is_reported_once(database):
    path, _ = database
    watch = Checkpoint(path).watch()
    assert [watch.changed() for _ in range(3)] == [True, False, False]


def test_a_write_of_another_connection_is_a_change(database):
    path, connection = database
    watch = Checkpoint(path).watch()
    watch.changed()
    connection.execute("INSERT INTO claims VALUES ('a')")
    assert watch.changed()
    assert watch.changed(), "it may have been flushed only now"
    age(path)
    assert [watch.changed() for _ in range(2)] == [True, False]


def test_a_read_is_no_change(database):
    path, connection = database
    watch = Checkpoint(path).watch()
    watch.changed()
    assert connection.execute("SELECT * FROM claims").fetchall() == []
    assert not watch.changed()


def test_a_database_that_is_gone_is_a_change_and_then_none(database):
    path, _ = database
    watch = Checkpoint(path).watch()
    watch.changed()
    path.unlink()
    assert watch.changed()
    assert not watch.changed()


def test_without_a_change_one_is_reported_now_and_then_anyway(database):
    path, _ = database
    watch = Checkpoint(path).watch()
    reported = [watch.changed() for _ in range(2 * UNCHANGED_POLLS + 3)]
    assert [number for number, changed in enumerate(reported) if changed] == [
        0,
        UNCHANGED_POLLS + 1,
        2 * UNCHANGED_POLLS + 2,
    ]
