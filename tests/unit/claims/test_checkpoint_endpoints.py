"""Endpoints in the checkpoint: written rows are read back, and damaged rows affect no claim."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drakit_nodeplugin.state import rows
from drakit_nodeplugin.state.checkpoint import Checkpoint, CheckpointError
from drakit_nodeplugin.state.records import DamagedRowError, StoredEndpoint, checksum, load_endpoint
from tests.fakes.checkpoints import fill, stored_claim

USB = StoredEndpoint(
    name="usb",
    pools={"node-1": ("cam-0", "cam-1"), "node-1/usb": ()},
    gone={"node-1": ("cam-1",)},
    evicting={"node-1": ("cam-0", "cam-1")},
)
NET = StoredEndpoint(name="net", pools={}, stopped_at=1795251182.25, removing=True)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "camera.example.com" / "checkpoint.db"


@pytest.fixture
async def checkpoint(path):
    opened = Checkpoint(path)
    await opened.open()
    yield opened
    await opened.close()


def change(path, *statements):
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


async def reopened(path):
    checkpoint = Checkpoint(path)
    await checkpoint.open()
    try:
        return await checkpoint.endpoints(), await checkpoint.uids(), checkpoint.damage
    finally:
        await checkpoint.close()


# ---------------------------------------------------------------- what is stored


def test_a_row_of_an_earlier_version_has_no_devices_that_are_gone():
    body = orjson.dumps({"name": "usb", "pools": {"node-1": ["cam-0"]}, "removing": False})
    endpoint = load_endpoint("usb", body, expected=checksum(body))
    assert endpoint == StoredEndpoint(name="usb", pools={"node-1": ("cam-0",)})


async def test_written_endpoints_survive_a_restart(path, checkpoint):
    store = checkpoint
    assert await store.endpoints() == []
    await store.write_endpoints([USB])
    await store.write_endpoints([NET])
    assert await store.endpoints() == [NET, USB]
    await checkpoint.close()
    assert await reopened(path) == ([NET, USB], set(), None)


async def test_an_endpoint_replaces_its_stored_row(checkpoint):
    for endpoint in (USB, NET, StoredEndpoint(name="usb", pools={"node-1": ("cam-9",)})):
        await checkpoint.write_endpoints([endpoint])
    assert await checkpoint.endpoints() == [NET, endpoint]


async def test_endpoints_are_forgotten_and_one_that_is_not_there_is_fine(checkpoint):
    for endpoint in (USB, NET):
        await checkpoint.write_endpoints([endpoint])
    await checkpoint.forget_endpoints(["usb", "none"])
    assert await checkpoint.endpoints() == [NET]
    await checkpoint.forget_endpoints({"net"})
    assert await checkpoint.endpoints() == []


async def test_the_largest_endpoint_is_stored(path, checkpoint):
    pools = {f"node-1/{n}": tuple(f"gpu-{n}-slice-{m:05}" for m in range(1280)) for n in range(10)}
    largest = StoredEndpoint(name="gpu", pools=pools)
    await checkpoint.write_endpoints([largest])
    assert await checkpoint.endpoints() == [largest]


async def test_each_write_is_one_transaction_and_nothing_to_forget_is_none(checkpoint):
    seconds = []
    checkpoint.on_transaction = seconds.append
    await checkpoint.write_endpoints([USB])
    await checkpoint.endpoints()
    await checkpoint.forget_endpoints([])
    assert len(seconds) == 1
    await checkpoint.forget_endpoints(["usb", "net"])
    assert len(seconds) == 2


async def test_claims_do_not_notice(path, checkpoint):
    written = (await checkpoint.write([stored_claim("a")])).written
    await checkpoint.write_endpoints([USB])
    await checkpoint.forget_endpoints(["usb"])
    again = (await checkpoint.write(list(written.values()))).written
    assert again["uid-a"].generation == written["uid-a"].generation + 1
    straight = stored_claim("b", state="prepared")
    assert set((await checkpoint.write([straight])).written) == {"uid-b"}


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


async def test_a_full_disk_keeps_what_was_stored_and_the_next_write_succeeds(checkpoint):
    await checkpoint.write_endpoints([USB])
    ((before,),) = checkpoint._connection.execute("PRAGMA max_page_count").fetchall()
    checkpoint._connection.execute("PRAGMA max_page_count = 1")
    large = StoredEndpoint(name="usb", pools={"node-1": tuple(f"cam-{n}" for n in range(9999))})

    with pytest.raises(CheckpointError, match="check space and permissions"):
        await checkpoint.write_endpoints([large])

    assert await checkpoint.endpoints() == [USB]
    checkpoint._connection.execute(f"PRAGMA max_page_count = {before}")
    await checkpoint.write_endpoints([large])
    assert await checkpoint.endpoints() == [large]
    assert checkpoint.unusable is None


async def test_a_database_with_other_damage_is_not_changed(path, checkpoint):
    await checkpoint.write([stored_claim("a")])
    change(path, "UPDATE bodies SET checksum = 1")
    with pytest.raises(CheckpointError):
        await checkpoint.find(["uid-a"])
    with pytest.raises(CheckpointError, match="is damaged"):
        await checkpoint.write_endpoints([USB])


async def test_a_checkpoint_that_is_not_open_fails(path):
    for call in (
        Checkpoint(path).endpoints(),
        Checkpoint(path).write_endpoints([USB]),
        Checkpoint(path).forget_endpoints(["usb"]),
        Checkpoint(path).held_devices(),
    ):
        with pytest.raises(CheckpointError, match="is not open"):
            await call


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
    checkpoint = Checkpoint(path)
    await checkpoint.open()
    for endpoint in (USB, NET):
        await checkpoint.write_endpoints([endpoint])
    change(path, statement)

    assert await checkpoint.endpoints() == [NET]

    assert checkpoint.broken is None
    await checkpoint.close()
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


async def test_a_damaged_row_is_written_over(path, checkpoint):
    await checkpoint.write_endpoints([USB])
    change(path, "UPDATE endpoints SET checksum = 1")
    assert await checkpoint.endpoints() == []
    await checkpoint.write_endpoints([USB])
    assert await checkpoint.endpoints() == [USB]


async def test_the_endpoints_of_a_damaged_database_are_copied_too(path, checkpoint):
    await fill(path, count=3)
    for endpoint in (USB, NET, StoredEndpoint(name="bad", pools={})):
        await checkpoint.write_endpoints([endpoint])
    await checkpoint.close()
    change(
        path,
        "UPDATE bodies SET checksum = 1 WHERE id = 2",
        "UPDATE endpoints SET checksum = 1 WHERE name = 'bad'",
    )
    again = Checkpoint(path)
    await again.open()
    assert "uid-001" in again.damage
    assert await again.endpoints() == [NET, USB]
    await again.close()


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
    change(path, statement)
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


def test_a_row_without_later_fields_gets_their_defaults():
    body = orjson.dumps({"name": "usb", "pools": {"node-1": ["cam-0"]}})
    found = load_endpoint("usb", body, expected=checksum(body))
    assert found == StoredEndpoint(name="usb", pools={"node-1": ("cam-0",)})


texts = st.text(st.characters(codec="utf-8"), max_size=9)


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
