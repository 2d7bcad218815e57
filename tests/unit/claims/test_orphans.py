"""Removal of CDI files without an entry."""

from __future__ import annotations

import asyncio
import errno
import json
from dataclasses import replace

import pytest

from drakit_formats.cdi import directory
from drakit_nodeplugin.claims.kubelet_claims import Grace, KubeletClaims
from drakit_nodeplugin.claims.recovery import OrphanRemover
from drakit_nodeplugin.state.podresources import PodView
from tests.fakes.claims import DRIVER, claim_body, reference

ORPHAN = f"{DRIVER}-claim_lost.json"


class Kubelet:
    def __init__(self) -> None:
        self.claims = KubeletClaims(pods=PodView.COMPLETE)
        self.asked = 0

    def lists(self, *uids: str, pods: PodView = PodView.COMPLETE) -> None:
        self.claims = KubeletClaims(uids=frozenset(uids), pods=pods)

    async def listed(self) -> KubeletClaims:
        self.asked += 1
        return replace(self.claims, asked_at=asyncio.get_running_loop().time())


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
        grace=Grace(),
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


@pytest.mark.looptime
async def test_it_takes_two_polls_a_grace_period_apart(plugin, orphans):
    assert await orphans.poll() == 0
    await asyncio.sleep(119)
    assert await orphans.poll() == 0
    await asyncio.sleep(1)
    assert await orphans.poll() == 1
    assert plugin.files() == {f"{DRIVER}-claim_kept.json"}
    assert await orphans.poll() == 0


@pytest.mark.looptime
async def test_a_file_that_the_kubelet_lists_stays_and_its_grace_begins_when_it_does_not(
    plugin, orphans, kubelet
):
    await orphans.poll()
    kubelet.lists("lost")
    await asyncio.sleep(600)
    assert await orphans.poll() == 0
    kubelet.lists()
    await orphans.poll()
    await asyncio.sleep(119)
    assert await orphans.poll() == 0
    await asyncio.sleep(1)
    assert await orphans.poll() == 1


@pytest.mark.looptime
async def test_a_kubelet_that_has_not_read_its_pods_frees_no_file(plugin, orphans, kubelet):
    kubelet.lists(pods=PodView.PARTIAL)
    for _ in range(100):
        await asyncio.sleep(60)
        assert await orphans.poll() == 0
    kubelet.lists()
    assert await orphans.poll() == 0
    await asyncio.sleep(119)
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
async def test_it_takes_long_unless_the_kubelet_answers(plugin, orphans, kubelet, pods, seconds):
    kubelet.lists(pods=pods)
    await orphans.poll()
    await asyncio.sleep(seconds - 1)
    assert await orphans.poll() == 0
    await asyncio.sleep(1)
    assert await orphans.poll() == 1


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
        pytest.param(f"{DRIVER}-device_lost.json", id="another-class"),
        pytest.param(f"{DRIVER}x-claim_lost.json", id="a-longer-driver-name"),
        pytest.param("lidar.example.com-claim_lost.json", id="another-driver"),
        pytest.param(f"{DRIVER}-claim_lost.yaml", id="yaml"),
        pytest.param("vendor.json", id="anything"),
    ],
)
async def test_files_of_other_names_are_never_touched(plugin, orphans, name):
    (plugin.cdi / ORPHAN).rename(plugin.cdi / name)
    assert await poll_for_a_grace(orphans) == 0
    assert name in plugin.files()


@pytest.mark.looptime
@pytest.mark.parametrize(
    "text",
    [
        pytest.param('{"kind": "other.example.com/claim", "devices": []}', id="another-kind"),
        pytest.param("{}", id="no-kind"),
        pytest.param(f'{{"kind": "{DRIVER}/claim", "devices": [{{"name": "x"}}]}}', id="a-name"),
        pytest.param(f'{{"kind": "{DRIVER}/claim", "devices": [7]}}', id="a-device-is-a-number"),
        pytest.param(f'{{"kind": "{DRIVER}/claim"}}', id="no-devices"),
    ],
)
async def test_a_file_of_our_name_that_we_did_not_write_is_never_touched(plugin, orphans, text):
    (plugin.cdi / ORPHAN).write_text(text)
    assert await poll_for_a_grace(orphans) == 0
    assert (plugin.cdi / ORPHAN).read_text() == text
    found = await asyncio.to_thread(plugin.specs.without_entry, {"kept"})
    assert found == set(), "it would be damage at every start"


@pytest.mark.looptime
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("{", id="cut"),
        pytest.param("[]", id="list"),
    ],
)
async def test_a_damaged_file_of_our_name_goes(plugin, orphans, text):
    (plugin.cdi / ORPHAN).write_text(text)
    assert await poll_for_a_grace(orphans) == 1


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
    with pytest.raises(OSError, match="Input/output error"):
        await poll_for_a_grace(orphans)
    assert any("theirs" in name for name in plugin.files())
