"""Calls and their answers, on a virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from drakit_nodeplugin.kubelet.dra import ClaimCalls
from tests.fakes.kubelet import reference
from tests.unit.kubelet.conftest import DRIVER

A, B = reference("a"), reference("b")


@pytest.fixture
def calls() -> ClaimCalls:
    return ClaimCalls(DRIVER, response_seconds=40)


async def begin(calls: ClaimCalls, *claims, operation="prepare") -> asyncio.Task:
    """Begin a call, which is not answered within a second."""
    call = asyncio.create_task(calls.handle(operation, claims, method="test"))
    await asyncio.sleep(1)
    assert not call.done()
    return call


async def test_a_text_that_grpc_would_refuse_is_sent_all_the_same(calls, claims, queue):
    claims.errors = {"a": "/mnt/\udce9 is gone"}
    calls.serve(queue)
    for operation in ("prepare", "unprepare"):
        answers = await calls.handle(operation, [A], method="test")
        assert answers["a"].error == "/mnt/\\udce9 is gone"


async def test_a_text_without_end_is_cut(calls, claims, queue):
    claims.errors = {"a": "x" * 5_000_000}
    calls.serve(queue)
    answers = await calls.handle("prepare", [A], method="test")
    assert answers["a"].error is not None
    assert len(answers["a"].error) < 5000


# ------------------------------------------------------------ another instance is active


@pytest.mark.looptime
@pytest.mark.parametrize("operation", ["prepare", "unprepare"])
async def test_calls_wait_for_the_hand_over(calls, queue, claims, looptime, operation):
    call = await begin(calls, A, operation=operation)
    await asyncio.sleep(20)
    calls.serve(queue)
    assert (await call)["a"].error is None
    assert claims.done == [f"{operation} a"]
    assert looptime == 21


@pytest.mark.looptime
async def test_a_call_that_waits_too_long_is_asked_again(calls, queue, claims, looptime):
    call = await begin(calls, A, B)
    assert {uid: answer.error for uid, answer in (await call).items()} == {
        uid: f"claim lab/claim-{uid}: another instance of the node plugin is active for driver "
        f"{DRIVER}, or the driver is being restarted; the kubelet retries"
        for uid in "ab"
    }
    assert looptime == 40
    calls.serve(queue)
    assert (await calls.handle("prepare", [A], method="test"))["a"].error is None
    assert claims.begun == ["prepare a"]


@pytest.mark.looptime
async def test_the_wait_and_the_work_share_the_calls_time(calls, queue, claims, looptime):
    claims.hold("a")
    call = await begin(calls, A)
    await asyncio.sleep(29)
    calls.serve(queue)
    assert "is still preparing this claim" in (await call)["a"].error
    assert looptime == 40
    claims.let_go("a")
    await claims.until_done("prepare a")


@pytest.mark.looptime
async def test_while_an_instance_hands_over_new_calls_wait_and_calls_in_flight_end(
    calls, queue, claims, looptime
):
    claims.hold("a")
    calls.serve(queue)
    in_flight = await begin(calls, A)
    calls.serve(None)
    new = await begin(calls, B)
    claims.let_go("a")
    assert (await in_flight)["a"].error is None
    assert "another instance" in (await new)["b"].error
    assert looptime == 41
    assert claims.begun == ["prepare a"]


@pytest.mark.looptime
async def test_a_stop_ends_the_waits_at_once(calls, queue, claims, looptime):
    call = await begin(calls, A)
    calls.refuse()
    stopping = "claim lab/claim-a: the node plugin is stopping; the kubelet retries"
    assert (await call)["a"].error == stopping
    for source in (queue, None):
        calls.serve(source)
        assert (await calls.handle("prepare", [A], method="test"))["a"].error == stopping
    assert looptime == 1
    assert claims.begun == []


@pytest.mark.looptime
async def test_calls_that_need_no_instance_do_not_wait(calls, looptime):
    assert await calls.handle("prepare", [], method="test") == {}
    answers = await calls.handle("prepare", [reference("../a")], method="test")
    assert "invalid UID" in answers["../a"].error
    assert looptime == 0
