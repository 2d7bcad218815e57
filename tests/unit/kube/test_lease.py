"""Leader election: never two at a time, on a virtual clock, against objects in memory."""

import asyncio
import logging
from contextlib import asynccontextmanager, suppress

import pytest

from drakit_daemon.kube import ForbiddenError, UnavailableError
from drakit_daemon.kube.lease import LeaseElection
from tests.fakes.kube import FakeCluster
from tests.unit.kube.conftest import ObjectSession

LEASES = "/apis/coordination.k8s.io/v1/namespaces/drakit-system/leases"
LEASE = f"{LEASES}/operator"

pytestmark = pytest.mark.looptime


class Link(ObjectSession):
    """One candidate's way to the objects, which can be cut."""

    hangs = False
    loses_answers = False

    def cut(self, how):
        refused = UnavailableError.no_response("PUT", LEASE, why="refused")
        self.hangs, self.error = how == "hangs", refused if how == "refused" else None

    async def ask(self, method, path, body=None, timeout_seconds=None):
        if self.hangs:
            await asyncio.sleep(timeout_seconds)
            raise UnavailableError.no_response(method, path, why="it hangs")
        answer = await super().ask(method, path, body)
        if self.loses_answers and method != "GET":
            raise UnavailableError.no_response(method, path, why="the answer is lost")
        return answer


class Candidate:
    """A process of an election: it ends when it may have lost the Lease."""

    working = 0

    def __init__(self, cluster, name):
        self.link = Link(cluster)
        self.election = LeaseElection(
            self.link, namespace="drakit-system", name="operator", identity=name
        )
        self.spans = []
        self.reason = None
        self.task = asyncio.create_task(self.run())

    async def run(self):
        now = asyncio.get_running_loop().time
        await self.election.acquire()
        assert Candidate.working == 0, "two leaders at a time"
        Candidate.working += 1
        self.spans.append([now(), None])
        try:
            self.reason = await self.election.hold()
        finally:
            self.spans[-1][1] = now()
            Candidate.working -= 1

    async def stop(self):
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        await self.election.release()


@pytest.fixture
def cluster():
    Candidate.working = 0
    return FakeCluster()


def spec(cluster):
    return cluster.request("GET", LEASE)[1]["spec"]


@asynccontextmanager  # no fixture: the virtual clock begins with the test
async def a_leader_and_a_candidate(cluster):
    first = Candidate(cluster, "first")
    await asyncio.sleep(0.5)
    second = Candidate(cluster, "second")
    await asyncio.sleep(10)
    try:
        yield first, second
    finally:
        await first.stop()
        await second.stop()


async def test_one_leads_and_the_other_waits(cluster):
    async with a_leader_and_a_candidate(cluster) as (first, second):
        await asyncio.sleep(3600)
        assert (len(first.spans), len(second.spans)) == (1, 0)
        assert first.election.is_leader
        assert not second.election.is_leader
        assert second.election.holder == first.election.identity == spec(cluster)["holderIdentity"]
        assert spec(cluster)["leaseTransitions"] == 0
        assert spec(cluster)["leaseDurationSeconds"] == 15


async def test_a_leader_that_stops_hands_over_at_once(cluster):
    async with a_leader_and_a_candidate(cluster) as (first, second):
        await first.stop()
        ended = asyncio.get_running_loop().time()
        await asyncio.sleep(3)
        assert second.spans[0][0] - ended <= 2.1
        assert spec(cluster)["leaseTransitions"] == 1
        assert spec(cluster)["holderIdentity"] == second.election.identity
        await second.stop()
        assert spec(cluster)["holderIdentity"] == ""


@pytest.mark.parametrize("how", ["hangs", "refused"])
async def test_a_leader_that_is_cut_off_ends_before_another_may_lead(cluster, how):
    async with a_leader_and_a_candidate(cluster) as (first, second):
        cut = asyncio.get_running_loop().time()
        first.link.cut(how)
        await asyncio.sleep(30)
        stopped, began = first.spans[0][1], second.spans[0][0]
        assert 8 <= stopped - cut <= 10.1
        assert began - stopped >= 4
        assert began - cut <= 20
        assert first.reason == "the Lease was not renewed in time"
        assert not first.election.is_leader
        assert first.task.done()
        assert cut - 2.1 <= first.election.responded_at <= cut
        assert second.election.responded_at >= cut + 27


@pytest.mark.parametrize(
    ("how", "cut_seconds", "seconds"),
    [
        pytest.param("refused", 3, 3, id="short-cuts"),
        pytest.param("hangs", 2.5, 10, id="renewals-that-are-sent-to-a-server-that-is-gone"),
    ],
)
async def test_what_is_survived(cluster, how, cut_seconds, seconds, caplog):
    caplog.set_level(logging.INFO)
    async with a_leader_and_a_candidate(cluster) as (first, second):
        for _ in range(5):
            first.link.cut(how)
            await asyncio.sleep(cut_seconds)
            first.link.cut(None)
            await asyncio.sleep(seconds)
        assert (len(first.spans), len(second.spans)) == (1, 0)
    logged = {record.msg for record in caplog.records}
    assert {"cannot renew the lease", "the lease is renewed again"} <= logged


async def test_a_renewal_whose_answer_was_lost_is_one_of_ours(cluster):
    async with a_leader_and_a_candidate(cluster) as (first, second):
        first.link.loses_answers = True
        await asyncio.sleep(2)
        first.link.loses_answers = False
        await asyncio.sleep(20)
        assert (len(first.spans), len(second.spans)) == (1, 0)
        assert spec(cluster)["leaseTransitions"] == 0


async def test_a_stop_that_cuts_off_a_renewal_releases_the_lease(cluster):
    async with a_leader_and_a_candidate(cluster) as (first, _):
        lease = cluster.request("GET", LEASE)[1]
        lease["spec"]["renewTime"] = "2026-01-01T00:00:00.000000Z"  # its response is lost
        cluster.request("PUT", LEASE, {}, lease)
        await first.stop()
        assert spec(cluster)["holderIdentity"] == ""


async def test_a_lease_that_was_deleted_is_made_again(cluster):
    async with a_leader_and_a_candidate(cluster) as (first, second):
        cluster.request("DELETE", LEASE)
        await asyncio.sleep(20)
        assert (len(first.spans), len(second.spans)) == (1, 0)
        assert spec(cluster)["holderIdentity"] == first.election.identity


async def test_a_leader_whose_lease_was_taken_ends_at_once(cluster):
    async with a_leader_and_a_candidate(cluster) as (first, second):
        lease = cluster.request("GET", LEASE)[1]
        lease["spec"]["holderIdentity"] = "somebody"
        cluster.request("PUT", LEASE, {}, lease)
        taken = asyncio.get_running_loop().time()
        await asyncio.sleep(2.2)
        assert first.spans[0][1] - taken <= 2.1
        assert first.reason == "the Lease was taken by somebody"
        await first.election.release()
        assert spec(cluster)["holderIdentity"] == "somebody", "it is not ours to release"
        await asyncio.sleep(20)
        assert len(second.spans) == 1


async def test_the_holders_duration_counts_and_not_its_clock(cluster):
    body = {
        "metadata": {"name": "operator"},
        "spec": {
            "holderIdentity": "old",
            "leaseDurationSeconds": 60,
            "renewTime": "2001-01-01T00:00:00Z",
        },
    }
    cluster.request("POST", LEASES, {}, body)
    candidate = Candidate(cluster, "new")
    await asyncio.sleep(70)
    assert 60 <= candidate.spans[0][0] <= 62
    await candidate.stop()


async def test_a_missing_permission_is_reported_once(cluster, caplog):
    candidate = Candidate(cluster, "first")
    candidate.link.error = ForbiddenError(
        status=403, reason="Forbidden", message="", method="GET", path=LEASE
    )
    await asyncio.sleep(60)
    told = [r.error for r in caplog.records if r.levelname == "WARNING"]
    assert len(told) == 1
    assert 'lacks the verb "get" on "leases"' in told[0]
    await candidate.stop()
