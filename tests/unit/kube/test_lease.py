"""Leader election: never two at a time, on a virtual clock, against objects in memory."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest

from drakit.kube import ForbiddenError, UnavailableError
from drakit.kube.errors import error_of_status
from drakit.kube.lease import LeaseElection, LeaseTimings, WorkNotStoppedError
from tests.fakes.kube import FakeCluster, StatusError

LEASES = "/apis/coordination.k8s.io/v1/namespaces/drakit-system/leases"
LEASE = f"{LEASES}/operator"

pytestmark = pytest.mark.looptime


class Link:
    """One candidate's way to the objects, which can be cut."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.error = None
        self.hangs = False
        self.loses_answers = False

    async def ask(self, method, path, body=None, timeout_seconds=None):
        await asyncio.sleep(0.01)
        if self.hangs:
            await asyncio.sleep(timeout_seconds)
            raise UnavailableError.no_answer(method, path, why="it hangs")
        if self.error:
            raise self.error
        try:
            answer = self.cluster.request(method, path, {}, body)[1]
        except StatusError as error:
            raise error_of_status(error.body, method=method, path=path) from None
        if self.loses_answers and method != "GET":
            raise UnavailableError.no_answer(method, path, why="the answer is lost")
        return answer

    async def get(self, path, *, timeout_seconds=None):
        return await self.ask("GET", path, None, timeout_seconds)

    async def create(self, path, body, *, timeout_seconds=None):
        return await self.ask("POST", path, body, timeout_seconds)

    async def replace(self, path, body, *, timeout_seconds=None):
        return await self.ask("PUT", path, body, timeout_seconds)


class Candidate:
    """An election with work that notes when it ran, and never twice at a time."""

    working = 0

    def __init__(self, cluster, name, *, stop_seconds=0.0):
        self.link = Link(cluster)
        self.election = LeaseElection(
            self.link, namespace="drakit-system", name="operator", identity=name
        )
        self.stop_seconds = stop_seconds
        self.spans = []
        self.task = asyncio.create_task(self.election.run(self.work, self.stopped))
        self.stops = 0

    def stopped(self):
        self.stops += 1

    async def work(self):
        now = asyncio.get_running_loop().time
        assert Candidate.working == 0, "two leaders at a time"
        Candidate.working += 1
        self.spans.append([now(), None])
        try:
            await asyncio.Event().wait()
        finally:
            if self.stop_seconds:
                await asyncio.sleep(self.stop_seconds)
            self.spans[-1][1] = now()
            Candidate.working -= 1

    async def stop(self):
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


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
        assert spec(cluster)["leaseDurationSeconds"] == 8


async def test_a_leader_that_stops_hands_over_at_once(cluster):
    async with a_leader_and_a_candidate(cluster) as (first, second):
        await first.stop()
        ended = asyncio.get_running_loop().time()
        await asyncio.sleep(2)
        assert second.spans[0][0] - ended <= 1.1
        assert spec(cluster)["leaseTransitions"] == 1
        assert spec(cluster)["holderIdentity"] == second.election.identity
        await second.stop()
        assert spec(cluster)["holderIdentity"] == ""


@pytest.mark.parametrize("how", ["hangs", "refused"])
async def test_a_leader_that_is_cut_off_stops_before_another_may_lead(cluster, how):
    async with a_leader_and_a_candidate(cluster) as (first, second):
        cut = asyncio.get_running_loop().time()
        if how == "hangs":
            first.link.hangs = True
        else:
            first.link.error = UnavailableError.no_answer("PUT", LEASE, why="refused")
        await asyncio.sleep(30)
        stopped, began = first.spans[0][1], second.spans[0][0]
        assert 4 <= stopped - cut <= 5.1
        assert began - stopped >= 2
        assert began - cut <= 10
        assert first.stops == 1
        assert not first.task.done(), "it goes on as a candidate"
        first.link.hangs, first.link.error = False, None
        await asyncio.sleep(30)
        assert len(first.spans) == 1, "the Lease is not taken from a healthy leader"
        await second.stop()
        await asyncio.sleep(2)
        assert len(first.spans) == 2


async def test_a_dead_leader_is_replaced(cluster):
    async with a_leader_and_a_candidate(cluster) as (first, second):
        died = asyncio.get_running_loop().time()
        first.link.hangs = True
        first.task.cancel()  # its release gets no answer
        with suppress(asyncio.CancelledError):
            await first.task
        await asyncio.sleep(15)
        assert 7 <= second.spans[0][0] - died <= 10


async def test_a_short_cut_is_survived(cluster):
    async with a_leader_and_a_candidate(cluster) as (first, second):
        for _ in range(5):
            first.link.error = UnavailableError.no_answer("PUT", LEASE, why="refused")
            await asyncio.sleep(3)
            first.link.error = None
            await asyncio.sleep(3)
        assert (len(first.spans), len(second.spans)) == (1, 0)


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
        lease["spec"]["renewTime"] = "2026-01-01T00:00:00.000000Z"  # whose answer nobody reads
        cluster.request("PUT", LEASE, {}, lease)
        await first.stop()
        assert spec(cluster)["holderIdentity"] == ""


async def test_a_lease_that_was_deleted_is_made_again(cluster):
    async with a_leader_and_a_candidate(cluster) as (first, second):
        cluster.request("DELETE", LEASE)
        await asyncio.sleep(20)
        assert (len(first.spans), len(second.spans)) == (1, 0)
        assert spec(cluster)["holderIdentity"] == first.election.identity


async def test_a_lease_that_was_taken_stops_the_work_at_once(cluster):
    async with a_leader_and_a_candidate(cluster) as (first, second):
        lease = cluster.request("GET", LEASE)[1]
        lease["spec"]["holderIdentity"] = "somebody"
        cluster.request("PUT", LEASE, {}, lease)
        taken = asyncio.get_running_loop().time()
        await asyncio.sleep(1.2)
        assert first.spans[0][1] - taken <= 1.1
        assert spec(cluster)["holderIdentity"] == "somebody", "it is not ours to release"
        await asyncio.sleep(12)
        assert len(first.spans) + len(second.spans) == 2


async def test_clocks_of_others_are_not_trusted(cluster):
    async with a_leader_and_a_candidate(cluster) as (first, second):
        await first.stop()
        await asyncio.sleep(3)
        lease = cluster.request("GET", LEASE)[1]
        lease["spec"] |= {"holderIdentity": "past", "renewTime": "2001-01-01T00:00:00.000000Z"}
        cluster.request("PUT", LEASE, {}, lease)
        at = asyncio.get_running_loop().time()
        await asyncio.sleep(20)
        assert 8 <= second.spans[-1][0] - at <= 11, (
            "it held for its duration, whatever its time says"
        )


async def test_the_holders_duration_counts(cluster):
    body = {
        "metadata": {"name": "operator"},
        "spec": {"holderIdentity": "old", "leaseDurationSeconds": 60, "renewTime": "x"},
    }
    cluster.request("POST", LEASES, {}, body)
    candidate = Candidate(cluster, "new")
    await asyncio.sleep(70)
    assert 60 <= candidate.spans[0][0] <= 62
    await candidate.stop()


async def test_work_that_takes_its_time_is_stopped_under_a_renewed_lease(cluster):
    first = Candidate(cluster, "first", stop_seconds=20)
    await asyncio.sleep(5)
    second = Candidate(cluster, "second")
    await first.stop()
    await asyncio.sleep(2)
    assert first.spans[0][1] <= second.spans[0][0]
    await second.stop()


async def test_work_that_does_not_stop_ends_the_process(cluster):
    first = Candidate(cluster, "first", stop_seconds=100)
    await asyncio.sleep(5)
    first.link.error = UnavailableError.no_answer("PUT", LEASE, why="refused")
    cut = asyncio.get_running_loop().time()
    with pytest.raises(WorkNotStoppedError):
        await first.task
    assert asyncio.get_running_loop().time() - cut <= 8.1
    assert spec(cluster)["holderIdentity"] == first.election.identity
    await asyncio.sleep(100)  # its work ends


async def test_work_that_fails_ends_the_election_and_frees_the_lease(cluster):
    async def work():
        await asyncio.sleep(3)
        raise ZeroDivisionError

    election = LeaseElection(
        Link(cluster), namespace="drakit-system", name="operator", identity="me"
    )
    with pytest.raises(ZeroDivisionError):
        await election.run(work)
    assert spec(cluster)["holderIdentity"] == ""


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


def test_timings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="longer than the one before"):
        LeaseTimings(lease_seconds=5, renew_deadline_seconds=5)
