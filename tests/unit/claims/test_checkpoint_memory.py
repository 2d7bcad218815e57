"""Answers from the checkpoint's cache, and entries that were removed by hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from drakit_nodeplugin.state.cdi_files import ClaimSpecs
from tests.fakes.checkpoints import delete, stored_claim, stored_device
from tests.fakes.claims import DRIVER, claim_body, reference
from tests.unit.claims.conftest import forget, opened

A = stored_claim("a", cdi_spec="{}", devices=(stored_device("cam-a", consumes={}),))


@pytest.fixture
def specs(tmp_path) -> ClaimSpecs:
    return ClaimSpecs(DRIVER, tmp_path / "cdi")


@pytest.fixture
async def checkpoint(path, specs):
    async with opened(path, files=specs) as checkpoint:
        yield checkpoint


def without_thread(checkpoint, monkeypatch) -> None:
    async def refuse(work, **kwargs):
        raise AssertionError("the writer's thread is not needed")

    monkeypatch.setattr(checkpoint, "_run", refuse)


@pytest.mark.parametrize("state", ["preparing", "prepared", "unpreparing"])
async def test_stored_rows_and_unknown_claims_need_no_thread(checkpoint, monkeypatch, state):
    written = (await checkpoint.write([replace(A, state=state), stored_claim("b")])).written
    await delete(checkpoint, [written["uid-b"]])
    without_thread(checkpoint, monkeypatch)
    uids = ["uid-a", "uid-b", "uid-c"]
    assert await checkpoint.find(uids) == {"uid-a": written["uid-a"]}


async def test_rows_of_an_earlier_process_are_read_once(path, checkpoint, monkeypatch):
    written = (await checkpoint.write([replace(A, state="prepared")])).written
    await checkpoint.close()
    async with opened(path) as later:
        assert await later.find(["uid-a"]) == written
        with monkeypatch.context() as patched:
            without_thread(later, patched)
            assert await later.find(["uid-a"]) == written


@pytest.mark.parametrize(
    "texts", [{"configs": ("x" * 5000,)}, {"metadata": {"r": "x" * 5000}}, {"data": "x" * 5000}]
)
async def test_large_texts_are_not_kept_in_memory(checkpoint, texts):
    large = replace(stored_claim("large"), **texts)
    written = (await checkpoint.write([large])).written
    assert not checkpoint._recent
    assert await checkpoint.find(["uid-large"]) == written


async def test_a_forgotten_row_is_written_no_more_and_its_device_is_free(checkpoint, tmp_path):
    (known,) = (await checkpoint.write([A])).written.values()
    assert await checkpoint.forget("uid-a", known.generation)
    assert (await checkpoint.write([replace(known, state="prepared")])).changed == {"uid-a"}
    outcome = await checkpoint.confirm([known])
    assert (outcome.written, outcome.changed) == ({}, {"uid-a"})
    assert not (tmp_path / "cdi").exists(), "no file without a row"
    assert (await checkpoint.find(["uid-a"]), await checkpoint.uids()) == ({}, set())
    assert await delete(checkpoint, [known]) == set()
    assert await checkpoint.devices_in_use() == {}
    (again,) = (await checkpoint.write([A])).written.values()
    assert again.generation > known.generation


async def test_files_follow_their_rows_in_both_directions(checkpoint, specs):
    written = (await checkpoint.write([A], files=True)).written
    assert await checkpoint.clear(["uid-a", "uid-b"]) == (written, {}), "it has a row"
    assert await asyncio.to_thread(specs.uids) == {"uid-a"}
    assert await checkpoint.release(list(written.values())) == (frozenset(), {})
    assert await asyncio.to_thread(specs.uids) == set()
    assert await checkpoint.uids() == set()


async def test_a_row_stays_whose_file_cannot_be_removed(checkpoint, tmp_path):
    (known,) = (await checkpoint.write([A])).written.values()
    (tmp_path / "cdi" / f"{DRIVER}-claim_uid-a.json").mkdir(parents=True)
    changed, unremoved = await checkpoint.release([known])
    assert (changed, unremoved.keys()) == (frozenset(), {"uid-a"})
    assert len(await checkpoint.uids()) == 1


@pytest.mark.parametrize("side_effects", [True, False])
async def test_a_claim_that_was_removed_by_hand_is_unprepared(
    plugin, claims, devices, side_effects
):
    devices.traits = replace(devices.traits, side_effects=side_effects)
    claims.store(claim_body("a", "cam-0"))
    await plugin.prepare(reference("a"))
    await forget(plugin, "a")
    assert await plugin.unprepare(reference("a")) == {"a": None}
    assert plugin.files() == set()
