"""Rebuilding a lost checkpoint from its sources."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest

from drakit import DeviceNode
from drakit_nodeplugin.claims import recovery
from drakit_nodeplugin.claims.kubelet_claims import KubeletClaims, kubelet_claims
from drakit_nodeplugin.claims.recovery import Rebuilder, Rebuilt
from drakit_nodeplugin.state.checkpoint import CheckpointError
from drakit_nodeplugin.state.podresources import ListedDevice, PodView
from drakit_nodeplugin.state.records import StoredClaim
from tests.fakes.claims import DRIVER, NODE, claim_body, reference
from tests.unit.claims.conftest import errors


class Kubelet:
    """Lists claims as the real kubelet: a device also has the CDI names of the devices before
    it."""

    def __init__(self) -> None:
        self.devices: list[ListedDevice] = []
        self.pods = PodView.COMPLETE

    def uses(
        self,
        uid: str,
        *devices: str,
        share: str | None = None,
        cdi: bool = True,
        others: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> None:
        names: tuple[str, ...] = ()
        for index, device in enumerate(devices):
            names += (f"{DRIVER}/claim={uid}-{index}", *others.get(device, ()))
            self.devices.append(
                ListedDevice(
                    namespace="lab",
                    pod=f"pod-{uid}",
                    claim=f"claim-{uid}",
                    driver=DRIVER,
                    pool=NODE,
                    device=device,
                    share_id=share,
                    cdi_names=names if cdi else (),
                )
            )

    async def listed(self) -> KubeletClaims:
        devices = self.devices if self.pods is not PodView.UNKNOWN else []
        return kubelet_claims(DRIVER, devices, pods=self.pods)


@pytest.fixture
def kubelet() -> Kubelet:
    return Kubelet()


@pytest.fixture
def lose(start, tmp_path):
    """Start the plugin again without its database: all entries are lost, CDI files are not."""

    async def lose(*, boot_id: str = "boot-1"):
        for path in tmp_path.glob("checkpoint.db*"):
            path.unlink()
        return await start(boot_id=boot_id)

    return lose


@pytest.fixture
def rebuild(kubelet, claims):
    """Rebuild the entries of a plugin."""

    async def rebuild(plugin, *, source=claims) -> Rebuilt:
        parts = replace(plugin.parts, source=source)
        return await Rebuilder(parts, kubelet=kubelet).rebuild()

    return rebuild


@pytest.fixture
async def lost(start, lose, claims):
    """Prepare claim a, and lose its entry. Return the plugin and the result of that prepare."""
    claims.store(claim_body("a", "cam-0"))
    answer = await (await start()).prepare(reference("a"))
    return await lose(), answer


async def entries(plugin) -> dict[str, StoredClaim]:
    return {claim.uid: claim async for page in plugin.checkpoint.pages() for claim in page}


def facts(claim: StoredClaim) -> tuple[object, ...]:
    """Return an entry without its generation and rebuilt mark."""
    return (
        str(claim),
        claim.state,
        claim.boot_id,
        claim.devices,
        claim.configs,
        claim.cdi_spec,
        claim.pod_claim_name,
    )


async def test_claims_that_the_kubelet_lists_and_the_api_server_confirms_are_rebuilt_in_full(
    plugin, lose, claims, kubelet, rebuild
):
    of_a_template = claim_body("a", "cam-0", {"device": "cam-1", "request": "other/small"})
    of_a_template["metadata"]["annotations"] = {"resource.kubernetes.io/pod-claim-name": "cams"}
    claims.store(of_a_template, claim_body("b", {"device": "cam-2", "shareID": "share-1"}))
    await plugin.prepare(reference("a"), reference("b"))
    before = await entries(plugin)
    plugin = await lose()
    kubelet.uses("a", "cam-0", "cam-1")
    kubelet.uses("b", "cam-2", share="share-1")
    assert await rebuild(plugin) == Rebuilt(
        complete=("lab/claim-a", "lab/claim-b"), pods=PodView.COMPLETE
    )
    after = await entries(plugin)
    assert {uid: facts(claim) for uid, claim in after.items()} == {
        uid: facts(claim) for uid, claim in before.items()
    }


@pytest.mark.parametrize("confirmed", [True, False])
async def test_the_number_of_a_rebuilt_claim_goes_to_no_other_device(
    start, lose, claims, kubelet, devices, rebuild, confirmed
):
    """The CDI file of the claim has the number, and its container can still open it."""

    def node(identity: str) -> DeviceNode:
        return DeviceNode(path="/dev/tty", type="c", major=188, minor=0, identity=identity)

    devices.nodes = {"cam-0": (node("usb:0"),), "cam-1": (node("usb:1"),)}
    shares = [{"device": "cam-0", "shareID": each} for each in ("one", "two")]
    claims.store(claim_body("a", shares[0]), claim_body("b", shares[1]), claim_body("c", "cam-1"))
    await (await start()).prepare(reference("a"))
    plugin = await lose()
    kubelet.uses("a", "cam-0", share="one")
    claims.answers = confirmed
    await rebuild(plugin)
    claims.answers = True
    (error,) = await errors(plugin, "c")
    assert "c 188:0, which is still held for other hardware" in str(error)
    assert await errors(plugin, "b") == [None], "a share of the same device"
    assert await errors(plugin, "a") == [None]
    (device,) = (await entries(plugin))["a"].devices
    assert [each.identity for each in device.nodes] == ["usb:0"]
    await plugin.unprepare(reference("a"), reference("b"))
    assert await errors(plugin, "c") == [None]


async def test_claims_and_held_devices_are_unknown_until_they_are_rebuilt(lost, kubelet, rebuild):
    """An empty list would make a backend's driver be forgotten, and devices be treated as free."""
    plugin, _ = lost
    for query in (plugin.checkpoint.states, plugin.checkpoint.devices_in_use):
        with pytest.raises(CheckpointError, match="is being rebuilt"):
            await query()
    kubelet.uses("a", "cam-0")
    await rebuild(plugin)
    await plugin.checkpoint.rebuilt()
    assert await plugin.checkpoint.states() == {"prepared": 1}
    assert await plugin.checkpoint.devices_in_use() == {NODE: {"cam-0"}}


async def test_a_cdi_file_that_cannot_be_read_costs_its_own_claim_only_the_file(
    lost, claims, kubelet, rebuild
):
    plugin, _ = lost
    kubelet.uses("a", "cam-0")
    (file,) = plugin.cdi.iterdir()
    file.unlink()
    file.mkdir()  # for example EIO
    kubelet.uses("b", "cam-1")
    claims.store(claim_body("b", "cam-1"))
    assert (await rebuild(plugin)).complete == ("lab/claim-a", "lab/claim-b")
    assert [each.cdi_spec for each in (await entries(plugin)).values()] == [None, None]


async def test_names_of_others_come_from_the_kubelets_list(
    plugin, lose, claims, kubelet, devices, rebuild
):
    devices.others = {"cam-0": ("v.com/lens=0", "v.com/tools=all"), "cam-2": ("v.com/tools=all",)}
    claims.store(claim_body("a", "cam-0", "cam-1", {"device": "cam-2", "request": "other/small"}))
    answer = await plugin.prepare(reference("a"))
    plugin = await lose()
    for _ in range(2):  # once for each container
        kubelet.uses("a", "cam-0", "cam-1", "cam-2", others=devices.others)
    await rebuild(plugin)
    assert await plugin.prepare(reference("a")) == answer
    assert devices.prepares == 6
    assert [d.cdi_devices for d in (await entries(plugin))["a"].devices] == [
        ("v.com/lens=0", "v.com/tools=all"),
        (),
        ("v.com/tools=all",),
    ]


async def test_an_entry_rebuilt_without_the_api_server_keeps_its_names_until_the_next_prepare(
    lost, claims, kubelet, devices, rebuild
):
    plugin, answer = lost
    kubelet.uses("a", "cam-0", others={"cam-0": ("v.com/lens=9",)})
    claims.answers = False
    await rebuild(plugin)
    assert (await entries(plugin))["a"].devices[0].cdi_devices == ("v.com/lens=9",)
    claims.answers = True
    assert await plugin.prepare(reference("a")) == answer
    assert devices.prepares == 2


@pytest.mark.parametrize("answers", [True, False], ids=["api-server-answers", "and-it-does-not"])
async def test_a_rebuilt_claim_is_prepared_again_by_its_driver_once(
    lost, claims, kubelet, devices, rebuild, answers
):
    plugin, answer = lost
    kubelet.uses("a", "cam-0")
    await rebuild(plugin)
    assert (await entries(plugin))["a"].rebuilt == "confirmed"
    claims.answers = answers
    for _ in range(2):
        assert await plugin.prepare(reference("a")) == answer
    assert devices.prepares == 2
    assert (await entries(plugin))["a"].rebuilt is None


@pytest.mark.parametrize(
    ("answers", "body"),
    [
        pytest.param(False, None, id="no-answer"),
        pytest.param(True, None, id="no-such-claim"),
        pytest.param(
            True, claim_body("b", "cam-0", name="claim-a"), id="another-claim-of-the-name"
        ),
        pytest.param(True, claim_body("a", allocated=False), id="not-allocated-any-more"),
        pytest.param(True, claim_body("a", "cam-0", node="node-2"), id="allocated-elsewhere"),
        pytest.param(True, claim_body("a", "cam-7"), id="allocated-again"),
    ],
)
async def test_without_the_api_servers_word_devices_are_held_and_the_claim_can_be_unprepared(
    lost, claims, kubelet, devices, rebuild, answers, body
):
    plugin, _ = lost
    (file,) = plugin.cdi.iterdir()
    claims.bodies.clear()
    claims.answers = answers
    if body is not None:
        claims.store(body)
    kubelet.uses("a", "cam-0")
    assert await rebuild(plugin) == Rebuilt(incomplete=("lab/claim-a",), pods=PodView.COMPLETE)
    entry = (await entries(plugin))["a"]
    assert (entry.rebuilt, entry.state, entry.cdi_spec) == ("listed", "prepared", file.read_text())
    claims.answers = True
    claims.store(claim_body("c", "cam-0"))
    refused = await plugin.prepare(reference("c"))
    assert "device cam-0 is still prepared for claim lab/claim-a" in refused["c"].error
    await plugin.unprepare(reference("a"))
    assert await entries(plugin) == {}
    assert devices.prepared == {}
    assert plugin.files() == set()


@pytest.mark.parametrize("file", [True, False], ids=["with-its-file", "without-its-file"])
async def test_a_rebuilt_claim_is_of_an_earlier_boot_after_the_next_reboot(
    start, lost, claims, kubelet, devices, rebuild, file
):
    plugin, _ = lost
    if not file:
        await asyncio.to_thread(plugin.specs.unlink, ["a"])
    kubelet.uses("a", "cam-0")
    assert (await rebuild(plugin)).complete == ("lab/claim-a",)
    assert await plugin.restorer.restore() == 0
    plugin = await start(boot_id="boot-2")
    claims.answers = False
    answer = (await plugin.prepare(reference("a")))["a"]
    assert "cannot read the claim from the API server" in answer.error
    assert devices.prepares == 1
    claims.answers = True
    await plugin.prepare(reference("a"))
    assert devices.prepares == 2
    assert len(plugin.files()) == 1


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(-60, id="written-before-the-boot"),
        pytest.param(60, id="written-before-it-with-a-clock-that-was-ahead"),
    ],
)
async def test_a_file_from_before_the_reboot_is_not_taken_for_prepared(
    plugin, lose, claims, kubelet, devices, rebuild, seconds
):
    claims.store(claim_body("a", "cam-0"))
    await plugin.prepare(reference("a"))
    (file,) = plugin.cdi.iterdir()
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    os.utime(file, (boot + seconds, boot + seconds))
    plugin = await lose(boot_id="boot-2")
    kubelet.uses("a", "cam-0")
    await rebuild(plugin)
    await plugin.prepare(reference("a"))
    assert devices.prepares == 2


@pytest.mark.parametrize(
    ("pods", "listed", "rebuilt"),
    [
        pytest.param(
            PodView.COMPLETE,
            False,
            Rebuilt(lost=("a",), pods=PodView.COMPLETE),
            id="that-lists-other-claims-loses-the-claim",
        ),
        pytest.param(
            PodView.UNKNOWN, True, Rebuilt(lost=("a",)), id="that-does-not-answer-names-nothing"
        ),
        pytest.param(
            PodView.PARTIAL,
            True,
            Rebuilt(complete=("lab/claim-a",), pods=PodView.PARTIAL),
            id="that-has-not-read-all-its-pods-names-what-it-has",
        ),
    ],
)
async def test_a_kubelet(lost, kubelet, rebuild, pods, listed, rebuilt):
    plugin, _ = lost
    kubelet.pods = pods
    if listed:
        kubelet.uses("a", "cam-0")
    assert await rebuild(plugin) == rebuilt
    assert len(await entries(plugin)) == len(rebuilt.complete)
    assert len(plugin.files()) == 1, "the file of an unknown claim is kept"


async def test_a_listed_claim_without_our_cdi_names_is_reported(plugin, kubelet, rebuild):
    kubelet.uses("a", "cam-0", cdi=False)
    rebuilt = await rebuild(plugin)
    assert rebuilt == Rebuilt(lost=("lab/claim-a",), pods=PodView.COMPLETE)


async def test_entries_that_were_saved_are_left_as_they_are(plugin, claims, kubelet, rebuild):
    claims.store(claim_body("a", "cam-0"))
    await plugin.prepare(reference("a"))
    before = await entries(plugin)
    claims.store(claim_body("a", "cam-7"))
    kubelet.uses("a", "cam-7")
    assert await rebuild(plugin) == Rebuilt(pods=PodView.COMPLETE)
    assert await entries(plugin) == before


async def test_an_entry_that_was_written_meanwhile_is_left_as_it_is(
    plugin, claims, kubelet, rebuild
):
    claims.store(claim_body("a", "cam-0"))
    kubelet.uses("a", "cam-0")

    class Slow:
        async def fetch(self, reference, *, timeout_seconds):
            await plugin.prepare(reference)
            return await claims.fetch(reference, timeout_seconds=timeout_seconds)

    rebuilt = await rebuild(plugin, source=Slow())
    assert (rebuilt.complete, rebuilt.lost) == (("lab/claim-a",), ())
    assert (await entries(plugin))["a"].rebuilt is None


async def test_an_unconfirmed_claim_beside_a_confirmed_one_gets_its_device_for_admin_access(
    plugin, claims, kubelet, rebuild
):
    claims.store(claim_body("b", "cam-0"))
    kubelet.uses("a", "cam-0")
    kubelet.uses("b", "cam-0")
    assert await rebuild(plugin) == Rebuilt(
        complete=("lab/claim-b",), incomplete=("lab/claim-a",), pods=PodView.COMPLETE
    )
    after = await entries(plugin)
    assert {uid: entry.devices[0].admin_access for uid, entry in after.items()} == {
        "a": True,
        "b": False,
    }


async def test_a_claim_beside_shares_has_the_device_for_admin_access(plugin, kubelet, rebuild):
    kubelet.uses("a", "cam-0")
    kubelet.uses("b", "cam-0", share="share-1")
    kubelet.uses("c", "cam-0", share="share-2")
    await rebuild(plugin)
    after = await entries(plugin)
    assert {name: entry.devices[0].hold for name, entry in after.items()} == {
        "a": "admin",
        "b": "share",
        "c": "share",
    }


async def test_an_api_server_that_hangs_is_waited_for_only_so_long(
    plugin, kubelet, rebuild, monkeypatch
):
    monkeypatch.setattr(recovery, "FETCH_SECONDS", 0.5)

    class Silent:
        async def fetch(self, reference, *, timeout_seconds):
            await asyncio.Event().wait()

    for number in range(100):
        kubelet.uses(f"{number:03}", f"cam-{number}")
    async with asyncio.timeout(5):  # less than one wait for each eight claims
        rebuilt = await rebuild(plugin, source=Silent())
    assert len(rebuilt.incomplete) == len(await entries(plugin)) == 100


async def test_a_checkpoint_that_fails_is_reported_and_not_raised(plugin, claims, kubelet, rebuild):
    claims.store(claim_body("a", "cam-0"))
    kubelet.uses("a", "cam-0")

    async def full(claims):
        raise CheckpointError("no space")

    plugin.checkpoint.write = full
    assert await rebuild(plugin) == Rebuilt(error="no space")


async def test_a_kubelet_that_never_answers_ends_the_rebuild(plugin, kubelet, rebuild, monkeypatch):
    monkeypatch.setattr(recovery, "REBUILD_SECONDS", 0.05)
    kubelet.listed = asyncio.Event().wait
    assert await rebuild(plugin) == Rebuilt(error="the rebuild took longer than 0.05 s")


@pytest.mark.parametrize(
    ("rebuilt", "text"),
    [
        pytest.param(Rebuilt(), "no claim was lost", id="nothing"),
        pytest.param(
            Rebuilt(complete=("a", "b"), incomplete=("c",), lost=("d",)),
            "2 claims rebuilt, 1 claim rebuilt without the API server, 1 claim lost",
            id="of-each",
        ),
        pytest.param(Rebuilt(error="no space"), "no space", id="failed"),
    ],
)
def test_a_summary_is_a_sentence_for_people(rebuilt, text):
    assert str(rebuilt) == text
