"""Calls that join work, wait for it and abandon it, in virtual time."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest

from drakit import ClaimReference
from drakit_daemon import logs
from drakit_driver.runtime.order import Order, claim_key
from drakit_nodeplugin.claims.queue import NOT_DONE, ClaimQueue
from drakit_nodeplugin.claims.unprepare import Undone
from drakit_nodeplugin.claims.work import ClaimResult
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
        self.order = Order()
        self.queue = ClaimQueue("camera.example.com", claims, order=self.order)
        super().__init__("camera.example.com", response_seconds=40)
        self.serve(self.queue)


async def prepare(calls, *claims):
    return await calls.handle("prepare", claims, method="v1.NodePrepareResources")


async def unprepare(calls, *claims):
    answers = await calls.handle("unprepare", claims, method="v1.NodeUnprepareResources")
    return {uid: answer.error for uid, answer in answers.items()}


async def test_after_40_seconds_the_answer_is_that_the_work_continues(looptime):
    claims = SlowClaims(a=50)
    calls = Calls(claims)
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


class OneByOne(SlowClaims):
    """Answers each claim of a batch after its own seconds."""

    async def prepare(self, works):
        async def one(work):
            await asyncio.sleep(self.seconds.get(work.claim.uid, 0))
            work.finish(ClaimResult())

        await asyncio.gather(*(one(work) for work in works))


@pytest.mark.parametrize("joins", [False, True], ids=["of-the-batch", "in-flight-already"])
async def test_a_slow_claim_does_not_spoil_the_others(looptime, joins):
    calls = Calls(OneByOne(a=100, b=1))
    first = asyncio.create_task(prepare(calls, A)) if joins else None
    await asyncio.sleep(1)
    answers = await prepare(calls, A, B)
    assert looptime == 41
    assert "still preparing" in answers["a"].error
    assert answers["b"].error is None
    assert first is None or "still preparing" in (await first)["a"].error


async def test_an_unprepare_gives_up_the_prepare_that_it_waits_for():
    class Obedient(SlowClaims):
        async def prepare(self, works):
            (work,) = works
            given_up = asyncio.Event()
            work.on_abandon = given_up.set
            await given_up.wait()
            assert work.abandoned
            work.finish(ClaimResult(error="given up"))

    calls = Calls(Obedient())
    first = asyncio.create_task(prepare(calls, A))
    await asyncio.sleep(1)
    async with asyncio.timeout(5):
        assert await unprepare(calls, A) == {"a": None}
    assert (await first)["a"].error == "given up"


async def test_a_prepare_waits_for_the_unprepare_and_a_retry_joins_the_one_that_waits():
    claims = SlowClaims(a=15)
    calls = Calls(claims)
    works = [asyncio.create_task(unprepare(calls, A))]
    for _ in range(3):
        await asyncio.sleep(1)
        works.append(asyncio.create_task(prepare(calls, A)))
    await asyncio.gather(*works)
    assert (claims.begun, claims.abandoned) == (["unprepare a", "prepare a"], [])


async def test_a_blocked_queue_is_bounded():
    claims = SlowClaims(a=10_000)
    calls = Calls(claims)
    answers = []
    for _ in range(4):
        answers += [(await prepare(calls, A))["a"].error, (await unprepare(calls, A))["a"]]
    assert "too many calls for this claim are in flight" in answers[-1]
    assert len(calls.order.line(claim_key("a"))) == 5
    await calls.queue.cancel()


async def test_an_engine_that_raises_answers_every_claim_without_its_words(caplog):
    claims = SlowClaims()
    claims.failure = ValueError("password=hunter2")
    answers = await prepare(Calls(claims), A, B)
    assert answers.keys() == {"a", "b"}
    for answer in answers.values():
        assert "an internal error of the node plugin" in answer.error
        assert "hunter2" not in answer.error
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert record.exc_info[1] is claims.failure


async def test_a_report_that_fails_keeps_no_claim_without_its_answer(caplog):
    calls = Calls(SlowClaims())
    calls.queue._observers = (SimpleNamespace(),)  # it has no method `finished`
    answers = await prepare(calls, A, B)
    assert [answer.error for answer in answers.values()] == [None, None]
    assert "result could not be reported" in caplog.messages


async def test_a_claim_that_the_engine_forgot_gets_an_error(caplog):
    claims = SlowClaims()
    claims.forgotten = {"a"}
    answers = await prepare(Calls(claims), A, B)
    assert answers.keys() == {"a", "b"}
    assert "an internal error of the node plugin" in answers["a"].error
    assert answers["b"].error is None
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR] == [
        "engine returned no result for a claim"
    ]


async def test_an_engine_that_cancels_itself_is_an_answer():
    class Cancelled(SlowClaims):
        async def _work(self, operation, claims):
            raise asyncio.CancelledError

    answers = await prepare(Calls(Cancelled()), A)
    assert "stopped while preparing" in answers["a"].error


async def test_a_drain_waits_for_work_and_a_cancel_cuts_what_is_left(looptime):
    claims = SlowClaims(a=10, b=100)
    calls = Calls(claims)
    works = [asyncio.create_task(prepare(calls, claim)) for claim in (A, B)]
    await asyncio.sleep(1)
    assert not await calls.queue.drain(timeout_seconds=20)
    assert looptime == 21
    assert claims.done == ["prepare a"]
    await calls.queue.cancel()
    assert looptime == 21
    answers = await asyncio.gather(*works)
    assert "the node plugin stopped while " in answers[1]["b"].error
    assert await calls.queue.drain(timeout_seconds=0)


async def test_a_drain_waits_for_work_without_a_call(looptime):
    """A recovery, a restorer or the collector may be calling the driver."""
    queue = ClaimQueue("camera.example.com", SlowClaims(), order=Order())
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
    calls = Calls(claims)
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
    calls = Calls(claims)
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


async def test_a_retry_logs_both_ids_once_and_work_keeps_the_first(caplog):
    seen = []

    class Telling(SlowClaims):
        async def _work(self, operation, claims):
            await super()._work(operation, claims)
            seen.append(logs.request_id.get())

    caplog.set_level(logging.INFO)
    caplog.handler.addFilter(logs.RequestIdFilter())
    calls = Calls(Telling(a=10, b=10))
    first = asyncio.create_task(prepare(calls, A, B))
    await asyncio.sleep(1)
    await prepare(calls, A, B)
    await first
    (joined,) = [r for r in caplog.records if r.getMessage() == "call joins work in flight"]
    assert seen == [joined.began_by]
    answered = {r.request_id for r in caplog.records if r.getMessage() == "call completed"}
    assert answered == {joined.began_by, joined.request_id}


async def test_one_info_line_a_call(caplog):
    caplog.set_level(logging.INFO)
    claims = SlowClaims()
    claims.errors = {"b": "broken"}
    await prepare(Calls(claims), A, B)
    (record,) = caplog.records
    facts = (record.method, record.claims, record.claim, record.errors)
    assert facts == ("v1.NodePrepareResources", 2, "lab/claim-a, lab/claim-b", 1)


@pytest.mark.parametrize(
    ("words", "namespace", "name", "uid"),
    [
        ("without a UID", "lab", "n", ""),
        ("invalid UID", "lab", "n", "../x"),
        ("invalid UID", "lab", "n", "a\n"),
        ("invalid UID", "lab", "n", "ä"),
        ("invalid UID", "lab", "n", "u" * 129),
        ("without a namespace", "", "n", "u"),
        ("without a name", "lab", "", "u"),
        ("invalid name", "lab", "a/b", "u"),
        ("invalid name", "lab", "a" * 254, "u"),
    ],
)
@pytest.mark.parametrize("call", [prepare, unprepare])
async def test_a_malformed_claim_gets_its_own_error_and_stays_outside(
    words, namespace, name, uid, call
):
    claims = SlowClaims()
    bad = ClaimReference(namespace=namespace, name=name, uid=uid)
    answers = await call(Calls(claims), A, bad)
    errors = {
        uid: answer.error if isinstance(answer, ClaimResult) else answer
        for uid, answer in answers.items()
    }
    assert errors.keys() == {"a", uid}
    assert errors["a"] is None
    assert words in errors[uid]
    assert len(errors[uid]) < 300
    assert claims.begun == [f"{call.__name__} a"]


async def test_a_claim_that_is_sent_twice_is_refused_once():
    claims = SlowClaims()
    answers = await prepare(Calls(claims), A, B, A)
    assert answers.keys() == {"a", "b"}
    assert "2 times in one call" in answers["a"].error
    assert claims.begun == ["prepare b"]
