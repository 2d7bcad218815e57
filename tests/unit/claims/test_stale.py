"""Detection and collection of stale entries."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drakit_driver.runtime.failures import EndpointStoppedError
from drakit_formats.resource.claim import parse_claim
from drakit_nodeplugin.claims.errors import ClaimFetchError, NoResponseError
from drakit_nodeplugin.claims.stale import StaleCollector, StaleReason, stale_reason
from drakit_nodeplugin.claims.work import ClaimDependencies
from drakit_nodeplugin.config import StaleClaims
from drakit_nodeplugin.state.checkpoint import CheckpointError
from drakit_nodeplugin.state.podresources import PodView
from drakit_nodeplugin.state.records import StoredClaim
from tests.fakes.checkpoints import stored_claim, stored_device
from tests.fakes.claims import DRIVER, NODE, FakeClaims, claim_body, opaque, reference
from tests.fakes.node import StaticNode
from tests.unit.claims.conftest import Kubelet

HERE = StaticNode(name=NODE, labels={"zone": "a"})


def entry(uid: str, *devices: str, **fields: Any) -> StoredClaim:
    """An entry of a claim, with devices of this node's pool."""
    fields = {"state": "prepared", "generation": 1, "name": f"claim-{uid}"} | fields
    fields = {"devices": tuple(map(stored_device, devices))} | fields
    return replace(stored_claim("x"), uid=uid, **fields)


def on_label(value: str) -> dict[str, Any]:
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": [value]}]}
    body = claim_body("a", "cam-0")
    body["status"]["allocation"]["nodeSelector"] = {"nodeSelectorTerms": [term]}
    return body


# ------------------------------------------------------------ one entry, one claim


LIDAR = {"driver": "lidar.example.com", "device": "lidar-0"}
JUDGED = {
    None: {
        "as-it-was-prepared": claim_body("a", "cam-0"),
        "for-any-node": claim_body("a", "cam-0", node=None),
        "for-nodes-like-this-one": on_label("a"),
        "with-a-device-of-another-driver-beside": claim_body("a", "cam-0", LIDAR),
        "for-another-request": claim_body("a", {"device": "cam-0", "request": "main/small"}),
    },
    StaleReason.GONE: {"deleted": None},
    StaleReason.REPLACED: {
        "another-uid": claim_body("b", "cam-0", name="claim-a"),
        "another-uid-not-allocated": claim_body("b", name="claim-a", allocated=False),
    },
    StaleReason.DEALLOCATED: {"deallocated": claim_body("a", allocated=False)},
    StaleReason.ELSEWHERE: {
        "for-another-node": claim_body("a", "cam-0", node="node-2"),
        "for-nodes-unlike-this-one": on_label("b"),
    },
    StaleReason.REALLOCATED: {
        "another-device": claim_body("a", "cam-1"),
        "one-device-more": claim_body("a", "cam-0", "cam-1"),
        "same-name-in-another-pool": claim_body("a", {"device": "cam-0", "pool": "other"}),
        "another-share-of-the-device": claim_body("a", {"device": "cam-0", "shareID": "share-2"}),
        "devices-of-another-driver-alone": claim_body("a", LIDAR),
    },
}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(body, reason, id=name)
        for reason, bodies in JUDGED.items()
        for name, body in bodies.items()
    ],
)
@pytest.mark.parametrize("state", ["preparing", "prepared", "unpreparing"])
def test_an_entry_is_judged_by_its_claim(body, reason, state):
    found = None if body is None else parse_claim(body)
    assert stale_reason(entry("a", "cam-0", state=state), found, driver=DRIVER, node=HERE) == reason


@pytest.mark.parametrize(
    ("stored", "body", "labels", "reason"),
    [
        pytest.param(
            entry("a", "cam-0", "cam-1"),
            claim_body("a", "cam-0"),
            {},
            StaleReason.REALLOCATED,
            id="an-entry-with-more-devices-than-its-claim",
        ),
        pytest.param(
            entry("a", "cam-0"), on_label("b"), None, None, id="labels-of-the-node-are-not-known"
        ),
        pytest.param(
            entry("a", "cam-0"),
            claim_body("a", "cam-0", config=[opaque([1])]),
            {},
            None,
            id="parameters-that-cannot-be-used",
        ),
        pytest.param(
            entry("a", rebuilt="listed", devices=(stored_device("cam-0", request=""),)),
            claim_body("a", "cam-0"),
            {},
            None,
            id="an-entry-of-which-only-the-devices-were-rebuilt",
        ),
    ],
)
def test_an_entry_is_judged_by_what_is_known(stored, body, labels, reason):
    node = StaticNode(name=NODE, labels=labels)
    assert stale_reason(stored, parse_claim(body), driver=DRIVER, node=node) == reason


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


class Site:
    """A collector with fakes for its dependencies; `collected` lists its results."""

    def __init__(self) -> None:
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
            settings=StaleClaims(),
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
async def test_only_stale_claims_of_many_are_collected(site, state):
    site.entries.store(*(entry(f"{n:02}", f"cam-{n}", state=state) for n in range(10)))
    site.claims.store(*(claim_body(f"{n:02}", f"cam-{n}") for n in range(10) if n not in (3, 7)))
    await site.polls(3)
    assert sorted(site.unprepared) == ["03", "07"]
    await site.polls(20)
    assert len(site.entries.stored) == 8


@pytest.mark.looptime
async def test_two_checks_within_the_grace_are_not_enough(site):
    site.entries.store(entry("a", "cam-0"))
    await site.polls(20, seconds=5)
    assert site.unprepared == []


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("change", "end"),
    [
        pytest.param(
            lambda site: site.claims.store(claim_body("a", "cam-0")),
            lambda site: site.claims.bodies.clear(),
            id="the-claim-is-back",
        ),
        pytest.param(
            lambda site: site.kubelet.lists("a"),
            lambda site: site.kubelet.lists(),
            id="the-kubelet-lists-it",
        ),
        pytest.param(
            lambda site: site.entries.store(entry("a", "cam-0", generation=2)),
            None,
            id="the-entry-was-written",
        ),
        pytest.param(
            lambda site: site.claims.store(claim_body("a", allocated=False)),
            None,
            id="there-is-another-reason",
        ),
    ],
)
async def test_the_grace_begins_again_if_in_between(site, change, end):
    site.entries.store(entry("a", "cam-0"))
    await site.polls(2)
    change(site)
    await site.polls(1)
    if end is not None:
        end(site)
        await site.polls(1)
    await site.polls(1)
    assert site.unprepared == []
    await site.polls(1)
    assert site.unprepared == ["a"]


@pytest.mark.looptime
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            lambda site: site.entries.store(entry("a", "cam-0", generation=2)),
            id="the-entry-was-written",
        ),
        pytest.param(lambda site: site.kubelet.lists("a"), id="the-kubelet-lists-it"),
        pytest.param(
            lambda site: site.kubelet.lists(pods=PodView.PARTIAL), id="the-kubelet-starts"
        ),
    ],
)
async def test_the_grace_begins_again_if_at_the_last_moment(site, change):
    """The kubelet is asked a second time after the API server's answer."""
    site.entries.store(entry("a", "cam-0"))
    await site.polls(2)
    listed, changes = site.kubelet.listed, [lambda site: None, change]

    async def change_before_the_second_answer():
        changes.pop(0)(site)
        return await listed()

    site.kubelet.listed = change_before_the_second_answer
    await site.polls(1)
    assert changes == []
    assert site.unprepared == []
    site.kubelet.listed = listed
    site.kubelet.lists()
    await site.polls(1)
    assert site.unprepared == []


@pytest.mark.looptime
@pytest.mark.parametrize(
    "error",
    [
        pytest.param(
            NoResponseError(claim="a", cause="the API server does not respond"), id="no-answer"
        ),
        pytest.param(ClaimFetchError(claim="a", cause="our role lacks a verb"), id="a-refusal"),
        pytest.param(KeyError("allocation"), id="an-internal-error"),
    ],
)
async def test_what_proves_nothing_about_the_claim_neither_collects_it_nor_ends_the_grace(
    site, error
):
    fetch = site.fetch

    async def refuse(reference, *, timeout_seconds):
        raise error

    site.entries.store(entry("a", "cam-0"))
    site.fetch = refuse
    await site.polls(100)
    assert site.unprepared == []
    site.fetch = fetch
    await site.polls(1)
    site.fetch = refuse
    await site.polls(1)
    site.fetch = fetch
    await site.polls(1)
    assert site.unprepared == ["a"]


@pytest.mark.looptime
async def test_an_unavailable_api_server_is_not_asked_for_every_claim(site):
    async def none(reference, *, timeout_seconds):
        site.asked.append(reference.uid)
        await asyncio.sleep(timeout_seconds)
        raise NoResponseError(claim=str(reference), cause="the API server does not respond")

    site.fetch = none
    site.entries.page_size = 500
    site.entries.store(*(entry(f"{n:04}", f"cam-{n}") for n in range(2000)))
    await site.polls(1)
    assert len(site.asked) == 8


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("listed", "pods"),
    [
        pytest.param("a", PodView.COMPLETE, id="by-podresources"),
        pytest.param("a", PodView.UNKNOWN, id="by-the-state-file-alone"),
        pytest.param("", PodView.PARTIAL, id="perhaps-by-a-kubelet-that-has-not-read-its-pods"),
    ],
)
async def test_a_claim_that_the_kubelet_lists_is_never_collected(site, listed, pods):
    site.entries.store(entry("a", "cam-0"))
    site.kubelet.lists(*listed, pods=pods)
    await site.polls(200)
    assert site.unprepared == []
    assert site.asked == []


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
        pytest.param([U], 61, id="without-any-answer-it-takes-an-hour"),
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
    site = Site()
    site.entries.store(*(entry(f"{n:03}", f"cam-{n:03}") for n in range(201)))
    site.claims.store(*(claim_body(f"{n:03}", f"cam-{n:03}") for n in range(201)))
    await site.polls(1)
    assert looptime == pytest.approx(60 + 10)


@pytest.mark.looptime
async def test_without_entries_neither_kubelet_nor_api_server_is_asked(site):
    await site.polls(3)
    assert site.kubelet.asked == 0
    assert site.orphan_polls == 3


# ------------------------------------------------------------ with the real engine


@pytest.fixture
def collector_of(monkeypatch):
    """Make a collector that needs no time between its two checks."""
    monkeypatch.setattr("drakit_nodeplugin.claims.stale.FETCHES_PER_SECOND", 10_000)
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
            settings=StaleClaims().model_copy(update={"grace_period": 0.0}),
        )

    return make


async def test_a_stale_claim_that_is_prepared_again_in_between_is_not_collected(
    plugin, claims, devices, collector_of
):
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
    plugin, claims, devices, collector_of
):
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
@pytest.mark.parametrize("pods", [PodView.UNKNOWN, PodView.PARTIAL])
async def test_the_grace_period_starts_again_although_the_api_server_was_silent_too(site, pods):
    site.entries.store(entry("a", "cam-0"))
    await site.polls(1)
    site.claims.answers = False
    site.kubelet.lists(pods=pods)
    await site.polls(5)
    site.claims.answers = True
    site.kubelet.lists()
    await site.polls(1)
    assert site.unprepared == []
