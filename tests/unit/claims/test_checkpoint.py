"""The checkpoint's contract while its file is intact."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from drakit_nodeplugin.state.checkpoint import Checkpoint, CheckpointError
from drakit_nodeplugin.state.records import DamagedRowError, StoredEndpoint, checksum, load
from tests.fakes.checkpoints import delete, fill, reopen, stored_claim, stored_device
from tests.unit.claims.conftest import opened

A, B = stored_claim("a"), stored_claim("b")


async def prepare(checkpoint, *claims):
    """Write claims as prepared, after an intent; return the stored claims."""
    begun = (await checkpoint.write(claims)).written
    done = [replace(begun[claim.uid], state="prepared", cdi_spec="{}") for claim in claims]
    written = (await checkpoint.write(done)).written
    return [written[claim.uid] for claim in claims]


# ---------------------------------------------------------------- what is stored


async def test_written_rows_survive_a_restart_and_no_temporary_file_remains(path):
    stored = await fill(path, count=3)
    assert await reopen(path) == ({claim.uid: claim for claim in stored}, None)
    assert [file.name for file in path.parent.iterdir()] == ["checkpoint.db"]


@pytest.mark.parametrize("body", [b"[]", b"null", b"5", b"{}", b'{"uid": 1}', b"{", b'"state"'])
def test_bytes_that_are_no_claim_are_damage_although_their_checksum_is_right(body):
    with pytest.raises(DamagedRowError, match="it cannot be read"):
        load(body, expected=checksum(body))


async def test_a_config_that_is_nested_beyond_measure_is_refused_and_nothing_is_written(checkpoint):
    config = {}
    for _ in range(5000):
        config = {"a": config}
    deep = stored_claim("deep", devices=(stored_device("cam-9", configs=(config,)),))
    with pytest.raises(CheckpointError, match="claim lab/deep cannot be written as JSON"):
        await checkpoint.write([A, deep])
    assert await checkpoint.uids() == set()
    assert checkpoint.unusable is None
    assert set((await checkpoint.write([A])).written) == {A.uid}


# ---------------------------------------------------------------- generations


async def test_each_write_gives_a_generation_that_was_never_given(path, checkpoint):
    first = (await checkpoint.write([A, B])).written
    second = (await checkpoint.write(list(first.values()))).written
    await delete(checkpoint, list(second.values()))
    await checkpoint.close()
    async with opened(path) as again:
        third = (await again.write([A])).written

        generations = [c.generation for batch in (first, second, third) for c in batch.values()]
        assert generations == sorted(set(generations))
        assert generations[0] > 0
        assert third[A.uid] == (await again.find([A.uid]))[A.uid]


async def test_a_writer_with_another_generation_changes_nothing(checkpoint):
    (known,) = await prepare(checkpoint, A)
    late = [replace(known, generation=known.generation - 1), B]

    outcome = await checkpoint.write(late)

    assert outcome.changed == {A.uid}
    assert set(outcome.written) == {B.uid}
    assert (await checkpoint.find([A.uid])) == {A.uid: known}
    assert (await checkpoint.write([A])).changed == {A.uid}, "it expects no row"
    assert await delete(checkpoint, [replace(known, generation=1)]) == {A.uid}
    assert await delete(checkpoint, [known]) == set()
    assert (await checkpoint.write([known])).changed == {A.uid}, "its row is deleted"
    assert await checkpoint.uids() == {B.uid}
    assert await delete(checkpoint, [known, replace(known, uid="uid-c")]) == set()


# ---------------------------------------------------------------- devices


def on(name, *devices, **fields):
    return stored_claim(name, devices=tuple(stored_device(d, **fields) for d in devices))


async def test_a_claim_that_gets_other_devices_frees_those_it_had(checkpoint):
    (stored,) = await prepare(checkpoint, on("a", "cam-0", "cam-1"))
    moved = replace(stored, devices=on("a", "cam-1", "cam-2").devices)
    outcome = await checkpoint.write([moved, on("b", "cam-0"), on("c", "cam-2")])
    assert set(outcome.written) == {"uid-a", "uid-b"}
    assert outcome.held["uid-c"].holder.uid == "uid-a"


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="an-exclusive-claim"),
        pytest.param({"share_id": "share-1"}, id="a-share"),
        pytest.param({"admin_access": True}, id="another-admin-access"),
    ],
)
async def test_admin_access_goes_beside(checkpoint, fields):
    admin = {"admin_access": True, "share_id": "share-9"}
    batch = [on("b", "cam-0", **admin), on("a", "cam-0", **fields), on("c", "cam-0", **admin)]
    assert len((await checkpoint.write(batch)).written) == 3


SHARE = {"share_id": "share-1"}


@pytest.mark.parametrize("together", [False, True], ids=["a-row", "an-earlier-claim-of-the-batch"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(SHARE, {}, id="an-exclusive-claim-is-refused-beside-a-share-of"),
        pytest.param({}, SHARE, id="a-share-is-refused-beside-an-exclusive-claim-of"),
    ],
)
async def test_shares_and_exclusive_claims_of_one_device(checkpoint, first, second, together):
    holder, wanted = on("a", "cam-0", **first), on("b", "cam-1", "cam-0", **second)
    batch = [holder, wanted, on("c", "cam-1")]
    if not together:
        await checkpoint.write([batch.pop(0)])

    outcome = await checkpoint.write(batch)

    assert outcome.held["uid-b"].device == wanted.devices[1]
    assert outcome.held["uid-b"].holder.uid == "uid-a"
    # A rejected claim holds none of its devices.
    assert "uid-c" in outcome.written
    await delete(checkpoint, list((await checkpoint.find(["uid-a"])).values()))
    assert set((await checkpoint.write([on("b", "cam-0", **second)])).written) == {"uid-b"}


async def test_an_exclusive_claim_waits_for_the_last_share_whatever_their_state(checkpoint):
    names = ("a", "b", "c")
    shares = await prepare(checkpoint, *(on(name, "cam-0", share_id=name) for name in names))
    wanted = on("d", "cam-0")
    for number, share in enumerate(shares):
        refused = (await checkpoint.write([wanted])).held["uid-d"]
        assert refused.holder.uid == shares[number].uid  # the same one is named each time
        leaving = (await checkpoint.write([replace(share, state="unpreparing")])).written
        assert (await checkpoint.write([wanted])).held["uid-d"].holder == leaving[share.uid]
        await delete(checkpoint, list(leaving.values()))
    assert set((await checkpoint.write([wanted])).written) == {"uid-d"}


async def test_a_claim_that_has_a_device_is_not_in_its_own_way(checkpoint):
    both = replace(A, devices=(stored_device("cam-0"), stored_device("cam-0", share_id="share-1")))
    (stored,) = await prepare(checkpoint, both)
    alone = replace(stored, devices=both.devices[:1])
    (stored,) = (await checkpoint.write([alone])).written.values()
    shared = replace(stored, devices=both.devices[1:])
    batch = [shared, on("b", "cam-0", share_id="share-2")]
    assert len((await checkpoint.write(batch)).written) == 2
    (stored,) = (await checkpoint.find([A.uid])).values()
    refused = (await checkpoint.write([replace(stored, devices=alone.devices)])).held
    assert refused[A.uid].holder.uid == "uid-b"


async def test_a_share_that_is_given_up_is_free_for_the_rest_of_the_batch(checkpoint):
    (stored,) = await prepare(checkpoint, on("a", "cam-0", **SHARE))
    moved = replace(stored, devices=on("a", "cam-1").devices)
    assert (await checkpoint.write([on("b", "cam-0"), moved])).held.keys() == {"uid-b"}
    (stored,) = (await checkpoint.find(["uid-a"])).values()
    back = (
        await checkpoint.write([replace(stored, devices=on("a", "cam-0", **SHARE).devices)])
    ).written
    moved = replace(back["uid-a"], devices=moved.devices)
    assert (await checkpoint.write([moved, on("b", "cam-0")])).written.keys() == {"uid-a", "uid-b"}


async def test_a_device_that_two_requests_of_a_claim_name_is_held_once(checkpoint):
    twice = stored_claim("a", devices=(stored_device("cam-0"), stored_device("cam-0")))
    (stored,) = await prepare(checkpoint, twice)
    assert stored.devices == twice.devices


# ---------------------------------------------------------------- questions


async def test_claims_are_found_by_state_and_boot(checkpoint):
    await prepare(checkpoint, A, replace(B, boot_id="boot-2"))
    await checkpoint.write([stored_claim("c")])

    assert [claim.uid for claim in await checkpoint.in_state("preparing")] == ["uid-c"]
    assert await checkpoint.uids() == {"uid-a", "uid-b", "uid-c"}
    assert await checkpoint.uids(state="prepared") == {"uid-a", "uid-b"}
    assert await checkpoint.uids(boot_id="boot-1") == {"uid-a", "uid-c"}
    assert await checkpoint.uids(state="prepared", boot_id="boot-2") == {"uid-b"}
    assert len(await checkpoint.uids()) == 3
    assert set(await checkpoint.find(["uid-a", "uid-none"])) == {"uid-a"}
    assert await checkpoint.find([]) == {}


async def test_the_devices_of_all_rows_are_named_by_pool(checkpoint):
    elsewhere = replace(stored_device("cam-0"), pool="node-1/usb")
    assert await checkpoint.devices_in_use() == {}
    await prepare(checkpoint, on("a", "cam-0", "cam-1"), on("b", "cam-2", share_id="1"))
    await checkpoint.write([on("c", "cam-2", share_id="2"), on("d", "cam-3", admin_access=True)])
    await checkpoint.write([stored_claim("e", devices=(elsewhere,))])
    assert await checkpoint.devices_in_use() == {
        "node-1": {"cam-0", "cam-1", "cam-2"},  # not of the claim with admin access
        "node-1/usb": {"cam-0"},
    }


async def test_more_claims_than_a_statement_takes_are_written_found_and_listed_in_order(checkpoint):
    many = [stored_claim(f"{number:04}") for number in range(1203)]
    written = (await checkpoint.write(many)).written
    assert len(written) == 1203
    assert await checkpoint.find(list(written)) == written
    pages = [page async for page in checkpoint.pages(size=500)]
    assert [len(page) for page in pages] == [500, 500, 203]
    assert [claim for page in pages for claim in page] == [*written.values()]
    assert (await checkpoint.write([replace(c, uid=f"{c.uid}-2") for c in many])).held.keys() == {
        f"{uid}-2" for uid in written
    }
    assert await delete(checkpoint, list(written.values())) == set()
    assert await checkpoint.uids() == set()


async def test_every_call_fails_before_it_is_opened_and_after_it_is_closed(path):
    checkpoint = Checkpoint(path)

    async def every_call_fails():
        for call in (
            checkpoint.uids(),
            checkpoint.devices_in_use(),
            checkpoint.endpoints(),
            checkpoint.write_endpoints([StoredEndpoint(name="usb", pools={})]),
            checkpoint.forget_endpoints(["usb"]),
        ):
            with pytest.raises(CheckpointError, match="is not open"):
                await call

    await every_call_fails()
    await checkpoint.open()
    await checkpoint.open()  # as a retry of somebody
    assert await checkpoint.uids() == set()
    await checkpoint.close()
    await checkpoint.close()
    await every_call_fails()


# ---------------------------------------------------------------- changes


async def test_each_way_to_change_a_row_wakes_those_that_wait_for_changes(checkpoint):
    async def changed(work):
        waiting = asyncio.create_task(checkpoint.revision.after(checkpoint.revision.number))
        result = await work
        async with asyncio.timeout(5):
            await waiting
        return result

    (row,) = (await changed(checkpoint.write([A]))).written.values()
    (row,) = (await changed(checkpoint.write([replace(row, state="prepared")]))).written.values()
    await changed(delete(checkpoint, [row]))
    (row,) = (await changed(checkpoint.write([A]))).written.values()
    assert await changed(checkpoint.forget(A.uid, row.generation))


async def test_what_changes_no_row_wakes_nobody(checkpoint):
    seconds = []
    checkpoint.on_transaction = seconds.append
    (row,) = (await checkpoint.write([A])).written.values()
    seen = checkpoint.revision.number
    await checkpoint.uids()
    assert (await checkpoint.write([])).written == {}
    assert await delete(checkpoint, []) == set()
    assert len(seconds) == 1, "nothing to write or delete costs no transaction"
    assert 0 < seconds[0] < 30
    assert await checkpoint.confirm([row])
    assert await checkpoint.clear([B.uid]) == ({}, {})
    assert not await checkpoint.forget(A.uid, row.generation - 1)
    assert not await checkpoint.forget(B.uid, row.generation)
    assert await checkpoint.held_beside_unpreparing() == []
    with pytest.raises(CheckpointError, match="claim lab/b appears twice"):
        await checkpoint.write([stored_claim("c"), B, B])
    assert await checkpoint.uids() == {A.uid}
    assert checkpoint.revision.number == seen
