"""An admin's request to forget a claim: the active instance answers it, or nobody is active."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from drakit_nodeplugin.changes import FilePoller
from drakit_nodeplugin.claims.events import ClaimEvents
from drakit_nodeplugin.config import NodePluginConfig
from drakit_nodeplugin.host.active_driver import Maintenance
from drakit_nodeplugin.host.node import Environment, NodeEvents
from drakit_nodeplugin.metrics import Metrics
from drakit_nodeplugin.state import inspection
from drakit_nodeplugin.state.inspection import InspectionError, forget, requests
from drakit_nodeplugin.state.lock import try_lock
from drakit_nodeplugin.state.records import StoredClaim
from tests.fakes.checkpoints import fill, reopen, stored_claim
from tests.fakes.claims import DRIVER, NODE, claim_body, reference
from tests.fakes.tasks import running, until
from tests.unit.devices.conftest import Node as DeviceNode

A, B = "uid-a", "uid-b"


@pytest.fixture
def lock(tmp_path):
    """Hold the lock of the driver, as its active instance does; closing it releases the lock."""
    with contextlib.ExitStack() as stack:
        assert stack.enter_context(try_lock(tmp_path))
        yield stack


@pytest.fixture
async def plugin(start, claims, lock):
    """An active instance that has prepared two claims."""
    plugin = await start()
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-1"))
    await plugin.prepare(reference(A), reference(B))
    return plugin


@contextlib.asynccontextmanager
async def answering(plugin):
    """Answer requests as the node plugin does."""
    session = asyncio.get_running_loop().create_future()
    config = NodePluginConfig.model_validate({"drivers": [{"driver": "cameras"}]})
    poller = FilePoller(period_seconds=0.01)
    environment = SimpleNamespace(config=config, podresources=None, file_poller=poller)
    maintenance = Maintenance(
        plugin.parts,
        engine=plugin.engine,
        queue=plugin.queue,
        announcer=ClaimEvents(DRIVER, node=NODE),
        events=NodeEvents(NODE, session),
        environment=cast("Environment", environment),
        metrics=Metrics().for_driver(DRIVER),
        devices=DeviceNode().manager(),
        registered=asyncio.Event(),
    )
    async with running(poller.run(), maintenance.handle_requests()):
        yield


async def row(plugin, uid=A) -> StoredClaim:
    return (await plugin.checkpoint.find([uid]))[uid]


def request_files(folder) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if "forget" in file.name)


# ------------------------------------------------------------ the active instance answers


async def test_the_active_instance_forgets_the_claim(plugin, tmp_path, caplog):
    async with answering(plugin):
        await asyncio.to_thread(forget, plugin.checkpoint.path, await row(plugin))

    assert await plugin.states() == {B: "prepared"}
    assert await plugin.checkpoint.find([A]) == {}, "not even in its memory"
    assert request_files(tmp_path) == []
    (record,) = [r for r in caplog.records if r.message == "claim forgotten on request"]
    assert (record.driver, record.claim_uid) == (DRIVER, A)


async def test_a_row_that_has_changed_since_it_was_inspected_is_kept(plugin, tmp_path, caplog):
    old = await row(plugin)
    (changed,) = (await plugin.checkpoint.write([replace(old, cdi_spec="{}")])).written.values()
    async with answering(plugin):
        with pytest.raises(InspectionError, match=r"has changed .* since this command read it"):
            await asyncio.to_thread(forget, plugin.checkpoint.path, old)

    assert await row(plugin) == changed
    assert request_files(tmp_path) == []
    assert "claim forgotten on request" not in caplog.messages


async def test_requests_for_several_claims_are_answered_together(plugin):
    """A claim that is already gone is treated as forgotten."""
    rows = [await row(plugin, uid) for uid in (A, B)]
    await plugin.unprepare(reference(A))
    async with answering(plugin), asyncio.TaskGroup() as group:
        for each in rows:
            group.create_task(asyncio.to_thread(forget, plugin.checkpoint.path, each))
    assert await plugin.states() == {}


async def test_a_checkpoint_that_cannot_be_written_answers_nothing(plugin, caplog, monkeypatch):
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(inspection, "FORGET_SECONDS", 0.2)
    plugin.checkpoint.broken = "the checkpoint is damaged"
    async with answering(plugin):
        with pytest.raises(InspectionError, match="did not respond"):
            await asyncio.to_thread(forget, plugin.checkpoint.path, await row(plugin))
    assert await plugin.states() == {A: "prepared", B: "prepared"}
    assert "claim not forgotten" in caplog.messages


@pytest.mark.parametrize(
    ("newer", "left"),
    [
        pytest.param(0, {B: "prepared"}, id="of-the-present-row-is-answered"),
        pytest.param(1, {A: "prepared", B: "prepared"}, id="of-another-row-is-removed"),
    ],
)
async def test_a_request_whose_command_was_killed(plugin, tmp_path, newer, left):
    request = tmp_path / f"forget-{A}"
    request.write_text(str((await row(plugin)).generation + newer))
    async with answering(plugin):
        await until(lambda: not request.exists())
    assert await plugin.states() == left


def test_only_requests_are_read(tmp_path):
    (tmp_path / "forget-uid-a").write_text("7")
    (tmp_path / "forget-uid-b").write_text("")
    (tmp_path / "forget-uid-c").mkdir()
    (tmp_path / ".forget-uid-d.0a1b2c3d").write_text("7")  # one that is being written
    (tmp_path / "checkpoint.db").write_text("7")
    assert requests(tmp_path) == {"uid-a": 7}


# ------------------------------------------------------------ no instance is active


async def test_while_no_instance_is_active_an_unchanged_row_is_forgotten_at_once(path):
    first, second = await fill(path, count=2)
    for other in (replace(first, generation=first.generation - 1), stored_claim("000")):
        with pytest.raises(InspectionError, match=rf"claim lab/{other.name} has changed"):
            await asyncio.to_thread(forget, path, other)
    await asyncio.to_thread(forget, path, first)
    assert await reopen(path) == ({second.uid: second}, None)
    assert [file.name for file in path.parent.iterdir()] == ["checkpoint.db"]


async def test_an_instance_that_stops_without_an_answer_leaves_it_to_the_command(
    plugin, lock, tmp_path
):
    known = await row(plugin)
    command = asyncio.create_task(asyncio.to_thread(forget, plugin.checkpoint.path, known))
    await until(lambda: request_files(tmp_path) == [f"forget-{A}"])
    await plugin.checkpoint.close()
    lock.close()
    await command
    assert (await reopen(plugin.checkpoint.path))[0].keys() == {B}
    assert request_files(tmp_path) == []


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        pytest.param(True, "is empty", id="no-file"),
        pytest.param(False, "cannot be changed: .*No such file", id="no-directory"),
    ],
)
def test_a_checkpoint_that_is_gone_is_an_error(tmp_path, folder, text):
    path = tmp_path / DRIVER / "checkpoint.db"
    if folder:
        path.parent.mkdir()
    with pytest.raises(InspectionError, match=f"the checkpoint {path} {text}"):
        forget(path, stored_claim("a"))
    assert not path.exists()
