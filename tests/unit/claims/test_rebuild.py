"""Rebuilding a lost checkpoint from its sources."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import cast

import pytest

from drakit_nodeplugin.claims import recovery
from drakit_nodeplugin.claims.allocation import ParameterLimits
from drakit_nodeplugin.claims.kubelet_claims import KubeletClaims, kubelet_claims
from drakit_nodeplugin.claims.recovery import Rebuilder, Rebuilt
from drakit_nodeplugin.claims.work import ClaimDependencies
from drakit_nodeplugin.state.checkpoint import CheckpointError
from drakit_nodeplugin.state.podresources import ListedDevice, PodView
from drakit_nodeplugin.state.records import StoredClaim
from tests.fakes.claims import DRIVER, NODE, claim_body, reference
from tests.fakes.node import StaticNode


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


def rebuilder(plugin, kubelet, claims) -> Rebuilder:
    parts = replace(plugin.parts, source=claims)
    return Rebuilder(parts, kubelet=kubelet)


def rebuilder_of(kubelet, *, checkpoint, source, files) -> Rebuilder:
    """Make a rebuilder with fakes only, because a thread and a virtual clock do not work
    together."""
    parts = SimpleNamespace(
        driver=DRIVER,
        node=StaticNode(name=NODE),
        boot_id="boot-1",
        checkpoint=checkpoint,
        source=source,
        specs=files,
        limits=ParameterLimits(),
    )
    return Rebuilder(cast("ClaimDependencies", parts), kubelet=kubelet)


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
    )


async def test_claims_that_the_kubelet_lists_and_the_api_server_confirms_are_rebuilt_in_full(
    start, lose, claims, kubelet
):
    plugin = await start()
    claims.store(
        claim_body("a", "cam-0", {"device": "cam-1", "request": "other/small"}),
        claim_body("b", {"device": "cam-2", "shareID": "share-1"}),
    )
    await plugin.prepare(reference("a"), reference("b"))
    before = await entries(plugin)
    plugin = await lose()
    kubelet.uses("a", "cam-0", "cam-1")
    kubelet.uses("b", "cam-2", share="share-1")
    rebuilt = await rebuilder(plugin, kubelet, claims).rebuild()
    assert rebuilt == Rebuilt(complete=("lab/claim-a", "lab/claim-b"), pods=PodView.COMPLETE)
    after = await entries(plugin)
    assert {uid: facts(claim) for uid, claim in after.items()} == {
        uid: facts(claim) for uid, claim in before.items()
    }


async def test_names_of_others_come_from_the_kubelets_list(start, lose, claims, kubelet, devices):
    devices.others = {"cam-0": ("v.com/lens=0", "v.com/tools=all"), "cam-2": ("v.com/tools=all",)}
    plugin = await start()
    body = claim_body("a", "cam-0", "cam-1", {"device": "cam-2", "request": "other/small"})
    claims.store(body)
    answer = await plugin.prepare(reference("a"))
    plugin = await lose()
    kubelet.uses("a", "cam-0", "cam-1", "cam-2", others=devices.others)
    kubelet.uses("a", "cam-0", "cam-1", "cam-2", others=devices.others)
    await rebuilder(plugin, kubelet, claims).rebuild()
    assert await plugin.prepare(reference("a")) == answer
    assert devices.prepares == 6
    assert [d.cdi_devices for d in (await entries(plugin))["a"].devices] == [
        ("v.com/lens=0", "v.com/tools=all"),
        (),
        ("v.com/tools=all",),
    ]


async def test_an_entry_rebuilt_without_the_api_server_keeps_its_names_until_the_next_prepare(
    start, lose, claims, kubelet, devices
):
    devices.others = {"cam-0": ("v.com/lens=0",)}
    plugin = await start()
    claims.store(claim_body("a", "cam-0"))
    answer = await plugin.prepare(reference("a"))
    plugin = await lose()
    kubelet.uses("a", "cam-0", others={"cam-0": ("v.com/lens=9",)})
    claims.answers = False
    await rebuilder(plugin, kubelet, claims).rebuild()
    assert (await entries(plugin))["a"].devices[0].cdi_devices == ("v.com/lens=9",)
    claims.answers = True
    assert await plugin.prepare(reference("a")) == answer
    assert devices.prepares == 2


@pytest.mark.parametrize("answers", [True, False], ids=["api-server-answers", "and-it-does-not"])
async def test_a_rebuilt_claim_is_prepared_again_by_its_driver_once(
    start, lose, claims, kubelet, devices, answers
):
    plugin = await start()
    claims.store(claim_body("a", "cam-0"))
    answer = await plugin.prepare(reference("a"))
    plugin = await lose()
    kubelet.uses("a", "cam-0")
    await rebuilder(plugin, kubelet, claims).rebuild()
    assert (await entries(plugin))["a"].rebuilt == "confirmed"
    claims.answers = answers
    assert await plugin.prepare(reference("a")) == answer
    assert await plugin.prepare(reference("a")) == answer
    assert devices.prepares == 2
    assert (await entries(plugin))["a"].rebuilt is None


async def test_a_claim_of_several_containers_has_each_device_once(start, lose, claims, kubelet):
    plugin = await start()
    claims.store(claim_body("a", "cam-0", "cam-1"))
    await plugin.prepare(reference("a"))
    plugin = await lose()
    claims.answers = False
    kubelet.uses("a", "cam-0", "cam-1")
    kubelet.uses("a", "cam-0", "cam-1")
    await rebuilder(plugin, kubelet, claims).rebuild()
    entry = (await entries(plugin))["a"]
    assert [device.device for device in entry.devices] == ["cam-0", "cam-1"]


@pytest.fixture
def bodies() -> dict[str, dict | None]:
    return {
        "gone": None,
        "replaced": claim_body("b", "cam-0", name="claim-a"),
        "deallocated": claim_body("a", allocated=False),
        "elsewhere": claim_body("a", "cam-0", node="node-2"),
        "reallocated": claim_body("a", "cam-7"),
    }


@pytest.mark.parametrize(
    "found",
    [
        pytest.param("silent", id="no-answer"),
        pytest.param("gone", id="no-such-claim"),
        pytest.param("replaced", id="another-claim-of-the-name"),
        pytest.param("deallocated", id="not-allocated-any-more"),
        pytest.param("elsewhere", id="allocated-for-another-node"),
        pytest.param("reallocated", id="allocated-again"),
    ],
)
async def test_without_the_api_servers_word_devices_are_held_and_the_claim_can_be_unprepared(
    start, lose, claims, kubelet, devices, bodies, found
):
    plugin = await start()
    claims.store(claim_body("a", "cam-0"))
    await plugin.prepare(reference("a"))
    text = (await entries(plugin))["a"].cdi_spec
    plugin = await lose()
    claims.bodies.clear()
    claims.answers = found != "silent"
    if body := bodies.get(found):
        claims.store(body)
    kubelet.uses("a", "cam-0")
    rebuilt = await rebuilder(plugin, kubelet, claims).rebuild()
    assert rebuilt == Rebuilt(incomplete=("lab/claim-a",), pods=PodView.COMPLETE)
    entry = (await entries(plugin))["a"]
    assert entry.rebuilt == "listed"
    assert entry.cdi_spec == text
    assert entry.state == "prepared"
    claims.answers = True
    claims.store(claim_body("c", "cam-0"))
    refused = await plugin.prepare(reference("c"))
    assert "device cam-0 is still prepared for claim lab/claim-a" in refused["c"].error
    await plugin.unprepare(reference("a"))
    assert await entries(plugin) == {}
    assert devices.prepared == {}
    assert plugin.files() == set()


async def test_a_claim_whose_file_is_lost_too_is_prepared_again_when_the_kubelet_asks(
    start, lose, claims, kubelet, devices
):
    plugin = await start()
    claims.store(claim_body("a", "cam-0"))
    await plugin.prepare(reference("a"))
    plugin = await lose()
    await asyncio.to_thread(plugin.specs.unlink, ["a"])
    kubelet.uses("a", "cam-0")
    rebuilt = await rebuilder(plugin, kubelet, claims).rebuild()
    assert rebuilt.complete == ("lab/claim-a",)
    assert await plugin.restorer.restore() == 0
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
    start, lose, claims, kubelet, devices, seconds
):
    plugin = await start()
    claims.store(claim_body("a", "cam-0"))
    await plugin.prepare(reference("a"))
    (file,) = plugin.cdi.iterdir()
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    os.utime(file, (boot + seconds, boot + seconds))
    plugin = await lose(boot_id="boot-2")
    kubelet.uses("a", "cam-0")
    await rebuilder(plugin, kubelet, claims).rebuild()
    await plugin.prepare(reference("a"))
    assert devices.prepares == 2


@pytest.mark.parametrize("file", [True, False], ids=["with-its-file", "without-its-file"])
async def test_a_rebuilt_claim_is_of_an_earlier_boot_after_the_next_reboot(
    start, lose, claims, kubelet, devices, file
):
    plugin = await start()
    claims.store(claim_body("a", "cam-0"))
    await plugin.prepare(reference("a"))
    plugin = await lose()
    if not file:
        await asyncio.to_thread(plugin.specs.unlink, ["a"])
    kubelet.uses("a", "cam-0")
    await rebuilder(plugin, kubelet, claims).rebuild()
    plugin = await start(boot_id="boot-2")
    claims.answers = False
    answer = (await plugin.prepare(reference("a")))["a"]
    assert "cannot read it from the API server" in answer.error
    assert devices.prepares == 1


async def test_a_file_of_an_unknown_claim_is_reported_and_kept(start, lose, claims, kubelet):
    plugin = await start()
    claims.store(claim_body("a", "cam-0"))
    await plugin.prepare(reference("a"))
    plugin = await lose()
    rebuilt = await rebuilder(plugin, kubelet, claims).rebuild()
    assert rebuilt == Rebuilt(lost=("a",), pods=PodView.COMPLETE)
    assert await entries(plugin) == {}
    assert len(plugin.files()) == 1


async def test_a_kubelet_that_cannot_be_asked_names_nothing(start, lose, claims, kubelet):
    plugin = await start()
    claims.store(claim_body("a", "cam-0"))
    await plugin.prepare(reference("a"))
    plugin = await lose()
    kubelet.uses("a", "cam-0")
    kubelet.pods = PodView.UNKNOWN
    assert await rebuilder(plugin, kubelet, claims).rebuild() == Rebuilt(lost=("a",))


async def test_a_kubelet_that_has_not_read_all_its_pods_names_what_it_has(
    start, lose, claims, kubelet
):
    plugin = await start()
    claims.store(claim_body("a", "cam-0"))
    await plugin.prepare(reference("a"))
    plugin = await lose()
    kubelet.uses("a", "cam-0")
    kubelet.pods = PodView.PARTIAL
    assert await rebuilder(plugin, kubelet, claims).rebuild() == Rebuilt(
        complete=("lab/claim-a",), pods=PodView.PARTIAL
    )


async def test_a_foreign_file_is_not_a_lost_claim(lose, claims, kubelet):
    plugin = await lose()
    plugin.cdi.mkdir()
    (plugin.cdi / f"{DRIVER}-claim_x.json").write_text('{"kind": "other/claim", "devices": []}')
    assert await rebuilder(plugin, kubelet, claims).rebuild() == Rebuilt(pods=PodView.COMPLETE)


async def test_a_listed_claim_without_our_cdi_names_is_reported(lose, claims, kubelet):
    plugin = await lose()
    kubelet.uses("a", "cam-0", cdi=False)
    rebuilt = await rebuilder(plugin, kubelet, claims).rebuild()
    assert rebuilt == Rebuilt(lost=("lab/claim-a",), pods=PodView.COMPLETE)


async def test_entries_that_were_saved_are_left_as_they_are(start, claims, kubelet):
    plugin = await start()
    claims.store(claim_body("a", "cam-0"))
    await plugin.prepare(reference("a"))
    before = await entries(plugin)
    claims.store(claim_body("a", "cam-7"))
    kubelet.uses("a", "cam-7")
    assert await rebuilder(plugin, kubelet, claims).rebuild() == Rebuilt(pods=PodView.COMPLETE)
    assert await entries(plugin) == before


async def test_an_entry_that_was_written_meanwhile_is_left_as_it_is(start, claims, kubelet):
    plugin = await start()
    claims.store(claim_body("a", "cam-0"))
    kubelet.uses("a", "cam-0")
    listed = kubelet.listed

    class Slow:
        async def fetch(self, reference, *, timeout_seconds):
            await plugin.prepare(reference)
            return await claims.fetch(reference, timeout_seconds=timeout_seconds)

    kubelet.listed = listed
    rebuilt = await rebuilder(plugin, kubelet, Slow()).rebuild()
    assert rebuilt.complete == ("lab/claim-a",)
    assert (await entries(plugin))["a"].rebuilt is None
    assert rebuilt.lost == ()


async def test_an_unconfirmed_claim_beside_a_confirmed_one_gets_its_device_for_admin_access(
    lose, claims, kubelet
):
    plugin = await lose()
    claims.store(claim_body("b", "cam-0"))
    kubelet.uses("a", "cam-0")
    kubelet.uses("b", "cam-0")
    rebuilt = await rebuilder(plugin, kubelet, claims).rebuild()
    assert rebuilt == Rebuilt(
        complete=("lab/claim-b",), incomplete=("lab/claim-a",), pods=PodView.COMPLETE
    )
    after = await entries(plugin)
    assert [device.admin_access for device in after["a"].devices] == [True]
    assert [device.admin_access for device in after["b"].devices] == [False]


async def test_a_claim_beside_shares_has_the_device_for_admin_access(lose, claims, kubelet):
    plugin = await lose()
    kubelet.uses("a", "cam-0")
    kubelet.uses("b", "cam-0", share="share-1")
    kubelet.uses("c", "cam-0", share="share-2")
    await rebuilder(plugin, kubelet, claims).rebuild()
    after = await entries(plugin)
    assert {name: entry.devices[0].hold for name, entry in after.items()} == {
        "a": "admin",
        "b": "share",
        "c": "share",
    }


@pytest.mark.looptime
async def test_an_api_server_that_hangs_is_waited_for_only_so_long(looptime):
    """Run without a real database, whose thread does not work with a virtual clock."""
    stored: list[StoredClaim] = []

    class Checkpoint:
        async def uids(self):
            return set()

        async def orphans(self):
            return set()

        async def write(self, claims):
            stored.extend(claims)
            written = {claim.uid: claim for claim in claims}
            return type("Outcome", (), {"written": written, "held": {}, "changed": frozenset()})

        async def find(self, uids):
            return {}

    class Files:
        def read(self, uid):
            return None

    class Silent:
        async def fetch(self, reference, *, timeout_seconds):
            await asyncio.sleep(3600)

    kubelet = Kubelet()
    for number in range(100):
        kubelet.uses(f"{number:03}", f"cam-{number}")
    rebuilt = await rebuilder_of(
        kubelet, checkpoint=Checkpoint(), source=Silent(), files=Files()
    ).rebuild()
    assert len(rebuilt.incomplete) == len(stored) == 100
    assert looptime == recovery.FETCH_SECONDS


async def test_a_checkpoint_that_fails_is_reported_and_not_raised(start, claims, kubelet):
    plugin = await start()
    claims.store(claim_body("a", "cam-0"))
    kubelet.uses("a", "cam-0")

    async def full(claims):
        raise CheckpointError("no space")

    plugin.checkpoint.write = full
    rebuilt = await rebuilder(plugin, kubelet, claims).rebuild()
    assert rebuilt == Rebuilt(error="no space")


@pytest.mark.looptime
async def test_a_kubelet_that_never_answers_ends_the_rebuild(start, claims, looptime):
    class Hanging:
        async def listed(self):
            await asyncio.sleep(3600)

    files = type("Files", (), {})()
    rebuilt = await rebuilder_of(Hanging(), checkpoint=files, source=claims, files=files).rebuild()
    assert rebuilt.error == "it took longer than 15 s"
    assert looptime == recovery.REBUILD_SECONDS


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
