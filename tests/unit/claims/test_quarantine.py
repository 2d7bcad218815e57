"""The copied rows of a damaged database, and the knowledge about the rest."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing

import pytest

from drakit_nodeplugin.state import rows, schema
from drakit_nodeplugin.state.quarantine import copy_rows
from tests.fakes.checkpoints import fill, stored_claim, stored_device

PAGE = 4096
CLAIMS = 60
UIDS = {f"uid-{number:03}" for number in range(CLAIMS)}


@pytest.fixture
def target(tmp_path):
    with closing(schema.connect(tmp_path / "target.db")) as connection:
        with rows.transaction(connection):
            schema.create(connection)
        yield connection


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "checkpoint.db"
    asyncio.run(fill(path, count=CLAIMS))
    return path


def copied(path, target):
    """Copy the rows; return the copied claims, and those that are named but were not copied."""
    with rows.transaction(target):
        lost = copy_rows(path, target)
    return rows.uids(target, state=None, boot_id=None), lost


def leaves(path, tree):
    """Return the leaf pages of a tree, in their order."""
    with closing(sqlite3.connect(path)) as connection:
        (root,) = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = ?", (tree,)
        ).fetchone()
    data = path.read_bytes()
    page = data[(root - 1) * PAGE : root * PAGE]
    assert page[0] == 5, "the tree has one level only"
    cells = int.from_bytes(page[3:5])
    starts = [int.from_bytes(page[12 + 2 * n : 14 + 2 * n]) for n in range(cells)]
    return [int.from_bytes(page[start : start + 4]) for start in starts] + [
        int.from_bytes(page[8:12])
    ]


def zero(path, *pages):
    with path.open("r+b") as file:
        for page in pages:
            file.seek((page - 1) * PAGE)
            file.write(bytes(PAGE))


@pytest.mark.parametrize(
    "choose",
    [
        pytest.param(lambda pages: pages[:1], id="the-first"),
        pytest.param(lambda pages: pages[-1:], id="the-last"),
        pytest.param(lambda pages: pages[2:3], id="one-in-the-middle"),
        pytest.param(lambda pages: pages[1:-1], id="all-but-the-ends"),
    ],
)
def test_pages_of_bodies_that_are_gone_cost_their_rows_and_these_are_named(path, target, choose):
    pages = leaves(path, "bodies")
    zero(path, *choose(pages))
    kept, lost = copied(path, target)
    assert 0 < len(kept) < CLAIMS
    assert lost == UIDS - kept


def test_no_row_depends_on_the_definition_of_another_table(path, target):
    data = path.read_bytes()
    path.write_bytes(data.replace(b"CREATE TABLE counters", b"CREATE TABLx counters"))
    assert copied(path, target)[0] == UIDS


def test_lost_claims_are_named_by_the_index_of_uids(path, target):
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT name, rootpage FROM sqlite_master"
        roots = dict(connection.execute(query))
    zero(path, roots["bodies"], roots["claims"])
    assert copied(path, target) == (set(), UIDS)


def test_one_of_two_claims_with_the_same_device_is_kept(tmp_path, target):
    path = tmp_path / "double.db"
    with closing(schema.connect(path)) as connection, rows.transaction(connection):
        schema.create(connection)
        connection.execute("DROP INDEX exclusive_device")
        for name in ("a", "b"):
            claim = stored_claim(name, devices=(stored_device("cam-0"),))
            rows.write(connection, [claim])
            connection.execute("UPDATE devices SET hold = 'admin'")
    assert copied(path, target) == ({"uid-a"}, {"uid-b"})


def test_new_generations_are_above_all_that_were_copied(tmp_path, target):
    path = tmp_path / "future.db"
    with closing(schema.connect(path)) as connection, rows.transaction(connection):
        schema.create(connection)
        connection.execute("UPDATE meta SET value = ? WHERE name = 'generation'", (2**60,))
        rows.write(connection, [stored_claim("a")])
    copied(path, target)
    with rows.transaction(target):
        written = rows.write(target, [stored_claim("b")]).written
    assert written["uid-b"].generation > 2**60
