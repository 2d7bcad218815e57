"""Endpoints in the checkpoint: written rows are read back, and damaged rows affect no claim."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drakit_nodeplugin.state import rows
from drakit_nodeplugin.state.checkpoint import Checkpoint, CheckpointError
from drakit_nodeplugin.state.records import DamagedRowError, StoredEndpoint, checksum, load_endpoint
from tests.fakes.checkpoints import fill
from tests.unit.claims.conftest import opened, sql

USB = StoredEndpoint(
    name="usb",
    pools={"node-1": ("cam-0", "cam-1"), "node-1/usb": ()},
    gone={"node-1": ("cam-1",)},
    evicting={"node-1": ("cam-0", "cam-1")},
)
NET = StoredEndpoint(name="net", pools={}, stopped_at=1795251182.25, removing=True)


async def reopened(path):
    checkpoint = Checkpoint(path)
    await checkpoint.open()
    try:
        return await checkpoint.endpoints(), await checkpoint.uids(), checkpoint.damage
    finally:
        await checkpoint.close()


# ---------------------------------------------------------------- what is stored


async def test_written_endpoints_survive_a_restart_until_they_are_forgotten(path, checkpoint):
    assert await checkpoint.endpoints() == []
    await checkpoint.write_endpoints([USB])
    await checkpoint.write_endpoints([NET])
    assert await checkpoint.endpoints() == [NET, USB]
    await checkpoint.close()
    assert await reopened(path) == ([NET, USB], set(), None)
    async with opened(path) as again:
        await again.forget_endpoints(["usb", "none"])
        assert await again.endpoints() == [NET]


def test_a_row_without_later_fields_gets_their_defaults():
    body = orjson.dumps({"name": "usb", "pools": {"node-1": ["cam-0"]}})
    found = load_endpoint("usb", body, expected=checksum(body))
    assert found == StoredEndpoint(name="usb", pools={"node-1": ("cam-0",)})


# ---------------------------------------------------------------- errors


async def test_a_name_that_is_no_text_is_refused_and_nothing_is_written(checkpoint):
    with pytest.raises(
        CheckpointError,
        match="rejects the entry: endpoint 'a\\\\ud800' cannot be written as JSON",
    ):
        await checkpoint.write_endpoints([StoredEndpoint(name="a\ud800", pools={})])
    await checkpoint.write_endpoints([USB])
    assert await checkpoint.endpoints() == [USB]
    assert checkpoint.unusable is None


# ---------------------------------------------------------------- damage


DAMAGED = {
    "a-checksum": "UPDATE endpoints SET checksum = 1 WHERE name = 'usb'",
    "a-checksum-of-another-type": "UPDATE endpoints SET checksum = 'x' WHERE name = 'usb'",
    "a-body": "UPDATE endpoints SET body = CAST(replace(body, 'cam-0', 'cam-9') AS BLOB)"
    " WHERE name = 'usb'",
    "a-body-of-another-type": "UPDATE endpoints SET body = CAST(body AS TEXT) WHERE name = 'usb'",
    "a-name": "UPDATE endpoints SET name = 'usb-2' WHERE name = 'usb'",
    "a-name-of-another-type": "UPDATE endpoints SET name = x'00' WHERE name = 'usb'",
}


@pytest.mark.parametrize("statement", DAMAGED.values(), ids=DAMAGED)
async def test_a_damaged_row_is_passed_over_and_dropped_at_the_next_start(path, statement, caplog):
    await fill(path, count=3)
    async with opened(path) as checkpoint:
        for endpoint in (USB, NET):
            await checkpoint.write_endpoints([endpoint])
        sql(path, statement)

        assert await checkpoint.endpoints() == [NET]

        assert checkpoint.broken is None
    caplog.set_level(logging.WARNING)
    uids = {"uid-000", "uid-001", "uid-002"}
    assert await reopened(path) == ([NET], uids, None)
    (record,) = caplog.records
    assert record.getMessage() == "damaged endpoint row dropped"
    assert record.reason.startswith(f"the row of endpoint {record.endpoint}: it")
    caplog.clear()
    assert await reopened(path) == ([NET], uids, None)
    assert caplog.records == []
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM endpoints").fetchone() == (1,)


async def test_the_endpoints_of_a_damaged_database_are_copied_too(path, checkpoint):
    await fill(path, count=3)
    for endpoint in (USB, NET, StoredEndpoint(name="bad", pools={})):
        await checkpoint.write_endpoints([endpoint])
    await checkpoint.close()
    sql(
        path,
        "UPDATE bodies SET checksum = 1 WHERE id = 2",
        "UPDATE endpoints SET checksum = 1 WHERE name = 'bad'",
    )
    async with opened(path) as again:
        assert "uid-001" in again.damage
        assert await again.endpoints() == [NET, USB]


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param("DROP TABLE endpoints", id="a-table-that-is-missing"),
        pytest.param("ALTER TABLE endpoints ADD COLUMN x", id="another-table"),
    ],
)
async def test_a_table_that_is_not_ours_costs_no_claim(path, checkpoint, statement):
    await fill(path, count=3)
    await checkpoint.write_endpoints([USB])
    await checkpoint.close()
    sql(path, statement)
    endpoints, uids, damage = await reopened(path)
    assert damage.startswith("its tables are not those of a checkpoint")
    assert uids == {"uid-000", "uid-001", "uid-002"}
    assert endpoints == ([USB] if "ALTER" in statement else [])


@pytest.mark.parametrize(
    "body",
    [
        *(b"[]", b"null", b"5", b"{}", b"{", b'"name"', b'{"name":"usb"}'),
        b'{"name":"usb","pools":[]}',
        b'{"name":5,"pools":{}}',
    ],
)
def test_bytes_that_are_no_endpoint_are_damage_although_their_checksum_is_right(body):
    with pytest.raises(DamagedRowError):
        load_endpoint("usb", body, expected=checksum(body))


texts = st.text(st.characters(codec="utf-8"), max_size=9)


@settings(max_examples=40)
@given(
    st.builds(
        StoredEndpoint,
        name=texts,
        pools=st.dictionaries(texts, st.lists(texts, max_size=3).map(tuple), max_size=3),
        stopped_at=st.none() | st.floats(allow_nan=False, allow_infinity=False),
        removing=st.booleans(),
    )
)
def test_every_endpoint_comes_back(endpoint):
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE endpoints (name PRIMARY KEY, checksum, body)")
        rows.write_endpoints(connection, [endpoint])
        assert rows.endpoints(connection) == [endpoint]
        assert rows.damaged_endpoints(connection) == {}
