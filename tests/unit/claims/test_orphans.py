"""Removal of CDI files without an entry."""

from __future__ import annotations

import asyncio
import errno
import json

import pytest

from drakit_formats.cdi import directory
from drakit_nodeplugin.claims.recovery import OrphanRemover
from drakit_nodeplugin.config import StaleClaims
from drakit_nodeplugin.state.podresources import PodView
from tests.fakes.claims import DRIVER, claim_body, reference
from tests.unit.claims.conftest import Kubelet

ORPHAN = f"{DRIVER}-claim_lost.json"


@pytest.fixture
def kubelet() -> Kubelet:
    return Kubelet()


@pytest.fixture
async def plugin(start, claims):
    """Start a plugin with one prepared claim, and the file of another one."""
    plugin = await start()
    claims.store(claim_body("kept", "cam-0"))
    await plugin.prepare(reference("kept"))
    write(plugin, "lost")
    return plugin


@pytest.fixture
def orphans(plugin, kubelet) -> OrphanRemover:
    return OrphanRemover(
        plugin.parts,
        queue=plugin.queue,
        kubelet=kubelet,
        settings=StaleClaims(),
    )


def write(plugin, uid: str, *, kind: str = f"{DRIVER}/claim") -> None:
    devices = [{"name": f"{uid}-0", "containerEdits": {"env": ["A=B"]}}]
    spec = {"cdiVersion": "0.5.0", "kind": kind, "devices": devices}
    (plugin.cdi / f"{DRIVER}-claim_{uid}.json").write_text(json.dumps(spec))


async def poll_for_a_grace(orphans) -> int:
    """Poll twice, a grace period apart; return the number of removed files."""
    first = await orphans.poll()
    await asyncio.sleep(120)
    return first + await orphans.poll()


# ------------------------------------------------------------ when


async def test_without_an_orphan_the_kubelet_is_not_asked(plugin, orphans, kubelet):
    (plugin.cdi / ORPHAN).unlink()
    assert await orphans.poll() == 0
    assert kubelet.asked == 0


async def removed_after(orphans, seconds: float) -> None:
    """Check that the grace period begins with a poll now, and that it lasts that long."""
    assert await orphans.poll() == 0
    await asyncio.sleep(seconds - 1)
    assert await orphans.poll() == 0
    await asyncio.sleep(1)
    assert await orphans.poll() == 1


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("pods", "seconds"),
    [
        pytest.param(PodView.COMPLETE, 120, id="the-kubelet-lists-its-pods"),
        pytest.param(PodView.UNKNOWN, 3600, id="the-kubelet-gives-no-answer"),
    ],
)
async def test_it_takes_two_polls_a_grace_period_apart(plugin, orphans, kubelet, pods, seconds):
    kubelet.lists(pods=pods)
    await removed_after(orphans, seconds)
    assert plugin.files() == {f"{DRIVER}-claim_kept.json"}
    assert await orphans.poll() == 0


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("listed", "pods"),
    [
        pytest.param(["lost"], PodView.COMPLETE, id="the-kubelet-lists-the-claim"),
        pytest.param([], PodView.PARTIAL, id="the-kubelet-has-not-read-its-pods"),
    ],
)
async def test_no_grace_begins_while(plugin, orphans, kubelet, listed, pods):
    await orphans.poll()
    kubelet.lists(*listed, pods=pods)
    for _ in range(100):
        await asyncio.sleep(60)
        assert await orphans.poll() == 0
    kubelet.lists()
    await removed_after(orphans, 120)


@pytest.mark.looptime
async def test_a_file_whose_claim_is_prepared_in_between_stays(plugin, orphans, claims):
    await orphans.poll()
    claims.store(claim_body("lost", "cam-1"))
    await plugin.prepare(reference("lost"))
    await asyncio.sleep(600)
    assert await orphans.poll() == 0
    assert ORPHAN in plugin.files()


@pytest.mark.looptime
async def test_a_claim_that_is_worked_on_is_left_alone(plugin, orphans):
    assert plugin.queue.take("lost")
    assert await poll_for_a_grace(orphans) == 0
    plugin.queue.release("lost")
    assert await orphans.poll() == 1


@pytest.mark.looptime
async def test_an_entry_that_was_written_at_the_last_moment_keeps_its_file(
    plugin, orphans, kubelet, claims
):
    claims.store(claim_body("lost", "cam-1"))
    await orphans.poll()
    await asyncio.sleep(120)
    listed = kubelet.listed

    async def prepared_meanwhile():
        await plugin.prepare(reference("lost"))
        return await listed()

    kubelet.listed = prepared_meanwhile
    assert await orphans.poll() == 0
    assert ORPHAN in plugin.files()


# ------------------------------------------------------------ whose file it is


@pytest.mark.looptime
@pytest.mark.parametrize(
    "name",
    [
        f"{DRIVER}-device_lost.json",
        f"{DRIVER}x-claim_lost.json",
        "lidar.example.com-claim_lost.json",
        f"{DRIVER}-claim_lost.yaml",
        "vendor.json",
    ],
)
async def test_files_of_other_names_are_never_touched(plugin, orphans, name):
    (plugin.cdi / ORPHAN).rename(plugin.cdi / name)
    assert await poll_for_a_grace(orphans) == 0
    assert name in plugin.files()


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("", True),
        ("{", True),
        ("[]", True),
        ("{}", False),
        ('{"kind": "other.example.com/claim", "devices": []}', False),
        (f'{{"kind": "{DRIVER}/claim", "devices": [{{"name": "x"}}]}}', False),
        (f'{{"kind": "{DRIVER}/claim", "devices": [7]}}', False),
        (f'{{"kind": "{DRIVER}/claim"}}', False),
    ],
)
async def test_of_files_of_our_name_only_damaged_ones_go_and_those_of_others_stay(
    plugin, orphans, text, ours
):
    (plugin.cdi / ORPHAN).write_text(text)
    if not ours:
        found = await asyncio.to_thread(plugin.specs.without_entry, {"kept"})
        assert found == set(), "it would be damage at every start"
    assert await poll_for_a_grace(orphans) == ours
    assert (ORPHAN in plugin.files()) is not ours


@pytest.mark.looptime
async def test_a_file_that_cannot_be_read_is_not_removed(plugin, orphans, monkeypatch):
    """A file that cannot be read stays: it may belong to another program."""
    write(plugin, "theirs", kind="other.example.com/claim")
    real = directory._read

    def read(path):
        if "theirs" in path:
            raise OSError(errno.EIO, "Input/output error", path)
        return real(path)

    monkeypatch.setattr(directory, "_read", read)
    assert await poll_for_a_grace(orphans) == 1, "and it keeps no other from being removed"
    assert plugin.files() == {f"{DRIVER}-claim_{uid}.json" for uid in ("kept", "theirs")}
