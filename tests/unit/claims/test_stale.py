"""Detection and collection of stale entries."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drakit_formats.resource.claim import parse_claim
from drakit_nodeplugin.claims.errors import ClaimFetchError, NoAnswerError
from drakit_nodeplugin.claims.kubelet_claims import Grace, KubeletClaims
from drakit_nodeplugin.claims.stale import StaleCollector, StaleReason, StaleTiming, stale_reason
from drakit_nodeplugin.claims.work import ClaimDependencies
from drakit_nodeplugin.endpoints.failures import EndpointStoppedError
from drakit_nodeplugin.state.checkpoint import CheckpointError
from drakit_nodeplugin.state.podresources import PodView
from drakit_nodeplugin.state.records import StoredClaim, StoredDevice
from tests.fakes.claims import DRIVER, NODE, FakeClaims, claim_body, reference
from tests.fakes.node import StaticNode

HERE = StaticNode(name=NODE, labels={"zone": "a"})


def entry(uid: str, *devices: str, **fields: Any) -> StoredClaim:
    """An entry of a claim, with devices of this node's pool."""
    values: dict[str, Any] = {
        "uid": uid,
        "namespace": "lab",
        "name": f"claim-{uid}",
        "state": "prepared",
        "boot_id": "boot-1",
        "devices": tuple(
            StoredDevice(pool=NODE, device=device, request="main") for device in devices
        ),
        "generation": 1,
    }
    return StoredClaim(**values | fields)


def on_label(value: str) -> dict[str, Any]:
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": [value]}]}
    body = claim_body("a", "cam-0")
    body["status"]["allocation"]["nodeSelector"] = {"nodeSelectorTerms": [term]}
    return body


# ------------------------------------------------------------ one entry, one claim


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(claim_body("a", "cam-0"), None, id="as-it-was-prepared"),
        pytest.param(claim_body("a", "cam-0", node=None), None, id="for-any-node"),
        pytest.param(on_label("a"), None, id="for-nodes-like-this-one"),
        pytest.param(
            claim_body("a", "cam-0", {"driver": "lidar.example.com", "device": "lidar-0"}),
            None,
            id="with-a-device-of-another-driver-beside",
        ),
        pytest.param(
            claim_body("a", {"device": "cam-0", "request": "main/small"}),
            None,
            id="same-device-for-another-request",
        ),
        pytest.param(None, StaleReason.GONE, id="deleted"),
        pytest.param(
            claim_body("b", "cam-0", name="claim-a"), StaleReason.REPLACED, id="another-uid"
        ),
        pytest.param(
            claim_body("b", name="claim-a", allocated=False),
            StaleReason.REPLACED,
            id="another-uid-not-allocated",
        ),
        pytest.param(claim_body("a", allocated=False), StaleReason.DEALLOCATED, id="deallocated"),
        pytest.param(
            claim_body("a", "cam-0", node="node-2"), StaleReason.ELSEWHERE, id="for-another-node"
        ),
        pytest.param(on_label("b"), StaleReason.ELSEWHERE, id="for-nodes-unlike-this-one"),
        pytest.param(claim_body("a", "cam-1"), StaleReason.REALLOCATED, id="another-device"),
        pytest.param(
            claim_body("a", "cam-0", "cam-1"), StaleReason.REALLOCATED, id="one-device-more"
        ),
        pytest.param(
            claim_body("a", {"device": "cam-0", "pool": "other"}),
            StaleReason.REALLOCATED,
            id="same-name-in-another-pool",
        ),
        pytest.param(
            claim_body("a", {"device": "cam-0", "shareID": "share-2"}),
            StaleReason.REALLOCATED,
            id="another-share-of-the-device",
        ),
        pytest.param(
            claim_body("a", {"driver": "lidar.example.com", "device": "lidar-0"}),
            StaleReason.REALLOCATED,
            id="devices-of-another-driver-alone",
        ),
    ],
)
@pytest.mark.parametrize("state", ["preparing", "prepared", "unpreparing"])
def test_an_entry_is_judged_by_its_claim(body, reason, state):
    found = None if body is None else parse_claim(body)
    assert stale_reason(entry("a", "cam-0", state=state), found, driver=DRIVER, node=HERE) == reason


def test_an_entry_with_less_than_its_claim_has_is_stale():
    found = parse_claim(claim_body("a", "cam-0"))
    judged = stale_reason(entry("a", "cam-0", "cam-1"), found, driver=DRIVER, node=HERE)
    assert judged is StaleReason.REALLOCATED


def test_a_node_whose_labels_are_not_known_yet_proves_nothing():
    node, found = StaticNode(name=NODE, labels=None), parse_claim(on_label("b"))
    assert stale_reason(entry("a", "cam-0"), found, driver=DRIVER, node=node) is None


def test_parameters_that_cannot_be_used_do_not_make_an_entry_stale():
    body = claim_body("a", "cam-0")
    body["status"]["allocation"]["devices"]["config"] = [
        {"source": "FromClaim", "opaque": {"driver": DRIVER, "parameters": [1]}}
    ]
    assert stale_reason(entry("a", "cam-0"), parse_claim(body), driver=DRIVER, node=HERE) is None


def test_an_entry_of_which_only_the_devices_were_rebuilt_is_judged_by_them():
    found = parse_claim(claim_body("a", "cam-0"))
    rebuilt = replace(
        entry("a", rebuilt="listed"),
        devices=(StoredDevice(pool=NODE, device="cam-0", request=""),),
    )
    assert stale_reason(rebuilt, found, driver=DRIVER, node=HERE) is None


# ------------------------------------------------------------ checks


class Entries:
    """A checkpoint without a thread, which does not work with a virtual clock."""

    def __init__(self) -> None:
        self.stored: dict[str, StoredClaim] = {}
        self.broken = False
        self.page_size = 3

    def store(self, *claims: StoredClaim) -> None:
        self.stored |= {claim.uid: claim for claim in claims}

    async def uids(self) -> set[str]:
        return set(self.stored)

    async def pages(self):
        if self.broken:
            raise CheckpointError("the checkpoint is on fire")
        rows = [self.stored[uid] for uid in sorted(self.stored)]
        for start in range(0, len(rows), self.page_size):
            yield rows[start : start + self.page_size]


class Kubelet:
    """The claims that the kubelet lists."""

    def __init__(self) -> None:
        self.claims = KubeletClaims(pods=PodView.COMPLETE)
        self.asked = 0

    def lists(self, *uids: str, pods: PodView = PodView.COMPLETE) -> None:
        self.claims = KubeletClaims(uids=frozenset(uids), pods=pods)

    async def listed(self) -> KubeletClaims:
        self.asked += 1
        return replace(self.claims, asked_at=asyncio.get_running_loop().time())


class Site:
    """A collector with fakes for its dependencies; `collected` lists its results."""

    def __init__(self, **timing: float) -> None:
        self.entries = Entries()
        self.claims = FakeClaims()
        self.kubelet = Kubelet()
        self.registered = asyncio.Event()
        self.registered.set()
        self.collected: list[tuple[str, StaleReason]] = []
        self.unprepared: list[str] = []
        self.away = False
        self.orphan_polls = 0
        self.asked: list[str] = []
        parts = SimpleNamespace(driver=DRIVER, node=HERE, checkpoint=self.entries, source=self)
        self.collector = StaleCollector(
            cast("ClaimDependencies", parts),
            kubelet=self.kubelet,
            registered=self.registered,
            remove_orphans=self.remove_orphans,
            unprepare=lambda claim: self.unprepare(claim),
            on_collected=lambda reason: self.reasons.append(reason),
            timing=StaleTiming(**timing),
        )
        self.reasons: list[StaleReason] = []

    async def fetch(self, reference, *, timeout_seconds):
        self.asked.append(reference.uid)
        return await self.claims.fetch(reference, timeout_seconds=timeout_seconds)

    async def remove_orphans(self) -> None:
        self.orphan_polls += 1

    async def unprepare(self, claim: StoredClaim) -> bool:
        if self.away or self.entries.stored[claim.uid].generation != claim.generation:
            return False
        self.unprepared.append(claim.uid)
        del self.entries.stored[claim.uid]
        return True

    async def polls(self, number: int, *, seconds: float = 60.0) -> None:
        for _ in range(number):
            await asyncio.sleep(seconds)
            await self.collector.poll()


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.mark.looptime
async def test_a_claim_that_is_gone_is_collected_a_grace_after_it_was_seen(site, looptime):
    site.entries.store(entry("a", "cam-0"))
    running = asyncio.create_task(site.collector.run())
    await asyncio.sleep(60 + 119)
    assert site.unprepared == []
    await asyncio.sleep(2)
    assert site.unprepared == ["a"]
    assert site.reasons == [StaleReason.GONE]
    assert looptime == 181
    running.cancel()


@pytest.mark.looptime
@pytest.mark.parametrize("state", ["preparing", "prepared", "unpreparing"])
async def test_entries_in_every_state_are_collected(site, state):
    site.entries.store(entry("a", "cam-0", state=state))
    await site.polls(3)
    assert site.unprepared == ["a"]


@pytest.mark.looptime
async def test_claims_without_a_problem_are_never_collected(site):
    site.entries.store(*(entry(f"{n:02}", f"cam-{n}") for n in range(10)))
    site.claims.store(*(claim_body(f"{n:02}", f"cam-{n}") for n in range(10)))
    await site.polls(100)
    assert site.unprepared == []
    assert len(site.entries.stored) == 10


@pytest.mark.looptime
async def test_only_stale_claims_of_many_are_collected(site):
    site.entries.store(*(entry(f"{n:02}", f"cam-{n}") for n in range(10)))
    site.claims.store(*(claim_body(f"{n:02}", f"cam-{n}") for n in range(10) if n not in (3, 7)))
    await site.polls(3)
    assert sorted(site.unprepared) == ["03", "07"]


@pytest.mark.looptime
async def test_two_checks_within_the_grace_are_not_enough(site):
    site.entries.store(entry("a", "cam-0"))
    await site.polls(20, seconds=5)
    assert site.unprepared == []


@pytest.mark.looptime
async def test_a_claim_that_is_back_in_between_begins_again(site):
    site.entries.store(entry("a", "cam-0"))
    await site.polls(2)
    site.claims.store(claim_body("a", "cam-0"))
    await site.polls(1)
    site.claims.bodies.clear()
    await site.polls(2)
    assert site.unprepared == []
    await site.polls(1)
    assert site.unprepared == ["a"]


@pytest.mark.looptime
async def test_an_entry_that_was_written_in_between_begins_again(site):
    site.entries.store(entry("a", "cam-0"))
    await site.polls(2)
    site.entries.store(entry("a", "cam-0", generation=2))
    await site.polls(2)
    assert site.unprepared == []
    await site.polls(1)
    assert site.unprepared == ["a"]


@pytest.mark.looptime
async def test_another_reason_begins_again(site):
    site.entries.store(entry("a", "cam-0"))
    await site.polls(2)
    site.claims.store(claim_body("a", allocated=False))
    await site.polls(2)
    assert site.unprepared == []
    await site.polls(1)
    assert site.reasons == [StaleReason.DEALLOCATED]


@pytest.mark.looptime
async def test_an_entry_that_changes_at_the_last_moment_is_left(site):
    site.entries.store(entry("a", "cam-0"))
    await site.polls(2)
    listed = site.kubelet.listed

    async def prepared_meanwhile():
        site.entries.store(entry("a", "cam-0", generation=2))
        return await listed()

    site.kubelet.listed = prepared_meanwhile
    await site.polls(1)
    assert site.unprepared == []


@pytest.mark.looptime
async def test_an_api_server_without_an_answer_proves_nothing(site):
    site.entries.store(entry("a", "cam-0"))
    site.claims.answers = False
    await site.polls(100)
    assert site.unprepared == []


@pytest.mark.looptime
async def test_a_check_without_an_answer_does_not_undo_another_one(site):
    site.entries.store(entry("a", "cam-0"))
    await site.polls(1)
    site.claims.answers = False
    await site.polls(1)
    site.claims.answers = True
    await site.polls(1)
    assert site.unprepared == ["a"]


@pytest.mark.looptime
async def test_an_answer_that_proves_nothing_about_the_claim_is_none(site):
    async def refuse(reference, *, timeout_seconds):
        raise ClaimFetchError(claim=str(reference), cause="our role lacks a verb")

    site.fetch = refuse
    site.entries.store(entry("a", "cam-0"))
    await site.polls(100)
    assert site.unprepared == []


@pytest.mark.looptime
async def test_an_unavailable_api_server_is_not_asked_for_every_claim(site):
    async def none(reference, *, timeout_seconds):
        site.asked.append(reference.uid)
        await asyncio.sleep(timeout_seconds)
        raise NoAnswerError(claim=str(reference), cause="it does not respond")

    site.fetch = none
    site.entries.page_size = 500
    site.entries.store(*(entry(f"{n:04}", f"cam-{n}") for n in range(2000)))
    await site.polls(1)
    assert len(site.asked) == 8


@pytest.mark.looptime
async def test_a_claim_that_the_kubelet_lists_is_never_collected(site):
    site.entries.store(entry("a", "cam-0"))
    site.kubelet.lists("a")
    await site.polls(1000)
    assert site.unprepared == []
    assert site.asked == []


@pytest.mark.looptime
async def test_the_grace_begins_when_the_kubelet_lists_a_claim_no_more(site):
    site.entries.store(entry("a", "cam-0"))
    await site.polls(2)
    site.kubelet.lists("a")
    await site.polls(1)
    site.kubelet.lists()
    await site.polls(2)
    assert site.unprepared == []
    await site.polls(1)
    assert site.unprepared == ["a"]


@pytest.mark.looptime
async def test_the_kubelet_has_the_last_word(site):
    site.entries.store(entry("a", "cam-0"))
    await site.polls(2)
    answers = [frozenset(), frozenset({"a"})]
    listed = site.kubelet.listed

    async def change():
        site.kubelet.lists(*answers.pop(0))
        return await listed()

    site.kubelet.listed = change
    await site.polls(1)
    assert answers == []
    assert site.unprepared == []


@pytest.mark.looptime
async def test_a_replaced_claim_goes_while_the_new_one_of_its_name_is_used(site):
    site.entries.store(
        entry("old", "cam-0", name="cam"), entry("new", "cam-1", name="cam", generation=2)
    )
    site.claims.store(claim_body("new", "cam-1", name="cam"))
    site.kubelet.lists("new")
    await site.polls(3)
    assert site.reasons == [StaleReason.REPLACED]
    assert set(site.entries.stored) == {"new"}


@pytest.mark.looptime
async def test_without_any_answer_of_the_kubelet_it_takes_an_hour(site):
    site.entries.store(entry("a", "cam-0"))
    site.kubelet.lists(pods=PodView.UNKNOWN)
    await site.polls(60)
    assert site.unprepared == []
    await site.polls(1)
    assert site.unprepared == ["a"]


C, P, U = PodView.COMPLETE, PodView.PARTIAL, PodView.UNKNOWN


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("views", "number_of_polls"),
    [
        pytest.param([C], 3, id="complete"),
        pytest.param([P], None, id="without-our-own-pod-never"),
        pytest.param([P, C], 4, id="the-grace-begins-at-a-complete-list"),
        pytest.param([C, P, C], 5, id="a-kubelet-that-starts-in-between-begins-it-again"),
        pytest.param([C, C, P], None, id="the-last-look-must-be-complete-too"),
        pytest.param([U, C], 4, id="no-answer-is-not-the-first-of-two"),
        pytest.param([C, U, C], 5, id="after-a-silence-the-kubelet-may-be-another-one"),
        pytest.param([*[U] * 59, P], None, id="an-hour-of-silence-that-ends-without-our-own-pod"),
        pytest.param([*[U] * 59, P, U], 121, id="the-hour-begins-again-after-that"),
        pytest.param([*[P] * 59, U], 120, id="a-list-without-our-own-pod-is-no-silence"),
    ],
)
async def test_the_check_that_collects_a_claim_depends_on_the_kubelets_list(
    site, views, number_of_polls
):
    site.entries.store(entry("a", "cam-0"))
    for number in range(1, 201):
        site.kubelet.lists(pods=views[min(number, len(views)) - 1])
        await site.polls(1)
        if site.unprepared:
            break
    assert (number if site.unprepared else None) == number_of_polls


@pytest.mark.looptime
async def test_a_kubelet_that_starts_while_the_api_server_is_asked_confirms_nothing(site):
    site.entries.store(entry("a", "cam-0"))
    await site.polls(2)
    views, listed = [C, P], site.kubelet.listed

    async def restart():
        site.kubelet.lists(pods=views.pop(0))
        return await listed()

    site.kubelet.listed = restart
    await site.polls(1)
    assert views == []
    assert site.unprepared == []


@pytest.mark.looptime
async def test_a_kubelet_that_has_not_read_its_pods_costs_the_api_server_nothing(site):
    site.entries.store(entry("a", "cam-0"))
    site.kubelet.lists(pods=PodView.PARTIAL)
    await site.polls(10)
    assert site.asked == []


@pytest.mark.looptime
async def test_two_checks_of_one_answer_count_as_one(site):
    site.entries.store(entry("a", "cam-0"))
    answer = replace(site.kubelet.claims, asked_at=0)

    async def cached():
        return answer

    site.kubelet.listed = cached
    await site.polls(10)
    assert site.unprepared == []


@pytest.mark.looptime
async def test_the_collectors_of_all_drivers_check_at_the_same_time():
    sites = [Site(), Site()]
    asked: list[list[float]] = [[], []]
    for site, times in zip(sites, asked, strict=True):
        site.entries.store(entry("a", "cam-0"))

        async def note(times=times, listed=site.kubelet.listed):
            times.append(asyncio.get_running_loop().time())
            return await listed()

        site.claims.store(claim_body("a", "cam-0"))
        site.kubelet.listed = note
    running = [asyncio.create_task(sites[0].collector.run())]
    await asyncio.sleep(17)
    running.append(asyncio.create_task(sites[1].collector.run()))
    await asyncio.sleep(300)
    assert asked[0] == asked[1] == [60, 120, 180, 240, 300]
    for task in running:
        task.cancel()


@pytest.mark.looptime
async def test_the_state_file_alone_can_keep_a_claim(site):
    site.entries.store(entry("a", "cam-0"))
    site.kubelet.lists("a", pods=PodView.UNKNOWN)
    await site.polls(200)
    assert site.unprepared == []


@pytest.mark.looptime
async def test_nothing_is_checked_before_the_kubelet_has_registered_the_driver(site):
    site.entries.store(entry("a", "cam-0"))
    site.registered.clear()
    await site.polls(100)
    assert site.unprepared == []
    assert site.asked == []
    assert site.orphan_polls == 0
    site.registered.set()
    await site.polls(2)
    assert site.unprepared == []
    await site.polls(1)
    assert site.unprepared == ["a"]


@pytest.mark.looptime
async def test_a_driver_that_is_unavailable_is_asked_again_and_logged_once(site, caplog):
    site.entries.store(entry("a", "cam-0"))
    site.away = True
    await site.polls(10)
    logged = [r for r in caplog.records if r.message == "stale claim not unprepared yet"]
    assert len(logged) == 1
    site.away = False
    await site.polls(1)
    assert site.reasons == [StaleReason.GONE]


@pytest.mark.looptime
async def test_a_driver_that_hangs_does_not_stop_the_checks(site, looptime):
    async def hang(claim):
        await asyncio.sleep(3600)

    site.unprepare = hang
    site.entries.store(entry("a", "cam-0"))
    await site.polls(3)
    assert looptime == 3 * 60 + 40


@pytest.mark.looptime
async def test_a_checkpoint_that_fails_ends_a_check_and_not_the_collector(site, caplog):
    site.entries.store(entry("a", "cam-0"))
    site.entries.broken = True
    running = asyncio.create_task(site.collector.run())
    await asyncio.sleep(61)
    assert "check for stale claims failed" in caplog.text
    site.entries.broken = False
    await asyncio.sleep(181)
    assert site.unprepared == ["a"]
    running.cancel()


@pytest.mark.looptime
async def test_an_unprepare_whose_checkpoint_fails_is_tried_again(site):
    failures = [CheckpointError("the disk is full")]

    unprepare = site.unprepare

    async def fail_once(claim):
        if failures:
            raise failures.pop()
        return await unprepare(claim)

    site.unprepare = fail_once
    site.entries.store(entry("a", "cam-0"))
    await site.polls(4)
    assert site.unprepared == ["a"]


@pytest.mark.looptime
async def test_few_claims_are_read_at_the_same_time(site):
    busy, most = 0, 0

    async def slow(reference, *, timeout_seconds):
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(2)
        busy -= 1
        return parse_claim(claim_body(reference.uid, f"cam-{reference.uid}"))

    site.fetch = slow
    site.entries.page_size = 500
    site.entries.store(*(entry(f"{n:03}", f"cam-{n:03}") for n in range(200)))
    await site.polls(1)
    assert most == 8


@pytest.mark.looptime
async def test_reads_are_spread_over_time(looptime):
    site = Site(fetches_per_second=20)
    site.entries.store(*(entry(f"{n:03}", f"cam-{n:03}") for n in range(201)))
    site.claims.store(*(claim_body(f"{n:03}", f"cam-{n:03}") for n in range(201)))
    await site.polls(1)
    assert looptime == pytest.approx(60 + 10)


@pytest.mark.looptime
async def test_entries_without_a_problem_leave_nothing_in_memory(site):
    site.entries.store(*(entry(f"{n:03}", f"cam-{n:03}") for n in range(50)))
    site.claims.store(*(claim_body(f"{n:03}", f"cam-{n:03}") for n in range(50)))
    await site.polls(2)
    assert site.collector._suspects == {}


@pytest.mark.looptime
async def test_a_suspect_that_the_kubelet_unprepares_is_forgotten(site):
    site.entries.store(entry("a", "cam-0"), entry("b", "cam-1"))
    site.claims.store(claim_body("b", "cam-1"))
    await site.polls(1)
    del site.entries.stored["a"]
    await site.polls(1)
    assert site.collector._suspects == {}


@pytest.mark.looptime
async def test_without_entries_neither_kubelet_nor_api_server_is_asked(site):
    await site.polls(3)
    assert site.kubelet.asked == 0
    assert site.orphan_polls == 3


# ------------------------------------------------------------ with the real engine


@pytest.fixture
def collector_of():
    """Make a collector that needs no time between its two checks."""

    registered = asyncio.Event()
    registered.set()

    def make(plugin, kubelet: Kubelet) -> StaleCollector:
        async def no_files() -> None:
            pass

        return StaleCollector(
            plugin.parts,
            kubelet=kubelet,
            registered=registered,
            remove_orphans=no_files,
            unprepare=plugin.queue.collect,
            on_collected=lambda reason: None,
            timing=StaleTiming(grace=Grace(confirmed_seconds=0), fetches_per_second=10_000),
        )

    return make


async def test_a_stale_claim_leaves_nothing_and_its_device_is_free(
    start, claims, devices, collector_of
):
    plugin = await start()
    collector = collector_of(plugin, Kubelet())
    claims.store(claim_body("a", "cam-0"), claim_body("b", "cam-1"))
    await plugin.prepare(reference("a"), reference("b"))
    del claims.bodies["claim-a"]
    assert await collector.poll() == 0
    assert await collector.poll() == 1
    assert await plugin.states() == {"b": "prepared"}
    assert plugin.files() == {f"{DRIVER}-claim_b.json"}
    assert devices.prepared == {"cam-1": "b"}
    claims.store(claim_body("c", "cam-0"))
    answers = await plugin.prepare(reference("c"))
    assert answers["c"].error is None


async def test_a_stale_claim_that_is_prepared_again_in_between_is_not_collected(
    start, claims, devices, collector_of
):
    plugin = await start()
    collector = collector_of(plugin, Kubelet())
    claims.store(claim_body("a", "cam-0"))
    await plugin.prepare(reference("a"))
    claims.store(claim_body("a", "cam-7"))
    await collector.poll()
    claims.store(claim_body("a", "cam-1"))
    await plugin.prepare(reference("a"))
    assert await collector.poll() == 0
    assert devices.prepared == {"cam-1": "a"}


async def test_a_stale_claim_keeps_its_device_until_its_driver_is_back(
    start, claims, devices, collector_of
):
    plugin = await start()
    collector = collector_of(plugin, Kubelet())
    claims.store(claim_body("a", "cam-0"))
    await plugin.prepare(reference("a"))
    claims.bodies.clear()
    devices.reason_away = lambda: EndpointStoppedError(driver=DRIVER, reason="it crashed")
    for _ in range(3):
        assert await collector.poll() == 0
    assert await plugin.states() == {"a": "unpreparing"}
    assert plugin.files() == set()
    devices.reason_away = None
    # The first one to check ends it.
    await plugin.recovery.recover()
    assert await collector.poll() == 0
    assert await plugin.states() == {}
    assert devices.prepared == {}


@pytest.mark.looptime
async def test_a_list_that_becomes_incomplete_before_the_collection_ends_the_grace_period():
    site = Site()
    site.entries.store(entry("a", "cam-0"))
    await site.polls(2)
    listed = site.kubelet.listed
    lists = iter([PodView.COMPLETE, PodView.PARTIAL])

    async def restarting() -> KubeletClaims:
        return replace(await listed(), pods=next(lists, PodView.COMPLETE))

    site.kubelet.listed = restarting
    await site.polls(2)
    assert site.unprepared == []


@pytest.mark.looptime
@pytest.mark.parametrize("pods", [PodView.UNKNOWN, PodView.PARTIAL])
async def test_the_grace_period_starts_again_although_the_api_server_was_silent_too(pods):
    site = Site()
    site.entries.store(entry("a", "cam-0"))
    await site.polls(1)
    site.claims.answers = False
    site.kubelet.lists(pods=pods)
    await site.polls(5)
    site.claims.answers = True
    site.kubelet.lists()
    await site.polls(1)
    assert site.unprepared == []
