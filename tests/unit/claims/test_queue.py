"""Calls that join work, wait for it and abandon it, in virtual time."""

from __future__ import annotations

import asyncio
import logging

import pytest

from drakit_daemon import logs
from drakit_nodeplugin.claims.queue import NOT_DONE, ClaimQueue
from drakit_nodeplugin.claims.scheduler import Scheduler
from drakit_nodeplugin.claims.unprepare import Undone
from drakit_nodeplugin.claims.work import ClaimAnswer
from drakit_nodeplugin.kubelet.dra import ClaimCalls
from tests.fakes.checkpoints import stored_claim
from tests.fakes.kubelet import HeldClaims, reference

pytestmark = pytest.mark.looptime

A, B, C = reference("a"), reference("b"), reference("c")


class SlowClaims(HeldClaims):
    """Every call takes its claims' seconds."""

    def __init__(self, **seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    async def _work(self, operation, claims):
        self.batches.append(len(claims))
        self.begun += [f"{operation} {claim.uid}" for claim in claims]
        await asyncio.sleep(max(self.seconds.get(claim.uid, 0) for claim in claims))
        if self.failure is not None:
            raise self.failure
        self.done += [f"{operation} {claim.uid}" for claim in claims]


class Calls(ClaimCalls):
    """Makes the kubelet's calls to a queue."""

    def __init__(self, claims: HeldClaims) -> None:
        self.scheduler = Scheduler()
        self.queue = ClaimQueue("camera.example.com", claims, scheduler=self.scheduler)
        super().__init__("camera.example.com", answer_seconds=40)
        self.serve(self.queue)


def calls_of(claims: HeldClaims) -> Calls:
    return Calls(claims)


async def prepare(calls, *claims):
    return await calls.answer("prepare", claims, method="v1.NodePrepareResources")


async def unprepare(calls, *claims):
    answers = await calls.answer("unprepare", claims, method="v1.NodeUnprepareResources")
    return {uid: answer.error for uid, answer in answers.items()}


async def test_a_batch_is_one_call_of_the_engine():
    claims = SlowClaims()
    answers = await prepare(calls_of(claims), A, B, C)
    assert answers.keys() == {"a", "b", "c"}
    assert claims.batches == [3]


async def test_a_caller_that_hangs_up_does_not_stop_the_work(looptime):
    claims = SlowClaims(a=50)
    calls = calls_of(claims)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(prepare(calls, A), 30)
    answers = await prepare(calls, A)
    assert answers["a"].error is None
    assert looptime == 50
    assert claims.begun == ["prepare a"]


async def test_after_40_seconds_the_answer_is_that_the_work_continues(looptime):
    claims = SlowClaims(a=50)
    calls = calls_of(claims)
    answers = await prepare(calls, A)
    assert looptime == 40
    assert (
        "still preparing this claim; the work continues, and the kubelet retries"
        in answers["a"].error
    )
    assert answers["a"].devices == ()
    answers = await prepare(calls, A)
    assert looptime == 50
    assert answers["a"].devices[0].device == "cam-a"
    assert claims.batches == [1]


async def test_a_claim_that_joins_slow_work_does_not_spoil_the_others(looptime):
    claims = SlowClaims(a=100)
    calls = calls_of(claims)
    first = asyncio.create_task(prepare(calls, A))
    await asyncio.sleep(1)
    answers = await prepare(calls, A, B)
    assert "still preparing" in answers["a"].error
    assert answers["b"].error is None
    assert "still preparing" in (await first)["a"].error


async def test_ended_work_is_forgotten():
    claims = SlowClaims()
    calls = calls_of(claims)
    await prepare(calls, A)
    await prepare(calls, A)
    assert claims.begun == ["prepare a", "prepare a"]
    assert calls.scheduler.idle.is_set()


class OneByOne(SlowClaims):
    """Answers each claim of a batch after its own seconds."""

    async def prepare(self, works):
        async def one(work):
            await asyncio.sleep(self.seconds.get(work.claim.uid, 0))
            work.finish(ClaimAnswer())

        await asyncio.gather(*(one(work) for work in works))


async def test_a_slow_claim_of_a_new_batch_does_not_spoil_the_others(looptime):
    calls = calls_of(OneByOne(a=100, b=1))
    answers = await prepare(calls, A, B)
    assert looptime == 40
    assert "still preparing" in answers["a"].error
    assert answers["b"].error is None


async def test_an_unprepare_gives_up_the_prepare_that_it_waits_for():
    class Obedient(SlowClaims):
        async def prepare(self, works):
            (work,) = works
            given_up = asyncio.Event()
            work.on_abandon = given_up.set
            await given_up.wait()
            assert work.abandoned
            work.finish(ClaimAnswer(error="given up"))

    calls = calls_of(Obedient())
    first = asyncio.create_task(prepare(calls, A))
    await asyncio.sleep(1)
    async with asyncio.timeout(5):
        assert await unprepare(calls, A) == {"a": None}
    assert (await first)["a"].error == "given up"


async def test_a_prepare_does_not_give_up_the_unprepare_that_it_waits_for():
    claims = SlowClaims(a=5)
    calls = calls_of(claims)
    first = asyncio.create_task(unprepare(calls, A))
    await asyncio.sleep(1)
    await prepare(calls, A)
    await first
    assert claims.abandoned == []


async def test_an_unprepare_waits_for_the_prepare_and_runs_then(looptime):
    claims = SlowClaims(a=20)
    calls = calls_of(claims)
    first = asyncio.create_task(prepare(calls, A))
    await asyncio.sleep(10)
    # The one that waits does not hold up its batch: b is done at once.
    second = asyncio.create_task(unprepare(calls, A, B))
    await asyncio.sleep(1)
    assert claims.begun == ["prepare a", "unprepare b"]
    assert await second == {"a": None, "b": None}
    assert looptime == 40
    assert (await first)["a"].error is None
    assert claims.done == ["unprepare b", "prepare a", "unprepare a"]


async def test_a_prepare_waits_for_the_unprepare_and_a_retry_joins_the_one_that_waits():
    claims = SlowClaims(a=15)
    calls = calls_of(claims)
    works = [asyncio.create_task(unprepare(calls, A))]
    for _ in range(3):
        await asyncio.sleep(1)
        works.append(asyncio.create_task(prepare(calls, A)))
    await asyncio.gather(*works)
    assert claims.begun == ["unprepare a", "prepare a"]


async def test_works_for_one_claim_never_overlap():
    running = 0

    class Watched(SlowClaims):
        async def _work(self, operation, claims):
            nonlocal running
            running += 1
            assert running == 1
            await super()._work(operation, claims)
            running -= 1

    claims = Watched(a=5)
    calls = calls_of(claims)
    works = []
    for call in (prepare, unprepare, prepare, unprepare):
        works.append(asyncio.create_task(call(calls, A)))
        await asyncio.sleep(1)
    await asyncio.gather(*works)
    assert claims.done == ["prepare a", "unprepare a", "prepare a", "unprepare a"]


async def test_a_blocked_queue_is_bounded():
    claims = SlowClaims(a=10_000)
    calls = calls_of(claims)
    answers = []
    for _ in range(4):
        answers += [(await prepare(calls, A))["a"].error, (await unprepare(calls, A))["a"]]
    assert "too many calls for this claim are in flight" in answers[-1]
    assert len(calls.scheduler.turns("a")) == 5
    await calls.queue.cancel()


async def test_an_engine_that_raises_answers_every_claim_without_its_words(caplog):
    claims = SlowClaims()
    claims.failure = ValueError("password=hunter2")
    answers = await prepare(calls_of(claims), A, B)
    assert answers.keys() == {"a", "b"}
    for answer in answers.values():
        assert "an internal error of the node plugin (ValueError)" in answer.error
        assert "hunter2" not in answer.error
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert record.exc_info[1] is claims.failure


async def test_a_claim_that_the_engine_forgot_gets_an_error(caplog):
    claims = SlowClaims()
    claims.forgotten = {"a"}
    answers = await prepare(calls_of(claims), A, B)
    assert answers.keys() == {"a", "b"}
    assert "produced no result" in answers["a"].error
    assert answers["b"].error is None
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR] == [
        "engine returned no answer for a claim"
    ]


async def test_an_engine_that_cancels_itself_is_an_answer():
    class Cancelled(SlowClaims):
        async def _work(self, operation, claims):
            raise asyncio.CancelledError

    answers = await prepare(calls_of(Cancelled()), A)
    assert "interrupted" in answers["a"].error


async def test_a_drain_waits_for_work_and_a_cancel_cuts_what_is_left(looptime):
    claims = SlowClaims(a=10, b=100)
    calls = calls_of(claims)
    works = [asyncio.create_task(prepare(calls, claim)) for claim in (A, B)]
    await asyncio.sleep(1)
    assert not await calls.queue.drain(timeout_seconds=20)
    assert looptime == 21
    assert claims.done == ["prepare a"]
    await calls.queue.cancel()
    assert looptime == 21
    answers = await asyncio.gather(*works)
    assert "interrupted because the node plugin stopped" in answers[1]["b"].error
    assert await calls.queue.drain(timeout_seconds=0)


async def test_a_drain_waits_for_work_that_begins_meanwhile(looptime):
    claims = SlowClaims(a=10, b=100)
    calls = calls_of(claims)
    first = asyncio.create_task(prepare(calls, A))
    await asyncio.sleep(1)
    draining = asyncio.create_task(calls.queue.drain())
    await asyncio.sleep(1)
    second = asyncio.create_task(prepare(calls, B))
    assert await draining
    assert looptime == 102
    assert claims.done == ["prepare a", "prepare b"]
    await asyncio.gather(first, second)


async def test_a_drain_waits_for_work_without_a_call(looptime):
    """A recovery, a restorer or the collector may be calling the driver."""
    queue = ClaimQueue("camera.example.com", SlowClaims(), scheduler=Scheduler())
    assert queue.take("a")

    assert queue.take("b")
    asyncio.get_running_loop().call_later(10, queue.release, "b")
    asyncio.get_running_loop().call_later(20, queue.release, "a")
    await asyncio.sleep(1)
    assert not await queue.drain(timeout_seconds=5)
    assert looptime == 6
    assert await queue.drain()
    assert looptime == 20


async def test_a_drain_lets_calls_begin_that_wait_for_work_without_a_call(looptime):
    claims = SlowClaims(a=5)
    calls = calls_of(claims)
    assert calls.queue.take("a")
    call = asyncio.create_task(prepare(calls, A))
    asyncio.get_running_loop().call_later(10, calls.queue.release, "a")
    await asyncio.sleep(1)
    assert await calls.queue.drain()
    assert looptime == 15
    assert (await call)["a"].error is None


class Forgetful(SlowClaims):
    """Also undoes and collects."""

    async def undo_left(self, uids, *, state, settled):
        for uid in uids:
            self.begun.append(f"undo {uid}")
            settled({uid: Undone()})

    async def collect(self, stale):
        self.begun.append(f"collect {stale.uid}")
        return True

    async def prepare_again(self, works):
        await self.prepare(works)


async def test_while_a_queue_drains_only_calls_get_turns():
    claims = Forgetful(a=10)
    calls = calls_of(claims)
    call = asyncio.create_task(prepare(calls, A))
    await asyncio.sleep(1)
    draining = asyncio.create_task(calls.queue.drain())
    await asyncio.sleep(1)
    assert not calls.queue.take("b")
    assert await calls.queue.undo_left(["b"], state="preparing") == {}
    assert not await calls.queue.collect(stored_claim("b"))
    for claim in (A, B):
        answer = await calls.queue.prepare_again(claim)
        assert answer.reason == NOT_DONE
        assert "its driver is about to stop" in answer.error
    assert claims.begun == ["prepare a"]
    late = asyncio.create_task(prepare(calls, C))
    assert await draining
    assert (await late)["c"].error is None
    assert claims.begun == ["prepare a", "prepare c"]
    await call


async def test_work_without_a_call_gets_turns_until_a_drain():
    claims = Forgetful()
    queue = ClaimQueue("camera.example.com", claims, scheduler=Scheduler())
    await queue.undo_left(["a"], state="preparing")
    assert await queue.collect(stored_claim("b"))
    assert (await queue.prepare_again(C)).error is None
    assert claims.begun == ["undo a", "collect uid-b", "prepare c"]


async def test_a_retry_logs_both_ids_once_and_work_keeps_the_first(caplog):
    seen = []

    class Telling(SlowClaims):
        async def _work(self, operation, claims):
            await super()._work(operation, claims)
            seen.append(logs.request_id.get())

    caplog.set_level(logging.INFO)
    caplog.handler.addFilter(logs.RequestIdFilter())
    calls = calls_of(Telling(a=10, b=10))
    first = asyncio.create_task(prepare(calls, A, B))
    await asyncio.sleep(1)
    await prepare(calls, A, B)
    await first
    (joined,) = [r for r in caplog.records if r.getMessage() == "call joins work in flight"]
    assert seen == [joined.began_by]
    answered = {r.request_id for r in caplog.records if r.getMessage() == "call answered"}
    assert answered == {joined.began_by, joined.request_id}


async def test_one_info_line_a_call(caplog):
    caplog.set_level(logging.INFO)
    claims = SlowClaims()
    claims.errors = {"b": "broken"}
    await prepare(calls_of(claims), A, B)
    (record,) = caplog.records
    facts = (record.method, record.claims, record.claim, record.errors)
    assert facts == ("v1.NodePrepareResources", 2, "lab/claim-a, lab/claim-b", 1)


async def test_a_call_without_claims_is_answered_and_not_logged(caplog):
    caplog.set_level(logging.INFO)
    claims = SlowClaims()
    assert await prepare(calls_of(claims)) == {}
    assert caplog.records == []
    assert claims.begun == []


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        pytest.param(reference("", name="n"), "without a UID", id="no-uid"),
        pytest.param(reference("../x", name="n"), "invalid UID", id="slash-in-uid"),
        pytest.param(reference("a\n", name="n"), "invalid UID", id="newline-in-uid"),
        pytest.param(reference("ä", name="n"), "invalid UID", id="umlaut-in-uid"),
        pytest.param(reference("u" * 129, name="n"), "invalid UID", id="long-uid"),
        pytest.param(reference("u", namespace="", name="n"), "without a namespace", id="no-ns"),
        pytest.param(reference("u", name="a/b"), "invalid name", id="slash-in-name"),
        pytest.param(reference("u", name="a" * 254), "invalid name", id="long-name"),
    ],
)
@pytest.mark.parametrize("call", [prepare, unprepare])
async def test_a_malformed_claim_gets_its_own_error_and_stays_outside(bad, words, call):
    claims = SlowClaims()
    answers = await call(calls_of(claims), A, bad)
    errors = {
        uid: answer.error if isinstance(answer, ClaimAnswer) else answer
        for uid, answer in answers.items()
    }
    assert errors.keys() == {"a", bad.uid}
    assert errors["a"] is None
    assert words in errors[bad.uid]
    assert len(errors[bad.uid]) < 300
    assert claims.begun == [f"{call.__name__} a"]


async def test_a_claim_without_a_name_is_refused():
    claims = SlowClaims()
    bad = type(A)(namespace="lab", name="", uid="u")
    answers = await prepare(calls_of(claims), bad)
    assert "without a name" in answers["u"].error


async def test_a_claim_that_is_sent_twice_is_refused_once():
    claims = SlowClaims()
    answers = await prepare(calls_of(claims), A, B, A)
    assert answers.keys() == {"a", "b"}
    assert "2 times in one call" in answers["a"].error
    assert claims.begun == ["prepare b"]
