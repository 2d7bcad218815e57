"""Answers from the checkpoint's cache, and the detection of stale ones."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from drakit_nodeplugin.state.cdi_files import ClaimSpecs
from drakit_nodeplugin.state.checkpoint import Checkpoint
from drakit_nodeplugin.state.inspection import forget
from tests.fakes.checkpoints import delete, stored_claim, stored_device
from tests.fakes.claims import DRIVER, claim_body, reference

A = stored_claim("a", cdi_spec="{}", devices=(stored_device("cam-a", consumes={}),))


@pytest.fixture
def specs(tmp_path) -> ClaimSpecs:
    return ClaimSpecs(DRIVER, tmp_path / "cdi")


@pytest.fixture
async def checkpoint(tmp_path, specs):
    checkpoint = Checkpoint(tmp_path / "checkpoint.db", owner="one", files=specs)
    await checkpoint.open()
    yield checkpoint
    await checkpoint.close()


@pytest.fixture
async def other(tmp_path, checkpoint):
    """Another process, which opens the database after us."""
    other = Checkpoint(tmp_path / "checkpoint.db", owner="other")
    await other.open()
    yield other
    await other.close()


def without_thread(checkpoint, monkeypatch) -> None:
    async def refuse(work, **kwargs):
        raise AssertionError("the writer's thread is not needed")

    monkeypatch.setattr(checkpoint, "_run", refuse)


async def test_own_rows_and_unknown_claims_need_no_thread(checkpoint, monkeypatch):
    written = (await checkpoint.write([replace(A, state="prepared"), stored_claim("b")])).written
    await delete(checkpoint, [written["uid-b"]])
    without_thread(checkpoint, monkeypatch)
    uids = ["uid-a", "uid-b", "uid-c"]
    assert await checkpoint.find(uids, from_memory=True) == {"uid-a": written["uid-a"]}


async def test_rows_of_an_earlier_process_are_read_once(tmp_path, checkpoint, monkeypatch):
    written = (await checkpoint.write([replace(A, state="prepared")])).written
    later = Checkpoint(tmp_path / "checkpoint.db", owner="later")
    await later.open()
    assert await later.find(["uid-a"], from_memory=True) == written
    with monkeypatch.context() as patched:
        without_thread(later, patched)
        assert await later.find(["uid-a"], from_memory=True) == written
    await later.close()


async def test_large_parameters_are_not_kept_in_memory(checkpoint):
    large = replace(stored_claim("large"), configs=("x" * 5000,))
    written = (await checkpoint.write([large])).written
    assert not checkpoint._recent
    assert await checkpoint.find(["uid-large"], from_memory=True) == written


async def test_a_row_that_another_process_removed_is_noticed_when_it_is_confirmed(
    checkpoint, other, tmp_path
):
    (known,) = (await checkpoint.write([A])).written.values()
    await delete(other, [known])
    outcome = await checkpoint.confirm([known])
    assert (outcome.written, outcome.fenced) == ({}, {"uid-a"})
    assert not (tmp_path / "cdi").exists(), "no file without a row"
    assert await checkpoint.find(["uid-a"], from_memory=True) == {}


async def test_a_row_that_another_process_wrote_is_noticed_before_its_file_is_removed(
    checkpoint, other, specs
):
    assert await checkpoint.find(["uid-a"], from_memory=True) == {}
    written = (await other.write([A])).written
    await asyncio.to_thread(specs.place, {"uid-a": "{}"})
    assert await checkpoint.clear(["uid-a", "uid-b"]) == (written, {})
    assert await asyncio.to_thread(specs.uids) == {"uid-a"}


async def test_a_claim_that_another_process_has_changed_is_written_the_next_time(checkpoint, other):
    (known,) = (await checkpoint.write([A])).written.values()
    (changed,) = (await other.write([replace(known, cdi_spec="2")])).written.values()
    assert (await checkpoint.write([known])).fenced == {"uid-a"}
    assert await checkpoint.find(["uid-a"], from_memory=True) == {"uid-a": changed}


async def test_files_follow_their_rows_in_both_directions(checkpoint, specs):
    (known,) = (await checkpoint.write([A], files=True)).written.values()
    assert await asyncio.to_thread(specs.uids) == {"uid-a"}
    assert await checkpoint.release([known]) == (frozenset(), {})
    assert await asyncio.to_thread(specs.uids) == set()
    assert await checkpoint.uids() == set()


async def test_a_row_stays_whose_file_cannot_be_removed(checkpoint, tmp_path):
    (known,) = (await checkpoint.write([A])).written.values()
    (tmp_path / "cdi" / f"{DRIVER}-claim_uid-a.json").mkdir(parents=True)
    fenced, unremoved = await checkpoint.release([known])
    assert (fenced, unremoved.keys()) == (frozenset(), {"uid-a"})
    assert len(await checkpoint.uids()) == 1


async def test_a_repeat_does_not_bring_back_what_another_process_unprepared(start, claims, devices):
    old = await start()
    claims.store(claim_body("uid-a", "cam-0"))
    await old.prepare(reference("uid-a"))
    new = await start(beside=True)
    await new.unprepare(reference("uid-a"))

    answer = (await old.prepare(reference("uid-a")))["uid-a"]
    assert "another process changed its entry" in (answer.error or "")
    assert (await old.prepare(reference("uid-a")))["uid-a"].error is None
    assert devices.prepared == {"cam-0": "uid-a"}


async def test_an_entry_that_a_person_removed_is_not_unprepared_again(start, claims, devices):
    plugin = await start()
    claims.store(claim_body("a", "cam-0"))
    await plugin.prepare(reference("a"))
    devices.failing.add("cam-0")
    assert "cam-0" in (await plugin.unprepare(reference("a")))["a"]
    (stuck,) = (await plugin.checkpoint.find(["a"])).values()
    await asyncio.to_thread(forget, plugin.checkpoint.path, stuck)
    asked = devices.unprepares
    assert await plugin.unprepare(reference("a")) == {"a": None}
    assert devices.unprepares == asked


@pytest.mark.parametrize("side_effects", [True, False])
async def test_a_claim_that_was_removed_by_hand_is_unprepared(
    start, claims, devices, tmp_path, side_effects
):
    devices.traits = replace(devices.traits, side_effects=side_effects)
    plugin = await start()
    claims.store(claim_body("a", "cam-0"))
    await plugin.prepare(reference("a"))
    (claim,) = (await plugin.checkpoint.find(["a"])).values()
    await asyncio.to_thread(forget, tmp_path / "checkpoint.db", claim)
    assert await plugin.unprepare(reference("a")) == {"a": None}
    assert plugin.files() == set()
